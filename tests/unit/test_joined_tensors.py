"""Files whose tensors have several logical ones: read, written, converted and refused by the names in the files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.core.errors import CheckpointError
from megarl.weights.architectures import ARCHITECTURES
from megarl.weights.architectures.blocks import JOINED_QKV
from megarl.weights.architectures.complete import complete
from megarl.weights.architectures.table import JoinedTensor
from megarl.weights.checkpoint.convert.convert import Settings, convert_hf_to_megatron, convert_megatron_to_hf
from megarl.weights.checkpoint.convert.open_checkpoint import open_checkpoint
from megarl.weights.checkpoint.convert.verify import compute_digests, inspect_checkpoint
from megarl.weights.checkpoint.formats.hf_source import open_hf, places_in_files
from megarl.weights.reshard import layout
from megarl.weights.reshard.layouts import MegatronGrid, hf_layout
from tests.parallel.families import FAMILIES

GATE_UP = ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight")
DOWN = ("mlp.experts.{expert}.down_proj.weight",)
STACKS = {
    "stacked": (JoinedTensor("mlp.experts.gate_up_proj", GATE_UP), JoinedTensor("mlp.experts.down_proj", DOWN)),
    "transposed": (
        JoinedTensor("mlp.experts.gate_up_proj", GATE_UP, transposed=True),
        JoinedTensor("mlp.experts.down_proj", DOWN, transposed=True),
    ),
}
CASES = ("phi3", "ernie4_5_moe", "gpt_oss", *STACKS)
VERIFIED = Settings(progress=False, verify=True, file_bytes=5000, grid=MegatronGrid(tp=2, pp=2))


@pytest.fixture
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make a family's tiny model. A name of ``STACKS`` is a Qwen3-MoE whose files are arranged in another way."""
    name: str = request.param
    if name in STACKS:
        table = replace(ARCHITECTURES["qwen3_moe"], joined=(JOINED_QKV, *STACKS[name]))
        monkeypatch.setitem(ARCHITECTURES, "qwen3_moe", table)
        monkeypatch.setattr(
            "megarl.weights.checkpoint.formats.hf_source.JOINED", tuple(joined.name for joined in table.joined)
        )
    yield name if name not in STACKS else "qwen3_moe"


def config_of(family: str) -> dict[str, Any]:
    model_type, settings = FAMILIES[family]
    return {"model_type": model_type, **settings}


def write(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A checkpoint of random numbers; its tensors as they are stored."""
    whole = complete(config)
    generator = torch.Generator().manual_seed(5)
    places = places_in_files(whole, hf_layout(whole).tensors, "lm").values()
    shapes = {place.stored: place.whole for place in places}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize("family", CASES, indirect=True)
def test_there_and_back(family: str, tmp_path: Path) -> None:
    stored = write(tmp_path / "hf", config_of(family))
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "megatron", VERIFIED)
    convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "again", settings=VERIFIED)
    again = read(tmp_path / "again")
    assert again.keys() == stored.keys() and all(torch.equal(again[name], tensor) for name, tensor in stored.items())
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == stored.keys()
    digests = []
    for name in ("hf", "megatron", "again"):
        opened = open_checkpoint(tmp_path / name)
        digests.append(compute_digests(opened, None, progress=False))
        opened.close()
    assert digests[0] == digests[1] == digests[2]
    assert inspect_checkpoint(tmp_path / "again", digests=True, progress=False).is_whole


@pytest.mark.parametrize("family", ["transposed"], indirect=True)
def test_each_logical_tensor_is_its_part(family: str, tmp_path: Path) -> None:
    stored = write(tmp_path / "hf", config_of(family))
    source = open_hf(tmp_path / "hf")
    layer = "model.layers.1."
    both = stored[layer + "mlp.experts.gate_up_proj"][3]
    qkv = stored[layer + "self_attn.qkv_proj.weight"]
    expected = {
        "mlp.experts.3.gate_proj.weight": both[:, :40].T,
        "mlp.experts.3.up_proj.weight": both[:, 40:].T,
        "mlp.experts.3.down_proj.weight": stored[layer + "mlp.experts.down_proj"][3].T,
        "self_attn.k_proj.weight": qkv[96:144],
    }
    for name, want in expected.items():
        assert source.shapes[layer + name] == tuple(want.shape)
        assert torch.equal(source.read(layer + name, layout.whole(tuple(want.shape))), want)
        assert torch.equal(source.read(layer + name, ((5, 9), (2, 7))), want[5:9, 2:7])
    source.close()


@pytest.mark.parametrize("family", ["phi3"], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.2.mlp.gate_up_proj.weight"), r"lacks model\.layers\.2\.mlp\.gate_up_proj"),
        (
            lambda t: t.update({"model.layers.2.mlp.gate_up_proj.weight": torch.ones(190, 64)}),
            r"model\.layers\.2\.mlp\.gate_up_proj\.weight in .* has shape \(190, 64\), config\.json asks for \(192, 64",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(96, 64)}),
            r"does not know: model\.layers\.0\.mlp\.up_proj\.weight",
        ),
    ],
)
def test_errors_name_the_stored_tensor(family: str, change: Any, message: str, tmp_path: Path) -> None:
    tensors = write(tmp_path / "hf", config_of(family))
    change(tensors)
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "hf")
    found = inspect_checkpoint(tmp_path / "hf")
    assert not found.is_whole and all("mlp" in name for name in (*found.missing, *found.misshapen, *found.unknown))


def test_packed_weights_are_refused(tmp_path: Path) -> None:
    tensors = write(tmp_path / "hf", config_of("gpt_oss"))
    tensors["model.layers.0.mlp.experts.gate_up_proj_blocks"] = torch.zeros(8, 192, 2, 16, dtype=torch.uint8)
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"gate_up_proj_blocks in .* is in MXFP4.*Mxfp4Config\(dequantize=True\)"):
        open_checkpoint(tmp_path / "hf")
