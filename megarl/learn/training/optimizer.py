"""The optimizer of one model, and digests of the weights that it last wrote.

A digest covers one local parameter in the parameter's dtype. Each data-parallel rank adds the share that its optimizer
updates, read from the tensors that Adam writes (float32 masters, cast) and not from copies of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.config.schema import OptimizerConfig
from megarl.core.errors import WeightsDiffer, first_of
from megarl.learn.models.gpt import named_tensors, unwrap
from megarl.learn.parallel.cpu import FusedLayoutAdamW
from megarl.learn.training.streaming import share_digest
from megarl.ops import digest_values, slice_digests
from megarl.weights.checkpoint.training.state import inner_optimizers
from megarl.weights.reshard.adapters import Adapted


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Return the rate: linear warm-up over ``warmup_steps``, then linear decay to ``min_lr`` at ``decay_steps``.
    ``step`` counts from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.decay_steps is None or config.min_lr is None:
        return config.lr
    span = max(1, config.decay_steps - config.warmup_steps)
    fraction = min(1.0, (step - config.warmup_steps) / span)
    return config.lr + (config.min_lr - config.lr) * fraction


class Optimizer:
    """Adam with decoupled weight decay; float32 masters and moments of ``moments_dtype``, sharded over data-parallel
    ranks."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], config: OptimizerConfig, dtype: str, moments_dtype: str = "float32"
    ) -> None:
        from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
        from megatron.core.optimizer import distrib_optimizer, get_megatron_optimizer

        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.lr if config.min_lr is None else config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype == "bfloat16",
            params_dtype=getattr(torch, dtype),
            use_distributed_optimizer=True,
        )
        low = getattr(torch, moments_dtype)
        if low != torch.float32 and distrib_optimizer.Adam is not FusedLayoutAdamW:
            # Set after the constructor, which would move the masters into TransformerEngine's Adam: there neither
            # digests nor ``reload_model_params`` reach them.
            settings.use_precision_aware_optimizer = True
            settings.exp_avg_dtype = settings.exp_avg_sq_dtype = low
        self.inner: Any = get_megatron_optimizer(settings, list(chunks))
        for inner in inner_optimizers(self.inner):
            if isinstance(inner, FusedLayoutAdamW):
                inner.exp_avg_dtype = low
        self.set_hyperparameters(config)

    def restart(self, config: OptimizerConfig) -> None:
        """Reset all moments and step counts, and use ``config``, for a new phase of training."""
        for inner in inner_optimizers(self.inner):
            for group in inner.param_groups:
                group["step"] = 0
            for moments in inner.state.values():
                moments["exp_avg"].zero_()
                moments["exp_avg_sq"].zero_()
        self.set_hyperparameters(config)

    def set_hyperparameters(self, config: OptimizerConfig) -> None:
        """Use ``config`` and keep the moments.

        Call it after loading a checkpoint, which restores its own values, and at the start: Megatron leaves applying
        ``wd_mult`` (0 for norms and biases) to its own scheduler."""
        for inner in inner_optimizers(self.inner):
            for group in inner.param_groups:
                group["weight_decay"] = config.weight_decay * group["wd_mult"]
                group["betas"] = (config.beta1, config.beta2)
                group["eps"] = config.eps
        for outer in getattr(self.inner, "chained_optimizers", [self.inner]):
            outer.config.clip_grad = config.clip_grad
        self.inner.config.clip_grad = config.clip_grad

    def gradient_norm(self) -> float:
        """Return the norm of the gradients in the model's buffers, over the whole grid, before clipping; weights,
        masters and moments do not change."""
        overflowed = self.inner.prepare_grads()  # outside the assertion: python -O removes assertions
        assert not overflowed, "there is no loss scaler"
        return float(self.inner.get_grad_norm())

    def step(self, lr: float) -> float:
        """Make one step on the gradients in the model's buffers; return their norm before clipping."""
        for inner in inner_optimizers(self.inner):
            for group in inner.param_groups:
                group["lr"] = lr * group.get("lr_mult", 1.0)
        success, grad_norm, _ = self.inner.step()
        assert success, "the distributed optimizer skipped a step without a loss scaler"
        return float(grad_norm)


