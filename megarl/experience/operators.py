"""Raw -> verified: validity, verdicts, completeness, then the statistics of whole groups. Pure functions.

Shape legend: P prompt tokens, R response tokens.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megarl.algorithms import group_stats
from megarl.config.schema import RewardConfig
from megarl.schema import Experience

MESSAGES = 5
DROPPED_STATUSES = ("error", "timeout")


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of a rollout's groups. A group is dropped whole: the others' statistics stay what they are."""

    groups: int
    dropped: dict[str, int]
    """Reason -> number of groups."""
    statuses: dict[str, int]
    """Verdict status -> number of samples, before anything is dropped."""
    messages: tuple[str, ...]
    """What went wrong: the first few different texts, each with its first group and how many groups more it befell."""

    @property
    def kept(self) -> int:
        return self.groups - sum(self.dropped.values())


class Verified(NamedTuple):
    experiences: list[Experience]
    """Whole groups, each experience with its group's statistics, in the order given."""
    report: Report


def verify(experiences: Sequence[Experience], config: RewardConfig, *, vocab_size: int) -> Verified:
    """Check every group, settle missing verdicts by ``reward.on_error``, and attach the group statistics.

    A group with an invalid experience, a missing member or (``drop``) a missing verdict is left out and counted.
    """
    dropped: Counter[str] = Counter()
    faults: dict[str, list[str]] = {}
    kept: list[Experience] = []
    groups = by_group(experiences)
    for group in groups:
        fault = _group_fault(group, config, vocab_size)
        if fault is None:
            kept += with_stats([_settled(experience) for experience in group])
        else:
            dropped[fault.reason] += 1
            faults.setdefault(fault.message, []).append(fault.where)
    statuses: Counter[str] = Counter(experience.reward.status for experience in experiences)
    messages = tuple(_counted(message, where) for message, where in list(faults.items())[:MESSAGES])
    return Verified(kept, Report(len(groups), dict(dropped), dict(statuses), messages))


def by_group(experiences: Sequence[Experience]) -> list[list[Experience]]:
    """Experiences by group id, groups in the order of their first member."""
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(experience.group_id, []).append(experience)
    return list(groups.values())


def with_stats(group: Sequence[Experience]) -> list[Experience]:
    """The members of one whole group, each with the statistics of the group's scores."""
    stats = group_stats([experience.reward.score for experience in group])
    return [dataclasses.replace(experience, group_stats=stats) for experience in group]


def shuffle_rewards(experiences: Sequence[Experience], seed: int) -> list[Experience]:
    """A control experiment: all rewards of a rollout permuted, so that they tell nothing about the responses.

    Group statistics are those of the permuted rewards. Groups come back in the order of their first member.
    """
    order = np.random.default_rng(seed).permutation(len(experiences))
    pairs = zip(experiences, order, strict=True)
    shuffled = [dataclasses.replace(experience, reward=experiences[i].reward) for experience, i in pairs]
    return [experience for group in by_group(shuffled) for experience in with_stats(group)]


def check_experience(experience: Experience, vocab_size: int) -> str | None:
    """Why an experience cannot be trained on, or None. Lengths [R] agree, values are finite, ids within the vocabulary,
    and the segments tile the response."""
    response, mask, logp = experience.response_ids, experience.response_mask, experience.engine_logp
    if not len(response) == len(mask) == len(logp):
        return f"response_ids, response_mask and engine_logp have lengths {len(response)}, {len(mask)}, {len(logp)}"
    if len(experience.prompt_ids) == 0 or len(response) == 0:
        return f"prompt has {len(experience.prompt_ids)} tokens and response {len(response)}; neither may be empty"
    for name, ids in (("prompt_ids", experience.prompt_ids), ("response_ids", response)):
        if ids.min() < 0 or ids.max() >= vocab_size:
            return f"{name} has ids {ids.min()}..{ids.max()}, the vocabulary has {vocab_size}"
    if not np.isfinite(logp).all() or logp.max() > 1e-3:
        token = int(np.argmax(~np.isfinite(logp) | (logp > 1e-3)))
        return f"engine_logp {logp[token]} at token {token} is not a log-probability"
    end = 0
    for segment in experience.segments:
        if segment.start != end or segment.end <= segment.start:
            return f"segment {segment.start}..{segment.end} does not follow on token {end}"
        end = segment.end
    return None if end == len(response) else f"segments cover {end} of {len(response)} response tokens"


class _Fault(NamedTuple):
    reason: str
    where: str
    message: str


def _counted(message: str, where: Sequence[str]) -> str:
    return f"{where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''}: {message}"


def _group_fault(group: Sequence[Experience], config: RewardConfig, vocab_size: int) -> _Fault | None:
    first = group[0]
    indices = sorted(experience.index for experience in group)
    if indices != list(range(first.group_size)) or any(not _same_group(first, experience) for experience in group):
        return _Fault("incomplete", f"group {first.group_id}", f"its size is {first.group_size}, its members are {indices}")
    for experience in group:
        reason = check_experience(experience, vocab_size)
        if reason is not None:
            return _Fault("invalid", f"group {first.group_id}[{experience.index}]", reason)
    for experience in group:
        status = experience.reward.status
        if status in DROPPED_STATUSES and config.on_error == "drop":
            return _Fault(f"reward_{status}", f"group {first.group_id}[{experience.index}]", _why(experience.metadata))
    return None


def _same_group(first: Experience, other: Experience) -> bool:
    return (
        other.group_size == first.group_size
        and other.task_id == first.task_id
        and np.array_equal(other.prompt_ids, first.prompt_ids)
    )


def _settled(experience: Experience) -> Experience:
    """Under ``on_error=zero``: the score becomes 0, the status keeps saying why."""
    if experience.reward.status not in DROPPED_STATUSES:
        return experience
    return dataclasses.replace(experience, reward=dataclasses.replace(experience.reward, score=0.0))


def _why(metadata: dict[str, Any]) -> str:
    return str(metadata.get("reward_message", "no verdict"))
