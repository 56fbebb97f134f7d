"""Large memory of a model that can leave the device between uses and come back, verified.

A resident is all storages of one kind of one model. A storage is freed by ``resize_(0)``: parameters and their views
stay valid, and have their values again when it is refilled.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from megarl.core.errors import NotResident, OffloadError
from megarl.core.processes import heartbeat
from megarl.core.processes.machine import resident_bytes, trim_memory
from megarl.learn.memory.phases import Place, offload_setting
from megarl.learn.memory.resident_bytes import ITEM_BYTES
from megarl.ops import digest_values, slice_digests
from megarl.ops.host_memory import anonymous_map, pin, unpin
from megarl.weights.checkpoint.training.state import inner_optimizers

Kind = Literal["parameters", "gradients", "optimizer"]
PIECE = 2**28
"""Maximum bytes copied or written between two heartbeats."""
WORD = 8
"""Alignment of storage copies, in bytes."""


class Resident:
    """All storages of one kind of one model.

    Args:
        role: Role of the model: actor, reference, critic, reward_model, teachers.NAME.
        tensors: Returns the tensors whose storages it owns. Called on each move: an optimizer creates moments late.
        keeps_copy: Keep the host memory of a copy for the next one, registered with CUDA. On a CPU this would double
            the memory.
        bucket: Number of this part of the memory, if it moves in parts.
    """

    def __init__(
        self,
        role: str,
        kind: Kind,
        tensors: Callable[[], Iterable[torch.Tensor]],
        *,
        keeps_copy: bool = False,
        bucket: int | None = None,
    ) -> None:
        self.role, self.kind, self._bucket = role, kind, bucket
        self._keeps_copy = keeps_copy
        self.place = Place.DEVICE
        self.tensors = tensors
        """Returns the tensors whose storages it owns."""
        self._away: list[tuple[torch.UntypedStorage, torch.device, int]] = []
        """(storage, device, bytes) of each, while it is not on the device."""
        self._digests: list[int] = []
        self._copy: _Copy | None = None

    @property
    def name(self) -> str:
        """Name in plans, which all buckets share."""
        return f"{self.role}.{self.kind}"

    @property
    def title(self) -> str:
        """Name of its file and in errors."""
        return self.name if self._bucket is None else f"{self.name}.bucket{self._bucket}"

    @property
    def nbytes(self) -> int:
        """Bytes that it has on the device, or had before it left."""
        return sum(size for _, _, size in self._away or _storages(self.tensors()))

    def leave(self, place: Place, folder: Path) -> None:
        """Copy it to ``place`` (a file in ``folder`` for DISK) and free its memory on the device. ABSENT copies
        nothing: it comes back as zeros.

        Raises OffloadError, with the memory still on the device.
        """
        assert self.place is Place.DEVICE and place is not Place.DEVICE, f"{self.title}: {self.place} to {place}"
        storages = _storages(self.tensors())
        if place is not Place.ABSENT:
            try:
                sizes = [size for _, _, size in storages]
                if self._copy is None or not self._copy.fits(sizes, place):
                    self._forget_copy()
                    self._copy = _Copy(sizes, folder / self.title, place, keeps=self._keeps_copy)
                self._digests = _digests(storages)
                self._copy.write(_views(storages))
            except (OSError, ValueError) as error:
                self._forget_copy()
                size = sum(size for _, _, size in storages)
                raise OffloadError(
                    f"{self.title} ({size} bytes) cannot be moved to {place}: {error}; give it room, or set "
                    f"{offload_setting(self.role)}=none"
                ) from error
        for storage, _, _ in storages:
            storage.resize_(0)
        self._away, self.place = storages, place

    def come_back(self) -> None:
        """Refill its memory on the device and compare it with what left. Raises OffloadError if it differs."""
        assert self.place is not Place.DEVICE, f"{self.title} is on the device"
        try:
            for storage, _, size in self._away:
                storage.resize_(size)
        except (RuntimeError, MemoryError) as error:
            raise OffloadError(f"the device has no room for {self.title} ({self.nbytes} bytes): {error}") from error
        if self.place is Place.ABSENT:
            for bytes_ in _views(self._away):
                bytes_.zero_()
        else:
            assert self._copy is not None
            try:
                self._copy.read(_views(self._away))
            except (OSError, ValueError) as error:
                raise OffloadError(f"{self.title} cannot come back from {self.place}: {error}") from error
            for i, (found, left) in enumerate(zip(_digests(self._away), self._digests, strict=True)):
                if found != left:
                    raise OffloadError(
                        f"{self.title} came back from {self.place} with other bytes than it left with: storage {i} of "
                        f"{len(self._away)} has digest {found:016x}, it left with {left:016x}; the copy was changed"
                    )
        if self._copy is not None and not self._copy.keeps:
            self._forget_copy()
        self._away, self.place = [], Place.DEVICE

    def _forget_copy(self) -> None:
        if self._copy is not None:
            self._copy.drop()
        self._copy, self._digests = None, []


class _Copy:
    """The bytes of offloaded storages, in an anonymous or file mapping; dropping it frees the memory immediately.

    Args:
        keeps: A mapping in memory is kept after it was read, and registered with CUDA.
    """

    def __init__(self, sizes: Sequence[int], path: Path, place: Place, *, keeps: bool) -> None:
        self._sizes, self._place = sizes, place
        self._starts, end = [], 0
        for size in sizes:
            self._starts.append(end)
            end += -(-size // WORD) * WORD
        self._size = end
        self._path = path if place is Place.DISK else None
        self._map = anonymous_map(end) if self._path is None and end else None
        self.keeps = keeps and self._map is not None
        """True if it stays for the next copy."""
        self._pinned = 0
        """Address of the mapping that is registered with CUDA, or 0."""
        if keeps and self._map is not None:
            memory = torch.frombuffer(self._map, dtype=torch.uint8)
            pin(memory)
            self._pinned = memory.data_ptr()

    def fits(self, sizes: Sequence[int], place: Place) -> bool:
        """True if storages of these sizes can be copied to the same memory."""
        return self.keeps and (self._sizes, self._place) == (sizes, place)

    def write(self, sources: Iterable[torch.Tensor]) -> None:
        if self._path is None:
            self._each(self._map, sources, lambda kept, source: kept.copy_(source))
            return
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            if self._size:
                os.posix_fallocate(file, 0, self._size)  # so that a full disk is an error here, not a signal later
                with mmap.mmap(file, self._size) as mapped:
                    self._each(mapped, sources, lambda kept, source: kept.copy_(source))
                    for start in range(0, self._size, PIECE):  # otherwise dirty pages stay in memory
                        heartbeat.beat()
                        mapped.flush(start, min(PIECE, self._size - start))
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)

    def read(self, targets: Iterable[torch.Tensor]) -> None:
        if self._path is None:
            self._each(self._map, targets, lambda kept, target: target.copy_(kept))
            return
        with self._path.open("r+b") as file:
            if (found := os.fstat(file.fileno()).st_size) != self._size:
                raise OSError(f"{self._path} has {found} bytes, {self._size} were written")
            if self._size:
                with mmap.mmap(file.fileno(), self._size) as mapped:
                    self._each(mapped, targets, lambda kept, target: target.copy_(kept))

    def _each(
        self,
        mapped: mmap.mmap | None,
        tensors: Iterable[torch.Tensor],
        do: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> None:
        """Call ``do`` with the copy of each storage and the storage, piece by piece."""
        for start, tensor in zip(self._starts, tensors, strict=True):
            assert mapped is not None, "a storage without bytes is no storage of a resident"
            kept = torch.frombuffer(mapped, dtype=torch.uint8, offset=start, count=tensor.numel())
            for piece, other in zip(kept.split(PIECE), tensor.split(PIECE), strict=True):
                heartbeat.beat()
                do(piece, other)

    def drop(self) -> None:
        if self.keeps:
            unpin([self._pinned])
        if self._map is not None:
            self._map.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class StateBucket(NamedTuple):
    """State of some parameters of one torch optimizer, which moves as one resident."""

    inner: torch.optim.Optimizer
    parameters: Sequence[torch.Tensor]
    resident: Resident
    nbytes: int
    """Bytes with the moments, which the first step creates."""


class Residents:
    """The residents of one model. Empty until ``train/memory.py`` manages them.

    Args:
        buckets: The optimizer's state, if it moves in buckets; ``residents`` has none of it then.
        send_away: Moves a bucket from the device to its place in an update.
    """

    def __init__(
        self,
        residents: Iterable[Resident] = (),
        buckets: Iterable[StateBucket] = (),
        send_away: Callable[[Resident], None] | None = None,
    ) -> None:
        self.buckets = tuple(buckets)
        self._residents = (*residents, *(bucket.resident for bucket in self.buckets))
        self._send_away = send_away

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._residents)

    @property
    def streams(self) -> bool:
        """True if the optimizer's state is away, and comes in buckets for a step."""
        return any(bucket.resident.place is not Place.DEVICE for bucket in self.buckets)

    def streamed(self, inner: torch.optim.Optimizer) -> Iterator[StateBucket]:
        """Yield the buckets of a torch optimizer, each while it is on the device. Raises OffloadError, and
        NonRetryableError for files above the disk quota."""
        assert self._send_away is not None, "residents without buckets"
        for bucket in self.buckets:
            if bucket.inner is inner:
                heartbeat.beat()
                bucket.resident.come_back()
                yield bucket
                self._send_away(bucket.resident)

    def require(self, *kinds: Kind) -> None:
        """Raise NotResident if a kind is not on the device."""
        for resident in self._residents:
            if resident.kind in kinds and resident.place is not Place.DEVICE:
                raise NotResident(
                    f"{resident.title} ({resident.nbytes} bytes) is needed on the device, but is "
                    f"{_WHERE[resident.place]}"
                )


