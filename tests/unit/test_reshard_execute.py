"""Plans executed in memory, against hand-written expectations (reshard_oracle)."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.errors import ConfigError, PlanError, WeightSyncError
from megarl.engines.sync.shared import HostMemory, SharedMemorySender, memory_file
from megarl.ops import slice_digests
from megarl.weights.reshard import execute
from megarl.weights.reshard import layout as boxes
from megarl.weights.reshard.buckets import HEADER, Bucket, MessageChannel, buckets_of, numbered
from megarl.weights.reshard.execute import (
    NO_ROOM,
    Arrival,
    Digests,
    Incoming,
    Outgoing,
    Work,
    compare,
    digests_of,
    exchange,
    fold,
    folds_of,
    merge,
    receive,
    send,
)
from megarl.weights.reshard.layouts import MegatronGrid, hf_layout, megatron_layout, vllm_layout
from megarl.weights.reshard.plan import RankPair, ReshardPlan, build_plan
from tests.unit.reshard_network import TIMEOUT_S
from tests.unit.reshard_oracle import (
    Case,
    Network,
    Tensors,
    assert_same,
    cases,
    configs,
    divisors,
    megatron_grid,
    qwen3_config,
    random_hf,
    run_threads,
    unwritten,
    vllm_rank,
)

fast = settings(max_examples=25)
FP32, BF16 = torch.float32, torch.bfloat16


def run_plan(
    plan: ReshardPlan, sources: list[Tensors], network: Network, bucket_bytes: int = 4096, dtype: torch.dtype = FP32
) -> tuple[list[Tensors], Digests]:
    """Send and receive in threads; what every destination rank holds then, and the digests of all senders."""
    got = [unwritten(dict(plan.destination.local_shapes(r)), dtype) for r in range(plan.destination.num_ranks)]
    written = [dict.fromkeys(tensors, 0) for tensors in got]

    def count(rank: int, local: str, numel: int) -> None:
        written[rank][local] += numel

    keys = {"dtype": dtype, "bucket_bytes": bucket_bytes}
    senders = [functools.partial(send, plan, r, t, network.port(r), **keys) for r, t in enumerate(sources)]
    receivers = [
        functools.partial(receive, plan, r, t.__getitem__, network.port(r), wrote=functools.partial(count, r), **keys)
        for r, t in enumerate(got)
    ]
    results = run_threads(network, [*senders, *receivers])
    assert written == [{name: t.numel() for name, t in tensors.items()} for tensors in got]
    return got, merge(results[: len(senders)])


def run_exchange(plan: ReshardPlan, sources: list[Tensors], bucket_bytes: int = 4096) -> list[Tensors]:
    """Every rank is source and destination of a colocated plan."""
    ranks = max(plan.source.num_ranks, plan.destination.num_ranks)
    shapes = [dict(plan.destination.local_shapes(r)) for r in range(plan.destination.num_ranks)]
    got = [unwritten(s) for s in shapes]
    network = Network()
    run_threads(
        network,
        [
            functools.partial(
                exchange,
                plan,
                r,
                sources[r] if r < len(sources) else {},
                (got[r] if r < len(got) else {}).__getitem__,
                network.port(r),
                dtype=FP32,
                bucket_bytes=bucket_bytes,
            )
            for r in range(ranks)
        ],
    )
    assert network.largest_bytes <= HEADER + bucket_bytes
    return got


def messages_of(plan: ReshardPlan, link: RankPair, bucket_bytes: int) -> list[Bucket]:
    """Messages from one rank to another, in float32, with those that end their channels."""
    buckets = numbered(buckets_of(plan, plan.moves, bucket_bytes, FP32))
    return [b for b in buckets if b.channel.src == link.src and link.dst in b.channel.dsts]


def to_engine(case: Case) -> ReshardPlan:
    return build_plan(
        megatron_layout(case.config, MegatronGrid(case.tp, case.pp, case.dp)),
        vllm_layout(case.config, case.engine_tp, case.replicas),
    )


def engine_digests(plan: ReshardPlan, got: list[Tensors]) -> Digests:
    return {
        (rank, tensor): value
        for rank, tensors in enumerate(got)
        for tensor, value in digests_of(plan.destination, rank, tensors.__getitem__).items()
    }


class Nowhere:
    """Transport of a sender whose receivers are not there."""

    def __init__(self) -> None:
        self.sent = 0

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def isend(self, message: torch.Tensor, rank: int, /) -> Nowhere:
        self.sent += len(message) - HEADER
        return self

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor], /) -> Arrival:
        raise AssertionError("trainer ranks only send")

    def wait(self) -> None:
        """Nothing is on its way."""


@pytest.mark.parametrize("apart", [False, True], ids=["one plan", "a plan for each"])
def test_replicas_are_packed_for_once_and_slices_digested_once(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas in one plan; those that take weights one after another are packed for one after another."""
    config = qwen3_config(tie_word_embeddings=False)
    source, shards = megatron_layout(config, MegatronGrid(pp=2)), megatron_grid(config, random_hf(config), 1, 2, 1)
    digested: list[int] = []
    packed: list[int] = []
    slice_of = execute.local_view

    def counted(slices: Sequence[Any]) -> torch.Tensor:
        digested.append(len(slices))
        return slice_digests(slices)

    def copied(*args: Any) -> torch.Tensor:
        packed.append(slice_of(*args).numel())
        return slice_of(*args)

    monkeypatch.setattr(execute, "slice_digests", counted)
    monkeypatch.setattr(execute, "local_view", copied)

    def sent_to(replicas: int) -> tuple[int, int, Digests]:
        """Bytes that both trainer ranks have sent, copies that they have made, and their digests."""
        packed.clear()
        plan, nowhere, found = build_plan(source, vllm_layout(config, 2, 1 if apart else replicas)), Nowhere(), []
        for rank, tensors in enumerate(shards):
            digested.clear()
            known: dict[Any, int] = {}
            for _ in range(replicas if apart else 1):
                sent = send(plan, rank, tensors, nowhere, dtype=FP32, bucket_bytes=256, known=known)
            found.append(sent)
            assert sum(digested) == len(known) > 0
            full = [b for b in buckets_of(plan, plan.moves_from(rank), 256, FP32) if b.slices]
            assert all(digested) and len(digested) <= len(full) < len(known)  # at most one call a bucket
        return nowhere.sent, len(packed), merge(found)

    once, copies, first = sent_to(1)
    fourfold, copies_for_four, found = sent_to(4)
    assert fourfold == 4 * once
    assert copies_for_four == (4 if apart else 1) * copies
    replicas = 1 if apart else 4
    assert found == {(2 * r + dst, tensor): n for (dst, tensor), n in first.items() for r in range(replicas)}


