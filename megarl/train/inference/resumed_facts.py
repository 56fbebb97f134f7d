"""Sums of what a checkpoint has, kept in its manifest: after a resume the models must have the same ones."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.learn.training.model import WithoutAdapters
from megarl.train.inference.models import Models
from megarl.weights.checkpoint.training.state import inner_optimizers

Facts = dict[str, float | str | None]
WITHIN = 1e-9
"""Relative difference of two sums of the same numbers, which threads may add in another order."""


def facts_of(models: Models) -> Facts:
    """Return this rank's sums: ``weights``, ``moments`` and ``steps`` of the actor's optimizer, ``reference`` unless it
    is refreshed, each model of ``Models.more``, and the digest of the generators (``random``). None: not in memory.
    """
    inner = inner_optimizers(models.actor.optimizer.inner)
    states = [state for each in inner for state in each.state.values()]
    reference, never = models.reference, models.config.reference.refresh == "never"
    others = dict(models.more) if reference is None or isinstance(reference, WithoutAdapters) or not never else {
        **models.more, "reference": reference}  # fmt: skip
    return {
        "weights": _sum(p for chunk in models.actor.model.chunks for p in chunk.parameters()),
        "moments": _sum(s[name] for s in states for name in ("exp_avg", "exp_avg_sq") if name in s),
        "steps": float(sum(int(group.get("step", 0)) for each in inner for group in each.param_groups)),
        **{name: _sum(p for chunk in model.chunks for p in chunk.parameters()) for name, model in others.items()},
        "random": None if models.more else _random(),  # those models are made, with random numbers, after a resume
    }


def facts_of_ranks(models: Models) -> list[Facts]:
    """Return every rank's ``facts_of``, on every rank. Every rank calls it."""
    everyone: list[Facts] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, facts_of(models))
    return everyone


def _sum(tensors: Iterable[torch.Tensor]) -> float | None:
    """Return Σ (place + 1)·Σ|x|: tensors of one size that are exchanged have another sum."""
    total = 0.0
    for place, tensor in enumerate(tensors):
        if tensor.numel() and not tensor.untyped_storage().size():
            return None
        total += (place + 1) * float(tensor.detach().abs().sum(dtype=torch.float64))
    return total


def _random() -> str:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state().numpy().tobytes()  # noqa: NPY002
    return hashlib.blake2b(repr(states).encode(), digest_size=8).hexdigest()


ALARMS = {
    "weights": ("resumed-weights", "the actor's weights"),
    "moments": ("moments-lost", "the optimizer's moments"),
    "steps": ("optimizer-steps", "the optimizer's count of steps"),
    "reference": ("reference", "the reference's weights"),
    "random": ("random-states", "the random generators' states"),
}
"""Fact -> alarm, and its name in the text; the models of ``Models.more`` have the alarm ``average``."""


def lost(before: Mapping[str, Any], now: Facts) -> dict[str, str]:
    """Return alarm -> text for each fact that is another after a resume; of a fact that is unknown, nothing."""
    found: dict[str, str] = {}
    for name in before.keys() & now.keys():
        old, new = before[name], now[name]
        same = old == new or (isinstance(old, float) and isinstance(new, float) and abs(old - new) <= WITHIN * abs(old))
        if not same and old is not None and new is not None:
            alarm, text = ALARMS.get(name, ("average", f"the weights of {name}"))
            found[alarm] = f"{text} are not those of the checkpoint: {old} then, {new} now"
    return found
