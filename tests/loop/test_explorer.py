"""The explorer against engines that answer as told: overlap, retries, restarts, and the process itself."""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from megarl.buffer.store import Store
from megarl.config import Config, save_resolved
from megarl.config.job import RunConfig, StoreConfig, SyncConfig
from megarl.config.schema import FromScratchConfig, ModelConfig, RolloutConfig, TasksetConfig
from megarl.core.errors import EngineError, RequestRefused
from megarl.core.jobs import ProcessKind
from megarl.core.processes import heartbeat
from megarl.core.processes.fork import Forked, ForkServer
from megarl.core.schema import GREEDY, Reward, Task, WeightsVersion
from megarl.engines.client.client import Prompt, Sampling
from megarl.engines.client.engine_choice import EngineChoice
from megarl.engines.client.frames import Completion, VersionSpan, encode
from megarl.explore.explorer.claimed import RolloutClock
from megarl.explore.explorer.explorer import AskedEngines, ClaimSettings, Explorer
from megarl.explore.explorer.trajectories import TrajectorySettings
from megarl.explore.recording.model import NO_LIMITS, RolloutModel, TokenLimits, Workflow
from megarl.explore.workflows.single_turn import FEEDBACK, reflect, single_turn
from megarl.rewards import Verdict
from megarl.run.process.process import PRELOAD
from megarl.tasks import ChatTokenizer
from megarl.tasks.templates.turns import messages_of, render_turns, turn_ids
from tests.engine_rows import serving_row
from tests.loop.fake_server import KEY, Connected, FakeServer, answer, serving
from tests.stores import finish

VERSION = WeightsVersion(2, 7)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megarl.learn.models.from_scratch import create

    path = tmp_path_factory.mktemp("models") / "model"
    small = FromScratchConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
                              num_key_value_heads=1, head_dim=16)  # fmt: skip
    create(path, small, ["1 + 2 ="], seed=1)
    return path


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> ChatTokenizer:
    return ChatTokenizer.open(model_path)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.begin_attempt(1)
    store.tasks.add("train", [task(i) for i in range(12)])
    return store


def task(i: int) -> Task:
    messages = ({"role": "user", "content": f"{i} + 1 ="},)
    return Task(f"train/{i}", "reasoning_gym/chain_sum", messages, "math", {"ground_truth": str(i + 1)})


class FakeEngine:
    """Answers after ``delays_s(request, index)``; its first calls fail after ``fail_after`` samples each."""

    def __init__(self, tokenizer: ChatTokenizer, fail_after: Sequence[int] = (), abort: bool = False) -> None:
        self.tokenizer, self.failures, self.abort = tokenizer, list(fail_after), abort
        self.calls: list[list[Prompt]] = []
        self.seeds: list[int] = []
        self.delay_s: Callable[[int], float] = lambda n: 0.0

    async def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Completion]:
        self.calls.append(list(prompts))
        self.sampling = sampling
        fail_after = self.failures.pop(0) if self.failures else None
        samples = [(i, j) for i, prompt in enumerate(prompts) for j in range(prompt.n)]
        for n, (i, j) in enumerate(samples):
            if n == fail_after and not self.abort:
                raise EngineError("the engine is gone")
            await asyncio.sleep(self.delay_s(n))
            seed = (prompts[i].seed or 0) + j
            ids = answer(self.tokenizer, prompts[i], seed)
            cut = fail_after is not None and n >= fail_after
            spans = (VersionSpan("2.6", 0, 1), VersionSpan("2.7", 1, len(ids)))
            if not cut:
                self.seeds.append(seed)
            yield Completion(i, j, ids, np.full(len(ids), -0.1, np.float32), "abort" if cut else "stop", spans)


class FakeScorer:
    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.starts: list[float] = []

    async def score(self, task: Task, text: str, *, in_thinking: bool = False) -> Verdict:
        self.starts.append(time.monotonic())
        await asyncio.sleep(self.seconds)
        if text == "2":
            return Verdict(Reward(float("nan"), "error"), "ValueError: two")
        return Verdict(Reward(float(text == task.ground_truth), "ok" if text == task.ground_truth else "wrong"))


