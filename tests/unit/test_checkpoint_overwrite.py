"""``--overwrite`` replaces a checkpoint that a conversion wrote, and nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megarl.core.errors import CheckpointError
from megarl.weights.checkpoint.convert import convert
from megarl.weights.checkpoint.convert.convert import (
    Settings,
    convert_hf_to_megatron,
    convert_megatron_to_hf,
    reshard_checkpoint,
)
from megarl.weights.checkpoint.formats.output import MANIFEST, Finished, OutputDirectory
from megarl.weights.checkpoint.formats.overwrite import check_apart, check_export_target, check_target
from megarl.weights.reshard.layouts import MegatronGrid
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
    with pytest.raises(
        CheckpointError, match=r"contains the source .*models/hf, which would be deleted; give another directory"
    ):
        convert_hf_to_megatron(root / "models/hf", target(root), OVERWRITE)
    assert contents(root) == before


def test_all_directories_of_a_target_are_compared_in_one_walk_of_the_source(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked: list[Path] = []
    rglob = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda path, pattern: walked.append(path) or rglob(path, pattern))
    for name in ("out", ".out.old", ".out.partial"):
        (root / name).mkdir()
    check_target(root / "out", [root / "models/hf"], overwrite=True)
    assert walked.count(root / "models/hf") == 1


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
    file = root / "meg/__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))  # repeating the command is the way to repair it
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


@contextmanager
def unchanged(root: Path) -> Iterator[None]:
    """Assert that every file is as it was before."""
    before = contents(root)
    yield
    assert contents(root) == before


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("name", [".x.old", ".x.partial"])
def test_a_source_with_the_name_of_a_temporary_folder_is_refused(root: Path, name: str, exists: bool) -> None:
    shutil.copytree(root / "models/hf", root / name)
    if exists:
        shutil.copytree(root / "models/hf", root / "x")
    with (
        unchanged(root),
        pytest.raises(CheckpointError, match=rf"contains the source .*\{name}, which would be deleted"),
    ):
        convert_hf_to_megatron(root / name, root / "x", QUIET)


def test_a_backup_with_other_files_is_not_removed(root: Path) -> None:
    convert_hf_to_megatron(root / "models/hf", root / ".x.old", QUIET)
    (root / ".x.old/training_log.txt").write_text("keep me")
    shutil.copytree(root / ".x.old", root / "x")
    with unchanged(root), pytest.raises(CheckpointError, match=r"\.x\.old has training_log.txt .*move it away"):
        convert_hf_to_megatron(root / "models/hf", root / "x", QUIET)
    with unchanged(root), pytest.raises(CheckpointError, match=r"\.x\.old has training_log.txt .*move it away"):
        convert_hf_to_megatron(root / "models/hf", root / "x", OVERWRITE)
    (root / ".x.old/training_log.txt").unlink()
    (root / "x/training_log.txt").unlink()
    with unchanged(root), pytest.raises(CheckpointError, match=r"x exists; give another directory"):
        convert_hf_to_megatron(root / "models/hf", root / "x", QUIET)


@pytest.mark.parametrize(
    "files",
    [
        {"lock": "", "mine.txt": "keep me"},
        {"lock": "keep me"},
        {"journal.jsonl": "keep me"},
        {"journal.jsonl": '{"job": "0"}\n', "mine.txt": "keep me"},
        {"journal.jsonl": '{"job": "0"}\n', "huggingface/mine.txt": "keep me"},
        {MANIFEST: '{"tensors": {}, "files": {}}', "mine.txt": "keep me"},
    ],
    ids=["lock", "other lock", "other journal", "journal", "inner", "manifest"],
)
def test_a_partial_folder_with_other_files_is_not_emptied(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / ".x.partial" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / ".x.partial" / name).write_text(text)
    with (
        unchanged(root),
        pytest.raises(CheckpointError, match=r"\.x\.partial was not written by megarl, .* move it away"),
    ):
        convert_hf_to_megatron(root / "models/hf", root / "x", QUIET)


@pytest.mark.parametrize("folder", ["", "huggingface"])
def test_a_conversion_that_was_killed_among_small_files_makes_way_for_another_source(root: Path, folder: str) -> None:
    """Its journal names the files that it was copying, which the other source need not have."""
    target, partial = root / "x", root / ".x.partial"
    with OutputDirectory(target, "0") as output:
        (partial / folder).mkdir(exist_ok=True)
        output.copying(["config.json", "preprocessor[1].json"])
        (partial / folder / "preprocessor[1].json").write_text("{}")
        output.add(Finished("config.json", 2, {}))
    check_target(target, [root / "models/hf"], overwrite=False)
    (partial / folder / "mine.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match=r"\.x\.partial was not written by megarl"):
        check_target(target, [root / "models/hf"], overwrite=False)


def test_weights_of_another_size_are_not_replaced(root: Path) -> None:
    convert_hf_to_megatron(root / "models/hf", root / "meg", QUIET)
    (root / "meg/__0_0.distcp").write_bytes(b"fine-tuned")
    with unchanged(root), pytest.raises(CheckpointError, match=r"meg has __0_0.distcp with 10 bytes, .*move it away"):
        convert_hf_to_megatron(root / "models/hf", root / "meg", OVERWRITE)


def test_a_source_of_links_into_the_target_is_refused(root: Path) -> None:
    convert_hf_to_megatron(root / "models/hf", root / "meg", QUIET)
    convert_megatron_to_hf(root / "meg", root / "back", settings=QUIET)
    (root / "variant").mkdir()
    for path in (root / "back").iterdir():
        if path.name != MANIFEST:
            (root / "variant" / path.name).symlink_to(path)
    with unchanged(root), pytest.raises(CheckpointError, match=r"back contains the source .*variant/"):
        convert_hf_to_megatron(root / "variant", root / "back", OVERWRITE)


def test_a_folder_that_is_mounted_twice_is_one_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount needs root: two inodes are made equal instead."""
    (root / "bind").mkdir()
    samefile = Path.samefile
    both = {root / "bind", root / "models"}
    monkeypatch.setattr(Path, "samefile", lambda a, b: {a, b} == both or samefile(a, b))
    with pytest.raises(CheckpointError, match=r"models contains the source .*bind"):
        check_apart(root / "models", [root / "bind"])
    with pytest.raises(CheckpointError, match=r"models contains the source .*bind/hf"):
        (root / "bind/hf").mkdir()
        check_apart(root / "models", [root / "bind/hf"])
    with pytest.raises(CheckpointError, match=r"models/new is inside the source .*bind"):
        check_apart(root / "models/new", [root / "bind"])
    (root / "models/sub").mkdir()
    both = {root / "bind", root / "models/sub"}
    with pytest.raises(CheckpointError, match=r"bind/new is inside the source .*models/sub"):
        check_apart(root / "bind/new", [root / "models"])


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_target_that_appears_while_converting_is_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    check = convert.check_written

    def appear(*args: object, **options: object) -> None:
        (root / "out").mkdir()
        (root / "out/mine.txt").write_text("keep me")
        check(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(convert, "check_written", appear)
    with pytest.raises(CheckpointError, match=r"out (exists|has no)"):
        convert_hf_to_megatron(root / "models/hf", root / "out", OVERWRITE if overwrite else QUIET)
    assert contents(root / "out") == {"mine.txt": b"keep me"}
    monkeypatch.undo()
    shutil.rmtree(root / "out")
    assert convert_hf_to_megatron(root / "models/hf", root / "out", QUIET).kept_files > 0


@pytest.mark.parametrize("target", [".", "..", "sub/..", "/", "../..", "../work"])
def test_the_working_directory_is_no_target(root: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    (root / "work/sub").mkdir(parents=True)
    monkeypatch.chdir(root / "work")
    monkeypatch.setattr(convert, "open_hf_checkpoint", lambda *_: pytest.fail("the source is read"))
    with (
        unchanged(root),
        pytest.raises(CheckpointError, match="is the working directory or contains it; give another directory"),
    ):
        convert_hf_to_megatron(root / "models/hf", Path(target), OVERWRITE)


def test_a_mount_point_is_no_target(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == root / "disk")
    with unchanged(root), pytest.raises(CheckpointError, match="disk is a mount point, which cannot be replaced"):
        convert_hf_to_megatron(root / "models/hf", root / "disk", OVERWRITE)


def test_a_new_target_inside_the_source_is_refused(root: Path) -> None:
    with unchanged(root), pytest.raises(CheckpointError, match="hf/meg is inside the source .*models/hf"):
        convert_hf_to_megatron(root / "models/hf", root / "models/hf/meg", QUIET)
    (root / "elsewhere").mkdir()
    (root / "models/hf/link").symlink_to(root / "elsewhere")
    with unchanged(root), pytest.raises(CheckpointError, match="link (is inside|contains) the source .*models/hf"):
        convert_hf_to_megatron(root / "models/hf", root / "models/hf/link", OVERWRITE)


@pytest.mark.parametrize(
    "names", [["config.json", "thesis.tex"], ["model.safetensors"], ["config.json", "adapter.safetensors"]]
)
def test_an_export_replaces_only_what_exports_write(root: Path, names: list[str]) -> None:
    (root / "out").mkdir()
    for name in names:
        (root / "out" / name).write_text("keep me")
    with pytest.raises(CheckpointError, match=r"out is not an HF checkpoint, .* move it away"):
        check_export_target(root / "out", [root / "models/hf"])


@pytest.mark.parametrize("name", [".out.partial", ".out.old"])
def test_an_export_removes_no_other_files_from_its_temporary_directories(root: Path, name: str) -> None:
    (root / name).mkdir()
    (root / name / "thesis.tex").write_text("keep me")
    config = qwen3_config()
    with (
        unchanged(root),
        pytest.raises(CheckpointError, match=rf"\{name} is not an HF checkpoint, .* it has thesis.tex; move it away"),
    ):
        export(config, MegatronGrid(), random_hf(config), root / "models/hf", root / "out")
    (root / name / "thesis.tex").rename(root / name / "model.safetensors")
    (root / name / "config.json").write_text("{}")
    export(config, MegatronGrid(), random_hf(config), root / "models/hf", root / "out")
    assert not (root / name).exists()


def test_an_export_into_its_source_is_refused(root: Path) -> None:
    config = qwen3_config()
    with unchanged(root), pytest.raises(CheckpointError, match="hf/out is inside the source .*models/hf"):
        export(config, MegatronGrid(), random_hf(config), root / "models/hf", root / "models/hf/out")


def test_an_export_replaces_an_older_one(root: Path) -> None:
    (root / "models/hf/NOTICE").write_text("copied with the model")
    config = qwen3_config()
    for _ in range(2):
        export(config, MegatronGrid(), random_hf(config), root / "models/hf", root / "out")
    assert (root / "out/NOTICE").is_file()
