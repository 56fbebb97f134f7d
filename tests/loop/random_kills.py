"""A job whose processes are killed one after another at random moments."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.loop.same_run import has
from tests.system.jobs import START_S, Job

SUPERVISOR = "supervisor"
"""The command itself, with which the job ends; it is started again."""
SURVIVES = ("cluster.restarts=1000", "cluster.replacements=1000")
"""Settings of a job that outlives so many kills."""


@contextmanager
def killed_at_random(
    run_dir: Path,
    settings: Sequence[str],
    victims: Sequence[str],
    kills: int,
    seed: object,
    longest_s: float = 4.0,
    begun: Callable[[], bool] = lambda: True,
    further: int = 0,
    limit_s: float = START_S,
) -> Iterator[tuple[Job, int]]:
    """The job once it has ended well, and the number of kills: fewer where it ended before.

    Args:
        victims: Roles as of ``Job.pid_of``, in turn.
        longest_s: The next kill comes within so many seconds of the moment at which its victim is there.
        begun: True once the first kill may come.
        further: Steps that are done before each kill of a trainer rank or the supervisor, beyond those before the last
            one. Where a start takes longer than it is until the next kill, a job would only ever start.
        limit_s: Most seconds from the last kill to the end.
    """
    dice = random.Random(repr(seed))
    job = Job(run_dir, [*settings, *SURVIVES]).start()
    done, steps = 0, further
    try:
        while done < kills:
            victim = victims[done % len(victims)]
            role = "trainer 0" if victim == SUPERVISOR else victim
            wanted = steps if role == "trainer 0" else 0
            end = time.monotonic() + START_S
            while job.poll() is None and time.monotonic() < end:
                if begun() and has(job, role) and len(job.steps()) >= wanted:
                    break
                time.sleep(0.02)
            time.sleep(dice.uniform(0, longest_s))
            if job.poll() is not None:
                break
            with suppress(AssertionError, ProcessLookupError, FileNotFoundError):  # absent just now
                os.kill(job.pid if victim == SUPERVISOR else job.pid_of(victim), signal.SIGKILL)
                done += 1
                if role == "trainer 0":
                    steps = len(job.steps()) + further
            if victim == SUPERVISOR:
                job.wait(30)
                job.until_gone(60)
                job = Job(run_dir, [*settings, *SURVIVES]).start()
        assert job.wait(limit_s) == 0, job.output.read_text()
        yield job, done
    finally:
        job.clean_up()
