"""Sequences and micro-batches: every position trained exactly once, everywhere the same shapes, pairs stay together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.schema import TrainingSample
from megarl.learn.batching import MicroBatching, Sequences, joined, micro_batches, of_demonstrations, of_samples
from megarl.learn.batching.micro import best_fit, deal, spread
from megarl.learn.batching.sequences import NO_IDS
from tests.parallel.batches import bytes_of

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def sequences(lengths: list[int]) -> Sequences:
    """Position i of all has token i + 1, and every position but the last of a sequence is in the loss."""
    total = sum(lengths)
    mask = torch.ones(total, dtype=torch.bool)
    mask[torch.tensor(lengths).cumsum(0) - 1] = False
    return Sequences(torch.arange(1, total + 1), torch.tensor(lengths), mask)


def sample(prompt: list[int], response: list[int], mask: list[bool]) -> TrainingSample:
    ids = np.array(response, dtype=np.int32)
    return TrainingSample(np.array(prompt, dtype=np.int32), ids, np.array(mask), -ids.astype(np.float32), "stop")


def test_values_sit_where_their_token_is_predicted() -> None:
    samples = [sample([5, 6, 7], [8, 9], [True, True]), sample([5], [6, 7, 8], [True, False, True])]
    found = of_samples(samples)
    assert found.tokens.tolist() == [5, 6, 7, 8, 9, 5, 6, 7, 8]
    assert found.targets.tolist() == [-100, -100, 8, 9, -100, 6, -100, 8, -100]
    assert found.row.tolist() == [0] * 5 + [1] * 4 and found.cu_seqlens.tolist() == [0, 5, 9]
    assert found.engine_logp is not None
    assert found.engine_logp.tolist() == [0, 0, -8, -9, 0, -6, -7, -8, 0]
    demonstrations = of_demonstrations([(e.prompt_ids, e.response_ids) for e in samples])
    assert demonstrations.targets.tolist() == [-100, -100, 8, 9, -100, 6, 7, 8, -100]
    assert joined(found, demonstrations).engine_logp.tolist() == found.engine_logp.tolist() + [0] * 9
    taught = of_demonstrations([(e.prompt_ids, e.response_ids) for e in samples], [e.engine_logp for e in samples])
    assert taught.engine_logp.tolist() == found.engine_logp.tolist()
    assert joined(found, taught).engine_logp.tolist() == found.engine_logp.tolist() * 2


def test_a_step_takes_29_bytes_a_token_of_which_the_engine_gives_9() -> None:
    """docs/roles.md has these numbers."""
    samples = [sample([5, 6, 7], [8, 9], [True, True]), sample([5], [6, 7, 8], [True, False, True])]
    found = of_samples(samples)
    lengths, total = found.lengths.nbytes, 9
    assert bytes_of(found) - lengths == 9 * total and lengths == 8 * 2
    for name in ("advantages", "returns", "old_logp", "ref_logp", "values"):
        setattr(found, name, torch.zeros(total))
    assert bytes_of(found) - lengths == 29 * total
    pairs = [(e.prompt_ids, e.response_ids) for e in samples]
    assert bytes_of(of_demonstrations(pairs)) - lengths == 5 * total
    both = joined(found, of_demonstrations(pairs))
    assert bytes_of(both) - 2 * lengths - 4 == 29 * 2 * total and both.tokens.dtype == torch.int32


@given(LENGTHS, st.booleans())
def test_the_targets_of_a_micro_batch_are_those_of_the_step(lengths: list[int], scores: bool) -> None:
    step = sequences(lengths)
    if scores:  # the last token of each sequence has the score that is trained
        step.mask = ~step.mask
    for micro_batching in (MicroBatching(max_tokens=64), MicroBatching(rows=3)):
        for batch in micro_batches(step, micro_batching, 0):
            assert torch.equal(batch.targets(step), batch.take(step.targets, -100))


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 80))
def test_best_fit_puts_each_item_into_one_chunk_with_room(sizes: list[int], capacity: int) -> None:
    chunks = best_fit(sizes, capacity)
    assert sorted(i for chunk in chunks for i in chunk) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in chunk) for chunk in chunks]
    assert all(0 < load <= capacity for load in loads)
    assert all(a + b > capacity for a, b in itertools.combinations(loads, 2))


def test_best_fit_by_hand() -> None:
    # 6 and 5 open chunks; 4 fits best after 6, 3 after 5, and 2 only there as well.
    assert best_fit([2, 5, 4, 6, 3], 10) == [[3, 2], [1, 4, 0]]
    with pytest.raises(ValueError, match="11 does not fit into a chunk of 10"):
        best_fit([11], 10)


@given(LENGTHS, st.integers(1, 8))
def test_spread_is_even(sizes: list[int], number: int) -> None:
    chunks = spread(sizes, number)
    assert sorted(i for chunk in chunks for i in chunk) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in chunk) for chunk in chunks]
    assert max(loads) - min(loads) <= max(sizes)


CUTS = st.builds(
    MicroBatching,
    dp=st.integers(1, 4),
    cp=st.sampled_from([1, 2, 4]),
    multiple=st.sampled_from([1, 2, 4]),
    chunks=st.sampled_from([1, 2]),
    max_tokens=st.one_of(st.none(), st.integers(96, 200)),
    rows=st.integers(1, 9),
)


@given(LENGTHS, CUTS, st.integers(1, 2))
def test_every_position_once_and_all_shapes_equal(lengths: list[int], micro_batching: MicroBatching, each: int) -> None:
    lengths = lengths[: len(lengths) // each * each] or [3] * each
    step = sequences(lengths)
    units = [list(range(i, i + each)) for i in range(0, len(lengths), each)]
    ranks = [micro_batches(step, micro_batching, rank, units) for rank in range(micro_batching.dp)]
    assert len({len(batches) for batches in ranks}) == 1
    assert len(ranks[0]) % micro_batching.chunks == 0
    batches = [batch for rank in ranks for batch in rank]
    assert len({batch.index.shape for batch in batches}) == 1
    seen = torch.cat([batch.index[batch.index >= 0] for batch in batches])
    assert sorted(seen.tolist()) == list(range(len(step.tokens)))
    for batch in batches:
        rows, width = batch.index.shape
        assert width % (micro_batching.multiple * micro_batching.cp) == 0
        for i in range(0, len(batch.numbers), each):  # who belongs together is together, in order
            assert batch.numbers[i : i + each].tolist() in units
        real = batch.index >= 0
        assert torch.equal(step.row[batch.index[real]], batch.numbers[batch.row[real]])
        assert torch.equal(batch.index[real] - step.cu_seqlens[step.row[batch.index[real]]], batch.position[real])
        assert (batch.row[real].diff() >= 0).all()
        assert (
            torch.equal(batch.take(step.tokens)[real], batch.index[real] + 1)
            and not batch.take(step.tokens)[~real].any()
        )
        if micro_batching.max_tokens is None:
            assert batch.cu_seqlens is None
            continue
        assert rows == 1 and batch.cu_seqlens is not None
        ends = batch.cu_seqlens.tolist()
        assert (
            ends[0] == 0 and ends[-1] == width and batch.max_seqlen == max(b - a for a, b in itertools.pairwise(ends))
        )
        assert all(
            (b - a) % (2 * micro_batching.cp if micro_batching.cp > 1 else 1) == 0 for a, b in itertools.pairwise(ends)
        )
        starts = [int((batch.row[0] == i).nonzero()[0, 0]) for i in range(len(batch.numbers))]
        assert starts == ends[: len(starts)]


@given(LENGTHS, CUTS)
def test_context_parallel_shares_are_the_zigzag_of_every_sequence(
    lengths: list[int], micro_batching: MicroBatching
) -> None:
    for batch in micro_batches(sequences(lengths), micro_batching, 0):
        shares = batch.shares(micro_batching.cp)
        width = batch.index.shape[1]
        assert shares.shape == (micro_batching.cp, width // micro_batching.cp) and sorted(
            shares.flatten().tolist()
        ) == list(range(width))
        if micro_batching.cp == 1:
            continue
        ends = [0, width] if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
        for rank, share in enumerate(shares):
            wanted = []
            for start, end in itertools.pairwise(ends):
                piece = (end - start) // (2 * micro_batching.cp)
                for k in (rank, 2 * micro_batching.cp - 1 - rank):
                    wanted += range(start + k * piece, start + (k + 1) * piece)
            assert share.tolist() == wanted


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 8]))
@settings(max_examples=20)
def test_long_tailed_lengths_fill_their_chunks(seed: int, dp: int) -> None:
    """Lengths as of R1's answers: a median of 2,000 tokens, a few up to the limit."""
    lengths = np.clip(np.random.default_rng(seed).lognormal(7.6, 1.0, 4096), 16, 32768).astype(int).tolist()
    micro_batching = MicroBatching(dp=dp, max_tokens=32768)
    chunks = [chunk for rank in deal([[n] for n in lengths], micro_batching) for chunk in rank]
    fullest = max(sum(lengths[i] for i in chunk) for chunk in chunks)
    assert sum(lengths) / (len(chunks) * fullest) >= 0.95
    assert all(chunks)  # no dummies


