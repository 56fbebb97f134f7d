"""Causes of a gap between trainer and engine, put into an engine on purpose, for ``megarl diff`` to name.

``python -m tests.loop.diff_causes`` is an engine of ``megarl diff`` with the cause that ``$DIFF_CAUSE`` names.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megarl.diff.operation_errors import CACHE, SAMPLER, TEMPLATE
from megarl.engines.tracing import points, traced_engine
from megarl.engines.tracing.traced_engine import TracedEngine

State = dict[str, torch.Tensor]
TOKENS = torch.randint(4, 190, (75,), generator=torch.Generator().manual_seed(1)).tolist()
"""The sequence of all tests; the tiny router sends all of it to few experts."""
FILES = "DIFF_FILES"
"""Variable with the folder of other weights."""


@dataclass(frozen=True)
class Seeded:
    """A cause.

    Attributes:
        named: Name that ``megarl diff`` must give it.
        at: (layer, operation) that must be the first.
        options: ``rollout.engine_options``.
        weights: Changes the state of an HF checkpoint, which the engine gets by an update from files.
        change: Changes the engine.
        word: Part of the sentence.
    """

    named: str
    at: tuple[int, str]
    family: str = "qwen3"
    options: dict[str, Any] = field(default_factory=dict)
    weights: Callable[[State], None] | None = None
    change: Callable[[TracedEngine], None] | None = None
    word: str = ""


def _set(**values: Any) -> dict[str, Any]:
    return {"hf_overrides": values}


def load(engine: TracedEngine, folder: str) -> None:
    """An update from files, as explore programs make it."""
    call = engine.engine.collective_rpc
    call("megarl_expect_files")
    call("start_weight_update")
    call("update_weights", kwargs={"update_info": {"version": "1.1", "folder": folder}})
    call("finish_weight_update")
    assert call("megarl_outcome") == [{}]


def _layer(engine: TracedEngine, number: int) -> Any:
    return traced_engine.layers_of(engine.model)[number]


def _zero_expert(number: int) -> Callable[[State], None]:
    def change(state: State) -> None:
        for part in ("gate_proj", "up_proj", "down_proj"):
            state[f"model.layers.1.mlp.experts.{number}.{part}.weight"].zero_()

    return change


def _swap_experts(state: State) -> None:
    for part in ("gate_proj", "up_proj", "down_proj"):
        one, other = (state[f"model.layers.1.mlp.experts.{e}.{part}.weight"] for e in (1, 3))
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def _round(state: State) -> None:
    weight = state["model.layers.1.self_attn.o_proj.weight"]
    scale = weight.abs().amax(1, keepdim=True) / 448
    weight.copy_((weight / scale).to(torch.float8_e4m3fn).float() * scale)


def _swap_rows(state: State) -> None:
    head = state["lm_head.weight"]
    rows = TOKENS[10:12]
    head[rows] = head[rows[::-1]]


def _lose_a_tap(state: State) -> None:
    state["model.layers.0.conv.conv.weight"][..., 0].zero_()


def _decay_faster(state: State) -> None:
    state["model.layers.0.linear_attn.A_log"] += 1.0


def _noise(name: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[name].add_(0.05 * torch.randn(state[name].shape, generator=torch.Generator().manual_seed(5)))

    return change


def _sizes_of_angles(engine: TracedEngine) -> None:
    _layer(engine, 0).self_attn.rotary_emb.cos_sin_cache.mul_(1.1)


def _epsilon(engine: TracedEngine) -> None:
    _layer(engine, 1).post_attention_layernorm.variance_epsilon = 0.05


def _router_in_bfloat16(engine: TracedEngine) -> None:
    gate = _layer(engine, 1).mlp.gate
    forward = gate.forward

    def rounded(hidden: torch.Tensor) -> Any:
        out = forward(hidden.bfloat16().float())
        return (out[0].bfloat16().float(), *out[1:])

    gate.forward = rounded


def _head_in_bfloat16(engine: TracedEngine) -> None:
    model: Any = engine.model
    compute = model.compute_logits
    model.compute_logits = lambda hidden, *more: compute(hidden.bfloat16().float(), *more).bfloat16().float()


def _stale_cache(engine: TracedEngine) -> None:
    """The third request attends to other keys and values than the second has written."""
    ask, calls = engine.ask, []

    def stale(tokens: list[int], **sampling: Any) -> Any:
        calls.append(tokens)
        if len(calls) == 3:
            for cache in engine.worker.model_runner.kv_caches:
                cache.mul_(1.05)
        return ask(tokens, **sampling)

    engine.ask = stale  # type: ignore[method-assign]


def _kept_prefix(engine: TracedEngine) -> None:
    """The first request has older weights; the prefix cache is not reset when the others' arrive."""
    ask, own = engine.ask, engine.engine.vllm_config.model_config.model
    load(engine, os.environ[FILES])
    calls = []

    def after(tokens: list[int], **sampling: Any) -> Any:
        calls.append(tokens)
        if len(calls) == 2:
            load(engine, own)
        return ask(tokens, **sampling)

    engine.ask = after  # type: ignore[method-assign]


