"""Both sides of a plan in threads of one process, over a transport that shows memory which is reused too early."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

TIMEOUT_S = 20.0
GARBAGE = 0xAB


class Network:
    """Rendezvous between threads. A message is read from the sender's memory only when the receiver waits for it, and
    the receiver's memory is overwritten with garbage as soon as it is given for one: who reuses either too early gets
    wrong data. ``most_alive`` counts the buffers of one rank that were sent and not waited for, or expected and not
    released."""

    def __init__(
        self,
        corrupt: Callable[[int, int, int, Tensor], None] | None = None,
        faults: Mapping[tuple[int, int, int], int] = MappingProxyType({}),
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.timeout_s = timeout_s
        self.faults = faults
        """(source, destination, number of a message) -> how often it is delivered, instead of once."""
        self.sent: dict[tuple[int, int], int] = defaultdict(int)
        self.queues: dict[tuple[int, int], queue.Queue[tuple[Tensor, threading.Event]]] = defaultdict(queue.Queue)
        self.lock = threading.Lock()
        self.alive: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)
        """Side and rank -> messages in each buffer, by its address (0 for all of a receiver's)."""
        self.most_alive = 0
        self.largest_bytes = 0
        self.messages: dict[tuple[int, int], int] = defaultdict(int)
        self.corrupt = corrupt
        self.failed = threading.Event()

    def sleep(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until ``ready()``; an error in any thread ends the wait. Raises RuntimeError, as gloo and NCCL do, when
        it is over."""
        deadline = time.monotonic() + self.timeout_s
        while not ready():
            assert not self.failed.is_set(), f"{what}: another rank failed"
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what}: nothing came")

    def port(self, rank: int) -> Port:
        return Port(self, rank)

    def queue(self, link: tuple[int, int]) -> queue.Queue[tuple[Tensor, threading.Event]]:
        with self.lock:
            return self.queues[link]

    def count(self, who: tuple[str, int], buffer: int, change: int) -> None:
        with self.lock:
            alive = self.alive[who]
            alive[buffer] += change
            assert alive[buffer] >= 0, f"{who} was released twice"
            self.most_alive = max(self.most_alive, len(+alive) if buffer else alive[buffer])


@dataclass
class Sent:
    network: Network
    rank: int
    event: threading.Event
    buffer: int

    def wait(self) -> None:
        self.network.sleep(lambda: self.event.wait(0.1), f"source rank {self.rank} sending")
        self.network.count(("source", self.rank), self.buffer, -1)


@dataclass
class Expected:
    """The next message of a link, of ``nbytes``, on its way into ``memory``."""

    network: Network
    link: tuple[int, int]
    memory: Tensor
    nbytes: int

    def wait(self) -> Tensor:
        net, (src, dst) = self.network, self.link
        arrived: list[tuple[Tensor, threading.Event]] = []

        def ready() -> bool:
            with contextlib.suppress(queue.Empty):
                arrived.append(net.queue(self.link).get(timeout=0.1))
            return bool(arrived)

        net.sleep(ready, f"destination rank {dst} waiting for {src}")
        sent, event = arrived[0]
        assert sent.numel() <= self.memory.numel(), (
            f"{self.link}: room for {self.memory.numel()} bytes, got {sent.numel()}"
        )
        self.memory[: sent.numel()].copy_(sent)
        if net.corrupt is not None:
            with net.lock:
                number = net.messages[self.link]
                net.messages[self.link] += 1
            net.corrupt(src, dst, number, self.memory)
        event.set()
        return self.memory[: self.nbytes]

    def release(self) -> None:
        self.network.count(("destination", self.link[1]), 0, -1)


@dataclass
class Port:
    """The Transport of one rank."""

    network: Network
    rank: int

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def isend(self, message: Tensor, rank: int) -> Sent:
        assert message.dim() == 1 and message.dtype == torch.uint8 and message.is_contiguous()
        event = threading.Event()
        self.network.count(("source", self.rank), message.data_ptr(), 1)
        with self.network.lock:
            self.network.largest_bytes = max(self.network.largest_bytes, message.numel())
        number = self.network.sent[self.rank, rank]
        self.network.sent[self.rank, rank] += 1
        copies = self.network.faults.get((self.rank, rank, number), 1)
        for _ in range(copies):
            self.network.queue((self.rank, rank)).put((message if copies == 1 else message.clone(), event))
        if not copies:
            event.set()
        return Sent(self.network, self.rank, event, message.data_ptr())

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], Tensor]) -> Expected:
        self.network.count(("destination", self.rank), 0, 1)
        memory = spare()
        assert memory.dim() == 1 and memory.numel() >= nbytes and memory.dtype == torch.uint8
        memory.fill_(GARBAGE)
        return Expected(self.network, (rank, self.rank), memory, nbytes)


def run_threads(network: Network, jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run all jobs at once; their results in order, or the first error of any."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = jobs[i]()
        except BaseException as error:
            errors.append(error)
            network.failed.set()

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(network.timeout_s + 5)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    return results
