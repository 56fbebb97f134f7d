"""A step's rollouts from a real engine: dynamic sampling and greedy answers, the same again when a step is repeated."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from megarl.buffer.store import Store
from megarl.config.algorithms import AlgorithmConfig
from megarl.config.job import StoreConfig
from megarl.config.schema import Config, EvaluationConfig, RolloutConfig, TrainerConfig
from megarl.core.schema import Reward, Task, Trajectory, WeightsVersion
from megarl.engines.client.client import EngineClient, Prompt, Sampling
from megarl.explore.explorer.explorer import AskedEngines, ClaimSettings, Explorer
from megarl.learn import algorithms
from megarl.rewards import Verdict
from megarl.train.ranks import Reporter, RunContext, TrainState
from megarl.train.rollout.evaluation import Evaluation
from megarl.train.rollout.group_part import Published
from megarl.train.rollout.reading import NodeReader, RolloutReader
from megarl.train.rollout.rollouts import Rollouts
from megarl.train.services import RolloutWaiter
from tests.engine_rows import choice_of
from tests.loop.engines import KEY, VOCAB, RunningEngine

MAX_TOKENS = 6
STATE, VERSION = TrainState("rl", 2), WeightsVersion(0, 1)
PUBLISHED = Published(VERSION, 2)


class Words:
    """Of a model without a chat template: a prompt is its token ids, a text too."""

    largest_id = VOCAB - 1

    def render(self, messages: Iterable[dict[str, str]], kwargs: Any = None) -> str:
        [message] = messages
        return message["content"]

    def rendered_ids(self, text: str) -> np.ndarray:
        return np.array(text.split(), dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(map(str, ids))


class EvenScorer:
    """An answer is right when its first token is even: about one group of four in eight then has zero variance."""

    async def score(self, task: Task, text: str, *, in_thinking: bool = False) -> Verdict:
        right = int(text.split()[0]) % 2 == 0
        return Verdict(Reward(float(right), "ok" if right else "wrong"))


@contextmanager
def exploring(store: Store, engine: RunningEngine) -> Iterator[None]:
    async def main() -> None:
        async with EngineClient(choice_of(engine.url), KEY, timeout_s=60) as client:
            words: Any = Words()
            store.engines.register(client.engines.fleet.rows)
            asked = AskedEngines(client, client.engines)
            await Explorer(store, asked, EvenScorer(), words, ClaimSettings("e0", capacity=64)).run()

    store.journal.open_job()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        store.journal.close_job()
        thread.join(60)
        assert not failures, failures


class Ranks:
    """The only rank of a job that nobody stops."""

    stopping = False

    def agree(self, yes: bool) -> bool:
        return yes

    def stop_requested(self) -> bool:
        return False


def services(
    store: Store, folder: Path, evaluation: EvaluationConfig | None = None
) -> tuple[Rollouts, Evaluation, Reporter]:
    config = Config(
        algorithm=AlgorithmConfig(group_size=4, dynamic_sampling=True),
        trainer=TrainerConfig(tasks_per_step=8, seed=3),
        rollout=RolloutConfig(max_response_tokens=MAX_TOKENS),
        store=StoreConfig(poll_s=0.01),
        evaluation=evaluation or EvaluationConfig(),
    )
    context, alone = RunContext(config, folder, 0, 0), cast(Any, Ranks())
    reporter = Reporter(context, store)
    wait = RolloutWaiter(context, store, alone, reporter).wait
    reader = RolloutReader(NodeReader(), store, lambda: False)
    algorithm = replace(algorithms.get("grpo"), needs=frozenset({"greedy"}))
    return (
        Rollouts(context, algorithm, store, reporter, reader, wait, VOCAB),
        Evaluation(context, store, reporter, wait),
        reporter,
    )


def task(i: int) -> Task:
    content = " ".join(str((i * 17 + j * 5) % 190 + 4) for j in range(6))
    return Task(f"train/{i}", "even", ({"role": "user", "content": content},), "", {"ground_truth": "even"})


def tokens(trajectories: Iterable[Trajectory]) -> list[tuple[str, int, list[int], list[int]]]:
    return [
        (e.group_id, e.index, e.response.token_ids.tolist(), e.greedy.response.token_ids.tolist())
        for e in trajectories
        if e.greedy
    ]


def stored(store: Store, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories with their arrays, and those of their greedy answers."""
    groups = list(dict.fromkeys(e.group_id for e in trajectories))
    every = {(e.group_id, e.index): e for e in store.groups.read(groups)}
    return [every[e.group_id, e.index] for e in trajectories]


@pytest.mark.slow
def test_a_steps_groups_with_their_greedy_answers(engine: RunningEngine, tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.tasks.add("train", [task(i) for i in range(60)])
    with exploring(store, engine):
        first = services(store, tmp_path)[0].groups(STATE, PUBLISHED)
        answers = stored(store, first.trajectories)
        store.rollouts.discard(2)  # the step is repeated, as after a kill
        second = services(store, tmp_path)[0].groups(STATE, PUBLISHED)
        again = stored(store, second.trajectories)
    assert len(first.rollout_ids) > 1, "the first rollout had enough groups: nothing was replaced"
    assert len(tokens(answers)) == len(first.trajectories) == 32
    assert first.rollout_ids == second.rollout_ids and tokens(answers) == tokens(again)
    assert first.metrics["rollout/greedy"] == 8 * len(first.rollout_ids)
    rights = [e.reward.status == "ok" for e in first.trajectories]
    assert all(0 < sum(rights[i : i + 4]) < 4 for i in range(0, 32, 4))
    leaders = answers[::4]
    alone = engine.generate(
        [Prompt(e.prompt.token_ids) for e in leaders], Sampling(max_tokens=MAX_TOKENS, temperature=0.0)
    )
    assert [c.token_ids.tolist() for c in alone] == [e.greedy.response.token_ids.tolist() for e in leaders if e.greedy]
    assert any(not np.array_equal(e.greedy.response.token_ids, e.response.token_ids) for e in answers if e.greedy)


@pytest.mark.slow
def test_an_evaluation_of_several_answers(
    engine: RunningEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated as by a job that resumes there it has the same answers; log-probs are of the tokens that top-k keeps."""
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.tasks.add("eval", [task(i) for i in range(6)])
    written: list[Any] = []
    answers = []
    with exploring(store, engine):
        for name, top_k in (("first", 20), ("again", 20), ("one", 1)):
            _, evaluation, reporter = services(
                store, tmp_path, EvaluationConfig(samples=3, temperature=1.0, top_p=0.9, top_k=top_k)
            )
            monkeypatch.setattr(reporter, "write", lambda step, metrics: written.append(metrics))
            evaluation.run(STATE, VERSION, name)
            answers.append(store.groups.trajectories(name))
    first, again, one = answers
    assert len(first) == 18 and {e.index for e in first} == {0, 1, 2}
    ids = [[(e.task_id, e.index, e.response.token_ids.tolist()) for e in side] for side in answers]
    assert ids[0] == ids[1] != ids[2] and written[0] == written[1]
    right = sum(e.reward.status == "ok" for e in first)
    assert written[0]["val/accuracy"] == written[0]["val-core/even/acc/mean@3"] == right / 18
    assert all((e.response.logp == 0.0).all() for e in one)  # the only token kept has probability 1
    assert any((e.response.logp < 0.0).any() for e in first)
    store.close()
