"""One trainer rank's links to the workers of all engines, and the places of the joined processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import Store

from megarl.engines.sync.link import Backend, EngineLinks, LinkAddress, first_workers, join_groups
from megarl.engines.sync.shared import DeviceMemory, HostMemory, MemoryFile, Places, SharedMemorySender


@dataclass(frozen=True)
class Joined:
    """Engines joined by a trainer's weight links, as of the last ``connect``; lists are by engine number."""

    starts: Sequence[tuple[str, int]]
    """URL of each engine and the start of its process. Engines of two programs may have the same number."""
    machines: Sequence[list[str]]
    """Machines of each engine's workers."""
    senders: Sequence[Sequence[Any]]
    """Senders as in ``Places``."""

    @property
    def all(self) -> list[int]:
        """Return the numbers of all engines."""
        return list(range(len(self.starts)))

    def replaced(self, starts: Sequence[tuple[str, int]]) -> list[int]:
        """Return the numbers of engines that are new or have another start."""
        before = [*self.starts, *[None] * (len(starts) - len(self.starts))]
        return [i for i, start in enumerate(starts) if start != before[i]]

    def places(self) -> Places:
        """Return the machines of all workers and trainer ranks."""
        return Places([where for engine in self.machines for where in engine], self.senders)


NONE_JOINED = Joined((), (), ())


class TrainerLinks:
    """Links for notices, in host memory, and for bucket messages; with gloo both use the same links.

    Args:
        rank: This trainer rank, out of ``trainers``.
        over: ``sync.transport``.
        file: Memory file of this process, for buckets in host memory.
        keeps: Keep buckets in GPU memory after a sync.
    """

    def __init__(self, rank: int, trainers: int, over: Backend, file: MemoryFile, *, keeps: bool = True) -> None:
        self._rank, self._trainers, self._over, self._file, self._keeps = rank, trainers, over, file, keeps
        self.notices = EngineLinks()
        """Links in host memory to the workers of all engines."""
        self._messages = EngineLinks(over) if over == "nccl" else self.notices
        self._workers: Sequence[int] = ()

    def number(self, workers: Sequence[int]) -> None:
        """Number the workers of all engines; ``workers``: number of workers of each engine."""
        self._workers = workers
        self.notices.number(workers)
        self._messages.number(workers)

    def join(
        self, store: Store, address: LinkAddress, engine: int, partners: Sequence[int], near: Collection[int]
    ) -> None:
        """Join an engine's link; ``partners`` are the engine's workers that this rank sends to.

        Args:
            near: Workers on this machine, numbered over all engines.
        """
        first, peers, over = first_workers(self._workers)[engine], self._trainers, self._over
        here = [worker for worker in partners if first + worker in near]
        others = [worker for worker in partners if first + worker not in near]
        notices, messages = join_groups(store, address, self._rank, peers, near=here, far=others, over=over)
        self.notices.add(engine, notices)
        if messages is not notices:
            self._messages.add(engine, messages)

    def sender(self, near: frozenset[int]) -> SharedMemorySender:
        """Return the transport to all workers; the workers in ``near`` are on this machine."""
        memory = DeviceMemory(keeps=self._keeps) if self._over == "nccl" else HostMemory(self._file)
        return SharedMemorySender(self.notices, near, memory, self._messages)

    def remove(self, engine: int) -> None:
        """Close the links to an engine, if any."""
        self.notices.remove(engine)
        self._messages.remove(engine)

    def close(self) -> None:
        """Close all links."""
        self.notices.close()
        self._messages.close()
