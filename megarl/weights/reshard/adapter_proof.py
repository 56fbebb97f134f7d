"""Proof that the delivered tensors of a model with adapters equal the result of its W, A and B.

Digests compare an engine's tensors with the sent ones. This module compares sent tensors with the trainer's by separate
arithmetic. It finds an adapter that is missing, stale, scaled twice or merged in bfloat16 before an engine receives it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

import torch

from megarl.core.errors import WeightsDiffer, first_of
from megarl.ops import digest_values, slice_digests
from megarl.weights.reshard.adapters import AdaptedModel, LocalAdapter, MergedTensors, SeparateTensors
from megarl.weights.reshard.plan import ReshardPlan

ROWS = 16
"""Number of rows of a merged tensor to recompute."""
STACKED = 4
"""Number of experts of a stack with recomputed rows."""
ROUNDING = 2.0**-23
"""Relative error of one float32 operation, with a margin for a kernel's order of summation."""


class ProvenTensors(Mapping[str, torch.Tensor]):
    """Delivered tensors of a model with adapters; each is checked at its first access.

    ``[]`` raises WeightsDiffer if a tensor is not W + scale · B·A, rounded once, or not A or scale · B.

    Args:
        tensors: Tensors to deliver.
        turn: Number of the delivery; it selects the rows to recompute.
    """

    def __init__(self, tensors: MergedTensors | SeparateTensors, turn: int) -> None:
        self._tensors, self._turn, self._proven = tensors, turn, set[str]()
        self._scales = {each.b: each.factors.scale for group in tensors.model.adapters.values() for each in group}

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self._tensors[name]
        if name not in self._proven:
            self._prove(name, found)
            self._proven.add(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def unmerged(self) -> Mapping[str, torch.Tensor]:
        """``unmerged`` of the wrapped tensors."""
        return self._tensors.unmerged

    def _prove(self, name: str, found: torch.Tensor) -> None:
        model = self._tensors.model
        if name in model.factors:
            exact, scale = model.factors[name], self._scales.get(name, 1.0)
            check_rounded(name, "scale · B" if name in self._scales else "A", found, exact.double() * scale)
        elif isinstance(self._tensors, MergedTensors) and name in model.adapters:
            check_merged(name, found, model, self._turn)
        elif found is not model.own[name] and not torch.equal(found, model.own[name]):
            raise WeightsDiffer(f"{name} is not sent as the trainer has it, although it has no adapter")


@torch.no_grad()
def check_merged(name: str, found: torch.Tensor, model: AdaptedModel, turn: int) -> None:
    """Recompute some rows of a merged tensor in float64. Raises WeightsDiffer.

    Args:
        name: Local name of W.
        found: The merged tensor.
        turn: Number that selects the rows.
    """
    adapters = sorted(model.adapters[name], key=attrgetter("lead"))
    stacks = [(lead, list(own)) for lead, own in groupby(adapters, key=attrgetter("lead"))]
    for at in _spread(len(stacks), STACKED, turn):
        lead, own = stacks[at]
        base = model.own[name][lead]
        rows = torch.tensor(_spread(base.shape[0], ROWS, turn))
        exact, size = _rows_with(base, own, model.factors, rows)
        terms = 2 + max(each.factors.rank for each in own)
        what = "W + scale · B·A, added in float32 and rounded once"
        check_rounded(name, what, found[lead][rows.to(found.device)], exact, size * (terms * ROUNDING))


def _rows_with(
    base: torch.Tensor, adapters: Sequence[LocalAdapter], factors: Mapping[str, torch.Tensor], rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of W + scale · B·A in float64, and the sum of absolute values of each element's terms."""
    exact = base[rows.to(base.device)].double()
    size = exact.abs()
    for adapter in adapters:
        a, b = factors[adapter.a][adapter.lead], factors[adapter.b][adapter.lead]
        if adapter.factors.is_embedding:
            ours = a[:, rows.to(a.device)].t().double() * adapter.factors.scale
            exact += ours @ b.t().double()
            size += ours.abs() @ b.t().double().abs()
            continue
        a, at = a.double(), 0
        for begin, end in adapter.places:
            inside = (rows >= begin) & (rows < end)
            ours = b[(rows[inside] - begin + at).to(b.device)].double() * adapter.factors.scale
            inside = inside.to(exact.device)
            exact[inside] += ours @ a
            size[inside] += ours.abs() @ a.abs()
            at += end - begin
    return exact, size


def _spread(count: int, most: int, turn: int) -> list[int]:
    """Choose at most ``most`` of ``count`` indices, evenly spread; different ones for each turn."""
    step, first = max(1, count // most), random.Random(turn).randrange(count)
    return sorted({(first + number * step) % count for number in range(min(count, most))})


@torch.no_grad()
def check_rounded(
    name: str, what: str, found: torch.Tensor, exact: torch.Tensor, error: torch.Tensor | None = None
) -> None:
    """Compare a tensor with expected float64 values, rounded once to its dtype. Raises WeightsDiffer.

    Args:
        what: Description of the values.
        error: Largest error of each value before rounding; ``None``: the error of one float32 operation.
    """
    room = exact.abs() * ROUNDING if error is None else error
    low, high = (exact - room).to(found.dtype), (exact + room).to(found.dtype)
    if bool(((found >= low) & (found <= high)).all()):
        return
    worst = float((found.double() - exact).abs().nan_to_num(torch.inf).max())
    raise WeightsDiffer(
        f"{name} is not {what}: it is off by up to {worst:.1e}, and one rounding to {found.dtype} makes "
        f"{float((high - low).abs().max()) + torch.finfo(found.dtype).eps * float(exact.abs().max()) / 2:.1e}; the "
        "adapter is left out, old, scaled differently from model.lora, or merged in another dtype"
    )


class BaseProof:
    """Digests of this rank's tensors that training must not change, computed at the first delivery."""

    def __init__(self) -> None:
        self._first: dict[str, int] | None = None

    def check(self, model: AdaptedModel) -> None:
        """Compare the base model with its state at the first delivery. Raises WeightsDiffer naming a tensor."""
        own = {name: tensor for name, tensor in model.own.items() if name not in model.saved}
        found = slice_digests([(tensor, (0,) * tensor.dim(), tensor.shape) for tensor in own.values()])
        now = dict(zip(own, digest_values(found), strict=True))
        first = self._first = self._first or now
        if changed := sorted(name for name in first.keys() | now.keys() if first.get(name) != now.get(name)):
            raise WeightsDiffer(
                f"the model under the adapters has changed since the first sync: {first_of(changed, 4)}; model.lora "
                "trains A's, B's and model.lora.modules_to_save alone, so something else writes into it"
            )


def check_covered(plan: ReshardPlan, whole: ReshardPlan, rank: int, model: AdaptedModel, *, merged: bool) -> None:
    """Check that a plan delivers all of a rank's tensors that training changes. Raises WeightsDiffer.

    Args:
        plan: Plan of the tensors that training changes.
        whole: Plan of all tensors.
        merged: Adapters are delivered inside the model's tensors.
    """
    trained = {*model.saved, *(model.adapters if merged else model.factors)}
    parts = {part for row, _ in whole.source.rows_of(rank) if row.local in trained for part in row.parts}
    if missing := sorted((parts & whole.destination.tensors.keys()) - plan.destination.tensors.keys()):
        raise WeightsDiffer(
            f"training changes these tensors, and a sync would not deliver them: {first_of(missing, 4)}; compare "
            "model.lora.targets and model.lora.modules_to_save with what is trained"
        )
