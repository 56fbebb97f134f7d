"""Cause of the first operation that differs, tried in an order: weights, settings, precision, then what the numbers
show.

Shape legend: T tokens, h query heads, g key/value heads, d width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megarl.diff.operation_errors import CACHE, SAMPLER, TEMPLATE, WEIGHTS, Finding, relative, separated
from megarl.engines.tracing import points
from megarl.engines.tracing.points import EngineTrace, Record
from megarl.learn.models.attention import attend


@dataclass(frozen=True)
class Cause:
    """A cause: its name, and one sentence with where to look."""

    name: str
    text: str


_NORM = ("rms_norm_eps", "layer_norm_eps", "norm_eps")
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_dim", "no_rope_layers",
         "no_rope_layer_interval", "rope_interleave", "rope_local_base_freq", "llama_4_scaling")  # fmt: skip
_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "attention_chunk_size")
_SCALE = ("attention_multiplier", "query_pre_attn_scalar", "attn_logit_softcapping")
_ROUTER = ("num_experts_per_tok", "moe_k", "norm_topk_prob", "routed_scaling_factor", "scoring_func", "n_group",
           "topk_group", "topk_method", "router_scaling_factor")  # fmt: skip
SETTINGS: Mapping[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    points.STREAM: (("multiplier", ("embedding_multiplier", "residual_multiplier", "hidden_size")),),
    points.ATTENTION_INPUT: (("norm epsilon", _NORM),),
    points.QUERY_NORM: (("norm epsilon", _NORM),),
    points.KEY_NORM: (("norm epsilon", _NORM),),
    points.ROTATED_QUERY: (("rope scaling", _ROPE), ("attention scale", _SCALE)),
    points.ROTATED_KEY: (("rope scaling", _ROPE),),
    points.ATTENTION: (
        ("window", _WINDOW),
        ("attention scale", _SCALE),
        ("rope scaling", _ROPE),
        ("norm epsilon", _NORM),
    ),
    points.MLP_INPUT: (("norm epsilon", _NORM), ("multiplier", ("residual_multiplier",))),
    points.ROUTER: (("router", _ROUTER),),
    points.MLP: (("router", _ROUTER), ("activation", ("hidden_act", "hidden_activation", "swiglu_limit"))),
    points.FINAL_NORM: (("norm epsilon", _NORM),),
    points.HEAD: (("logit scale", ("logits_scaling", "final_logit_softcapping")), ("head", ("tie_word_embeddings",))),
}
"""Operation -> (name of a cause, settings of config.json that make it)."""
_LINEAR = (points.QUERY, points.KEY, points.VALUE, points.PROJECTION, points.MLP, points.ROUTER, points.ATTENTION)


def cause_of(finding: Finding, engine: EngineTrace, trainer: Record, window: int | None, temperature: float) -> Cause:
    """Return the cause of the first operation that differs.

    Args:
        trainer: Record of the trainer's model.
        window: Tokens that the trainer attends to in the finding's layer; None for all.
        temperature: ``rollout.temperature``.
    """
    tried: tuple[Callable[[], Cause | None], ...] = (
        lambda: _of_weights(finding, engine),
        lambda: _of_settings(finding, engine),
        lambda: _of_precision(finding, engine),
        lambda: _of_numbers(finding, engine, trainer, window, temperature),
    )
    found = next((cause for each in tried if (cause := each()) is not None), None)
    return found or Cause(
        "unknown", "weights and settings agree; look at vLLM's kernel for it, or at rollout.engine_options"
    )


def _of_weights(finding: Finding, engine: EngineTrace) -> Cause | None:
    """Return the cause if a weight of the operation differs from the model's files."""
    last = finding.layer >= engine.facts["layers"] or (finding.point == (0, points.STREAM))
    # A norm after a block belongs to the layer before.
    layers = (finding.layer, finding.layer - 1) if finding.operation == points.STREAM else (finding.layer,)
    own = {
        name: text
        for name, text in engine.weights.items()
        if any(part in name for part in WEIGHTS.get(finding.operation, ()))
        and (last if ".layers." not in name else any(f".layers.{layer}." in name for layer in layers))
    }
    if not own:
        return None
    name, text = next(iter(own.items()))
    expert = ".experts." in name
    kinds = {
        "is zero": "missing expert" if expert else "missing weight",
        "has the values of": "permuted expert" if expert else "permuted weight",
        "has its rows": "permuted weight",
        "is rounded": "quantisation",
    }
    kind = next((kind for start, kind in kinds.items() if text.startswith(start)), "stale weight")
    more = f" ({len(own)} weights of the operation differ)" if len(own) > 1 else ""
    return Cause(kind, f"the engine's {name} {text}{more}; look at the last sync's digests, or start the engine again")


def _of_settings(finding: Finding, engine: EngineTrace) -> Cause | None:
    """Return the cause if the engine computes with another setting of the operation than the model's config.json."""
    held, own = engine.facts["config"], engine.facts["file"]
    for name, keys in SETTINGS.get(finding.operation, ()):
        for key in keys:
            if held.get(key) != own.get(key):
                return Cause(
                    name,
                    f"the engine has {key}={held.get(key)!r}, config.json {own.get(key)!r}; look at "
                    "rollout.engine_options (hf_overrides)",
                )
    return None


