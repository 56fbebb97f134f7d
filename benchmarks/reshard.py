"""Slice to slice against gather-then-broadcast: the same processes, the same weights, the same run.

Four trainer ranks (TP2 x PP2) and two engine ranks (TP2) in six processes over gloo on loopback. Three ways, in turn,
several
times: megarl's plan over sockets; the same plan through shared memory, as an engine on the trainer's machine gets it;
    and what
most frameworks do: gather every parameter whole from the tensor-parallel ranks of its stage, broadcast it to all engine
ranks, and let each cut out its own share. At the end every engine rank's tensors are compared bit for bit.

    python benchmarks/reshard.py [--repeats 5] [--bucket-mib 4 16 64] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import page
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megarl.engines.sync.shared import HostMemory, SharedMemoryReceiver, SharedMemorySender, memory_file
from megarl.weights.architectures import architecture
from megarl.weights.reshard import execute
from megarl.weights.reshard import layout as boxes
from megarl.weights.reshard.copy import GroupTransport
from megarl.weights.reshard.execute import receive, send
from megarl.weights.reshard.layouts import Layout, MegatronGrid, megatron_layout, vllm_layout
from megarl.weights.reshard.plan import ReshardPlan, build_plan

T = TypeVar("T")
GRID = MegatronGrid(tp=2, pp=2)
ENGINE_TP = 2
TRAINERS = GRID.world_size
MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
DTYPE = torch.bfloat16


class Counting:
    """A transport that counts the bytes of messages."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.allocate = inner.allocate
        self.bytes = 0

    def isend(self, message: torch.Tensor, rank: int) -> Any:
        self.bytes += message.nbytes
        return self.inner.isend(message, rank)

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor]) -> Any:
        return self.inner.irecv(nbytes, rank, spare)


class Between(GroupTransport):
    """Trainer ranks and engine ranks in one group: the other side's rank 0 is ``peers``."""

    def __init__(self, peers: int) -> None:
        super().__init__()
        object.__setattr__(self, "peers", peers)

    def isend(self, message: torch.Tensor, rank: int) -> Any:
        return super().isend(message, rank + self.peers)  # type: ignore[attr-defined]

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor]) -> Any:
        return super().irecv(nbytes, rank + self.peers, spare)  # type: ignore[attr-defined]


def values_of(tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The same numbers in every process."""
    generator = torch.Generator().manual_seed(sum(tensor.encode()) * 7919 % 2**31)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(DTYPE)


def local_tensors(layout: Layout, rank: int, fill: bool) -> dict[str, torch.Tensor]:
    out = {name: torch.zeros(shape, dtype=DTYPE) for name, shape in layout.local_shapes(rank).items()}
    for piece in layout.pieces(rank) if fill else ():
        whole = values_of(piece.tensor, layout.tensors[piece.tensor])
        cut = whole[tuple(slice(lo, hi) for lo, hi in piece.box)]
        out[piece.local][boxes.index_of(piece.at, boxes.shape_of(piece.box))] = cut
    return out


def peak_reset() -> int:
    """Start measuring this process's peak; returns its resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def slices(
    plan: ReshardPlan,
    rank: int,
    tensors: dict[str, torch.Tensor],
    transport: Any,
    bucket: int,
    finish: Callable[[], None],
) -> int:
    counting = Counting(transport)
    if rank < TRAINERS:
        send(plan, rank, tensors, counting, dtype=DTYPE, bucket_bytes=bucket)
    else:
        receive(plan, rank - TRAINERS, tensors.__getitem__, counting, dtype=DTYPE, bucket_bytes=bucket)
    finish()
    return counting.bytes


def without_digests(way: Callable[[], T]) -> T:
    """The same with digests left out: what they cost."""
    kept = execute.slice_digests
    execute.slice_digests = lambda slices: torch.zeros(len(slices), dtype=torch.int64)
    try:
        return way()
    finally:
        execute.slice_digests = kept


