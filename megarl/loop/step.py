"""What one step of reinforcement learning does with its experiences: inference by every role, advantages, updates.

Shape legend: N sequences of a step, T their positions (``batching.Sequences``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from megarl.algorithms import StepInput, group_stats, kl
from megarl.algorithms.parts import doubles, repeated
from megarl.batching import Sequences, joined, of_demonstrations, of_experiences, response_values
from megarl.checkpoint.score_pad import score_pad
from megarl.config.schema import AlgorithmConfig
from megarl.experience import by_group, with_stats
from megarl.loop.rollouts import Demonstration
from megarl.metrics import Sums, mean_of_sums, spread
from megarl.schema import Experience, GroupStats, Sample
from megarl.training import objectives
from megarl.training.model import FrozenModel, TrainedModel
from megarl.training.objectives import Objective
from megarl.training.optimizer import learning_rate

if TYPE_CHECKING:
    from megarl.loop.session import Session

NO_GROUP = GroupStats(0.0, 0.0, 1)
"""Of a demonstration, which has no reward."""


@dataclass
class StepBatch:
    """The same on every rank; each model takes its share by its own grid."""

    experiences: list[Sample]
    """Without their arrays, which ``sequences`` holds."""
    sequences: Sequences
    """Of the experiences, and of demonstrations behind them."""
    updates: list[list[list[int]]]
    """For each optimizer update the units that it trains on: numbers of sequences that go through the model together."""

    @property
    def outside(self) -> list[list[int]]:
        """Units of the sequences that no update trains on: truncated answers that are filtered, answers that are in no pair."""
        trained = {number for units in self.updates for unit in units for number in unit}
        return [[i] for i in range(len(self.sequences)) if i not in trained]


def gather(s: Session, experiences: list[Experience], demonstrations: Sequence[Demonstration]) -> StepBatch:
    """Sequences of a step, dealt to its updates; demonstrations in equal shares."""
    sequences = of_experiences(experiences)
    filtered = set(overlong(s, experiences))
    units = [unit for unit in _units(s, experiences) if not filtered.intersection(unit)]
    updates = updates_of(units, s.config.trainer.updates_per_step)
    if demonstrations:
        first, updates = len(sequences), updates or [[]]
        sequences = joined(sequences, of_demonstrations(demonstrations))
        dealt = updates_of([[i] for i in range(first, len(sequences))], len(updates), exactly=True)
        updates = [usual + expert for usual, expert in zip(updates, dealt, strict=True)]
    return StepBatch([Sample.of(e) for e in experiences], sequences, updates)


def overlong(s: Session, experiences: Sequence[Experience | Sample]) -> list[int]:
    """Numbers of the answers that ``algorithm.overlong_filtering`` leaves out of the loss."""
    if not s.config.algorithm.overlong_filtering:
        return []
    return [i for i, experience in enumerate(experiences) if experience.finish_reason == "length"]


def filter_overlong(s: Session, batch: StepBatch) -> None:
    """Take truncated answers out of the loss mask, after ``infer``: the store and ``mismatch`` have log-probs of every answer."""
    if numbers := overlong(s, batch.experiences):
        sequences = batch.sequences
        kept = torch.ones(len(sequences), dtype=torch.bool)
        kept[numbers] = False
        sequences.mask = sequences.mask & repeated(kept, sequences.lengths)


def _units(s: Session, experiences: list[Experience]) -> list[list[int]]:
    choose = s.algorithm.choose_pairs
    if choose is None:
        return [[i] for i in range(len(experiences))]
    units, start = [], 0
    for group in by_group(experiences):
        pairs = choose([e.reward.score for e in group], s.config.algorithm)
        units += [[start + chosen, start + rejected] for chosen, rejected in pairs]
        start += len(group)
    return units


def updates_of(units: Sequence[list[int]], updates: int, *, exactly: bool = False) -> list[list[list[int]]]:
    """Units in order in ``updates`` equal parts; fewer parts when there are fewer units, unless ``exactly`` so many are asked for."""
    updates = updates if exactly else min(updates, len(units))
    cuts = [u * len(units) // updates for u in range(updates + 1)] if updates else []
    return [list(units[start:end]) for start, end in itertools.pairwise(cuts)]


def infer(s: Session, batch: StepBatch) -> None:
    """Fill what the algorithm needs: log-probs under the weights that the update starts from, the reference's, values."""
    sequences = batch.sequences
    # The store and the mismatch take log-probs of every answer, the adaptive KL of those that ``filter_overlong`` leaves.
    rest = batch.outside if "old_logp" in s.algorithm.needs else []
    cut = set(overlong(s, batch.experiences))
    kept = [unit for unit in rest if not cut.intersection(unit)]

    def answers(model: FrozenModel, others: list[list[int]] = kept) -> torch.Tensor:
        asked = [*batch.updates, others] if others else batch.updates
        return model.answers(sequences, [model.micro_batches(sequences, units) for units in asked])

    if "old_logp" in s.algorithm.needs:
        sequences.old_logp = answers(s.actor, rest)
        if s.position.rank == 0:
            s.store.record_old_logp(batch.experiences, response_values(sequences.old_logp, batch.experiences))
    if s.roles.reference is not None:
        sequences.ref_logp = answers(s.roles.reference)
    if s.roles.critic is not None:
        sequences.values = answers(s.roles.critic)


