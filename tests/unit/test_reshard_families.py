"""Every family from any grid to any engine, file or other grid, bit for bit as the oracle cuts it from whole HF
tensors."""

from __future__ import annotations

import functools
from collections import Counter
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megarl.weights.reshard import layout
from megarl.weights.reshard.buckets import HEADER, buckets_of, bytes_of
from megarl.weights.reshard.execute import compare, digests_of, exchange, merge, receive, send
from megarl.weights.reshard.layout import Layout
from megarl.weights.reshard.layouts import MegatronGrid, hf_layout, megatron_layout, vllm_layout
from megarl.weights.reshard.plan import ReshardPlan, build_plan
from tests.conftest import SOAK
from tests.unit.reshard_cases import FAMILIES, Engine, FamilyCase, Grid, Side, family_cases, qwen3_config
from tests.unit.reshard_oracle import (
    Network,
    Tensors,
    engine_ranks,
    first_difference,
    megatron_ranks,
    numbered_hf,
    run_threads,
    shapes_of,
    unwritten,
)

KINDS = {"engine": 30, "grid": 16, "hf": 8, "load": 8}
"""Kind of transfer (see ``family_cases``) -> cases of every family; 434 in all, others in every run."""
TIMES = 6 if SOAK else 1
"""How many times as many cases ``make soak`` draws."""

pytestmark = pytest.mark.slow

DTYPES = torch.float32, torch.bfloat16
Arrays = dict[str, np.ndarray]


def layout_of(case: FamilyCase, side: Side, te: bool) -> Layout:
    if isinstance(side, Grid):
        impl: Any = "transformer_engine" if te else "local"
        return megatron_layout(case.config, MegatronGrid(**side.settings), transformer_impl=impl, mtp=case.mtp)
    if isinstance(side, Engine):
        return vllm_layout(case.config, side.tp, side.replicas, pp=side.pp, expert_parallel=side.expert_parallel)
    return hf_layout(case.config, mtp=case.mtp)


def plan_of(case: FamilyCase, **options: Any) -> ReshardPlan:
    source, target = (layout_of(case, *side) for side in zip((case.source, case.target), case.te, strict=True))
    return build_plan(source, target, **options)


def both_ends(case: FamilyCase) -> tuple[list[Tensors], list[Tensors]]:
    """Rank -> tensors of source and target, by the oracle."""
    hf = numbered_hf(case.config, case.mtp)

    def held_by(side: Side, te: bool) -> list[Tensors]:
        if isinstance(side, Grid):
            return megatron_ranks(case.config, hf, side, te=te, mtp=case.mtp)
        return engine_ranks(case.config, hf, side) if isinstance(side, Engine) else [hf]

    return held_by(case.source, case.te[0]), held_by(case.target, case.te[1])


def slices(at: tuple[int, ...], box: tuple[tuple[int, int], ...]) -> tuple[int | slice, ...]:
    """Where ``box``'s elements lie in a local tensor from ``at`` on; leading axes of a stack are single indices."""
    lead = len(at) - len(box)
    return (*at[:lead], *(slice(start, start + hi - lo) for start, (lo, hi) in zip(at[lead:], box, strict=True)))


def carry_out(plan: ReshardPlan, sources: list[Tensors], dst: int) -> Tensors:
    """What destination rank ``dst`` holds after its moves, padding zeroed; asserts that no element is written twice."""
    shapes = dict(plan.destination.local_shapes(dst))
    got = unwritten(shapes)
    target = {name: tensor.numpy() for name, tensor in got.items()}
    given_by: dict[int, Arrays] = {}
    written: Counter[str] = Counter()
    for move in plan.moves_to(dst):
        if move.src not in given_by:
            given_by[move.src] = {n: t.numpy() for n, t in sources[move.src].items()}
        target[move.dst_local][slices(move.dst_at, move.box)] = given_by[move.src][move.src_local][
            slices(move.src_at, move.box)
        ]
        written[move.dst_local] += prod(hi - lo for lo, hi in move.box)
    for padding in plan.destination.padding(dst):
        target[padding.local][tuple(slice(lo, hi) for lo, hi in padding.box)] = 0
        written[padding.local] += prod(hi - lo for lo, hi in padding.box)
    assert written == {name: prod(shape) for name, shape in shapes.items()}, f"rank {dst}: elements written"
    return got


def origin(case: FamilyCase, value: float) -> str:
    """The element of the HF model that has this value in ``numbered_hf``."""
    if value != value or value == 0:
        return "padding" if value == 0 else "not written"
    at = int(value) - 1
    for name, shape in shapes_of(case.config, case.mtp).items():
        if at < prod(shape):
            return f"{name}{[int(i) for i in np.unravel_index(at, shape)]}"
        at -= prod(shape)
    return "no element of the model"


def explain(case: FamilyCase, rank: int, got: Tensors, expected: Tensors) -> str | None:
    """The first element that is wrong, and which elements of the model are there and should be."""
    text = first_difference(got, expected)
    if text is None or "]: " not in text:
        return text and f"rank {rank}: {text}"
    where, values = text.split("]: ")
    have, want = (origin(case, float(value)) for value in values.split(", expected "))
    return f"rank {rank}: {where}] holds {have}, expected {want}"


