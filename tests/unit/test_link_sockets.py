"""Sockets that weight links take of a large job's ranks, counted from its plan."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from megarl.core.config.schema import RolloutConfig
from megarl.engine.sync.shared import Places
from megarl.train.sync.parts import EnginePlans, partners_of, parts_of
from megarl.weights.reshard.layouts import MegatronGrid, megatron_layout, vllm_layout
from megarl.weights.reshard.plan import ReshardPlan, build_plan

TRAINERS, ENGINES, TP = 256, 32, 8
LIMIT = 600
"""Most sockets of a rank. The usual limit of open files is 1,024, and a rank has others."""
DENSE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    **DENSE,
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""Qwen3-235B-A22B with 8 of its 94 layers."""
GRIDS = {
    "dense": (DENSE, MegatronGrid(tp=8, pp=4, dp=8), False),
    "experts in parallel": (EXPERTS, MegatronGrid(tp=4, pp=8, dp=8, ep=32), True),
    "every rank sends to every worker": (EXPERTS, MegatronGrid(tp=4, pp=8, dp=8, ep=32), False),
}
MOST = {"dense": (14, 14), "experts in parallel": (48, 50), "every rank sends to every worker": (256, 256)}
"""Most workers that a trainer rank sends to, most trainer ranks that a worker receives from."""


def plan_of(case: str) -> ReshardPlan:
    config, grid, expert_parallel = GRIDS[case]
    source = megatron_layout(config, grid, transformer_impl="transformer_engine")
    assert source.num_ranks == TRAINERS
    return build_plan(source, vllm_layout(config, TP, ENGINES, expert_parallel=expert_parallel))


@pytest.mark.parametrize("case", GRIDS)
def test_sockets_of_a_large_job(case: str) -> None:
    pairs = plan_of(case).bytes_per_link(2)
    sent, received = Counter(pair.src for pair in pairs), Counter(pair.dst for pair in pairs)
    assert (max(sent.values()), max(received.values())) == MOST[case]
    one_store, listening = 1, ENGINES  # one socket of each link listens
    full_mesh = ENGINES * (TRAINERS + TP - 1) + listening + one_store
    assert full_mesh == 8449
    trainers = {rank: sent[rank] + listening + one_store for rank in range(TRAINERS)}
    # Rank 0 also serves the store: its connection with a worker ends when that one's link has been joined.
    trainers[0] += TRAINERS + 1
    joining = [TRAINERS + 2 + (ENGINES - joined) * TP + joined + min(joined * TP, sent[0]) for joined in range(33)]
    workers = {rank: received[rank] + 1 + one_store for rank in range(ENGINES * TP)}
    assert max(*trainers.values(), *joining, *workers.values()) < LIMIT


def test_both_sides_find_the_same_partners() -> None:
    """Each trainer rank from its own moves, each worker from its own, also where engines have plans of their own."""
    config = {**DENSE, "num_hidden_layers": 4}
    source = megatron_layout(config, MegatronGrid(tp=2, pp=2, dp=2))
    sizes = [2, 2, 2]
    for each in (False, True):
        plans = EnginePlans(source, config, RolloutConfig(tp=2), each=each)
        parts = parts_of(plans.of_engines(sizes), sizes, Places())
        by_trainers = {
            (rank, engine, worker)
            for rank in range(source.num_ranks)
            for engine, workers in enumerate(partners_of(parts, sizes, rank))
            for worker in workers
        }
        by_workers = {
            (rank, engine, worker)
            for engine in range(len(sizes))
            for worker in range(2)
            for rank in plans.of(engine).senders_to(worker if each else 2 * engine + worker)
        }
        assert by_trainers == by_workers and by_trainers
