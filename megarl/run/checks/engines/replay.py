"""Checks of ``buffer.replay``."""

from __future__ import annotations

import logging

from megarl.config import Config
from megarl.core.errors import ConfigError
from megarl.core.jobs import Job

log = logging.getLogger(__name__)


def check_replay(config: Config, job: Job) -> None:
    """Raise ConfigError if no step, or none with its whole share, could replay groups; warn without a correction."""
    replay, tasks = config.buffer.replay, config.trainer.tasks_per_step
    if not replay.share:
        return
    setting = f"buffer.replay.share={replay.share:g}"
    if not job.rollouts:
        raise ConfigError(f"{setting} in an offline job, which has no rollouts; leave it out")
    count = replay.num_groups(tasks)
    if not count:
        raise ConfigError(
            f"{setting} is less than one of trainer.tasks_per_step={tasks} groups; set it to {1 / tasks:g} or more, or "
            "to 0"
        )
    if replay.min_accuracy > replay.max_accuracy:
        raise ConfigError(
            f"buffer.replay.min_accuracy={replay.min_accuracy:g} is above "
            f"buffer.replay.max_accuracy={replay.max_accuracy:g}, so no group is between them; exchange them"
        )
    if replay.hardness and replay.min_accuracy == 1:
        raise ConfigError(
            f"buffer.replay.hardness={replay.hardness:g} never replays groups that are all right, and "
            "buffer.replay.min_accuracy=1 no others; set one of them to 0"
        )
    first = 1 + config.sync.max_staleness
    if replay.max_age < first:
        raise ConfigError(
            f"buffer.replay.max_age={replay.max_age}: with sync.max_staleness={config.sync.max_staleness} a group is "
            f"replayed after {first} steps at the earliest; set it to {first} or more"
        )
    again = min(replay.uses - 1, replay.max_age - first + 1)
    if count > (most := (tasks - count) * again):
        needed = -(-count // (tasks - count))
        raise ConfigError(
            f"{setting} replays {count} of trainer.tasks_per_step={tasks} groups, but the other {tasks - count} can be "
            f"replayed {most} times in all (buffer.replay.uses={replay.uses}, buffer.replay.max_age={replay.max_age}); "
            f"set uses to {needed + 1} or more and max_age to {needed + first - 1} or more, or lower the share"
        )
    if config.algorithm.correction == "none":
        log.warning(
            "%s without algorithm.correction: earlier weights have sampled the replayed tokens, and the loss takes "
            "them for those of the step; set algorithm.correction=truncate (docs/algorithms.md)",
            setting,
        )
