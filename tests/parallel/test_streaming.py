"""An optimizer whose state comes to the device in buckets makes the bits of one whose state stays, within the ledger's
bytes, on every grid."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.lora import LoraConfig
from megarl.config.schema import Config, ModelConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from megarl.core.errors import NotResident, OffloadError
from megarl.core.metrics import Timeline
from megarl.learn.memory.phases import BUCKET, OFFLOAD, Phase, Place
from tests.parallel.families import save
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, save_tiny_qwen3
from tests.parallel.test_megatron_on_cpu import sft_steps

BYTES = 20_000
"""Of a bucket: less than the embedding's state, more than that of several norms."""
LR = 1e-3
STEPS = 3
LORA = LoraConfig(rank=4)
CASES: dict[int, list[tuple[str, ParallelConfig, ModelConfig]]] = {
    1: [
        ("qwen3", ParallelConfig(), ModelConfig(dtype="bfloat16")),
        ("qwen3", ParallelConfig(), ModelConfig(dtype="bfloat16", moments_dtype="bfloat16", grad_dtype="bfloat16")),
        ("qwen3", ParallelConfig(), ModelConfig(dtype="bfloat16", lora=LORA)),
    ],
    2: [
        ("qwen3", ParallelConfig(dp=2), ModelConfig(dtype="bfloat16")),
        ("qwen3", ParallelConfig(dp=2), ModelConfig(dtype="float32")),
        ("qwen3", ParallelConfig(tp=2), ModelConfig(dtype="bfloat16")),
        ("qwen3", ParallelConfig(pp=2, vpp=2), ModelConfig(dtype="float32")),
        ("qwen3", ParallelConfig(dp=2, overlap_grad_reduce=True, overlap_param_gather=True), ModelConfig()),
        ("moe", ParallelConfig(dp=2, ep=2), ModelConfig(dtype="bfloat16")),
    ],
}


def actor_on(folder: Path, case: tuple[str, ParallelConfig, ModelConfig]) -> Any:
    from dataclasses import replace

    from megarl.learn.parallel import process_groups
    from megarl.learn.training.model import TrainedModel, micro_batching_for
    from megarl.learn.training.schedule import Head
    from megarl.weights.checkpoint.formats import hf

    name, parallel, settings = case
    process_groups.initialize(parallel, seed=1)
    path = folder / name
    limits = micro_batching_for(parallel, TrainerConfig(packing=False, micro_batch_size=1))
    actor = TrainedModel(
        hf.read_hf_config(path),
        replace(settings, path=str(path)),
        parallel,
        Head(VOCAB),
        limits,
        OptimizerConfig(lr=LR, clip_grad=0.05),
    )
    actor.model.load_hf(path)
    return actor


def memory_of(actor: Any, folder: Path, offload: Any, limit: int | None = None, size: int | None = BYTES) -> Any:
    from megarl.train.memory import PhaseMemory
    from megarl.train.ranks import Ranks, RunContext

    models: Any = SimpleNamespace(by_role=lambda: {"actor": actor.model})
    trainer = TrainerConfig(offload=offload, offload_disk_bytes=limit, stream_optimizer_bytes=size)
    context = RunContext(Config(trainer=trainer), folder, 1, torch.distributed.get_rank())
    memory = PhaseMemory(context, models, Ranks(), Timeline(folder / "timeline", folder.name))
    memory.begin()
    return memory


def on_device(residents: Any) -> int:
    """Bytes of the optimizer's state that are on the device now, by the storages themselves."""
    from megarl.learn.memory.residents import Place

    there = [b.resident for b in residents.buckets if b.resident.place is Place.DEVICE]
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for r in there for t in r.tensors()}
    away = [t for b in residents.buckets if b.resident not in there for t in b.resident.tensors()]
    assert not any(t.untyped_storage().nbytes() for t in away)
    return sum(held.values())


def state_of(actor: Any) -> dict[str, torch.Tensor]:
    """Masters, moments and steps of the optimizer."""
    from megarl.weights.checkpoint.training.state import inner_optimizers

    found = {}
    for i, inner in enumerate(inner_optimizers(actor.optimizer.inner)):
        for j, group in enumerate(inner.param_groups):
            found[f"{i}.{j}.step"] = torch.tensor(-1 if "step" not in group else int(group["step"]))
            for k, p in enumerate(group["params"]):
                values = {"param": p.detach(), **{n: t for n, t in inner.state[p].items() if torch.is_tensor(t)}}
                found |= {f"{i}.{j}.{k}.{name}": value.clone() for name, value in values.items()}
    return found


