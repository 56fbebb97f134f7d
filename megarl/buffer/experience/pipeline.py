"""Rewards of a rollout, from verdicts of single answers to group statistics; metrics of a step's rewards.

Pure functions.

Stages, in this order:

1. a verifier's verdict and the weights of form, repetition and language (``rewards.verdict.weighed``, as each answer
  ends);
2. ``verify``: groups checked, missing verdicts settled, operators applied, length rewards added; groups kept or
  dropped, and members excluded, with a reason;
3. ``split_by_accuracy``: dynamic sampling;
4. ``shuffle_rewards``: a control experiment;
5. ``add_model_scores``: the reward model;
6. ``with_group_stats``.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megarl.buffer.experience.operators import LARGEST_SCORE, Operated, check_trajectory, group_stats, is_zero_variance
from megarl.config.rewards import LengthConfig, RewardConfig
from megarl.core.errors import first_of
from megarl.core.metrics import spread
from megarl.core.schema import Outcome, Trajectory
from megarl.rewards.verdict import FAILURES, NO_VERDICT, k15_length_rewards, overlong_penalty, with_parts

T = TypeVar("T", Trajectory, Outcome)
MESSAGES = 5


@dataclasses.dataclass(frozen=True)
class Report:
    """Counts of a rollout's kept and dropped groups. Groups are dropped whole, so other groups' statistics do not
    change."""

    groups: int
    dropped: dict[str, int]
    """Reason -> number of groups."""
    ends: dict[str, int]
    """``End`` -> number of trajectories, before groups are dropped; greedy answers excluded."""
    messages: tuple[str, ...]
    """First few distinct reasons, each with its first group and the number of further groups."""
    excluded: dict[str, int] = dataclasses.field(default_factory=dict)
    """Reason -> number of members excluded from kept groups."""

    @property
    def kept(self) -> int:
        """Number of kept groups."""
        return self.groups - sum(self.dropped.values())

    def __add__(self, other: Report) -> Report:
        """Add the counts of two rollouts."""
        return Report(
            self.groups + other.groups,
            dict(Counter(self.dropped) + Counter(other.dropped)),
            dict(Counter(self.ends) + Counter(other.ends)),
            (*self.messages, *other.messages)[:MESSAGES],
            dict(Counter(self.excluded) + Counter(other.excluded)),
        )


class Verified(NamedTuple):
    trajectories: list[Trajectory]
    """Kept groups, in the given order, without excluded members."""
    report: Report
    dropped: dict[str, str]
    """Id of a dropped group -> reason."""
    excluded: dict[tuple[str, int], str]
    """(group id, index) of an excluded member of a kept group -> reason."""


def _untouched(group: Sequence[Trajectory]) -> Operated:
    return Operated(list(group), {})


def verify(
    trajectories: Sequence[Trajectory],
    config: RewardConfig,
    *,
    vocab_size: int,
    max_response_tokens: int | None = None,
    lacks: Callable[[Sequence[Trajectory]], str | None] = lambda group: None,
    step: int = 0,
    operate: Callable[[Sequence[Trajectory]], Operated] = _untouched,
    min_members: int = 1,
) -> Verified:
    """Check every group, settle missing verdicts by ``reward.on_error``, apply operators and shape the scores.

    A group with an invalid trajectory, a missing member or (``drop``) a missing verdict is dropped and counted. Under
    ``mask`` only the member without a verdict is excluded. A greedy answer is checked, settled and shaped like a
    member, but skips operators.

    Args:
        operate: ``Operators.apply``.
        min_members: Fewest members that a group with excluded members needs to be kept.
        max_response_tokens: ``rollout.max_response_tokens``, only for ``reward.overlong_buffer``.
        lacks: Returns what a group lacks to be whole, besides members, or None.
        step: Counted from 0, only for ``reward.length.warmup_steps``.
    """
    dropped: dict[str, str] = {}
    faults: dict[str, list[str]] = {}
    kept: list[Trajectory] = []
    excluded: dict[tuple[str, int], str] = {}
    groups = by_group(trajectories)
    for group in groups:
        group_id = group[0].group_id
        fault = _group_fault(group, config, vocab_size, lacks)
        if fault is None:
            masked = {e.index: e.end.value for e in group if config.on_error == "mask" and _lacks_verdict(e)}
            members, reasons = operate([_settled(e, config) for e in group if e.index not in masked])
            reasons = masked | reasons
            fault = _too_few(group_id, members, reasons, min_members)
        if fault is None:
            rated = [shaped(e, config, max_response_tokens) for e in members]
            kept += length_rewarded(rated, config.length, step)
            excluded |= {(group_id, index): reason for index, reason in reasons.items()}
        else:
            dropped[group_id] = fault.reason
            faults.setdefault(fault.message, []).append(fault.where)
    ends: Counter[str] = Counter(trajectory.end.value for trajectory in trajectories)
    messages = tuple(_counted(message, where) for message, where in list(faults.items())[:MESSAGES])
    counts = dict(Counter(excluded.values()))
    report = Report(len(groups), dict(Counter(dropped.values())), dict(ends), messages, counts)
    return Verified(kept, report, dropped, excluded)


def by_group(trajectories: Sequence[T]) -> list[list[T]]:
    """Return trajectories, or their outcomes, by group; groups in the order of their first member."""
    groups: dict[str, list[T]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return list(groups.values())


def shaped(trajectory: Trajectory, config: RewardConfig, max_response_tokens: int | None) -> Trajectory:
    """Add DAPO's length penalty to a trajectory's score, and as part ``overlong``; the status stays.

    The length is the last model turn's, because the limit applies to each response. A trajectory without a verdict
    keeps the 0 of ``on_error=zero``.
    """
    if config.overlong_buffer is None:
        return trajectory
    assert max_response_tokens is not None, "reward.overlong_buffer counts back from rollout.max_response_tokens"
    length = len(trajectory.response)
    penalty = overlong_penalty(length, max_response_tokens, config.overlong_buffer, config.overlong_penalty)
    greedy = None if trajectory.greedy is None else shaped(trajectory.greedy, config, max_response_tokens)
    return dataclasses.replace(_with_part(trajectory, "overlong", penalty, 1.0), greedy=greedy)


def length_rewarded(group: Sequence[Trajectory], config: LengthConfig, step: int) -> list[Trajectory]:
    """Add k1.5's reward for being short among the members of one whole group, as part ``length``; from ``warmup_steps``
    on. Greedy answers and trajectories without a verdict are unchanged and not compared."""
    if not config.weight or step < config.warmup_steps:
        return list(group)
    judged = [e for e in group if not _lacks_verdict(e)]
    rewards = iter(k15_length_rewards([e.response_length for e in judged], [e.reward.status == "ok" for e in judged]))
    return [e if _lacks_verdict(e) else _with_part(e, "length", next(rewards), config.weight) for e in group]


def _with_part(trajectory: Trajectory, name: str, value: float, weight: float) -> Trajectory:
    reward = trajectory.reward
    if reward.status in NO_VERDICT:
        return trajectory
    parts = with_parts(reward.parts, {name: value})
    reward = dataclasses.replace(reward, score=reward.score + weight * value, parts=parts)
    return dataclasses.replace(trajectory, reward=reward)


def split_by_accuracy(groups: Sequence[list[Trajectory]]) -> tuple[list[list[Trajectory]], dict[str, str]]:
    """Return the groups with both right and wrong answers, and the other groups' id -> ``all_right`` or ``all_wrong``.

    Used by dynamic sampling. Verdict statuses decide, because shaping varies scores too.
    """
    kept: list[list[Trajectory]] = []
    left_out: dict[str, str] = {}
    for group in groups:
        if is_zero_variance([trajectory.reward.status for trajectory in group]):
            left_out[group[0].group_id] = "all_right" if group[0].reward.status == "ok" else "all_wrong"
        else:
            kept.append(group)
    return kept, left_out


def shuffle_rewards(trajectories: Sequence[Trajectory], seed: int) -> list[Trajectory]:
    """Permute all rewards of a rollout, as a control experiment: they become independent of the responses.

    Groups are returned in the order of their first member.
    """
    order = np.random.default_rng(seed).permutation(len(trajectories))
    pairs = zip(trajectories, order, strict=True)
    shuffled = [dataclasses.replace(trajectory, reward=trajectories[i].reward) for trajectory, i in pairs]
    return [trajectory for group in by_group(shuffled) for trajectory in group]


def add_model_scores(trajectories: Sequence[Trajectory], scores: Sequence[float], coef: float) -> list[Trajectory]:
    """Add ``coef`` times a reward model's score to each reward, and the unscaled score as part ``model``."""
    return [
        dataclasses.replace(
            e,
            reward=dataclasses.replace(
                e.reward, score=e.reward.score + coef * score, parts=with_parts(e.reward.parts, {"model": score})
            ),
        )
        for e, score in zip(trajectories, scores, strict=True)
    ]