def explore(
    store: Store,
    engine: FakeEngine,
    scorer: FakeScorer,
    tokenizer: ChatTokenizer,
    workflow: Workflow = single_turn,
    *,
    engines: int = 1,
    timeout_s: float = 7.5,
    limits: TokenLimits = NO_LIMITS,
    **changes: Any,
) -> None:
    """Run an explorer until everything asked for is done, then close the job. ``changes``: of ``ClaimSettings``."""
    store.engines.register([serving_row(n, f"http://{n}", version=VERSION) for n in range(engines)])
    asked = AskedEngines(engine, EngineChoice(()), timeout_s=timeout_s)
    claims = replace(ClaimSettings("e0", capacity=1000, poll_s=0.005), **changes)
    trajectories = TrajectorySettings(retry_s=0.0, limits=limits)

    async def main() -> None:
        explorer = Explorer(store, asked, scorer, tokenizer, claims, workflow, trajectories)
        running = asyncio.create_task(explorer.run())
        while not running.done() and store.groups.claim("probe", 0) == []:
            done, total = store.rollouts.progress("r0")
            if total and done == total:
                store.journal.close_job()
                break
            await asyncio.sleep(0.005)
        await running

    asyncio.run(asyncio.wait_for(main(), 30))


def request(store: Store, groups: int = 3, group_size: int = 4, **sampling: Any) -> None:
    settings = {"temperature": 0.9, "max_tokens": 8, "seed": 11} | sampling
    store.rollouts.request("r0", "train", 5, VERSION, store.tasks.ids("train")[:groups], group_size, settings)