@fast
@given(case=cases(), bucket_bytes=st.sampled_from([4, 37, 256, 4096, 1 << 20]), dtype=st.sampled_from([FP32, BF16]))
def test_megatron_to_vllm_equals_hand_written_shards(case: Case, bucket_bytes: int, dtype: torch.dtype) -> None:
    hf = random_hf(case.config)
    plan = to_engine(case)
    network = Network()
    got, sent = run_plan(plan, megatron_grid(case.config, hf, case.tp, case.pp, case.dp), network, bucket_bytes, dtype)
    for rank, tensors in enumerate(got):
        assert_same(tensors, vllm_rank(case.config, hf, case.engine_tp, rank % case.engine_tp), dtype)
    assert network.largest_bytes <= HEADER + bucket_bytes
    assert network.most_alive <= 2
    compare(plan, sent, engine_digests(plan, got))


@fast
@given(case=cases())
def test_hf_to_megatron_equals_hand_written_shards(case: Case) -> None:
    hf = random_hf(case.config)
    plan = build_plan(hf_layout(case.config), megatron_layout(case.config, MegatronGrid(case.tp, case.pp, case.dp)))
    got, _ = run_plan(plan, [hf], Network())
    for tensors, expected in zip(got, megatron_grid(case.config, hf, case.tp, case.pp, case.dp), strict=True):
        assert_same(tensors, expected)


@fast
@given(case=cases(), bucket_bytes=st.sampled_from([16, 300, 4096]))
def test_megatron_to_hf_returns_every_bit(case: Case, bucket_bytes: int) -> None:
    hf = random_hf(case.config)
    grid = megatron_layout(case.config, MegatronGrid(case.tp, case.pp, case.dp))
    plan = build_plan(grid, hf_layout(case.config), colocated=True)
    assert_same(run_exchange(plan, megatron_grid(case.config, hf, case.tp, case.pp, case.dp), bucket_bytes)[0], hf)


