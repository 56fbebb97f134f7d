"""Megatron's checkpoint format as files: what torch reads of ours, what we read of others', and what we refuse to
unpickle."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megarl.core.errors import CheckpointError
from megarl.weights.checkpoint.convert.convert import Settings, convert_hf_to_megatron, convert_megatron_to_hf
from megarl.weights.checkpoint.formats.dist import Chunk, DistFiles, FileSlice, Stored
from megarl.weights.checkpoint.formats.dist_write import write_chunk
from megarl.weights.checkpoint.formats.slices import BoxIndex, OpenFiles, as_bytes
from megarl.weights.reshard import layout
from megarl.weights.reshard.layouts import MegatronGrid
from tests.unit.reshard_cases import Config, Grid, qwen3_config
from tests.unit.reshard_oracle import Tensors, assert_same, megatron_ranks, numbered_hf
from tests.unit.test_checkpoint_convert import QUIET, deepseek, read_hf, write_hf

# ------------------------------------------------------------------ slices


@st.composite
def shapes_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], layout.Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    return shape, tuple((lo, draw(st.integers(lo + 1, n))) for lo, n in zip(starts, shape, strict=True))


@given(case=shapes_and_boxes())
def test_any_box_of_a_file(tmp_path_factory: pytest.TempPathFactory, case: Any) -> None:
    shape, box = case
    whole = torch.arange(layout.volume(layout.whole(shape)), dtype=torch.float32).view(shape)
    file = tmp_path_factory.getbasetemp() / "box"
    file.write_bytes(b"header" + bytes(as_bytes(whole)))
    files = OpenFiles()
    got = files.read_box(file, 6, torch.float32, shape, box)
    files.close()
    assert torch.equal(got, whole[tuple(slice(lo, hi) for lo, hi in box)])


def test_a_short_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match=r"f ends after 100 bytes, expected 400 or more; copy"):
        OpenFiles().read_box(tmp_path / "f", 0, torch.float32, (10, 10), ((0, 10), (0, 10)))


@given(data=st.data())
def test_index_finds_every_overlap(data: st.DataObject) -> None:
    lead = data.draw(st.integers(0, 2))
    held = [
        (*((i, i + 1) for i in data.draw(st.tuples(*[st.integers(0, 2)] * lead))), (lo, lo + n))
        for lo, n in data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=6))
    ]
    asked = (*((0, data.draw(st.integers(1, 3))) for _ in range(lead)), (2, 7))
    found = {(common, item) for common, item in BoxIndex(zip(held, range(9), strict=False)).overlapping(asked)}
    assert found == {(c, i) for i, box in enumerate(held) if (c := layout.intersect(box, asked)) is not None}


# ------------------------------------------------------------------ the format


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_a_chunk_is_what_torch_saves(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(2 * 33 * 17).view(2, 33, 17).to(dtype)
    with (tmp_path / "f").open("wb") as stream:
        stream.write(b"before")
        place = write_chunk(stream, layout.whole((2, 33, 17)), dtype, (as_bytes(part) for part in tensor))
        stream.write(b"after")
    data = (tmp_path / "f").read_bytes()[place[0] : sum(place)]
    assert torch.equal(torch.load(io.BytesIO(data), weights_only=True), tensor)
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None  # the checksums are right


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("plain", lambda t: t),
        ("view", lambda t: torch.cat([t, t])[len(t) :]),
        ("parameter", lambda t: torch.nn.Parameter(t)),
    ],
)
def test_what_torch_saves_is_read(tmp_path: Path, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = torch.randn(6, 5)
    buffer = io.BytesIO()
    torch.save(make(tensor), buffer)
    (tmp_path / "f").write_bytes(b"xyz" + buffer.getvalue())
    stored = {"k": Stored(torch.float32, (6, 5), (Chunk(((0, 6), (0, 5)), "f", 3, len(buffer.getvalue())),))}
    got = DistFiles(tmp_path, stored).read("k", ((1, 4), (2, 5)))
    assert torch.equal(got, tensor[1:4, 2:5])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.randn(5, 6).t(), r"strides \(1, 6\), expected torch.float32 of \(6, 5\), row-major"),
        (torch.randn(6, 5).half(), r"is torch.float16 of shape \(6, 5\)"),
        (torch.randn(6, 4), r"shape \(6, 4\)"),
        ({"a": 1}, "is no saved tensor"),
        (os.system, "is no saved tensor"),
    ],
)
def test_a_chunk_that_is_something_else(tmp_path: Path, value: Any, message: str) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    (tmp_path / "f").write_bytes(buffer.getvalue())
    stored = {"k": Stored(torch.float32, (6, 5), (Chunk(((0, 6), (0, 5)), "f", 0, len(buffer.getvalue())),))}
    with pytest.raises(CheckpointError, match=message):
        DistFiles(tmp_path, stored).read("k", ((0, 6), (0, 5)))


def test_a_part_of_a_file_reads_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    with (tmp_path / "f").open("rb") as stream:
        part = FileSlice(stream, 2, 5)
        assert part.read() == b"23456" and part.read(1) == b""
        assert part.seek(-2, os.SEEK_END) == 3 and part.read(9) == b"56"
        assert part.seek(1) == 1 and part.seek(1, os.SEEK_CUR) == 2 and part.tell() == 2


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


class Dotted:
    """Reaches a function through an allowed module: ``torch.distributed.checkpoint.filesystem.os.system``."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return "os.system"


