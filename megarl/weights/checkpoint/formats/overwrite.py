"""Checks of existing directories: a conversion or export replaces only its own output, without other files."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from fnmatch import fnmatch
from glob import escape
from pathlib import Path

from megarl.core.durable import aside, exists, recover_directory
from megarl.core.errors import CheckpointError
from megarl.weights.checkpoint.formats.hf_source import small_files
from megarl.weights.checkpoint.formats.output import (
    JOURNAL,
    LOCK,
    MANIFEST,
    copied_files,
    partial_path,
    read_target_manifest,
)

log = logging.getLogger(__name__)

_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", MANIFEST)
_EXPORTED = (*_WEIGHTS, "config.json", "generation_config.json", *_TOKENIZER)
_DIST = ("__*.distcp", "common.pt", ".metadata", "metadata.json")
_CONVERTING = (*_EXPORTED, *_DIST, LOCK, JOURNAL, f".{JOURNAL}.*.tmp")
"""Names in a directory written by a conversion, in addition to the small files of its source."""


def named_target(target: Path) -> Path:
    """Return the target with a last name (``sub/..`` has none). Raises CheckpointError if it cannot be renamed."""
    if target.name in ("", ".."):
        target = target.resolve()
    if Path.cwd().is_relative_to(target.resolve()):
        raise CheckpointError(f"{target} is the working directory or contains it; give another directory as target")
    if os.path.ismount(target):
        raise CheckpointError(f"{target} is a mount point, which cannot be replaced; give a directory inside it")
    return target


def check_target(target: Path, sources: Iterable[Path], *, overwrite: bool) -> None:
    """Raise CheckpointError if writing ``target`` would delete files that no conversion wrote.

    Args:
        target: May exist only with ``overwrite``; then it must be empty or contain a converted checkpoint and no other
            file.
        sources: Directories that are read. They may neither contain the target nor be in it or its temporary folders.
    """
    sources = tuple(sources)
    partial = partial_path(target)
    check_apart(target, sources, aside(target), partial)
    if exists(partial) and not _is_partial(partial, sources):
        raise CheckpointError(f"{partial} was not written by megarl, but is needed to write {target}; move it away")
    _check_replaceable(target, overwrite)


def check_replaceable(target: Path, sources: Iterable[Path], *, overwrite: bool) -> None:
    """Repeat part of ``check_target`` just before the rename: other processes may have written there since."""
    check_apart(target, sources, aside(target))
    _check_replaceable(target, overwrite)


def _check_replaceable(target: Path, overwrite: bool) -> None:
    old = aside(target)
    if exists(old) and (other := _other_files(old)) is not None:
        raise CheckpointError(f"{old} {other}, but is needed to write {target}; move it away")
    _check_existing(target, overwrite)
    if recover_directory(target):
        log.warning("%s was being replaced when the process was killed: the old one is restored", target)
        _check_existing(target, overwrite)


def _check_existing(target: Path, overwrite: bool) -> None:
    if not exists(target):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists; give another directory, or --overwrite to replace it")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; --overwrite replaces converted checkpoints only; give another path")
    if (other := _other_files(target)) is not None:
        raise CheckpointError(
            f"{target} {other}; --overwrite replaces a converted checkpoint without other files only; move it away or "
            "give another directory"
        )


def check_apart(target: Path, sources: Iterable[Path], *temporary: Path) -> None:
    """Raise CheckpointError if the target is, contains or is inside one of the directories that are read.

    The same applies to its ``temporary`` directories. A link in a source counts as its target. A directory mounted
    twice counts as one, also inside a source.
    """
    written = [(path, {path.resolve(), path.parent.resolve() / path.name}) for path in (target, *temporary)]
    for source in sources:
        for read in (source, *(path for path in source.rglob("*") if path.is_symlink() or path.is_dir())):
            for path, places in written:
                _check_apart(path, places, read)


def _check_apart(path: Path, places: Iterable[Path], read: Path) -> None:
    resolved = read.resolve()
    if any(_is_inside(resolved, place) for place in places):
        raise CheckpointError(f"{path} contains the source {read}, which would be deleted; give another directory")
    if any(_is_inside(place, resolved) for place in places):
        raise CheckpointError(f"{path} is inside the source {read}, which would lose files; give another directory")


def _is_inside(path: Path, folder: Path) -> bool:
    """True if a resolved path is the folder or inside it, by name or through another mount."""
    if path.is_relative_to(folder):
        return True
    return folder.is_dir() and any(parent.exists() and parent.samefile(folder) for parent in (path, *path.parents))


def check_export_target(target: Path, sources: Iterable[Path]) -> None:
    """Raise CheckpointError unless ``target`` is new, empty or only contains an export of ``sources``, outside of them.

    The same applies to the temporary directories next to it, which a killed export leaves.
    """
    sources, partial, old = tuple(sources), partial_path(target), aside(target)
    check_apart(target, sources, partial, old)
    for path in (target, partial, old):
        if exists(path):
            _check_exported(path, sources, whole=path != partial)


def _check_exported(path: Path, sources: Iterable[Path], *, whole: bool) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not an HF checkpoint, so an exported one does not replace it; move it away")
    other = _unknown(path, _EXPORTED, sources)
    lacks = whole and any(path.iterdir()) and not (path / "config.json").is_file()
    if other or lacks:
        found = f"has {other[0]}" if other else "has no config.json"
        raise CheckpointError(
            f"{path} is not an HF checkpoint, so an exported one does not replace it: it {found}; move it away"
        )


def _is_partial(path: Path, sources: Iterable[Path]) -> bool:
    """True for an empty folder, or a conversion's unfinished folder without other files."""
    if path.is_symlink() or not path.is_dir():
        return False
    names = {entry.name for entry in path.iterdir()}
    if JOURNAL not in names and MANIFEST in names:
        return _other_files(path, (LOCK,)) is None  # killed between the manifest and the rename
    if JOURNAL in names:
        return _is_journal(path / JOURNAL) and not _unknown(
            path, (*_CONVERTING, *map(escape, copied_files(path))), sources, folders=True
        )
    begun = not [name for name in names if name != LOCK and not fnmatch(name, f".{JOURNAL}.*.tmp")]
    return begun and (LOCK not in names or (path / LOCK).stat().st_size == 0)


