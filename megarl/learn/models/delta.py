"""Layers that see earlier tokens without attention, in plain torch: short convolutions (LFM2) and gated delta nets.

A gated delta net, the linear attention of Qwen3-Next and Qwen3.5 (arXiv:2412.06464), keeps a state S for each head, a
map from keys to values. Each token decays the state, corrects what the state returns for the token's key k towards its
value v, and reads it with its query q:

S ← e^g S;  S ← S + k β (v − kᵀ S);  o = qᵀ S.

Megatron-Core's delta net needs a CUDA package and takes no packed sequences. This one has its parameters' names and
layout.

Shape legend: s rows of the sequences, b sequences side by side, t = b · s tokens one sequence after the other, n
sequences, N chunks of C tokens, h value heads of this rank, g key heads, d width of a key, d' of a value, c channels of
the convolution, k its taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)

from megarl.learn.models.norms import RMSNorm
from megarl.weights.megatron_private import parts_in_checkpoint

CHUNK = 64
"""Tokens that are computed together; between chunks only states pass."""
SMALL = 1e-6
"""Added to squared lengths of queries and keys, as the published kernels do."""


class Chunks(NamedTuple):
    """Places of sequences in chunks. Chunk i of all sequences that have one stand together, the longest first."""

    place: torch.Tensor
    """int64 [t]: each token's row among the N · C rows of the chunks."""
    active: tuple[int, ...]
    """Number of sequences that have an i-th chunk."""


