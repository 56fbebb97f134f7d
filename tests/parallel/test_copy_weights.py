"""Weights from one model to another in the same world: every element, in the destination's dtype, or an error that
names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import ParallelConfig
from megarl.core.errors import PlanError, WeightSyncError
from megarl.weights.reshard.buckets import HEADER
from megarl.weights.reshard.copy import HEADS, CopyReport, GroupTransport, copy_weights
from tests.parallel.families import save
from tests.parallel.grid import run_grid
from tests.parallel.models import save_tiny_qwen3

TP2, PP2, DP2 = ParallelConfig(tp=2), ParallelConfig(pp=2), ParallelConfig(dp=2)
EP2 = ParallelConfig(dp=2, ep=2)
BUCKET = 5000
"""Smaller than most tensors and no multiple of a row."""
LEFT = 7.0
"""What tensors that are not to be touched hold."""


@dataclass(frozen=True)
class Side:
    parallel: ParallelConfig
    dtype: str = "float32"
    head: Any = "lm"


CASES: dict[str, tuple[str, Side, Side]] = {
    "tp2-dp2": ("qwen3", Side(TP2), Side(DP2)),
    "dp2-tp2": ("qwen3", Side(DP2), Side(TP2)),
    "pp2-tp2": ("qwen3", Side(PP2), Side(TP2)),
    "same-grid": ("qwen3", Side(TP2), Side(TP2)),
    "uneven-stages": ("qwen3", Side(replace(PP2, first_stage_layers=1)), Side(PP2)),
    "tied-pp2-dp2": ("qwen3-tied", Side(PP2), Side(DP2)),
    "tied-dp2-pp2": ("qwen3-tied", Side(DP2), Side(PP2)),  # the second copy of the embedding, on the last stage
    "fp32-bf16": ("qwen3", Side(TP2), Side(DP2, "bfloat16")),
    "bf16-fp32": ("qwen3", Side(TP2, "bfloat16"), Side(PP2)),
    "experts-ep2-ep1": ("qwen3_moe", Side(EP2), Side(DP2)),
    "experts-ep1-ep2": ("qwen3_moe", Side(DP2), Side(EP2)),
    "experts-ep2-etp2": ("qwen3_moe", Side(EP2), Side(TP2)),
    "router-bias-bf16": ("deepseek_v3", Side(EP2), Side(PP2, "bfloat16")),  # stays in float32
    "critic": ("qwen3", Side(TP2), Side(DP2, head="score")),
    "critic-tied": ("qwen3-tied", Side(PP2), Side(TP2, head="score")),
    "critic-bf16": ("qwen3_moe", Side(EP2), Side(PP2, "bfloat16", "score")),
    "reward-to-reward": ("qwen3", Side(PP2, head="score"), Side(TP2, head="score")),
}
LEFT_OUT = {
    "critic": ("lm_head.weight", "score.weight"),
    "critic-tied": ("score.weight",),
    "critic-bf16": ("lm_head.weight", "score.weight"),
}


def join_world() -> None:
    from megarl.learn.parallel import process_groups

    process_groups.initialize(DP2, seed=1)


def local_tensors(
    path: Path, side: Side, rank: int, fill: float | None = None, cast: str | None = None
) -> tuple[Any, dict[str, torch.Tensor]]:
    """(layout, this rank's tensors): from the checkpoint (as ``cast`` knows its numbers), or all ``fill``."""
    from megarl.learn.parallel.grid import megatron_grid
    from megarl.weights.checkpoint.formats import hf
    from megarl.weights.reshard.layouts import megatron_layout

    layout = megatron_layout(hf.read_hf_config(path), megatron_grid(side.parallel), head=side.head)
    own = {row.local: layout.dtype_of(row.parts[0]) for row, _ in layout.rows_of(rank)}
    tensors = {
        name: torch.full(shape, float("nan") if fill is None else fill, dtype=getattr(torch, own[name] or side.dtype))
        for name, shape in layout.local_shapes(rank).items()
    }
    if fill is None:
        hf.load_into(path, layout, rank, tensors, score="zeros")
        for name, tensor in tensors.items() if cast else ():
            if own[name] is None:
                tensor.copy_(tensor.to(getattr(torch, cast or "")))
    return layout, tensors


def copies(rank: int, folder: str) -> dict[str, tuple[list[str], CopyReport, int]]:
    """Case -> (local tensors that are not as they should be, report, expected number of digests here)."""
    join_world()
    found = {}
    for case, (model, a, b) in CASES.items():
        path = Path(folder) / model
        source, source_tensors = local_tensors(path, a, rank)
        before = {name: tensor.clone() for name, tensor in source_tensors.items()}
        destination, tensors = local_tensors(path, b, rank, fill=LEFT)
        _, expected = local_tensors(path, b, rank, cast=a.dtype)
        if b.head == "score" != a.head and "output_layer.weight" in expected:
            expected["output_layer.weight"].fill_(LEFT)
        report = copy_weights(source, source_tensors, destination, tensors, rank, bucket_bytes=BUCKET, left_out=HEADS)
        wrong = [name for name, want in expected.items() if not torch.equal(tensors[name], want)]
        wrong += [f"source's {name}" for name, want in before.items() if not torch.equal(source_tensors[name], want)]
        mine = {piece.tensor for piece in destination.pieces(rank)} - set(report.left_out)
        found[case] = wrong, report, len(mine)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copies")
    save_tiny_qwen3(root / "qwen3")
    save_tiny_qwen3(root / "qwen3-tied", tied=True)
    save("qwen3_moe", root / "qwen3_moe")
    save("deepseek_v3", root / "deepseek_v3")
    return root


@pytest.fixture(scope="module")
def copied(folder: Path) -> list[dict[str, tuple[list[str], CopyReport, int]]]:
    return run_grid(2, copies, str(folder))


@pytest.mark.parametrize("case", list(CASES))
def test_the_destination_has_the_source_s_weights(copied: Any, case: str) -> None:
    for rank, answer in enumerate(copied):
        wrong, report, _ = answer[case]
        assert not wrong, f"rank {rank}: {wrong}"
        assert report.left_out == LEFT_OUT.get(case, ())
        assert report.digests == sum(answer[case][2] for answer in copied)


class Damaging(GroupTransport):
    """Flips one bit of what has arrived, as bad memory or a bad network card does."""

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor]) -> Any:
        arrival = super().irecv(nbytes, rank, spare)

        class Damaged:
            release = arrival.release

            def wait(self) -> torch.Tensor:
                message = arrival.wait()
                if len(message) > HEADER:
                    message[len(message) // 2] ^= 1
                return message

        return Damaged()


def damaged(rank: int, folder: str) -> str:
    join_world()
    source, source_tensors = local_tensors(Path(folder) / "qwen3", Side(TP2), rank)
    destination, tensors = local_tensors(Path(folder) / "qwen3", Side(PP2), rank, fill=LEFT)
    transport = Damaging() if rank == 1 else GroupTransport()
    try:
        copy_weights(source, source_tensors, destination, tensors, rank, bucket_bytes=1 << 20, transport=transport)
    except WeightSyncError as error:
        return str(error)
    return ""


def test_one_flipped_bit_is_seen_by_every_rank(folder: Path) -> None:
    first, second = run_grid(2, damaged, str(folder))
    assert first == second
    assert "do not use this model" in first and "on destination rank 1, from source ranks [0, 1]" in first
    assert first.count("digest sent") == 1, first


def aliased(rank: int, folder: str) -> str:
    """Two tensors of the destination share their memory, so that the second write destroys the first: nothing is sent
    here."""
    join_world()
    source, source_tensors = local_tensors(Path(folder) / "qwen3", Side(DP2), rank)
    destination, tensors = local_tensors(Path(folder) / "qwen3", Side(DP2), rank, fill=LEFT)
    if rank == 1:
        tensors["decoder.layers.1.input_layernorm.weight"] = tensors["decoder.layers.0.input_layernorm.weight"]
    try:
        copy_weights(source, source_tensors, destination, tensors, rank, bucket_bytes=BUCKET)
    except WeightSyncError as error:
        return str(error)
    return ""


def test_what_is_overwritten_afterwards_is_seen(folder: Path) -> None:
    first, second = run_grid(2, aliased, str(folder))
    assert first == second
    assert (
        "model.layers.0.input_layernorm.weight in decoder.layers.0.input_layernorm.weight on destination rank 1"
        in first
    )
    assert "model.layers.1" not in first and "rank 0," not in first


def refusals(rank: int, folder: str) -> list[str]:
    join_world()
    path = Path(folder) / "qwen3"
    source, source_tensors = local_tensors(path, Side(TP2), rank)
    found = []
    mixed = local_tensors(path, Side(DP2), rank, fill=LEFT)
    mixed[1]["decoder.final_layernorm.weight"] = mixed[1]["decoder.final_layernorm.weight"].bfloat16()
    for destination, tensors in (
        local_tensors(path, Side(DP2, head="score"), rank, fill=LEFT),
        local_tensors(path, Side(ParallelConfig(tp=2, dp=2)), rank, fill=LEFT),
        local_tensors(Path(folder) / "qwen3_moe", Side(DP2), rank, fill=LEFT),
        mixed,
    ):
        with pytest.raises(PlanError) as error:
            copy_weights(source, source_tensors, destination, tensors, rank, bucket_bytes=BUCKET)
        assert all(tensor.eq(LEFT).all() for tensor in tensors.values())
        found.append(str(error.value))
    return found


def test_what_does_not_fit_is_refused_before_anything_is_written(folder: Path) -> None:
    for head, ranks, family, dtype in run_grid(2, refusals, str(folder)):
        assert "lm_head.weight has no place in megatron tp=1 pp=1 dp=2 head=score" in head
        assert "score.weight has no place in megatron tp=2 pp=1 dp=1:" in head and "left_out" in head
        assert "with 2 ranks to megatron tp=2 pp=1 dp=2 with 4; both models must be on the same ranks" in ranks
        assert "mlp.experts" in family and "same config.json" in family
        assert "decoder.final_layernorm.weight on rank" in dtype and "torch.bfloat16" in dtype


def critic_of_actor(rank: int, folder: str) -> tuple[float, float, list[str]]:
    """A critic whose weights come from the actor's memory, and one whose weights come from the actor's files, learn
    alike."""
    from megarl.learn.parallel import process_groups
    from tests.parallel.trainee import Trainee

    path = Path(folder) / "qwen3"
    process_groups.initialize(TP2, seed=1)
    actor = Trainee(path, TP2, "lm")
    grid = process_groups.Grid(DP2, seed=1)
    with grid.active():
        critic, other = Trainee(path, DP2, "score", score="zeros"), Trainee(path, DP2, "score", score="zeros")
    for name, tensor in critic.tensors.items():
        if name != "output_layer.weight":
            tensor.fill_(LEFT)
    copy_weights(actor.layout, actor.tensors, critic.layout, critic.tensors, rank, bucket_bytes=BUCKET, left_out=HEADS)
    critic.optimizer.reload_model_params()
    with grid.active():
        norms = critic.step(1)[0], other.step(1)[0]
        wrong = [name for name, tensor in critic.tensors.items() if not torch.equal(tensor, other.tensors[name])]
    return *norms, wrong


def test_a_critic_from_the_actor_s_memory_is_the_one_from_its_files(folder: Path) -> None:
    for ours, theirs, wrong in run_grid(2, critic_of_actor, str(folder)):
        assert ours == theirs and not wrong
