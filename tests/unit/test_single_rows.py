"""Bits of single rows in linear layers, on products that sum a single row in another order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megarl.engines.cpu import single_rows
from megarl.engines.cpu.single_rows import TRIED_ROWS, doubling, needs_doubling


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(single_rows, "known", {})
    yield


class Product:
    """``x W^T + b`` in float64, rounded; a single row is summed in float32, in the order of its columns."""

    def __init__(self, same: bool) -> None:
        self.same, self.rows = same, list[int]()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.rows.append(x.shape[:-1].numel())
        if self.rows[-1] == 1 and not self.same:
            out = (x.reshape(-1) * weight).cumsum(1)[:, -1].reshape(*x.shape[:-1], -1)
        else:
            out = (x.double() @ weight.double().t()).float()
        return out if bias is None else out + bias


def matrix(rows: int = 32, columns: int = 300) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [None, torch.arange(32.0)])
def test_a_single_row_has_the_bits_that_it_has_among_others(bias: torch.Tensor | None) -> None:
    product, weight = Product(same=False), matrix()
    linear = doubling(product)
    x = torch.randn(5, 300)
    among = linear(x, weight, bias)
    alone = torch.cat([linear(row, weight, bias) for row in x.split(1)])
    assert torch.equal(alone, among) and product.rows == [5] + [2] * 5
    assert not torch.equal(torch.cat([product(row, weight, bias) for row in x.split(1)]), among)
    assert torch.equal(linear(x[0], weight, bias), among[0])  # one row without a dimension of rows
    assert torch.equal(linear(x[None, :1], weight, bias), among[None, :1])


@pytest.mark.parametrize("same", [True, False])
def test_it_is_tried_once_for_a_shape(same: bool) -> None:
    product, weight = Product(same), matrix()
    for _ in range(2):
        assert needs_doubling(product, weight, (32, 300), torch.float32) is not same
        assert product.rows == [TRIED_ROWS] + [1] * TRIED_ROWS
    needs_doubling(product, matrix(columns=301), (32, 301), torch.float32)
    assert len(product.rows) == 2 * (1 + TRIED_ROWS)


def test_zeros_show_nothing() -> None:
    """So it is tried again with the weights that come."""
    product = Product(same=True)
    assert needs_doubling(product, torch.zeros(32, 300), (32, 300), torch.float32)
    assert not needs_doubling(product, matrix(), (32, 300), torch.float32)
