"""An old copy of the weights is not what the optimizer last wrote, on any grid and in any dtype, and it is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import OptimizerConfig, ParallelConfig, TrainerConfig
from megarl.core.errors import WeightsDiffer
from tests.conftest import SOAK
from tests.parallel.families import save
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, save_tiny_qwen3
from tests.parallel.test_megatron_on_cpu import parts, sft_steps

LR = 1e-5
"""Of the step that the old copy lacks."""
PAIRS = [
    ("qwen3", ParallelConfig(tp=2), "bfloat16"),
    *[("qwen3", ParallelConfig(tp=2), "float32"), ("tied", ParallelConfig(pp=2), "bfloat16")][: 2 * SOAK],
    ("qwen3", ParallelConfig(dp=2), "bfloat16"),
    ("qwen3", ParallelConfig(cp=2), "float32"),
    ("tied", ParallelConfig(pp=2, vpp=2), "float32"),
    ("moe", ParallelConfig(dp=2, ep=2), "bfloat16"),
    ("deepseek", ParallelConfig(pp=2), "bfloat16"),
]
FOURS = [
    ("qwen3", ParallelConfig(tp=2, dp=2), "float32"),
    *[("qwen3", ParallelConfig(tp=2, dp=2), "bfloat16")][: 1 * SOAK],
    ("moe", ParallelConfig(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True), "float32"),
    *[("moe", ParallelConfig(dp=4, ep=2), "bfloat16")][: 1 * SOAK],
]
Fault = Callable[[Any], None]


def actor_on(folder: Path, case: tuple[str, ParallelConfig, str]) -> Any:
    from megarl.config.schema import ModelConfig
    from megarl.learn.parallel import process_groups
    from megarl.learn.training.model import TrainedModel, micro_batching_for
    from megarl.learn.training.schedule import Head
    from megarl.weights.checkpoint.formats import hf

    model, parallel, dtype = case
    process_groups.initialize(parallel, seed=1)
    path = folder / model
    trainer = TrainerConfig(packing=False, micro_batch_size=1)
    settings = ModelConfig(path=str(path), dtype=dtype)  # type: ignore[arg-type]
    optimizer = OptimizerConfig(lr=LR)
    actor = TrainedModel(
        hf.read_hf_config(path), settings, parallel, Head(VOCAB), micro_batching_for(parallel, trainer), optimizer
    )
    actor.model.load_hf(path)
    return actor


def difference(actor: Any, tensors: dict[str, torch.Tensor] | None = None) -> str:
    """What the comparison of ``tensors`` (those of the model) with what was written reports; every rank calls it."""
    from megarl.learn.training.optimizer import check_written

    try:
        if tensors is None:
            actor.model.proven_tensors()
        else:
            check_written(tensors, actor.model.written())
    except WeightsDiffer as error:
        return str(error)
    return ""


def on_grids(rank: int, folder: str, cases: list[Any]) -> list[tuple[str, str, list[str]]]:
    """Runs in each rank, for each case: (differences of current weights, of an old copy, names of tensors that the copy
    lacks)."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    found = []
    for case in cases:
        actor = actor_on(Path(folder), case)
        current = difference(actor)
        sft_steps(actor, range(1), lr=LR)
        current += difference(actor)
        old = {name: tensor.clone() for name, tensor in actor.model.tensors.items()}
        actor.optimizer.restart(OptimizerConfig(lr=LR))
        sft_steps(actor, range(1, 2), lr=LR)
        current += difference(actor)
        changed = sorted(name for name, tensor in actor.model.tensors.items() if not torch.equal(tensor, old[name]))
        found.append((current, difference(actor, old), changed))
        dist.barrier()
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    save_tiny_qwen3(folder / "qwen3")
    save_tiny_qwen3(folder / "tied", tied=True)
    save("qwen3_moe", folder / "moe")
    save("deepseek_v3", folder / "deepseek")
    return folder


@pytest.mark.parametrize("world", [2, 4])
def test_an_old_copy_is_named_on_every_grid(folder: Path, world: int) -> None:
    cases = {2: PAIRS, 4: FOURS}[world]
    for rank, found in enumerate(run_grid(world, on_grids, str(folder), cases)):
        for case, (current, stale, changed) in zip(cases, found, strict=True):
            assert current == "", case
            assert changed and "not what the optimizer last wrote" in stale, (case, rank)
            assert changed[0] in stale, (case, stale)


