"""The trainer's model of a comparison, in float32: every operation computed from the engine's own inputs.

So an error of one layer does not reach the next one, and the first operation that differs is the one that is wrong.

Shape legend: T tokens, h query heads, g key/value heads, d width of a head.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.config import Config
from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.engines.tracing import points
from megarl.engines.tracing.points import EngineTrace, Record, flat
from megarl.learn.batching import MicroBatching, Sequences
from megarl.learn.models.gpt import unwrap
from megarl.learn.parallel import process_groups
from megarl.learn.training.model import Model
from megarl.learn.training.schedule import Head
from megarl.run.process import ports
from megarl.weights.architectures import architecture
from megarl.weights.architectures.rope import ropes
from megarl.weights.checkpoint.formats.hf_source import read_hf_config


class TrainerModel:
    """Megatron's model on one CPU process, in float32.

    Args:
        config: The run's settings; ``model.path`` is an HF checkpoint.
    """

    def __init__(self, config: Config) -> None:
        from megatron.core import parallel_state

        parallel = ParallelConfig()
        if not parallel_state.model_parallel_is_initialized():
            [port] = ports.choose("127.0.0.1", 1, None)
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            process_groups.initialize(parallel, seed=0)
        self.hf_config = read_hf_config(Path(config.model.path))
        settings = replace(ModelConfig(), path=config.model.path, dtype="float32", transformer_impl="local")
        limits = MicroBatching(dp=1, cp=1, multiple=1, chunks=1, max_tokens=None, rows=1, max_patches=None)
        self._ropes = ropes(architecture(self.hf_config), self.hf_config)
        self.model = Model(self.hf_config, settings, parallel, Head(int(self.hf_config["vocab_size"])), limits)
        self.model.load_hf(Path(config.model.path))
        self._stage: Any = unwrap(self.model.chunks[0])

    @torch.no_grad()
    def trace(self, engine: EngineTrace, *, temperature: float) -> tuple[Record, torch.Tensor, torch.Tensor]:
        """Return the record of the engine's sequence, float32 [T - 1] log-probs at temperature 1, and at
        ``temperature``."""
        record: Record = {}
        removed = self._install(engine.whole, record)
        try:
            logp = self._logp(engine.tokens, 1.0)
            scaled = self._logp(engine.tokens, temperature)
        finally:
            for remove in removed:
                remove()
        return record, logp, scaled

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that a layer attends to; None for all."""
        layers = self._stage.decoder.layers
        core = getattr(layers[layer].self_attention, "core_attention", None) if layer < len(layers) else None
        return getattr(core, "window", None)

    def _logp(self, tokens: list[int], temperature: float) -> torch.Tensor:
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[-1] = False
        sequences = Sequences(torch.tensor(tokens, dtype=torch.int32), torch.tensor([len(tokens)]), mask)
        batches = self.model.micro_batches(sequences)
        return self.model.outputs(sequences, [batches], temperature=temperature)[:-1]

    def _install(self, given: Record, record: Record) -> list[Callable[[], None]]:
        hooks = _Hooks(given, record, len(given[0, points.STREAM]))
        for number, layer in enumerate(self._stage.decoder.layers):
            hooks.before(layer, number, points.STREAM)
            attention, mlp = layer.self_attention, layer.mlp
            hooks.before(attention, number, points.ATTENTION_INPUT)
            hooks.before(mlp, number, points.MLP_INPUT)
            # Forced, because rounding may choose another expert for a token.
            hooks.after(mlp, number, points.MLP, force=True)
            if hasattr(mlp, "router"):
                hooks.wrap(mlp.router, "gating", number, points.ROUTER)
            if not hasattr(attention, "core_attention"):  # a delta net or short convolution
                hooks.before(attention.out_proj, number, points.ATTENTION)
                hooks.after(attention.out_proj, number, points.PROJECTION)
                continue
            hooks.after(attention.linear_proj, number, points.PROJECTION)
            core = attention.core_attention
            if not hasattr(attention, "linear_qkv"):  # latent attention
                hooks.after(core, number, points.ATTENTION)
                continue
            hooks.after(attention.linear_qkv, number, "", self._qkv(number, attention.config))
            for name, operation in (("q_layernorm", points.QUERY_NORM), ("k_layernorm", points.KEY_NORM)):
                norm = getattr(attention, name, None)
                if norm is not None and any(True for _ in norm.parameters()):
                    hooks.after(norm, number, operation)
            hooks.wrap_inputs(core, "_attend", self._attend(number))
            hooks.after(core, number, points.ATTENTION)
        last = len(self._stage.decoder.layers)
        hooks.before(self._stage.decoder.final_layernorm, last, points.STREAM)
        hooks.after(self._stage.decoder.final_layernorm, last, points.FINAL_NORM, force=True)
        return hooks.removed

    def _qkv(self, number: int, config: Any) -> Callable[[torch.Tensor], Record]:
        groups, heads, width = config.num_query_groups, config.num_attention_heads, config.kv_channels
        kinds, each = 1 + config.attention_output_gate, heads // groups

        def split(out: torch.Tensor) -> Record:
            parts = flat(out, out.numel() // out.shape[-1]).unflatten(1, (groups, -1, width))
            q = torch.cat(parts[:, :, : kinds * each].chunk(kinds, dim=2), dim=-1)  # a head's gate is beside its query
            k, v = parts[:, :, kinds * each], parts[:, :, -1]  # keys may be the values
            return {
                (number, points.QUERY): q.flatten(1),
                (number, points.KEY): k.flatten(1),
                (number, points.VALUE): v.flatten(1),
            }

        return split

    def _attend(self, number: int) -> Callable[..., Record]:
        rope = self._ropes[number]
        # Megatron's side has YaRN's factor in the scale of the scores, vLLM in the rotated vectors.
        factor = 1.0 if rope is None else rope.attention_factor

        def read(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Record:
            # [1, h, T, d] -> [T, h * d]
            rotated = {(number, points.ROTATED_QUERY): query * factor, (number, points.ROTATED_KEY): key * factor}
            return {point: flat(tensor[0].transpose(0, 1), tensor.shape[2]) for point, tensor in rotated.items()}

        return read


class _Hooks:
    """Hooks that record, and replace inputs by the engine's."""

    def __init__(self, given: Record, record: Record, tokens: int) -> None:
        self._given, self._record, self._tokens = given, record, tokens
        self.removed: list[Callable[[], None]] = []

    def before(self, module: Any, number: int, operation: str) -> None:
        """Record the module's first input; then replace it by the engine's."""

        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            own = args[0] if args else kwargs["hidden_states"]
            self._record.setdefault((number, operation), flat(own, self._tokens))
            given = self._given.get((number, operation))
            if given is None:
                return args, kwargs
            forced = given.view_as(own).to(own.dtype, copy=True)  # Megatron may add in place
            return ((forced, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": forced})

        self.removed.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def after(
        self,
        module: Any,
        number: int,
        operation: str,
        read: Callable[[torch.Tensor], Record] | None = None,
        *,
        force: bool = False,
    ) -> None:
        """Record the module's output, without a bias that Megatron adds later; ``force``: replace it, too."""

        def hook(_: Any, args: Any, output: Any) -> Any:
            tensor = output[0] if isinstance(output, tuple) else output
            bias = output[1] if isinstance(output, tuple) and len(output) > 1 else None
            whole = tensor if bias is None else tensor + bias
            found = {(number, operation): flat(whole, self._tokens)} if read is None else read(whole)
            for point, value in found.items():
                self._record.setdefault(point, value)
            given = self._given.get((number, operation)) if force else None
            if given is None:
                return None
            forced = given.view_as(tensor).to(tensor.dtype, copy=True)
            return (forced, *(None for _ in output[1:])) if isinstance(output, tuple) else forced

        # Before the hook that divides logits.
        self.removed.append(module.register_forward_hook(hook, prepend=force).remove)

    def wrap(self, owner: Any, name: str, number: int, operation: str) -> None:
        """Record the result of a method."""
        original = getattr(owner, name)

        def wrapped(*args: Any) -> Any:
            result = original(*args)
            self._record.setdefault((number, operation), flat(result, self._tokens))
            return result

        setattr(owner, name, wrapped)
        self.removed.append(lambda: delattr(owner, name))

    def wrap_inputs(self, owner: Any, name: str, read: Callable[..., Record]) -> None:
        """Record the arguments of a method."""
        original = getattr(owner, name)

        def wrapped(*args: Any) -> Any:
            for point, value in read(*args).items():
                self._record.setdefault(point, value)
            return original(*args)

        setattr(owner, name, wrapped)
        self.removed.append(lambda: delattr(owner, name))
