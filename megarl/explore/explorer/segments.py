"""Responses of a trajectory in segments: each is stored before the next begins; repetition at the end ends a response.

Such a response is ended before its limit.

Source: Kimi k1.5 (arXiv:2501.12599, section 2.6.2), which ends repeated sequences early.

After a death the next claim of the group resumes there: the workflow runs again and gets recorded segments immediately.
A resampled segment has the same tokens, because its start determines its seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np

from megarl.buffer.order.pacing import Pacing
from megarl.buffer.store import Claim
from megarl.config import Config
from megarl.core.schema import Segment, WeightsSpan, WeightsVersion, digest_of, file_digest
from megarl.engines.client.frames import Completion, VersionSpan
from megarl.engines.client.gather import SampleRequest
from megarl.explore.explorer.iterations import Budget, GroupPace
from megarl.explore.recording.model import Sampler, TokenLimits

LONGEST_PERIOD = 256
"""Longest repeated sequence that is detected, in tokens."""


def repeats_at_end(token_ids: np.ndarray, times: int) -> bool:
    """Return True if the last tokens are one sequence ``times`` times in a row.

    Args:
        token_ids: int [T].
        times: 2 or more.
    """
    longest = min(len(token_ids) // times, LONGEST_PERIOD)
    if not longest:
        return False
    # A period is a distance to an earlier occurrence of the last token.
    candidates = np.flatnonzero(token_ids[-1 - longest : -1][::-1] == token_ids[-1]) + 1
    return any(_has_period(token_ids[-period * times :], period) for period in candidates.tolist())


def _has_period(token_ids: np.ndarray, period: int) -> bool:
    return np.array_equal(token_ids[period:], token_ids[:-period])


Record = Callable[[tuple[Claim, Segment]], Awaitable[bool]]
"""``Store.segments.append`` of one segment, in a separate thread."""
Forget = Callable[[Claim, int, int], Awaitable[None]]
"""``Store.segments.forget``, in a separate thread."""


@dataclass(frozen=True)
class SegmentSettings:
    """Lengths of segments, and the budget of partial rollouts."""

    tokens: int | None = None
    """Most tokens of a segment (``rollout.segment_tokens``); None for whole responses, which are not recorded."""
    max_repeats: int | None = None
    """Repetitions that end a response (``rollout.max_repeats``); None for none."""
    budget: Budget | None = None
    """Budget of partial rollouts; None for none."""
    pacing: Pacing = Pacing()
    """Schedule of weight publications."""

    @classmethod
    def of(cls, config: Config) -> SegmentSettings:
        rollout = config.rollout
        return cls(rollout.segment_tokens, rollout.max_repeats, Budget.of(rollout), Pacing.of(config.sync))


WHOLE_RESPONSES = SegmentSettings()


class SegmentSampler:
    """Samples the responses of one trajectory.

    Args:
        record: Records a segment; None to record none.
        pace: Limit of a partial rollout; None for none.
        recorded: Segments of the trajectory from earlier claims, in order.
        forget: Deletes a trajectory's recorded responses from a number on, whose context differs.
        counts: ``resumed_tokens``: reused recorded tokens; ``replay_diverged``: discarded ones, because the workflow's
            context differs.
    """

    def __init__(
        self,
        sampler: Sampler,
        claim: Claim,
        index: int,
        limits: TokenLimits,
        settings: SegmentSettings,
        record: Record | None,
        pace: GroupPace | None,
        counts: Counter[str] | dict[str, int],
        recorded: Sequence[Segment] = (),
        forget: Forget | None = None,
    ) -> None:
        self._sampler, self._record, self._forget, self._pace = sampler, record, forget, pace
        self._claim, self._index, self._limits, self._settings, self._counts = claim, index, limits, settings, counts
        self._recorded = list(recorded)
        self._is_ours = True

    async def sample(self, request: SampleRequest) -> Completion:
        """Return the whole response. Raises as ``Gatherer.sample``."""
        with nullcontext() if self._pace is None else self._pace.sampling(self._index):
            return await self._sample(request)

    async def _sample(self, request: SampleRequest) -> Completion:
        most, size = min(request.max_tokens or self._limits.response, self._limits.response), self._settings.tokens
        segments, context = await self._replayed(request), ""
        while not segments or segments[-1].finish_reason is None:
            start = sum(len(segment.token_ids) for segment in segments)
            left = min(most - start, self._room(request, segments) - start)
            if segments and left < 1:  # limits were lowered since the recording
                segments[-1] = replace(segments[-1], finish_reason="length")
                break
            if self._pace is not None:
                await self._pace.begin(self._index)
            asked = left if size is None else min(left, size - start % size)
            whole = asked == left and not segments
            completion = await self._sampler.sample(request if whole else _continued(request, segments, asked))
            if whole and self._record is None:
                return completion
            context = context or _context(request)
            segment = self._segment(completion, request, start, context, goes_on=asked < left)
            if segment.finish_reason in (None, "length") and self._repeats([*segments, segment]):
                segment = replace(segment, finish_reason="repetition")
            segments.append(segment)
            if self._pace is not None:
                self._pace.spend(self._index, len(segment.token_ids))
            if self._record is not None and self._is_ours:
                self._is_ours = await self._record((self._claim, segment))
        return _joined(segments)

    def _room(self, request: SampleRequest, segments: Sequence[Segment]) -> int:
        """Return the number of tokens that may follow the context."""
        expanded = segments[0].prompt_ids if segments else None
        return self._limits.trajectory - len(request.token_ids if expanded is None else expanded)

    async def _replayed(self, request: SampleRequest) -> list[Segment]:
        """Return the response's recorded segments; if their context differs, delete them and all later ones."""
        found = [segment for segment in self._recorded if segment.turn == request.turn]
        if not found:
            return []
        starts = np.cumsum([0, *(len(segment.token_ids) for segment in found)])[:-1]
        context = _context(request)
        if any(s.context != context or s.start != start for s, start in zip(found, starts, strict=True)):
            self._counts["replay_diverged"] += sum(len(s.token_ids) for s in self._recorded if s.turn >= request.turn)
            self._recorded = [segment for segment in self._recorded if segment.turn < request.turn]
            if self._forget is not None:
                await self._forget(self._claim, self._index, request.turn)
            return []
        self._counts["resumed_tokens"] += sum(len(segment.token_ids) for segment in found)
        return found

    def _segment(
        self, completion: Completion, request: SampleRequest, start: int, context: str, *, goes_on: bool
    ) -> Segment:
        tokens = len(completion.token_ids)
        spans = completion.versions or (VersionSpan("default", 0, tokens),)
        # Fewer tokens than requested: the engine's context is full.
        unfinished = goes_on and completion.finish_reason == "length"
        return Segment(
            self._index,
            request.turn,
            start,
            context,
            completion.token_ids,
            completion.logprobs,
            tuple(WeightsSpan(span.start, span.end, self._version(span.version)) for span in spans),
            None if unfinished else completion.finish_reason,
            completion.prompt_ids if start == 0 else None,
            completion.routing,
            completion.computed,
        )

    def _repeats(self, segments: Sequence[Segment]) -> bool:
        tokens = [segment.token_ids for segment in segments]
        times = self._settings.max_repeats
        return times is not None and repeats_at_end(np.concatenate(tokens), times)

    def _version(self, name: str) -> WeightsVersion:
        return self._claim.version if name == "default" else WeightsVersion.parse(name)


