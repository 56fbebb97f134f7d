"""Checkpoint folders: which ones are finished, their manifests, and checks of their files.

Layout (verl's): ``<dir>/global_step_<i>/{actor/, critic/, …, rng_<rank>.json, state.json}`` and
``<dir>/latest_checkpointed_iteration.txt``. A checkpoint is written as ``global_step_<i>.attempt_<n>``, its manifest
``state.json`` last, and then renamed. A folder with another name or without manifest is unfinished and ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from megarl.core import durable
from megarl.core.durable import write_text
from megarl.core.errors import CheckpointError, JobError
from megarl.core.jobs import TRAIN, of_program
from megarl.core.processes import heartbeat

log = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"
EXPORTED_STEP = "hf_step"
"""File in a run's directory with the step of the weights in ``hf/``."""
PREFIX = "global_step_"
KEPT = "kept"
"""Folder beside the checkpoints with the manifests of states that nodes keep (``trainer.keep_state``)."""
SLOTS = 2
"""States of a rank that its node keeps: the newest one, and the one that is written."""
MANIFEST = "state.json"
PIECE = 1 << 22
"""Bytes of a file read and hashed at a time."""
_UNFINISHED = re.compile(rf"{PREFIX}[0-9]+\.attempt_([0-9]+)")
_NUMBER = re.compile(r"[0-9]{1,18}")
_BESIDE_STATE = ("made", "files")
"""Manifest entries other than the resumable state: origin and files."""


class Fingerprint(NamedTuple):
    """Size and digest that identify a file's content."""

    size: int
    """Bytes."""
    sha256: str

    @classmethod
    def of(cls, path: Path, over: Callable[[], bool] = lambda: False) -> Fingerprint:
        """Compute a file's fingerprint. ``over`` is called before each piece; raises JobError when it returns True."""
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while piece := file.read(PIECE):
                if over():
                    raise JobError(f"asked to stop while {path} was compared with its digest")
                digest.update(piece)
            return cls(os.fstat(file.fileno()).st_size, digest.hexdigest())


def current_attempt(run_dir: Path, program: str = TRAIN) -> int:
    """Number of the newest attempt of a program of the run; 0 before the first. Raises JobError for an invalid file."""
    path = run_dir / of_program("attempt", program)
    if not path.is_file():
        return 0
    if not _NUMBER.fullmatch(text := path.read_text(errors="replace").strip()):
        raise JobError(
            f"{path} has no number but {text[:40]!r}, which megarl has not written; write the largest number there "
            "that a line of metrics.jsonl has as training/attempt, or a larger one"
        )
    return int(text)


def unfinished_name(step: int, attempt: int) -> str:
    """Name of a checkpoint during writing, different for every attempt, so that attempts do not share files."""
    return f"{PREFIX}{step}.attempt_{attempt}"


def _attempt_of(unfinished: Path) -> int:
    found = _UNFINISHED.fullmatch(unfinished.name)
    assert found is not None, f"{unfinished} has no name of unfinished_name"
    return int(found[1])


def latest(folder: Path) -> Path | None:
    """Newest finished checkpoint of ``folder``, or ``None``."""
    return next(reversed(finished(folder)), None)


def newest_state(folder: Path) -> Path | None:
    """Newest finished checkpoint of ``folder``, or the manifest of a later state that nodes keep; ``None`` without
    any."""
    both = [found for found in (latest(folder), latest(folder / KEPT)) if found is not None]
    return max(both, key=lambda path: steps_of([path])) if both else None


def is_kept(checkpoint: Path) -> bool:
    """True for the manifest of a state that nodes keep."""
    return checkpoint.parent.name == KEPT


def exported_step(run_dir: Path) -> int | None:
    """Step of the weights in a run's ``hf/``; ``None`` if not recorded."""
    path = run_dir / EXPORTED_STEP
    text = path.read_text(errors="replace").strip() if path.is_file() else ""
    return int(text) if _NUMBER.fullmatch(text) else None


