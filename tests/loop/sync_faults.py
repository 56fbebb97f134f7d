"""Faults of a weight sync, each put in at a boundary of the real code: tensors, messages, the worker's memory, answers.

A fault is a context manager: within it a publication must be refused, after it the engine is as before. It takes the
``Lab`` and a random generator, and chooses place and size by that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from vllm.model_executor.model_loader.reload import layerwise

from megarl.engines.client.probe import ProbeText
from megarl.engines.sync import writer
from megarl.engines.sync.writer import SliceWriter
from megarl.train.sync import publish
from megarl.weights.reshard import layout
from megarl.weights.reshard.buckets import HEADER, Bucket, BucketSlice
from megarl.weights.reshard.execute import buckets_from, fold, local_view, message_view
from tests.loop.local_engine import LocalEngine
from tests.loop.trainers import Flipping, Ranks, Sent

GARBAGE = 7.0
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Weights:
    """One set of a model's weights, as the trainer ranks have it."""

    shards: Sequence[Tensors]
    """Of each rank."""
    written: Sequence[Mapping[str, int]]
    """Digests of what its optimizer wrote."""
    probe: ProbeText


@dataclass
class Lab:
    """A local engine and the trainer ranks that publish to it."""

    engine: LocalEngine
    ranks: Ranks
    bucket_bytes: int
    old: Weights
    """The engine has these."""
    new: Weights
    """These are published next."""
    tensors: list[Tensors] = field(default_factory=list)
    """Tensors that each rank gives to its publisher; a fault may replace them."""

    def buckets(self, rank: int) -> list[Bucket]:
        """Messages of a rank, in the order in which it sends them; the last one is empty."""
        plan = self.ranks.publishers[rank].connection.parts[0].plan
        return buckets_from(plan, rank, self.bucket_bytes, self.engine.receiver.model_config.dtype)

    def bucket(self, rng: random.Random, least: int = 1) -> tuple[int, Bucket]:
        """A rank, and one of its messages of at least so many slices."""
        rank = rng.randrange(len(self.ranks.publishers))
        return rank, rng.choice([bucket for bucket in self.buckets(rank) if len(bucket.slices) >= least])

    def module(self, rng: random.Random) -> tuple[Any, str]:
        """A module that has weights, and the path of one of its local tensors."""
        owner = self.engine.receiver.writer.owner
        name = rng.choice(sorted(owner))
        return owner[name][0], name


NARROWER = {4: (torch.bfloat16, torch.float16, None), 2: (torch.float8_e4m3fn, torch.float8_e5m2, None)}
"""Bytes of an element -> types to which it may be cast by mistake; None: its bytes in the other order."""
Fault = Callable[[Lab, random.Random], AbstractContextManager[None]]


class Changing(Flipping):
    """Sends what ``change`` makes of each message: a list of messages in its place."""

    def __init__(self, inner: Any, change: Callable[[int, torch.Tensor], list[torch.Tensor]]) -> None:
        super().__init__(inner, 0)
        self._change, self._number = change, -1

    def isend(self, message: torch.Tensor, rank: int, /) -> Any:
        self._number += 1
        works = [self._inner.isend(m, rank) for m in self._change(self._number, message)]
        return _All(works) if works else Sent()


class _All(NamedTuple):
    works: list[Any]

    def wait(self) -> None:
        while self.works:
            self.works.pop(0).wait()


@contextmanager
def messages(lab: Lab, rank: int, change: Callable[[int, torch.Tensor], list[torch.Tensor]]) -> Iterator[None]:
    publisher = lab.ranks.publishers[rank]
    whole = publisher.connection.transport
    publisher.connection.transport = Changing(whole, change)
    try:
        yield
    finally:
        if publisher.connection.transport is not None:
            publisher.connection.transport = whole


