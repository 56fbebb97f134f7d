"""Links between threads of one process, in place of gloo's: the same calls, queues instead of sockets."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from megarl.engines.sync.link import LinkAddress
from tests.loop.trainers import Sent

LOOK_S = 0.05
"""Seconds between two looks whether a link was closed."""


@dataclass(eq=False)
class Room:
    """Ranks of one link."""

    timeout_s: float
    closed: threading.Event = field(default_factory=threading.Event)
    queues: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = field(
        default_factory=lambda: defaultdict(queue.SimpleQueue)
    )


_rooms: dict[str, Room] = {}
_lock = threading.Lock()


@dataclass(eq=False)
class LocalLink:
    """``link.Link`` of link rank ``rank``; once a rank has closed it, what the others wait for raises RuntimeError."""

    room: Room
    rank: int
    peers: int

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def isend(self, message: torch.Tensor, rank: int, /) -> Sent:
        with _lock:
            self.room.queues[self.rank, self.peers + rank].put(message.clone())
        return Sent()

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor], /) -> Expected:
        with _lock:
            arriving = self.room.queues[self.peers + rank, self.rank]
        return Expected(self.room, arriving, spare()[:nbytes])

    def close(self) -> None:
        self.room.closed.set()


@dataclass(eq=False)
class Expected:
    """The next message of a queue, for ``memory``."""

    room: Room
    arriving: queue.SimpleQueue[torch.Tensor]
    memory: torch.Tensor

    def wait(self) -> torch.Tensor:
        deadline = time.monotonic() + self.room.timeout_s
        while True:
            try:
                message = self.arriving.get(timeout=LOOK_S)
            except queue.Empty:
                if self.room.closed.is_set():
                    raise RuntimeError("the link was closed") from None
                if time.monotonic() > deadline:
                    raise RuntimeError(f"nothing came in {self.room.timeout_s} s") from None
                continue
            self.memory[: len(message)].copy_(message)
            return self.memory

    def release(self) -> None:
        """Nothing is lent."""


def join(store: Any, address: LinkAddress, rank: int, peers: int, partners: Collection[int]) -> LocalLink:
    """``link.join`` within this process."""
    with _lock:
        room = _rooms.setdefault(address.name, Room(address.timeout_s))
    return LocalLink(room, rank, peers)
