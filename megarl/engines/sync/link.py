"""Weight links: a process group of trainer ranks and workers for each engine, separate from both sides' default groups.

A link is a gloo group, whose messages are in host memory, or a NCCL group (never run on hardware), whose messages are
on each rank's GPU. They differ in creating and closing a group, and in the memory of messages.

Ranks of a link are the trainer's 0 .. W-1, then the engine's workers. Only ranks that exchange messages in the plan are
connected: full meshes of 256 trainer ranks with 32 engines of 8 workers each would take 8,416 connections a rank.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore, Work

from megarl.core.errors import WeightSyncError
from megarl.weights.reshard.copy import Received
from megarl.weights.reshard.execute import Arrival, Transport
from megarl.weights.reshard.execute import Work as WorkOfSend

Backend = Literal["gloo", "nccl"]
TAKE_S = 2.0
"""Seconds for which a closing link still receives arriving buckets."""
NOTICE_BYTES = 1024
"""Largest message other than a bucket, in bytes; it arrives in one piece."""
NEVER_SENT = 1
"""Tag that no message has; messages have tag 0."""
ProcessGroupGloo: Any = dist.ProcessGroupGloo
"""Any, because PyTorch's stubs lack its options, its point-to-point methods, and stores that take bytes."""


@dataclass(frozen=True)
class LinkAddress:
    """``name``: unique in the job, since a new link replaces a broken one."""

    host: str
    port: int
    name: str
    world_size: int
    timeout_s: float

    @property
    def timeout(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self.timeout_s)


@dataclass(frozen=True)
class _Expected:
    """An expected message, which leaves the link's list once it is waited for."""

    received: Received
    expected: dict[int, Received]

    def wait(self) -> torch.Tensor:
        try:
            message = self.received.wait()
        except RuntimeError:  # its connection was closed
            self.expected.pop(id(self.received.work), None)
            raise
        self.expected.pop(id(self.received.work), None)
        return message

    def release(self) -> None:
        self.received.release()


class Link:
    """Point-to-point transport of flat contiguous tensors, for ``megarl.weights.reshard.execute``.

    Args:
        group: Process group of all link ranks.
        peers: Link rank of the other side's rank 0.
        partners: Ranks of the other side with which this rank exchanges messages.
        over: Kind of the group.
    """

    def __init__(self, group: Any, peers: int, partners: Collection[int], over: Backend = "gloo") -> None:
        self.group: Any = group
        """Process group; None once the link is closed."""
        self._peers = peers
        self._partners = frozenset(partners)
        self._over = over
        self._expected: dict[int, Received] = {}
        """Expected messages that have not been waited for, by their works."""

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        return memory_of(self._over, nbytes)

    def isend(self, message: torch.Tensor, rank: int, /) -> Work:
        """Start sending to the other side's ``rank``; the message must not change until ``wait()`` returns."""
        return self._open(rank).send([message], self._peers + rank, 0)

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor], /) -> Arrival:
        """Start receiving the next message of the other side's ``rank`` into memory from ``spare``."""
        memory = spare()
        message = memory[:nbytes]
        room = message if self._over == "nccl" else memory  # NCCL needs the exact size, gloo a sufficient one
        received = Received(self._open(rank).recv([room], self._peers + rank, 0), message)
        self._expected[id(received.work)] = received
        return _Expected(received, self._expected)

    def connect(self) -> None:
        """Exchange a byte with every partner; return when all have replied.

        This opens the connections, so that a partner's later death closes one and is detected immediately. A partner's
        death before its connection is detected only after up to five of gloo's timeouts.
        """
        word, works = self.allocate(1).zero_(), list[WorkOfSend | Arrival]()

        def say(rank: int) -> WorkOfSend:
            return self.isend(word, rank)

        def hear(rank: int) -> Arrival:
            return self.irecv(1, rank, lambda: self.allocate(1))

        try:
            # NCCL connects two ranks when both start, with one queue for both directions. So trainer ranks start with
            # sends and workers with receives, in the order of partners.
            steps: tuple[Callable[[int], WorkOfSend | Arrival], ...] = (say, hear) if self._peers else (hear, say)
            works += [step(rank) for step in steps for rank in sorted(self._partners)]
            while works:
                works.pop().wait()
        except BaseException:
            works.clear()
            self.close()
            raise

    def close(self) -> None:
        """Close the connections, so that ranks waiting for this one fail immediately instead of after their timeout.

        gloo closes them after a wait for a message times out (``abort`` and ``shutdown`` do nothing). So this waits for
        each expected message, and then for one that is never sent. Otherwise they close with the group's last
        reference, which an error's frames may keep; and the destructor hangs if a forgotten expected message arrives.
        Arriving buckets are received first, for TAKE_S seconds, because gloo would not notify their sender.

        NCCL closes them here, but ranks waiting for this one wait for their timeout.
        """
        group, self.group = self.group, None
        until = time.monotonic() + TAKE_S
        expected = sorted(self._expected.values(), key=lambda one: one.message.nbytes <= NOTICE_BYTES)
        for received in expected if self._over == "gloo" else ():
            left = until - time.monotonic() if received.message.nbytes > NOTICE_BYTES else 0.0
            with suppress(RuntimeError):  # the first timeout ends all other waits too
                received.work.wait(datetime.timedelta(seconds=max(left, 0.001)))  # type: ignore[call-arg]
        self._expected.clear()
        if self._over == "nccl" and group is not None:
            group.abort()
        for partner in self._partners if self._over == "gloo" and group is not None else ():
            with suppress(RuntimeError):
                work = group.recv([torch.empty(1, dtype=torch.uint8)], self._peers + partner, NEVER_SENT)
                work.wait(datetime.timedelta(seconds=0.001))

    def _open(self, rank: int) -> Any:
        assert self.group is not None, "the link is closed"
        assert rank in self._partners, f"rank {rank} of the other side is no partner in the plan"
        return self.group


