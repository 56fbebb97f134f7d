"""The scalar head of a critic or reward model: a GPTModel stage that returns one number per position.

Shape legend: s sequence length, b rows of the micro-batch, H hidden size.

Sources: transformers' ``modeling_layers.py`` (``GenericForSequenceClassification``: a linear layer without bias after
the last norm); Megatron-Core 0.16.1 ``models/gpt/gpt_model.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


class ScoreHead(torch.nn.Module):
    """A linear layer with one row, whole on every tensor-parallel rank, in place of GPTModel's output layer.

    Under sequence parallelism each rank scores its share of the sequence and the scores are gathered, which moves H
    times less data than gathering hidden states. Each rank then has the weight gradient of its share, and the mark
    ``sequence_parallel`` makes Megatron sum the shares (``finalize_model_grads``). Without sequence parallelism every
    rank has the whole gradient.

    Saved under ``output_layer.weight``, like any tensor that is equal on all ranks of a stage.
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
        """[s, b, H] (a share of s with sequence parallelism) -> (float32 [s, b, 1], equal on all tensor-parallel ranks;
        None).

        Computed in float32 for every model dtype: bfloat16 resolves a value of 100 only to within 0.25.
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
    """Megatron's GPTModel with a stricter check of checkpoints."""

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Require the output weight's exact shape. Megatron accepts another shape, for vocabularies with other padding,
        and would silently load the first row of a language model's output weight as the head."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, *args, **kwargs)
        if self.post_process:
            state[f"{prefix}output_layer.weight"].allow_shape_mismatch = False
        return state


def smallest_output(gpt: Mapping[str, Any], pre_process: bool, post_process: bool, tp: int) -> dict[str, Any]:
    """Return GPTModel's arguments for an output weight with (almost) no memory, which ``install`` replaces.

    A model with one stage shares its embedding and allocates none; a separate last stage needs no vocabulary otherwise.
    """
    if pre_process and post_process:
        return {**gpt, "share_embeddings_and_output_weights": True}
    return {
        **gpt,
        "vocab_size": tp if post_process else gpt["vocab_size"],
        "share_embeddings_and_output_weights": False,
    }


def install(stage: torch.nn.Module) -> None:
    """Replace a GPTModel's output layer by a ``ScoreHead``; do nothing on a stage without one."""
    assert type(stage) is GPTModel, f"not Megatron's model: {type(stage).__name__}"
    model: Any = stage
    if getattr(model, "output_layer", None) is None:
        return
    assert not getattr(model, "mtp_process", False), "multi-token prediction needs logits"
    model.__class__ = ScoreModel
    model.output_layer = ScoreHead(model.config, model.pg_collection.tp)
    if model.share_embeddings_and_output_weights:  # set by ``smallest_output``
        model.share_embeddings_and_output_weights = False
        del model.embedding.word_embeddings.weight.zero_out_wgrad
