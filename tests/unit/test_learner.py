"""Decisions of a step between its phases, without a model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.buffer.experience.operators import group_stats
from megarl.buffer.order.draws import ExpertRow
from megarl.config.alarms import AlarmsConfig
from megarl.config.algorithms import AlgorithmConfig, KLConfig, PPOConfig, PreferenceConfig, settings_of
from megarl.config.lora import LoraConfig
from megarl.config.schema import Config, CriticConfig, ModelConfig, ParallelConfig, RolloutConfig, TrainerConfig
from megarl.core.schema import FinishReason, Reward, Trajectory
from megarl.learn import algorithms
from megarl.learn.algorithms import Estimate, StepInput
from megarl.learn.batching import Sequences, micro_batches
from megarl.learn.batching.micro import MicroBatching
from megarl.learn.training import objectives
from megarl.learn.training.objectives import LossTokens
from megarl.train.batch.batch import StepBatch, filter_overlong, make_batch
from megarl.train.inference.inference import Inference
from megarl.train.inference.models import Models
from megarl.train.ranks import Reporter, RunContext, TrainState
from megarl.train.update.learner import Learner, kl_coef, step_input
from tests.trajectories import one_turn


def learner_of(
    config: Config, *, actor: Any = None, reference: Any = None, critic: Any = None, updates: Any = None, **changes: Any
) -> Learner:
    """A learner with stand-ins of models. ``changes``: to the algorithm."""
    algorithm = replace(algorithms.get(config.algorithm.name), **changes)
    for trained in (actor, critic):
        if isinstance(trained, SimpleNamespace):
            trained.model = trained  # its own part
    models: Any = SimpleNamespace(actor=actor, reference=reference, critic=critic)
    models.finish_gathers = partial(Models.finish_gathers, models)
    ranks: Any = SimpleNamespace(gather=list)
    return Learner(config, algorithm, Inference(config, algorithm, models, lambda _: None), updates, ranks)


def batch(reasons: tuple[FinishReason, ...] = ("stop", "length")) -> StepBatch:
    lengths = torch.tensor([4, 5])
    mask = torch.tensor([False, True, True, False, False, True, True, True, False])
    values = torch.arange(9.0)
    sequences = Sequences(
        torch.arange(9), lengths, mask, old_logp=torch.full((9,), -1.0), ref_logp=torch.full((9,), -1.5), values=values
    )
    outcomes: list[Any] = [SimpleNamespace(reward=SimpleNamespace(score=1.0), group_stats=None) for _ in reasons]
    return StepBatch(outcomes, outcomes, sequences, [], list(reasons))


@pytest.mark.parametrize(("step", "moves"), [(0, False), (1, False), (2, True)])
def test_the_coefficient_stays_while_the_critic_learns_alone(step: int, moves: bool) -> None:
    config = PPOConfig(name="ppo", kl=KLConfig(0.1, "k1", "reward", target=0.01, horizon=10))
    learner, state = (
        learner_of(Config(algorithm=config, critic=CriticConfig(warmup_steps=2)), critic=object()),
        TrainState(step=step),
    )
    assert learner.critic_alone(state) is not moves
    after, metrics = learner.estimate(state, batch())
    assert metrics["actor/kl_coef"] == 0.1 and metrics["actor/kl_measured"] == pytest.approx(0.5)
    assert (after.kl_coef is not None) is moves and state.kl_coef is None


def test_without_a_target_the_coefficient_is_the_setting() -> None:
    assert kl_coef(TrainState(kl_coef=0.37), KLConfig(0.1)) == 0.1
    assert kl_coef(TrainState(kl_coef=0.37), KLConfig(0.1, target=0.01)) == 0.37
    assert kl_coef(TrainState(), KLConfig(0.1, target=0.01)) == 0.1


def test_the_estimate_reads_the_adapted_coefficient_in_its_settings() -> None:
    """As the loss does: there is no other place to read it."""
    config = PPOConfig(name="ppo", kl=KLConfig(0.1, "k1", "reward", target=0.01, horizon=10))
    seen: list[float] = []

    def estimate(step: StepInput, settings: AlgorithmConfig) -> Estimate:
        seen.append(settings.kl.coef)
        return Estimate(torch.zeros(9), torch.zeros(9), {})

    learner = learner_of(Config(algorithm=config), estimate=estimate)
    state = TrainState(kl_coef=0.37)
    learner.estimate(state, batch())
    assert seen == [0.37] == [learner.settings(state).kl.coef]


def test_what_stands_behind_a_cut_answer() -> None:
    ppo = algorithms.get("ppo")
    assert step_input(batch(), ppo, PPOConfig()).bootstrap is None
    found = step_input(batch(), ppo, PPOConfig(bootstrap_truncated=True)).bootstrap
    assert found is not None and found.tolist() == [0.0, 8.0]


@pytest.mark.parametrize("needs", [{"old_logp", "ref_logp"}, {"ref_logp"}])
def test_answers_outside_any_pair_have_log_probs(needs: set[str]) -> None:
    """Not 0, which is the log-prob of a certain token, in the mismatch with the engine and in the adaptive KL."""
    scores = [0.0, 1.0, 0.5, 0.5]
    trajectories: list[Any] = [answer(i, score) for i, score in enumerate(scores)]
    model = SimpleNamespace(
        micro_batches=lambda sequences, units: micro_batches(sequences, MicroBatching(rows=2), 0, units),
        outputs=lambda sequences, updates: asked_for(sequences, updates),
    )
    config = Config(algorithm=PreferenceConfig(name="online_dpo"))
    batch = make_batch(trajectories, [], algorithms.get("online_dpo"), config.algorithm, 1)
    assert batch.updates == [[[1, 0]]]
    learner_of(config, actor=model, reference=model, needs=frozenset({"pairs", "group"} | needs)).inference.fill(batch)
    every = torch.full_like(batch.sequences.mask, True, dtype=torch.float32)
    paired = batch.sequences.row < 2
    if "old_logp" in needs:
        assert batch.sequences.old_logp is not None
        assert torch.equal(batch.sequences.old_logp, every)
    assert batch.sequences.ref_logp is not None
    assert torch.equal(batch.sequences.ref_logp, every if "old_logp" in needs else torch.where(paired, 1.0, 0.0))


@pytest.mark.parametrize("updates", [1, 2])
def test_an_answer_in_several_pairs_has_its_log_probs_once(updates: int) -> None:
    """``outputs`` adds up what ranks have found, and two of them may have the same answer."""
    trajectories: list[Any] = [answer(i, score) for i, score in enumerate([0.0, 1.0, 0.5, 0.5])]
    model = SimpleNamespace(
        micro_batches=lambda sequences, units: micro_batches(sequences, MicroBatching(rows=2), 0, units),
        outputs=lambda sequences, updates: asked_for(sequences, updates),
    )
    config = Config(algorithm=PreferenceConfig(name="online_dpo"))
    changes: Any = {
        "needs": frozenset({"pairs", "group", "old_logp", "ref_logp"}),
        "choose_pairs": lambda rewards, settings: [(1, 0), (1, 2)],
    }
    algorithm = replace(algorithms.get("online_dpo"), **changes)
    batch = make_batch(trajectories, [], algorithm, config.algorithm, updates)
    assert [unit for units in batch.updates for unit in units] == [[1, 0], [1, 2]]
    learner_of(config, actor=model, reference=model, **changes).inference.fill(batch)
    every = torch.ones(len(batch.sequences.tokens))
    assert batch.sequences.old_logp is not None and batch.sequences.ref_logp is not None
    assert torch.equal(batch.sequences.old_logp, every) and torch.equal(batch.sequences.ref_logp, every)


@pytest.mark.parametrize(("offline", "filled"), [(True, True), (False, False)])
def test_an_offline_job_has_all_log_probs_from_inference(offline: bool, filled: bool) -> None:
    """It calls ``update`` with an objective of its own, which fills nothing."""
    model = SimpleNamespace(
        micro_batches=lambda sequences, units: micro_batches(sequences, MicroBatching(rows=2), 0, units),
        outputs=lambda sequences, updates: asked_for(sequences, updates),
    )
    step = batch()
    step.updates, step.outcomes, step.rows = [[[0], [1]]], [], []
    learner_of(Config(), actor=model, offline=offline).inference.fill(step)
    assert step.sequences.old_logp is not None and bool(step.sequences.old_logp.any()) is filled


@pytest.mark.parametrize(
    ("lora", "filled"),
    [(LoraConfig(rank=2, dropout=0.1), True), (LoraConfig(rank=2), False), (LoraConfig(dropout=0.1), False)],
)
def test_an_update_that_drops_inputs_gives_no_log_probs(lora: LoraConfig, filled: bool) -> None:
    """Those of inference, which drops none, are the ones that engines can be compared with."""
    model = SimpleNamespace(
        micro_batches=lambda sequences, units: micro_batches(sequences, MicroBatching(rows=2), 0, units),
        outputs=lambda sequences, updates: asked_for(sequences, updates),
    )
    step = batch()
    step.updates, step.outcomes, step.rows = [[[0], [1]]], [], []
    learner_of(Config(model=ModelConfig(lora=lora)), actor=model).inference.fill(step)
    assert step.sequences.old_logp is not None and bool(step.sequences.old_logp.any()) is filled


def asked_for(sequences: Sequences, updates: Any) -> torch.Tensor:
    """1 at the positions of the micro-batches, each of which may be asked for once."""
    found = torch.zeros(len(sequences.tokens))
    for batch in (batch for batches in updates for batch in batches):
        found.index_add_(0, batch.index[batch.index >= 0], torch.ones(int((batch.index >= 0).sum())))
    return found


def answer(index: int, score: float, reason: FinishReason = "stop") -> Trajectory:
    length = index + 2
    return Trajectory(
        rollout_id="r",
        task_id="t",
        group_id="g",
        index=index,
        group_size=4,
        turns=one_turn(range(3), range(length), finish_reason=reason),
        reward=Reward(score, "ok"),
        group_stats=group_stats([0.0, 1.0, 1.0, 0.0]),
    )


REASONS = ("stop", "length", "stop", "length")


def filtered(
    settings: AlgorithmConfig, *, updates: int = 1, demonstrations: Any = (), reasons: Any = REASONS
) -> tuple[Any, StepBatch, list[Any]]:
    """The stand-in of a model, and a group of four answers as far as its advantages; log-probs before the filter."""
    model: Any = SimpleNamespace(
        micro_batches=lambda sequences, units: micro_batches(sequences, MicroBatching(rows=2), 0, units),
        outputs=lambda sequences, asked: -0.5 * asked_for(sequences, asked),
    )
    learner = learner_of(Config(algorithm=settings), actor=model, reference=model)
    trajectories: list[Any] = [answer(i, score, reasons[i]) for i, score in enumerate([0.0, 1.0, 1.0, 0.0])]
    batch = make_batch(trajectories, demonstrations, algorithms.get(settings.name), settings, updates)
    learner.inference.fill(batch)
    old_logp, sampled = batch.sequences.old_logp, batch.sequences.sampled
    recorded = [] if old_logp is None else [old_logp[sampled & (batch.sequences.row == i)].tolist() for i in range(4)]
    filter_overlong(batch, settings)
    learner.estimate(TrainState(), batch)
    return model, batch, recorded


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp_baseline", "reinforce_pp"])
def test_truncated_answers_are_in_no_update_and_the_others_keep_their_group(name: str) -> None:
    """Advantages of the rest are those of numpy: statistics of the whole group, whitening over what is trained on."""
    config = settings_of(name)(name=name, overlong_filtering=True, kl=KLConfig(0.0))
    model, found, recorded = filtered(config, updates=2)
    assert found.updates == [[[0]], [[2]]]
    row, mask = found.sequences.row, found.sequences.mask
    assert torch.bincount(row[mask], minlength=4).tolist() == [2, 0, 4, 0]
    # The mismatch has those of every answer; an estimate of the algorithm's own may read them before the first update.
    first = 0.0 if name != "reinforce_pp" else -0.5
    assert recorded == [[first] * 2, *([-0.5] * (i + 2) for i in range(1, 4))]
    rewards, tokens = np.array([0.0, 1.0, 1.0, 0.0]), np.array([2, 0, 4, 0])
    wanted = rewards - 0.5 if name != "reinforce_pp" else rewards
    if name == "grpo":
        wanted = wanted / (np.sqrt(1 / 3) + 1e-6)
    else:
        mean = (wanted * tokens).sum() / tokens.sum()
        wanted = (wanted - mean) / np.sqrt((tokens * (wanted - mean) ** 2).sum() / (tokens.sum() - 1) + 1e-8)
    assert found.sequences.advantages is not None
    assert torch.allclose(
        found.sequences.advantages, torch.where(mask, torch.tensor(wanted)[row], 0.0).float(), atol=1e-6
    )
    policy = objectives.policy(algorithms.get(name), config, found.sequences)
    counts = [
        policy.count(LossTokens.of(b, found.sequences))
        for units in found.updates
        for b in model.micro_batches(found.sequences, units)
    ]
    assert float(sum(counts)) == 6  # the denominator: tokens of the answers that ended


def test_without_the_filter_truncated_answers_are_trained_on() -> None:
    _, found, _ = filtered(AlgorithmConfig())
    assert found.updates == [[[0], [1], [2], [3]]] and int(found.sequences.mask.sum()) == 2 + 3 + 4 + 5


def test_a_step_of_truncated_answers_alone_has_no_update_but_for_demonstrations() -> None:
    config = AlgorithmConfig(overlong_filtering=True)
    _, found, _ = filtered(config, reasons=["length"] * 4)
    assert found.updates == [] and not found.sequences.mask.any()
    shown = [ExpertRow(np.arange(2), np.arange(3))]
    _, found, _ = filtered(replace(config, name="mix"), reasons=["length"] * 4, demonstrations=shown)
    assert found.updates == [[[4]]] and int(found.sequences.mask.sum()) == 3


def test_a_pair_with_a_truncated_answer_is_left_out() -> None:
    config = PreferenceConfig(name="online_dpo", overlong_filtering=True)
    assert filtered(config, reasons=["stop"] * 4)[1].updates == [[[1, 0]]]
    assert filtered(config, reasons=REASONS)[1].updates == []


@pytest.mark.parametrize(
    ("name", "changes", "infers"),
    [
        ("grpo", {}, True),
        ("grpo", {"kl": KLConfig(0.1, target=0.01)}, False),
        ("reinforce_pp", {}, False),
        ("opmd", {}, True),
    ],
)
def test_log_probs_of_the_first_update_come_with_it(name: str, changes: Any, infers: bool) -> None:
    """Each token's once, by inference or by the first update of the first epoch, and by no other."""
    asked: list[float] = []

    def backward(sequences: Sequences, units: Any, objective: Any, logp: torch.Tensor | None) -> Any:
        if logp is not None:
            logp += asked_for(sequences, [units])
        asked.append(float("nan") if logp is None else float(logp.sum()))
        return {"actor/loss": (1.0, 1.0)}

    model: Any = SimpleNamespace(
        micro_batches=lambda sequences, units: micro_batches(sequences, MicroBatching(rows=2), 0, units),
        outputs=lambda sequences, updates: asked_for(sequences, updates),
        backward=backward,
        gradient_norm=lambda: 1.0,
        step=lambda lr, watch: None,
        finish_gather=lambda: None,
    )
    updates: Any = SimpleNamespace(
        begin=lambda: None, end=lambda state: {}, admits=lambda state, name, sums, norm, update: (True, state)
    )
    settings = settings_of(name)(name=name, **changes)
    alarms = AlarmsConfig(witness=False)  # it computes with a model's gradients
    config = Config(algorithm=settings, trainer=TrainerConfig(ppo_epochs=2), alarms=alarms)
    learner = learner_of(config, actor=model, reference=model, updates=updates, restarts_optimizer=False)
    trajectories: list[Any] = [answer(i, score) for i, score in enumerate([0.0, 1.0, 1.0, 0.0])]
    step = make_batch(trajectories, [], algorithms.get(name), settings, 2)
    learner.inference.fill(step)
    assert step.sequences.old_logp is not None
    by_inference = int(step.sequences.old_logp.sum())
    learner.train_step(TrainState(), step)
    assert torch.equal(step.sequences.old_logp, torch.ones(len(step.sequences.tokens)))
    assert (by_inference < len(step.sequences.tokens)) is infers
    assert [value == value for value in asked] == [infers] + [False] * (2 * len(step.updates) - 1)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("roles", [["actor"], ["critic", "actor"], ["critic"]])
