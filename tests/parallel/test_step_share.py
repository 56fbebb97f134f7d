"""A whole step on ranks that hold shares of it: the bytes of each, and the bits of ranks that hold all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.algorithms import AlgorithmConfig, KLConfig, MixConfig, PPOConfig, PreferenceConfig
from megarl.config.job import SyncConfig
from megarl.config.schema import (
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    TrainerConfig,
    UpdateFilterConfig,
)
from megarl.core.errors import DataError, MegarlError, NonRetryableError
from megarl.core.schema import Reward, Trajectory, Turn, WeightsSpan, WeightsVersion, file_digest
from tests.loop.vision_models import QWEN_IMAGE, picture, save_tiny_qwen2_5_vl
from tests.parallel import families
from tests.parallel.batches import bytes_of
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, save_tiny_qwen3

OLD, NEW = WeightsVersion(1, 1), WeightsVersion(1, 2)
LAGS = {OLD: 2, NEW: 0}
GROUP = 8
PICTURES = {file_digest(file): file for file in (picture(1, 56, 56), picture(2, 56, 84))}
VECTORS = dict(zip(PICTURES, (4, 6), strict=True))
"""Of a picture, by its digest."""
LAYERS, EXPERTS, OF_TOKEN = 4, 8, 3
"""Layers with experts, experts of a layer and of a token in the mixture of experts."""


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
    images: bool = False
    """Two of three trajectories begin with a picture."""
    replayed: bool = False
    """Tokens come with expert ids."""


def with_images(trajectories: list[Trajectory]) -> list[Trajectory]:
    """The trajectories, two of three with a picture in the prompt."""
    found = []
    for i, trajectory in enumerate(trajectories):
        prompt, *after = trajectory.turns
        for digest in list(PICTURES)[i % 3 : i % 3 + 1]:
            ids = [7, *[QWEN_IMAGE] * VECTORS[digest], 8]
            prompt = replace(prompt, token_ids=np.array(ids, np.int32), images=(digest,))
        found.append(replace(trajectory, turns=(prompt, *after)))
    return found


def with_routing(trajectories: list[Trajectory]) -> list[Trajectory]:
    """The trajectories with expert ids; each line is a prompt and an answer."""
    random, found = np.random.default_rng(6), []
    for trajectory in trajectories:
        turns = list(trajectory.turns)
        for i in range(1, len(turns), 2):
            tokens = len(turns[i - 1]) + len(turns[i]) - 1
            ids = random.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :OF_TOKEN]
            turns[i] = replace(turns[i], routing=ids.astype(np.int8))
        found.append(replace(trajectory, turns=tuple(turns)))
    return found


def learner_of(path: str, case: Case, limit: int) -> Any:
    """A learner with models of its own on the ranks of this world."""
    from megarl.learn import algorithms
    from megarl.learn.parallel import process_groups
    from megarl.learn.training.model import Model, TrainedModel, micro_batching_for
    from megarl.learn.training.schedule import Head
    from megarl.train.batch.images import ImageInputs
    from megarl.train.inference.inference import Inference
    from megarl.train.inference.models import Models
    from megarl.train.ranks import Ranks
    from megarl.train.update.learner import Learner, UpdateFilter
    from megarl.weights.checkpoint.formats import hf

    trainer = TrainerConfig(
        packing=case.packing, max_tokens_per_micro_batch=limit, micro_batch_size=2, updates_per_step=case.updates
    )
    model, optimizer = ModelConfig(path=path, dtype="float32"), OptimizerConfig(lr=1e-2)
    rollout = RolloutConfig(routing_replay=case.replayed)
    config = Config(model=model, parallel=case.actor, algorithm=case.settings, trainer=trainer, rollout=rollout)
    algorithm, hf_config = algorithms.get(case.settings.name), hf.read_hf_config(Path(path))
    process_groups.initialize(case.actor, seed=1)
    others = case.others or case.actor
    grid = {} if case.others is None else {"grid": process_groups.Grid(others, seed=1).active}
    actor = TrainedModel(hf_config, model, case.actor, Head(VOCAB), micro_batching_for(case.actor, trainer), optimizer)
    limits = micro_batching_for(others, trainer)
    reference = Model(hf_config, model, others, Head(VOCAB), limits, **grid)
    critic = None
    if "critic" in algorithm.roles:
        critic = TrainedModel(hf_config, model, others, None, limits, optimizer, **grid)
    actor.model.replays_routing = case.replayed
    for each in (actor.model, reference):
        each.load_hf(Path(path))
    if critic is not None:
        critic.model.load_hf(Path(path), score="zeros")
    reporter: Any = SimpleNamespace(log=lambda text: None, event=lambda kind, data: None)
    models: Any = SimpleNamespace(actor=actor, reference=reference, critic=critic, hf_config=hf_config)
    models.finish_gathers = partial(Models.finish_gathers, models)
    models.check_routing = partial(Models.check_routing, models)
    models.images = ImageInputs.of(config, hf_config)
    updates = UpdateFilter(UpdateFilterConfig(), reporter)
    return Learner(config, algorithm, Inference(config, algorithm, models, lambda phase: None), updates, Ranks())


def batch_of(
    learner: Any, case: Case, number: int, longest: int, share_of: Any, change: Callable[[Any], Any] = lambda t: t
) -> Any:
    """``change``: made to the trajectories."""
    from megarl.buffer.experience import with_group_stats
    from megarl.buffer.order.draws import ExpertRow
    from megarl.train.batch.batch import make_batch

    shown = [ExpertRow(np.arange(2, 6 + i), np.arange(2, 9 + i)) for i in range(case.shown)]
    given = with_group_stats(trajectories_of(number, longest, lines=case.lines))
    given = with_images(given) if case.images else given
    given = change(with_routing(given) if case.replayed else given)
    inputs = learner.inference.models.images
    lags, images = LAGS if case.lines else None, inputs and inputs.of_step(PICTURES)
    settings = (learner.algorithm, case.settings, case.updates, lags, images, share_of)
    return make_batch(given, shown, *settings, replays_routing=case.replayed)


def on_grids(rank: int, what: Callable[[int, str, Case], Any], cases: list[tuple[str, Case]]) -> list[Any]:
    """Runs in each rank: what a function finds in each case, on a grid of the case's own."""
    from megatron.core import parallel_state

    found = []
    for path, case in cases:
        found.append(what(rank, path, case))
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()
    return found


