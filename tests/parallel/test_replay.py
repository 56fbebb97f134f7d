"""Routing replay on real grids: given ids choose the experts, as in transformers with the same ids forced on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.algorithms import AlgorithmConfig
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, RouterConfig, TrainerConfig
from tests.parallel.batches import sequences_of
from tests.parallel.exact import exact_logps, rounding
from tests.parallel.families import VOCAB, hf_model
from tests.parallel.grid import run_grid
from tests.parallel.parity import gradient_errors, gradients_by_file, make_batch, next_token_logp, whole_gradients

GRADIENT_TOLERANCE = 1e-5
"""Of gradients, relative to each parameter's largest entry."""
ROUNDING = 1.5
"""Largest error of log-probs against float64, in multiples of the error that transformers has in float32. Two results
within it are at most twice as far apart. Absolute bounds would depend on the processor's order of summation."""
SP = ParallelConfig(tp=2, sequence_parallel=True)


@dataclass(frozen=True)
class Case:
    """A grid, and how it cuts the batch and computes."""

    grid: str
    parallel: ParallelConfig
    recompute: str = "none"
    packed: bool = True
    router: RouterConfig = RouterConfig()


CASES = (
    Case("one process", ParallelConfig()),
    Case("one process, padded", ParallelConfig(), "full", packed=False),
    Case("tp2-sp", SP),
    Case("tp2-sp, recompute", SP, "full"),
    Case("tp2-sp, balanced", SP, router=RouterConfig(aux_loss_coef=1e-12)),
    Case("ep2", ParallelConfig(dp=2, ep=2)),
    Case("pp2", ParallelConfig(pp=2), "full"),
    Case("pp2-vpp2", ParallelConfig(pp=2, vpp=2)),
    Case("cp2", ParallelConfig(cp=2)),
    Case("tp2-sp pp2 ep2", replace(SP, pp=2, ep=2), "full"),
    Case("cp2 ep2", ParallelConfig(cp=2, ep=2)),
)
FAMILIES = ("qwen3_moe", "qwen3_moe_mixed", "deepseek_v3", "mixtral", "ernie4_5_moe")


def families_of(case: Case, soak: bool) -> tuple[str, ...]:
    """Every third of them, in turn among the grids; ``make soak`` has the others."""
    mine = FAMILIES[CASES.index(case) % 3 :: 3]
    return tuple(family for family in FAMILIES if family not in mine) if soak else mine


def chosen_of(gate: Any) -> list[torch.Tensor]:
    """Ids [t, K] of every later forward pass of a gate."""
    found: list[torch.Tensor] = []
    gate.register_forward_hook(lambda module, given, output: found.append(output[2]))
    return found


