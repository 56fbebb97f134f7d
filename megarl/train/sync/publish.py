"""Trainer side of a weight sync: publish every version, and verify that the engines have it."""

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
from megarl.learn.training.optimizer import check_written
from megarl.train.sync.connection import EngineConnection
from megarl.train.sync.fleet import PartOfEngines
from megarl.train.sync.look import lost
from megarl.train.sync.publication import Publication, SyncReport
from megarl.weights.reshard.adapter_proof import BaseProof, ProvenTensors, check_covered
from megarl.weights.reshard.adapters import Adapted, MergedTensors
from megarl.weights.reshard.buckets import bytes_of
from megarl.weights.reshard.execute import Digests, SliceDigests, send
from megarl.weights.reshard.plan import ReshardPlan
from megarl.weights.reshard.sent_proof import check_sent

AWAIT_S = 0.2
"""Minimum seconds between two checks for engines of other programs."""
UNMOVED = (
    "an engine does not compute with a test adapter as the trainer does: adapters that it is given do not reach its "
    "layers, reach others, or are scaled otherwise; compare model.lora and sync.adapter of both programs"
)
"""Beginning of an error text."""
Start = tuple[Key, int]
"""(engine, number of its start)."""
LEAST_BUCKET = 65536
"""Minimum bytes of a halved bucket; if this little memory is missing, buckets are not the cause."""


class DeliveredRows(Protocol):
    """Rows of engines, as written by the process that delivers weights (``Store.engines``)."""

    def delivered(self, starts: Mapping[Key, int], version: WeightsVersion | None) -> None:
        """Record the weights of these starts; None: they have lost their weights."""

    def free(self) -> None:
        """Release all engines that keep weights for an evaluation."""


