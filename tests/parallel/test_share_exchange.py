"""Shares of a step: what ranks put together of theirs, and updates with the bits of ranks that hold all of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.algorithms import AlgorithmConfig, KLConfig
from megarl.config.schema import ParallelConfig
from tests.parallel.batches import held_by, random_sequences
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, save_tiny_qwen3

LENGTHS = [3, 1, 9, 4, 4, 7, 2, 5]
HELD = [[0, 3, 6], [1, 2, 3], [2, 6], []]
"""Of four ranks; 4, 5 and 7 are held by nobody, and the last one holds nothing."""


def in_pieces(rank: int, pieces: list[int]) -> list[dict[str, Any]]:
    """Runs in each rank: what ``put_together`` finds with pieces of each size."""
    import torch.distributed as dist

    from megarl.learn.batching import sequences as module

    dist.init_process_group("gloo")
    found = []
    for module.PIECE in pieces:
        found.append(put_together(rank))
    return found


def put_together(rank: int) -> dict[str, Any]:
    """Values of a rank's share, put together for the step and back."""
    from megarl.learn.batching import StepShare

    share, total = StepShare.of(HELD[rank], torch.tensor(LENGTHS)), sum(LENGTHS)
    found: dict[str, Any] = {"numbers": share.numbers.tolist(), "wrong": []}
    generator = torch.Generator().manual_seed(7)
    odd = torch.tensor([-0.0, 0.0, math.nan, -math.nan, math.inf, -math.inf, 5e-324, -1.5], dtype=torch.float64)
    values = {
        "float64": odd,
        "float32": odd.float(),
        "pairs": torch.randn(len(LENGTHS), 2, 3, generator=generator),
        "int64": torch.tensor([-(2**63), 2**63 - 1, 0, -1, 1, 5, 6, 7]),
        "int16": torch.arange(-4, 4).to(torch.int16),
        "bool": torch.arange(8) % 3 == 0,
    }
    for name, whole in values.items():
        got = share.together(whole[share.numbers])
        bits = torch.int64 if whole.dtype == torch.float64 else torch.int32
        if whole.is_floating_point():
            got, whole = got.view(bits), whole.view(bits)
        if got.dtype != whole.dtype or not torch.equal(got, whole):
            found["wrong"].append(name)
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), share.lengths)
    held = torch.isin(row, share.numbers)
    computed = torch.randn(total, generator=generator)
    first = torch.tensor([next(r for r in range(4) if i in ALL[r]) for i in range(len(LENGTHS))])
    mine = torch.where(first[row] == rank, computed, 0.0)[held]
    share.add_up(mine)
    found["summed"] = torch.equal(mine, computed[held])
    return found


ALL = [[0, 3, 4, 6], [1, 2, 3, 5], [2, 6, 7], [3]]
"""``HELD`` with what ``StepShare.of`` deals."""


def test_ranks_put_together_what_each_holds() -> None:
    """In pieces of one value, of some, and all at once."""
    for rank, found in enumerate(run_grid(4, in_pieces, [1, 10, 2**20])):
        assert found == [{"numbers": ALL[rank], "wrong": [], "summed": True}] * 3


def step_of(seed: int) -> Any:
    """Sequences of unequal lengths, some of them samples of one trajectory, with all that a loss takes."""
    sequences = random_sequences(seed, 17, VOCAB)
    sequences.mask[sequences.cu_seqlens[1:] - 1] = False
    generator = torch.Generator().manual_seed(seed)
    for name in ("old_logp", "ref_logp", "advantages", "engine_logp"):
        setattr(sequences, name, torch.randn(len(sequences.tokens), generator=generator) * 0.1 - 2.0)
    sequences.trajectory = torch.tensor([0, 0, 0, *range(1, 8), 8, 8, *range(9, 14)])
    return sequences


def on_grids(rank: int, path: str, cases: list[tuple[str, bool]]) -> dict[tuple[str, bool], dict[str, Any]]:
    """Runs in each rank: what ``both_ways`` finds in each case."""
    from megatron.core import parallel_state

    found = {}
    for grid, packed in cases:
        found[grid, packed] = both_ways(path, GRIDS[grid], packed)
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()
    return found


