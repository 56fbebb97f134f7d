"""Megatron-Core trains on CPU with ``megarl.learn.parallel.cpu``, and each of its points is needed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from tests.parallel.batches import sequences_of
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, save_tiny_qwen3


def make_actor(path: str, parallel: ParallelConfig, dtype: str = "float32") -> Any:
    from megarl.learn.batching import MicroBatching
    from megarl.learn.parallel import process_groups
    from megarl.learn.parallel.grid import megatron_grid
    from megarl.learn.training.model import TrainedModel
    from megarl.learn.training.schedule import Head
    from megarl.weights.checkpoint.formats import hf
    from megarl.weights.reshard.layouts import megatron_layout

    position = process_groups.initialize(parallel, seed=1)
    hf_config = hf.read_hf_config(Path(path))
    layout = megatron_layout(hf_config, megatron_grid(parallel))
    micro_batching = MicroBatching(dp=parallel.dp, rows=2)
    model = ModelConfig(path=path, dtype=dtype)
    actor = TrainedModel(hf_config, model, parallel, Head(VOCAB), micro_batching, OptimizerConfig(lr=1e-2))
    hf.load_into(Path(path), layout, position.rank, actor.model.tensors)
    actor.model.weights_changed()
    return actor


def sft_steps(actor: Any, steps: range, lr: float = 1e-2) -> list[tuple[float, float]]:
    """(this rank's part of the loss, gradient norm) of some supervised steps on seeded rows."""
    from megarl.config.algorithms import AlgorithmConfig
    from megarl.learn import algorithms
    from megarl.learn.training import objectives

    out = []
    for step in steps:
        g = torch.Generator().manual_seed(step)
        tokens, mask = torch.randint(2, VOCAB, (4, 16), generator=g), torch.rand(4, 16, generator=g) < 0.5
        mask[:, -1] = False
        rows = sequences_of(tokens, mask)
        objective = objectives.policy(algorithms.get("sft"), AlgorithmConfig(), rows)
        sums = actor.backward(rows, actor.model.micro_batches(rows), objective)
        out.append((sums.get("actor/loss", (0.0, 0.0))[0], actor.step(lr)))
    return out


def train(rank: int, path: str, parallel: ParallelConfig, dtype: str, without: str | None) -> list[tuple[float, float]]:
    from megarl.learn.parallel import cpu

    cpu.POINTS = tuple(p for p in cpu.POINTS if p.__name__ != without)
    actor = make_actor(path, parallel, dtype)
    return sft_steps(actor, range(3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), layers=2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_falls(model: str, dtype: str) -> None:
    (losses,) = run_grid(1, train, model, ParallelConfig(), dtype, None)
    assert all(norm > 0 for _, norm in losses)
    again = run_grid(2, train, model, ParallelConfig(tp=2), dtype, None)
    tolerance = 1e-5 if dtype == "float32" else 0.05
    for (loss, _), (loss_tp2, _) in zip(losses, again[0], strict=True):
        assert loss_tp2 == pytest.approx(loss, rel=tolerance)


def load_afterwards(rank: int, folder: str) -> list[float]:
    """Frequencies of a model that transformers loads once factories are replaced, as where it was never used before."""
    from torch.overrides import get_ignored_functions
    from torch.utils._device import _device_constructors

    from megarl.learn.parallel import cpu

    for found in (_device_constructors, get_ignored_functions):
        found.cache_clear()
    cpu.install()
    from transformers.models.mistral.modeling_mistral import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = MistralForCausalLM(MistralConfig(**sizes, num_hidden_layers=1, vocab_size=VOCAB))
    model.save_pretrained(folder)
    loaded = MistralForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight)
    return loaded.model.rotary_emb.inv_freq.tolist()


def test_models_of_transformers_load_afterwards(tmp_path: Path) -> None:
    [found] = run_grid(1, load_afterwards, str(tmp_path))
    assert found == pytest.approx([10_000.0 ** (-i / 4) for i in range(4)], rel=1e-6)


NO_CUDA = "NVIDIA driver|not compiled with CUDA|re-initialize CUDA"  # the last where TransformerEngine is installed
NEEDED = {
    "_cuda_runtime": NO_CUDA,
    "_device_literals": NO_CUDA,
    "_rng_state": NO_CUDA,
    "_optimizer_dtype_names": "torch.BFloat16Tensor",
}


@pytest.mark.parametrize("point", list(NEEDED))
def test_each_point_is_needed(model: str, point: str) -> None:
    dtype = "bfloat16" if point == "_optimizer_dtype_names" else "float32"
    with pytest.raises(AssertionError, match=NEEDED[point]):
        run_grid(1, train, model, ParallelConfig(), dtype, point)


def recompute(rank: int, folder: str) -> tuple[list[float], list[str]]:
    """Gradient through an output that was discarded, and what was built to compute it."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    from megarl.learn.parallel import process_groups

    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    process_groups.initialize(ParallelConfig(), seed=1)
    x = torch.arange(4.0, requires_grad=True)
    part = CheckpointWithoutOutput(None)
    doubled = part.checkpoint(lambda t: 2 * t, x)
    squares = doubled.view(2, 2).square()
    part.discard_output_and_register_recompute(squares)
    assert doubled.untyped_storage().size() == 0
    squares.sum().backward()
    assert x.grad is not None
    return x.grad.tolist(), os.listdir(folder)


def test_a_discarded_output_is_filled_without_a_compiler(tmp_path: Path) -> None:
    """Ranks would wait for the lock that a killed one has left in the folder of extensions; Megatron-Core 0.16 builds
    none."""
    assert run_grid(1, recompute, str(tmp_path)) == [([0.0, 8.0, 16.0, 24.0], [])]


def save_and_go_on(rank: int, path: str, parallel: ParallelConfig, folder: str) -> tuple[Any, str]:
    from megarl.weights.checkpoint.training import state

    actor = make_actor(path, parallel)
    sft_steps(actor, range(2))
    state.save(Path(folder), 2, parts(actor), {"phase": "rl"}, keep=2)
    return sft_steps(actor, range(2, 5)), weights_digest(actor)


def resume_and_go_on(rank: int, path: str, parallel: ParallelConfig, folder: str) -> tuple[Any, str]:
    from megarl.weights.checkpoint.training import state

    actor = make_actor(path, parallel)
    found = state.latest(Path(folder))
    assert found is not None and state.read_state(found)["phase"] == "rl"
    state.load(found, parts(actor))
    return sft_steps(actor, range(2, 5)), weights_digest(actor)


def parts(actor: Any) -> Any:
    from megarl.weights.checkpoint.training.state import CheckpointedModel

    return {"actor": CheckpointedModel(actor.model.chunks, actor.optimizer.inner)}


def weights_digest(actor: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(actor.model.tensors.items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("grid", ["tp2", "pp2", "dp2"])
def test_resume_is_bitwise(model: str, grid: str, tmp_path: Path) -> None:
    parallel = ParallelConfig(**{grid[:2]: 2})
    uninterrupted = run_grid(2, save_and_go_on, model, parallel, str(tmp_path))
    resumed = run_grid(2, resume_and_go_on, model, parallel, str(tmp_path))
    assert resumed == uninterrupted


def save_untrained(rank: int, path: str, folder: str) -> str:
    from megarl.weights.checkpoint.training import state

    actor = make_actor(path, ParallelConfig())
    state.save(Path(folder), 0, parts(actor), {"phase": "rl"}, keep=1)
    return weights_digest(actor)


def load_untrained(rank: int, path: str, folder: str) -> str:
    from megarl.weights.checkpoint.training import state

    actor = make_actor(path, ParallelConfig())
    for tensor in actor.model.tensors.values():
        tensor.zero_()
    found = state.latest(Path(folder))
    assert found is not None
    state.load(found, parts(actor))
    return weights_digest(actor)


def test_checkpoint_before_the_first_step(model: str, tmp_path: Path) -> None:
    assert run_grid(1, save_untrained, model, str(tmp_path)) == run_grid(1, load_untrained, model, str(tmp_path))


def restart(rank: int, path: str, parallel: ParallelConfig) -> list[Any]:
    actor = make_actor(path, parallel)
    decays = [{group["wd_mult"]: group["weight_decay"] for group in inner_groups(actor)}]
    sft_steps(actor, range(2))
    weights = {name: tensor.clone() for name, tensor in actor.model.tensors.items()}
    other = OptimizerConfig(lr=1e-2, weight_decay=0.5, beta1=0.8, beta2=0.9, eps=1e-6, clip_grad=0.1)
    runs = []
    for renew in (
        lambda: actor.optimizer.restart(other),
        lambda: setattr(actor, "optimizer", new_optimizer(actor, other)),
    ):
        for name, tensor in actor.model.tensors.items():
            tensor.copy_(weights[name])
        renew()
        actor.model.weights_changed()
        decays.append({group["wd_mult"]: group["weight_decay"] for group in inner_groups(actor)})
        runs.append((sft_steps(actor, range(2, 4)), weights_digest(actor)))
    return [decays, *runs]


def inner_groups(actor: Any) -> list[dict[str, Any]]:
    from megarl.weights.checkpoint.training.state import inner_optimizers

    return [group for inner in inner_optimizers(actor.optimizer.inner) for group in inner.param_groups]


def new_optimizer(actor: Any, config: OptimizerConfig) -> Any:
    from megarl.learn.training.optimizer import Optimizer

    return Optimizer(actor.model.chunks, config, "float32")


def test_restarted_optimizer_is_as_new(model: str) -> None:
    """No moment, step or setting of the phase before stays; norms are never decayed."""
    for decays, restarted, new in run_grid(2, restart, model, ParallelConfig(dp=2)):
        assert decays == [{1.0: 0.01, 0.0: 0.0}, {1.0: 0.5, 0.0: 0.0}, {1.0: 0.5, 0.0: 0.0}]
        assert restarted == new


def listening(rank: int) -> list[str]:
    """Local addresses on which this process listens."""
    import psutil

    from megarl.learn.parallel import process_groups

    process_groups.initialize(ParallelConfig(dp=2), seed=1)
    return [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def test_a_job_on_loopback_listens_there_alone() -> None:
    for addresses in run_grid(2, listening):
        assert addresses and set(addresses) == {"127.0.0.1"}


def test_resume_on_another_grid(model: str, tmp_path: Path) -> None:
    uninterrupted = run_grid(2, save_and_go_on, model, ParallelConfig(tp=2), str(tmp_path))
    resumed = run_grid(1, resume_and_go_on, model, ParallelConfig(), str(tmp_path))
    for (loss, norm), (loss_1, norm_1) in zip(uninterrupted[0][0], resumed[0][0], strict=True):
        assert loss_1 == pytest.approx(loss, rel=1e-5)
        assert norm_1 == pytest.approx(norm, rel=1e-5)