@fast
@given(data=st.data(), config=configs(layers=4))
def test_grid_to_grid(data: st.DataObject, config: dict) -> None:
    tp_sizes = divisors(gcd(config["num_key_value_heads"], config["intermediate_size"]))

    def grid() -> MegatronGrid:
        return MegatronGrid(
            data.draw(st.sampled_from(tp_sizes)), data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 2))
        )

    a, b = grid(), grid()
    hf = random_hf(config)
    plan = build_plan(megatron_layout(config, a), megatron_layout(config, b), colocated=True)
    got = run_exchange(plan, megatron_grid(config, hf, a.tp, a.pp, a.dp))
    for tensors, expected in zip(got, megatron_grid(config, hf, b.tp, b.pp, b.dp), strict=True):
        assert_same(tensors, expected)


def test_equal_grids_move_nothing_between_ranks() -> None:
    layout = megatron_layout(qwen3_config(), MegatronGrid(2, 2, 2))
    assert build_plan(layout, layout, colocated=True).bytes_per_link(4) == {}


@fast
@given(case=cases(), data=st.data())
def test_one_flipped_element_is_named(case: Case, data: st.DataObject) -> None:
    plan = to_engine(case)
    bucket_bytes = 512
    link = data.draw(st.sampled_from(sorted({RankPair(move.src, move.dst) for move in plan.moves})))
    buckets = messages_of(plan, link, bucket_bytes)
    number = data.draw(st.integers(0, len(buckets) - 1).filter(lambda n: buckets[n].slices))
    chunk = data.draw(st.sampled_from(buckets[number].slices))
    element = chunk.offset // 4 + data.draw(st.integers(0, boxes.volume(chunk.box) - 1))
    victim = chunk.move

    def corrupt(src: int, dst: int, count: int, message: torch.Tensor) -> None:
        if (src, dst, count) == (*link, number):
            message[HEADER + element * 4] ^= 1

    sources = megatron_grid(case.config, random_hf(case.config), case.tp, case.pp, case.dp)
    got, sent = run_plan(plan, sources, Network(corrupt), bucket_bytes)
    with pytest.raises(WeightSyncError) as error:
        compare(plan, sent, engine_digests(plan, got))
    faults = [line for line in str(error.value).splitlines() if "destination rank" in line]
    assert len(faults) == 1
    assert faults[0].startswith(f"{victim.tensor} in ")
    assert victim.dst_local in faults[0]
    senders = sorted({move.src for move in plan.moves if move.dst == link.dst and move.tensor == victim.tensor})
    assert f"destination rank {link.dst}, from source ranks {senders}:" in faults[0]


@fast
@given(case=cases(), data=st.data(), lost=st.booleans())
def test_a_message_that_is_lost_or_comes_twice_is_named(case: Case, data: st.DataObject, lost: bool) -> None:
    """With its tensors and ranks, as soon as another message of its link arrives.

    A lost message can keep its sender from sending another: ranks then wait for each other in a circle of several
    sources and destinations, and the transport's timeout names the messages that are waited for.
    """
    plan, bucket_bytes = to_engine(case), 512
    link = data.draw(st.sampled_from(sorted({RankPair(move.src, move.dst) for move in plan.moves})))
    buckets = messages_of(plan, link, bucket_bytes)
    number = data.draw(st.integers(0, len(buckets) - 2))
    circle = lost and plan.source.num_ranks > 1 and plan.destination.num_ranks > 1
    network = Network(faults={(*link, number): 0 if lost else 2}, timeout_s=1.0 if circle else TIMEOUT_S)
    sources = megatron_grid(case.config, random_hf(case.config), case.tp, case.pp, case.dp)
    with pytest.raises(WeightSyncError) as error:
        run_plan(plan, sources, network, bucket_bytes)
    said = str(error.value)
    if circle and "nothing came" in said:
        assert "from source rank" in said and ("did not arrive" in said or "was not taken" in said)
        return
    assert said.startswith(f"{buckets[number + (not lost)]} was expected")  # of a doubled message, the one after it
    assert ("was lost" if lost else "came twice") in said