def test_a_workflow_within_its_limit_is_work_for_the_watchdog(
    store: Store, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[bool] = []
    monkeypatch.setattr(heartbeat, "count_work", lambda: counted.append(True))

    async def slow(task: Task, model: RolloutModel) -> None:
        model.ask(task)
        while not counted:  # no sample has ended
            await asyncio.sleep(0.01)
        await model.generate()

    request(store)
    explore(store, FakeEngine(tokenizer), FakeScorer(), tokenizer, workflow=slow)
    assert len(store.groups.trajectories("r0")) == 12


def test_an_explorer_gives_heartbeats_while_its_trajectories_last(
    store: Store, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed = asyncio.Event()
    beat = store.workers.beat

    def counted(worker: str) -> None:
        beat(worker)
        if loop:  # a workflow has begun
            loop[0].call_soon_threadsafe(renewed.set)

    monkeypatch.setattr(store.workers, "beat", counted)
    loop = list[asyncio.AbstractEventLoop]()

    async def slow(task: Task, model: RolloutModel) -> None:
        loop[:] = [asyncio.get_running_loop()]
        model.ask(task)
        await renewed.wait()
        await model.generate()

    request(store)
    explore(store, FakeEngine(tokenizer), FakeScorer(), tokenizer, workflow=slow, silence_s=0.04)
    assert len(store.groups.trajectories("r0")) == 12


def test_groups_are_written_whole_as_the_engine_gave_them(store: Store, tokenizer: ChatTokenizer) -> None:
    request(store)
    engine = FakeEngine(tokenizer)
    explore(store, engine, FakeScorer(), tokenizer)
    got = store.groups.trajectories("r0")
    assert [(e.group_id, e.index) for e in got] == [(f"r0/{p}", j) for p in range(3) for j in range(4)]
    assert engine.sampling == Sampling(max_tokens=8, temperature=0.9, oldest=VERSION)
    for e in got:
        asked = task(int(e.group_id[-1]))
        np.testing.assert_array_equal(e.prompt.token_ids, tokenizer.prompt_ids(asked.prompt))
        np.testing.assert_array_equal(e.response.logp, np.full(e.response_length, -0.1, np.float32))
        assert e.response.token_ids[-1] == tokenizer.eos_ids[0] and e.finish_reason == "stop"
        assert [(s.start, s.end, str(s.version)) for s in e.response.spans] == [
            (0, 1, "2.6"),
            (1, e.response_length, "2.7"),
        ]
        text = tokenizer.decode(e.response.token_ids)
        expected = "error" if text == "2" else "ok" if text == asked.ground_truth else "wrong"
        assert e.reward.status == expected
        assert e.metadata.get("reward_message") == ("ValueError: two" if expected == "error" else None)
        assert e.metadata["reward"] == {"verifier": "", "seconds": 0.0, "waited_s": 0.0, "tries": 1, "kills": 0}
    metrics = store.rollouts.metrics("r0")
    assert metrics["samples"] == 12 and metrics["groups"] == 3 and metrics["retries"] == 0
    assert metrics["response_tokens"] == sum(e.response_length for e in got)


def test_an_answer_is_scored_while_others_are_still_generated(store: Store, tokenizer: ChatTokenizer) -> None:
    request(store, groups=1)
    engine, scorer = FakeEngine(tokenizer), FakeScorer(seconds=0.1)
    engine.delay_s = lambda n: 0.15
    explore(store, engine, scorer, tokenizer)
    metrics = store.rollouts.metrics("r0")
    assert metrics["generation_s"] > 0.59 and metrics["reward_s"] > 0.09  # it slept for so long at least
    assert 0 < metrics["overlap_s"] <= min(metrics["generation_s"], metrics["reward_s"])


@pytest.mark.parametrize("abort", [False, True])
def test_what_an_engine_fails_to_give_is_asked_for_again_with_its_own_seed(
    store: Store, tokenizer: ChatTokenizer, abort: bool
) -> None:
    request(store)
    engine = FakeEngine(tokenizer, fail_after=[5, 0], abort=abort)
    explore(store, engine, FakeScorer(), tokenizer)
    assert store.rollouts.progress("r0") == (3, 3)
    assert [[p.n for p in call] for call in engine.calls] == [[4, 4, 4], [1, 1, 1, 4], [1, 1, 1, 4]]
    whole = [p.seed + j for p in engine.calls[0] for j in range(4) if p.seed is not None]
    assert sorted(engine.seeds) == sorted(whole) and len(set(whole)) == 12
    assert store.rollouts.metrics("r0")["retries"] == 2 and len(store.journal.events("engine_retry")) == 2


@pytest.mark.parametrize("abort", [False, True])
def test_a_greedy_answer_is_sampled_scored_and_asked_for_again_like_any_other(
    store: Store, tokenizer: ChatTokenizer, abort: bool
) -> None:
    request(store, greedy=True)
    engine = FakeEngine(
        tokenizer, fail_after=[6, 0], abort=abort
    )  # of 15: one whole group, and the next one's greedy answer
    explore(store, engine, FakeScorer(), tokenizer)
    asked = [[(p.n, p.greedy) for p in call] for call in engine.calls]
    assert asked == [[(1, True), (4, False)] * 3, *[[(4, False), (1, True), (4, False)]] * 2]
    assert engine.sampling == Sampling(max_tokens=8, temperature=0.9, oldest=VERSION)
    got = store.groups.trajectories("r0")
    assert [(e.group_id, e.index) for e in got] == [(f"r0/{p}", j) for p in range(3) for j in range(4)]
    for e in got:
        assert e.greedy is not None and e.greedy.index == GREEDY and e.greedy.group_id == e.group_id
        assert tokenizer.decode(e.greedy.response.token_ids) == task(int(e.group_id[-1])).ground_truth
    statuses = [e.greedy.reward.status for e in got if e.greedy]
    assert statuses == ["ok"] * 4 + ["error"] * 4 + ["ok"] * 4, "the scorer fails at a 2"
    assert [e.greedy.metadata for e in got if e.greedy][4]["reward_message"] == "ValueError: two"
    metrics = store.rollouts.metrics("r0")
    assert (metrics["samples"], metrics["greedy"], metrics["retries"]) == (12, 3, 2)


def test_an_engine_that_stays_dead_ends_the_explorer_and_frees_its_claims(
    store: Store, tokenizer: ChatTokenizer
) -> None:
    request(store)
    with pytest.raises(EngineError, match="the engine is gone"):
        explore(store, FakeEngine(tokenizer, fail_after=[5, 1, *[0] * 10_000]), FakeScorer(), tokenizer, timeout_s=0.2)
    assert len(store.groups.claim("next", 10)) == 3 - store.rollouts.progress("r0")[0]


def test_a_request_that_would_be_refused_again_fails_at_once(store: Store, tokenizer: ChatTokenizer) -> None:
    class Refusing(FakeEngine):
        async def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Completion]:
            self.calls.append(list(prompts))
            raise RequestRefused("no such image")
            yield

    request(store)
    engine = Refusing(tokenizer)
    with pytest.raises(RequestRefused, match="no such image"):
        explore(store, engine, FakeScorer(), tokenizer, timeout_s=60)
    assert len(engine.calls) == 1


def test_another_fault_is_not_disguised(store: Store, tokenizer: ChatTokenizer) -> None:
    class Broken(FakeScorer):
        async def score(self, task: Task, text: str, *, in_thinking: bool = False) -> Verdict:
            raise ZeroDivisionError

    request(store)
    with pytest.raises(BaseExceptionGroup) as caught:
        explore(store, FakeEngine(tokenizer), Broken(), tokenizer)
    assert caught.value.subgroup(ZeroDivisionError) is not None


def test_capacity_bounds_what_is_under_way(store: Store, tokenizer: ChatTokenizer) -> None:
    request(store, groups=12)
    engine = FakeEngine(tokenizer)
    engine.delay_s = lambda n: 0.002
    explore(store, engine, FakeScorer(), tokenizer, capacity=9)
    assert max(sum(p.n for p in call) for call in engine.calls) == 8 and store.rollouts.progress("r0") == (12, 12)


@pytest.mark.parametrize(("backlog", "begun"), [(1000, 12), (8, 2)])
def test_slow_verifiers_do_not_hold_up_generation_until_the_backlog_is_full(
    store: Store, tokenizer: ChatTokenizer, backlog: int, begun: int
) -> None:
    """No verdict comes before ``begun`` groups are begun: with capacity for two groups all twelve while there is room
    to wait."""
    request(store, groups=12)
    engine = FakeEngine(tokenizer)

    class Slow(FakeScorer):
        async def score(self, task: Task, text: str, *, in_thinking: bool = False) -> Verdict:
            until = time.monotonic() + 20
            while sum(map(len, engine.calls)) < begun and time.monotonic() < until:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.1)
            most.append(sum(map(len, engine.calls)))
            return await super().score(task, text)

    most: list[int] = []
    explore(store, engine, Slow(), tokenizer, capacity=8, backlog=backlog)
    assert store.rollouts.progress("r0") == (12, 12)
    assert begun <= most[0] <= min(12, begun + 2), (
        "groups that were claimed before the last answers came may be under way"
    )


