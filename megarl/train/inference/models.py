"""The models of a trainer rank: the actor, and optionally reference, critic, reward model and
teachers.

All share the job's ranks, each on its grid (``<role>.parallel``; by default the actor's).

The actor of a job that trains a reward model is first a language model, then the same model with a score head. A
checkpoint of step 0 has the weights after the warm start, later ones have the reward model. Without a warm start the
job may continue a sequence-classification checkpoint.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from megarl.config import Config
from megarl.config.derived import path_of, sections_of, teacher_role
from megarl.config.lora import LoraConfig
from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.core.errors import NonRetryableError
from megarl.core.schema import Outcome, name_of
from megarl.learn.algorithms import Algorithm
from megarl.learn.batching import MicroBatching
from megarl.learn.batching.sequences import NO_IDS, Sequences
from megarl.learn.memory.phases import Phase
from megarl.learn.parallel import process_groups
from megarl.learn.training.adapters import share_base
from megarl.learn.training.model import Grid, Model, TrainedModel, WithoutAdapters, micro_batching_for
from megarl.learn.training.optimizer import check_written
from megarl.learn.training.role_adapters import role_lora, shares_base
from megarl.learn.training.schedule import Head
from megarl.train.batch.images import ImageInputs
from megarl.train.batch.samples import WITHOUT_REPLAY
from megarl.weights.architectures import architecture
from megarl.weights.checkpoint.formats import hf
from megarl.weights.checkpoint.formats.hf_source import has_score
from megarl.weights.checkpoint.formats.score_files import ScoreFiles
from megarl.weights.checkpoint.training import state
from megarl.weights.checkpoint.training.disk_space import writing
from megarl.weights.reshard.layouts import hf_layout
from megarl.weights.reshard.plan import build_plan

REFERENCE = "reference"
"""Folder in the run directory for the model after the warm start, as an HF checkpoint."""


class ActorKind(NamedTuple):
    """Kind of the model in training."""

    scores: bool
    """True if it returns scores, not log-probs."""
    adapted: bool
    """True if it has adapters and its base model is frozen."""


class Models:
    """Actor, reference, critic, reward model and teachers; a model that algorithm and settings do not need is None.

    Call ``make_actor`` first, and ``build`` after the warm start and after each rollback.
    """

    actor: TrainedModel

    def __init__(self, config: Config, algorithm: Algorithm) -> None:
        self.config = config
        self._algorithm = algorithm
        self.hf_config = hf.read_hf_config(Path(config.model.path))
        temperature = config.rollout.temperature if not algorithm.offline else 1.0
        float32 = config.model.head_dtype == "float32"
        self.head = Head(int(self.hf_config["vocab_size"]), temperature, config.trainer.logits_bytes, float32)
        """Head of the actor after the warm start."""
        self.images = ImageInputs.of(config, self.hf_config)
        """None for a text model."""
        self.reference: Model | WithoutAdapters | None = None
        """For an actor with adapters: the actor without them."""
        self.critic: TrainedModel | None = None
        self.reward_model: Model | None = None
        self.teachers: dict[str, Model] = {}
        """Name -> teacher with a path; empty if the algorithm needs no teacher."""
        self.more: dict[str, Model] = {}
        """Role -> model added by a part of the job. Their memory stays on the device."""
        self._grids: dict[ParallelConfig, process_groups.Grid] = {}

    def make_actor(self, checkpoint: Path | None) -> None:
        """Build the actor for ``checkpoint`` (None: the run's start) unless one of its kind exists; load no weights."""
        kind = self._kind(in_warm_start(self.config, checkpoint))
        if not hasattr(self, "actor") or kind != self._made:
            self.__dict__.pop("actor", None)  # free its memory before the next one is built
            self.actor = self._actor(kind)

    def _kind(self, warming_up: bool) -> ActorKind:
        """Return the actor's kind: a bare language model in the warm start, then the kind that the job trains."""
        if warming_up:
            return ActorKind(scores=False, adapted=False)
        return ActorKind(scores=trains_scores(self._algorithm), adapted=self.config.model.lora.is_used)

    def check_routing(self, sequences: Sequences, rows: Sequence[Outcome]) -> None:
        """Check that the expert ids of held sequences fit the actor's layers and experts. Raises NonRetryableError.

        Args:
            rows: Trajectory of each sampled sequence.
        """
        sizes = architecture(self.hf_config).sizes(self.hf_config)
        wanted, ids = (len(sizes.moe_layers), sizes.topk), sequences.routing
        fix = f"engines and trainer have other models, or rows of another run: {WITHOUT_REPLAY}"
        if ids is None or tuple(ids.shape[1:]) != wanted:
            found = "none" if ids is None else f"those of {tuple(ids.shape[1:])}"
            raise NonRetryableError(
                f"expert ids of {wanted} (layers with experts, experts of a token) are needed and {found} came; {fix}"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < NO_IDS or high >= sizes.experts:
            at = int(ids.argmin() if low < NO_IDS else ids.argmax()) // ids[0].numel()
            number = int(sequences.held(torch.arange(len(sequences.step_lengths)))[sequences.row[at]])
            raise NonRetryableError(
                f"{name_of(rows[number])} has expert id {low if low < NO_IDS else high}, of {sizes.experts} experts "
                f"with ids 0 to {sizes.experts - 1}; {fix}"
            )

    def load_beginning(self) -> None:
        """Load the run's first weights into the actor."""
        self._load(self.actor.model, Path(self.config.model.path))
        if (adapter := self.config.model.lora.path) is not None:
            assert self.actor.model.adapters is not None, "checked before any process starts"
            self.actor.model.adapters.load(Path(adapter), self.actor.model.all_tensors)
            self.actor.model.weights_changed()

    def load_base(self) -> None:
        """Load the base model of an actor with adapters: the job's model, or the result of the warm start."""
        self._load(self.actor.model, self._base)

    @property
    def _base(self) -> Path:
        """HF checkpoint of the adapters' base model."""
        config = self.config
        return Path(config.run.dir) / REFERENCE if config.trainer.warm_start.steps else Path(config.model.path)

    def _load(self, model: Model, path: Path) -> None:
        model.load_hf(path, score="stored" if model.head is not None else score_source(path))

    def leave_warm_start(self) -> None:
        """Copy the warm start's weights to the kind of model that the job trains: with a score head, which begins with
        zeros, or with adapters."""
        kind = self._kind(warming_up=False)
        if kind != self._made:
            before = self._made
            actor = self._actor(kind)
            actor.model.copy_from(self.actor.model, bucket_bytes=self.config.sync.bucket_bytes)
            assert kind.scores >= before.scores
            self.actor = actor

    def _actor(self, kind: ActorKind) -> TrainedModel:
        config = self.config
        micro_batching = micro_batching_for(config.parallel, config.trainer)
        model = config.model if kind.adapted else replace(config.model, lora=LoraConfig())
        head = None if kind.scores else self.head
        actor = TrainedModel(self.hf_config, model, config.parallel, head, micro_batching, config.trainer.optimizer)
        actor.model.replays_routing = config.rollout.routing_replay
        self._made = kind
        return actor

    def build(self, step: int, checkpoint: Path | None, own_reference: Path, enter: Callable[[Phase], None]) -> None:
        """Build the other models with their weights at ``step``; existing models are kept and get these weights.

        Args:
            enter: ``PhaseMemory.enter``, which loads what a phase needs onto the device.
            step: Completed steps; at 0 reference and critic begin with the actor's weights.
            checkpoint: Checkpoint from which the actor was loaded.
            own_reference: HF checkpoint of the actor at step 0.

        Raises:
            CheckpointError: ``checkpoint`` cannot be loaded.
        """
        config = self.config
        if self._algorithm.has_reference(config.algorithm):
            enter(Phase.REFRESH)
            if self.actor.model.adapters is not None:
                self.reference = WithoutAdapters(self.actor.model)
            elif self.reference is None:
                parallel, grid = self._grid("reference")
                micro_batching = micro_batching_for(parallel, config.trainer)
                self.reference = Model(
                    self.hf_config, self._settings("reference"), parallel, self.head, micro_batching, grid
                )
            if isinstance(self.reference, Model) and step and config.reference.refresh == "never":
                self.reference.load_hf(own_reference)
            else:
                self.refresh_reference()
        if config.reward_model.path is not None and self.reward_model is None:
            enter(Phase.SCORES)
            self.reward_model = self._reward_model(Path(config.reward_model.path))
        here = [name for name, teacher in config.teachers.items() if teacher.path is not None]
        if here and "teacher_logp" in self._algorithm.needs and not self.teachers:
            enter(Phase.TEACHERS)
            self.teachers = {name: self._teacher(teacher_role(name)) for name in here}
        if "critic" in self._algorithm.roles and (self.critic is None or not step):
            self.critic = None  # free its memory before the next one is built
            gc.collect()
            enter(Phase.CRITIC)
            self.critic = self._critic()
        for role in self.more:
            self._begin(role, checkpoint if step else None)
        if step and checkpoint is not None and (parts := self._other_parts()):
            enter(Phase.LOAD)
            state.load(checkpoint, parts)
            if self.critic is not None:
                self.critic.optimizer.set_hyperparameters(config.critic.optimizer)

    def add(self, role: str, dtype: Literal["float32", "bfloat16"], checkpoint: Path | None) -> Model:
        """Add a model with the actor's grid. It gets the weights of ``role`` in the checkpoint, else the actor's
        current ones; later checkpoints include it."""
        actor = self.actor.model
        settings = replace(actor.model_config, dtype=dtype)
        self.more[role] = Model(self.hf_config, settings, actor.parallel, actor.head, actor.micro_batching, actor.grid)
        self._begin(role, checkpoint)
        return self.more[role]

    def _begin(self, role: str, checkpoint: Path | None) -> None:
        """Load the current weights of an added model."""
        if checkpoint is not None and (checkpoint / role).is_dir():
            state.load(checkpoint, {role: state.CheckpointedModel(self.more[role].chunks, None)})
        else:
            self.more[role].copy_from(self.actor.model, bucket_bytes=self.config.sync.bucket_bytes)

    def _reward_model(self, path: Path) -> Model:
        parallel, grid = self._grid("reward_model")
        settings, micro_batching = self._settings("reward_model"), micro_batching_for(parallel, self.config.trainer)
        files = ScoreFiles.of(path)
        model = Model(hf.read_hf_config(files.base), settings, parallel, None, micro_batching, grid)
        _load_scores(model, files)
        if shares_base(self.config, "reward_model"):
            share_base(self.actor.model.chunks, model.chunks)
        return model

    def _teacher(self, role: str) -> Model:
        path = path_of(self.config, role)
        assert path is not None, "checked before any process starts"
        parallel, grid = self._grid(role)
        settings, micro_batching = self._settings(role), micro_batching_for(parallel, self.config.trainer)
        return load_teacher(Path(path), settings, parallel, self.head, micro_batching, grid)

    def _critic(self) -> TrainedModel:
        config, role = self.config, self.config.critic
        files = None if role.path is None else ScoreFiles.of(Path(role.path))
        hf_config = self.hf_config if files is None else hf.read_hf_config(files.base)
        parallel, grid = self._grid("critic")
        settings, micro_batching = self._settings("critic"), micro_batching_for(parallel, config.trainer)
        critic = TrainedModel(hf_config, settings, parallel, None, micro_batching, role.optimizer, grid)
        same = (
            self.reward_model is not None
            and role.path == config.reward_model.path
            and settings == self.reward_model.model_config
        )
        if files is None:
            # Its score head begins with zeros.
            critic.model.copy_from(self.actor.model, bucket_bytes=config.sync.bucket_bytes)
        elif same and self.reward_model is not None and files.adapter is None:
            critic.model.copy_from(self.reward_model, bucket_bytes=config.sync.bucket_bytes)
        else:
            _load_scores(critic.model, files)
        if shares_base(config, "critic"):
            share_base(self.actor.model.chunks, critic.model.chunks)
        return critic

    def finish_gathers(self) -> None:
        """Call ``TrainedModel.finish_gather`` of each trained model."""
        for trained in (self.actor, self.critic):
            if trained is not None:
                trained.finish_gather()

    def by_role(self) -> dict[str, Model]:
        """Return role -> model for the existing models."""
        critic = None if self.critic is None else self.critic.model
        reference = self.reference if isinstance(self.reference, Model) else None
        roles = {"critic": critic, "reference": reference, "reward_model": self.reward_model}
        return (
            {"actor": self.actor.model}
            | {role: model for role, model in roles.items() if model is not None}
            | {teacher_role(name): model for name, model in self.teachers.items()}
            | self.more
        )

    def refresh_reference(self) -> None:
        """Copy the actor's current weights to the reference, verified. Do nothing without a reference."""
        if isinstance(self.reference, Model):
            self.reference.copy_from(self.actor.model, bucket_bytes=self.config.sync.bucket_bytes)

    def actor_part(self) -> state.CheckpointedModel:
        """Return the actor's part of a checkpoint."""
        return state.CheckpointedModel(self.actor.model.chunks, self.actor.optimizer.inner)

    def parts(self) -> dict[str, state.CheckpointedModel]:
        """Return the models and optimizers of a checkpoint."""
        more = {role: state.CheckpointedModel(model.chunks, None) for role, model in self.more.items()}
        return {"actor": self.actor_part()} | self._other_parts() | more

    def _other_parts(self) -> dict[str, state.CheckpointedModel]:
        """Return the other parts of a checkpoint. A reference that never changes has files in the run directory; one
        that every step replaces needs none."""
        found = {}
        if self.critic is not None:
            critic, optimizer = self.critic.model, self.critic.optimizer.inner
            found["critic"] = state.CheckpointedModel(critic.chunks, optimizer, critic.grid)
        if isinstance(self.reference, Model) and isinstance(self.config.reference.refresh, int):
            found["reference"] = state.CheckpointedModel(self.reference.chunks, None, self.reference.grid)
        return found

    def export(self, model: Model, target: Path, rank: int) -> None:
        """Write the actor, or an added model, as an ordinary HF checkpoint; every rank calls it, rank 0 writes.

        Prediction layers of ``model.path`` come along unchanged.
        """
        plan = build_plan(model.layout, hf_layout(self.hf_config, head="score" if model.head is None else "lm"))
        with writing(target):
            hf.export_hf(plan, rank, model.proven_tensors(), Path(self.config.model.path), target, with_prediction=True)

    def base_digest(self) -> str | None:
        """Return the digest of the adapters' base model; None without adapters. Every rank calls it."""
        model = self.actor.model
        return None if model.adapters is None else model.adapters.base_digest(model.tensors)

    def export_adapter(self, target: Path) -> None:
        """Write the actor's adapters as PEFT's files; every rank calls it, rank 0 writes."""
        model = self.actor.model
        assert model.adapters is not None, "the actor has no adapters"
        adapters = model.adapters
        tensors = adapters.adapted(model.all_tensors).trained
        if model.optimizer is not None:
            check_written(tensors, model.written())
        with writing(target):
            adapters.save(target, tensors, str(self._base))

    def _settings(self, role: str) -> ModelConfig:
        """Settings of a role's model."""
        model, section = self.config.model, sections_of(self.config)[role]
        return replace(model, dtype=section.dtype or model.dtype, lora=role_lora(self.config, role))

    def _grid(self, role: str) -> tuple[ParallelConfig, Grid]:
        own, parallel = self.config.parallel, sections_of(self.config)[role].parallel
        if parallel is None or parallel == own:
            return own, nullcontext
        if parallel not in self._grids:
            timeout_s = process_groups.collective_timeout_s(self.config.cluster.stall_s)
            self._grids[parallel] = process_groups.Grid(parallel, seed=self.config.trainer.seed, timeout_s=timeout_s)
        return parallel, self._grids[parallel].active


def load_teacher(
    path: Path,
    settings: ModelConfig,
    parallel: ParallelConfig,
    head: Head,
    micro_batching: MicroBatching,
    grid: Grid = nullcontext,
) -> Model:
    """Build a language model with the weights of its files. ``head``: the student's, without its vocabulary.

    Raises CheckpointError if the files cannot be read.
    """
    hf_config = hf.read_hf_config(path)
    model = Model(
        hf_config, settings, parallel, replace(head, vocab_size=int(hf_config["vocab_size"])), micro_batching, grid
    )
    model.load_hf(path)
    return model


def _load_scores(model: Model, files: ScoreFiles) -> None:
    """Load the weights of a critic or reward model from its files."""
    model.load_hf(files.base, score="zeros" if files.begins_without_score else "stored")
    if files.adapter is not None:
        assert model.adapters is not None, "its settings are those of the files"
        model.adapters.load(files.adapter, model.all_tensors)
        model.weights_changed()


def trains_scores(algorithm: Algorithm) -> bool:
    """True if the model to train is a reward model."""
    return "actor" not in algorithm.roles


def in_warm_start(config: Config, checkpoint: Path | None) -> bool:
    """True if the actor of ``checkpoint`` (None: the run's beginning) is a language model without adapters, from the
    warm start or its end."""
    return bool(config.trainer.warm_start.steps) and (
        checkpoint is None or state.manifest_of(checkpoint)["step"] == 0 or checkpoint.parent.name == "warm_start"
    )


def score_source(path: Path) -> Literal["stored", "zeros"]:
    """Return the source of a reward model's initial score head (``Model.load_hf``)."""
    return "stored" if has_score(path) else "zeros"
