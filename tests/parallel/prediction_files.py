"""A prediction layer in the files of a tiny model, whose drafts are known."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megarl.weights.architectures import architecture
from megarl.weights.architectures.table import prediction_tensors
from megarl.weights.checkpoint.formats.hf import SINGLE, read_hf_config
from megarl.weights.checkpoint.formats.hf_source import places_in_files

HIDDEN = ("hnorm.weight", "pre_fc_norm_hidden.weight")
LAST = ("shared_head.norm.weight", "mtp.norm.weight")


def add_prediction(path: Path) -> list[str]:
    """Add a layer that passes the hidden state on: it drafts the token that was likeliest before the last one, if the
    model's last norm has weights of 1. Returns the stored names."""
    raw = json.loads((path / "config.json").read_text())
    raw.get("text_config", raw).update(num_nextn_predict_layers=1, mtp_num_hidden_layers=1)
    (path / "config.json").write_text(json.dumps(raw))
    config = read_hf_config(path)
    tensors = load_file(path / SINGLE)
    dtype = next(value.dtype for name, value in tensors.items() if name.endswith("embed_tokens.weight"))
    unit = torch.zeros if config["model_type"].startswith("qwen3") else torch.ones  # these add 1 to a norm's weight
    added = {}
    for name, place in places_in_files(config, prediction_tensors(architecture(config), config), "lm").items():
        value = 0.05 * torch.randn(place.whole)
        if name.endswith(("eh_proj.weight", "mtp.fc.weight")):
            value = torch.cat([torch.zeros(place.whole[0], place.whole[0]), torch.eye(place.whole[0])], 1)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            value = torch.zeros(place.whole)
        elif name.endswith((*HIDDEN, *LAST)):
            value = unit(place.whole)
        added[place.stored] = value.to(dtype)
    save_file(tensors | added, path / SINGLE, metadata={"format": "pt"})
    return list(added)


def scale_tensor(path: Path, name: str, factor: float) -> None:
    """Multiply a stored tensor by ``factor``."""
    tensors = load_file(path / SINGLE)
    save_file(tensors | {name: tensors[name] * factor}, path / SINGLE, metadata={"format": "pt"})