def test_new_groups_are_spread_over_the_engines(store: Store, tokenizer: ChatTokenizer) -> None:
    request(store, groups=5, group_size=1, seed=None)
    engine = FakeEngine(tokenizer)
    explore(store, engine, FakeScorer(), tokenizer, engines=3)
    assert sorted(len(call) for call in engine.calls) == [1, 2, 2]
    assert all(p.seed is None for call in engine.calls for p in call)


def test_a_predecessors_claims_are_taken_up(store: Store, tokenizer: ChatTokenizer) -> None:
    request(store)
    assert len(store.groups.claim("e0", 2)) == 2  # and then it was killed
    explore(store, FakeEngine(tokenizer), FakeScorer(), tokenizer)
    assert store.rollouts.progress("r0") == (3, 3)


def test_an_evaluation_that_a_predecessor_left_is_recorded(store: Store, tokenizer: ChatTokenizer) -> None:
    store.rollouts.request("r0", "eval", 5, VERSION, store.tasks.ids("train")[:3], 2, {"temperature": 0.0})
    for claim in store.groups.claim("killed", 3):
        assert finish(store, claim)
    assert not store.rollouts.is_complete("r0")
    explore(store, FakeEngine(tokenizer), FakeScorer(), tokenizer)
    assert store.rollouts.is_complete("r0") and {state for state, _, _ in store.groups.states("r0").values()} == {
        "consumed"
    }
    event = store.evaluations.read("r0")
    assert (event["right"], event["tasks"], event["samples"], event["metrics"]["val/accuracy"]) == (6, 3, 2, 1.0)


