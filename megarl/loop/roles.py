"""The models of a job beside the actor: which there are, where their weights come from, what a checkpoint holds of them.

All roles share the job's ranks, each on a grid of its own (``<role>.parallel``; the actor's where none is given).
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.checkpoint import hf, state
from megarl.config.schema import CriticConfig, ModelConfig, ParallelConfig, ReferenceConfig, RewardModelConfig
from megarl.parallel import groups
from megarl.training.model import FrozenModel, Grid, TrainedModel, cut_for

if TYPE_CHECKING:
    from megarl.loop.session import Session

Settings = ReferenceConfig | CriticConfig | RewardModelConfig


class Roles:
    """Reference, critic and reward model; None where the algorithm and the settings need none."""

    def __init__(self, s: Session) -> None:
        self.session = s
        self.reference: FrozenModel | None = None
        self.critic: TrainedModel | None = None
        self.reward_model: FrozenModel | None = None
        self._grids: dict[ParallelConfig, groups.Grid] = {}

    def build(self) -> None:
        """Build them, with the weights that they have at the session's step: at step 0 the actor's own. Those that are there are kept
        and given these weights."""
        s, config = self.session, self.session.config
        if s.algorithm.has_reference(config.algorithm):
            if self.reference is None:
                parallel, grid = self._grid(config.reference)
                self.reference = FrozenModel(
                    s.hf_config, self._model(config.reference), parallel, s.head, cut_for(parallel, config.trainer), grid
                )
            if s.state.step and config.reference.refresh == "never":
                self.reference.load_hf(s.run_dir / "reference")
            else:
                self.refresh_reference()
        if config.reward_model.path is not None and self.reward_model is None:
            path = Path(config.reward_model.path)
            parallel, grid = self._grid(config.reward_model)
            self.reward_model = FrozenModel(
                hf.read_hf_config(path), self._model(config.reward_model), parallel, None, cut_for(parallel, config.trainer), grid
            )
            self.reward_model.load_hf(path)
        if "critic" in s.algorithm.roles and (self.critic is None or not s.state.step):
            self.critic = None  # before the next one takes its room
            gc.collect()
            self.critic = self._critic()
        if s.state.step and (found := s.newest_checkpoint()) is not None and (parts := self.parts()):
            s.load_parts(found, parts)
            if self.critic is not None:
                self.critic.optimizer.set_hyperparameters(config.critic.optimizer)

    def _critic(self) -> TrainedModel:
        s, settings = self.session, self.session.config.critic
        path = None if settings.path is None else Path(settings.path)
        hf_config = s.hf_config if path is None else hf.read_hf_config(path)
        parallel, grid = self._grid(settings)
        cut = cut_for(parallel, s.config.trainer)
        critic = TrainedModel(hf_config, self._model(settings), parallel, None, cut, settings.optimizer, grid)
        if path is None:
            critic.copy_from(s.actor, bucket_bytes=s.config.sync.bucket_bytes)  # its score head begins with zeros
        elif self.reward_model is not None and settings.path == s.config.reward_model.path and self._model(settings) == self.reward_model.model_config:
            critic.copy_from(self.reward_model, bucket_bytes=s.config.sync.bucket_bytes)
        else:
            critic.load_hf(path)
        return critic

    def refresh_when_due(self) -> None:
        """At the start of a step, when ``reference.refresh`` says so."""
        refresh = self.session.config.reference.refresh
        if refresh == "every_iteration" or (isinstance(refresh, int) and self.session.state.step % refresh == 0):
            self.refresh_reference()

    def refresh_reference(self) -> None:
        """The actor's weights now, proven equal. Nothing to do without a reference."""
        if self.reference is not None:
            self.reference.copy_from(self.session.actor, bucket_bytes=self.session.config.sync.bucket_bytes)

    def parts(self) -> dict[str, state.Part]:
        """What belongs into a checkpoint beside the actor. A reference that never changes has its files in the run directory, one that
        every step replaces has none to keep."""
        found = {}
        if self.critic is not None:
            found["critic"] = state.Part(self.critic.chunks, self.critic.optimizer.inner, self.critic.grid)
        if self.reference is not None and isinstance(self.session.config.reference.refresh, int):
            found["reference"] = state.Part(self.reference.chunks, None, self.reference.grid)
        return found

    def _model(self, settings: Settings) -> ModelConfig:
        model = self.session.config.model
        return replace(model, dtype=settings.dtype or model.dtype)

    def _grid(self, settings: Settings) -> tuple[ParallelConfig, Grid]:
        own = self.session.config.parallel
        if settings.parallel is None or settings.parallel == own:
            return own, nullcontext
        if settings.parallel not in self._grids:
            config = self.session.config
            timeout_s = groups.patience_s(config.cluster.stall_s)
            self._grids[settings.parallel] = groups.Grid(settings.parallel, seed=config.trainer.seed, timeout_s=timeout_s)
        return settings.parallel, self._grids[settings.parallel].active
