"""Copies of checkpoints in a remote folder (``trainer.remote``), written and read by fsspec.

Layout: ``<remote>/global_step_<i>/`` has a checkpoint's files; ``run/`` in it has the files of the run that a start
elsewhere needs, listed in ``run.json``. The manifest ``state.json`` is written last; without it a copy is ignored.

``python -m megarl.weights.checkpoint.training.remote_folder RUN_DIR CHECKPOINT URL`` writes a copy.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from megarl.core.durable import replace_directory, whole, write_text
from megarl.core.errors import CheckpointError, ConfigError, JobError
from megarl.weights.checkpoint.training.manifest import (
    LATEST,
    MANIFEST,
    PIECE,
    PREFIX,
    Fingerprint,
    fault_of_files,
    finished,
    latest,
    remove,
    steps_of,
    unfinished_name,
)

log = logging.getLogger(__name__)

RUN_FILES = ("resolved.json", "metrics.jsonl", "run_id", "attempt", "model", "reference", "data")
"""Files and folders of a run that a start elsewhere needs."""
RUN, LIST = "run", "run.json"
FETCHED = "fetched"
"""File in the run's directory whose checkpoint was fetched and whose store lacks the steps before it."""


class RemoteFolder:
    """The remote folder of a run.

    Every method raises CheckpointError if the folder cannot be used.
    """

    def __init__(self, url: str) -> None:
        """Raises ConfigError if no installed package reads such a URL."""
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self._url = url
        try:
            self._files, self._root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError(
                f"trainer.remote={url}: {error}; give a URL of fsspec's (file:///…, s3://…, gs://…) and install its "
                "package, or leave it out"
            ) from error

    def check_writable(self) -> None:
        """Raise ConfigError unless a file can be written and read back."""
        name, text = f".megarl-{uuid.uuid4().hex}", b"megarl"
        try:
            with self._reached():
                self._files.makedirs(self._root, exist_ok=True)
                self._files.pipe_file(self._path(name), text)
                if self._files.cat_file(self._path(name)) != text:
                    raise OSError("a file that was written has other content")
                self._files.rm_file(self._path(name))
        except CheckpointError as error:
            raise ConfigError(
                f"trainer.remote={self._url} cannot be written: {error.__cause__}; give a folder that this user may "
                "write in, or leave it out"
            ) from error

    def steps(self) -> list[int]:
        """Return the steps of complete copies, in order."""
        with self._reached():
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
            named = steps_of([Path(str(path).rstrip("/")) for path in found])
            return [step for step in sorted(named) if self._manifest(step) is not None]

    def put(self, run_dir: Path, checkpoint: Path) -> None:
        """Copy a finished checkpoint, its manifest last. Then remove copies of checkpoints that the run has removed."""
        (step,) = steps_of([checkpoint])
        manifest = (checkpoint / MANIFEST).read_bytes()
        name = f"{PREFIX}{step}"
        with self._reached():
            if self._manifest(step) != json.loads(manifest):
                self._remove(step)
                for file, (size, digest) in json.loads(manifest)["files"].items():
                    if self._put_file(checkpoint / file, f"{name}/{file}") != Fingerprint(size, digest):
                        raise CheckpointError(f"{checkpoint / file} differs from its manifest and was not copied")
                found = {
                    str(path.relative_to(run_dir)): list(
                        self._put_file(path, f"{name}/{RUN}/{path.relative_to(run_dir)}")
                    )
                    for path in _files_of_run(run_dir)
                }
                self._files.pipe_file(self._path(f"{name}/{LIST}"), json.dumps(found, indent=1).encode())
                self._files.pipe_file(self._path(f"{name}/{MANIFEST}"), manifest)
            kept = {*steps_of(finished(checkpoint.parent)), step}
        for other in self.steps():
            if other not in kept:
                with self._reached():
                    self._remove(other)

    def get(self, run_dir: Path, step: int) -> Path:
        """Fetch a copy, with files of the run that are missing here; return the checkpoint.

        Raises CheckpointError also if a file differs from the copy's manifest.
        """
        name, folder = f"{PREFIX}{step}", run_dir / "checkpoints"
        target = folder / unfinished_name(step, 0)
        remove(target)
        with self._reached():
            manifest = self._manifest(step)
            if manifest is None:
                raise CheckpointError(f"{self._url}/{name} has no manifest")
            for file in manifest["files"]:
                self._get_file(f"{name}/{file}", _inside(target, file))
            of_run = json.loads(self._files.cat_file(self._path(f"{name}/{LIST}")))
            missing = {file: found for file, found in of_run.items() if not _inside(run_dir, file).exists()}
            aside = target / RUN
            for file, found in missing.items():
                if self._get_file(f"{name}/{RUN}/{file}", _inside(aside, file)) != Fingerprint(*found):
                    raise CheckpointError(f"{self._url}/{name}/{RUN}/{file} differs from {LIST}")
        (target / MANIFEST).write_text(json.dumps(manifest, indent=1))
        if (fault := fault_of_files(target)) is not None:
            remove(target)
            raise CheckpointError(f"{self._url}/{name} is damaged: {fault}")
        for file in missing:
            (run_dir / file).parent.mkdir(parents=True, exist_ok=True)
            with whole(run_dir / file) as temporary:
                shutil.copyfile(aside / file, temporary)
        shutil.rmtree(aside, ignore_errors=True)
        write_text(run_dir / FETCHED, str(step))
        replace_directory(target, folder / name)
        write_text(folder / LATEST, str(step))
        return folder / name

    def _manifest(self, step: int) -> dict[str, Any] | None:
        """Return a copy's manifest; None for an unfinished copy."""
        try:
            found = json.loads(self._files.cat_file(self._path(f"{PREFIX}{step}/{MANIFEST}")))
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) and isinstance(found.get("files"), dict) else None

    def _remove(self, step: int) -> None:
        """Remove a copy, its manifest first."""
        with suppress(FileNotFoundError):
            self._files.rm_file(self._path(f"{PREFIX}{step}/{MANIFEST}"))
        with suppress(FileNotFoundError):
            self._files.rm(self._path(f"{PREFIX}{step}"), recursive=True)

    def _put_file(self, source: Path, name: str) -> Fingerprint:
        path = self._path(name)
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        with source.open("rb") as file, self._files.open(path, "wb") as written:
            return _copied(file, written)

    def _get_file(self, name: str, target: Path) -> Fingerprint:
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._files.open(self._path(name), "rb") as file, target.open("wb") as written:
            return _copied(file, written)

    def _path(self, name: str) -> str:
        return f"{str(self._root).rstrip('/')}/{name}"

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Turn errors of the file system's package, whose types differ, into CheckpointError."""
        try:
            yield
        except (CheckpointError, JobError, ConfigError):
            raise
        except Exception as error:
            raise CheckpointError(f"trainer.remote={self._url} cannot be used: {error}") from error