def force(gate: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Let a gate of transformers choose the experts ``ids`` [t, K], and weigh them as its family does; return a list to
    which each pass adds those that it would have chosen."""
    choose, others = gate.forward, []
    deepseek, scale = hasattr(gate, "e_score_correction_bias"), getattr(gate, "routed_scaling_factor", 1.0)

    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        others.append(choose(hidden)[2])
        logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
        weights = (logits.sigmoid() if deepseek else logits.softmax(-1)).gather(1, ids)
        if getattr(gate, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * scale, ids

    gate.forward = forward
    return others


def reference(folder: Path, family: str) -> None:
    """Save the family's model, and beside it the batch, ids of its own, forced ones, and what transformers makes of the
    forced ones."""
    model = hf_model(family, **({"num_local_experts": 8} if family == "mixtral" else {}))
    model.save_pretrained(folder)
    batch = make_batch(lambda tokens: next_token_logp(model, tokens)[0].detach())
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    rows, width = batch["tokens"].shape
    own = [chosen_of(gate) for gate in gates]
    with torch.no_grad():
        model(batch["tokens"])
    own_ids = torch.stack([found[0].view(rows, width, -1) for found in own], 2)
    experts, top_k = gates[0].weight.shape[0], own_ids.shape[-1]
    generator = torch.Generator().manual_seed(5)
    forced = torch.rand(rows, width, len(gates), experts, generator=generator).argsort(-1)[..., :top_k]
    others = [force(gate, forced[:, :, i].reshape(rows * width, top_k)) for i, gate in enumerate(gates)]
    logp = next_token_logp(model, batch["tokens"])[0]
    loss = -logp[batch["mask"]].mean()
    loss.backward()
    other_ids = torch.stack([found[0].view(rows, width, -1) for found in others], 2)
    changed = (other_ids.sort(-1).values != forced.sort(-1).values).any(-1)
    saved = {"logp": logp.detach(), "own": own_ids, "forced": forced, "changed": changed}
    following = batch["tokens"].roll(-1, 1)[..., None]
    saved["exact"] = exact_logps(model, batch["tokens"]).gather(-1, following)[..., 0]
    torch.save((batch, saved | {"loss": float(loss.detach()), "gradients": gradients_by_file(model)}), folder / "t.pt")


def on_grid(rank: int, root: str, cases: list[Case], soak: bool) -> dict[tuple[str, str], dict[str, Any]]:
    """Runs in each rank: this rank's errors in each case."""
    from megatron.core import parallel_state

    from megarl.learn.parallel import process_groups

    found = {}
    for case in cases:
        process_groups.initialize(case.parallel, seed=1)
        for family in families_of(case, soak):
            found[family, case.grid] = _on_case(rank, Path(root) / family, case)
        parallel_state.destroy_model_parallel()
    return found


def _on_case(rank: int, path: Path, case: Case) -> dict[str, Any]:
    from megarl.learn import algorithms
    from megarl.learn.models.gpt import unwrap
    from megarl.learn.training import objectives
    from megarl.learn.training.model import TrainedModel, micro_batching_for
    from megarl.learn.training.schedule import Head
    from megarl.weights.checkpoint.formats import hf

    hf_config = hf.read_hf_config(path)
    batch, expected = torch.load(path / "t.pt", weights_only=False)
    trainer = TrainerConfig(max_tokens_per_micro_batch=48, packing=case.packed, micro_batch_size=2)
    settings = ModelConfig(path=str(path), recompute=case.recompute, router=case.router)  # type: ignore[arg-type]
    actor = TrainedModel(
        hf_config, settings, case.parallel, Head(VOCAB), micro_batching_for(case.parallel, trainer), OptimizerConfig()
    )
    actor.model.load_hf(path)
    actor.model.replays_routing = True
    sequences = sequences_of(**batch)
    real = torch.arange(batch["tokens"].shape[1]) < batch["lengths"][:, None]
    found: dict[str, Any] = {}

    def logp(ids: torch.Tensor | None) -> torch.Tensor:
        sequences.routing = None if ids is None else ids[real].to(torch.int8)
        return actor.model.outputs(sequences, [actor.model.micro_batches(sequences)])

    alone, own = logp(None), logp(expected["own"])
    found["own"] = bool(torch.equal(alone, own))
    none = expected["forced"].clone().fill_(-1)
    found["none"] = bool(torch.equal(alone, logp(none)))
    kept = sequences.mask
    found["gap"] = float((alone - expected["logp"][real])[kept].abs().max())
    wanted = expected["logp"][real][kept]
    forced = logp(expected["forced"])[kept]
    exact = expected["exact"][real][kept]
    scale = exact.abs().clamp(min=1.0)
    found["logp"] = float(((forced - wanted).abs() / scale).max())
    found["noise"] = float(((wanted - exact).abs() / scale).max())
    found["rounding"], found["rounding of transformers"] = rounding(forced, exact), rounding(wanted, exact)
    sums = actor.backward(
        sequences,
        actor.model.micro_batches(sequences),
        objectives.policy(algorithms.get("sft"), AlgorithmConfig(), sequences),
    )
    if sums:
        found["changed"] = sums["actor/routing_changed"][0] - float(expected["changed"][real].double().mean())
    names = [
        {(f"chunk{v}.{n}" if len(actor.model.chunks) > 1 else n): p for n, p in unwrap(c).named_parameters()}
        for v, c in enumerate(actor.model.chunks)
    ]
    gradients = whole_gradients(actor.model.chunks, names)
    found["gradient"] = gradient_errors(rank, hf_config, actor.model.layout, gradients, expected["gradients"])
    routers = [value for name, value in gradients.items() if name.endswith("router.weight")]
    found["router"] = min((float(value.abs().max()) for value in routers), default=1.0)
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("replay")
    for family in FAMILIES:
        reference(root / family, family)
    return root


@pytest.mark.parametrize("world", sorted({case.parallel.world_size for case in CASES}))
@pytest.mark.parametrize("soak", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["", "others"])
def test_given_ids_choose_the_experts_and_the_router_learns(world: int, soak: bool, checkpoints: Path) -> None:
    cases = [case for case in CASES if case.parallel.world_size == world]
    for found in run_grid(world, on_grid, str(checkpoints), cases, soak):
        for place, errors in found.items():
            print(place, errors)
            assert errors["own"] and errors["none"], place
            assert errors["logp"] <= 2 * ROUNDING * errors["noise"] and errors["gap"] > 0.1, (place, errors)
            assert errors["rounding"]["mean"] <= ROUNDING * errors["rounding of transformers"]["mean"], (place, errors)
            assert errors["gradient"][0] <= GRADIENT_TOLERANCE and errors["router"] > 0, (place, errors)
            assert abs(errors.get("changed", 0.0)) < 1e-9, (place, errors)