def bytes_held(rank: int, path: str, case: Case) -> tuple[int, int, int]:
    """Runs in each rank: bytes of its sequences with all that a step fills, of the whole step's, and sequences held."""
    learner = learner_of(path, case, limit=2048)
    sizes = []
    for share_of in (learner.inference.share, lambda plan: None):
        sequences = batch_of(learner, case, 512, 1024, share_of).sequences
        for name in ("old_logp", "ref_logp", "advantages"):
            setattr(sequences, name, torch.zeros(len(sequences.tokens)))
        sizes.append(sequences)
    return bytes_of(sizes[0]), bytes_of(sizes[1]), len(sizes[0])


GRPO = AlgorithmConfig(name="grpo", kl=KLConfig(0.1, "k3"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), layers=2)


@pytest.mark.parametrize("dp", [2, 4])
def test_a_rank_holds_its_share_of_the_bytes(model: Path, dp: int) -> None:
    """Of 512 sequences of mixed lengths, packed: padded rows are dealt in turn, whatever their lengths. In one update,
    and in four."""
    cases = [(str(model), Case(GRPO, ParallelConfig(dp=dp), updates=updates)) for updates in (1, 4)]
    for found in zip(*run_grid(dp, on_grids, bytes_held, cases), strict=True):
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
    "images": Case(GRPO, ParallelConfig(dp=2), lines=True, images=True),
    "expert ids": Case(GRPO, ParallelConfig(dp=2, ep=2), lines=True, replayed=True),
}


