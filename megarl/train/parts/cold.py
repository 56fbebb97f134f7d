"""Comparison of an engine that received updates with an engine started with the same weights (``sync.cold_interval``).

Digests compare stored weights; the probe compares an engine with the trainer within a tolerance. This check compares
two engines: whatever an update leaves behind (an old packed copy, a captured graph, a cache) makes them differ.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from megarl.buffer.store import Store
from megarl.core.errors import EngineError, WeightsDiffer, WeightSyncError
from megarl.core.processes import heartbeat
from megarl.core.schema import WeightsVersion
from megarl.engines.client.control import EngineControl
from megarl.engines.client.names import COLD_FOLDER, KEY_VARIABLE, cold_mark
from megarl.engines.client.probe import Probed, ProbeText, mean_share
from megarl.engines.fleet import EngineRow, EngineStatus, EngineTurn
from megarl.learn.memory.phases import Phase
from megarl.train.inference.models import Models
from megarl.train.memory import PhaseMemory
from megarl.train.part import Metrics, Part
from megarl.train.ranks import Ranks, Reporter, RunContext, TrainState
from megarl.train.sync.probe import probe_text
from megarl.train.sync.weights import WeightSync

DECODED = 64
"""Maximum number of tokens sampled after the probe text."""
MEET_S = 5.0
"""Seconds between two collectives while ranks wait for the engine."""


class ColdCheck(Part):
    """Compares an engine every ``sync.cold_interval`` steps. Rank 0 calls the engine and the supervisor.

    Args:
        export: Writes the actor as an HF checkpoint into a folder; all ranks call it.
    """

    def __init__(
        self,
        context: RunContext,
        store: Store,
        ranks: Ranks,
        reporter: Reporter,
        models: Models,
        memory: PhaseMemory,
        weights: WeightSync,
        export: Callable[[Path], None],
    ) -> None:
        self._weights = weights
        self._context, self._store, self._ranks, self._reporter = context, store, ranks, reporter
        self._models, self._memory, self._export = models, memory, export
        self._key = os.environ.get(KEY_VARIABLE, "")
        self._folder = context.run_dir / COLD_FOLDER
        self._last = 0
        """Step of the last check."""
        if context.rank == 0:
            cold_mark(self._folder).unlink(missing_ok=True)  # left by a killed attempt

    def after_publish(self, state: TrainState) -> Metrics:
        """Every ``sync.cold_interval`` steps: get log-probs of an engine, restart it from weight files, get them again,
        then publish to the engine. Return metrics.

        An engine that does not restart, or a request to stop, ends the comparison only.

        Raises:
            WeightsDiffer: on rank 0, if the log-probs differ: on CPUs in any bit, on GPUs by more than
                ``sync.probe_tolerance`` on average. Other ranks raise WeightSyncError.
        """
        weights, step = self._weights, state.step
        start, interval = time.monotonic(), self._context.config.sync.cold_interval
        assert interval is not None, "the settings ask for this part"
        if step % interval or step in (0, self._last):
            return {}
        self._last = step
        self._memory.enter(Phase.SYNC)
        text = probe_text(self._context.config, self._models.head, self._models.actor.model, DECODED)
        self._export(self._folder)
        failure = self._await(self._compared(text, weights.version) if self._context.rank == 0 else iter(()))
        if not self._ranks.agree(not isinstance(failure, WeightsDiffer)):
            raise failure or WeightSyncError("an engine that began with the weights differs; rank 0's log says how")
        compared = self._ranks.agree(failure is None)
        if failure is not None:
            self._reporter.log(f"WARNING: no engine was compared with one that begins with the weights: {failure}")
        weights.publish_again(
            "an engine was started with the weights' files" + compared * ", and computes the same", step
        )
        if self._context.rank == 0:
            for file in self._folder.glob("*.safetensors"):  # config.json stays: the engine's settings name it
                file.unlink()
        self._memory.enter(Phase.ROLLOUT)
        return {"sync/cold_seconds": time.monotonic() - start} if compared else {}

    def _await(self, steps: Iterator[None]) -> EngineError | WeightSyncError | None:
        """Run rank 0's steps, with a collective every MEET_S for the other ranks; return rank 0's error, if any."""
        failure: EngineError | WeightSyncError | None = None
        done = False
        while not done:
            until = time.monotonic() + MEET_S
            try:
                while not done and time.monotonic() < until:
                    done = next(steps, self) is self
                    heartbeat.beat()
            except (EngineError, WeightSyncError) as error:
                failure, done = error, True
            done = self._ranks.agree(done)
        return failure

    def _compared(self, text: ProbeText, version: WeightsVersion) -> Iterator[None]:
        """Compare an engine; yield while waiting. Raises EngineError, WeightsDiffer."""
        config = self._context.config
        engine, control = self._engine(version)
        warm = control.probe(text.token_ids, decode=text.decode)
        mark = cold_mark(self._folder)
        mark.touch()
        turn = EngineTurn.AWAY
        try:
            for turn in (EngineTurn.AWAY, EngineTurn.HERE):
                yield from self._order(engine, turn)
            yield from self._until(lambda: self._has_come_back(engine), f"engine {engine.number} did not come back")
        finally:
            mark.unlink()
            if turn is EngineTurn.AWAY:
                self._store.engines.turn([engine.number], EngineTurn.HERE)
        cold = EngineControl(engine.url, self._key, config.sync.timeout_s, proving=True)
        again = cold.probe(text.token_ids, decode=text.decode)
        compare(warm, again, engine.url, None if config.parallel.backend == "gloo" else text.tolerance)

    def _engine(self, version: WeightsVersion) -> tuple[EngineRow, EngineControl]:
        """Find an engine that got the weights by updates. Raises EngineError."""
        for engine in self._store.engines.own():
            if engine.is_present and engine.has == version:
                return engine, EngineControl(engine.url, self._key, self._context.config.sync.timeout_s)
        raise EngineError(f"none serves with weights {version}")

    def _order(self, engine: EngineRow, turn: EngineTurn) -> Iterator[None]:
        """Order a turn and wait until the supervisor has carried it out. Raises EngineError."""
        order = self._store.engines.turn([engine.number], turn)[engine.number]
        yield from self._until(
            lambda: self._registered(engine).done_turn >= order,
            f"engine {engine.number} was ordered to be {turn} and is not",
        )

    def _has_come_back(self, engine: EngineRow) -> bool:
        now = self._registered(engine)
        return now.state is EngineStatus.SERVING and now.start > engine.start

    def _registered(self, engine: EngineRow) -> EngineRow:
        """Return the engine's newest row from the supervisor."""
        return next(found for found in self._store.engines.own() if found.number == engine.number)

    def _until(self, holds: Callable[[], bool], what: str) -> Iterator[None]:
        """Yield until ``holds()``. Raises EngineError after ``rollout.start_timeout_s``, or on a request to stop."""
        config = self._context.config
        until = time.monotonic() + config.rollout.start_timeout_s
        while not holds():
            if self._ranks.stopping:
                raise EngineError("the job is asked to stop")
            if time.monotonic() > until:
                raise EngineError(f"{what} within rollout.start_timeout_s={config.rollout.start_timeout_s:g}")
            yield
            time.sleep(config.store.poll_s)


def compare(warm: Probed, cold: Probed, url: str, tolerance: float | None) -> None:
    """Compare the log-probs of an updated engine with those of an engine started with the weights.

    Args:
        tolerance: Largest mean difference, in multiples of max(1, |log-prob|), over the tokens before the first one
            sampled differently; None requires equal bits.

    Raises WeightsDiffer, naming the first kind of log-prob that differs.
    """
    alike = next((i for i, (a, b) in enumerate(zip(warm.tokens, cold.tokens, strict=True)) if a != b), len(warm.tokens))
    for what in ("prefill", "decode", "again"):
        one, other = list(getattr(warm, what)), list(getattr(cold, what))
        if what != "prefill" and tolerance is not None:
            one, other = one[:alike], other[:alike]
        far = mean_share(one, other)
        if one == other or (tolerance is not None and far <= tolerance):
            continue
        at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        raise WeightsDiffer(
            f"the engine at {url}, which took the weights by updates, differs from one that began with them: log-probs "
            f"of {what} are {far:.2e} apart on average, first at token {at + 1} ({one[at]!r} and {other[at]!r}); an "
            "update leaves something behind that digests do not see (docs/weight_sync.md, Proof)"
        )
