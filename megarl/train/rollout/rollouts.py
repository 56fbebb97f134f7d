"""Training groups of a step: requested, awaited, read, verified and chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from megarl.buffer.experience import Report, Verified, by_group, part_metrics, verifier_metrics, verify
from megarl.buffer.experience.operators import Operators
from megarl.buffer.order.group_choice import TaskChoice
from megarl.buffer.order.pacing import Pacing
from megarl.buffer.order.replay import ReplayChoice
from megarl.buffer.store import Store, Used
from megarl.core.schema import Trajectory, WeightsVersion
from megarl.learn.algorithms import Algorithm
from megarl.train.batch.accounts import SampleAccount
from megarl.train.rank.ranks import Stopped
from megarl.train.rank.reporter import Reporter
from megarl.train.rank.state import RunContext, TrainState
from megarl.train.rollout.asking import Asking, GroupRequests, InAdmissionOrder, InCompletionOrder
from megarl.train.rollout.found import Awaited, FoundGroups, Published, rollout_of
from megarl.train.rollout.group_part import GroupServices
from megarl.train.rollout.group_parts import group_parts_of
from megarl.train.rollout.reading import RolloutReader


class Wait(Protocol):
    """``RolloutWaiter.wait``. Raises Stopped."""

    def __call__(self, look: Callable[[], Awaited], label: str, *, weights_step: int) -> None: ...


@dataclass(frozen=True)
class StepGroups:
    """Groups that a step trains on, the same on every rank."""

    trajectories: list[Trajectory]
    """Trajectories of whole groups; group statistics are computed later, with a reward model's scores."""
    rollout_ids: tuple[str, ...]
    """Rollouts in which the groups were requested."""
    used: Used
    """All groups of these rollouts: consumed, or dropped with a reason."""
    report: Report
    """Counts over all groups of these rollouts, before dynamic sampling."""
    metrics: dict[str, float]
    account: SampleAccount
    lags: dict[WeightsVersion, int] | None = None
    """Lag in steps of each version that sampled tokens; None if nothing is sampled ahead or replayed."""


