"""An optimizer's state in a checkpoint: the values that Megatron-Core's own code saves, and a share of its memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import ParallelConfig
from tests.parallel.families import save
from tests.parallel.grid import run_grid
from tests.parallel.models import save_tiny_qwen3
from tests.parallel.test_megatron_on_cpu import sft_steps
from tests.parallel.test_reshard_memory import resident
from tests.parallel.test_written import actor_on

CASES = {
    2: [
        ("qwen3", ParallelConfig(tp=2), "bfloat16"),
        ("qwen3", ParallelConfig(dp=2), "bfloat16"),
        ("qwen3", ParallelConfig(cp=2), "float32"),
        ("tied", ParallelConfig(pp=2, vpp=2), "float32"),
        ("moe", ParallelConfig(dp=2, ep=2), "bfloat16"),
    ],
    4: [
        ("qwen3", ParallelConfig(dp=4), "float32"),
        ("tied", ParallelConfig(pp=2, dp=2), "bfloat16"),
        ("moe", ParallelConfig(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True), "float32"),
        ("deepseek", ParallelConfig(dp=4, ep=2), "bfloat16"),
    ],
}


def compared(rank: int, folder: str, cases: list[Any]) -> list[tuple[int, int]]:
    """For each case: parameters of this rank's optimizers, and those whose state it saves; all are as Megatron-Core's
    own."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megarl.weights.checkpoint.training.rank_state import sharded_optimizer_state
    from megarl.weights.checkpoint.training.save import bare, named

    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False}
    found = []
    for case in cases:
        actor = actor_on(Path(folder), case)
        sft_steps(actor, range(1))
        metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
        model = {
            name: bare(chunk).sharded_state_dict(metadata=metadata) for name, chunk in named(actor.model.chunks).items()
        }
        inner = actor.optimizer.inner
        sizes = [0, 0]
        for optimizer in getattr(inner, "chained_optimizers", [inner]):
            theirs = DistributedOptimizer.sharded_param_state_fully_reshardable(optimizer, model, False, metadata)
            ours = sharded_optimizer_state(optimizer, model, False, metadata)
            for number, tensors in ours.items():
                for name, tensor in tensors.items():
                    other = theirs[number][name]
                    assert torch.equal(tensor.data, other.data) and tensor.data.dtype is torch.float32, other.key
                    assert tensor.key == other.key and tensor.replica_id == (*other.replica_id[:2], 0)
                    if not isinstance(tensor, ShardedTensorFactory):
                        assert tensor.global_offset == other.global_offset
            group = optimizer.data_parallel_group
            everywhere: list[Any] = [None] * group.size()
            dist.all_gather_object(everywhere, list(ours), group=group)
            assert sorted(number for numbers in everywhere for number in numbers) == list(theirs), "each is saved once"
            loading = sharded_optimizer_state(optimizer, model, True, metadata)
            assert len(loading) == len(optimizer.model_param_gbuf_map), "a rank loads what it has a share of"
            mains: list[Any] = [None] * group.size()
            main = [
                number for number, t in loading.items() if all(i == 0 for i in nested_values(t["param"].replica_id))
            ]
            assert all(is_main_replica(loading[number]["exp_avg"].replica_id) for number in main)
            dist.all_gather_object(mains, main, group=group)
            assert len({n for numbers in mains for n in numbers}) == sum(map(len, mains)), "one main copy at most"
            sizes = [sizes[0] + len(theirs), sizes[1] + len(ours)]
        found.append((sizes[0], sizes[1]))
        dist.barrier()
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_the_state_is_that_of_megatrons_own_code(tmp_path: Path, world: int) -> None:
    save_tiny_qwen3(tmp_path / "qwen3")
    save_tiny_qwen3(tmp_path / "tied", tied=True)
    save("qwen3_moe", tmp_path / "moe")
    save("deepseek_v3", tmp_path / "deepseek")
    ranks = run_grid(world, compared, str(tmp_path), CASES[world])
    for number, (_, parallel, _) in enumerate(CASES[world]):
        assert all(0 < mine <= total for total, mine in (rank[number] for rank in ranks))
        if parallel.dp == world:
            assert all(mine < total for total, mine in (rank[number] for rank in ranks)), "no rank saves all"


