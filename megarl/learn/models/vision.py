"""The vision tower of a GPTModel's first stage, and three-axis rotary positions on every stage.

The tower is transformers' module, whole on every rank of the stage. Each rank computes the vectors of a micro-batch's
images, and inserts those in its share of the tokens into the embeddings. With DeepStack (arXiv:2406.04334) the first
layers add further vectors, those of the tower's middle blocks, to their outputs at the same places.

Shape legend: s tokens on this rank, b rows of the micro-batch, S tokens of the micro-batch on this context-parallel
rank, H hidden size, d rotated width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

from megarl.weights.architectures import architecture
from megarl.weights.reshard.adapters import LORA, TOWER


@dataclass(frozen=True)
class Vectors:
    """The vectors of a micro-batch's images in this rank's share of the tokens."""

    values: torch.Tensor
    """[n, H]"""
    places: tuple[torch.Tensor, ...]
    """Token and row of the m positions with a vector, int64 [m] each."""
    source: torch.Tensor
    """int64 [m]: index of the vector at each of these."""
    levels: tuple[torch.Tensor, ...] = ()
    """[n, H] each: vectors that the first layers add to their outputs."""
    leaves: tuple[torch.Tensor, ...] = ()
    """``levels`` apart from the tower's graph. Recomputed layers leave their gradients here."""


class ImageEmbedding(LanguageModelEmbedding):  # type: ignore[misc]
    """Megatron's embedding, which also inserts image vectors while ``vectors`` is set."""

    vectors: Vectors | None = None

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, tokentype_ids: Any = None) -> torch.Tensor:
        """[b, S] -> [s, b, H]; s is a share of S with sequence parallelism."""
        embedded: torch.Tensor = super().forward(input_ids, position_ids, tokentype_ids)
        if self.vectors is None:
            return embedded
        embedded = embedded.index_put(self.vectors.places, self.vectors.values[self.vectors.source])
        if not any(level.requires_grad for level in self.vectors.levels):
            return embedded
        joined: torch.Tensor = _JoinedGradients.apply(embedded, self.vectors.leaves, *self.vectors.levels)
        return joined


class _JoinedGradients(torch.autograd.Function):
    """Passes embeddings on. Its backward pass, which follows those of all layers, gives the tower the gradients in
    ``leaves``: a layer that is recomputed would go through the tower's graph by itself, and free it."""

    @staticmethod
    def forward(ctx: Any, embedded: torch.Tensor, leaves: tuple[torch.Tensor, ...], *levels: Any) -> torch.Tensor:
        ctx.leaves = leaves
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None, *(leaf.grad for leaf in ctx.leaves)