_WHERE = {Place.MEMORY: "in host memory", Place.DISK: "on disk", Place.ABSENT: "absent"}


def residents_of(
    role: str, model: Any, bucket_bytes: int | None = None, send_away: Callable[[Resident], None] | None = None
) -> Residents:
    """Make the residents of a ``Model``.

    Args:
        bucket_bytes: Bytes of optimizer state that move together, at most, unless one parameter has more; None moves
            all of it at once.
        send_away: As in ``Residents``.
    """
    optimizer, on_gpu = model.optimizer, torch.cuda.is_available()

    def resident(kind: Kind, tensors: Callable[[], Iterable[torch.Tensor]], bucket: int | None = None) -> Resident:
        return Resident(role, kind, tensors, keeps_copy=on_gpu, bucket=bucket)

    if optimizer is None:
        return Residents([resident("parameters", lambda: [p for c in model.chunks for p in _own(c)])])
    buffers = [b for chunk in model.chunks for b in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    # In a float32 model the parameters are the masters, and the masters move with them.
    shared = {b.param_data.untyped_storage()._cdata for b in buffers}

    def of_optimizer() -> Iterator[torch.Tensor]:
        for inner in inner_optimizers(optimizer.inner):
            yield from _state(inner, [p for group in inner.param_groups for p in group["params"]], shared)

    own = [
        resident("parameters", lambda: [*(b.param_data for b in buffers), *_frozen(model.chunks)]),
        resident("gradients", lambda: (b.grad_data for b in buffers)),
    ]
    if bucket_bytes is None:
        return Residents([*own, resident("optimizer", of_optimizer)])
    moments = 2 * ITEM_BYTES[model.model_config.moments_dtype]
    found: list[StateBucket] = []
    for inner in inner_optimizers(optimizer.inner):
        for parameters, size in _buckets(inner, shared, moments, bucket_bytes):
            state = partial(_state, inner, parameters, shared)
            found.append(StateBucket(inner, parameters, resident("optimizer", state, len(found)), size))
    return Residents(own, found, send_away)


def _state(inner: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], shared: Set[int]) -> list[torch.Tensor]:
    """Return masters and moments of some parameters, without masters in ``shared`` storages."""
    moments = (value for p in parameters for value in inner.state.get(p, {}).values() if torch.is_tensor(value))
    return [t for t in (*parameters, *moments) if t.dim() and t.untyped_storage()._cdata not in shared]


