"""Training on a step's batch: advantages, optimizer updates, and the refusal of bad ones.

An update is checked after its gradients are computed and before they are applied. All ranks decide from shared numbers,
so the decision is the same whichever rank of whichever grid found the first NaN.

Shape legend: N sequences of a step, T their positions (``batching.Sequences``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from megarl.buffer.experience import with_group_stats
from megarl.buffer.experience.operators import group_stats
from megarl.buffer.order.draws import ExpertRow
from megarl.config import Config
from megarl.config.algorithms import AlgorithmConfig, KLConfig, PPOConfig, reads_distribution
from megarl.config.derived import teachers_at
from megarl.config.schema import TeacherConfig, UpdateFilterConfig
from megarl.core.errors import NonRetryableError
from megarl.core.metrics import Sums, mean_of_sums
from megarl.core.schema import GroupStats, Trajectory, WeightsVersion
from megarl.learn import plain
from megarl.learn.algorithms import Algorithm, StepInput
from megarl.learn.algorithms.terms import token_rewards
from megarl.learn.algorithms.terms.reduction import counts
from megarl.learn.memory.phases import Phase
from megarl.learn.training import objectives
from megarl.learn.training.model import TrainedModel
from megarl.learn.training.objectives import Objective
from megarl.learn.training.optimizer import learning_rate
from megarl.learn.training.streaming import unwatched
from megarl.train.batch.batch import StepBatch, make_batch
from megarl.train.batch.images import StepImages
from megarl.train.batch.samples import WithArrays
from megarl.train.inference.distributions import divergence_of, teacher_weights
from megarl.train.inference.inference import Inference
from megarl.train.ranks import Ranks, Reporter, TrainState
from megarl.train.update.critic_witness import CriticWitness
from megarl.train.update.frozen import FrozenParameters
from megarl.train.update.optimizer_witness import OptimizerWitness
from megarl.train.update.router_witness import RouterWitness
from megarl.train.update.witness import Witness


class RollBack(Exception):
    """Roll the run back to its newest checkpoint; raised on every rank. The text has the reason."""


class UpdateFilter:
    """Admits or rejects each update of a step, and counts bad steps."""

    def __init__(self, config: UpdateFilterConfig, reporter: Reporter) -> None:
        self._config = config
        self._reporter = reporter
        self._left_out = 0
        self._bad = False
        """True if the current step has a bad update."""
        self._in_a_row = 0
        """Number of consecutive bad steps; steps repeated after a rollback reset it only after the bad step."""
        self._last_bad = (False, -1)

    def begin(self) -> None:
        """Begin a step's updates."""
        self._left_out, self._bad = 0, False

    def end(self, state: TrainState) -> dict[str, float]:
        """End a step's updates; return its metrics."""
        if not self._bad and _place(state) >= self._last_bad:
            self._in_a_row = 0
        return {"training/skipped_updates": float(self._left_out), "training/rollbacks": float(state.rollbacks)}

    def admits(
        self, state: TrainState, model: str, sums: Sums, norm: float, update: int = 0
    ) -> tuple[bool, TrainState]:
        """Return False for an update to skip, and the state with the norms that define spikes.

        Every rank calls it.

        Args:
            model: ``actor`` or ``critic``.
            sums: Sums of ``TrainedModel.backward``; they include the loss on ranks that report for a replica.
            norm: Gradient norm before clipping.
            update: Number within the step, counted from 0.

        Raises:
            RollBack: the setting demands it.
            NonRetryableError: the setting is ``stop``, or ``max_bad_steps`` steps in a row were bad.
        """
        config = self._config
        losses = [total for name, (total, _) in sums.items() if name.endswith("/loss")]
        finite = math.isfinite(norm) and all(map(math.isfinite, losses))
        # First number: 1 if some rank has a non-finite value. Second: the largest finite norm.
        shared = torch.tensor([0.0 if finite else 1.0, norm if math.isfinite(norm) else 0.0], dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        before = state.grad_norms.get(model, [])
        if shared[0]:
            reason, action, setting = _not_finite(losses, norm), config.on_nonfinite, "on_nonfinite"
        elif (usual := _usual(before, config.spike_factor, config.spike_window)) is not None and float(
            shared[1]
        ) > usual[1]:
            reason = (
                f"the gradient's norm is {norm:.4g}, above {config.spike_factor:g} times the median {usual[0]:.4g} of "
                f"the last {len(before)} updates"
            )
            action, setting = config.on_spike, "on_spike"
        else:
            # An update with zero gradient is no measure: all its groups have zero variance.
            if config.spike_factor is not None and shared[1] > 0:
                norms = [*before, float(shared[1])][-config.spike_window :]
                state = replace(state, grad_norms={**state.grad_norms, model: norms})
            return True, state
        where = f"{'warm start, ' if state.warming_up else ''}step {state.step + 1}, update {update + 1} of the {model}"
        self._refuse(state, f"{where}: {reason}", action, setting)
        event = {"step": state.step + 1, "update": update + 1, "model": model, "reason": reason, "action": action}
        self._reporter.event("bad_update", event)
        if action == "rollback":
            raise RollBack(f"{where}: {reason}")
        self._reporter.log(f"WARNING: {where}: {reason}; the update is left out (trainer.update_filter.{setting}=skip)")
        self._left_out += 1
        return False, state

    def _refuse(self, state: TrainState, what: str, action: str, setting: str) -> None:
        """Count a bad step. Raises NonRetryableError if the job must end."""
        if action == "stop":
            raise NonRetryableError(
                f"{what} (trainer.update_filter.{setting}=stop); look at the data and the learning rate of that step, "
                "or set it to skip or rollback to go on without it"
            )
        if not self._bad:
            self._bad, self._last_bad = True, max(self._last_bad, _place(state))
            self._in_a_row += 1
        if self._in_a_row >= self._config.max_bad_steps:
            raise NonRetryableError(
                f"{what}; {self._in_a_row} steps in a row had such updates "
                f"(trainer.update_filter.max_bad_steps={self._config.max_bad_steps}), so "
                "it is no passing fault: lower the learning rate, look at rewards and data"
                + (", raise trainer.update_filter.spike_factor" if setting == "on_spike" else "")
                + ", or go on from an earlier checkpoint by removing the later ones"
            )


def _place(state: TrainState) -> tuple[bool, int]:
    return not state.warming_up, state.step


def _not_finite(losses: Sequence[float], norm: float) -> str:
    mine = next((loss for loss in losses if not math.isfinite(loss)), None)
    everyone: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    bad = [(rank, loss) for rank, loss in enumerate(everyone) if loss is not None]
    told = (
        f"the loss is {bad[0][1]} on rank{'s' * (len(bad) > 1)} {', '.join(str(rank) for rank, _ in bad)}, "
        if bad
        else ""
    )
    return f"{told}the gradient's norm is {norm}"


def _usual(norms: Sequence[float], factor: float | None, window: int) -> tuple[float, float] | None:
    """Return (median, norm limit for a spike) once the window is full, else None."""
    if factor is None or len(norms) < window:
        return None
    median = statistics.median(norms[-window:])
    return median, factor * median


NO_GROUP = GroupStats(0.0, 0.0, 1)
"""Group statistics of a demonstration, which has no reward."""


class Learner:
    """Makes batches of a job's steps and trains on them. Every rank makes the same calls.

    Args:
        inference: The models, with the forward passes before an update.
    """

    def __init__(
        self, config: Config, algorithm: Algorithm, inference: Inference, updates: UpdateFilter, ranks: Ranks
    ) -> None:
        self.config, self.algorithm, self._updates, self._ranks = config, algorithm, updates, ranks
        self.inference, self._models = inference, inference.models
        self._frozen = FrozenParameters()
        self.with_arrays: WithArrays = list
        """Reads the arrays of trajectories that the store's reader returned without them; set by ``services_of``."""

    def batch_of(
        self,
        trajectories: Sequence[Trajectory],
        demonstrations: Sequence[ExpertRow] = (),
        lags: Mapping[WeightsVersion, int] | None = None,
        images: StepImages | None = None,
    ) -> StepBatch:
        """Make the batch of whole groups, with group statistics; this rank holds its share of the tokens. Every rank
        calls it, because arrays that are still in the store are read here.

        Arguments and errors as in ``make_batch``.
        """
        config, share = self.config, self.inference.share
        settings = (self.algorithm, config.algorithm, config.trainer.updates_per_step, lags, images, share)
        replays = config.rollout.routing_replay
        return make_batch(
            with_group_stats(trajectories), demonstrations, *settings, self.with_arrays, replays_routing=replays
        )

    def train_step(self, state: TrainState, batch: StepBatch) -> tuple[TrainState, dict[str, float]]:
        """Estimate advantages and make the step's updates; return the new state, and metrics."""
        settings = self.settings(state)
        state, estimated = self.estimate(state, batch)
        teachers = teachers_at(self.config.teachers, state.step)
        taught = divergence_of(batch, settings, teachers) if reads_distribution(settings) else None
        policy = partial(objectives.policy, self.algorithm, settings, batch.sequences, taught=taught)
        first = policy(unchanged=True) if self.inference.first_update_infers else None
        witness = None
        if self.config.alarms.witness and plain.covers(settings) and not self.critic_alone(state) and batch.updates:
            witness = Witness(batch, settings)
        state, updated = self.update(state, batch, policy(), settings, first, witness)
        return state, estimated | updated

    def estimate(self, state: TrainState, batch: StepBatch) -> tuple[TrainState, dict[str, float]]:
        """Compute advantages (and returns) of every token; return the state with the next step's KL coefficient, and
        metrics."""
        sequences, config = batch.sequences, self.settings(state)
        metrics: dict[str, float] = {}
        if "advantages" in self.algorithm.needs:
            teachers = teachers_at(self.config.teachers, state.step)
            result = self.algorithm.step_advantages(step_input(batch, self.algorithm, config, teachers), config)
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
            distance = token_rewards.totals(sequences.old_logp, sequences.ref_logp, kept, config.kl.estimator)
            # A frozen actor does not measure the coefficient, nor does a step without tokens in the loss.
            if not self.critic_alone(state) and distance.number:
                state = replace(state, kl_coef=token_rewards.adapted(distance.mean, len(batch.outcomes), config.kl))
            metrics["actor/kl_measured"] = distance.mean
        return state, metrics

    def settings(self, state: TrainState) -> AlgorithmConfig:
        """Return the algorithm's settings for the next step of ``state``, with its KL coefficient."""
        config = self.config.algorithm
        return replace(config, kl=replace(config.kl, coef=kl_coef(state, config.kl)))

    def critic_alone(self, state: TrainState) -> bool:
        """True in the steps of ``critic.warmup_steps``, while the actor is frozen."""
        return self._models.critic is not None and state.step < self.config.critic.warmup_steps

    def update(
        self,
        state: TrainState,
        batch: StepBatch,
        policy: Objective,
        settings: AlgorithmConfig,
        first: Objective | None = None,
        witness: Witness | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """Make the step's optimizer updates: of the critic, and of the actor by ``policy``.

        Args:
            settings: The algorithm's settings with the step's KL coefficient.
            first: Objective of the first update, which then fills ``old_logp`` of its tokens.
            witness: Computes the actor's updates a second time; None for none.

        Returns:
            The state with the updates' gradient norms, and metrics over all ranks.
        """
        config, number, sequences = self.config, state.step, batch.sequences
        actor, critic, alone = self._models.actor, self._models.critic, self.critic_alone(state)
        actor_step = number if critic is None else number - config.critic.warmup_steps
        sums: list[Sums] = []
        updates: list[Sums] = []
        differences: dict[str, float] = {}
        norms: list[float] = []
        several = len(batch.updates) * config.trainer.ppo_epochs > 1
        of_optimizer = None if witness is None else OptimizerWitness(config.trainer.optimizer, actor_step)
        of_routers = None if witness is None else RouterWitness(batch, actor, config.model.router, number)
        of_critic = None
        if witness is not None and critic is not None and isinstance(settings, PPOConfig):
            of_critic = CriticWitness(batch, settings)

        def learn(
            update: int,
            trained: TrainedModel,
            objective: Objective,
            units: list[list[int]],
            lr: float,
            logp: torch.Tensor | None = None,
            witness: Witness | None = None,
        ) -> None:
            nonlocal state
            watched = objective
            if witness is not None:
                watched = witness.watching(objective, update, unchanged=logp is not None)
            if of_routers is not None and trained is actor:
                of_routers.begin(update)
            found = trained.backward(sequences, trained.model.micro_batches(sequences, units), watched, logp)
            if of_routers is not None:
                of_routers.end()
            norm = trained.gradient_norm()
            if witness is not None and of_optimizer is not None:
                differences.update(witness.differences(trained, found))
                norms.append(norm)
                self._frozen.add(trained)
                of_optimizer.before(trained)
            admitted, state = self._updates.admits(state, objective.name, found, norm, update)
            if admitted:
                trained.step(lr, unwatched if of_optimizer is None else of_optimizer.around)
                if witness is not None and of_optimizer is not None:
                    of_optimizer.after()
                name = objective.name
                own = {f"{name}/grad_norm": (norm, 1.0), f"{name}/lr": (lr, 1.0)}
                if several and update == 0:  # a mean over updates hides whether a loss or a gradient differed first
                    own[f"{name}/first_grad_norm"] = (norm, 1.0)
                    if (total := found.get(f"{name}/loss")) is not None:
                        found = {**found, f"{name}/first_loss": total}
                sums.append(found)
                updates.append(own)

        self.inference.enter(Phase.UPDATE)
        self._updates.begin()
        if self.algorithm.restarts_optimizer:
            actor.optimizer.restart(config.trainer.optimizer)
        for i, units in enumerate(batch.updates * config.trainer.ppo_epochs):
            if critic is not None:
                values = objectives.returns(settings, sequences)
                learn(
                    i,
                    critic,
                    of_critic.watching(values, i) if of_critic else values,
                    units,
                    learning_rate(config.critic.optimizer, number),
                )
            if not alone:
                own = first if i == 0 else None
                lr = learning_rate(config.trainer.optimizer, actor_step)
                old = sequences.old_logp if own else None
                learn(i, actor, own or policy, units, lr, old, witness)
        self._models.finish_gathers()
        if of_optimizer is not None:
            differences |= largest_of_ranks(of_optimizer.metrics() | self._frozen.metrics())
            spread = norm_spread(norms)
            differences["check/gradient"] = max(spread, differences.get("check/gradient", 0.0))
        if of_routers is not None:
            differences |= of_routers.metrics()
        if of_critic is not None:
            differences |= of_critic.metrics()
        metrics = mean_of_sums(self._ranks.gather(sums)) | mean_of_sums(updates) | differences
        return state, metrics | self._updates.end(state)


def largest_of_ranks(metrics: dict[str, float]) -> dict[str, float]:
    """Return the largest value of each metric over all ranks, which call it with the same names."""
    values = torch.tensor(list(metrics.values()), dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(metrics, values.tolist(), strict=True))


def norm_spread(norms: Sequence[float]) -> float:
    """Return the largest relative difference between ranks of an update's gradient norm, by which each rank clips."""
    if not norms:
        return 0.0
    ends = torch.tensor([*norms, *(-norm for norm in norms)], dtype=torch.float64)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    largest, smallest = ends[: len(norms)], -ends[len(norms) :]
    return float(((largest - smallest) / largest.clamp(min=1e-30)).max())


def kl_coef(state: TrainState, config: KLConfig) -> float:
    """Return the KL coefficient of the next step of ``state``: the setting, or its adapted value."""
    return config.coef if config.target is None or state.kl_coef is None else state.kl_coef


def step_input(
    batch: StepBatch, algorithm: Algorithm, config: AlgorithmConfig, teachers: Mapping[str, TeacherConfig] = {}
) -> StepInput:
    """Make the input of an algorithm's advantages; demonstrations have no reward. Every rank calls it."""
    sequences, rows = batch.sequences, batch.rows
    tokens = sequences.together(counts(sequences.mask, sequences.lengths))
    more = len(tokens) - len(rows)
    rewards = [row.reward.score for row in rows] + [0.0] * more
    stats = [row.group_stats or group_stats([row.reward.score]) for row in rows] + [NO_GROUP] * more
    greedy, bootstrap, weights = None, None, None
    if sequences.teacher_logp is not None:
        weights = teacher_weights(batch.teachers, teachers)
    if "greedy" in algorithm.needs:
        scores = [row.greedy.reward.score for row in rows if row.greedy is not None] + [0.0] * more
        greedy = torch.tensor(scores, dtype=torch.float64)
    if sequences.values is not None and isinstance(config, PPOConfig) and config.bootstrap_truncated:
        # The value of the state after the last token is at that token's position.
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
        teacher_logp=sequences.teacher_logp,
        values=sequences.values,
        bootstrap=bootstrap,
        greedy=greedy,
        teacher_weights=weights,
        taught=batch.taught,
        expert=torch.arange(len(tokens)) >= len(rows) if more else None,
        own=None if sequences.share is None else sequences.share.numbers,
        together=sequences.together,
    )