class EngineLinks:
    """The links of all engines as one transport; its ranks number all engines' workers consecutively."""

    def __init__(self, over: Backend = "gloo") -> None:
        self.over = over
        self._firsts: Sequence[int] = ()
        self.links: dict[int, Link] = {}
        """Number of an engine -> its link."""

    def number(self, workers: Sequence[int]) -> None:
        """Number the ranks of engines; ``workers``: each engine's number of workers."""
        self._firsts = first_workers(workers)

    def add(self, engine: int, link: Link) -> None:
        """Set the link of an engine, replacing its earlier one."""
        self.remove(engine)
        self.links[engine] = link

    def remove(self, engine: int) -> None:
        """Close the link of an engine, if it has one."""
        if (link := self.links.pop(engine, None)) is not None:
            link.close()

    def close(self) -> None:
        """Close all links."""
        for engine in list(self.links):
            self.remove(engine)

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        return memory_of(self.over, nbytes)

    def isend(self, message: torch.Tensor, rank: int, /) -> Work:
        link, worker = self._worker(rank)
        return link.isend(message, worker)

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor], /) -> Arrival:
        link, worker = self._worker(rank)
        return link.irecv(nbytes, worker, spare)

    def _worker(self, rank: int) -> tuple[Link, int]:
        """Return the link of a rank, and its number among its engine's workers."""
        engine = bisect_right(self._firsts, rank) - 1
        return self.links[engine], rank - self._firsts[engine]


