"""The score head on real grids: the scores and gradients of transformers' ...ForSequenceClassification, and training on
from a checkpoint.

A fixed random weight for every position makes the loss linear in the scores, so that no position's gradient is hidden
by another's. All grids of one size run in one set of processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import ModelConfig, ParallelConfig
from tests.conftest import SOAK
from tests.parallel.families import FAMILIES, MOE, VOCAB
from tests.parallel.grid import run_grid
from tests.parallel.models import save_tiny_qwen3

TOLERANCE = 1e-5
"""Of the largest score, and of a tensor's largest gradient entry."""
GRIDS = {
    "tp1": ParallelConfig(),
    "tp2": ParallelConfig(tp=2),
    "tp2-sp": ParallelConfig(tp=2, sequence_parallel=True),
    "pp2": ParallelConfig(pp=2),
    "dp2": ParallelConfig(dp=2),
    "ep2": ParallelConfig(dp=2, ep=2),
    "tp2-sp-pp2": ParallelConfig(tp=2, pp=2, sequence_parallel=True),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "llama3-tied": ("llama3", {}),
    "mistral": ("mistral", {}),
    "qwen2-tied": ("qwen2", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "deepseek_v3": ("deepseek_v3", {}),
}


def _fits(model: str, grid: str) -> bool:
    """Experts need sequence parallelism under tp, and only they know ep."""
    return grid != "tp2" if MODELS[model][0] in MOE else grid != "ep2"


ALL = [(model, grid) for model in MODELS for grid in GRIDS if _fits(model, grid)]


def in_every_run(model: str, grid: str) -> bool:
    """Each model on one rank, with its experts on two, and on every other of the other grids; ``make soak`` has all."""
    turn = list(MODELS).index(model) + list(GRIDS).index(grid)
    return grid in ("tp1", "ep2") or turn % 2 == 0


CASES = [case for case in ALL if SOAK or in_every_run(*case)]
every_case = pytest.mark.parametrize(
    ("model", "grid"),
    [pytest.param(*case, marks=() if in_every_run(*case) else pytest.mark.soak) for case in ALL],
    ids=[f"{m}-{g}" for m, g in ALL],
)


def hf_classifier(model: str) -> Any:
    """Random, in float32, with nothing at its neutral value."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    family, changes = MODELS[model]
    model_type, settings = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**settings, **changes}, num_labels=1)
    torch.manual_seed(0)
    hf = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in [*hf.named_parameters(), *hf.named_buffers()]:
            if "norm" in name:
                tensor.add_(0.2 * torch.randn_like(tensor))
            elif name.endswith((".bias", "e_score_correction_bias")):
                tensor.copy_(0.3 * torch.randn_like(tensor))
    return hf


def build(path: Path, parallel: ParallelConfig, rank: int, dtype: str = "float32") -> tuple[Any, Any, Any]:
    """(stage, its tensors, layout) of this rank, filled from the checkpoint."""
    from megarl.learn.models.gpt import build_chunks, named_tensors
    from megarl.learn.parallel.grid import megatron_grid
    from megarl.weights.checkpoint.formats import hf
    from megarl.weights.reshard.layouts import megatron_layout

    hf_config = hf.read_hf_config(path)
    (stage,) = build_chunks(hf_config, ModelConfig(path=str(path), dtype=dtype), parallel, "score")  # type: ignore[arg-type]
    tensors = named_tensors(stage)
    for tensor in tensors.values():
        tensor.fill_(float("nan"))  # whatever is not loaded shows
    layout = megatron_layout(hf_config, megatron_grid(parallel), head="score")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == layout.local_shapes(rank)
    hf.load_into(path, layout, rank, tensors)
    return stage, tensors, layout


def run(
    model: Any, tokens: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, *, forward_only: bool
) -> dict[int, torch.Tensor]:
    """Row -> scores [S] on the last stage, {} elsewhere. The loss: the sum of scores times ``weights``."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(iterator: Any, stage: Any) -> Any:
        batch = next(iterator)
        output = stage(tokens[batch], torch.arange(tokens.shape[1]).expand_as(tokens[batch]), None)

        def loss(scores: torch.Tensor) -> Any:
            assert scores.dtype == torch.float32 and scores.shape == (*tokens[batch].shape, 1)
            total = (scores[..., 0] * weights[batch]).sum()
            return total, torch.zeros((), dtype=torch.int), (batch, scores.detach()[..., 0])

        return output, loss

    collected = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(rows.split(2)),
        model=model,
        num_microbatches=len(rows) // 2,
        seq_length=tokens.shape[1],
        micro_batch_size=2,
        forward_only=forward_only,
    )
    return {int(row): score for batch, scores in collected for row, score in zip(batch, scores, strict=True)}


