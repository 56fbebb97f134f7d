"""The trainer's side of a weight sync: publish every version, and prove that the engines have it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from traceback import clear_frames
from typing import Literal, Protocol

import torch

from megarl.core.errors import EngineError, WeightsDiffer, WeightSyncError
from megarl.core.processes import heartbeat
from megarl.core.schema import WeightsVersion
from megarl.engines.client.control import Pause
from megarl.engines.client.probe import ProbeText
from megarl.engines.fleet import Key
from megarl.learn.training.optimizer_digests import check_written
from megarl.train.sync.connection import EngineConnection
from megarl.train.sync.engine_parts import PartOfEngines
from megarl.train.sync.look import lost
from megarl.train.sync.publication import Publication, SyncReport
from megarl.weights.reshard.adapter_proof import BaseProof, ProvenTensors, check_covered
from megarl.weights.reshard.adapters import Adapted, MergedTensors
from megarl.weights.reshard.buckets import bytes_of
from megarl.weights.reshard.execute import Digests, SliceDigests, send
from megarl.weights.reshard.plan import ReshardPlan

AWAIT_S = 0.2
"""Least seconds between two looks for engines of other programs."""
UNMOVED = (
    "an engine does not compute with a test adapter as the trainer does: adapters that it is given do not reach its "
    "layers, reach others, or are scaled otherwise; compare model.lora and sync.adapter of both programs"
)
"""Beginning of an error."""
Start = tuple[Key, int]
"""An engine, and the number of its start."""
LEAST_BUCKET = 65536
"""Bytes below which no bucket is halved: memory that lacks so little is not the buckets'."""


class DeliveredRows(Protocol):
    """Rows of engines as the process that delivers weights writes them (``Store.engines``)."""

    def delivered(self, starts: Mapping[Key, int], version: WeightsVersion | None) -> None:
        """Note the weights of these starts; None: that they have lost theirs."""

    def free(self) -> None:
        """Have no engine keep its weights for an evaluation."""


