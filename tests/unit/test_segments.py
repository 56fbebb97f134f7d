"""Segments of unfinished trajectories: what an explorer samples, records and takes up again; cuts by weights."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.buffer.order.pacing import Pacing
from megarl.buffer.store import Claim, Store
from megarl.buffer.store.codec import segment_from_row, segment_to_row
from megarl.core.schema import Segment, WeightsSpan, WeightsVersion, digest_of
from megarl.engines.client.frames import Completion, VersionSpan
from megarl.engines.client.gather import SampleRequest
from megarl.explore.explorer.iterations import Budget, GroupPace, Iterations, tokens_by_iteration
from megarl.explore.explorer.segments import LONGEST_PERIOD, Record, SegmentSampler, SegmentSettings, repeats_at_end
from megarl.explore.recording.model import TokenLimits
from tests.stores import VERSION, finish, make_segment, make_task, request

LIMITS = TokenLimits(response=20, trajectory=30)


def ask(turn: int = 0, prompt: Sequence[int] = (1, 2, 3), max_tokens: int | None = None) -> SampleRequest:
    return SampleRequest("g", 0, 2, np.array(prompt, np.int32), (), 5, turn=turn, max_tokens=max_tokens)


class Tokens:
    """A policy whose next token follows from the tokens before it and the seed of its request, as an engine's does at
    temperature 0 or with a seed; it ends with 0, or where it has no room."""

    def __init__(self, length: int, context: int = 30) -> None:
        self.length, self.context = length, context
        self.asked: list[SampleRequest] = []
        self.version = "0.3"

    async def sample(self, request: SampleRequest) -> Completion:
        self.asked.append(request)
        assert request.max_tokens is None or request.max_tokens > 0
        found: list[int] = []
        limit = min(request.max_tokens or LIMITS.response, LIMITS.response, self.context - len(request.token_ids))
        while len(found) < limit and request.start + len(found) < self.length:
            before = [*request.token_ids.tolist(), *found]
            found.append(1 + (sum(before) * 31 + len(before) + (request.seed or 0)) % 97)
        ended = request.start + len(found) == self.length
        tokens = np.array(found, np.int32)
        logp = -tokens.astype(np.float32)
        spans = (VersionSpan(self.version, 0, len(found)),)
        context = np.concatenate([request.token_ids, tokens])
        chosen = np.stack([context % 7, context % 5], 1)[request.routed : -1, None].astype(np.int8)
        return Completion(0, 0, tokens, logp, "stop" if ended else "length", spans, routing=chosen)


def sampler(
    tokens: Tokens,
    claim: Claim,
    size: int | None,
    kept: list[Segment] | None = None,
    recorded: Sequence[Segment] = (),
    counts: Counter[str] | None = None,
    pace: GroupPace | None = None,
) -> SegmentSampler:
    async def record(one: tuple[Claim, Segment]) -> bool:
        assert kept is not None
        kept.append(one[1])
        return True

    counts = Counter() if counts is None else counts
    return SegmentSampler(
        tokens, claim, 0, LIMITS, SegmentSettings(size), record if size else None, pace, counts, recorded
    )


def recording(kept: list[Segment]) -> Record:
    async def record(one: tuple[Claim, Segment]) -> bool:
        kept.append(one[1])
        return True

    return record


@pytest.fixture
def claim() -> Claim:
    return Claim("r0", "train", 0, VERSION, "r0/0", 0, 2, {}, make_task(0), "a", "token", 1)


@given(length=st.integers(1, 40), size=st.integers(1, 25), cut=st.integers(0, 30), most=st.integers(1, 25))
@settings(max_examples=100, deadline=None)
def test_a_response_that_is_taken_up_is_the_one_that_was_not_cut(length: int, size: int, cut: int, most: int) -> None:
    """Whatever segments of it are recorded, at whatever limit."""
    claim = Claim("r0", "train", 0, VERSION, "r0/0", 0, 2, {}, make_task(0), "a", "token", 1)
    kept: list[Segment] = []
    whole = asyncio.run(sampler(Tokens(length), claim, size, kept).sample(ask(max_tokens=most)))
    assert len(whole.token_ids) == min(length, most, 20, 27)
    assert [s.start for s in kept] == list(range(0, len(whole.token_ids), size))
    assert [s.finish_reason for s in kept[:-1]] == [None] * (len(kept) - 1) and kept[-1].finish_reason is not None
    tokens, counts = Tokens(length), Counter[str]()
    taken = sampler(tokens, claim, size, [], kept[:cut], counts)
    again = asyncio.run(taken.sample(ask(max_tokens=most)))
    assert again.token_ids.tolist() == whole.token_ids.tolist() and again.finish_reason == whole.finish_reason
    assert again.logprobs.tolist() == whole.logprobs.tolist() and again.versions == whole.versions
    assert len(tokens.asked) == len(kept) - min(cut, len(kept))
    assert counts["resumed_tokens"] == sum(len(s.token_ids) for s in kept[:cut])


def test_a_response_in_one_is_asked_for_as_it_is(claim: Claim) -> None:
    tokens, request = Tokens(9), ask()
    completion = asyncio.run(sampler(tokens, claim, None).sample(request))
    assert tokens.asked == [request] and completion.finish_reason == "stop"


@pytest.mark.parametrize(("version", "oldest"), [("1.4", WeightsVersion(1, 4)), ("0.3", None)])
def test_a_response_goes_on_with_no_older_weights(claim: Claim, version: str, oldest: WeightsVersion | None) -> None:
    """Engines take new weights one after another. Weights of the model's files are the same on all, and have no name
    there."""
    tokens = Tokens(9)
    tokens.version = version
    asyncio.run(sampler(tokens, claim, 4, []).sample(ask()))
    assert [request.oldest for request in tokens.asked] == [None, oldest, oldest]


class Looping(Tokens):
    """Says different tokens, and then the same few without end."""

    def __init__(self, before: int, period: int) -> None:
        super().__init__(100)
        self.before, self.period = before, period

    async def sample(self, request: SampleRequest) -> Completion:
        whole = await super().sample(request)
        places = range(request.start, request.start + len(whole.token_ids))
        ids = [50 + i if i < self.before else (i - self.before) % self.period for i in places]
        return replace(whole, token_ids=np.array(ids, np.int32))


def test_a_response_that_repeats_itself_ends_after_its_segment(claim: Claim) -> None:
    """Tokens 0 1 2 from 3 on: three times by token 12, which the segment up to 15 shows."""
    kept: list[Segment] = []
    tokens = Looping(3, 3)
    loop = SegmentSampler(tokens, claim, 0, LIMITS, SegmentSettings(5, 3), recording(kept), None, Counter[str]())
    found = asyncio.run(loop.sample(ask()))
    assert found.finish_reason == "repetition" and len(found.token_ids) == 15 and len(tokens.asked) == 3
    assert [s.finish_reason for s in kept] == [None, None, "repetition"]
    counts = Counter[str]()
    again = SegmentSampler(Tokens(1), claim, 0, LIMITS, SegmentSettings(5, 3), None, None, counts, kept)
    taken = asyncio.run(again.sample(ask()))
    assert taken.finish_reason == "repetition" and taken.token_ids.tolist() == found.token_ids.tolist()
    assert counts["resumed_tokens"] == 15


@pytest.mark.parametrize(
    ("times", "size", "reason", "length"),
    [
        (None, 5, "length", 20),
        (7, 5, "length", 20),
        (5, 5, "repetition", 20),  # shown only by the limit's own segment
        (2, 20, "repetition", 20),
    ],
)
def test_a_repetition_at_the_limit(claim: Claim, times: int | None, size: int, reason: str, length: int) -> None:
    loop = SegmentSampler(
        Looping(3, 3), claim, 0, LIMITS, SegmentSettings(size, times), recording([]), None, Counter[str]()
    )
    found = asyncio.run(loop.sample(ask()))
    assert (found.finish_reason, len(found.token_ids)) == (reason, length)


def test_a_response_that_stops_by_itself_has_not_been_stopped(claim: Claim) -> None:
    tokens = Looping(0, 1)
    tokens.length = 9
    loop = SegmentSampler(tokens, claim, 0, LIMITS, SegmentSettings(9, 2), recording([]), None, Counter[str]())
    assert asyncio.run(loop.sample(ask())).finish_reason == "stop"


@given(ids=st.lists(st.integers(0, 2), max_size=40), times=st.integers(2, 5))
@settings(max_examples=300, deadline=None)
def test_repetition_is_found_as_it_is_defined(ids: list[int], times: int) -> None:
    ends = any(len(ids) >= p * times and ids[-p * times :] == ids[-p:] * times for p in range(1, len(ids) + 1))
    assert repeats_at_end(np.array(ids, np.int32), times) == ends


def test_the_longest_period_that_is_found() -> None:
    longest = np.tile(np.arange(LONGEST_PERIOD, dtype=np.int32), 2)
    assert repeats_at_end(longest, 2) and not repeats_at_end(longest, 3)
    assert not repeats_at_end(np.tile(np.arange(LONGEST_PERIOD + 1, dtype=np.int32), 2), 2)


def test_segments_have_seeds_by_where_they_start(claim: Claim) -> None:
    tokens = Tokens(12)
    asyncio.run(sampler(tokens, claim, 4, []).sample(ask()))
    assert [r.start for r in tokens.asked] == [0, 4, 8] and tokens.asked[0].seed == 5
    assert len({r.seed for r in tokens.asked}) == 3
    assert [len(r.token_ids) for r in tokens.asked] == [3, 7, 11]


def test_what_follows_another_context_is_sampled_again(claim: Claim) -> None:
    """A workflow whose second observation differs: its first response is taken, the later two are not."""
    kept: list[Segment] = []

    async def play(
        recorded: Sequence[Segment], prompts: Sequence[Sequence[int]]
    ) -> tuple[list[Completion], int, Counter[str]]:
        tokens, counts = Tokens(6), Counter[str]()
        one = sampler(tokens, claim, 4, kept, recorded, counts)
        return [await one.sample(ask(turn, prompt)) for turn, prompt in enumerate(prompts)], len(tokens.asked), counts

    first, asked, _ = asyncio.run(play((), [(1,), (1, 2), (1, 2, 3)]))
    assert asked == 6
    again, asked, counts = asyncio.run(play(tuple(kept), [(1,), (1, 9), (1, 2, 3)]))
    assert asked == 4 and counts == {"resumed_tokens": 6, "replay_diverged": 12}
    assert again[0].token_ids.tolist() == first[0].token_ids.tolist()
    assert again[2].token_ids.tolist() == first[2].token_ids.tolist(), "sampled again, with the same seed"


def test_nothing_is_recorded_once_the_group_is_no_longer_ours(claim: Claim) -> None:
    calls = 0

    async def record(one: tuple[Claim, Segment]) -> bool:
        nonlocal calls
        calls += 1
        return False

    one = SegmentSampler(Tokens(12), claim, 0, LIMITS, SegmentSettings(4), record, None, Counter[str]())
    assert len(asyncio.run(one.sample(ask())).token_ids) == 12 and calls == 1


# ---------------------------------------------------------------------------------------------------------------------
# Budgets


class Published:
    """Steps in the weights that are live, as the store has them."""

    step: int | None = None

    async def live_step(self) -> int | None:
        return self.step


async def settled(look: Callable[[], bool]) -> None:
    for _ in range(1000):
        if look():
            return
        await asyncio.sleep(0)
    raise AssertionError("nothing happened")


def test_a_trajectory_of_a_later_step_waits_for_each_publication(claim: Claim) -> None:
    """Step 2 with k=2: budgets of 4 from the weights of steps 0 and 1, without limit from those of step 2."""
    asyncio.run(_waits(replace(claim, step=2)))


async def _waits(claim: Claim) -> None:
    live, reached, waiting = Published(), list[int](), list[int]()
    live.step = 0
    iterations = Iterations(live.live_step, Pacing(2, 1), 0.0)

    async def reach(claim: Claim, step: int) -> None:
        reached.append(step)

    pace = GroupPace(iterations, claim, Budget(4), {}, reach, waiting.append)
    tokens = Tokens(18)
    keeping = asyncio.create_task(iterations.keep())
    samplers = [
        SegmentSampler(tokens, claim, index, LIMITS, SegmentSettings(2), None, pace, Counter[str]()) for index in (0, 1)
    ]
    work = [asyncio.create_task(one.sample(ask())) for one in samplers]
    for step, starts in ((0, [0, 2]), (1, [4, 6])):
        await settled(lambda step=step: reached == list(range(step + 1)))  # type: ignore[misc]
        assert sum(waiting) == 2 and not any(one.done() for one in work)
        assert sorted(r.start for r in tokens.asked) == sorted(starts * 2)
        tokens.asked.clear()
        tokens.version, live.step = f"0.{step + 4}", step + 1
    done = [await one for one in work]
    await pace.ended(0)
    keeping.cancel()
    assert sum(waiting) == 0 and reached == [0, 1]
    for one in done:
        assert one.versions == (VersionSpan("0.3", 0, 4), VersionSpan("0.4", 4, 8), VersionSpan("0.5", 8, 18))


def test_a_budget_in_seconds_ends_whatever_was_sampled(claim: Claim) -> None:
    asyncio.run(_waits_by_time(replace(claim, step=1)))


async def _waits_by_time(claim: Claim) -> None:
    live, reached, now = Published(), list[int](), 100.0
    live.step = 0

    async def reach(claim: Claim, step: int) -> None:
        reached.append(step)

    class Slow(Tokens):
        async def sample(self, request: SampleRequest) -> Completion:
            nonlocal now
            now += 1.0
            return await super().sample(request)

    iterations = Iterations(live.live_step, Pacing(1, 1), 0.0, lambda: now)
    now += 60
    assert iterations.age_s == 0, "the first publication is awaited for longer than a budget"
    await iterations.look()
    now += 0.5
    assert iterations.age_s == 0.5
    pace = GroupPace(iterations, claim, Budget(seconds=3.0), {}, reach, lambda samples: None)
    tokens = Slow(18)
    keeping = asyncio.create_task(iterations.keep())
    await pace.ended(1)
    work = asyncio.create_task(
        SegmentSampler(tokens, claim, 0, LIMITS, SegmentSettings(2), None, pace, Counter[str]()).sample(ask())
    )
    await settled(lambda: reached == [0])
    assert [request.start for request in tokens.asked] == [0, 2, 4] and not work.done()
    tokens.version, live.step = "0.4", 1
    assert (await work).versions == (VersionSpan("0.3", 0, 6), VersionSpan("0.4", 6, 18))
    keeping.cancel()


def test_a_trajectory_with_two_responses_at_once_waits_when_both_do(claim: Claim) -> None:
    asyncio.run(_both_wait(replace(claim, step=1)))


async def _both_wait(claim: Claim) -> None:
    live, reached, waiting = Published(), list[int](), list[int]()
    iterations = Iterations(live.live_step, Pacing(1, 1), 0.0)

    async def reach(claim: Claim, step: int) -> None:
        reached.append(step)

    pace = GroupPace(iterations, claim, Budget(4), {}, reach, waiting.append)
    await pace.ended(1)
    gate = asyncio.Event()

    class Slow(Tokens):
        async def sample(self, request: SampleRequest) -> Completion:
            if request.turn == 1 and request.start == 0:
                await gate.wait()
            return await super().sample(request)

    tokens = Slow(9)
    one = SegmentSampler(tokens, claim, 0, LIMITS, SegmentSettings(2), None, pace, Counter[str]())
    keeping = asyncio.create_task(iterations.keep())
    work = [asyncio.create_task(one.sample(ask(turn))) for turn in (1, 0)]
    for _ in range(100):
        await asyncio.sleep(0)
    assert reached == [] and sum(waiting) == 1, "the other response is under way"
    gate.set()
    await settled(lambda: reached == [0])
    assert sum(waiting) == 1
    live.step = 1
    assert [len((await task).token_ids) for task in work] == [9, 9] and sum(waiting) == 0
    keeping.cancel()


def test_a_claim_goes_on_with_the_budget_that_is_left(claim: Claim) -> None:
    """Tokens of weights that were published within an iteration, by a start or an evaluation, count in it."""
    a, b = WeightsVersion(1, 1), WeightsVersion(2, 1)
    segments = {0: (make_segment(0, version=a), make_segment(0, start=4, tokens=3, version=b)), 1: (make_segment(1),)}
    spent = tokens_by_iteration(segments, {a: 2, b: 2, VERSION: 0})
    assert spent == {0: Counter({2: 7}), 1: Counter({0: 4})}


# ---------------------------------------------------------------------------------------------------------------------
# Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.tasks.add("train", [make_task(i) for i in range(4)])
    store.pacing.record_version(VERSION, 0)
    request(store, "r0", groups=2)
    yield store
    store.close()


def test_segments_are_there_for_the_next_claim_until_the_group_is_whole(store: Store) -> None:
    [claim, other] = store.groups.claim("a", 2)
    first, second = make_segment(0), make_segment(0, start=4, finish_reason="stop")
    with_prompt = replace(make_segment(1), prompt_ids=np.arange(9, dtype=np.int32))
    assert store.segments.append([(claim, first), (other, make_segment(1))]) == [True, True]
    assert store.segments.append([(claim, second), (claim, with_prompt)]) == [True, True]
    store.groups.release("a")
    assert store.segments.append([(claim, make_segment(0, start=8))]) == [False], "no longer ours"
    [again, _] = store.groups.claim("b", 2)
    assert sorted(again.segments) == [0, 1]
    for a, b in zip(again.segments[0], (first, second), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() and a.logp.tolist() == b.logp.tolist()
        assert (a.start, a.context, a.spans, a.finish_reason) == (b.start, b.context, b.spans, b.finish_reason)
    assert again.segments[1][0].prompt_ids is not None and again.segments[1][0].prompt_ids.tolist() == list(range(9))
    assert finish(store, again)
    assert store.segments.read([again.group_id, other.group_id]).keys() == {other.group_id}


def test_a_trajectory_that_begins_again_has_reached_nothing(store: Store) -> None:
    [claim, _] = store.groups.claim("a", 2)
    store.segments.append([(claim, make_segment(0)), (claim, make_segment(1))])
    store.segments.reach(claim, 3)
    assert store.segments.reached("r0", 3) == (1, 2) and store.segments.reached("r0", 4) == (0, 2)
    store.segments.forget(claim, 0)
    assert store.segments.read([claim.group_id])[claim.group_id].keys() == {1} and store.segments.reached("r0", 3) == (
        0,
        2,
    )
    store.segments.reach(claim, 3)
    store.groups.release("a")
    [again, _] = store.groups.claim("b", 2)
    assert store.segments.reached("r0", 3) == (0, 2), "what another claim had reached says nothing of this one"
    finish(store, again)
    assert store.segments.reached("r0", 9) == (1, 2), "whole"


def test_a_resume_keeps_the_tokens_of_weights_that_are_left(store: Store) -> None:
    """Of a group that is whole, and of one that is not: what later weights than the checkpoint's have sampled goes."""
    later = WeightsVersion(0, 5)
    for version, step in ((WeightsVersion(0, 4), 1), (later, 2)):
        store.pacing.record_version(version, step)
        store.pacing.record_live(version)
    assert store.pacing.live_step() == 2
    [whole, claim] = store.groups.claim("a", 2)
    assert finish(store, whole)  # by VERSION alone
    two = replace(
        make_segment(0, start=4, tokens=6), spans=(WeightsSpan(0, 2, WeightsVersion(0, 4)), WeightsSpan(2, 6, later))
    )
    after = make_segment(0, turn=1, finish_reason="stop")
    store.segments.append([(claim, s) for s in (make_segment(0), two, after, make_segment(1, version=later))])
    store.segments.reach(claim, 2)
    store.rollouts.discard(1)
    assert store.pacing.live_step() is None and store.groups.claim("b", 2) == [], (
        "engines may have the weights of step 2"
    )
    store.pacing.record_version(WeightsVersion(1, 1), 1)
    assert store.groups.claim("b", 2) == []
    store.pacing.record_live(WeightsVersion(1, 1))
    assert store.pacing.live_step() == 1
    assert store.groups.states("r0")[whole.group_id][0] == "ready", "untouched"
    [again] = store.groups.claim("b", 2)
    assert again.version == VERSION and again.oldest == WeightsVersion(1, 1), "an engine may still have those of step 2"
    assert again.segments.keys() == {0} and store.segments.reached("r0", 1) == (1, 2)
    kept = again.segments[0]
    assert [(s.turn, s.start, len(s.token_ids), s.finish_reason) for s in kept] == [(0, 0, 4, None), (0, 4, 2, None)]
    assert kept[1].spans == (WeightsSpan(0, 2, WeightsVersion(0, 4)),)


