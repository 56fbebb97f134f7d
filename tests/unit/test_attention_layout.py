"""Buckets of packed sequences and zigzag shares, against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.learn.batching.micro import share_rows
from megarl.learn.models.packed import LONG, PADDING_BOUND, buckets, packed_layout

LENGTHS = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 3000)), min_size=1, max_size=40)


@given(LENGTHS)
def test_every_token_has_one_place_in_its_own_row(lengths: list[int]) -> None:
    found = buckets(torch.tensor(lengths))
    total = sum(lengths)
    places = sum(rows * width for rows, width in found.shapes)
    assert len(found.source) == places <= PADDING_BOUND * total
    assert len(found.shapes) <= 2 * math.log2(max(*lengths, 1)) + 1
    assert torch.equal(found.source[found.place], torch.arange(total))
    sequence = [i for i, n in enumerate(lengths) for _ in range(n)]
    position = [p for n in lengths for p in range(n)]
    seen, base = [], 0
    for rows, width in found.shapes:
        for row in found.source[base : base + rows * width].view(rows, width).tolist():
            (owner,) = {sequence[token] for token in row}  # padding repeats a token of the sequence itself
            seen.append(owner)
            own = lengths[owner]
            assert [position[token] for token in row] == [*range(own), *[own - 1] * (width - own)]
        base += rows * width
    assert sorted(seen) == [i for i, n in enumerate(lengths) if n]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 5))
def test_shares_are_zigzag(pieces: list[int], cp: int) -> None:
    lengths = [2 * cp * n for n in pieces]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    shares = []
    for rank in range(cp):
        for start, size in zip(starts, pieces, strict=True):
            for piece in (rank, 2 * cp - 1 - rank):
                shares += range(start + piece * size, start + (piece + 1) * size)
    rows = share_rows(torch.tensor(lengths), cp)
    assert rows.tolist() == [shares.index(token) for token in range(sum(lengths))]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 4))
def test_a_layout_takes_from_shares_and_gives_back_to_them(pieces: list[int], cp: int) -> None:
    lengths = torch.tensor([2 * cp * n for n in pieces])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    layout = packed_layout(cu_seqlens, cp)
    plain = buckets(lengths)
    rows = share_rows(lengths, cp)
    token_of_row = torch.empty_like(rows)
    token_of_row[rows] = torch.arange(len(rows))
    assert layout.buckets.shapes == plain.shapes
    assert torch.equal(token_of_row[layout.buckets.source], plain.source)
    assert torch.equal(layout.buckets.source[layout.buckets.place], torch.arange(len(rows)))
    assert (layout.order is None) == (cp == 1)
    assert layout.order is None or torch.equal(layout.order, rows)


def test_a_length_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[8, 6\] are not all multiples of 2\*cp=4: pad each sequence"):
        share_rows(torch.tensor([8, 6]), 2)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([LONG], True),
        ([LONG, 0, LONG], True),
        ([2 * LONG, LONG], True),
        ([LONG - 1], False),
        ([LONG + 1, LONG + 2], False),
    ],
)
def test_which_sequences_need_no_kernel_for_packed_ones(lengths: list[int], expected: bool) -> None:
    assert buckets(torch.tensor(lengths)).are_long_and_full == expected
