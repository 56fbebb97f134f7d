"""A kept step, computed again: the first stage at which it differs from what was trained.

Every stage begins with the kept results of the stage before, so that a difference has its cause in the stage itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch

from megarl import ops
from megarl.buffer.experience.operators import group_stats
from megarl.config import Config
from megarl.config.schema import ParallelConfig
from megarl.core.errors import ConfigError
from megarl.core.kept_batches import KeptBatch, KeptValues
from megarl.core.schema import Outcome, Reward
from megarl.learn import algorithms, plain
from megarl.learn.algorithms import Algorithm
from megarl.learn.batching import Sequences
from megarl.learn.parallel import process_groups
from megarl.learn.training import objectives
from megarl.train.batch.batch import StepBatch
from megarl.train.batch.kept_images import ReadImages, put_images
from megarl.train.inference.inference import Inference
from megarl.train.inference.models import REFERENCE, Models
from megarl.train.ranks import Ranks, Reporter, TrainState
from megarl.train.update.learner import Learner, UpdateFilter
from megarl.train.update.witness import Witness
from megarl.weights.checkpoint.training import state as saving

BOUNDS = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest difference of a log-prob or value between two grids, by ``model.dtype``."""
RELATIVE = {"float32": 1e-5, "bfloat16": 0.05}
"""Largest relative difference of sums."""


@dataclass(frozen=True)
class ReplayStage:
    """A stage of the step.

    Attributes:
        difference: Largest difference from what was trained; relative for sums and advantages.
        bound: Difference from which on the stage differs.
        where: Largest element, or name of the sum.
    """

    name: str
    difference: float
    bound: float
    where: str

    @property
    def differs(self) -> bool:
        """True beyond the bound, or for NaN."""
        return not self.difference <= self.bound