def fetch_newer(run_dir: Path, url: str) -> Path | None:
    """Fetch the newest whole copy if the run's directory has no checkpoint of that step or later; return its path.

    A damaged copy is skipped with a warning. Raises CheckpointError if the folder cannot be used.
    """
    remote, here = RemoteFolder(url), latest(run_dir / "checkpoints")
    done = -1 if here is None else steps_of([here])[0]
    for step in reversed([step for step in remote.steps() if step > done]):
        try:
            found = remote.get(run_dir, step)
        except CheckpointError as error:
            log.warning("%s; taking the copy before it", error)
            continue
        log.info("fetched %s from trainer.remote=%s", found, url)
        return found
    return None


def _copied(source: Any, target: Any) -> Fingerprint:
    digest, size = hashlib.sha256(), 0
    while piece := source.read(PIECE):
        target.write(piece)
        digest.update(piece)
        size += len(piece)
    return Fingerprint(size, digest.hexdigest())


def _files_of_run(run_dir: Path) -> Iterator[Path]:
    for name in RUN_FILES:
        path = run_dir / name
        if path.is_file():
            yield path
        elif path.is_dir() and not path.is_symlink():
            yield from (file for file in sorted(path.rglob("*")) if file.is_file())


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a listed file. Raises CheckpointError for one outside of ``folder``."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise CheckpointError(f"a manifest lists {name!r}, which is outside of its folder")
    return folder / name


def main(arguments: list[str]) -> int:
    """Write a copy; return 1, with the reason on standard error, if it cannot be written."""
    run_dir, checkpoint, url = arguments
    try:
        RemoteFolder(url).put(Path(run_dir), Path(checkpoint))
    except (CheckpointError, ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
