"""Joins an explore program to a run that its trainer's program has begun, and removes its engines at its end.

An explore program makes no rows, model or checkpoint of the run, and writes only its own rows of the store's tables.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from megarl.buffer.store import Store, sqlite_file
from megarl.config import Config, load_resolved, to_dict
from megarl.core.errors import ConfigError, FencedError, JobError
from megarl.learn import algorithms
from megarl.run.checks.settings import check_settings
from megarl.run.process.interrupt import INTERRUPT
from megarl.run.run_dir.changes import Change, changes, described, is_in

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between two checks while waiting."""
AGAIN_S = 60.0
"""Seconds between two log lines while waiting."""
OF_TRAINER = ("trainer", "critic", "reference", "reward_model", "buffer", "run", "cluster")
"""Settings of trainer ranks, or of each program: an explore program's may differ."""
SHARED = ("rollout.tp", "rollout.pp", "rollout.expert_parallel", "parallel.backend", "store.url", "sync.method")
"""Settings that trainer and engines must share although they do not change training."""


class Waiting:
    """Logs a wait: the first line immediately, then one a minute."""

    def __init__(self) -> None:
        self._said: float | None = None

    def pause(self, what: str) -> None:
        """Log ``what`` if a line is due, and sleep briefly. Raises KeyboardInterrupt after a signal."""
        now = time.monotonic()
        if self._said is None or now - self._said >= AGAIN_S:
            self._said = now
            log.info("waiting for %s", what)
        INTERRUPT.check()
        time.sleep(LOOK_S)


def await_run(config: Config, nodes: int) -> Config | None:
    """Wait without limit until a trainer's program has begun the run. Return the settings with the values that the run
    derived from its rows; None if the run is finished.

    Raises:
        ConfigError: settings differ that must match the run's, or do not fit this machine.
    """
    run_dir, waiting = Path(config.run.dir), Waiting()
    while True:
        if not (run_dir / "resolved.json").is_file() or not _has_begun(config):
            waiting.pause(f"`megarl train run.mode=train` to begin the run in {run_dir}")
            continue
        run = load_resolved(run_dir / "resolved.json")
        if is_closed(config):
            if run.trainer.steps >= config.trainer.steps and _steps(config) >= run.trainer.steps:
                return None
            steps = max(run.trainer.steps, config.trainer.steps)
            waiting.pause(f"`megarl train run.mode=train` to go on to trainer.steps={steps}")
        elif run.run.mode == "both":
            waiting.pause(f"`megarl train run.mode=train`: {run_dir} was last started with run.mode=both")
        else:
            break
    config = replace(
        config,
        rollout=replace(
            config.rollout, max_prompt_tokens=config.rollout.max_prompt_tokens or run.rollout.max_prompt_tokens
        ),
        taskset=replace(config.taskset, date=config.taskset.date or run.taskset.date),
    )
    if found := differences(run, config):
        raise ConfigError(
            f"run.mode=explore: settings differ from the run in {run_dir}: {described(found)}; give this command "
            "the overrides of the trainer's"
        )
    check_settings(config, algorithms.get(config.algorithm.name), nodes)
    return config


def differences(run: Config, config: Config) -> list[Change]:
    """Return the settings of an explore program that differ from its run's but must match."""
    found = changes(to_dict(run), to_dict(config))
    return [c for c in found if is_in(c.setting, SHARED) or (c.trains() and not is_in(c.setting, OF_TRAINER))]


def is_closed(config: Config) -> bool:
    """Return True if the run has begun and its job is closed: all requested steps are done."""
    with _opened(config) as store:
        return store.journal.has_begun() and store.journal.job_state() == "closed"


def _steps(config: Config) -> int:
    """Return the number of finished steps: the trainer of a closed run may be about to make more."""
    with _opened(config) as store:
        return store.journal.last_step()


def _has_begun(config: Config) -> bool:
    path = sqlite_file(config.store.url)
    if path is not None and not (path.is_file() and path.stat().st_size):
        return False
    with _opened(config) as store:
        return store.journal.has_begun()


def _opened(config: Config) -> closing[Store]:
    return closing(Store(config.store.url, read_only=True, outage_s=config.store.outage_s))


def enter(config: Config, attempt: int) -> None:
    """Begin an attempt of this program in the store, which fences its earlier attempts."""
    store = Store(config.store.url, outage_s=config.store.outage_s, program=algorithms.job_of(config).program)
    store.begin_attempt(attempt)
    store.close()


def leave(config: Config, attempt: int) -> None:
    """Remove this program's engines from the registry, if the store is reachable."""
    program = algorithms.job_of(config).program
    with (
        suppress(JobError, FencedError, ConfigError),
        closing(Store(config.store.url, attempt=attempt, program=program)) as store,
    ):
        store.engines.register([])
