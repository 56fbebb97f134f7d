"""``megarl exam``: put known faults into small jobs and print which of them a job notices, and how it names them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.exam.runner import Exam


DESCRIPTION = """Put known silent faults into small jobs, one at a time; print which a job notices and names.

Needs no GPU. The same command continues after a stop (docs/alarms.md)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``megarl exam``."""
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="faults or areas to run")
    parser.add_argument("--healthy", type=int, metavar="N", default=0, help="run N jobs without a fault, too")
    parser.add_argument("--folder", type=Path, default=Path("runs/exam"), help="keeps outcomes; a repeat goes on")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page of results, in Markdown")
    parser.add_argument("--peer", type=Path, metavar="FILE", help="outcomes of benchmarks/exam_trl.py, for the page")
    parser.add_argument("--at-once", type=int, metavar="N", default=max(1, (os.cpu_count() or 1) // 2 + 1))


def run(arguments: argparse.Namespace) -> int:
    """Run the exam; return the exit status."""
    from megarl.exam.areas import faults

    rows = faults()
    if unknown := set(arguments.only) - rows.keys() - {fault.name for area in rows.values() for fault in area}:
        sys.stderr.write(f"megarl exam: no fault or area {', '.join(sorted(unknown))}; --list prints all\n")
        return 2
    chosen = [
        (area, fault)
        for area, own in rows.items()
        for fault in own
        if not arguments.only or area in arguments.only or fault.name in arguments.only
    ]
    if arguments.list:
        for area, fault in chosen:
            sys.stdout.write(f"{area}/{fault.name} [{fault.alarm}] {fault.report}: {fault.breaks}\n")
        return 0
    from megarl.core.durable import write_text
    from megarl.exam.exam_page import page, summary
    from megarl.exam.runner import Exam, Runner

    runner = Runner(arguments.folder)
    try:
        written = [fault for _, fault in chosen if fault.install or fault.prepare]
        exams = [Exam(fault.name, fault.job, fault) for fault in written]
        healthy = healthy_jobs(arguments.healthy)
        runner.run_all([*exams, *healthy], arguments.at_once)
        results = {fault.name: found for fault in written if (found := runner.outcome(fault.name)) is not None}
        sound = [found for exam in healthy if (found := runner.outcome(exam.name)) is not None]
        if arguments.write is not None:
            write_text(arguments.write, page(rows, results, sound, arguments.peer))
        sys.stdout.write(f"{summary(rows, results, sound)}\n")
    finally:
        runner.close()
    return 0


def healthy_jobs(number: int) -> list[Exam]:
    """Return jobs without a fault, of twice the steps: every kind in turn, each with another seed and learning rate."""
    from megarl.exam.runner import Exam
    from megarl.exam.small_jobs import JOBS

    names, found = list(JOBS), list[Exam]()
    for n in range(number):
        rate = (5e-5, 1e-4, 2e-5)[n % 3]
        settings = (f"trainer.seed={n + 1}", f"trainer.optimizer.lr={rate}")
        found.append(Exam(f"healthy-{n:03d}", names[n % len(names)], None, settings, times=2))
    return found
