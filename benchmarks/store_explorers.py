"""Long responses through PostgreSQL, by one explorer and by several: trajectories/s written and taken at once.

``python benchmarks/store_explorers.py [--explorers 1 4] [--steps N] [--write]``. The server is a job's own, on this
machine. Each explorer is a process that claims groups and puts them; the trainer, this process, takes each step's
groups, reads all their tokens and records the step, while explorers go on with the next one. Every group has to be put
by one explorer, once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import numpy as np
import page
import store as calls

from megarl.buffer.store import EndedGroup, Store, Used
from megarl.core.schema import WeightsVersion
from megarl.run.postgres import Server

POLL_S = 0.01
PACKET = 16
"""Groups that an explorer claims at once."""
DRAWN = 64
"""Different responses of an explorer."""
OUTAGE_S = 60.0


def explore(url: str, number: int, begin: Barrier, end: Event, answer: Connection) -> None:
    """Put groups until ``end``, then send the ids of those that this explorer has put."""
    rng = np.random.default_rng(number)
    tokens = rng.integers(0, 150_000, (DRAWN, calls.LONG), dtype=np.int32)
    logps = -rng.exponential(0.5, (DRAWN, calls.LONG)).astype(np.float32)
    store, put = Store(url, outage_s=OUTAGE_S), list[str]()
    begin.wait()
    while not end.is_set():
        claims = store.groups.claim(f"explorer-{number}", PACKET, max_samples=PACKET * calls.MEMBERS)
        ended = []
        for claim in claims:
            drawn = rng.integers(0, DRAWN, claim.group_size)
            members = zip(calls.answers(claim), drawn, strict=True)
            ended.append(EndedGroup(claim, [calls.with_tokens(one, tokens[i], logps[i]) for one, i in members]))
        put += [group.claim.group_id for group, is_in in zip(ended, store.groups.put_all(ended), strict=True) if is_in]
        if not claims:
            end.wait(POLL_S)
    store.close()
    answer.send(put)


@dataclass(frozen=True)
class Passed:
    """Steps that explorers and trainer went through together."""

    seconds: float
    waited_s: float
    """Of them, those in which the trainer waited for explorers."""
    put: list[int]
    """Groups of each explorer."""


def passed(url: str, explorers: int, steps: int) -> Passed:
    """Let so many explorers write so many steps, one ahead of the trainer."""
    spawn = multiprocessing.get_context("spawn")
    begin, end = spawn.Barrier(explorers + 1), spawn.Event()
    pipes = [spawn.Pipe(duplex=False) for _ in range(explorers)]
    processes = [
        spawn.Process(target=explore, args=(url, number, begin, end, pipe[1]), daemon=True)
        for number, pipe in enumerate(pipes)
    ]
    store, waited_s = Store(url, outage_s=OUTAGE_S), 0.0
    store.tasks.add("train", calls.tasks("train", calls.GROUPS_A_STEP))
    ids = store.tasks.ids("train")

    def ask(step: int) -> None:
        version = WeightsVersion(1, step)
        store.pacing.record_version(version, step)
        store.rollouts.request(f"train-{step:06d}", "train", step, version, ids, calls.MEMBERS, {})

    ask(0)
    for process in processes:
        process.start()
    begin.wait()
    started = time.perf_counter()
    for step in range(steps):
        if step + 1 < steps:
            ask(step + 1)
        before = time.perf_counter()
        while not store.rollouts.is_complete(f"train-{step:06d}"):
            time.sleep(POLL_S)
        waited_s += time.perf_counter() - before
        groups = store.groups.take(calls.GROUPS_A_STEP, step=step)
        read = store.groups.read(groups)
        assert sum(len(one.turns[1].token_ids) for one in read) == calls.GROUPS_A_STEP * calls.MEMBERS * calls.LONG
        store.journal.record_step(step + 1, {}, Used(tuple(groups)))
    seconds = time.perf_counter() - started
    end.set()
    put = [pipe[0].recv() for pipe in pipes]
    for process in processes:
        process.join()
    store.close()
    every = [group for of_one in put for group in of_one]
    assert len(every) == len(set(every)) == steps * calls.GROUPS_A_STEP, "a group was put twice, or never"
    return Passed(seconds, waited_s, [len(of_one) for of_one in put])


def say(text: page.Text, found: Sequence[Passed], steps: int) -> None:
    number = steps * calls.GROUPS_A_STEP * calls.MEMBERS
    text.say(
        f"PostgreSQL, {steps} steps of {calls.GROUPS_A_STEP} groups of {calls.MEMBERS} trajectories of {calls.LONG:,} "
        "random tokens; explorers one step ahead."
    )
    text.say("")
    text.say("| explorers | trajectories/s | trainer waits | groups of each explorer |")
    text.say("|---:|---:|---:|---|")
    for one in found:
        groups = ", ".join(map(str, one.put))
        text.say(f"| {len(one.put)} | {number / one.seconds:,.0f} | {one.waited_s / one.seconds:.0%} | {groups} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--explorers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="also write the table into docs/benchmarks/store.md")
    options = parser.parse_args()
    found, text = [], page.Text()
    for number in options.explorers:
        with tempfile.TemporaryDirectory() as folder:
            server = Server(Path(folder) / "postgres", "key of the benchmark")
            server.start()
            try:
                found.append(passed(server.url, number, options.steps))
            finally:
                server.stop()
    say(text, found, options.steps)
    if options.write:
        page.write("benchmarks/store.md", str(text))


if __name__ == "__main__":
    main()