def measured(rank: int, folder: str, dp: int) -> dict[str, int]:
    """Peak extra bytes of a snapshot, a save and a load on one rank, and the bytes of the model's parameters."""
    import torch
    import torch.distributed as dist

    from megarl.weights.checkpoint.training import state
    from megarl.weights.checkpoint.training.save import sharded_state

    actor = actor_on(Path(folder), ("model", ParallelConfig(dp=dp), "float32"))
    sft_steps(actor, range(1))
    part = state.CheckpointedModel(actor.model.chunks, actor.optimizer.inner)
    saved = state.save(Path(folder) / "checkpoints", 1, {"actor": part}, {}, keep=2)
    found = {"model": sum(p.nbytes for chunk in actor.model.chunks for p in chunk.parameters())}

    def peak(action: Callable[[], Any]) -> int:
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        before = resident("VmRSS")
        action()
        return resident("VmHWM") - before

    with part.grid(), torch.no_grad():
        found["snapshot"] = peak(lambda: sharded_state(part, is_loading=False))
    found["save"] = peak(lambda: state.save(Path(folder) / "checkpoints", 2, {"actor": part}, {}, keep=2))
    found["load"] = peak(lambda: state.load(saved, {"actor": part}))
    return found


@pytest.mark.parametrize("dp", [pytest.param(2, marks=pytest.mark.soak), 4])
def test_a_checkpoint_takes_a_share_of_the_optimizers_memory(tmp_path: Path, dp: int) -> None:
    """Gathered on every rank it would be three times the float32 parameters, and the buffers of a gather."""
    save("qwen3", tmp_path / "model", hidden_size=512, intermediate_size=1536, num_hidden_layers=4)
    for found in run_grid(dp, measured, str(tmp_path), dp):
        share = 3 * found["model"] // dp
        assert found["model"] > 32 << 20
        assert found["snapshot"] < share, found
        assert found["save"] < found["model"] // dp + share, found
        assert found["load"] < 4 * found["model"] + share, found


def restored(rank: int, folder: str, case: Any) -> list[str]:
    """What of this rank's masters and moments is not what it was, once a checkpoint was saved, values spoiled and the
    checkpoint loaded."""
    from megarl.weights.checkpoint.training import state
    from megarl.weights.megatron_private import optimizer_state

    actor = actor_on(Path(folder), case)
    sft_steps(actor, range(1))
    part = state.CheckpointedModel(actor.model.chunks, actor.optimizer.inner)
    saved = state.save(Path(folder) / "checkpoints", 1, {"actor": part}, {}, keep=1)
    own = {
        (number, name): tensor
        for optimizer in actor.optimizer.inner.chained_optimizers
        for number, parameter in enumerate(optimizer.model_param_gbuf_map)
        for name, tensor in optimizer_state(optimizer, parameter).items()
    }
    before = {key: tensor.clone() for key, tensor in own.items()}
    for tensor in own.values():
        tensor.fill_(7.0)
    state.load(saved, {"actor": part})
    return [f"{key}" for key, tensor in own.items() if not tensor.equal(before[key])]


def test_padding_of_buckets_moves_no_master(tmp_path: Path) -> None:
    """Three ranks divide no bucket evenly, and the tied embedding has one of its own: Megatron-Core's own gather left
    the padding out and took what lies behind it from other places."""
    save_tiny_qwen3(tmp_path / "tied", tied=True)
    assert run_grid(6, restored, str(tmp_path), ("tied", ParallelConfig(pp=2, dp=3), "bfloat16")) == [[]] * 6
