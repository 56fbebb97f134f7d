"""Bad optimizer updates: a loss or gradient norm that is not finite, or a norm far above earlier ones.

An update is checked after its gradients are computed and before they are applied. All ranks decide from shared numbers,
so the decision is the same whichever rank of whichever grid found the first NaN.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from megarl.config.schema import UpdateFilterConfig
from megarl.core.errors import NonRetryableError
from megarl.core.metrics import Sums
from megarl.train.rank.reporter import Reporter
from megarl.train.rank.state import TrainState


class RollBack(Exception):
    """Roll the run back to its newest checkpoint; raised on every rank. The text has the reason."""


class UpdateFilter:
    """Admits or rejects each update of a step, and counts bad steps."""

    def __init__(self, config: UpdateFilterConfig, reporter: Reporter) -> None:
        self._config = config
        self._reporter = reporter
        self._left_out = 0
        self._bad = False
        """True if the current step has a bad update."""
        self._in_a_row = 0
        """Number of consecutive bad steps; steps repeated after a rollback reset it only after the bad step."""
        self._last_bad = (False, -1)

    def begin(self) -> None:
        """Begin a step's updates."""
        self._left_out, self._bad = 0, False

    def end(self, state: TrainState) -> dict[str, float]:
        """End a step's updates; return its metrics."""
        if not self._bad and _place(state) >= self._last_bad:
            self._in_a_row = 0
        return {"training/skipped_updates": float(self._left_out), "training/rollbacks": float(state.rollbacks)}

    def admits(
        self, state: TrainState, model: str, sums: Sums, norm: float, update: int = 0
    ) -> tuple[bool, TrainState]:
        """Return False for an update to skip, and the state with the norms that define spikes.

        Every rank calls it.

        Args:
            model: ``actor`` or ``critic``.
            sums: Sums of ``TrainedModel.backward``; they include the loss on ranks that report for a replica.
            norm: Gradient norm before clipping.
            update: Number within the step, counted from 0.

        Raises:
            RollBack: the setting demands it.
            NonRetryableError: the setting is ``stop``, or ``max_bad_steps`` steps in a row were bad.
        """
        config = self._config
        losses = [total for name, (total, _) in sums.items() if name.endswith("/loss")]
        finite = math.isfinite(norm) and all(map(math.isfinite, losses))
        # First number: 1 if some rank has a non-finite value. Second: the largest finite norm.
        shared = torch.tensor([0.0 if finite else 1.0, norm if math.isfinite(norm) else 0.0], dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        before = state.grad_norms.get(model, [])
        if shared[0]:
            reason, action, setting = _not_finite(losses, norm), config.on_nonfinite, "on_nonfinite"
        elif (usual := _usual(before, config.spike_factor, config.spike_window)) is not None and float(
            shared[1]
        ) > usual[1]:
            reason = (
                f"the gradient's norm is {norm:.4g}, above {config.spike_factor:g} times the median {usual[0]:.4g} of "
                f"the last {len(before)} updates"
            )
            action, setting = config.on_spike, "on_spike"
        else:
            # An update with zero gradient is no measure: all its groups have zero variance.
            if config.spike_factor is not None and shared[1] > 0:
                norms = [*before, float(shared[1])][-config.spike_window :]
                state = replace(state, grad_norms={**state.grad_norms, model: norms})
            return True, state
        where = f"{'warm start, ' if state.warming_up else ''}step {state.step + 1}, update {update + 1} of the {model}"
        self._refuse(state, f"{where}: {reason}", action, setting)
        event = {"step": state.step + 1, "update": update + 1, "model": model, "reason": reason, "action": action}
        self._reporter.event("bad_update", event)
        if action == "rollback":
            raise RollBack(f"{where}: {reason}")
        self._reporter.log(f"WARNING: {where}: {reason}; the update is left out (trainer.update_filter.{setting}=skip)")
        self._left_out += 1
        return False, state

    def _refuse(self, state: TrainState, what: str, action: str, setting: str) -> None:
        """Count a bad step. Raises NonRetryableError if the job must end."""
        if action == "stop":
            raise NonRetryableError(
                f"{what} (trainer.update_filter.{setting}=stop); look at the data and the learning rate of that step, "
                "or set it to skip or rollback to go on without it"
            )
        if not self._bad:
            self._bad, self._last_bad = True, max(self._last_bad, _place(state))
            self._in_a_row += 1
        if self._in_a_row >= self._config.max_bad_steps:
            raise NonRetryableError(
                f"{what}; {self._in_a_row} steps in a row had such updates "
                f"(trainer.update_filter.max_bad_steps={self._config.max_bad_steps}), so "
                "it is no passing fault: lower the learning rate, look at rewards and data"
                + (", raise trainer.update_filter.spike_factor" if setting == "on_spike" else "")
                + ", or go on from an earlier checkpoint by removing the later ones"
            )


def _place(state: TrainState) -> tuple[bool, int]:
    return not state.warming_up, state.step


def _not_finite(losses: Sequence[float], norm: float) -> str:
    mine = next((loss for loss in losses if not math.isfinite(loss)), None)
    everyone: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    bad = [(rank, loss) for rank, loss in enumerate(everyone) if loss is not None]
    told = (
        f"the loss is {bad[0][1]} on rank{'s' * (len(bad) > 1)} {', '.join(str(rank) for rank, _ in bad)}, "
        if bad
        else ""
    )
    return f"{told}the gradient's norm is {norm}"


def _usual(norms: Sequence[float], factor: float | None, window: int) -> tuple[float, float] | None:
    """Return (median, norm limit for a spike) once the window is full, else None."""
    if factor is None or len(norms) < window:
        return None
    median = statistics.median(norms[-window:])
    return median, factor * median
