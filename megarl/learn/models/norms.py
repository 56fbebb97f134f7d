"""Norms for Megatron's local spec; multipliers of embeddings, residuals and logits; inputs of single layers.

Shape legend: h query heads (or key heads) of this rank, d width of a head; s rows of this rank (a share under sequence
parallelism), b sequences, n layers, e width of a layer's input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megarl.weights.architectures.megatron_config import Multipliers
from megarl.weights.architectures.table import NormRules

WithBias = tuple[torch.Tensor, torch.Tensor | None]


class LayerInputs(torch.nn.Module):
    """Inputs of single layers (Gemma 4): from a second embedding of the tokens, and from the first one's output.

    Args:
        vocab: Padded rows of the second embedding.
        layers: Number of the model's layers.
        width: Width of a layer's input.
    """

    def __init__(self, config: Any, vocab: int, layers: int, width: int) -> None:
        from megatron.core.tensor_parallel import VocabParallelEmbedding

        super().__init__()
        self._layers, self._width, self._config = layers, width, config
        self.embedding = VocabParallelEmbedding(
            vocab, layers * width, init_method=config.init_method, reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
        )  # fmt: skip
        self.norm = RMSNorm(config, width, eps=config.layernorm_epsilon)
        self.projection = _whole_linear(config, config.hidden_size, layers * width)

    def forward(self, tokens: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[b, S] tokens of all ranks' rows, their embeddings [s, b, hidden] -> [s, b, n, e]."""
        own = self.embedding(tokens) * torch.tensor(self._width**0.5).to(embedded)
        if not self._config.sequence_parallel:
            own = own.transpose(0, 1)
        projected = self.projection(embedded) * self._config.hidden_size**-0.5
        shape = self._layers, self._width
        return (self.norm(projected.unflatten(-1, shape)) + own.unflatten(-1, shape)) * 2**-0.5

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the modules' weights for Megatron's checkpoints; the embedding is sharded."""
        from megatron.core.transformer.utils import sharded_state_dict_default

        state: dict[str, Any] = {}
        group = self.embedding.tp_group
        for name, module in self.named_children():
            state |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, group)
        return state


class LayerInputGate(torch.nn.Module):
    """Adds a layer's own input, times a gate of the hidden state, to the layer's output.

    Args:
        width: Width of the input.
    """

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
        self.gate = _whole_linear(config, config.hidden_size, width)
        self.projection = _whole_linear(config, width, config.hidden_size)
        self.activation = config.activation_func
        self.input: torch.Tensor | None = None
        """[s, b, e], of this forward pass; ``add_layer_inputs`` has them set."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, hidden] -> [s, b, hidden]. Each input is read once."""
        assert self.input is not None, "a layer's input is read in the forward pass alone, not computed again"
        own, self.input = self.input, None
        return x + self.norm(self.projection(self.activation(self.gate(x)) * own))


def _whole_linear(config: Any, inputs: int, outputs: int) -> torch.nn.Linear:
    """Make a linear layer that every rank has whole."""
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    linear = torch.nn.Linear(inputs, outputs, bias=False, dtype=config.params_dtype, device=device)
    linear.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return linear


def add_layer_inputs(stage: Any, vocab: int, layers: int, width: int) -> None:
    """Give each layer of a GPTModel, which has all layers of the model, its own input. Call it after ``install``.

    Args:
        vocab: Padded vocabulary.
        layers: Number of the model's layers.
        width: Width of an input; 0 for a model without them.
    """
    if not width:
        return
    stage.layer_inputs = LayerInputs(stage.config, vocab, layers, width)

    def hand_inputs(module: Any, unnamed: Any, given: dict[str, Any], embedded: torch.Tensor) -> None:
        inputs = stage.layer_inputs(given["input_ids"], embedded)
        for layer in stage.decoder.layers:
            layer.mlp_bda.gate.input = inputs[:, :, layer.layer_number - 1]

    stage.embedding.register_forward_hook(hand_inputs, with_kwargs=True)