def _of_precision(finding: Finding, engine: EngineTrace) -> Cause | None:
    """Return the cause if the engine computes in fewer bits than its dtype."""
    facts, operation = engine.facts, finding.operation
    if operation in _LINEAR and facts["quantization"] is not None:
        return Cause(
            "quantisation",
            f"the engine keeps weights as {facts['quantization']}; look at rollout.weight_dtype, and "
            "algorithm.correction for its gap",
        )
    if operation in (points.ATTENTION, CACHE) and facts["kv_cache_dtype"] not in ("auto", facts["dtype"]):
        return Cause(
            "quantisation",
            f"the engine keeps its KV cache as {facts['kv_cache_dtype']}; look at rollout.kv_cache_dtype",
        )
    if operation == points.ROUTER and _in_bfloat16(engine.whole[finding.point]):
        return Cause("router dtype", "the engine's router computes in bfloat16; look at model.router_dtype")
    if operation == points.HEAD and _in_bfloat16(engine.logits):
        return Cause("head dtype", "the engine's head computes in bfloat16; look at model.head_dtype")
    return None


def _in_bfloat16(tensor: torch.Tensor) -> bool:
    return torch.equal(tensor.bfloat16().float(), tensor)


def _of_numbers(
    finding: Finding, engine: EngineTrace, trainer: Record, window: int | None, temperature: float
) -> Cause | None:
    """Return the cause that the compared numbers show."""
    operation, whole = finding.operation, separated(engine.whole, trainer)
    if operation == CACHE:
        return Cause(
            "stale KV",
            f"layer {finding.layer} attends to other keys and values in the cache than it computes from the same "
            "tokens; look at sync.pause and the reset of the prefix cache",
        )
    if operation == TEMPLATE:
        return Cause(
            "template",
            f"token {finding.token} of the row's prompt differs between the trainer's chat template and the engine's; "
            "look at tokenizer_config.json, chat_template.jinja and rollout.engine_options.chat_template",
        )
    if operation == SAMPLER:
        return _of_sampling(engine, temperature)
    held, own = whole.get(finding.point), trainer.get(finding.point)
    if held is None or own is None or held.shape != own.shape:
        return Cause("shape", "the two sides have other widths; look at the heads and sizes in config.json")
    if operation in (points.ATTENTION_INPUT, points.MLP_INPUT, points.FINAL_NORM):
        ratio = held / own
        if float((ratio / ratio.median(-1, keepdim=True).values - 1).abs().quantile(0.9)) < finding.tolerance:
            return Cause("norm epsilon", f"each token is scaled by one number; look at {_NORM[0]} of both sides")
    if operation in (points.ROTATED_QUERY, points.ROTATED_KEY):
        same = float(relative(held.norm(dim=-1, keepdim=True), own.norm(dim=-1, keepdim=True)).max())
        what = "angles" if same < 10 * finding.tolerance else "sizes"
        return Cause("rope scaling", f"the {what} of rotated vectors differ; look at rope_parameters of both sides")
    if operation == points.ATTENTION:
        return _of_attention(finding, whole, window)
    if operation == points.MLP and (router := whole.get((finding.layer, points.ROUTER))) is not None:
        return _of_experts(finding, relative(held, own), router, engine.facts["config"])
    return None


def _of_attention(finding: Finding, whole: Record, window: int | None) -> Cause | None:
    """Attend again with the engine's queries and keys, to the tokens of other windows."""
    query, key, value = (
        whole.get((finding.layer, n)) for n in (points.ROTATED_QUERY, points.ROTATED_KEY, points.VALUE)
    )
    held = whole[finding.point]
    if query is None or key is None or value is None:
        return None
    groups = value.shape[-1]
    for width in (d for d in (256, 192, 128, 96, 80, 64, 48, 32, 24, 16) if not groups % d):
        if query.shape[-1] % width or key.shape != value.shape:
            continue
        split = [x.unflatten(-1, (-1, width)).transpose(0, 1)[None] for x in (query, key, value)]
        for tokens in (None, *range(1, len(held) + 1)):
            out = attend(*split, window=tokens)[0].transpose(0, 1).flatten(1)
            if float(relative(held, out).max()) < finding.tolerance:
                return Cause(
                    "window",
                    f"the engine attends to {tokens or 'all'} tokens, the trainer to {window or 'all'}; look at "
                    "sliding_window and layer_types",
                )
    return None


def _of_experts(
    finding: Finding, errors: torch.Tensor, router: torch.Tensor, config: Mapping[str, Any]
) -> Cause | None:
    """Name the expert that all tokens that differ have chosen, and no other token."""
    topk = int(config.get("num_experts_per_tok") or config.get("moe_k") or 1)
    chosen = torch.zeros_like(router, dtype=torch.bool).scatter_(-1, router.topk(topk, dim=-1).indices, True)
    wrong = errors > finding.tolerance
    guilty = chosen[wrong].all(0) & ~chosen[~wrong].any(0)
    if guilty.sum() != 1:
        return None
    return Cause(
        "missing expert", f"exactly the tokens of expert {int(guilty.long().argmax())} differ; look at its weights"
    )


def _of_sampling(engine: EngineTrace, temperature: float) -> Cause:
    """Fit the temperature that explains the reported log-probs; otherwise they are of fewer tokens."""
    sampled = torch.tensor(engine.tokens[engine.given :])[:, None]
    fits = {}
    for hundredths in range(1, 401):
        scaled = (engine.logits / (hundredths / 100)).log_softmax(-1).gather(-1, sampled)[:, 0]
        fits[hundredths / 100] = float((scaled - engine.reported).abs().max())
    best = min(fits, key=fits.__getitem__)
    if fits[best] < 0.02:
        return Cause(
            "temperature",
            f"the engine's log-probs are at temperature {best:g}, the trainer's at {temperature:g}; look at "
            "rollout.temperature and generation_config.json",
        )
    return Cause(
        "sampling", "the engine's log-probs are of fewer tokens than the vocabulary; look at top_p, top_k and min_p"
    )