def on_grids(rank: int, folder: str, cases: list[tuple[str, str]]) -> dict[tuple[str, str], float | None]:
    """Runs in each rank: the largest difference of a score, relative to the largest one (None without the last stage).

    Writes ``{model}-gradients-{grid}``, the gradients under the names of the weights.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megarl.learn.models.gpt import unwrap
    from megarl.learn.parallel import process_groups
    from megarl.weights.checkpoint.formats import hf
    from megarl.weights.reshard.layouts import hf_layout
    from megarl.weights.reshard.plan import build_plan

    found: dict[tuple[str, str], float | None] = {}
    for grid in dict.fromkeys(grid for _, grid in cases):
        parallel = GRIDS[grid]
        position = process_groups.initialize(parallel, seed=1)
        for model in (m for m, g in cases if g == grid):
            path = Path(folder) / model
            expected = torch.load(path / "expected.pt")
            stage, tensors, layout = build(path, parallel, rank)
            config: Any = unwrap(stage).config
            ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), stage)
            ddp.zero_grad_buffer()
            ddp.train()
            mine = torch.arange(len(expected["tokens"]))[position.dp_rank :: parallel.dp]
            scores = run(ddp, expected["tokens"], expected["weights"], mine, forward_only=False)
            largest = expected["scores"].abs().max()
            differences = [
                float((score - expected["scores"][row]).abs().max() / largest) for row, score in scores.items()
            ]
            found[model, grid] = max(differences) if differences else None
            assert position.is_last_stage == bool(differences)
            gradients = {
                name: torch.zeros_like(tensor) for name, tensor in tensors.items()
            }  # the router's bias has none
            gradients |= {name: p.main_grad for name, p in unwrap(stage).named_parameters()}
            plan = build_plan(layout, hf_layout(hf.read_hf_config(path), head="score"))
            hf.export_hf(plan, rank, gradients, path, Path(folder) / f"{model}-gradients-{grid}")
        dist.barrier()
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``{model}``: a checkpoint, with tokens [8, 24], weights, and transformers' scores; ``{model}-gradients``: its
    gradients."""
    root = tmp_path_factory.mktemp("scores")
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(
        2, VOCAB, (8, 24), generator=generator
    )  # no padding token: its embedding gets no gradient there
    weights = torch.randn(8, 24, generator=generator) / tokens.numel()
    for name in MODELS:
        model = hf_classifier(name)
        model.save_pretrained(root / name)
        scores = model.score(model.model(tokens).last_hidden_state)[..., 0]
        assert torch.equal(scores[:, -1:], model(tokens).logits), "the class scores the last token"
        torch.save({"tokens": tokens, "weights": weights, "scores": scores.detach()}, root / name / "expected.pt")
        (scores * weights).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.grad)
            for buffer in model.buffers():
                buffer.zero_()
        model.save_pretrained(root / f"{name}-gradients")
    return root


@pytest.fixture(scope="module")
def differences(folder: Path) -> dict[tuple[str, str], float]:
    """(model, grid) -> largest relative difference of a score on any rank."""
    found: dict[tuple[str, str], float] = {}
    for world in sorted({p.world_size for p in GRIDS.values()}):
        cases = [(m, g) for m, g in CASES if GRIDS[g].world_size == world]
        answers = run_grid(world, on_grids, str(folder), cases, timeout_s=280)
        found |= {case: max(a[case] for a in answers if a[case] is not None) for case in cases}
    return found


@every_case
def test_scores_equal_transformers(differences: dict[tuple[str, str], float], model: str, grid: str) -> None:
    assert differences[model, grid] < TOLERANCE


