"""Short programs a second: in the sandbox, and as plain subprocesses of the same interpreter, in turn in one run.

Plain is ``python -c``, one process for each test, or for program and assertions together; and the same without site
packages (-I -S), as programs in the sandbox are started. ``python benchmarks/sandbox.py [workers]``. On a machine that
does other things too only the ratios mean something.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import page

from megarl.config.rewards import CodeConfig
from megarl.rewards.code import make_scorer
from megarl.sandbox.bubblewrap import find
from megarl.sandbox.selftest import local_sandbox

ROUNDS = 5
SECONDS = 2.0
ITEMS = 100
PROGRAM = "import sys\na, b = map(int, sys.stdin.read().split())\nprint(a + b)\n"
FUNCTION = "def add(a, b):\n    return a + b\n"
TESTS = {
    count: {"inputs": [f"{i} 1" for i in range(count)], "outputs": [str(i + 1) for i in range(count)]}
    for count in (1, 10)
}
ASSERTS = {"test_list": [f"assert add({i}, 1) == {i + 1}" for i in range(3)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workers", type=int, nargs="?", default=2)
    parser.add_argument("--write", action="store_true", help="also write the tables into docs/benchmarks/sandbox.md")
    options = parser.parse_args()
    workers = options.workers
    sandbox = local_sandbox()
    score = make_scorer(sandbox, CodeConfig())
    python = find().python

    def plain(*options: str) -> Callable[[dict[str, Any]], None]:
        def work(row: dict[str, Any]) -> None:
            if "test_list" in row:  # program and tests in one process: what anybody can forge
                subprocess.run([python, *options, "-c", "\n".join([FUNCTION, *row["test_list"]])], check=True)
                return
            for given, expected in zip(row["inputs"], row["outputs"], strict=True):
                done = subprocess.run([python, *options, "-c", PROGRAM], input=given, capture_output=True, text=True)
                assert done.stdout.strip() == expected

        return work

    def boxed(row: dict[str, Any]) -> None:
        verdict = score(FUNCTION if "test_list" in row else PROGRAM, row, None)
        assert verdict["status"] == "ok", verdict

    ways = (boxed, plain(), plain("-I", "-S"))
    text = page.Text()
    say = text.say

    say(f"{workers} workers, median of {ROUNDS} rounds of {SECONDS:g} s each; {sandbox.describe()}\n")
    say(
        "| answer | sandbox, answers/s | plain | plain -I -S | time, sandbox / plain | sandbox / plain -I -S "
        "|\n|---|---|---|---|---|---|"
    )
    for name, row in (("1 test", TESTS[1]), ("10 tests", TESTS[10]), ("3 assertions", ASSERTS)):
        found = [[rate(way, row, workers) for way in ways] for _ in range(ROUNDS)]
        rates = [statistics.median(values) for values in zip(*found, strict=True)]
        ratios = [statistics.median(other[i] / other[0] for other in found) for i in (1, 2)]
        say(
            f"| {name} | {' | '.join(f'{value:.1f}' for value in rates)} | "
            f"{' | '.join(f'{value:.2f}' for value in ratios)} |"
        )
    say("\n| answer | CPU ms in the sandbox | plain | plain -I -S |\n|---|---|---|---|")
    for name, row in (("1 test", TESTS[1]), ("10 tests", TESTS[10]), ("3 assertions", ASSERTS)):
        say(f"| {name} | {' | '.join(f'{cpu(way, row):.1f}' for way in ways)} |")
    say(f"\nload at the end {os.getloadavg()[0]:.1f}")
    if options.write:
        page.write("benchmarks/sandbox.md", str(text))


def rate(work: Callable[[dict[str, Any]], None], row: dict[str, Any], workers: int) -> float:
    """Items a second of ``workers`` threads that each go on for ``SECONDS``."""
    start = time.monotonic()

    def loop(_: int) -> int:
        count = 0
        while time.monotonic() < start + SECONDS:
            work(row)
            count += 1
        return count

    with ThreadPoolExecutor(workers) as pool:
        done = sum(pool.map(loop, range(workers)))
    return done / (time.monotonic() - start)


def cpu(work: Callable[[dict[str, Any]], None], row: dict[str, Any]) -> float:
    """Milliseconds of one item, ours and our children's; without what the kernel's own threads do to take namespaces
    apart."""

    def used() -> float:
        return sum(
            u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )

    def loop() -> None:
        for _ in range(ITEMS):
            work(row)
        for zygote in local_sandbox()._threads.__dict__.get("idle", ()):  # killed, they would leave no account
            zygote._outer.link.shutdown(socket.SHUT_RDWR)
            zygote._outer._process.wait()

    before = used()
    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    return 1e3 * (used() - before) / ITEMS


if __name__ == "__main__":
    main()
