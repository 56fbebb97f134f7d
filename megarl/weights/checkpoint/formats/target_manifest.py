"""``megarl_manifest.json``, the last file of a conversion: list of the directory's files, digest of each tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from megarl.core.errors import CheckpointError
from megarl.weights.checkpoint.formats.output import MANIFEST

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
