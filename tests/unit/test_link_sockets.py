"""Sockets that weight links take of a large job's ranks, counted from its plan."""

from __future__ import annotations

from collections import Counter

import pytest
from plan import JOBS, QWEN3_235B, Job

from megarl.config.schema import RolloutConfig
from megarl.engines.sync.shared import Places
from megarl.train.sync.fleet import EnginePlans, partners_of, parts_of
from megarl.weights.reshard.layouts import MegatronGrid, megatron_layout

TRAINERS, ENGINES, TP = 256, 32, 8
LIMIT = 600
"""Most sockets of a rank. The usual limit of open files is 1,024, and a rank has others."""
[DENSE] = [job.config for job in JOBS if job.name == "Llama-3-70B"]
EXPERTS = {**QWEN3_235B, "num_hidden_layers": 8}
"""Qwen3-235B-A22B with 8 of its 94 layers."""
EXPERTS_GRID = MegatronGrid(tp=4, pp=8, dp=8, ep=32)
LARGE = (
    Job("dense", DENSE, MegatronGrid(tp=8, pp=4, dp=8), TP, ENGINES),
    Job("experts in parallel", EXPERTS, EXPERTS_GRID, TP, ENGINES, True),
    Job("every rank sends to every worker", EXPERTS, EXPERTS_GRID, TP, ENGINES),
)
MOST = {"dense": (14, 14), "experts in parallel": (48, 50), "every rank sends to every worker": (256, 256)}
"""Most workers that a trainer rank sends to, most trainer ranks that a worker receives from."""


@pytest.mark.parametrize("job", LARGE, ids=lambda job: job.name)
def test_sockets_of_a_large_job(job: Job) -> None:
    plan = job.plan()
    assert plan.source.num_ranks == TRAINERS
    pairs = plan.bytes_per_link(2)
    sent, received = Counter(pair.src for pair in pairs), Counter(pair.dst for pair in pairs)
    assert (max(sent.values()), max(received.values())) == MOST[job.name]
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
