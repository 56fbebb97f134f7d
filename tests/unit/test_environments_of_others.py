"""Environments of other packages, against the packages themselves, with responses that are given."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megarl.core.config.schema import RolloutConfig
from megarl.core.errors import ConfigError
from megarl.core.schema import Reward, Task
from megarl.explore import environments, workflows
from megarl.explore.environments import EpisodeThreads
from megarl.explore.recording.limits import TokenLimits
from megarl.explore.workflows.environment import environment
from tests.unit.test_environments import Model

GAME = {"id": "tests.games.guess_gymnasium:Guess-v0"}
EPISODES = (
    ("7",), ("3", "it is 9", "7"), ("1", "2", "3", "4"), ("no number",), ("5", ""), ("-7", "7 or 8", "<7>"),
)  # fmt: skip


def task(tries: int = 4) -> Task:
    """A row of ``guess``, as ``megarl data`` writes it."""
    prompt = ({"role": "user", "content": "Game 3. Guess 2 to 8: higher or lower?"},)
    return Task("t", "guess", prompt, "game", {"style": "rule", "ground_truth": "7"}, {"tries": tries})


def play(name: str, responses: tuple[str, ...], options: Any = None, row: Task | None = None) -> Model:
    """Play an episode to its end."""
    model = Model(*responses)
    model.limits = TokenLimits()
    model.options = options or {}
    played: Any = model
    asyncio.run(environment(environments.get(name), EpisodeThreads(8, 60.0))(row or task(), played))
    assert model.reason is None, model.reason
    return model


def trajectory(model: Model) -> Any:
    """All that a trainer or a person would see of it."""
    return model.first or None, model.messages, model.rated, model.reward, len(model.responses)


def check(name: str, options: Any, prompt: int | None = 64) -> None:
    rollout = RolloutConfig(workflow="environment", environment=name, options=options, max_prompt_tokens=prompt)
    workflows.check(rollout, Path("runs"))


@pytest.mark.parametrize("responses", EPISODES)
def test_guess_of_gymnasium_is_our_own(responses: tuple[str, ...]) -> None:
    pytest.importorskip("gymnasium")
    assert trajectory(play("gymnasium", responses, GAME)) == trajectory(play("guess", responses))


def test_discrete_actions_of_gymnasium_are_words_or_numbers_and_seeded_by_the_group() -> None:
    pytest.importorskip("gymnasium")
    lake = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}}
    words = {**lake, "actions": {"left": 0, "down": 1, "right": 2, "up": 3}}
    route = ("down", "Down.", "go right", "right", "down", "not up but right")
    check("gymnasium", words)
    model = play("gymnasium", route, words)
    assert [text for _, text in model.messages] == ["4", "8", "9", "10", "14"] and model.first == "0"
    assert model.reward is not None and (model.reward.score, model.reward.status) == (1.0, "ok")
    assert play("gymnasium", ("1", "1", "2", "2", "1", "action 2"), lake).messages == model.messages
    for unreadable in ("", "7", "onwards"):
        assert play("gymnasium", (unreadable,), lake).reward == Reward(0.0, "wrong", {"turn_1": 0.0})
    drawn = play("gymnasium", ("8",), {"id": "FrozenLake-v1", "kwargs": {"render_mode": "ansi"}})
    assert str(drawn.first).strip().endswith("HFFG")
    slips = [play("gymnasium", ("1",) * 100, {"id": "FrozenLake-v1"}).messages for _ in range(2)]
    assert slips[0] == slips[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, r"rollout.options.id is not set.*such as FrozenLake-v1"),
        ({"id": "Nowhere-v0"}, r"rollout.options.id='Nowhere-v0' cannot be made: NameNotFound"),
        ({"id": "no_such_module:A-v0"}, r"cannot be made: ModuleNotFoundError"),
        ({"id": "Pendulum-v1"}, r"has actions Box.*whose actions are Text or Discrete"),
        ({"id": "FrozenLake-v1", "actions": {"jump": 4}}, r"actions=\{'jump': 4\} is no discrete action"),
        ({"id": "FrozenLake-v1", "size": 4}, r"size=4 is no option of rollout.environment=gymnasium, which has id"),
        ({"id": 3}, r"id=3 must be a str"),
    ],
)
def test_what_gymnasium_cannot_do_is_refused_before_a_process_starts(options: Any, words: str) -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match=words):
        check("gymnasium", options)


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install gymnasium"):
        check("gymnasium", GAME)


def question() -> Task:
    prompt = ({"role": "user", "content": "9 + 3 ="},)
    return Task("t", "reasoning_gym/chain_sum", prompt, "math", {"ground_truth": "12"}, {"tries": 9})


def test_a_question_of_reasoning_gym_is_asked_again_until_its_answer_is_right() -> None:
    model = play("reasoning_gym", ("13", "<answer>12</answer>"), row=question())
    assert model.messages == [("environment", "That is not right. Try again.")]
    assert model.reward is not None and (model.reward.score, model.reward.status) == (1.0, "ok")
    lost = play("reasoning_gym", ("1", "2", "3"), {"tries": 2, "feedback": "No."}, question())
    assert lost.messages == [("environment", "No.")] and lost.responses == ["3"]
    assert lost.reward == Reward(sum(lost.rated), "wrong", {"turn_1": lost.rated[0], "turn_2": lost.rated[1]})


def test_the_score_of_a_question_is_that_of_its_best_response() -> None:
    scores = {"a": 0.25, "b": 0.0, "c": 0.5}
    episode: Any = environments.get("reasoning_gym")(question(), {"tries": 3})
    episode._score = lambda text, truth, info: scores[text]
    assert [episode.step(text).reward for text in "abc"] == [0.25, 0.0, 0.25]


def test_options_of_reasoning_gym_are_checked() -> None:
    check("reasoning_gym", {"tries": 2}, prompt=None)
    for options, words in (({"tries": 0}, "must be at least 1"), ({"trys": 1}, "trys=1 is no option")):
        with pytest.raises(ConfigError, match=words):
            check("reasoning_gym", options)
