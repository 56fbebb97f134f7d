"""Rewards that come after their responses: groups wait for them, and no longer than asked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from megarl.buffer.experience import verify
from megarl.buffer.order.group_choice import ReplayChoice, TaskChoice
from megarl.buffer.store import Claim, GivenReward, Store, Used
from megarl.config import Config
from megarl.config.job import SyncConfig
from megarl.config.rewards import FormatConfig, RewardConfig
from megarl.config.schema import TrainerConfig
from megarl.core.errors import ConfigError, DataError
from megarl.core.jobs import JOBS
from megarl.core.schema import GREEDY, Reward, WeightsVersion
from megarl.learn import algorithms
from megarl.rewards.routes import compute_score
from megarl.run.checks.pacing import check_pacing
from megarl.run.launch.records import read_rewards, write_awaiting
from megarl.tasks import ChatTokenizer
from megarl.train.ranks import RunContext
from megarl.train.rollout.group_part import GroupServices
from megarl.train.rollout.group_parts import group_parts_of
from megarl.train.rollout.rollouts import GroupRequests, InAdmissionOrder, InCompletionOrder
from tests.stores import make_task, make_trajectory, request

LATE = Reward(math.nan, "late")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    url = f"sqlite:///{tmp_path}/store.db" if request.param == "sqlite" else request.getfixturevalue("new_postgres")()
    store = Store(url)
    store.tasks.add("train", [make_task(i) for i in range(6)])
    yield store
    store.close()


def put(store: Store, claim: Claim, late: Sequence[int] = (0, 1)) -> None:
    members = [make_trajectory(claim, i) for i in claim.indices]
    assert store.groups.put(claim, [replace(e, reward=LATE) if e.index in late else e for e in members])


def states(store: Store, rollout: str = "r0") -> list[str]:
    return [state for state, _, _ in store.groups.states(rollout).values()]


def test_a_group_is_ready_when_its_last_reward_has_come(store: Store) -> None:
    request(store, groups=3)
    for claim, late in zip(store.groups.claim("a", 3), ((0, 1), (1,), ()), strict=True):
        put(store, claim, late)
    assert states(store) == ["awaiting", "awaiting", "ready"] and store.rollouts.progress("r0") == (1, 3)
    assert store.rollouts.progress("r0", awaiting=True) == (3, 3) and store.groups.take(9, step=0) == ["r0/2"]
    found = [each for part in store.late.awaiting() for each in part]
    waiting = [(each.task.task_id, each.trajectory.group_id, each.trajectory.index) for each in found]
    assert waiting == [("train/0", "r0/0", 0), ("train/0", "r0/0", 1), ("train/1", "r0/1", 1)]
    token = found[0].claim
    assert {each.claim for each in found} == {token}
    right, wrong = Reward(1.0, "ok", {"style": 0.5}), Reward(0.0, "wrong")
    done = store.late.give(
        [
            GivenReward("r0/0", 0, token, right),
            GivenReward("r0/1", 1, token, wrong),
            GivenReward("r0/2", 0, token, wrong),
        ]
    )
    assert (done.written, done.ready, done.left_out) == (2, 1, (("r0/2", 0),))
    assert states(store) == ["awaiting", "ready", "ready"]
    again = store.late.give(
        [
            GivenReward("r0/0", 0, token, wrong),
            GivenReward("r0/0", 1, token, right),
            GivenReward("no/0", 0, token, wrong),
        ]
    )
    assert (again.written, again.ready, again.left_out) == (1, 1, (("r0/0", 0), ("no/0", 0)))
    rewards = {(e.group_id, e.index): e.reward for e in store.groups.read(["r0/0", "r0/1"])}
    assert rewards[("r0/0", 0)] == rewards[("r0/0", 1)] == right and rewards[("r0/1", 1)] == wrong
    assert store.groups.take(9, step=0) == ["r0/0", "r0/1", "r0/2"] and store.rollouts.is_complete("r0")


def test_a_reward_is_of_the_responses_that_were_judged(store: Store) -> None:
    """Meanwhile the job went back, and the group's id has other responses."""
    given: list[GivenReward] = []
    for _ in range(2):
        request(store, groups=1)
        (claim,) = store.groups.claim("a", 1)
        put(store, claim)
        given.append(GivenReward("r0/0", 0, claim.token, Reward(1.0, "ok")))
    done = store.late.give(given[:1])
    assert (done.written, done.left_out) == (0, (("r0/0", 0),)) and store.late.give(given).written == 1


