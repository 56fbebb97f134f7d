"""The frames of an engine's stream: any cut into chunks gives the same records, and every truncation is noticed."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.engines.client.frames import (
    Completion,
    Decoder,
    Failure,
    FrameError,
    Record,
    StreamHeartbeat,
    VersionSpan,
    encode,
)

COUNT = st.integers(0, 2**31 - 1)
IDS = st.lists(COUNT, max_size=40).map(lambda ids: np.array(ids, dtype=np.int32))
ROUTING = st.builds(
    lambda shape, kind: np.arange(np.prod(shape)).astype(kind).reshape(shape),
    st.tuples(*[st.integers(0, 5)] * 3),
    st.sampled_from(["i1", "i2"]),
)


@st.composite
def samples(draw: st.DrawFn) -> Completion:
    ids = draw(IDS)
    logprobs = draw(st.lists(st.floats(width=32), min_size=len(ids), max_size=len(ids)))
    versions = draw(st.lists(st.tuples(st.text(max_size=8), COUNT, COUNT), max_size=3))
    return Completion(
        draw(COUNT),
        draw(COUNT),
        ids,
        np.array(logprobs, dtype=np.float32),
        draw(st.sampled_from(["stop", "length", "abort"])),
        tuple(VersionSpan(*span) for span in versions),
        draw(st.none() | IDS),
        draw(st.none() | ROUTING),
    )


FAILURES = st.builds(Failure, COUNT, COUNT, st.text(max_size=30), st.booleans())
HEARTBEATS = st.builds(StreamHeartbeat, st.integers(0, 2**60), st.booleans())
RECORDS = st.lists(samples() | FAILURES | HEARTBEATS, max_size=6)


def content(record: Record) -> object:
    """Comparable by bits."""
    if not isinstance(record, Completion):
        return record
    arrays = (record.token_ids, record.logprobs, record.prompt_ids, record.routing)
    bits = [None if array is None else (array.dtype, array.shape, array.tobytes()) for array in arrays]
    return record.request, record.index, record.finish_reason, record.versions, bits


def decoded(chunks: list[bytes]) -> list[object]:
    decoder = Decoder()
    records = [content(record) for chunk in chunks for record in decoder.feed(chunk)]
    decoder.end()
    return records


@given(RECORDS, st.lists(st.integers(0, 10_000), max_size=20))
def test_any_cut_into_chunks_gives_the_same_records(records: list[Record], cuts: list[int]) -> None:
    stream = b"".join(map(encode, records))
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    chunks = [stream[a:b] for a, b in zip(places, places[1:], strict=False)]
    assert decoded(chunks) == [content(record) for record in records]
    assert decoded([bytes([byte]) for byte in stream]) == [content(record) for record in records]


@given(RECORDS.filter(bool), st.data())
def test_every_truncation_is_noticed_and_loses_no_whole_record(records: list[Record], data: st.DataObject) -> None:
    frames = [encode(record) for record in records]
    whole = data.draw(st.integers(0, len(frames) - 1))
    kept = b"".join(frames[:whole]) + frames[whole][: data.draw(st.integers(1, len(frames[whole]) - 1))]
    decoder = Decoder()
    assert [content(record) for record in decoder.feed(kept)] == [content(record) for record in records[:whole]]
    with pytest.raises(FrameError, match="ended within a frame"):
        decoder.end()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_log_probs_keep_their_bits(values: list[float]) -> None:
    """vLLM gives float32 numbers as Python's floats."""
    sample = Completion(0, 0, np.arange(len(values)), np.array(values), "stop", ())
    [record] = Decoder().feed(encode(sample))
    assert isinstance(record, Completion)
    assert (record.logprobs.dtype, record.token_ids.dtype) == (np.float32, np.int32)
    assert record.logprobs.tobytes() == np.array(values, dtype=np.float32).tobytes()
    assert record.logprobs.flags.writeable and record.token_ids.flags.writeable


def test_a_sample_of_a_million_tokens_is_one_frame() -> None:
    ids, logprobs = np.arange(10**6, dtype=np.int32), np.linspace(-9, 0, 10**6, dtype=np.float32)
    stream = encode(Completion(3, 1, ids, logprobs, "length", (VersionSpan("1.2", 0, 10**6),)))
    [(*_, bits)] = decoded([stream[i : i + 65536] for i in range(0, len(stream), 65536)])
    assert bits == [*((array.dtype, array.shape, array.tobytes()) for array in (ids, logprobs)), None, None]


def header(kind: bytes, fields: int, arrays: int) -> bytes:
    return struct.pack("<4sII", kind, fields, arrays)


GOOD = encode(Completion(0, 0, np.array([1, 2]), np.array([-1.0, -2.0]), "stop", ()))


