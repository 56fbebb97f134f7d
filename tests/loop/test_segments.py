"""Responses in segments on real engines: cut anywhere and continued on another engine, or after a kill, they are what
they would have been."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest

from megarl.buffer.store import Claim, Store
from megarl.core.schema import Segment
from megarl.engines.client.client import EngineClient, Prompt, Sampling
from megarl.engines.client.frames import Completion
from megarl.engines.client.gather import Gatherer, SampleRequest
from megarl.explore.explorer.segments import SegmentSampler, SegmentSettings
from megarl.explore.recording.model import TokenLimits
from tests.engine_rows import choice_of
from tests.loop.conftest import TINY_ROLLOUT
from tests.loop.engines import KEY, WIDE_SIZES, RunningEngine, some_prompts, tiny_engine
from tests.loop.same_run import kill, steps_of
from tests.loop.zygote import Zygote
from tests.stores import VERSION, make_task
from tests.system.jobs import START_S, TINY, Job

TOKENS = 40
LIMITS = TokenLimits(response=TOKENS, trajectory=128)


@pytest.fixture(scope="module")
def other(
    shared_engine: RunningEngine, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningEngine]:
    """An engine with the same weights: those of the files, which the shared one begins with again."""
    shared_engine.stop()
    running = tiny_engine(tmp_path_factory.mktemp("other"), rollout=TINY_ROLLOUT)
    running.zygote = zygote
    try:
        yield running.ready()
    finally:
        running.stop()


Answers = dict[int, tuple[Completion, list[Segment]]]


def respond(
    engine: RunningEngine,
    prompts: Sequence[Prompt],
    size: int | None,
    temperature: float,
    recorded: Mapping[int, Sequence[Segment]],
) -> Answers:
    """Responses to prompts, each with its segments; they go on where those in ``recorded`` end."""

    async def retried(error: Exception) -> None:
        raise error

    async def one(i: int, prompt: Prompt, gatherer: Gatherer) -> tuple[Completion, list[Segment]]:
        kept: list[Segment] = list(recorded.get(i, ()))

        async def record(written: tuple[Claim, Segment]) -> bool:
            kept.append(written[1])
            return True

        claim = Claim("r0", "train", 0, VERSION, f"r0/{i}", i, 2, {}, make_task(i), "a", "token", 1)
        segments, there = SegmentSettings(size), recorded.get(i, ())
        recorder = record if size else None
        sampler = SegmentSampler(gatherer, claim, 0, LIMITS, segments, recorder, None, Counter[str](), there)
        request = SampleRequest(f"r0/{i}", 0, 2, np.array(prompt.token_ids, np.int32), (), 1000 * i + 1)
        return await sampler.sample(request), kept

    async def all_of_them() -> Answers:
        sampling = Sampling(max_tokens=TOKENS, temperature=temperature, ignore_eos=True)
        async with EngineClient(choice_of(engine.url), KEY, timeout_s=60) as client, asyncio.TaskGroup() as tasks:
            gatherer = Gatherer(
                client, sampling, tasks, change=lambda n: None, retried=retried, timeout_s=60, retry_s=0.1
            )
            answers = [tasks.create_task(one(i, prompt, gatherer)) for i, prompt in enumerate(prompts)]
            return {i: await answer for i, answer in enumerate(answers)}

    return asyncio.run(all_of_them())


def assert_same_cut_anywhere(
    first: RunningEngine, second: RunningEngine, temperature: float, segment_sizes: Sequence[int]
) -> None:
    """Check responses that are cut after any number of segments, one after another, on the one engine and the other:
    tokens, log-probs and versions are those of responses that nothing cuts."""
    prompts = some_prompts(6)
    for size in segment_sizes:
        whole = respond(first, prompts, size, temperature, {})
        rng, taken = np.random.default_rng(size), dict[int, Sequence[Segment]]()
        for where in (second, first, second):
            cuts = {i: rng.integers(len(taken.get(i, ())), len(kept) + 1) for i, (_, kept) in whole.items()}
            found = respond(where, prompts, size, temperature, taken)
            taken = {i: kept[: cuts[i]] for i, (_, kept) in found.items()}
            for i, (completion, _) in found.items():
                expected = whole[i][0]
                assert completion.token_ids.tolist() == expected.token_ids.tolist(), (size, i)
                assert completion.logprobs.tobytes() == expected.logprobs.tobytes(), (size, i)
                assert len(completion.token_ids) == TOKENS and completion.versions == expected.versions


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
def test_a_cut_response_goes_on_elsewhere_with_the_same_bits(
    engine: RunningEngine, other: RunningEngine, temperature: float
) -> None:
    assert_same_cut_anywhere(engine, other, temperature, (1, 7, 16))


@pytest.mark.soak
def test_a_wide_model_goes_on_elsewhere_with_the_same_bits(tmp_path: Path, zygote: Zygote) -> None:
    """Above 1,024 columns oneDNN's product of one row is another than that of several."""
    pair = [tiny_engine(tmp_path / name, rollout=TINY_ROLLOUT, sizes=WIDE_SIZES) for name in ("one", "two")]
    try:
        for running in pair:
            running.zygote = zygote
            running.ready()
        for temperature in (0.0, 1.0):
            assert_same_cut_anywhere(pair[0], pair[1], temperature, (7, 16))
        in_one, cut = (respond(pair[0], some_prompts(6), size, 0.0, {}) for size in (None, 7))
        for i, (completion, _) in cut.items():
            assert completion.token_ids.tolist() == in_one[i][0].token_ids.tolist()
            assert np.abs(completion.logprobs - in_one[i][0].logprobs).max() <= 1e-4
    finally:
        for running in pair:
            running.stop()


