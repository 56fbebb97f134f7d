"""The byte contract, measured on real processes: a sync takes two buckets on either side, whatever the model's size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.grid import run_grid

BUCKET = 4 << 20
SLACK = 3 << 20
"""Allocator, socket buffers, code that runs for the first time."""
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "vocab_size": 2000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def transfer(rank: int, shared: bool) -> tuple[int, int, int]:
    """(bytes of the weights, peak extra bytes, largest fused tensor) of one side; rank 0 sends, rank 1 receives."""
    import torch.distributed as dist

    from megarl.engines.sync.shared import HostMemory, SharedMemoryReceiver, SharedMemorySender, memory_file
    from megarl.weights.reshard.copy import GroupTransport
    from megarl.weights.reshard.execute import receive, send
    from megarl.weights.reshard.layouts import MegatronGrid, megatron_layout, vllm_layout
    from megarl.weights.reshard.plan import build_plan

    class Other(GroupTransport):
        """The only rank of the other side."""

        def isend(self, message: torch.Tensor, _: int) -> Any:
            return super().isend(message, 1 - rank)

        def irecv(self, nbytes: int, _: int, spare: Any) -> Any:
            return super().irecv(nbytes, 1 - rank, spare)

    dist.init_process_group("gloo")
    source, destination = megatron_layout(CONFIG, MegatronGrid()), vllm_layout(CONFIG, 1)
    plan = build_plan(source, destination)
    files: list[Any] = [None, None]
    dist.all_gather_object(files, memory_file())
    link: Any = Other()
    if shared:
        link = (
            SharedMemorySender(link, frozenset({0}), HostMemory(files[0]))
            if rank == 0
            else SharedMemoryReceiver(link, {0}, HostMemory(others={0: files[0]}))
        )
    shapes = (source if rank == 0 else destination).local_shapes(0)
    tensors = {name: torch.full(shape, 1.0 - rank, dtype=torch.float32) for name, shape in shapes.items()}
    worst, lengths = 0, []
    for _ in range(2):  # the first time pages of libraries come in
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        before = resident("VmRSS")
        if rank == 0:
            send(plan, 0, tensors, link, dtype=torch.float32, bucket_bytes=BUCKET)
        else:
            receive(plan, 0, tensors.__getitem__, link, dtype=torch.float32, bucket_bytes=BUCKET)
        worst = resident("VmHWM") - before
        if shared:
            link.finish()
            lengths.append(os.stat(f"/proc/{files[0].pid}/fd/{files[0].descriptor}").st_size)
    assert len({*lengths}) == shared, "the second sync made new buckets"
    for pad in destination.padding(0) if rank == 1 else ():
        tensors[pad.local][tuple(slice(lo, hi) for lo, hi in pad.box)] = 1.0
    assert all(bool((tensor == 1).all()) for tensor in tensors.values())
    return sum(t.nbytes for t in tensors.values()), worst, max(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("shared", [False, True], ids=["sockets", "shared memory"])
def test_a_transfer_takes_two_buckets_on_either_side(shared: bool) -> None:
    sides = run_grid(2, transfer, shared)
    assert max(largest for _, _, largest in sides) >= 4 * BUCKET  # a stack of experts
    for size, extra, _ in sides:
        assert size > 200e6
        assert extra <= 2 * BUCKET + SLACK