@every_case
def test_gradients_equal_transformers(folder: Path, differences: Any, model: str, grid: str) -> None:
    from safetensors.torch import load_file

    expected = load_file(folder / f"{model}-gradients" / "model.safetensors")
    found = load_file(folder / f"{model}-gradients-{grid}" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        error = float((found[name] - want).abs().max() / want.abs().max().clamp_min(1e-12))
        assert error < TOLERANCE, f"{name}: gradient off by {error:.1e} of its largest entry"


CONTINUED = {
    "float32": [("tp2-sp", "tp2-sp"), ("tp2-sp", "pp2"), ("dp2", "dp2"), ("dp2", "tp2-sp")],
    "bfloat16": [("tp2-sp", "tp2-sp"), ("tp2-sp", "dp2")],
}
"""dtype -> (grid that saves, grid that goes on)."""


def parts(model: Any) -> dict[str, Any]:
    from megarl.weights.checkpoint.training.state import CheckpointedModel

    return {"critic": CheckpointedModel([model.stage], model.optimizer)}


def save_and_continue(rank: int, folder: str, dtype: str) -> None:
    """Runs in each rank: ``going-{grid}``, weights after two updates, and ``{saved}-to-{grid}``, the same with a
    checkpoint between."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megarl.learn.parallel import process_groups
    from megarl.weights.checkpoint.training import state
    from tests.parallel.trainee import Trainee

    root = Path(folder)
    saving = dict.fromkeys(saved for saved, _ in CONTINUED[dtype])
    for saved, grid in [*((saved, None) for saved in saving), *CONTINUED[dtype]]:
        here = saved if grid is None else grid
        process_groups.initialize(GRIDS[here], seed=1)
        model = Trainee(root / "model", GRIDS[here], "score", dtype)
        if grid is None:
            model.step(1)
            state.save(root / f"saved-{saved}", 1, parts(model), {"phase": "test"}, keep=1)
        else:
            for tensor in model.tensors.values():
                tensor.fill_(float("nan"))
            state.load(root / f"saved-{saved}" / "global_step_1", parts(model))
        model.step(2)
        model.export(root / (f"going-{saved}" if grid is None else f"{saved}-to-{grid}"))
        dist.barrier()
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("dtype", list(CONTINUED))
def test_training_goes_on_from_a_checkpoint_on_any_grid(tmp_path: Path, dtype: str) -> None:
    """The head's weight is saved once, found on every rank, and so are its moments; on the same grid to the bit."""
    from safetensors.torch import load_file

    hf_classifier("qwen3-tied").save_pretrained(tmp_path / "model")
    run_grid(2, save_and_continue, str(tmp_path), dtype, timeout_s=280)
    before = load_file(tmp_path / "model" / "model.safetensors")["score.weight"]
    for saved, grid in CONTINUED[dtype]:
        going = load_file(tmp_path / f"going-{saved}" / "model.safetensors")
        found = load_file(tmp_path / f"{saved}-to-{grid}" / "model.safetensors")
        assert going.keys() == found.keys()
        assert not torch.equal(going["score.weight"].float(), before), "the head has learned nothing"
        for name, want in going.items():
            error = float((found[name].float() - want.float()).abs().max())
            limit = 0.0 if saved == grid else {"float32": 2e-5, "bfloat16": 1e-2}[dtype]
            assert error <= limit, f"{name}: {error:.1e} off from {saved} to {grid}"


def load_a_language_model(rank: int, folder: str) -> tuple[str, bool]:
    """Runs alone: what loading an actor's checkpoint into a critic says, and whether the head is as it was."""
    from megarl.core.errors import CheckpointError
    from megarl.learn.parallel import process_groups
    from megarl.weights.checkpoint.training import state
    from tests.parallel.trainee import Trainee

    root = Path(folder)
    process_groups.initialize(GRIDS["tp1"], seed=1)
    actor = Trainee(root / "model", GRIDS["tp1"], "lm")
    state.save(root / "saved", 1, parts(actor), {"phase": "test"}, keep=1)
    critic = Trainee(root / "model", GRIDS["tp1"], "score", score="zeros")
    try:
        state.load(root / "saved" / "global_step_1", parts(critic))
    except CheckpointError as error:
        return str(error), not critic.tensors["output_layer.weight"].any()
    return "", False


def test_an_actors_checkpoint_is_no_critics(tmp_path: Path) -> None:
    """Megatron lets output weights of other shapes pass, for other paddings of the vocabulary."""
    save_tiny_qwen3(tmp_path / "model")
    ((message, kept),) = run_grid(1, load_a_language_model, str(tmp_path))
    assert "does not fit this model" in message and "output_layer.weight" in message and kept
