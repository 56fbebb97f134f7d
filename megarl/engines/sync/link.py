"""Weight links: for each engine a process group of trainer ranks and its workers, beside both sides' default groups.

A link is a gloo group, whose messages are in host memory, or a NCCL group (never run on hardware), whose messages are
on each rank's GPU. They differ in how a group is made and closed, and in where its messages are.

Ranks of a link are the trainer's 0 .. W-1, then the engine's workers. Connections exist between ranks that exchange
messages in the plan, and between no others: full meshes of 256 trainer ranks with 32 engines of 8 workers each would
take 8,416 connections a rank.
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
from megarl.weights.reshard.execute import Arrival, Transport
from megarl.weights.reshard.execute import Work as WorkOfSend
from megarl.weights.reshard.transport import Received

Backend = Literal["gloo", "nccl"]
TAKE_S = 2.0
"""Seconds in which a link that is closed takes the buckets that are arriving."""
NOTICE_BYTES = 1024
"""Longest message that is no bucket: it arrives whole, so nobody is in the middle of sending it."""
NEVER_SENT = 1
"""Tag of no message: all others have 0."""
ProcessGroupGloo: Any = dist.ProcessGroupGloo
"""PyTorch's stubs know neither its options nor its point-to-point methods, nor that a store takes bytes."""


@dataclass(frozen=True)
class LinkAddress:
    """``name``: never used before in the job; a new link replaces one that a failure has broken."""

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
    """A message that a link is told of once it is waited for."""

    received: Received
    expected: dict[int, Received]

    def wait(self) -> torch.Tensor:
        try:
            message = self.received.wait()
        except RuntimeError:  # its connection is closed
            self.expected.pop(id(self.received.work), None)
            raise
        self.expected.pop(id(self.received.work), None)
        return message

    def release(self) -> None:
        self.received.release()


class Link:
    """Point-to-point transport of flat contiguous tensors, as ``megarl.weights.reshard.execute`` asks for it.

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
        """Messages that are expected and have not been waited for, by their works."""

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        return memory_of(self._over, nbytes)

    def isend(self, message: torch.Tensor, rank: int, /) -> Work:
        """Starts to send to the other side's ``rank``; the message must stay as it is until ``wait()`` returns."""
        return self._open(rank).send([message], self._peers + rank, 0)

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor], /) -> Arrival:
        """Expects the next message of the other side's ``rank`` in the memory that ``spare`` gives."""
        memory = spare()
        message = memory[:nbytes]
        room = message if self._over == "nccl" else memory  # NCCL needs the message's size, gloo any that is enough
        received = Received(self._open(rank).recv([room], self._peers + rank, 0), message)
        self._expected[id(received.work)] = received
        return _Expected(received, self._expected)

    def connect(self) -> None:
        """Exchange a byte with every partner; returns when all of them have.

        Also makes the connections, so that the death of a partner later closes one and is noticed at once. A partner
        that died before its connection exists is noticed after up to five timeouts: gloo waits so long for it.
        """
        word, works = self.allocate(1).zero_(), list[WorkOfSend | Arrival]()

        def say(rank: int) -> WorkOfSend:
            return self.isend(word, rank)

        def hear(rank: int) -> Arrival:
            return self.irecv(1, rank, lambda: self.allocate(1))

        try:
            # NCCL connects two ranks when both begin, and has one queue for both directions: so trainer ranks begin to
            # send as workers begin to receive, each in the order of its partners.
            steps: tuple[Callable[[int], WorkOfSend | Arrival], ...] = (say, hear) if self._peers else (hear, say)
            works += [step(rank) for step in steps for rank in sorted(self._partners)]
            while works:
                works.pop().wait()
        except BaseException:
            works.clear()
            self.close()
            raise

    def close(self) -> None:
        """Closes the connections, so that ranks that wait for this one fail at once instead of after their timeout.

        gloo closes them where a message is waited for in vain (``abort`` and ``shutdown`` do nothing), so each that is
        expected is waited for, and then one that nobody sends. Without that it closes them with the group's last
        reference, which an error's frames may hold. Its destructor never returns where a message comes that was
        expected and is forgotten. A bucket that is arriving is taken first, for TAKE_S: gloo tells its sender nothing,
        who would wait for the timeout.

        NCCL closes them here, and who waits for this rank waits for the timeout.
        """
        group, self.group = self.group, None
        until = time.monotonic() + TAKE_S
        expected = sorted(self._expected.values(), key=lambda one: one.message.nbytes <= NOTICE_BYTES)
        for received in expected if self._over == "gloo" else ():
            left = until - time.monotonic() if received.message.nbytes > NOTICE_BYTES else 0.0
            with suppress(RuntimeError):  # it does not come: that ends all others, too
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
    """The links of all engines as one transport, whose ranks are those of all engines' workers one after another."""

    def __init__(self, over: Backend = "gloo") -> None:
        self.over = over
        self._firsts: Sequence[int] = ()
        self.links: dict[int, Link] = {}
        """Number of an engine -> its link."""

    def number(self, workers: Sequence[int]) -> None:
        """Number the ranks of engines that have so many workers each."""
        self._firsts = first_workers(workers)

    def add(self, engine: int, link: Link) -> None:
        """Take the link of an engine, in place of its earlier one."""
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
        """The link of a rank, and its number among the workers of its engine."""
        engine = bisect_right(self._firsts, rank) - 1
        return self.links[engine], rank - self._firsts[engine]


