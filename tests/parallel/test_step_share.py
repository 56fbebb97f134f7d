"""A whole step on ranks that hold shares of it: the bytes of each, and the bits of ranks that hold all of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.core.config.algorithms import AlgorithmConfig, KLConfig, MixConfig, PPOConfig, PreferenceConfig
from megarl.core.config.job import SyncConfig
from megarl.core.config.schema import (
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainerConfig,
    UpdateFilterConfig,
)
from megarl.core.schema import Reward, Trajectory, Turn, WeightsSpan, WeightsVersion
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, save_tiny_qwen3

OLD, NEW = WeightsVersion(1, 1), WeightsVersion(1, 2)
LAGS = {OLD: 2, NEW: 0}
GROUP = 8


def trajectories_of(number: int, longest: int, *, lines: bool = False) -> list[Trajectory]:
    """Answers of mixed lengths, a long tail among them, in groups of eight. ``lines``: every third is of two samples,
    every fifth truncated, and older weights have begun every fourth."""
    random = np.random.default_rng(5)
    lengths = np.minimum(np.exp(random.normal(np.log(longest / 8), 1.0, number)), longest).astype(int) + 3
    found = []
    for i, length in enumerate(lengths.tolist()):
        ids = random.integers(2, VOCAB, length + 4).astype(np.int32)
        logp = -random.random(length, dtype=np.float32)
        spans = (WeightsSpan(0, length, NEW),)
        if lines and i % 4 == 1:
            spans = (WeightsSpan(0, 2, OLD), WeightsSpan(2, length, NEW))
        reason: Any = "length" if lines and i % 5 == 2 else "stop"
        turns = [Turn("user", ids[:4]), Turn("model", ids[4:], 0, logp, spans, reason, float(i % 2))]
        if lines and i % 3 == 0:
            turns += [Turn("user", ids[1:4]), Turn("model", ids[4:7], 2, logp[:3], (WeightsSpan(0, 3, NEW),), "stop")]
        score = Reward(float(random.integers(0, 3)), "ok")
        found.append(Trajectory("r", f"t{i // GROUP}", f"g{i // GROUP}", i % GROUP, GROUP, tuple(turns), score))
    return found


@dataclass(frozen=True)
class Case:
    settings: AlgorithmConfig
    actor: ParallelConfig
    others: ParallelConfig | None = None
    """Of reference and critic."""
    packing: bool = True
    updates: int = 2
    lines: bool = False
    shown: int = 0
    """Demonstrations."""


def learner_of(path: str, case: Case, limit: int) -> Any:
    """A learner with models of its own on the ranks of this world."""
    from megarl.learn import algorithms
    from megarl.learn.parallel import groups
    from megarl.learn.training.model import FrozenModel, TrainedModel, micro_batching_for
    from megarl.learn.training.schedule import Head
    from megarl.train.rank.ranks import Ranks
    from megarl.train.update.learner import Learner
    from megarl.train.update.models import Models
    from megarl.train.update.updates import UpdateFilter
    from megarl.weights.checkpoint.formats import hf

    trainer = TrainerConfig(
        packing=case.packing, max_tokens_per_micro_batch=limit, micro_batch_size=2, updates_per_step=case.updates
    )
    model, optimizer = ModelConfig(path=path, dtype="float32"), OptimizerConfig(lr=1e-2)
    config = Config(model=model, parallel=case.actor, algorithm=case.settings, trainer=trainer)
    algorithm, hf_config = algorithms.get(case.settings.name), hf.read_hf_config(Path(path))
    groups.initialize(case.actor, seed=1)
    others = case.others or case.actor
    grid = {} if case.others is None else {"grid": groups.Grid(others, seed=1).active}
    actor = TrainedModel(hf_config, model, case.actor, Head(VOCAB), micro_batching_for(case.actor, trainer), optimizer)
    limits = micro_batching_for(others, trainer)
    reference = FrozenModel(hf_config, model, others, Head(VOCAB), limits, **grid)
    critic = None
    if "critic" in algorithm.roles:
        critic = TrainedModel(hf_config, model, others, None, limits, optimizer, **grid)
    for each in (actor, reference):
        each.load_hf(Path(path))
    if critic is not None:
        critic.load_hf(Path(path), score="zeros")
    reporter: Any = SimpleNamespace(log=lambda text: None, event=lambda kind, data: None)
    models: Any = SimpleNamespace(actor=actor, reference=reference, critic=critic)
    models.finish_gathers = partial(Models.finish_gathers, models)
    updates = UpdateFilter(UpdateFilterConfig(), reporter)
    return Learner(config, algorithm, models, updates, Ranks(), lambda phase: None)


def batch_of(learner: Any, case: Case, number: int, longest: int, share_of: Any) -> Any:
    from megarl.explore.experience import with_group_stats
    from megarl.explore.order.draws import ExpertRow
    from megarl.train.update.batch import make_batch

    shown = [ExpertRow(np.arange(2, 6 + i), np.arange(2, 9 + i)) for i in range(case.shown)]
    given = with_group_stats(trajectories_of(number, longest, lines=case.lines))
    lags = LAGS if case.lines else None
    return make_batch(given, shown, learner._algorithm, case.settings, case.updates, lags, None, share_of)


def bytes_held(rank: int, path: str, case: Case) -> tuple[int, int, int]:
    """Runs in each rank: bytes of its sequences with all that a step fills, of the whole step's, and sequences held."""
    learner = learner_of(path, case, limit=2048)
    sizes = []
    for share_of in (learner.share, lambda plan: None):
        sequences = batch_of(learner, case, 512, 1024, share_of).sequences
        for name in ("old_logp", "ref_logp", "advantages"):
            setattr(sequences, name, torch.zeros(len(sequences.tokens)))
        sizes.append(sequences)
    return sizes[0].nbytes, sizes[1].nbytes, len(sizes[0])