def step(rank: int, path: str, case: Case) -> dict[str, Any]:
    """Runs in each rank: the same step with its share and with all sequences; which results have other bits."""
    from megarl.learn.batching import micro_batches
    from megarl.train.batch.batch import filter_overlong
    from megarl.train.batch.batch_file import kept_batch, put_together, taken
    from megarl.train.ranks import TrainState
    from megarl.train.update.gap import engine_gap

    learner = learner_of(path, case, limit=200)
    models = learner.inference.models
    loose = replace(learner.config, sync=SyncConfig(sample_tolerance=1e9))  # the engine's log-probs are made up
    found, held = [], []
    for share_of in (learner.inference.share, lambda plan: None):
        for trained in (models.actor, models.critic):
            if trained is not None:
                trained.model.load_hf(Path(path), score="zeros")
                trained.optimizer.restart(OptimizerConfig(lr=1e-2))
        batch = batch_of(learner, case, 40, 64, share_of)
        learner.inference.fill(batch)
        sampled = batch.sequences.sampled
        filter_overlong(batch, case.settings)
        if batch.sequences.share is None:
            parts = [
                [taken(batch, micro_batches(batch.sequences, models.actor.model.micro_batching, dp_rank, units), update)
                 for update, units in enumerate(batch.updates)] for dp_rank in range(case.actor.dp)
            ]  # fmt: skip
            kept = None if rank else put_together(batch, parts)
        else:
            kept = kept_batch(batch, models.actor.model)
        state, metrics = learner.train_step(TrainState("rl"), batch)
        metrics |= engine_gap(batch, sampled, loose)
        weights = [trained.model.tensors for trained in (models.actor, models.critic) if trained is not None]
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


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that take images, and expert ids, by the name of their case."""
    folder = tmp_path_factory.mktemp("special")
    images = save_tiny_qwen2_5_vl(folder / "images")
    return {"images": images, "expert ids": families.save("qwen3_moe", folder / "experts")}


@pytest.fixture(scope="module")
def steps(model: Path, special: dict[str, Path]) -> dict[str, list[dict[str, Any]]]:
    """Name of a case -> what each rank found; all cases of a world in one set of processes."""
    found: dict[str, list[dict[str, Any]]] = {}
    for world in (2, 4):
        cases = {name: case for name, case in CASES.items() if case.actor.world_size == world}
        given = [(str(special.get(name, model)), case) for name, case in cases.items()]
        found |= dict(zip(cases, map(list, zip(*run_grid(world, on_grids, step, given), strict=True)), strict=True))
    return found


@pytest.mark.parametrize("name", list(CASES))
def test_a_step_has_the_bits_of_ranks_that_hold_all_of_it(steps: dict[str, list[dict[str, Any]]], name: str) -> None:
    case, less = CASES[name], []
    assert len(steps[name]) == case.actor.world_size
    for found in steps[name]:
        assert (found["different"], found["metrics"], found["moved"]) == ([], {}, True)
        own, whole = found["held"]
        less.append(own < 0.8 * whole)
    # On several grids a rank may be of different data-parallel ranks, and holds what each of them takes.
    assert any(less) if case.others is not None else all(less) == (case.actor.dp > 1)


FOREIGN = 4
"""Trajectory with a fault: of one sample, which one rank holds."""


def foreign(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Trajectories of which one has a placeholder less than its picture needs, or an expert id of another model."""
    prompt, answer = trajectories[FOREIGN].turns
    if prompt.images:
        prompt = replace(prompt, token_ids=np.delete(prompt.token_ids, 2))
    elif answer.routing is not None:
        answer = replace(answer, routing=np.where(np.arange(OF_TOKEN), answer.routing, EXPERTS).astype(np.int8))
    changed = replace(trajectories[FOREIGN], turns=(prompt, answer))
    return [*trajectories[:FOREIGN], changed, *trajectories[FOREIGN + 1 :]]


def faults(rank: int, path: str, name: str) -> tuple[bool, list[tuple[type, str]]]:
    """Runs in each rank: whether it holds the foreign row, and the errors of what reads the row."""
    from megarl.train.inference.inference import model_scores

    case = replace(CASES[name], lines=False)
    learner, shares, met = learner_of(path, case, limit=200), [], []

    def share_of(plan: Any) -> Any:
        shares.append(learner.inference.share(plan))
        return shares[-1]

    def scored() -> None:
        given = foreign(with_images(trajectories_of(40, 64)))
        model_scores(learner.inference.models.reference, given, learner.inference.models.images.of_step(PICTURES))

    trained = lambda: learner.inference.fill(batch_of(learner, case, 40, 64, share_of, foreign))  # noqa: E731
    for action in (trained, scored) if case.images else (trained,):
        try:
            action()
        except MegarlError as error:
            met.append((type(error), str(error)))
    return FOREIGN in shares[0].numbers, met