def whole_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return name -> digest of the whole tensor; all tensors must be on one device."""
    found = slice_digests([(tensor, (0,) * tensor.dim(), tensor.shape) for tensor in tensors.values()])
    return dict(zip(tensors, digest_values(found), strict=True))


@torch.no_grad()
def digests_written(
    chunks: Sequence[torch.nn.Module],
    optimizer: Any,
    *,
    frozen: bool = True,
    shares: Mapping[torch.nn.Parameter, torch.Tensor] | None = None,
) -> dict[str, int]:
    """Return local name -> digest of what ``optimizer`` (Megatron's) wrote; with ``frozen`` also of untrained tensors.

    Every rank calls it: the shares of a data-parallel group are summed.

    Args:
        shares: ``StreamedStep.digests`` of the last step, if the masters are not on the device.
    """
    names: dict[torch.nn.Parameter, str] = {}
    for number, chunk in enumerate(chunks):
        prefix = f"chunk{number}." if len(chunks) > 1 else ""
        names |= {p: prefix + name for name, p in unwrap(chunk).named_parameters() if p.requires_grad}
    written = np.zeros(len(names), dtype=np.uint64)
    for distributed in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not distributed.is_stub_optimizer:
            written += _shares(distributed, list(names), shares)  # 0 for parameters of the other optimizers
    found = dict(zip(names.values(), written.tolist(), strict=True))
    if not frozen:
        return found
    tensors = named_tensors(chunks if len(chunks) > 1 else chunks[0])
    now = whole_digests({name: tensor for name, tensor in tensors.items() if name not in found})
    return {name: found[name] if name in found else now[name] for name in tensors}


def _shares(
    optimizer: Any, parameters: Sequence[torch.nn.Parameter], known: Mapping[torch.nn.Parameter, torch.Tensor] | None
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return uint64 [number of ``parameters``]: digests of one distributed optimizer's parameters, 0 for others."""
    written = np.zeros(len(parameters), dtype=np.uint64)
    # Data-parallel ranks have the same parameters in their buffers; other ranks may train more, fewer, or none.
    own = [p for buffer in optimizer.buffers for p in buffer.params]
    if not own:
        return written
    number = {p: i for i, p in enumerate(own)}
    total = torch.zeros(len(own), dtype=torch.int64, device=own[0].device)
    for p, (group, place) in optimizer.model_param_group_index_map.items():
        share = optimizer.optimizer.param_groups[group]["params"][place]
        # One at a time, so that only one cast copy exists.
        total[number[p]].copy_(share_digest(optimizer, p, share) if known is None else known[p])
    dist.all_reduce(total, group=optimizer.data_parallel_group)  # modulo 2**64
    place_of = {p: i for i, p in enumerate(parameters)}
    written[[place_of[p] for p in own]] = total.cpu().numpy().view(np.uint64)
    return written


def check_written(tensors: Mapping[str, torch.Tensor], written: Mapping[str, int]) -> None:
    """Compare tensors with ``digests_written``, by local name; with adapters, only trained tensors.

    Raises:
        WeightsDiffer: names one differing tensor, and the number of others; or tensors that one side lacks.
    """
    given = whole_digests(tensors.model.trained if isinstance(tensors, Adapted) else tensors)
    if isinstance(tensors, Adapted):
        _check_trained(given, written)
    wrong = [name for name in sorted(given.keys() | written.keys()) if given.get(name) != written.get(name)]
    if wrong:
        values = ("nothing" if (v := side.get(wrong[0])) is None else format(v, "016x") for side in (written, given))
        raise WeightsDiffer(
            "weights to be sent are not what the optimizer last wrote: {} has digest {} by the optimizer, {} in the "
            "tensor given{}; the tensors are an old copy, or parameters were not updated from the optimizer's "
            "masters".format(wrong[0], *values, f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else "")
        )


def _check_trained(trained: Mapping[str, int], written: Mapping[str, int]) -> None:
    """Compare the tensors that ``model.lora`` trains with those of the optimizer. Raises WeightsDiffer."""
    if more := sorted(written.keys() - trained.keys()):
        raise WeightsDiffer(
            f"the model under the adapters is trained too: {first_of(more, 4)}; model.lora trains A's, B's and "
            "model.lora.modules_to_save alone, so something has taken these out of the frozen ones"
        )
    if less := sorted(trained.keys() - written.keys()):
        raise WeightsDiffer(
            f"the optimizer does not train {first_of(less, 4)}, which model.lora trains; something has frozen them"
            " before the optimizer was made"
        )
