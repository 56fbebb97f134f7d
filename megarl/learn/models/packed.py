"""Attention over packed sequences: index arithmetic of their buckets, and rotary position embedding.

Plain integer tensors, computed once per micro-batch on the CPU; this module does not import Megatron.

Megatron-Core has one rotary embedding for all layers. For packed sequences each layer slices the table per sequence,
for queries and for keys, and computes sines again; the lengths are read from the device each time. Here this happens
once per forward pass.

Shape legend: t tokens of packed sequences on this rank, h heads of this rank, d width of a head, r width that rotates.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.learn.batching.micro import share_rows
from megarl.weights.architectures.rope import Rope

PADDING_BOUND = 1.5
"""Maximum bucket places per token: padded queries, keys and values are at most 1.5 times as large as packed ones."""


LONG = 8192
"""Minimum tokens of a sequence that a GPU attends to separately: with 16,384 tokens that took 0.6 to 1.0 of the time of
torch's kernel for packed sequences on an H200 (docs/benchmarks/gpu.md)."""


@dataclass(frozen=True)
class Buckets:
    """Places for the T tokens of packed sequences, in consecutive blocks of [sequences, width]."""

    shapes: tuple[tuple[int, int], ...]
    """(sequences, width) of each bucket, narrowest first."""
    source: torch.Tensor
    """int64 [P], P = sum of sequences * width: the token at each place; padding repeats the sequence's last token."""
    place: torch.Tensor
    """int64 [T]: the place of each token. ``source[place] == arange(T)``."""

    @property
    def are_long_and_full(self) -> bool:
        """True if every sequence has ``LONG`` tokens or more and none is padded."""
        return len(self.source) == len(self.place) and min((width for _, width in self.shapes), default=0) >= LONG


def buckets(lengths: torch.Tensor) -> Buckets:
    """Deal sequences (int64 [n] lengths, in packing order) to buckets; a bucket's width is its longest sequence.

    Each bucket takes lengths in (2^k, 3 * 2^(k-1)] or in (3 * 2^(k-1), 2^(k+1)]. So no sequence is padded to 1.5 times
    its length, and n sequences of lengths up to L make at most 2 * log2(L) + 1 buckets. Empty sequences have no place.
    """
    lengths = lengths.to("cpu", torch.int64)
    starts = lengths.cumsum(0) - lengths
    upper = 2 ** torch.ceil(torch.log2(lengths.clamp_min(1).double())).long()  # exact: doubles hold powers of two
    classes = torch.where(4 * lengths <= 3 * upper, 3 * upper, 4 * upper)
    shapes, sources, place, base = [], [], torch.empty(int(lengths.sum()), dtype=torch.int64), 0
    for size in classes[lengths > 0].unique().tolist():
        (chosen,) = torch.where((classes == size) & (lengths > 0))
        width = int(lengths[chosen].max())
        column, ends = torch.arange(width), lengths[chosen, None]
        tokens = starts[chosen, None] + torch.minimum(column, ends - 1)
        real = (column < ends).flatten()
        sources.append(tokens.flatten())
        place[sources[-1][real]] = base + torch.arange(len(chosen) * width)[real]
        shapes.append((len(chosen), width))
        base += len(chosen) * width
    return Buckets(tuple(shapes), torch.cat(sources) if sources else place, place)


@dataclass(frozen=True)
class PackedLayout:
    """``Buckets`` that read and write tokens in the concatenated shares of all context-parallel ranks."""

    buckets: Buckets
    order: torch.Tensor | None
    """int64 [T]: the row of each token among the shares (``share_rows``); None with one share."""