def test_a_late_greedy_answer_is_awaited_too(store: Store) -> None:
    request(store, groups=1, greedy=True)
    (claim,) = store.groups.claim("a", 1)
    put(store, claim, claim.indices)
    found = [each.trajectory.index for part in store.late.awaiting() for each in part]
    assert found == [GREEDY, 0, 1]
    assert store.late.give([GivenReward("r0/0", i, claim.token, Reward(1.0, "ok")) for i in found]).ready == 1


def test_an_evaluation_waits_for_no_reward(store: Store) -> None:
    store.rollouts.request("eval-0", "eval", 0, WeightsVersion(1, 1), store.tasks.ids("train")[:1], 2, {})
    for claim in store.groups.claim("a", 9):
        put(store, claim)
    assert states(store, "eval-0") == ["ready"]


def asking(store: Store, order: Any, late_steps: int | None) -> Any:
    config = Config(
        trainer=TrainerConfig(tasks_per_step=2, steps=9),
        sync=SyncConfig(max_staleness=2),
        reward=RewardConfig(late_steps=late_steps),
    )
    context = RunContext(config, Path(), 1, 0)
    replay, unused = ReplayChoice(config, store), cast(Any, None)
    parts = group_parts_of(GroupServices(config, store, unused, replay, unused), algorithms.get("grpo"))
    requests = GroupRequests(context, store, TaskChoice(config, store), parts)
    return order(requests, replay) if order is InAdmissionOrder else order(requests)


def asked_with_first_weights(store: Store, order: Any) -> str:
    """Ask for two groups that step 2 may take, with the weights of step 0; return the rollout's id."""
    step = 2 if order is InAdmissionOrder else 0
    name = f"train-{step:06d}"
    request(store, name, step=step, groups=2, version=WeightsVersion(1, 1))
    store.pacing.record_version(WeightsVersion(1, 1), 0)
    return name


@pytest.mark.parametrize("order", [InAdmissionOrder, InCompletionOrder])
def test_a_group_is_left_out_once_it_has_waited_as_long_as_it_may(store: Store, order: Any) -> None:
    """Asked for with the weights of step 0; one of two still awaits its rewards."""
    name = asked_with_first_weights(store, order)
    for claim, late in zip(store.groups.claim("a", 2), ((0, 1), ()), strict=True):
        put(store, claim, late)
    assert order is InAdmissionOrder or not asking(store, order, 2).look(1, 0, (), 2).complete
    waits, gives_up = asking(store, order, None), asking(store, order, 2)
    assert waits.look(2, 0, (), 2)[:2] == (1, 2) and not waits.look(2, 0, (), 2).complete
    assert gives_up.look(2, 0, (), 2).complete and waits.choose(2, (), 2) == [f"{name}/1"]
    assert set(gives_up.choose(2, (), 2)) == {f"{name}/0", f"{name}/1"} and states(store, name) == ["ready"] * 2
    verified = verify(store.groups.read([f"{name}/0", f"{name}/1"]), RewardConfig(), vocab_size=1000)
    assert verified.dropped == {f"{name}/0": "reward_late"} and verified.report.ends["reward_late"] == 2
    store.journal.record_step(3, {}, Used((f"{name}/1",), verified.dropped))
    store.rollouts.discard(2)  # a job that goes back waits again
    assert states(store, name) == ["awaiting", "ready"]


@pytest.mark.parametrize("given", [False, True])
def test_a_restart_keeps_the_rewards_of_the_weights_that_it_goes_on_with(store: Store, given: bool) -> None:
    """Step 2 had trained on a group whose rewards were given, and the checkpoint is of step 1."""
    names = {step: f"train-{step:06d}" for step in range(3)}
    for step, name in names.items():
        store.pacing.record_version(WeightsVersion(1, step), step)
        request(store, name, step=step, groups=2, version=WeightsVersion(1, step))
        for claim in store.groups.claim("a", 2):
            put(store, claim, (0, 1) if step else ())
    claims = {found.trajectory.group_id: found.claim for part in store.late.awaiting() for found in part}
    group = f"{names[1]}/0"
    rewards = [GivenReward(group, i, claims[group], Reward(float(i), "ok" if i else "wrong")) for i in range(2)]
    if given:
        assert store.late.give(rewards).ready == 1
        store.journal.record_step(2, {}, Used((group,)))
    store.rollouts.discard(1)
    assert states(store, names[1]) == ["ready" if given else "awaiting", "awaiting"]
    assert states(store, names[2]) == []
    if given:
        assert sorted(e.reward.score for e in store.groups.read([group])) == [0.0, 1.0]
        store.rollouts.discard(1, ahead=True)  # other settings, or a rollback
        assert states(store, names[1]) == []
    else:
        assert store.late.give(rewards).written == 2