def _sampling(**more: Any) -> Callable[[TracedEngine], None]:
    def change(engine: TracedEngine) -> None:
        ask = engine.ask
        engine.ask = lambda tokens, **sampling: ask(tokens, **(sampling | more))  # type: ignore[method-assign]

    return change


_THETA = {"rope_type": "default", "rope_theta": 20000.0}
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
CAUSES = {
    "rope-theta": Seeded("rope scaling", (0, points.ROTATED_QUERY), options=_set(rope_parameters=_THETA), word="20000"),
    "rope-factor": Seeded(
        "rope scaling", (0, points.ROTATED_QUERY), "llama3", _set(rope_parameters=_LLAMA3), word="factor"
    ),
    "rope-size": Seeded("rope scaling", (0, points.ROTATED_QUERY), change=_sizes_of_angles, word="sizes"),
    "window-lost": Seeded("window", (0, points.ATTENTION), "mistral", _set(sliding_window=None), word="sliding_window"),
    "window-other": Seeded("window", (0, points.ATTENTION), "mistral", _set(sliding_window=12), word="12"),
    "norm-epsilon": Seeded("norm epsilon", (0, points.ATTENTION_INPUT), options=_set(rms_norm_eps=1e-2), word="0.01"),
    "norm-epsilon-of-one": Seeded("norm epsilon", (1, points.MLP_INPUT), change=_epsilon, word="scaled"),
    "router-dtype": Seeded("router dtype", (1, points.ROUTER), "qwen3_moe", change=_router_in_bfloat16),
    "head-dtype": Seeded("head dtype", (2, points.HEAD), change=_head_in_bfloat16),
    "missing-expert": Seeded(
        "missing expert", (1, points.MLP), "qwen3_moe", weights=_zero_expert(5), word="layers.1.mlp.experts.5"
    ),
    "unused-expert": Seeded(
        "missing expert", (1, points.MLP), "qwen3_moe", weights=_zero_expert(3), word="layers.1.mlp.experts.3"
    ),
    "permuted-expert": Seeded(
        "permuted expert", (1, points.MLP), "qwen3_moe", weights=_swap_experts, word="layers.1.mlp.experts.3"
    ),
    "stale-cache": Seeded("stale KV", (0, CACHE), change=_stale_cache, word="sync.pause"),
    "kept-prefix": Seeded(
        "stale KV", (0, CACHE), weights=_noise("model.layers.0.self_attn.v_proj.weight"), change=_kept_prefix
    ),
    "quantised": Seeded("quantisation", (1, points.PROJECTION), weights=_round, word="o_proj"),
    "temperature": Seeded("temperature", (2, SAMPLER), change=_sampling(temperature=0.7), word="0.7"),
    "top-p": Seeded("sampling", (2, SAMPLER), change=_sampling(top_p=0.4), word="top_p"),
    "template": Seeded(
        "template", (0, TEMPLATE), options={"chat_template": "{% for m in messages %}t9 {{ m.content }}{% endfor %}"}
    ),
    "stale-weight": Seeded(
        "stale weight", (0, points.MLP), weights=_noise("model.layers.0.mlp.up_proj.weight"), word="up_proj"
    ),
    "stale-decay": Seeded("stale weight", (0, points.ATTENTION), "qwen3_5", weights=_decay_faster, word="A_log"),
    "lost-tap": Seeded("stale weight", (0, points.ATTENTION), "lfm2", weights=_lose_a_tap, word="conv"),
    "head-rows": Seeded("permuted weight", (2, points.HEAD), weights=_swap_rows, word="lm_head"),
    "experts-of-a-token": Seeded(
        "router", (0, points.MLP), "qwen3_moe", _set(num_experts_per_tok=2), word="num_experts_per_tok"
    ),
    "residual-multiplier": Seeded(
        "multiplier", (0, points.MLP_INPUT), "granite", _set(residual_multiplier=0.5), word="residual_multiplier"
    ),
    "attention-scale": Seeded(
        "attention scale", (0, points.ATTENTION), "granite", _set(attention_multiplier=0.2), word="attention_multiplier"
    ),
}
"""Name -> cause."""


def change(engine: TracedEngine) -> None:
    seeded = CAUSES[os.environ["DIFF_CAUSE"]] if "DIFF_CAUSE" in os.environ else None
    if seeded is None:
        return
    if seeded.change is not None:
        seeded.change(engine)
    elif seeded.weights is not None:
        load(engine, os.environ[FILES])


def other_weights(source: Path, target: Path, weights: Callable[[State], None]) -> None:
    """Write a copy of an HF checkpoint with other weights."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    state = load_file(target / "model.safetensors")
    weights(state)
    save_file(state, target / "model.safetensors", {"format": "pt"})


def main() -> None:
    traced_engine.main(change)


if __name__ == "__main__":
    main()