@contextmanager
def content(lab: Lab, rank: int, bucket: Bucket, change: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Change the elements (uint8) of one message. It is no fault if they are the same afterwards."""
    changed = []

    def once(number: int, message: torch.Tensor) -> list[torch.Tensor]:
        if number == bucket.number:
            before = message.clone()
            change(message[HEADER:])
            changed.append(not torch.equal(before, message))
        return [message]

    with messages(lab, rank, once):
        yield
    assert changed == [True], "the fault changed nothing"


def part(flat: torch.Tensor, slice_: BucketSlice) -> torch.Tensor:
    """The bytes of a slice in its message."""
    return message_view(flat, slice_).view(-1).view(torch.uint8)


def flipped_bits(count: int) -> Fault:
    def fault(lab: Lab, rng: random.Random) -> AbstractContextManager[None]:
        rank, bucket = lab.bucket(rng)
        slice_ = rng.choice(bucket.slices)
        size = layout.volume(slice_.box) * slice_.dtype.itemsize
        bits = rng.sample(range(8 * size), min(count, 8 * size))

        def change(flat: torch.Tensor) -> None:
            for bit in bits:
                part(flat, slice_)[bit // 8] ^= 1 << bit % 8

        return content(lab, rank, bucket, change)

    return fault


def swapped_slices(lab: Lab, rng: random.Random) -> AbstractContextManager[None]:
    """The first elements of two slices of a message change places."""
    rank, bucket = lab.bucket(rng, least=2)
    first, second = rng.sample(bucket.slices, 2)

    def change(flat: torch.Tensor) -> None:
        a, b = part(flat, first), part(flat, second)
        size = min(len(a), len(b))
        a[:size], b[:size] = b[:size].clone(), a[:size].clone()

    return content(lab, rank, bucket, change)


def doubled_slice(lab: Lab, rng: random.Random) -> AbstractContextManager[None]:
    """A slice is there twice: in its place and in that of another one, of another tensor where the message has one."""
    rank, bucket = lab.bucket(rng, least=2)
    first, second = rng.sample(bucket.slices, 2)

    def change(flat: torch.Tensor) -> None:
        a, b = part(flat, first), part(flat, second)
        b.copy_(a.repeat(-(-len(b) // len(a)))[: len(b)])

    return content(lab, rank, bucket, change)


def other_tensor(lab: Lab, rng: random.Random) -> AbstractContextManager[None]:
    """A slice has the elements of any other tensor of the rank."""
    rank, bucket = lab.bucket(rng)
    slice_ = rng.choice(bucket.slices)
    names = sorted(name for name in lab.new.shards[rank] if name != slice_.move.src_local)
    source = lab.new.shards[rank][rng.choice(names)].contiguous().view(-1)

    def change(flat: torch.Tensor) -> None:
        to = message_view(flat, slice_).view(-1)
        to.copy_(source.nan_to_num().repeat(-(-len(to) // len(source)))[: len(to)])

    return content(lab, rank, bucket, change)


def other_offset(lab: Lab, rng: random.Random) -> AbstractContextManager[None]:
    """A slice begins some elements later, and what is missing comes from its begin."""
    rank, bucket = lab.bucket(rng)
    slice_ = rng.choice(bucket.slices)
    by = rng.randrange(1, layout.volume(slice_.box))
    return content(lab, rank, bucket, lambda flat: _roll(part(flat, slice_), by * slice_.dtype.itemsize))


def _roll(to: torch.Tensor, by: int) -> None:
    to.copy_(to.roll(by))


def zeroed_slice(lab: Lab, rng: random.Random) -> AbstractContextManager[None]:
    """A slice was not packed: the bucket has zeros there."""
    rank, bucket = lab.bucket(rng)
    slice_ = rng.choice(bucket.slices)
    return content(lab, rank, bucket, lambda flat: _zero(part(flat, slice_)))


def _zero(to: torch.Tensor) -> None:
    to.zero_()


def earlier_slice(lab: Lab, rng: random.Random) -> AbstractContextManager[None]:
    """A slice has the elements of the sync before."""
    rank, bucket = lab.bucket(rng)
    slice_ = rng.choice(bucket.slices)
    return content(lab, rank, bucket, lambda flat: _earlier(lab, rank, flat, [slice_]))


def earlier_message(lab: Lab, rng: random.Random) -> AbstractContextManager[None]:
    """A message of the sync before comes, under the right number."""
    rank, bucket = lab.bucket(rng)
    return content(lab, rank, bucket, lambda flat: _earlier(lab, rank, flat, bucket.slices))


def _earlier(lab: Lab, rank: int, flat: torch.Tensor, slices: Sequence[BucketSlice]) -> None:
    for slice_ in slices:
        message_view(flat, slice_).copy_(local_view(lab.old.shards[rank][slice_.move.src_local], slice_, slice_.src_at))


def other_dtype(lab: Lab, rng: random.Random) -> AbstractContextManager[None]:
    """A slice was cast to another type on its way, or its bytes are in the other order."""
    rank, bucket = lab.bucket(rng)
    slice_ = rng.choice(bucket.slices)
    size, dtype = slice_.dtype.itemsize, rng.choice(NARROWER[slice_.dtype.itemsize])

    def change(flat: torch.Tensor) -> None:
        to = message_view(flat, slice_)
        if dtype is None:
            part(flat, slice_).view(-1, size).copy_(part(flat, slice_).view(-1, size).flip(1))
        else:
            to.copy_(to.to(dtype))

    return content(lab, rank, bucket, change)


def lost_message(lab: Lab, rng: random.Random) -> AbstractContextManager[None]:
    rank, bucket = lab.bucket(rng)
    return messages(lab, rank, lambda number, message: [] if number == bucket.number else [message])


def doubled_message(lab: Lab, rng: random.Random) -> AbstractContextManager[None]:
    rank, bucket = lab.bucket(rng)
    return messages(lab, rank, lambda number, message: [message] * (2 if number == bucket.number else 1))


def exchanged_messages(lab: Lab, rng: random.Random) -> AbstractContextManager[None]:
    """A message comes after the next one."""
    rank, bucket = lab.bucket(rng)
    held: list[torch.Tensor] = []

    def change(number: int, message: torch.Tensor) -> list[torch.Tensor]:
        if number == bucket.number:
            held.append(message)
            return []
        return [message, *held] if number == bucket.number + 1 else [message]

    return messages(lab, rank, change)


def other_number(lab: Lab, rng: random.Random) -> AbstractContextManager[None]:
    """A bit of a message's number is flipped."""
    rank, bucket = lab.bucket(rng)
    bit = rng.randrange(63)

    def change(number: int, message: torch.Tensor) -> list[torch.Tensor]:
        if number == bucket.number:
            message[:8].view(torch.int64)[0] ^= 1 << bit
        return [message]

    return messages(lab, rank, change)


@contextmanager
def stale_rank(lab: Lab, rng: random.Random) -> Iterator[None]:
    """A rank gives the tensors of the sync before."""
    rank = rng.randrange(len(lab.tensors))
    lab.tensors[rank] = lab.old.shards[rank]
    yield


@contextmanager
def stale_tensor(lab: Lab, rng: random.Random) -> Iterator[None]:
    """One tensor that a rank gives is that of the sync before."""
    rank = rng.randrange(len(lab.tensors))
    name = rng.choice(sorted(lab.new.shards[rank]))
    lab.tensors[rank] = {**lab.new.shards[rank], name: lab.old.shards[rank][name]}
    yield


def changed_in_transfer(*, one: bool) -> Fault:
    """Memory of a rank (all its tensors, or one) gets the values of the sync before after it was compared with what
    the optimizer wrote, and before it is packed."""

    @contextmanager
    def fault(lab: Lab, rng: random.Random) -> Iterator[None]:
        rank = rng.randrange(len(lab.tensors))
        names = sorted(lab.new.shards[rank])
        chosen = [rng.choice(names)] if one else names
        lab.tensors[rank] = given = {name: tensor.clone() for name, tensor in lab.new.shards[rank].items()}
        check = publish.check_written

        def then_changed(tensors: Tensors, written: Mapping[str, int]) -> None:
            check(tensors, written)
            if tensors is given:
                for name in chosen:
                    given[name].copy_(lab.old.shards[rank][name])

        with mock.patch.object(publish, "check_written", then_changed):
            yield

    return fault


@contextmanager
def lost_digest(lab: Lab, rng: random.Random) -> Iterator[None]:
    """Rank 1 reports one digest less than it sent."""
    whole, draw = publish.send, rng.random()

    def send(plan: Any, rank: int, *args: Any, **kwargs: Any) -> Any:
        digests = whole(plan, rank, *args, **kwargs)
        if rank == 1:
            del digests[list(digests)[int(draw * len(digests))]]
        return digests

    with mock.patch.object(publish, "send", send):
        yield


@contextmanager
def earlier_digests(lab: Lab, rng: random.Random) -> Iterator[None]:
    """The worker answers with the digests of the sync before."""
    before = lab.engine.receiver_digests()
    with tampered(lab, lambda path, answer: _with_digests(answer, before)):
        yield


@contextmanager
def earlier_fold(lab: Lab, rng: random.Random) -> Iterator[None]:
    """The worker answers with the sum of the digests of the sync before, and with right digests."""
    before = lab.engine.receiver_digests()
    with tampered(lab, lambda path, answer: _with_digests(answer, before, folds_only=True)):
        yield


@contextmanager
def missing_digest(lab: Lab, rng: random.Random) -> Iterator[None]:
    """The worker's answer lacks a tensor."""
    draw = rng.random()

    def without(path: str, answer: Any) -> Any:
        found = lab.engine.receiver_digests()
        del found[list(found)[int(draw * len(found))]]
        return _with_digests(answer, found)

    with tampered(lab, without):
        yield


def _with_digests(answer: Any, digests: Mapping[str, str], folds_only: bool = False) -> Any:
    """The answer with these digests, if it is one with a worker's digests or with their fold."""
    [found] = answer["results"] if isinstance(answer, dict) and "results" in answer else [{}]
    if "model.norm.weight" in found and not folds_only:
        return {"results": [digests]}
    if "fold" in found:
        folded = fold({name: int(digest, 16) for name, digest in digests.items()})
        return {"results": [{"fold": f"{folded:016x}", "tensors": len(digests)}]}
    return answer


@contextmanager
def tampered(lab: Lab, tamper: Callable[[str, Any], Any]) -> Iterator[None]:
    with mock.patch.object(lab.engine, "tamper", tamper):
        yield


@contextmanager
def earlier_version(lab: Lab, rng: random.Random) -> Iterator[None]:
    """The engine ends the update under the version that it had."""
    version = lab.engine.llm.llm_engine.get_weight_version()
    with mock.patch.object(lab.engine, "version_of", lambda given: version):
        yield


def disagreed(name: str, value: Any) -> Fault:
    """The trainer announces another value of a field of InitInfo as it joins."""

    @contextmanager
    def fault(lab: Lab, rng: random.Random) -> Iterator[None]:
        leader = lab.ranks.publishers[0].connection
        told = leader.init_info
        for publisher in lab.ranks.publishers:
            publisher.connection.disconnect()
        with mock.patch.object(leader, "init_info", lambda *args: told(*args) | {name: value}):
            yield

    return fault


@contextmanager
def kept_layer(lab: Lab, rng: random.Random) -> Iterator[None]:
    """A layer keeps its old tensors and what was packed from them, as if its new ones had been processed."""
    module, _ = lab.module(rng)
    process, packed = layerwise._layerwise_process, vars(module).get("cpu_linear")

    def keep(layer: Any, info: Any) -> None:
        if layer is not module:
            process(layer, info)
            return
        layerwise._place_kernel_tensors(layer, info)
        info.reset()
        assert packed is None or layer.cpu_linear is packed

    with mock.patch.object(writer, "_layerwise_process", keep):
        yield


@contextmanager
def kept_everything(lab: Lab, rng: random.Random) -> Iterator[None]:
    """Every layer keeps its old tensors."""

    def keep(layer: Any, info: Any) -> None:
        layerwise._place_kernel_tensors(layer, info)
        info.reset()

    with mock.patch.object(writer, "_layerwise_process", keep):
        yield


@contextmanager
def unread_copy(lab: Lab, rng: random.Random) -> Iterator[None]:
    """The worker writes a local tensor into a copy that the model does not read."""
    _, chosen = lab.module(rng)
    tensor = SliceWriter.tensor

    def copied(self: SliceWriter, name: str) -> torch.Tensor:
        found = tensor(self, name)
        return found.clone() if name == chosen else found

    with mock.patch.object(SliceWriter, "tensor", copied):
        yield


def unwritten_slice(*, counted: bool) -> Fault:
    """The worker leaves a slice out, and counts it all the same or not."""

    @contextmanager
    def fault(lab: Lab, rng: random.Random) -> Iterator[None]:
        _, chosen = lab.module(rng)
        tensor, wrote, left = SliceWriter.tensor, SliceWriter.wrote, [1]

        def write(self: SliceWriter, name: str) -> torch.Tensor:
            found = tensor(self, name)
            if name == chosen and left[0] > 0:
                found.fill_(GARBAGE)  # as of memory that was used before
                found = found.clone()
            return found

        def count(self: SliceWriter, name: str, numel: int) -> None:
            skipped = name == chosen and left[0] > 0
            if skipped:
                left[0] -= 1
            if counted or not skipped:
                wrote(self, name, numel)

        with mock.patch.object(SliceWriter, "tensor", write), mock.patch.object(SliceWriter, "wrote", count):
            yield

    return fault


@contextmanager
def recounted_slice(lab: Lab, rng: random.Random) -> Iterator[None]:
    """The worker counts a slice twice, so that its layer is packed too early where others are still to come."""
    _, chosen = lab.module(rng)
    wrote, left = SliceWriter.wrote, [1]

    def count(self: SliceWriter, name: str, numel: int) -> None:
        if name == chosen and left[0]:
            left[0] -= 1
            self.left[self.owner[name][0]] -= numel
        wrote(self, name, numel)

    with mock.patch.object(SliceWriter, "wrote", count):
        yield


def moved(kind: str) -> Fault:
    """A parameter (or buffer) of the model is another tensor with the same new values: a captured graph reads the old
    one."""

    @contextmanager
    def fault(lab: Lab, rng: random.Random) -> Iterator[None]:
        places = [
            (module, name)
            for module in lab.engine.model.modules()
            for name, tensor in getattr(module, kind).items()
            if tensor is not None and tensor.numel()
        ]
        module, name = rng.choice(places)
        tensors = getattr(module, kind)
        original, finish = tensors[name], SliceWriter.finish

        def move(self: SliceWriter) -> None:
            finish(self)
            copy = original.detach().clone()
            tensors[name] = torch.nn.Parameter(copy, requires_grad=False) if kind == "_parameters" else copy

        with mock.patch.object(SliceWriter, "finish", move):
            yield
        tensors[name] = original

    return fault


def stale_forward(*, decode_only: bool, one: bool) -> Fault:
    """The model computes with the weights of the sync before (all, or one module's) while parameters are right, as from
    a copy or in a captured graph."""

    @contextmanager
    def fault(lab: Lab, rng: random.Random) -> Iterator[None]:
        model = lab.engine.model
        modules = [lab.module(rng)[0]] if one else list(model.modules())
        old, forward, logits, decodes = _held(modules), model.forward, model.compute_logits, [False]

        def with_old(compute: Callable[[], Any]) -> Any:
            if decode_only and not decodes[0]:
                return compute()
            new = _held(modules)
            _put(old)
            try:
                return compute()
            finally:
                _put(new)

        def stale(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            decodes[0] = len(input_ids) == 1
            return with_old(lambda: forward(input_ids, *args, **kwargs))

        def stale_logits(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return with_old(lambda: logits(hidden, *args, **kwargs))

        with mock.patch.object(model, "forward", stale), mock.patch.object(model, "compute_logits", stale_logits):
            yield

    return fault


def _held(modules: Sequence[Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Copies of each module's own tensors, and the packed form that it computes from."""
    return [
        (
            module,
            {name: p.data.clone() for name, p in module.named_parameters(recurse=False)}
            | ({"cpu_linear": module.cpu_linear} if "cpu_linear" in vars(module) else {}),
        )
        for module in modules
    ]


def _put(held: list[tuple[Any, dict[str, Any]]]) -> None:
    for module, values in held:
        for name, value in values.items():
            if name == "cpu_linear":
                module.cpu_linear = value
            else:
                getattr(module, name).data.copy_(value)


class Kind(NamedTuple):
    """A kind of mutants."""

    count: int
    """Mutants of it in a thousand."""
    fault: Fault
    caught_by: frozenset[str]
    """Checks of which one must catch each."""


def _kind(count: int, fault: Fault, *caught_by: str) -> Kind:
    return Kind(count, fault, frozenset(caught_by))


KINDS: dict[str, Kind] = {
    "a bit of a slice flipped": _kind(100, flipped_bits(1), "digest"),
    "many bits of a slice flipped": _kind(40, flipped_bits(16), "digest"),
    "two slices swapped": _kind(50, swapped_slices, "digest"),
    "a slice sent twice": _kind(30, doubled_slice, "digest"),
    "a slice of another tensor": _kind(50, other_tensor, "digest"),
    "a slice of another offset": _kind(50, other_offset, "digest"),
    "a slice not packed": _kind(30, zeroed_slice, "digest"),
    "a slice of the sync before": _kind(50, earlier_slice, "digest"),
    "a message of the sync before": _kind(30, earlier_message, "digest"),
    "a slice of another dtype": _kind(40, other_dtype, "digest", "form"),
    "a message lost": _kind(30, lost_message, "number"),
    "a message sent twice": _kind(30, doubled_message, "number"),
    "two messages exchanged": _kind(20, exchanged_messages, "number"),
    "a message of another number": _kind(20, other_number, "number"),
    "a rank sends the sync before": _kind(20, stale_rank, "written"),
    "a rank sends one tensor of the sync before": _kind(40, stale_tensor, "written"),
    "a rank's memory changed in the transfer": _kind(20, changed_in_transfer(one=False), "written"),
    "a tensor's memory changed in the transfer": _kind(20, changed_in_transfer(one=True), "written"),
    "a sender's digest lost": _kind(10, lost_digest, "digest"),
    "a worker's digests of the sync before": _kind(10, earlier_digests, "digest"),
    "a worker's sum of digests of the sync before": _kind(10, earlier_fold, "sum"),
    "a worker's digest missing": _kind(10, missing_digest, "digest"),
    "an update ended under the version before": _kind(20, earlier_version, "version"),
    "another dtype announced": _kind(10, disagreed("dtype", "float16"), "plan"),
    "another plan announced": _kind(10, disagreed("vocab_multiple", 256), "plan"),
    "a layer keeps old weights": _kind(50, kept_layer, "digest", "form"),
    "a worker keeps old weights": _kind(10, kept_everything, "digest", "form"),
    "written into a copy that nobody reads": _kind(30, unread_copy, "digest", "form", "padding"),
    "a slice not written": _kind(20, unwritten_slice(counted=True), "digest", "padding"),
    "a slice neither written nor counted": _kind(20, unwritten_slice(counted=False), "count"),
    "a slice counted twice": _kind(10, recounted_slice, "count", "digest"),
    "a parameter moved": _kind(30, moved("_parameters"), "address"),
    "a buffer moved": _kind(10, moved("_buffers"), "address"),
    "prompts and decode with old weights": _kind(10, stale_forward(decode_only=False, one=False), "probe"),
    "prompts and decode with one old layer": _kind(10, stale_forward(decode_only=False, one=True), "probe"),
    "decode with old weights": _kind(20, stale_forward(decode_only=True, one=False), "decode"),
    "decode with one old layer": _kind(30, stale_forward(decode_only=True, one=True), "decode"),
}
"""A thousand mutants."""