class _AddLevel:
    """Forward hook of a layer: adds the vectors of its level to its output."""

    def __init__(self, embedding: ImageEmbedding, level: int) -> None:
        self.embedding, self.level = embedding, level

    def __call__(self, layer: Any, given: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
        hidden, context = output
        packed = kwargs["packed_seq_params"]
        # A recomputed layer runs after its micro-batch's context has ended; the packing is still that micro-batch's.
        vectors = self.embedding.vectors if packed is None else getattr(packed, PACKED, None)
        if vectors is None:
            return output
        more = vectors.leaves[self.level][vectors.source]
        return hidden.index_put(vectors.places, more, accumulate=True), context


PACKED = "megarl_vectors"
"""Attribute of Megatron's PackedSeqParams with a micro-batch's vectors."""


class SectionedRotary(torch.nn.Module):
    """Angles of M-RoPE (arXiv:2409.12191): sections of a head rotate by a token's time, row and column.

    Megatron's class requires CUDA, and splits the sequence for context parallelism in a way that does not fit packed
    sequences. Here the positions already belong to this rank's tokens.
    """

    def __init__(self, width: int, base: float, *, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.inverse = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)

    def forward(self, position_ids: torch.Tensor, mrope_section: list[int], cp_group: Any = None) -> torch.Tensor:
        """int64 [3, b, S], or [b, S] for text only -> float32 [S, b, 1, d]."""
        position_ids = position_ids.expand(3, *position_ids.shape[-2:])
        angles = position_ids[..., None].float() * self.inverse.to(position_ids.device)  # [3, b, S, d / 2]
        if self.interleaved:  # rows have frequencies 1, 4, 7, ..., columns 2, 5, 8, ...
            half = angles[0].clone()
            for axis in (1, 2):
                turns = slice(axis, 3 * mrope_section[axis], 3)
                half[..., turns] = angles[axis][..., turns]
        else:
            parts = angles.split(mrope_section, dim=-1)
            half = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
        return torch.cat([half, half], dim=-1).transpose(0, 1).unsqueeze(2).contiguous()


def install(stage: torch.nn.Module, hf_config: Mapping[str, Any], base: float, share: float, *, trained: bool) -> None:
    """Prepare a bare GPTModel for images; do nothing for a text model.

    Args:
        base: Base of the rotary angles.
        share: Rotated share of a head.
        trained: Train the tower with the language model.
    """
    gpt: Any = stage
    config = gpt.config
    if config.mrope_section is None:
        return
    arch = architecture(hf_config)
    width = int(config.kv_channels * share)
    gpt.rotary_pos_emb = SectionedRotary(width, base, interleaved=arch.layers.mrope_interleaved)
    gpt.mrope_section = config.mrope_section
    gpt.position_embedding_type = "mrope"
    if not gpt.pre_process:
        return
    assert type(gpt.embedding) is LanguageModelEmbedding, f"Megatron's embedding is a {type(gpt.embedding).__name__}"
    gpt.embedding.__class__ = ImageEmbedding
    for level in range(arch.sizes(hf_config).deepstack):
        layer = gpt.decoder.layers[level]
        assert layer.layer_number == level + 1, f"layer {layer.layer_number} of the model stands in place {level}"
        layer.register_forward_hook(_AddLevel(gpt.embedding, level), with_kwargs=True)
    gpt.visual = _tower(arch.name, hf_config["vision_config"], config.params_dtype)
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


def _tower(family: str, vision_config: Mapping[str, Any], dtype: torch.dtype) -> torch.nn.Module:
    from transformers import CONFIG_MAPPING, AutoModel

    config = CONFIG_MAPPING[family].sub_configs["vision_config"](**vision_config)
    tower: Any = AutoModel.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    tower.frequencies = {name: buffer.clone() for name, buffer in tower.rotary_pos_emb.named_buffers()}
    others = [name for name, _ in tower.named_buffers() if not name.startswith("rotary_pos_emb.")]
    assert not others, f"the tower has buffers that must not be cast either: {others}"
    return tower.to(dtype)  # type: ignore[no-any-return]


def has_sections(stage: torch.nn.Module) -> bool:
    """True if a bare GPTModel takes three-axis positions."""
    return getattr(stage, "position_embedding_type", None) == "mrope"


@contextmanager
def showing(
    stage: torch.nn.Module, source: torch.Tensor, pixels: torch.Tensor, grids: torch.Tensor, packed: Any = None
) -> Iterator[None]:
    """Insert these images' vectors in a forward pass of ``stage`` (a bare first stage) within the context.

    Args:
        source: int64 [b, S], for this rank's tokens (``batching.images.Shown``).
        pixels: float32 [p, w]
        grids: int64 [n, 3]
        packed: Megatron's PackedSeqParams of the pass, for layers that are recomputed later; None for padded rows.
    """
    gpt: Any = stage
    weight = next(gpt.visual.parameters())
    with torch.set_grad_enabled(torch.is_grad_enabled() and _is_trained(gpt)):
        found = gpt.visual(pixels.to(weight.device, weight.dtype), grid_thw=grids.to(weight.device))
    mine = source.t()
    if gpt.config.sequence_parallel:
        group = gpt.embedding.tp_group
        mine = mine.chunk(group.size())[group.rank()]
    places = torch.nonzero(mine >= 0, as_tuple=True)
    levels = tuple(getattr(found, "deepstack_features", None) or ())
    leaves = tuple(level.detach().requires_grad_(level.requires_grad) for level in levels)
    vectors = Vectors(found.pooler_output, places, mine[places], levels, leaves)
    gpt.embedding.vectors = vectors
    if packed is not None:
        setattr(packed, PACKED, vectors)
    try:
        yield
    finally:
        gpt.embedding.vectors = None


def _is_trained(gpt: Any) -> bool:
    """True if an update changes the tower: the whole tower, a module of it, or its adapters."""
    adapters = getattr(gpt, LORA, None)
    of_tower = [] if adapters is None else [p for n, p in adapters.named_parameters() if n.startswith(TOWER)]
    return any(parameter.requires_grad for parameter in (*gpt.visual.parameters(), *of_tower))