def test_a_group_that_is_whole_becomes_segments_where_its_weights_are_gone(store: Store) -> None:
    """What is left of each response, with the digest of what it follows: the sampler takes it up."""
    later = WeightsVersion(0, 5)
    store.pacing.record_version(later, 2)
    [claim, _] = store.groups.claim("a", 1) * 2
    store.segments.append([])
    trajectories = []
    from tests.stores import make_trajectory

    for index in claim.indices:
        one = make_trajectory(claim, index)
        prompt, response = one.turns
        spans = (WeightsSpan(0, 3, VERSION), WeightsSpan(3, 4, later))
        ids = np.arange(len(prompt) + len(response) - 1, dtype=np.int8).reshape(-1, 1, 1)
        trajectories.append(replace(one, turns=(prompt, replace(response, spans=spans, routing=ids))))
    assert store.groups.put(claim, trajectories)
    store.rollouts.discard(1)
    store.pacing.record_live(VERSION)
    [again] = store.groups.claim("b", 1)
    for index in claim.indices:
        [kept] = again.segments[index]
        prompt, response = trajectories[index].turns
        assert kept.context == digest_of(prompt.token_ids) and kept.finish_reason is None
        assert kept.token_ids.tolist() == response.token_ids.tolist()[:3] and (kept.turn, kept.start) == (0, 0)
        assert kept.routing is not None and kept.routing.ravel().tolist() == list(range(len(prompt) + 3 - 1))


