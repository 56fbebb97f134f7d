"""Every wrong way to send a model with adapters is named, the right one passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from megarl.core.errors import WeightsDiffer
from megarl.weights.reshard import adapters
from megarl.weights.reshard.adapter_proof import BaseProof, ProvenTensors, check_merged
from megarl.weights.reshard.adapters import AdaptedModel, Factors, LocalAdapter, MergedTensors, SeparateTensors

OUT, INTO = 200, 96
"""Shape of two fused tensors of 96 rows each, and padding."""
EXPERTS = 6


def adapted(dtype: torch.dtype, size: float = 0.02) -> AdaptedModel:
    """One fused tensor with two adapters. ``size``: of scale · B·A beside W, about."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    own, factors, local = {"w": drawn(OUT, INTO), "norm": drawn(INTO)}, {}, []
    for number, (rank, scale) in enumerate(((4, 1.5), (3, 2.0))):
        each = Factors(f"layer.{number}", (96, INTO), rank, scale)
        places = ((96 * number, 96 * number + 96),)
        local.append(LocalAdapter(each, f"{number}.a", f"{number}.b", places, by_input=False))
        factors[f"{number}.a"] = drawn(rank, INTO)
        factors[f"{number}.b"] = drawn(96, rank) * (size / scale / rank**0.5)
    own["experts"] = drawn(EXPERTS, 40, INTO)
    factors |= {"e.a": drawn(EXPERTS, 2, INTO), "e.b": drawn(EXPERTS, 40, 2) * size}
    expert = Factors("layer.expert", (40, INTO), 2, 0.7)
    stack = [LocalAdapter(expert, "e.a", "e.b", ((0, 40),), by_input=False, lead=(n,)) for n in range(EXPERTS)]
    embedding = Factors("embedding", (INTO, OUT), 3, 1.5, is_embedding=True)
    factors |= {"x.a": drawn(3, OUT) * size, "x.b": drawn(INTO, 3)}
    own["embedding"] = drawn(OUT, INTO)
    looked_up = LocalAdapter(embedding, "x.a", "x.b", ((0, INTO),), by_input=True)
    return AdaptedModel(own, factors, {"w": local, "experts": stack, "embedding": [looked_up]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-5, 0.02, 1.0, 30.0])
def test_right_tensors_pass(dtype: torch.dtype, size: float) -> None:
    model = adapted(dtype, size)
    for kind in (MergedTensors, SeparateTensors):
        for turn in range(5):
            given = ProvenTensors(kind(model), turn)
            assert [torch.equal(given[name], kind(model)[name]) for name in given] == [True] * len(given)


def _in_bf16(base: torch.Tensor, own: list[LocalAdapter], factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    whole = base.to(torch.bfloat16, copy=True)
    for each in own:
        [(begin, end)] = each.places
        product = factors[each.b].bfloat16() @ factors[each.a].bfloat16()
        whole[begin:end] += product * each.factors.scale
    return whole.to(base.dtype)


MERGES: dict[str, Callable[..., torch.Tensor]] = {
    "in bfloat16": _in_bf16,
    "not at all": lambda base, own, factors: base,
    "twice": lambda base, own, factors: _MERGED(_MERGED(base, own, factors), own, factors),
    "one alone": lambda base, own, factors: _MERGED(base, own[:1], factors),
}
_MERGED = adapters.merged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", MERGES)
def test_merged_otherwise(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, how: str) -> None:
    monkeypatch.setattr(adapters, "merged", MERGES[how])
    with pytest.raises(WeightsDiffer, match="w is not W \\+ scale · B·A, added in float32 and rounded once"):
        ProvenTensors(MergedTensors(adapted(dtype)), 0)["w"]


def test_an_embedding_merged_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for how in ("not at all", "twice"):
        monkeypatch.setattr(adapters, "merged", MERGES[how])
        with pytest.raises(WeightsDiffer, match="embedding is not W"):
            ProvenTensors(MergedTensors(adapted(torch.float32)), 0)["embedding"]


def test_every_row_of_every_expert_is_computed_again_in_turn() -> None:
    model = adapted(torch.float32)
    places = (("w", (OUT - 1, 5)), ("w", (0, 0)), ("experts", (EXPERTS - 1, 39, 3)), ("embedding", (OUT - 1, 5)))
    for name, at in places:
        found = MergedTensors(model)[name].clone()
        found[at] += 1e-3
        turns = [turn for turn in range(0, 200, 2) if _differs(name, found, model, turn)]
        assert 0 < len(turns) < 50, "an element that is off is seen within some syncs"


def _differs(name: str, found: torch.Tensor, model: AdaptedModel, turn: int) -> bool:
    try:
        check_merged(name, found, model, turn)
    except WeightsDiffer:
        return True
    return False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_that_changes_is_named(dtype: torch.dtype) -> None:
    model, proof = adapted(dtype), BaseProof()
    proof.check(model)
    model.factors["0.a"].add_(1.0)
    proof.check(model)
    model.own["w"][7, 3] *= 1 + 2**-7
    with pytest.raises(WeightsDiffer, match="since the first sync: w; model.lora trains"):
        proof.check(model)