def trained(rank: int, folder: Path, case: Any, offload: str) -> dict[str, Any]:
    """What ``STEPS`` steps leave, and the most bytes of state that were on the device in one; ``offload`` none: of an
    optimizer that stays."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megarl.learn.memory.resident_bytes import model_bytes

    actor = actor_on(folder, case)
    memory = memory_of(actor, folder / f"rank_{rank}_of_{dist.get_world_size()}_{offload}", offload)
    peaks, norms, facts = [0], [], []

    class Watching:
        def __init__(self, parameters: Any) -> None: ...

        def __enter__(self) -> None:
            peaks.append(on_device(actor.model.residents))

        def __exit__(self, *exc: object) -> None:
            peaks.append(on_device(actor.model.residents))

    plain_step = actor.step
    actor.step = lambda lr: plain_step(lr, Watching)
    for step in range(STEPS):
        memory.enter(Phase.ROLLOUT)
        memory.enter(Phase.UPDATE)
        if offload != "none":
            facts.append(actor.model.residents.streams and on_device(actor.model.residents) == 0)
        norms += sft_steps(actor, range(step, step + 1), lr=LR)
        if offload != "none":
            facts.append(actor.model.residents.streams and on_device(actor.model.residents) == 0)
        actor.finish_gather()
        memory.enter(Phase.SYNC)
        actor.model.proven_tensors()  # against the digests of the streamed step
    planned = memory.metrics().get("memory/update/planned_bytes", 0.0)  # "none" moves nothing
    if offload != "none":
        try:
            actor.model.weights_changed()
            facts.append(False)
        except NotResident as error:
            facts.append("actor.optimizer.bucket0" in str(error))
    memory.enter(Phase.SAVE)
    weights = {name: tensor.clone() for name, tensor in actor.model.all_tensors.items()}
    state = state_of(actor)
    total = sum(r.nbytes for r in actor.model.residents if r.kind == "optimizer")
    name, parallel, settings = case
    predicted = model_bytes(
        actor.model.hf_config, actor.model.model_config, parallel, "lm", trained=True, bucket_bytes=BYTES
    )[rank]
    memory.close()
    dist.barrier()
    parallel_state.destroy_model_parallel()
    return {
        "weights": weights, "state": state, "norms": norms, "facts": facts, "peak": max(peaks), "total": total,
        "buckets": len(actor.model.residents.buckets), "predicted": predicted, "planned": planned,
    }  # fmt: skip


def on_grids(rank: int, folder: str, cases: list[Any]) -> list[dict[str, Any]]:
    """Runs in each rank, for each case: the comparison of a streamed optimizer with one that stays."""
    found = []
    for number, case in enumerate(cases):
        stays = trained(rank, Path(folder), case, "none")
        streams = trained(rank, Path(folder), case, ["memory", "disk"][number % 2])
        equal = {
            kind: stays[kind].keys() == streams[kind].keys()
            and all(torch.equal(stays[kind][name], streams[kind][name]) for name in stays[kind])
            for kind in ("weights", "state")
        }
        left = {name: value for name, value in streams.items() if name not in ("weights", "state")}
        found.append({**left, **equal, "same_norms": stays["norms"] == streams["norms"], "whole": stays["total"]})
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    save_tiny_qwen3(folder / "qwen3")
    save("qwen3_moe", folder / "moe")
    return folder


@pytest.mark.parametrize("world", CASES)
def test_the_bits_are_those_of_an_optimizer_that_stays_within_the_ledgers_bytes(folder: Path, world: int) -> None:
    for rank, found in enumerate(run_grid(world, on_grids, str(folder), CASES[world])):
        for case, got in zip(CASES[world], found, strict=True):
            said = (rank, case[0], case[1], case[2].dtype, got)
            assert got["weights"] and got["state"] and got["same_norms"] and all(got["facts"]), said
            predicted = got["predicted"]
            assert got["buckets"] > 2 and got["total"] == predicted["optimizer"], said
            assert 0 < got["peak"] <= predicted[BUCKET] < predicted["optimizer"], said
            model = predicted["parameters"] + predicted["gradients"]
            assert model + got["peak"] <= got["planned"] <= model + predicted[BUCKET], said
    assert not list(folder.glob(f"rank_*/{OFFLOAD}"))


def faults(rank: int, folder: str) -> list[str]:
    """Runs in each rank: the errors of a step with a changed copy on rank 1, and of one above rank 1's disk quota."""
    from megatron.core import parallel_state

    said = []
    case = CASES[2][0]
    for fault in ("copy", "quota"):
        actor = actor_on(Path(folder), case)
        own = Path(folder) / f"fault_{fault}_{rank}"
        masters = sum(p.numel() * 4 for g in actor.optimizer.inner.param_groups for p in g["params"])
        # The first step makes moments, which do not fit.
        memory = memory_of(actor, own, "disk", limit=masters + 100 if fault == "quota" and rank == 1 else None)
        memory.enter(Phase.UPDATE)
        if fault == "copy":
            sft_steps(actor, range(1), lr=LR)
            if rank == 1:
                path = own / OFFLOAD / "rank_1" / "actor.optimizer.bucket1"
                data = bytearray(path.read_bytes())
                data[40] ^= 1
                path.write_bytes(data)
        try:
            sft_steps(actor, range(1, 2), lr=LR)
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        parallel_state.destroy_model_parallel()
    return said


def test_a_changed_copy_or_a_full_quota_ends_every_rank_by_name(folder: Path) -> None:
    first, second = run_grid(2, faults, str(folder))
    assert "actor.optimizer.bucket1 came back from disk with other bytes than it left with" in second[0]
    assert "trainer.offload_disk_bytes=" in second[1] and second[1].startswith("NonRetryableError")
    for said in first:
        assert said.startswith(OffloadError.__name__) and "another trainer rank" in said
    assert str(Place.DISK) in second[0]
