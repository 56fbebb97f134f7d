"""Weights through every kind of shared memory and over every kind of link: one test, on a CPU and on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.run.process import ports
from tests.parallel.grid import run_grid
from tests.parallel.test_reshard_memory import CONFIG

BUCKET = 1 << 20
REPLICAS = 2


def kinds(cpu: str, gpu: str, gpus: int) -> list[Any]:
    missing = torch.cuda.device_count() < gpus
    marks = [pytest.mark.gpu, pytest.mark.skipif(missing, reason=f"torch sees fewer than {gpus} CUDA devices")]
    return [cpu, pytest.param(gpu, marks=marks)]


def transfer(rank: int, transport: Any, device: str, replicas: int = REPLICAS) -> list[str]:
    """Rank 0 sends, the others are engines of one worker that receive; each one's digests of the tensors then."""
    from megarl.weights.reshard.execute import compare, digests_of, receive, send
    from megarl.weights.reshard.layouts import MegatronGrid, megatron_layout, vllm_layout
    from megarl.weights.reshard.plan import build_plan

    source, destination = megatron_layout(CONFIG, MegatronGrid()), vllm_layout(CONFIG, 1, replicas)
    plan, dtype = build_plan(source, destination), torch.bfloat16
    layout, own = (source, 0) if rank == 0 else (destination, rank - 1)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).to(device, dtype if rank else torch.float32)
        for name, shape in layout.local_shapes(own).items()
    }
    options: dict[str, Any] = {"dtype": dtype, "bucket_bytes": BUCKET}
    for _ in range(2):  # the second time over the same links, in kept buckets
        if rank == 0:
            sent = send(plan, 0, tensors, transport, **options)
        else:
            receive(plan, own, tensors.__getitem__, transport, **options)
        transport.finish()
    if rank == 0:
        rounded = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        whole = digests_of(source, 0, rounded.__getitem__)
        compare(plan, sent, {(dst, name): digest for dst in range(replicas) for name, digest in whole.items()})
        return sorted(f"{name}: {digest}" for name, digest in whole.items())
    return sorted(f"{name}: {digest}" for name, digest in digests_of(destination, own, tensors.__getitem__).items())


def through_memory(rank: int, kind: str) -> list[str]:
    import torch.distributed as dist

    from megarl.engines.sync.shared import (
        DeviceMemory,
        HostMemory,
        SharedMemoryReceiver,
        SharedMemorySender,
        memory_file,
    )
    from megarl.weights.reshard.copy import GroupTransport

    class Other(GroupTransport):
        """Ranks of the other side: engines are those after rank 0."""

        def isend(self, message: torch.Tensor, to: int) -> Any:
            assert message.device.type == "cpu" and message.nbytes <= 1024, "notices alone go over it"
            return super().isend(message, to + (rank == 0))

        def irecv(self, nbytes: int, source: int, spare: Any) -> Any:
            return super().irecv(nbytes, source + (rank == 0), spare)

    dist.init_process_group("gloo")
    files: list[Any] = [None] * (1 + REPLICAS)
    dist.all_gather_object(files, memory_file())
    others = {0: files[0]} if rank else {}
    memory = DeviceMemory() if kind == "CUDA IPC" else HostMemory(None if rank else files[0], others)
    transport: Any = (
        SharedMemoryReceiver(Other(), {0}, memory)
        if rank
        else SharedMemorySender(Other(), frozenset(range(REPLICAS)), memory)
    )
    return transfer(rank, transport, "cuda" if kind == "CUDA IPC" else "cpu")


@pytest.mark.parametrize("kind", kinds("memory file", "CUDA IPC", 1))
def test_weights_through_memory(kind: str) -> None:
    sender, *engines = run_grid(1 + REPLICAS, through_memory, kind, gpus=kind == "CUDA IPC")
    assert sender and all(engine == sender for engine in engines)


def over_links(rank: int, port: int, over: Any, replicas: int) -> list[str]:
    from megarl.engines.sync.link import EngineLinks, LinkAddress, join_groups, open_store
    from megarl.engines.sync.shared import HostMemory, SharedMemoryReceiver, SharedMemorySender, memory_file

    if over == "nccl":
        torch.cuda.set_device(rank)
    store = open_store(LinkAddress("127.0.0.1", port, "", 0, 60.0), master=rank == 0)
    links = [EngineLinks(), EngineLinks(over)]
    for engine in range(replicas) if rank == 0 else [rank - 1]:
        address = LinkAddress("127.0.0.1", port, f"1/{engine}", 2, 60.0)
        joined = join_groups(store, address, int(rank > 0), int(rank == 0), near=[], far=[0], over=over)
        for of_engines, link in zip(links, joined, strict=True):
            of_engines.number([1] * replicas)
            of_engines.add(engine if rank == 0 else 0, link)
    transport: Any = (
        SharedMemoryReceiver(links[0], (), HostMemory(), links[1])
        if rank
        else SharedMemorySender(links[0], frozenset(), HostMemory(memory_file()), links[1])
    )
    found = transfer(rank, transport, "cuda" if over == "nccl" else "cpu", replicas)
    if store.add("ended", 1) == 1 + replicas:
        store.set("all ended", "")
    store.wait(["all ended"])
    for of_engines in links:
        of_engines.close()
    return found


@pytest.mark.parametrize("over", kinds("gloo", "nccl", 2))
def test_weights_over_links(over: str) -> None:
    [port] = ports.choose("127.0.0.1", 1, None)
    replicas = REPLICAS if over == "gloo" else min(REPLICAS, torch.cuda.device_count() - 1)
    sender, *engines = run_grid(1 + replicas, over_links, port, over, replicas, gpus=over == "nccl")
    assert sender and all(engine == sender for engine in engines)
