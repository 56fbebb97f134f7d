"""CPU-seconds of moving a model's memory to a copy in host memory and back: a kept copy and a new one each time.

    python benchmarks/offload.py [--write]

Both ways alternate in one process. The table is in docs/benchmarks/turns.md.
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


def move(resident: Resident) -> tuple[float, float]:
    """CPU-seconds in which the resident leaves, and comes back."""
    start = time.process_time()
    resident.leave(Place.MEMORY, Path())
    left = time.process_time()
    resident.come_back()
    return left - start, time.process_time() - left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="also write the table into docs/benchmarks/turns.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tensors = [torch.full((2**26,), float(i)) for i in range(4)]
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
    rows = ["| copy | leaves, CPU-s | GB/CPU-s | comes back, CPU-s | GB/CPU-s |", "|---|---|---|---|---|"]
    for name, moves in found.items():
        leave, back = (statistics.median(times) for times in zip(*moves, strict=True))
        rows.append(f"| {name} | {leave:.2f} | {gb / leave:.1f} | {back:.2f} | {gb / back:.1f} |")
    text = f"{gb:.2f} GB in 4 storages, digests of both moves included; medians of {args.rounds} rounds in turn.\n\n"
    text += "\n".join(rows)
    print(text)
    if args.write:
        page.write("benchmarks/turns.md", text, "benchmarks/offload.py")


if __name__ == "__main__":
    main()
