"""Seconds of moving a model's memory to a copy in host memory and back: a kept copy and a new one each time.

    python benchmarks/offload.py [--write]

Both ways alternate in one process. On a CPU the seconds are the process's own, and the table is in
docs/benchmarks/turns.md. On a GPU they are those of a clock, a kept copy is registered with CUDA, and `first` is the
move that makes the copy.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import page
import torch

from megarl.learn.memory.phases import Place
from megarl.learn.memory.residents import Resident

GPU = torch.cuda.is_available()


def now() -> float:
    """Seconds: of the clock once the GPU is idle, else of the process."""
    if not GPU:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def move(resident: Resident) -> tuple[float, float]:
    """Seconds in which the resident leaves, and comes back."""
    start = now()
    resident.leave(Place.MEMORY, Path())
    left = now()
    resident.come_back()
    return left - start, now() - left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="also write the table into docs/benchmarks/turns.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tensors = [torch.full((2**26,), float(i), device="cuda" if GPU else "cpu") for i in range(4 << 2 * GPU)]
    gb = sum(tensor.nbytes for tensor in tensors) / 1e9
    ways = {
        name: Resident("actor", "optimizer", lambda: tensors, keeps_copy=name == "kept") for name in ("new", "kept")
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for i in range(args.rounds + 1):
        for name, resident in ways.items():
            seconds = move(resident)
            if i:  # the kept copy is made in the first round
                found[name].append(seconds)
            elif GPU:
                found[f"{name}, first"] = [seconds]
    s = "s" if GPU else "CPU-s"
    rows = [f"| copy | leaves, {s} | GB/{s} | comes back, {s} | GB/{s} |", "|---|---|---|---|---|"]
    for name, moves in found.items():
        leave, back = (statistics.median(times) for times in zip(*moves, strict=True))
        rows.append(f"| {name} | {leave:.2f} | {gb / leave:.1f} | {back:.2f} | {gb / back:.1f} |")
    text = f"{gb:.2f} GB in {len(tensors)} storages, digests of both moves included; "
    text += f"medians of {args.rounds} rounds in turn.\n\n"
    text += "\n".join(rows)
    print(text)
    if args.write:
        page.write("benchmarks/turns.md", text, "benchmarks/offload.py")


if __name__ == "__main__":
    main()
