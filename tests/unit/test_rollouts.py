"""Ranks that wait for a rollout meet again and again: a collective gives up long before a long rollout ends. And which
tasks, groups and demonstrations a step gets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from megarl.buffer.order import draws as data
from megarl.buffer.store import Claim, ExpertExperience, Store
from megarl.config.algorithms import AlgorithmConfig
from megarl.config.rewards import RewardConfig
from megarl.config.schema import Config, TrainerConfig
from megarl.core.errors import JobError
from megarl.core.schema import GREEDY, Reward, Task, Trajectory, WeightsVersion
from megarl.learn import algorithms
from megarl.run.supervise.watchdog import WAITING
from megarl.tasks import ChatTokenizer
from megarl.train import services
from megarl.train.ranks import Reporter, RunContext, Stopped, TrainState
from megarl.train.rollout import rollouts
from megarl.train.rollout.group_part import Awaited, Published
from megarl.train.rollout.reading import NodeReader, RolloutReader
from megarl.train.services import RolloutWaiter
from tests.trajectories import one_turn


class Waited:
    """Rank ``rank`` of a job in which the other ranks say yes: its ranks, reporter, weights and checkpoints in one."""

    def __init__(self, rank: int, progress: list[tuple[int, int]], stop_at: int | None = None) -> None:
        self.answers: list[bool] = []
        self.settling = False  # no checkpoint is being written
        self._stop_at = stop_at
        config: Any = SimpleNamespace(store=SimpleNamespace(poll_s=0.001), cluster=SimpleNamespace(stall_s=300.0))
        late = SimpleNamespace(count=lambda: self.awaited.pop(0))
        store: Any = SimpleNamespace(journal=SimpleNamespace(events=lambda *_: []), late=late)
        self.awaited: list[int] = []
        self.lines: list[str] = []
        self._progress = progress
        this: Any = self
        repairs = [services.WrittenCheckpoints(this), services.ReplacedEngines(this, this)]
        self.waiter = RolloutWaiter(RunContext(config, Path(), 1, rank), store, this, this, repairs)

    def look(self) -> Awaited:
        done, total = self._progress.pop(0) if len(self._progress) > 1 else self._progress[0]
        return Awaited(done, total, done == total)

    def wait(self) -> None:
        self.waiter.wait(self.look, "rollout", weights_step=0)

    def settle(self) -> None: ...

    def log(self, line: str) -> None:
        self.lines.append(line)

    def lost(self) -> None: ...

    @property
    def stopping(self) -> bool:
        return self._stop_at is not None and len(self.answers) >= self._stop_at

    def progress(self, total: int | None, label: str, unit: str) -> Any:
        return tqdm(total=total, disable=True)

    def agree(self, yes: bool) -> bool:
        self.answers.append(yes)
        return yes

    def stop_requested(self) -> bool:
        return self.stopping


@pytest.fixture(autouse=True)
def meets_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "MEET_S", 0.0)


def test_a_long_rollout_meets_in_between() -> None:
    s = Waited(0, [(0, 2), (1, 2), (1, 2), (2, 2)])
    s.wait()
    assert s.answers[-1] and 1 <= s.answers.count(False) <= 3


def test_a_wait_for_late_rewards_is_told_and_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog looks at rollouts alone (``WAITING``): the phase is another one while people give rewards."""
    phases: list[str] = []
    monkeypatch.setattr(services, "AWAITING_S", 0.0)
    monkeypatch.setattr(services.heartbeat, "phase", lambda name: phases.append(name) or nullcontext())
    s = Waited(0, [(0, 2), (0, 2), (0, 2), (1, 2), (2, 2)])
    s.awaited = [0, 3, 3, 2]
    monkeypatch.setattr(services, "MEET_S", 60.0)
    s.wait()
    assert [line.split(":")[0] for line in s.lines] == [
        f"the job waits for the rewards of {n} responses" for n in (3, 2)
    ]
    assert "megarl data reward" in s.lines[0] and "megarl" not in s.lines[1], "the hint comes once"
    assert phases == [services.LATE_REWARDS] * 3 and services.LATE_REWARDS not in WAITING


def test_other_ranks_wait_for_the_first() -> None:
    s = Waited(1, [])
    s.wait()
    assert s.answers == [True]


def test_a_stop_ends_the_wait() -> None:
    s = Waited(0, [(0, 2)], stop_at=2)
    with pytest.raises(Stopped):
        s.wait()
    assert s.answers == [False, True, False]  # the second: no engine is lost


def test_tasks_of_a_step_go_on_over_epochs() -> None:
    ids = [str(i) for i in range(7)]
    asked = [task for step in range(7) for task in data.tasks_of_step(ids, step, 3, seed=1)]
    assert all(sorted(asked[epoch * 7 : epoch * 7 + 7]) == ids for epoch in range(3))
    assert asked[:7] != asked[7:14]


