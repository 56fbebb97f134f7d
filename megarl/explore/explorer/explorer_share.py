"""One explorer's share of the limits of all explorers of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megarl.config import Config
from megarl.core.errors import ConfigError
from megarl.rewards.pool.process import addresses


def check_explorers(config: Config) -> None:
    """Raise ConfigError if an explorer would have no group or no reward worker."""
    number, workers = config.rollout.explorers, config.reward.workers
    if number > workers:
        raise ConfigError(
            f"rollout.explorers={number}: each needs a separate reward worker, but reward.workers={workers}; raise "
            "that, or have fewer explorers"
        )
    if number > config.rollout.concurrent_groups:
        raise ConfigError(
            f"rollout.explorers={number} share rollout.concurrent_groups={config.rollout.concurrent_groups}; raise "
            "that, or have fewer explorers"
        )


def share_of(config: Config, hosts: Sequence[str], number: int) -> Config:
    """Return the settings of explorer ``number``: its part of groups in flight, reward workers, and requests to judge
    and teachers.

    Args:
        hosts: Reward hosts of the job's other nodes, in addition to ``reward.hosts``.
    """
    reward, explorers = config.reward, config.rollout.explorers

    def part(whole: int) -> int:
        return max(1, len(range(number, whole, explorers)))

    judge = replace(reward.judge, concurrency=part(reward.judge.concurrency))
    own = replace(
        reward,
        workers=part(reward.workers),
        hosts=addresses([*reward.hosts, *hosts])[number::explorers],
        backlog=part(reward.backlog),
        judge=judge,
    )
    groups = part(config.rollout.concurrent_groups)
    teachers = {name: replace(each, concurrency=part(each.concurrency)) for name, each in config.teachers.items()}
    rollout = replace(config.rollout, concurrent_groups=groups)
    return replace(config, reward=own, rollout=rollout, teachers=teachers)
