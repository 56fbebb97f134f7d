"""Causal attention over whole sequences by ``scaled_dot_product_attention``, with a window and with sinks.

Shape legend: n sequences of w tokens, h query heads, g key/value heads, d width of a head, d' of a value, W tokens of
the window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

SINK_COLUMNS = 8
"""Columns added to queries and keys for sinks: one is used, but GPU kernels want multiples of 8."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from every token to itself and earlier tokens. No mask is larger than [W, 2 * W + 1].

    Args:
        query, key, value: [n, h, w, d], [n, g, w, d], [n, g, w, d'] with d' up to d.
        scale: Scale of the scores; None means 1 / sqrt(d).
        window: Number of tokens that a token attends to, including itself; None means all.
        sinks: [h], one score per head that takes a share of the softmax and has no value (gpt-oss).

    Returns:
        [n, h, w, d'].
    """
    width, lead = value.shape[-1], 0
    if sinks is not None:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        query, key, value = _with_sink(query, key, value, sinks / scale)
        lead = 1
    if width < query.shape[-1]:  # else torch falls back to a kernel that materialises the scores
        value = F.pad(value, (0, query.shape[-1] - width))
    if window is None or query.shape[2] <= window:
        out = _causal(query, key, value, scale, lead)
    else:
        first = _causal(query[:, :, :window], key[:, :, : lead + window], value[:, :, : lead + window], scale, lead)
        out = torch.cat([first, _banded(query[:, :, window:], key, value, scale, lead, window)], dim=2)
    return out[..., :width]


def _with_sink(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prepend a key without a value; its product with a query is the ``score`` [h] of the head."""
    column = score.to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    query = F.pad(torch.cat([query, column], dim=-1), (0, SINK_COLUMNS - 1))
    key = F.pad(key, (0, SINK_COLUMNS, 1, 0))
    sink = torch.zeros_like(key[:, :, :1])
    sink[..., -SINK_COLUMNS] = 1.0
    return query, torch.cat([sink, key[:, :, 1:]], dim=2), F.pad(value, (0, 0, 1, 0))


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, lead: int
) -> torch.Tensor:
    """Attend to all earlier tokens; keys have ``lead`` places before the first token."""
    query = F.pad(query, (0, 0, lead, 0)) if lead else query
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out[:, :, lead:]


def _banded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, lead: int, window: int
) -> torch.Tensor:
    """Attend from the tokens from W on, in blocks of W that see themselves and the previous block.

    Args:
        query: [n, h, w - W, d].
        key, value: [n, g, lead + w, d], for all tokens.
    """
    n, rest = query.shape[0], query.shape[2]
    blocks = -(-rest // window)
    missing = blocks * window - rest
    query = F.pad(query, (0, 0, 0, missing)).unflatten(2, (blocks, window)).transpose(1, 2).flatten(0, 1)

    def pairs(x: torch.Tensor) -> torch.Tensor:
        """[n, g, lead + w, d] -> [n * blocks, g, lead + 2 * W, d]."""
        both = F.pad(x[:, :, lead:], (0, 0, 0, missing)).unfold(2, 2 * window, window)
        both = both.permute(0, 2, 1, 4, 3).flatten(0, 1)
        return torch.cat([x[:, :, :lead].repeat_interleave(blocks, 0), both], dim=2) if lead else both

    place = torch.arange(window, device=query.device)[:, None]
    before = torch.arange(2 * window, device=query.device)
    seen = F.pad((before > place) & (before <= place + window), (lead, 0), value=True)
    out = F.scaled_dot_product_attention(
        query, pairs(key), pairs(value), attn_mask=seen, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.unflatten(0, (n, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :rest]