def test_digest_of_a_tensor_is_the_same_number_everywhere() -> None:
    """Trainer shards, engine shards and the file add up to one checksum (vocabulary cut unevenly, no copies)."""
    config = qwen3_config(num_key_value_heads=4)
    hf = random_hf(config)
    file = digests_of(hf_layout(config), 0, hf.__getitem__)
    trainer, engine = megatron_layout(config, MegatronGrid(2)), vllm_layout(config, 4)
    parts = [digests_of(trainer, r, t.__getitem__) for r, t in enumerate(megatron_grid(config, hf, 2, 1, 1))]
    shards = [digests_of(engine, r, vllm_rank(config, hf, 4, r).__getitem__) for r in range(4)]
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.3.self_attn.k_proj.weight"):
        assert sum(p.get(name, 0) for p in parts) % 2**64 == file[name]
        assert sum(s.get(name, 0) for s in shards) % 2**64 == file[name]


@given(
    digests=st.dictionaries(st.text(max_size=8), st.integers(0, 2**64 - 1), min_size=1, max_size=5),
    change=st.integers(1, 2**64 - 1),
    data=st.data(),
)
def test_a_fold_shows_any_one_difference_and_adds_up(digests: dict[str, int], change: int, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(digests)))
    other = {**digests, name: (digests[name] + change) % 2**64}
    assert fold(other) != fold(digests)
    first = {tensor: data.draw(st.integers(0, 2**64 - 1)) for tensor in digests}
    second = {tensor: (digest - first[tensor]) % 2**64 for tensor, digest in digests.items()}
    senders = [folds_of({(3, tensor): digest for tensor, digest in part.items()}) for part in (first, second)]
    assert merge(senders) == folds_of({(3, tensor): digest for tensor, digest in digests.items()})
    if len(digests) > 1 and digests[name] != 0:
        assert fold({tensor: digest for tensor, digest in digests.items() if tensor != name}) != fold(digests)


def test_a_missing_digest_is_an_error_naming_its_tensor() -> None:
    plan = build_plan(hf_layout(qwen3_config()), vllm_layout(qwen3_config(), 1))
    with pytest.raises(
        WeightSyncError, match=r"model\.norm\.weight in model\.norm\.weight on destination rank 0.*found nothing"
    ):
        compare(plan, {(0, "model.norm.weight"): 1}, {})