@pytest.mark.parametrize("order", [InAdmissionOrder, InCompletionOrder])
def test_a_step_of_late_groups_alone_waits_for_the_first_reward(store: Store, order: Any) -> None:
    name = asked_with_first_weights(store, order)
    [first] = store.groups.claim("a", 1)
    put(store, first)
    assert store.late.count() == 0  # the other group waits for an explorer
    claims = [first, *store.groups.claim("a", 1)]
    assert store.late.count() == 0  # and is being sampled
    put(store, claims[1])
    assert store.late.count() == 4
    late = asking(store, order, 2)
    assert not late.look(2, 0, (), 2).complete and states(store, name) == ["awaiting"] * 2
    for index in (0, 1):
        store.late.give([GivenReward(f"{name}/1", index, claims[1].token, Reward(1.0, "ok"))])
    assert store.late.count() == 2
    assert late.look(2, 0, (), 2).complete and set(late.choose(2, (), 2)) == {f"{name}/0", f"{name}/1"}


def test_the_rows_that_await_rewards_replace_no_scores(store: Store, tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "rows.jsonl", cast(ChatTokenizer, None)  # without rows none is asked for
    for text in ('{"score": null}\n', ""):
        path.write_text(text)
        assert write_awaiting(store, tokenizer, path) == 0 and not path.read_text()
    for text in ('{"score": null}\n{"score": 0}\n', '{"a": 1}\n', "text\n", "[1]\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="has scores in it, which would be lost"):
            write_awaiting(store, tokenizer, path)
        assert path.read_text() == text


def test_a_source_of_the_family_late_gets_no_verdict() -> None:
    assert compute_score("late/humans", "42", "42")["status"] == "late"
    config = RewardConfig(routes={"my_set": "late"})
    assert compute_score("my_set", "42", "42", config=config)["status"] == "late"


def rows_file(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rewards_are_read_as_reward_functions_return_them(tmp_path: Path) -> None:
    path = rows_file(
        tmp_path / "r.jsonl",
        {"group_id": "g/0", "index": 0, "claim": "t", "score": 1.0, "response": "x"},
        {"group_id": "g/0", "index": 1, "claim": "t", "score": None},
        {"group_id": "g/0", "index": 2, "claim": "t", "score": 0.25, "acc": True, "parts": {"style": 0.5}},
    )
    found = read_rewards([path], Config(reward=RewardConfig(weight=2.0)))
    assert [(each.group_id, each.position, each.reward.score, each.reward.status) for each in found] == [
        ("g/0", 0, 2.0, "ok"),
        ("g/0", 2, 0.5, "ok"),
    ]
    assert found[1].reward.parts == {"acc": 1.0, "style": 0.5, "answer": 0.25}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"group_id": 1, "index": 0, "claim": "t", "score": 1.0}, "group_id must be the id of a group, got 1"),
        ({"group_id": "g", "index": "0", "claim": "t", "score": 1.0}, "index must be the number of a response"),
        ({"group_id": "g", "index": 0, "claim": "t", "score": "good"}, "line 1: score must be a reward"),
        (
            {"group_id": "g", "index": 0, "claim": "t", "score": 1.0, "status": "late"},
            "status must be ok or wrong, got 'late'",
        ),
        ({"group_id": "g", "index": 0, "claim": None, "score": 1.0}, "claim must be the claim that"),
        ({"group_id": "g", "score": 1.0}, "no column 'index'; a row has group_id, index, claim and score"),
    ],
)
def test_rows_that_are_no_rewards_are_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_rewards([rows_file(tmp_path / "r.jsonl", row)], Config())


def test_a_response_gets_one_reward(tmp_path: Path) -> None:
    """As where two people have judged it: none of theirs is dropped in silence."""
    row = {"group_id": "g/0", "index": 0, "claim": "t", "score": 1.0}
    first, same = (rows_file(tmp_path / name, row) for name in ("a.jsonl", "b.jsonl"))
    assert len(read_rewards([first, same], Config())) == 1
    sampled_again = rows_file(tmp_path / "c.jsonl", row | {"claim": "u", "score": 0.0})
    assert len(read_rewards([first, sampled_again], Config())) == 2
    other = rows_file(tmp_path / "d.jsonl", row | {"score": 0.0})
    with pytest.raises(DataError, match=r"d\.jsonl.* line 1: score must be the reward that an earlier row gives"):
        read_rewards([first, other], Config())


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.late_steps=2: with sync\.max_staleness=1, .* set it to 1 to 1,"):
        check_pacing(Config(reward=RewardConfig(late_steps=2), sync=SyncConfig(max_staleness=1)), JOBS["both"])
    with pytest.raises(ConfigError, match=r"reward\.format\.weight=1 with rewards that are given later"):
        read_rewards([tmp_path / "r.jsonl"], Config(reward=RewardConfig(format=FormatConfig(weight=1.0))))
