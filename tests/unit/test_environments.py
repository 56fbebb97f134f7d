"""Episodes turn by turn, against a model that responds as told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from megarl.config.schema import RolloutConfig
from megarl.core.errors import ConfigError
from megarl.core.schema import End, Reward, Task, Turn
from megarl.explore import environments, workflows
from megarl.explore.environments import EpisodeThreads, Observation
from megarl.explore.environments.guess import Guess
from megarl.explore.recording.model import TokenLimits
from megarl.explore.recording.turns import recorded_reward
from megarl.explore.workflows.environment import environment
from megarl.rewards.verdict import MAX_PARTS
from tests.trajectories import one_turn


class Model:
    """A ``RolloutModel`` whose responses are given."""

    seed, group_seed, limits, options = 7, 3, TokenLimits(prompt=9), {"size": 4}
    count_tokens = staticmethod(len)

    def __init__(self, *responses: str, truncated: int | None = None, room: int = 100) -> None:
        self.responses, self.truncated, self.left = list(responses), truncated, room
        self.messages: list[tuple[str, str]] = []
        self.images: list[bytes] = []
        self.reward: Reward | None = None
        self.reason: str | None = None
        self.cause: End | None = None
        self.first: str | None = None
        self.rated: list[float] = []

    def ask(self, task: Task, observation: str | None = None, images: Sequence[bytes] = ()) -> None:
        self.images += images
        if observation is not None and len(observation) > self.limits.prompt:
            raise ValueError(f"the prompt has {len(observation)} tokens")
        self.first = observation

    def rate(self, turn: Turn, reward: float) -> None:
        self.rated.append(reward)

    async def generate(self) -> Turn:
        reason = "length" if self.truncated == len(self.messages) else "stop"
        return one_turn([1], [2], [-1.0], finish_reason=reason)[-1]  # type: ignore[arg-type]

    def written(self, turn: Turn) -> str:
        return self.responses.pop(0)

    def add(self, author: str, text: str, images: Sequence[bytes] = ()) -> Any:
        self.images += images
        self.left -= 1
        if self.left < 0:
            return None
        self.messages.append((author, text))
        return object()

    def finish(self, reward: Reward) -> None:
        self.reward = reward

    def fail(self, reason: str, cause: End = End.WORKFLOW_ERROR) -> None:
        self.reason, self.cause = reason, cause


def task(number: int = 7, tries: int = 4) -> Task:
    return Task("t", "guess", (), "", {"ground_truth": str(number)}, {"tries": tries})


def run(model: Model, make: Any = Guess, row: Task | None = None, timeout_s: float = 60.0) -> Model:
    played: Any = model
    asyncio.run(environment(make, EpisodeThreads(8, timeout_s))(row or task(), played))
    return model


def test_an_episode_until_it_is_won() -> None:
    model = run(Model("3", "it is 9", "7"))
    assert model.messages == [("environment", "higher"), ("environment", "lower")]
    assert model.reward == Reward(1.0, "ok", {"turn_1": 0.0, "turn_2": 0.0, "turn_3": 1.0})
    assert model.rated == [0.0, 0.0, 1.0] and model.first is None


@pytest.mark.parametrize(
    ("model", "row"),
    [(Model("1", "2"), task(tries=2)), (Model("no number"), task()), (Model("1", truncated=0), task()),
     (Model("1", room=0), task())],
)  # fmt: skip
def test_an_episode_that_is_lost(model: Model, row: Task) -> None:
    reward = run(model, row=row).reward
    assert reward is not None and (reward.score, reward.status) == (0.0, "wrong")


class Broken:
    closed = 0

    def __init__(self, task: Task, at: str) -> None:
        self.at = at
        if at == "make":
            raise OSError("no server")

    def step(self, response: str) -> Observation:
        if self.at == "step":
            raise ConnectionResetError("gone")
        return Observation("", 0.5, done=True)

    def close(self) -> None:
        Broken.closed += 1
        if self.at == "close":
            raise ValueError("twice")


@pytest.mark.parametrize(("at", "words"), [("make", "OSError: no server"), ("step", "ConnectionResetError: gone")])
def test_a_fault_is_no_verdict_and_never_a_reward_of_0(at: str, words: str) -> None:
    Broken.closed = 0
    model = run(Model("1"), lambda row: Broken(row, at))
    assert model.reward is None and model.reason is not None and words in model.reason
    assert model.cause is End.ENVIRONMENT_ERROR
    assert Broken.closed == (at == "step")


def test_a_fault_in_closing_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = run(Model("1"), lambda row: Broken(row, "close"))
    assert model.reward == Reward(0.5, "wrong", {"turn_1": 0.5}) and "did not close: ValueError: twice" in caplog.text


def test_by_name_and_from_a_users_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class Mine:\n    def __init__(self, task): self.task = task\nmake = Mine\n")
    assert environments.get("guess") is Guess
    assert environments.get(str(path)).__name__ == "Mine"  # type: ignore[attr-defined]
    for name, words in (
        ("chess", "'chess' does not exist; choose one of guess, .*, or"),
        (str(tmp_path / "x.py"), "no such file"),
    ):
        with pytest.raises(ConfigError, match=words):
            workflows.get(RolloutConfig(workflow="environment", environment=name))
    path.write_text("x = 1")
    with pytest.raises(ConfigError, match=r"has no make\(task\)"):
        environments.get(str(path))


@pytest.mark.parametrize(
    ("make", "seeds"),
    [
        (lambda task, seed: Seeded(seed), [7]),
        (lambda task, *, seed=None: Seeded(seed), [7]),
        (lambda task: Seeded(None), [None]),
        (lambda task, other=3: Seeded(other), [3]),
    ],
)
def test_a_make_that_takes_a_seed_gets_that_of_the_trajectory(make: Any, seeds: list[int | None]) -> None:
    assert run(Model("1"), make).reward == Reward(float(seeds[0] or 0), "wrong" if seeds == [None] else "ok", ANY)


class Seeded:
    def __init__(self, seed: int | None) -> None:
        self.seed = seed

    def step(self, response: str) -> Observation:
        return Observation("", float(self.seed or 0), done=True)

    def close(self) -> None: ...


class Hanging:
    """An episode that hangs in ``at`` until ``go``; ``calls`` is what has happened."""

    def __init__(self, task: Task | None, at: str) -> None:
        self.at, self.go, self.calls, self.closed = at, threading.Event(), list[str](), threading.Event()

    def make(self, task: Task) -> Hanging:
        self._call("make")
        return self

    def step(self, response: str) -> Observation:
        self._call("step")
        return Observation("", 1.0, done=True)

    def close(self) -> None:
        self._call("close")
        self.closed.set()

    def _call(self, name: str) -> None:
        self.calls.append(f"{name} begins")
        if self.at == name:
            self.go.wait(60)
        self.calls.append(f"{name} ends")


@pytest.mark.parametrize("at", ["make", "step"])
def test_a_call_past_its_limit_ends_the_episode_which_is_closed_when_it_returns(at: str) -> None:
    hanging = Hanging(None, at)
    model = run(Model("1"), hanging.make, timeout_s=0.5)
    assert model.cause is End.ENVIRONMENT_TIMEOUT and model.reward is None
    assert model.reason == f"{at} has not returned within rollout.environment_timeout_s=0.5"
    assert hanging.calls[-1] == f"{at} begins"
    hanging.go.set()
    assert hanging.closed.wait(60) and hanging.calls[-3:] == [f"{at} ends", "close begins", "close ends"]


def test_a_close_past_its_limit_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    hanging = Hanging(None, "close")
    model = run(Model("1"), hanging.make, timeout_s=0.5)
    assert model.reward == Reward(1.0, "ok", {"turn_1": 1.0}) and "close has not returned within" in caplog.text
    hanging.go.set()


def test_calls_that_hang_block_no_other_episode() -> None:
    hanging = [Hanging(None, "step") for _ in range(6)]
    good = [Hanging(None, "") for _ in range(6)]

    async def main() -> list[Any]:
        threads = EpisodeThreads(2, 0.05)
        models: list[Any] = [Model("1") for _ in hanging + good]
        await asyncio.gather(
            *(environment(row.make, threads)(task(), model) for row, model in zip(hanging + good, models, strict=True))
        )
        return models

    models = asyncio.run(asyncio.wait_for(main(), 60))
    assert [model.cause for model in models[:6]] == [End.ENVIRONMENT_TIMEOUT] * 6
    assert all(model.reward.score == 1.0 for model in models[6:])
    for episode in hanging:
        episode.go.set()


def test_an_episode_that_is_cancelled_in_a_step_is_closed_after_it() -> None:
    hanging = Hanging(None, "step")

    async def main() -> None:
        played: Any = Model("1")
        running = asyncio.ensure_future(environment(hanging.make, EpisodeThreads(2, 60.0))(task(), played))
        while "step begins" not in hanging.calls:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(asyncio.wait_for(main(), 60))
    assert not hanging.closed.is_set()
    hanging.go.set()
    assert hanging.closed.wait(60) and hanging.calls[-3:] == ["step ends", "close begins", "close ends"]


def test_calls_at_once_are_limited() -> None:
    lock, now, most = threading.Lock(), [0], [0]

    class Counted(Seeded):
        def step(self, response: str) -> Observation:
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            threading.Event().wait(0.01)
            with lock:
                now[0] -= 1
            return Observation("", 1.0, done=True)

    async def main() -> None:
        threads = EpisodeThreads(3, 60.0)
        models: list[Any] = [Model("1") for _ in range(20)]
        await asyncio.gather(*(environment(lambda task: Counted(0), threads)(task(), model) for model in models))

    asyncio.run(asyncio.wait_for(main(), 60))
    assert most[0] == 3


def test_an_episode_of_more_responses_than_a_reward_has_parts() -> None:
    """It failed, so that a policy was trained on its short episodes alone."""

    class Long:
        steps = 0

        def step(self, response: str) -> Observation:
            self.steps += 1
            return Observation("on", 1.0, done=self.steps == MAX_PARTS + 44)

        def close(self) -> None: ...

    reward = run(Model(*["a"] * (MAX_PARTS + 44), room=1000), lambda task: Long()).reward
    assert reward is not None and reward.score == MAX_PARTS + 44 and recorded_reward(reward) == reward
    assert len(reward.parts) == MAX_PARTS


@pytest.mark.parametrize("name", ["done", "success"])
@pytest.mark.parametrize("value", ["False", "no", float("nan"), 2])
def test_what_is_neither_true_nor_false_is_no_outcome(name: str, value: Any) -> None:
    """`success="False"` was a success: a text is true whatever it says."""

    class Loose:
        def step(self, response: str) -> Observation:
            outcome: dict[str, Any] = {"done": True, name: value}
            return Observation("", **outcome)

        def close(self) -> None:
            pass

    model = run(Model("1"), lambda row: Loose())
    assert model.reward is None and model.reason is not None and f"Observation.{name}" in model.reason


class Board:
    """Its first observation is known once it is made."""

    def __init__(self, task: Task, group_seed: int, limits: TokenLimits, count_tokens: Any, options: Any) -> None:
        self.text = f"{group_seed}{options['size']}"[: limits.prompt]
        assert count_tokens(self.text) <= limits.prompt

    def reset(self) -> Any:
        return self.text

    def step(self, response: str) -> Observation:
        return Observation("", 1.0, done=True)

    def close(self) -> None: ...


def test_a_first_observation_follows_the_prompt() -> None:
    model = run(Model("1"), Board)
    assert model.first == "34" and model.reward == Reward(1.0, "ok", {"turn_1": 1.0})


class Loud(Board):
    def reset(self) -> Any:
        return "x" * 10


class Silent(Board):
    def reset(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("make", "reason"),
    [(Loud, "the prompt has 10 tokens"), (Silent, "reset must return a text or an Observation, got None")],
)
def test_a_first_observation_that_cannot_be_used_is_the_environments_fault(make: Any, reason: str) -> None:
    model = run(Model("1"), make)
    assert reason in str(model.reason) and model.cause is End.ENVIRONMENT_ERROR and model.reward is None


def test_first_observations_need_a_limit_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "board.py").write_text("class make:\n    def reset(self): return ''\n")
    rollout = RolloutConfig(workflow="environment", environment=f"{tmp_path}/board.py")
    with pytest.raises(ConfigError, match="rollout.max_prompt_tokens is not set"):
        workflows.check(rollout, tmp_path)
    workflows.check(replace(rollout, max_prompt_tokens=64), tmp_path)


def test_an_environment_may_change_its_task() -> None:
    def make(task: Task) -> Board:
        task.extra_info.clear()
        return Board(task, 3, TokenLimits(), len, {"size": 4})

    row = task()
    assert run(Model("1"), make, row).reward is not None and row.extra_info


def test_a_number_of_thousands_of_digits_is_no_guess() -> None:
    game = Guess(task(5, 3))
    assert game.step("4").text == "higher"
    assert game.step("9" * 5000) == Observation("", done=True, success=False)
