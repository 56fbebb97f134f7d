"""Plans as values: coverage, determinism, balance, bytes, and the messages for what cannot be planned."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.errors import ConfigError, PlanError
from megarl.weights.reshard import layout as boxes
from megarl.weights.reshard.buckets import buckets_of, bytes_of
from megarl.weights.reshard.layout import AxisSpan, Layout, LayoutRow, Owners, Split
from megarl.weights.reshard.layouts import MegatronGrid, hf_layout, megatron_layout, padded_vocab_size, vllm_layout
from megarl.weights.reshard.plan import ReshardPlan, build_plan
from tests.unit.reshard_engines import model
from tests.unit.reshard_oracle import Case, cases, configs, qwen3_config

fast = settings(max_examples=40)


def layouts(case: Case) -> tuple[Layout, Layout]:
    return (
        megatron_layout(case.config, MegatronGrid(case.tp, case.pp, case.dp)),
        vllm_layout(case.config, case.engine_tp, case.replicas),
    )


def with_rows(layout: Layout, rows: list[LayoutRow]) -> Layout:
    return Layout(layout.name, layout.tensors, layout.num_ranks, rows, layout.dtypes)


def with_split(layout: Layout, number: int, share: int, split: Split) -> Layout:
    """The layout with another split in one share of one row."""
    rows = list(layout.rows)
    splits = tuple(split if k == share else old for k, old in enumerate(rows[number].splits))
    rows[number] = rows[number]._replace(splits=splits)
    return with_rows(layout, rows)


def a_segment(data: st.DataObject, layout: Layout) -> tuple[int, int, int]:
    """(row, share, segment) of some piece."""
    places = [
        (number, share, i)
        for number, row in enumerate(layout.rows)
        for share, split in enumerate(row.splits)
        for i in range(len(split.spans))
    ]
    return data.draw(st.sampled_from(places))


@fast
@given(case=cases(), data=st.data())
def test_a_destination_piece_removed_or_doubled_is_a_plan_error(case: Case, data: st.DataObject) -> None:
    source, destination = layouts(case)
    number, share, i = a_segment(data, destination)
    row = destination.rows[number]
    split = row.splits[share]
    fewer = split._replace(spans=split.spans[:i] + split.spans[i + 1 :])
    with pytest.raises(PlanError, match="not wholly written") as error:
        build_plan(source, with_split(destination, number, share, fewer)).check()
    assert row.local in str(error.value)
    more = split._replace(spans=(*split.spans, split.spans[i]))
    with pytest.raises(PlanError, match="written twice") as error:
        build_plan(source, with_split(destination, number, share, more)).check()
    assert row.parts[split.spans[i].part] in str(error.value)


@fast
@given(case=cases(), data=st.data())
def test_a_destination_piece_beside_its_tensor_is_a_plan_error(case: Case, data: st.DataObject) -> None:
    source, destination = layouts(case)
    number, share, i = a_segment(data, destination)
    row = destination.rows[number]
    split = row.splits[share]
    span = split.spans[i]
    shift = row.shape[row.axis] + 1
    for bad in (span._replace(at=span.at + split.size), span._replace(lo=span.lo + shift, hi=span.hi + shift)):
        spans = (*split.spans[:i], bad, *split.spans[i + 1 :])
        with pytest.raises(PlanError, match="outside") as error:
            build_plan(source, with_split(destination, number, share, split._replace(spans=spans))).check()
        assert row.local in str(error.value)


@fast
@given(case=cases(), data=st.data())
def test_a_source_piece_removed_or_overlapped_is_a_plan_error(case: Case, data: st.DataObject) -> None:
    source, destination = layouts(case)
    number, share, i = a_segment(data, source)
    row = source.rows[number]
    span = row.splits[share].spans[i]
    tensor = row.parts[span.part]

    def without(other: LayoutRow) -> LayoutRow:
        """Also where a second stage has the same elements (a tied output weight)."""
        kept = [
            split._replace(spans=tuple(s for s in split.spans if (other.parts[s.part], s[1:3]) != (tensor, span[1:3])))
            for split in other.splits
        ]
        return other._replace(splits=tuple(kept))

    with pytest.raises(PlanError, match="not wholly written") as error:
        build_plan(with_rows(source, [without(other) for other in source.rows]), destination).check()
    assert tensor in str(error.value)
    if span.hi - span.lo > 1:
        only = Split(span.hi - span.lo - 1, 0, (AxisSpan(span.part, span.lo, span.hi - 1, 0),))
        extra = row._replace(local="copy", splits=(only,), owners=Owners(((0,),)))
        with pytest.raises(PlanError, match="written twice") as error:
            build_plan(with_rows(source, [*source.rows, extra]), destination).check()
        assert tensor in str(error.value)


def test_padding_over_a_piece_is_a_plan_error() -> None:
    layout = vllm_layout(qwen3_config(), 1)
    number = next(i for i, row in enumerate(layout.rows) if row.local == "model.norm.weight")
    split = layout.rows[number].splits[0]
    bad = with_split(layout, number, 0, split._replace(used=split.size - 1))
    with pytest.raises(PlanError, match=r"model\.norm\.weight is written twice"):
        build_plan(hf_layout(qwen3_config()), bad).check()


def test_one_local_tensor_of_two_shapes_is_a_plan_error() -> None:
    layout = vllm_layout(model("mixtral", num_local_experts=2), 1)
    number = next(i for i, row in enumerate(layout.rows) if row.stack)
    rows = list(layout.rows)
    rows[number] = rows[number]._replace(stack=(3,))
    with pytest.raises(PlanError, match=r"w13_weight would have shape \(3, 256, 8\) and \(2, 256, 8\)"):
        build_plan(hf_layout(model("mixtral", num_local_experts=2)), with_rows(layout, rows)).check()


def test_an_expert_that_is_left_out_is_a_plan_error() -> None:
    config = model("mixtral")
    layout = vllm_layout(config, 1)
    rows = [row for row in layout.rows if not (row.local.endswith("w2_weight") and row.lead == (3,))]
    with pytest.raises(PlanError, match=r"experts\.routed_experts\.w2_weight.* is not wholly written"):
        build_plan(hf_layout(config), with_rows(layout, rows)).check()


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
    assert build_plan(*layouts(replace(case, dp=case.dp + 1))).fingerprint != a.fingerprint


@fast
@given(case=cases(), capacity=st.sampled_from([4, 7, 100, 5000]))
def test_bytes_are_countable_before_the_job_starts(case: Case, capacity: int) -> None:
    plan = build_plan(*layouts(case))
    to = plan.destination
    needed = sum(
        sum(map(prod, to.local_shapes(r).values())) - sum(boxes.volume(p.box) for p in to.padding(r))
        for r in range(to.num_ranks)
    )
    assert sum(plan.bytes_per_link(2).values()) == bytes_of(to, torch.bfloat16) == 2 * needed
    buckets = buckets_of(plan, plan.moves, capacity, torch.bfloat16)
    volumes = (boxes.volume(chunk.box) * len(b.channel.dsts) for b in buckets for chunk in b.slices)
    assert sum(volumes) == needed
    assert all(0 < bucket.nbytes <= capacity for bucket in buckets)
    assert plan.peak_extra_bytes(capacity, 2) <= 2 * capacity


@fast
@given(case=cases(), data=st.data())
def test_the_part_of_some_tensors_writes_their_local_tensors_whole(case: Case, data: st.DataObject) -> None:
    plan = build_plan(*layouts(case))
    some = set(data.draw(st.lists(st.sampled_from(sorted(plan.destination.tensors)), min_size=1, max_size=3)))
    part = plan.only(some.__contains__)
    part.check()
    locals_ = {move.dst_local for move in plan.moves if move.tensor in some}
    assert {(m.dst, m.dst_local) for m in part.moves} == {
        (m.dst, m.dst_local) for m in plan.moves if m.dst_local in locals_
    }


def sent_by_copies(plan: ReshardPlan) -> list[list[int]]:
    """Bytes that each source rank sends, grouped by ranks that hold the same."""
    sent: Counter[int] = Counter()
    for link, size in plan.bytes_per_link(1).items():
        sent[link.src] += size
    groups: dict[Any, list[int]] = defaultdict(list)
    for rank in range(plan.source.num_ranks):
        groups[plan.source.kind(rank)].append(sent[rank])
    return list(groups.values())


@settings(max_examples=40)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2]),
    dp=st.integers(1, 9),
    engine_tp=st.sampled_from([1, 2, 4, 8, 16]),
    replicas=st.integers(1, 9),
)
def test_data_parallel_copies_share_the_sending(tp: int, pp: int, dp: int, engine_tp: int, replicas: int) -> None:
    """Whatever the numbers of copies and replicas: none sends more than 2 % above the mean (8 layers in Qwen3-0.6B's
    shapes)."""
    config = qwen3_config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    plan = build_plan(megatron_layout(config, MegatronGrid(tp, pp, dp)), vllm_layout(config, engine_tp, replicas))
    for sent in sent_by_copies(plan):
        assert max(sent) <= 1.02 * sum(sent) / len(sent)


@fast
@given(case=cases(), capacity=st.sampled_from([100, 5000]))
def test_a_rank_packs_an_element_once_for_all_replicas(case: Case, capacity: int) -> None:
    """All copies of an element together pack it as often as there are copies, or replicas where these are fewer."""
    plan = build_plan(*layouts(case))
    total = 0
    for src in range(plan.source.num_ranks):
        packed: dict[Any, list[Any]] = defaultdict(list)
        for bucket in buckets_of(plan, plan.moves_from(src), capacity, torch.float32):
            for chunk in bucket.slices:
                packed[plan.destination.kind(chunk.move.dst), chunk.move.dst_local, chunk.move.tensor].append(chunk.box)
                total += boxes.volume(chunk.box)
        assert all(boxes.first_overlap(found) is None for found in packed.values())
    expected = 0
    for piece in (piece for rank in range(case.engine_tp) for piece in plan.destination.pieces(rank)):
        for box, copies in {copy.box: len(copy.ranks) for copy in plan.source.copies(piece.tensor)[::-1]}.items():
            common = boxes.intersect(box, piece.box)
            expected += min(copies, case.replicas) * (0 if common is None else boxes.volume(common))
    assert total == expected


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_neighbouring_windows_come_from_different_stages(stages: int) -> None:
    config = qwen3_config(num_hidden_layers=8, tie_word_embeddings=False)
    plan = build_plan(megatron_layout(config, MegatronGrid(pp=stages)), vllm_layout(config, 1, replicas=2))
    buckets = buckets_of(plan, plan.moves, 256, torch.float32)
    modules = [[chunk.move.dst_local.rpartition(".")[0] for chunk in bucket.slices] for bucket in buckets]
    runs = [(src, len(list(run))) for src, run in groupby(bucket.channel.src for bucket in buckets)]
    assert {bucket.channel.dsts for bucket in buckets} == {(0, 1)}
    assert len(runs) >= (6 * stages if stages > 1 else 1)
    layers = [bucket for bucket in buckets if ".layers." in bucket.slices[0].move.tensor]
    for number, bucket in enumerate(layers):  # of each stage about as much has gone as of the others
        gone = Counter(other.channel.src for other in layers[: number + 1])
        share = [gone[src] / sum(b.channel.src == src for b in layers) for src in range(stages)]
        assert max(share) - min(share) < 0.3, bucket
    flat = [module for of_bucket in modules for module in of_bucket]
    whole = [module for module, _ in groupby(flat)]
    assert len(whole) == len(set(whole)), "a module that was left is begun again"


def test_experts_and_the_rest_are_shared_by_their_own_copies() -> None:
    """With expert parallelism the copies of an expert are fewer ranks than those of a norm; both are shared."""
    config = model("qwen3_moe", vocab_size=256, num_experts=8, hidden_size=64, num_hidden_layers=8, mlp_only_layers=[])
    plan = build_plan(
        megatron_layout(config, MegatronGrid(tp=2, dp=4, ep=4, etp=1)), vllm_layout(config, 2, 3, expert_parallel=True)
    )
    sent: dict[str, Counter[int]] = {"experts": Counter(), "rest": Counter()}
    for move in plan.moves:
        kind = "experts" if ".experts." in move.tensor else "rest"
        sent[kind][move.src] += boxes.volume(move.box)
    for counts in sent.values():
        assert len(counts) == 8
        assert max(counts.values()) <= 1.1 * sum(counts.values()) / 8


@fast
@given(case=cases(), node=st.sampled_from([1, 2, 3, 8]))
def test_the_nearest_copies_send(case: Case, node: int) -> None:
    """Ranks of both sides are placed on nodes of ``node`` devices one after the other. (Of a tied embedding that lies
    on two stages under two names only the first is ever used.)"""

    def distance(src: int, dst: int) -> int:
        return abs(src // node - dst // node)

    source, destination = layouts(replace(case, config={**case.config, "tie_word_embeddings": False}))
    plan = build_plan(source, destination, nearness=distance)
    plan.check()
    for move in plan.moves:
        holders = {
            rank for copy in source.copies(move.tensor) if boxes.contains(copy.box, move.box) for rank in copy.ranks
        }
        assert distance(move.src, move.dst) == min(distance(rank, move.dst) for rank in holders)
    sent = [move for rank in range(source.num_ranks) for move in plan.moves_from(rank)]
    assert sorted(sent) == sorted(plan.moves)


def test_the_source_may_hold_the_same_piece_under_two_names_and_the_destination_gets_both() -> None:
    """A tied model on two stages keeps the embedding twice; the engine's lm_head is a tensor of its own."""
    config = qwen3_config(tie_word_embeddings=True)
    plan = build_plan(megatron_layout(config, MegatronGrid(1, 2, 1)), vllm_layout(config, 1))
    targets = [m.dst_local for m in plan.moves if m.tensor == "model.embed_tokens.weight"]
    assert sorted(targets) == ["lm_head.weight", "model.embed_tokens.weight"]