def test_greedy_segments_are_the_response_in_one(engine: RunningEngine) -> None:
    prompts = some_prompts(6)
    in_one = respond(engine, prompts, None, 0.0, {})
    for i, (completion, kept) in respond(engine, prompts, 5, 0.0, {}).items():
        assert completion.token_ids.tolist() == in_one[i][0].token_ids.tolist() and len(kept) == TOKENS // 5
        assert completion.logprobs.tobytes() == in_one[i][0].logprobs.tobytes()


# ---------------------------------------------------------------------------------------------------------------------
# A job

TWO_TURNS = """
async def workflow(task, model):
    model.ask(task)
    await model.generate(max_tokens=12)
    model.add("user", "Again.")
    await model.generate()
"""
THAT_STOPS = """
import asyncio
import os
import signal
import sqlite3
from pathlib import Path

STOP = Path({folder!r}) / "stop"
STORE = "file:{folder}/killed/store.db?mode=ro"
LATE = "select count(*) from segments where rollout_id = ? and turn = 1 and start > 2"
watching = None


async def stop_when_late():
    while True:
        if STOP.exists():
            connection = sqlite3.connect(STORE, uri=True)
            [late] = connection.execute(LATE, (STOP.read_text(),)).fetchone()
            connection.close()
            if late > 3:
                STOP.unlink()
                os.kill(os.getpid(), signal.SIGSTOP)
        await asyncio.sleep(0)


async def workflow(task, model):
    global watching
    if watching is None and STOP.exists():
        watching = asyncio.create_task(stop_when_late())
    await two_turns(task, model)
"""
SETTINGS = (
    *TINY,
    "trainer.steps=2",
    "trainer.warm_start.steps=1",
    "rollout.max_response_tokens=24",
    "model.from_scratch.max_position_embeddings=160",
    "rollout.max_trajectory_tokens=120",
    "rollout.segment_tokens=2",
)


def responses(run_dir: Path) -> dict[tuple[str, int], list[tuple[str, bytes, bytes]]]:
    """Turns of every training trajectory."""
    store = Store(f"sqlite:///{run_dir}/store.db", read_only=True)
    found = {
        (e.group_id, e.index): [
            (turn.author, turn.token_ids.tobytes(), b"" if turn.logp is None else turn.logp.tobytes())
            for turn in e.turns
        ]
        for step in range(2)
        for e in store.groups.trajectories(f"train-{step:06d}")
    }
    store.close()
    return found


@pytest.mark.timeout(3 * START_S)
@pytest.mark.soak
def test_trajectories_go_on_after_their_explorer_and_their_engine_were_killed(tmp_path: Path) -> None:
    """Of two turns of the model; each process is killed when tokens of both turns are in the store: the explorer stops
    itself there."""
    workflow, stop = tmp_path / "that_stops.py", tmp_path / "stop"
    workflow.write_text(TWO_TURNS.replace("workflow", "two_turns") + THAT_STOPS.format(folder=str(tmp_path)))
    settings = (*SETTINGS, f"rollout.workflow={workflow}", "cluster.stall_s=600", "rollout.request_timeout_s=600")

    def stopped_explorer() -> psutil.Process:
        """The explorer, once it has stopped itself in the rollout that the file ``stop`` names."""
        killed.until(lambda: not stop.exists(), "segments of the second turn")
        explorer = psutil.Process(killed.pid_of("explorer"))
        killed.until(lambda: explorer.status() == psutil.STATUS_STOPPED, "an explorer that is stopped")
        return explorer

    whole, killed = Job(tmp_path / "whole", settings), Job(tmp_path / "killed", settings)
    try:
        assert whole.start().wait(START_S) == 0, whole.output.read_text()
        stop.write_text("train-000000")
        killed.start()
        first = stopped_explorer()
        stop.write_text("train-000001")
        kill(killed, "explorer", first.pid)
        second = stopped_explorer()
        kill(killed, "engine 0", killed.pid_of("engine"))
        second.resume()
        assert killed.wait(START_S) == 0, killed.output.read_text()
        assert (killed.run_dir / "attempt").read_text() == "1"
        assert responses(killed.run_dir) == responses(whole.run_dir)
        names = ("rollout/resumed_tokens", "rollout/replay_diverged")
        assert [[record[name] for name in names] for record in steps_of(whole.run_dir)] == [[0, 0], [0, 0]]
        [[resumed, _], _] = found = [[record[name] for name in names] for record in steps_of(killed.run_dir)]
        assert resumed > 0 and [diverged for _, diverged in found] == [0, 0]
        losses = [[record["actor/pg_loss"] for record in steps_of(job.run_dir)] for job in (whole, killed)]
        assert losses[0] == losses[1]
    finally:
        for job in (killed, whole):
            if job.has_started:
                job.clean_up()
