"""``--overwrite`` replaces a checkpoint that a conversion wrote, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.checkpoint.convert import Settings, convert_hf_to_megatron, convert_megatron_to_hf, reshard_checkpoint
from megarl.checkpoint.output import MANIFEST
from megarl.errors import CheckpointError
from megarl.reshard.layouts import MegatronGrid
from tests.unit.reshard_cases import qwen3_config
from tests.unit.reshard_oracle import random_hf
from tests.unit.test_checkpoint_convert import QUIET, write_hf
from tests.unit.test_checkpoint_hf import export
from tests.unit.test_checkpoint_output import contents

OVERWRITE = Settings(progress=False, overwrite=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    config = qwen3_config()
    write_hf(tmp_path / "models/hf", config, random_hf(config))
    (tmp_path / "models/notes.txt").write_text("keep me")
    return tmp_path


def linked(root: Path) -> Path:
    (root / "link").symlink_to(root / "models")
    return root / "link"


@pytest.mark.parametrize(
    "target",
    [
        lambda root: root / "models",
        lambda root: root / "models/hf",
        lambda root: root / "models/../models/hf",
        linked,
        lambda root: linked(root) / "hf",
    ],
    ids=["parent", "source", "other spelling", "link to the parent", "source by a link"],
)
def test_a_target_that_contains_the_source_is_refused(root: Path, target: Callable[[Path], Path]) -> None:
    before = contents(root)
    with pytest.raises(CheckpointError, match=r"contains the source .*models/hf, which would be deleted; give another directory"):
        convert_hf_to_megatron(root / "models/hf", target(root), OVERWRITE)
    assert contents(root) == before


def test_a_target_inside_the_source_is_refused(root: Path) -> None:
    convert_hf_to_megatron(root / "models/hf", root / "meg", QUIET)
    before = contents(root)
    with pytest.raises(CheckpointError, match=r"meg/huggingface is inside the source .*meg"):
        convert_megatron_to_hf(root / "meg", root / "meg/huggingface", settings=OVERWRITE)
    with pytest.raises(CheckpointError, match=r"contains the source .*models/hf"):
        convert_megatron_to_hf(root / "meg", root / "models", config=root / "models/hf", settings=OVERWRITE)
    with pytest.raises(CheckpointError, match=r"contains the source"):
        reshard_checkpoint(root / "meg", root / "meg", settings=OVERWRITE)
    assert contents(root) == before


@pytest.mark.parametrize("kind", ["folder", "file", "run", "beside ours", "in a folder of ours"])
def test_other_files_are_never_deleted(root: Path, kind: str) -> None:
    target = root / "out"
    mine = target / "mine.txt"
    if kind == "file":
        mine = target
    elif kind == "run":
        mine = target / "checkpoints/state.json"
    elif kind == "beside ours":
        convert_hf_to_megatron(root / "models/hf", target, QUIET)
    elif kind == "in a folder of ours":
        convert_hf_to_megatron(root / "models/hf", target, QUIET)
        mine = target / "huggingface/mine.txt"
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("keep me")
    before = contents(root)
    with pytest.raises(CheckpointError, match=r"out .*; --overwrite replaces .* only; (move|give)"):
        convert_hf_to_megatron(root / "models/hf", target, OVERWRITE)
    assert contents(root) == before


def test_a_checkpoint_of_ours_and_an_empty_folder_are_replaced(root: Path) -> None:
    (root / "meg").mkdir()
    convert_hf_to_megatron(root / "models/hf", root / "meg", OVERWRITE)
    convert_hf_to_megatron(root / "models/hf", root / "meg", OVERWRITE)
    (root / "meg/__0_0.distcp").write_bytes(b"damaged")  # repeating the command is the way to repair it
    convert_hf_to_megatron(root / "models/hf", root / "meg", OVERWRITE)
    convert_megatron_to_hf(root / "meg", root / "back", settings=OVERWRITE)
    convert_megatron_to_hf(root / "meg", root / "back", settings=OVERWRITE)
    assert (root / "back" / MANIFEST).is_file()
    assert sorted(p.name for p in root.iterdir()) == ["back", "meg", "models"]


def test_a_link_is_replaced_and_not_what_it_points_to(root: Path) -> None:
    convert_hf_to_megatron(root / "models/hf", root / "meg", QUIET)
    (root / "out").symlink_to(root / "meg")
    before = contents(root / "meg")
    convert_hf_to_megatron(root / "models/hf", root / "out", OVERWRITE)
    assert not (root / "out").is_symlink() and contents(root / "out") == contents(root / "meg") == before


def test_folders_with_the_names_of_temporary_ones_are_not_cleared(root: Path) -> None:
    """``.out.partial`` and ``.out.old`` are removed only if a conversion wrote them."""
    for name in (".out.partial", ".out.old"):
        (root / name).mkdir()
        (root / name / "mine.txt").write_text("keep me")
        with pytest.raises(CheckpointError, match=rf"\{name} .* move it away"):
            convert_hf_to_megatron(root / "models/hf", root / "out", QUIET)
        assert contents(root / name) == {"mine.txt": b"keep me"}
        os.rename(root / name, root / f"kept{name}")


@pytest.mark.parametrize("mine", ["out/mine.txt", "out/folder/config.json"])
def test_an_export_deletes_no_other_files(root: Path, mine: str) -> None:
    (root / mine).parent.mkdir(parents=True)
    (root / mine).write_text("keep me")
    before = contents(root)
    config = qwen3_config()
    with pytest.raises(CheckpointError, match=r"out is not an HF checkpoint, .* move it away"):
        export(config, MegatronGrid(), random_hf(config), root / "models/hf", root / "out")
    assert contents(root) == before


def test_an_export_does_not_replace_its_source(root: Path) -> None:
    config = qwen3_config()
    before = contents(root)
    with pytest.raises(CheckpointError, match=r"contains the source .*models/hf"):
        export(config, MegatronGrid(), random_hf(config), root / "models/hf", linked(root) / "hf")
    assert contents(root / "models") == {name.removeprefix("models/"): data for name, data in before.items()}