sizes, steps, counts, seeds = st.integers(1, 40), st.integers(0, 50), st.integers(1, 20), st.integers(0, 2**31 - 1)


@given(size=sizes, step=steps, count=counts, seed=seeds, rounds=st.integers(1, 4))
def test_extra_rollouts_ask_for_tasks_new_to_the_step(size: int, step: int, count: int, seed: int, rounds: int) -> None:
    ids = [f"t{i}" for i in range(size)]
    first, extras = set(data.tasks_of_step(ids, step, count, seed)), []
    for extra in range(1, rounds + 1):
        more = data.extra_tasks(ids, step, extra, count, seed)
        assert len(more) == count and more == data.extra_tasks(ids, step, extra, count, seed)
        extras += more
    new = extras[: size - len(first)]
    assert len(set(new)) == len(new) and not set(new) & first, "a task came again before all had come once"
    assert all(len(set(extras[i : i + size])) == len(extras[i : i + size]) for i in range(0, len(extras), size))


def test_extra_rollouts_of_other_steps_rounds_and_seeds_ask_for_others() -> None:
    ids = [f"t{i}" for i in range(1000)]
    choices = [data.extra_tasks(ids, *args) for args in [(0, 1, 8, 1), (1, 1, 8, 1), (0, 2, 8, 1), (0, 1, 8, 2)]]
    assert len({tuple(choice) for choice in choices}) == 4


@given(usual=st.integers(0, 3000), hundredths=st.integers(0, 99))
def test_expert_rows_are_their_share_of_all_rows_rounded_up(usual: int, hundredths: int) -> None:
    """E = ceil(ratio * (usual + E)), the smallest such E, in decimals."""
    number = data.num_expert_rows(usual, hundredths / 100)
    ratio = Decimal(hundredths) / 100
    assert number == math.ceil(ratio * (usual + number))
    assert number == 0 or number - 1 < ratio * (usual + number - 1)


def test_the_share_of_expert_rows_is_taken_in_decimals() -> None:
    assert math.ceil(0.07 * 100) == 8, "what floats make of it"
    assert data.num_expert_rows(93, 0.07) == 7
    assert data.num_expert_rows(512, 0.2) == 128
    assert data.num_expert_rows(512, 0.0) == 0


def demonstrations(size: int) -> list[data.ExpertRow]:
    return [data.ExpertRow(np.array([i], dtype=np.int32), np.array([i, 9], dtype=np.int32)) for i in range(size)]


@given(size=sizes, count=counts, seed=seeds)
def test_expert_rows_of_a_step_are_fixed_and_all_come_up(size: int, count: int, seed: int) -> None:
    experts, again = (data.ExpertRows(demonstrations(size)) for _ in range(2))
    chosen = [[int(prompt[0]) for prompt, *_ in experts.of_step(step, count, seed)] for step in range(size)]
    assert all(len(rows) == count for rows in chosen)
    assert chosen[-1] == [int(prompt[0]) for prompt, *_ in again.of_step(size - 1, count, seed)], (
        "earlier steps had an influence"
    )
    assert set(Counter(i for rows in chosen for i in rows).values()) == {count}, "`size` steps are `count` whole epochs"


def test_expert_rows_are_not_chosen_as_tasks_are() -> None:
    experts = data.ExpertRows(demonstrations(64))
    tasks = data.tasks_of_step([str(i) for i in range(64)], 0, 16, 1)
    assert [str(prompt[0]) for prompt, *_ in experts.of_step(0, 16, 1)] != tasks