def test_clock() -> None:
    now = [0.0]
    clock = RolloutClock(now=lambda: now[0])
    for at, phase, by in [(1, "generation", 2), (2, "generation", -1), (2, "reward", 1), (4, "generation", -1)]:
        now[0] = at
        clock.change(phase, by)
    now[0] = 7
    clock.change("reward", -1)
    now[0] = 9
    metrics = clock.metrics()
    assert (metrics["generation_s"], metrics["reward_s"], metrics["overlap_s"]) == (3.0, 5.0, 2.0)


class ForkedExplorer(Forked):
    """An explorer that is forked, as a job's explorers are, from a process with its imports."""

    def __init__(self, pid: int, log: Path) -> None:
        super().__init__(pid)
        self.log = log

    def signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@functools.cache
def explorers() -> ForkServer:
    """Make the process to fork from."""
    server = ForkServer.start(PRELOAD[ProcessKind.EXPLORER], dict(os.environ))
    atexit.register(server.close)
    return server


@contextmanager
def process(
    tmp_path: Path,
    model_path: Path,
    engines: str,
    *,
    descriptors: Mapping[str, int] = MappingProxyType({}),
    rollout: Mapping[str, Any] | None = None,
    forked: bool = True,
    **env: str,
) -> Iterator[ForkedExplorer]:
    """Run an explorer's process until the end of the block.

    Args:
        descriptors: Variable -> descriptor whose number in the process it gets.
        forked: False starts the process by itself.
    """
    config = Config(
        run=RunConfig(dir=str(tmp_path)),
        model=ModelConfig(path=str(model_path)),
        taskset=TasksetConfig(train="-", eval="-"),
        rollout=RolloutConfig(max_prompt_tokens=64, request_timeout_s=5, start_timeout_s=2, **(rollout or {})),
        sync=SyncConfig(timeout_s=1),
        store=StoreConfig(url=f"sqlite:///{tmp_path}/store.db"),
    )
    save_resolved(config, tmp_path / "resolved.json")
    command = ["-m", "megarl.run.start", "explorer", "--config", str(tmp_path / "resolved.json")]
    store = Store(config.store.url)
    store.engines.register([serving_row(0, engines, version=VERSION)])
    store.close()
    variables = {**os.environ, "MEGARL_JOB_KEY": KEY, "MEGARL_ATTEMPT": "1", **env}
    log = tmp_path / "explorer.log"
    with log.open("wb") as output:
        if forked:
            pid = explorers().fork(command, variables, output.fileno(), descriptors)
            assert pid is not None, explorers().differing(variables)
        else:
            actions = [(os.POSIX_SPAWN_DUP2, output.fileno(), 2)]
            pid = os.posix_spawn(sys.executable, [sys.executable, *command], variables, file_actions=actions)
    explorer = ForkedExplorer(pid, log)
    try:
        yield explorer
    finally:
        explorer.signal(signal.SIGKILL)
        explorer.wait(30)


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


async def corrected(task: Task, model: RolloutModel) -> None:
    """Two responses, the second after a tool's turn."""
    model.ask(task)
    await model.generate()
    model.write("tool", np.array([7, 7], dtype=np.int32))
    await model.generate()


def test_a_workflow_of_two_turns(store: Store, tokenizer: ChatTokenizer) -> None:
    """Second turns continue all before them, in whatever order they come, each with a seed of its own."""
    request(store, groups=2)
    engine = FakeEngine(tokenizer, fail_after=[5])
    explore(store, engine, FakeScorer(), tokenizer, workflow=corrected)
    got = store.groups.trajectories("r0")
    assert [(e.group_id, e.index) for e in got] == [(f"r0/{p}", j) for p in range(2) for j in range(4)]
    asked = [prompt for call in engine.calls for prompt in call]
    for e in got:
        assert [turn.author for turn in e.turns] == ["user", "model", "tool", "model"]
        assert [turn.follows for turn in e.turns] == [-1, 0, 1, 2]
        context = np.concatenate([turn.token_ids for turn in e.turns[:3]])
        assert any(np.array_equal(p.token_ids, context) and p.n == 1 for p in asked)
        [sample] = e.samples()
        lengths = [len(turn) for turn in e.turns[1:]]
        assert sample.response_mask.tolist() == [True] * lengths[0] + [False] * 2 + [True] * lengths[2]
        assert e.response_length == lengths[0] + lengths[2]
    assert len(engine.seeds) == len(set(engine.seeds)) == 16
    assert store.rollouts.metrics("r0")["response_tokens"] == sum(e.response_length for e in got)
    first = {(e.group_id, e.index): e.turns[3].token_ids.tolist() for e in got}
    store.journal.open_job()
    request(store, groups=2)
    explore(store, FakeEngine(tokenizer), FakeScorer(), tokenizer, workflow=corrected)
    again = {(e.group_id, e.index): e.turns[3].token_ids.tolist() for e in store.groups.trajectories("r0")}
    assert again == first, "an engine's failure changed what was sampled"