def frame(kind: bytes, fields: object, arrays: bytes = b"") -> bytes:
    text = json.dumps(fields).encode()
    return header(kind, len(text), len(arrays)) + text + arrays


SAMPLE = {
    "request": 0,
    "index": 0,
    "finish_reason": "stop",
    "versions": [["1.2", 0, 1]],
    "tokens": 1,
    "prompt_tokens": None,
    "routing": None,
    "computed": "0123",
}
FAILED = {"request": 0, "index": 0, "message": "no", "refused": True}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (b"SMPL", SAMPLE | {"request": "0"}),
        (b"SMPL", SAMPLE | {"index": None}),
        (b"SMPL", SAMPLE | {"request": 0.0}),
        (b"SMPL", SAMPLE | {"tokens": True}),
        (b"SMPL", SAMPLE | {"tokens": -1, "prompt_tokens": 4}),
        (b"SMPL", SAMPLE | {"prompt_tokens": False}),
        (b"SMPL", SAMPLE | {"routing": [1, 0, 2]}),
        (b"SMPL", SAMPLE | {"routing": [3, 0, 2, 2]}),
        (b"SMPL", SAMPLE | {"routing": [1, 1, 1, 1]}),
        (b"SMPL", SAMPLE | {"routing": [1, 0, -1, 2]}),
        (b"SMPL", SAMPLE | {"routing": {}}),
        (b"SMPL", SAMPLE | {"finish_reason": "tired"}),
        (b"SMPL", SAMPLE | {"finish_reason": ["stop"]}),
        (b"SMPL", SAMPLE | {"versions": ["abc"]}),
        (b"SMPL", SAMPLE | {"versions": [[1, 0, 1]]}),
        (b"SMPL", SAMPLE | {"versions": [["1.2", 0, "1"]]}),
        (b"SMPL", SAMPLE | {"versions": {}}),
        (b"FAIL", FAILED | {"message": ["no"]}),
        (b"FAIL", FAILED | {"refused": "false"}),
        (b"FAIL", FAILED | {"request": None}),
        (b"BEAT", {"tokens": float("nan"), "paused": False}),
        (b"BEAT", {"tokens": 1, "paused": 0}),
    ],
)
def test_fields_of_another_type_are_refused(kind: bytes, fields: dict[str, object]) -> None:
    arrays = bytes(8) if kind == b"SMPL" else b""
    decoded([frame(b"SMPL", SAMPLE, bytes(8)), frame(b"FAIL", FAILED), frame(b"BEAT", {"tokens": 1, "paused": False})])
    with pytest.raises(FrameError, match="malformed"):
        decoded([frame(kind, fields, arrays)])


@pytest.mark.parametrize(
    "good", [frame(b"FAIL", FAILED, bytes(4)), frame(b"BEAT", {"tokens": 1, "paused": False}, bytes(4))]
)
def test_only_samples_have_arrays(good: bytes) -> None:
    with pytest.raises(FrameError, match="malformed.*4 bytes of arrays"):
        decoded([good])


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (b'{"request": 0, "index": 0}\n', "unknown kind"),
        (b"<html><body>Bad gateway", "unknown kind"),
        (header(b"WHAT", 2, 0) + b"{}", "unknown kind"),
        (header(b"SMPL", 2**31, 0), "too long"),
        (header(b"SMPL", 2, 2**32 - 1), "too long"),
        (header(b"BEAT", 2, 0) + b"{}", "malformed.*tokens"),
        (header(b"BEAT", 2, 0) + b"\xff\xff", "malformed"),
        (header(b"FAIL", 2, 0) + b"[]", "malformed"),
        (GOOD.replace(b'"tokens": 2', b'"tokens": 3'), "malformed.*3 tokens"),
        (GOOD[:-4], "ended within a frame"),
    ],
)
def test_what_is_no_frame_is_refused(stream: bytes, words: str) -> None:
    with pytest.raises(FrameError, match=words):
        decoded([GOOD, stream])


def test_a_long_message_is_cut() -> None:
    [failure] = Decoder().feed(encode(Failure(0, 0, "é" * 10**6, True)))
    assert isinstance(failure, Failure) and 0 < len(failure.message) < 10**6


def test_a_message_can_be_written_to_a_file() -> None:
    """JSON has halves of surrogate pairs, which neither a log nor a database takes."""
    [failure] = Decoder().feed(encode(Failure(0, 0, "bad \ud800 byte, é", True)))
    assert isinstance(failure, Failure) and failure.message == "bad ? byte, é"


def test_log_probs_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens has 1 log-probs"):
        encode(Completion(0, 0, np.array([1, 2]), np.array([-1.0]), "stop", ()))
