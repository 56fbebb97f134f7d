"""The groups of answers that a step trains with: asked for, awaited, read, verified and chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from megarl.core.errors import NonRetryableError
from megarl.core.schema import Trajectory, WeightsVersion
from megarl.explore.experience import (
    Report,
    Verified,
    by_group,
    part_metrics,
    shuffle_rewards,
    split_by_accuracy,
    verifier_metrics,
    verify,
)
from megarl.explore.experience.operators import Operators
from megarl.explore.order.choice import TaskChoice
from megarl.explore.order.draws import data_seed
from megarl.explore.order.pacing import Pacing
from megarl.explore.order.replay import ReplayChoice, Replayed, replay_metrics
from megarl.explore.store import Store, Used
from megarl.learn.algorithms import Algorithm
from megarl.train.rank.context import RunContext
from megarl.train.rank.reporter import Reporter
from megarl.train.rank.state import TrainState
from megarl.train.rollout.asking import (
    Asking,
    Awaited,
    GroupRequests,
    InAdmissionOrder,
    InCompletionOrder,
    Published,
    rollout_of,
)
from megarl.train.rollout.reading import RolloutReader
from megarl.train.update.accounts import NONE, Amount, Excluded, SampleAccount, sum_of


class Wait(Protocol):
    """``RolloutWaiter.wait``."""

    def __call__(self, look: Callable[[], Awaited], label: str, *, weights_step: int) -> bool: ...


SURPLUS = "surplus"
"""Reason to drop a group that dynamic sampling found beyond ``trainer.tasks_per_step``."""


@dataclass(frozen=True)
class StepGroups:
    """Groups that a step trains with, the same on every rank."""

    trajectories: list[Trajectory]
    """Whole groups; their statistics come with the reward model's scores."""
    rollout_ids: tuple[str, ...]
    """Rollouts that the groups were asked for in."""
    used: Used
    """All groups of these rollouts: consumed, or dropped with a reason."""
    report: Report
    """Counts of the groups of all these rollouts, dynamic sampling aside."""
    metrics: dict[str, float]
    account: SampleAccount
    lags: dict[WeightsVersion, int] | None = None
    """Lag of each version that has sampled some token of them; None where nothing is sampled ahead or replayed."""


@dataclass
class _Found:
    """Groups of a step so far."""

    groups: list[list[Trajectory]] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    raw: list[Trajectory] = field(default_factory=list)
    report: Report = field(default_factory=lambda: Report(0, {}, {}, ()))
    measured: list[dict[str, float]] = field(default_factory=list)
    replayed: list[Replayed] = field(default_factory=list)
    again: list[list[Trajectory]] = field(default_factory=list)
    """Groups of earlier steps, by ``replayed``."""
    again_dropped: dict[str, str] = field(default_factory=dict)
    members: dict[str, dict[int, Amount]] = field(default_factory=dict)
    """Group id -> index of a member -> what was sampled for it, of every group that was read."""
    excluded: dict[tuple[str, int], str] = field(default_factory=dict)
    """(group id, index) of members that kept groups are trained without -> reason."""
    greedy: Amount = NONE
    """Greedy answers of these groups."""

    def count(self, trajectories: Sequence[Trajectory], verified: Verified) -> None:
        """Count what was sampled for whole groups, as they were read, and who of them is left out."""
        for group in by_group(trajectories):
            self.members[group[0].group_id] = {e.index: Amount(1, e.response_length) for e in group}
            if (greedy := group[0].greedy) is not None:
                self.greedy += Amount(1, greedy.response_length)
        self.excluded |= verified.excluded

    def account(self, wanted: int) -> SampleAccount:
        """Account for all that was sampled: why some of it is not trained."""
        excluded = Excluded()
        excluded.add("greedy", self.greedy)
        dropped = {**self.used(wanted).dropped, **self.again_dropped}
        for group_id, reason in dropped.items():
            excluded.add(reason, sum_of(self.members[group_id].values()))
        for (group_id, index), reason in self.excluded.items():
            if group_id not in dropped:
                excluded.add(reason, self.members[group_id][index])
        sampled = sum_of(amount for group in self.members.values() for amount in group.values())
        return SampleAccount(sampled + self.greedy, excluded)

    def ids(self) -> set[str]:
        return {trajectory.group_id for trajectory in self.raw}

    def used(self, wanted: int) -> Used:
        ids = [group[0].group_id for group in self.groups]
        dropped = self.dropped | dict.fromkeys(ids[wanted:], SURPLUS)
        again = tuple(group.group_id for group in self.replayed)
        trained = {*ids[:wanted], *again}
        excluded = {member: reason for member, reason in self.excluded.items() if member[0] in trained}
        return Used(tuple(ids[:wanted]), dropped, again, excluded)

    def trained(self, wanted: int) -> list[Trajectory]:
        """Trajectories of the step: replayed groups are spread evenly among those that were sampled for it, so that
        each of its updates has some."""
        kinds = (self.groups[:wanted], self.again)
        placed = [((2 * i + 1) / len(groups), group) for groups in kinds for i, group in enumerate(groups)]
        return [trajectory for _, group in sorted(placed, key=lambda place: place[0]) for trajectory in group]