class Rollouts:
    """Training groups of a step. Every rank makes the same calls; rank 0 requests and chooses groups."""

    def __init__(
        self,
        context: RunContext,
        algorithm: Algorithm,
        store: Store,
        reporter: Reporter,
        reader: RolloutReader,
        wait: Wait,
        vocab_size: int,
    ) -> None:
        self._context = context
        self._vocab_size = vocab_size
        self._store = store
        self._reporter = reporter
        self._reader = reader
        self._wait = wait
        self._pacing = Pacing.of(context.config.sync)
        self._operators = Operators(context.config)
        self._choice = TaskChoice(context.config, store)
        replay = ReplayChoice(context.config, store)
        self._parts = group_parts_of(GroupServices(context.config, store, reader, replay, self.verified), algorithm)
        self._requests = GroupRequests(context, store, self._choice, self._parts)
        self._asking: Asking = InAdmissionOrder(self._requests, replay)
        if context.config.sync.order == "completion":
            self._asking = InCompletionOrder(self._requests)

    def drain(self, state: TrainState, *, weights_step: int) -> None:
        """Wait in step ``state.step`` until the groups requested ahead are ready; do nothing in completion order.

        A checkpoint then finds them in the store, and no engine samples while weights change. Partial rollouts of later
        steps are ready when their budget is used up. Raises Stopped.

        Args:
            weights_step: Steps of training in the actor's weights.
        """
        if self._context.config.sync.order == "completion":
            return
        for step in range(state.step + 1, min(self._pacing.asked(state.step), self._context.config.trainer.steps)):
            with self._reporter.timeline.phase("rollout", step=state.step):
                look = partial(self._requests.look_ahead, step, state.step)
                self._wait(look, f"rollout {step + 1}, ahead", weights_step=weights_step)

    def groups(self, state: TrainState, published: Published) -> StepGroups:
        """Wait for this step's groups, take and verify them. Parts may drop some, request others, or add some.

        The first ``trainer.tasks_per_step`` groups count; the others are surplus.

        Args:
            published: Weights to sample with.

        Raises:
            NonRetryableError: no group is left.
            Stopped: the job is asked to stop.
        """
        config, step, timeline, parts = self._context.config, state.step, self._reporter.timeline, self._parts
        found, rounds, asking = FoundGroups(), 0, self._asking
        wanted, missing = config.trainer.tasks_per_step, self._choice.per_step
        for extra in range(max([1, *(part.rounds for part in parts)])):
            with timeline.phase("rollout", step=step):
                if self._context.rank == 0:
                    if extra:
                        self._requests.ask_more(state, published, extra, asking.further(missing))
                    else:
                        asking.ask(state, published)
                label = f"rollout {step + 1}" + (f", again ({len(found.groups)} of {wanted} groups)" if extra else "")
                look = partial(asking.look, step, extra, found.ids(), missing)
                self._wait(look, label, weights_step=step)
                rounds += 1
            with timeline.phase("batch", step=step):
                if not extra:
                    for part in parts:
                        part.begin(found, state)
                    wanted = asking.wanted(len(found.replayed))
                self._take(found, step, missing)
            if (missing := wanted - len(found.groups)) <= 0:
                break
        for part in parts:
            part.finish(found, state, rounds)
        ids = list(dict.fromkeys(trajectory.group_id for trajectory in found.raw))
        found.measured.append(self._reader.metrics(lambda: asking.rollouts(step, rounds, ids)))
        trajectories, measured = found.trained(wanted), found.measured
        metrics = {f"rollout/{name}": sum(m.get(name, 0.0) for m in measured) for m in measured for name in m}
        kept = min(len(found.groups), wanted)
        metrics |= {"rollout/extra": rounds - 1.0, "rollout/kept_groups": float(kept)}
        metrics |= part_metrics(trajectories) | verifier_metrics(found.raw)
        if self._context.rank == 0:
            asked = {trajectory.group_id: trajectory.task_id for trajectory in found.raw}
            metrics |= self._choice.metrics(step, list(asked.values()))
        for part in parts:
            metrics |= part.metrics(found, kept)
        mixed = config.sync.max_staleness or any(part.mixes_versions for part in parts)
        lags = self._lags(trajectories, step) if mixed else None
        if lags is not None:
            metrics |= staleness(trajectories, {group.group_id for group in found.replayed}, lags)
        for part in parts:
            trajectories = part.change(trajectories, state)
        rollout_ids = tuple(dict.fromkeys(map(rollout_of, ids)))
        used, account = found.used(wanted), found.account(wanted)
        return StepGroups(trajectories, rollout_ids, used, found.report, metrics, account, lags)

    def _lags(self, trajectories: Sequence[Trajectory], step: int) -> dict[WeightsVersion, int]:
        """Return version -> lag: training steps between that version and the step's starting weights."""
        versions = {span.version for e in trajectories for turn in e.turns for span in turn.spans}
        steps = self._reader.version_steps(sorted(versions))
        return {version: step - steps[version] for version in versions}

    def _take(self, found: FoundGroups, step: int, missing: int) -> None:
        """Take the ready groups of the step. Raises Stopped."""
        answers = self._reader.take(lambda: self._asking.choose(step, found.ids(), missing))
        if answers is None:
            raise Stopped
        found.raw += answers
        verified = self.verified(answers, step)
        found.count(answers, verified)
        found.report += verified.report
        found.dropped |= verified.dropped
        groups = by_group(verified.trajectories)
        for part in self._parts:
            groups = part.select(found, groups)
        found.groups += groups

    def verified(self, trajectories: Sequence[Trajectory], step: int) -> Verified:
        """Verify whole groups for step ``step``, counted from 0."""
        config = self._context.config
        return verify(
            trajectories,
            config.reward,
            vocab_size=self._vocab_size,
            max_response_tokens=config.rollout.max_response_tokens,
            lacks=lambda group: next((why for part in self._parts if (why := part.lacks(group)) is not None), None),
            step=step,
            operate=self._operators.apply,
            min_members=config.buffer.min_members,
        )


def staleness(
    trajectories: Sequence[Trajectory], replayed: Collection[str], lags: Mapping[WeightsVersion, int]
) -> dict[str, float]:
    """Return the share of trained tokens sampled by earlier weights; over new groups also the mean and maximum lag."""
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
