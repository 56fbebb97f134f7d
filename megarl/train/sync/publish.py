"""The trainer's side of a weight sync: publish every version, and prove that the engines have it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from traceback import clear_frames
from typing import Literal

import torch

from megarl.core import heartbeat
from megarl.core.errors import EngineError, WeightsDiffer, WeightSyncError
from megarl.core.schema import WeightsVersion
from megarl.engine.client.probe import ProbeText
from megarl.engine.client.watch import EngineWatch
from megarl.learn.training.optimizer_digests import check_written
from megarl.train.sync.connection import EngineConnection, with_timeout
from megarl.train.sync.kept import KeptEngines
from megarl.train.sync.parts import PartOfEngines
from megarl.train.sync.publication import Pause, Publication, SyncReport
from megarl.weights.reshard.buckets import bytes_of
from megarl.weights.reshard.execute import Digests, SliceDigests, send

AWAIT_S = 0.2
"""Least seconds between two looks for engines of other programs."""
LEAST_BUCKET = 65536
"""Bytes below which no bucket is halved: memory that lacks so little is not the buckets'."""


class WeightPublisher(EngineConnection):
    """A connection over which weights are published, proven and probed. Every trainer rank makes the same calls."""

    @cached_property
    def kept(self) -> KeptEngines:
        """Engines that are left out of updates."""
        return KeptEngines()

    @with_timeout(lambda config: config.sync.timeout_s)
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
        if self.transport is None:
            raise WeightSyncError(f"weights {version} cannot be published without a link: call connect() first")
        self._count += 1
        topic, reports = f"publish/{self._generation}.{self._count}", []
        failure: WeightSyncError | None = None
        known: SliceDigests = {}
        try:
            for part in self._parts_behind(topic, version):
                send = partial(self._send, part, tensors, written, known)
                try:
                    reports.append(self._publish_to(part, topic, version, send, abort, probe))
                except WeightSyncError as error:
                    if isinstance(error, WeightsDiffer) or not self._each:
                        raise
                    failure = failure or error
            if failure is not None:
                raise failure
            return SyncReport.of_parts(reports)
        except BaseException:
            self._disconnect()
            raise
        finally:
            failure = None  # its traceback holds this frame

    def _parts_behind(self, topic: str, version: WeightsVersion) -> list[PartOfEngines]:
        """Parts to publish to: those whose engine generates with the version already need nothing."""
        if not self._each:
            return self.parts
        if self._rank == 0:
            with self._messages.announcing(topic) as message:
                message["behind"] = self.kept.behind(self._fleet, str(version))
        else:
            message = self._messages.received(topic)
        return [self.parts[engine] for engine in message["behind"]]

    def _publish_to(
        self,
        part: PartOfEngines,
        topic: str,
        version: WeightsVersion,
        send: Callable[[], Digests],
        abort: bool,
        probe: ProbeText | None,
    ) -> SyncReport:
        heartbeat.beat()
        fleet = self._fleet.part(part.engines if self._rank == 0 else ())
        publication = Publication(fleet, self._messages, part.plan, f"{topic}/{part.engines[0]}", version)
        if self._rank != 0:
            return publication.follow(send, self._rank)
        pause: Pause = "abort" if abort else self._config.sync.pause
        return publication.lead(send, pause, bytes_of(part.plan.destination, self._dtype), probe)

    @with_timeout(lambda config: 2 * config.sync.timeout_s)  # two requests to each engine, and those of a far text once
    def probe(self, text: ProbeText) -> float:
        """Largest difference of the text's log-probs between this trainer and any engine. Every rank calls it.

        Raises:
            WeightSyncError: on every rank, when it is more than the text's tolerance. The engines then refuse requests.
        """
        self._count += 1
        topic = f"probe/{self._generation}.{self._count}"
        if self._rank != 0:
            return self._messages.received(topic)["max_difference"]
        with self._messages.announcing(topic) as message:
            try:
                answers = self._fleet.each(lambda i, engine: engine.probe(text.token_ids, decode=text.decode))
                message["max_difference"] = max(map(text.check, answers))
                for scores in self._fleet.each(
                    lambda i, engine: [engine.scores(far.token_ids, 1, among=far.candidates) for far in text.far]
                ):
                    for far, found in zip(text.far, scores, strict=True):
                        far.check(found)
            except WeightSyncError as error:
                self._fleet.close(str(error))
                raise
        return message["max_difference"]

    def died(self) -> list[str]:
        """``EngineFleet.died`` since ``connect``; empty on ranks other than 0."""
        if self._rank:
            return self._fleet.died()
        gone = [f"the engine at {url} is gone" for url in self._left_out()] or self._fleet.died()
        return gone or (["no engine is there"] if self.come_and_go and not self._engines() else [])

    def await_any(self, seconds: float) -> bool:
        """Wait for so long for an engine that is there, on rank 0; ends early when the job is asked to stop."""
        until = time.monotonic() + seconds
        while not (there := bool(self._engines())) and not self._stopping() and time.monotonic() < until:
            heartbeat.beat()
            time.sleep(max(self._config.store.poll_s, AWAIT_S))
        return there

    def deserted(self) -> str | None:
        """Reason to join other engines while answers are awaited, on rank 0: they have taken the places of all those
        that were joined. Engines that come while another is left are joined at the next publication."""
        urls = (self._engines() or ()) if self.come_and_go else self._registered()
        if self.transport is None or not urls or not set(self._fleet.urls).isdisjoint(urls):
            return None
        return f"no engine that was given the weights is there, and {', '.join(urls)} is"

    def watch(self, version: WeightsVersion) -> EngineWatch:
        """Watch the engines, which have this version, on rank 0; none on others."""
        return EngineWatch([], str(version)) if self._rank else self._fleet.watch(str(version), self.kept.versions)

    def drain(self, given_up: Callable[[], bool]) -> None:
        """Have the engines end their requests, and begin none before a publication (``EngineControl.drain``). Raises
        EngineError."""
        self._fleet.each(lambda i, engine: engine.drain(given_up))

    def halve_buckets(self) -> tuple[int, int] | None:
        """Halve ``sync.bucket_bytes`` for the next ``connect``; return the bytes before and after, None where they
        would be too few."""
        old = self._config.sync.bucket_bytes
        if old // 2 < LEAST_BUCKET:
            return None
        self._config = replace(self._config, sync=replace(self._config.sync, bucket_bytes=old // 2))
        return old, old // 2

    def part(self) -> None:
        """Close the links before the engines end: the next ``connect`` joins all of them."""
        self._fleet.forget_processes()
        self._disconnect()

    def sleep(self) -> dict[str, float]:
        """Have the engines give up weights and KV cache until ``wake``; return the bytes that their workers freed and
        still have, on rank 0. Raises EngineError there."""
        if self._rank:
            return {}
        if self.transport is None:
            raise EngineError("no engine is joined")
        workers = [w for engine in self._fleet.each(lambda i, engine: engine.sleep()) for w in engine]
        return {
            "memory/engines/freed_bytes": sum(worker["freed"] for worker in workers),
            "memory/engines/asleep_bytes": sum(worker["rss"] for worker in workers),
        }

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Give engines that sleep this memory again; the others have it. Raises EngineError on rank 0."""
        rollout = self._config.rollout
        if self._rank == 0 and rollout.placement == "colocated" and rollout.offload == "sleep":
            self._fleet.each(lambda i, engine: engine.wake(what))

    def _send(
        self, part: PartOfEngines, tensors: Mapping[str, torch.Tensor], written: Mapping[str, int], known: SliceDigests
    ) -> Digests:
        assert self.transport is not None and self._sender is not None
        bucket, transport = self._config.sync.bucket_bytes, part.transport(self.transport)
        try:
            check_written(tensors, written)
            digests = send(
                part.plan, self._rank, tensors, transport, dtype=self._dtype, bucket_bytes=bucket, known=known
            )
            self._sender.finish()
            check_written(tensors, written)  # they were sent from memory that an update must not change meanwhile
            return digests
        except BaseException as error:
            clear_frames(error.__traceback__)  # they hold sends under way, which would keep the link open
            for engine in part.engines:
                self._links.remove(engine)
            if not self._each:
                self._disconnect()
            raise