def gather_then_broadcast(
    source: Layout, destination: Layout, rank: int, tensors: dict[str, torch.Tensor], groups: dict[str, Any]
) -> int:
    """Every fused tensor of the trainer (all experts of a layer as one), whole, to every engine rank."""
    received = 0
    for names, stage in groups["items"]:
        wholes: dict[str, torch.Tensor] = {}
        root = stage * GRID.tp
        in_stage = rank < TRAINERS and rank // GRID.tp == stage
        if in_stage:  # gather the shares of this stage's tensor-parallel ranks
            wholes = {name: torch.empty(source.tensors[name], dtype=DTYPE) for name in names}
            mine, locals_ = _shares(source, rank, names, tensors)
            shares = [mine if r == rank else _like(source, r, names) for r in range(root, root + GRID.tp)]
            dist.all_gather(shares, mine, group=groups["stage"])
            received += sum(s.nbytes for s in shares) - mine.nbytes
            for r, share in zip(range(root, root + GRID.tp), shares, strict=True):
                _place(source, r, names, share, wholes)
            del shares, mine, locals_
        if rank == root or rank >= TRAINERS:  # the whole tensors, stacked as one message, to the engines
            size = sum(int(torch.Size(source.tensors[name]).numel()) for name in names)
            message = (
                torch.cat([wholes[name].reshape(-1) for name in names])
                if rank == root
                else torch.empty(size, dtype=DTYPE)
            )
            dist.broadcast(message, src=root, group=groups[f"engines{stage}"])
            if rank >= TRAINERS:
                received += message.nbytes
                at = 0
                for name in names:
                    shape = source.tensors[name]
                    numel = int(torch.Size(shape).numel())
                    wholes[name] = message[at : at + numel].view(shape)
                    at += numel
                for piece in groups["pieces"][names]:
                    cut = wholes[piece.tensor][tuple(slice(lo, hi) for lo, hi in piece.box)]
                    tensors[piece.local][boxes.index_of(piece.at, boxes.shape_of(piece.box))].copy_(cut)
    return received


def _pieces(layout: Layout, rank: int, names: tuple[str, ...]) -> list[Any]:
    """A rank's pieces of these tensors, from the rows that have them."""
    rows = {id(row): row for name in names for row in layout.rows_with[name]}
    return [
        piece for row in rows.values() if rank in row.owners.share_of for piece in row.pieces(row.owners.share_of[rank])
    ]


def _shares(
    layout: Layout, rank: int, names: tuple[str, ...], tensors: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, None]:
    parts = [
        tensors[p.local][boxes.index_of(p.at, boxes.shape_of(p.box))].reshape(-1) for p in _pieces(layout, rank, names)
    ]
    return torch.cat(parts), None


def _like(layout: Layout, rank: int, names: tuple[str, ...]) -> torch.Tensor:
    return torch.empty(sum(boxes.volume(p.box) for p in _pieces(layout, rank, names)), dtype=DTYPE)


def _place(
    layout: Layout, rank: int, names: tuple[str, ...], share: torch.Tensor, wholes: dict[str, torch.Tensor]
) -> None:
    at = 0
    for piece in _pieces(layout, rank, names):
        size = boxes.volume(piece.box)
        wholes[piece.tensor][tuple(slice(lo, hi) for lo, hi in piece.box)] = share[at : at + size].view(
            boxes.shape_of(piece.box)
        )
        at += size


def _items(source: Layout) -> list[tuple[tuple[str, ...], int]]:
    """What is gathered at once: the parts of a fused tensor; of experts, the fused stack of a layer. With its stage."""
    items: dict[str, list[str]] = defaultdict(list)
    stage_of: dict[str, int] = {}
    for row in source.rows:
        layer = (
            row.parts[0].split(".experts.")[0] + "." + row.local.rsplit(".", 2)[-2]
            if ".experts." in row.parts[0]
            else row.parts[0]
        )
        items[layer] += [part for part in row.parts if part not in items[layer]]
        stage_of[layer] = row.owners.ranks[0][0] // GRID.tp
    return [(tuple(names), stage_of[layer]) for layer, names in items.items()]


def _end_and_close(transport: Any) -> None:
    transport.finish()
    transport.close()


def _through_memory(link: Between, rank: int) -> Any:
    """Return a rank's side of the transport through shared memory, with a memory file of its own."""
    files: list[Any] = [None] * (TRAINERS + ENGINE_TP)
    dist.all_gather_object(files, memory_file())
    if rank < TRAINERS:
        return SharedMemorySender(link, frozenset(range(ENGINE_TP)), HostMemory(files[rank]))
    return SharedMemoryReceiver(link, range(TRAINERS), HostMemory(others=dict(enumerate(files[:TRAINERS]))))


