"""``megarl data awaiting`` and ``megarl data reward``: rewards that are given later."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from megarl.config import Config, load_resolved
from megarl.core.errors import ConfigError
from megarl.run.job_store import store_of_run
from megarl.run.run_dir.late import read_rewards, write_awaiting
from megarl.tasks import ChatTokenizer

log = logging.getLogger(__name__)


def write_awaiting_rows(config: Config, target: str) -> None:
    """Write trajectories of a run that await rewards to a jsonl file."""
    config = _of_run(config)
    with store_of_run(config.store.url, Path(config.run.dir), read_only=True) as store:
        count = write_awaiting(store, ChatTokenizer.of(config), Path(target))
    log.info("%s: %d responses await a reward", target, count)


def give_rewards(config: Config, sources: Sequence[str]) -> None:
    """Write the rewards of files into a run's store, in one transaction.

    Raises:
        ConfigError, DataError: with file and row; then nothing is written.
    """
    config = _of_run(config)
    given = read_rewards([Path(source) for source in sources], config)
    with store_of_run(config.store.url, Path(config.run.dir)) as store:
        done = store.late.give(given)
    log.info("%d rewards written, %d groups are ready with them", done.written, done.ready)
    if done.left_out:
        group, index = done.left_out[0]
        log.warning(
            "%d rows left out, the first of %s[%d]: rewarded already, used by a step without, sampled again, or not "
            "in the store",
            len(done.left_out),
            group,
            index,
        )


def _of_run(config: Config) -> Config:
    """The settings that the run named by ``config`` was started with. Raises ConfigError where there is none."""
    resolved = Path(config.run.dir) / "resolved.json"
    if not resolved.is_file():
        raise ConfigError(f"run.dir={config.run.dir} has no run; name that whose responses await rewards (run.name)")
    return load_resolved(resolved)
