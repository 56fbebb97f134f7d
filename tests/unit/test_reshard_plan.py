"""Plans as values: coverage, determinism, balance, bytes, and the messages for what cannot be planned."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import ConfigError, PlanError
from megarl.reshard import boxes
from megarl.reshard.execute import buckets_of
from megarl.reshard.layout import Holding, Layout, Padding, Piece
from megarl.reshard.layouts import MegatronGrid, hf_layout, megatron_layout, padded_vocab_size, vllm_layout
from megarl.reshard.plan import build_plan
from tests.unit.reshard_oracle import Case, cases, qwen3_config

fast = settings(max_examples=40, deadline=None)


def layouts(case: Case) -> tuple[Layout, Layout]:
    return (
        megatron_layout(case.config, MegatronGrid(case.tp, case.pp, case.dp)),
        vllm_layout(case.config, case.engine_tp, case.replicas),
    )


def with_pieces(layout: Layout, which: int, pieces: tuple[Piece, ...]) -> Layout:
    holdings = list(layout.holdings)
    holdings[which] = replace(holdings[which], pieces=pieces)
    return replace(layout, holdings=tuple(holdings))


@fast
@given(case=cases(), data=st.data())
def test_a_destination_piece_removed_or_doubled_is_a_plan_error(case: Case, data: st.DataObject) -> None:
    source, destination = layouts(case)
    which = data.draw(st.integers(0, len(destination.holdings) - 1))
    pieces = destination.holdings[which].pieces
    i = data.draw(st.integers(0, len(pieces) - 1))
    with pytest.raises(PlanError, match="not wholly written") as error:
        build_plan(source, with_pieces(destination, which, pieces[:i] + pieces[i + 1 :]))
    assert pieces[i].local in str(error.value)
    with pytest.raises(PlanError, match="written twice") as error:
        build_plan(source, with_pieces(destination, which, (*pieces, pieces[i])))
    assert pieces[i].tensor in str(error.value)


@fast
@given(case=cases(), data=st.data())
def test_a_source_piece_removed_or_overlapped_is_a_plan_error(case: Case, data: st.DataObject) -> None:
    source, destination = layouts(case)
    which = data.draw(st.integers(0, len(source.holdings) - 1))
    victim = data.draw(st.sampled_from(source.holdings[which].pieces))
    gone = source
    for h, holding in enumerate(source.holdings):
        kept = tuple(p for p in holding.pieces if (p.tensor, p.box) != (victim.tensor, victim.box))
        gone = with_pieces(gone, h, kept)
    with pytest.raises(PlanError, match="not wholly written") as error:
        build_plan(gone, destination)
    assert victim.tensor in str(error.value)
    if boxes.volume(victim.box) > 1:
        axis = max(range(len(victim.box)), key=lambda a: victim.box[a][1] - victim.box[a][0])
        lo, hi = victim.box[axis]
        smaller = tuple((lo, hi - 1) if a == axis else interval for a, interval in enumerate(victim.box))
        pieces = (*source.holdings[which].pieces, replace(victim, box=smaller))
        with pytest.raises(PlanError, match="written twice") as error:
            build_plan(with_pieces(source, which, pieces), destination)
        assert victim.tensor in str(error.value)


def test_padding_over_a_piece_is_a_plan_error() -> None:
    layout = vllm_layout(qwen3_config(), 1)
    holding = layout.holdings[0]
    pads = (*holding.padding, Padding("model.norm.weight", ((0, 1),)))
    bad = replace(layout, holdings=(replace(holding, padding=pads),))
    with pytest.raises(PlanError, match=r"model\.norm\.weight is written twice"):
        build_plan(hf_layout(qwen3_config()), bad)


def test_another_models_layout_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"model\.embed_tokens\.weight has shape \(70, 8\) in vllm .* and \(71, 8\) in hf"
    ):
        build_plan(hf_layout(qwen3_config(vocab_size=71)), vllm_layout(qwen3_config(), 1))


@fast
@given(case=cases())
def test_two_processes_plan_the_same(case: Case) -> None:
    a, b = build_plan(*layouts(case)), build_plan(*layouts(case))
    assert a.moves == b.moves
    assert a.fingerprint == b.fingerprint
    other = replace(case, replicas=case.replicas + 1)
    assert build_plan(*layouts(other)).fingerprint != a.fingerprint


@fast
@given(case=cases(), capacity=st.sampled_from([1, 7, 100, 5000]))
def test_bytes_are_countable_before_the_job_starts(case: Case, capacity: int) -> None:
    plan = build_plan(*layouts(case))
    holdings = [plan.destination.holding(r) for r in range(plan.destination.num_ranks)]
    needed = sum(
        sum(prod(s) for s in h.local_shapes.values()) - sum(boxes.volume(p.box) for p in h.padding) for h in holdings
    )
    assert sum(plan.bytes_per_link(2).values()) == 2 * needed
    buckets = buckets_of(plan, plan.links, capacity)
    assert sum(bucket.elements for bucket in buckets) == needed
    assert all(0 < bucket.elements <= capacity for bucket in buckets)
    assert plan.peak_extra_bytes(2 * capacity, 2) <= 4 * capacity


def test_data_parallel_copies_share_the_sending() -> None:
    """List scheduling: two ranks that could have sent the same piece differ by at most one piece."""
    config = qwen3_config(num_hidden_layers=8)
    plan = build_plan(megatron_layout(config, MegatronGrid(2, 1, 4)), vllm_layout(config, 2, 4))
    sent = [sum(n for link, n in plan.bytes_per_link(4).items() if link.src == rank) for rank in range(8)]
    largest = 4 * max(boxes.volume(move.box) for move in plan.moves)
    assert min(sent) > largest
    for tp_rank in range(2):
        assert max(sent[tp_rank::2]) - min(sent[tp_rank::2]) <= largest


def test_the_source_may_hold_the_same_piece_under_two_names_and_the_destination_gets_both() -> None:
    """A tied model on two stages keeps the embedding twice; the engine's lm_head is a tensor of its own."""
    config = qwen3_config(tie_word_embeddings=True)
    plan = build_plan(megatron_layout(config, MegatronGrid(1, 2, 1)), vllm_layout(config, 1))
    targets = [m.dst_local for m in plan.moves if m.tensor == "model.embed_tokens.weight"]
    assert sorted(targets) == ["lm_head.weight", "model.embed_tokens.weight"]