def test_a_second_response_after_a_wrong_one(store: Store, tokenizer: ChatTokenizer) -> None:
    """A right one, one without a verdict, and a trajectory without room have one response."""
    request(store, groups=12)
    explore(store, FakeEngine(tokenizer), FakeScorer(), tokenizer, workflow=reflect)
    rendered = render_turns(tokenizer, messages_of("user", [FEEDBACK]))
    feedback = turn_ids(tokenizer, rendered, tokenizer.end_id).tolist()
    turns = {"ok": set(), "wrong": set(), "error": set()}  # type: dict[str, set[int]]
    for e in store.groups.trajectories("r0"):
        models = [turn for turn in e.turns if turn.author == "model"]
        turns[e.reward.status].add(len(models))
        if len(models) == 2:
            assert e.turns[2].author == "user" and e.turns[2].token_ids.tolist() == feedback
            first = tokenizer.decode(models[0].token_ids)
            assert first != "2" and first != str(int(e.task_id.split("/")[1]) + 1)
    assert 2 in turns["wrong"] and 1 not in turns["wrong"] and 1 in turns["ok"]
    store.journal.open_job()
    request(store, groups=12)
    longest = max(e.prompt_length for e in store.groups.trajectories("r0")) if store.groups.trajectories("r0") else 20
    limits = TokenLimits(trajectory=longest + 8)
    explore(store, FakeEngine(tokenizer), FakeScorer(), tokenizer, workflow=reflect, limits=limits)
    assert {len(e.turns) for e in store.groups.trajectories("r0")} == {2}


counter = itertools.count()


async def failing(task: Task, model: RolloutModel) -> None:
    """Fails for one trajectory of each task before its prompt, for another after a response."""
    number = next(counter)
    if number % 4 == 0:
        raise ValueError("no such tool")
    model.ask(task)
    await model.generate()
    if number % 4 == 1:
        raise KeyError("after a response")


def test_a_workflow_that_fails_costs_its_own_trajectory(store: Store, tokenizer: ChatTokenizer) -> None:
    request(store)
    explore(store, FakeEngine(tokenizer), FakeScorer(), tokenizer, workflow=failing)
    got = store.groups.trajectories("r0")
    failed = [e for e in got if "reward_message" in e.metadata and "two" not in e.metadata["reward_message"]]
    assert len(got) == 12 and len(failed) == 6 and {e.reward.status for e in failed} == {"error"}
    reasons = {e.metadata["reward_message"].partition(" (")[0] for e in failed}
    assert reasons == {"ValueError: no such tool", "KeyError: 'after a response'"}
    assert all(math.isnan(e.reward.score) for e in failed)


