"""Kinds of processes, and the table of jobs with the kinds that each job has."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Literal


class ProcessKind(Enum):
    """Kind of a process that a supervisor starts, with the prefix of its process names and of its file names."""

    ENGINE = ("engine", "engine")
    TRAINER = ("trainer rank", "trainer")
    REWARD_HOST = ("reward host", "reward_host")
    EXPLORER = ("explorer", "explorer")
    BENCH = ("bench", "bench")

    def __init__(self, label: str, stem: str) -> None:
        self.label = label
        self.stem = stem

    def named(self, number: int, part: int = 0) -> str:
        """Name of process ``number``. ``part`` counts the processes of an engine that spans nodes, from 0."""
        if self in OFTEN_ALONE and number == 0:
            return self.label
        return f"{self.label} {number}" + (f" part {part + 1}" if part else "")

    def log(self, number: int, part: int = 0) -> str:
        """File name of the log of process ``number``."""
        if self in OFTEN_ALONE and number == 0:
            return f"{self.stem}.log"
        return f"{self.stem}_{number}" + (f"_part_{part + 1}" if part else "") + ".log"


OFTEN_ALONE = frozenset({ProcessKind.EXPLORER, ProcessKind.BENCH})
"""Kinds that often have one process per job; the first one's name has no number."""
TRAIN = "train"
"""Program of every job that has a trainer. Jobs of several programs can share a run and its store. A start ends only
earlier attempts of the same program."""
STORE = "store"
"""Program of `megarl store`, which runs no step."""
EXPLORE = "explore"
"""Prefix of the programs that explore for another program's trainer: ``explore-0``, ``explore-1``."""
STOPPED = 128 + signal.SIGTERM
"""Exit status of an explorer that was asked to stop before the job was closed."""
PROGRAM = "MEGARL_PROGRAM"
"""Environment variable that names the program of a process's job."""
REWARD_HOSTS = "MEGARL_REWARD_HOSTS"
"""Environment variable of explorers: addresses of reward hosts, each with ``*`` and its number of workers."""
KEEPS, KEPT_IN, NODE = "MEGARL_KEEP_STATE", "MEGARL_KEPT_IN", "MEGARL_NODE_OF_RANK"
"""Variables of a trainer rank that keeps its state: ``trainer.keep_state``, its node's folder, its node's number."""


def kind_of(name: str) -> ProcessKind | None:
    """Kind of a process by its name (``trainer rank 0``) or file stem (``trainer_0``); ``None`` for any other."""
    return next((kind for kind in ProcessKind if name.startswith((kind.label, kind.stem))), None)


def of_program(name: str, program: str) -> str:
    """Name of a file in the run directory that each program has separately: ``attempt``, or ``attempt_explore-0``."""
    return name if program == TRAIN else f"{name}_{program}"


OWN_WORKER = "explorer-"
"""Prefix of the names of a job's own explorers; explorers of ``megarl explore`` have another one."""


def worker_of(program: str, number: int = 0) -> str:
    """Unique name under which an explorer of a program claims groups."""
    if program == TRAIN:
        return f"{OWN_WORKER}{number}"
    return of_program("explorer", program) + (f".{number}" if number else "")


def logs_of(run_dir: str | Path, attempt: int | str, program: str) -> Path:
    """Folder of an attempt's logs."""
    return Path(run_dir) / "logs" / of_program(f"attempt_{attempt}", program)


def unit_of(name: str) -> str:
    """Name of the unit to which a process belongs (``engine 0`` for ``engine 0 part 2``). A unit's processes are
    replaced together."""
    return name.partition(" part ")[0]


Mode = Literal["both", "explore", "train", "offline", "bench"]


@dataclass(frozen=True)
class Job:
    """A row of ``JOBS``."""

    mode: Mode
    processes: tuple[ProcessKind, ...]
    """Kinds in start order, the slowest to start first."""
    rollouts: bool
    """True if the trainer's rows are rollouts, False if they are read from a file."""
    until: ProcessKind
    """Kind that decides the job's end: the job ends when these processes end, and the attempt fails when one dies."""
    program: str = TRAIN

    def has(self, kind: ProcessKind) -> bool:
        """Return True if the job has processes of ``kind``."""
        return kind in self.processes

    @property
    def trains(self) -> bool:
        """True if the job has trainer ranks."""
        return self.has(ProcessKind.TRAINER)

    @property
    def joins(self) -> bool:
        """True if the job works on a run that another program begins and ends."""
        return self.mode == "explore"

    @property
    def is_alone(self) -> bool:
        """True if the job needs no other program."""
        return self.mode not in ("explore", "train")

    def numbered(self, number: int) -> Job:
        """Return the job as explore program ``number``; any other job unchanged."""
        return replace(self, program=f"{EXPLORE}-{number}") if self.joins else self


JOBS: Mapping[Mode, Job] = {
    job.mode: job
    for job in (
        Job(
            "both",
            (ProcessKind.ENGINE, ProcessKind.TRAINER, ProcessKind.REWARD_HOST, ProcessKind.EXPLORER),
            rollouts=True,
            until=ProcessKind.TRAINER,
        ),
        Job(
            "explore",
            (ProcessKind.ENGINE, ProcessKind.REWARD_HOST, ProcessKind.EXPLORER),
            rollouts=True,
            until=ProcessKind.EXPLORER,
            program=f"{EXPLORE}-0",
        ),
        Job("train", (ProcessKind.TRAINER,), rollouts=True, until=ProcessKind.TRAINER),
        Job("offline", (ProcessKind.TRAINER,), rollouts=False, until=ProcessKind.TRAINER),
        Job(
            "bench",
            (ProcessKind.ENGINE, ProcessKind.REWARD_HOST, ProcessKind.EXPLORER, ProcessKind.BENCH),
            rollouts=True,
            until=ProcessKind.BENCH,
            program="bench",
        ),
    )
}