def many(count: int) -> Any:
    return settings(
        max_examples=TIMES * count,
        database=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_moves_give_what_slicing_the_model_gives(kind: str, family: str) -> None:
    @many(KINDS[kind])
    @given(case=family_cases(family, kind))
    def check(case: FamilyCase) -> None:
        plan, (sources, expected) = plan_of(case), both_ends(case)
        assert (plan.source.num_ranks, plan.destination.num_ranks) == (len(sources), len(expected))
        for rank, want in enumerate(expected):
            wrong = explain(case, rank, carry_out(plan, sources, rank), want)
            assert wrong is None, f"{case}\n{wrong}"

    check()


def any_case(*kinds: str) -> st.SearchStrategy[FamilyCase]:
    return st.tuples(st.sampled_from(FAMILIES), st.sampled_from(kinds)).flatmap(lambda drawn: family_cases(*drawn))


@many(30)
@given(case=any_case(*KINDS))
def test_every_rank_sees_the_same_plan_in_its_own_part(case: FamilyCase) -> None:
    """Both sides of all links agree, and a rank that plans for itself alone finds what the whole plan has for it."""
    whole = plan_of(case)
    whole.check()
    sent = {rank: list(whole.moves_from(rank)) for rank in range(whole.source.num_ranks)}
    received = {rank: list(whole.moves_to(rank)) for rank in range(whole.destination.num_ranks)}
    assert [move for moves in sent.values() for move in moves if move.src not in sent] == []
    both = (
        sorted(move for moves in sent.values() for move in moves),
        sorted(move for moves in received.values() for move in moves),
    )
    assert both[0] == both[1]
    moves = [move for moves in received.values() for move in moves]
    buckets = buckets_of(whole, moves, 1 << 20, torch.bfloat16)
    sizes = (
        layout.volume(chunk.box) * chunk.dtype.itemsize * len(bucket.channel.dsts)
        for bucket in buckets
        for chunk in bucket.slices
    )
    assert bytes_of(whole.destination, torch.bfloat16) == sum(sizes)
    last_sender, last_receiver = whole.source.num_ranks - 1, whole.destination.num_ranks - 1
    assert list(plan_of(case).moves_from(last_sender)) == sent[last_sender]
    assert list(plan_of(case).moves_to(last_receiver)) == received[last_receiver]
    by_link = {link: [move for move in received[link[1]] if move.src == link[0]] for link in whole.bytes_per_link(4)}
    for (src, dst), moves in by_link.items():  # both ends pack and unpack a link in this order
        assert [move for move in sent[src] if move.dst == dst] == moves


def blank(plan: ReshardPlan, dtype: torch.dtype = torch.float32) -> list[Tensors]:
    return [unwritten(dict(plan.destination.local_shapes(rank)), dtype) for rank in range(plan.destination.num_ranks)]


@many(15)
@given(
    case=any_case("engine", "engine", "load"),
    dtype=st.sampled_from(DTYPES),
    bucket_bytes=st.sampled_from([16, 100, 1 << 16]),
)
def test_sent_in_buckets_it_is_the_same(case: FamilyCase, dtype: torch.dtype, bucket_bytes: int) -> None:
    """Trainer and engine in processes of their own (here threads); float32 masters, the router's bias float32 in bf16
    too."""
    plan, network, (sources, expected) = plan_of(case), Network(), both_ends(case)
    got = blank(plan, dtype)
    keys: dict[str, Any] = {"dtype": dtype, "bucket_bytes": bucket_bytes}
    senders = [functools.partial(send, plan, r, t, network.port(r), **keys) for r, t in enumerate(sources)]
    receivers = [functools.partial(receive, plan, r, t.__getitem__, network.port(r), **keys) for r, t in enumerate(got)]
    sent = merge(run_threads(network, [*senders, *receivers])[: len(sources)])
    for rank, want in enumerate(expected):
        wrong = first_difference(got[rank], want, dtype)
        assert wrong is None, f"{case}\nrank {rank}: {wrong}"
    assert network.largest_bytes <= HEADER + bucket_bytes
    assert network.most_alive <= 2
    found = {
        (rank, tensor): digest
        for rank, tensors in enumerate(got)
        for tensor, digest in digests_of(plan.destination, rank, tensors.__getitem__).items()
    }
    compare(plan, sent, found)


@many(18)
@given(case=any_case("grid", "hf"), bucket_bytes=st.sampled_from([16, 100, 1 << 16]))
def test_exchanged_among_the_same_ranks_it_is_the_same(case: FamilyCase, bucket_bytes: int) -> None:
    """Both grids are the same processes, and one may have more of them than the other."""
    plan, network, (sources, expected) = plan_of(case, colocated=True), Network(), both_ends(case)
    got = blank(plan)
    ranks = range(max(len(sources), len(got)))
    jobs = [
        functools.partial(
            exchange,
            plan,
            rank,
            sources[rank] if rank < len(sources) else {},
            (got[rank] if rank < len(got) else {}).__getitem__,
            network.port(rank),
            dtype=torch.float32,
            bucket_bytes=bucket_bytes,
        )
        for rank in ranks
    ]
    run_threads(network, jobs)
    for rank, want in enumerate(expected):
        wrong = explain(case, rank, got[rank], want)
        assert wrong is None, f"{case}\n{wrong}"


def test_a_mistake_is_told_by_the_names_of_the_elements() -> None:
    """What a failing case prints; here the last rows of gate and up are exchanged."""
    case = FamilyCase(qwen3_config(), Grid(), Engine(), (False, False))
    want = both_ends(case)[1][0]
    name = "model.layers.2.mlp.gate_up_proj.weight"
    got = {**want, name: want[name].flip(0)}
    assert explain(case, 3, got, want) == (
        "rank 3: model.layers.2.mlp.gate_up_proj.weight[0, 0] holds model.layers.2.mlp.up_proj.weight[23, 0], "
        "expected model.layers.2.mlp.gate_proj.weight[0, 0]"
    )