def test_a_stream_cut_within_a_frame_loses_only_the_samples_that_were_not_whole(
    store: Store, tokenizer: ChatTokenizer
) -> None:
    request(store, groups=3, group_size=4, seed=11)
    ids = answer(tokenizer, Prompt(tokenizer.prompt_ids(({"role": "user", "content": "0 + 1 ="},))), 0)
    size = len(encode(Completion(0, 0, ids, np.zeros(len(ids)), "stop", (VersionSpan("2.7", 0, len(ids)),))))
    server = FakeServer(tokenizer, cuts=[5 * size + size // 2, 2 * size + 5])
    with serving(server) as url:
        explore(store, Connected(url), FakeScorer(), tokenizer)
    assert store.rollouts.progress("r0") == (3, 3)
    first, second, third = ([seed + j for seed, n in call for j in range(n)] for call in server.calls)
    assert second == first[5:], "five samples had come whole"
    assert third == first[7:]
    assert [e.index for e in store.groups.trajectories("r0")] == [0, 1, 2, 3] * 3


def test_the_process_shows_that_engines_generate(
    tmp_path: Path, model_path: Path, store: Store, tokenizer: ChatTokenizer
) -> None:
    """Else its supervisor ends a job in which only long answers are left."""
    request(store, groups=2)
    server, memory = FakeServer(tokenizer), heartbeat.Memory()
    server.held.clear()
    passed = {heartbeat.VARIABLE: memory.descriptor}
    with serving(server) as url, process(tmp_path, model_path, url, descriptors=passed):
        wait_for(lambda: memory.read().work >= 3)
        assert store.rollouts.progress("r0") == (0, 2)
        server.held.set()
        wait_for(lambda: store.rollouts.progress("r0") == (2, 2))


def test_the_process_works_until_the_job_is_closed(
    tmp_path: Path, model_path: Path, store: Store, tokenizer: ChatTokenizer
) -> None:
    request(store, groups=12)
    with serving(FakeServer(tokenizer)) as url, process(tmp_path, model_path, url) as explorer:
        wait_for(lambda: store.rollouts.progress("r0") == (12, 12))
        got = store.groups.trajectories("r0")
        assert [e.reward.status for e in got] == ["ok", "wrong"] * 24, "reasoning-gym's verdicts"
        store.rollouts.request(
            "r1", "eval", 5, VERSION, store.tasks.ids("train"), 1, {"temperature": 0.0, "max_tokens": 8}
        )
        wait_for(lambda: store.rollouts.progress("r1") == (12, 12))
        store.journal.close_job()
        assert explorer.wait(60) == 0


def test_a_killed_process_leaves_no_group_without_its_greedy_answer(
    tmp_path: Path, model_path: Path, store: Store, tokenizer: ChatTokenizer
) -> None:
    server = FakeServer(tokenizer)
    server.delay_s = 0.03
    request(store, groups=12, greedy=True)
    with serving(server) as url:
        with process(tmp_path, model_path, url) as explorer:
            wait_for(lambda: store.rollouts.progress("r0")[0] >= 2)
            explorer.signal(signal.SIGKILL)
        assert 0 < store.rollouts.progress("r0")[0] < 12
        assert all(e.greedy is not None for e in store.groups.trajectories("r0"))
        server.delay_s = 0.0
        with process(tmp_path, model_path, url) as explorer:
            wait_for(lambda: store.rollouts.progress("r0") == (12, 12))
            store.journal.close_job()
            assert explorer.wait(60) == 0
    got = store.groups.trajectories("r0")
    assert len(got) == 48 and all(e.greedy is not None and e.greedy.group_id == e.group_id for e in got)


def test_sigterm_gives_the_claims_back(
    tmp_path: Path, model_path: Path, store: Store, tokenizer: ChatTokenizer
) -> None:
    server = FakeServer(tokenizer)
    server.delay_s = 60.0
    request(store)
    with serving(server) as url, process(tmp_path, model_path, url) as explorer:
        assert server.received.wait(30)
        assert store.groups.claim("other", 10) == []
        explorer.signal(signal.SIGTERM)
        assert explorer.wait(60) == 143
        assert "claims given back" in explorer.log.read_text()
    assert len(store.groups.claim("other", 10)) == 3


def test_other_processes_of_the_user_cannot_read_an_explorers_keys(
    tmp_path: Path, model_path: Path, store: Store, tokenizer: ChatTokenizer
) -> None:
    path, found = tmp_path / "mine.py", tmp_path / "environment"
    path.write_text(
        "import shutil\nasync def workflow(task, model):\n"
        f"    shutil.copyfile('/proc/self/environ', {str(found)!r})\n"
        "    model.ask(task)\n    await model.generate()\n"
    )
    request(store)
    own = functools.partial(process, rollout={"workflow": str(path)}, forked=False)
    with serving(FakeServer(tokenizer)) as url, own(tmp_path, model_path, url) as explorer:
        wait_for(lambda: store.rollouts.progress("r0") == (3, 3))
        store.journal.close_job()
        assert explorer.wait(60) == 0
    [key] = [line for line in found.read_text().split("\0") if line.startswith("MEGARL_JOB_KEY=")]
    assert set(key.partition("=")[2]) == {"x"}


BLOCKING = {
    "agent": """
import json, urllib.request
async def run(base_url, prompt, request_kwargs, metadata):
    {call}
def ask(base_url, prompt, request_kwargs):
    body = json.dumps({{"messages": prompt, **request_kwargs}}).encode()
    headers = {{"Content-Type": "application/json"}}
    urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)).read()
""",
    "workflow": """
import asyncio, time
async def workflow(task, model):
    model.ask(task)
    asyncio.create_task(model.generate())
    await asyncio.to_thread(time.sleep, 1000)
""",
    "environment": """
import time
class Hanging:
    def __init__(self, task): ...
    def step(self, response): ...
    def close(self): time.sleep(1000)
make = Hanging
""",
}


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("agent", "ask(base_url, prompt, request_kwargs)"),
        ("agent", "import asyncio; await asyncio.to_thread(ask, base_url, prompt, request_kwargs)"),
        ("workflow", ""),
        ("environment", ""),
    ],
)
def test_a_stop_waits_for_no_thread_that_blocks(
    tmp_path: Path, model_path: Path, store: Store, tokenizer: ChatTokenizer, kind: str, call: str
) -> None:
    """Within ``run.shutdown_grace_s`` (20 s)."""
    path = tmp_path / "mine.py"
    path.write_text(BLOCKING[kind].format(call=call))
    rollout = {"workflow": str(path)} if kind == "workflow" else {"workflow": kind, kind: str(path)}
    server = FakeServer(tokenizer)
    server.delay_s = 1000.0
    request(store)
    with serving(server) as url, process(tmp_path, model_path, url, rollout=rollout) as explorer:
        assert server.received.wait(30)
        explorer.signal(signal.SIGTERM)
        assert explorer.wait(20) == 143
    assert len(store.groups.claim("other", 10)) == 3


