"""One GRPO update on a fixed batch: every grid against plain transformers and torch, written here independently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import AlgorithmConfig, KLConfig, ModelConfig, OptimizerConfig, ParallelConfig
from tests.parallel.batches import sequences_of
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, save_tiny_qwen3

TOLERANCE = 1e-5
SETTINGS = AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, entropy_coef=0.01, kl=KLConfig(coef=0.1))
CLIP_GRAD = 0.5
GRIDS = {
    "tp1": ParallelConfig(),
    "tp2": ParallelConfig(tp=2),
    "tp2-sp": ParallelConfig(tp=2, sequence_parallel=True),
    "pp2": ParallelConfig(pp=2),
    "dp2": ParallelConfig(dp=2),
    "tp2pp2": ParallelConfig(tp=2, pp=2),
}


def make_batch(reference_logp: Any) -> dict[str, torch.Tensor]:
    """Ten rows of unequal length. old_logp and ref_logp are the model's own, perturbed: no term of the loss vanishes."""
    g = torch.Generator().manual_seed(11)
    rows, length = 10, 20
    tokens = torch.randint(2, VOCAB, (rows, length), generator=g)
    mask = torch.zeros(rows, length, dtype=torch.bool)
    lengths = torch.zeros(rows, dtype=torch.int64)
    for i in range(rows):
        prompt = int(torch.randint(3, 8, (), generator=g))
        response = int(torch.randint(1, length - prompt, (), generator=g))
        mask[i, prompt - 1 : prompt + response - 1] = True
        tokens[i, prompt + response :] = 0
        lengths[i] = prompt + response
    mask[3, 7] = False  # a token in the middle that is not in the loss
    logp = reference_logp(tokens)
    noise = [torch.randn(rows, length, generator=g) * 0.1 for _ in range(2)]
    advantages = torch.randn(rows, 1, generator=g).expand(rows, length).contiguous()
    return {"tokens": tokens, "lengths": lengths, "mask": mask, "old_logp": logp + noise[0], "ref_logp": logp + noise[1], "advantages": advantages}


def next_token_logp(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(tokens).logits.float()
    logp_all = torch.log_softmax(logits, -1)
    nxt = torch.roll(tokens, -1, 1)
    return logp_all.gather(-1, nxt[..., None])[..., 0], -(logp_all.exp() * logp_all).sum(-1)


def reference(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The batch, and its loss, the sum of the absolute terms, the gradient norm and each gradient by HF name."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        batch = make_batch(lambda tokens: next_token_logp(model, tokens)[0])
    logp, entropy = next_token_logp(model, batch["tokens"])
    ratio = torch.exp(logp - batch["old_logp"])
    surrogate = torch.minimum(ratio * batch["advantages"], ratio.clamp(0.8, 1.28) * batch["advantages"])
    log_r = batch["ref_logp"] - logp
    k3 = torch.exp(log_r) - log_r - 1
    terms = torch.stack([-surrogate, 0.1 * k3, -0.01 * entropy])[:, batch["mask"]]
    count = batch["mask"].sum()
    loss = terms.sum() / count
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    norm = torch.sqrt(sum(g.double().pow(2).sum() for g in grads.values()))
    return batch, {"loss": float(loss.detach()), "terms": float(terms.detach().abs().sum() / count), "norm": float(norm), "grads": grads}


def one_update(rank: int, path: str, parallel: ParallelConfig, batch: dict[str, torch.Tensor], micro: int) -> dict[str, Any]:
    """Runs in each rank: the actor's loss and gradients as the trainer computes them."""
    import torch.distributed as dist

    from megarl import algorithms
    from megarl.batching import Cut
    from megarl.checkpoint import hf
    from megarl.metrics import mean_of_sums
    from megarl.models.gpt import unwrap
    from megarl.parallel import groups
    from megarl.reshard.layouts import MegatronGrid, megatron_layout
    from megarl.training import objectives
    from megarl.training.model import TrainedModel
    from megarl.training.schedule import Head

    groups.initialize(parallel, seed=1)
    hf_config = hf.read_hf_config(Path(path))
    layout = megatron_layout(hf_config, MegatronGrid(parallel.tp, parallel.pp, parallel.dp))
    cut = Cut(dp=parallel.dp, multiple=parallel.tp if parallel.sequence_parallel else 1, rows=micro)
    optimizer = OptimizerConfig(lr=1e-3, clip_grad=CLIP_GRAD)
    actor = TrainedModel(hf_config, ModelConfig(path=path), parallel, Head(VOCAB), cut, optimizer)
    hf.load_into(Path(path), layout, rank, actor.tensors)
    actor.weights_changed()
    sequences = sequences_of(**batch)
    objective = objectives.policy(algorithms.get("grpo"), SETTINGS, sequences)
    sums = actor.backward(sequences, actor.micro_batches(sequences), objective)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sums)
    metrics = mean_of_sums(everyone)
    (chunk,) = actor.chunks
    for buffer in chunk.buffers:  # the distributed optimizer leaves each rank its shard of the reduced gradient
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            size = bucket.grad_data.numel() // group.size()
            mine_shard = bucket.grad_data[group.rank() * size : (group.rank() + 1) * size].clone()
            dist.all_gather_into_tensor(bucket.grad_data, mine_shard, group=group)
    grads = {n: p.main_grad.clone() for n, p in unwrap(chunk).named_parameters()}
    return {"loss": metrics["actor/loss"], "grads": grads, "norm": actor.step(1e-3), "metrics": metrics}


def to_hf(hf_config: dict[str, Any], parallel: ParallelConfig, answers: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    from megarl.reshard.layouts import MegatronGrid, hf_layout, megatron_layout
    from megarl.reshard.plan import build_plan

    target = hf_layout(hf_config)
    out = {name: torch.full(shape, float("nan")) for name, shape in target.local_shapes(0).items()}
    source = megatron_layout(hf_config, MegatronGrid(parallel.tp, parallel.pp, parallel.dp))
    for m in build_plan(source, target).moves:
        size = [hi - lo for lo, hi in m.box]
        src = answers[m.src]["grads"][m.src_local][tuple(slice(a, a + n) for a, n in zip(m.src_at, size, strict=True))]
        out[m.dst_local][tuple(slice(a, a + n) for a, n in zip(m.dst_at, size, strict=True))] = src
    return out


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model_and_reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    path = save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), tied=request.param)
    return path, *reference(path)


@pytest.mark.parametrize("micro", [10, 2])
@pytest.mark.parametrize("grid", list(GRIDS))
def test_update_equals_plain_transformers(model_and_reference: tuple[Path, Any, Any], grid: str, micro: int) -> None:
    from megarl.checkpoint import hf

    path, batch, expected = model_and_reference
    parallel = GRIDS[grid]
    if micro == 2 and grid not in ("tp1", "pp2", "dp2"):
        pytest.skip("micro-batching is crossed with the grids that it interacts with: tp1, pp2, dp2")
    answers = run_grid(parallel.world_size, one_update, str(path), parallel, batch, micro)
    assert abs(answers[0]["loss"] - expected["loss"]) / expected["terms"] < TOLERANCE
    for answer in answers:
        assert abs(answer["norm"] - expected["norm"]) / expected["norm"] < TOLERANCE
    grads = to_hf(hf.read_hf_config(path), parallel, answers)
    assert grads.keys() == expected["grads"].keys()
    for name, want in expected["grads"].items():
        error = float((grads[name] - want).abs().max() / want.abs().max())
        assert error < TOLERANCE, f"{name}: gradient off by {error:.1e} of its largest entry"