def test_a_rank_looks_for_its_part_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with every sync, nor in the pause that it takes; another plan, bucket size or dtype is looked at again."""
    config = qwen3_config()
    asked: list[ReshardPlan] = []
    for side in ("moves_from", "moves_to"):
        moves = getattr(ReshardPlan, side)
        monkeypatch.setattr(ReshardPlan, side, lambda plan, rank, moves=moves: asked.append(plan) or moves(plan, rank))
    for plan in (build_plan(hf_layout(config), vllm_layout(config, 1)) for _ in range(2)):
        for bucket_bytes, dtype in ((4096, FP32), (4096, BF16), (999, BF16)):
            asked.clear()
            for seed in (1, 2):
                hf = random_hf(config, seed)
                got, sent = run_plan(plan, [hf], Network(), bucket_bytes, dtype)
                assert_same(got[0], vllm_rank(config, hf, 1, 0), dtype)
                compare(plan, sent, engine_digests(plan, got))
            assert asked == [plan, plan]  # once by either side


def test_tensors_of_another_shape_are_refused_before_anything_is_sent() -> None:
    config = qwen3_config()
    plan = build_plan(megatron_layout(config, MegatronGrid()), vllm_layout(config, 1))
    tensors = megatron_grid(config, random_hf(config), 1, 1, 1)[0]
    tensors["output_layer.weight"] = tensors["output_layer.weight"][:70]
    with pytest.raises(PlanError, match=r"output_layer\.weight .* must have shape \(128, 8\), found \(70, 8\)"):
        send(plan, 0, tensors, Network().port(0), dtype=FP32, bucket_bytes=64)


def test_a_bucket_smaller_than_an_element_is_refused() -> None:
    plan = build_plan(hf_layout(qwen3_config()), vllm_layout(qwen3_config(), 1))
    with pytest.raises(ConfigError, match=r"sync\.bucket_bytes=3"):
        send(plan, 0, random_hf(qwen3_config()), Network().port(0), dtype=FP32, bucket_bytes=3)


def test_parameters_that_require_gradients_are_sources_and_destinations() -> None:
    config = qwen3_config()
    hf = {name: torch.nn.Parameter(t) for name, t in random_hf(config).items()}
    plan = replace(build_plan(hf_layout(config), hf_layout(config)), colocated=True)
    got = {name: torch.nn.Parameter(torch.zeros_like(t)) for name, t in hf.items()}
    exchange(plan, 0, hf, got.__getitem__, Network().port(0), dtype=FP32, bucket_bytes=1 << 20)
    assert_same(got, hf)


@pytest.mark.parametrize("contiguous", [True, False])
def test_slices_of_neighbouring_experts_are_written_as_one(contiguous: bool) -> None:
    """Also into memory of another order, where each slice is copied by itself."""
    config = qwen3_config() | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
    }
    generator = torch.Generator().manual_seed(0)
    hf = {name: torch.randn(shape, generator=generator) for name, shape in hf_layout(config).local_shapes(0).items()}
    plan = replace(build_plan(hf_layout(config), vllm_layout(config, 1)), colocated=True)
    got = unwritten(dict(plan.destination.local_shapes(0)))
    if not contiguous:
        got = {name: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor for name, tensor in got.items()}
    writes: list[str] = []

    def write(local: str) -> torch.Tensor:
        writes.append(local)
        return got[local]

    exchange(plan, 0, hf, write, Network().port(0), dtype=FP32, bucket_bytes=1 << 20)
    for layer in range(config["num_hidden_layers"]):
        experts = [f"model.layers.{layer}.mlp.experts.{i}" for i in range(6)]
        w13, w2 = (f"model.layers.{layer}.mlp.experts.routed_experts.{name}" for name in ("w13_weight", "w2_weight"))
        both = (torch.cat([hf[f"{e}.gate_proj.weight"], hf[f"{e}.up_proj.weight"]]) for e in experts)
        assert torch.equal(got[w13], torch.stack(list(both)))
        assert torch.equal(got[w2], torch.stack([hf[f"{e}.down_proj.weight"] for e in experts]))
        assert writes.count(w13) == writes.count(w2) == 1


HUGE = 1 << 50


class Allocating:
    """A transport that takes memory for each message at once."""

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def isend(self, message: torch.Tensor, rank: int, /) -> Work:
        raise AssertionError("nothing could be packed")

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor], /) -> Arrival:
        raise AssertionError(f"there was room for {spare().numel()} bytes")


@pytest.mark.parametrize("ends", ["closed", "begun again"])
def test_memory_that_a_receiver_still_maps_is_not_truncated(ends: str) -> None:
    """One that was given up while it hung reads on from it: beyond a file's end that would be SIGBUS."""
    file = memory_file()
    sender = SharedMemorySender(Allocating(), frozenset({0}), HostMemory(file))
    sender.allocate(100).fill_(7)
    with open(f"/proc/{file.pid}/fd/{file.descriptor}", "rb") as mapped:
        if ends == "closed":
            sender.close()
        else:
            sender = SharedMemorySender(Allocating(), frozenset({0}), HostMemory(file))
        assert mapped.read(100) == bytes([7]) * 100
    assert os.fstat(file.descriptor).st_size == 0 and not os.get_inheritable(file.descriptor)
    sender.allocate(10).fill_(8)
    with open(f"/proc/{file.pid}/fd/{file.descriptor}", "rb") as mapped:
        assert mapped.read(10) == bytes([8]) * 10
    os.close(file.descriptor)


def test_a_bucket_without_memory_is_told_from_other_failures() -> None:
    """Allocations that really fail, on either side and in shared memory; the words go to the other processes."""
    plan = build_plan(hf_layout(qwen3_config()), vllm_layout(qwen3_config(), 1))
    buckets, rank = [Bucket(MessageChannel(0, (0,)), HUGE, ())], plan.destination.num_ranks
    shared = SharedMemorySender(Allocating(), frozenset({0}), HostMemory(memory_file()))
    attempts: list[Callable[[], object]] = [
        lambda: Outgoing(plan, {}, Allocating(), buckets),
        lambda: Outgoing(plan, {}, shared, buckets),
        lambda: Incoming(plan, rank, {}.__getitem__, lambda local, numel: None, Allocating(), buckets),
    ]
    for attempt in attempts:
        with pytest.raises(WeightSyncError, match=f"{NO_ROOM} {HUGE + HEADER} bytes: .*annot allocate memory"):
            attempt()