def finished(folder: Path) -> list[Path]:
    """Finished checkpoints of ``folder``, the newest last."""
    return [p for p in in_order(folder) if (p / MANIFEST).is_file()]


def in_order(folder: Path) -> list[Path]:
    """Checkpoints by step, including those without a manifest."""
    steps = {step: p for p in folder.glob(f"{PREFIX}*") if (step := _step_of(p.name)) is not None}
    return [steps[step] for step in sorted(steps)]


def steps_of(checkpoints: Sequence[Path]) -> list[int]:
    """Steps in the names of checkpoints."""
    return [step for path in checkpoints if (step := _step_of(path.name)) is not None]


def unfounded_latest(folder: Path) -> str | None:
    """Reason why ``latest_checkpointed_iteration.txt`` names no finished checkpoint; ``None`` if valid or missing."""
    path = folder / LATEST
    if not path.is_file():
        return None
    name = path.read_text(errors="replace").strip()
    named = folder / f"{PREFIX}{name}"
    if named in finished(folder) or named in durable.moved_aside(folder, f"{PREFIX}*"):
        return None
    return f"{path} names {name!r}, but {named / MANIFEST} is missing"


def recover(folder: Path) -> list[Path]:
    """Finish or undo every ``complete`` killed between its renames; return the checkpoints restored.

    Call it only at a start: a running job may be between the renames.
    """
    return [target for target in durable.moved_aside(folder, f"{PREFIX}*") if durable.recover_directory(target)]


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, manifest first: after a kill the rest counts as unfinished."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def prune(folder: Path, keep: int, attempt: int = 0, best: int | None = None) -> None:
    """Remove all finished checkpoints except the newest ``keep`` and step ``best``'s, and unfinished ones of attempts
    up to ``attempt``."""
    kept = finished(folder)[-keep:]
    for checkpoint in in_order(folder):
        if checkpoint not in kept and (best is None or _step_of(checkpoint.name) != best):
            remove(checkpoint)
    for path in folder.glob(f"{PREFIX}*"):
        if (found := _UNFINISHED.fullmatch(path.name)) and int(found[1]) <= attempt:
            remove(path)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read ``state.json``. Raises CheckpointError if it is damaged, or its step differs from the folder's name."""
    path = checkpoint / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(manifest.get("step"), int) or not isinstance(manifest.get("phase"), str):
            raise ValueError("it has no step and phase")
        if (step := manifest["step"]) != (named := _step_of(checkpoint.name)) and named is not None:
            raise ValueError(f"its step is {step}, its folder is {checkpoint.name}")
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return manifest


