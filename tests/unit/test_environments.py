"""Episodes turn by turn, against a model that responds as told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megarl.core.config.schema import RolloutConfig
from megarl.core.errors import ConfigError
from megarl.core.schema import End, Reward, Task, Turn
from megarl.explore import environments, workflows
from megarl.explore.environments import Observation
from megarl.explore.workflows.environment import environment
from tests.trajectories import one_turn


class Model:
    """A ``RolloutModel`` whose responses are given."""

    def __init__(self, *responses: str, truncated: int | None = None, room: int = 100) -> None:
        self.responses, self.truncated, self.left = list(responses), truncated, room
        self.messages: list[tuple[str, str]] = []
        self.reward: Reward | None = None
        self.reason: str | None = None
        self.cause: End | None = None

    def ask(self, task: Task) -> None: ...

    async def generate(self) -> Turn:
        reason = "length" if self.truncated == len(self.messages) else "stop"
        return one_turn([1], [2], [-1.0], finish_reason=reason)[-1]  # type: ignore[arg-type]

    def text(self, turn: Turn) -> str:
        return self.responses.pop(0)

    def add(self, author: str, text: str) -> Any:
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


def run(model: Model, make: Any = environments.ENVIRONMENTS["guess"], row: Task | None = None) -> Model:
    played: Any = model
    asyncio.run(environment(make)(row or task(), played))
    return model


def test_an_episode_until_it_is_won() -> None:
    model = run(Model("3", "it is 9", "7"))
    assert model.messages == [("environment", "higher"), ("environment", "lower")]
    assert model.reward == Reward(1.0, "ok", {"turn_1": 0.0, "turn_2": 0.0, "turn_3": 1.0})


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
    assert environments.get("guess") is environments.ENVIRONMENTS["guess"]
    assert environments.get(str(path)).__name__ == "Mine"  # type: ignore[attr-defined]
    for name, words in (
        ("chess", "'chess' is not there; there are guess, or"),
        (str(tmp_path / "x.py"), "no such file"),
    ):
        with pytest.raises(ConfigError, match=words):
            workflows.get(RolloutConfig(workflow="environment", environment=name))
    path.write_text("x = 1")
    with pytest.raises(ConfigError, match=r"has no make\(task\)"):
        environments.get(str(path))
