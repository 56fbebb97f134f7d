"""The services of a job that samples, and waiting for a rollout on all ranks together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from megarl.buffer.store import Store
from megarl.core.processes import heartbeat
from megarl.engines.client.names import KEY_VARIABLE
from megarl.learn import algorithms
from megarl.rewards.pool.tally import EVENT
from megarl.train.loop.checkpoints import Checkpointer
from megarl.train.loop.rank import TrainerRank
from megarl.train.part import Services
from megarl.train.ranks import Ranks, Reporter, RunContext, Stopped
from megarl.train.rollout.evaluation import Evaluates, Evaluation, EvaluationMeanwhile
from megarl.train.rollout.evaluation_check import EvaluationCheck
from megarl.train.rollout.group_part import Awaited
from megarl.train.rollout.reading import NodeReader, RolloutReader
from megarl.train.rollout.rollouts import Rollouts
from megarl.train.sync.connection import EngineConnection
from megarl.train.sync.look import EngineLook
from megarl.train.sync.probe import outlives_update
from megarl.train.sync.publication import FilePublisher
from megarl.train.sync.publish import WeightPublisher
from megarl.train.sync.weights import WeightSync

MEET_S = 30.0
"""Seconds between two collectives while ranks wait. A rollout may take longer than the timeout of a collective."""
EVENTS_S = 1.0
"""Seconds between two reads of the explorer's events from the store."""
AWAITING_S = 5.0
"""Seconds between two counts of the responses that await a reward."""
LATE_REWARDS = "late rewards"
"""Heartbeat phase of a rollout that waits only for rewards given by people."""
SHARE = 4
"""Polling interval as a multiple of the seconds that one poll takes."""
SETTLE_S = 1.0
"""Seconds between two collectives while a checkpoint is being written; it counts once ranks have met."""


class EventLines:
    """Log lines about failing rewards. The explorer puts them in the store, because its log is not on the terminal."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen = max((event["number"] for event in store.journal.events(EVENT)), default=0)
        self._looked_at = time.monotonic()

    def lines(self) -> list[str]:
        """Return new lines; reads the store every EVENTS_S at most."""
        if time.monotonic() - self._looked_at < EVENTS_S:
            return []
        self._looked_at = time.monotonic()
        found = self._store.journal.events(EVENT, self._seen)
        self._seen = max([self._seen, *(event["number"] for event in found)])
        return [event["data"]["line"] for event in found]


class LateRewardLines:
    """Count of responses that lack only a reward from a person, and the log lines about them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._looked_at = time.monotonic()
        self._logged = 0
        self._fix = (
            ": write them with `megarl data awaiting FILE.jsonl`, give their rewards with `megarl data reward "
            "FILE.jsonl`"
        )
        """End of the first line; later lines omit it."""
        self.num_awaiting = 0

    def line(self) -> str | None:
        """Return a line if the count has changed, else None; counts every AWAITING_S at most."""
        if time.monotonic() - self._looked_at < AWAITING_S:
            return None
        self._looked_at, self.num_awaiting = time.monotonic(), self._store.late.count()
        if not self.num_awaiting or self.num_awaiting == self._logged:
            return None
        self._logged = self.num_awaiting
        fix, self._fix = self._fix, ""
        return f"the job waits for the rewards of {self.num_awaiting} responses{fix}"


class Repair(Protocol):
    """A repair to make while ranks wait. Every rank makes the same calls, except ``is_due``."""

    def is_due(self) -> bool:
        """True if ranks must meet early for this repair; called on rank 0, several times a second."""

    def make_good(self, weights_step: int) -> None:
        """Make the repair. ``weights_step``: steps of training in the actor's weights."""


class WrittenCheckpoints:
    """Lets a checkpoint count as soon as it has been written in the background."""

    def __init__(self, checkpoints: Checkpointer) -> None:
        self._checkpoints = checkpoints
        self._met = time.monotonic()

    def is_due(self) -> bool:
        return self._checkpoints.settling and time.monotonic() - self._met > SETTLE_S

    def make_good(self, weights_step: int) -> None:
        self._met = time.monotonic()
        self._checkpoints.settle()


class ReplacedEngines:
    """Sends a replacement engine the weights that its predecessor had."""

    def __init__(self, weights: WeightSync, ranks: Ranks) -> None:
        self._weights, self._ranks = weights, ranks
        self._lost: str | None = None
        self._looked = time.monotonic()

    def is_due(self) -> bool:
        if time.monotonic() - self._looked > EVENTS_S:
            self._lost, self._looked = self._weights.lost(), time.monotonic()
        return self._lost is not None

    def make_good(self, weights_step: int) -> None:
        if not self._ranks.agree(self._lost is None):
            self._weights.publish_again(self._lost, weights_step)
            self._lost = None


