"""Accuracy on held-out tasks, against counting subsets and draws by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.buffer.experience.held_out import (
    TaskScores,
    pass_at,
    right_answers,
    sampled_metrics,
    sizes,
    source_metrics,
    standard_error,
)
from megarl.buffer.store import Store
from megarl.config.schema import Config, EvaluationConfig, RolloutConfig, TrainerConfig
from megarl.core.schema import Reward, Task, Trajectory, WeightsVersion
from megarl.explore.explorer.other_explorers import record_evaluations
from megarl.train.ranks import Reporter, RunContext, TrainState
from megarl.train.rollout.evaluation import Evaluation
from tests.trajectories import one_turn


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        answers = [True] * c + [False] * (n - c)
        subsets = [any(subset) for subset in itertools.combinations(answers, k)]
        assert pass_at(k, np.array([c]), n)[0] == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    """Its mean over draws of n = 6 answers, each right with probability 0.3, is 1 - 0.7^k."""
    n, p = 6, 0.3
    chances = np.array(
        [np.prod([p if right else 1 - p for right in draw]) for draw in itertools.product([0, 1], repeat=n)]
    )
    counts = np.array([sum(draw) for draw in itertools.product([0, 1], repeat=n)])
    for k in range(1, n + 1):
        assert (chances * pass_at(k, counts, n)).sum() == pytest.approx(1 - (1 - p) ** k)


def test_the_standard_error_is_clustered_by_task() -> None:
    """Eight equal answers to a task are no more than one: the error of 30 tasks, as of one answer to each."""
    right = np.array([1] * 12 + [0] * 18)
    once, often = standard_error(right / 1), standard_error(right * 8 / 8)
    assert once == often == pytest.approx(np.sqrt(0.4 * 0.6 / 29))
    assert sampled_metrics(right * 8, 8, ["aime"] * 30)["val/accuracy_se"] == once
    assert standard_error(np.array([1.0])) is None


def test_ks_are_verls() -> None:
    assert [list(sizes(n)) for n in (2, 3, 8, 12)] == [[2], [2, 3], [2, 4, 8], [2, 4, 8, 12]]


def test_metrics_of_two_sources() -> None:
    right, sources = np.array([4, 0, 2]), ["a", "a", "b/c"]
    scores = TaskScores(np.array([3.0, 1.0, 2.0]), np.array([4, 0, 3]), True)
    found = source_metrics(right, scores, 4, sources)
    assert found.pop("val/score") == 6 / 7
    assert [found.pop(f"val-core/{source}/reward/mean@4") for source in ("a", "b/c")] == [1.0, 2 / 3]
    found |= sampled_metrics(right, 4, sources)
    assert set(found) == {
        *("val/accuracy_se", "val/pass@2", "val/pass@2_se", "val/pass@4", "val/pass@4_se"),
        *(
            f"val-core/{source}/acc/{name}@4{end}"
            for source in ("a", "b/c")
            for name, end in (("mean", ""), ("best", "/mean"))
        ),
    }
    assert found["val/pass@2"] == pytest.approx((1 + 0 + 5 / 6) / 3) and found["val/pass@4"] == pytest.approx(2 / 3)
    assert (found["val-core/a/acc/mean@4"], found["val-core/b/c/acc/mean@4"]) == (0.5, 0.5)
    draws = [max(draw) for draw in itertools.product([1, 1, 0, 0], repeat=4)]
    assert found["val-core/b/c/acc/best@4/mean"] == pytest.approx(sum(draws) / len(draws))


def test_a_single_task_has_no_standard_error() -> None:
    assert not [name for name in sampled_metrics(np.array([1]), 2, ["a"]) if name.endswith("_se")]


def test_answers_are_counted_by_task_and_those_without_a_verdict_are_wrong() -> None:
    def answer(task: str, status: str) -> Any:
        return SimpleNamespace(task_id=task, reward=SimpleNamespace(status=status))

    answers = [answer("b", "ok"), answer("a", "error"), answer("b", "ok"), answer("a", "wrong"), answer("c", "ok")]
    assert right_answers(answers, ["a", "b", "c", "d"]).tolist() == [0, 2, 1, 0]


VERSION = WeightsVersion(1, 1)
TASKS = [Task(f"t{i}", "sums", ({"role": "user", "content": str(i)},), "", {"ground_truth": "1"}) for i in range(5)]


def answered(claim: Any, index: int, found: int | Reward) -> Trajectory:
    right = isinstance(found, int) and index < found
    return Trajectory(
        rollout_id=claim.rollout_id,
        task_id=claim.task.task_id,
        group_id=claim.group_id,
        index=index,
        group_size=claim.group_size,
        turns=one_turn([0] * 3, [1] * 2),
        reward=found if isinstance(found, Reward) else Reward(float(right), "ok" if right else "wrong"),
    )


class Evaluated:
    """An evaluation whose rollouts have ``right[i]`` right answers to task i, or that reward, and what it left."""

    def __init__(
        self,
        path: Path,
        config: EvaluationConfig,
        right: Sequence[int | Reward],
        monkeypatch: pytest.MonkeyPatch,
        step: int = 20,
        tasks: Sequence[Task] = TASKS,
    ) -> None:
        self.store = Store(f"sqlite:///{path}/store.db")
        self.store.tasks.add("eval", tasks)
        self.sampling: Any = None
        self.lines: list[str] = []
        self.metrics: dict[str, float] = {}
        context = RunContext(
            Config(evaluation=config, rollout=RolloutConfig(max_response_tokens=9), trainer=TrainerConfig(seed=3)),
            path,
            1,
            0,
        )
        reporter = Reporter(context, self.store)
        monkeypatch.setattr(reporter, "write", lambda step, metrics: self.metrics.update(metrics))
        monkeypatch.setattr(reporter, "log", self.lines.append)

        def wait(look: Any, label: str, *, weights_step: int) -> None:
            for claim in self.store.groups.claim("w", 100):
                self.sampling, found = claim.sampling, right[claim.position]
                assert self.store.groups.put(claim, [answered(claim, j, found) for j in range(claim.group_size)])
                record_evaluations(self.store, "w", claim.rollout_id)
            assert look().complete

        Evaluation(context, self.store, reporter, wait).run(TrainState("rl", step), VERSION, f"eval-{step}")
        (self.event,) = (event["data"] for event in self.store.journal.events("evaluation"))


def test_by_default_one_greedy_answer_under_the_names_there_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Evaluated(tmp_path, EvaluationConfig(), [1, 0, 1, 0, 1], monkeypatch)
    assert found.sampling == {"temperature": 0.0, "max_tokens": 9}
    assert found.metrics == {
        "val/accuracy": 0.6,
        "val/error_rate": 0.0,
        "val/score": 0.6,
        "val-core/sums/acc/mean@1": 0.6,
        "val-core/sums/reward/mean@1": 0.6,
    }
    assert found.lines == ["held-out accuracy at step 20: 60.0% (3 of 5 tasks, greedy)"]
    assert found.event["accuracy"] == 0.6 and found.event["standard_error"] == pytest.approx(np.sqrt(0.6 * 0.4 / 4))


def test_several_files_or_sources_have_an_accuracy_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluated(folder: str, tasks: Sequence[Task]) -> Evaluated:
        (tmp_path / folder).mkdir()
        return Evaluated(tmp_path / folder, EvaluationConfig(), [1, 0, 1, 0, 1], monkeypatch, tasks=tasks)

    files = [replace(task, task_id=f"eval/{'aime' if i < 2 else 'math'}/{i}") for i, task in enumerate(TASKS)]
    found = evaluated("files", files)
    assert found.lines[1] == "  by source: aime 50.0% (of 2), math 66.7% (of 3)"
    assert found.metrics["val/accuracy/aime"] == 0.5 and found.event["sources"]["math"] == [2 / 3, 3]
    mixed = [replace(task, data_source="code") if i else task for i, task in enumerate(TASKS)]
    assert evaluated("sources", mixed).lines[1] == "  by source: sums 100.0% (of 1), code 50.0% (of 4)"


def test_graded_rewards_have_their_mean_beside_the_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is right, and yet responses differ; one without a verdict is in no mean."""
    rewards = [Reward(s, "wrong") for s in (0.5, 0.25, 0.75, 0.5)] + [Reward(math.nan, "error")]
    found = Evaluated(tmp_path, EvaluationConfig(), rewards, monkeypatch)
    assert (found.metrics["val/accuracy"], found.metrics["val/error_rate"]) == (0.0, 0.2)
    assert found.metrics["val/score"] == found.metrics["val-core/sums/reward/mean@1"] == 0.5
    assert found.event["score"] == 0.5 and found.event["graded"]
    assert found.lines == [
        "held-out accuracy at step 20: 0.0% ± 0.0% (0 of 5 tasks, greedy), mean score 0.500; 1 without a verdict"
    ] or found.lines == [
        "held-out accuracy at step 20: 0.0% (0 of 5 tasks, greedy), mean score 0.500; 1 without a verdict"
    ]


