"""Errors of operations, and the first one beyond its tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megarl.engines.tracing import points
from megarl.engines.tracing.points import EngineTrace, Point, Record

TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
"""Largest relative error of an operation on equal inputs, by the engine's dtype."""
LOGP = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""Largest difference of a log-prob."""
ROUNDED_EXPERTS = 0.9
"""Share of tokens that is compared where rounding may choose another expert."""
WEIGHTS: Mapping[str, tuple[str, ...]] = {
    points.STREAM: ("embed_tokens", "post_feedforward_layernorm", "post_mlp_layernorm"),
    points.ATTENTION_INPUT: ("input_layernorm", "operator_norm"),
    points.QUERY: ("q_proj", "qkv_proj"),
    points.KEY: ("k_proj", "qkv_proj"),
    points.VALUE: ("v_proj", "qkv_proj"),
    points.QUERY_NORM: ("q_norm", "query_layernorm"),
    points.KEY_NORM: ("k_norm", "key_layernorm"),
    points.ATTENTION: (
        "q_a_",
        "q_b_",
        "kv_a_",
        "kv_b_",
        "q_proj",
        "sinks",
        "self_attn.q_norm",
        "self_attn.k_norm",
        "in_proj",
        "conv1d",
        "conv.conv",
        "A_log",
        "dt_bias",
        "linear_attn.norm",
    ),
    points.PROJECTION: ("o_proj", "self_attn.dense", "out_proj"),
    points.MLP_INPUT: ("layernorm", "ffn_norm"),
    points.ROUTER: ("mlp.gate.", "router", "block_sparse_moe.gate."),
    points.MLP: ("mlp.", "block_sparse_moe.", "feed_forward."),
    points.FINAL_NORM: ("model.norm", "embedding_norm"),
    points.HEAD: ("lm_head", "embed_tokens"),
}
"""Operation -> parts of names of its weights, in HF checkpoints."""
CACHE, SAMPLER, TEMPLATE = "KV cache", "sampling", "chat template"


@dataclass(frozen=True)
class Finding:
    """An operation, compared.

    Attributes:
        layer: Number from 0; the number of layers for what follows them.
        error: Largest relative error of a token; for log-probs their largest difference.
        token: Index of that token.
    """

    layer: int
    operation: str
    error: float
    tolerance: float
    token: int = 0

    @property
    def differs(self) -> bool:
        """True beyond the tolerance, or for NaN."""
        return not self.error <= self.tolerance

    @property
    def point(self) -> Point:
        """The place in a record."""
        return self.layer, self.operation


def compare(
    engine: EngineTrace, trainer: Record, logp: torch.Tensor, scaled: torch.Tensor, messages: list[int] | None
) -> list[Finding]:
    """Return every comparison in the order of computation.

    Args:
        trainer: Record of the trainer's model.
        logp, scaled: float32 [T - 1] by the trainer, at temperature 1 and at the run's.
        messages: Token ids of the row's conversation by the trainer's template; None if it is not compared.
    """
    dtype = engine.facts["dtype"]
    tolerance, of_logp = TOLERANCES[dtype], LOGP[dtype]
    found = []
    if messages is not None and engine.rendered is not None:
        found.append(_template(messages, engine.rendered))
    layers = engine.facts["layers"]
    whole = separated(engine.whole, trainer)
    for number in range(layers + 1):
        found += [
            _finding((number, operation), whole, trainer, tolerance, exact=dtype == "float32")
            for operation in (*points.OPERATIONS, points.FINAL_NORM)
            if (number, operation) in whole and (number, operation) in trainer
        ]
    found.append(_largest(layers, points.HEAD, (engine.logp - logp).abs(), of_logp))
    for number in range(layers):
        found += [
            _finding((number, operation), own, _tail(engine.whole, own, offset), 3 * tolerance, CACHE)
            for own, offset in ((engine.decoded, engine.given), (engine.cached, None))
            for operation in (points.ATTENTION,)
            if (number, operation) in own
        ]
    sampled = scaled[engine.given - 1 :]
    found.append(_largest(layers, SAMPLER, (engine.reported - sampled).abs(), of_logp))
    return found + _weights(engine)


def _weights(engine: EngineTrace) -> list[Finding]:
    """Return operations whose weights differ from the files, also without an effect on this sequence."""
    found = dict.fromkeys(
        (_layer_of(name, engine.facts["layers"], operation), operation)
        for name in engine.weights
        for operation in [next((o for o, parts in WEIGHTS.items() if any(p in name for p in parts)), points.MLP)]
    )
    return [Finding(layer, operation, float("inf"), 0.0) for layer, operation in found]


def _layer_of(name: str, layers: int, operation: str) -> int:
    after = name.partition(".layers.")[2].partition(".")[0]
    return int(after) if after.isdecimal() else 0 if operation == points.STREAM else layers


def separated(engine: Record, trainer: Record) -> Record:
    """Return the engine's record with joined projections split as the trainer's are."""
    found = dict(engine)
    for (number, operation), joined in engine.items():
        parts = [(number, name) for name in (points.QUERY, points.KEY, points.VALUE)]
        if operation == points.JOINED and all(point in trainer for point in parts):
            widths = [trainer[point].shape[-1] for point in parts]
            if sum(widths) == joined.shape[-1]:
                found |= dict(zip(parts, joined.split(widths, dim=-1), strict=True))
    return found


def first(findings: list[Finding]) -> Finding | None:
    """Return the first operation that differs; None if all agree."""
    return next((finding for finding in findings if finding.differs), None)


def _tail(whole: Record, own: Record, offset: int | None) -> Record:
    """Return the rows of ``whole`` that ``own`` has: from ``offset`` on, or the last ones."""
    return {
        point: whole[point][-len(rows) :] if offset is None else whole[point][offset : offset + len(rows)]
        for point, rows in own.items()
        if point in whole
    }


def _finding(
    point: Point, engine: Record, trainer: Record, tolerance: float, name: str = "", *, exact: bool = True
) -> Finding:
    held, own = engine[point], trainer[point]
    if held.shape != own.shape:
        return Finding(point[0], name or point[1], float("inf"), tolerance)
    errors = relative(held, own)
    if point[1] == points.MLP and not exact and (point[0], points.ROUTER) in engine:
        errors = errors.clamp(max=float(errors.quantile(ROUNDED_EXPERTS)))
    return _largest(point[0], name or point[1], errors, tolerance)


def relative(held: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return float32 [T]: distance of each token's vector, relative to its length, or to a tenth of the usual one."""
    length = own.norm(dim=-1)
    return (held - own).norm(dim=-1) / length.clamp(min=1e-12 + 0.1 * float(length.mean()))


def _largest(layer: int, operation: str, errors: torch.Tensor, tolerance: float) -> Finding:
    at = int(errors.nan_to_num(nan=torch.inf).argmax()) if len(errors) else 0
    return Finding(layer, operation, float(errors[at]) if len(errors) else 0.0, tolerance, at)


def _template(trainer: list[int], engine: list[int]) -> Finding:
    at = next((i for i, (a, b) in enumerate(zip(trainer, engine, strict=False)) if a != b), None)
    if at is None and len(trainer) != len(engine):
        at = min(len(trainer), len(engine))
    return Finding(0, TEMPLATE, 0.0 if at is None else 1.0, 0.0, at or 0)
