"""HF checkpoints: load the slices that a rank needs, export one from any grid.

Both directions use the layouts of weight sync; no model has separate conversion code.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from megarl.core.durable import replace_directory
from megarl.core.errors import CheckpointError
from megarl.core.processes import heartbeat
from megarl.weights.architectures import Head, architecture
from megarl.weights.architectures.table import prediction_tensors
from megarl.weights.checkpoint.formats.hf_files import INDEX, SINGLE, FilePlace, shards
from megarl.weights.checkpoint.formats.hf_source import (
    EMBEDDING,
    LM_HEAD,
    SCORE,
    check_copy,
    check_hf,
    check_labels,
    copy_small_files,
    has_prediction,
    has_prediction_layers,
    open_hf,
    places_in_files,
    read_hf_config,
)
from megarl.weights.checkpoint.formats.output import partial_path, write_json
from megarl.weights.checkpoint.formats.overwrite import check_export_target
from megarl.weights.checkpoint.formats.slices import Source, value_fault, warn_of_casts
from megarl.weights.reshard import layout as boxes
from megarl.weights.reshard.buckets import wire_dtype
from megarl.weights.reshard.copy import GroupTransport
from megarl.weights.reshard.execute import Transport, exchange
from megarl.weights.reshard.layout import Layout, Piece
from megarl.weights.reshard.plan import ReshardPlan

__all__ = ["INDEX", "SINGLE", "export_hf", "load_into", "output_rows", "read_hf_config"]

_READ_ELEMENTS = 4 << 20


def load_into(
    path: Path,
    layout: Layout,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    score: Literal["stored", "zeros"] = "stored",
) -> None:
    """Fill a rank's local tensors from an HF checkpoint, reading only its slices; cast to their dtypes, zero padding.

    Args:
        tensors: Local name -> tensor, shaped as in the layout. FP8 weights are dequantised.
        score: Source of a score head: the file, or "zeros" for a new one. Then all else comes from a language model (or
            another score model), without its output weight.

    Raises CheckpointError naming tensors that are missing, misshapen, unknown to the model's table, not finite, of a
    dtype that no weight has, or contradict ``tie_word_embeddings``. Raises it also for a missing or truncated file, and
    a sequence-classification checkpoint without exactly one label.
    """
    source = open_hf(path)
    hf_config = read_hf_config(path)
    is_score = SCORE in layout.tensors
    try:
        if is_score and score == "zeros":
            check_hf(source, layout.only(lambda name: name != SCORE), hf_config, beside={SCORE})
        else:
            if is_score:
                check_labels(path, hf_config)
            check_hf(source, layout, hf_config)
        double = {name for name, dtype in source.dtypes.items() if dtype is torch.float64}
        warn_of_casts(path, {p.tensor: tensors[p.local].dtype for p in layout.pieces(rank) if p.tensor in double})
        tied = LM_HEAD in source.shapes and LM_HEAD not in layout.tensors and not is_score
        with torch.no_grad():
            for pad in layout.padding(rank):
                tensors[pad.local][boxes.index_of(boxes.start_of(pad.box), boxes.shape_of(pad.box))].zero_()
            for piece in layout.pieces(rank):
                if piece.tensor == SCORE and score == "zeros":
                    tensors[piece.local].zero_()
                    continue
                _load(source, piece, tensors[piece.local][boxes.index_of(piece.at, boxes.shape_of(piece.box))], tied)
    finally:
        source.close()


def output_rows(path: Path, layout: Layout, ids: range, dtype: torch.dtype) -> torch.Tensor:
    """Read the rows of the output weight for token ids [len(ids), H]: of the embedding if the layout's weights are
    tied. Rows beyond the checkpoint's vocabulary are 0.

    Raises CheckpointError for missing or truncated files.
    """
    name = LM_HEAD if LM_HEAD in layout.tensors else EMBEDDING
    source = open_hf(path)
    try:
        size, width = source.shapes[name]
        found = torch.zeros(len(ids), width, dtype=dtype)
        held: boxes.Box = ((min(ids.start, size), min(ids.stop, size)), (0, width))
        for box in boxes.split(held, _READ_ELEMENTS):
            heartbeat.beat()
            found[box[0][0] - ids.start : box[0][1] - ids.start, slice(*box[1])] = source.read(name, box)
    finally:
        source.close()
    return found


def _load(source: Source, piece: Piece, into: torch.Tensor, tied: bool) -> None:
    """Load one piece in bounded blocks; compare a tied model's embedding with its copy in the file."""
    for box in boxes.split(piece.box, _READ_ELEMENTS):
        heartbeat.beat()
        values = source.read(piece.tensor, box)
        if tied and piece.tensor == EMBEDDING:
            check_copy(source.path, EMBEDDING, LM_HEAD, values, source.read(LM_HEAD, box))
        part = into[
            tuple(slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(box, piece.box, strict=True))
        ].copy_(values)
        if (fault := value_fault(values, part)) is not None:
            raise CheckpointError(f"{piece.tensor} in {source.file_of(piece.tensor)} {fault}")


