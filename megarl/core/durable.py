"""Write files and folders atomically: each appears complete and synced to disk, or not at all.

After a kill or a power loss either the old version or the new one exists, never a part. A kill may leave the old folder
moved aside; ``recover_directory`` puts it back.
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
    """Yield a temporary path; on exit sync that file and rename it to ``path``, or remove it on an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk raises without a filename
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace the file's content atomically: a reader sees the old file or the new one."""
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of entries, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """``sync`` every file below a folder, then the folders, ``folder`` last. Synced files cost nothing."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            heartbeat.beat()
            sync(Path(parent, name))
        sync(Path(parent))


def moved_aside(folder: Path, names: str = "*") -> list[Path]:
    """Targets in ``folder``, matching the glob ``names``, that a killed ``replace_directory`` has moved aside."""
    return [path.with_name(path.name[1:].removesuffix(_OLD)) for path in folder.glob(f".{names}{_OLD}")]


def aside(target: Path) -> Path:
    """Path to which the old folder is moved while the new one takes its name."""
    return target.with_name(f".{target.name}{_OLD}")


def replace_directory(new: Path, target: Path) -> None:
    """Sync ``new`` and rename it to ``target``; the old folder is first moved aside, since rename cannot replace it."""
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
    """Finish or undo a killed ``replace_directory``. True if the new folder is missing and the old one was restored."""
    old = aside(target)
    if exists(target) or not exists(old):
        _remove(old)
        return False
    os.replace(old, target)
    sync(target.parent)
    return True


def exists(path: Path) -> bool:
    """True if the path exists, also as a link to a missing target."""
    return path.exists() or path.is_symlink()


def _remove(path: Path) -> None:
    """Remove a file, link or folder, ignoring errors: the next use of the name reports what remains."""
    with suppress(OSError):
        if not path.is_dir() or path.is_symlink():
            path.unlink()
            return
        # Newest last: the file that marks a folder as finished was written last, so it outlives all others.
        for entry in sorted(path.iterdir(), key=lambda entry: entry.lstat().st_mtime_ns):
            _remove(entry)
        path.rmdir()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; ``{}`` if the file does not exist. Raises CheckpointError for any other content."""
    try:
        value = json.loads(path.read_text()) if path.is_file() else {}
        if not isinstance(value, dict):
            raise ValueError(f"it holds {type(value).__name__}")
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); copy the checkpoint again") from error
    return value