def _is_journal(path: Path) -> bool:
    try:
        value = json.loads(path.read_text().partition("\n")[0])
    except (OSError, ValueError):
        return False
    return isinstance(value, dict) and set(value) == {"job"}


def _unknown(folder: Path, patterns: Iterable[str], sources: Iterable[Path], *, folders: bool = False) -> list[str]:
    """Entries that match no pattern and are no small file of a source; ``folders`` allows ``huggingface/``."""
    copied = {name for source in sources for name in small_files(source)}
    found = []
    for entry in sorted(folder.iterdir()):
        if folders and entry.name == "huggingface" and entry.is_dir() and not entry.is_symlink():
            found += [f"{entry.name}/{name}" for name in _unknown(entry, patterns, sources)]
        elif not entry.is_file() or not (
            entry.name in copied or any(fnmatch(entry.name, pattern) for pattern in patterns)
        ):
            found.append(entry.name)
    return found


def _other_files(target: Path, known: Iterable[str] = ()) -> str | None:
    """Reason why the directory is not just a converted checkpoint; ``None`` if it is one or is empty."""
    if target.exists() and not target.is_dir():
        return "is a file"
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_symlink() or not path.is_dir()}
    if not found:
        return None
    manifest = read_target_manifest(target)
    if manifest is None:
        return f"has no {MANIFEST}"
    if other := sorted(found - {MANIFEST, *manifest.files, *manifest.beside, *known}):
        return f"has {other[0]}{f' and {len(other) - 1} more files' if other[1:] else ''} besides the checkpoint"
    for name in sorted(found & manifest.files.keys()):
        size = (target / name).lstat().st_size if not (target / name).exists() else (target / name).stat().st_size
        if size != manifest.files[name]:
            return f"has {name} with {size} bytes, {MANIFEST} has {manifest.files[name]} bytes"
    return None