GRPO = AlgorithmConfig(name="grpo", kl=KLConfig(0.1, "k3"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), layers=2)


@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize("dp", [2, 4])
def test_a_rank_holds_its_share_of_the_bytes(model: Path, dp: int, updates: int) -> None:
    """Of 512 sequences of mixed lengths, packed: padded rows are dealt in turn, whatever their lengths."""
    found = run_grid(dp, bytes_held, str(model), Case(GRPO, ParallelConfig(dp=dp), updates=updates))
    assert sum(number for *_, number in found) == 512
    assert all(own <= 1.1 / dp * whole for own, whole, _ in found)


CASES = {
    "grpo": Case(GRPO, ParallelConfig(dp=4)),
    "padded": Case(GRPO, ParallelConfig(dp=2), packing=False),
    "lines": Case(
        replace(GRPO, aggregation="seq_mean_token_mean", overlong_filtering=True, segments="current", turn_rewards=0.5),
        ParallelConfig(dp=2),
        lines=True,
    ),
    "several grids": Case(
        replace(GRPO, kl=KLConfig(0.1, "k3", target=0.01)), ParallelConfig(tp=2, dp=2), ParallelConfig(dp=4), lines=True
    ),
    "critic": Case(
        PPOConfig(name="ppo", kl=KLConfig(0.1, "k1", "reward"), whiten_advantages=True, bootstrap_truncated=True),
        ParallelConfig(tp=2, dp=2),
        ParallelConfig(pp=2, dp=2),
        lines=True,
    ),
    "demonstrations": Case(MixConfig(name="mix", mu=0.3, kl=KLConfig(0.1)), ParallelConfig(dp=2), lines=True, shown=5),
    "pairs": Case(PreferenceConfig(name="online_dpo", beta=0.3), ParallelConfig(dp=2)),
    "one rank": Case(GRPO, ParallelConfig(tp=2)),
}


def step(rank: int, path: str, case: Case) -> dict[str, Any]:
    """Runs in each rank: the same step with its share and with all sequences; which results have other bits."""
    from megarl.train.rank.state import TrainState
    from megarl.train.update.batch import filter_overlong
    from megarl.train.update.gap import engine_gap
    from megarl.train.update.kept import kept_batch

    learner = learner_of(path, case, limit=200)
    models = learner._models
    loose = replace(learner._config, sync=SyncConfig(sample_tolerance=1e9))  # the engine's log-probs are made up
    found, held = [], []
    for share_of in (learner.share, lambda plan: None):
        for model in (models.actor, models.critic):
            if model is not None:
                model.load_hf(Path(path), score="zeros")
                model.optimizer.restart(OptimizerConfig(lr=1e-2))
        batch = batch_of(learner, case, 40, 64, share_of)
        learner.infer(batch)
        sampled = batch.sequences.sampled
        filter_overlong(batch, case.settings)
        kept = kept_batch(batch, models.actor.micro_batching)
        state, metrics = learner.train_step(TrainState("rl"), batch)
        metrics |= engine_gap(batch, sampled, loose)
        weights = [model.tensors for model in (models.actor, models.critic) if model is not None]
        found.append({
            "batch": (batch.updates, batch.outside, batch.trained, batch.excluded, batch.finish_reasons),
            "kept": {name: value.tolist() for name, value in vars(kept).items()} if kept is not None else None,
            "state": state,
            "metrics": metrics,
            "weights": [{name: t.tolist() for name, t in each.items()} for each in weights],
        })  # fmt: skip
        held.append(len(batch.sequences))
    own, whole = found
    return {
        "different": [name for name in own if own[name] != whole[name]],
        "metrics": {n: (own["metrics"].get(n), v) for n, v in whole["metrics"].items() if own["metrics"].get(n) != v},
        "moved": bool(whole["metrics"]["actor/grad_norm"] > 0),
        "held": held,
    }


@pytest.mark.parametrize("name", list(CASES))
def test_a_step_has_the_bits_of_ranks_that_hold_all_of_it(model: Path, name: str) -> None:
    case, less = CASES[name], []
    for found in run_grid(case.actor.world_size, step, str(model), case):
        assert (found["different"], found["metrics"], found["moved"]) == ([], {}, True)
        own, whole = found["held"]
        less.append(own < 0.8 * whole)
    # On several grids a rank may be of different data-parallel ranks, and holds what each of them takes.
    assert any(less) if case.others is not None else all(less) == (case.actor.dp > 1)


def scores(rank: int, path: str) -> dict[str, Any]:
    """Runs in each rank: scores of a reward model that takes shares, and of one that is given all sequences."""
    from megarl.learn.batching import of_demonstrations
    from megarl.learn.models.gpt import unwrap
    from megarl.train.update.learner import model_scores

    model = learner_of(path, Case(PPOConfig(name="ppo"), ParallelConfig(dp=2)), limit=200)._models.critic
    for name, weight in unwrap(model.chunks[0]).named_parameters():
        if name.startswith("output_layer"):
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(3))
    trajectories = trajectories_of(20, 64, lines=True)
    whole = of_demonstrations([trajectory.answered() for trajectory in trajectories])
    expected = model.outputs(whole, [model.micro_batches(whole)])[whole.scored(0)].tolist()
    return {"found": model_scores(model, trajectories), "expected": expected}


def test_scores_of_a_reward_model_are_those_of_all_trajectories(model: Path) -> None:
    first, second = run_grid(2, scores, str(model))
    assert first["found"] == first["expected"] == second["found"]
    assert len(set(first["found"])) == 20
