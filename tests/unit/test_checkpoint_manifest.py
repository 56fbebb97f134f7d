"""The manifest of a converted checkpoint is compared with what is on the disk, wherever the checkpoint is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.cli import main
from megarl.core.errors import CheckpointError
from megarl.weights.checkpoint.convert.convert import Settings, convert_hf_to_megatron, convert_megatron_to_hf
from megarl.weights.checkpoint.convert.verify import check_digests, inspect_checkpoint, render
from megarl.weights.checkpoint.formats.output import MANIFEST
from tests.unit.reshard_cases import qwen3_config
from tests.unit.reshard_oracle import numbered_hf, random_hf
from tests.unit.test_checkpoint_convert import QUIET, write_hf

Convert = Callable[..., Any]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    config = qwen3_config()
    write_hf(tmp_path / "source", config, random_hf(config))
    convert_hf_to_megatron(tmp_path / "source", tmp_path / "megatron", QUIET)
    convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", settings=QUIET)
    return tmp_path


def flip(folder: Path) -> None:
    """One bit of an element, in the middle of the largest file."""
    file = max((*folder.glob("*.safetensors"), *folder.glob("__*.distcp")), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    at = data.index(b"\x3f", len(data) // 2)  # an exponent byte
    data[at - 1] ^= 1
    file.write_bytes(data)


DIFFERS = r"model\.\S+ has digest \w{16}, megarl_manifest\.json \w{16}"
CONVERT: dict[str, Convert] = {"hf": convert_hf_to_megatron, "megatron": convert_megatron_to_hf}


@pytest.mark.parametrize("kind", CONVERT)
def test_a_flipped_bit_is_seen_by_inspect(root: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "inspect", str(root / kind), "--digests"]) == 0
    assert f"{MANIFEST} has the same digests" in capsys.readouterr().out
    flip(root / kind)
    assert main(["convert", "inspect", str(root / kind), "--digests"]) == 1
    out = capsys.readouterr().out
    assert "not as written: 1" in out and "whole" not in out
    found = inspect_checkpoint(root / kind, digests=True, progress=False)
    assert not found.is_whole and len(found.changed) == 1
    assert (
        main(["convert", "inspect", str(root / kind), "--digests", "--dtype", "bfloat16"]) == 1
    )  # of what is stored all the same


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("kind", CONVERT)
def test_a_flipped_bit_of_a_source_is_seen_before_anything_is_written(root: Path, kind: str, verify: bool) -> None:
    flip(root / kind)
    before = sorted(path.name for path in root.iterdir())
    for settings in (
        Settings(progress=False, verify=verify),
        Settings(progress=False, verify=verify, dtype=torch.bfloat16),
    ):
        with pytest.raises(
            CheckpointError, match=rf"{kind} is not as it was written: {DIFFERS}; copy it again, or remove"
        ):
            CONVERT[kind](root / kind, root / "out", settings=settings)
    assert sorted(path.name for path in root.iterdir()) == before
    (root / kind / MANIFEST).unlink()  # changed on purpose
    CONVERT[kind](root / kind, root / "out", settings=Settings(progress=False, verify=True))


def test_a_model_folder_for_training(root: Path) -> None:
    check_digests(root / "hf", "model.path")
    check_digests(root / "source", "model.path")  # without a manifest
    flip(root / "hf")
    with pytest.raises(CheckpointError, match=rf"model\.path: .*hf is not as it was written: {DIFFERS}"):
        check_digests(root / "hf", "model.path")


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def test_headers_that_differ_are_seen_without_reading_everything(root: Path) -> None:
    rewritten(root / "hf", lambda tensors: tensors | {"model.norm.weight": tensors["model.norm.weight"].half()})
    found = inspect_checkpoint(root / "hf")
    assert not found.is_whole
    assert found.changed[0].startswith("model.safetensors has ") and "not as written: 2" in render(found)
    assert "model.norm.weight is float16 (8,), megarl_manifest.json has float32 (8,)" in found.changed


def test_prediction_layers_that_are_left_out_are_no_difference(tmp_path: Path) -> None:
    from tests.unit.test_checkpoint_convert import deepseek

    config = deepseek()
    write_hf(tmp_path / "hf", config, numbered_hf(config, mtp=True))
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "meg", Settings(progress=False, mtp=True))
    assert inspect_checkpoint(tmp_path / "meg", digests=True, progress=False).is_whole
    convert_megatron_to_hf(tmp_path / "meg", tmp_path / "back", settings=QUIET)
    assert len(json.loads((tmp_path / "back" / MANIFEST).read_text())["tensors"]) < len(
        json.loads((tmp_path / "meg" / MANIFEST).read_text())["tensors"]
    )
