"""The models of a trainer rank: the actor, and beside it reference, critic, reward model and teachers.

All share the job's ranks, each on a grid of its own (``<role>.parallel``; the actor's where none is given).

The actor of a job that trains a reward model is a language model at first, then the same one with a score head. A
checkpoint of step 0 holds the weights after the warm start, later ones the reward model. Without a warm start the job
may go on with a sequence-classification checkpoint.
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
from megarl.config.lora import LoraConfig
from megarl.config.model_roles import path_of, sections_of, teacher_role
from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.core.errors import NonRetryableError
from megarl.core.schema import Outcome, name_of
from megarl.learn.algorithms import Algorithm
from megarl.learn.batching.sequences import NO_IDS, Sequences
from megarl.learn.memory.phases import Phase
from megarl.learn.parallel import process_groups
from megarl.learn.training.adapters import share_base
from megarl.learn.training.model import Grid, Model, TrainedModel, WithoutAdapters, micro_batching_for
from megarl.learn.training.optimizer_digests import check_written
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
"""Folder of a run with the model after the warm start, as an HF checkpoint."""


class ActorKind(NamedTuple):
    """Kind of the model that is trained."""

    scores: bool
    """It gives scores, not log-probs."""
    adapted: bool
    """It has adapters, and is not trained itself."""


class Models:
    """Actor, reference, critic, reward model and teachers; None where the algorithm and the settings need none.

    ``make_actor`` comes first, ``build`` after the warm start and again after a rollback.
    """

    actor: TrainedModel

    def __init__(self, config: Config, algorithm: Algorithm) -> None:
        self._config = config
        self._algorithm = algorithm
        self.hf_config = hf.read_hf_config(Path(config.model.path))
        temperature = config.rollout.temperature if not algorithm.offline else 1.0
        float32 = config.model.head_dtype == "float32"
        self.head = Head(int(self.hf_config["vocab_size"]), temperature, config.trainer.logits_bytes, float32)
        """The actor's after the warm start."""
        self.images = ImageInputs.of(config, self.hf_config)
        """None where the model takes no images."""
        self.reference: Model | WithoutAdapters | None = None
        """Of an actor with adapters the actor without them."""
        self.critic: TrainedModel | None = None
        self.reward_model: Model | None = None
        self.teachers: dict[str, Model] = {}
        """Name -> teacher; none where the algorithm needs none."""
        self.more: dict[str, Model] = {}
        """Role -> model that a part of the job has added. Their memory stays on the device."""
        self._grids: dict[ParallelConfig, process_groups.Grid] = {}

    def make_actor(self, checkpoint: Path | None) -> None:
        """Make the actor for weights of ``checkpoint``, or of the run's beginning; one of this kind is kept."""
        kind = self._kind(in_warm_start(self._config, checkpoint))
        if not hasattr(self, "actor") or kind != self._made:
            self.__dict__.pop("actor", None)  # before the next one takes its room
            self.actor = self._actor(kind)

    def _kind(self, warming_up: bool) -> ActorKind:
        """Kind of the actor: a language model by itself in the warm start, then what the job trains."""
        if warming_up:
            return ActorKind(scores=False, adapted=False)
        return ActorKind(scores=trains_scores(self._algorithm), adapted=self._config.model.lora.is_used)

    def check_routing(self, sequences: Sequences, rows: Sequence[Outcome]) -> None:
        """Check that the expert ids of held sequences are of the actor's layers and experts. Raises NonRetryableError.

        Args:
            rows: Trajectory of each sampled sequence of the step.
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
        """Give the actor the weights that the run begins with."""
        self._load(self.actor.model, Path(self._config.model.path))
        if (adapter := self._config.model.lora.path) is not None:
            assert self.actor.model.adapters is not None, "checked before any process starts"
            self.actor.model.adapters.load(Path(adapter), self.actor.model.all_tensors)
            self.actor.model.weights_changed()

    def load_base(self) -> None:
        """Give an actor with adapters the model that they are for: the job's, or what the warm start made of it."""
        self._load(self.actor.model, self._base)

    @property
    def _base(self) -> Path:
        """The HF checkpoint that adapters are for."""
        config = self._config
        return Path(config.run.dir) / REFERENCE if config.trainer.warm_start.steps else Path(config.model.path)

    def _load(self, model: Model, path: Path) -> None:
        model.load_hf(path, score="stored" if model.head is not None else score_source(path))

    def leave_warm_start(self) -> None:
        """Give the weights that the warm start left to the model that the job trains: one with a score head, which
        begins with zeros, or with adapters."""
        kind = self._kind(warming_up=False)
        if kind != self._made:
            before = self._made
            actor = self._actor(kind)
            actor.model.copy_from(self.actor.model, bucket_bytes=self._config.sync.bucket_bytes)
            assert kind.scores >= before.scores
            self.actor = actor

    def _actor(self, kind: ActorKind) -> TrainedModel:
        config = self._config
        micro_batching = micro_batching_for(config.parallel, config.trainer)
        model = config.model if kind.adapted else replace(config.model, lora=LoraConfig())
        head = None if kind.scores else self.head
        actor = TrainedModel(self.hf_config, model, config.parallel, head, micro_batching, config.trainer.optimizer)
        actor.model.replays_routing = config.rollout.routing_replay
        self._made = kind
        return actor

    def build(self, step: int, checkpoint: Path | None, own_reference: Path, enter: Callable[[Phase], None]) -> None:
        """Build the other models with the weights that they have at ``step``; those that are there are kept and given
        these.

        Args:
            enter: Has what a phase needs on the device (``PhaseMemory.enter``).
            step: Completed steps; at 0 reference and critic begin with the actor's weights.
            checkpoint: The one that the actor was loaded from.
            own_reference: HF checkpoint of the actor at step 0.

        Raises:
            CheckpointError: ``checkpoint`` cannot be loaded.
        """
        config = self._config
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
        if "teacher_logp" in self._algorithm.needs and not self.teachers:
            enter(Phase.TEACHERS)
            self.teachers = {name: self._teacher(teacher_role(name)) for name in config.teachers}
        if "critic" in self._algorithm.roles and (self.critic is None or not step):
            self.critic = None  # before the next one takes its room
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
        """Make a model with the actor's grid. Its weights are those of ``role`` in the checkpoint, else the actor's of
        now; checkpoints have it from here on."""
        actor = self.actor.model
        settings = replace(actor.model_config, dtype=dtype)
        self.more[role] = Model(self.hf_config, settings, actor.parallel, actor.head, actor.micro_batching, actor.grid)
        self._begin(role, checkpoint)
        return self.more[role]

    def _begin(self, role: str, checkpoint: Path | None) -> None:
        """Give a model that was added the weights that it goes on with."""
        if checkpoint is not None and (checkpoint / role).is_dir():
            state.load(checkpoint, {role: state.CheckpointedModel(self.more[role].chunks, None)})
        else:
            self.more[role].copy_from(self.actor.model, bucket_bytes=self._config.sync.bucket_bytes)

    def _reward_model(self, path: Path) -> Model:
        parallel, grid = self._grid("reward_model")
        settings, micro_batching = self._settings("reward_model"), micro_batching_for(parallel, self._config.trainer)
        files = ScoreFiles.of(path)
        model = Model(hf.read_hf_config(files.base), settings, parallel, None, micro_batching, grid)
        _load_scores(model, files)
        if shares_base(self._config, "reward_model"):
            share_base(self.actor.model.chunks, model.chunks)
        return model

    def _teacher(self, role: str) -> Model:
        path = path_of(self._config, role)
        assert path is not None, "checked before any process starts"
        hf_config = hf.read_hf_config(Path(path))
        parallel, grid = self._grid(role)
        settings, micro_batching = self._settings(role), micro_batching_for(parallel, self._config.trainer)
        head = replace(self.head, vocab_size=int(hf_config["vocab_size"]))
        model = Model(hf_config, settings, parallel, head, micro_batching, grid)
        model.load_hf(Path(path))
        return model

    def _critic(self) -> TrainedModel:
        config, role = self._config, self._config.critic
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
        """``TrainedModel.finish_gather`` of each that is trained."""
        for trained in (self.actor, self.critic):
            if trained is not None:
                trained.finish_gather()

    def by_role(self) -> dict[str, Model]:
        """Role -> model, of those that there are."""
        critic = None if self.critic is None else self.critic.model
        reference = self.reference if isinstance(self.reference, Model) else None
        roles = {"critic": critic, "reference": reference, "reward_model": self.reward_model}
        return (
            {"actor": self.actor.model}
            | {role: model for role, model in roles.items() if model is not None}
            | {teacher_role(name): model for name, model in self.teachers.items()}
            | self.more
        )

    def refresh_due(self, step: int) -> bool:
        """True if ``reference.refresh`` asks for a new reference at the start of a step."""
        refresh = self._config.reference.refresh
        due = refresh == "every_iteration" or (isinstance(refresh, int) and step % refresh == 0)
        return due and self.reference is not None

    def refresh_reference(self) -> None:
        """Give the reference the actor's weights of now, proven equal. Nothing to do without a reference."""
        if isinstance(self.reference, Model):
            self.reference.copy_from(self.actor.model, bucket_bytes=self._config.sync.bucket_bytes)

    def actor_part(self) -> state.CheckpointedModel:
        """Part of a checkpoint that holds the actor."""
        return state.CheckpointedModel(self.actor.model.chunks, self.actor.optimizer.inner)

    def parts(self) -> dict[str, state.CheckpointedModel]:
        """Models and optimizers of a checkpoint."""
        more = {role: state.CheckpointedModel(model.chunks, None) for role, model in self.more.items()}
        return {"actor": self.actor_part()} | self._other_parts() | more

    def _other_parts(self) -> dict[str, state.CheckpointedModel]:
        """Parts beside the actor. A reference that never changes has its files in the run directory; one that every
        step replaces needs none."""
        found = {}
        if self.critic is not None:
            critic, optimizer = self.critic.model, self.critic.optimizer.inner
            found["critic"] = state.CheckpointedModel(critic.chunks, optimizer, critic.grid)
        if isinstance(self.reference, Model) and isinstance(self._config.reference.refresh, int):
            found["reference"] = state.CheckpointedModel(self.reference.chunks, None, self.reference.grid)
        return found

    def export(self, model: Model, target: Path, rank: int) -> None:
        """Write the actor, or an added model, as an ordinary HF checkpoint; every rank calls it, rank 0 writes."""
        plan = build_plan(model.layout, hf_layout(self.hf_config, head="score" if model.head is None else "lm"))
        with writing(target):
            hf.export_hf(plan, rank, model.proven_tensors(), Path(self._config.model.path), target)

    def base_digest(self) -> str | None:
        """Digest of the model that the actor's adapters are for; None without adapters. Every rank calls it."""
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
        model, section = self._config.model, sections_of(self._config)[role]
        return replace(model, dtype=section.dtype or model.dtype, lora=role_lora(self._config, role))

    def _grid(self, role: str) -> tuple[ParallelConfig, Grid]:
        own, parallel = self._config.parallel, sections_of(self._config)[role].parallel
        if parallel is None or parallel == own:
            return own, nullcontext
        if parallel not in self._grids:
            timeout_s = process_groups.collective_timeout_s(self._config.cluster.stall_s)
            self._grids[parallel] = process_groups.Grid(parallel, seed=self._config.trainer.seed, timeout_s=timeout_s)
        return parallel, self._grids[parallel].active


def _load_scores(model: Model, files: ScoreFiles) -> None:
    """Give a critic or reward model the weights of its files."""
    model.load_hf(files.base, score="zeros" if files.begins_without_score else "stored")
    if files.adapter is not None:
        assert model.adapters is not None, "its settings are those of the files"
        model.adapters.load(files.adapter, model.all_tensors)
        model.weights_changed()


def trains_scores(algorithm: Algorithm) -> bool:
    """True if the model to train is a reward model."""
    return "actor" not in algorithm.roles


def in_warm_start(config: Config, checkpoint: Path | None) -> bool:
    """True if the actor of ``checkpoint`` is one of the warm start, or what that left: a language model without
    adapters. None is the run's beginning."""
    return bool(config.trainer.warm_start.steps) and (
        checkpoint is None or state.manifest_of(checkpoint)["step"] == 0 or checkpoint.parent.name == "warm_start"
    )


def score_source(path: Path) -> Literal["stored", "zeros"]:
    """Source of the score head that a reward model begins with (``Model.load_hf``)."""
    return "stored" if has_score(path) else "zeros"
