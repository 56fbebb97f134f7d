"""Rotary position embedding of packed sequences, with tables that all layers of a micro-batch share.

Megatron-Core cuts the table in each layer, for queries and for keys, sequence by sequence, and takes its
sines again. Its lengths come from the device each time. Here that is done once for each forward pass.

Shape legend: t tokens of packed sequences on this rank, h heads of this rank, d width of a head, r width that rotates.
"""

from __future__ import annotations

from typing import Any

import torch

from megarl.learn.models.attention_layout import lengths_of


def by_token(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Mark the sequences of a micro-batch whose angles are given for each of this rank's tokens, not by position."""
    cu_seqlens._megarl_by_token = True  # type: ignore[attr-defined]
    return cu_seqlens


def install() -> None:
    """Put ``rotate_packed`` in the place of Megatron's function. Safe to call twice."""
    from megatron.core.models.common.embeddings import rope_utils

    rope_utils._apply_rotary_pos_emb_thd = rotate_packed


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
    """Rotate by each token's position in its own sequence (RoPE, arXiv:2104.09864); the bits are Megatron's.

    Args:
        t: [t, h, d].
        cu_seqlens: [n+1] int32, of whole sequences. The tables are kept on it for the layers to come.
        freqs: [longest sequence, 1, 1, r], float32; [t, 1, 1, r] where ``cu_seqlens`` is marked with ``by_token``.
        rotary_interleaved: Pairs are neighbours, not halves.
        multi_latent_attention: Pairs are neighbours in ``t`` and halves in the result.
        mscale: Factor of both tables (YaRN).
        cp_group: Context-parallel group; a rank has the two zigzag chunks of each sequence.
        mla_rotary_interleaved: Name of ``multi_latent_attention`` in 0.19.

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
    """[t, h, r] with each pair (a, b) as (-b, a)."""
    if interleaved:
        return torch.stack((-t[..., 1::2], t[..., ::2]), dim=-1).flatten(-2)
    a, b = t.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def _tables(
    cu_seqlens: torch.Tensor, freqs: torch.Tensor, mscale: float, dtype: torch.dtype, cp_group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of this rank's tokens, [t, 1, r] each; those of the last call where the same are asked for."""
    key = (freqs.data_ptr(), freqs.shape, mscale, dtype)
    kept = getattr(cu_seqlens, "_megarl_rotary", None)
    if kept is None or kept[0] != key:
        if not getattr(cu_seqlens, "_megarl_by_token", False):
            packed = freqs[_positions(cu_seqlens, cp_group.rank(), cp_group.size())].squeeze(1)
        else:
            packed = freqs.squeeze(1)
        tables = tuple((table * mscale).to(dtype) for table in (packed.cos(), packed.sin()))
        kept = cu_seqlens._megarl_rotary = key, tables, freqs  # type: ignore[attr-defined]  # freqs: its address stays
    cos, sin = kept[1]
    return cos, sin


def _positions(cu_seqlens: torch.Tensor, cp_rank: int, cp: int) -> torch.Tensor:
    """Position of each of this rank's tokens in its sequence, [t] int64, on the device of ``cu_seqlens``.

    Made by the first layer that asks: layers of latent attention have tables of their own.
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