def both_ways(path: str, parallel: ParallelConfig, packed: bool) -> dict[str, Any]:
    """The same step with all sequences on each rank, and with a share of them."""
    from megarl.learn import algorithms
    from megarl.learn.batching import MicroBatching, StepShare, dealt
    from megarl.learn.training import objectives
    from tests.parallel.parity import whole_gradients
    from tests.parallel.test_megatron_on_cpu import make_actor

    actor = make_actor(path, parallel)
    actor.model.micro_batching = MicroBatching(
        dp=parallel.dp, cp=parallel.cp, max_tokens=48 if packed else None, rows=2
    )
    settings = AlgorithmConfig(aggregation="seq_mean_token_mean", clip_high=0.28, kl=KLConfig(0.1, "k3"))
    whole = step_of(1)
    updates = [[[i] for i in range(9)], [[i] for i in range(9, 16)]]
    taken = {
        number
        for units in updates
        for chunk in dealt(whole.lengths.tolist(), actor.model.micro_batching, units)[actor.model.dp_rank]
        for number in chunk
    }
    share = StepShare.of(taken, whole.lengths)
    found: dict[str, Any] = {"held": len(share.numbers), "of": len(whole)}
    seen: list[Any] = []
    for sequences in (whole, held_by(whole, share)):
        lists = [actor.model.micro_batches(sequences, units) for units in updates]
        outputs = actor.model.outputs(sequences, lists)
        sequences = replace(sequences, old_logp=torch.zeros_like(outputs))
        objective = objectives.policy(algorithms.get("grpo"), settings, sequences)
        first = objectives.policy(algorithms.get("grpo"), settings, sequences, unchanged=True)
        sums = [actor.backward(sequences, lists[0], first, sequences.old_logp)]
        sequences.old_logp += torch.where(sequences.old_logp == 0, outputs, 0.0)
        sums.append(actor.backward(sequences, lists[1], objective))
        names = [dict(chunk.module.named_parameters()) for chunk in actor.model.chunks]
        gradients = {name: t.clone() for name, t in whole_gradients(actor.model.chunks, names).items()}
        norm = actor.gradient_norm()
        seen.append((sequences, outputs, sums, gradients, norm))
    (_, outputs, *rest), (part, own, *others) = seen
    kept = torch.isin(whole.row, share.numbers)
    found["outputs"] = torch.equal(outputs[kept], own) and torch.equal(seen[0][0].old_logp[kept], part.old_logp)
    found["sums"], found["norm"] = rest[0] == others[0], rest[2] == others[2]
    found["gradients"] = all(torch.equal(t, others[1][name]) for name, t in rest[1].items()) and len(rest[1]) > 0
    return found


GRIDS = {
    "dp2": ParallelConfig(dp=2),
    "dp4": ParallelConfig(dp=4),
    "tp2-dp2": ParallelConfig(tp=2, dp=2),
    "pp2-dp2": ParallelConfig(pp=2, dp=2),
    "cp2-dp2": ParallelConfig(cp=2, dp=2),
}
BOTH = (True, False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), layers=2)


@pytest.fixture(scope="module")
def ranks(model: Path) -> dict[tuple[str, bool], list[dict[str, Any]]]:
    """Grid, and whether rows are packed -> what each rank found; all cases of a world in one set of processes."""
    found: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for world in (2, 4):
        cases = [(grid, packed) for grid in GRIDS for packed in BOTH if GRIDS[grid].world_size == world]
        by_rank = run_grid(world, on_grids, str(model), cases)
        found |= {case: [answers[case] for answers in by_rank] for case in cases}
    return found


@pytest.mark.parametrize("packed", BOTH)
@pytest.mark.parametrize("grid", list(GRIDS))
def test_a_share_gives_the_bits_of_the_whole_step(ranks: Any, grid: str, packed: bool) -> None:
    """Log-probs, loss, metrics, gradients and their norm; one sequence of the step is in no update."""
    for found in ranks[grid, packed]:
        assert found.pop("held") <= found.pop("of") / GRIDS[grid].dp + 2
        assert found == {"outputs": True, "sums": True, "norm": True, "gradients": True}
