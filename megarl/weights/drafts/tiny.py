"""Build a tiny model of a family known to transformers: its configuration, and the tensors in its files."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.core.errors import ArchitectureError
from megarl.weights.architectures.table import EXPERT, Shape
from megarl.weights.checkpoint.formats.hf_source import read_config_json

LAYERS = 4
SMALL: Mapping[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "sliding_window": 8,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_nextn_predict_layers": 0,
}
"""Keys of a tiny configuration; all sizes are different, to avoid accidental matches."""
_NEEDED = {"hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "rope_parameters"}
SMALL_TOWER: Mapping[str, Any] = {
    "depth": 3,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "num_attention_heads": 2,
    "out_hidden_size": SMALL["hidden_size"],
    "patch_size": 14,
    "spatial_merge_size": 2,
    "num_position_embeddings": 25,
    "window_size": 56,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 2],
}
"""Keys of a tiny vision tower."""
TOKENS: Mapping[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
_INNER = re.compile(r"^(model\.)?language_model\.(model\.)?")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_BLOCK = re.compile(r"\b(blocks|layers|\w+_list)\.\d+\.")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


@dataclass
class StoredTensor:
    """Tensors with the same name except for the layer and expert numbers."""

    shape: Shape
    layers: set[int] = field(default_factory=set)
    """Empty for a tensor outside the layers."""
    prefixed: bool = False
    """True if the files have the prefix of a language model inside a larger one."""
    others: set[Shape] = field(default_factory=set)
    """Further shapes, of some of the layers."""


Stored = dict[str, StoredTensor]
"""Name as in tables (without the layer's prefix, ``{expert}`` for a number) -> stored tensors."""


def tiny_config(folder: Path) -> dict[str, Any]:
    """Return the tiny model's configuration: class and settings of ``folder``'s config.json, with ``SMALL`` sizes.

    Raises:
        CheckpointError: config.json cannot be read.
        ArchitectureError: transformers lacks the family or cannot build a model of it, or it is no language model.
    """
    config = read_config_json(folder, "DIR")
    model_type = str(config.get("model_type"))
    try:
        made = _config_class(model_type)
    except KeyError:
        from transformers import __version__

        raise ArchitectureError(
            f"transformers {__version__} has no configuration class for model_type={model_type!r}; where the family is "
            "another one's under a new name, write that name into model_type"
        ) from None
    try:
        whole = made(**copy.deepcopy(config)).to_dict()
    except Exception as error:  # the class may raise anything
        raise ArchitectureError(
            f"{folder / 'config.json'}: transformers' {made.__name__} refuses it ({error}); give the one that the "
            "family has published"
        ) from error
    if lacking := sorted(_NEEDED - {**text_of(whole)}.keys()):
        raise ArchitectureError(
            f"the configuration of a {model_type} model lacks {', '.join(lacking)}, which megarl's tables need; use a "
            "family with rotary embeddings whose configuration has these keys"
        )
    tiny = {**whole, **_small(whole), **TOKENS}
    if isinstance(text := whole.get("text_config"), dict):
        tiny["text_config"] = {**text, **_small(text), **TOKENS}
    if isinstance(vision := whole.get("vision_config"), dict):
        tiny["vision_config"] = {**vision, **{key: value for key, value in SMALL_TOWER.items() if vision.get(key)}}
    text = text_of(tiny)
    if "head_dim" in text and not _runs(tiny):  # some classes require heads of hidden_size / num_attention_heads
        text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
    if not _runs(tiny):
        raise ArchitectureError(
            f"transformers' {model_type} with tiny sizes computes nothing, so there is no draft; write its table by "
            "hand (docs/adding_a_model.md)"
        )
    return tiny


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a configuration."""
    part: dict[str, Any] = config.get("text_config", config)
    return part


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the language model's keys at the top, as tables read it."""
    return {**text_of(config), **{key: value for key, value in config.items() if key != "text_config"}}


def _small(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Tiny values of a language model's keys."""
    layers = whole.get("num_hidden_layers")
    small = {key: value for key, value in SMALL.items() if whole.get(key) is not None}
    if "kv_lora_rank" in small:
        small["head_dim"], small["num_key_value_heads"] = small["qk_rope_head_dim"], small["num_attention_heads"]
    if "num_experts_per_tok" in small:
        small["num_experts_per_tok"] = min(whole["num_experts_per_tok"], small["num_experts_per_tok"])
    lists: dict[str, Any] = {
        key: [*value[: LAYERS - 1], value[-1]]
        for key, value in whole.items()
        if isinstance(value, list) and len(value) == layers
    }
    rope = whole.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("mrope_section") and "head_dim" in small:
        half = int(small["head_dim"] * (rope.get("partial_rotary_factor") or 1.0)) // 2
        rows = max(half // 4, 1)
        lists["rope_parameters"] = {**rope, "mrope_section": [half - 2 * rows, rows, rows]}
    return small | lists


def _runs(config: Mapping[str, Any]) -> bool:
    import torch

    model = tiny_model(config)
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(2, 10)[None])
    except Exception:  # the model may raise anything
        return False
    return True


def _config_class(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def tiny_model(config: Mapping[str, Any]) -> Any:
    """Return a random float32 model of the family, without neutral values (of norms, biases).

    Raises ArchitectureError if transformers cannot build a model of the configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    try:
        made = _config_class(str(config["model_type"]))(**copy.deepcopy(dict(config)))
        auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
        model = auto.from_config(made, dtype=torch.float32, attn_implementation="eager").eval()
    except Exception as error:  # the class may raise anything
        raise ArchitectureError(
            f"transformers makes no model of this config.json ({type(error).__name__}: {error}); give the one that the "
            "family has published"
        ) from error
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.add_(0.2 * torch.randn_like(tensor))
            elif "bias" in name:
                tensor.copy_(0.3 * torch.randn_like(tensor))
    return model


def stored_tensors(model: Any, names: Collection[str] = ()) -> Stored:
    """Return the tensors in the files that transformers saves for a model.

    Args:
        names: Names in a checkpoint's files. If they match transformers' own format better than the one that it
            writes for older programs, its own is returned.
    """
    written = _saved(model, original=True)
    if not {*names} - written.keys():
        return written
    return min(written, _saved(model, original=False), key=lambda stored: len(stored.keys() - {*names}))


def _saved(model: Any, *, original: bool) -> Stored:
    from safetensors import safe_open

    found: Stored = {}
    with tempfile.TemporaryDirectory(prefix="megarl-draft-") as folder:
        model.save_pretrained(folder, save_original_format=original)
        for file in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 -- it is no dict
                    place, layer = place_in_table(name)
                    shape = tuple(tensors.get_slice(name).get_shape())
                    one = found.setdefault(place, StoredTensor(shape))
                    one.others |= {shape} - {one.shape}
                    one.layers |= set() if layer is None else {layer}
                    one.prefixed |= _INNER.match(name) is not None
    return found


def place_in_table(name: str) -> tuple[str, int | None]:
    """Return (name as in tables, layer number) of a tensor in a checkpoint's files."""
    name = _INNER.sub("model.", name)
    name = name.replace("model.visual.", "visual.", 1) if name.startswith("model.visual.") else name
    layer = _LAYER.match(name)
    if layer is None:
        return _BLOCK.sub(r"\1.{block}.", name), None
    return _EXPERT.sub(EXPERT, name[layer.end() :]), int(layer[1])


def names_in(folder: Path) -> set[str]:
    """Return the names, as in tables, in the index of a checkpoint's files; empty without an index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return set()
    return {place_in_table(name)[0] for name in json.loads(index.read_text())["weight_map"]}


def names_beside(folder: Path, stored: Stored) -> Iterator[str]:
    """Names in ``folder``'s files that the tiny model lacks: transformers does not read them."""
    yield from sorted(name for name in names_in(folder) if name not in stored)
