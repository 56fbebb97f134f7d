"""Which existing directories a conversion or an export may replace: those that it wrote itself, with no other files in them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from megarl.checkpoint.output import JOURNAL, LOCK, MANIFEST, partial_path
from megarl.checkpoint.target_manifest import read_target_manifest
from megarl.durable import aside, recover_directory
from megarl.errors import CheckpointError

log = logging.getLogger(__name__)


def check_target(target: Path, sources: Iterable[Path], *, overwrite: bool) -> None:
    """Raise CheckpointError unless ``target`` can be written without the loss of a file that no conversion wrote.

    Args:
        target: It may exist with ``overwrite`` only; then it is empty or holds a converted checkpoint and no other file.
        sources: Directories that are read; none may contain an existing target or lie inside it.
    """
    for temporary in (partial_path(target), aside(target)):
        if temporary.exists() and not _is_temporary(temporary):
            raise CheckpointError(f"{temporary} was not written by megarl, but is needed to write {target}; move it away")
    if recover_directory(target):
        log.warning("%s was being replaced when that was killed: the old one is back", target)
    if not (target.exists() or target.is_symlink()):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists; give another directory, or --overwrite to replace it")
    check_apart(target, sources)
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; --overwrite replaces converted checkpoints only; give another path")
    if (other := _other_files(target)) is not None:
        raise CheckpointError(
            f"{target} {other}; --overwrite replaces a converted checkpoint without other files only; move it away or give another directory"
        )


def check_apart(target: Path, sources: Iterable[Path]) -> None:
    """Raise CheckpointError if the target is one of the directories that are read, contains one or lies inside one."""
    place = target.resolve()
    for source in sources:
        if source.resolve().is_relative_to(place):
            raise CheckpointError(f"{target} contains the source {source}, which would be deleted; give another directory")
        if place.is_relative_to(source.resolve()):
            raise CheckpointError(f"{target} is inside the source {source}, which would lose files; give another directory")


def check_export_target(target: Path, sources: Iterable[Path]) -> None:
    """Raise CheckpointError unless ``target`` is new, empty or an HF checkpoint (files, no folders), apart from ``sources``."""
    if not target.exists():
        return
    check_apart(target, sources)
    entries = list(target.iterdir()) if target.is_dir() else [target]
    is_hf = any(entry.name == "config.json" or entry.suffix == ".safetensors" for entry in entries)
    if entries and (not is_hf or any(entry.is_dir() for entry in entries)):
        raise CheckpointError(f"{target} is not an HF checkpoint, so an exported one does not replace it; move it away")


def _is_temporary(path: Path) -> bool:
    """True for an empty folder, what a conversion left in the middle, and a converted checkpoint that was being removed."""
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else {path.name}
    return not names or bool(names & {JOURNAL, LOCK, MANIFEST})


def _other_files(target: Path) -> str | None:
    """How the directory is more, or other, than a converted checkpoint; None where it is one, or empty."""
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_symlink() or not path.is_dir()}
    if not found:
        return None
    manifest = read_target_manifest(target)
    if manifest is None:
        return f"has no {MANIFEST}"
    other = sorted(found - {MANIFEST, *manifest.files, *manifest.beside})
    return f"has {other[0]}{f' and {len(other) - 1} more files' if other[1:] else ''} besides the checkpoint" if other else None
