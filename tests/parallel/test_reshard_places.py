"""The way is chosen per move: memory between processes of one machine, sockets between machines, copies from near by
first."""

from __future__ import annotations

from typing import Any

import torch

from tests.parallel.grid import run_grid
from tests.parallel.test_reshard_memory import CONFIG

BUCKET = 1 << 20


def test_near_copies_send() -> None:
    from megarl.engines.sync.shared import Places
    from megarl.weights.reshard.layouts import MegatronGrid, megatron_layout, vllm_layout
    from megarl.weights.reshard.plan import build_plan

    source, destination = megatron_layout(CONFIG, MegatronGrid(dp=2)), vllm_layout(CONFIG, 1, replicas=2)
    ranks = [("east", 0, 0), ("west", 0, 0)]
    for workers, senders in (
        (["east", "east"], [{0}, {0}]),
        (["west", "east"], [{1}, {0}]),
        (["north", "north"], [{0}, {1}]),
    ):
        plan = build_plan(source, destination, nearness=Places(workers, ranks).nearness())
        assert [{move.src for move in plan.moves_to(dst)} for dst in range(2)] == senders
        assert {m for src in range(2) for m in plan.moves_from(src)} == set(plan.moves)
    assert Places(["east"], [("east", 0, 0)]).nearness() is None


def transfer(rank: int) -> dict[str, int]:
    """Ranks 0 and 1: two pipeline stages on machines east and west; ranks 2 and 3: engines of one worker on east and
    north, which get the same messages. What each sent how."""
    import torch.distributed as dist

    from megarl.engines.sync.shared import HostMemory, Places, SharedMemoryReceiver, SharedMemorySender, memory_file
    from megarl.weights.reshard.copy import GroupTransport
    from megarl.weights.reshard.execute import receive, send
    from megarl.weights.reshard.layouts import MegatronGrid, megatron_layout, vllm_layout
    from megarl.weights.reshard.plan import build_plan

    counts = {"socket": 0}
    peers = 2 if rank < 2 else 0

    class Link(GroupTransport):
        def isend(self, message: torch.Tensor, to: int) -> Any:
            counts["socket"] += message.nbytes
            return super().isend(message, to + peers)

        def irecv(self, nbytes: int, source: int, spare: Any) -> Any:
            return super().irecv(nbytes, source + peers, spare)

    dist.init_process_group("gloo")
    source, destination = megatron_layout(CONFIG, MegatronGrid(pp=2)), vllm_layout(CONFIG, 1, replicas=2)
    files: list[Any] = [None] * 4
    dist.all_gather_object(files, memory_file())
    places = Places(["east", "north"], [("east", *files[0]), ("west", *files[1])])
    plan = build_plan(source, destination, nearness=places.nearness())
    options: dict[str, Any] = {"dtype": torch.float32, "bucket_bytes": BUCKET}
    if rank < 2:
        tensors = {name: torch.full(shape, rank + 1.0) for name, shape in source.local_shapes(rank).items()}
        sender = SharedMemorySender(Link(), places.workers_on_same_machine(rank), HostMemory(files[rank]))
        send(plan, rank, tensors, sender, **options)
        sender.finish()
        return counts | {"bytes": sum(n for link, n in plan.bytes_per_link(4).items() if link.src == rank)}
    worker = rank - 2
    tensors = {name: torch.zeros(shape) for name, shape in destination.local_shapes(worker).items()}
    near = places.senders_on_same_machine(worker)
    receiver = SharedMemoryReceiver(Link(), near, HostMemory(others=near))
    receive(plan, worker, tensors.__getitem__, receiver, **options)
    receiver.finish()
    for name, tensor in tensors.items():
        second = name.startswith(("model.layers.2.", "model.layers.3.", "model.norm", "lm_head"))
        vocab = CONFIG["vocab_size"] if "embed" in name or "lm_head" in name else tensor.shape[0]
        assert bool((tensor[:vocab] == 1.0 + second).all()), name
    return counts


def test_each_move_goes_its_own_way() -> None:
    near, far, *_ = run_grid(4, transfer)
    assert near["bytes"] > 100e6 and far["bytes"] > 100e6
    assert 0.5 * near["bytes"] <= near["socket"] < 0.501 * near["bytes"]  # to one engine only the words
    assert far["socket"] >= far["bytes"]