def rank_main(rank: int, port: int, buckets: list[int], repeats: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=TRAINERS + ENGINE_TP)
    source, destination = megatron_layout(MODEL, GRID), vllm_layout(MODEL, ENGINE_TP)
    plan = build_plan(source, destination)
    trainer = rank < TRAINERS
    own = rank if trainer else rank - TRAINERS
    tensors = local_tensors(source if trainer else destination, own, fill=trainer)
    items = _items(source)
    groups: dict[str, Any] = {
        "items": items,
        "pieces": {n: _pieces(destination, own, n) for n, _ in items} if not trainer else {},
    }
    for stage in range(GRID.pp):
        ranks = list(range(stage * GRID.tp, (stage + 1) * GRID.tp))
        group = dist.new_group(ranks)
        if rank in ranks:
            groups["stage"] = group
        groups[f"engines{stage}"] = dist.new_group([ranks[0], *range(TRAINERS, TRAINERS + ENGINE_TP)])
    link = Between(TRAINERS if trainer else 0)
    shared, again = (_through_memory(link, rank) for _ in range(2))
    ways: dict[str, Callable[[], int]] = {
        "gather then broadcast": lambda: gather_then_broadcast(source, destination, rank, tensors, groups)
    }
    for bucket in buckets:
        ways[f"slices, sockets, buckets of {bucket >> 20} MiB"] = partial(
            slices, plan, own + (0 if trainer else TRAINERS), tensors, link, bucket, lambda: None
        )
        ways[f"slices, shared memory, buckets of {bucket >> 20} MiB"] = partial(
            slices, plan, own + (0 if trainer else TRAINERS), tensors, shared, bucket, shared.finish
        )
        last = f"slices, shared memory, buckets of {bucket >> 20} MiB"
        ways[f"{last}, made again"] = partial(
            slices, plan, own + (0 if trainer else TRAINERS), tensors, again, bucket, partial(_end_and_close, again)
        )
        ways[f"{last}, sent without digests"] = partial(without_digests, ways[last])
    results: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    want = local_tensors(destination, own, fill=True) if not trainer else {}
    for _ in range(repeats):
        for name, way in ways.items():
            if not trainer:
                for tensor in tensors.values():
                    tensor.zero_()
            dist.barrier()
            before = peak_reset()
            start = time.monotonic()
            count = way()
            dist.barrier()
            seconds = time.monotonic() - start
            results[name].append({"seconds": seconds, "peak": _status("VmHWM") - before, "bytes": count})
            for local, tensor in want.items():
                assert torch.equal(tensors[local], tensor), f"{name}: {local} on engine rank {own} is wrong"
    Path(out, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--write", action="store_true", help="also write the table into docs/benchmarks/reshard.md")
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as out:
        mp.spawn(rank_main, (port, [n << 20 for n in args.bucket_mib], args.repeats, out), nprocs=TRAINERS + ENGINE_TP)
        ranks = [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(TRAINERS + ENGINE_TP)]
    size = sum(int(torch.Size(s).numel()) for s in architecture(MODEL).tensors(MODEL).values()) * DTYPE.itemsize
    lines = [
        f"Model: {MODEL['model_type']}, {size / 1e9:.2f} GB in {str(DTYPE).removeprefix('torch.')}, "
        f"{MODEL['num_experts']} experts in {MODEL['num_hidden_layers']} layers; trainer {GRID}, engine "
        f"tp={ENGINE_TP}; {args.repeats} repeats in turn, medians.",
        "",
        "| way | seconds | against gathering | bytes moved | peak extra memory, trainer rank | engine rank |",
        "|---|---|---|---|---|---|",
    ]
    base = statistics.median(run["seconds"] for run in ranks[0]["gather then broadcast"])
    for name in ranks[0]:
        seconds = statistics.median(run["seconds"] for run in ranks[0][name])
        moved = sum(rank[name][0]["bytes"] for rank in ranks)
        peak = [
            max(statistics.median(run["peak"] for run in r[name]) for r in side)
            for side in (ranks[:TRAINERS], ranks[TRAINERS:])
        ]
        lines.append(
            f"| {name} | {seconds:.2f} | {base / seconds:.1f}x | {moved / 1e9:.2f} GB | {peak[0] / 2**20:.0f} MiB | "
            f"{peak[1] / 2**20:.0f} MiB |"
        )
    text = "\n".join(lines)
    print(text)
    if args.write:
        page.write("benchmarks/reshard.md", text)


if __name__ == "__main__":
    main()
