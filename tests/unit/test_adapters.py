"""Adapters as rows: which tensors have one, where A and B lie on every grid, and the bytes of a sync."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from megarl.config.lora import LoraConfig
from megarl.core.errors import ConfigError
from megarl.weights.reshard.adapters import (
    AdaptedModel,
    AdapterDelivery,
    Factors,
    MergedTensors,
    SeparateTensors,
    adapter_layout,
    factors_of,
    local_adapters,
    merged,
    saved_whole,
)
from megarl.weights.reshard.buckets import bytes_of
from megarl.weights.reshard.layouts import MegatronGrid, hf_layout, megatron_layout, vllm_layout
from megarl.weights.reshard.plan import build_plan
from tests.unit.reshard_cases import qwen3_config

GRIDS = [
    MegatronGrid(),
    MegatronGrid(tp=2, dp=2),
    MegatronGrid(tp=4),
    MegatronGrid(tp=2, pp=2),
    MegatronGrid(pp=2, vpp=2),
    MegatronGrid(cp=2, tp=2),
]
LORA = LoraConfig(rank=2, alpha=3.0, targets=["all-linear", "lm_head", "embed_tokens"])
QWEN2_5_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "rope_theta": 1000000.0,
}
"""config.json of Qwen/Qwen2.5-7B-Instruct, as far as shapes depend on it."""


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_every_rank_holds_its_parts_of_every_adapter_once(grid: MegatronGrid, tied: bool) -> None:
    """Of A and B as of any tensor: local tensors are tiled, and what all ranks hold makes up the whole."""
    config = qwen3_config(tie_word_embeddings=tied)
    lora = LoraConfig(
        rank=2, targets=["all-linear", *([] if tied else ["lm_head", "embed_tokens"])], rank_pattern={"o_proj": 3}
    )
    base, factors = megatron_layout(config, grid), factors_of(config, lora)
    layout = adapter_layout(base, factors)
    for rank in range(grid.world_size):
        layout.check(rank)
        for local, own in local_adapters(base, factors, rank).items():
            shapes = layout.local_shapes(rank)
            for each in own:
                rows = base.local_shapes(rank)[local][1 if each.factors.is_embedding else 0]
                assert shapes[each.b][0] == each.rows
                assert shapes[each.a][0] == each.factors.rank == shapes[each.b][1]
                assert sum(end - begin for begin, end in each.places) <= rows
    whole = adapter_layout(hf_layout(config), factors)
    for source, destination in ((layout, whole), (whole, layout)):
        build_plan(source, destination).check()
    for tp in (1, 2):
        build_plan(layout, adapter_layout(vllm_layout(config, tp), factors)).check()


def test_merged_weights_are_the_same_on_every_grid() -> None:
    """A rank's part of W + scale · B·A is that of the whole tensor, and unmerging gives W back."""
    config = qwen3_config()
    factors = factors_of(config, LORA)
    generator = torch.Generator().manual_seed(0)

    def numbered(layout: Any) -> dict[str, torch.Tensor]:
        return {name: torch.randn(shape, generator=generator) for name, shape in layout.tensors.items()}

    whole = hf_layout(config)
    tensors = numbered(whole) | numbered(adapter_layout(whole, factors))
    expected = {
        name: tensors[name] if name not in factors else tensors[name] + product(factors[name], tensors)
        for name in whole.tensors
    }
    for grid in GRIDS:
        base = megatron_layout(config, grid)
        for rank in range(grid.world_size):
            own = local_tensors(base, rank, tensors)
            ab = local_tensors(adapter_layout(base, factors), rank, tensors)
            adapters = local_adapters(base, factors, rank)
            found = MergedTensors(AdaptedModel(own, ab, adapters))
            for name, tensor in local_tensors(base, rank, expected).items():
                torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)
            for name, of_tensor in adapters.items():
                back = merged(found[name], of_tensor, ab, sign=-1.0)
                torch.testing.assert_close(back, own[name], rtol=1e-4, atol=1e-5)
            separate = SeparateTensors(AdaptedModel(own, ab, adapters))
            for of_tensor in adapters.values():
                for each in of_tensor:
                    assert torch.equal(separate[each.a], ab[each.a])
                    assert torch.equal(separate[each.b], ab[each.b] * each.factors.scale)
            assert set(separate) == {*own, *ab} and len(separate) == len(own) + len(ab)