def test_a_rank_of_a_huge_job_plans_its_own_part_quickly() -> None:
    """Qwen3-32B shapes, 512 trainer ranks, 16 engines of 8: the work must not grow with ranks squared."""
    config = qwen3_config(
        vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    start = time.process_time()
    plan = build_plan(megatron_layout(config, MegatronGrid(8, 4, 16)), vllm_layout(config, 8, 16))
    received, sent = list(plan.moves_to(127)), list(plan.moves_from(511))
    assert time.process_time() - start < 2
    assert len(received) < 2000 and len(sent) < 2000
    assert len(plan.moves) < 200_000
    assert {m.dst for m in plan.moves} == set(range(128))


def test_a_stack_has_a_leading_single_index() -> None:
    """Two 2-D tensors in one 3-D local tensor."""
    shapes = {"e0": (2, 3), "e1": (2, 3)}
    owners, whole = Owners(((0,),)), Split(2, 2, (AxisSpan(0, 0, 2, 0),))
    flat = [LayoutRow(name, (name,), (2, 3), 0, (whole,), owners) for name in shapes]
    stack = [LayoutRow("w", (name,), (2, 3), 0, (whole,), owners, (2,), (i,)) for i, name in enumerate(shapes)]
    plan = build_plan(Layout("flat", shapes, 1, flat), Layout("stack", shapes, 1, stack))
    plan.check()
    assert plan.destination.local_shapes(0) == {"w": (2, 2, 3)}
    assert [m.dst_at for m in plan.moves] == [(0, 0, 0), (1, 0, 0)]
    assert boxes.index_of((1, 0, 2), (2, 1)) == (1, slice(0, 2), slice(2, 3))


@pytest.mark.parametrize(
    ("family", "changes", "grid", "message"),
    [
        (
            "qwen3",
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            MegatronGrid(tp=4),
            r"parallel\.tp=4 neither divides nor is a multiple of num_key_value_heads=6 of qwen3; set parallel\.tp to "
            r"one "
            r"of \[1, 2, 3, 6, 12\]",
        ),
        (
            "qwen3",
            {"num_attention_heads": 6},
            MegatronGrid(tp=4),
            r"parallel\.tp=4 does not divide "
            r"num_attention_heads=6 of qwen3",
        ),
        (
            "qwen3",
            {"intermediate_size": 25},
            MegatronGrid(tp=2),
            r"parallel\.tp=2 does not divide intermediate_size=25 of qwen3; set parallel\.tp to one of \[1\]",
        ),
        (
            "qwen3",
            {"num_key_value_heads": 1, "head_dim": 1},
            MegatronGrid(tp=4),
            r"tp=4 does not divide the rows of "
            r"the joint .*=6 of",
        ),
        (
            "qwen3",
            {},
            MegatronGrid(pp=3),
            r"parallel\.pp=3 does not divide num_hidden_layers=4 of qwen3; set parallel\.pp to 1, 2 or 4, or give the "
            r"first or last",
        ),
        (
            "qwen3",
            {},
            MegatronGrid(pp=3, first_stage_layers=1),
            r"pp=3 does not divide .*=4 of qwen3; set "
            r"parallel\.first_stage_layers",
        ),
        (
            "qwen3",
            {},
            MegatronGrid(pp=2, vpp=3),
            r"parallel\.vpp=3 does not divide the layers .*\[2, 2\]; set "
            r"parallel\.vpp to 1 or 2",
        ),
        (
            "qwen3",
            {},
            MegatronGrid(vpp=2),
            r"parallel\.vpp=2 needs parallel\.pp above 1; set parallel\.pp to 2 or more",
        ),
        (
            "qwen3",
            {},
            MegatronGrid(pp=2, vpp=1, first_stage_layers=1, last_stage_layers=2),
            r"parallel\.pp=2 does not "
            r"divide",
        ),
        (
            "qwen3",
            {},
            MegatronGrid(pp=2, vpp=2, first_stage_layers=2, last_stage_layers=2),
            r"parallel\.vpp=2 with "
            r"both .* give one of the two",
        ),
        ("qwen3", {}, MegatronGrid(dp=0), r"parallel\.dp=0 is not a positive number"),
        ("qwen3", {}, MegatronGrid(cp=0), r"parallel\.cp=0 is not a positive number"),
        ("qwen3", {}, MegatronGrid(dp=2, ep=2), r"parallel\.ep=2, but qwen3 has no experts; set parallel\.ep to 1"),
        (
            "mixtral",
            {},
            MegatronGrid(dp=2, ep=2),
            r"parallel\.ep=2 does not divide the 5 experts of mixtral; set "
            r"parallel\.ep to 1 or 5",
        ),
        (
            "mixtral",
            {},
            MegatronGrid(dp=2, ep=5),
            r"ep=5 \* parallel\.etp=1 does not divide the 2 ranks .*tp=1 pp=1 "
            r"dp=2 ep=5",
        ),
        (
            "mixtral",
            {},
            MegatronGrid(dp=3, etp=3),
            r"parallel\.etp=3 does not divide the experts' width 128 of mixtral",
        ),
    ],
)
def test_a_grid_that_does_not_fit_names_rule_values_and_mend(
    family: str, changes: dict, grid: MegatronGrid, message: str
) -> None:
    config = qwen3_config(**changes) if family == "qwen3" else model(family, **changes)
    with pytest.raises(ConfigError, match=message):
        megatron_layout(config, grid)


@pytest.mark.parametrize(
    ("family", "changes", "engine", "message"),
    [
        (
            "qwen3",
            {},
            {"tp": 3},
            r"rollout\.tp=3 does not divide num_attention_heads=4 of qwen3; set rollout\.tp to one of \[1, 2, 4\]",
        ),
        (
            "qwen3",
            {"num_attention_heads": 6, "num_key_value_heads": 6},
            {"tp": 3},
            r"rollout\.tp=3 does not divide the padded vocabulary=128",
        ),
        (
            "qwen3",
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            {"tp": 4},
            r"rollout\.tp=4 neither divides nor is a multiple of num_key_value_heads=6 .* one of \[1, 2\]",
        ),
        ("qwen3", {}, {"tp": 0}, r"rollout\.tp=0"),
        ("qwen3", {}, {"tp": 1, "pp": 5}, r"rollout\.pp=5 is more than the 4 layers of qwen3"),
        ("qwen3", {}, {"tp": 1, "expert_parallel": True}, r"rollout\.expert_parallel=True, but qwen3 has no experts"),
        (
            "mixtral",
            {"num_attention_heads": 8},
            {"tp": 8, "expert_parallel": True},
            r"tp=8 leaves ranks without any of the 5 experts of mixtral; set rollout\.tp to at most 5",
        ),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 6},
            {"tp": 4},
            r"rollout\.tp=4 does not divide the width of the "
            r"experts=6 of qwen3_moe",
        ),
    ],
)
def test_an_engine_that_does_not_fit_names_rule_values_and_mend(
    family: str, changes: dict, engine: dict, message: str
) -> None:
    config = qwen3_config(**changes) if family == "qwen3" else model(family, **changes)
    with pytest.raises(ConfigError, match=message):
        vllm_layout(config, **engine)


@fast
@given(
    config=configs(layers=4), tp=st.integers(2, 12), pp=st.integers(1, 4), side=st.sampled_from(["trainer", "engine"])
)
def test_the_sizes_that_a_message_names_fit(config: dict, tp: int, pp: int, side: str) -> None:
    def layout(tp: int) -> Layout:
        return megatron_layout(config, MegatronGrid(tp)) if side == "trainer" else vllm_layout(config, tp, pp=pp)

    try:
        layout(tp)
    except ConfigError as error:
        for fix in re.findall(r"\d+", str(error).partition(".tp to ")[2]):
            layout(int(fix))


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
