"""PEFT's files of an adapter: ``adapter_config.json`` and ``adapter_model.safetensors``.

Source: PEFT 0.21 ``utils/save_and_load.py`` (names), ``tuners/lora/config.py`` (keys).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megarl.core.config.lora import LoraConfig
from megarl.core.durable import replace_directory
from megarl.core.errors import CheckpointError, first_of
from megarl.weights.checkpoint.formats.output import partial_path, write_json
from megarl.weights.reshard import boxes
from megarl.weights.reshard.adapters import Factors, names_module
from megarl.weights.reshard.execute import Transport, exchange
from megarl.weights.reshard.layout import Layout
from megarl.weights.reshard.layouts import whole_layout
from megarl.weights.reshard.plan import build_plan
from megarl.weights.reshard.transport import GroupTransport

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before the HF names of tensors in the file."""


def read_config(folder: Path) -> dict[str, Any]:
    """``adapter_config.json``. Raises CheckpointError where it is missing, damaged, or of another kind of adapter."""
    path = folder / CONFIG
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{folder} is no PEFT adapter: {path.name} cannot be read ({error})") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        raise CheckpointError(f"{path} is no LoRA adapter (peft_type); megarl reads LORA alone")
    for key in ("use_dora", "use_qalora", "layer_replication", "lora_bias", "megatron_config", "target_parameters"):
        if found.get(key):
            raise CheckpointError(
                f"{path} has {key}={found[key]!r}, which megarl does not compute; it reads plain LoRA"
            )
    if found.get("bias", "none") != "none":
        raise CheckpointError(f"{path} has bias={found['bias']!r}; megarl reads adapters with bias='none'")
    return found


def write_adapter(
    target: Path,
    lora: LoraConfig,
    factors: Mapping[str, Factors],
    layout: Layout,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    base: str,
    modules_to_save: list[str],
    head: str = "lm",
    transport: Transport | None = None,
    bucket_bytes: int = 64 << 20,
) -> dict[str, int]:
    """Write a rank's adapters as PEFT's files; every rank of the grid calls it, rank 0 writes.

    Args:
        layout: Of the adapters and of what ``modules_to_save`` trains.
        tensors: Local name -> tensor.
        base: Path or name of the model that the adapter is for.

    Returns:
        HF name -> digest of this rank's part of what was written.
    """
    whole, digests = gathered(layout, rank, tensors, transport=transport, bucket_bytes=bucket_bytes)
    if rank == 0:
        temporary = partial_path(target)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file({PREFIX + name: tensor for name, tensor in whole.items()}, temporary / TENSORS, {"format": "pt"})
        write_json(temporary / CONFIG, config_of(lora, factors, base, modules_to_save, head))
        replace_directory(temporary, target)
    return digests


def gathered(
    layout: Layout,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    transport: Transport | None = None,
    bucket_bytes: int = 64 << 20,
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Whole tensors of a layout by their HF names, on rank 0 ({} on others), and digests of this rank's part."""
    dtype = next((tensor.dtype for tensor in tensors.values()), torch.float32)
    plan = build_plan(layout, whole_layout("PEFT", layout.tensors), colocated=True)
    whole = {name: torch.empty(shape, dtype=dtype) for name, shape in layout.tensors.items()} if rank == 0 else {}
    sent = exchange(
        plan, rank, tensors, whole.__getitem__, transport or GroupTransport(), dtype=dtype, bucket_bytes=bucket_bytes
    )
    return whole, {name: digest for (_, name), digest in sent.items()}


def config_of(
    lora: LoraConfig, factors: Mapping[str, Factors], base: str, modules_to_save: list[str], head: str = "lm"
) -> dict[str, Any]:
    """``adapter_config.json`` of adapters.

    A target is the end of the modules' names where that names no module without an adapter.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head == "lm" else "SEQ_CLS",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True if lora.init == "kaiming" else "gaussian",
        "target_modules": [own.module for own in factors.values()],
        "modules_to_save": modules_to_save or None,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": dict(lora.alpha_pattern),
        "inference_mode": True,
    }


def load_adapter(folder: Path, layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill a rank's adapters from PEFT's files, with the file's bits where the dtypes are equal.

    Raises CheckpointError naming tensors that are missing, or that no adapter of this model takes.
    """
    read_config(folder)
    path = folder / TENSORS
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {TENSORS}; save the adapter with safe_serialization=True")
    with safe_open(path, framework="pt") as file:
        stored = {own_name(name): name for name in file.keys()}  # noqa: SIM118 - it is no mapping
        missing = [name for name in layout.tensors if name not in stored]
        if missing:
            raise CheckpointError(f"{path} lacks {first_of(missing, 3)}; give model.lora the targets that it has")
        unused = [name for name in stored if name not in layout.tensors]
        if unused:
            raise CheckpointError(f"{path} has {first_of(unused, 3)}, which no target of model.lora takes")
        with torch.no_grad():
            for pad in layout.padding(rank):
                tensors[pad.local][boxes.index_of(boxes.start_of(pad.box), boxes.shape_of(pad.box))].zero_()
            for piece in layout.pieces(rank):
                values = file.get_slice(stored[piece.tensor])
                if tuple(values.get_shape()) != layout.tensors[piece.tensor]:
                    raise CheckpointError(
                        f"{piece.tensor} in {path} has shape {tuple(values.get_shape())}, this model's has "
                        f"{layout.tensors[piece.tensor]}; set model.lora.rank to the adapter's"
                    )
                part = values[tuple(slice(low, high) for low, high in piece.box)]
                tensors[piece.local][boxes.index_of(piece.at, boxes.shape_of(piece.box))].copy_(part)


def own_name(stored: str) -> str:
    """HF name of a tensor of PEFT's file."""
    return stored.removeprefix(PREFIX).replace(".lora_A.default.", ".lora_A.").replace(".lora_B.default.", ".lora_B.")


__all__ = ["CONFIG", "TENSORS", "config_of", "gathered", "load_adapter", "names_module", "read_config", "write_adapter"]