def test_every_epoch_makes_the_same_updates_in_order(epochs: int, roles: list[str]) -> None:
    """As verl's ppo_epochs: mini-batches are cut once; log-probs, values and advantages stay those of the step's
    start. The critic is alone while it warms up. The first update has metrics of its own."""
    critic = "critic" in roles
    made: list[Any] = []

    def model(name: str) -> Any:
        return SimpleNamespace(
            micro_batches=lambda sequences, units: units,
            backward=lambda sequences, units, objective, logp: (
                made.append((objective.name, units)) or {f"{name}/loss": (1.0, 1.0)}
            ),
            gradient_norm=lambda: float(len(made)),
            step=lambda lr, watch: made.append((name, "step")),
            finish_gather=lambda: None,
        )

    numbers: list[int] = []
    updates = SimpleNamespace(
        begin=lambda: None,
        end=lambda state: {},
        admits=lambda state, name, sums, norm, update: (numbers.append(update) or True, state),
    )
    settings = PPOConfig(name="ppo") if critic else AlgorithmConfig()
    warmup_steps = 0 if "actor" in roles else 6
    trainer = TrainerConfig(ppo_epochs=epochs)
    config = Config(algorithm=settings, trainer=trainer, critic=CriticConfig(warmup_steps=warmup_steps))
    learner = learner_of(config, actor=model("actor"), critic=model("critic") if critic else None, updates=updates)
    step = batch()
    step.updates = [[[0]], [[1]]]
    step.sequences.returns = step.sequences.values
    policy = objectives.policy(algorithms.get(settings.name), settings, step.sequences)
    _, metrics = learner.update(TrainState(step=5), step, policy, settings)
    assert made == [
        entry
        for _ in range(epochs)
        for units in step.updates
        for role in roles
        for entry in ((role, units), (role, "step"))
    ]
    assert numbers == [n for n in range(2 * epochs) for _ in roles]
    for role in roles:  # those of the first update stand alone
        assert metrics[f"{role}/first_grad_norm"] < metrics[f"{role}/grad_norm"]
        assert metrics[f"{role}/first_loss"] == 1.0


@pytest.mark.parametrize(("offline", "devices"), [(False, 4 + 6), (True, 4)])
def test_throughput_is_verls(offline: bool, devices: int, tmp_path: Path) -> None:
    """total_num_tokens / (time_per_step * n_gpus), n_gpus those of the job: of verl's compute_throughout_metrics and
    get_n_gpus."""
    recorded: dict[str, float] = {}
    config = Config(
        algorithm=AlgorithmConfig(name="sft" if offline else "grpo"),
        parallel=ParallelConfig(tp=2, dp=2),
        rollout=RolloutConfig(tp=2, replicas=3),
    )
    journal = SimpleNamespace(record_step=lambda step, metrics, used: recorded.update(metrics))
    store: Any = SimpleNamespace(journal=journal)
    reporter = Reporter(RunContext(config, tmp_path, 1, 0), store)
    reporter.timeline.seconds.update({"step": 8.0, "sync": 1.0})
    reporter.record_step(1, {}, tokens=1600)
    assert (
        recorded["perf/total_num_tokens"] == 1600 and recorded["perf/time_per_step"] == recorded["timing_s/step"] == 8.0
    )
    assert recorded["perf/throughput"] == 1600 / (8.0 * devices)
