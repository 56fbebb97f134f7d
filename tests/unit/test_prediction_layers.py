"""Prediction layers under ``mtp.``: kept or dropped by conversions, named as in Megatron-Core, copied into exports."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.core.errors import ArchitectureError, CheckpointError
from megarl.weights.architectures.complete import complete
from megarl.weights.checkpoint.convert.convert import Settings, convert_hf_to_megatron, convert_megatron_to_hf
from megarl.weights.checkpoint.convert.open_checkpoint import open_checkpoint
from megarl.weights.checkpoint.convert.verify import inspect_checkpoint
from megarl.weights.checkpoint.formats import hf
from megarl.weights.checkpoint.formats.hf_source import places_in_files
from megarl.weights.reshard import layout
from megarl.weights.reshard.layouts import MegatronGrid, hf_layout, megatron_layout
from megarl.weights.reshard.plan import build_plan
from tests.parallel.families import FAMILIES
from tests.unit.reshard_cases import Grid
from tests.unit.reshard_network import Network, run_threads
from tests.unit.reshard_oracle import Config, Tensors, assert_same, megatron_ranks, numbered_hf
from tests.unit.test_checkpoint_convert import deepseek, read_hf, write_hf

BESIDE = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_5_vl", "qwen3_5_moe_vl")


def config_of(family: str) -> Config:
    """config.json of a tiny model with a prediction layer; Qwen3-Next's has no key for it."""
    model_type, settings = FAMILIES[family]
    key = {} if family == "qwen3_next" else {"mtp_num_hidden_layers": 1}
    if "text_config" in settings:
        return {"model_type": model_type, **settings, "text_config": {**settings["text_config"], **key}}
    return {"model_type": model_type, **settings, **key}