def product(own: Factors, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum that an adapter adds to its tensor."""
    found = own.scale * (tensors[own.b] @ tensors[own.a])
    return found.t() if own.is_embedding else found


def local_tensors(layout: Any, rank: int, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A rank's local tensors, cut from whole ones; padding is zero."""
    found = {name: torch.zeros(shape) for name, shape in layout.local_shapes(rank).items()}
    for piece in layout.pieces(rank):
        part = whole[piece.tensor][tuple(slice(low, high) for low, high in piece.box)]
        at = tuple(slice(start, start + size) for start, size in zip(piece.at, part.shape, strict=True))
        found[piece.local][at] = part
    return found


def test_targets_are_named_as_peft_names_them() -> None:
    config = qwen3_config()
    layers = int(config["num_hidden_layers"])
    every = factors_of(config, LoraConfig(rank=4))
    assert len(every) == 7 * layers and "lm_head.weight" not in every
    few = factors_of(config, LoraConfig(rank=4, targets=["q_proj", "mlp.down_proj", "layers.1.self_attn.v_proj"]))
    assert {own.leaf for own in few.values()} == {"q_proj", "down_proj", "v_proj"} and len(few) == 2 * layers + 1
    ranked = factors_of(config, LoraConfig(rank=4, rank_pattern={"q_proj": 8}, alpha_pattern={"k_proj": 1.0}))
    q, k = (ranked[f"model.layers.0.self_attn.{leaf}.weight"] for leaf in ("q_proj", "k_proj"))
    assert (q.rank, q.scale, k.rank, k.scale) == (8, 4.0, 4, 0.25)
    root = factors_of(config, LoraConfig(rank=4, rslora=True))["model.layers.0.self_attn.q_proj.weight"]
    assert root.scale == 16.0


@pytest.mark.parametrize(
    "setting",
    [{"targets": ["query"]}, {"rank_pattern": {"query": 2}}, {"alpha_pattern": {"query": 2.0}}],
    ids=lambda s: next(iter(s)),
)
def test_a_name_of_no_layer_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"model.lora.{next(iter(setting))} has 'query'.*q_proj"):
        factors_of(qwen3_config(), LoraConfig(rank=4, **setting))


def test_a_module_to_save_must_be_there() -> None:
    tensors = hf_layout(qwen3_config()).tensors
    assert saved_whole(tensors, LoraConfig(rank=4, modules_to_save=["model.norm"])) == ["model.norm.weight"]
    with pytest.raises(ConfigError, match="modules_to_save has 'scorer'"):
        saved_whole(tensors, LoraConfig(rank=4, modules_to_save=["scorer"]))


def test_bytes_of_a_sync_at_the_shapes_of_7b() -> None:
    """Rank 32 on every linear layer: 2 % of the model at most, separate, counted from the plan."""
    lora = LoraConfig(rank=32)
    source, engines = megatron_layout(QWEN2_5_7B, MegatronGrid(tp=2, dp=4)), vllm_layout(QWEN2_5_7B, 1)
    full = bytes_of(engines, torch.bfloat16)
    assert full == 2 * sum(prod(shape) for shape in engines.tensors.values())
    delivery = AdapterDelivery.of(QWEN2_5_7B, lora, separate=True)
    plan = build_plan(delivery.layout(source), delivery.layout(engines))
    sent = bytes_of(plan.only(delivery.changed(plan.destination).__contains__).destination, torch.bfloat16)
    assert sent / full == pytest.approx(0.0106, abs=1e-4)
    merge = AdapterDelivery.of(QWEN2_5_7B, lora, separate=False)
    changed = build_plan(source, engines).only(merge.changed(engines).__contains__).destination
    assert bytes_of(changed, torch.bfloat16) / full == pytest.approx(0.857, abs=1e-3), "all but embeddings and norms"
    attention = AdapterDelivery.of(QWEN2_5_7B, LoraConfig(rank=32, targets=["q_proj"]), separate=False)
    beside = {name.split(".", 4)[-1] for name in attention.changed(engines) if ".layers.0." in name}
    assert beside == {f"{leaf}.{kind}" for leaf in ("q_proj", "k_proj", "v_proj") for kind in ("weight", "bias")}, (
        "a tensor of vLLM's, and its module, go whole"
    )
