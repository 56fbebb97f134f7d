"""Open a checkpoint of either format and check it against its family's table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from megarl.core.errors import ArchitectureError, CheckpointError, first_of
from megarl.weights.architectures import Head as TableHead
from megarl.weights.architectures import architecture
from megarl.weights.checkpoint.formats.dist import (
    ADAPTER,
    METADATA,
    NOT_MODEL,
    DistFiles,
    Stored,
    find_dist,
    missing_elements,
    shared_chunk,
)
from megarl.weights.checkpoint.formats.dist_write import adapt, is_known
from megarl.weights.checkpoint.formats.hf_files import Dequantised, Divided, HFFiles
from megarl.weights.checkpoint.formats.hf_source import (
    EMBEDDING,
    HF_FOLDER,
    LM_HEAD,
    SCORE,
    check_hf,
    check_labels,
    check_shape,
    check_tied,
    is_expected,
    open_hf,
    read_hf_config,
)
from megarl.weights.checkpoint.formats.slices import check_dtypes
from megarl.weights.checkpoint.training.manifest import check_finished
from megarl.weights.reshard.layout import Layout
from megarl.weights.reshard.layouts import dist_layout, hf_layout

Head = Literal["auto", "lm", "value"]
OUTPUT = "output_layer.weight"
EMBEDDING_KEY = "embedding.word_embeddings.weight"


@dataclass
class Opened:
    """A checkpoint that has every tensor of its table."""

    kind: Literal["hf", "megatron"]
    path: Path
    config_path: Path
    """Directory of config.json and tokenizer."""
    hf_config: dict[str, Any]
    source: HFFiles | Dequantised | Divided | DistFiles
    layout: Layout
    """Layout on one rank; local names are the names in ``source``."""
    is_value: bool
    mtp: bool
    other: tuple[str, ...] = field(default=())
    """Stored tensors that do not belong to the model (optimizer state, dropped prediction layers)."""

    def close(self) -> None:
        """Close the files."""
        self.source.close()

    @property
    def table(self) -> TableHead:
        """Head for the architecture tables."""
        return "score" if self.is_value else "lm"

    def is_expected(self, name: str) -> bool:
        """True if a stored tensor outside the layout is allowed."""
        if self.kind == "hf":
            return is_expected(name, self.layout, self.hf_config)
        return _beside(name, self.mtp) or (name == OUTPUT and _is_tied(self.hf_config, self.is_value))

    def dtype_of(self, tensor: str) -> torch.dtype:
        """Stored dtype of a logical tensor."""
        found = {self.source.dtypes[row.local] for row in self.layout.rows_with[tensor]}
        return found.pop()


def _read_config(path: Path) -> dict[str, Any]:
    """Read and complete the configuration. Raises CheckpointError if missing, damaged or refused by transformers."""
    try:
        return read_hf_config(path)
    except ArchitectureError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}") from error


def family(hf_config: dict[str, Any], where: Path, head: TableHead = "lm") -> str:
    """Return the family name of a configuration. Raises CheckpointError if it has no table."""
    try:
        return architecture(hf_config, head).name
    except ArchitectureError as error:
        raise CheckpointError(f"{where / 'config.json'}: {error}") from error


def open_checkpoint(
    path: Path, *, config_path: Path | None = None, head: Head = "auto", mtp: bool = False, check: bool = True
) -> Opened:
    """Open a directory of either format. ``check`` requires every tensor and refuses unknown ones.

    Raises CheckpointError with file, tensor, expected and found value.
    """
    dist = find_dist(path)
    return (
        open_hf_checkpoint(path, head, mtp, check)
        if dist is None
        else open_dist_checkpoint(path, config_path, head, mtp, check)
    )


def open_hf_checkpoint(path: Path, head: Head = "auto", mtp: bool = False, check: bool = True) -> Opened:
    """Open an HF checkpoint. Raises CheckpointError."""
    hf_config = _read_config(path)
    family(hf_config, path)
    source = open_hf(path)
    is_value = SCORE in source.shapes if head == "auto" else head == "value"
    table: TableHead = "score" if is_value else "lm"
    family(hf_config, path, table)
    layout = hf_layout(hf_config, mtp=mtp, head=table)
    if check:
        if is_value:
            check_labels(path, hf_config)
        check_hf(source, layout, hf_config)
        if _is_tied(hf_config, is_value) and LM_HEAD in source.shapes:
            check_shape(LM_HEAD, source.file_of(LM_HEAD), source.shapes[LM_HEAD], source.shapes[EMBEDDING])
            check_tied(source, EMBEDDING, LM_HEAD, source.shapes[EMBEDDING][0])
    other = tuple(name for name in source.shapes if name not in layout.tensors)
    return Opened("hf", path, path, hf_config, source, layout, is_value, mtp, other)


def config_folder(path: Path) -> Path:
    """Directory of config.json and tokenizer for a dist_checkpointing directory. Raises CheckpointError if missing."""
    places = (path / HF_FOLDER, path.parent / HF_FOLDER, path)
    found = next((p for p in places if (p / "config.json").is_file()), None)
    if found is None:
        raise CheckpointError(
            f"{path} has no {HF_FOLDER}/config.json; give the HF model it was made from with --config"
        )
    return found


def open_dist_checkpoint(
    path: Path, config_path: Path | None, head: Head = "auto", mtp: bool = False, check: bool = True
) -> Opened:
    """Open a dist_checkpointing directory: ``path``, or its ``actor`` or ``dist_ckpt`` folder."""
    path = find_dist(path) or path
    check_finished(path)
    if config_path is None:
        config_path = config_folder(path)
    hf_config = _read_config(config_path)
    family(hf_config, config_path)
    files = DistFiles(path)
    if any(key.startswith(ADAPTER) for key in files.stored):
        raise CheckpointError(
            f"{path} has adapters alone, not the model that they are for; `megarl convert megatron-to-hf {path} "
            "TARGET` writes them as a PEFT adapter, which `megarl convert merge-adapter` puts into the model"
        )
    output = files.shapes.get(OUTPUT)
    is_value = (output is not None and output[0] == 1) if head == "auto" else head == "value"
    rows = files.shapes.get(EMBEDDING_KEY, (0,))[0]
    if check and rows < hf_config["vocab_size"]:
        raise CheckpointError(
            f"{EMBEDDING_KEY} in {path} has {rows} rows, config.json asks for {hf_config['vocab_size']} or more; "
            "they belong to different models"
        )
    table: TableHead = "score" if is_value else "lm"
    family(hf_config, config_path, table)
    layout = dist_layout(hf_config, vocab=max(rows, hf_config["vocab_size"]), mtp=mtp, head=table)
    wanted = layout.local_shapes(0)
    stored = adapt(files.stored, wanted)
    # A tied model may have been saved with a copy of the embedding.
    copy = {OUTPUT} if _is_tied(hf_config, is_value) else set()
    other = tuple(key for key in files.stored if not is_known(key, wanted))
    if check:
        _check_stored(path, stored, wanted, [key for key in other if key not in copy and not _beside(key, mtp)])
        if copy and OUTPUT in files.shapes:
            check_tied(files, EMBEDDING_KEY, OUTPUT, hf_config["vocab_size"])
    files.close()
    return Opened("megatron", path, config_path, hf_config, DistFiles(path, stored), layout, is_value, mtp, other)


def _is_tied(hf_config: dict[str, Any], is_value: bool) -> bool:
    return bool(hf_config.get("tie_word_embeddings")) and not is_value


def _beside(key: str, mtp: bool) -> bool:
    """True if a stored tensor is not part of the requested model."""
    return NOT_MODEL.match(key) is not None or (not mtp and key.startswith("mtp."))


def _check_stored(
    path: Path, stored: dict[str, Stored], wanted: dict[str, tuple[int, ...]], unknown: Iterable[str]
) -> None:
    missing = [key for key in wanted if key not in stored]
    if missing:
        raise CheckpointError(
            f"{path} lacks {first_of(missing, 5)}; it was saved from another model than config.json describes"
        )
    for key, shape in wanted.items():
        check_shape(key, path, stored[key].shape, shape)
    check_dtypes((key, path, stored[key].dtype) for key in wanted)
    for key, missing_count in missing_elements(stored):
        raise CheckpointError(
            f"{key} in {path}: chunks have {prod(stored[key].shape) - missing_count} elements, expected "
            f"{prod(stored[key].shape)}; it was not saved whole"
        )
    if (shared := shared_chunk({key: stored[key] for key in wanted})) is not None:
        raise CheckpointError(f"{path / METADATA}: {shared}; copy the checkpoint again")
    unknown = sorted(unknown)
    if unknown:
        raise CheckpointError(
            f"{path} has tensors that the model's table does not know: {first_of(unknown, 5)}; config.json is another "
            "model's, or add them to megarl/weights/architectures/"
        )