def test_a_killed_process_is_taken_over_by_the_next(
    tmp_path: Path, model_path: Path, store: Store, tokenizer: ChatTokenizer
) -> None:
    server = FakeServer(tokenizer)
    server.delay_s = 0.05
    request(store, groups=12)
    with serving(server) as url:
        with process(tmp_path, model_path, url) as explorer:
            wait_for(lambda: store.rollouts.progress("r0")[0] >= 2)
            explorer.signal(signal.SIGKILL)
        before = {(e.group_id, e.index): e.response.token_ids.tolist() for e in store.groups.trajectories("r0")}
        assert 0 < len(before) < 48
        server.delay_s = 0.0
        with process(tmp_path, model_path, url) as explorer:
            wait_for(lambda: store.rollouts.progress("r0") == (12, 12))
            store.journal.close_job()
            assert explorer.wait(60) == 0
    after = {(e.group_id, e.index): e.response.token_ids.tolist() for e in store.groups.trajectories("r0")}
    assert len(store.groups.trajectories("r0")) == len(after) == 48 and before.items() <= after.items()


def test_a_dead_engine_ends_the_process_with_its_reason(
    tmp_path: Path, model_path: Path, store: Store, tokenizer: ChatTokenizer
) -> None:
    server = FakeServer(tokenizer)
    server.alive = False
    request(store)
    with serving(server) as url, process(tmp_path, model_path, url) as explorer:
        assert explorer.wait(30) == 1
        last = explorer.log.read_text().strip().splitlines()[-1]
        assert f"ERROR explorer explorer-0: the engine at {url} is gone or silent" in last


def test_a_wrong_key_is_named(tmp_path: Path, model_path: Path, store: Store, tokenizer: ChatTokenizer) -> None:
    request(store)
    with serving(FakeServer(tokenizer)) as url, process(tmp_path, model_path, url, MEGARL_JOB_KEY="other") as explorer:
        assert explorer.wait(30) == 1
        assert "answered 401 to /megarl/generate" in explorer.log.read_text()


def test_the_process_imports_neither_torch_nor_vllm() -> None:
    heavy = {"torch", "transformers", "vllm", "megatron"}
    code = f"import sys, megarl.explore.explorer.explorer; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