def linear(prefix: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a gated MLP."""
    across = {f"{prefix}.{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
    return {**across, f"{prefix}.down_proj.weight": (hidden, width)}


def prediction_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """HF name -> shape, written from vLLM's ``qwen3_next_mtp.py`` and ``qwen3_5_mtp.py``."""
    text: dict[str, Any] = config.get("text_config", config)
    hidden, head, layer = text["hidden_size"], text["head_dim"], "mtp.layers.0"
    queries, keys = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        **{f"mtp.{name}.weight": (hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
        **{f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")},
        f"{layer}.self_attn.q_proj.weight": (2 * queries, hidden),
        **{f"{layer}.self_attn.{name}_proj.weight": (keys, hidden) for name in "kv"},
        f"{layer}.self_attn.o_proj.weight": (hidden, queries),
        **{f"{layer}.self_attn.{name}_norm.weight": (head,) for name in "qk"},
    }
    if "num_experts" not in text:
        return shapes | linear(f"{layer}.mlp", text["intermediate_size"], hidden)
    number, width = text["num_experts"], text["moe_intermediate_size"]
    shapes |= {
        f"{layer}.mlp.gate.weight": (number, hidden),
        f"{layer}.mlp.shared_expert_gate.weight": (1, hidden),
        **linear(f"{layer}.mlp.shared_expert", text["shared_expert_intermediate_size"], hidden),
    }
    if config["model_type"] == "qwen3_5_moe":
        stacks = f"{layer}.mlp.experts"
        both = (number, 2 * width, hidden)
        return shapes | {f"{stacks}.gate_up_proj": both, f"{stacks}.down_proj": (number, hidden, width)}
    for expert in range(number):
        shapes |= linear(f"{layer}.mlp.experts.{expert}", width, hidden)
    return shapes


def random(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def model_of(config: Config) -> tuple[Tensors, Tensors]:
    """Stored tensors of a model: those of its layers, and those of its prediction layer."""
    whole = complete(config)
    places = places_in_files(whole, hf_layout(whole).tensors, "lm").values()
    return random({place.stored: place.whole for place in places}), random(prediction_shapes(config))


def number_of(folder: Path, config: Config) -> int:
    """Number of prediction layers in a folder's config.json."""
    found = json.loads((folder / "config.json").read_text())
    text: dict[str, int] = found.get("text_config", found)
    return text.get("mtp_num_hidden_layers", found.get("num_nextn_predict_layers", 1))


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "drop"])
@pytest.mark.parametrize("family", BESIDE)
def test_a_layer_under_mtp_is_kept_or_dropped(tmp_path: Path, family: str, keep: bool) -> None:
    config = config_of(family)
    model, prediction = model_of(config)
    write_hf(tmp_path / "hf", config, model | prediction)
    chosen = Settings(progress=False, mtp=keep, verify=True, grid=MegatronGrid(tp=2, pp=2))
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "meg", chosen)
    convert_megatron_to_hf(tmp_path / "meg", tmp_path / "back", settings=chosen)
    assert_same(read_hf(tmp_path / "back"), model | (prediction if keep else {}))
    assert number_of(tmp_path / "back", config) == int(keep)
    for folder in ("hf", "meg", "back"):
        assert inspect_checkpoint(tmp_path / folder, mtp=keep, digests=True, progress=False).is_whole
    if not keep:
        return
    opened = open_checkpoint(tmp_path / "meg", mtp=True)
    same = {
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight",
        "final_layernorm.weight": "mtp.norm.weight",
        "transformer_layer.self_attention.linear_proj.weight": "mtp.layers.0.self_attn.o_proj.weight",
        "transformer_layer.self_attention.q_layernorm.weight": "mtp.layers.0.self_attn.q_norm.weight",
    }
    for key, name in same.items():
        want = prediction[name]
        assert torch.equal(opened.source.read(f"mtp.layers.0.{key}", layout.whole(tuple(want.shape))), want)
    opened.close()


def test_a_missing_or_a_second_layer_under_mtp_is_refused(tmp_path: Path) -> None:
    keep, config = Settings(progress=False, mtp=True), config_of("qwen3_5")
    model, prediction = model_of(config)
    write_hf(tmp_path / "without", config, model)
    with pytest.raises(CheckpointError, match=r"lacks mtp\..* of the prediction layers; leave them out"):
        convert_hf_to_megatron(tmp_path / "without", tmp_path / "out", keep)
    write_hf(tmp_path / "unknown", config, model | prediction | {"mtp.embed_tokens.weight": torch.ones(4, 4)})
    with pytest.raises(CheckpointError, match=r"does not know: mtp\.embed_tokens\.weight"):
        convert_hf_to_megatron(tmp_path / "unknown", tmp_path / "out", keep)
    second = {name.replace("layers.0", "layers.1"): tensor.clone() for name, tensor in prediction.items()}
    write_hf(tmp_path / "two", {**config, "mtp_num_hidden_layers": 2}, model | prediction | second)
    with pytest.raises(ArchitectureError, match=r"mtp_num_hidden_layers=2: its prediction layers share a projection"):
        convert_hf_to_megatron(tmp_path / "two", tmp_path / "out", keep)
    convert_hf_to_megatron(tmp_path / "two", tmp_path / "out", Settings(progress=False))


def exported(tmp_path: Path, config: Config, stored: Tensors, **options: Any) -> Tensors:
    """Export a model of numbers from the folder ``hf``, which has ``stored``; the tensors in the files."""
    write_hf(tmp_path / "hf", config, stored)
    whole = complete(config)
    plan = build_plan(hf_layout(whole), hf_layout(whole))
    trained = {name: torch.full(shape, 7.0) for name, shape in hf_layout(whole).tensors.items()}
    port = Network().port(0)
    hf.export_hf(plan, 0, trained, tmp_path / "hf", tmp_path / "out", transport=port, file_bytes=5000, **options)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    found = read_hf(tmp_path / "out")
    assert index.keys() == found.keys()
    return found


@pytest.mark.parametrize("family", [*BESIDE, "deepseek_v3"])
def test_an_export_has_the_prediction_layers_that_it_started_from(tmp_path: Path, family: str) -> None:
    if family == "deepseek_v3":
        config = deepseek()
        every = numbered_hf(config, mtp=True)
        prediction = {name: tensor for name, tensor in every.items() if name.startswith("model.layers.4.")}
        model = {name: tensor for name, tensor in every.items() if name not in prediction}
    else:
        config = config_of(family)
        model, prediction = model_of(config)
    found = exported(tmp_path, config, model | prediction, with_prediction=True)
    assert_same({name: tensor for name, tensor in found.items() if name in prediction}, prediction)
    assert found.keys() == model.keys() | prediction.keys()
    assert all((found[name] == 7).all() for name in model)
    assert number_of(tmp_path / "out", config) == 1


def test_every_rank_takes_part_in_an_export_with_prediction_layers(tmp_path: Path) -> None:
    """A file has tensors of the ranks, of the start model's files, or both."""
    config, grid = deepseek(), Grid(tp=2, pp=2)
    whole = hf_layout(config)
    every = {name: tensor.clone() for name, tensor in numbered_hf(config, mtp=True).items()}
    source = write_hf(tmp_path / "hf", config, every)
    trained = {name: every[name] + 0.5 for name in whole.tensors}
    plan, network = build_plan(megatron_layout(config, MegatronGrid(**grid.settings)), whole), Network()  # type: ignore[arg-type]
    jobs: list[Callable[[], Any]] = [
        functools.partial(
            hf.export_hf, plan, rank, tensors, source, tmp_path / "out",
            transport=network.port(rank), file_bytes=2000, with_prediction=True,
        )
        for rank, tensors in enumerate(megatron_ranks(config, trained, grid))
    ]  # fmt: skip
    run_threads(network, jobs)
    assert_same(read_hf(tmp_path / "out"), every | trained)


def test_an_export_leaves_out_prediction_layers_that_are_not_whole(tmp_path: Path) -> None:
    config = config_of("qwen3_next")
    model, prediction = model_of(config)
    del prediction["mtp.norm.weight"]
    assert exported(tmp_path, config, model | prediction, with_prediction=True).keys() == model.keys()
    assert number_of(tmp_path / "out", config) == 0


def test_an_export_in_another_dtype_casts_prediction_layers(tmp_path: Path) -> None:
    config = config_of("qwen3_5")
    model, prediction = model_of(config)
    found = exported(tmp_path, config, model | prediction, with_prediction=True, dtype=torch.bfloat16)
    assert_same({name: tensor for name, tensor in found.items() if name in prediction}, prediction, torch.bfloat16)