def chunks_of(lengths: Sequence[int], size: int = CHUNK) -> Chunks:
    """Return the places of sequences with these lengths, which follow each other."""
    counts = [-(-length // size) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda number: -counts[number])
    rank = {number: place for place, number in enumerate(order)}
    active = tuple(sum(count > i for count in counts) for i in range(max(counts, default=0)))
    first = [0, *torch.tensor(active).cumsum(0).tolist()] if active else [0]
    places = [torch.empty(0, dtype=torch.int64)]
    for number, length in enumerate(lengths):
        token = torch.arange(length)
        start = torch.tensor(first)[token // size]
        places.append((start + rank[number]) * size + token % size)
    return Chunks(torch.cat(places), active)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    chunks: Chunks,
    size: int = CHUNK,
) -> torch.Tensor:
    """Run the rule over sequences that follow each other; every sequence begins with a state of zeros.

    Computed in float32: within chunks by the WY form of the updates (a triangular system), between them by one step for
    all sequences together.

    Args:
        query, key: [t, g, d], of any length; g divides h.
        value: [t, h, d'].
        decay: float32 [t, h], g of the formula, at most 0.
        beta: [t, h], from 0 to 1.
        chunks: Of ``chunks_of`` the sequences' lengths.

    Returns:
        [t, h, d'] in the type of ``query``.
    """
    repeat = value.shape[1] // key.shape[1]
    query, key = (_unit(x.float()).repeat_interleave(repeat, dim=1) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    value, beta = value.float(), beta.float()[..., None]

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """[t, h, ...] -> [N, h, C, ...], zeros where a chunk has no token."""
        rows = x.new_zeros(sum(chunks.active) * size, *x.shape[1:]).index_copy(0, chunks.place, x)
        return rows.unflatten(0, (-1, size)).transpose(1, 2)

    query, written, read, value = (chunked(x) for x in (query, key, key * beta, value * beta))
    between = _between(chunked(decay), size)
    start, end = chunked(decay).cumsum(2).exp()[..., None], between[:, :, -1, :, None]
    system, within = ((x @ written.mT) * between for x in (read, query))
    columns = torch.cat([value, read * start], dim=-1)
    solved = torch.linalg.solve_triangular(system, columns, upper=False, unitriangular=True)
    new, seen = solved.split([value.shape[-1], query.shape[-1]], dim=-1)
    query, written, end = query * start, written * end, start[:, :, -1:]

    parts = [x.split(chunks.active) for x in (query, written, within, new, seen, end)]
    state = value.new_zeros(chunks.active[0] if chunks.active else 0, value.shape[1], query.shape[-1], value.shape[-1])
    outputs = [new[:0]]
    for query, written, within, new, seen, end in zip(*parts, strict=True):
        state = state[: len(query)]
        values = new - seen @ state
        outputs.append(query @ state + within @ values)
        state = state * end + written.mT @ values
    found = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    return found.index_select(0, chunks.place)


def _between(decay: torch.Tensor, size: int) -> torch.Tensor:
    """[N, h, C] -> [N, h, C, C]: what is left at token i of what token j wrote, 0 for later j.

    Decays are summed from j to i: differences of sums from the chunk's start would round off small ones after large
    ones.
    """
    row = torch.arange(size, device=decay.device)
    steps = decay[..., :, None].masked_fill(row[:, None] <= row, 0.0)
    return steps.cumsum(-2).exp().masked_fill(row[:, None] < row, 0.0)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + SMALL)


def causal_convolution(x: torch.Tensor, weight: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over each token and the k - 1 before it in its sequence, channel by channel.

    Args:
        x: [t, c].
        weight: [c, 1, k]; the last tap is the token's own.
        position: int64 [t], each token's place in its sequence.
    """
    taps = weight.shape[-1]
    total = x * weight[:, 0, -1]
    for back in range(1, min(taps, len(x))):
        before = F.pad(x[:-back], (0, 0, back, 0)).masked_fill((position < back)[:, None], 0.0)
        total = total + before * weight[:, 0, -1 - back]
    return total


class SequencePlaces(NamedTuple):
    """Positions and chunks of a micro-batch's sequences, which all layers share."""

    position: torch.Tensor
    chunks: Chunks


def places_of(lengths: Sequence[int], device: torch.device) -> SequencePlaces:
    """Return the places of sequences with these lengths, which follow each other."""
    position = torch.cat([torch.arange(length) for length in lengths])
    chunks = chunks_of(lengths)
    return SequencePlaces(position.to(device), chunks._replace(place=chunks.place.to(device)))


class DeltaNet(MegatronModule):  # type: ignore[misc]
    """The layer, in the place of Megatron's ``self_attention``; its keys in checkpoints are Megatron's.

    Sizes are those of the TransformerConfig (``linear_*``). Context parallelism is refused by ``parallel.grid``.
    """

    def __init__(self, config: Any, layer_number: int, pg_collection: Any = None, **unused: Any) -> None:
        super().__init__(config=config)
        from megatron.core.process_groups_config import ProcessGroupCollection

        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.layer_number, self.pg_collection, self.tp_size = layer_number, pg_collection, pg_collection.tp.size()
        self.conv_bias = False
        self.key_head_dim, self.value_head_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.num_value_heads = config.linear_num_value_heads
        self.qk_dim = self.key_head_dim * config.linear_num_key_heads
        self.v_dim = self.value_head_dim * self.num_value_heads
        self.in_proj_dim = 2 * self.qk_dim + 2 * self.v_dim + 2 * self.num_value_heads
        self.conv_dim_local_tp = (2 * self.qk_dim + self.v_dim) // self.tp_size
        common: dict[str, Any] = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, self.in_proj_dim, init_method=config.init_method, gather_output=False, **common
        )
        self.out_proj = RowParallelLinear(
            self.v_dim, config.hidden_size, init_method=config.output_layer_init_method, input_is_parallel=True,
            skip_bias_add=True, **common,
        )  # fmt: skip
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        own: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        heads, channels = self.num_value_heads // self.tp_size, self.conv_dim_local_tp
        self.conv1d = torch.nn.Conv1d(
            channels, channels, config.linear_conv_kernel_dim, groups=channels, bias=False, **own
        )
        self.dt_bias, self.A_log = (torch.nn.Parameter(torch.zeros(heads, **own)) for _ in range(2))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        self.out_norm = RMSNorm(config, self.value_head_dim, eps=config.layernorm_epsilon)
        self.out_norm.weight.sequence_parallel = False  # type: ignore[attr-defined]  # ``forward`` reduces its gradient

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, *, packed_seq_params: Any = None, **unused: Any
    ) -> tuple[torch.Tensor, None]:
        """Return the layer's output for [s, b, hidden], or for packed sequences [t, 1, hidden]; the bias is None."""
        return _projected(self, self._mixed, hidden_states, packed_seq_params), None

    def _mixed(self, projected: torch.Tensor, places: SequencePlaces) -> torch.Tensor:
        """[t, in_proj_dim / tp] -> [t, h * d']."""
        keys, values, heads = (n // self.tp_size for n in (self.qk_dim, self.v_dim, self.num_value_heads))
        mixed, gate, beta, step = projected.split([2 * keys + values, values, heads, heads], dim=-1)
        mixed = F.silu(causal_convolution(mixed, self.conv1d.weight, places.position))
        query, key, value = mixed.split([keys, keys, values], dim=-1)
        query, key = (x.unflatten(-1, (-1, self.key_head_dim)) for x in (query, key))
        value, gate = (x.unflatten(-1, (-1, self.value_head_dim)) for x in (value, gate))
        decay = -self.A_log.float().exp() * F.softplus(step.float() + self.dt_bias.float())
        out = gated_delta_rule(query, key, value, decay, beta.sigmoid(), places.chunks).to(projected.dtype)
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight)  # each rank norms its own heads
        normed = weight * F.rms_norm(out.float(), (self.value_head_dim,), None, self.out_norm.eps).to(out.dtype)
        return (normed * F.silu(gate.float())).to(out.dtype).flatten(-2)

    def sharded_state_dict(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Return the entries of Megatron's checkpoints: parts of fused tensors have keys of their own."""
        state: dict[str, Any] = GatedDeltaNet.sharded_state_dict(self, *arguments, **named)
        return state


class ShortConvolution(MegatronModule):  # type: ignore[misc]
    """The layer, in the place of Megatron's ``self_attention``: each token is projected to b, c and x, and the output
    is the projection of c · convolution(b · x). Tensor parallelism splits the channels. Source: transformers'
    ``models/lfm2/modeling_lfm2.py``.
    """

    def __init__(self, config: Any, layer_number: int, pg_collection: Any = None, **unused: Any) -> None:
        super().__init__(config=config)
        from megatron.core.process_groups_config import ProcessGroupCollection

        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.layer_number, self.pg_collection = layer_number, pg_collection
        common: dict[str, Any] = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        hidden, channels = config.hidden_size, config.hidden_size // pg_collection.tp.size()
        self.in_proj = ColumnParallelLinear(
            hidden, 3 * hidden, init_method=config.init_method, gather_output=False, **common
        )
        self.out_proj = RowParallelLinear(
            hidden, hidden, init_method=config.output_layer_init_method, input_is_parallel=True, skip_bias_add=True,
            **common,
        )  # fmt: skip
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        taps = config.linear_conv_kernel_dim
        self.conv1d = torch.nn.Conv1d(
            channels, channels, taps, groups=channels, bias=False, dtype=config.params_dtype, device=device
        )
        set_tensor_model_parallel_attributes(self.conv1d.weight, True, 0, 1)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, *, packed_seq_params: Any = None, **unused: Any
    ) -> tuple[torch.Tensor, None]:
        """Return the layer's output for [s, b, hidden], or for packed sequences [t, 1, hidden]; the bias is None."""
        return _projected(self, self._mixed, hidden_states, packed_seq_params), None

    def _mixed(self, projected: torch.Tensor, places: SequencePlaces) -> torch.Tensor:
        """[t, 3 * hidden / tp] -> [t, hidden / tp]."""
        before, after, x = projected.chunk(3, dim=-1)
        return after * causal_convolution(before * x, self.conv1d.weight, places.position)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None, **unused: Any
    ) -> dict[str, Any]:
        """Return the entries of Megatron's checkpoints: the three parts of ``in_proj`` have keys of their own."""
        metadata, group = ensure_metadata_has_dp_cp_group(metadata), self.pg_collection.tp
        state: dict[str, Any] = {}
        for name in ("in_proj", "out_proj"):
            module = getattr(self, name)
            state |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=group)
        weights, groups = self.conv1d.state_dict(keep_vars=True), metadata["dp_cp_group"]
        state |= make_sharded_tensors_for_checkpoint(
            weights, f"{prefix}conv1d.", {"weight": 0}, sharded_offsets, tp_group=group, dp_cp_group=groups
        )
        key, channels = f"{prefix}in_proj.weight", len(self.conv1d.weight)
        return state | {key: parts_in_checkpoint(state[key], 3 * [channels], ["b", "c", "x"])}


