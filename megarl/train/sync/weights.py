"""Publication of the actor's weights to the job's engines, and again after an engine was replaced.

Every rank makes the same calls, and all ranks get the same outcome: a result, an error or ``Stopped``.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch

from megarl.core.errors import EngineError, WeightsDiffer, WeightSyncError
from megarl.core.schema import WeightsVersion
from megarl.engines.client.probe import ProbeText
from megarl.learn.memory.phases import Phase
from megarl.learn.training.model import Model
from megarl.train.inference.models import Models
from megarl.train.memory import PhaseMemory
from megarl.train.ranks import Ranks, Reporter, RunContext, Stopped
from megarl.train.sync.probe import SentDigests, SentWeights, probe_text, test_adapter
from megarl.train.sync.publication import Delivery
from megarl.train.sync.publish import WeightPublisher
from megarl.weights.reshard.adapters import MergedTensors, SeparateTensors
from megarl.weights.reshard.execute import NO_ROOM

T = TypeVar("T")
FIRST_S = 5.0
"""Seconds without an engine before the first log line about it."""
MEET_S = 30.0
"""Seconds between two collectives while ranks wait for engines."""
TRIES = 4
"""Attempts at one publication; each further attempt follows the death of an engine."""


class WeightSync:
    """The engines of a job, as seen by all its trainer ranks together.

    Args:
        delivery: Delivers weights to the engines.
        record: Stores a version with its number of training steps; on rank 0.
        links: ``delivery`` if it has links to engines, which may join, leave and die; None if weights are files.
        keeps_sent: Keep a copy of each version (``last_published.outlives_update``).
    """

    def __init__(
        self,
        context: RunContext,
        ranks: Ranks,
        reporter: Reporter,
        models: Models,
        delivery: Delivery,
        memory: PhaseMemory,
        record: Callable[[WeightsVersion, int], None],
        *,
        links: WeightPublisher | None = None,
        keeps_sent: bool = False,
    ) -> None:
        self.version = WeightsVersion(context.attempt, 0)
        """Version published last; 0 before the first."""
        self.step = 0
        """Number of training steps in it."""
        self._keeps_sent = keeps_sent
        self.sent: SentWeights | None = None
        """Copy of the weights sent last, or None."""
        self._given: SentWeights | None = None
        """Weights of the last version if they are not the actor's."""
        self._digests = SentDigests()
        self._context, self._ranks, self._reporter, self._record = context, ranks, reporter, record
        self._models, self._memory = models, memory
        self._delivery, self._links = delivery, links

    def connect(self) -> None:
        """Wait for the engines, and join them for weight syncs. Raises EngineError, WeightSyncError, Stopped."""
        self._again_if_one_dies(lambda: None, join=True)

    def publish(self, step: int, given: SentWeights | None = None) -> dict[str, float]:
        """Publish the actor's weights, with ``step`` training steps, to every wanted engine under a new, verified
        version; enter ``Phase.ROLLOUT`` and return sync metrics.

        Args:
            given: Other weights to publish instead, for an evaluation.

        Raises EngineError, WeightSyncError, Stopped.
        """
        self._memory.enter(Phase.SYNC)  # absent engines may be wanted from here on
        self._begin_version(step)
        links = self._links
        changed = links is not None and not self._ranks.agree(not links.engines_changed())
        # Requests of an earlier attempt at engines of other programs are made again, so abort them.
        abort = links is not None and links.come_and_go and self.version.n == 1
        self._given = given
        return self._again_if_one_dies(lambda: self.send_version(abort=abort, sent=given), join=changed)

    def publish_again(self, why: str | None, step: int) -> None:
        """Publish the last version to an engine that replaced another one.

        The other engines get their requests again, or continue them (``sync.pause=keep``).

        Args:
            why: Reason, on the rank that found it.
            step: Number of training steps in the actor's weights. If the last version is older and no copy was kept,
                they become a new version.
        """
        sent = self._given or (self.sent if step != self.step else None)
        if step != self.step and sent is None:
            self._begin_version(step)
        self._reporter.log(f"{why}; joining the engine that is new there")
        with self._memory.during(Phase.SYNC):
            self._again_if_one_dies(lambda: self.send_version(abort=not self._keeps, sent=sent), join=True)
        self._reporter.log(f"published {self.version} again; the rollout goes on")

    def _begin_version(self, step: int) -> None:
        """Start a version for the actor's weights, and store it before an engine samples with them."""
        self.version, self.step = WeightsVersion(self._context.attempt, self.version.n + 1), step
        if self._context.rank == 0:
            self._record(self.version, step)

    @contextmanager
    def quieting(self) -> Iterator[Callable[[], bool]]:
        """Make the engines end their requests and start none, in a thread of rank 0; yield a function that returns True
        once they have.

        Leaving the context waits for the thread, which stops within seconds. A failed engine is left to the next
        publication.
        """
        links = self._links
        if links is None or self._context.rank or not self.version.n:
            yield lambda: True
            return
        given_up = threading.Event()
        with ThreadPoolExecutor(1, thread_name_prefix="pause") as pool:
            ended = pool.submit(links.drain, given_up.is_set)
            try:
                yield ended.done
            finally:
                given_up.set()

    def send_version(self, *, abort: bool = False, sent: SentWeights | None = None) -> dict[str, float]:
        """Send the actor's weights as ``version`` to the joined engines, verify and probe them; return metrics.

        Args:
            abort: Abort requests in flight instead of waiting for them.
            sent: Weights to send instead of the actor's: a copy of an earlier send of this version.
        """
        actor = self._models.actor.model
        self._memory.enter(Phase.SYNC)
        self._wake("weights")
        self._try_adapter(actor)
        tensors, written = (self._delivered(actor), actor.written()) if sent is None else (sent.tensors, sent.written)
        self._together(lambda: self._digests.check(self.version, written))
        # An engine that continues requests in flight is probed before they go on.
        first = self._probe() if self._keeps else None
        report = self._together(
            lambda: self._delivery.publish(tensors, self.version, written=written, abort=abort, probe=first)
        )
        text = first or (self._probe() if sent is None else sent.probe)
        if sent is None and self._keeps_sent:
            self.sent = None  # never two copies
            self.sent = SentWeights.copy_of(tensors, written, text)
        self._memory.enter(Phase.ROLLOUT)  # the KV cache has the memory that the actor leaves
        self._wake("kv_cache")
        proven = self._keeps and not text.far
        difference = None if proven else self._together(lambda: self._delivery.probe(text))
        return report.metrics() | ({} if difference is None else {"sync/probe_diff_max": difference})

    def _try_adapter(self, actor: Model) -> None:
        """Send a test adapter to engines that have not passed one."""
        links = self._links
        if actor.adapters is None or links is None or self._ranks.agree(not links.untried()):
            return
        head, config = self._models.head, self._context.config
        tested = self._together(lambda: test_adapter(config, head, actor, self._delivered))
        version = WeightsVersion(self._context.attempt, 0)
        tensors, written, text = tested.tensors, tested.written, tested.probe
        self._together(lambda: links.try_adapter(tensors, version, written=written, probe=text))

    def _delivered(self, actor: Model) -> Mapping[str, torch.Tensor]:
        """Return the actor's tensors in their form for delivery."""
        if actor.adapters is None:
            return actor.tensors
        model = actor.adapters.adapted(actor.all_tensors)
        return MergedTensors(model) if self._context.config.sync.adapter == "merged" else SeparateTensors(model)

    def _wake(self, what: Literal["weights", "kv_cache"]) -> None:
        if (engines := self._memory.engines) is not None:
            self._together(lambda: engines.wake(what))

    def _probe(self) -> ProbeText:
        models = self._models
        # Requests that go on keep blocks in use, and leave no time for a text of its own.
        first, actor = self.version.n == 1, models.actor.model
        return probe_text(self._context.config, models.head, actor, far=first, repeated=not self._keeps)

    @property
    def _keeps(self) -> bool:
        """True if requests in flight continue with new weights."""
        return self._context.config.sync.pause == "keep"

    def _again_if_one_dies(self, do: Callable[[], T], *, join: bool) -> T:
        """Call ``do``. If an engine dies during the call, join its replacement and call again; if a bucket did not fit
        into memory, call again with buckets of half the size.

        An error with all engines alive is raised immediately, above all differing weights. After a request to stop no
        engine is replaced: any failure except differing weights raises ``Stopped``.
        """
        left, links = TRIES, self._links
        while True:
            try:
                if join:
                    self._await_engines()
                    self._together(self._delivery.connect)
                return do()
            except (EngineError, WeightSyncError) as error:
                differ = not self._ranks.agree(not isinstance(error, WeightsDiffer))
                if not differ and self._ranks.stop_requested():
                    raise Stopped(str(error)) from error
                if links is None:
                    raise
                join = True
                if not differ and self._smaller_buckets(links, error):
                    continue
                left -= 1
                found = [] if differ else links.died()
                if self._ranks.agree(not found):  # only rank 0 finds dead engines
                    raise
                if not left:
                    died = "".join(f"; {fate}" for fate in found)
                    raise WeightSyncError(f"{error} (tried {TRIES} times, an engine died each time{died})") from error
                self._reporter.log(
                    f"an engine died in a weight sync ({'; '.join(found)}); waiting for the one that replaces it"
                )

    def _await_engines(self) -> None:
        """Wait until an explore program's engine is present: at the start of an attempt for
        ``rollout.start_timeout_s``, later without limit. Do nothing for a job with its own engines or without links.

        Raises EngineError, Stopped.
        """
        links = self._links
        if links is None or not links.come_and_go:
            return
        config, began, said = self._context.config, time.monotonic(), 0
        limit_s = config.rollout.start_timeout_s if not self.version.n else math.inf
        while True:
            wait_s = min(MEET_S, config.cluster.stall_s / 3)
            there = self._context.rank != 0 or links.await_any(wait_s if said else FIRST_S)
            if self._ranks.agree(there):
                return
            if self._ranks.stop_requested():
                raise Stopped("no explore program has an engine")
            if not self._ranks.agree(time.monotonic() - began < limit_s):
                raise EngineError(
                    f"no explore program has an engine after rollout.start_timeout_s={limit_s:g}; start "
                    "`megarl explore` with the overrides of this run"
                )
            self._reporter.log(f"waiting for engines of `megarl explore` ({time.monotonic() - began:.0f} s so far)")
            said += 1

    def lost(self) -> str | None:
        """Return ``WeightPublisher.lost`` on rank 0; None on other ranks, and without links."""
        return self._links.lost() if self._links is not None and self._context.rank == 0 else None

    def _smaller_buckets(self, links: WeightPublisher, error: EngineError | WeightSyncError) -> bool:
        """Halve the buckets on every rank if a process lacked memory for one; return True if they were halved."""
        if self._ranks.agree(NO_ROOM not in str(error)) or (halved := links.halve_buckets()) is None:
            return False
        self._reporter.log(
            f"WARNING: out of memory in a weight sync; trying again with sync.bucket_bytes {halved[0]} -> {halved[1]} "
            f"until this attempt ends ({error})"
        )
        return True

    def _together(self, do: Callable[[], T]) -> T:
        """Call ``do``; raise on every rank if it failed on one."""
        failure: EngineError | WeightSyncError | None = None
        try:
            result = do()
        except (EngineError, WeightSyncError) as error:
            failure = error
        try:
            if self._ranks.agree(failure is None):
                return result
            raise failure or WeightSyncError("a weight sync failed on another trainer rank, whose log says why")
        finally:
            failure = None  # its traceback holds this frame