def test_ranks_without_work_get_dummies() -> None:
    ranks = deal([[5], [7]], MicroBatching(dp=4, max_tokens=16))
    assert sorted(chunk for rank in ranks for chunk in rank) == [[], [], [0], [1]]


def test_a_sequence_longer_than_a_micro_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="an item of 24 does not fit into a chunk of 20"):
        micro_batches(sequences([21]), MicroBatching(cp=4, max_tokens=20), 0)


def routed(tokens: int, layers: int = 2) -> np.ndarray:
    """Expert ids of all but the last of so many tokens."""
    return np.arange((tokens - 1) * layers * 3).astype(np.int8).reshape(tokens - 1, layers, 3)


def test_expert_ids_sit_at_their_tokens() -> None:
    samples = [sample([5, 6, 7], [8, 9], [True, True]), sample([5], [6, 7, 8], [True, False, True])]
    found = of_samples([samples[0]._replace(routing=routed(5)), samples[1]._replace(routing=routed(4))])
    assert found.routing is not None and found.routing.dtype == torch.int8
    none = np.full((1, 2, 3), NO_IDS, np.int8)
    wanted = np.concatenate([routed(5), none, routed(4), none])
    assert found.routing.tolist() == wanted.tolist()
    both = joined(found, of_demonstrations([(e.prompt_ids, e.response_ids) for e in samples]))
    assert both.routing is not None
    assert both.routing[:9].tolist() == wanted.tolist() and bool((both.routing[9:] == NO_IDS).all())


def test_samples_of_which_one_lacks_expert_ids_have_none() -> None:
    """Of groups that were sampled without routing replay; a learner that needs ids refuses the step."""
    samples = [sample([5], [6, 7, 8], [True] * 3)._replace(routing=ids) for ids in (routed(4), None)]
    assert of_samples(samples).routing is None and of_samples(samples[:1]).routing is not None