def _buckets(
    inner: torch.optim.Optimizer, shared: Set[int], moments: int, limit: int
) -> Iterator[tuple[list[torch.Tensor], int]]:
    """Yield an optimizer's parameters in groups with at most ``limit`` bytes of state, or one parameter, and the bytes.

    Args:
        moments: Bytes of an element's moments.
    """
    group: list[torch.Tensor] = []
    total = 0
    for p in (p for group in inner.param_groups for p in group["params"]):
        master = 0 if p.untyped_storage()._cdata in shared else p.element_size()
        size = p.numel() * (master + moments)
        if group and total + size > limit:
            yield group, total
            group, total = [], 0
        group.append(p)
        total += size
    if group:
        yield group, total


def _frozen(chunks: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return untrained parameters: they are in no buffer."""
    return [p.data for chunk in chunks for p in _own(chunk) if not p.requires_grad]


def _own(chunk: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return a chunk's parameters, except those borrowed from another model (``share_base``)."""
    return [p for p in chunk.parameters() if not getattr(p, "is_lent", False)]


def release_freed_memory() -> None:
    """Return freed memory of GPU and host to the system."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim_memory()


def device_bytes() -> int:
    """Return the bytes of this process on its device: of torch's tensors on a GPU, of the whole process on a CPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else resident_bytes()


def _storages(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.UntypedStorage, torch.device, int]]:
    """Return each non-empty storage once, with its device and bytes."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage._cdata] = (storage, tensor.device, storage.nbytes())
    return list(found.values())


def _views(storages: Iterable[tuple[torch.UntypedStorage, torch.device, int]]) -> Iterator[torch.Tensor]:
    """Yield uint8 views of storages."""
    for storage, device, size in storages:
        yield torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,))  # type: ignore[call-overload]


def _digests(storages: Iterable[tuple[torch.UntypedStorage, torch.device, int]]) -> list[int]:
    """Return the digest of each storage, computed where it is; all must be on one device."""
    # Words are faster than bytes.
    words = [bytes_ if bytes_.numel() % WORD else bytes_.view(torch.int64) for bytes_ in _views(storages)]
    return digest_values(slice_digests([(x, (0,), x.shape) for x in words]))
