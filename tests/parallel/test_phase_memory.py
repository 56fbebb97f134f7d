"""A model whose memory leaves the device between phases trains as one that stays, on every grid, in every dtype."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.schema import Config, ParallelConfig, TrainerConfig
from megarl.core.errors import NotResident, OffloadError, WeightsDiffer
from megarl.core.metrics import Timeline
from megarl.learn.memory.phases import OFFLOAD, Phase, Place
from tests.conftest import SOAK
from tests.parallel.families import save
from tests.parallel.grid import run_grid
from tests.parallel.models import save_tiny_qwen3
from tests.parallel.test_megatron_on_cpu import sft_steps
from tests.parallel.test_written import LR, actor_on

CASES = {
    2: [
        ("qwen3", ParallelConfig(tp=2), "bfloat16"),
        ("qwen3", ParallelConfig(dp=2), "float32"),
        ("tied", ParallelConfig(pp=2, vpp=2), "bfloat16"),
        ("moe", ParallelConfig(dp=2, ep=2), "bfloat16"),
    ],
    4: [
        ("qwen3", ParallelConfig(tp=2, pp=2), "float32"),
        ("moe", ParallelConfig(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True), "float32"),
    ],
}
STEPS = 3


def memory_of(actor: Any, place: Place, folder: Path, limit: int | None = None) -> Any:
    from megarl.train.memory import PhaseMemory
    from megarl.train.ranks import Ranks, RunContext

    models: Any = SimpleNamespace(by_role=lambda: {"actor": actor.model})
    offload: Any = "none" if place is Place.DEVICE else str(place)
    config = Config(trainer=TrainerConfig(offload=offload, offload_disk_bytes=limit))
    context = RunContext(config, folder, 1, torch.distributed.get_rank())
    memory = PhaseMemory(context, models, Ranks(), Timeline(folder / "timeline", folder.name))
    memory.begin()
    return memory


def storages(actor: Any) -> int:
    """Bytes of parameters and gradients on the device."""
    buffers = [b for chunk in actor.model.chunks for b in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    return sum(t.untyped_storage().nbytes() for b in buffers for t in (b.param_data, b.grad_data))


def trained(rank: int, folder: str, case: Any, place: Place) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """Weights after ``STEPS`` steps, and whether each look between them found what it should."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    actor = actor_on(Path(folder), case)
    memory = memory_of(actor, place, Path(folder) / f"rank_{rank}")
    looks: list[bool] = []
    for step in range(STEPS):
        memory.enter(Phase.ROLLOUT)
        looks.append((storages(actor) == 0) is (place is not Place.DEVICE))
        memory.enter(Phase.SYNC)
        actor.model.proven_tensors()  # while the optimizer is away
        memory.enter(Phase.UPDATE)
        sft_steps(actor, range(step, step + 1), lr=LR)
    memory.enter(Phase.ROLLOUT)
    with memory.during(Phase.SYNC):
        found = {name: tensor.clone() for name, tensor in actor.model.proven_tensors().items()}
    looks.append(memory.phase is Phase.ROLLOUT)
    if place is not Place.DEVICE:
        for use in (lambda: actor.model.tensors, lambda: actor.step(LR), lambda: sft_steps(actor, range(1), lr=LR)):
            try:
                use()
                looks.append(False)
            except NotResident as error:
                looks.append(str(place) in str(error) or "host memory" in str(error))
    memory.close()
    dist.barrier()
    parallel_state.destroy_model_parallel()
    return found, looks


def places(case: Any) -> list[Place]:
    """One in turn: tensor, data, expert and pipeline parallelism meet both. ``make soak`` takes both everywhere."""
    both = [Place.MEMORY, Place.DISK]
    return both if SOAK else [both[[c for cases in CASES.values() for c in cases].index(case) % 2]]


def on_grids(rank: int, folder: str, cases: list[Any]) -> list[tuple[bool, list[bool]]]:
    """Runs in each rank, for each case: do the weights equal those of a model that stays, and the looks."""
    found = []
    for case in cases:
        stays, _ = trained(rank, folder, case, Place.DEVICE)
        for place in places(case):
            leaves, looks = trained(rank, folder, case, place)
            found.append((all(torch.equal(stays[name], leaves[name]) for name in stays), looks))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("turns")
    save_tiny_qwen3(folder / "qwen3")
    save_tiny_qwen3(folder / "tied", tied=True)
    save("qwen3_moe", folder / "moe")
    return folder


@pytest.mark.parametrize(
    "world", [pytest.param(world, marks=pytest.mark.soak if world == 4 else ()) for world in CASES]
)
def test_the_weights_are_those_of_a_model_that_stays(folder: Path, world: int) -> None:
    for rank, found in enumerate(run_grid(world, on_grids, str(folder), CASES[world])):
        cases = [(case, place) for case in CASES[world] for place in places(case)]
        for case, (same, looks) in zip(cases, found, strict=True):
            assert same and all(looks), (rank, case, looks)
    assert not list(folder.glob(f"rank_*/{OFFLOAD}"))


def faults(rank: int, folder: str) -> list[str]:
    """Runs in each rank: what is said of weights changed after they came back, and of a copy that rank 1 has lost."""
    said = []
    actor = actor_on(Path(folder), ("qwen3", ParallelConfig(tp=2), "bfloat16"))
    own = Path(folder) / f"fault_{rank}"
    memory = memory_of(actor, Place.DISK, own)
    memory.enter(Phase.ROLLOUT)
    memory.enter(Phase.SYNC)
    next(iter(actor.model.tensors.values())).view(-1)[0] += 1.0
    for kind, do in ((WeightsDiffer, actor.model.proven_tensors), (OffloadError, lambda: memory.enter(Phase.UPDATE))):
        if kind is OffloadError and rank == 1:
            (own / OFFLOAD / "rank_1" / "actor.optimizer").unlink()
        try:
            do()
            said.append("")
        except kind as error:
            said.append(str(error))
    return said


def test_faults_end_every_rank(folder: Path) -> None:
    first, second = run_grid(2, faults, str(folder))
    for said in (first, second):
        assert "not what the optimizer last wrote" in said[0]
    assert "on another trainer rank" in first[1]
    assert "actor.optimizer cannot come back from disk" in second[1]


def limited(rank: int, folder: str) -> str:
    from megarl.core.errors import NonRetryableError

    actor = actor_on(Path(folder), ("qwen3", ParallelConfig(tp=2), "bfloat16"))
    try:
        memory_of(actor, Place.DISK, Path(folder) / f"limited_{rank}", limit=1000).enter(Phase.ROLLOUT)
    except NonRetryableError as error:
        return str(error)
    return ""


def test_more_on_disk_than_the_setting_allows_is_refused(folder: Path) -> None:
    for said in run_grid(2, limited, str(folder)):
        assert "trainer.offload_disk_bytes=1000" in said