def test_expert_rows_are_read_and_encoded_in_the_order_of_the_store(prepared: Path, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.open(prepared / "model")
    store = Store(f"sqlite:///{tmp_path}/store.db")
    rows = [task_of(i, response=str(i + 1)) for i in range(5)]
    store.experts.import_sources([("late", [ExpertExperience(row) for row in rows[3:]])])
    store.experts.replace_source("file", [ExpertExperience(row) for row in rows[:3]])
    found = RolloutReader(NodeReader(), store, lambda: False).demonstrations(tokenizer)
    store.close()
    for (prompt, response, *_), i in zip(found, (3, 4, 0, 1, 2), strict=True):
        np.testing.assert_array_equal(prompt, tokenizer.prompt_ids(rows[i].prompt))
        np.testing.assert_array_equal(response, tokenizer.response_ids(str(i + 1)))


def task_of(i: int, response: str | None = None) -> Task:
    messages = ({"role": "user", "content": f"{i} + 1 ="},)
    return Task(
        f"train/{i}", "reasoning_gym/chain_sum", messages, "math", {"ground_truth": str(i + 1)}, response=response
    )


RIGHT = {"all": (True, True), "none": (False, False), "mixed": (True, False), "broken": (True, None)}
"""Which answers of a group are right; None: no verdict."""


class AnsweringStore(Store):
    """Every rollout is answered as soon as it is asked for. ``outcome(number of the task)`` is a key of RIGHT."""

    outcome: Callable[[int], str]

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._request, self.rollouts.request = self.rollouts.request, self._answered  # type: ignore[method-assign]

    def _answered(self, rollout_id: str, *args: Any, **more: Any) -> None:
        self._request(rollout_id, *args, **more)
        for claim in reversed(self.groups.claim("e", 1000)):
            answers = [self._answer(claim, index) for index in claim.indices]
            assert self.groups.put(claim, answers, {"samples": 2.0 * len(self.groups.trajectories(rollout_id))})

    def _answer(self, claim: Claim, index: int) -> Trajectory:
        number = int(claim.task.task_id.split("/")[1])
        right = True if index == GREEDY else RIGHT[self.outcome(number)][index]
        reward = Reward(math.nan, "error") if right is None else Reward(float(right), "ok" if right else "wrong")
        length = 1 + index if index >= 0 else 1
        return Trajectory(
            claim.rollout_id, claim.task.task_id, claim.group_id, index, claim.group_size,
            turns=one_turn([number], [3] * length, [-0.5] * length, version=claim.version), reward=reward,
        )  # fmt: skip


class Step:
    """The only rank of a step on 40 tasks, 4 of them a step, 2 answers each."""

    def __init__(
        self,
        path: Path,
        outcome: Callable[[int], str],
        step: int = 3,
        needs: tuple[str, ...] = (),
        *,
        stopped: bool = False,
        **algorithm: Any,
    ) -> None:
        self.store = AnsweringStore(f"sqlite:///{path}/store.db")
        self.store.outcome = outcome
        self.store.tasks.add("train", [task_of(i) for i in range(40)])
        self.train_tasks = self.store.tasks.ids("train")
        config = Config(
            algorithm=AlgorithmConfig(group_size=2, **algorithm),
            trainer=TrainerConfig(tasks_per_step=4, seed=5),
            reward=RewardConfig(overlong_buffer=1, overlong_penalty=0.5),
        )
        context = RunContext(config, path, 1, 0)
        self.state = TrainState("rl", step)
        reporter = Reporter(context, self.store)
        self.timeline = reporter.timeline
        reader = RolloutReader(NodeReader(), self.store, lambda: False)
        needed = replace(algorithms.get("grpo"), needs=frozenset(needs))

        def wait(*_: Any, **__: Any) -> None:
            if stopped:
                raise Stopped

        self._rollouts = rollouts.Rollouts(context, needed, self.store, reporter, reader, wait, 64)

    def groups(self) -> rollouts.StepGroups:
        return self._rollouts.groups(self.state, Published(WeightsVersion(1, 2), self.state.step))


def groups_of(found: rollouts.StepGroups) -> list[str]:
    return list(dict.fromkeys(e.group_id for e in found.trajectories))


def test_a_step_without_dynamic_sampling_is_one_rollout(tmp_path: Path) -> None:
    s = Step(tmp_path, lambda i: "all")
    found = s.groups()
    assert groups_of(found) == [f"train-000003/{i}" for i in range(4)]
    assert found.rollout_ids == ("train-000003",) and found.report.kept == 4
    assert found.metrics["rollout/extra"] == 0 and found.metrics["rollout/kept_groups"] == 4
    assert "rollout/all_right" not in found.metrics and list(s.timeline.seconds) == ["rollout", "batch"]
    assert all(e.greedy is None for e in found.trajectories)
    assert found.used == (tuple(groups_of(found)), {}, (), {})


def test_groups_that_say_nothing_are_replaced_until_there_are_enough(tmp_path: Path) -> None:
    """One task in four is mixed: the rounds go on until four groups are there, the surplus is left out."""

    def outcome(i: int) -> str:
        return ("mixed", "all", "none", "broken")[i % 4]

    s = Step(tmp_path, outcome, dynamic_sampling=True)
    ids = s.train_tasks
    asked = [data.tasks_of_step(ids, 3, 4, 5), *(data.extra_tasks(ids, 3, r, 4, 5) for r in range(1, 10))]
    mixed = [[outcome(int(t.split("/")[1])) == "mixed" for t in tasks] for tasks in asked]
    needed = next(n for n in range(1, 11) if sum(map(sum, mixed[:n])) >= 4)
    names = ["train-000003", *(f"train-000003-{r}" for r in range(1, 10))]
    expected = [f"{names[r]}/{p}" for r in range(needed) for p in range(4) if mixed[r][p]]
    assert needed > 1, "the first rollout had enough: nothing is tested"
    found = s.groups()
    assert groups_of(found) == expected[:4]
    assert found.rollout_ids == tuple(names[:needed])
    outcomes = Counter(outcome(int(t.split("/")[1])) for tasks in asked[:needed] for t in tasks)
    assert found.report.groups == 4 * needed and found.report.dropped.get("reward_error", 0) == outcomes["broken"]
    m = found.metrics
    assert (m["rollout/extra"], m["rollout/kept_groups"]) == (needed - 1, 4)
    assert (m["rollout/all_right"], m["rollout/all_wrong"]) == (outcomes["all"], outcomes["none"])
    assert m["rollout/samples"] == sum(s.store.rollouts.metrics(name)["samples"] for name in names[:needed])
    assert m["reward/parts/overlong"] == 0.0
    reasons = {"all": "all_right", "none": "all_wrong", "broken": "reward_error", "mixed": "surplus"}
    of_task = {
        f"{n}/{p}": outcome(int(t.split("/")[1])) for n, ts in zip(names, asked, strict=False) for p, t in enumerate(ts)
    }
    left_out = [g for n in names[:needed] for p in range(4) if (g := f"{n}/{p}") not in expected[:4]]
    assert found.used.consumed == tuple(expected[:4])
    assert found.used.dropped == {group: reasons[of_task[group]] for group in left_out}
    # All of them belong to the step: the trainer that resumes there forgets them, one that is past it keeps them.
    s.store.rollouts.discard(4)
    assert all(s.store.rollouts.progress(name) == (4, 4) for name in found.rollout_ids)
    s.store.journal.record_step(4, {}, found.used)
    s.store.rollouts.discard(3, saved=True)
    assert all(s.store.rollouts.progress(name) == (4, 4) for name in found.rollout_ids)
    kept = s.groups()
    assert kept is not None and kept.used == found.used and kept.metrics == m
    s.store.rollouts.discard(3)
    assert all(s.store.rollouts.progress(name) == (0, 0) for name in found.rollout_ids)
    again = s.groups()
    assert again is not None and groups_of(again) == expected[:4] and again.metrics == m
    assert [e.prompt.token_ids.tolist() for e in again.trajectories] == [
        e.prompt.token_ids.tolist() for e in found.trajectories
    ]


def test_of_more_groups_than_a_step_trains_the_first_count(tmp_path: Path) -> None:
    ids = [f"train/{i}" for i in range(40)]
    silent = int(data.tasks_of_step(ids, 3, 4, 5)[1].split("/")[1])
    s = Step(tmp_path, lambda i: "all" if i == silent else "mixed", dynamic_sampling=True)
    found = s.groups()
    assert groups_of(found) == ["train-000003/0", "train-000003/2", "train-000003/3", "train-000003-1/0"]
    assert found.report.kept == 8 and found.metrics["rollout/kept_groups"] == 4


def test_after_the_last_extra_rollout_a_step_trains_with_what_it_has(tmp_path: Path) -> None:
    s = Step(tmp_path, lambda i: "mixed" if i == 7 else "none", dynamic_sampling=True, max_extra_rollouts=20)
    found = s.groups()
    assert len(found.rollout_ids) == 21
    assert {e.task_id for e in found.trajectories} == {"train/7"} and found.metrics["rollout/kept_groups"] >= 1
    none = Step(tmp_path / "none", lambda i: "all", dynamic_sampling=True, max_extra_rollouts=0)
    with pytest.raises(
        JobError, match=r"none of the 4 groups of 1 rollouts of step 4 .* all right \(4\) and all wrong \(0\); raise"
    ):
        none.groups()


def test_rollouts_of_a_step_draw_other_numbers(tmp_path: Path) -> None:
    s = Step(tmp_path, lambda i: "none", dynamic_sampling=True, max_extra_rollouts=2)
    drawn: list[int] = []
    claim_groups = s.store.groups.claim

    def spying(*args: Any) -> list[Claim]:
        claims: list[Claim] = claim_groups(*args)
        drawn.extend(claim.sampling["seed"] for claim in claims)
        return claims

    s.store.groups.claim = spying
    with pytest.raises(JobError, match="of 3 rollouts"):
        s.groups()
    assert len(drawn) == 12 and len(set(drawn)) == 3 and drawn[0] == 5 * 1_000_003 + 3


def test_a_greedy_answer_is_asked_for_where_the_algorithm_needs_it(tmp_path: Path) -> None:
    s = Step(tmp_path, lambda i: "mixed", needs=("advantages", "greedy"))
    found = s.groups()
    assert len(found.trajectories) == 8
    assert all(e.greedy is not None and e.greedy.reward.status == "ok" and e.index >= 0 for e in found.trajectories)


def test_a_stop_gives_the_step_up(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        Step(tmp_path, lambda i: "all", stopped=True).groups()
