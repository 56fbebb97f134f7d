"""Adapters of the tiny models with images, tower and language model: PEFT's on transformers' class, megarl's on a
grid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.config.lora import LoraConfig
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megarl.weights.architectures import ARCHITECTURES
from tests.parallel import peft_twin, vision
from tests.parallel.families import VOCAB, hf_model

LORA = LoraConfig(
    rank=4,
    alpha=6.0,
    targets=["all-linear", "attn.qkv", "attn.proj", "visual.merger.mlp.0"],
    rank_pattern={"blocks.1.attn.qkv": 3},
    alpha_pattern={"visual.*proj": 5.0},
)
OF = {
    vision.FAMILY: LORA,
    vision.DEEPSTACK: replace(
        LORA,
        targets=[
            "all-linear",
            "attn.qkv",
            "attn.proj",
            "visual.merger.linear_fc1",
            "deepstack_merger_list.1.linear_fc2",
        ],
    ),
}
EXPECTED = "expected_of_adapter.pt"


def save(path: Path, family: str) -> None:
    """Write an adapter in PEFT's files beside the model in ``path``, and ``EXPECTED``: log-probs, loss and gradients of
    A's and B's by HF name."""
    folder = peft_twin.save_adapter(path, OF[family])
    model = peft_twin.of_files(hf_model(family), folder)
    logp = vision.transformers_logp(model)
    loss = -logp.sum() / int(vision.sequences().mask.sum())
    loss.backward()
    trained = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    gradients = peft_twin.by_file(model, trained, ARCHITECTURES[family])
    torch.save({"logp": logp.detach(), "loss": loss.item(), "gradients": gradients}, path / EXPECTED)


def on_grid(rank: int, path: Path, family: str, parallel: ParallelConfig, limits: Any) -> dict[str, Any]:
    """Runs in each rank, on the grid in place: errors against ``EXPECTED``, and whether every A and B moved while the
    model itself did not."""
    import torch.distributed as dist

    from megarl.config.algorithms import AlgorithmConfig
    from megarl.core.metrics import mean_of_sums
    from megarl.learn import algorithms
    from megarl.learn.models.gpt import unwrap
    from megarl.learn.training import objectives
    from megarl.learn.training.model import TrainedModel
    from megarl.learn.training.schedule import Head
    from megarl.weights.checkpoint.formats import hf
    from tests.parallel.parity import gradient_errors, whole_gradients

    hf_config, expected = hf.read_hf_config(path), torch.load(path / EXPECTED, weights_only=False)
    settings = ModelConfig(path=str(path), lora=OF[family])
    actor = TrainedModel(hf_config, settings, parallel, Head(VOCAB), limits, OptimizerConfig(lr=1e-2))
    model, adapters = actor.model, actor.model.adapters
    assert adapters is not None
    model.load_hf(path)
    adapters.load(path / peft_twin.FOLDER, model.all_tensors)
    model.weights_changed()
    sequences = vision.sequences()
    objective = objectives.policy(algorithms.get("sft"), AlgorithmConfig(name="sft"), sequences)
    batches = model.micro_batches(sequences)
    logp = model.outputs(sequences, [batches])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, actor.backward(sequences, batches, objective))
    (chunk,) = model.chunks
    names = {name: p for name, p in unwrap(chunk).named_parameters() if p.requires_grad}
    gradients = whole_gradients(model.chunks, [names])
    gradient, where = gradient_errors(rank, hf_config, adapters.layout, gradients, expected["gradients"])
    before = {name: tensor.clone() for name, tensor in model.all_tensors.items()}
    actor.step(1e-2)
    moved = {name for name, tensor in model.all_tensors.items() if not torch.equal(tensor, before[name])}
    return {
        "logp": float((logp - expected["logp"]).abs().max()),
        "loss": abs(mean_of_sums(everyone)["actor/loss"] - expected["loss"]),
        "gradient": gradient,
        "where": where,
        "moved": moved == set(adapters.adapted(model.all_tensors).factors) and any("visual" in name for name in moved),
    }
