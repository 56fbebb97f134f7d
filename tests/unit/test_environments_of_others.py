"""Environments of other packages, against the packages themselves, with responses that are given.

Tests are skipped if their package is missing::

    python3 -m venv /tmp/envs/verifiers && /tmp/envs/verifiers/bin/pip install verifiers==0.4.0
    python3 -m venv /tmp/envs/openenv && /tmp/envs/openenv/bin/pip install openenv-core==0.3.0
    export MEGARL_VERIFIERS_PYTHON=/tmp/envs/verifiers/bin/python MEGARL_OPENENV_PYTHON=/tmp/envs/openenv/bin/python
    pytest tests/unit/test_environments_of_others.py
    MEGARL_SOAK=1 pytest tests/loop/test_guess_of_others.py  # a step of each trains the same bits; 6 minutes
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from PIL import Image

from megarl.config import Config
from megarl.config.rewards import FormatConfig, RewardConfig
from megarl.config.schema import RolloutConfig
from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Reward, Task, Turn
from megarl.explore import environments, workflows
from megarl.explore.environments import EnvironmentFault, EpisodeThreads, verifiers
from megarl.explore.environments.types import in_thread
from megarl.explore.recording.model import TokenLimits
from megarl.explore.workflows.environment import environment
from megarl.rewards import RewardPool, Verdict
from megarl.run.checks import vision
from megarl.run.process import ports
from tests import games
from tests.unit.test_environments import Model

GAME = {"id": "tests.games.guess_gymnasium:Guess-v0"}
EPISODES = (
    ("7",), ("3", "it is 9", "7"), ("1", "2", "3", "4"), ("no number",), ("5", ""), ("-7", "7 or 8", "<7>"),
)  # fmt: skip


VERIFIERS = os.environ.get("MEGARL_VERIFIERS_PYTHON", "")
OPENENV = os.environ.get("MEGARL_OPENENV_PYTHON", "")
with_verifiers = pytest.mark.skipif(not VERIFIERS, reason="MEGARL_VERIFIERS_PYTHON names no Python with verifiers")
with_openenv = pytest.mark.skipif(not OPENENV, reason="MEGARL_OPENENV_PYTHON names no Python with openenv-core")
GAMES = Path(games.__file__).parent


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
    asyncio.run(environment(environments.get(name), EpisodeThreads(8, 300.0))(row or task(), played))
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
    capitals = {**lake, "actions": {"Left": 0, "DOWN": 1, "Right": 2, "up": 3}}
    check("gymnasium", capitals)
    assert play("gymnasium", route, capitals).messages == model.messages
    assert [text for _, text in model.messages] == ["4", "8", "9", "10", "14"] and model.first == "0"
    assert model.reward is not None and (model.reward.score, model.reward.status) == (1.0, "ok")
    assert play("gymnasium", ("1", "1", "2", "2", "1", "action 2"), lake).messages == model.messages
    for unreadable in ("", "7", "onwards", "9" * 5000, "<think>2"):
        assert play("gymnasium", (unreadable,), lake).reward == Reward(0.0, "wrong", {"turn_1": 0.0})
    drawn = play("gymnasium", ("8",), {"id": "FrozenLake-v1", "kwargs": {"render_mode": "ansi"}})
    assert str(drawn.first).strip().endswith("HFFG")
    slips = [play("gymnasium", ("1",) * 100, {"id": "FrozenLake-v1"}).messages for _ in range(2)]
    assert slips[0] == slips[1]


def test_gymnasium_shows_pictures() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    lake = {"id": "FrozenLake-v1", "kwargs": {"render_mode": "rgb_array"}}

    class Lamp(gymnasium.Env):  # type: ignore[misc, name-defined]
        """A lamp that is switched on and off; its picture is white or black."""

        action_space, observation_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(2)

        def __init__(self, render_mode: str) -> None:
            self.render_mode, self.on = render_mode, 0

        def reset(self, **given: Any) -> Any:
            self.on = 0
            return 0, {}

        def step(self, action: int) -> Any:
            self.on = action
            return action, float(action), False, False, {}

        def render(self) -> Any:
            return np.full((28, 56, 3), 255 * self.on, np.uint8)

    gymnasium.register("Lamp-v0", Lamp)
    try:
        options = {"id": "Lamp-v0", "kwargs": {"render_mode": "rgb_array"}}
        check("gymnasium", options)
        model = Model("1", "0", room=1)
        model.limits, model.options = TokenLimits(), options
        asyncio.run(environment(environments.get("gymnasium"), EpisodeThreads(8, 300.0))(task(), model))  # type: ignore[arg-type]
        assert model.first == "" and model.messages == [("environment", "")]
        assert [np.asarray(Image.open(io.BytesIO(file))).mean() for file in model.images] == [0, 255, 0]
        assert np.asarray(Image.open(io.BytesIO(model.images[0]))).shape == (28, 56, 3)
        with pytest.raises(ConfigError, match=r"rollout.environment=gymnasium shows images .*takes text only"):
            vision.check_environment(
                Config(rollout=RolloutConfig(workflow="environment", environment="gymnasium", options=options))
            )
    finally:
        del gymnasium.registry["Lamp-v0"]
    if importlib.util.find_spec("pygame") is None:
        with pytest.raises(ConfigError, match=r"gives no picture: .*pygame is not installed"):
            check("gymnasium", lake)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, r"rollout.options.id is not set.*such as FrozenLake-v1"),
        ({"id": "Nowhere-v0"}, r"rollout.options.id='Nowhere-v0' cannot be made: NameNotFound"),
        ({"id": "no_such_module:A-v0"}, r"cannot be made: ModuleNotFoundError"),
        ({"id": "Pendulum-v1"}, r"has actions Box.*whose actions are Text or Discrete"),
        ({"id": "FrozenLake-v1", "actions": {"jump": 4}}, r"actions=\{'jump': 4\} is no discrete action"),
        ({"id": "FrozenLake-v1", "actions": {"go down": 1}}, r"'go down': 1\} names an action by no single word; give"),
        ({"id": "FrozenLake-v1", "actions": {1: 1}}, r"actions=\{1: 1\} names an action by no single word"),
        ({"id": "FrozenLake-v1", "actions": {True: 1}}, r"actions=\{True: 1\} names an action by no single word"),
        ({"id": "FrozenLake-v1", "actions": {"a": 1, "A": 1}}, r"'A': 1\} is the same word as 'a'.*remove one"),
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


class Verified(Model):
    """A model whose responses a pool of rewards scores."""

    pool: RewardPool
    row: Task

    async def generate(self) -> Turn:
        self.said = self.responses.pop(0)
        return await super().generate()

    def written(self, turn: Turn) -> str:
        return self.said

    async def verdict(self, of: Turn) -> Verdict:
        return await self.pool.score(self.row, self.said)


def ask(row: Task, *responses: str, options: Any = None, **rewards: Any) -> Model:
    """Play an episode of reasoning_gym, with a pool of its own."""
    model: Any = Verified(*responses)
    model.limits, model.options, model.row = TokenLimits(), options or {}, row

    async def main() -> None:
        async with RewardPool(RewardConfig(workers=1, **rewards)) as model.pool:
            await environment(environments.get("reasoning_gym"), EpisodeThreads(8, 300.0))(row, model)

    asyncio.run(main())
    assert model.reason is None, model.reason
    return model  # type: ignore[no-any-return]


def test_a_question_of_reasoning_gym_is_asked_again_until_its_answer_is_right() -> None:
    model = ask(question(), "13", "<answer>12</answer>", weight=0.5)
    assert model.messages == [("environment", "That is not right. Try again.")]
    assert model.reward is not None and (model.reward.score, model.reward.status) == (1.0, "ok")
    lost = ask(question(), "1", "2", "3", options={"tries": 2, "feedback": "No."})
    assert lost.messages == [("environment", "No.")] and lost.responses == ["3"]
    assert lost.reward == Reward(sum(lost.rated), "wrong", {"turn_1": lost.rated[0], "turn_2": lost.rated[1]})


def test_the_score_of_a_question_is_that_of_its_best_response() -> None:
    scores = {"a": 0.25, "b": 0.0, "c": 0.5}
    episode: Any = environments.get("reasoning_gym")(question(), {"tries": 3})
    assert [episode.step(text, scores[text]).reward for text in "abc"] == [0.25, 0.0, 0.25]


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_an_environment_gets_the_verifiers_score_and_no_part_of_it(tmp_path: Path, weight: float) -> None:
    (tmp_path / "reward.py").write_text(
        "def compute_score(**_): return {'score': 1, 'answer': 42, 'format': 7, 'user_format': 8}"
    )
    form = FormatConfig(weight=weight)
    model = ask(question(), "13", path=str(tmp_path / "reward.py"), format=form)
    assert model.reward == Reward(1.0, "ok", {"turn_1": 1.0})


def test_code_of_a_response_does_not_run_in_this_process() -> None:
    """SymPy evaluates the answer to an integral."""
    metadata = {"variable": "x", "integrand": "2*x"}
    row = replace(question(), data_source="reasoning_gym/simple_integration", extra_info={"metadata": metadata})
    lost = ask(row, "__import__('sys').modules.__setitem__('left_by_a_response', 1)", options={"tries": 1})
    assert "left_by_a_response" not in sys.modules and lost.rated == [0.0]


def test_a_response_without_a_verdict_leaves_its_trajectory_without_one() -> None:
    row = replace(question(), data_source="reasoning_gym/no_such_family")
    assert ask(row, "13", retries=0).reward is None


def test_rows_of_an_environment_that_asks_the_verifier_need_one() -> None:
    for name, asks in (("reasoning_gym", True), ("guess", False)):
        assert workflows.asks_verifier(RolloutConfig(workflow="environment", environment=name)) is asks


def test_options_of_reasoning_gym_are_checked() -> None:
    check("reasoning_gym", {"tries": 2}, prompt=None)
    for options, words in (({"tries": 0}, "must be at least 1"), ({"trys": 1}, "trys=1 is no option")):
        with pytest.raises(ConfigError, match=words):
            check("reasoning_gym", options)


@pytest.fixture
def taskset(tmp_path: Path) -> Any:
    """Options of the game as a taskset of verifiers with one task."""
    row = task()
    data = {"prompt": row.prompt[0]["content"], "ground_truth": row.ground_truth, "tries": row.extra_info["tries"]}
    (tmp_path / "rows.json").write_text(json.dumps([data]))
    block = {"taskset": {"id": "guess_verifiers", "file": f"{tmp_path}/rows.json"}}
    yield {"python": VERIFIERS, "env": block, "path": str(GAMES)}
    verifiers.PROCESS.end()


def row_of_taskset() -> Task:
    return replace(task(), extra_info={"index": 0})


@with_verifiers
def test_guess_of_verifiers_is_our_own(taskset: Any) -> None:
    words, env = verifiers.command(taskset, "rows", "9")
    written = subprocess.run(words, env=env, stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()
    assert [json.loads(line)["prompt"] for line in written] == [list(task().prompt)]
    check("verifiers", taskset)
    for responses in EPISODES:
        seen = play("verifiers", responses, taskset, row_of_taskset())
        assert trajectory(seen) == trajectory(play("guess", responses)), responses


@with_verifiers
def test_an_episode_of_verifiers_that_hangs_is_killed_and_a_dead_server_replaced(taskset: Any) -> None:
    play("verifiers", ("7",), taskset, row_of_taskset())
    episode: Any = environments.get("verifiers")(row_of_taskset(), taskset)
    assert episode.step("1").text == "higher"
    os.kill(episode.pid, signal.SIGSTOP)
    call = in_thread(lambda: episode.step("2"))
    episode.kill()
    with pytest.raises(EnvironmentFault, match="process has ended"):
        call.result(60)
    episode.close()
    verifiers.PROCESS.process.kill()  # type: ignore[union-attr]
    verifiers.PROCESS.process.wait()  # type: ignore[union-attr]
    play("verifiers", ("7",), taskset, row_of_taskset())


@with_verifiers
def test_rows_that_a_taskset_does_not_have_are_named(taskset: Any) -> None:
    words, env = verifiers.command(taskset, "rows", "9", "--skip", "5")
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "0 rows, not 9: the taskset has no more after --skip 5" in done.stderr
    with pytest.raises(AssertionError, match="has 1 tasks, and a row the index 3; make the rows again"):
        play("verifiers", ("7",), taskset, replace(row_of_taskset(), extra_info={"index": 3}))
    taskset["env"]["taskset"]["nothing"] = 1
    with pytest.raises(ConfigError, match=r"(?s)nothing; Extra inputs are not permitted"):
        check("verifiers", taskset)


def test_an_empty_response_comes_back_from_verifiers_as_none() -> None:
    seen = [{"role": "user", "content": "Guess"}, {"role": "assistant", "content": ""}]
    again = [seen[0], {"role": "assistant", "content": None}]
    new = verifiers.messages_after(seen, [*again, {"role": "user", "content": "higher"}], opened=True)
    assert new == [{"role": "user", "content": "higher"}]
    with pytest.raises(ValueError, match="asks with .*'lower'.* for .*'higher'.*; it must not be rewritten"):
        verifiers.messages_after([*seen, *new], [*again, {"role": "user", "content": "lower"}], opened=True)


def test_rows_of_another_taskset_are_refused() -> None:
    options = {"env": {"taskset": {"id": "warmer"}}}
    fits = replace(task(), data_source="verifiers/warmer", extra_info={"index": 0})
    verifiers.Verifiers.check_row(fits, options)
    paired = {"env": {"id": "best-of-n", "taskset": {"id": "warmer"}}}
    verifiers.Verifiers.check_row(replace(fits, data_source="verifiers/best-of-n+warmer"), paired)
    for row in (replace(fits, data_source="verifiers/digit"), replace(fits, extra_info={})):
        with pytest.raises(DataError, match="is no row of 'verifiers/warmer'"):
            verifiers.Verifiers.check_row(row, options)


def test_a_taskset_has_no_keys_but_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEGARL_JOB_KEY", "OPENAI_API_KEY", "OTHER_API_KEY"):
        monkeypatch.setenv(name, "secret")
    options = {"python": "python", "env": {}, "path": "/tasksets", "variables": ["OPENAI_API_KEY"]}
    env = verifiers.command(options, "check")[1]
    assert [name for name in env if env[name] == "secret"] == ["OPENAI_API_KEY"]
    assert env["PYTHONPATH"] == "/tasksets" and env["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "rollout.options.python is not set"),
        ({"python": "/no/python", "env": {"a": 1}}, "python='/no/python' is no program; give the Python of"),
        ({"python": sys.executable, "env": {"a": 1}}, "names no taskset"),
        (
            {"python": sys.executable, "env": {"taskset": {"id": "x"}}, "variables": ["MEGARL_JOB_KEY"]},
            "variables='MEGARL_JOB_KEY' is no name of a variable of yours",
        ),
        ({"python": sys.executable, "env": {"taskset": {"id": "x"}}}, r"No module named 'verifiers' \(verifiers 0.4"),
    ],
)
def test_tasksets_that_do_not_load_are_refused(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check("verifiers", options)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", port))


@pytest.fixture
def server() -> Any:
    """Address of the game's OpenEnv server, a process of its own."""
    [port] = ports.choose("127.0.0.1", 1, None)
    process = subprocess.Popen([OPENENV, str(GAMES / "guess_openenv.py"), str(port), "8"])
    try:
        while process.poll() is None and not listens(port):
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@with_openenv
def test_guess_of_openenv_is_our_own(server: str) -> None:
    options = {"url": server, "observation": "text"}
    check("openenv", options)
    for responses in EPISODES:
        assert trajectory(play("openenv", responses, options)) == trajectory(play("guess", responses)), responses
    for wrong, words in (({"action": "move"}, "have .*message"), ({"observation": "seen"}, "have .*text")):
        with pytest.raises(ConfigError, match=words):
            check("openenv", {**options, **wrong})