@pytest.mark.parametrize(
    ("name", "kind", "words", "number"),
    [
        ("images", DataError, "has 6 vectors, but the tokens have 5 placeholders for it", 2),
        ("expert ids", NonRetryableError, "has expert id 8, of 8 experts with ids 0 to 7", 1),
    ],
)
def test_every_rank_raises_what_one_rank_finds_in_its_share(
    special: dict[str, Path], name: str, kind: type, words: str, number: int
) -> None:
    holds, met = zip(*run_grid(2, faults, str(special[name]), name), strict=True)
    assert sorted(holds) == [False, True] and met[0] == met[1] and len(met[0]) == number
    for found, text in met[0]:
        assert found is kind and f"trajectory {FOREIGN} of group g0 " in text and words in text, text


def misfits(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Trajectories with expert ids, of which one has ids of fewer tokens, and the next one of fewer layers."""
    found = with_routing(trajectories)
    for i, cut in ((FOREIGN, np.s_[1:]), (FOREIGN + 1, np.s_[:, 1:])):
        prompt, answer = found[i].turns
        assert answer.routing is not None
        found[i] = replace(found[i], turns=(prompt, replace(answer, routing=answer.routing[cut])))
    return found


def without_replay(rank: int, path: str) -> bool:
    """Runs in each rank: whether stored expert ids leave a step's metrics and weights as they are without any."""
    from megarl.train.ranks import TrainState

    case = replace(CASES["expert ids"], lines=False, replayed=False)
    learner, found = learner_of(path, case, limit=200), []
    actor = learner.inference.models.actor
    before = {name: weight.clone() for name, weight in actor.model.tensors.items()}
    for change in (lambda trajectories: trajectories, misfits):
        actor.model.load_hf(Path(path))
        actor.optimizer.restart(OptimizerConfig(lr=1e-2))
        batch = batch_of(learner, case, 40, 64, learner.inference.share, change)
        learner.inference.fill(batch)
        _, metrics = learner.train_step(TrainState("rl"), batch)
        found.append((metrics, {name: weight.clone() for name, weight in actor.model.tensors.items()}))
    (expected, weights), (metrics, stored) = found
    moved = any(not torch.equal(before[name], weight) for name, weight in weights.items())
    return moved and metrics == expected and all(torch.equal(stored[name], weight) for name, weight in weights.items())


def test_without_routing_replay_stored_expert_ids_change_no_bit(special: dict[str, Path]) -> None:
    assert all(run_grid(2, without_replay, str(special["expert ids"])))


def scores(rank: int, path: str) -> dict[str, Any]:
    """Runs in each rank: scores of a reward model that takes shares, and of one that is given all sequences."""
    from megarl.learn.batching import of_demonstrations, score_positions
    from megarl.learn.models.gpt import unwrap
    from megarl.train.inference.inference import model_scores

    model = learner_of(path, Case(PPOConfig(name="ppo"), ParallelConfig(dp=2)), limit=200).inference.models.critic.model
    for name, weight in unwrap(model.chunks[0]).named_parameters():
        if name.startswith("output_layer"):
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(3))
    trajectories = trajectories_of(20, 64, lines=True)
    whole = of_demonstrations([trajectory.answered() for trajectory in trajectories])
    expected = model.outputs(whole, [model.micro_batches(whole)])[score_positions(whole, 0)].tolist()
    return {"found": model_scores(model, trajectories), "expected": expected}


def test_scores_of_a_reward_model_are_those_of_all_trajectories(model: Path) -> None:
    first, second = run_grid(2, scores, str(model))
    assert first["found"] == first["expected"] == second["found"]
    assert len(set(first["found"])) == 20
