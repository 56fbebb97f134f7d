"""Core attention for Megatron's local spec, computed by ``scaled_dot_product_attention``.

Shape legend: n sequences of w tokens, h query heads, g key/value heads, d width of a head, d' of a value, W tokens of
the window.

Megatron's ``DotProductAttention`` materialises the scores, and supports neither packed sequences nor context
parallelism. This class is causal self-attention without dropout, with Megatron's windows and learned sinks.

Shape legend: s rows of this rank (a share of the sequence under context parallelism), b sequences, t tokens of packed
sequences on this rank, h query heads and g key/value heads of this rank, d width of a head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from megarl.learn.models.packed import PackedLayout, packed_layout, positions_of
from megarl.weights.architectures.table import ModelSizes, source_of

VARLEN_WIDTH = 256
"""Widest head of torch's kernel for packed sequences."""
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


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """Megatron's ``core_attention``; see ``forward``.

    Under context parallelism the ranks exchange shares of the sequence for shares of the heads (Megatron's ``a2a``;
    DeepSpeed-Ulysses, 2309.14509), compute whole sequences of h / cp heads with the same code, and exchange back.
    Unlike gathering keys and values, this takes no more memory than the shares. ``cp`` must divide h (``parallel.grid``
    checks it).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        norm: Callable[..., torch.nn.Module] | None = None,
        **latent: int,
    ) -> None:
        """``norm`` makes norms of rotated queries and keys. ``latent``: MLA's k_channels and v_channels, unused because
        the tensors' shapes give them."""
        super().__init__(config=config)
        assert attention_type == "self" and attn_mask_type == AttnMaskType.causal, "only causal self-attention"
        assert not (config.attention_dropout if attention_dropout is None else attention_dropout), "no dropout"
        assert not config.apply_query_key_layer_scaling and config.softmax_type in ("vanilla", "learnable")
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.softmax_scale = softmax_scale
        """Scale of the scores; None means 1 / sqrt(d)."""
        self.q_layernorm, self.k_layernorm = (
            None if norm is None else norm(config, config.kv_channels, eps=config.layernorm_epsilon) for _ in range(2)
        )
        self.query_growth: tuple[float, int] | None = None
        """(beta, tokens) for queries that grow with their position; see ``_grown``."""
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: int | None = config.window_size[0] + 1 if has_window else None
        """Number of tokens that a token attends to, including itself."""
        self.softmax_offset: torch.nn.Parameter | None = None
        """[h], the sinks, under Megatron's parameter name."""
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.tp_group.size()
            device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        /,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend from every token to itself and earlier tokens of its sequence, or of its window.

        Args:
            query, key, value: [s, b, h or g, d], or packed [t, h or g, d]; ``value`` may be narrower than the others.
            attention_mask: None.
            packed_seq_params: Megatron's PackedSeqParams with ``qkv_format="thd"`` and the ``cu_seqlens_q`` of the
                whole sequences (multiples of 2 * cp). Index tensors are cached on it for later layers.

        Returns:
            [s, b, h * d] or [t, h * d], where d is the values' width.
        """
        assert attention_mask is None and attention_bias is None, "causal attention takes no mask"
        cp = self.cp_group.size()
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if self.query_growth is not None:
            query = self._grown(query, packed_seq_params, *self.query_growth)
        if cp > 1:
            query, key, value = _to_heads(query, key, value, self.cp_group)
        if packed_seq_params is None:
            out = self._dense(query, key, value, cp)
        else:
            out = self._packed(query, key, value, packed_seq_params)
        if cp > 1:
            out = _to_rows(out, self.cp_group)
        return out.flatten(-2)

    def _grown(self, query: torch.Tensor, params: Any, beta: float, original: int) -> torch.Tensor:
        """Return the queries times 1 + ``beta`` * ln(1 + position // ``original``)."""
        cp = self.cp_group
        if params is None:
            cu_seqlens, longest = torch.tensor([0, len(query) * cp.size()]), len(query) * cp.size()
        else:
            cu_seqlens, longest = params.cu_seqlens_q, params.max_seqlen_q
        if longest <= original:
            return query
        position = positions_of(cu_seqlens, cp.rank(), cp.size()).to(query.device)
        factor = 1 + beta * torch.log1p((position // original).float())
        return query * factor.to(query.dtype).view(-1, *[1] * (query.dim() - 1))

    def _dense(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cp: int) -> torch.Tensor:
        """Attend densely: [s, b, *, d], or the shares of all ranks [cp, s, b, *, d], to the same shape."""
        if cp > 1:
            query, key, value = (_unshare(x) for x in (query, key, value))
        # [s, b, h, d] -> [b, h, s, d]
        out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value))).permute(2, 0, 1, 3)
        return out if cp == 1 else _share(out, cp)

    def _packed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: Any) -> torch.Tensor:
        """Attend to packed sequences: [t, *, d], or the shares of all ranks [cp, t, *, d], to the same shape."""
        cp = self.cp_group.size()
        assert params.qkv_format == "thd", f"packed sequences as {params.qkv_format!r} are not thd"
        layout = layout_of(params, cp)
        shares = query.shape[:-2]
        if cp > 1:
            query, key, value = (x.flatten(0, 1) for x in (query, key, value))
        assert len(query) == len(layout.buckets.place), (
            f"cu_seqlens ends at {len(layout.buckets.place)}, but there are {len(query)} tokens"
        )
        half, same_width = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1] == value.shape[-1]
        is_slower = layout.buckets.are_long_and_full and self.window is None
        fits = half and same_width and query.shape[-1] <= VARLEN_WIDTH and self.softmax_offset is None
        if query.is_cuda and fits and not is_slower:
            out = self._varlen(query, key, value, params, layout)
        else:
            out = self.bucketed(query, key, value, layout)
        return out.view(*shares, *out.shape[1:])

    def bucketed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout
    ) -> torch.Tensor:
        """Make one causal call per bucket; temporary memory is at most ``PADDING_BOUND`` times the arguments'."""
        found = layout.buckets
        sizes = [rows * width for rows, width in found.shapes]
        pieces = [_Spread.apply(x, found.source, found.place).split(sizes) for x in (query, key, value)]
        outs = []
        for shape, *qkv in zip(found.shapes, *pieces, strict=True):
            # [n * w, h, d] -> [n, h, w, d]
            out = self._attend(*(x.unflatten(0, shape).transpose(1, 2) for x in qkv))
            outs.append(out.transpose(1, 2).flatten(0, 1))
        result: torch.Tensor = _Collect.apply(torch.cat(outs), found.place)
        return result

    def _varlen(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: Any, layout: PackedLayout
    ) -> torch.Tensor:
        """Call torch's kernel for packed sequences, which needs CUDA and half precision."""
        from torch.nn.attention.varlen import varlen_attn

        cu, longest = params.cu_seqlens_q, params.max_seqlen_q
        more: Any = {"enable_gqa": True} if query.shape[1] != key.shape[1] and _is_told_of_groups() else {}
        if layout.order is not None:
            query, key, value = (x.index_select(0, layout.order) for x in (query, key, value))
        out = varlen_attn(
            query, key, value, cu, cu, longest, longest,
            scale=self.softmax_scale, window_size=(-1 if self.window is None else self.window - 1, 0), **more,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out if layout.order is None else torch.zeros_like(out).index_copy(0, layout.order, out)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[n, h, w, d], [n, g, w, d], [n, g, w, d'] -> [n, h, w, d']."""
        sinks, cp = self.softmax_offset, self.cp_group.size()
        if sinks is not None and cp > 1:  # select the heads that ``_to_heads`` gave this rank
            sinks = sinks.chunk(cp)[self.cp_group.rank()]
        return attend(query, key, value, scale=self.softmax_scale, window=self.window, sinks=sinks)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the sinks for Megatron's checkpoints, sharded with the heads."""
        state = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return dict(state)


class GatedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's attention with output gates (``attention_output_gate``), also on more ranks than key/value heads.

    There each rank computes a whole query group and takes its own heads; Megatron forgets to take their gates.
    """

    def get_query_key_value_tensors(self, *arguments: Any, **named: Any) -> Any:
        """Return query, key, value and gate of this rank's heads: [s, b, h, d], twice [s, b, g, d], [s, b, h, d]."""
        query, key, value, gate = super().get_query_key_value_tensors(*arguments, **named)
        if gate.shape[2] != query.shape[2]:
            ranks = gate.shape[2] // query.shape[2]
            gate = gate.unflatten(2, (ranks, -1))[:, :, self.pg_collection.tp.rank() % ranks]
        return query, key, value, gate

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return [s, b, h * d] times the sigmoid of its gate; Megatron compiles this, for minutes on CPUs."""
        return (x * torch.sigmoid(gate.reshape(x.shape).float())).to(x.dtype)


class HandedKeys:
    """Keys before rope, and values, that one layer hands to later ones in the same forward pass.

    Args:
        readers: Number of layers that take them.
    """

    def __init__(self, readers: int) -> None:
        self._readers, self._left = readers, 0
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def put(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep keys and values, [s, b, g, d] each, until the last reader has taken them."""
        self._kept, self._left = (key, value), self._readers

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of this forward pass."""
        assert self._kept is not None, "layers take keys in the order of a forward pass, none of them computed again"
        kept, self._left = self._kept, self._left - 1
        if not self._left:
            self._kept = None
        return kept


class NormedValueAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's attention with each value head normed, without a weight; with heads of its own if they are given.

    Args:
        head: Width of a head.
        groups: Key heads of the model's layer.
        values: Their source: a projection of their own; the keys before norm and rope; or, with the keys, an earlier
            layer, whose rope the layer has too (``share_keys``).
    """

    handed: HandedKeys | None = None
    """Where later layers take this layer's keys and values, or this layer takes an earlier one's."""

    def __init__(
        self,
        config: Any,
        *arguments: Any,
        head: int | None = None,
        groups: int | None = None,
        values: Literal["projected", "keys", "taken"] = "projected",
        **named: Any,
    ) -> None:
        if head is not None:
            config = copy.copy(config)
            config.kv_channels, config.num_query_groups = head, groups
        super().__init__(config, *arguments, **named)
        self._values = values
        if values == "keys":
            self.linear_qkv = self._column(self.query_projection_size + self.kv_projection_size)
        elif values == "taken":
            del self.linear_qkv
            self.k_layernorm: Any = None
            self.linear_q = self._column(self.query_projection_size)

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        """Return query, key and value of this rank's heads: [s, b, h, d], twice [s, b, g, d]."""
        if self._values == "taken":
            assert self.handed is not None, "share_keys names the layer whose keys this one takes"
            query, _ = self.linear_q(hidden_states)
            return self.q_layernorm(query.unflatten(-1, (-1, self.config.kv_channels))), *self.handed.take()
        if self._values == "keys":
            query, key, value = self._without_values(hidden_states)
        else:
            query, key, value = super().get_query_key_value_tensors(hidden_states, *arguments, **named)
        value = F.rms_norm(value.float(), value.shape[-1:], None, self.config.layernorm_epsilon).to(value.dtype)
        if self.handed is not None:
            self.handed.put(key, value)
        return query, key, value

    def _without_values(self, hidden_states: torch.Tensor) -> Any:
        """Return query, key and value, which is the key before its norm.

        With fewer key heads than ranks, each computes its whole group and takes its query heads, as in Megatron.
        """
        mixed, _ = self.linear_qkv(hidden_states)
        groups, width, tp = self.config.num_query_groups, self.config.kv_channels, self.pg_collection.tp
        each = max(tp.size() // groups, 1)  # ranks that share a group
        if each > 1:
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed).chunk(groups, -1)[tp.rank() // each]
        rows = self.config.num_attention_heads // groups + 1
        mixed = mixed.unflatten(-1, (-1, rows, width))
        query, key = mixed[:, :, :, :-1].flatten(2, 3), mixed[:, :, :, -1]
        if each > 1:
            query = query.chunk(each, 2)[tp.rank() % each]
        return self.q_layernorm(query), self.k_layernorm(key), key

    def _column(self, outputs: int) -> ColumnParallelLinear:
        config = self.config
        return ColumnParallelLinear(
            config.hidden_size, outputs, config=config, init_method=config.init_method, gather_output=False, bias=False,
            skip_bias_add=False, is_expert=False, tp_comm_buffer_name="qkv", tp_group=self.pg_collection.tp,
        )  # fmt: skip


def share_keys(stage: Any, sizes: ModelSizes) -> None:
    """Hand keys and values of layers of a GPTModel to the later layers that have none, as ``source_of`` says.

    The stage has all layers of the model (``reshard.grid.check_grid``), which run in order.
    """
    takers = [(layer, source_of(sizes, layer)) for layer in sizes.shared_layers]
    for source in {source for _, source in takers}:
        readers = [layer for layer, own in takers if own == source]
        handed = HandedKeys(len(readers))
        for layer in (source, *readers):
            stage.decoder.layers[layer].self_attention.handed = handed


@cache
def _is_told_of_groups() -> bool:
    """True if torch's kernel for packed sequences has an argument for grouped heads; 2.11 has none and needs none."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


def layout_of(params: Any, cp: int) -> PackedLayout:
    """Return the layout of a micro-batch, which the first layer computes and caches on its PackedSeqParams."""
    layout: PackedLayout | None = getattr(params, "_megarl_layout", None)
    if layout is None:
        layout = params._megarl_layout = packed_layout(params.cu_seqlens_q, cp)
    return layout


class _Spread(torch.autograd.Function):
    """Copy rows to their places in the buckets. Places after a sequence's end are never read, so they have no
    gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, source: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place), None, None


class _Collect(torch.autograd.Function):
    """Copy places back to rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.shape = x.shape
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (place,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy_(0, place, grad), None


class _Exchange(torch.autograd.Function):
    """Exchange blocks [cp, ...]: send block i to rank i, receive block j from rank j. It is its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _all_to_all(grad, ctx.group), None


def _all_to_all(x: torch.Tensor, group: Any) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def _to_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
    """[..., h, d] of this rank's rows -> [cp, ..., h / cp, d]: the rows of every rank, for this rank's part of the
    heads."""
    cp = group.size()
    parts = []
    for x in (query, _enough_heads(key, query.shape[-2], cp), _enough_heads(value, query.shape[-2], cp)):
        parts.append(x.unflatten(-2, (cp, -1)).movedim(-3, 0))
    joint = _Exchange.apply(torch.cat([x.flatten(-2) for x in parts], dim=-1), group)
    pieces = joint.split([x.shape[-2] * x.shape[-1] for x in parts], dim=-1)
    return tuple(piece.unflatten(-1, x.shape[-2:]) for piece, x in zip(pieces, parts, strict=True))


def _to_rows(out: torch.Tensor, group: Any) -> torch.Tensor:
    """[cp, ..., h / cp, d] -> [..., h, d], the inverse of ``_to_heads`` for tensors with as many heads as queries."""
    back: torch.Tensor = _Exchange.apply(out, group)
    return back.movedim(0, -3).flatten(-3, -2)


def _enough_heads(x: torch.Tensor, heads: int, cp: int) -> torch.Tensor:
    """Return key/value heads that divide among ``cp`` ranks: unchanged, or repeated as often as ranks or queries
    need."""
    own = x.shape[-2]
    if own % cp == 0:
        return x
    return x.repeat_interleave(cp // own if cp % own == 0 else heads // own, dim=-2)


def _unshare(x: torch.Tensor) -> torch.Tensor:
    """[cp, s, ...], where share r has pieces r and 2 * cp - 1 - r -> the whole sequence [cp * s, ...]."""
    first, second = x.chunk(2, dim=1)
    return torch.cat([first.flatten(0, 1), second.flip(0).flatten(0, 1)])


def _share(x: torch.Tensor, cp: int) -> torch.Tensor:
    """[cp * s, ...] -> [cp, s, ...]: the inverse of ``_unshare``."""
    first, second = x.chunk(2)
    return torch.cat([first.unflatten(0, (cp, -1)), second.unflatten(0, (cp, -1)).flip(0)], dim=1)
