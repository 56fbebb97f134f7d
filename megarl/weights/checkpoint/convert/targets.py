"""File contents of a checkpoint of either format, and writers for them and for accompanying files."""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from megarl.weights.checkpoint.convert.open_checkpoint import Opened, OutFile, Region
from megarl.weights.checkpoint.formats.dist import Chunk, DistFiles, Stored
from megarl.weights.checkpoint.formats.dist_write import extra_states, other_name, write_chunk, write_metadata
from megarl.weights.checkpoint.formats.hf_files import (
    INDEX,
    Dequantised,
    Divided,
    HFFiles,
    groups,
    header_bytes,
    shards,
)
from megarl.weights.checkpoint.formats.hf_source import HF_FOLDER, copy_small_files, divided, places_in_files, rename
from megarl.weights.checkpoint.formats.output import Finished, write_json
from megarl.weights.checkpoint.formats.slices import as_bytes
from megarl.weights.reshard import layout as boxes
from megarl.weights.reshard.layout import Box, Layout
from megarl.weights.reshard.layouts import (
    VOCAB_MULTIPLE,
    MegatronGrid,
    dist_layout,
    hf_layout,
    megatron_layout,
    padded_vocab_size,
)
from megarl.weights.reshard.plan import build_plan

Blocks = Callable[[Region], Iterator[torch.Tensor]]
Closable = HFFiles | Dequantised | Divided | DistFiles


class Target(Protocol):
    kind: str
    layout: Layout
    """Layout on one rank; local names are the names in the files."""
    dtypes: dict[str, torch.dtype]
    """Local name -> dtype."""
    files: tuple[OutFile, ...]

    def write(self, path: Path, file: OutFile, blocks: Blocks) -> tuple[tuple[str, Chunk], ...]:
        """Write one file of the directory ``path``; return the chunks for the directory's metadata."""
        ...

    def reader(self, path: Path, records: Iterable[Finished] | None = None) -> Closable:
        """Open these files' tensors for reading; ``None``: the finished directory's."""
        ...

    def finish(self, path: Path, records: Iterable[Finished]) -> None:
        """Write all other files."""
        ...


def file_size(target: Target, file: OutFile) -> int:
    """Bytes of the elements in a file."""
    return sum(boxes.volume(region.box) * target.dtypes[region.local].itemsize for region in file.regions)


