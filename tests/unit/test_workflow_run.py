"""What a workflow does wrong costs its own trajectory the verdict, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.buffer.experience import verify
from megarl.buffer.store import Claim
from megarl.buffer.store.codec import trajectory_from_row, trajectory_to_row
from megarl.config.rewards import RewardConfig
from megarl.core.errors import PromptRefused
from megarl.core.schema import End, Reward, Task, Trajectory, WeightsVersion
from megarl.engines.client.frames import Completion
from megarl.engines.client.gather import SampleRequest
from megarl.explore.explorer import trajectories
from megarl.explore.explorer.claimed import ClaimedGroup, RolloutClock
from megarl.explore.explorer.explorer import run_through
from megarl.explore.explorer.trajectories import TrajectoryRunner, TrajectorySettings
from megarl.explore.recording.model import RenderedPrompt, TokenLimits, observed
from megarl.explore.workflows.single_turn import single_turn
from megarl.rewards import Verdict
from megarl.tasks import ChatTokenizer
from tests.chat_battery import checkpoint

Play = Callable[[Task, Any], Awaitable[None]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.open(checkpoint(tmp_path_factory.mktemp("qwen") / "qwen2_5", "qwen2_5"))


class Engine:
    """A gatherer whose samples are all the same; ``delay_s`` before each."""

    def __init__(self, tokenizer: ChatTokenizer, delay_s: float = 0.0) -> None:
        self.ids, self.delay_s = tokenizer.response_ids("15"), delay_s
        self.requests: list[SampleRequest] = []

    async def sample(self, request: SampleRequest) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(self.delay_s)
        return Completion(0, 0, self.ids, np.full(len(self.ids), -0.5, np.float32), "stop", ())


def up_to(tokens: int) -> TokenLimits:
    return TokenLimits(trajectory=tokens)


class RightAlways:
    async def score(self, task: Task, text: str, *, in_thinking: bool = False) -> Verdict:
        return Verdict(Reward(1.0, "ok"))


def task() -> Task:
    messages = ({"role": "user", "content": "What is 12 + 3?"},)
    return Task("t", "s", messages, "", {"ground_truth": ["15"]}, {"tools": ["add"]})


def group(tokenizer: ChatTokenizer, size: int = 1, row: Task | None = None) -> ClaimedGroup:
    row = row or task()
    claim = Claim("r", "train", 0, WeightsVersion(1, 1), "g", 0, size, {}, row, "w", "t", 1)
    return ClaimedGroup(claim, RenderedPrompt.of(row, tokenizer), 7, RolloutClock())


async def nothing() -> None:
    """Is called once no token of a trajectory is missing."""


def play(
    workflow: Play,
    tokenizer: ChatTokenizer,
    size: int = 1,
    engine: Engine | None = None,
    scorer: RightAlways | None = None,
    **changes: Any,
) -> list[Trajectory]:
    """Trajectories of one group, each as the store gives it back."""
    settings = replace(TrajectorySettings(limits=up_to(200), retry_s=0.0, timeout_s=30.0), **changes)
    claimed, gatherer = group(tokenizer, size), engine or Engine(tokenizer)

    async def main() -> list[Trajectory]:
        runner = TrajectoryRunner(workflow, scorer or RightAlways(), tokenizer, settings)
        runs = (runner.run(claimed, i, gatherer, nothing) for i in range(size))  # type: ignore[arg-type]
        return await asyncio.gather(*runs)

    found = asyncio.run(asyncio.wait_for(main(), 60))
    return [trajectory_from_row(_Row(trajectory_to_row(trajectory))) for trajectory in found]


class _Row:
    def __init__(self, row: dict[str, Any]) -> None:
        self.__dict__.update(row)


def test_what_a_workflow_is_given(tokenizer: ChatTokenizer) -> None:
    """Settings, tool calls as the model's family writes them, and verifiers by name; rewards of turns are stored."""
    seen: dict[str, Any] = {}

    class ByName(RightAlways):
        async def score(self, task: Task, text: str, *, in_thinking: bool = False) -> Verdict:
            return Verdict(Reward(float(len(task.data_source)), "ok"))

    async def workflow(task: Task, model: Any) -> None:
        model.ask(task)
        turn = await model.generate()
        seen["options"], seen["calls"] = dict(model.options), model.tool_calls(turn)
        seen["by name"] = (await model.verify("school/math")).score
        model.rate(turn, 0.25)

    engine = Engine(tokenizer)
    engine.ids = tokenizer.response_ids('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    [found] = play(workflow, tokenizer, engine=engine, scorer=ByName(), options={"size": 3})
    assert seen["options"] == {"size": 3} and seen["by name"] == 11.0
    assert [(call.name, call.arguments) for call in seen["calls"]] == [("add", {"a": 1})]
    assert found.reward.score == 1.0, "the task's own verifier"
    assert [turn.reward for turn in found.turns] == [None, 0.25]


@pytest.mark.parametrize("reward", [float("nan"), "1"])
def test_a_reward_of_a_turn_is_a_finite_number(tokenizer: ChatTokenizer, reward: Any) -> None:
    async def workflow(task: Task, model: Any) -> None:
        model.ask(task)
        model.rate(await model.generate(), reward)

    [found] = play(workflow, tokenizer)
    assert found.end is End.WORKFLOW_ERROR and "must be a finite number" in found.metadata["reward_message"]


def test_a_first_observation_is_in_the_prompt(tokenizer: ChatTokenizer) -> None:
    async def workflow(task: Task, model: Any) -> None:
        model.ask(task, "The board is empty.")
        await model.generate()

    [found] = play(workflow, tokenizer)
    prompt = tokenizer.decode(found.turns[0].token_ids, special=True)
    assert "What is 12 + 3?\n\nThe board is empty.<|im_end|>" in prompt
    [found] = play(workflow, tokenizer, limits=TokenLimits(prompt=20, trajectory=200))
    assert "more than rollout.max_prompt_tokens=20" in found.metadata["reward_message"]


@pytest.mark.parametrize("first", [True, False], ids=["ask", "add"])
def test_a_long_observation_without_room_is_not_tokenised_whole(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """One of 10 MiB held all trajectories up for half a minute."""
    read, encode, long = 0, ChatTokenizer.encode, "a b " * 500_000

    def counted(self: ChatTokenizer, text: str) -> Any:
        nonlocal read
        read += len(text)
        return encode(self, text)

    async def workflow(task: Task, model: Any) -> None:
        model.ask(task, *([long] if first else []))
        await model.generate()
        assert model.add("environment", long) is None

    monkeypatch.setattr(ChatTokenizer, "encode", counted)
    [found] = play(workflow, tokenizer, limits=TokenLimits(prompt=100, trajectory=200))
    words = "more than rollout.max_prompt_tokens=100 tokens" if first else None
    assert found.truncated is not first and 0 < read < 500_000
    assert words is None or words in found.metadata["reward_message"]


def raising(error: BaseException) -> Play:
    async def workflow(task: Task, model: Any) -> None:
        model.ask(task)
        await model.generate()
        raise error

    return workflow


def finishing(*reward: Any) -> Play:
    async def workflow(task: Task, model: Any) -> None:
        model.ask(task)
        await model.generate()
        model.finish(Reward(*reward))

    return workflow


def calling(call: Callable[[Any], Any]) -> Play:
    async def workflow(task: Task, model: Any) -> None:
        model.ask(task)
        await model.generate()
        result = call(model)
        if asyncio.iscoroutine(result):
            await result

    return workflow


async def cancelling_itself(task: Task, model: Any) -> None:
    model.ask(task)
    await model.generate()
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.sleep(0)


WRONG = {
    "has cancelled its own task": cancelling_itself,
    "CancelledError": raising(asyncio.CancelledError()),
    "SystemExit: 3": raising(SystemExit(3)),
    "KeyboardInterrupt": raising(KeyboardInterrupt()),
    "GeneratorExit": raising(GeneratorExit()),
    "surrogate": raising(ValueError("surrogate \ud800")),
    "status must be one of": finishing(1.0, "great"),
    "score must be a number, got '1.0'": finishing("1.0", "ok"),
    "score must be a number, got None": finishing(None, "ok"),
    "the reward nan": finishing(float("nan"), "ok"),
    "must be a finite number, got nan": finishing(1.0, "ok", {"part": float("nan")}),
    "must be a finite number, got 'x'": finishing(1.0, "ok", {"part": "x"}),
    "valid text": finishing(1.0, "ok", {"\ud800": 1.0}),
    "needs a name": finishing(1.0, "ok", {3: 1.0}),
    "300 parts": finishing(1.0, "ok", {str(i): 1.0 for i in range(300)}),
    "finish takes a Reward": calling(lambda model: model.finish(1.0)),
    "got float64": calling(lambda model: model.write("user", [1.5])),
    "row of integers": calling(lambda model: model.write("user", [[1]])),
    "must lie between 0": calling(lambda model: model.write("user", [2**31 + 1])),
    "got -1 to": calling(lambda model: model.begin([-1])),
    "got 'assistant'": calling(lambda model: model.write("assistant", [1])),
    "a prompt of 5000 tokens leaves no room": calling(
        lambda model: (model.begin(np.ones(5000, np.int32)), model.generate())[1]
    ),
    "follows a prompt of one token": calling(lambda model: (model.begin([]), model.generate())[1]),
    "max_tokens of 1 or more": calling(lambda model: model.generate(max_tokens=0)),
    "a whole number, got 8.5": calling(lambda model: model.generate(max_tokens=8.5)),
    "a whole number, got '8'": calling(lambda model: model.generate(max_tokens="8")),
    "after=99 is no turn": calling(lambda model: model.generate(after=99)),
}


@pytest.mark.parametrize("words", WRONG)
def test_one_trajectory_pays_with_a_named_reason(tokenizer: ChatTokenizer, words: str) -> None:
    numbers = itertools.count()

    async def workflow(task: Task, model: Any) -> None:
        if model.index == 1:
            next(numbers)
            await WRONG[words](task, model)
        else:
            await finishing(0.5, "wrong")(task, model)

    first, second, third = play(workflow, tokenizer, 3, retries=1)
    assert (first.end, third.end) == (End.FINISHED, End.FINISHED) and first.reward.score == 0.5
    assert second.end is End.WORKFLOW_ERROR and words in second.metadata["reward_message"] and next(numbers) == 2


def test_a_prompt_of_the_task_without_room(tokenizer: ChatTokenizer) -> None:
    [found] = play(finishing(1.0, "ok"), tokenizer, limits=up_to(3))
    assert found.end is End.WORKFLOW_ERROR and "rollout.max_trajectory_tokens" in found.metadata["reward_message"]
    assert len(found.turns) == 1


def test_a_response_for_which_responses_left_no_room_is_truncated(tokenizer: ChatTokenizer) -> None:
    async def workflow(task: Task, model: Any) -> None:
        model.ask(task)
        while True:
            await model.generate()
            model.write("user", [1] * 40)

    [found] = play(workflow, tokenizer)
    assert found.end is End.TRUNCATED and found.reward == Reward(1.0, "ok")


def test_other_integers_are_recorded_as_int32(tokenizer: ChatTokenizer) -> None:
    given = np.array([1, 2], np.int64)

    async def workflow(task: Task, model: Any) -> None:
        model.ask(task)
        await model.generate()
        model.write("tool", given)
        given[:] = 0
        await model.generate()
        model.finish(Reward(np.float32(0.5), "wrong", {"part": np.int64(2)}))  # type: ignore[arg-type, dict-item]

    [found] = play(workflow, tokenizer)
    assert found.turns[2].token_ids.tolist() == [1, 2] and found.reward == Reward(0.5, "wrong", {"part": 2.0})


def test_every_trajectory_has_a_task_of_its_own(tokenizer: ChatTokenizer) -> None:
    seen: list[Task] = []
    images: list[int] = []

    async def workflow(task: Task, model: Any) -> None:
        seen.append(task)
        assert task.ground_truth == ["15"] and task.extra_info == {"tools": ["add"]}
        images.append(id(task.images))
        model.ask(task)
        task.prompt[-1]["content"] += " Think."
        task.ground_truth.append("16")
        task.extra_info["tools"].append("sub")
        task.chat_template_kwargs["tools"] = []
        with pytest.raises(ValueError, match="read-only"):
            model.turns[0].token_ids[0] = 0
        await model.generate()
        if model.index == 0:
            raise ValueError("again")

    found = play(workflow, tokenizer, 4, retries=1)
    assert [e.end for e in found] == [End.WORKFLOW_ERROR] + [End.FINISHED] * 3
    assert [row.prompt[-1]["content"] for row in seen] == ["What is 12 + 3? Think."] * 5
    assert {e.turns[0].token_ids.tobytes() for e in found} == {found[0].turns[0].token_ids.tobytes()}


def test_a_changed_task_is_not_asked(tokenizer: ChatTokenizer) -> None:
    async def workflow(task: Task, model: Any) -> None:
        model.ask(replace(task, prompt=({"role": "user", "content": "other"},)))

    [found] = play(workflow, tokenizer)
    assert "begin takes other prompts" in found.metadata["reward_message"]


def test_the_seed_stays_when_a_trajectory_begins_again(tokenizer: ChatTokenizer) -> None:
    seeds: list[tuple[int, int]] = []

    async def workflow(task: Task, model: Any) -> None:
        seeds.append((model.index, model.seed))
        raise ValueError("again")

    play(workflow, tokenizer, 3, retries=1)
    assert sorted(seeds) == sorted(2 * list(dict(seeds).items())) and len(set(dict(seeds).values())) == 3


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_workflow_without_an_end(tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch, stubborn: bool) -> None:
    monkeypatch.setattr(trajectories, "CANCEL_S", 0.1)
    closed: list[int] = []

    async def workflow(task: Task, model: Any) -> None:
        model.ask(task)
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            closed.append(1)
            if not stubborn:
                raise
            await asyncio.sleep(1000)

    [found] = play(workflow, tokenizer, timeout_s=0.1)
    assert found.end is End.WORKFLOW_TIMEOUT and "rollout.workflow_timeout_s=0.1" in found.metadata["reward_message"]
    assert closed == [1]


def test_waits_for_the_engine_are_not_the_workflows_time(tokenizer: ChatTokenizer) -> None:
    async def workflow(task: Task, model: Any) -> None:
        model.ask(task)
        await asyncio.gather(model.generate(), model.generate())
        await model.verify()

    [found] = play(workflow, tokenizer, engine=Engine(tokenizer, delay_s=2.5), timeout_s=2.0)
    assert found.end is End.FINISHED


def test_a_cancellation_passes(tokenizer: ChatTokenizer) -> None:
    begun = asyncio.Event()

    async def workflow(task: Task, model: Any) -> None:
        begun.set()
        await asyncio.sleep(1000)

    async def main() -> None:
        runner = TrajectoryRunner(
            workflow, RightAlways(), tokenizer, TrajectorySettings(limits=up_to(9), retries=9, retry_s=0.0)
        )
        gatherer: Any = Engine(tokenizer)
        running = asyncio.ensure_future(runner.run(group(tokenizer), 0, gatherer, nothing))
        await begun.wait()
        assert runner.in_workflow == 1
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert runner.in_workflow == 0

    asyncio.run(asyncio.wait_for(main(), 30))


class Uneven(Engine):
    """A gatherer whose first sample of all takes long."""

    async def sample(self, request: SampleRequest) -> Completion:
        self.delay_s = 0.0 if self.requests else 0.3
        return await super().sample(request)


async def _first_of_two(task: Task, model: Any) -> None:
    model.ask(task)
    tasks = [asyncio.create_task(model.generate()) for _ in range(2)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def _again_after_a_timeout(task: Task, model: Any) -> None:
    model.ask(task)
    try:
        async with asyncio.timeout(0.05):
            await model.generate()
    except TimeoutError:
        await model.generate()


@pytest.mark.parametrize("workflow", [_first_of_two, _again_after_a_timeout])
def test_a_response_that_nobody_waited_for_ends_the_trajectory(tokenizer: ChatTokenizer, workflow: Play) -> None:
    """Else a workflow trains on what came first: the short responses."""
    engine = Uneven(tokenizer)
    [found] = play(workflow, tokenizer, engine=engine)
    assert found.end is End.ABANDONED and "1 of its responses" in found.metadata["reward_message"]


def test_a_response_after_the_verdict_is_not_recorded(tokenizer: ChatTokenizer) -> None:
    left: list[asyncio.Task[Any]] = []

    class Slow(RightAlways):
        async def score(self, task: Task, text: str, *, in_thinking: bool = False) -> Verdict:
            await asyncio.gather(*left, return_exceptions=True)
            return await super().score(task, text)

    async def workflow(task: Task, model: Any) -> None:
        await _first_of_two(task, model)
        left.extend(one for one in asyncio.all_tasks() if "generate" in repr(one.get_coro()))

    async def main() -> Trajectory:
        runner = TrajectoryRunner(workflow, Slow(), tokenizer, TrajectorySettings(limits=up_to(200), timeout_s=30.0))
        gatherer: Any = Uneven(tokenizer)
        found = await runner.run(group(tokenizer), 0, gatherer, nothing)
        await asyncio.gather(*left, return_exceptions=True)
        return found

    found = asyncio.run(asyncio.wait_for(main(), 30))
    assert len(left) == 1 and sum(turn.author == "model" for turn in found.turns) == 1


def test_a_trajectory_that_failed_gets_no_reward(tokenizer: ChatTokenizer) -> None:
    async def workflow(task: Task, model: Any) -> None:
        model.ask(task)
        await model.generate()
        model.fail("the tool is gone")
        model.finish(Reward(1.0, "ok"))

    [found] = play(workflow, tokenizer)
    assert found.end is End.WORKFLOW_ERROR and found.reward.status == "error"


@pytest.mark.parametrize("goes_on", ["a message", "a response"])
def test_a_trajectory_that_failed_is_not_truncated_by_what_it_does_afterwards(
    tokenizer: ChatTokenizer, goes_on: str
) -> None:
    """Without room it had the end ``truncated``: it was not begun again, and ``on_error=zero`` trained the outage."""
    runs = []

    async def workflow(task: Task, model: Any) -> None:
        runs.append(model)
        model.ask(task)
        await model.generate()
        model.fail("the tool is gone")
        if goes_on == "a message":
            assert model.add("user", "long " * 200) is None
        else:
            model.write("user", np.ones(500, np.int32))
            await model.generate()

    [found] = play(workflow, tokenizer, retries=2)
    assert found.end is End.WORKFLOW_ERROR and len(runs) == 3
    assert verify([found], RewardConfig(on_error="zero"), vocab_size=10**6).dropped == {"g": "workflow_error"}


def test_a_refused_prompt_that_the_workflow_handles_is_not_abandoned(tokenizer: ChatTokenizer) -> None:
    class Refusing(Engine):
        async def sample(self, request: SampleRequest) -> Completion:
            if request.token_ids[0] == 1:
                raise PromptRefused("ValueError: out of vocabulary")
            return await super().sample(request)

    async def workflow(task: Task, model: Any) -> None:
        model.begin([1])
        with pytest.raises(PromptRefused):
            await model.generate()
        model.begin([2])
        await model.generate()

    [found] = play(workflow, tokenizer, engine=Refusing(tokenizer))
    assert found.end is End.FINISHED and found.reward.score == 1.0


def test_a_prompt_that_engines_refuse_costs_its_trajectory(tokenizer: ChatTokenizer) -> None:
    class Refusing(Engine):
        async def sample(self, request: SampleRequest) -> Completion:
            if request.index == 1:
                raise PromptRefused("ValueError: image 0 cannot be decoded")
            return await super().sample(request)

    first, second = play(single_turn, tokenizer, 2, engine=Refusing(tokenizer))
    assert first.end is End.FINISHED and second.end is End.WORKFLOW_ERROR
    assert "cannot be decoded" in second.metadata["reward_message"]


def test_sys_exit_of_a_task_of_a_workflow_ends_no_explorer(tokenizer: ChatTokenizer) -> None:
    async def leave() -> None:
        await asyncio.sleep(0)
        sys.exit(3)

    async def workflow(task: Task, model: Any) -> None:
        model.ask(task)
        await model.generate()
        if model.index == 1:
            await asyncio.gather(leave(), asyncio.sleep(0.01))
        if model.index == 2:
            left.append(asyncio.create_task(leave()))

    found: list[Trajectory] = []
    left: list[asyncio.Task[None]] = []

    async def main() -> int:
        runner = TrajectoryRunner(
            workflow, RightAlways(), tokenizer, TrajectorySettings(limits=up_to(200), timeout_s=30.0)
        )
        gatherer: Any = Engine(tokenizer)
        found.extend(await asyncio.gather(*(runner.run(group(tokenizer, 3), i, gatherer, nothing) for i in range(3))))
        await asyncio.wait(left)
        return 7

    loop = asyncio.new_event_loop()
    assert run_through(loop, main()) == 7 and isinstance(left[0].exception(), SystemExit)
    loop.close()
    assert [one.end for one in found] == [End.FINISHED, End.WORKFLOW_ERROR, End.FINISHED]
    assert "SystemExit: 3" in found[1].metadata["reward_message"]


def test_sampling_without_a_seed_leaves_the_trajectory_one(tokenizer: ChatTokenizer) -> None:
    """A greedy evaluation: an environment without a seed is begun again until it draws an easy episode."""
    seeds: list[int] = []

    async def workflow(task: Task, model: Any) -> None:
        seeds.append(model.seed)
        raise ValueError("again")

    claimed = replace(group(tokenizer, 2), seed=None)

    async def main() -> None:
        runner = TrajectoryRunner(
            workflow, RightAlways(), tokenizer, TrajectorySettings(1, retry_s=0.0, timeout_s=30.0, limits=up_to(99))
        )
        gatherer: Any = Engine(tokenizer)
        for index in range(2):
            await runner.run(claimed, index, gatherer, nothing)

    asyncio.run(main())
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


def test_most_tokens_are_a_number_that_engines_take(tokenizer: ChatTokenizer) -> None:
    engine = Engine(tokenizer)

    async def workflow(task: Task, model: Any) -> None:
        model.ask(task)
        await asyncio.gather(*(model.generate(max_tokens=n) for n in (np.int64(8), 10**30)))

    play(workflow, tokenizer, engine=engine)
    assert json.dumps([request.max_tokens for request in engine.requests]) == f"[8, {2**31 - 1}]"


def test_a_workflow_that_goes_on_after_a_message_without_room_is_not_truncated(tokenizer: ChatTokenizer) -> None:
    """``algorithm.overlong_filtering`` left out whatever had rewritten its context."""

    async def workflow(task: Task, model: Any) -> None:
        model.ask(task)
        await model.generate()
        assert model.add("user", "word " * 300) is None
        model.begin(model.turns[0].token_ids)
        await model.generate()

    [found] = play(workflow, tokenizer)
    assert found.end is End.FINISHED and not found.truncated


@pytest.mark.parametrize(
    "late",
    [
        lambda model: model.finish(Reward(0.0, "wrong")),
        lambda model: model.fail("late"),
        lambda model: model.truncate(),
        lambda model: model.begin(np.array([5], np.int32)),
        lambda model: model.add("environment", "late"),
    ],
    ids=["finish", "fail", "truncate", "begin", "add"],
)
def test_nothing_is_taken_from_a_task_that_the_workflow_left(
    tokenizer: ChatTokenizer, late: Callable[[Any], Any]
) -> None:
    """While the verifier was asked, a late `finish` or `fail` had its verdict weighed twice."""
    left: list[asyncio.Task[Any]] = []
    asked = asyncio.Event()

    class Slow:
        async def score(self, task: Task, text: str, *, in_thinking: bool = False) -> Verdict:
            asked.set()
            with pytest.raises(RuntimeError, match="has ended"):
                await left[0]
            return Verdict(Reward(2.0, "ok", {"answer": 1.0}))

    async def workflow(task: Task, model: Any) -> None:
        async def later() -> None:
            await asked.wait()
            late(model)

        model.ask(task)
        await model.generate()
        left.append(asyncio.create_task(later()))

    runner = TrajectoryRunner(
        workflow, Slow(), tokenizer, TrajectorySettings(limits=up_to(200), rewards=RewardConfig(weight=2.0))
    )
    engine: Any = Engine(tokenizer)
    found = asyncio.run(runner.run(group(tokenizer), 0, engine, nothing))
    assert found.reward == Reward(2.0, "ok", {"answer": 1.0}) and found.end is End.FINISHED
    assert [turn.author for turn in found.turns] == ["user", "model"]


def test_settings_of_a_trajectory_are_its_own(tokenizer: ChatTokenizer) -> None:
    sizes = []

    async def workflow(task: Task, model: Any) -> None:
        sizes.append(model.options["nested"].pop("size", None))
        await single_turn(task, model)

    play(workflow, tokenizer, 2, options={"nested": {"size": 3}})
    assert sizes == [3, 3]


@pytest.mark.parametrize(
    ("content", "observation", "seen"), [("  f(x)", "", "  f(x)"), ("", "12", "12"), (" a", "b ", " a\n\nb ")]
)
def test_an_observation_changes_no_prompt(content: str, observation: str, seen: str) -> None:
    row = replace(task(), prompt=({"role": "user", "content": content},))
    assert observed(row, observation).prompt == ({"role": "user", "content": seen},)
    with pytest.raises(ValueError, match="stands for an image"):
        observed(replace(row, images=(b"",)), "an <image>")
