"""Faults of a resumed run."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace as change
from pathlib import Path
from typing import Any

from megarl.exam.fault import Fault, wrap


def _on_resume(act: Callable[[Any, Any, Any], Any]) -> None:
    """Call ``act`` with the checkpointer, the models and the state of a resumed run; it returns the state."""
    from megarl.train.loop.checkpoints import Checkpointer

    def around(original: Any, checkpointer: Any, models: Any) -> Any:
        state = original(checkpointer, models)
        return act(checkpointer, models, state) if state.step and not state.warming_up else state

    wrap(Checkpointer.resume, around)


def _resumed_step() -> Callable[[], int]:
    """Return a function that returns the step of the resume; 0 in a first start."""
    steps = [0]

    def act(checkpointer: Any, models: Any, state: Any) -> Any:
        steps[0] = state.step
        return state

    _on_resume(act)
    return lambda: steps[0]


def _lr_restarted() -> None:
    from megarl.learn.training import optimizer

    begun = _resumed_step()
    wrap(optimizer.learning_rate, lambda original, config, step: original(config, max(0, step - begun())))


def _lr_counted_twice() -> None:
    from megarl.learn.training import optimizer

    begun = _resumed_step()
    wrap(optimizer.learning_rate, lambda original, config, step: original(config, step + begun()))


def _moments_lost() -> None:
    def act(checkpointer: Any, models: Any, state: Any) -> Any:
        models.actor.optimizer.restart(models.config.trainer.optimizer)
        return state

    _on_resume(act)


def _moments_swapped() -> None:
    from megarl.weights.checkpoint.training.state import inner_optimizers

    def act(checkpointer: Any, models: Any, state: Any) -> Any:
        for inner in inner_optimizers(models.actor.optimizer.inner):
            by_size: dict[int, list[Any]] = {}
            for moments in inner.state.values():
                by_size.setdefault(moments["exp_avg"].numel(), []).append(moments)
            for equal in by_size.values():
                kept = [moments["exp_avg"].clone() for moments in equal]
                for moments, other in zip(equal, kept[1:] + kept[:1], strict=True):
                    moments["exp_avg"].copy_(other)
        return state

    _on_resume(act)


def _bias_correction_lost() -> None:
    from megarl.weights.checkpoint.training.state import inner_optimizers

    def act(checkpointer: Any, models: Any, state: Any) -> Any:
        for inner in inner_optimizers(models.actor.optimizer.inner):
            for group in inner.param_groups:
                group["step"] = 1
        return state

    _on_resume(act)


def _of_tasks(around: Callable[..., Any]) -> None:
    from megarl.buffer.order.group_choice import TaskChoice

    wrap(TaskChoice.tasks, around)


def _data_restarted() -> None:
    begun = _resumed_step()
    _of_tasks(lambda original, choice, step, *args: original(choice, step - begun(), *args))


def _data_skipped() -> None:
    begun = _resumed_step()
    _of_tasks(lambda original, choice, step, *args: original(choice, step + (begun() > 0), *args))


def _data_of_other_seed() -> None:
    begun = _resumed_step()
    _of_tasks(lambda original, choice, step, seed, *args: original(choice, step, seed + (begun() > 0), *args))


def _rows_changed(run_dir: Path) -> None:
    import pyarrow.parquet as pq

    path = run_dir / "data" / "train.parquet"
    if path.is_file():
        table = pq.read_table(path)
        pq.write_table(table.take(list(range(table.num_rows))[::-1]), path)


def _seeds_repeated() -> None:
    from megarl.train.rollout.rollouts import GroupRequests

    begun = _resumed_step()

    def around(
        original: Any, requests: Any, rollout_id: str, state: Any, step: int, *args: Any, asked_at: Any = None
    ) -> Any:
        done = step if asked_at is None else asked_at
        return original(requests, rollout_id, state, step - begun(), *args, asked_at=done)

    wrap(GroupRequests.request, around)


def _generators_reseeded() -> None:
    import numpy as np
    import torch

    from megarl.train.loop.checkpoints import Checkpointer

    def around(original: Any, checkpointer: Any, models: Any) -> None:
        original(checkpointer, models)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(models.config.trainer.seed)

    wrap(Checkpointer.put_random_states, around)


def _step_counted_twice() -> None:
    _on_resume(lambda checkpointer, models, state: change(state, step=state.step + 1))


def _reference_of_actor() -> None:
    from megarl.train.inference.models import Models

    def around(original: Any, models: Any, step: int, *args: Any) -> None:
        original(models, step, *args)
        if step:
            models.refresh_reference()

    wrap(Models.build, around)


def _kl_coef_restarted() -> None:
    _on_resume(lambda checkpointer, models, state: change(state, kl_coef=None))


def _average_lost() -> None:
    from megarl.train.inference.models import Models

    wrap(Models._begin, lambda original, models, role, checkpoint: original(models, role, None))


def _actor_of_average() -> None:
    from megarl.train.inference.models import Models

    def around(original: Any, models: Any, role: str, checkpoint: Any) -> None:
        original(models, role, checkpoint)
        if checkpoint is not None and (checkpoint / role).is_dir():
            models.actor.model.copy_from(models.more[role], bucket_bytes=models.config.sync.bucket_bytes)

    wrap(Models._begin, around)


def _actor_of_start() -> None:
    def act(checkpointer: Any, models: Any, state: Any) -> Any:
        models.load_beginning()
        return state

    _on_resume(act)


def _best_forgotten() -> None:
    from megarl.core import metrics

    begun = _resumed_step()
    wrap(
        metrics.best_step,
        lambda original, run_dir, name, steps: original(run_dir, name, {step for step in steps if step > begun()}),
    )


def _half_checkpoint(run_dir: Path) -> None:
    files = [path for path in run_dir.glob("checkpoints/global_step_*/actor/*.distcp") if path.is_file()]
    if files:
        last = max(files, key=lambda path: (int(path.parts[-3].rpartition("_")[2]), path.stat().st_size))
        os.truncate(last, last.stat().st_size // 2)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "lr-restarted",
        "verl-project/verl#7953",
        "The learning rate's schedule begins again after a resume.",
        alarm="learning-rate",
        job="resume",
        install=_lr_restarted,
        settings=("trainer.optimizer.warmup_steps=6",),
        begins=3,
    ),
    Fault(
        "lr-counted-twice",
        "THUDM/slime#1547",
        "The learning rate's schedule counts the steps before a resume twice.",
        alarm="learning-rate",
        job="resume",
        install=_lr_counted_twice,
        settings=("trainer.optimizer.warmup_steps=8",),
        begins=3,
    ),
    Fault(
        "moments-lost",
        "areal-project/AReaL#1468",
        "Adam's moments are zero after a resume.",
        alarm="moments-lost",
        job="resume",
        install=_moments_lost,
        begins=3,
    ),
    Fault(
        "moments-swapped",
        "databricks/flashoptim#3",
        "Adam's moments belong to other parameters after a resume.",
        alarm="moments-lost",
        job="resume",
        install=_moments_swapped,
        begins=3,
    ),
    Fault(
        "bias-correction-lost",
        "NVIDIA/Megatron-LM#5976",
        "Adam's step count differs from the updates made, so its bias correction is wrong.",
        alarm="optimizer-steps",
        job="resume",
        install=_bias_correction_lost,
        begins=3,
    ),
    Fault(
        "data-restarted",
        "allenai/open-instruct#1523",
        "The order of the data begins again after a resume.",
        alarm="data-order",
        job="resume",
        install=_data_restarted,
        begins=3,
    ),
    Fault(
        "data-skipped",
        "NVIDIA-NeMo/RL#3599",
        "The cursor of the data runs ahead of what was trained, so a resume skips tasks.",
        alarm="data-order",
        job="resume",
        install=_data_skipped,
        begins=3,
    ),
    Fault(
        "data-of-other-seed",
        "verl-project/verl#7816",
        "The subset of the data is drawn from an unseeded generator, so a resume goes on with other data.",
        alarm="data-order",
        job="resume",
        install=_data_of_other_seed,
        begins=3,
    ),
    Fault(
        "rows-changed",
        "NVIDIA-NeMo/RL#2519",
        "The rows behind the data's cursor are others after a resume.",
        alarm="rows",
        job="resume",
        prepare=_rows_changed,
        begins=3,
    ),
    Fault(
        "seeds-repeated",
        "NVIDIA-NeMo/RL#226",
        "Engines sample with the seeds of the run's start again.",
        alarm="repeated-seeds",
        job="resume",
        install=_seeds_repeated,
        begins=3,
    ),
    Fault(
        "generators-reseeded",
        "modelscope/ms-swift#9935",
        "The restored random generators are seeded again after a resume.",
        alarm="random-states",
        job="resume",
        install=_generators_reseeded,
        settings=("model.lora.rank=4", "model.lora.alpha=8", "model.lora.dropout=0.1"),
        begins=3,
    ),
    Fault(
        "step-counted-twice",
        "verl-project/verl#7933",
        "The step counter is one ahead after a resume.",
        alarm="step-gap",
        job="resume",
        install=_step_counted_twice,
        begins=4,
    ),
    Fault(
        "reference-of-actor",
        "NVIDIA-NeMo/RL#3722",
        "The reference is made from the resumed actor, so the KL penalty begins at 0 again.",
        alarm="reference",
        job="resume",
        install=_reference_of_actor,
        begins=3,
    ),
    Fault(
        "kl-coef-restarted",
        "verl-project/verl#2653",
        "The adapted KL coefficient begins again from the settings.",
        alarm="kl-coef",
        job="resume",
        install=_kl_coef_restarted,
        settings=("algorithm.kl.target=0.01", "algorithm.kl.horizon=100"),
        begins=3,
    ),
    Fault(
        "average-lost",
        "m2lines/Samudra#313",
        "The moving average begins again from the actor after a resume.",
        alarm="average",
        job="resume",
        install=_average_lost,
        settings=("evaluation.average=0.9",),
        begins=3,
    ),
    Fault(
        "actor-of-average",
        "atomistic-machine-learning/schnetpack#785",
        "The actor goes on from the moving average's weights after a resume.",
        alarm="resumed-weights",
        job="resume",
        install=_actor_of_average,
        settings=("evaluation.average=0.9",),
        begins=3,
    ),
    Fault(
        "actor-of-start",
        "huggingface/lerobot#4560",
        "The actor has its first weights after a resume, while optimizer and step count go on.",
        alarm="resumed-weights",
        job="resume",
        install=_actor_of_start,
        begins=3,
    ),
    Fault(
        "best-forgotten",
        "OpenRLHF/OpenRLHF#1333",
        "The best metric begins again after a resume, so a worse checkpoint replaces the best one.",
        alarm="best",
        job="resume",
        install=_best_forgotten,
        settings=(
            "trainer.checkpoint_interval=1",
            "trainer.async_checkpoint=false",
            "trainer.keep_best=val/accuracy",
            "trainer.keep_checkpoints=1",
            "trainer.eval_interval=2",
        ),
        within=2,
        begins=3,
    ),
    Fault(
        "half-checkpoint",
        "RLinf/RLinf#1469",
        "A checkpoint whose writing was cut off is resumed from.",
        alarm="checkpoint",
        job="resume",
        prepare=_half_checkpoint,
        begins=3,
    ),
)