class WeightPublisher:
    """Publishes, proves and probes weights over a connection. Every trainer rank makes the same calls.

    Args:
        rows: Where rank 0 notes the weights that engines have.
    """

    def __init__(self, connection: EngineConnection, rows: DeliveredRows) -> None:
        self.connection, self._rows = connection, rows
        self.come_and_go = connection.come_and_go
        self._dtype: torch.dtype = getattr(torch, connection.config.model.dtype)
        self._count = 0
        """Number of the last publication or probe."""
        self.whole: set[Start] = set()
        """Starts of engines that have proven to have all weights since they slept; on rank 0."""
        self.tried: set[Start] = set()
        """Starts of engines whose way of adapters was tried; on rank 0."""
        self.changes: dict[int, ReshardPlan] = {}
        """``id`` of a part -> its plan of what training changes."""
        self._covering: list[ReshardPlan] = []
        """Plans that deliver all that training changes."""
        self._base = BaseProof()

    def connect(self) -> None:
        """``EngineConnection.connect``."""
        connection, self.changes, self._covering = self.connection, {}, []
        connection.connect()
        if connection.rank == 0:  # an engine that joins begins from nothing, also one that has not been started again
            joined = self._starts(connection.joining)
            self.whole, self.tried = self.whole - joined, self.tried - joined

    def engines_changed(self) -> bool:
        """``EngineConnection.engines_changed``."""
        return self.connection.engines_changed()

    def publish(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: WeightsVersion,
        *,
        written: Mapping[str, int],
        abort: bool = False,
        probe: ProbeText | None = None,
    ) -> SyncReport:
        """Send this rank's local tensors (Megatron names, any float dtype); return when every engine has proven to
        have all weights and generates again.

        Args:
            written: ``Model.written``: digests of what the optimizer last wrote, which ``tensors`` must have.
            abort: End the requests under way instead of waiting for them, which may take longer than an engine's
                answer.
            probe: Compared within the publication; needed, and allowed, with ``sync.pause=keep``.

        With ``sync.pause=keep`` each engine that has not got the version, and does not keep another one, takes it by
        itself. One that fails is not waited for by the others: the first failure is raised when all have been given
        it.

        Raises:
            WeightSyncError: on every rank. The engines then refuse requests with the reason; ``connect`` and
                ``publish`` bring them back. A WeightsDiffer on rank 0 when ``tensors`` are not what was written, or
                when all were sent and proven to be others.
        """
        connection = self.connection
        if connection.transport is None:
            raise WeightSyncError(f"weights {version} cannot be published without a link: call connect() first")
        self._count += 1
        topic, reports = f"publish/{connection.generation}.{self._count}", []
        failure: WeightSyncError | None = None
        known: SliceDigests = {}
        with heartbeat.timeout(connection.config.sync.timeout_s):
            try:
                for part, plan in self._planned(topic, self._parts_behind(topic, version), tried=True):
                    send = partial(self._send, part, plan, tensors, written, known)
                    try:
                        reports.append(self._publish_to(part, plan, topic, version, send, abort, probe))
                    except WeightSyncError as error:
                        if isinstance(error, WeightsDiffer) or not connection.each:
                            raise
                        failure = failure or error
                if failure is not None:
                    raise failure
                return SyncReport.of_parts(reports)
            except BaseException:
                connection.disconnect()
                raise
            finally:
                failure = None  # its traceback holds this frame

    def _parts_behind(self, topic: str, version: WeightsVersion) -> list[PartOfEngines]:
        """Parts to publish to: those whose engine generates with the version already need nothing."""
        connection = self.connection
        if not connection.each:
            return connection.parts
        if connection.rank == 0:
            with connection.messages.announcing(topic) as message:
                message["behind"] = self.behind(version)
        else:
            message = connection.messages.received(topic)
        return [connection.parts[engine] for engine in message["behind"]]

    def behind(self, version: WeightsVersion) -> list[int]:
        """Places of the engines to publish to: none that keeps weights for an evaluation, unless one of those has lost
        them or no other engine is left."""
        look, joined = self.connection.look, [row.key for row in self.connection.rows]
        fleet = look.fleet()
        holding = [row for row in fleet if row.holds_for]
        others = [row for row in fleet.to_join(begun=True) if not row.holds_for]
        if holding and (not others or any(row.has is None for row in holding)):
            self._rows.free()
            fleet = look.fleet()
        return [joined.index(row.key) for row in fleet.behind(version) if row.key in joined]

    def note(self, engines: Iterable[int], version: WeightsVersion | None) -> None:
        """Note that these engines have proven to have a version; None: that they have lost theirs."""
        rows = [self.connection.rows[engine] for engine in engines]
        self._rows.delivered({row.key: row.start for row in rows}, version)

    def _planned(
        self, topic: str, parts: Sequence[PartOfEngines], *, tried: bool = False
    ) -> list[tuple[PartOfEngines, ReshardPlan]]:
        """Each part with the plan to execute: of what training changes, where its engines have proven to have the
        rest. With ``tried`` raises WeightSyncError where an engine has not computed with a test adapter."""
        connection = self.connection
        adapters = connection.adapters
        if adapters is None:
            return [(part, part.plan) for part in parts]
        if connection.rank == 0:
            have = [not self._starts(part.engines) - self.whole for part in parts]
            with connection.messages.announcing(f"{topic}/changed") as message:
                if tried and any(self._starts(part.engines) - self.tried for part in parts):
                    raise WeightSyncError(
                        "an engine has not computed with a test adapter yet, so that model.lora may do nothing there: "
                        "try_adapter() comes before its first weights"
                    )
                message["changed"] = [rest and connection.config.rollout.weight_dtype == "auto" for rest in have]
        else:
            message = connection.messages.received(f"{topic}/changed")
        for part, changed in zip(parts, message["changed"], strict=True):
            if changed and id(part) not in self.changes:
                self.changes[id(part)] = part.plan.only(adapters.changed(part.plan.destination).__contains__)
        plans = [
            self.changes[id(p)] if changed else p.plan for p, changed in zip(parts, message["changed"], strict=True)
        ]
        return list(zip(parts, plans, strict=True))

    def _starts(self, engines: Iterable[int]) -> set[Start]:
        """Starts of joined engines, on rank 0."""
        return {(row.key, row.start) for row in (self.connection.rows[engine] for engine in engines)}

    def _publish_to(
        self,
        part: PartOfEngines,
        plan: ReshardPlan,
        topic: str,
        version: WeightsVersion,
        send: Callable[[], Digests],
        abort: bool,
        probe: ProbeText | None,
        *,
        opens: bool = True,
    ) -> SyncReport:
        heartbeat.beat()
        connection = self.connection
        fleet = connection.fleet.part(part.engines if connection.rank == 0 else ())
        topic, changed = f"{topic}/{part.engines[0]}", plan is not part.plan
        publication = Publication(fleet, connection.messages, plan, topic, version, changed=changed)
        if connection.rank != 0:
            return publication.follow(send, connection.rank)
        pause: Pause = "abort" if abort else connection.config.sync.pause
        try:
            nbytes = bytes_of(plan.destination, self._dtype)
            report = publication.lead(send, pause, nbytes, probe, opens=opens)
        except BaseException:
            self.whole -= self._starts(part.engines)
            self.note(part.engines, None)
            raise
        self.whole |= self._starts(part.engines)
        self.note(part.engines, version if opens else None)
        return report

    def untried(self) -> bool:
        """Return True if a joined engine has not been tried with a test adapter, which rank 0 knows alone."""
        return bool(self._starts(range(len(self.connection.rows))) - self.tried)

    def try_adapter(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: WeightsVersion,
        *,
        written: Mapping[str, int],
        probe: ProbeText,
    ) -> None:
        """Deliver a test adapter to the engines that were not tried with one, and compare log-probs of a text. They
        refuse requests until the next publication. Every rank calls it.

        Raises:
            WeightSyncError: as ``publish``; a WeightsDiffer where an engine does not compute with the adapter.
        """
        connection = self.connection
        self._count += 1
        topic = f"try/{connection.generation}.{self._count}"
        known: SliceDigests = {}
        with heartbeat.timeout(2 * connection.config.sync.timeout_s):
            try:
                if connection.rank == 0:
                    with connection.messages.announcing(topic) as message:
                        untried = [bool(self._starts(part.engines) - self.tried) for part in connection.parts]
                        message["parts"] = [number for number, is_new in enumerate(untried) if is_new]
                else:
                    message = connection.messages.received(topic)
                parts = [connection.parts[number] for number in message["parts"]]
                for part, plan in self._planned(topic, parts):
                    send = partial(self._send, part, plan, tensors, written, known)
                    self._publish_to(part, plan, topic, version, send, True, None, opens=False)
                    self._prove_adapter(part, f"{topic}/{part.engines[0]}/computed", probe)
            except BaseException:
                connection.disconnect()
                raise

    def _prove_adapter(self, part: PartOfEngines, topic: str, probe: ProbeText) -> None:
        connection = self.connection
        if connection.rank:
            connection.messages.received(topic)
            return
        fleet = connection.fleet.part(part.engines)
        with connection.messages.announcing(topic):
            try:
                proving = fleet.each(lambda i, engine: replace(engine, proving=True).probe(probe.token_ids))
                for found in proving:
                    probe.check(found)
            except WeightsDiffer as error:
                fleet.close(UNMOVED)
                raise WeightsDiffer(f"{UNMOVED}: {error}") from error
        self.tried |= self._starts(part.engines)

    def probe(self, text: ProbeText) -> float:
        """Largest difference of the text's log-probs between this trainer and any engine. Every rank calls it.

        Raises:
            WeightSyncError: on every rank, when it is more than the text's tolerance. The engines then refuse requests.
        """
        self._count += 1
        connection, topic = self.connection, f"probe/{self.connection.generation}.{self._count}"
        # Two requests to each engine, and those of a far text once.
        with heartbeat.timeout(2 * connection.config.sync.timeout_s):
            if connection.rank != 0:
                return connection.messages.received(topic)["max_difference"]
            with connection.messages.announcing(topic) as message:
                try:
                    message["max_difference"] = self._probe(text)
                except WeightSyncError as error:
                    connection.fleet.close(str(error))
                    self.note(range(len(connection.rows)), None)
                    raise
            return message["max_difference"]

    def _probe(self, text: ProbeText) -> float:
        fleet = self.connection.fleet
        answers = fleet.each(lambda i, engine: engine.probe(text.token_ids, decode=text.decode))
        difference = max(map(text.check, answers))
        for scores in fleet.each(
            lambda i, engine: [engine.scores(far.token_ids, 1, among=far.candidates) for far in text.far]
        ):
            for far, found in zip(text.far, scores, strict=True):
                far.check(found)
        return difference

    def died(self) -> list[str]:
        """``EngineFleet.died`` since ``connect``; empty on ranks other than 0."""
        connection = self.connection
        if connection.rank:
            return connection.fleet.died()
        gone = [f"the engine at {url} is gone" for url in connection.left_out()] or connection.fleet.died()
        return gone or (["no engine is there"] if self.come_and_go and not connection.look.to_join() else [])

    def await_any(self, seconds: float) -> bool:
        """Wait for so long for an engine that is there, on rank 0; ends early when the job is asked to stop."""
        until = time.monotonic() + seconds
        connection = self.connection
        while not (there := bool(connection.look.to_join())) and not connection.stopping() and time.monotonic() < until:
            heartbeat.beat()
            time.sleep(max(connection.config.store.poll_s, AWAIT_S))
        return there

    def lost(self) -> str | None:
        """Reason to publish again while answers are awaited (``look.lost``), on rank 0; None where there is none."""
        connection = self.connection
        return None if connection.transport is None else lost(connection.look.fleet(), connection.rows)

    def drain(self, given_up: Callable[[], bool]) -> None:
        """Have the engines end their requests, and begin none before a publication (``EngineControl.drain``). Raises
        EngineError."""
        self.connection.fleet.each(lambda i, engine: engine.drain(given_up))

    def halve_buckets(self) -> tuple[int, int] | None:
        """Halve the bytes of a message (``sync.bucket_bytes``) for the next ``connect``; return the bytes before and
        after, None where they would be too few."""
        connection = self.connection
        old = connection.bucket_bytes
        if old // 2 < LEAST_BUCKET:
            return None
        connection.bucket_bytes = old // 2
        return old, old // 2

    def part(self) -> None:
        """Close the links before the engines end: the next ``connect`` joins all of them."""
        self.connection.fleet.forget_starts()
        self.connection.disconnect()

    def sleep(self) -> dict[str, float]:
        """Have the engines give up KV cache and, without ``rollout.offload=memory``, weights until ``wake``; return
        the bytes that their workers freed and still have, on rank 0. Raises EngineError there."""
        connection = self.connection
        keep = connection.config.rollout.offload == "memory"
        if not keep:
            self.whole = set()
        if connection.rank:
            return {}
        if connection.transport is None:
            raise EngineError("no engine is joined")
        workers = [w for engine in connection.fleet.each(lambda i, engine: engine.sleep(keep)) for w in engine]
        return {
            "memory/engines/freed_bytes": sum(worker["freed"] for worker in workers),
            "memory/engines/asleep_bytes": sum(worker["rss"] for worker in workers),
        }

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Give the engines this memory again (``EngineControl.wake``). Raises EngineError on rank 0."""
        if self.connection.rank == 0:
            self.connection.fleet.each(lambda i, engine: engine.wake(what))

    def _send(
        self,
        part: PartOfEngines,
        plan: ReshardPlan,
        tensors: Mapping[str, torch.Tensor],
        written: Mapping[str, int],
        known: SliceDigests,
    ) -> Digests:
        connection = self.connection
        assert connection.transport is not None and connection.sender is not None
        bucket, transport = connection.bucket_bytes, part.transport(connection.transport)
        given: Mapping[str, torch.Tensor] = tensors
        try:
            check_written(tensors, written)
            if isinstance(tensors, Adapted):
                self._base.check(tensors.model)
                if not any(plan is covering for covering in self._covering):
                    merged = isinstance(tensors, MergedTensors)
                    check_covered(plan, part.plan, connection.rank, tensors.model, merged=merged)
                    self._covering.append(plan)
                given = ProvenTensors(tensors, self._count)
            digests = send(plan, connection.rank, given, transport, dtype=self._dtype, bucket_bytes=bucket, known=known)
            connection.sender.finish()
            check_written(tensors, written)  # they were sent from memory that an update must not change meanwhile
            return digests
        except BaseException as error:
            clear_frames(error.__traceback__)  # they hold sends under way, which would keep the link open
            for engine in part.engines:
                connection.links.remove(engine)
            if not connection.each:
                connection.disconnect()
            raise
