"""The trained model of one rank: Megatron DDP, distributed optimizer, log-probs and updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megarl.algorithms import Algorithm, LossInput
from megarl.batching import MicroBatch, Rows, micro_batches
from megarl.checkpoint.state import inner_optimizers
from megarl.config.schema import AlgorithmConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megarl.metrics import Sums
from megarl.models.gpt import build_stage, named_tensors, unwrap
from megarl.training.schedule import Head, run


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Linear warm-up over ``warmup_steps``, then linear decay to ``min_lr`` at ``decay_steps``. ``step`` counts from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.decay_steps is None or config.min_lr is None:
        return config.lr
    span = max(1, config.decay_steps - config.warmup_steps)
    fraction = min(1.0, (step - config.warmup_steps) / span)
    return config.lr + (config.min_lr - config.lr) * fraction


class FrozenModel:
    """A model that only gives log-probs: the reference, and the base of the actor."""

    def __init__(self, hf_config: Mapping[str, Any], model: ModelConfig, parallel: ParallelConfig, head: Head) -> None:
        self.hf_config = hf_config
        self.head = head
        self.stage: Any = build_stage(hf_config, model, parallel)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Local parameter name -> data."""
        return named_tensors(self.stage)

    @torch.no_grad()
    def logprob(
        self, rows: Rows, micro_batch_size: int, temperature: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(log-prob, entropy) float32 [N, S] of the masked next tokens; None on ranks without the last stage.

        ``temperature`` None takes the head's.
        """
        head = self.head if temperature is None else replace(self.head, temperature=temperature)
        self.stage.eval()
        parts = run(
            self.stage,
            micro_batches(rows, micro_batch_size),
            head,
            lambda _, logp, entropy: (logp.sum(), (logp, entropy)),
            forward_only=True,
        )
        if not parts:
            return None
        return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])


class Actor(FrozenModel):
    """A ``FrozenModel`` that learns."""

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        model: ModelConfig,
        parallel: ParallelConfig,
        head: Head,
        optimizer: OptimizerConfig,
    ) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        super().__init__(hf_config, model, parallel, head)
        self.model_config = model
        config: Any = unwrap(self.stage).config
        self.stage = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=True, check_for_nan_in_grad=True
            ),
            self.stage,
        )
        self.optimizer = self._build_optimizer(optimizer)
        self.set_hyperparameters(optimizer)
        config.grad_scale_func = self.optimizer.scale_loss

    def _build_optimizer(self, config: OptimizerConfig) -> Any:
        from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
        from megatron.core.optimizer import get_megatron_optimizer

        return get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.lr if config.min_lr is None else config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                clip_grad=config.clip_grad,
                bf16=self.model_config.dtype == "bfloat16",
                params_dtype=getattr(torch, self.model_config.dtype),
                use_distributed_optimizer=True,
            ),
            [self.stage],
        )

    def restart_optimizer(self, config: OptimizerConfig) -> None:
        """Forget all moments and steps, and go on with ``config``: a new phase of training begins."""
        for inner in inner_optimizers(self.optimizer):
            for group in inner.param_groups:
                group["step"] = 0
            for moments in inner.state.values():
                moments["exp_avg"].zero_()
                moments["exp_avg_sq"].zero_()
        self.set_hyperparameters(config)

    def set_hyperparameters(self, config: OptimizerConfig) -> None:
        """Go on with ``config`` and the moments so far.

        Needed after a checkpoint is loaded, which brings the values that it was made with, and at the start: Megatron
        leaves it to its own scheduler that norms and biases have ``wd_mult`` 0.
        """
        for inner in inner_optimizers(self.optimizer):
            for group in inner.param_groups:
                group["weight_decay"] = config.weight_decay * group["wd_mult"]
                group["betas"] = (config.beta1, config.beta2)
                group["eps"] = config.eps
        for outer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            outer.config.clip_grad = config.clip_grad
        self.optimizer.config.clip_grad = config.clip_grad

    def weights_changed(self) -> None:
        """Call after writing into ``tensors``: the optimizer's float32 masters are taken from them again."""
        self.optimizer.reload_model_params()

    def backward(
        self,
        rows: Rows,
        micro_batch_size: int,
        algorithm: Algorithm,
        settings: AlgorithmConfig,
    ) -> Sums:
        """Gradients of the loss over ``rows`` of all data-parallel ranks, divided by the global count.

        Returns:
            Metric sums over this rank's rows on last-stage ranks, {} elsewhere; ``actor/loss`` is their mean.
        """
        from megatron.core import parallel_state

        self.stage.train()
        self.stage.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = micro_batches(rows, micro_batch_size)
        count = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            mask, row = _flat(batch)
            count += algorithm.count(mask, row, len(batch), settings).double()
        dist.all_reduce(count, group=parallel_state.get_data_parallel_group())
        scale = 1.0 / max(float(count), 1.0)

        def loss_function(batch: MicroBatch, logp: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, Any]:
            mask, row = _flat(batch)
            keep = batch.mask

            def picked(values: torch.Tensor | None) -> torch.Tensor | None:
                return None if values is None else values[keep]

            loss = algorithm.loss(
                LossInput(
                    logp=logp[keep],
                    entropy=entropy[keep],
                    old_logp=picked(batch.old_logp),
                    ref_logp=picked(batch.ref_logp),
                    advantages=picked(batch.advantages),
                    mask=mask,
                    row=row,
                    num_rows=len(batch),
                    engine_logp=picked(batch.engine_logp),
                ),
                settings,
            )
            share = algorithm.count(mask, row, len(batch), settings)
            return loss.total * scale, {"actor/loss": (loss.total.detach(), share)} | loss.metrics

        collected = run(self.stage, batches, self.head, loss_function, forward_only=False)
        sums: dict[str, tuple[float, float]] = {}
        for metrics in collected:
            for name, (total, number) in metrics.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + float(total), before[1] + float(number))
        return sums

    def step(self, lr: float) -> dict[str, float]:
        """One optimizer step on the gradients in the buffers (``backward`` has raised already if one is not finite)."""
        for inner in inner_optimizers(self.optimizer):
            for group in inner.param_groups:
                group["lr"] = lr * group.get("lr_mult", 1.0)
        success, grad_norm, _ = self.optimizer.step()
        assert success, "the distributed optimizer skipped a step without a loss scaler"
        return {"actor/grad_norm": float(grad_norm), "actor/lr": lr}


def _flat(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask and row number of the tokens in the loss, as the algorithms take them: flat over kept tokens."""
    row = torch.arange(len(batch), device=batch.mask.device)[:, None].expand_as(batch.mask)[batch.mask]
    return torch.ones_like(row, dtype=torch.bool), row
