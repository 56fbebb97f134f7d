"""Weights published as files (``sync.method=checkpoint``): a folder per version, complete once its manifest exists.

Standard library only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.core.durable import read_json, write_text
from megarl.core.errors import CheckpointError
from megarl.core.schema import WeightsVersion

FOLDER = "weights"
MANIFEST = "published.json"
KEPT = 2
"""Number of complete versions kept: an engine may read one while the next appears."""


@dataclass(frozen=True)
class PublishedWeights:
    """Manifest of a version, with what an engine must prove after reading the files."""

    version: str
    digests: Mapping[str, str]
    """Logical tensor -> hexadecimal digest of its elements in ``model.dtype``, as in the trainer."""
    probe: Sequence[int]
    """Token ids of the probe text."""
    logp: Sequence[float]
    """The trainer's log-probs of ``probe[1:]`` at temperature 1."""
    tolerance: float
    """Largest allowed difference of the engine's log-probs, in multiples of max(1, |log-prob|)."""
    decode: int = 0
    """Tokens that the engine samples after the probe text."""

    def write(self, folder: Path) -> None:
        """Write the manifest, which completes the folder. Raises OSError."""
        write_text(folder / MANIFEST, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> PublishedWeights:
        """Read the manifest of a folder. Raises CheckpointError if it is missing or invalid."""
        try:
            return cls(**read_json(folder / MANIFEST))
        except (OSError, TypeError) as error:  # a trainer may remove it at any moment
            raise CheckpointError(f"{folder / MANIFEST} is no manifest of published weights ({error})") from error


def folder_of(run_dir: Path, version: WeightsVersion | str) -> Path:
    """Folder of a version's files."""
    return run_dir.absolute() / FOLDER / str(version)


def whole_versions(run_dir: Path) -> list[WeightsVersion]:
    """Versions with complete folders, the newest last."""
    found = []
    for path in (run_dir / FOLDER).glob(f"[0-9]*/{MANIFEST}"):
        with suppress(ValueError):
            found.append(WeightsVersion.parse(path.parent.name))
    return sorted(found)


def remove_old(run_dir: Path) -> None:
    """Remove all but the newest ``KEPT`` complete versions, and older folders that a kill left unfinished."""
    kept = whole_versions(run_dir)[-KEPT:]
    for path in (run_dir / FOLDER).iterdir():
        with suppress(ValueError):
            version = WeightsVersion.parse(path.name.removeprefix(".").removesuffix(".partial"))
            if version not in kept and version < kept[-1]:
                (path / MANIFEST).unlink(missing_ok=True)  # first: marks the rest as incomplete
                shutil.rmtree(path, ignore_errors=True)