def _context(request: SampleRequest) -> str:
    """Return the digest of a response's context, with its images, since images of equal size have equal tokens."""
    return digest_of(request.token_ids, [file_digest(image) for image in request.images])


def _continued(request: SampleRequest, segments: Sequence[Segment], max_tokens: int) -> SampleRequest:
    """Return the request for the tokens after ``segments``."""
    token_ids = np.concatenate([request.token_ids, *(segment.token_ids for segment in segments)])
    start, routed = len(token_ids) - len(request.token_ids), len(token_ids) - 1
    version = segments[-1].spans[-1].version if start else None
    return replace(
        request,
        token_ids=token_ids,
        start=start,
        max_tokens=max_tokens,
        routed=routed if start else request.routed,
        oldest=version if version is not None and version.attempt else None,  # the model's files have no attempt
    )


def _joined(segments: Sequence[Segment]) -> Completion:
    """Join segments into one response."""
    reason = segments[-1].finish_reason
    assert reason is not None
    spans: list[VersionSpan] = []
    for segment in segments:
        for span in segment.spans:
            start, end, version = segment.start + span.start, segment.start + span.end, str(span.version)
            if spans and spans[-1].version == version:
                start = spans.pop().start
            spans.append(VersionSpan(version, start, end))
    return Completion(
        request=0,
        index=0,
        token_ids=np.concatenate([segment.token_ids for segment in segments]),
        logprobs=np.concatenate([segment.logp for segment in segments]),
        finish_reason=reason,
        versions=tuple(spans),
        prompt_ids=segments[0].prompt_ids,
        routing=np.concatenate(routing)
        if (routing := [s.routing for s in segments if s.routing is not None])
        else None,
        computed=segments[-1].computed,
    )
