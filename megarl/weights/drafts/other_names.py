"""Rows of ``blocks`` under other HF names: gated MLPs, routers, their biases, and attention beside other layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from megarl.weights.architectures import blocks
from megarl.weights.architectures.blocks import Gated, gated, gated_rows, router_bias, same
from megarl.weights.architectures.table import EXPERT, Fused, JoinedTensor, Logical, Param, Stage
from megarl.weights.drafts.tiny import Stored

_APART = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
"""Names of a gated MLP's three tensors."""
_TOGETHER = ("gate_up_proj", "down_proj"), ("input_linear", "output_linear")
"""Names of a gated MLP's tensors if one has gate and up."""
_SPELLINGS = {
    "self_attn.o_proj": ("self_attn.out_proj", "self_attn.dense"),
    "self_attn.q_norm": ("self_attn.q_layernorm",),
    "self_attn.k_norm": ("self_attn.k_layernorm",),
}
"""Usual name -> other names of the same tensor."""
_ATTENTION = (*blocks.UNNORMED_ATTENTION, *blocks.QK_NORM, *blocks.QKV_BIAS)
_CORRECTION = "e_score_correction_bias"


class Renamed(NamedTuple):
    """Rows with names as in a checkpoint's files."""

    origin: str
    """Reason for the rows, for a comment."""
    rows: tuple[Param, ...]
    joined: tuple[JoinedTensor, ...] = ()
    vllm: tuple[Fused, ...] = ()
    """vLLM's rows by its usual names."""


def renamed(stored: Stored) -> Iterator[Renamed]:
    """Yield rows that the names of a checkpoint's tensors suggest; their shapes are not compared."""
    for mlp, joined in _gated_mlps(stored):
        yield from _mlp_rows(mlp, joined)
    for place, one in stored.items():
        if one.layers and re.search(r"(gate|router)(\.\w+)?\.weight$", place) and "shared" not in place:
            row = same("mlp.router.weight", Logical(place, "experts hidden"), Stage.MOE)
            yield Renamed("a router by its name", (row,))
        if one.layers and place.endswith(_CORRECTION):
            single = len(one.shape) == 2
            bias = Logical(f"mlp.gate.{_CORRECTION}" if single else place, "experts", dtype="float32")
            rows = blocks.ROUTER_BIAS if single else router_bias(bias)
            yield Renamed(
                "a router's bias by its name", rows, (JoinedTensor(place, (bias.name,), single=True),) if single else ()
            )
    for row in _ATTENTION:
        yield Renamed("attention in some layers", (replace(row, stage=Stage.ATTENTION),))
        usual, _, end = row.hf[0].name.rpartition(".")
        for name in _SPELLINGS.get(usual, ()):
            part = replace(row.hf[0], name=f"{name}.{end}")
            if part.name in stored:
                for stage in (Stage.LAYER, Stage.ATTENTION):
                    yield Renamed("another name", (replace(row, hf=(part,), stage=stage),))


def _gated_mlps(stored: Stored) -> Iterator[tuple[Gated, tuple[JoinedTensor, ...]]]:
    """Yield gated MLPs with tensors that hold gate and up together, or all experts."""
    for names in _APART:
        suffix = f".{names[2]}.weight"
        for prefix in (place.removesuffix(suffix) for place in stored if place.endswith(suffix)):
            if all(f"{prefix}.{name}.weight" in stored for name in names):
                yield gated(prefix, _extent(prefix), names), ()
    for both, down in _TOGETHER:
        for place, one in stored.items():
            found = re.fullmatch(rf"(.+)\.{both}(\.weight)?", place)
            if found is None or f"{found[1]}.{down}{found[2] or ''}" not in stored:
                continue
            prefix, stacked = found[1], len(one.shape) == 3
            if stacked:
                inner = prefix if prefix.endswith("experts") else f"{prefix}.experts"
                mlp = gated(f"{inner}.{EXPERT}", "expert_ffn")
            else:
                mlp = gated(prefix, _extent(prefix), ("gate_proj", "up_proj", down))
            joined = JoinedTensor(place, tuple(part.name for part in mlp[:2]))
            below = JoinedTensor(f"{prefix}.{down}{found[2] or ''}", (mlp[2].name,))
            yield mlp, (joined, below) if stacked else (joined,)


def _extent(prefix: str) -> str:
    return "expert_ffn" if EXPERT in prefix else "shared_ffn" if "shared" in prefix else "ffn"


def _mlp_rows(mlp: Gated, joined: tuple[JoinedTensor, ...]) -> Iterator[Renamed]:
    prefix = mlp[0].name.rpartition(".")[0].rpartition(".")[0]
    extent = mlp[0].axes.split()[0]
    if extent == "expert_ffn":
        module = prefix.removesuffix(f".experts.{EXPERT}")
        rows = gated_rows(mlp, Stage.MOE, "mlp.experts.local_experts.{expert}", "mlp.experts.{fc}.weight{expert}")
        yield Renamed("experts by their names", rows, joined, blocks.vllm_experts(mlp, module))
        return
    vllm = blocks.vllm_gated(mlp, f"{prefix}.gate_up_proj.weight")
    if extent == "shared_ffn":
        rows = gated_rows(mlp, Stage.MOE, "mlp.shared_experts")
        yield Renamed("a shared expert by its names", rows, joined, vllm)
        return
    for stage in (Stage.LAYER, Stage.DENSE):
        yield Renamed("an MLP by its names", gated_rows(mlp, stage, "mlp"), joined, vllm)


def placed_norms(stored: Stored, names: Iterable[str], places: Mapping[str, str]) -> Iterator[Renamed]:
    """Yield rows of norms by their places in a layer. Yield the last norm's row if only one tensor can be that norm.

    Args:
        names: Tensors without a row.
        places: Name of a norm -> Megatron's.
    """
    usual = {row.megatron: row for row in (*blocks.INPUT_NORM, *blocks.MLP, *blocks.NORMS_AFTER)}
    last = [name for name in names if not stored[name].layers and name.endswith("norm.weight")]
    for name in names:
        if name in places:
            row = usual[places[name]]
        elif last == [name]:
            row = blocks.OUTPUT[0]
        else:
            continue
        yield Renamed("by the modules around it", (replace(row, hf=(replace(row.hf[0], name=name),)),))