def test_asking_again_forgets_segments(store: Store) -> None:
    [claim, other] = store.groups.claim("a", 2)
    store.segments.append([(claim, make_segment(0)), (other, make_segment(0))])
    request(store, "r0", groups=2)
    assert store.segments.read([claim.group_id, other.group_id]) == {}


def test_segments_tile_a_response(claim: Claim) -> None:
    kept: list[Segment] = []
    asyncio.run(sampler(Tokens(17), claim, 5, kept).sample(ask()))
    assert all(a.start + len(a.token_ids) == b.start for a, b in pairwise(kept))


def test_segments_after_another_image_are_not_taken(claim: Claim) -> None:
    """Images of one size have the same tokens."""
    kept: list[Segment] = []
    asyncio.run(sampler(Tokens(8), claim, 4, kept).sample(replace(ask(), images=(b"one",))))
    assert len(kept) == 2
    for image, resumed in ((b"one", 8), (b"other", 0)):
        counts = Counter[str]()
        again = SegmentSampler(Tokens(8), claim, 0, LIMITS, SegmentSettings(4), recording([]), None, counts, kept)
        asyncio.run(again.sample(replace(ask(), images=(image,))))
        assert counts["resumed_tokens"] == resumed and counts["replay_diverged"] == 8 - resumed


