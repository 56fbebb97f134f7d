"""The vision tower of a GPTModel's first stage, and three-axis rotary positions on every stage.

The tower is transformers' module, whole on every rank of the stage. Each rank computes the vectors of a micro-batch's
images, and inserts those in its share of the tokens into the embeddings.

Shape legend: s tokens on this rank, b rows of the micro-batch, S tokens of the micro-batch on this context-parallel
rank, H hidden size, d width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

from megarl.weights.reshard.adapters import LORA, TOWER


@dataclass(frozen=True)
class Vectors:
    """The vectors of a micro-batch's images."""

    values: torch.Tensor
    """[n, H]"""
    source: torch.Tensor
    """int64 [b, S]: index of the vector at this position; -1 for a token."""


class ImageEmbedding(LanguageModelEmbedding):  # type: ignore[misc]
    """Megatron's embedding, which also inserts image vectors while ``vectors`` is set."""

    vectors: Vectors | None = None

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, tokentype_ids: Any = None) -> torch.Tensor:
        """[b, S] -> [s, b, H]; s is a share of S with sequence parallelism."""
        embedded: torch.Tensor = super().forward(input_ids, position_ids, tokentype_ids)
        if self.vectors is None:
            return embedded
        source = self.vectors.source.t()
        if self.config.sequence_parallel and self.scatter_to_sequence_parallel:
            source = source.chunk(self.tp_group.size())[self.tp_group.rank()]
        here = torch.nonzero(source >= 0, as_tuple=True)
        return embedded.index_put(here, self.vectors.values[source[here]])


class SectionedRotary(torch.nn.Module):
    """Angles of M-RoPE (arXiv:2409.12191): sections of a head rotate by a token's time, row and column.

    Megatron's class requires CUDA, and splits the sequence for context parallelism in a way that does not fit packed
    sequences. Here the positions already belong to this rank's tokens.
    """

    def __init__(self, width: int, base: float) -> None:
        super().__init__()
        self.inverse = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)

    def forward(self, position_ids: torch.Tensor, mrope_section: list[int], cp_group: Any = None) -> torch.Tensor:
        """int64 [3, b, S], or [b, S] for text only -> float32 [S, b, 1, d]."""
        position_ids = position_ids.expand(3, *position_ids.shape[-2:])
        angles = position_ids[..., None].float() * self.inverse.to(position_ids.device)  # [3, b, S, d / 2]
        parts = angles.split(mrope_section, dim=-1)
        half = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
        return torch.cat([half, half], dim=-1).transpose(0, 1).unsqueeze(2).contiguous()


def install(stage: torch.nn.Module, hf_config: Mapping[str, Any], base: float, *, trained: bool) -> None:
    """Prepare a bare GPTModel for images; do nothing for a text model.

    Args:
        base: Base of the rotary angles.
        trained: Train the tower with the language model.
    """
    gpt: Any = stage
    config = gpt.config
    if config.mrope_section is None:
        return
    gpt.rotary_pos_emb = SectionedRotary(config.kv_channels, base)
    gpt.mrope_section = config.mrope_section
    gpt.position_embedding_type = "mrope"
    if not gpt.pre_process:
        return
    assert type(gpt.embedding) is LanguageModelEmbedding, f"Megatron's embedding is a {type(gpt.embedding).__name__}"
    gpt.embedding.__class__ = ImageEmbedding
    gpt.visual = _tower(hf_config["vision_config"], config.params_dtype)
    keep_float32(gpt)
    for parameter in gpt.visual.parameters():
        parameter.requires_grad_(trained)
        # With sequence parallelism each rank has the gradient of its share, and Megatron sums them.
        parameter.sequence_parallel = config.sequence_parallel


def keep_float32(stage: torch.nn.Module) -> None:
    """Restore the float32 bits of the tower's rotary frequencies: Float16Module casts every buffer, engines use
    float32."""
    tower: Any = getattr(stage, "visual", None)
    if tower is not None:
        device = next(tower.parameters()).device
        for name, frequencies in tower.frequencies.items():
            setattr(tower.rotary_pos_emb, name, frequencies.to(device))


def _tower(vision_config: Mapping[str, Any], dtype: torch.dtype) -> torch.nn.Module:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    config = Qwen2_5_VLVisionConfig(**vision_config)
    config._attn_implementation = "sdpa"
    tower: Any = Qwen2_5_VisionTransformerPretrainedModel(config)
    tower.frequencies = {name: buffer.clone() for name, buffer in tower.rotary_pos_emb.named_buffers()}
    others = [name for name, _ in tower.named_buffers() if not name.startswith("rotary_pos_emb.")]
    assert not others, f"the tower has buffers that must not be cast either: {others}"
    return tower.to(dtype)  # type: ignore[no-any-return]


def has_sections(stage: torch.nn.Module) -> bool:
    """True if a bare GPTModel takes three-axis positions."""
    return getattr(stage, "position_embedding_type", None) == "mrope"


@contextmanager
def showing(stage: torch.nn.Module, source: torch.Tensor, pixels: torch.Tensor, grids: torch.Tensor) -> Iterator[None]:
    """Insert these images' vectors in a forward pass of ``stage`` (a bare first stage) within the context.

    Args:
        source: int64 [b, S], for this rank's tokens (``batching.images.Shown``).
        pixels: float32 [p, w]
        grids: int64 [n, 3]
    """
    gpt: Any = stage
    weight = next(gpt.visual.parameters())
    with torch.set_grad_enabled(torch.is_grad_enabled() and _is_trained(gpt)):
        values = gpt.visual(pixels.to(weight.device, weight.dtype), grid_thw=grids.to(weight.device)).pooler_output
    gpt.embedding.vectors = Vectors(values, source)
    try:
        yield
    finally:
        gpt.embedding.vectors = None


def _is_trained(gpt: Any) -> bool:
    """True if an update changes the tower: the whole tower, a module of it, or its adapters."""
    adapters = getattr(gpt, LORA, None)
    of_tower = [] if adapters is None else [p for n, p in adapters.named_parameters() if n.startswith(TOWER)]
    return any(parameter.requires_grad for parameter in (*gpt.visual.parameters(), *of_tower))
