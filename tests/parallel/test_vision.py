"""Families with images on every grid: log-probs, loss and gradients of transformers, tower frozen and trained, packed
and padded; and the same HF file again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megarl.config.algorithms import AlgorithmConfig
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from tests.conftest import SOAK
from tests.parallel import parity, vision, vision_adapters, vision_scores
from tests.parallel.families import VOCAB
from tests.parallel.grid import run_grid

TOLERANCE = 1e-5
GRIDS = {
    name: grid for name, grid in parity.GRIDS.items() if "EP2" not in name and name not in ("TP2 × PP2", "TP2 × DP2")
}
LAYOUTS = {
    "packed": TrainerConfig(max_tokens_per_micro_batch=96),
    "padded": TrainerConfig(packing=False, micro_batch_size=2),
}
CASES = [
    (family, grid, layout, trained, recompute)
    for family in (vision.HYBRID, vision.DEEPSTACK, vision.FAMILY)
    for grid in GRIDS
    for layout in LAYOUTS
    for trained, recompute in ((False, "none"), (True, "none"), (True, "full"))
    if recompute == "none" or layout == "packed"
    if family != vision.HYBRID or "CP2" not in grid
]
"""Family, grid, layout, tower trained, recomputation."""


def in_every_run(case: tuple[str, str, str, bool, str]) -> bool:
    """Whether ``make test`` measures it; ``make soak`` measures all. A frozen tower is the trained one without its own
    gradients."""
    family, grid, layout, trained, recompute = case
    if family == vision.HYBRID:  # its tower is that of DeepStack's family, without what its first layers add
        return layout == "packed" and trained and (grid, recompute) in (("one process", "full"), ("TP2 + SP", "none"))
    if family == vision.DEEPSTACK:  # for the rest its tower is like the other one
        return (trained and grid in ("one process", "PP2")) or (layout == "packed" and trained and grid == "TP2 + SP")
    if recompute == "full":
        return grid in ("one process", "CP2")
    if trained and GRIDS[grid].world_size == 4:  # one layout in turn
        return layout == list(LAYOUTS)[list(GRIDS).index(grid) % 2]
    return trained or (layout == "packed" and grid in ("one process", "TP2 + SP", "PP2"))


SCORED = {
    grid: [(layout, trained) for layout in LAYOUTS for trained in (True, False)]
    for grid in ("one process", "TP2", "TP2 + SP", "PP2", "DP2", "CP2")
}
if not SOAK:
    turns = (slice(None), slice(1, 3), slice(0, 4, 3))
    SCORED = {grid: each[turns[i and 1 + i % 2]] for i, (grid, each) in enumerate(SCORED.items())}
"""Grid -> layouts, with the tower trained or not, of a model with a score head; ``make soak`` has all. Grids but the
first meet each layout once, with the tower trained in one of them."""
ADAPTED = "TP2 + SP"
"""Grid of a model with adapters in tower and language model."""
MEASURED = [case for case in CASES if SOAK or in_every_run(case)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    for family in (vision.FAMILY, vision.DEEPSTACK):
        vision.save(folder / family, family)
        vision_adapters.save(folder / family, family)
    vision.save(folder / vision.HYBRID, vision.HYBRID)
    vision_scores.save(folder / "scores")
    return folder


def on_grid(rank: int, root: str, world: int, backend: Literal["gloo", "nccl"] = "gloo") -> dict[Any, dict[str, Any]]:
    """Runs in each rank: this rank's worst errors of every case of this world."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megarl.core.metrics import mean_of_sums
    from megarl.learn import algorithms
    from megarl.learn.memory.phases import Place
    from megarl.learn.memory.residents import residents_of
    from megarl.learn.models.gpt import unwrap
    from megarl.learn.parallel import process_groups
    from megarl.learn.training import objectives
    from megarl.learn.training.model import TrainedModel, micro_batching_for
    from megarl.learn.training.schedule import Head
    from megarl.weights.checkpoint.formats import hf
    from megarl.weights.reshard.layouts import hf_layout
    from megarl.weights.reshard.plan import build_plan
    from tests.parallel.parity import gradient_errors, whole_gradients

    found: dict[Any, Any] = {}
    sequences = vision.sequences()
    objective = objectives.policy(algorithms.get("sft"), AlgorithmConfig(name="sft"), sequences)
    for grid, parallel in GRIDS.items():
        if parallel.world_size != world:
            continue
        parallel = replace(parallel, backend=backend)
        process_groups.initialize(parallel, seed=1)
        for family, trained, recompute in dict.fromkeys((c[0], c[3], c[4]) for c in MEASURED if c[1] == grid):
            path = Path(root) / family
            hf_config = hf.read_hf_config(path)
            expected = torch.load(path / "expected.pt", weights_only=False)
            settings = ModelConfig(path=str(path), train_vision_tower=trained, recompute=recompute)  # type: ignore[arg-type]
            head = Head(VOCAB)
            limits = micro_batching_for(parallel, LAYOUTS["packed"])
            actor = TrainedModel(hf_config, settings, parallel, head, limits, OptimizerConfig(lr=1e-2))
            names = [
                {
                    (f"chunk{v}.{n}" if len(actor.model.chunks) > 1 else n): p
                    for n, p in unwrap(c).named_parameters()
                    if p.requires_grad
                }
                for v, c in enumerate(actor.model.chunks)
            ]
            for case in [c for c in MEASURED if (c[0], c[1], *c[3:]) == (family, grid, trained, recompute)]:
                actor.model.load_hf(path)
                actor.model.micro_batching = micro_batching_for(parallel, LAYOUTS[case[2]])
                batches = actor.model.micro_batches(sequences)
                logp = actor.model.outputs(sequences, [batches])
                everyone: list[Any] = [None] * world
                dist.all_gather_object(everyone, actor.backward(sequences, batches, objective))
                layout = actor.model.layout
                if not trained:
                    layout = layout.only(lambda name: not name.startswith("visual."))
                gradient, where = gradient_errors(
                    rank, hf_config, layout, whole_gradients(actor.model.chunks, names), expected["gradients"]
                )
                tower = {name: t.clone() for name, t in actor.model.tensors.items() if "visual" in name}
                actor.step(1e-2)
                after = actor.model.outputs(sequences, [batches])
                for resident in residents_of("actor", actor.model):
                    resident.leave(Place.MEMORY, Path(root))
                    assert not any(t.untyped_storage().nbytes() for t in resident.tensors())
                    resident.come_back()
                actor.model.proven_tensors()
                assert torch.equal(actor.model.outputs(sequences, [batches]), after)
                moved = [not torch.equal(t, actor.model.tensors[name]) for name, t in tower.items()]
                found[case] = {
                    "logp": float((logp - expected["logp"]).abs().max()),
                    "loss": abs(mean_of_sums(everyone)["actor/loss"] - expected["loss"]),
                    "gradient": gradient,
                    "where": where,
                    "moved": moved,
                }
            if trained and recompute == "none":
                actor.model.load_hf(path)
                plan = build_plan(actor.model.layout, hf_layout(hf_config))
                hf.export_hf(plan, rank, actor.model.proven_tensors(), path, Path(root) / f"{family} again {grid}")
        if grid in SCORED:  # the last family's actor
            actor.model.load_hf(path)
            cases = [(LAYOUTS[layout], trained) for layout, trained in SCORED[grid]]
            found[grid] = vision_scores.on_grid(rank, Path(root), grid, parallel, actor, cases)
        if grid == ADAPTED:
            limits = micro_batching_for(parallel, LAYOUTS["packed"])
            for family in vision_adapters.OF:
                adapted = vision_adapters.on_grid(rank, Path(root) / family, family, parallel, limits)
                found["adapters", family] = adapted
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def errors(root: Path) -> dict[Any, list[dict[str, Any]]]:
    """Case -> what each rank found."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for world in (1, 2, 4):
        for of_rank in run_grid(world, on_grid, str(root), world):
            for case, errors in of_rank.items():
                found.setdefault(case, []).append(errors)
    return found


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if in_every_run(case) else pytest.mark.soak) for case in CASES],
    ids=lambda c: f"{c[0]} | {c[1]} | {c[2]} | tower {'trained' if c[3] else 'frozen'} | {c[4]}",
)
def test_outputs_and_gradients_equal_transformers(errors: dict[Any, list[dict[str, Any]]], case: Any) -> None:
    for rank in errors[case]:
        assert rank["logp"] < TOLERANCE
        assert rank["loss"] < TOLERANCE
        assert rank["gradient"] < TOLERANCE, f"{rank['where']}: gradient off by {rank['gradient']:.1e}"
        assert all(rank["moved"]) if case[3] else not any(rank["moved"])
    assert any(rank["moved"] for rank in errors[case]), "some rank has the tower"


@pytest.mark.parametrize("family", vision_adapters.OF)
def test_adapters_of_tower_and_language_model_equal_peft(errors: dict[Any, list[dict[str, Any]]], family: str) -> None:
    for rank in errors["adapters", family]:
        assert max(rank["logp"], rank["loss"]) < TOLERANCE
        assert rank["gradient"] < TOLERANCE, f"{rank['where']}: gradient off by {rank['gradient']:.1e}"
        assert rank["moved"], "an update changes every A and B, and nothing of the model itself"


@pytest.mark.parametrize(
    ("family", "grid"), list(dict.fromkeys(case[:2] for case in MEASURED if case[3:] == (True, "none")))
)
def test_the_same_file_comes_out(errors: dict[Any, Any], root: Path, family: str, grid: str) -> None:
    from safetensors.torch import load_file

    given, again = (load_file(root / folder / "model.safetensors") for folder in (family, f"{family} again {grid}"))
    assert given.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in given.items())


@pytest.mark.parametrize("grid", SCORED)
def test_scores_and_their_gradients_equal_transformers(errors: dict[Any, Any], grid: str) -> None:
    for rank in errors[grid]:
        for (layout, trained), case in zip(SCORED[grid], rank, strict=True):
            assert max(case["score"], case["loss"]) < TOLERANCE, f"{layout}: {case}"
            assert case["gradient"] < TOLERANCE, f"{layout}, {case['where']}: gradient off by {case['gradient']:.1e}"
            assert all(case["moved"]) if trained else not any(case["moved"])
    assert any(case["moved"] for rank in errors[grid] for case in rank), "some rank has the tower"


@pytest.mark.parametrize("grid", SCORED)
def test_the_same_score_model_comes_out(errors: dict[Any, Any], root: Path, grid: str) -> None:
    from safetensors.torch import load_file

    given, again = (load_file(root / folder / "model.safetensors") for folder in ("scores", f"scores again {grid}"))
    assert given.keys() == again.keys() and "score.weight" in given
    assert all(torch.equal(tensor, again[name]) for name, tensor in given.items())


def in_bfloat16(rank: int, path: str, family: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs in a rank: the tower's frequencies in a bfloat16 model, those that transformers computes, its vectors."""
    from megarl.learn.models.gpt import build_chunks, unwrap
    from megarl.learn.parallel import process_groups
    from megarl.weights.checkpoint.formats import hf

    process_groups.initialize(ParallelConfig(), seed=1)
    hf_config = hf.read_hf_config(Path(path))
    [chunk] = build_chunks(hf_config, ModelConfig(path=path, dtype="bfloat16"), ParallelConfig())
    tower = unwrap(chunk).visual
    assert all(p.dtype is torch.bfloat16 for p in tower.parameters())
    own = vision.hf_model(family).model.visual.rotary_pos_emb.inv_freq
    return tower.rotary_pos_emb.inv_freq, own, own.bfloat16().float()


@pytest.mark.parametrize("family", vision_adapters.OF)
def test_a_bfloat16_tower_has_its_frequencies_in_float32(root: Path, family: str) -> None:
    """In bfloat16 a patch 80 rows down would be turned by 0.15 rad too much."""
    [(found, expected, rounded)] = run_grid(1, in_bfloat16, str(root / family), family)
    assert found.dtype is torch.float32 and torch.equal(found, expected) and not torch.equal(found, rounded)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_gpu_gives_what_transformers_does_on_the_cpu(root: Path) -> None:
    """Float32 on both, whose sums a GPU takes in another order."""
    for of_rank in run_grid(1, on_grid, str(root), 1, "nccl", gpus=True):
        for case, of_case in of_rank.items():
            for found in of_case if isinstance(of_case, list) else [of_case]:
                worst = max(found.get("logp", found.get("score")), found["loss"], found["gradient"])
                assert worst < 10 * TOLERANCE, f"{case}: {found}"
