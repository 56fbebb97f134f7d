"""Entry of an explore program into a run that its trainer's program has begun, and its exit.

It makes nothing of a run: no rows, no model, no checkpoint, no tables' rows but its own.
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
"""Seconds between two looks for what is waited for."""
AGAIN_S = 60.0
"""Seconds between two lines about it."""
OF_TRAINER = ("trainer", "critic", "reference", "reward_model", "teachers", "buffer", "run", "cluster")
"""Settings that concern trainer ranks, or each program for itself: an explore program may have others."""
SHARED = ("rollout.tp", "rollout.pp", "rollout.expert_parallel", "parallel.backend", "store.url", "sync.method")
"""Settings on which trainer and engines must agree, of those that change no training."""


class Waiting:
    """Lines about something that is waited for: the first at once, then one a minute."""

    def __init__(self) -> None:
        self._said: float | None = None

    def pause(self, what: str) -> None:
        """Log ``what`` where a line is due, and sleep for a moment. Raises KeyboardInterrupt after a signal."""
        now = time.monotonic()
        if self._said is None or now - self._said >= AGAIN_S:
            self._said = now
            log.info("waiting for %s", what)
        INTERRUPT.check()
        time.sleep(LOOK_S)


def await_run(config: Config, nodes: int) -> Config | None:
    """Wait, however long, until a trainer's program has begun the run; return the settings with what the run has taken
    from its rows. None where the run is finished.

    Raises:
        ConfigError: settings differ from the run's that must not, or do not fit this machine.
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
            f"run.mode=explore: settings are not those of the run in {run_dir}: {described(found)}; give this command "
            "the overrides of the trainer's"
        )
    check_settings(config, algorithms.get(config.algorithm.name), nodes)
    return config


def differences(run: Config, config: Config) -> list[Change]:
    """Settings of an explore program that its run has otherwise, and that must be alike."""
    found = changes(to_dict(run), to_dict(config))
    return [c for c in found if is_in(c.setting, SHARED) or (c.trains() and not is_in(c.setting, OF_TRAINER))]


def is_closed(config: Config) -> bool:
    """Return True if the run has been finished, as far as it was asked for."""
    with _opened(config) as store:
        return store.journal.has_begun() and store.journal.job_state() == "closed"


def _steps(config: Config) -> int:
    """Steps that the run has made: a trainer that is to make more may not have said so yet."""
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
    """Take the store for an attempt of this program: it ends the right to write of this program's earlier ones."""
    store = Store(config.store.url, outage_s=config.store.outage_s, program=algorithms.job_of(config).program)
    store.begin_attempt(attempt)
    store.close()


def leave(config: Config, attempt: int) -> None:
    """Take this program's engines out of the registry, as far as the store is there."""
    program = algorithms.job_of(config).program
    with (
        suppress(JobError, FencedError, ConfigError),
        closing(Store(config.store.url, attempt=attempt, program=program)) as store,
    ):
        store.engines.register([])