def score(s: Session, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
    """The experiences with the reward model's scores of the whole answers in their rewards, and metrics; as they are without one."""
    model = s.roles.reward_model
    if model is None:
        return experiences, {}
    sequences = of_experiences(experiences)
    scores = model.answers(sequences, [model.micro_batches(sequences)])[sequences.scored(score_pad(model.hf_config))].tolist()
    return add_scores(experiences, scores, s.config.reward_model.coef), spread("reward_model/score", scores)


def add_scores(experiences: Sequence[Experience], scores: Sequence[float], coef: float) -> list[Experience]:
    """The rewards with a reward model's scores (one for each, of the whole answer) in them; group statistics are taken anew."""
    scored = [
        replace(e, reward=replace(e.reward, score=e.reward.score + coef * score, parts={**e.reward.parts, "model": score}))
        for e, score in zip(experiences, scores, strict=True)
    ]
    return [experience for group in by_group(scored) for experience in with_stats(group)]


def estimate(s: Session, batch: StepBatch) -> dict[str, float]:
    """Advantages (and returns) of every token, and the coefficient of the KL for the next step; metrics of both."""
    sequences, config = batch.sequences, s.config.algorithm
    metrics: dict[str, float] = {}
    if "advantages" in s.algorithm.needs:
        result = s.algorithm.step_advantages(_step_input(s, batch), config)
        sequences.advantages, sequences.returns = result.advantages, result.returns
        metrics |= result.metrics
    if config.kl.target is not None and sequences.old_logp is not None and sequences.ref_logp is not None:
        metrics["actor/kl_coef"] = kl_coef(s)
        distance = kl.mean(sequences.old_logp, sequences.ref_logp, sequences.sampled, config.kl.estimator)
        # An actor that stays says nothing of the coefficient, and neither does a step without a token in the loss.
        if not critic_alone(s) and bool(sequences.sampled.any()):
            adapted = kl.adapted(kl_coef(s), distance, len(batch.experiences), config.kl)
            s.state = replace(s.state, kl_coef=adapted)
        metrics["actor/kl_measured"] = distance
    return metrics


def kl_coef(s: Session) -> float:
    """Of the step at hand: the setting, or what it has been adapted to."""
    config = s.config.algorithm.kl
    return config.coef if config.target is None or s.state.kl_coef is None else s.state.kl_coef


def critic_alone(s: Session) -> bool:
    """Whether the step is one of ``critic.warmup_steps``, in which the actor stays as it is."""
    return s.roles.critic is not None and s.state.step < s.config.critic.warmup_steps


def _step_input(s: Session, batch: StepBatch) -> StepInput:
    sequences, experiences = batch.sequences, batch.experiences
    more = len(sequences) - len(experiences)
    rewards = [e.reward.score for e in experiences] + [0.0] * more
    stats = [e.group_stats or group_stats([e.reward.score]) for e in experiences] + [NO_GROUP] * more
    greedy, bootstrap = None, None
    if "greedy" in s.algorithm.needs:
        scores = [e.greedy.reward.score for e in experiences if e.greedy is not None] + [0.0] * more
        greedy = torch.tensor(scores, dtype=torch.float64)
    if sequences.values is not None and s.config.algorithm.bootstrap_cut:
        # The value of the state behind the last token stands at that token's own position.
        cut = torch.tensor([e.finish_reason == "length" for e in experiences] + [False] * more)
        bootstrap = torch.where(cut, sequences.values[sequences.cu_seqlens[1:] - 1], 0.0)
    return StepInput(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        stats=stats,
        cu_seqlens=sequences.cu_seqlens,
        mask=sequences.mask,
        old_logp=sequences.old_logp,
        ref_logp=sequences.ref_logp,
        values=sequences.values,
        bootstrap=bootstrap,
        greedy=greedy,
        expert=sequences.expert,
        kl_coef=kl_coef(s),
    )


def update(s: Session, batch: StepBatch, policy: Objective, settings: AlgorithmConfig) -> dict[str, float]:
    """The step's optimizer updates, of the critic and of the actor by ``policy``; metrics over all ranks.

    ``settings``: the algorithm's with the KL coefficient of the step.
    """
    config, number, sequences = s.config, s.state.step, batch.sequences
    critic, alone = s.roles.critic, critic_alone(s)
    actor_step = number if critic is None else number - config.critic.warmup_steps
    sums: list[Sums] = []
    updates: list[Sums] = []

    def learn(update: int, model: TrainedModel, objective: Objective, units: list[list[int]], lr: float) -> None:
        found = model.backward(sequences, model.micro_batches(sequences, units), objective)
        norm = model.gradient_norm()
        if s.guard.admits(objective.name, found, norm, update):
            model.step(lr)
            sums.append(found)
            updates.append({f"{objective.name}/grad_norm": (norm, 1.0), f"{objective.name}/lr": (lr, 1.0)})

    s.guard.begin()
    if s.algorithm.restarts_optimizer:
        s.actor.optimizer.restart(config.trainer.optimizer)
    for i, units in enumerate(batch.updates * config.trainer.ppo_epochs):
        if critic is not None:
            learn(i, critic, objectives.returns(settings, sequences), units, learning_rate(config.critic.optimizer, number))
        if not alone:
            learn(i, s.actor, policy, units, learning_rate(config.trainer.optimizer, actor_step))
    return mean_of_sums(s.gather(sums)) | mean_of_sums(updates) | s.guard.end()


def mismatch(sequences: Sequences) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's for the same weights and tokens."""
    old, engine, sampled = sequences.old_logp, sequences.engine_logp, sequences.sampled
    if old is None or engine is None or not bool(sampled.any()):
        return {}
    logp = doubles(sampled, lambda a, b: (a - b).abs(), old, engine)
    logp_mean, logp_max = float(logp.mean()), float(logp.max())
    del logp
    probs = doubles(sampled, lambda a, b: (a.exp() - b.exp()).abs(), old, engine)
    probs_mean, probs_max = float(probs.mean()), float(probs.max())
    return {
        "training/rollout_logp_diff_mean": logp_mean,
        "training/rollout_probs_diff_mean": probs_mean,
        "training/rollout_logp_diff_max": logp_max,
        "training/rollout_probs_diff_max": probs_max,
    }
