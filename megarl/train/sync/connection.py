"""A trainer rank's connection to the job's engines: it finds them in the registry, joins links, and agrees on a plan.

Every trainer rank makes the same calls. Rank 0 calls the engines; the ranks exchange messages through the links'
key-value store, so that all of them learn how a call ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any, Protocol

from megarl.config.schema import Config
from megarl.core.errors import WeightSyncError
from megarl.core.processes import heartbeat
from megarl.engines.client.control import EngineControl
from megarl.engines.client.names import JobAddresses
from megarl.engines.fleet import EngineRow, Fleet
from megarl.engines.sync.link import LinkAddress
from megarl.engines.sync.shared import Places, SharedMemorySender, machine, memory_file
from megarl.learn.parallel.grid import megatron_grid
from megarl.train.sync.engine_parts import EnginePlans, PartOfEngines, partners_of, parts_of, places_of
from megarl.train.sync.fleet import EngineFleet, await_wanted, failures, results
from megarl.train.sync.links import NONE_JOINED, Joined, TrainerLinks
from megarl.train.sync.rank_messages import RankMessages
from megarl.weights.reshard.adapters import AdapterDelivery
from megarl.weights.reshard.execute import Transport
from megarl.weights.reshard.layout import Layout
from megarl.weights.reshard.layouts import VOCAB_MULTIPLE

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
            if self.come_and_go:  # an earlier trainer may have been killed during an update
                engine.workers("megarl_abandon_update")
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
