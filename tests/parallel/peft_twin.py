"""A model of transformers with PEFT's adapters, which megarl's adapters are compared with."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megarl.config.lora import LoraConfig
from megarl.weights.architectures import Architecture, architecture
from megarl.weights.checkpoint.formats import peft
from megarl.weights.checkpoint.formats.hf import read_hf_config
from megarl.weights.checkpoint.formats.output import write_json
from megarl.weights.reshard.adapters import factors_of, saved_whole
from megarl.weights.reshard.layouts import hf_layout

FOLDER = "adapter"


def save_adapter(path: Path, lora: LoraConfig, seed: int = 0) -> Path:
    """Write an adapter of random A's and B's beside the model in ``path``, as PEFT's files."""
    return write_adapter(path, lora, _drawn(path, lora, seed))


def _drawn(path: Path, lora: LoraConfig, seed: int) -> dict[str, torch.Tensor]:
    hf_config, generator = read_hf_config(path), torch.Generator().manual_seed(seed)
    factors, shapes = factors_of(hf_config, lora), hf_layout(hf_config).tensors
    tensors = {}
    for own in factors.values():
        tensors[own.a] = torch.randn(own.rank, own.shape[1], generator=generator) / own.shape[1] ** 0.5
        tensors[own.b] = torch.randn(own.shape[0], own.rank, generator=generator) * 0.1
    for name in saved_whole(shapes, lora):
        tensors[name] = 0.5 * torch.randn(shapes[name], generator=generator)
    return tensors


def write_adapter(path: Path, lora: LoraConfig, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write an adapter beside the model in ``path``, as PEFT's files. ``tensors``: by megarl's names."""
    hf_config = read_hf_config(path)
    target = path / FOLDER
    target.mkdir(exist_ok=True)
    stored = {peft.stored_name(name, architecture(hf_config)): tensor for name, tensor in tensors.items()}
    save_file(stored, target / peft.TENSORS)
    settings = peft.config_of(lora, factors_of(hf_config, lora), str(path), lora.modules_to_save, hf_config=hf_config)
    write_json(target / peft.CONFIG, settings)
    return target


def load(model: Any, folder: Path, lora: LoraConfig) -> Any:
    """The model with PEFT's adapters of a folder, to be trained.

    transformers has all experts of a layer in two tensors. PEFT adapts these with one A and one B of rank 2 r for gate
    and up together, of whose B two blocks have numbers and the others stay zero. PEFT 0.21 turns files into that
    itself, but leaves dense layers and shared experts of such a model out, and scales rslora's wrongly.
    """
    import peft as library

    with safe_open(folder / peft.TENSORS, framework="pt") as file:
        tensors = {peft.own_name(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    factors = factors_of(read_hf_config(folder.parent), lora)
    plain = [own.module for own in factors.values() if _EXPERTS not in own.module]
    has_experts = len(plain) < len(factors)
    config = library.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        target_modules=plain,
        rank_pattern=dict(lora.rank_pattern),
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if has_experts else None,
    )
    if has_experts:
        config.rank_pattern = {r".*\.gate_up_proj": 2 * lora.rank}
        config.alpha_pattern = {r".*\.gate_up_proj": lora.alpha * (2**0.5 if lora.rslora else 2)}
    with warnings.catch_warnings(), patch("peft.utils.transformers_weight_conversion._convert_peft_config_moe"):
        warnings.simplefilter("ignore")
        adapted = library.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if not parameter.requires_grad:
            continue
        value = _of_peft(name, adapted, tensors)
        assert value.shape == parameter.shape, (name, value.shape, parameter.shape)
        parameter.data.copy_(value)
        if ".experts.base_layer.lora_B" in name:
            mask = (value != 0).float()
            parameter.register_hook(lambda grad, mask=mask: grad * mask)
    return adapted


_EXPERTS = ".mlp.experts."


def _of_peft(name: str, adapted: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Tensor of PEFT's parameter, of a file's."""
    own = peft.own_name(name)
    if _EXPERTS not in own:
        return tensors[own]
    module, letter = own.partition(_EXPERTS)[0], "A" if ".lora_A" in name else "B"
    experts = range(adapted.get_submodule(name.partition(".lora_")[0]).num_experts)

    def stack(leaf: str) -> torch.Tensor:
        return torch.stack([tensors[f"{module}{_EXPERTS}{e}.{leaf}.lora_{letter}.weight"] for e in experts])

    if ".base_layer." in name:
        gate, up = stack("gate_proj"), stack("up_proj")
        if letter == "A":
            each = torch.cat([gate, up], dim=1)
        else:
            each = torch.stack([torch.block_diag(*pair) for pair in zip(gate, up, strict=True)])
    else:
        each = stack("down_proj")
    return each.flatten(0, 1) if letter == "A" else each.permute(1, 2, 0).flatten(1)


def of_files(model: Any, folder: Path) -> Any:
    """The model with PEFT's adapters of a folder as PEFT itself reads it, to be trained."""
    import peft as library

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # tensors that are missing
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return library.PeftModel.from_pretrained(model, str(folder), is_trainable=True)


def by_file(
    adapted: Any, values: Mapping[str, torch.Tensor], table: Architecture | None = None
) -> dict[str, torch.Tensor]:
    """Tensors of PEFT's parameters by megarl's names; ``values`` has them by PEFT's.

    ``table``: of a model of which transformers has other names than its checkpoint.
    """
    found: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        own = peft.own_name(name, table)
        if _EXPERTS not in own:
            found[own] = value
            continue
        module, _, which = own.partition(".mlp.experts.")
        wrapper = adapted.get_submodule(name.partition(".lora_")[0])
        experts, rank = wrapper.num_experts, value.shape[0 if ".lora_A" in name else 1] // wrapper.num_experts
        is_a = ".lora_A" in name
        each = value.reshape(experts, rank, -1)
        if not is_a:
            each = value.reshape(value.shape[0], rank, experts).permute(2, 0, 1)
        for expert in range(experts):
            place, letter, own_part = f"{module}.mlp.experts.{expert}", "A" if is_a else "B", each[expert]
            if not which.startswith("base_layer"):
                found[f"{place}.down_proj.lora_{letter}.weight"] = own_part
                continue
            half, rows = rank // 2, each.shape[1] // 2
            gate = own_part[:half] if is_a else own_part[:rows, :half]
            up = own_part[half:] if is_a else own_part[rows:, half:]
            found[f"{place}.gate_proj.lora_{letter}.weight"] = gate
            found[f"{place}.up_proj.lora_{letter}.weight"] = up
    return found
