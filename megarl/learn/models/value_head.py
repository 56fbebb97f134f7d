"""The scalar head of a critic or reward model: a GPTModel stage that gives one number for each position.

Shape legend: s sequence length, b rows of the micro-batch, H hidden size.

Source: transformers' ``modeling_layers.py`` (``GenericForSequenceClassification``: a linear without bias after the last
    norm);
Megatron-Core 0.16.1 ``models/gpt/gpt_model.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


class ScoreHead(torch.nn.Module):
    """A linear of one row, whole on every tensor-parallel rank, in the place of GPTModel's output layer.

    Under sequence parallelism each rank scores its share of the sequence and the scores are gathered, which moves H
    times less than gathering what they are computed from. The weight's gradient is then that of the share: the mark
    ``sequence_parallel`` makes Megatron add the shares up (``finalize_model_grads``). Without it every rank has the
    whole gradient.

    Saved as Megatron saves any tensor that all ranks of a stage have alike, under ``output_layer.weight``.
    """

    def __init__(self, config: Any, tp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """[s, b, H] (a share of s where the sequence is cut) -> (float32 [s, b, 1], equal on all tensor-parallel ranks;
        None).

        Computed in float32 whatever the model's dtype is: a value of 100 in bfloat16 is known to within 0.25 only.
        """
        assert weight is None, "a score head is tied to nothing"
        scores = F.linear(input_.float(), self.weight.float())
        if self.sequence_parallel:
            # Every rank computes the whole loss from the gathered scores, so each takes its share of that one gradient.
            scores = gather_from_sequence_parallel_region(
                scores, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return scores, None


class ScoreModel(GPTModel):  # type: ignore[misc]
    """Megatron's own model; only its checkpoints are read more strictly."""

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Megatron lets an output weight of another shape pass, for vocabularies that are padded otherwise. Here that
        would take the first row of a language model's output weight for the head, without a word."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, *args, **kwargs)
        if self.post_process:
            state[f"{prefix}output_layer.weight"].allow_shape_mismatch = False
        return state


def smallest_output(gpt: Mapping[str, Any], pre_process: bool, post_process: bool, tp: int) -> dict[str, Any]:
    """GPTModel's arguments with an output weight that takes (next to) no memory until ``install`` replaces it.

    A model in one piece that shares its embedding allocates none; a last stage by itself needs the vocabulary for
    nothing else.
    """
    if pre_process and post_process:
        return {**gpt, "share_embeddings_and_output_weights": True}
    return {
        **gpt,
        "vocab_size": tp if post_process else gpt["vocab_size"],
        "share_embeddings_and_output_weights": False,
    }


def install(stage: torch.nn.Module) -> None:
    """Put a ``ScoreHead`` in the place of a GPTModel's output layer; nothing to do on a stage that has none."""
    assert type(stage) is GPTModel, f"not Megatron's model: {type(stage).__name__}"
    model: Any = stage
    if getattr(model, "output_layer", None) is None:
        return
    assert not getattr(model, "mtp_process", False), "multi-token prediction needs logits"
    model.__class__ = ScoreModel
    model.output_layer = ScoreHead(model.config, model.pg_collection.tp)
    if model.share_embeddings_and_output_weights:  # as ``smallest_output`` asked for
        model.share_embeddings_and_output_weights = False
        del model.embedding.word_embeddings.weight.zero_out_wgrad