@with_openenv
def test_a_server_of_openenv_with_too_few_places_says_so_and_a_call_is_ended(server: str) -> None:
    options = {"url": server, "observation": "text"}
    make: Any = environments.get("openenv")
    episodes = [make(task(), 1, options) for _ in range(8)]
    assert [episode.reset() for episode in episodes] == [""] * 8
    ninth = make(task(), 1, options)
    with pytest.raises(RuntimeError, match="CAPACITY_REACHED.*max_concurrent_envs"):
        ninth.reset()
    for episode in episodes:
        episode.close()
    ninth.kill()
    with pytest.raises(Exception, match=r"clos"):
        ninth.step("1")
    ninth.close()


@contextmanager
def serving(serve: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Iterator[str]:
    """Address of a server of our own, in a thread."""
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_get("/ws", serve)
    runner = web.AppRunner(app)
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield asyncio.run_coroutine_threadsafe(start(), loop).result()
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)


@pytest.fixture
def pinging() -> Iterator[tuple[str, threading.Event]]:
    """Address of a server that pings after each reset, and whether a ping was answered."""
    answered = threading.Event()

    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        async for message in socket:
            if message.type is web.WSMsgType.PONG:
                answered.set()
                continue
            kind = message.json()["type"]
            await socket.send_json({"type": "observation", "data": {"observation": {"text": kind}, "done": False}})
            if kind == "reset":
                await socket.ping()
            else:
                await socket.close()
        return socket

    with serving(serve) as url:
        yield url, answered


def test_a_text_of_openenv_that_is_null_is_an_empty_one() -> None:
    """It was shown to the model as "None"."""

    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            await socket.send_json({"type": "observation", "data": {"observation": {"text": None}}})
        return socket

    with serving(serve) as url:
        episode: Any = environments.get("openenv")(task(), 1, {"url": url, "observation": "text"})
        assert episode.reset() == "" and episode.step("1").text == ""
        episode.close()


def test_a_ping_of_openenv_is_answered_while_a_model_is_asked(pinging: tuple[str, threading.Event]) -> None:
    url, answered = pinging
    episode: Any = environments.get("openenv")(task(), 1, {"url": url, "observation": "text"})
    assert episode.reset() == "reset"
    assert answered.wait(20)
    assert episode.step("1").text == "step"
    for _ in range(2):  # the server has closed the connection
        with pytest.raises(ConnectionError, match=r"clos"):
            episode.step("2")
    episode.close()


def test_a_server_of_openenv_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"url='http://127.0.0.1:9' has no OpenEnv server: .*start it before"):
        check("openenv", {"url": "http://127.0.0.1:9"})
