"""Requests for training groups: their number, tasks and time, and the choice of a step's groups (``sync.order``)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from typing import Protocol

from megarl.buffer.order.draws import EXTRA, data_seed, drawn_seed
from megarl.buffer.order.group_choice import TaskChoice
from megarl.buffer.order.pacing import Pacing, choose
from megarl.buffer.order.replay import ReplayChoice
from megarl.buffer.store import Store, UnusedGroup
from megarl.train.rank.state import RunContext, TrainState
from megarl.train.rollout.found import Awaited, Published, rollout_id, rollout_of, whole
from megarl.train.rollout.group_part import GroupPart


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