def test_several_answers_have_means_pass_at_k_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EvaluationConfig(samples=4, temperature=0.6, top_p=0.95, top_k=20)
    found = Evaluated(tmp_path, config, [4, 2, 0, 0, 1], monkeypatch)
    assert found.sampling.items() > {"temperature": 0.6, "max_tokens": 9, "top_p": 0.95, "top_k": 20}.items()
    assert found.metrics["val/accuracy"] == found.metrics["val-core/sums/acc/mean@4"] == 7 / 20
    assert found.metrics["val/pass@4"] == pytest.approx(0.6) and found.metrics["val/error_rate"] == 0.0
    line = "held-out accuracy at step 20: 35.0% ± 18.7% (avg@4 of 5 tasks, temperature 0.6), pass@4 60.0% ± 24.5%"
    assert found.lines == [line]
    assert found.event["samples"] == 4 and found.event["pass"] == pytest.approx(0.6)
    assert found.event["standard_error"] == found.metrics["val/accuracy_se"]


def test_an_evaluation_samples_the_same_when_it_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a job that resumes there; another step draws other numbers."""
    config = EvaluationConfig(samples=2, temperature=1.0)
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    seeds = [
        Evaluated(folder, config, [1] * 5, monkeypatch, step).sampling["seed"]
        for folder, step in zip(folders, (20, 20, 40), strict=True)
    ]
    assert seeds[0] == seeds[1] != seeds[2]
