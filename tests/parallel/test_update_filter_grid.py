"""Updates that are not finite, on real grids: one rank's NaN is left out on all, and nothing of it stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, UpdateFilterConfig
from tests.parallel.batches import sequences_of
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, save_tiny_qwen3
from tests.parallel.test_megatron_on_cpu import make_actor, parts

SPOILED: list[Callable[[Any], Any]] = [
    lambda x: x * float("nan"),
    lambda x: x * float("inf"),
    lambda x: x + float("inf"),
]
ACTOR, CRITIC = ParallelConfig(tp=2, dp=2), ParallelConfig(pp=2, dp=2)


def bits(model: Any) -> dict[str, torch.Tensor]:
    """Everything that an update changes on this rank: weights, masters, moments, counts of steps."""
    from megarl.weights.checkpoint.training.save import inner_optimizers, start_moments

    start_moments(model.optimizer.inner)
    found = {f"weight {name}": tensor.clone() for name, tensor in model.model.tensors.items()}
    for i, inner in enumerate(inner_optimizers(model.optimizer.inner)):
        for j, group in enumerate(inner.param_groups):
            found[f"{i} {j} step"] = torch.tensor(group["step"])
            for k, p in enumerate(group["params"]):
                moments = inner.state[p]
                found |= {
                    f"{i} {j} {k} {name}": t.clone()
                    for name, t in (("master", p.data), *moments.items())
                    if isinstance(t, torch.Tensor)
                }
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def on_ranks(rank: int, path: str, folder: str) -> dict[str, Any]:
    """Runs in each rank: a good update of actor and critic, a bad one, a good one; and the good ones alone."""
    from megarl.config.algorithms import AlgorithmConfig
    from megarl.core.errors import JobError
    from megarl.learn import algorithms
    from megarl.learn.batching import MicroBatching
    from megarl.learn.parallel import process_groups
    from megarl.learn.training import objectives
    from megarl.learn.training.model import TrainedModel
    from megarl.learn.training.objectives import Objective
    from megarl.train.ranks import TrainState
    from megarl.train.update.learner import RollBack, UpdateFilter
    from megarl.weights.checkpoint.formats import hf
    from megarl.weights.checkpoint.training import state

    actor = make_actor(path, ACTOR)
    micro_batching = MicroBatching(dp=CRITIC.dp, rows=2)
    grid = process_groups.Grid(CRITIC, seed=1)
    hf_config, model = hf.read_hf_config(Path(path)), ModelConfig(path=path, dtype="float32")
    critic = TrainedModel(hf_config, model, CRITIC, None, micro_batching, OptimizerConfig(lr=1e-2), grid.active)
    critic.model.load_hf(Path(path), score="zeros")
    said: list[str] = []
    events: list[Any] = []
    reporter: Any = SimpleNamespace(
        log=said.append, event=lambda kind, data: events.append(data) if rank == 0 else None
    )
    at_step = TrainState("rl", 4)
    updates = UpdateFilter(UpdateFilterConfig(), reporter)

    def rows_of(step: int) -> Any:
        g = torch.Generator().manual_seed(step)
        tokens, mask = torch.randint(2, VOCAB, (8, 16), generator=g), torch.rand(8, 16, generator=g) < 0.5
        mask[:, -1] = False
        return sequences_of(tokens, mask)

    def update(
        name: str, step: int, spoiled: Callable[[Any], Any] | None = None, where: int = -1
    ) -> tuple[bool, float]:
        """``spoiled`` of the loss of the second micro-batch, on rank ``where`` alone."""
        model, rows = (actor, rows_of(step)) if name == "actor" else (critic, rows_of(step + 100))
        usual, calls = objectives.policy(algorithms.get("sft"), AlgorithmConfig(), rows), 0

        def loss(kept: Any, answers: torch.Tensor) -> Any:
            nonlocal calls
            calls += 1
            if name == "critic":  # squares of scores
                found = algorithms.Loss((answers[:, 0] - 1).square().sum(), {})
            else:
                found = usual.loss(kept, answers)
            if calls == 2 and rank == where and spoiled is not None:
                return algorithms.Loss(spoiled(found.total), found.metrics)
            return found

        sums = model.backward(rows, model.model.micro_batches(rows), Objective(name, usual.count, loss))
        norm = model.gradient_norm()
        admitted, _ = updates.admits(at_step, name, sums, norm)
        if admitted:
            model.step(1e-2)
        return admitted, norm

    out: dict[str, Any] = {"admitted": []}
    update("actor", 0), update("critic", 0)
    state.save(Path(folder), 1, parts(actor), {"phase": "rl"}, keep=1)
    for name, where, kinds in (
        ("actor", 0, 3),
        ("actor", 3, 2),
        ("critic", 2, 3),
    ):  # rank 3 is no first of a tensor-parallel pair
        for spoiled in SPOILED[:kinds]:
            before = bits(actor), bits(critic)
            updates.begin()
            admitted, norm = update(name, 1, spoiled, where)
            out["admitted"].append((name, admitted, str(norm), updates.end(at_step)["training/skipped_updates"]))
            assert same(bits(actor), before[0]) and same(bits(critic), before[1])
            updates.begin()
            updates.end(at_step)  # of a good step, so that they are not in a row
    out["said"], out["events"] = said, events
    # A good update is what it would have been without them.
    at = bits(actor)
    update("actor", 2)
    after = bits(actor)
    assert not same(at, after)
    state.load(Path(folder) / "global_step_1", parts(actor))
    assert same(bits(actor), at), "nothing of the bad ones stayed, and a checkpoint brings all back"
    update("actor", 2)
    assert same(bits(actor), after)
    # The other verdicts.
    for action, kind in (("stop", JobError), ("rollback", RollBack)):
        updates = UpdateFilter(UpdateFilterConfig(on_nonfinite=action), reporter)  # type: ignore[arg-type]
        with pytest.raises(kind) as raised:
            update("critic", 3, SPOILED[0], 3)
        out[action] = str(raised.value)
    return out


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    model = save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), layers=2)
    return run_grid(4, on_ranks, str(model), str(tmp_path_factory.mktemp("saved")))


def test_every_rank_leaves_it_out(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert [(name, admitted, left_out) for name, admitted, _, left_out in rank["admitted"]] == [
            ("actor", False, 1.0)
        ] * 5 + [("critic", False, 1.0)] * 3
        finite = [math.isfinite(float(norm)) for _, _, norm, _ in rank["admitted"]]
        assert finite == [False, False, True, False, False, False, False, True], (
            "of two only the loss is infinite, on one rank"
        )


def test_it_is_said_where_it_came_from(ranks: list[dict[str, Any]]) -> None:
    said = ranks[0]["said"]
    assert said[0].startswith("WARNING: step 5, update 1 of the actor: the loss is nan on rank 0, ")
    assert (
        "the loss is nan on rank 2" in said[5]
        and "of the critic" in said[5]
        and "trainer.update_filter.on_nonfinite=skip" in said[5]
    )
    assert "the loss is inf on rank 2, the gradient's norm is " in said[7]
    assert all(rank["said"] == said for rank in ranks)
    assert [event["action"] for event in ranks[0]["events"]][:8] == ["skip"] * 8 and not ranks[1]["events"]


def test_the_other_verdicts_are_every_ranks_too(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert (
            "step 5, update 1 of the critic: the loss is nan on rank 3" in rank["stop"]
            and "on_nonfinite=stop" in rank["stop"]
        )
        assert "the loss is nan on rank 3" in rank["rollback"]
