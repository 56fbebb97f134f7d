"""Files and folders that appear whole or not at all, and are on the disk before they do.

A kill or a loss of power leaves the old one or the new one, never a part. An old folder may have been moved aside by
then: ``recover_directory`` puts it back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megarl.core.errors import CheckpointError
from megarl.core.processes import heartbeat

_OLD = ".old"


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file written there is synced and renamed to ``path``, or removed on an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk raises without one
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace the file's content; a reader sees the old file or the new one."""
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """``sync`` every file below a folder, then the folders, the given one last. What is on the disk costs nothing."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            heartbeat.beat()
            sync(Path(parent, name))
        sync(Path(parent))


def moved_aside(folder: Path, names: str = "*") -> list[Path]:
    """Targets in ``folder``, of those that match ``names``, whose ``replace_directory`` was killed."""
    return [path.with_name(path.name[1:].removesuffix(_OLD)) for path in folder.glob(f".{names}{_OLD}")]


def aside(target: Path) -> Path:
    """Path of an older folder while a new one takes its name."""
    return target.with_name(f".{target.name}{_OLD}")


def replace_directory(new: Path, target: Path) -> None:
    """Sync and rename a folder; an older one is moved aside first and removed last: rename cannot replace it."""
    sync_tree(new)
    recover_directory(target)
    old = aside(target)
    if exists(target):
        os.replace(target, old)
    try:
        os.replace(new, target)
    except OSError:
        recover_directory(target)
        raise
    sync(target.parent)
    _remove(old)


def recover_directory(target: Path) -> bool:
    """Undo or end a ``replace_directory`` that was killed; True where there was no new folder and the old one is
    back."""
    old = aside(target)
    if exists(target) or not exists(old):
        _remove(old)
        return False
    os.replace(old, target)
    sync(target.parent)
    return True


def exists(path: Path) -> bool:
    """True also for a link whose target is missing."""
    return path.exists() or path.is_symlink()


def _remove(path: Path) -> None:
    """Remove a file, link or folder, as far as that goes: what is left is seen by whoever needs its name."""
    with suppress(OSError):
        if not path.is_dir() or path.is_symlink():
            path.unlink()
            return
        # The newest last: what marks a finished folder was written last, and is there as long as anything
        # is.
        for entry in sorted(path.iterdir(), key=lambda entry: entry.lstat().st_mtime_ns):
            _remove(entry)
        path.rmdir()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file. Raises CheckpointError for anything else."""
    try:
        value = json.loads(path.read_text()) if path.is_file() else {}
        if not isinstance(value, dict):
            raise ValueError(f"it holds {type(value).__name__}")
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); copy the checkpoint again") from error
    return value