def _projected(
    layer: Any,
    mixed: Callable[[torch.Tensor, SequencePlaces], torch.Tensor],
    hidden_states: torch.Tensor,
    packed_seq_params: Any,
) -> torch.Tensor:
    """Return ``out_proj`` of ``mixed`` of ``in_proj`` of [s, b, hidden]; with ``packed_seq_params`` b is 1.

    Args:
        mixed: Function of the projected tokens, one sequence after the other, and of their places.
    """
    projected, _ = layer.in_proj(hidden_states)
    rows, sequences = projected.shape[:2]
    if packed_seq_params is None:
        places = places_of([rows] * sequences, projected.device)
    else:
        places = _of_packed(packed_seq_params, projected.device)
    out = mixed(projected.transpose(0, 1).flatten(0, 1), places)
    output, _ = layer.out_proj(out.unflatten(0, (sequences, rows)).transpose(0, 1).contiguous())
    return output  # type: ignore[no-any-return]


def _of_packed(params: Any, device: torch.device) -> SequencePlaces:
    """Return the places of a micro-batch's sequences, which the first layer computes."""
    found: SequencePlaces | None = getattr(params, "_megarl_delta_places", None)
    if found is None:
        found = params._megarl_delta_places = places_of(params.cu_seqlens_q.diff().tolist(), device)
    return found