def memory_of(over: Backend, nbytes: int) -> torch.Tensor:
    """Memory (uint8) for messages of a link over this backend."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda" if over == "nccl" else "cpu")


def first_workers(workers: Sequence[int]) -> list[int]:
    """Rank of each engine's first worker among all workers, of engines that have so many each."""
    return list(accumulate(workers, initial=0))[:-1]


class PartOfWorkers:
    """Some of a transport's ranks as a transport of their own: rank r is ``first`` + r of the whole."""

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
    """The link's key-value store; the master listens on ``address.host`` alone, others wait for it up to the
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
    """Joins the group as link rank ``rank``; returns when all ``address.world_size`` ranks have, and this one is
    connected to its partners.

    A gloo group keeps no reference to ``store``: the caller may close it. A NCCL group keeps it, and its connection.

    Args:
        peers: Link rank of the other side's rank 0.
        partners: Ranks of the other side with which this rank exchanges messages; each counts this rank among its own.

    Raises:
        torch.distributed.DistError: some rank did not come within the timeout.
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
    """Join the group that carries messages in host memory, and that of bucket messages ``over`` another backend.

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
    """A group in which this rank knows the addresses of its partners alone, so that it connects to no other."""
    options = ProcessGroupGloo._Options()
    options._timeout = address.timeout
    options._devices = [_device(address.host)]
    addresses: Any = HashStore()  # the group's own: where it writes its address, and reads that of a partner
    addresses.set_timeout(address.timeout)
    group = ProcessGroupGloo(addresses, rank, address.world_size, options)
    everyone.set(_key(rank), addresses.get(_key(rank)))
    _await_all(everyone, address)
    keys = [_key(partner) for partner in partners]
    for key, value in zip(keys, everyone.multi_get(keys) if keys else [], strict=True):
        addresses.set(key, value)
    return group


def _nccl_group(everyone: Any, address: LinkAddress, rank: int, partners: Sequence[int]) -> Any:
    """A group in which two ranks get a communicator of their own with their first message."""
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
"""With it a message that does not come raises after the timeout; without it torch would end the process. A group reads
it as it is made."""


def _key(rank: int) -> str:
    """Key under which gloo writes a rank's address, of a group with one device."""
    return f"0/{rank}"


def _await_all(store: Store, address: LinkAddress) -> None:
    """Return once so many ranks as the link has called this, each after it wrote its address."""
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
    """Network device of gloo, whose pairs connect at their first message: on one machine it must not listen outside
    it; across machines it does on the job's network. Each group needs its own, which ends with it."""
    own = os.environ.get("MEGARL_NODE_ADDRESS")
    if own:
        return ProcessGroupGloo.create_device(hostname=own, lazy_init=True)
    if host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback):
        return ProcessGroupGloo.create_device(hostname=host, lazy_init=True)
    return ProcessGroupGloo.create_default_device(lazy_init=True)


def _is_address(host: str) -> bool:
    return host.replace(".", "").isdigit() or ":" in host
