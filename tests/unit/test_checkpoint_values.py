"""Values, dtypes and files that no model is trained with or served from are refused, by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.cli import main
from megarl.core.errors import CheckpointError
from megarl.weights.checkpoint.convert.convert import Settings, convert_hf_to_megatron, convert_megatron_to_hf
from megarl.weights.checkpoint.convert.verify import inspect_checkpoint
from megarl.weights.checkpoint.formats import hf
from megarl.weights.reshard.layouts import MegatronGrid, megatron_layout
from tests.unit.reshard_cases import qwen3_config
from tests.unit.reshard_oracle import Tensors, random_hf, unwritten
from tests.unit.test_checkpoint_convert import QUIET, read_hf, write_hf
from tests.unit.test_checkpoint_hf import write_checkpoint

NAME = "model.layers.2.mlp.up_proj.weight"


def source(root: Path, **changed: torch.Tensor) -> Path:
    config = qwen3_config()
    return write_hf(root / "hf", config, random_hf(config) | {NAME: changed["value"]} if changed else random_hf(config))


def load(path: Path) -> Tensors:
    """As a trainer's rank does."""
    layout = megatron_layout(qwen3_config(), MegatronGrid(2))
    got = unwritten(dict(layout.local_shapes(1)), torch.bfloat16)
    hf.load_into(path, layout, 1, got)
    return got


def weight(value: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    found = torch.ones(24, 8)
    found[20, 3] = value
    return found.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    path = source(tmp_path, value=weight(value, dtype))
    message = (
        rf"{NAME} in .*hf/model\.safetensors has {'a NaN' if value != value else 'an infinite value'}; use a "
        r"checkpoint from before"
    )
    with pytest.raises(CheckpointError, match=message + ".*--allow-nonfinite"):
        convert_hf_to_megatron(path, tmp_path / "out", QUIET)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=message):
        load(path)
    found = inspect_checkpoint(path, digests=True, progress=False)
    assert not found.is_whole and any(NAME in text for text in found.misshapen)


def test_values_that_are_not_finite_may_be_converted_on_purpose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To look at a model that has diverged."""
    path = source(tmp_path, value=weight(float("nan")))
    assert main(["convert", "hf-to-megatron", str(path), str(tmp_path / "meg"), "--allow-nonfinite", "--verify"]) == 0
    assert NAME in caplog.text
    with pytest.raises(CheckpointError, match=r"up_proj.* has a NaN|linear_fc1.* has a NaN"):
        convert_megatron_to_hf(tmp_path / "meg", tmp_path / "back", settings=QUIET)
    convert_megatron_to_hf(tmp_path / "meg", tmp_path / "back", settings=Settings(progress=False, allow_nonfinite=True))
    assert torch.equal(read_hf(tmp_path / "back")[NAME].isnan(), weight(float("nan")).isnan())


def test_a_value_that_the_wanted_dtype_cannot_hold(tmp_path: Path) -> None:
    path = source(tmp_path, value=weight(1e5))
    with pytest.raises(
        CheckpointError, match=rf"{NAME} in .* has a value that float16 cannot hold; use bfloat16 or float32"
    ):
        convert_hf_to_megatron(path, tmp_path / "out", Settings(progress=False, dtype=torch.float16))
    convert_hf_to_megatron(path, tmp_path / "out", Settings(progress=False, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool])
def test_dtypes_that_no_weight_has(tmp_path: Path, dtype: torch.dtype) -> None:
    path = source(tmp_path, value=weight(0).to(dtype))
    message = (
        rf"{NAME} in .*model\.safetensors is {str(dtype).removeprefix('torch.')}, which is no weight's dtype; use the "
        r"checkpoint before quantisation"
    )
    for settings in (QUIET, Settings(progress=False, dtype=torch.bfloat16)):
        with pytest.raises(CheckpointError, match=message):
            convert_hf_to_megatron(path, tmp_path / "out", settings)
    with pytest.raises(CheckpointError, match=message):
        load(path)
    found = inspect_checkpoint(path)
    assert not found.is_whole and any(NAME in text for text in found.misshapen)


def test_float64_is_cast_when_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    path = source(tmp_path, value=weight(dtype=torch.float64))
    with pytest.raises(
        CheckpointError, match=rf"{NAME} in .* is float64, and no model is; give --dtype float32 or another to cast it"
    ):
        convert_hf_to_megatron(path, tmp_path / "out", QUIET)
    convert_hf_to_megatron(path, tmp_path / "out", Settings(progress=False, dtype=torch.float32))
    assert f"{NAME} is float64 and is cast to float32" in caplog.text
    caplog.clear()
    load(path)
    assert f"{NAME} is float64 and is cast to bfloat16" in caplog.text


def test_a_megatron_checkpoint_with_such_dtypes(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp  # as another program might have written it

    convert_hf_to_megatron(source(tmp_path), tmp_path / "meg", QUIET)
    from megarl.weights.checkpoint.formats.dist import DistFiles

    files = DistFiles(tmp_path / "meg")
    state = {k: files.read(k, tuple((0, n) for n in s)) for k, s in files.shapes.items()}
    files.close()
    for file in (
        *(tmp_path / "meg").glob("*.distcp"),
        tmp_path / "meg/.metadata",
        tmp_path / "meg/megarl_manifest.json",
    ):
        file.unlink()
    key = "decoder.final_layernorm.weight"
    dcp.save(state | {key: state[key].to(torch.int8)}, checkpoint_id=tmp_path / "meg", no_dist=True)
    with pytest.raises(CheckpointError, match=rf"{key} in .*meg is int8, which is no weight's dtype"):
        convert_megatron_to_hf(tmp_path / "meg", tmp_path / "out", settings=QUIET)


# ------------------------------------------------------------------ which file counts


def sharded(root: Path) -> Path:
    config = qwen3_config()
    return write_checkpoint(root / "hf", config, random_hf(config), files=2)


def test_a_single_file_beside_an_index(tmp_path: Path) -> None:
    """transformers reads the single file, vLLM those of the index: nobody can say which was meant."""
    path = sharded(tmp_path)
    save_file(random_hf(qwen3_config(), seed=9), path / "model.safetensors")
    message = r"has model\.safetensors and model\.safetensors\.index\.json .*; remove the one that is not meant"
    with pytest.raises(CheckpointError, match=message):
        convert_hf_to_megatron(path, tmp_path / "out", QUIET)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_an_index_of_the_single_file_is_not_ambiguous(tmp_path: Path) -> None:
    path = source(tmp_path)
    names = load_file(path / "model.safetensors")
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")})
    )
    convert_hf_to_megatron(path, tmp_path / "out", QUIET)


def test_an_index_that_names_the_wrong_file(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    index = path / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    right = value["weight_map"][NAME]
    wrong = next(file for file in value["weight_map"].values() if file != right)
    value["weight_map"][NAME] = wrong
    index.write_text(json.dumps(value))
    message = rf"index\.json lists {NAME} in {wrong}, which lacks it; it is in {right}"
    with pytest.raises(CheckpointError, match=message):
        convert_hf_to_megatron(path, tmp_path / "out", QUIET)
    with pytest.raises(CheckpointError, match=message):
        load(path)
