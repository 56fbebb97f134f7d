"""Acceptance of drafts by the model (``rollout.speculative``)."""

from __future__ import annotations

import logging

from megarl.core.errors import EngineError
from megarl.engines.client.control import Drafts, EngineControl
from megarl.train.part import Part, StepData
from megarl.train.ranks import RunContext, TrainState
from megarl.train.sync.publish import WeightPublisher

log = logging.getLogger(__name__)


class DraftAcceptance(Part):
    """Adds ``rollout/draft_acceptance``: the accepted share of the tokens that engines drafted since the last step.

    An engine that does not answer is left out. No metric without drafts, or with ``sync.method=checkpoint``.
    """

    def __init__(self, context: RunContext, links: WeightPublisher | None) -> None:
        self._links = links if context.rank == 0 else None
        self._before: dict[str, Drafts] = {}
        """URL -> counts at the last step."""

    def before_batch(self, state: TrainState, data: StepData) -> None:
        if self._links is None:
            return
        new = self._links.connection.fleet.each(self._new)
        drafted, accepted = sum(d.drafted for d in new), sum(d.accepted for d in new)
        if drafted:
            data.metrics["rollout/draft_acceptance"] = accepted / drafted

    def _new(self, number: int, engine: EngineControl) -> Drafts:
        """Return an engine's counts since the last step; a restarted engine begins at 0."""
        try:
            now = engine.drafts()
        except EngineError as error:
            log.warning("rollout/draft_acceptance leaves an engine out: %s", error)
            return Drafts()
        before = self._before.get(engine.url, Drafts())
        self._before[engine.url] = now
        if now.drafted < before.drafted:
            before = Drafts()
        return Drafts(now.drafted - before.drafted, now.accepted - before.accepted)
