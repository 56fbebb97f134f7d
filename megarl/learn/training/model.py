"""A model on one rank, frozen or trained: Megatron's modules, their outputs for a step's sequences, and updates.

Shape legend: T positions of ``Sequences`` (a rank's share of a step, or the whole step); k outputs of the head at each:
log-prob and entropy, or a score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from megarl.core.metrics import Sums
from megarl.learn.batching import MicroBatch, MicroBatching, Sequences, micro_batches
from megarl.learn.memory.phases import Place
from megarl.learn.memory.resident_bytes import bucket_size
from megarl.learn.memory.residents import Residents
from megarl.learn.models.gpt import build_chunks, named_tensors, unwrap
from megarl.learn.models.specs import EIGHT_BIT_UNIT
from megarl.learn.models.teaching import MoreColumns
from megarl.learn.parallel.grid import megatron_grid
from megarl.learn.training.adapters import ModelAdapters
from megarl.learn.training.objectives import LossTokens, Objective
from megarl.learn.training.optimizer import Optimizer, check_written, digests_written
from megarl.learn.training.schedule import Head, run
from megarl.learn.training.streaming import StreamedStep, Watch, unwatched
from megarl.weights.architectures import architecture
from megarl.weights.checkpoint.formats import hf
from megarl.weights.reshard.adapters import MergedTensors, is_adapter
from megarl.weights.reshard.copy import HEADS, copy_weights
from megarl.weights.reshard.layouts import megatron_layout

if TYPE_CHECKING:
    from megarl.learn.models.routing_replay import Replay


def micro_batching_for(parallel: ParallelConfig, trainer: TrainerConfig) -> MicroBatching:
    """Return the micro-batch limits of a model on this grid."""
    return MicroBatching(
        dp=parallel.dp,
        cp=parallel.cp,
        multiple=parallel.tp if parallel.sequence_parallel else 1,
        chunks=parallel.pp if parallel.vpp > 1 else 1,
        max_tokens=trainer.max_tokens_per_micro_batch if trainer.packing else None,
        rows=trainer.micro_batch_size,
        max_patches=trainer.max_patches_per_micro_batch,
    )


def padded_for(model: ModelConfig, limits: MicroBatching) -> MicroBatching:
    """Return limits with which every rank's tokens make matrices that the model's layers multiply."""
    return limits if model.fp8 is None else replace(limits, multiple=limits.multiple * EIGHT_BIT_UNIT)


Grid = Callable[[], AbstractContextManager[Any]]
"""Makes a context that activates a model's process groups."""