def memory_of(over: Backend, nbytes: int) -> torch.Tensor:
    """Allocate memory (uint8) for messages over a backend."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda" if over == "nccl" else "cpu")


def first_workers(workers: Sequence[int]) -> list[int]:
    """Return the rank of each engine's first worker; ``workers``: each engine's number of workers."""
    return list(accumulate(workers, initial=0))[:-1]


class PartOfWorkers:
    """A transport of a subset of ranks: rank r is rank ``first`` + r of the whole."""

    def __init__(self, whole: Transport, first: int) -> None:
        self._whole = whole
        self._first = first

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        return self._whole.allocate(nbytes)

    def isend(self, message: torch.Tensor, rank: int, /) -> WorkOfSend:
        return self._whole.isend(message, self._first + rank)

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor], /) -> Arrival:
        return self._whole.irecv(nbytes, self._first + rank, spare)


def open_store(address: LinkAddress, *, master: bool) -> TCPStore:
    """Open the link's key-value store; the master listens only on ``address.host``, others wait for it up to the
    timeout."""
    listening = socket.create_server((address.host, address.port)).detach() if master else None
    return TCPStore(
        address.host,
        address.port,
        None,
        is_master=master,
        timeout=address.timeout,
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def join(
    store: Store, address: LinkAddress, rank: int, peers: int, partners: Collection[int], over: Backend = "gloo"
) -> Link:
    """Join the group as link rank ``rank``; return when all ``address.world_size`` ranks have joined and this one is
    connected to its partners.

    A gloo group keeps no reference to ``store``: the caller may close it. A NCCL group keeps it, and its connection.

    Args:
        peers: Link rank of the other side's rank 0.
        partners: Ranks of the other side with which this rank exchanges messages; they must list this rank too.

    Raises:
        torch.distributed.DistError: some rank did not join within the timeout.
        RuntimeError: a partner failed while it was being connected.
        WeightSyncError: this process has no GPU, over NCCL.
    """
    everyone = PrefixStore(f"{over}/{address.name}", store)
    make = _nccl_group if over == "nccl" else _gloo_group
    link = Link(make(everyone, address, rank, [peers + partner for partner in partners]), peers, partners, over)
    link.connect()
    return link


def join_groups(
    store: Store,
    address: LinkAddress,
    rank: int,
    peers: int,
    *,
    near: Collection[int],
    far: Collection[int],
    over: Backend,
) -> tuple[Link, Link]:
    """Join the group for messages in host memory, and the group for buckets ``over`` another backend.

    Args:
        near: Partners on this machine, with which notices are exchanged in host memory.
        far: The other partners.

    Returns:
        The two links; with gloo one link is both.
    """
    if over == "gloo":
        link = join(store, address, rank, peers, [*near, *far])
        return link, link
    notices = join(store, address, rank, peers, near)
    try:
        return notices, join(store, address, rank, peers, far, over)
    except BaseException:
        notices.close()
        raise


def _gloo_group(everyone: Any, address: LinkAddress, rank: int, partners: Sequence[int]) -> Any:
    """Make a group in which this rank has only its partners' addresses, so that it connects to no others."""
    options = ProcessGroupGloo._Options()
    options._timeout = address.timeout
    options._devices = [_device(address.host)]
    addresses: Any = HashStore()  # the group's own store, for its address and its partners' addresses
    addresses.set_timeout(address.timeout)
    group = ProcessGroupGloo(addresses, rank, address.world_size, options)
    everyone.set(_key(rank), addresses.get(_key(rank)))
    _await_all(everyone, address)
    keys = [_key(partner) for partner in partners]
    for key, value in zip(keys, everyone.multi_get(keys) if keys else [], strict=True):
        addresses.set(key, value)
    return group


def _nccl_group(everyone: Any, address: LinkAddress, rank: int, partners: Sequence[int]) -> Any:
    """Make a group in which each pair of ranks creates a communicator with its first message."""
    if not torch.cuda.is_available():
        raise WeightSyncError(
            f"sync.transport=nccl, but rank {rank} of link {address.name} on {socket.gethostname()} sees no GPU; give "
            "every trainer rank and engine worker one, or set sync.transport=gloo"
        )
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = address.timeout
    before = os.environ.get(_BLOCKING)
    os.environ[_BLOCKING] = "1"
    try:
        group = dist.ProcessGroupNCCL(everyone, rank, address.world_size, options)
    finally:
        del os.environ[_BLOCKING]
        if before is not None:
            os.environ[_BLOCKING] = before
    everyone.set(_key(rank), "")
    _await_all(everyone, address)
    return group


_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
"""Variable that makes a missing message raise after the timeout; otherwise torch ends the process. Read at a group's
creation."""


def _key(rank: int) -> str:
    """Return gloo's key for a rank's address, in a group with one device."""
    return f"0/{rank}"


def _await_all(store: Store, address: LinkAddress) -> None:
    """Wait until all ranks of the link have called this, each after writing its address."""
    if store.add("joined", 1) == address.world_size:
        store.set("all", "")
    try:
        store.wait(["all"], address.timeout)
    except dist.DistStoreError as error:
        missing = [rank for rank in range(address.world_size) if not store.check([_key(rank)])]
        raise dist.DistStoreError(
            f"of {address.world_size} ranks of link {address.name} these did not come in {address.timeout_s:.0f} s: "
            f"{', '.join(map(str, missing))}"
        ) from error


def _device(host: str) -> Any:
    """Return a network device of gloo that connects pairs at their first message. On one machine it listens only
    locally; across machines, on the job's network. Each group needs a separate device, which ends with it."""
    own = os.environ.get("MEGARL_NODE_ADDRESS")
    if own:
        return ProcessGroupGloo.create_device(hostname=own, lazy_init=True)
    if host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback):
        return ProcessGroupGloo.create_device(hostname=host, lazy_init=True)
    return ProcessGroupGloo.create_default_device(lazy_init=True)


def _is_address(host: str) -> bool:
    return host.replace(".", "").isdigit() or ":" in host
