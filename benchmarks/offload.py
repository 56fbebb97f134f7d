"""CPU-seconds of moving a model's memory to a copy in host memory and back, with huge pages and with small ones.

    python benchmarks/offload.py [--write]

Both ways alternate in one process. The table is in docs/benchmarks/turns.md.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from pathlib import Path
from unittest import mock

import page
import torch

from megarl.learn.memory import residents
from megarl.learn.memory.phases import Place
from megarl.learn.memory.residents import Resident


def move(resident: Resident) -> tuple[float, float]:
    """CPU-seconds in which the resident leaves, and comes back."""
    start = time.process_time()
    resident.leave(Place.MEMORY, Path())
    left = time.process_time()
    resident.come_back()
    return left - start, time.process_time() - left


def small_pages(resident: Resident) -> tuple[float, float]:
    """Measure with memory as the system gives it by default."""
    with (
        mock.patch.object(residents, "anonymous_map", lambda nbytes: mmap.mmap(-1, nbytes)),
        mock.patch.object(residents, "advise_huge_pages", lambda memory: None),
    ):
        return move(resident)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="also write the table into docs/benchmarks/turns.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = ["| pages | leaves, CPU-s | comes back, CPU-s | GB/CPU-s there and back |", "|---|---|---|---|"]
    tensors = [torch.full((2**26,), float(i)) for i in range(4)]
    resident, gb = Resident("actor", "optimizer", lambda: tensors), sum(t.nbytes for t in tensors) / 1e9
    ways = {"small": small_pages, "huge": move}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for i in range(args.rounds + 1):
        for name, way in ways.items():
            seconds = way(resident)
            if i:  # in the first round the machine gives the process its memory
                found[name].append(seconds)
    for name, moves in found.items():
        leave, back = (statistics.median(times) for times in zip(*moves, strict=True))
        rows.append(f"| {name} | {leave:.2f} | {back:.2f} | {2 * gb / (leave + back):.1f} |")
    text = f"{gb:.2f} GB in 4 storages, digests of both moves included; medians of {args.rounds} rounds in turn.\n\n"
    text += "\n".join(rows)
    print(text)
    if args.write:
        page.write("benchmarks/turns.md", text, "benchmarks/offload.py")


if __name__ == "__main__":
    main()
