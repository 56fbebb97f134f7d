"""Large memory of a model that can leave the device between uses and come back, verified.

A resident is all storages of one kind of one model. A storage is freed by ``resize_(0)``: parameters and their views
stay valid, and have their values again when it is refilled.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from megarl.core.errors import NotResident, OffloadError
from megarl.core.processes import heartbeat
from megarl.core.processes.machine import resident_bytes, trim_memory
from megarl.learn.memory.phases import Place, offload_setting
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
    """

    def __init__(
        self, role: str, kind: Kind, tensors: Callable[[], Iterable[torch.Tensor]], *, keeps_copy: bool = False
    ) -> None:
        self.role, self.kind = role, kind
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
        return f"{self.role}.{self.kind}"

    @property
    def nbytes(self) -> int:
        """Bytes that it has on the device, or had before it left."""
        return sum(size for _, _, size in self._away or _storages(self.tensors()))

    def leave(self, place: Place, folder: Path) -> None:
        """Copy it to ``place`` (a file in ``folder`` for DISK) and free its memory on the device. ABSENT copies
        nothing: it comes back as zeros.

        Raises OffloadError, with the memory still on the device.
        """
        assert self.place is Place.DEVICE and place is not Place.DEVICE, f"{self.name}: {self.place} to {place}"
        storages = _storages(self.tensors())
        if place is not Place.ABSENT:
            try:
                sizes = [size for _, _, size in storages]
                if self._copy is None or not self._copy.fits(sizes, place):
                    self._forget_copy()
                    self._copy = _Copy(sizes, folder / self.name, place, keeps=self._keeps_copy)
                self._digests = _digests(storages)
                self._copy.write(_views(storages))
            except (OSError, ValueError) as error:
                self._forget_copy()
                size = sum(size for _, _, size in storages)
                raise OffloadError(
                    f"{self.name} ({size} bytes) cannot be moved to {place}: {error}; give it room, or set "
                    f"{offload_setting(self.role)}=none"
                ) from error
        for storage, _, _ in storages:
            storage.resize_(0)
        self._away, self.place = storages, place

    def come_back(self) -> None:
        """Refill its memory on the device and compare it with what left. Raises OffloadError if it differs."""
        assert self.place is not Place.DEVICE, f"{self.name} is on the device"
        try:
            for storage, _, size in self._away:
                storage.resize_(size)
        except (RuntimeError, MemoryError) as error:
            raise OffloadError(f"the device has no room for {self.name} ({self.nbytes} bytes): {error}") from error
        if self.place is Place.ABSENT:
            for bytes_ in _views(self._away):
                bytes_.zero_()
        else:
            assert self._copy is not None
            try:
                self._copy.read(_views(self._away))
            except (OSError, ValueError) as error:
                raise OffloadError(f"{self.name} cannot come back from {self.place}: {error}") from error
            for i, (found, left) in enumerate(zip(_digests(self._away), self._digests, strict=True)):
                if found != left:
                    raise OffloadError(
                        f"{self.name} came back from {self.place} with other bytes than it left with: storage {i} of "
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


class Residents:
    """The residents of one model. Empty until ``train/memory.py`` manages them."""

    def __init__(self, residents: Iterable[Resident] = ()) -> None:
        self._by_kind = {resident.kind: resident for resident in residents}

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._by_kind.values())

    def require(self, *kinds: Kind) -> None:
        """Raise NotResident if a kind is not on the device."""
        for kind in kinds:
            resident = self._by_kind.get(kind)
            if resident is not None and resident.place is not Place.DEVICE:
                raise NotResident(
                    f"{resident.name} ({resident.nbytes} bytes) is needed on the device, but is "
                    f"{_WHERE[resident.place]}"
                )


_WHERE = {Place.MEMORY: "in host memory", Place.DISK: "on disk", Place.ABSENT: "absent"}


def residents_of(role: str, model: Any) -> Residents:
    """Make the residents of a ``Model``."""
    optimizer, on_gpu = model.optimizer, torch.cuda.is_available()

    def resident(kind: Kind, tensors: Callable[[], Iterable[torch.Tensor]]) -> Resident:
        return Resident(role, kind, tensors, keeps_copy=on_gpu)

    if optimizer is None:
        return Residents([resident("parameters", lambda: [p for c in model.chunks for p in _own(c)])])
    buffers = [b for chunk in model.chunks for b in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    # In a float32 model the parameters are the masters, and the masters move with them.
    shared = {b.param_data.untyped_storage()._cdata for b in buffers}

    def of_optimizer() -> Iterator[torch.Tensor]:
        for inner in inner_optimizers(optimizer.inner):
            tensors = [p for group in inner.param_groups for p in group["params"]]
            tensors += [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
            yield from (t for t in tensors if t.dim() and t.untyped_storage()._cdata not in shared)

    return Residents(
        [
            resident("parameters", lambda: [*(b.param_data for b in buffers), *_frozen(model.chunks)]),
            resident("gradients", lambda: (b.grad_data for b in buffers)),
            resident("optimizer", of_optimizer),
        ]
    )


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
