"""A worker extension that can be told to do wrong: the tests show that the checks see it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization.online import fp8

from megarl.engines.sync import writer
from megarl.engines.sync.eight_bits import layers_of
from megarl.engines.sync.receiver import WorkerExtension


class FaultyWorker(WorkerExtension):
    model_runner: Any
    fault_absorbed: Any

    def fault_leave_experts_unpacked(self, leave: bool) -> None:
        """What vLLM's own reload does on CPU."""
        if leave:
            writer.repack_experts = lambda model: None
        else:
            writer.repack_experts = _REPACK

    def fault_stale_absorbed_weights(self) -> None:
        """Latent attention goes on with another matrix than its projection's, as if it had not been made again."""
        attention = self.model_runner.model.model.layers[0].self_attn.mla_attn.mla_attn
        stale = attention.W_UV.data.clone()  # it shares memory with the projection
        stale[1, 2, 3] += 1
        self.fault_absorbed, attention.W_UV = attention.W_UV, torch.nn.Parameter(stale, requires_grad=False)

    def fault_restore_absorbed_weights(self) -> None:
        """The matrix lies where it lay before ``fault_stale_absorbed_weights``."""
        self.model_runner.model.model.layers[0].self_attn.mla_attn.mla_attn.W_UV = self.fault_absorbed

    def fault_stale_decode(self) -> None:
        """From now on tokens are decoded with the weights of now, whatever comes: as a captured graph does that reads
        memory which an update has replaced. Prompts are computed with the weights that were stored last."""
        model = self.model_runner.model
        old = [(module, _weights_of(module)) for module in model.modules()]
        forward = model.forward

        def stale(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if len(input_ids) > 1:
                return forward(input_ids, *args, **kwargs)
            new = [(module, _weights_of(module)) for module in model.modules()]
            _put(old)
            try:
                return forward(input_ids, *args, **kwargs)
            finally:
                _put(new)

        model.forward = stale

    def fault_change_bits(self, module: str, name: str) -> None:
        """The lowest bit of the last element of a tensor changes: of what the engine computes with."""
        tensor = getattr(self.model_runner.model.get_submodule(module), name).data
        last = tensor[tuple(n - 1 for n in tensor.shape)].view(1)
        last.view({1: torch.uint8, 4: torch.int32}[tensor.element_size()]).bitwise_xor_(1)

    def fault_quantise_otherwise(self, otherwise: bool) -> None:
        """vLLM rounds weights of 8 bits towards zero instead of to the nearest."""
        fp8._fp8_quant_per_channel = _truncated if otherwise else _QUANTISE

    def fault_bytes(self) -> int:
        """Bytes of the memory in which parameters and 8-bit forms lie; of linear layers that a CPU's kernel has packed,
        those of the weight."""
        model = self.model_runner.model
        forms = [tensor for layer in layers_of(model).values() for tensor in layer.held().values()]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in (*model.parameters(), *forms)}
        alone = (m for m in model.modules() if writer.is_packed_linear(m) and not m.weight.numel())
        return sum(s.nbytes() for s in storages.values()) + sum(writer.unpack_linear(m).nbytes for m in alone)

    def fault_change_head(self) -> tuple[str, bool]:
        """The LM head's own weight changes; returns the type of the logits and whether they have changed."""
        model = self.model_runner.model
        hidden = torch.ones(1, model.lm_head.weight.shape[1], dtype=model.lm_head.weight.dtype)
        before = model.compute_logits(hidden)
        model.lm_head.weight.data[1, 2] += 8
        after = model.compute_logits(hidden)
        return str(after.dtype), not torch.equal(before, after)


def _truncated(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    exact, rounded = weight / scale, _QUANTISE(weight, scale)
    bits = rounded.view(torch.uint8)
    return torch.where(rounded.float().abs() > exact.abs(), bits - 1, bits).view(rounded.dtype)


def _weights_of(module: Any) -> dict[str, Any]:
    """Copies of a module's own weights, and the packed form that it computes from."""
    packed = {"cpu_linear": module.cpu_linear} if "cpu_linear" in vars(module) else {}
    return {name: p.data.clone() for name, p in module.named_parameters(recurse=False)} | packed


def _put(weights: list[tuple[Any, dict[str, Any]]]) -> None:
    for module, values in weights:
        for name, value in values.items():
            if name == "cpu_linear":
                module.cpu_linear = value
            else:
                getattr(module, name).data.copy_(value)


_REPACK = writer.repack_experts
_QUANTISE = fp8._fp8_quant_per_channel
