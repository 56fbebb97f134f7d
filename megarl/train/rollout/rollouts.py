"""Training groups of a step: requested, awaited, read, verified and chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol

from megarl.buffer.experience import Report, Verified, by_group, part_metrics, verifier_metrics, verify
from megarl.buffer.experience.operators import Operators
from megarl.buffer.order.draws import EXTRA, data_seed, drawn_seed
from megarl.buffer.order.group_choice import ReplayChoice, TaskChoice
from megarl.buffer.order.pacing import Pacing, choose
from megarl.buffer.store import Store, UnusedGroup, Used
from megarl.core.schema import Trajectory, WeightsVersion
from megarl.learn.algorithms import Algorithm
from megarl.train.batch.samples import SampleAccount
from megarl.train.ranks import Reporter, RunContext, Stopped, TrainState
from megarl.train.rollout.group_part import (
    Awaited,
    FoundGroups,
    GroupPart,
    GroupServices,
    Published,
    rollout_id,
    rollout_of,
    whole,
)
from megarl.train.rollout.group_parts import group_parts_of
from megarl.train.rollout.reading import RolloutReader


class GroupRequests:
    """Requests for training groups in the store; on rank 0.

    Args:
        parts: Parts of the group service.
    """

    def __init__(self, context: RunContext, store: Store, choice: TaskChoice, parts: Sequence[GroupPart] = ()) -> None:
        self.config = context.config
        self.store = store
        self.choice = choice
        self.pacing = Pacing.of(context.config.sync)
        self._parts = parts
        self._sampling = {name: value for part in parts for name, value in part.sampling().items()}

    def ask_more(self, state: TrainState, published: Published, extra: int, number: int) -> None:
        """Request further groups, for the ``extra``-th time in a step."""
        if not self.store.rollouts.is_requested(rollout_id(state.step, extra)):
            tasks = self.choice.tasks(state.step, self.seed(state), extra)[:number]
            self.request(rollout_id(state.step, extra), state, state.step, published, tasks, extra)

    def look_ahead(self, ahead: int, step: int) -> Awaited:
        """Return the progress of step ``ahead``'s groups: all must be complete before weights change in step ``step``,
        unless a part needs fewer."""
        for part in self._parts:
            if (less := part.look_ahead(ahead, step)) is not None:
                return less
        return whole(self.store, rollout_id(ahead), awaiting=True)

    def overdue(self, step: int, unused: Sequence[UnusedGroup] | None = None) -> list[UnusedGroup]:
        """Return the groups that step ``step`` takes although rewards are missing, out of ``unused``; None: out of all
        unused groups."""
        read = self.store.pacing.unused if unused is None else lambda: unused
        return [group for part in self._parts for group in part.overdue(read, step)]

    def seed(self, state: TrainState) -> int:
        """Return the seed for choosing tasks; it changes with each rollback."""
        return data_seed(self.config.trainer.seed, state.rollbacks)

    def request(
        self,
        rollout_id: str,
        state: TrainState,
        step: int,
        published: Published,
        tasks: list[str],
        extra: int = 0,
        *,
        asked_at: int | None = None,
    ) -> None:
        """Request the groups of a rollout. Its seed depends on ``step`` and ``extra``; ``asked_at``: steps done, if not
        ``step``."""
        seed = self.seed(state)
        sampling = {
            "temperature": self.config.rollout.temperature,
            "max_tokens": self.config.rollout.max_response_tokens,
            "seed": drawn_seed(seed, step, extra, EXTRA) if extra else seed * 1_000_003 + step,
            **self._sampling,
        }
        size = self.config.algorithm.group_size
        done = step if asked_at is None else asked_at
        self.store.rollouts.request(rollout_id, "train", done, published.version, tasks, size, sampling)


class Asking(Protocol):
    """Requests groups and chooses a step's groups; on rank 0."""

    def ask(self, state: TrainState, published: Published) -> None:
        """Request the groups of a step and of the steps ahead, unless the store has them."""

    def further(self, missing: int) -> int:
        """Return the number of groups to request in a step that lacks ``missing`` groups."""

    def look(self, step: int, extra: int, without: Collection[str], missing: int) -> Awaited:
        """Return the progress towards what ``choose`` needs."""

    def choose(self, step: int, without: Collection[str], missing: int) -> list[str]:
        """Choose up to ``missing`` ready groups of a step that are not in ``without``; return their ids in order.

        Overdue groups stop waiting for their rewards, so that all readers read the same.
        """

    def wanted(self, replayed: int) -> int:
        """Return the number of new groups in a step that replays ``replayed`` groups."""

    def rollouts(self, step: int, rounds: int, used: Sequence[str]) -> list[str]:
        """Return the ids of the rollouts that a step reports, after ``rounds`` requests and with ``used`` groups. The
        result is the same on every rank."""