def check_replays(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError for a job whose kept steps cannot be computed again."""
    for reason, found in (
        ("pairs of responses", algorithm.choose_pairs is not None),
        ("teachers", "teacher_logp" in algorithm.needs),
        ("rewards of turns", config.algorithm.turn_rewards > 0.0),
    ):
        if found:
            raise ConfigError(f"algorithm.name={config.algorithm.name} learns from {reason}, which no kept step has")


def on_one_process(config: Config) -> Config:
    """Return the settings of the same models on one CPU process."""
    one = ParallelConfig()
    roles = {name: replace(getattr(config, name), parallel=None) for name in ("reference", "critic", "reward_model")}
    model = replace(config.model, transformer_impl="local")
    return replace(config, parallel=one, model=model, **roles)


class StepReplay:
    """A kept step on this rank's grid. Every rank makes the same calls.

    Args:
        config: The run's settings, with the grid to compute on.
        checkpoint: Of the step before.
        read_images: Called where the model has a vision tower.
        exact: The grid is the run's own, so that every difference counts.

    Raises:
        ConfigError: the batch cannot be made again.
    """

    def __init__(
        self,
        config: Config,
        kept: KeptBatch,
        values: KeptValues,
        checkpoint: Path,
        read_images: ReadImages,
        *,
        exact: bool,
    ) -> None:
        self._config, self._exact = config, exact
        self._algorithm = algorithms.get(config.algorithm.name)
        self._kept, self._values = kept, values
        self.batch = _batch_of(kept, values)
        torch.set_num_threads(config.trainer.num_threads)
        ops.use(config.trainer.kernels)
        process_groups.initialize(config.parallel, seed=config.trainer.seed)
        self._models = models = Models(config, self._algorithm)
        if models.images is not None:
            put_images(models.images, self.batch.sequences, self._owners(), read_images)
        models.make_actor(checkpoint)
        if models.actor.model.adapters is not None:
            models.load_base()
        saving.load(checkpoint, {"actor": models.actor_part()})
        models.actor.optimizer.set_hyperparameters(config.trainer.optimizer)
        self._state = TrainState.from_manifest(saving.manifest_of(checkpoint))
        if not self._state.step:
            models.actor.optimizer.restart(config.trainer.optimizer)
            models.leave_warm_start()
        models.actor.model.head = models.head
        models.build(self._state.step, checkpoint, Path(config.run.dir) / REFERENCE, lambda phase: None)
        self._inference = Inference(config, self._algorithm, models, lambda phase: None)
        updates = UpdateFilter(config.trainer.update_filter, cast("Reporter", _Silent()))
        self._learner = Learner(config, self._algorithm, self._inference, updates, Ranks())

    def _owners(self) -> list[tuple[str, int] | None]:
        """Return (group id, index) of each sequence's response; None for an expert row."""
        values = self._values
        return [
            None if of < 0 else (str(values.response_groups[of]), int(values.response_indices[of]))
            for of in values.row[np.argsort(self._kept.numbers)].tolist()
        ]

    def stages(self, recorded: dict[str, float]) -> list[ReplayStage]:
        """Return all stages in order, with the metrics ``recorded`` of the step."""
        return [*self._outputs(), *self._advantages(), *self._updates(recorded)]

    def _bound(self, usual: float) -> float:
        return 0.0 if self._exact else usual

    def _advantages(self) -> list[ReplayStage]:
        batch, settings = self.batch, self._learner.settings(self._state)
        sequences = batch.sequences
        trained = sequences.advantages
        if trained is None:
            return []
        self._learner.estimate(self._state, batch)  # of a critic's job also the returns
        assert sequences.advantages is not None
        here, sequences.advantages = sequences.advantages.double(), trained
        if plain.covers(settings):
            here = Witness(batch, settings).advantages
        size = max(1.0, float(here.abs().max()))
        return [self._stage("advantages", (here - trained.double()).abs() / size, RELATIVE["float32"])]

    def _outputs(self) -> list[ReplayStage]:
        """Compare log-probs and values by the checkpoint's weights."""
        models, sequences, found = self._models, self.batch.sequences, []
        roles = (
            ("log-probs", "old_logp", models.actor.model),
            ("reference", "ref_logp", models.reference),
            ("values", "values", None if models.critic is None else models.critic.model),
        )
        for name, field, model in roles:
            trained = getattr(sequences, field)
            if model is None or trained is None:
                continue
            here = model.outputs(sequences, [model.micro_batches(sequences, units) for units in self.batch.updates])
            apart = (here - trained).abs() * sequences.mask
            found.append(self._stage(name, apart, self._bound(BOUNDS[self._config.model.dtype])))
        return found

    def _updates(self, recorded: dict[str, float]) -> list[ReplayStage]:
        settings, batch, sequences = self._learner.settings(self._state), self.batch, self.batch.sequences
        policy = partial(objectives.policy, self._algorithm, settings, sequences)
        first = None
        if self._inference.first_update_infers and sequences.old_logp is not None:
            first = policy(unchanged=True)
            numbers = torch.tensor([i for unit in batch.updates[0] for i in unit])
            sequences.old_logp[torch.isin(sequences.row, numbers)] = 0.0  # the update fills them, as it did
        witness = Witness(batch, settings) if plain.covers(settings) else None
        _, again = self._learner.update(self._state, batch, policy(), settings, first, witness)
        usual = RELATIVE[self._config.model.dtype]
        sums = {
            name: abs(again[name] - recorded[name]) / max(abs(recorded[name]), 1.0)
            for name in again
            if name in recorded
            and not name.startswith("check/")
            and name.endswith(("loss", "grad_norm", "clipfrac", "ppo_kl", "entropy"))
        }
        found = []
        of_first = {name for name in sums if "/first_" in name}
        losses = ("loss", "clipfrac", "ppo_kl", "entropy")
        for stage, update, ends in (
            ("loss", " of update 1", ("/first_loss",)),
            ("gradient", " of update 1", ("/first_grad_norm",)),
            ("loss", "", losses),
            ("gradient", "", ("grad_norm",)),
        ):
            named = of_first if update else sums.keys() - of_first
            own = {name: sums[name] for name in sorted(named) if name.endswith(ends)}
            name = max(own, key=lambda key: own[key], default="")
            if name:
                text = f"{name}: {again[name]:.9g} here, {recorded[name]:.9g} trained"
                found.append(ReplayStage(f"{stage}{update}", own[name], self._bound(usual), text))
            if update:
                continue
            if (formula := again.get(f"check/{stage}")) is not None:
                found.append(ReplayStage(f"{stage}, by plain formulas", formula, 10 * usual, f"check/{stage}"))
        return found

    def _stage(self, name: str, apart: torch.Tensor, bound: float) -> ReplayStage:
        at = int(apart.nan_to_num(nan=torch.inf).argmax())
        sequences = self.batch.sequences
        row = int(sequences.row[at])
        number = at - int(sequences.cu_seqlens[row])
        owner = self._owners()[row]
        who = "an expert row" if owner is None else f"response {owner[1]} of group {owner[0]}"
        return ReplayStage(name, float(apart[at]), bound, f"token {number + 1} of {who}")


class _Silent:
    """A reporter of nothing."""

    def log(self, text: str) -> None: ...

    def event(self, kind: str, data: object) -> None: ...


def _batch_of(kept: KeptBatch, values: KeptValues) -> StepBatch:
    """Make the batch that was kept: its sequences in the order of the step. Raises ConfigError for repeated ones."""
    order = np.argsort(kept.numbers)
    if len(np.unique(kept.numbers)) < len(order):
        raise ConfigError("the kept step trains on a sequence several times, which is not computed again")
    starts = kept.lengths.cumsum() - kept.lengths
    places = np.concatenate([np.arange(starts[i], starts[i] + kept.lengths[i]) for i in order])

    def taken(array: np.ndarray) -> torch.Tensor | None:
        return torch.from_numpy(np.ascontiguousarray(array[places])) if len(array) else None

    lengths, rows = torch.from_numpy(kept.lengths[order]).long(), values.row[order]
    tokens, mask = taken(kept.tokens), taken(kept.mask)
    assert tokens is not None and mask is not None
    sequences = Sequences(tokens, lengths, mask)
    for name in ("advantages", "old_logp", "ref_logp", "engine_logp", "values", "routing"):
        setattr(sequences, name, taken(getattr(values, name)))
    is_expert = torch.from_numpy(rows < 0)
    if is_expert.any():
        sequences.expert = is_expert
    if len(np.unique(rows)) < len(rows) and not is_expert.any():
        sequences.trajectory = torch.from_numpy(np.unique(rows, return_inverse=True)[1]).long()
    outcomes = _outcomes(values)
    number_of = np.empty(len(order), np.int64)
    number_of[order] = np.arange(len(order))
    updates = [
        [[int(i)] for i in np.sort(number_of[kept.updates == update])] for update in range(int(kept.updates.max()) + 1)
    ]
    return StepBatch(
        outcomes=outcomes,
        rows=[outcomes[i] for i in rows if i >= 0],
        sequences=sequences,
        updates=updates,
        finish_reasons=[
            "length" if cut else "stop" for cut, i in zip(values.truncated[order], rows, strict=True) if i >= 0
        ],
    )


def _outcomes(values: KeptValues) -> list[Outcome]:
    """Return the step's responses, with the statistics of their groups computed again."""
    groups = values.response_groups.tolist()
    members: dict[str, list[float]] = {}
    for group, reward in zip(groups, values.rewards.tolist(), strict=True):
        members.setdefault(group, []).append(reward)
    stats = {group: group_stats(rewards) for group, rewards in members.items()}
    found = []
    for i, group in enumerate(groups):
        index, score = int(values.response_indices[i]), float(values.rewards[i])
        own = Outcome("", group, index, 0, 0, Reward(score, "ok"), False, stats[group], None)
        if len(values.greedy):
            greedy = replace(own, reward=Reward(float(values.greedy[i]), "ok"))
            own = replace(own, greedy=greedy)
        found.append(own)
    return found