@pytest.mark.parametrize("routed", [0, 2])
def test_expert_ids_of_segments_are_those_of_the_response_in_one(routed: int) -> None:
    """Each token but the last has its own, whether the response is sampled in one go or in parts."""
    claim = Claim("r0", "train", 0, VERSION, "r0/0", 0, 2, {}, make_task(0), "a", "token", 1)
    asked = replace(ask(), routed=routed)
    found = []
    for size in (None, 4, 5):
        kept: list[Segment] = []
        one = SegmentSampler(Tokens(12), claim, 0, LIMITS, SegmentSettings(size), recording(kept), None, Counter[str]())
        completion = asyncio.run(one.sample(asked))
        tokens = np.concatenate([asked.token_ids, completion.token_ids])
        assert completion.routing is not None and completion.routing.shape == (3 + 12 - 1 - routed, 1, 2)
        assert completion.routing[:, 0, 0].tolist() == (tokens % 7)[routed:-1].tolist()
        found += [segment.routing for segment in kept[:1]]
    assert [len(ids) for ids in found if ids is not None] == [14 - routed, 6 - routed, 7 - routed]


def test_a_segment_that_is_cut_keeps_the_expert_ids_before_its_new_last_token() -> None:
    spans = (WeightsSpan(0, 3, VERSION), WeightsSpan(3, 5, WeightsVersion(4, 4)))
    ids = np.arange(7, dtype=np.int8).reshape(7, 1, 1)
    whole = replace(make_segment(0, tokens=5, routing=ids), spans=spans)
    cut = whole.before({"4.4"})
    assert cut is not None and cut.routing is not None
    assert len(cut.token_ids) == 3 and cut.routing.tolist() == ids[:5].tolist()


def test_expert_ids_of_a_recorded_segment_come_back() -> None:
    """A response that goes on after a death has those of its first segments from the store."""
    for routing in (None, np.arange(24, dtype=np.int16).reshape(4, 2, 3)):
        row = segment_to_row("r0/0", "r0", make_segment(0, routing=routing))
        found = segment_from_row(type("Row", (), row)()).routing
        assert (found is None) == (routing is None)
        assert routing is None or (found is not None and found.dtype == np.int16 and np.array_equal(found, routing))
