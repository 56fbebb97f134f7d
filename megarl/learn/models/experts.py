"""Routers that balance the load of their experts, and modules of experts with biases.

For a router of E experts that chooses k, with scores s_{t,e} that sum to 1 over e (softmax, or sigmoids divided by
their sum):

    balance = (1/N) Σ_n Σ_e f_{n,e}·P_{n,e}
    f_{n,e} = E/(k·T_n) Σ_t 1(e among the k best of t),  P_{n,e} = 1/T_n Σ_t s_{t,e}
    z       = 1/T Σ_t (logsumexp_e logits_{t,e})²
    bias_e += rate · sign(mean load − load_e), after an update

over the N sequences of an update, of T_n tokens, T in all (DeepSeek-V3, 2412.19437 eq. 17–20 and 16; ST-MoE, 2202.08906
eq. 5). Both losses are summed over the layers. Megatron's losses are means over one micro-batch, so they depend on how
an update is split.

Shape legend: t tokens of this rank in a micro-batch, E experts, n sequences of the micro-batch.

Files and vLLM use the same order, so that any contiguous share of the rows has whole pairs.

Shape legend: t tokens, f width of an expert on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter

from megarl.config.schema import RouterConfig
from megarl.core.metrics import Sums
from megarl.weights.megatron_private import submodules_of


@dataclass(frozen=True)
class UpdateSize:
    """Denominators of an update's balance."""

    sequences: int
    """Number over all data-parallel ranks."""
    tokens: int
    """Number over all data-parallel ranks, without padding."""
    most: int
    """Number of sequences in this rank's largest micro-batch."""


class Router(TopKRouter):
    """Megatron's router, which also measures an update's balance and adds the losses to the gradient.

    Args:
        biased: With a softmax: use a bias to choose experts but not to weigh them. The bias is a buffer with the name
            of Megatron's bias for sigmoids.
    """

    router_replay: Any
    """Expert choices to replay (``experts.routing_replay``), or None."""
    witness: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None
    """Called with the logits [t, E] of a micro-batch's tokens, their sequences [t] and the weighted loss."""

    def __init__(self, settings: RouterConfig, biased: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.biased = biased
        if biased:
            del self.expert_bias  # None
            bias = torch.zeros(self.num_experts, dtype=torch.float32, device=self.weight.device)
            self.register_buffer("expert_bias", bias)
        self.settings = settings
        self.sequence: torch.Tensor | None = None
        """int64 [t]: index of each token's sequence in the micro-batch, -1 for padding; None outside of updates."""

    def begin(self, size: UpdateSize) -> None:
        """Reset the measurements for a new update."""
        self._size = size
        self.load = torch.zeros(self.num_experts, dtype=torch.int64, device=self.weight.device)
        """int64 [E]: tokens routed to each expert on this rank; ``measured`` replaces it by the sum over ranks."""
        self.losses = torch.zeros(2, dtype=torch.float64, device=self.weight.device)
        """This rank's share of (balance, z)."""

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return probabilities and choices, [t, E] each."""
        probs, chosen = self._routed(logits, padding_mask)
        # Recomputation runs a layer twice, the first time without gradients.
        if self.sequence is not None and self.training and torch.is_grad_enabled():
            real = self.sequence >= 0
            self.load += chosen[real].sum(0)
            own = logits.view(-1, self.num_experts)[real].float()
            losses = self._losses(own, self.sequence[real])
            self.losses += losses.detach()
            weights = losses.new_tensor([self.settings.aux_loss_coef, self.settings.z_loss_coef])
            weighted = losses @ weights
            if self.witness is not None:
                self.witness(own, self.sequence[real], weighted)
            probs = MoEAuxLossAutoScaler.apply(probs, weighted)
        return probs, chosen

    def _routed(self, logits: torch.Tensor, padding_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        replay = self.router_replay
        if self.biased:
            self.router_replay = _BiasedChoice(self.expert_bias, replay)
        try:
            probs, chosen = super().routing(logits, padding_mask)
        finally:
            self.router_replay = replay
        return probs, chosen

    def _losses(self, logits: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
        """Return float32 [2] of (balance, z): the share of this rank's tokens in the sums over the update."""
        chosen, scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function)
        most, experts = self._size.most, self.num_experts
        counted = torch.cat([chosen.float(), torch.ones_like(logits[:, :1])], dim=1)
        counts = logits.new_zeros(most, experts + 1).index_add(0, sequence, counted)
        if self.tp_cp_group.size() > 1:  # the other ranks have the other tokens of these sequences
            dist.all_reduce(counts, group=self.tp_cp_group)
        length = counts[:, -1:].clamp(min=1.0)
        frequency = counts[:, :-1] * experts / (self.topk * length)
        probability = logits.new_zeros(most, experts).index_add(0, sequence, scores.float()) / length
        balance = (frequency * probability).sum() / self._size.sequences
        return torch.stack([balance, logits.logsumexp(-1).square().sum() / self._size.tokens])


