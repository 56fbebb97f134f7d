"""A trainer rank's connection to the job's engines: their links, and messages between ranks during a sync.

Every trainer rank makes the same calls. Rank 0 calls the engines; the ranks exchange messages through the links'
key-value store, so that all of them learn how a call ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

from torch import distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from megarl.config.schema import Config
from megarl.core.errors import WeightsDiffer, WeightSyncError
from megarl.core.processes import heartbeat
from megarl.engines.client.control import EngineControl
from megarl.engines.client.names import JobAddresses
from megarl.engines.fleet import EngineRow, Fleet
from megarl.engines.sync.link import Backend, EngineLinks, LinkAddress, first_workers, join_groups, open_store
from megarl.engines.sync.shared import (
    DeviceMemory,
    HostMemory,
    MemoryFile,
    Places,
    SharedMemorySender,
    machine,
    memory_file,
)
from megarl.learn.parallel.grid import megatron_grid
from megarl.train.sync.fleet import (
    EngineFleet,
    EnginePlans,
    PartOfEngines,
    await_wanted,
    failures,
    partners_of,
    parts_of,
    places_of,
    results,
)
from megarl.weights.reshard.adapters import AdapterDelivery
from megarl.weights.reshard.execute import Transport
from megarl.weights.reshard.layout import Layout
from megarl.weights.reshard.layouts import VOCAB_MULTIPLE


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


class RankMessages:
    """One trainer rank's messages. Rank 0 serves the store, and removes keys when every rank has read them."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self.timeout_s = timeout_s
        self._store: TCPStore | None = None
        self._keys: list[str] = []
        """Keys that rank 0 has written or read and not yet removed."""

    @property
    def store(self) -> TCPStore:
        """Return the store; call ``open`` first."""
        assert self._store is not None, "open first"
        return self._store

    def open(self, address: LinkAddress) -> None:
        """Open the store if it is closed."""
        if self._store is None:
            self._store = open_store(address, master=self._rank == 0)

    @contextmanager
    def announcing(self, topic: str) -> Iterator[dict[str, Any]]:
        """Send the other ranks the dict that the body fills, or the error that it raises, under ``topic``."""
        self._note(topic)
        message: dict[str, Any] = {}
        try:
            yield message
        except BaseException as error:
            failed = {"error": str(error) or type(error).__name__, "differs": isinstance(error, WeightsDiffer)}
            self.store.set(topic, json.dumps(failed))
            raise
        self.store.set(topic, json.dumps(message))

    def received(self, topic: str, timeout_s: float | None = None) -> dict[str, Any]:
        """Return another rank's message under ``topic``; raise its error as a WeightSyncError."""
        timeout_s = timeout_s or self.timeout_s
        try:
            self.store.wait([topic], timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            raise WeightSyncError(f"no word of {topic} from another trainer rank in {timeout_s:.0f} s") from error
        self._note(topic)
        message = json.loads(self.store.get(topic))
        if "error" in message:
            raise (WeightsDiffer if message["differs"] else WeightSyncError)(message["error"])
        return message

    def post(self, key: str, value: Sequence[Any]) -> None:
        """Write a value for rank 0."""
        self.store.set(key, json.dumps(value))

    def posted(self, key: str) -> Any:
        """Return a value that another rank wrote for rank 0."""
        self.store.wait([key], timedelta(seconds=self.timeout_s))
        self._note(key)
        return json.loads(self.store.get(key))

    def read_by_all(self) -> list[str]:
        """Return the keys so far, to ``remove`` once every rank has read them, and start a new list."""
        keys, self._keys = self._keys, []
        return keys

    def remove(self, keys: Sequence[str]) -> None:
        """Delete keys that every rank has read."""
        for key in keys:
            self.store.delete_key(key)

    def _note(self, key: str) -> None:
        if self._rank == 0:
            self._keys.append(key)


LEAVE_S = 10.0
"""Seconds within which an engine of another program must respond again after its first response."""


class LooksForEngines(Protocol):
    """Finds engines (``EngineLook``)."""

    @property
    def is_own(self) -> bool:
        """False if the engines belong to other programs."""

    def fleet(self) -> Fleet:
        """Return the engines' current rows."""

    def to_join(self) -> list[EngineRow] | None:
        """Return the engines to deliver weights to; None while all are absent by order."""


class EngineConnection:
    """One trainer rank's side of the engines' weight links.

    Args:
        config: Uses model.dtype, parallel, rollout (tp, pp, start_timeout_s) and sync.
        layout: The trainer's layout, ``megatron_layout`` of config.parallel.
        hf_config: config.json of the model.
        rank: This process's rank in the layout.
        look: Finds the engines; used on rank 0.
        vocab_multiple: Multiple to which the layout pads the vocabulary; the engines rebuild the layout with it.
        addresses: Addresses of the links' store; by default from the environment.
        stopping: True once the job is asked to stop; ends the wait for engines that are not ready.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        hf_config: Mapping[str, Any],
        rank: int,
        *,
        look: LooksForEngines,
        vocab_multiple: int = VOCAB_MULTIPLE,
        addresses: JobAddresses | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._addresses = addresses or JobAddresses.from_environment()
        self.config = config
        self.bucket_bytes = config.sync.bucket_bytes
        """Maximum bytes of a message; may change between two calls of ``connect``."""
        self.look = look
        self.come_and_go = not look.is_own
        self.rows: list[EngineRow] = []
        """Engines joined last, each with the start that responded; on rank 0."""
        self.joining: Sequence[int] = ()
        """Numbers of the engines that the last ``connect`` joined; their earlier weights do not count."""
        self.rank, self.stopping = rank, stopping
        self._layout, self._vocab_multiple = layout, vocab_multiple
        self.fleet = EngineFleet([], self._addresses.key, config.sync.timeout_s)
        self.each = config.sync.pause == "keep"
        """True if engines receive weights one after another, by separate plans."""
        self.adapters: AdapterDelivery | None = None
        """Delivery of the model's adapters, if it has any."""
        if config.model.lora.is_used:
            separate = config.sync.adapter == "separate"
            self.adapters = AdapterDelivery.of(hf_config, config.model.lora, separate=separate)
        self._plans = EnginePlans(layout, hf_config, config.rollout, each=self.each, adapters=self.adapters)
        self.parts: list[PartOfEngines] = []
        """Engines that receive weights together, since ``connect``."""
        self.messages = RankMessages(rank, config.rollout.start_timeout_s + config.sync.timeout_s)
        self.timeout_s = config.sync.timeout_s
        """Timeout in seconds for joining a link, and for each message."""
        self.generation = 0
        """Number of the last ``connect``."""
        self._file = memory_file()
        self._joined = NONE_JOINED
        self._keeps_buckets = not config.rollout.is_colocated
        self.links = TrainerLinks(rank, layout.num_ranks, config.sync.transport, self._file, keeps=self._keeps_buckets)
        self.sender: SharedMemorySender | None = None
        self.transport: Transport | None = None
        """None before ``connect`` and after a failed publication."""

    def connect(self) -> None:
        """Wait for the engines, and join new ones and those with a broken link; the other links stay.

        Raises:
            EngineError, WeightSyncError: an engine is not ready in time, or rejects the link; every rank raises.
        """
        with heartbeat.timeout(self.config.rollout.start_timeout_s):
            try:
                self._connect()
            except BaseException:
                self.disconnect()
                raise

    def _connect(self) -> None:
        self.fleet.forget_starts()
        self.messages.open(self._address(None, self.messages.timeout_s))
        self.generation += 1
        topic = f"connect/{self.generation}"
        if self.rank == 0:
            with self.messages.announcing(topic) as message:
                message.update(self._agree(topic))
        else:
            self.messages.post(f"{topic}/{self.rank}", [self.transport is not None, machine(), *self._file])
            message = self.messages.received(topic)
        places, joining = Places(**message["places"]), message["joining"]
        self.joining = joining
        plans = self._plans.of_engines(message["workers"])
        if len(joining) == len(plans):
            self.links.close()  # includes the links of engines that have ended
        self.links.number(message["workers"])
        for engine in joining:
            self.links.remove(engine)
        near = places.workers_on_same_machine(self.rank)
        calls: AbstractContextManager[list[Future[Any]]] = nullcontext([])
        parts = parts_of(plans, message["workers"], places)
        if self.rank == 0:
            calls = self.fleet.calling(
                lambda i, engine: engine.init(self.init_info(i, places)) if i in joining else None
            )
        with calls as called:
            try:
                partners = partners_of(parts, message["workers"], self.rank) if joining else []
                for engine in joining:
                    self.links.join(self.messages.store, self._address(engine), engine, partners[engine], near)
            except Exception as error:
                raise WeightSyncError(
                    "; ".join([f"the weight link could not be joined: {error}", *failures(called)])
                ) from error
            results(called)
        self.parts = parts
        self._release_buckets()
        self.sender = self.transport = self.links.sender(near)

    def engines_changed(self) -> bool:
        """True on rank 0 if the wanted engines differ from the joined ones; True on every rank if none is joined."""
        if self.transport is None:
            return True
        if self.rank != 0:
            return False
        rows = self.look.to_join()
        return rows is None or [(e.key, e.start) for e in rows] != [(e.key, e.start) for e in self.rows]

    def left_out(self) -> list[str]:
        """Return joined engines that are no longer wanted."""
        rows = self.look.to_join()
        there = self.fleet.urls if rows is None else [row.url for row in rows]
        return [url for url in self.fleet.urls if url not in there]

    def _agree(self, topic: str) -> dict[str, Any]:
        """Find the engines and which of them to join; let these build the plan. Runs on rank 0."""
        rows = await_wanted(self.look.to_join, self.config.rollout.start_timeout_s, self.stopping)
        if (urls := [row.url for row in rows]) != self.fleet.urls:
            self.fleet = EngineFleet(urls, self._addresses.key, self.config.sync.timeout_s)
        self._plans.expect(len(urls))
        start_s = LEAVE_S if self.come_and_go else self.config.rollout.start_timeout_s
        self.fleet.wait_ready(start_s, self.stopping, tuple if self.come_and_go else self.left_out)
        self.rows = [replace(row, start=start) for row, start in zip(rows, self.fleet.starts, strict=True)]
        earlier, workers = self._plans.workers, self.fleet.workers
        self._plans.of_engines(workers)
        posted = [self.messages.posted(f"{topic}/{rank}") for rank in range(1, self._layout.num_ranks)]
        senders = [[machine(), *self._file], *(where for _, *where in posted)]
        open_everywhere = self.transport is not None and all(is_open for is_open, *_ in posted)
        same_plans = len(earlier) == len(urls) if self.each else list(earlier) == workers
        before = self._joined if open_everywhere and same_plans else NONE_JOINED
        starts = list(zip(self.fleet.urls, self.fleet.starts, strict=True))
        joining = before.replaced(starts)
        machines = self._machines(before, joining)
        if before.starts and (machines, senders) != (before.machines, before.senders):
            joining = before.all  # nearness decides the order of messages, which all processes must share
            machines = self._machines(before, joining)
        self._joined = Joined(starts, machines, senders)
        places = self._joined.places() if self.config.sync.shared_memory else Places()
        return {"workers": workers, "joining": joining, "places": asdict(places)}

    def _machines(self, before: Joined, joining: Sequence[int]) -> list[list[str]]:
        """Return the machines of each engine's workers; the engines in ``joining`` build the plan and return theirs."""

        def of_engine(i: int, engine: EngineControl) -> list[str]:
            if i not in joining:
                return before.machines[i]
            engine.workers("megarl_abandon_update")  # an earlier trainer may have been killed during an update
            return [worker["machine"] for worker in engine.workers("megarl_agree", self.init_info(i))]

        return self.fleet.each(of_engine)

    def _address(self, engine: int | None, timeout_s: float | None = None) -> LinkAddress:
        """Return the address of an engine's link; None: of the trainer ranks' own link."""
        return LinkAddress(
            self._addresses.link_host,
            self._addresses.link_port,
            name=f"{self.generation}/{engine}",
            world_size=self._layout.num_ranks + (0 if engine is None else self._plans.workers[engine]),
            timeout_s=timeout_s or self.timeout_s,
        )

    def disconnect(self) -> None:
        """Close all links and release the buckets; ``connect`` creates new ones."""
        self.links.close()
        self._release_buckets()
        self.sender = self.transport = None

    def _release_buckets(self) -> None:
        if self.sender is not None:
            self.sender.close()

    def init_info(self, replica: int, places: Places | None = None) -> dict[str, Any]:
        """Make ``megarl.engines.sync.receiver.InitInfo`` for one engine."""
        places, plans = places or Places(), self._plans
        return {
            **asdict(self._address(replica)),
            "grid": asdict(megatron_grid(self.config.parallel)),
            "transformer_impl": self.config.model.transformer_impl,
            "places": asdict(places_of(places, replica, plans.workers) if plans.apart else places),
            "vocab_multiple": self._vocab_multiple,
            "kernels": self.config.trainer.kernels,
            "replicas": plans.replicas,
            "replica": 0 if plans.apart else replica,
            "dtype": self.config.model.dtype,
            "weight_dtype": self.config.rollout.weight_dtype,
            "bucket_bytes": self.bucket_bytes,
            "transport": self.config.sync.transport,
            "keep_buckets": self._keeps_buckets,
            "fingerprint": plans.of(replica).fingerprint,
            **({} if self.adapters is None else {"lora": asdict(self.config.model.lora)}),
            "adapter": self.config.sync.adapter,
        }
