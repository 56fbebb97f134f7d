"""Draft layers of a worker are compared with the files once, and with themselves at every sync."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from megarl.core.errors import WeightsDiffer, WeightSyncError
from megarl.weights.checkpoint.formats.hf import read_hf_config
from megarl.weights.reshard.layouts import vllm_layout
from tests.parallel.families import hf_model
from tests.parallel.prediction_files import add_prediction


def modules_of(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """Modules with parameters of these names."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.zeros(shape)))
    return root


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5"])
def test_altered_layers_are_found(tmp_path: Path, family: str) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from megarl.engines.sync.draft_layers import DraftLayers
    from megarl.engines.sync.files import read_files
    from megarl.engines.sync.writer import LocalTensor

    hf_model(family).save_pretrained(tmp_path)
    add_prediction(tmp_path)
    layout = vllm_layout(read_hf_config(tmp_path), 2, drafts=True)
    config = cast(Any, SimpleNamespace(model=str(tmp_path), dtype=torch.float32, head_dtype=torch.float32))
    shapes, rank = layout.local_shapes(1), 1
    tensors = {name: LocalTensor(shape, torch.float32) for name, shape in shapes.items()}
    model, drafter = modules_of({"embed.weight": (8, 4)}), modules_of(shapes)
    drafter.add_module("embed", model.get_submodule("embed"))
    record_metadata_for_reloading(drafter)
    read_files(layout, rank, lambda n: drafter.get_parameter(n).data, lambda *_: None, tmp_path, torch.float32)

    layers = DraftLayers(drafter, model, config, layout, tensors, rank)
    layers.check()
    for name, parameter in drafter.named_parameters():
        first = parameter.data.view(-1)[0].clone()
        parameter.data.view(-1)[0] += 1
        if name == "embed.weight":  # the model's own: updates write it
            layers.check()
            continue
        with pytest.raises(WeightsDiffer, match="draft layers have changed"):
            layers.check()
        with pytest.raises(WeightsDiffer, match="the engine computes with other weights than"):
            DraftLayers(drafter, model, config, layout, tensors, rank).check()
        parameter.data.view(-1)[0] = first
    drafter.add_module("embed", modules_of({"weight": (8, 4)}))
    record_metadata_for_reloading(drafter)
    with pytest.raises(WeightSyncError, match=r"differ in these local tensors: embed\.weight"):
        DraftLayers(drafter, model, config, layout, tensors, rank)