def export_hf(
    plan: ReshardPlan,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    transport: Transport | None = None,
    bucket_bytes: int = 64 << 20,
    file_bytes: int = 4 << 30,
    with_prediction: bool = False,
) -> dict[str, int]:
    """Write ``target`` as an ordinary HF checkpoint. Every rank of the grid calls it; rank 0 writes.

    Returns logical tensor -> digest of this rank's part as written, after the cast. The parts add up modulo 2**64.

    Args:
        plan: From the grid's layout to ``hf_layout``, with the same ``head``. A score model is written as its family's
            ``...ForSequenceClassification`` with one label.
        tensors: The rank's local tensors.
        source: Directory to copy config.json, tokenizer and other small files from.
        target: Appears complete or not at all; an older export is replaced.
        dtype: Dtype of the files; ``None``: dtype of the tensors.
        file_bytes: Most bytes of a file (or one tensor); rank 0 needs memory for one file.
        with_prediction: Copy the prediction layers of ``source``, which no job trains, into a language model's files.
            Every rank reads the headers of the files of ``source``.

    Other ranks return after sending; add a barrier before they read the result. Raises CheckpointError on rank 0 if
    ``target`` is not an HF checkpoint, or is the source.
    """
    assert plan.destination.num_ranks == 1, "an HF checkpoint is written by one rank"
    transport = transport or GroupTransport()
    head: Head = "score" if SCORE in plan.destination.tensors else "lm"
    dtype = dtype or next(iter(tensors.values())).dtype
    temporary = partial_path(target)
    if rank == 0:
        check_export_target(target, [source])
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    hf_config = read_hf_config(source)
    places = places_in_files(hf_config, plan.destination.tensors, head)
    predict = with_prediction and head == "lm" and has_prediction_layers(source, hf_config)
    copied = places_in_files(hf_config, prediction_tensors(architecture(hf_config), hf_config), "lm") if predict else {}
    places |= copied
    shapes = {place.stored: place.whole for place in places.values()}
    dtypes = {place.stored: wire_dtype(plan.destination, name, dtype) for name, place in places.items()}
    sizes = {stored: prod(shape) * dtypes[stored].itemsize for stored, shape in shapes.items()}
    parts: dict[str, dict[str, FilePlace]] = defaultdict(dict)
    for name, place in places.items():
        parts[place.stored][name] = place
    files = shards(sizes, file_bytes)
    digests: dict[str, int] = {}
    for file, names in files.items():
        here = {name: place for stored in names for name, place in parts[stored].items()}
        part = replace(plan.only(here.__contains__), colocated=True)
        whole = {name: torch.empty(shapes[name], dtype=dtypes[name]) for name in names} if rank == 0 else {}
        views = {name: place.view(whole[place.stored]) for name, place in here.items()} if rank == 0 else {}
        plain = {name: view if here[name].groups == 1 else view.flatten(0, 1) for name, view in views.items()}
        sent = exchange(part, rank, tensors, plain.__getitem__, transport, dtype=dtype, bucket_bytes=bucket_bytes)
        digests |= {name: digest for (_, name), digest in sent.items()}
        if rank == 0:
            for name in (name for name, place in here.items() if place.groups > 1):  # flattened is a copy
                views[name].copy_(plain[name].view(views[name].shape))
            _copy(source, {name: view for name, view in views.items() if name in copied})
            save_file(whole, temporary / file, metadata={"format": "pt"})
    if rank == 0:
        if len(files) > 1:
            weight_map = {name: file for file, names in files.items() for name in names}
            write_json(temporary / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
        mtp = has_prediction(places, hf_config)
        copy_small_files(source, temporary, dtype, mtp=mtp, is_value=head == "score")
        replace_directory(temporary, target)
    return digests


def _copy(path: Path, views: Mapping[str, torch.Tensor]) -> None:
    """Read whole tensors of a checkpoint into ``views``, in bounded blocks."""
    if not views:
        return
    source = open_hf(path)
    try:
        for name, view in views.items():
            for box in boxes.split(boxes.whole(source.shapes[name]), _READ_ELEMENTS):
                heartbeat.beat()
                view[boxes.index_of(boxes.start_of(box), boxes.shape_of(box))] = source.read(name, box)
    finally:
        source.close()