class Rollouts:
    """Training groups of a step. Every rank makes the same calls; rank 0 asks for groups and chooses them."""

    def __init__(
        self,
        context: RunContext,
        algorithm: Algorithm,
        store: Store,
        reporter: Reporter,
        reader: RolloutReader,
        wait: Wait,
    ) -> None:
        self._context = context
        self._algorithm = algorithm
        self._store = store
        self._reporter = reporter
        self._reader = reader
        self._wait = wait
        self._pacing = Pacing.of(context.config.sync)
        self._operators = Operators(context.config)
        self._choice = TaskChoice(context.config, store)
        self._replay = ReplayChoice(context.config, store)
        self._requests = GroupRequests(context, algorithm, store, self._choice)
        self._asking: Asking = InAdmissionOrder(self._requests, self._replay)
        if context.config.sync.order == "completion":
            self._asking = InCompletionOrder(self._requests)

    def drain(self, state: TrainState, *, weights_step: int) -> None:
        """Wait until the groups that were asked for ahead are ready, in step ``state.step``; not in completion order.

        A checkpoint then finds them in the store, and weights change when no engine samples. Of partial rollouts those
        of later steps are there as far as their budget goes. Ends early when the job is asked to stop.

        Args:
            weights_step: Steps of training in the actor's weights.
        """
        if self._context.config.sync.order == "completion":
            return
        for step in range(state.step + 1, min(self._pacing.asked(state.step), self._context.config.trainer.steps)):
            with self._reporter.timeline.phase("rollout", step=state.step):
                look = partial(self._requests.look_ahead, step, state.step)
                if not self._wait(look, f"rollout {step + 1}, ahead", weights_step=weights_step):
                    return

    def groups(self, state: TrainState, published: Published, vocab_size: int) -> StepGroups | None:
        """Wait for this step's groups, take and verify them; None when the job is asked to stop.

        With ``algorithm.dynamic_sampling`` groups that are all right or all wrong are left out, and further rollouts of
        other tasks are asked for, at most ``algorithm.max_extra_rollouts``, until there are ``trainer.tasks_per_step``
        groups; of more, the first ones count. Groups that the step replays (``buffer.replay``) are among these.

        Args:
            published: The weights to sample with.

        Raises:
            NonRetryableError: dynamic sampling left no group at all.
        """
        config, step, timeline = self._context.config, state.step, self._reporter.timeline
        dynamic, wanted = config.algorithm.dynamic_sampling, config.trainer.tasks_per_step
        found, rounds, asking = _Found(), 0, self._asking
        missing = self._choice.per_step
        for extra in range(1 + config.algorithm.max_extra_rollouts if dynamic else 1):
            with timeline.phase("rollout", step=step):
                if self._context.rank == 0:
                    if extra:
                        self._requests.ask_more(state, published, extra, asking.further(missing))
                    else:
                        asking.ask(state, published)
                label = f"rollout {step + 1}" + (f", again ({len(found.groups)} of {wanted} groups)" if extra else "")
                look = partial(asking.look, step, extra, found.ids(), missing)
                if not self._wait(look, label, weights_step=step):
                    return None
                rounds += 1
            with timeline.phase("batch", step=step):
                if not extra:
                    if not self._take_again(found, state, vocab_size):
                        return None
                    wanted = asking.wanted(len(found.replayed))
                if not self._take(found, step, missing, vocab_size):
                    return None
            if (missing := wanted - len(found.groups)) <= 0:
                break
        ids = list(dict.fromkeys(trajectory.group_id for trajectory in found.raw))
        found.measured.append(self._reader.metrics(lambda: asking.rollouts(step, rounds, ids)))
        trajectories, measured = found.trained(wanted), found.measured
        metrics = {f"rollout/{name}": sum(m.get(name, 0.0) for m in measured) for m in measured for name in m}
        kept = float(min(len(found.groups), wanted))
        metrics |= {"rollout/extra": rounds - 1.0, "rollout/kept_groups": kept}
        if dynamic and not found.groups and not found.again and found.report.kept:
            raise NonRetryableError(
                f"algorithm.dynamic_sampling=true: none of the {found.report.kept} groups of {rounds} rollouts of "
                f"step {step + 1} is between all right ({metrics['rollout/all_right']:.0f}) and all wrong "
                f"({metrics['rollout/all_wrong']:.0f}); raise algorithm.max_extra_rollouts or algorithm.group_size, "
                "take other tasks, or set it to false"
            )
        metrics |= part_metrics(trajectories) | verifier_metrics(found.raw)
        if self._context.rank == 0:
            asked = {trajectory.group_id: trajectory.task_id for trajectory in found.raw}
            metrics |= self._choice.metrics(step, list(asked.values()))
        replays = config.buffer.replay.share > 0
        if replays:
            metrics |= replay_metrics(found.replayed, len(found.replayed) + int(kept))
        lags = self._lags(trajectories, step) if replays or config.sync.max_staleness else None
        if lags is not None:
            metrics |= staleness(trajectories, {group.group_id for group in found.replayed}, lags)
        if config.reward.shuffle:
            trajectories = shuffle_rewards(
                trajectories, seed=data_seed(config.trainer.seed, state.rollbacks) * 1_000_003 + step
            )
        rollout_ids = tuple(dict.fromkeys(map(rollout_of, ids)))
        used, account = found.used(wanted), found.account(wanted)
        return StepGroups(trajectories, rollout_ids, used, found.report, metrics, account, lags)

    def _lags(self, trajectories: Sequence[Trajectory], step: int) -> dict[WeightsVersion, int]:
        """Steps by which the versions that have sampled some token are behind those that the step starts from."""
        versions = {span.version for e in trajectories for turn in e.turns for span in turn.spans}
        steps = self._reader.version_steps(sorted(versions))
        return {version: step - steps[version] for version in versions}

    def _take(self, found: _Found, step: int, missing: int, vocab_size: int) -> bool:
        """Add the groups that are ready for the step; False when the job is asked to stop."""
        config = self._context.config
        answers = self._reader.take(lambda: self._asking.choose(step, found.ids(), missing))
        if answers is None:
            return False
        found.raw += answers
        verified = self._verified(answers, step, vocab_size)
        found.count(answers, verified)
        found.report += verified.report
        found.dropped |= verified.dropped
        groups = by_group(verified.trajectories)
        if config.algorithm.dynamic_sampling:
            groups, left_out = split_by_accuracy(groups)
            found.dropped |= left_out
            counts = Counter(left_out.values())
            found.measured.append({name: float(counts[name]) for name in ("all_right", "all_wrong")})
        found.groups += groups
        return True

    def _take_again(self, found: _Found, state: TrainState, vocab_size: int) -> bool:
        """Add the groups of earlier steps that this one replays; False when the job is asked to stop.

        They have been verified when they were first used; that is done again because lengths are rewarded there.
        """
        config = self._context.config
        if not config.buffer.replay.share:
            return True
        seed = data_seed(config.trainer.seed, state.rollbacks)
        read = self._reader.replayed(lambda: self._replay.groups(state.step, seed, state.step))
        if read is None:
            return False
        found.replayed = [replayed for replayed, _ in read]
        trajectories = [trajectory for _, group in read for trajectory in group]
        verified = self._verified(trajectories, state.step, vocab_size)
        found.count(trajectories, verified)
        found.again, found.again_dropped = by_group(verified.trajectories), verified.dropped
        # counted in their own step
        found.report += replace(verified.report, groups=0, dropped={}, ends={}, excluded={})
        return True

    def _verified(self, trajectories: Sequence[Trajectory], step: int, vocab_size: int) -> Verified:
        config = self._context.config
        return verify(
            trajectories,
            config.reward,
            vocab_size=vocab_size,
            max_response_tokens=config.rollout.max_response_tokens,
            greedy="greedy" in self._algorithm.needs,
            step=step,
            operate=self._operators.apply,
            min_members=config.buffer.min_members,
        )


def staleness(
    trajectories: Sequence[Trajectory], replayed: Collection[str], lags: Mapping[WeightsVersion, int]
) -> dict[str, float]:
    """Share of the trained tokens that earlier weights than the step's have sampled; mean and maximum of their lags in
    groups that are new."""
    new, all_tokens = Counter[int](), Counter[int]()
    for e in trajectories:
        for span in (span for turn in e.turns for span in turn.spans):
            lag, tokens = lags[span.version], span.end - span.start
            all_tokens[lag] += tokens
            new[lag] += tokens * (e.group_id not in replayed)
    metrics = {"rollout/stale_tokens": 1.0 - all_tokens[0] / max(all_tokens.total(), 1)}
    if new.total():
        mean = sum(lag * tokens for lag, tokens in new.items()) / new.total()
        metrics |= {"rollout/lag/mean": mean, "rollout/lag/max": float(max(lag for lag, n in new.items() if n))}
    return metrics
