"""Optimizer updates that would do harm: a loss or gradient norm that is not finite, or a norm far above those before it.

An update is looked at when its gradients are there and nothing has been changed by them. What is decided is decided on every rank
alike, by what all of them know together, so it does not matter which rank of which grid saw the first NaN.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.errors import LastingError
from megarl.metrics import Sums

if TYPE_CHECKING:
    from megarl.loop.session import Session


class RollBack(Exception):
    """The run goes back to its newest checkpoint (``roll_back``); raised on every rank. The text says why."""


class Guard:
    """What a session's updates have been like."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._left_out = 0
        self._bad = False
        """Whether the step at hand has a bad update."""
        self._in_a_row = 0
        """Bad steps. Those that are done again after a rollback end no row before the one that was bad."""
        self._last_bad = (False, -1)

    def begin(self) -> None:
        """Before the updates of a step."""
        self._left_out, self._bad = 0, False

    def end(self) -> dict[str, float]:
        """Behind the updates of a step; its metrics."""
        if not self._bad and self._place() >= self._last_bad:
            self._in_a_row = 0
        return {"training/skipped_updates": float(self._left_out), "training/rollbacks": float(self._session.state.rollbacks)}

    def admits(self, model: str, sums: Sums, norm: float, update: int = 0) -> bool:
        """Whether an update may be made; False where it is left out. Every rank calls it.

        Args:
            model: ``actor`` or ``critic``.
            sums: Of ``TrainedModel.backward``; has the loss on ranks that speak for a replica.
            norm: The gradient's, before clipping.
            update: Number within the step, counted from 0.

        Raises:
            RollBack: the setting says so.
            LastingError: the setting says stop, or ``max_bad_steps`` steps in a row were bad.
        """
        s, config = self._session, self._session.config.trainer.guard
        losses = [total for name, (total, _) in sums.items() if name.endswith("/loss")]
        finite = math.isfinite(norm) and all(map(math.isfinite, losses))
        # One number says whether some rank has something that is not finite, the other is the norm where all have one.
        shared = torch.tensor([0.0 if finite else 1.0, norm if math.isfinite(norm) else 0.0], dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        before = s.state.grad_norms.get(model, [])
        if shared[0]:
            reason, action, setting = self._not_finite(losses, norm), config.on_nonfinite, "on_nonfinite"
        elif (usual := _usual(before, config.spike_factor, config.spike_window)) is not None and float(shared[1]) > usual[1]:
            reason = (f"the gradient's norm is {norm:.4g}, above {config.spike_factor:g} times the median {usual[0]:.4g} of the last "
                f"{len(before)} updates")  # fmt: skip
            action, setting = config.on_spike, "on_spike"
        else:
            # Without gradient an update says nothing of the usual size: all answers of its groups have the same reward.
            if config.spike_factor is not None and shared[1] > 0:
                norms = [*before, float(shared[1])][-config.spike_window :]
                s.state = replace(s.state, grad_norms={**s.state.grad_norms, model: norms})
            return True
        where = f"{'warm start, ' if s.state.phase == 'warm_start' else ''}step {s.state.step + 1}, update {update + 1} of the {model}"
        self._refuse(f"{where}: {reason}", action, setting)
        if s.position.rank == 0:
            event = {"step": s.state.step + 1, "update": update + 1, "model": model, "reason": reason, "action": action}
            s.store.record_event("trainer", "bad_update", event)
        if action == "rollback":
            raise RollBack(f"{where}: {reason}")
        s.say(f"WARNING: {where}: {reason}; the update is left out (trainer.guard.{setting}=skip)")
        self._left_out += 1
        return False

    def _refuse(self, what: str, action: str, setting: str) -> None:
        """Count a bad step. Raises LastingError where the job is to end."""
        config = self._session.config.trainer.guard
        if action == "stop":
            raise LastingError(
                f"{what} (trainer.guard.{setting}=stop); look at the data and the learning rate of that step, or set it to skip or "
                "rollback to go on without it"
            )
        if not self._bad:
            self._bad, self._last_bad = True, max(self._last_bad, self._place())
            self._in_a_row += 1
        if self._in_a_row >= config.max_bad_steps:
            raise LastingError(
                f"{what}; {self._in_a_row} steps in a row had such updates (trainer.guard.max_bad_steps={config.max_bad_steps}), so "
                "it is no passing fault: lower the learning rate, look at rewards and data"
                + (", raise trainer.guard.spike_factor" if setting == "on_spike" else "")
                + ", or go on from an earlier checkpoint by removing the later ones"
            )

    def _place(self) -> tuple[bool, int]:
        state = self._session.state
        return state.phase != "warm_start", state.step

    def _not_finite(self, losses: Sequence[float], norm: float) -> str:
        mine = next((loss for loss in losses if not math.isfinite(loss)), None)
        everyone: list[float | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        bad = [(rank, loss) for rank, loss in enumerate(everyone) if loss is not None]
        told = f"the loss is {bad[0][1]} on rank{'s' * (len(bad) > 1)} {', '.join(str(rank) for rank, _ in bad)}, " if bad else ""
        return f"{told}the gradient's norm is {norm}"


def _usual(norms: Sequence[float], factor: float | None, window: int) -> tuple[float, float] | None:
    """(median, what is above it is a spike), once the window is full."""
    if factor is None or len(norms) < window:
        return None
    median = statistics.median(norms[-window:])
    return median, factor * median


def roll_back(s: Session, bad: RollBack) -> None:
    """Bring every rank to the newest checkpoint, or to the run's start where there is none, and the store and the metrics with it.

    What the checkpoint holds comes back to the bit, but for the count of rollbacks: the tasks and seeds of what follows are others.
    """
    s.settle(wait=True)
    step, rollbacks = s.state.step, s.state.rollbacks + 1
    s.say(f"WARNING: {bad}; going back to the newest checkpoint")
    s.state = replace(s.resume(), rollbacks=rollbacks)
    if s.state.phase != "warm_start":
        s.begin_reinforcement_learning()
    if s.position.rank == 0:
        if s.state.phase != "warm_start":
            s.store.discard_rollouts(s.state.step)
        s.store.record_event("trainer", "rollback", {"from_step": step, "to_step": s.state.step, "rollbacks": rollbacks, "why": str(bad)})
    s.drop_later_metrics()
    s.say(f"went back from step {step} to step {s.state.step}, by {'a checkpoint' if s.newest_checkpoint() else 'the beginning'}; "
        f"rollback {rollbacks}: from here on steps take other tasks")
