"""A small model that learns, made of Megatron's own parts: what grids, heads and copies are tested with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.weights.architectures import Head
from tests.parallel.models import VOCAB

ROWS, LENGTH = 8, 16


class Trainee:
    """One rank's part of a model with DDP and the distributed optimizer; everything happens on the grid that is in
    place."""

    def __init__(
        self, path: Path, parallel: ParallelConfig, head: Head, dtype: str = "float32", score: Any = "stored"
    ) -> None:
        import torch.distributed as dist
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from megarl.learn.models.gpt import build_chunks, unwrap
        from megarl.learn.parallel.grid import megatron_grid
        from megarl.weights.checkpoint.formats import hf
        from megarl.weights.reshard.layouts import hf_layout, megatron_layout

        self.path, self.parallel, self.head, self.rank = path, parallel, head, dist.get_rank()
        hf_config = hf.read_hf_config(path)
        (stage,) = build_chunks(hf_config, ModelConfig(path=str(path), dtype=dtype), parallel, head)  # type: ignore[arg-type]
        self.layout = megatron_layout(hf_config, megatron_grid(parallel), head=head)
        self.whole = hf_layout(hf_config, head=head)
        config: Any = unwrap(stage).config
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.stage = DistributedDataParallel(config, ddp, stage)
        bf16 = dtype == "bfloat16"
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-3, weight_decay=0.1, clip_grad=0.5, use_distributed_optimizer=True, bf16=bf16,
            params_dtype=getattr(torch, dtype),
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(settings, [self.stage])
        config.grad_scale_func = self.optimizer.scale_loss
        hf.load_into(path, self.layout, self.rank, self.tensors, score=score)
        self.optimizer.reload_model_params()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Asked for again: DDP moves parameters into its buffer."""
        from megarl.learn.models.gpt import named_tensors

        return named_tensors(self.stage)

    def step(self, seed: int) -> tuple[float, dict[int, torch.Tensor]]:
        """One update on rows made from ``seed``: (norm of the gradient; row -> the model's output on the last
        stage)."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from megarl.learn.models.gpt import unwrap
        from megarl.learn.models.head import Request, requesting
        from megarl.weights.checkpoint.training.state import inner_optimizers

        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(2, VOCAB, (ROWS, LENGTH), generator=generator)
        weights = torch.randn(ROWS, LENGTH, generator=generator) / tokens.numel()
        mine = torch.arange(ROWS)[parallel_state.get_data_parallel_rank() :: self.parallel.dp]

        def forward(iterator: Any, model: Any) -> Any:
            rows = next(iterator)
            positions = torch.arange(LENGTH).expand_as(tokens[rows])
            inner = unwrap(model)
            if self.head == "lm":
                with requesting(inner, Request.of(tokens[rows].roll(-1, 1), tokens.device, VOCAB)):
                    output = model(tokens[rows], positions, None)
            else:
                output = model(tokens[rows], positions, None)

            def loss(answer: torch.Tensor) -> Any:
                total = (answer[..., 0] * weights[rows]).sum()
                return total, torch.zeros((), dtype=torch.int), (rows, answer.detach())

            return output, loss

        self.stage.train()
        self.stage.zero_grad_buffer()
        self.optimizer.zero_grad()
        collected = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(mine.split(2)),
            model=self.stage,
            num_microbatches=len(mine) // 2,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        for inner in inner_optimizers(self.optimizer):
            for group in inner.param_groups:  # Megatron leaves both to its scheduler
                group |= {"lr": 1e-3, "weight_decay": 0.1 * group["wd_mult"]}
        _, norm, _ = self.optimizer.step()
        return float(norm), {int(row): out for rows, answer in collected for row, out in zip(rows, answer, strict=True)}

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def export(self, target: Path) -> None:
        """Its weights as an HF checkpoint; every rank calls it."""
        from megarl.weights.checkpoint.formats import hf
        from megarl.weights.reshard.plan import build_plan

        hf.export_hf(build_plan(self.layout, self.whole), self.rank, self.tensors, self.path, target)