class RolloutWaiter:
    """Waits for the explorers' groups, shows progress, and runs ``repairs`` while waiting."""

    def __init__(
        self, context: RunContext, store: Store, ranks: Ranks, reporter: Reporter, repairs: Sequence[Repair] = ()
    ) -> None:
        self._context = context
        self._store = store
        self._ranks = ranks
        self._reporter = reporter
        self._repairs = repairs
        self._event_lines = EventLines(store) if context.rank == 0 else None
        self._late = LateRewardLines(store)

    def wait(self, look: Callable[[], Awaited], label: str, *, weights_step: int) -> None:
        """Wait on every rank until the rollout is complete, with a progress bar.

        Args:
            look: Returns the rollout's progress; called on rank 0.
            weights_step: Steps of training in the actor's weights.

        Raises Stopped.
        """
        with self._reporter.progress(None, label, "group") as bar:
            while not self._ranks.agree(self._context.rank != 0 or self._follow(look, bar)):
                if self._ranks.stop_requested():
                    raise Stopped
                for repair in self._repairs:
                    repair.make_good(weights_step)

    def _follow(self, look: Callable[[], Awaited], bar: Any) -> bool:
        """Show progress until ranks meet; return True when the rollout is complete.

        Returns False early when the job is asked to stop or a repair is due.
        """
        config = self._context.config
        until = time.monotonic() + min(MEET_S, config.cluster.stall_s / 3)
        while True:
            heartbeat.beat()  # the explorer has a separate heartbeat
            looked_at = time.monotonic()
            done, bar.total, complete = look()
            bar.update(done - bar.n)
            for line in self._event_lines.lines() if self._event_lines else ():
                self._reporter.log(line)
            due = any([repair.is_due() for repair in self._repairs])
            if complete or self._ranks.stopping or due or time.monotonic() > until:
                return complete
            if (late := self._late.line()) is not None:
                self._reporter.log(late)
            # The watchdog ends a rollout without progress, but rewards from people may take longer.
            with heartbeat.phase(LATE_REWARDS) if self._late.num_awaiting else nullcontext():
                # Counting many groups loads the database; leave most of its time to the writers.
                time.sleep(max(config.store.poll_s, SHARE * (time.monotonic() - looked_at)))


def services_of(rank: TrainerRank) -> Services:
    """Make the services for a rank's models. No engine is joined yet."""
    config = rank.config
    place = (rank.context, rank.store, rank.ranks, rank.reporter)
    layout = (config, rank.models.actor.model.layout, rank.models.hf_config, rank.context.rank)
    together = config.rollout.is_colocated
    links: WeightPublisher | None = None
    if config.sync.method == "direct":
        look = EngineLook(
            rank.store,
            os.environ.get(KEY_VARIABLE, ""),
            own=algorithms.job_of(config).is_alone,
            together=together,
            begun=lambda: weights.version.n > 0,
            silence_s=config.cluster.heartbeat_s,
        )
        connection = EngineConnection(*layout, look=look, stopping=lambda: rank.ranks.stopping)
        links = WeightPublisher(connection, rank.store.engines)
    weights = WeightSync(
        rank.context,
        rank.ranks,
        rank.reporter,
        rank.models,
        links or FilePublisher(*layout),
        rank.memory,
        rank.store.pacing.record_version,
        links=links,
        keeps_sent=outlives_update(config.sync) and not together,
    )
    repairs = (WrittenCheckpoints(rank.checkpoints), ReplacedEngines(weights, rank.ranks))
    wait = RolloutWaiter(*place, repairs).wait
    node = NodeReader(rank.timeout_s + config.store.outage_s)
    reader = RolloutReader(node, rank.store, lambda: rank.ranks.stopping, whole=bool(config.buffer.operators))
    rank.learner.with_arrays = reader.with_arrays
    check = EvaluationCheck(config, rank.store, rank.models, rank.memory, node)
    in_front = Evaluation(rank.context, rank.store, rank.reporter, wait, check)
    evaluation: Evaluates = in_front
    if config.trainer.eval_engines:
        evaluation = EvaluationMeanwhile(*place, in_front, wait)
    return Services(
        config=config,
        algorithm=rank.algorithm,
        context=rank.context,
        store=rank.store,
        ranks=rank.ranks,
        reporter=rank.reporter,
        models=rank.models,
        memory=rank.memory,
        reader=reader,
        links=links,
        weights=weights,
        rollouts=Rollouts(
            rank.context, rank.algorithm, rank.store, rank.reporter, reader, wait, rank.models.head.vocab_size
        ),
        evaluation=evaluation,
        wait=wait,
        newest=rank.checkpoints.newest,
        export=rank.export,
    )
