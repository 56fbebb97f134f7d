"""The parts of a job's group service: each row has the condition on the settings, and the class, in hook order."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config import Config
from megarl.learn.algorithms import Algorithm
from megarl.train.rollout.group_part import GroupPart, GroupServices, made
from megarl.train.rollout.group_parts.dynamic import DynamicSampling
from megarl.train.rollout.group_parts.greedy import GreedyBaseline
from megarl.train.rollout.group_parts.late import OverdueRewards
from megarl.train.rollout.group_parts.partial import BudgetAhead
from megarl.train.rollout.group_parts.replay import ReplayedGroups
from megarl.train.rollout.group_parts.sampler import RecordedRouting, SpareAnswers
from megarl.train.rollout.group_parts.shuffle import ShuffledRewards
from megarl.train.rollout.group_parts.taught import TaughtGroups

GROUP_PARTS: tuple[tuple[Callable[[Config, Algorithm], bool], type[GroupPart]], ...] = (
    (lambda c, a: "greedy" in a.needs, GreedyBaseline),
    (lambda c, a: bool(c.teachers), TaughtGroups),
    (lambda c, a: c.rollout.spare > 0, SpareAnswers),
    (lambda c, a: c.rollout.routing_replay, RecordedRouting),
    (lambda c, a: c.rollout.is_partial, BudgetAhead),
    (lambda c, a: c.reward.late_steps is not None, OverdueRewards),
    (lambda c, a: c.buffer.replay.share > 0, ReplayedGroups),
    (lambda c, a: c.algorithm.dynamic_sampling, DynamicSampling),
    (lambda c, a: c.reward.shuffle, ShuffledRewards),
)


def group_parts_of(services: GroupServices, algorithm: Algorithm) -> list[GroupPart]:
    """Make the parts that the settings select, each with the services that its constructor names."""
    return [made(part, services) for wanted, part in GROUP_PARTS if wanted(services.config, algorithm)]