class Residual(torch.nn.Module):
    """Adds a layer's output, normed and multiplied, to the residual; replaces Megatron's bias-dropout-add (without
    dropout).

    Args:
        norm: Makes the norm; None for a family without one.
        scaled: Multiply the sum by ``scalar`` [1], which training keeps.
        gate: Makes the module that adds the layer's own input to the sum, before it is scaled.
    """

    def __init__(
        self,
        multiplier: float,
        norm: Callable[[], torch.nn.Module] | None = None,
        scaled: bool = False,
        gate: Callable[[], torch.nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.multiplier = multiplier
        self.norm = None if norm is None else norm()
        self.gate = None if gate is None else gate()
        self.scalar = torch.nn.Parameter(torch.ones(1), requires_grad=False) if scaled else None

    def forward(self, training: bool, fused: bool) -> Callable[[WithBias, torch.Tensor, float], torch.Tensor]:
        """Return the function of (output and bias, residual, dropout) that Megatron's layers call."""

        def add(output: WithBias, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            x, bias = output
            # Megatron enables gradients here; if the layer has none, the norm's weight must not begin a graph.
            with torch.set_grad_enabled(x.requires_grad):
                x = x if bias is None else x + bias
                x = x if self.norm is None else self.norm(x)
                total = residual + x * self.multiplier
                total = total if self.gate is None else self.gate(total)
                return total if self.scalar is None else total * self.scalar

        return add


def install(stage: Any, numbers: Multipliers, *, logits: bool) -> None:
    """Multiply the embeddings of a stage, divide its logits by scaling the output layer's input, and bound them.

    Args:
        stage: A GPTModel.
        logits: The stage returns logits; a score is not divided.
    """
    if stage.pre_process and numbers.embedding != 1.0:
        stage.embedding.register_forward_hook(lambda module, given, out: out * numbers.embedding)
    if stage.pre_process and numbers.embedding_root != 1.0:
        root = torch.tensor(numbers.embedding_root)
        stage.embedding.register_forward_hook(lambda module, given, out: out * root.to(out))
    if stage.post_process and logits and numbers.logits != 1.0:
        stage.decoder.final_layernorm.register_forward_hook(lambda module, given, out: out / numbers.logits)
    if stage.post_process and logits:
        stage.output_layer.softcap = numbers.softcap


class RMSNorm(torch.nn.RMSNorm):
    """The local spec's norm, marked for sequence parallelism: Megatron then reduces the weight's gradient.

    Args:
        own_eps: Epsilon for this norm instead of the model-wide ``eps``.
        zero_centred: Multiply by 1 + weight, in float32 (Gemma).
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        own_eps: float | None = None,
        zero_centred: bool = False,
        **unused: Any,
    ) -> None:
        super().__init__(hidden_size, eps=eps if own_eps is None else own_eps)
        self.zero_centred = zero_centred
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.zero_centred:
            return super().forward(x)
        normed = torch.nn.functional.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps)
        return normed.to(x.dtype)


class WholeWidthNorm(torch.nn.Module):
    """RMSNorm of a token's queries (or keys) over the heads of all tensor-parallel ranks.

    Every rank has the whole weight and uses its heads' part. Megatron sums gradients of weights with ``q_layernorm`` or
    ``k_layernorm`` in their name over the ranks, so each part gets the gradients of all ranks that use it.

    Args:
        hidden_size: Width of a head.
        heads: Heads of the model. With fewer heads than ranks, neighbouring ranks share one.
    """

    def __init__(self, config: Any, hidden_size: int, heads: int, eps: float = 1e-5, **unused: Any) -> None:
        from megatron.core import parallel_state

        super().__init__()
        ranks, rank = config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
        self.eps, self.copies, self.width = eps, max(ranks // heads, 1), heads * hidden_size
        own = max(heads // ranks, 1) * hidden_size
        self.first, self.last = rank // self.copies * own, (rank // self.copies + 1) * own
        self.weight = torch.nn.Parameter(torch.ones(self.width))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., h, d] -> [..., h, d]."""
        from megatron.core.tensor_parallel import (
            copy_to_tensor_model_parallel_region,
            reduce_from_tensor_model_parallel_region,
        )

        rows = x.flatten(-2).float()
        squares = rows.square().sum(-1, keepdim=True) / self.copies
        # Forward and backward sum over the ranks: every rank's output depends on every rank's squares.
        squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = rows * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight[self.first : self.last] * normed).to(x.dtype).view_as(x)


def norm_of(rules: NormRules) -> Any:
    """Return the spec for norms of hidden states and heads."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(module=RMSNorm, params={"zero_centred": True}) if rules.zero_centred else RMSNorm


def place(layer: Any, config: Any, rules: NormRules) -> None:
    """Put a family's norms into the submodules of a layer of Megatron's local spec.

    ``megarl.learn.models.norms.Residual`` has the norms after attention and MLP.
    """
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    layer.input_layernorm = layer.pre_mlp_layernorm = norm_of(rules) if rules.before else IdentityOp
    attention = layer.self_attention.submodules
    if config.qk_layernorm and not config.multi_latent_attention:
        attention.q_layernorm = attention.k_layernorm = norm_of(rules)
        if rules.after_rope:
            attention.q_layernorm = attention.k_layernorm = IdentityOp
            attention.core_attention = ModuleSpec(module=attention.core_attention, params={"norm": RMSNorm})
        if rules.whole_width:
            attention.q_layernorm = _whole_width(config.num_attention_heads)
            attention.k_layernorm = _whole_width(config.num_query_groups)


def _whole_width(heads: int) -> Any:
    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(module=WholeWidthNorm, params={"heads": heads})


def after(config: Any, rules: NormRules) -> Callable[[], torch.nn.Module] | None:
    """Return a function that makes the norm after attention or MLP, or None for a family without such norms."""
    if not rules.after:
        return None
    eps = config.layernorm_epsilon
    return partial(RMSNorm, config, config.hidden_size, eps=eps, zero_centred=rules.zero_centred)