def with_group_stats(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Attach to each trajectory the statistics of its group's scores. Groups are returned in the order of their first
    member."""
    return [
        dataclasses.replace(trajectory, group_stats=stats)
        for group in by_group(trajectories)
        for stats in [group_stats([trajectory.reward.score for trajectory in group])]
        for trajectory in group
    ]


class _Fault(NamedTuple):
    reason: str
    where: str
    message: str


def _lacks_verdict(trajectory: Trajectory) -> bool:
    return trajectory.reward.status in NO_VERDICT


def _too_few(group_id: str, members: Sequence[Trajectory], reasons: dict[int, str], min_members: int) -> _Fault | None:
    """Return the fault of a group with too few members left, with the most frequent reason of exclusion; else None."""
    if not reasons or len(members) >= min_members:
        return None
    [(reason, _)] = Counter(reasons[index] for index in sorted(reasons)).most_common(1)
    found = ", ".join(f"{name} {number}" for name, number in sorted(Counter(reasons.values()).items()))
    message = f"fewer than buffer.min_members={min_members} members are left; excluded: {found}"
    return _Fault(reason, f"group {group_id}", message)


def _counted(message: str, where: Sequence[str]) -> str:
    return f"{first_of(where, 1)}: {message}"


def _group_fault(
    group: Sequence[Trajectory],
    config: RewardConfig,
    vocab_size: int,
    lacks: Callable[[Sequence[Trajectory]], str | None],
) -> _Fault | None:
    first = group[0]
    indices = sorted(trajectory.index for trajectory in group)
    is_whole = len(set(indices)) == len(group) == first.group_size
    if not is_whole or any(not _same_group(first, trajectory) for trajectory in group):
        return _Fault(
            "incomplete", f"group {first.group_id}", f"its size is {first.group_size}, its members are {indices}"
        )
    baseline = first.greedy
    if (missing := lacks(group)) is not None:
        return _Fault("incomplete", f"group {first.group_id}", missing)
    answers = [(str(trajectory.index), trajectory) for trajectory in group]
    answers += [("greedy", baseline)] if baseline is not None else []
    for name, trajectory in answers:
        if config.on_error == "mask" and name != "greedy" and _lacks_verdict(trajectory):
            continue
        if lacks_reward(trajectory, config):
            return _Fault(trajectory.end.value, f"group {first.group_id}[{name}]", _why(trajectory.metadata))
        reason = check_trajectory(trajectory, vocab_size) or _check_score(trajectory)
        if reason is not None:
            return _Fault("invalid", f"group {first.group_id}[{name}]", reason)
    return None


def lacks_reward(trajectory: Trajectory, config: RewardConfig) -> bool:
    """Return True for a trajectory without a verdict that ``reward.on_error`` does not settle: it is not trained on;
    under ``drop`` its group is not either."""
    settled = trajectory.end.by_reward and config.on_error == "zero"
    return trajectory.reward.status in NO_VERDICT and not settled


def _same_group(first: Trajectory, other: Trajectory) -> bool:
    """Return True for members of one group. First turns may differ, because agents write their prompts."""
    return other.group_size == first.group_size and other.task_id == first.task_id


def _settled(trajectory: Trajectory, config: RewardConfig) -> Trajectory:
    """Set a missing score to 0 under ``on_error=zero``; the status stays."""
    if trajectory.greedy is not None:
        trajectory = dataclasses.replace(trajectory, greedy=_settled(trajectory.greedy, config))
    if not _lacks_verdict(trajectory):
        return trajectory
    assert config.on_error == "zero", f"a missing verdict is dropped under reward.on_error={config.on_error}"
    return dataclasses.replace(trajectory, reward=dataclasses.replace(trajectory.reward, score=0.0))


def _check_score(trajectory: Trajectory) -> str | None:
    """Return the fault of a score that is not finite or would overflow its group's advantages; else None."""
    score = trajectory.reward.score
    if _lacks_verdict(trajectory) or abs(score) <= LARGEST_SCORE:
        return None
    return f"its reward is {score}" + (f", beyond ±{LARGEST_SCORE:g}" if math.isfinite(score) else "")


def _why(metadata: dict[str, Any]) -> str:
    return str(metadata.get("reward_message", "no verdict"))


def part_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return ``reward/parts/<part>``: the unweighted mean of each part over the answers with it."""
    parts: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.reward.parts.items():
            parts[name].append(value)
    return {f"reward/parts/{name}": sum(values) / len(values) for name, values in sorted(parts.items())}


def verifier_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics of each verifier over all answers it judged, dropped ones included: ``reward/<verifier>/`` +
    ``answers``, ``error``, ``timeout``, ``retries``, ``kills`` (numbers), ``seconds/…`` in the verifier and
    ``waited_s/…`` for a free worker (mean, max, min)."""
    metrics: dict[str, float] = {}
    answers: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        for answer in (trajectory, trajectory.greedy):
            if answer is not None and "reward" in answer.metadata:
                answers[answer.metadata["reward"]["verifier"] or "none"].append(answer)
    for verifier, found in sorted(answers.items()):
        records, at = [answer.metadata["reward"] for answer in found], f"reward/{verifier}"
        metrics[f"{at}/answers"] = float(len(found))
        for status in FAILURES:
            metrics[f"{at}/{status}"] = float(sum(answer.reward.status == status for answer in found))
        metrics[f"{at}/retries"] = float(sum(max(0, record["tries"] - 1) for record in records))
        metrics[f"{at}/kills"] = float(sum(record["kills"] for record in records))
        for name in ("seconds", "waited_s"):
            metrics |= spread(f"{at}/{name}", [record[name] for record in records])
    return metrics
