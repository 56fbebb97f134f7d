"""``megarl scale``: a run that is training gets another number of engines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from megarl.core.config import Config, load_resolved
from megarl.core.config.rewards import JUDGE_IS_ROLLOUT
from megarl.core.errors import ConfigError
from megarl.core.jobs import TRAIN, ProcessKind, of_program
from megarl.explore.store import EngineRoom
from megarl.learn.algorithms import job_of
from megarl.run.run_dir.open_store import store_of_run
from megarl.run.run_dir.owner import held_locks

log = logging.getLogger(__name__)

ENGINES, PROGRAM = "engines", "program"
"""Settings of the command."""


def scale(run_dir: str, words: Sequence[str]) -> None:
    """Order a run's job to have so many engines; its supervisor starts and ends them.

    Args:
        words: ``engines=N``, and ``program=NAME`` where several programs of the run have engines.

    Raises:
        ConfigError: the run is not there or not running, or cannot have so many; nothing was ordered.
    """
    number, program = read(words)
    config, folder = config_of(run_dir), Path(run_dir)
    running = held_locks(folder, "")
    with store_of_run(config.store.url, folder) as store:
        own = job_of(config).has(ProcessKind.ENGINE)  # else rows of an earlier start may be there
        programs = [name for name in store.engine_programs() if name != TRAIN or own]
        program = program_of(run_dir, [name for name in programs if of_program("lock", name) in running], program)
        check_engines(config_of(run_dir, program), number)
        check_room(number, store.engine_room(program))
        before, new = store.scale_engines(program, number)
    log.info("%s of %s: engines %d -> %d%s", program, run_dir, before, number, f", {new} of them new" if new else "")


def read(words: Sequence[str]) -> tuple[int, str | None]:
    """Number of engines and name of the program, from words ``name=value``. Raises ConfigError."""
    found = dict(word.partition("=")[::2] for word in words)
    if unknown := sorted(found.keys() - {ENGINES, PROGRAM}):
        raise ConfigError(f"{unknown[0]} is nothing that a run is scaled by; give {ENGINES}=N, and {PROGRAM}=NAME")
    value = found.get(ENGINES, "")
    if not (value.isascii() and value.isdecimal()) or int(value) < 1:
        raise ConfigError(f"{ENGINES}={value}: give a whole number of 1 or more; `Ctrl-C` stops a run")
    return int(value), found.get(PROGRAM)


def config_of(run_dir: str, program: str = TRAIN) -> Config:
    """Settings of a program of the run. Raises ConfigError where there is none."""
    resolved = Path(run_dir) / f"{of_program('resolved', program)}.json"
    if not resolved.is_file():
        raise ConfigError(f"{run_dir} has no run; give the directory of one that is training (run.dir)")
    return load_resolved(resolved)


def check_engines(config: Config, number: int) -> None:
    """Raise ConfigError for a run whose engines must stay as they are."""
    rollout = config.rollout
    if rollout.placement == "colocated":
        raise ConfigError(
            "rollout.placement=colocated: each engine has devices of trainer ranks and takes turns with them; a run "
            "with rollout.placement=separate can be scaled"
        )
    if config.sync.method == "checkpoint":
        raise ConfigError(
            "sync.method=checkpoint: an explorer gives weights to the engines that it began with; start another "
            "explore program (`megarl explore --number N`), or end one"
        )
    if config.reward.judge.url == JUDGE_IS_ROLLOUT and number < rollout.replicas:
        raise ConfigError(
            f"{ENGINES}={number}: reward.judge.url={JUDGE_IS_ROLLOUT} asks the rollout.replicas={rollout.replicas} "
            "engines that the run began with; keep at least so many"
        )


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


def check_room(number: int, room: EngineRoom | None) -> None:
    """Raise ConfigError where a job's devices have no room for so many engines."""
    if room is not None and number > room.most:
        raise ConfigError(
            f"{ENGINES}={number}: the job has room for {room.most} ({room.why}); give it more devices, or scale to that"
        )
