"""The tiny Qwen2.5-VL with a score head: transformers' generic class, and megarl's model on a grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from megarl.weights.architectures import ARCHITECTURES
from tests.parallel import vision
from tests.parallel.families import hf_model, score_class


def weights() -> torch.Tensor:
    """float32 [T]: a weight of every position's score in the loss, so that no position's gradient is hidden."""
    return torch.randn(len(vision.sequences().tokens), generator=torch.Generator().manual_seed(8))


def save(path: Path) -> Path:
    """An HF checkpoint of the class, with ``expected.pt``: scores of all positions, the mean of those times
    ``weights``, and its gradients by the table's names."""
    from tests.parallel.parity import gradients_by_file

    published = hf_model(vision.FAMILY)
    published.config.num_labels = 1
    torch.manual_seed(1)
    model = score_class()._from_config(published.config, dtype=torch.float32, attn_implementation="eager").eval()
    model.model.load_state_dict(published.model.state_dict())
    model.save_pretrained(path)
    made, parts = vision.sequences(), []
    starts = made.cu_seqlens.tolist()
    for start, end, own in zip(starts, starts[1:], vision.images(), strict=False):
        inputs = vision.inputs_of(made.tokens[start:end], own)
        scores = model.score(model.model(**inputs).last_hidden_state)[0, :, 0]
        assert torch.equal(scores[-1], model(**inputs).logits[0, 0]), "the class scores the last token"
        parts.append(scores)
    scores = torch.cat(parts)
    loss = (scores * weights()).mean()
    loss.backward()
    table = ARCHITECTURES[vision.FAMILY]
    gradients = {table.name_in_table(name): tensor for name, tensor in gradients_by_file(model).items()}
    torch.save({"scores": scores.detach(), "loss": loss.item(), "gradients": gradients}, path / "expected.pt")
    return path


def on_grid(
    rank: int, root: Path, name: str, parallel: ParallelConfig, actor: Any, cases: list[tuple[TrainerConfig, bool]]
) -> list[dict[str, Any]]:
    """Runs in each rank, on the grid in place: errors of each case (layout of micro-batches, tower trained).

    Writes ``scores again {name}``, the files of the loaded model, and compares a copy of ``actor``.
    """
    import torch.distributed as dist

    from megarl.core.metrics import mean_of_sums
    from megarl.learn.algorithms import Loss
    from megarl.learn.models.gpt import unwrap
    from megarl.learn.training.model import TrainedModel, micro_batching_for
    from megarl.learn.training.objectives import LossTokens, Objective
    from megarl.weights.checkpoint.formats import hf
    from megarl.weights.reshard.layouts import hf_layout
    from megarl.weights.reshard.plan import build_plan
    from tests.parallel.parity import gradient_errors, whole_gradients

    path, found = root / "scores", list[dict[str, Any]]()
    hf_config, expected = hf.read_hf_config(path), torch.load(path / "expected.pt", weights_only=False)
    sequences, weight = vision.sequences(), weights()
    sequences.mask = torch.ones_like(sequences.mask)

    def loss(kept: LossTokens, outputs: torch.Tensor) -> Loss:
        return Loss((outputs[:, 0] * weight[kept.index].to(outputs.device)).sum(), {})

    objective = Objective("critic", lambda kept: torch.tensor(len(kept.index)), loss)
    critic: Any = None
    for layout, trained in cases:
        limits = micro_batching_for(parallel, layout)
        if critic is None or critic.model.model_config.train_vision_tower is not trained:
            settings = ModelConfig(path=str(path), train_vision_tower=trained)
            critic = TrainedModel(hf_config, settings, parallel, None, limits, OptimizerConfig(lr=1e-2))
        critic.model.micro_batching = limits
        critic.model.load_hf(path)
        (chunk,) = critic.model.chunks
        names = {name: p for name, p in unwrap(chunk).named_parameters() if p.requires_grad}
        batches = critic.model.micro_batches(sequences)
        scores = critic.model.outputs(sequences, [batches])
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, critic.backward(sequences, batches, objective))
        learned = (
            critic.model.layout if trained else critic.model.layout.only(lambda name: not name.startswith("visual."))
        )
        reduced = whole_gradients(critic.model.chunks, [names])
        gradient, where = gradient_errors(rank, hf_config, learned, reduced, expected["gradients"], "score")
        tower = {name: tensor.clone() for name, tensor in critic.model.tensors.items() if "visual" in name}
        critic.step(1e-2)
        found.append(
            {
                "score": float((scores - expected["scores"]).abs().max() / expected["scores"].abs().max()),
                "loss": abs(mean_of_sums(everyone)["critic/loss"] - expected["loss"]),
                "gradient": gradient,
                "where": where,
                "moved": [not torch.equal(tensor, critic.model.tensors[name]) for name, tensor in tower.items()],
            }
        )
    critic.model.load_hf(path)
    plan = build_plan(critic.model.layout, hf_layout(hf_config, head="score"))
    hf.export_hf(plan, rank, critic.model.proven_tensors(), path, root / f"scores again {name}")
    for tensor in critic.model.tensors.values():
        tensor.zero_()
    critic.model.copy_from(actor.model, bucket_bytes=1 << 16)
    for name, tensor in critic.model.tensors.items():
        same = tensor == (0 if name == "output_layer.weight" else actor.model.tensors[name])
        assert bool(same.all()), f"{name} is not the actor's"
    return found