def _local_dtypes(layout: Layout, opened: Opened, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Choose each dtype: the tensor's fixed one, else ``dtype``, else the stored one."""
    found: dict[str, torch.dtype] = {}
    for row in layout.rows:
        for tensor in row.parts:
            own = layout.dtype_of(tensor)
            wanted = getattr(torch, own) if own else dtype or opened.dtype_of(tensor)
            found[row.local] = torch.promote_types(found.get(row.local, wanted), wanted)
    return found


class HFTarget:
    """An ordinary HF checkpoint in safetensors."""

    kind = "hf"

    def __init__(self, opened: Opened, dtype: torch.dtype | None, file_bytes: int) -> None:
        self._opened = opened
        self.layout = hf_layout(opened.hf_config, mtp=opened.mtp, head=opened.table)
        self.dtypes = _local_dtypes(self.layout, opened, dtype)
        self._places = places_in_files(opened.hf_config, self.layout.tensors, opened.table)
        parts: dict[str, list[str]] = defaultdict(list)
        for name, place in self._places.items():
            parts[place.stored].append(name)
        for group in parts.values():
            group.sort(key=lambda name: (self._places[name].expert or 0, self._places[name].first))
            dtype = functools.reduce(torch.promote_types, (self.dtypes[name] for name in group))
            self.dtypes |= dict.fromkeys(group, dtype)
        sizes = {
            stored: prod(self._places[group[0]].whole) * self.dtypes[group[0]].itemsize
            for stored, group in parts.items()
        }
        self.files = tuple(
            # Wide elements first, to align every tensor to its element size.
            OutFile(
                name,
                tuple(
                    Region(part, boxes.whole(self.layout.tensors[part]))
                    for stored in sorted(group, key=lambda stored: -self.dtypes[parts[stored][0]].itemsize)
                    for part in parts[stored]
                ),
            )
            for name, group in shards(sizes, file_bytes).items()
        )
        self._total = sum(sizes.values())

    def write(self, path: Path, file: OutFile, blocks: Blocks) -> tuple[tuple[str, Chunk], ...]:
        with (path / file.name).open("wb", buffering=0) as stream:
            whole = {self._places[r.local].stored: self._places[r.local].whole for r in file.regions}
            dtypes = {self._places[r.local].stored: self.dtypes[r.local] for r in file.regions}
            stream.write(header_bytes((name, dtypes[name], shape) for name, shape in whole.items()))
            for _, found in groupby(
                file.regions, lambda r: (self._places[r.local].stored, self._places[r.local].expert)
            ):
                for block in self._in_order(list(found), blocks):
                    _write_all(stream, as_bytes(block))
            os.fsync(stream.fileno())
        return ()

    def _in_order(self, regions: list[Region], blocks: Blocks) -> Iterator[torch.Tensor]:
        """Yield the elements of a stored tensor, or of one of its experts, in file order."""
        first = self._places[regions[0].local]
        if not first.transposed and first.groups == 1:
            for region in regions:
                yield from blocks(region)
            return
        matrix = torch.empty(first.whole[first.expert is not None :], dtype=self.dtypes[regions[0].local])
        for region in regions:
            values, done = torch.empty(boxes.shape_of(region.box), dtype=matrix.dtype), 0
            for block in blocks(region):
                values.view(-1)[done : done + block.numel()] = block.view(-1)
                done += block.numel()
            view = self._places[region.local].view_in_matrix(matrix)
            view.copy_(values.view(view.shape))
        yield matrix

    def reader(self, path: Path, records: Iterable[Finished] | None = None) -> HFFiles | Dequantised | Divided:
        files = HFFiles(path, None if records is None else [record.file for record in records])
        rename(files, self._opened.hf_config)
        return divided(files, self._opened.hf_config)

    def finish(self, path: Path, records: Iterable[Finished]) -> None:
        if len(self.files) > 1:
            weight_map = {
                self._places[region.local].stored: file.name for file in self.files for region in file.regions
            }
            write_json(path / INDEX, {"metadata": {"total_size": self._total}, "weight_map": weight_map})
        _copy_small_files(self._opened, path, self)


class DistTarget:
    """A Megatron-Core checkpoint, split into chunks and files as ranks of ``grid`` would save it."""

    kind = "megatron"

    def __init__(
        self,
        opened: Opened,
        dtype: torch.dtype | None,
        file_bytes: int,
        grid: MegatronGrid,
        vocab_multiple: int = VOCAB_MULTIPLE,
    ) -> None:
        self._opened = opened
        config, mtp, head = opened.hf_config, opened.mtp, opened.table
        # TransformerEngine's names do not appear in files; its spec does not shard MLA's down-projections.
        ranks = megatron_layout(
            config, grid, vocab_multiple=vocab_multiple, transformer_impl="transformer_engine", mtp=mtp, head=head
        )
        vocab = padded_vocab_size(config["vocab_size"], grid.tp, vocab_multiple)
        self.layout = dist_layout(config, vocab=vocab, mtp=mtp, head=head)
        self.dtypes = _local_dtypes(self.layout, opened, dtype)
        self.files = tuple(self._plan_files(ranks, file_bytes))

    def _plan_files(self, ranks: Layout, file_bytes: int) -> Iterator[OutFile]:
        stacked = {row.local: len(row.stack) for row in self.layout.rows}
        held: dict[int, dict[tuple[str, Box], list[Box]]] = defaultdict(lambda: defaultdict(list))

        def hold(rank: int, key: str, box: Box) -> None:
            held[rank][key, box[: stacked[key]]].append(box)

        for move in build_plan(ranks, self.layout).moves_to(0):
            hold(move.src, move.dst_local, boxes.at(move.dst_at, boxes.shape_of(move.box)))
        for pad in self.layout.padding(0):
            hold(
                max(rank for rank, keys in held.items() if any(key == pad.local for key, _ in keys)), pad.local, pad.box
            )
        for rank in sorted(held):
            regions = [Region(key, box) for (key, _), found in held[rank].items() for box in _merged(found)]
            sizes = {region: boxes.volume(region.box) * self.dtypes[region.local].itemsize for region in regions}
            for part, group in enumerate(groups(sizes, file_bytes)):
                yield OutFile(f"__{rank}_{part}.distcp", tuple(group))

    def write(self, path: Path, file: OutFile, blocks: Blocks) -> tuple[tuple[str, Chunk], ...]:
        chunks = []
        with (path / file.name).open("wb") as stream:
            for region in file.regions:
                data = (as_bytes(block) for block in blocks(region))
                offset, length = write_chunk(stream, region.box, self.dtypes[region.local], data)
                chunks.append((region.local, Chunk(region.box, file.name, offset, length)))
            stream.flush()
            os.fsync(stream.fileno())
        return tuple(chunks)

    def reader(self, path: Path, records: Iterable[Finished] | None = None) -> DistFiles:
        if records is None:
            return DistFiles(path)
        chunks: dict[str, list[Chunk]] = defaultdict(list)
        for record in records:
            for key, chunk in record.chunks:
                chunks[key].append(chunk)
        shapes = self.layout.local_shapes(0)
        return DistFiles(
            path, {key: Stored(self.dtypes[key], shapes[key], tuple(held)) for key, held in chunks.items()}
        )

    def finish(self, path: Path, records: Iterable[Finished]) -> None:
        shapes = self.layout.local_shapes(0)
        # Write both names of a norm, sharing bytes, so that models of either spec can load it.
        aliases = {name: key for key in shapes if (name := other_name(key, shapes)) is not None}
        chunks = [item for record in records for item in record.chunks]
        tensors = {key: (self.dtypes[key], shape) for key, shape in shapes.items()}
        (path / HF_FOLDER).mkdir(exist_ok=True)
        _copy_small_files(self._opened, path / HF_FOLDER, self)
        write_metadata(path, tensors, chunks, aliases, extra_states(self.layout))


def _merged(found: list[Box]) -> list[Box]:
    """Merge boxes that are adjacent along a single axis: the parts of one rank's fused tensor."""
    out: list[Box] = []
    for box in sorted(found):
        differ = [axis for axis, (a, b) in enumerate(zip(out[-1], box, strict=True)) if a != b] if out else []
        if len(differ) == 1 and out[-1][differ[0]][1] == box[differ[0]][0]:
            axis = differ[0]
            out[-1] = (*box[:axis], (out[-1][axis][0], box[axis][1]), *box[axis + 1 :])
        else:
            out.append(box)
    return out


def _write_all(stream: Any, data: memoryview) -> None:
    while data:
        data = data[stream.write(data) :]


def _copy_small_files(opened: Opened, folder: Path, target: Target) -> None:
    """Write the current config.json with the dtype of most elements; copy tokenizer and other small files."""
    counts: dict[torch.dtype, int] = defaultdict(int)
    for local, shape in target.layout.local_shapes(0).items():
        counts[target.dtypes[local]] += prod(shape)
    dtype = max(counts, key=lambda dtype: counts[dtype])
    copy_small_files(opened.config_path, folder, dtype, mtp=opened.mtp, is_value=opened.is_value)