def test_metadata_can_run_no_code(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"asks for posix\.system, which no checkpoint needs"):
        DistFiles(tmp_path)
    dotted = b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x8c\x09os.system\x93."
    assert pickle.loads(dotted) is os.system
    (tmp_path / ".metadata").write_bytes(dotted)
    with pytest.raises(CheckpointError, match=r"asks for .*filesystem\.os\.system"):
        DistFiles(tmp_path)


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_a_path_in_the_metadata_is_read(module: str, tmp_path: Path) -> None:
    """Python 3.13 writes the second module's name."""
    metadata = dcp.Metadata({}, storage_data={}, storage_meta=dcp.StorageMeta(Path("/elsewhere")))
    written, own = pickle.dumps(metadata, protocol=2), f"c{type(Path()).__module__}\n".encode()
    assert own in written
    (tmp_path / ".metadata").write_bytes(written.replace(own, f"c{module}\n".encode()))
    assert DistFiles(tmp_path).shapes == {}


# ------------------------------------------------------------------ keys


def by_hand(config: Config, hf: Tensors) -> Tensors:
    """Keys and global tensors of a checkpoint, from the oracle's TP1 rank: layers and experts stacked where all are
    alike."""
    (rank,) = megatron_ranks(config, hf, Grid())
    alike = config["model_type"] == "qwen3"
    stacked: dict[str, list[torch.Tensor]] = {}
    for name, tensor in rank.items():
        key = name
        if alike and name.startswith("decoder.layers."):
            key = "decoder.layers." + name.split(".", 3)[3]
            key = key.replace("layers.input_layernorm.", "layers.self_attention.linear_qkv.layer_norm_")
            key = key.replace("layers.pre_mlp_layernorm.", "layers.mlp.linear_fc1.layer_norm_")
        if ".local_experts." in key:
            before, after = key.split(".local_experts.")
            key = f"{before}.experts.{after.split('.', 1)[1]}"
        stacked.setdefault(key, []).append(tensor)
    return {
        key: torch.stack(parts) if "experts.experts" in key or (alike and "layers" in key) else parts[0]
        for key, parts in stacked.items()
    }


@pytest.mark.parametrize("config", [qwen3_config(), deepseek(num_nextn_predict_layers=0)], ids=["stacked", "numbered"])
@pytest.mark.parametrize("grid", [MegatronGrid(), MegatronGrid(tp=2, pp=2)], ids=str)
def test_torch_reads_the_tensors_that_megatron_would_have_saved(
    tmp_path: Path, config: Config, grid: MegatronGrid
) -> None:
    hf = numbered_hf(config)
    write_hf(tmp_path / "hf", config, hf)
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "meg", Settings(progress=False, grid=grid))
    metadata = FileSystemReader(tmp_path / "meg").read_metadata()
    got: Tensors = {}
    for index, info in metadata.storage_data.items():
        if index.offset is None:
            continue
        data = (tmp_path / "meg" / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        chunk = torch.load(io.BytesIO(data), weights_only=True)
        size = metadata.state_dict_metadata[index.fqn].size
        whole = got.setdefault(index.fqn, torch.full(size, torch.nan))
        whole[tuple(slice(lo, lo + n) for lo, n in zip(index.offset, chunk.shape, strict=True))] = chunk
    expected = by_hand(config, hf)
    if grid.tp == 1:  # with tp=2 the embedding is padded to 128 rows, as with tp=1
        assert expected.keys() <= got.keys()
    for key, tensor in expected.items():
        assert torch.equal(got[key], tensor), key


def test_both_names_of_a_norm_share_its_bytes(tmp_path: Path) -> None:
    config = deepseek(num_nextn_predict_layers=0)
    write_hf(tmp_path / "hf", config, numbered_hf(config))
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "meg", QUIET)
    stored = DistFiles(tmp_path / "meg").stored
    layer = "decoder.layers.0."
    for a, b in (
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
        ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
    ):
        assert stored[layer + a] == stored[layer + b]
    assert layer + "self_attention.linear_qkv.layer_norm_weight" not in stored


