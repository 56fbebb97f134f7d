"""``megarl scale``: a run that is training gets another number of engines, or engines of another tensor parallelism."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megarl.config import Config, load_resolved
from megarl.core.errors import ConfigError
from megarl.core.jobs import TRAIN, ProcessKind, of_program
from megarl.learn.algorithms import job_of
from megarl.run.checks.engines.scaling import ENGINES, TP, check_engines, check_room, check_tp
from megarl.run.nodes.plan import workers_of
from megarl.run.run_dir.open_store import store_of_run
from megarl.run.run_dir.owner import held_locks
from megarl.run.supervise.more_engines import with_engines

log = logging.getLogger(__name__)

PROGRAM = "program"
"""Setting of the command that names a program."""


class Wanted(NamedTuple):
    """Settings of one command; None stays as it is."""

    engines: int | None
    tp: int | None
    program: str | None


def scale(run_dir: str, words: Sequence[str]) -> None:
    """Order a run's job to have so many engines, or others; its supervisor starts and ends them.

    Args:
        words: ``engines=N``, ``tp=M``, and ``program=NAME`` where several programs of the run have engines.

    Raises:
        ConfigError: the run is not there or not running, or cannot have such engines; nothing was ordered.
    """
    wanted = read(words)
    config, folder = config_of(run_dir), Path(run_dir)
    running = held_locks(folder, "")
    with store_of_run(config.store.url, folder) as store:
        own = job_of(config).has(ProcessKind.ENGINE)  # else rows of an earlier start may be there
        programs = [name for name in store.engines.programs() if name != TRAIN or own]
        running_programs = [name for name in programs if of_program("lock", name) in running]
        program = program_of(run_dir, running_programs, wanted.program)
        config = config_of(run_dir, program)
        engines = store.engines.read([program])
        there = sum(engine.wanted for engine in engines)
        workers = engines[0].wanted_workers if wanted.tp is None else wanted.tp * config.rollout.pp
        number = there if wanted.engines is None else wanted.engines
        check_engines(config, number)
        if workers != engines[0].wanted_workers:
            check_tp(with_engines(config, number, workers))
        check_room(number, workers, workers_of(config), store.engines.room(program))
        before, new = store.engines.scale(program, number, None if wanted.tp is None else workers)
    for engine in engines:
        if engine.is_refused:
            log.info("engine %d was not started when it was ordered last: %s", engine.number, engine.refused)
    log.info("%s of %s: engines %d -> %d%s", program, run_dir, before, number, f", {new} of them new" if new else "")
    if workers != engines[0].wanted_workers:
        log.info("each of them starts again in turn, with tp=%d", wanted.tp)


def read(words: Sequence[str]) -> Wanted:
    """Settings from words ``name=value``. Raises ConfigError."""
    found = dict(word.partition("=")[::2] for word in words)
    if unknown := sorted(found.keys() - {ENGINES, TP, PROGRAM}):
        raise ConfigError(
            f"{unknown[0]} is nothing that a run is scaled by; give {ENGINES}=N or {TP}=M, and {PROGRAM}=NAME"
        )
    if not found.keys() & {ENGINES, TP}:
        raise ConfigError(f"give {ENGINES}=N, {TP}=M or both; `Ctrl-C` stops a run")
    return Wanted(_count(found, ENGINES), _count(found, TP), found.get(PROGRAM))


def _count(found: Mapping[str, str], name: str) -> int | None:
    value = found.get(name)
    if value is not None and (not (value.isascii() and value.isdecimal()) or int(value) < 1):
        raise ConfigError(f"{name}={value}: give a whole number of 1 or more")
    return None if value is None else int(value)


def config_of(run_dir: str, program: str = TRAIN) -> Config:
    """Settings of a program of the run. Raises ConfigError where there is none."""
    resolved = Path(run_dir) / f"{of_program('resolved', program)}.json"
    if not resolved.is_file():
        raise ConfigError(f"{run_dir} has no run; give the directory of one that is training (run.dir)")
    return load_resolved(resolved)


def program_of(run_dir: str, programs: Sequence[str], asked: str | None) -> str:
    """Choose the program whose engines are meant, of those that run. Raises ConfigError."""
    if not programs:
        raise ConfigError(f"{run_dir} has no job that is running with engines; start it with rollout.replicas=N")
    if asked is None and len(programs) == 1:
        return programs[0]
    if asked in programs:
        assert asked is not None
        return asked
    named = ", ".join(f"{PROGRAM}={name}" for name in programs)
    raise ConfigError(f"{PROGRAM}={asked or ''}: the engines of {run_dir} are of several; give one of {named}")