def _step_of(name: str) -> int | None:
    """Step in a checkpoint's final name; ``None`` for other names."""
    number = name.removeprefix(PREFIX)
    return int(number) if name.startswith(PREFIX) and _NUMBER.fullmatch(number) else None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read the state to resume from: step, phase and other saved values. Raises CheckpointError if damaged."""
    return {name: value for name, value in read_manifest(checkpoint).items() if name not in _BESIDE_STATE}


def write_manifest(
    checkpoint: Path, state: Mapping[str, Any], made: Mapping[str, Any], files: Mapping[str, Fingerprint]
) -> None:
    """Write the manifest, which completes the checkpoint. ``made``: its origin, not needed to resume. ``files``:
    relative path -> fingerprint."""
    listed = {name: list(files[name]) for name in sorted(files)}
    write_text(checkpoint / MANIFEST, json.dumps({**state, "made": dict(made), "files": listed}, indent=1))


def complete(
    written: Path,
    state: Mapping[str, Any],
    made: Mapping[str, Any],
    files: Mapping[str, Fingerprint],
    keep: int,
    best: int | None = None,
) -> Path:
    """Finish the checkpoint in ``written``, whose files are complete; remove others as ``prune`` does; return its path.

    Args:
        files: Fingerprints computed by the writers; missing ones are computed here.
    """
    folder, final = written.parent, written.with_name(f"{PREFIX}{state['step']}")
    others = [path for path in written.rglob("*") if path.is_file() and str(path.relative_to(written)) not in files]
    durable.sync_tree(written)
    write_manifest(written, state, made, {**files, **fingerprints(written, others)})
    durable.replace_directory(written, final)
    write_text(folder / LATEST, str(state["step"]))
    prune(folder, keep, _attempt_of(written), best)
    return final


def training_checkpoint(part: Path) -> Path | None:
    """Finished checkpoint with the model (``actor``, ...) in ``part``; ``None`` if ``part`` belongs to none."""
    root = part.resolve().parent
    return root if (root / MANIFEST).is_file() else None


def check_finished(part: Path) -> None:
    """Raise CheckpointError if ``part`` is a model of an unfinished training checkpoint."""
    root = part.resolve().parent
    if _UNFINISHED.fullmatch(root.name) or (not (root / MANIFEST).is_file() and any(root.glob("rng_*.json"))):
        raise CheckpointError(
            f"{root} was not finished or is being removed, so its files may be incomplete; give a checkpoint "
            f"{PREFIX}N with a {MANIFEST}"
        )


def fault_of_files(
    checkpoint: Path, *, digests: bool = True, stopping: Callable[[], bool] = lambda: False, part: str = ""
) -> str | None:
    """Describe the first file that differs from the manifest, or a manifest without files; ``None`` if all match.

    ``part``: check only this folder's files; if the manifest lists none of them, log a warning.

    ``digests``: read every byte (0.9 GB/s a core with the processor's SHA instructions). Otherwise compare only sizes,
    and a manifest without files is only a warning.

    Raises CheckpointError for a damaged manifest, JobError once ``stopping`` returns True.
    """
    listed = read_manifest(checkpoint).get("files", {})
    try:
        wanted = {str(name): Fingerprint(int(size), str(digest)) for name, (size, digest) in listed.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{checkpoint / MANIFEST} is damaged: its list of files cannot be read ({error})"
        ) from error
    if part:
        wanted = {name: found for name, found in wanted.items() if Path(name).parts[0] == part}
        if not wanted:
            log.warning("%s lists no files of %s, so they cannot be verified", checkpoint / MANIFEST, part)
    elif not wanted:
        unlisted = f"{checkpoint / MANIFEST} lists no files, so none of them can be verified"
        if digests:
            return f"{unlisted}; set trainer.verify_checkpoints=false to load it unverified"
        log.warning("%s; it is loaded unverified (trainer.verify_checkpoints=false)", unlisted)
    sizes = {name: _size(checkpoint / name) for name in wanted}
    for name, size in sizes.items():
        if size != wanted[name].size:
            is_now = "is missing" if size is None else f"has {size} bytes"
            return f"{checkpoint / name} {is_now}, written were {wanted[name].size}"
    if digests:
        found = _digested([checkpoint / name for name in wanted], stopping)
        for name, fingerprint in zip(wanted, found, strict=True):
            if fingerprint != wanted[name]:
                return (
                    f"{checkpoint / name} has SHA-256 {fingerprint.sha256[:12]}…, written was "
                    f"{wanted[name].sha256[:12]}…"
                )
    return None


def _digested(paths: Sequence[Path], stopping: Callable[[], bool]) -> list[Fingerprint]:
    """Compute fingerprints in threads. Raises JobError once ``stopping`` returns True."""
    left = threading.Event()
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing releases the GIL
        try:
            return list(pool.map(lambda path: Fingerprint.of(path, lambda: left.is_set() or stopping()), paths))
        finally:
            left.set()  # on an interrupt, stop the reading threads


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def fingerprints(root: Path, paths: Iterable[Path]) -> dict[str, Fingerprint]:
    """Compute fingerprints: path relative to ``root`` -> fingerprint."""
    found = {}
    for path in paths:
        heartbeat.beat()
        found[str(path.relative_to(root))] = Fingerprint.of(path)
    return found
