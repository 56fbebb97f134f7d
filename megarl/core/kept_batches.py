"""Files with each step's training input (``trainer.keep_batches``): tokens in ``RUN/batches/step_NNNNNN.npz``, and what
the loss reads of them in ``RUN/batches/step_NNNNNN_values.npz``. Numpy only.

Shape legend: N sequences in the order of the model's input, T tokens of all sequences, G groups, R responses of the
step, trained or not; L layers with experts, K experts of a token.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from megarl.core.durable import whole
from megarl.core.errors import DataError

FOLDER = "batches"


@dataclass(frozen=True, eq=False)
class KeptBatch:
    """Everything that the updates of one step train on: 9 bytes a token, 20 bytes a sequence, and the group names."""

    tokens: np.ndarray
    """int32 [T]: input of the model, without padding."""
    targets: np.ndarray
    """int32 [T]: target token of the log-prob at each position; negative for none."""
    mask: np.ndarray
    """bool [T]: positions in the loss, after all masking."""
    lengths: np.ndarray
    """int32 [N]"""
    updates: np.ndarray
    """int32 [N]: number of the update within the step; further epochs repeat it."""
    numbers: np.ndarray
    """int32 [N]: number of the sequence within the step. A sequence of several pairs appears once per pair."""
    groups: np.ndarray
    """int32 [N]: index into ``group_ids``; -1 for an expert row."""
    indices: np.ndarray
    """int32 [N]: ``Trajectory.index``; 0 for an expert row."""
    group_ids: np.ndarray
    """str [G]"""

    def write(self, path: Path) -> None:
        """Write the file atomically. Raises OSError."""
        _write(path, self)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Raises DataError if it is damaged."""
        with _readable(path, "remove it, and its step is not compared"):
            found = cls(**_arrays(path, cls))
            if not len(found.tokens) == len(found.targets) == len(found.mask) == found.lengths.sum():
                raise ValueError("its arrays do not fit each other")
            if any(
                len(one) != len(found.lengths) for one in (found.updates, found.numbers, found.groups, found.indices)
            ):
                raise ValueError("its arrays do not fit each other")
            if len(found.groups) and not -1 <= found.groups.min() <= found.groups.max() < len(found.group_ids):
                raise ValueError("it has no such groups")
        return found


@dataclass(frozen=True, eq=False)
class KeptValues:
    """All else that the updates of a step read, in the order of its ``KeptBatch``.

    At most 20 bytes a token beside routing, and 30 bytes a response.

    An array of no elements stands for values that the step does not have.
    """

    advantages: np.ndarray
    """float32 [T], like the next four: at the positions of ``KeptBatch.mask``."""
    old_logp: np.ndarray
    ref_logp: np.ndarray
    engine_logp: np.ndarray
    values: np.ndarray
    routing: np.ndarray
    """int8 or int16 [T, L, K], as ``Sequences.routing``."""
    row: np.ndarray
    """int32 [N]: response of each sequence; -1 for an expert row."""
    response_groups: np.ndarray
    """str [R]: group of each response."""
    response_indices: np.ndarray
    """int32 [R]: number within the group."""
    rewards: np.ndarray
    """float64 [R]"""
    greedy: np.ndarray
    """float64 [R], reward of the greedy response to the prompt."""
    truncated: np.ndarray
    """bool [N]"""

    def write(self, path: Path) -> None:
        """Write the file atomically. Raises OSError."""
        _write(path, self)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Raises DataError if it is damaged or missing."""
        with _readable(path, "the step cannot be computed again"):
            return cls(**_arrays(path, cls))


def _write(path: Path, kept: KeptBatch | KeptValues) -> None:
    path.parent.mkdir(exist_ok=True)
    arrays: dict[str, Any] = {field.name: getattr(kept, field.name) for field in fields(kept)}
    with whole(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)


def _arrays(path: Path, kind: type[KeptBatch | KeptValues]) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as arrays:
        return {field.name: arrays[field.name] for field in fields(kind)}


@contextmanager
def _readable(path: Path, otherwise: str) -> Iterator[None]:
    """Raise DataError for a file whose reading fails; ``otherwise``: what then holds."""
    try:
        yield
    except (OSError, ValueError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read ({error}); {otherwise}") from error


def values_path(run_dir: Path, step: int) -> Path:
    """Path of a step's values; steps count from 1."""
    return run_dir / FOLDER / f"step_{step:06d}_values.npz"


def path_of(run_dir: Path, step: int) -> Path:
    """Path of a step's file; steps count from 1."""
    return run_dir / FOLDER / f"step_{step:06d}.npz"


def kept_steps(run_dir: Path) -> list[int]:
    """Steps that have a file, ascending."""
    names = (re.fullmatch(r"step_(\d+)\.npz", path.name) for path in (run_dir / FOLDER).glob("step_*.npz"))
    return sorted(int(name[1]) for name in names if name)


def forget_after(run_dir: Path, step: int) -> None:
    """Remove the files of steps after ``step``, to which the run has rolled back; they will be written again."""
    for later in kept_steps(run_dir):
        if later > step:
            path_of(run_dir, later).unlink(missing_ok=True)
            values_path(run_dir, later).unlink(missing_ok=True)
