"""Binary frames of an engine's stream of samples; the server encodes, the client decodes. Standard library and numpy.

A frame is a header (four letters of its kind, bytes of fields, bytes of arrays; 12 bytes, little-endian), a JSON object of small
fields, and raw little-endian arrays: int32 token ids, float32 log-probs, int32 prompt ids. No part of it is limited by lines.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megarl.schema import FinishReason

CONTENT_TYPE = "application/x-megarl-frames"
MAX_FIELDS_BYTES, MAX_ARRAY_BYTES = 2**24, 2**30
"""A header that announces more is not one: the arrays of 1 GiB hold an answer of 134 million tokens."""
MAX_MESSAGE = 2**16
"""Characters of an error's text; the rest is cut."""
_HEADER = struct.Struct("<4sII")
_SAMPLE, _FAILURE, _HEARTBEAT = b"SMPL", b"FAIL", b"BEAT"


class FrameError(ValueError):
    """The bytes of a stream are not whole frames."""


class VersionSpan(NamedTuple):
    """Response tokens ``[start, end)`` that weights of this name sampled (``default``: those of the model's files)."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Completion:
    """One finished sample, exactly as the engine sampled it."""

    request: int
    """Index of its prompt in the call."""
    index: int
    """0 .. n-1 within its prompt."""
    token_ids: np.ndarray
    """int32 [R], with the end-of-sequence token when that ended it."""
    logprobs: np.ndarray
    """float32 [R], of the distribution sampled from (temperature, top_p and top_k applied)."""
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    """Tile [0, R); empty when no token was sampled."""
    prompt_ids: np.ndarray | None = None
    """int32 [P]; of a prompt with images the ids that the engine computed, placeholders expanded. None for other prompts."""


@dataclass(frozen=True)
class Failure:
    """A sample that the engine could not give. ``refused``: for what is in its prompt, so it would fail again."""

    request: int
    index: int
    message: str
    refused: bool


@dataclass(frozen=True)
class Heartbeat:
    """Progress of an engine while samples are outstanding."""

    tokens: int
    """That the engine has generated since its start, for all calls: a call may wait while others are served."""
    paused: bool
    """A weight update is under way: no token is generated meanwhile."""


Record = Completion | Failure | Heartbeat


def encode(record: Record) -> bytes:
    """One frame."""
    match record:
        case Completion():
            return _frame(_SAMPLE, _sample_fields(record), b"".join(_arrays(record)))
        case Failure():
            return _frame(_FAILURE, vars(record) | {"message": record.message[:MAX_MESSAGE]})
        case Heartbeat():
            return _frame(_HEARTBEAT, vars(record))


def _sample_fields(sample: Completion) -> dict[str, Any]:
    return {
        "request": sample.request,
        "index": sample.index,
        "finish_reason": sample.finish_reason,
        "versions": sample.versions,
        "tokens": len(sample.token_ids),
        "prompt_tokens": None if sample.prompt_ids is None else len(sample.prompt_ids),
    }


def _arrays(sample: Completion) -> Iterator[bytes]:
    if len(sample.logprobs) != len(sample.token_ids):
        raise ValueError(f"a sample of {len(sample.token_ids)} tokens has {len(sample.logprobs)} log-probs")
    yield np.asarray(sample.token_ids, dtype="<i4").tobytes()
    yield np.asarray(sample.logprobs, dtype="<f4").tobytes()
    if sample.prompt_ids is not None:
        yield np.asarray(sample.prompt_ids, dtype="<i4").tobytes()


def _frame(kind: bytes, fields: dict[str, Any], arrays: bytes = b"") -> bytes:
    text = json.dumps(fields).encode()
    return _HEADER.pack(kind, len(text), len(arrays)) + text + arrays


class Decoder:
    """Gives the records of a stream that arrives in chunks of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[Record]:
        """The records that ``chunk`` completes. Raises FrameError where the bytes are no frame."""
        self._buffer += chunk
        while (record := self._next()) is not None:
            yield record

    def end(self) -> None:
        """Call at the end of the stream. Raises FrameError when it ended within a frame."""
        if self._buffer:
            raise FrameError(f"it ended within a frame: {len(self._buffer)} bytes of it came")

    def _next(self) -> Record | None:
        if len(self._buffer) < _HEADER.size:
            return None
        kind, fields, arrays = _HEADER.unpack_from(self._buffer)
        if kind not in _READERS:
            raise FrameError(f"a frame of unknown kind {kind!r}")
        if fields > MAX_FIELDS_BYTES or arrays > MAX_ARRAY_BYTES:
            raise FrameError(f"a frame {kind!r} with {fields} bytes of fields and {arrays} of arrays is too long")
        end = _HEADER.size + fields + arrays
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        try:
            return _READERS[kind](json.loads(body[:fields]), body[fields:])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise FrameError(f"a frame {kind!r} is malformed: {type(error).__name__}: {error}") from error


def _sample(fields: dict[str, Any], arrays: bytes) -> Completion:
    tokens, prompt_tokens = fields["tokens"], fields["prompt_tokens"]
    if len(arrays) != 4 * (2 * tokens + (prompt_tokens or 0)):
        raise ValueError(f"{tokens} tokens and {prompt_tokens} of the prompt are not {len(arrays)} bytes")
    prompt_at = 8 * tokens
    return Completion(
        request=fields["request"],
        index=fields["index"],
        token_ids=np.frombuffer(arrays, "<i4", tokens).astype(np.int32),
        logprobs=np.frombuffer(arrays, "<f4", tokens, 4 * tokens).astype(np.float32),
        finish_reason=fields["finish_reason"],
        versions=tuple(VersionSpan(*span) for span in fields["versions"]),
        prompt_ids=None if prompt_tokens is None else np.frombuffer(arrays[prompt_at:], "<i4").astype(np.int32),
    )


def _failure(fields: dict[str, Any], arrays: bytes) -> Failure:
    return Failure(fields["request"], fields["index"], fields["message"], fields["refused"])


def _heartbeat(fields: dict[str, Any], arrays: bytes) -> Heartbeat:
    return Heartbeat(fields["tokens"], fields["paused"])


_READERS: dict[bytes, Callable[[dict[str, Any], bytes], Record]] = {_SAMPLE: _sample, _FAILURE: _failure, _HEARTBEAT: _heartbeat}
