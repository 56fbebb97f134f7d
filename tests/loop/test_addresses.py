"""Tensors of a model that a sync has moved are named."""

from __future__ import annotations

import pytest
import torch

from megarl.core.errors import WeightSyncError
from megarl.engines.sync.sleep import addresses_of, check_addresses


def model() -> torch.nn.Module:
    """A linear layer and a batch norm, whose statistics are buffers."""
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


def test_new_values_at_the_old_addresses_pass() -> None:
    net = model()
    before = addresses_of(net)
    with torch.no_grad():
        net[0].weight.copy_(torch.ones(2, 3))
    check_addresses(before, addresses_of(net))
    assert len(before) == 7 and before["0.weight"] == (net[0].weight.data_ptr(), 24)


@pytest.mark.parametrize("name", ["0.weight", "1.running_mean"])
def test_the_same_values_elsewhere_are_an_error_that_names_the_tensor(name: str) -> None:
    net = model()
    before, (layer, own) = addresses_of(net), name.split(".")
    tensor = getattr(net[int(layer)], own)
    copy = tensor.detach().clone()
    setattr(net[int(layer)], own, torch.nn.Parameter(copy) if own == "weight" else copy)
    with pytest.raises(WeightSyncError, match=rf"moved tensors of the engine's model: {name} from 0x\w+ \(") as error:
        check_addresses(before, addresses_of(net))
    assert " and " not in str(error.value)


def test_a_storage_of_another_size_is_an_error() -> None:
    net = model()
    before = addresses_of(net)
    net[0].weight.untyped_storage().resize_(0)
    with pytest.raises(WeightSyncError, match=r"0\.weight from 0x\w+ \(24 bytes\) to 0x0 \(0 bytes\)"):
        check_addresses(before, addresses_of(net))


def test_a_tensor_that_is_gone_is_an_error() -> None:
    net = model()
    before = addresses_of(net)
    net[0].register_parameter("bias", None)
    with pytest.raises(WeightSyncError, match=r"0\.bias from 0x\w+ \(8 bytes\) to nowhere"):
        check_addresses(before, addresses_of(net))
