"""Training on a step's batch: inference by every model, advantages, optimizer updates.

Shape legend: N sequences of a step, T their positions (``batching.Sequences``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from megarl.buffer.experience import with_group_stats
from megarl.buffer.experience.groups import group_stats
from megarl.buffer.order.draws import ExpertRow
from megarl.config import Config
from megarl.config.algorithms import AlgorithmConfig, KLConfig, PPOConfig
from megarl.core.metrics import Sums, mean_of_sums
from megarl.core.schema import GroupStats, Trajectory, WeightsVersion, name_of
from megarl.learn.algorithms import Algorithm, StepInput
from megarl.learn.algorithms.terms import kl
from megarl.learn.algorithms.terms.parts import counts
from megarl.learn.batching import StepShare, of_demonstrations, score_positions
from megarl.learn.batching.images import Images
from megarl.learn.memory.phases import Phase
from megarl.learn.training import objectives
from megarl.learn.training.model import Model, TrainedModel, WithoutAdapters
from megarl.learn.training.objectives import Objective
from megarl.learn.training.optimizer import learning_rate
from megarl.train.rank.ranks import Ranks, on_all_ranks
from megarl.train.rank.state import TrainState
from megarl.train.update.batch import StepBatch, StepPlan, each_once, make_batch, overlong
from megarl.train.update.images import StepImages
from megarl.train.update.models import Models
from megarl.train.update.shares import share_of
from megarl.train.update.updates import UpdateFilter
from megarl.weights.checkpoint.formats.score_pad import score_pad

_PHASES = {"old_logp": Phase.OLD_LOGP, "ref_logp": Phase.REF_LOGP, "values": Phase.VALUES}
"""Phase of inference by the field that it fills."""
NO_GROUP = GroupStats(0.0, 0.0, 1)
"""Group statistics of a demonstration, which has no reward."""


class Learner:
    """Computes with a step's batch, on every rank alike."""

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        models: Models,
        updates: UpdateFilter,
        ranks: Ranks,
        enter: Callable[[Phase], None],
    ) -> None:
        self._config = config
        self._algorithm = algorithm
        self._models = models
        self._updates = updates
        self._ranks = ranks
        self._enter = enter
        """Has what a phase needs on the device (``PhaseMemory.enter``)."""

    @property
    def _first_update_infers(self) -> bool:
        """True if ``old_logp`` of the first update's tokens come from its own forward pass: nothing needs them
        earlier (an algorithm's own ``estimate`` may), the critic's warm-up leaves no update out, each token goes
        through the model once (an answer may be in several pairs), and updates compute what inference does (dropout of
        adapters is theirs alone). The updates of offline jobs fill nothing."""
        algorithm, settings = self._algorithm, self._config.algorithm
        others = algorithm.estimate is not None or self._models.critic is not None
        once = algorithm.choose_pairs is None and not algorithm.offline
        lora = self._config.model.lora
        alike = not (lora.is_used and lora.dropout)
        return "old_logp" in algorithm.needs and once and alike and not others and settings.kl.target is None

    def batch_of(
        self,
        trajectories: Sequence[Trajectory],
        demonstrations: Sequence[ExpertRow] = (),
        lags: Mapping[WeightsVersion, int] | None = None,
        images: StepImages | None = None,
    ) -> StepBatch:
        """Make the batch of whole groups, with the statistics of their scores; this rank holds its share of the tokens.

        Arguments and errors as of ``make_batch``.
        """
        config = self._config
        settings = (self._algorithm, config.algorithm, config.trainer.updates_per_step, lags, images, self.share)
        replays = config.rollout.routing_replay
        return make_batch(with_group_stats(trajectories), demonstrations, *settings, replays_routing=replays)

    def infer(self, batch: StepBatch) -> None:
        """Fill what the algorithm needs: log-probs under the weights that the update starts from, the reference's,
        values. ``old_logp`` of the first update may be filled by ``train_step``.

        Raises NonRetryableError, on every rank, for expert ids that are none of the actor's.
        """
        sequences = batch.sequences
        if self._config.rollout.routing_replay:
            on_all_ranks(lambda: self._models.check_routing(sequences, batch.rows))
        truncated = set(overlong(batch.rows, self._config.algorithm))
        for name, model, lists in self._inferred(batch.updates, batch.outside, truncated):
            self._enter(_PHASES[name])
            outputs = model.outputs(sequences, [model.micro_batches(sequences, units) for units in lists])
            setattr(sequences, name, outputs)

    def _inferred(
        self, updates: list[list[list[int]]], outside: list[list[int]], truncated: set[int]
    ) -> Iterator[tuple[str, Model | WithoutAdapters, list[list[list[int]]]]]:
        """Yield (field of ``Sequences``, model that fills it, lists of units that it takes), in order. Arguments as of
        ``StepPlan``."""
        # The mismatch takes log-probs of every answer, the adaptive KL of those that ``filter_overlong`` leaves.
        rest = outside if "old_logp" in self._algorithm.needs else []
        kept = [unit for unit in rest if not truncated.intersection(unit)]

        def lists(others: list[list[int]], first: int = 0) -> list[list[list[int]]]:
            return each_once([*updates[first:], *([others] if others else [])])

        models = self._models
        if "old_logp" in self._algorithm.needs:
            yield "old_logp", models.actor.model, lists(rest, int(self._first_update_infers))
        if models.reference is not None:
            yield "ref_logp", models.reference, lists(kept)
        if models.critic is not None:
            yield "values", models.critic.model, lists(kept)

    def share(self, plan: StepPlan) -> StepShare | None:
        """Choose the sequences of a step that this rank holds: those that its models take in inference and updates;
        None for all. Every rank calls it."""
        if self._algorithm.whole_step:
            return None
        inferred = self._inferred(plan.updates, plan.outside, plan.overlong)
        taken: list[tuple[Model | WithoutAdapters, list[list[int]]]] = [
            (m, units) for _, m, lists in inferred for units in lists
        ]
        for trained in (self._models.actor, self._models.critic):
            if trained is not None:
                taken += [(trained.model, units) for units in plan.updates]
        return share_of(plan.lengths, plan.patches, taken)

    def train_step(self, state: TrainState, batch: StepBatch) -> tuple[TrainState, dict[str, float]]:
        """Estimate advantages and make the step's updates; return the state with what they changed, and metrics."""
        settings = self.settings(state)
        state, estimated = self.estimate(state, batch)
        policy = partial(objectives.policy, self._algorithm, settings, batch.sequences)
        first = policy(unchanged=True) if self._first_update_infers else None
        state, updated = self.update(state, batch, policy(), settings, first)
        return state, estimated | updated

    def estimate(self, state: TrainState, batch: StepBatch) -> tuple[TrainState, dict[str, float]]:
        """Fill advantages (and returns) of every token; return the state with the KL coefficient of the next step, and
        metrics."""
        sequences, config = batch.sequences, self.settings(state)
        metrics: dict[str, float] = {}
        if "advantages" in self._algorithm.needs:
            result = self._algorithm.step_advantages(step_input(batch, self._algorithm, config), config)
            sequences.advantages, sequences.returns = result.advantages, result.returns
            if batch.turn_advantages is not None:
                own = batch.turn_advantages.to(result.advantages.dtype).masked_fill_(~sequences.mask, 0.0)
                sequences.advantages = torch.lerp(result.advantages, own, config.turn_rewards)
                turns = batch.kept(sequences.mask).totals(torch.Tensor.double, own)
                metrics |= turns.spread("critic/turn_advantages")
            metrics |= result.metrics
        if config.kl.target is not None and sequences.old_logp is not None and sequences.ref_logp is not None:
            metrics["actor/kl_coef"] = config.kl.coef
            kept = batch.kept(sequences.sampled)
            distance = kl.totals(sequences.old_logp, sequences.ref_logp, kept, config.kl.estimator)
            # An actor that stays is no measure for the coefficient, and neither is a step without a token in the loss.
            if not self.critic_alone(state) and distance.number:
                state = replace(state, kl_coef=kl.adapted(distance.mean, len(batch.outcomes), config.kl))
            metrics["actor/kl_measured"] = distance.mean
        return state, metrics

    def settings(self, state: TrainState) -> AlgorithmConfig:
        """The algorithm's settings in the step that ``state`` is about to make, with its KL coefficient."""
        config = self._config.algorithm
        return replace(config, kl=replace(config.kl, coef=kl_coef(state, config.kl)))

    def critic_alone(self, state: TrainState) -> bool:
        """True in the steps of ``critic.warmup_steps``, in which the actor stays as it is."""
        return self._models.critic is not None and state.step < self._config.critic.warmup_steps

    def update(
        self,
        state: TrainState,
        batch: StepBatch,
        policy: Objective,
        settings: AlgorithmConfig,
        first: Objective | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """Make the step's optimizer updates, of the critic and of the actor by ``policy``.

        Args:
            settings: The algorithm's with the KL coefficient of the step.
            first: Of the first update, which then fills ``old_logp`` of its tokens.

        Returns:
            The state with the norms of the updates, and metrics over all ranks.
        """
        config, number, sequences = self._config, state.step, batch.sequences
        actor, critic, alone = self._models.actor, self._models.critic, self.critic_alone(state)
        actor_step = number if critic is None else number - config.critic.warmup_steps
        sums: list[Sums] = []
        updates: list[Sums] = []

        def learn(
            update: int,
            trained: TrainedModel,
            objective: Objective,
            units: list[list[int]],
            lr: float,
            logp: torch.Tensor | None = None,
        ) -> None:
            nonlocal state
            found = trained.backward(sequences, trained.model.micro_batches(sequences, units), objective, logp)
            norm = trained.gradient_norm()
            admitted, state = self._updates.admits(state, objective.name, found, norm, update)
            if admitted:
                trained.step(lr)
                sums.append(found)
                updates.append({f"{objective.name}/grad_norm": (norm, 1.0), f"{objective.name}/lr": (lr, 1.0)})

        self._enter(Phase.UPDATE)
        self._updates.begin()
        if self._algorithm.restarts_optimizer:
            actor.optimizer.restart(config.trainer.optimizer)
        for i, units in enumerate(batch.updates * config.trainer.ppo_epochs):
            if critic is not None:
                learn(
                    i,
                    critic,
                    objectives.returns(settings, sequences),
                    units,
                    learning_rate(config.critic.optimizer, number),
                )
            if not alone:
                own = first if i == 0 else None
                lr = learning_rate(config.trainer.optimizer, actor_step)
                learn(i, actor, own or policy, units, lr, sequences.old_logp if own else None)
        self._models.finish_gathers()
        return state, mean_of_sums(self._ranks.gather(sums)) | mean_of_sums(updates) | self._updates.end(state)


def kl_coef(state: TrainState, config: KLConfig) -> float:
    """KL coefficient of the step that ``state`` is about to make: the setting, or its adapted value."""
    return config.coef if config.target is None or state.kl_coef is None else state.kl_coef


def step_input(batch: StepBatch, algorithm: Algorithm, config: AlgorithmConfig) -> StepInput:
    """Input of an algorithm's advantages; demonstrations have no reward. Every rank calls it."""
    sequences, rows = batch.sequences, batch.rows
    tokens = sequences.together(counts(sequences.mask, sequences.lengths))
    more = len(tokens) - len(rows)
    rewards = [row.reward.score for row in rows] + [0.0] * more
    stats = [row.group_stats or group_stats([row.reward.score]) for row in rows] + [NO_GROUP] * more
    greedy, bootstrap = None, None
    if "greedy" in algorithm.needs:
        scores = [row.greedy.reward.score for row in rows if row.greedy is not None] + [0.0] * more
        greedy = torch.tensor(scores, dtype=torch.float64)
    if sequences.values is not None and isinstance(config, PPOConfig) and config.bootstrap_truncated:
        # The value of the state after the last token stands at that token's own position.
        truncated = torch.tensor([reason == "length" for reason in batch.finish_reasons] + [False] * more)
        bootstrap = torch.where(sequences.held(truncated), sequences.values[sequences.cu_seqlens[1:] - 1], 0.0)
    return StepInput(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        stats=stats,
        cu_seqlens=sequences.cu_seqlens,
        mask=sequences.mask,
        tokens=tokens,
        old_logp=sequences.old_logp,
        ref_logp=sequences.ref_logp,
        values=sequences.values,
        bootstrap=bootstrap,
        greedy=greedy,
        expert=torch.arange(len(tokens)) >= len(rows) if more else None,
        own=None if sequences.share is None else sequences.share.numbers,
        together=sequences.together,
    )


def model_scores(model: Model, trajectories: list[Trajectory], images: StepImages | None = None) -> list[float]:
    """The reward model's score of each trajectory, read after the model's last turn. Every rank calls it.

    Args:
        images: Those of the step; None for a text model.

    Raises DataError, on every rank, where a trajectory has other placeholders than its images need.
    """
    lengths = torch.tensor([sum(map(len, trajectory.answered())) for trajectory in trajectories])
    patches = None
    if images is not None:
        patches = [images.patches(d for at in t.answered_images for d in at.digests) for t in trajectories]
    share = share_of(lengths, patches, [(model, None)])
    held = trajectories if share is None else [trajectories[i] for i in share.numbers.tolist()]
    sequences = of_demonstrations([trajectory.answered() for trajectory in held])
    sequences.share = share
    if images is not None:
        shown = [trajectory.answered_images for trajectory in held]
        on_all_ranks(lambda: images.put(sequences, shown, lambda i: name_of(held[i])))
    if sequences.images is None and any(patches or ()):
        sequences.images = Images.of_text(sequences.lengths)
    outputs = model.outputs(sequences, [model.micro_batches(sequences)])
    found: list[float] = sequences.together(outputs[score_positions(sequences, score_pad(model.hf_config))]).tolist()
    return found