def on_device(cu_seqlens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy ``cu_seqlens`` (int32 [n+1], on the host) to a device; ``lengths_of`` need not wait for the copy."""
    copy = cu_seqlens.to(device)
    copy._megarl_lengths = cu_seqlens.long().diff()  # type: ignore[attr-defined]
    return copy


def lengths_of(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return int64 [n] lengths on the host. Waits for the device unless ``on_device`` made ``cu_seqlens``."""
    known: torch.Tensor | None = getattr(cu_seqlens, "_megarl_lengths", None)
    return cu_seqlens.to("cpu", torch.int64).diff() if known is None else known


def packed_layout(cu_seqlens: torch.Tensor, cp: int) -> PackedLayout:
    """Compute the layout of one packed chunk, on the device of ``cu_seqlens`` (int32 [n+1], of the whole sequences)."""
    lengths = lengths_of(cu_seqlens)
    found = buckets(lengths)
    device = cu_seqlens.device
    if cp == 1:
        return PackedLayout(Buckets(found.shapes, found.source.to(device), found.place.to(device)), None)
    rows = share_rows(lengths, cp)
    place = torch.empty_like(found.place)
    place[rows] = found.place
    return PackedLayout(Buckets(found.shapes, rows[found.source].to(device), place.to(device)), rows.to(device))


def by_token(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Mark a micro-batch's sequences as having angles per token of this rank, instead of per position."""
    cu_seqlens._megarl_by_token = True  # type: ignore[attr-defined]
    return cu_seqlens


def install(stage: Any, ropes: Sequence[Rope | None]) -> None:
    """Give each layer of a GPTModel its rotary embedding, and all layers ``rotate_packed``. Safe to call again.

    Args:
        ropes: One for each layer of the whole model; () keeps Megatron's embedding.
    """
    from megatron.core.models.common.embeddings import rope_utils

    rope_utils._apply_rotary_pos_emb_thd = rotate_packed
    main = next((rope for rope in ropes if rope is not None), None)
    if main is None:
        return
    embeddings = {main: stage.rotary_pos_emb}
    embeddings |= {rope: copy.copy(stage.rotary_pos_emb) for rope in ropes if rope not in (None, main)}
    for rope, embedding in embeddings.items():
        width = rope.width or 2 * len(embedding.inv_freq)
        embedding.inv_freq = frequencies(rope, width).to(embedding.inv_freq.device)
    for layer in stage.decoder.layers:
        if (rope := ropes[layer.layer_number - 1]) is None:
            continue
        if rope != main:
            layer.self_attention.register_forward_pre_hook(_Replaced(embeddings[rope]), with_kwargs=True)
        if rope.attention_factor != 1.0:  # scales queries and keys, so their product by its square
            core = layer.self_attention.core_attention
            scale = layer.config.kv_channels**-0.5 if core.softmax_scale is None else core.softmax_scale
            core.softmax_scale = scale * rope.attention_factor**2
        if rope.query_beta:
            layer.self_attention.core_attention.query_growth = rope.query_beta, rope.original


class _Replaced:
    """Hook that gives a layer its own angles instead of the model's."""

    def __init__(self, embedding: Any) -> None:
        self.embedding = embedding

    def __call__(self, attention: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        is_packed = named.get("packed_seq_params") is not None
        length = len(named["rotary_pos_emb"]) * (1 if is_packed else self.embedding.cp_group.size())
        return arguments, named | {"rotary_pos_emb": self.embedding(length, packed_seq=is_packed)}


def frequencies(rope: Rope, width: int) -> torch.Tensor:
    """Return float32 [width / 2]: radians per token, with the same bits as transformers.

    A frequency of 0 (proportional) leaves its two dimensions as they are.

    Sources: linear by kaiokendev, YaRN 2309.00071; llama3 from Llama 3.1.
    """
    powers = rope.base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    plain = 1.0 / powers
    if rope.kind in ("default", "linear"):
        return plain / rope.factor
    if rope.kind == "proportional":
        turning = torch.arange(len(plain)) < int(rope.share * width // 2)
        return torch.where(turning, plain, 0.0)
    if rope.kind == "yarn":
        bounds = [
            width * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.base))
            for turns in (rope.fast, rope.slow)
        ]
        low, high = (math.floor(bounds[0]), math.ceil(bounds[1])) if rope.truncate else bounds
        low, high = max(low, 0), min(high, width - 1)
        ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
        kept = 1 - ramp.clamp(0, 1)
        return 1.0 / (rope.factor * powers) * (1 - kept) + plain * kept
    length = 2 * math.pi / plain
    found = torch.where(length > rope.original / rope.slow, plain / rope.factor, plain)
    share = (rope.original / length - rope.slow) / (rope.fast - rope.slow)
    between = ~(length < rope.original / rope.fast) * ~(length > rope.original / rope.slow)
    return torch.where(between, (1 - share) * found / rope.factor + share * found, found)


def rotate_packed(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
    mla_rotary_interleaved: bool = False,
) -> torch.Tensor:
    """Rotate by each token's position in its sequence (RoPE, arXiv:2104.09864), with Megatron's bits.

    Args:
        t: [t, h, d].
        cu_seqlens: [n+1] int32, of whole sequences. Tables are cached on it for later layers.
        freqs: [longest sequence, 1, 1, r], float32; [t, 1, 1, r] if ``by_token`` marked ``cu_seqlens``.
        rotary_interleaved: Pairs are neighbours, not halves.
        multi_latent_attention: Pairs are neighbours in ``t`` and halves in the result.
        mscale: Factor of both tables (YaRN).
        cp_group: Context-parallel group; a rank has the two zigzag chunks of each sequence.
        mla_rotary_interleaved: Name of ``multi_latent_attention`` in Megatron-Core 0.19.

    Returns:
        [t, h, d].
    """
    cos, sin = _tables(cu_seqlens, freqs, mscale, t.dtype, cp_group)
    width = freqs.shape[-1]
    t, rest = t[..., :width], t[..., width:]
    if multi_latent_attention or mla_rotary_interleaved:
        t = torch.cat((t[..., 0::2], t[..., 1::2]), dim=-1)
    t = t * cos + _rotated_half(t, rotary_interleaved) * sin
    return torch.cat((t, rest), dim=-1) if rest.shape[-1] else t


def _rotated_half(t: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """[t, h, r] with each pair (a, b) replaced by (-b, a)."""
    if interleaved:
        return torch.stack((-t[..., 1::2], t[..., ::2]), dim=-1).flatten(-2)
    a, b = t.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def _tables(
    cu_seqlens: torch.Tensor, freqs: torch.Tensor, mscale: float, dtype: torch.dtype, cp_group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of this rank's tokens, [t, 1, r] each, computed once per table of angles."""
    key = (freqs.data_ptr(), freqs.shape, mscale, dtype)
    kept: dict[Any, Any] | None = getattr(cu_seqlens, "_megarl_rotary", None)
    if kept is None:
        kept = cu_seqlens._megarl_rotary = {}  # type: ignore[attr-defined]
    if key not in kept:
        if not getattr(cu_seqlens, "_megarl_by_token", False):
            packed = freqs[positions_of(cu_seqlens, cp_group.rank(), cp_group.size())].squeeze(1)
        else:
            packed = freqs.squeeze(1)
        tables = tuple((table * mscale).to(dtype) for table in (packed.cos(), packed.sin()))
        kept[key] = tables, freqs  # holding freqs keeps its address unique
    cos, sin = kept[key][0]
    return cos, sin


def positions_of(cu_seqlens: torch.Tensor, cp_rank: int, cp: int) -> torch.Tensor:
    """Return the position of each of this rank's tokens in its sequence, [t] int64, on the device of ``cu_seqlens``.

    The first layer computes it, for the separate tables of latent attention too.
    """
    kept: torch.Tensor | None = getattr(cu_seqlens, "_megarl_positions", None)
    if kept is not None:
        return kept
    shares = lengths_of(cu_seqlens) // cp
    ends = shares.cumsum(0)
    place = torch.arange(int(ends[-1])) - (ends - shares).repeat_interleave(shares)
    if cp > 1:
        chunk = (shares // 2).repeat_interleave(shares)
        first = cp_rank * chunk
        last = (2 * cp - 1 - cp_rank) * chunk
        place = torch.where(place < chunk, first + place, last + place - chunk)
    cu_seqlens._megarl_positions = kept = place.to(cu_seqlens.device)  # type: ignore[attr-defined]
    return kept
