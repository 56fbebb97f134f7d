"""Checkpoints of either format: opened and checked, and the executor of a plan between two of them.

Reading, casting, digests and writing all release the GIL.

Memory is a few blocks for each worker, independent of tensor sizes.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from tqdm import tqdm

from megarl.core.errors import ArchitectureError, CheckpointError, first_of
from megarl.ops import slice_digest
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
from megarl.weights.checkpoint.formats.slices import BoxIndex, Source, check_dtypes, value_fault
from megarl.weights.checkpoint.training.manifest import check_finished
from megarl.weights.reshard import layout
from megarl.weights.reshard.layout import Box, Layout
from megarl.weights.reshard.layouts import dist_layout, hf_layout
from megarl.weights.reshard.plan import Move, ReshardPlan

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


T = TypeVar("T")
Count = Callable[[int], None]
"""Adds finished bytes to the progress; raises if another worker has failed."""


def each(
    what: str, items: Sequence[T], act: Callable[[T, Count], None], *, total: int, workers: int, progress: bool = True
) -> None:
    """Run ``act`` for every item; the first error stops all. ``total``: bytes that all items count together."""
    lock, stop = threading.Lock(), threading.Event()
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None if progress else True)

    def count(size: int) -> None:
        if stop.is_set():
            raise _Stopped
        with lock:
            bar.update(size)

    # One torch thread per worker: the workers are the parallelism.
    pool = ThreadPoolExecutor(max(workers, 1), initializer=torch.set_num_threads, initargs=(1,))
    try:
        for future in as_completed([pool.submit(act, item, count) for item in items]):
            future.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
        bar.close()


class _Stopped(Exception):
    """Another worker failed; never visible outside, because that worker's error is raised first."""


BLOCK_ELEMENTS = 4 << 20
_IN_FLIGHT = 64 << 20
"""Total bytes of all workers' blocks. Each worker has two buffers, at most 4 bytes an element (8 for float64)."""
_MODULUS = 1 << 64

Digests = dict[str, int]
"""Logical tensor -> digest of the elements read so far."""


class Region(NamedTuple):
    """A box of a target tensor that is contiguous, row-major, in a file of the target."""

    local: str
    box: Box


class OutFile(NamedTuple):
    name: str
    regions: tuple[Region, ...]


class Transfer:
    """The moves of a plan between two one-rank layouts, by destination.

    Args:
        plan: From the source checkpoint's layout to the target's.
        source: Tensors of the source, under the source layout's local names.
        dtypes: Local name in the target -> dtype.
        workers: Number of threads that request blocks concurrently; more threads get smaller blocks.
        nonfinite: Collects a text for each tensor with non-finite values; ``None`` makes such a value an error.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        source: Source,
        dtypes: Mapping[str, torch.dtype],
        workers: int = 1,
        nonfinite: dict[str, str] | None = None,
    ) -> None:
        self._block = max(min(BLOCK_ELEMENTS, _IN_FLIGHT // 8 // workers), 1)
        self.tensors = plan.destination.tensors
        self.source = source
        self.nonfinite = nonfinite
        self.dtypes = dtypes
        self.shapes = plan.destination.local_shapes(0)
        moves: dict[str, list[tuple[Box, Move]]] = defaultdict(list)
        for move in plan.moves_to(0):
            moves[move.dst_local].append((layout.at(move.dst_at, layout.shape_of(move.box)), move))
        self._moves = {local: BoxIndex(items) for local, items in moves.items()}

    def blocks(self, region: Region, digests: Digests) -> Iterator[torch.Tensor]:
        """Yield the region's source elements as contiguous row-major blocks; add their digests to ``digests``.

        Raises CheckpointError for damaged files and non-finite values.
        """
        dtype, index = self.dtypes[region.local], self._moves.get(region.local)
        scratch = _Scratch(min(self._block, layout.volume(region.box)))
        for box in layout.split(region.box, self._block):
            block = scratch.get(dtype, layout.shape_of(box))
            found = list(index.overlapping(box)) if index else []
            if sum(layout.volume(common) for common, _ in found) < block.numel():
                block.zero_()  # padding
            for common, move in found:
                view = _part(block, box, common, move)
                self._read(common, move, view, scratch)
                self._add(digests, view, common, move)
            yield block

    def digest(self, region: Region, written: Source, digests: Digests) -> Iterator[int]:
        """Add digests of a written region to ``digests``; yield the number of elements after each block."""
        dtype, index = self.dtypes[region.local], self._moves.get(region.local)
        scratch = _Scratch(min(self._block, layout.volume(region.box)))
        for box in layout.split(region.box, self._block):
            block = written.read(region.local, box, scratch.get(dtype, layout.shape_of(box)))
            for common, move in index.overlapping(box) if index else ():
                self._add(digests, _part(block, box, common, move), common, move)
            yield block.numel()

    def _read(self, common: Box, move: Move, view: torch.Tensor, scratch: _Scratch) -> None:
        """Read directly into the block if its dtype equals the file's, else through a second buffer."""
        start = layout.shifted(move.src_at, _offset(common, move))
        box = layout.at(start, tuple(view.shape))
        shape, dtype = layout.shape_of(box), self.source.dtypes[move.src_local]
        direct = view.is_contiguous() and view.dtype == dtype
        out = view.view(shape) if direct else scratch.get(dtype, shape, second=True)
        values = self.source.read(move.src_local, box, out)
        if values.data_ptr() != view.data_ptr():
            view.copy_(values.view(view.shape))
        if (fault := value_fault(values, view)) is not None:
            self._note(move, fault)

    def _note(self, move: Move, fault: str) -> None:
        """Record non-finite values, or raise CheckpointError."""
        text = f"{move.tensor} in {self.source.file_of(move.src_local)} {fault}"
        if self.nonfinite is None:
            raise CheckpointError(f"{text}; --allow-nonfinite converts it as it is")
        self.nonfinite[move.tensor] = text

    def _add(self, digests: Digests, view: torch.Tensor, common: Box, move: Move) -> None:
        start = tuple(lo + by for (lo, _), by in zip(move.box, _offset(common, move), strict=True))
        partial = slice_digest(view, start=start, shape=self.tensors[move.tensor])
        digests[move.tensor] = (digests.get(move.tensor, 0) + partial) % _MODULUS


class _Scratch:
    """Two reusable buffers. Memory freed per block would stay with the thread that allocated it."""

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._buffers: dict[tuple[torch.dtype, bool], torch.Tensor] = {}

    def get(self, dtype: torch.dtype, shape: tuple[int, ...], *, second: bool = False) -> torch.Tensor:
        key = dtype, second
        if key not in self._buffers:
            self._buffers[key] = torch.empty(self._elements, dtype=dtype)
        return self._buffers[key][: prod(shape)].view(shape)


def _offset(common: Box, move: Move) -> tuple[int, ...]:
    """Start of a part of the move's destination box, relative to that box, along the logical tensor's axes."""
    lead = len(move.dst_at) - len(move.box)
    return tuple(lo - at for (lo, _), at in zip(common[lead:], move.dst_at[lead:], strict=True))


def _part(block: torch.Tensor, box: Box, common: Box, move: Move) -> torch.Tensor:
    """View of ``common`` in the block for ``box``, with the logical tensor's axes."""
    lead = len(move.dst_at) - len(move.box)
    start = tuple(lo - first for (lo, _), (first, _) in zip(common, box, strict=True))
    return block[layout.index_of(start, layout.shape_of(common[lead:]))]


def add(total: Digests, more: Mapping[str, int]) -> None:
    for name, value in more.items():
        total[name] = (total.get(name, 0) + value) % _MODULUS
