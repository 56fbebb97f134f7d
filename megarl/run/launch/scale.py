"""``megarl scale``: changes the number or the tensor parallelism of a running job's engines.

The order is checked first.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megarl.buffer.store import EngineRoom
from megarl.config import Config, load_resolved
from megarl.config.rewards import JUDGE_IS_ROLLOUT
from megarl.core.errors import ConfigError
from megarl.core.jobs import TRAIN, ProcessKind, of_program
from megarl.learn.algorithms import job_of
from megarl.run.checks.memory import check_engine_devices
from megarl.run.job_store import store_of_run
from megarl.run.nodes.plan import workers_of
from megarl.run.run_dir.owner import held_locks
from megarl.run.supervise.engines import with_engines
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from megarl.weights.reshard.layouts import vllm_layout

log = logging.getLogger(__name__)

PROGRAM = "program"
"""Word of the command that names a program."""


class Wanted(NamedTuple):
    """Values of one command; None leaves a value unchanged."""

    engines: int | None
    tp: int | None
    program: str | None


def scale(run_dir: str, words: Sequence[str]) -> None:
    """Order another number or tensor parallelism of a job's engines; its supervisor starts and ends them.

    Args:
        words: ``engines=N``, ``tp=M``, and ``program=NAME`` if several programs of the run have engines.

    Raises:
        ConfigError: the run does not exist, is not running or cannot have such engines; nothing is ordered.
    """
    wanted = read(words)
    config, folder = config_of(run_dir), Path(run_dir)
    running = held_locks(folder, "")
    with store_of_run(config.store.url, folder) as store:
        own = job_of(config).has(ProcessKind.ENGINE)  # otherwise rows may be of an earlier start
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
    """Parse words ``name=value``. Raises ConfigError."""
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
    """Return the settings of a program of the run. Raises ConfigError if it does not exist."""
    resolved = Path(run_dir) / f"{of_program('resolved', program)}.json"
    if not resolved.is_file():
        raise ConfigError(f"{run_dir} has no run; give the directory of one that is training (run.dir)")
    return load_resolved(resolved)


def program_of(run_dir: str, programs: Sequence[str], asked: str | None) -> str:
    """Choose the program with the engines to scale among running ones. Raises ConfigError."""
    if not programs:
        raise ConfigError(f"{run_dir} has no job that is running with engines; start it with rollout.replicas=N")
    if asked is None and len(programs) == 1:
        return programs[0]
    if asked in programs:
        assert asked is not None
        return asked
    named = ", ".join(f"{PROGRAM}={name}" for name in programs)
    raise ConfigError(f"{PROGRAM}={asked or ''}: {run_dir} has engines of several programs; give one of {named}")


ENGINES, TP = "engines", "tp"
"""Words of the command for engines."""
_ASKING = f"with reward.judge.url={JUDGE_IS_ROLLOUT} the function of reward.path may ask"


def _are_asked_by_workers(config: Config) -> bool:
    """Return True if a user's reward function may use engines as the judge: its process keeps the URLs of the start."""
    return config.reward.path is not None and config.reward.judge.url == JUDGE_IS_ROLLOUT


def check_engines(config: Config, number: int) -> None:
    """Raise ConfigError if a run's engines cannot be changed to ``number``."""
    rollout = config.rollout
    if rollout.is_colocated:
        raise ConfigError(
            "rollout.placement=colocated: each engine has devices of trainer ranks and takes turns with them; a run "
            "with rollout.placement=separate can be scaled"
        )
    if config.sync.method == "checkpoint":
        raise ConfigError(
            "sync.method=checkpoint: an explorer gives weights to the engines that it began with; start another "
            "explore program (`megarl explore --number N`), or end one"
        )
    if _are_asked_by_workers(config) and number < rollout.replicas:
        raise ConfigError(
            f"{ENGINES}={number}: {_ASKING} the rollout.replicas={rollout.replicas} engines that the run began with; "
            f"give {rollout.replicas} or more"
        )


def check_tp(config: Config) -> None:
    """Raise ConfigError if engines with these settings' ``rollout.tp`` cannot join the running job."""
    setting, rollout = f"{TP}={config.rollout.tp}", config.rollout
    if config.sync.deterministic:
        raise ConfigError(
            f"{setting}: sync.deterministic=true has the same bits in every run, and engines of another tp add in "
            "another order; set rollout.tp in another run"
        )
    if _are_asked_by_workers(config):
        raise ConfigError(
            f"{setting}: {_ASKING} the engines at the ports that the run began with; engines of another tp have new "
            "ones. Set rollout.tp and start the run again"
        )
    hf_config = read_hf_config(Path(config.model.path))
    try:
        vllm_layout(hf_config, rollout.tp, pp=rollout.pp, expert_parallel=rollout.expert_parallel)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
    if config.cluster.device_bytes is not None:
        check_engine_devices(config, hf_config, config.cluster.device_bytes)


def check_room(number: int, workers: int, begun_with: int, room: EngineRoom | None) -> None:
    """Raise ConfigError if the ordered engines do not fit a job's devices.

    Args:
        workers: Workers of each engine.
        begun_with: Workers of each engine at the job's start.
    """
    if room is not None and number > (most := room.most(workers, begun_with)):
        raise ConfigError(
            f"{ENGINES}={number}: the job has room for {most} of {workers} workers each ({room.why}); give it more "
            "devices, or scale to that"
        )