def test_a_huge_grid_is_planned_in_seconds() -> None:
    """Qwen3-32B shapes, 512 trainer ranks, 16 engines of 8: the work must not grow with ranks squared."""
    config = qwen3_config(
        vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    plan = build_plan(megatron_layout(config, MegatronGrid(8, 4, 16)), vllm_layout(config, 8, 16))
    assert len(plan.moves) < 200_000
    assert {m.dst for m in plan.moves} == set(range(128))


def test_a_stack_has_a_leading_single_index() -> None:
    """Geometry that stacked experts will need: two 2-D tensors in one 3-D local tensor."""
    shapes = {"e0": (2, 3), "e1": (2, 3)}
    flat = Holding(shapes, tuple(Piece(n, boxes.whole(s), n, (0, 0)) for n, s in shapes.items()))
    stack = Holding({"w": (2, 2, 3)}, tuple(Piece(f"e{i}", boxes.whole((2, 3)), "w", (i, 0, 0)) for i in range(2)))
    plan = build_plan(Layout("flat", shapes, (flat,), (0,)), Layout("stack", shapes, (stack,), (0,)))
    assert [m.dst_at for m in plan.moves] == [(0, 0, 0), (1, 0, 0)]
    assert boxes.index_of((1, 0, 2), (2, 1)) == (1, slice(0, 2), slice(2, 3))


@pytest.mark.parametrize(
    ("changes", "grid", "message"),
    [
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            MegatronGrid(tp=4),
            r"parallel\.tp=4 does not divide num_key_value_heads=6 of qwen3; set parallel\.tp to 1, 2, 3 or 6",
        ),
        (
            {},
            MegatronGrid(tp=4),
            r"parallel\.tp=4 is greater than num_key_value_heads=2 of qwen3: .* set parallel\.tp to 1 or 2",
        ),
        (
            {"intermediate_size": 25},
            MegatronGrid(tp=2),
            r"parallel\.tp=2 does not divide intermediate_size=25 of qwen3; set parallel\.tp to 1",
        ),
        (
            {},
            MegatronGrid(pp=3),
            r"parallel\.pp=3 does not divide num_hidden_layers=4 of qwen3; set parallel\.pp to 1, 2 or 4",
        ),
        ({}, MegatronGrid(dp=0), r"parallel\.dp=0 is not a positive number"),
    ],
)
def test_a_grid_that_does_not_fit_names_rule_values_and_mend(changes: dict, grid: MegatronGrid, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        megatron_layout(qwen3_config(**changes), grid)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({}, 3, r"rollout\.tp=3 does not divide num_attention_heads=4 of qwen3; set rollout\.tp to one of \[1, 2, 4\]"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 6},
            3,
            r"rollout\.tp=3 does not divide the padded vocabulary=128",
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            4,
            r"rollout\.tp=4 neither divides nor is a multiple of num_key_value_heads=6 .* one of \[1, 2\]",
        ),
        ({}, 0, r"rollout\.tp=0"),
    ],
)
def test_an_engine_that_does_not_fit_names_rule_values_and_mend(changes: dict, tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vllm_layout(qwen3_config(**changes), tp)


def test_padded_vocab_size() -> None:
    assert [padded_vocab_size(v, tp) for v, tp in ((128, 2), (129, 2), (1, 4), (151936, 8))] == [128, 256, 256, 152064]


@fast
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    limit=st.integers(1, 40),
    shift=st.integers(0, 5),
)
def test_split_tiles_a_box_in_order(shape: tuple[int, ...], limit: int, shift: int) -> None:
    box = boxes.at((shift,) * len(shape), shape)
    parts = list(boxes.split(box, limit))
    assert all(0 < boxes.volume(p) <= limit and boxes.contains(box, p) for p in parts)
    assert sum(boxes.volume(p) for p in parts) == boxes.volume(box)
    assert boxes.first_overlap(parts) is None
    assert parts == sorted(parts)


@fast
@given(data=st.data())
def test_first_overlap_agrees_with_trying_all_pairs(data: st.DataObject) -> None:
    interval = st.tuples(st.integers(0, 8), st.integers(1, 4)).map(lambda t: (t[0], t[0] + t[1]))
    some = data.draw(st.lists(st.tuples(interval, interval), max_size=6))
    pairs = [(i, j) for i in range(len(some)) for j in range(i) if boxes.intersect(some[i], some[j]) is not None]
    assert (boxes.first_overlap(some) is None) == (not pairs)