def rewrite(folder: Path, change: Callable[[str, Any], list[tuple[str, Any, Callable[[Any], Any]]]]) -> None:
    """Give every tensor of a checkpoint's metadata other keys: (key, described) -> [(key, described, chunk's offsets ->
    offsets)]."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    described, storage = {}, {}
    for key, value in metadata.state_dict_metadata.items():
        if not hasattr(value, "chunks"):
            continue
        for name, size, inside in change(key, value):
            chunks = []
            for chunk in value.chunks:
                moved = inside(tuple(zip(chunk.offsets, chunk.sizes, strict=True)))
                if moved is None:
                    continue
                offsets, sizes = zip(*moved, strict=True)
                chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                info = metadata.storage_data[dcp.MetadataIndex(key, chunk.offsets)]
                storage[dcp.MetadataIndex(name, offsets)] = _StorageInfo(info.relative_path, info.offset, info.length)
            described[name] = dcp.TensorStorageMetadata(value.properties, torch.Size(size), chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(dcp.Metadata(described, storage_data=storage)))


def numbered_layers(key: str, value: Any) -> list[tuple[str, Any, Callable[[Any], Any]]]:
    if not key.startswith("decoder.layers."):
        return [(key, value.size, lambda box: box)]
    return [
        (
            key.replace("layers.", f"layers.{i}.", 1),
            value.size[1:],
            lambda box, i=i: box[1:] if box[0][0] == i else None,
        )
        for i in range(value.size[0])
    ]


def numbered_experts(key: str, value: Any) -> list[tuple[str, Any, Callable[[Any], Any]]]:
    """``singleton_local_shards``: experts apart, gate and up apart."""
    if "experts.experts." not in key:
        return [(key, value.size, lambda box: box)]
    experts, rows, columns = value.size
    if "linear_fc2" in key:
        return [
            (
                key.replace("experts.experts.", f"experts.experts.{e}."),
                (rows, columns),
                lambda box, e=e: box[1:] if box[0][0] == e else None,
            )
            for e in range(experts)
        ]
    half = rows // 2

    def inside(e: int, up: bool) -> Callable[[Any], Any]:
        def move(box: Any) -> Any:
            mine = box[0][0] == e and (box[1][0] >= half) == up
            return ((box[1][0] - half * up, box[1][1]), *box[2:]) if mine else None

        return move

    return [
        (key.replace("experts.experts.", f"experts.experts.{e}.") + suffix, (half, columns), inside(e, up))
        for e in range(experts)
        for suffix, up in (("_w", False), ("_v", True))
    ]


@pytest.mark.parametrize("style", ["numbered layers", "numbered experts", "TransformerEngine's names"])
def test_checkpoints_with_other_keys_are_read(tmp_path: Path, style: str) -> None:
    config = qwen3_config() if style == "numbered layers" else deepseek(num_nextn_predict_layers=0)
    hf = numbered_hf(config)
    write_hf(tmp_path / "hf", config, hf)
    # Cut in two, so that gate and up of an expert are chunks of their own.
    grid = MegatronGrid(tp=2, dp=1, ep=1, etp=2)
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "meg", Settings(progress=False, grid=grid))
    spelt = ("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "kv_layernorm")

    def only_te(key: str, value: Any) -> list[tuple[str, Any, Callable[[Any], Any]]]:
        is_second = any(name in key for name in spelt) and not (
            key.endswith("input_layernorm.weight") or is_moe_norm(key)
        )
        is_local = key.endswith("mlp.linear_fc1.layer_norm_weight") and is_moe_norm(key)
        return [] if is_second or is_local else [(key, value.size, lambda box: box)]

    def is_moe_norm(key: str) -> bool:
        return not key.startswith("decoder.layers.0.") and ("pre_mlp" in key or "linear_fc1" in key)

    rewrite(
        tmp_path / "meg", {"numbered layers": numbered_layers, "numbered experts": numbered_experts}.get(style, only_te)
    )
    convert_megatron_to_hf(tmp_path / "meg", tmp_path / "back", settings=Settings(progress=False, verify=True))
    assert_same(read_hf(tmp_path / "back"), hf)


def test_another_format_is_refused_by_name(tmp_path: Path) -> None:
    config = qwen3_config()
    write_hf(tmp_path / "hf", config, numbered_hf(config))
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "meg", QUIET)
    (tmp_path / "meg/metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    with pytest.raises(CheckpointError, match="sharded_backend='zarr', expected 'torch_dist'"):
        convert_megatron_to_hf(tmp_path / "meg", tmp_path / "back", settings=QUIET)
