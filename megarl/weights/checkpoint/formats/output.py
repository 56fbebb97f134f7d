"""A checkpoint directory that is written atomically, can be resumed, and ends with a manifest.

It is written as ``.<name>.partial`` next to the target. Its ``journal.jsonl`` has the job, then every finished file
with size and digests, and the names of small files before they are copied. A second run of the same job reads those
files again and keeps files that match their digests.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megarl.core.durable import replace_directory, sync_tree, write_text
from megarl.core.errors import CheckpointError
from megarl.weights.checkpoint.formats.dist import Chunk

MANIFEST = "megarl_manifest.json"
JOURNAL = "journal.jsonl"
LOCK = "lock"
COPIED = "copied"


class Finished(NamedTuple):
    """A completed file of the target."""

    file: str
    bytes: int
    digests: dict[str, int]
    """Logical tensor -> digest of its part in this file."""
    chunks: tuple[tuple[str, Chunk], ...] = ()
    """(key, chunk) in a dist_checkpointing file."""

    def to_json(self) -> str:
        """Return the record as one line of JSON."""
        chunks = [[key, chunk.box, chunk.offset, chunk.length] for key, chunk in self.chunks]
        digests = {name: f"{value:016x}" for name, value in self.digests.items()}
        return json.dumps({"file": self.file, "bytes": self.bytes, "digests": digests, "chunks": chunks})

    @classmethod
    def from_json(cls, line: str) -> Finished:
        """Read a record from its line."""
        value = json.loads(line)
        chunks = tuple(
            (key, Chunk(tuple((lo, hi) for lo, hi in box), value["file"], offset, length))
            for key, box, offset, length in value["chunks"]
        )
        return cls(value["file"], value["bytes"], {n: int(d, 16) for n, d in value["digests"].items()}, chunks)


class OutputDirectory:
    """The directory being written; a context manager that locks it.

    Args:
        target: Final path. An existing directory is replaced at the end, unless ``overwrite.check_target`` refused it.
        job: Fingerprint of source and settings; files of another job are discarded.
        check: Called just before ``target`` is replaced; raises CheckpointError to refuse.

    Raises CheckpointError if another process is writing it.
    """

    def __init__(self, target: Path, job: str, check: Callable[[], None] = lambda: None) -> None:
        self.target = target
        self.path = partial_path(target)
        self._job = job
        self._check = check
        self.finished: dict[str, Finished] = {}

    def __enter__(self) -> OutputDirectory:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise CheckpointError(f"another process is writing {self.path}; wait for it or end it") from error
        self.finished = self._read_journal()
        if not self.finished:
            self._clear()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None and not self.finished:
            self._remove_files()
            _remove(self.path)
        self._lock.close()

    def _read_journal(self) -> dict[str, Finished]:
        try:
            first, *lines = (self.path / JOURNAL).read_text().splitlines()
            if json.loads(first) != {"job": self._job}:
                logging.info("%s belongs to another source or other settings; starting again", self.path)
                return {}
        except (FileNotFoundError, ValueError):
            return {}
        found: dict[str, Finished] = {}
        for line in lines:
            try:
                record = Finished.from_json(line)
            except (ValueError, KeyError, TypeError):
                continue  # the line that was being written
            file = self.path / record.file
            if file.is_file() and file.stat().st_size == record.bytes:
                found[record.file] = record
        return found

    def _clear(self) -> None:
        self._remove_files()
        self.keep([])

    def _remove_files(self) -> None:
        """Remove all but the lock. The journal, which marks the files as a conversion's, is removed last."""
        for entry in sorted(self.path.iterdir(), key=lambda entry: entry.name == JOURNAL):
            if entry.name != LOCK:
                _remove(entry)

    def keep(self, records: Iterable[Finished]) -> None:
        """Begin a new journal with these records only."""
        self.finished = {record.file: record for record in records}
        copied = [json.dumps({COPIED: names})] if (names := sorted(copied_files(self.path))) else []
        lines = [json.dumps({"job": self._job}), *copied, *(record.to_json() for record in self.finished.values())]
        write_text(self.path / JOURNAL, "".join(f"{line}\n" for line in lines))

    def add(self, record: Finished) -> None:
        """Record a complete file, after its bytes are on disk."""
        self.finished[record.file] = record
        self._append(record.to_json())

    def copying(self, names: Iterable[str]) -> None:
        """Record small files before they are copied, so that a later conversion may remove them after a kill."""
        self._append(json.dumps({COPIED: sorted(names)}))

    def _append(self, line: str) -> None:
        with (self.path / JOURNAL).open("a") as journal:
            journal.write(f"{line}\n")
            journal.flush()
            os.fsync(journal.fileno())

    def check_space(self, needed: int) -> None:
        """Raise CheckpointError unless the disk has room for ``needed`` more bytes."""
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise CheckpointError(
                f"{self.target.parent} has {free / 2**30:.1f} GiB free, expected {needed / 2**30:.1f} GiB or more for "
                f"{self.target.name}; make room or write elsewhere"
            )

    def beside(self) -> list[str]:
        """Names of the directory's files other than tensor files."""
        files = (str(path.relative_to(self.path)) for path in self.path.rglob("*") if path.is_file())
        return sorted(name for name in files if name not in self.finished and name not in (JOURNAL, LOCK, MANIFEST))

    def commit(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest as the last file and rename the directory; an older one is moved aside first."""
        sync_tree(self.path)
        write_json(self.path / MANIFEST, manifest)
        self._check()
        (self.path / JOURNAL).unlink()
        (self.path / LOCK).unlink()
        replace_directory(self.path, self.target)


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file and sync it to disk."""
    with file.open("w") as stream:
        stream.write(json.dumps(value, indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def copied_files(partial: Path) -> set[str]:
    """Names of small files that the journal recorded before they were copied."""
    names: set[str] = set()
    try:
        lines = (partial / JOURNAL).read_text().splitlines()
    except (FileNotFoundError, UnicodeDecodeError):
        return names
    for line in lines:
        with suppress(ValueError, TypeError, KeyError):  # the line of a file, or half a line
            names.update(map(str, json.loads(line)[COPIED]))
    return names


def partial_path(target: Path) -> Path:
    """Temporary path of a target until it is renamed."""
    return target.with_name(f".{target.name}.partial")


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


FORMAT = "megarl-checkpoint-1"


class Noted(NamedTuple):
    """Record of a written logical tensor."""

    dtype: str
    shape: tuple[int, ...]
    digest: int


class TargetManifest(NamedTuple):
    path: Path
    tensors: Mapping[str, Noted]
    files: Mapping[str, int]
    """Tensor file -> bytes."""
    beside: tuple[str, ...]
    """Other files: metadata, config.json, tokenizer (empty in old manifests, which did not list them)."""

    def faults(self, digests: Mapping[str, int]) -> Iterator[str]:
        """Yield texts for tensors with digests other than recorded; skip tensors missing from the manifest."""
        for name, found in digests.items():
            noted = self.tensors.get(name)
            if noted is not None and noted.digest != found:
                yield f"{name} has digest {found:016x}, {MANIFEST} {noted.digest:016x}"

    def faults_of_headers(self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> Iterator[str]:
        """Yield texts for files with sizes, and tensors with shapes or dtypes, other than recorded."""
        for file, size in self.files.items():
            path = self.path.parent / file
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                yield f"{file} {'is missing' if found is None else f'has {found} bytes'}, {MANIFEST} has {size} bytes"
        for name, noted in self.tensors.items():
            if name in shapes and (shapes[name], dtypes[name]) != (noted.shape, noted.dtype):
                yield f"{name} is {dtypes[name]} {shapes[name]}, {MANIFEST} has {noted.dtype} {noted.shape}"


def read_target_manifest(folder: Path) -> TargetManifest | None:
    """Read a converted checkpoint's manifest; ``None`` if it has none. Raises CheckpointError if it is unreadable."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text())
        tensors = {
            str(name): Noted(str(t["dtype"]), tuple(int(n) for n in t["shape"]), int(t["digest"], 16))
            for name, t in value["tensors"].items()
        }
        files = {str(name): int(size) for name, size in value["files"].items()}
        return TargetManifest(path, tensors, files, tuple(map(str, value.get("beside", ()))))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error!r}); copy the checkpoint again, or remove this file"
        ) from error