def keep_gathered(actor: Any) -> None:
    """The all-gather of parameters no longer runs."""
    for chunk in actor.model.chunks:
        chunk.start_param_sync = lambda *args, **kwargs: None
    for optimizer in getattr(actor.optimizer.inner, "chained_optimizers", [actor.optimizer.inner]):
        optimizer.start_param_sync_for_bucket_group_subset = lambda: None  # Megatron-Core 0.19 calls this one


def keep_masters(actor: Any) -> None:
    """Masters are no longer copied into the model's parameters."""
    for optimizer in getattr(actor.optimizer.inner, "chained_optimizers", [actor.optimizer.inner]):
        optimizer._copy_main_params_to_model_params = lambda: None


def move_parameters(actor: Any) -> None:
    """Parameters leave the buffer that the optimizer writes into."""
    for chunk in actor.model.chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.data.clone()


def not_updated(rank: int, folder: str, cases: list[tuple[Any, Fault]]) -> list[str]:
    import torch.distributed as dist
    from megatron.core import parallel_state

    found = []
    for case, fault in cases:
        actor = actor_on(Path(folder), case)
        fault(actor)
        assert difference(actor) == ""
        sft_steps(actor, range(1), lr=LR)
        found.append(difference(actor))
        dist.barrier()
        parallel_state.destroy_model_parallel()
    return found


def test_parameters_that_do_not_get_what_was_written_are_named(folder: Path) -> None:
    tp, dp = ParallelConfig(tp=2), ParallelConfig(dp=2)
    cases: list[tuple[Any, Fault]] = [
        (("qwen3", tp, "bfloat16"), keep_masters),
        (("qwen3", tp, "bfloat16"), move_parameters),
        (("qwen3", tp, "float32"), move_parameters),
        (("qwen3", dp, "bfloat16"), keep_gathered),
        (("qwen3", dp, "float32"), keep_gathered),
    ]
    for found in run_grid(2, not_updated, str(folder), cases):
        for said in found:
            assert "not what the optimizer last wrote" in said and "weight" in said


def resumed(rank: int, folder: str, cases: list[tuple[Any, str]]) -> list[list[str]]:
    """Runs in each rank: after each resume, differences of the weights now, of a copy of those saved, and after another
    step."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megarl.weights.checkpoint.training import state

    found = []
    for number, ((model, parallel, dtype), other) in enumerate(cases):
        actor = actor_on(Path(folder), (model, parallel, dtype))
        sft_steps(actor, range(1), lr=LR)
        saved = Path(folder) / f"saved{dist.get_world_size()}.{number}"
        state.save(saved, 1, parts(actor), {"phase": "rl"}, keep=1)
        old = {name: tensor.clone() for name, tensor in actor.model.tensors.items()}
        sft_steps(actor, range(1, 2), lr=LR)
        if other != dtype:
            parallel_state.destroy_model_parallel()
            actor = actor_on(Path(folder), (model, parallel, other))
        state.load(saved / "global_step_1", parts(actor))
        said = [difference(actor), difference(actor, old) if other == dtype else ""]
        sft_steps(actor, range(1, 2), lr=LR)
        found.append([*said, difference(actor)])
        dist.barrier()
        parallel_state.destroy_model_parallel()
    return found


RESUMES = {
    2: [
        (("qwen3", ParallelConfig(dp=2), "bfloat16"), "float32"),
        (("tied", ParallelConfig(pp=2, vpp=2), "bfloat16"), "bfloat16"),
        (("moe", ParallelConfig(dp=2, ep=2), "bfloat16"), "bfloat16"),
    ],
    4: [(("moe", ParallelConfig(dp=4, ep=2), "bfloat16"), "bfloat16")],
}


@pytest.mark.parametrize(
    "world", [pytest.param(world, marks=pytest.mark.soak if world == 4 else ()) for world in RESUMES]
)
def test_a_resumed_model_has_what_its_optimizer_has(folder: Path, world: int) -> None:
    """In another dtype too: masters are finer than the bfloat16 weights that were saved beside them."""
    for found in run_grid(world, resumed, str(folder), RESUMES[world]):
        assert found == [["", "", ""]] * len(found)