class WeightPublisher:
    """Publishes, verifies and probes weights over a connection. Every trainer rank makes the same calls.

    Args:
        rows: Rows in which rank 0 records the engines' weights.
    """

    def __init__(self, connection: EngineConnection, rows: DeliveredRows) -> None:
        self.connection, self._rows = connection, rows
        self.come_and_go = connection.come_and_go
        self._dtype: torch.dtype = getattr(torch, connection.config.model.dtype)
        self._count = 0
        """Number of the last publication or probe."""
        self.whole: set[Start] = set()
        """Starts of engines that have verified all weights since they last slept; on rank 0."""
        self.tried: set[Start] = set()
        """Starts of engines that have passed a test adapter; on rank 0."""
        self.changes: dict[int, ReshardPlan] = {}
        """``id`` of a part -> the plan that covers only what training changes."""
        self._covering: list[ReshardPlan] = []
        """Plans checked to deliver everything that training changes."""
        self._base = BaseProof()

    def connect(self) -> None:
        """``EngineConnection.connect``."""
        connection, self.changes, self._covering = self.connection, {}, []
        connection.connect()
        if connection.rank == 0:  # a joining engine starts without weights, even if it has not been restarted
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
        """Send this rank's local tensors (Megatron names, any float dtype); return when every engine has verified all
        weights and generates again.

        Args:
            written: ``Model.written``: digests of what the optimizer last wrote, which ``tensors`` must have.
            abort: Abort requests in flight instead of waiting for them, which may exceed an engine's timeout.
            probe: Compared within the publication; required by ``sync.pause=keep``, and allowed only there.

        With ``sync.pause=keep`` each engine that lacks the version, and keeps no other one, receives it separately. If
        one fails, the others still receive it; then the first failure is raised.

        Raises:
            WeightSyncError: on every rank. The engines then refuse requests with the reason; ``connect`` and
                ``publish`` bring them back. WeightsDiffer on rank 0 if ``tensors`` differ from what was written, or if
                all were sent and arrived different.
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
        """Return the parts to publish to; a part whose engine already generates with the version is skipped."""
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
        """Return the indices of the engines to publish to. Engines that keep weights for an evaluation are skipped,
        unless one has lost them or no other engine is left."""
        look, joined = self.connection.look, [row.key for row in self.connection.rows]
        fleet = look.fleet()
        holding = [row for row in fleet if row.holds_for]
        others = [row for row in fleet.to_join(begun=True) if not row.holds_for]
        if holding and (not others or any(row.has is None for row in holding)):
            self._rows.free()
            fleet = look.fleet()
        return [joined.index(row.key) for row in fleet.behind(version) if row.key in joined]

    def note(self, engines: Iterable[int], version: WeightsVersion | None) -> None:
        """Record that these engines have verified a version; None: they have lost their weights."""
        rows = [self.connection.rows[engine] for engine in engines]
        self._rows.delivered({row.key: row.start for row in rows}, version)

    def _planned(
        self, topic: str, parts: Sequence[PartOfEngines], *, tried: bool = False
    ) -> list[tuple[PartOfEngines, ReshardPlan]]:
        """Return each part with its plan, which covers only what training changes if the engines have verified the
        rest. With ``tried`` raises WeightSyncError if an engine has not passed a test adapter."""
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
        """Return the starts of joined engines, on rank 0."""
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
        """True on rank 0 if a joined engine has not passed a test adapter."""
        return bool(self._starts(range(len(self.connection.rows))) - self.tried)

    def try_adapter(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: WeightsVersion,
        *,
        written: Mapping[str, int],
        probe: ProbeText,
    ) -> None:
        """Deliver a test adapter to the engines without one so far, and compare log-probs of a text. These engines
        refuse requests until the next publication. Every rank calls it.

        Raises:
            WeightSyncError: as ``publish``; WeightsDiffer if an engine does not compute with the adapter.
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
        """Return the largest difference of the text's log-probs between trainer and engines. Every rank calls it.

        Raises:
            WeightSyncError: on every rank, if it exceeds the text's tolerance. The engines then refuse requests.
        """
        self._count += 1
        connection, topic = self.connection, f"probe/{self.connection.generation}.{self._count}"
        # Two requests to each engine, and one for each far text.
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
        """Wait up to ``seconds`` for an engine to be present, on rank 0; end early when the job is asked to stop."""
        until = time.monotonic() + seconds
        connection = self.connection
        while not (there := bool(connection.look.to_join())) and not connection.stopping() and time.monotonic() < until:
            heartbeat.beat()
            time.sleep(max(connection.config.store.poll_s, AWAIT_S))
        return there

    def lost(self) -> str | None:
        """Return the reason to publish again while responses are awaited (``look.lost``), or None; on rank 0."""
        connection = self.connection
        return None if connection.transport is None else lost(connection.look.fleet(), connection.rows)

    def drain(self, given_up: Callable[[], bool]) -> None:
        """Make the engines end their requests, and start none before a publication (``EngineControl.drain``). Raises
        EngineError."""
        self.connection.fleet.each(lambda i, engine: engine.drain(given_up))

    def halve_buckets(self) -> tuple[int, int] | None:
        """Halve the bytes of a message (``sync.bucket_bytes``) for the next ``connect``; return the bytes before and
        after, or None if they would be too few."""
        connection = self.connection
        old = connection.bucket_bytes
        if old // 2 < LEAST_BUCKET:
            return None
        connection.bucket_bytes = old // 2
        return old, old // 2

    def part(self) -> None:
        """Close the links before the engines end; the next ``connect`` joins all engines."""
        self.connection.fleet.forget_starts()
        self.connection.disconnect()

    def sleep(self) -> dict[str, float]:
        """Make the engines free KV cache and, unless ``rollout.offload=memory``, weights until ``wake``. Return the
        bytes that their workers freed and still have, on rank 0. Raises EngineError there."""
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
        """Make the engines allocate this memory again (``EngineControl.wake``). Raises EngineError on rank 0."""
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
        proven = set(known)
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
            if given is tensors:
                own = (plan, connection.rank, tensors, known)
                check_sent(*own, dtype=self._dtype, bucket_bytes=bucket, proven=proven)
            check_written(tensors, written)  # an update must not have changed the memory during the send
            return digests
        except BaseException as error:
            clear_frames(error.__traceback__)  # they hold pending sends, which would keep the link open
            for engine in part.engines:
                connection.links.remove(engine)
            connection.sender.close()  # an engine that hangs may still read the buckets
            if not connection.each:
                connection.disconnect()
            raise