class Model:
    """Megatron's modules of a model, and their outputs. Used directly for frozen models: reference, reward model.

    ``head`` None makes a model that scores. ``grid``: activates the model's grid if that differs from the current one.
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        model: ModelConfig,
        parallel: ParallelConfig,
        head: Head | None,
        micro_batching: MicroBatching,
        grid: Grid = nullcontext,
    ) -> None:
        from megatron.core import parallel_state

        self.hf_config = hf_config
        self.model_config = model
        self.parallel = parallel
        self.head = head
        self.micro_batching = padded_for(model, micro_batching)
        self.grid = grid
        kind: Literal["lm", "score"] = "score" if head is None else "lm"
        self.layout = megatron_layout(
            hf_config, megatron_grid(parallel), transformer_impl=model.transformer_impl, head=kind
        )
        with grid():
            self.dp_rank: int = parallel_state.get_data_parallel_rank()
            self.chunks: list[Any] = list(build_chunks(hf_config, model, parallel, kind))
            """``parallel.vpp`` modules."""
            self.adapters: ModelAdapters | None = None
            if model.lora.is_used:
                rank = dist.get_rank()
                self.adapters = ModelAdapters(hf_config, model.lora, self.chunks, self.layout, rank, kind)
        self.replays_routing = False
        """True if the routers replay ``Sequences.routing``: the engines that recorded it have this model's weights."""
        self.residents = Residents()
        """Memory that may leave the device; empty until ``train/memory.py`` manages it."""
        self.optimizer: Optimizer | None = None
        """Optimizer of a trained model; None for a frozen one."""
        self.gathered = True
        """False from an optimizer step until the next forward pass, which gathers the step's parameters."""
        self._written: dict[str, int] | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Local name -> data of the base model's parameters. Raises NotResident, like every access to a model."""
        return {name: tensor for name, tensor in self.all_tensors.items() if not is_adapter(name)}

    @property
    def all_tensors(self) -> dict[str, torch.Tensor]:
        """``tensors`` and the adapters' tensors."""
        assert self.gathered, "finish_gather() comes first"
        self.residents.require("parameters")
        return named_tensors(self.chunks if len(self.chunks) > 1 else self.chunks[0])

    def proven_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return ``tensors`` with adapters merged in, to send or to write to files. Every rank calls it. Raises
        WeightsDiffer if the optimizer wrote other values."""
        adapters = self.adapters
        tensors = self.tensors if adapters is None else MergedTensors(adapters.adapted(self.all_tensors))
        if self.optimizer is not None:
            check_written(tensors, self.written())
        return tensors

    def load_hf(self, path: Path, *, score: Literal["stored", "zeros"] = "stored") -> None:
        """Load an HF checkpoint; ``score``: source of a score head (``checkpoint.hf.load_into``)."""
        hf.load_into(path, self.layout, dist.get_rank(), self.tensors, score=score)
        self._model_changed()

    def _model_changed(self) -> None:
        if self.adapters is not None:
            self.adapters.keep_originals(self.tensors)
        self.weights_changed()

    def copy_from(self, source: Model, *, bucket_bytes: int) -> None:
        """Copy another model's weights, slice by slice from its grid to this one's, and verify them. A head that only
        one model has is not changed. Every rank calls it.

        Between models with adapters only base tensors are copied: both have the same base model, also after a
        resume."""
        bare = self.adapters is not None and source.adapters is not None
        copy_weights(
            source.layout,
            source.tensors if bare else source.proven_tensors(),
            self.layout,
            self.tensors,
            dist.get_rank(),
            bucket_bytes=bucket_bytes,
            left_out=HEADS,
        )
        self._model_changed()

    def weights_changed(self) -> None:
        """Copy ``tensors`` to the optimizer's float32 masters; call it after writing into ``tensors``."""
        if self.optimizer is None:
            return
        self.residents.require("parameters", "optimizer")
        with self.grid():
            self.optimizer.inner.reload_model_params()

    def written(self) -> dict[str, int]:
        """Return local name -> digest of what the optimizer last wrote; with adapters, of trained tensors only. Every
        rank calls it.

        While the optimizer is offloaded, return the digests from ``keep_written``.
        """
        if self._written is not None:
            return self._written
        assert self.optimizer is not None, "nothing writes a frozen model"
        self.residents.require("parameters", "optimizer")
        return digests_written(self.chunks, self.optimizer.inner, frozen=self.adapters is None)

    def keep_written(self, streamed: Mapping[torch.nn.Parameter, torch.Tensor] | None = None) -> None:
        """Compute ``written`` before the optimizer leaves the device. Every rank calls it.

        Args:
            streamed: ``StreamedStep.digests`` of a step whose masters have left the device again.
        """
        if streamed is None:
            self._written = self.written()
            return
        assert self.optimizer is not None, "nothing writes a frozen model"
        frozen = self.adapters is None
        self._written = digests_written(self.chunks, self.optimizer.inner, frozen=frozen, shares=streamed)

    def forget_written(self) -> None:
        """Make ``written`` read the optimizer again if all memory is on the device; call it after memory has come
        back."""
        if all(resident.place is Place.DEVICE for resident in self.residents):
            self._written = None

    def micro_batches(self, sequences: Sequences, units: Sequence[Sequence[int]] | None = None) -> Sequence[MicroBatch]:
        """Make this rank's micro-batches of the sequences (or of ``units`` of them) for the model's grid."""
        return micro_batches(sequences, self.micro_batching, self.dp_rank, units)

    @torch.no_grad()
    def outputs(
        self,
        sequences: Sequences,
        updates: Sequence[Sequence[MicroBatch]],
        *,
        temperature: float | None = None,
        columns: MoreColumns | None = None,
        more: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return float32 [T] for the held sequences: log-prob of each masked next token (or score of each position),
        else 0.

        Args:
            updates: Results of ``micro_batches``, one list for each update; together, over all ranks, they are the
                requested sequences. If they are the micro-batches of the next updates, the first update's ratios are
                exactly 1.
            temperature: None uses the head's temperature.
            columns: Adds columns to the head's outputs.
            more: [T, ``columns.width``]; on one rank for each position it receives the further columns.
        """
        self.residents.require("parameters")
        head = self.head
        if head is not None and temperature is not None:
            head = replace(head, temperature=temperature)
        for chunk in self.chunks:
            chunk.eval()
        result = torch.zeros(len(sequences.tokens))

        def keep(batch: MicroBatch, outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
            if has_outputs:
                _write(result, batch, outputs[..., 0])
                if more is not None:
                    _write(more, batch, outputs[..., 2:])
            return outputs.sum(), None  # the schedule needs a loss

        with self.grid():
            has_outputs = _has_outputs()
            for batches in updates:
                replay = _replay(self, sequences, batches)
                run(self.chunks, sequences, batches, head, keep, forward_only=True, replay=replay, columns=columns)
        # For each position one rank has the output and the others have 0, so the sum is exact.
        sequences.add_up(result)
        return result


def token_ids(model: Model) -> range | None:
    """Return the token ids of this rank's rows of the output weight, padding included; None on ranks without one."""
    for chunk in model.chunks:
        layer = getattr(unwrap(chunk), "output_layer", None)
        if layer is not None:
            rows: int = layer.output_size_per_partition
            return range(layer.tp_group.rank() * rows, (layer.tp_group.rank() + 1) * rows)
    return None


class WithoutAdapters:
    """A model without its adapters, computed by the same modules: the reference of an actor with adapters."""

    def __init__(self, adapted: Model) -> None:
        self._adapted = adapted
        self.micro_batching, self.dp_rank = adapted.micro_batching, adapted.dp_rank
        self.micro_batches = adapted.micro_batches

    def outputs(self, sequences: Sequences, updates: Sequence[Sequence[MicroBatch]]) -> torch.Tensor:
        """Return ``Model.outputs`` without adapters; the routers choose experts themselves."""
        adapted = self._adapted
        assert adapted.adapters is not None
        replays, adapted.replays_routing = adapted.replays_routing, False
        try:
            with adapted.adapters.left_out(adapted.chunks, adapted.tensors):
                return adapted.outputs(sequences, updates)
        finally:
            adapted.replays_routing = replays


def _replay(
    model: Model, sequences: Sequences, batches: Sequence[MicroBatch], *, balanced: bool = False
) -> Replay | None:
    """Return the expert ids of ``batches``; None if the routers choose themselves."""
    from megarl.learn.models.routing_replay import Replay

    if sequences.routing is None or not model.replays_routing:
        return None
    return Replay(model.chunks, sequences.routing, batches, balanced=balanced)


def _has_outputs() -> bool:
    """True on one rank of each data-parallel replica; all ranks of a replica's last stage have equal outputs."""
    from megatron.core import parallel_state

    tp, cp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank()
    return tp == 0 and cp == 0


def _write(result: torch.Tensor, batch: MicroBatch, outputs: torch.Tensor) -> None:
    """Write outputs [b, S, ...] of each position in a micro-batch to its position in the rank's sequences."""
    real = batch.index >= 0
    result[batch.index[real]] = outputs.detach().to(result.dtype).cpu()[real]


class TrainedModel:
    """A model in training: the actor, the critic, a reward model."""

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        model: ModelConfig,
        parallel: ParallelConfig,
        head: Head | None,
        micro_batching: MicroBatching,
        optimizer: OptimizerConfig,
        grid: Grid = nullcontext,
    ) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        from megarl.learn.models.experts import routers

        self.model = Model(hf_config, model, parallel, head, micro_batching, grid)
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=model.grad_dtype == "float32",
            use_distributed_optimizer=True,  # no check_for_nan_in_grad: it would end one rank while others wait
            overlap_grad_reduce=parallel.overlap_grad_reduce,
            overlap_param_gather=parallel.overlap_param_gather,
            bucket_size=bucket_size(parallel),
        )
        config: Any = unwrap(self.model.chunks[0]).config
        with grid():
            chunks = [
                DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
                for number, chunk in enumerate(self.model.chunks)
            ]
            self.optimizer = Optimizer(chunks, optimizer, model.dtype, model.moments_dtype)
        self.model.chunks, self.model.optimizer = chunks, self.optimizer
        config.grad_scale_func = self.optimizer.inner.scale_loss
        if parallel.overlap_grad_reduce:  # else reduced once, after the last micro-batch
            waits = [chunk.no_sync for chunk in chunks]
            config.no_sync_func = waits if len(waits) > 1 else waits[0]
        self._balanced = model.router.is_used and bool(architecture(hf_config).sizes(hf_config).moe_layers)
        self._routers = routers(chunks)

    def backward(
        self,
        sequences: Sequences,
        batches: Sequence[MicroBatch],
        objective: Objective,
        logp: torch.Tensor | None = None,
    ) -> Sums:
        """Compute gradients of the objective over the ``batches`` of all data-parallel ranks; each part is divided by
        its global count.

        Args:
            logp: float32 [T]; 0 at the positions of ``batches``, where it receives the values of ``outputs``.

        Returns:
            Metric sums over this rank's sequences on one rank of its replica, {} elsewhere; ``<name>/loss`` is their
            mean.
        """
        self.model.residents.require("parameters", "gradients")
        with self.model.grid():
            if logp is None:
                return self._backward(sequences, batches, objective, None)
            found = torch.zeros_like(logp)
            sums = self._backward(sequences, batches, objective, found)
        sequences.add_up(found)  # exact, as in ``outputs``
        logp += found
        return sums

    def _backward(
        self, sequences: Sequences, batches: Sequence[MicroBatch], objective: Objective, logp: torch.Tensor | None
    ) -> Sums:
        from megatron.core import parallel_state

        from megarl.learn.models.experts import UpdateSize, measured

        for chunk in self.model.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.inner.zero_grad()
        counts = []
        for batch in batches:
            size = torch.tensor([len(batch.numbers), torch.count_nonzero(batch.index >= 0)], dtype=torch.float64)
            counts.append(torch.cat([size, objective.count(LossTokens.of(batch, sequences)).double().reshape(-1)]))
        count = torch.stack(counts).sum(0)
        dist.all_reduce(count, group=parallel_state.get_data_parallel_group())
        scale = 1.0 / count[2:].clamp(min=1.0)
        for router in self._routers:
            router.begin(UpdateSize(int(count[0]), int(count[1]), most=int(max(each[0] for each in counts))))

        has_outputs = _has_outputs()

        def loss_function(batch: MicroBatch, outputs: torch.Tensor) -> tuple[torch.Tensor, Any]:
            if logp is not None and has_outputs:
                _write(logp, batch, outputs[..., 0])
            kept = LossTokens.of(batch, sequences)
            loss = objective.loss(kept, outputs[kept.place.to(outputs.device)])
            total = (loss.totals * scale.to(loss.total)).sum()
            return total, (total.detach(), loss.metrics)

        replay = _replay(self.model, sequences, batches, balanced=self._balanced)
        schedule = partial(run, balanced=self._balanced, replay=replay, columns=objective.columns)
        collected = schedule(self.model.chunks, sequences, batches, self.model.head, loss_function, forward_only=False)
        self.model.gathered = True
        of_routers = measured(self.model.chunks, objective.name) if self._balanced else {}
        if replay is not None:
            of_routers = {**of_routers, **replay.measured(objective.name)}
        if not collected or not has_outputs:
            return {}
        whole = sum(float(total) for total, _ in collected)
        sums: dict[str, tuple[float, float]] = {f"{objective.name}/loss": (whole, 1.0 / self.model.parallel.dp)}
        for _, metrics in collected:
            for name, (total, number) in metrics.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + float(total), before[1] + float(number))
        return {**sums, **of_routers}

    def gradient_norm(self) -> float:
        """Return the norm of the gradients in the buffers, over the model's whole grid, before clipping. Does not
        change the input of a step."""
        with self.model.grid():
            return self.optimizer.gradient_norm()

    def step(self, lr: float, watch: Watch = unwatched) -> float:
        """Make one optimizer step on the gradients in the buffers, unchecked (``train/update/learner.py`` has checked
        them); return their norm.

        With ``parallel.overlap_param_gather`` the new parameters are complete after the next ``backward``, or after
        ``finish_gather``.

        If the optimizer's state is away and moves in buckets, it is on the device bucket by bucket. Raises OffloadError
        on every rank if a bucket of one rank could not be moved: its weights are then unusable.

        Args:
            watch: Looks at a bucket before and after its step.
        """
        from megarl.learn.models.experts import move_biases

        residents = self.model.residents
        residents.require("parameters", "gradients", *(() if residents.streams else ("optimizer",)))
        streamed = StreamedStep(residents, watch) if residents.streams else None
        with self.model.grid(), nullcontext() if streamed is None else streamed.within(self.optimizer.inner):
            norm = self.optimizer.step(lr)
        if streamed is not None:
            streamed.check()
            self.model.keep_written(streamed.digests)
        move_biases(self._routers)
        self.model.gathered = not self.model.parallel.overlap_param_gather
        return norm

    def finish_gather(self) -> None:
        """Wait for the parameters of the last ``step``. Every rank calls it after updates, before anything except
        ``backward``."""
        if self.model.gathered:
            return
        with self.model.grid():
            for chunk in self.model.chunks:
                chunk.start_param_sync(force_sync=True)
        self.model.gathered = True