class InAdmissionOrder:
    """Gives every step a separate rollout, and trains on its groups.

    All groups are sampled before the weights change, so repeated runs are equal to the bit.
    """

    def __init__(self, requests: GroupRequests, replay: ReplayChoice) -> None:
        self._requests = requests
        self._config, self._store = requests.config, requests.store
        self._choice, self._pacing = requests.choice, requests.pacing
        self._replay = replay

    def ask(self, state: TrainState, published: Published) -> None:
        steps = max(self._config.trainer.steps, state.step + 1)
        for step in range(state.step, min(self._pacing.asked(state.step), steps)):
            if not self._store.rollouts.is_requested(rollout_id(step)):
                seed = self._requests.seed(state)
                sampled = self._config.trainer.tasks_per_step - len(self._replay.groups(step, seed, state.step))
                tasks = self._choice.with_spare(step, seed, sampled)
                self._requests.request(rollout_id(step), state, step, published, tasks)

    def further(self, missing: int) -> int:
        return self._choice.per_step

    def look(self, step: int, extra: int, without: Collection[str], missing: int) -> Awaited:
        return whole(self._store, rollout_id(step, extra), awaiting=self._waits_no_more(step))

    def choose(self, step: int, without: Collection[str], missing: int) -> list[str]:
        if overdue := self._requests.overdue(step):
            self._store.late.stop_waiting([group.group_id for group in overdue])
        return self._store.groups.take(self._config.trainer.tasks_per_step, step=step, without=without)

    def _waits_no_more(self, step: int) -> bool:
        """True if a step drops its own groups that still await rewards: all of them were requested at one time."""
        own = rollout_id(step)
        if not any(group.rollout_id == own for group in self._requests.overdue(step)):
            return False
        return _has_ready([group for group in self._store.pacing.unused() if group.rollout_id == own])

    def wanted(self, replayed: int) -> int:
        return self._config.trainer.tasks_per_step - replayed

    def rollouts(self, step: int, rounds: int, used: Sequence[str]) -> list[str]:
        return [rollout_id(step, extra) for extra in range(rounds)]


class InCompletionOrder:
    """Gives a step the groups that end first, whichever step requested them, within ``sync.max_staleness``.

    Every publication requests as many groups as the limit allows. Their tasks continue the order of the earlier ones.
    """

    def __init__(self, requests: GroupRequests) -> None:
        self._requests = requests
        self._config, self._store = requests.config, requests.store
        self._choice, self._pacing = requests.choice, requests.pacing

    def ask(self, state: TrainState, published: Published) -> None:
        each, step = self._choice.per_step, state.step
        steps = min(self._pacing.deadline(published.step) + 1, self._config.trainer.steps) - step
        missing = steps * each - len(self._store.pacing.unused())
        if missing > 0:
            # A replaced engine may have received weights between two publications. Groups that this step requested with
            # them before a resume stay.
            number = next(n for n in count(step) if not self._store.rollouts.is_requested(rollout_id(n)))
            self._requests.request(
                rollout_id(number), state, number, published, self._tasks(state, missing), asked_at=step
            )

    def _tasks(self, state: TrainState, missing: int) -> list[str]:
        seed, each = self._requests.seed(state), self._choice.per_step
        first, asked = self._store.pacing.num_asked()
        step, skipped = divmod((state.step if first is None else first) * each + asked, each)
        found: list[str] = []
        while len(found) < skipped + missing:
            found += self._choice.tasks(step, seed)
            step += 1
        return found[skipped : skipped + missing]

    def further(self, missing: int) -> int:
        return missing

    def look(self, step: int, extra: int, without: Collection[str], missing: int) -> Awaited:
        unused = self._unused(without)
        chosen, wanted = self._chosen(unused, step, missing), min(missing, len(unused))
        return Awaited(len(chosen), wanted, len(chosen) == wanted)

    def choose(self, step: int, without: Collection[str], missing: int) -> list[str]:
        unused = self._unused(without)
        chosen = self._chosen(unused, step, missing)
        if overdue := [group.group_id for group in unused if group.awaiting and group.group_id in set(chosen)]:
            self._store.late.stop_waiting(overdue)
        return chosen

    def _unused(self, without: Collection[str]) -> list[UnusedGroup]:
        return [group for group in self._store.pacing.unused() if group.group_id not in without]

    def _chosen(self, unused: Sequence[UnusedGroup], step: int, missing: int) -> list[str]:
        late = self._requests.overdue(step, unused) if _has_ready(unused) else []
        ready = [group for group in unused if group.ready or group in late]
        due, others = (
            [self._pacing.deadline(group.weights_step) for group in groups]
            for groups in (ready, [group for group in unused if group not in ready])
        )
        return [ready[number].group_id for number in choose(due, others, step, missing, self._choice.per_step)]

    def wanted(self, replayed: int) -> int:
        return self._choice.per_step  # a step that replays fewer groups than its share is smaller

    def rollouts(self, step: int, rounds: int, used: Sequence[str]) -> list[str]:
        """Return finished rollouts: the step has used the last of their groups."""
        left = {group.rollout_id for group in self._store.pacing.unused() if group.group_id not in used}
        return [rollout for rollout in dict.fromkeys(map(rollout_of, used)) if rollout not in left]


def _has_ready(groups: Sequence[UnusedGroup]) -> bool:
    """True if a group has its rewards. A step waits for one: it could not train on late groups alone."""
    return any(group.ready for group in groups)


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
