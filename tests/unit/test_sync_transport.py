"""Carriers of weights that a job may not choose, and names of buckets in a GPU's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from megarl.config.schema import Config
from megarl.core.errors import ConfigError, WeightSyncError
from megarl.engines.sync.link import LinkAddress, join
from megarl.engines.sync.shared import DeviceMemory, decoded, encoded
from megarl.run.checks.settings import check_transport


def config(transport: str, backend: str, placement: str = "separate", shared_memory: bool = True) -> Config:
    whole = Config()
    return replace(
        whole,
        parallel=replace(whole.parallel, backend=backend),
        rollout=replace(whole.rollout, placement=placement),
        sync=replace(whole.sync, transport=transport, shared_memory=shared_memory),
    )


def test_weights_over_nccl_need_gpus() -> None:
    check_transport(config("gloo", "gloo"))
    check_transport(config("gloo", "nccl"))
    check_transport(config("nccl", "nccl"))
    with pytest.raises(
        ConfigError, match=r"sync\.transport=nccl with parallel\.backend=gloo.*; set sync\.transport=gloo"
    ):
        check_transport(config("nccl", "gloo"))


def test_nccl_does_not_connect_two_processes_of_one_gpu() -> None:
    check_transport(config("nccl", "nccl", "colocated"))
    check_transport(config("gloo", "nccl", "colocated", shared_memory=False))
    with pytest.raises(ConfigError, match=r"colocated and sync\.shared_memory=false.*set sync\.shared_memory=true"):
        check_transport(config("nccl", "nccl", "colocated", shared_memory=False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_rank_without_a_gpu_joins_no_nccl_link() -> None:
    address = LinkAddress("localhost", 1, "3/0", world_size=2, timeout_s=1.0)
    with pytest.raises(WeightSyncError, match=r"sync\.transport=nccl, but rank 1 of link 3/0 on .* sees no GPU"):
        join(HashStore(), address, 1, peers=0, partners=[0], over="nccl")


def test_a_handle_survives_its_name() -> None:
    """Of the sizes that CUDA and torch have."""
    handle = [bytes(range(65)), 2 << 20, 512, b"/torch_12345_3053452452_7", 3, bytes(range(255, 191, -1)), True]
    name = encoded(handle).ljust(DeviceMemory.name_bytes)
    assert len(name) == DeviceMemory.name_bytes and decoded(name) == handle
