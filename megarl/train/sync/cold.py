"""Comparison of an engine that has taken updates with one that begins with the same weights (``sync.cold_interval``).

Digests compare what is stored, the probe compares an engine with the trainer within a tolerance. This one compares two
engines: whatever an update leaves behind (an old packed copy, a captured graph, a cache) makes them differ.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from megarl.core import heartbeat
from megarl.core.config.lengths import context_tokens
from megarl.core.errors import EngineError, WeightsDiffer, WeightSyncError
from megarl.core.phases import Phase
from megarl.engine.client.auth import KEY_VARIABLE
from megarl.engine.client.control import EngineControl
from megarl.engine.client.names import COLD_FOLDER, COLD_MARK
from megarl.engine.client.probe import Probed, ProbeText, mean_share
from megarl.explore.store import EngineStatus, RegisteredEngine, Store
from megarl.train.rank.context import RunContext
from megarl.train.rank.ranks import Ranks
from megarl.train.sync.probe import probe_text
from megarl.train.update.models import Models
from megarl.train.update.turns import Turns

DECODED = 64
"""Most tokens that are sampled after the probe text."""


class ColdCheck:
    """Every rank makes the same calls; rank 0 speaks with the engine and the supervisor.

    Args:
        export: Writes the actor as an HF checkpoint into a folder, with all ranks.
    """

    def __init__(
        self,
        context: RunContext,
        store: Store,
        ranks: Ranks,
        models: Models,
        turns: Turns,
        export: Callable[[Path], None],
    ) -> None:
        self._context, self._store, self._ranks = context, store, ranks
        self._models, self._turns, self._export = models, turns, export
        self._key = os.environ.get(KEY_VARIABLE, "")
        self._last = 0
        """Step of the last check."""

    def check(self, step: int, publish_again: Callable[[str, int], None]) -> dict[str, float]:
        """Where ``sync.cold_interval`` is due, ask an engine for log-probs, start it with the weights' files, ask it
        again, and publish to it; return metrics.

        Raises:
            WeightsDiffer: on rank 0, when the two differ: on CPUs in a bit, on GPUs on average by more than
                ``sync.probe_tolerance``. Other ranks raise WeightSyncError.
            EngineError: on rank 0, when the engine does not come back.
        """
        start, config = time.monotonic(), self._context.config
        if config.sync.cold_interval is None or step % config.sync.cold_interval or step in (0, self._last):
            return {}
        self._last, folder = step, self._context.run_dir / COLD_FOLDER
        failure: EngineError | WeightSyncError | None = None
        with heartbeat.timeout(config.rollout.start_timeout_s):
            self._turns.enter(Phase.SYNC)
            text = probe_text(config, self._models)
            self._export(folder)
            try:
                if self._context.rank == 0:
                    self._compare(text, folder)
            except (EngineError, WeightSyncError) as error:
                failure = error
            if not self._ranks.agree(failure is None):
                raise failure or WeightSyncError("an engine that began with the weights differs; rank 0's log says how")
        publish_again("an engine was started with the weights' files, and computes the same", step)
        return {"sync/cold_seconds": time.monotonic() - start}

    def _compare(self, text: ProbeText, folder: Path) -> None:
        config = self._context.config
        decode = max(0, min(DECODED, context_tokens(config.rollout) - len(text.token_ids) - 2))
        engine = next(e for e in self._store.own_engines() if e.state is EngineStatus.SERVING)
        control = EngineControl(engine.url, self._key, config.sync.timeout_s, proving=True)
        warm = control.probe(text.token_ids, decode=decode)
        self._start_again(engine, control, folder)
        cold = control.probe(text.token_ids, decode=decode)
        compare(warm, cold, engine.url, None if config.parallel.backend == "gloo" else text.tolerance)

    def _start_again(self, engine: RegisteredEngine, control: EngineControl, folder: Path) -> None:
        mark = folder / COLD_MARK
        mark.touch()
        try:
            self._order(engine, EngineStatus.ABSENT)
            self._order(engine, EngineStatus.SERVING)
            control.wait_ready(self._context.config.rollout.start_timeout_s, stopping=lambda: self._ranks.stopping)
        finally:
            mark.unlink()

    def _order(self, engine: RegisteredEngine, wanted: EngineStatus) -> None:
        """Order a state, and wait until the supervisor has carried that out. Raises EngineError."""
        order, config = self._store.order_engine(engine.number, wanted), self._context.config
        until = time.monotonic() + config.rollout.start_timeout_s
        while next(e for e in self._store.own_engines() if e.number == engine.number).done < order:
            if time.monotonic() > until or self._ranks.stopping:
                raise EngineError(
                    f"engine {engine.number} was ordered to be {wanted} for sync.cold_interval and is not; the "
                    "supervisor carries out such orders"
                )
            heartbeat.beat()
            time.sleep(config.store.poll_s)


def compare(warm: Probed, cold: Probed, url: str, tolerance: float | None) -> None:
    """Compare the log-probs of the engine that took updates with those of the one that began with the weights.

    Args:
        tolerance: Largest mean difference, in multiples of max(1, |log-prob|); None asks for equal bits.

    Raises WeightsDiffer naming the first kind of log-prob that differs.
    """
    for what, one, other in zip(Probed._fields, warm, cold, strict=True):
        far = mean_share(one, other)
        if list(one) == list(other) or (tolerance is not None and far <= tolerance):
            continue
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), 0)
        raise WeightsDiffer(
            f"the engine at {url}, which took the weights by updates, differs from one that began with them: log-probs "
            f"of {what} are {far:.2e} apart on average, first at token {at + 1} ({one[at]!r} and {other[at]!r}); an "
            "update leaves something behind that digests do not see (docs/weight_sync.md, Proof)"
        )