class _BiasedChoice:
    """Choice of experts by probability plus bias, put in the place of Megatron's replayed choices.

    Args:
        replay: Choices to replay, or None.
    """

    def __init__(self, bias: torch.Tensor, replay: Any) -> None:
        self._bias, self._replay = bias, replay

    def get_replay_topk(
        self, logits: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, plain: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and ids of the chosen experts, [t, K] each, for logits [t, E]."""
        if self._replay is not None:
            chosen: tuple[torch.Tensor, torch.Tensor] = self._replay.get_replay_topk(
                logits, topk, num_groups, group_topk, self._choose
            )
            return chosen
        return self._choose(logits, topk)

    def _choose(self, logits: torch.Tensor, topk: int, **unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.softmax(logits.detach(), dim=-1, dtype=torch.float32) + self._bias
        ids = scores.topk(topk, dim=-1).indices
        return logits.gather(1, ids), ids


def balance(block: Any, settings: RouterConfig, biased: bool = False) -> None:
    """Replace the routers in a TransformerBlockSubmodules by ``Router``."""
    for layer in block.layer_specs:
        if (experts := submodules_of(layer.submodules.mlp, MoELayer)) is not None:
            experts.router = partial(Router, settings, biased)


def install(stage: torch.nn.Module) -> None:
    """Pass the tokens' sequence indices, given as padding mask [b, S], from layers to their routers."""
    for layer in stage.modules():
        if isinstance(layer, MoELayer) and isinstance(layer.router, Router):
            layer.register_forward_pre_hook(_number, with_kwargs=True)


def _number(layer: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    row = named.pop("padding_mask", None)
    layer.router.sequence = None if row is None else row.transpose(0, 1).reshape(-1)
    return arguments, named


def routers(chunks: Iterable[torch.nn.Module]) -> list[Router]:
    """Return the routers that measure balance, in layer order."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]


def sequences_of_tokens(stage: Any, row: torch.Tensor) -> torch.Tensor:
    """int64 [b, S]: ``MicroBatch.row`` of a context-parallel rank, in the form of ``stage``'s padding mask.

    Only Megatron's first stage splits the mask for sequence parallelism.
    """
    if stage.pre_process or not stage.config.sequence_parallel:
        return row
    return scatter_to_sequence_parallel_region(row.transpose(0, 1).contiguous()).transpose(0, 1).contiguous()


def measured(chunks: Sequence[torch.nn.Module], name: str) -> Sums:
    """Return metrics of an update, the same on every rank of the model: both losses as means over layers, and the
    largest load of an expert relative to its layer's mean. Every rank calls it; it sums each ``load`` over ranks."""
    # The model's device also on a stage without routers: a collective over CPU and GPU tensors would hang.
    found, device = routers(chunks), next(chunks[0].parameters()).device
    total = torch.zeros(3, dtype=torch.float64, device=device)
    fullest = torch.zeros((), dtype=torch.float64, device=device)
    if found:
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        load, losses = torch.stack([r.load for r in found]), torch.stack([r.losses for r in found])
        dist.all_reduce(load, group=group)
        dist.all_reduce(losses, group=group)
        for router, each in zip(found, load, strict=True):
            router.load = each
        total = torch.cat([losses.sum(0), losses.new_tensor([float(len(found))])])
        fullest = (load.amax(1) / load.double().mean(1).clamp(min=1e-9)).amax()
    stages = parallel_state.get_pipeline_model_parallel_group()
    dist.all_reduce(total, group=stages)
    dist.all_reduce(fullest, dist.ReduceOp.MAX, group=stages)
    balanced, z, layers = total.tolist()
    return {
        f"{name}/router_balance": (balanced / layers, 1.0),
        f"{name}/router_z": (z / layers, 1.0),
        f"max:{name}/router_load": (float(fullest), 1.0),
    }


@torch.no_grad()
def move_biases(found: Sequence[Router]) -> None:
    """Move every expert's bias by ``bias_update_rate`` towards an even load, after an optimizer step."""
    for router in found:
        if rate := router.settings.bias_update_rate:
            load = router.load.double()
            router.expert_bias += rate * torch.sign(load.mean() - load).to(router.expert_bias)


ALPHA, LIMIT = 1.702, 7.0
"""``swiglu_alpha`` and ``swiglu_limit`` of config.json; the architecture table accepts no other values."""


def clamped_swiglu(x: torch.Tensor) -> torch.Tensor:
    """[t, 2f], with gate and up alternating -> [t, f]."""
    gate, up = x[..., ::2].clamp(max=LIMIT), x[..., 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))


class PairedLinear(ColumnParallelLinear):  # type: ignore[misc]
    """An expert's first linear layer, with two rows for each output of the activation."""

    def __init__(self, input_size: int, output_size: int, **arguments: Any) -> None:
        super().__init__(input_size, 2 * output_size, **arguments)


class BiasedOnce(RowParallelLinear):  # type: ignore[misc]
    """An expert's second linear layer; only the first of the ranks that share an expert adds the bias."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # Each rank has the bias's whole gradient (``_OnFirst``), so it is not summed over ranks.
        self.bias.sequence_parallel = False
        # With etp = 1 a rank has whole experts, and counts their biases in the gradient norm.
        self.bias.tensor_model_parallel = parallel_state.get_expert_tensor_parallel_world_size() == 1

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[t, f] -> (this rank's share of the output, its share of the bias)."""
        out, bias = super().forward(x)
        out = out if self.explicit_expert_comm else out.clone()  # Megatron adds in place, and this tensor is a view
        return out, _OnFirst.apply(bias, parallel_state.get_expert_tensor_parallel_rank() == 0)


class _OnFirst(torch.autograd.Function):
    """Return the bias on the first rank and zeros on the others; every rank gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, is_first: bool) -> torch.Tensor:
        return bias.clone() if is_first else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


def pair(block: Any) -> None:
    """Put these layers into the experts of a TransformerBlockSubmodules."""
    for layer in block.layer_specs:
        if (moe := submodules_of(layer.submodules.mlp, MoELayer)) is not None:
            moe.experts.submodules.linear_fc1, moe.experts.submodules.linear_fc2 = PairedLinear, BiasedOnce
