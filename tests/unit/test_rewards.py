"""Verdicts, and the pool: a reward function that loops, dies or raises costs one sample, never the run."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.rewards import FormatConfig, RepetitionConfig, RewardConfig
from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Reward, Task
from megarl.explore.recording.turns import recorded_reward
from megarl.rewards import RewardPool, Verdict, compute_score
from megarl.rewards.pool import pool as worker_queue
from megarl.rewards.pool import process as reward_process
from megarl.rewards.pool.host import RewardHost
from megarl.rewards.pool.process import RemoteRewardProcess, Worker
from megarl.rewards.pool.worker import verdict_of
from megarl.rewards.routes import ROUTES
from megarl.rewards.verdict import to_verdict

KEY = "the key of this job"
TASK = Task("t/0", "reasoning_gym/chain_sum", ({"role": "user", "content": "9 + 3 ="},), "math", {"ground_truth": "12"})
LIGHT = Task("t/1", "vision/count", TASK.prompt, "vision", {"ground_truth": 12})
"""For a verifier that imports nothing, where it is not what is tested: reasoning-gym takes seconds a worker."""

USER_FILE = """
import os, sys, time
print("imported")
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    print("noise on stdout")
    if solution_str == "loop":
        open(__file__ + ".loop", "w").close()
        while True: pass
    if solution_str == "die": os._exit(3)
    if solution_str == "raise": raise KeyError("boom")
    if solution_str == "nan": return float("nan")
    if solution_str == "none": return None
    if solution_str == "pid": return float(os.getpid())
    if solution_str == "surrogate": raise ValueError(chr(0xD800))
    if solution_str == "much": raise ValueError("x" * 2**17)
    if solution_str == "stdin": return float(len(sys.stdin.read()))
    if solution_str == "wait":
        open(__file__ + ".waits", "w").close()
        while not os.path.exists(__file__ + ".go"): time.sleep(0.01)
        return 1
    return {"score": float(solution_str == ground_truth), "format": True, "comment": "text"}
"""


def score(*request: Any) -> float:
    return float(compute_score(*request)["score"])


def test_reasoning_gym_scores_its_own_answers() -> None:
    assert compute_score("reasoning_gym/chain_sum", " 12 \n", "12", {}) == {"score": 1.0, "status": "ok", "parts": {}}
    assert score("reasoning_gym/chain_sum", "12.0", "12", None) == 1.0
    assert score("reasoning_gym/chain_sum", "first <answer>1</answer> then <answer>12</answer>", "12") == 1.0
    assert score("reasoning_gym/chain_sum", "13", "12") == 0.0
    assert score("reasoning_gym/chain_sum", "", "12") == 0.0
    assert score("reasoning_gym/chain_sum", "<think>9 + 3</think>\n\n12", "12") == 1.0
    assert score("reasoning_gym/chain_sum", "<think><answer>12</answer>?</think>13", "12") == 0.0
    assert score("reasoning_gym/chain_sum", "<think>Is it <answer>12</answer>?", "12") == 0.0
    assert score("reasoning_gym/basic_arithmetic", "-7", "-7") == 1.0


def test_an_answer_that_a_family_of_reasoning_gym_cannot_read_is_wrong_and_a_row_an_error() -> None:
    assert score("reasoning_gym/prime_factorization", "2 × 3", "2 × 3") == 1.0
    assert score("reasoning_gym/prime_factorization", "no idea", "2 × 3") == 0.0
    with pytest.raises(KeyError, match="solution"):
        score("reasoning_gym/sudoku", "1 2 3", "1 2 3", {"metadata": {}})


def test_an_unknown_data_source_is_an_error() -> None:
    with pytest.raises(
        DataError, match="'my_set/1' has no verifier; known prefixes: reasoning_gym, math, .* reward.routes"
    ):
        compute_score("my_set/1", "1", "1")
    with pytest.raises(DataError, match="reasoning-gym has no such family"):
        compute_score("reasoning_gym/chain_sums", "1", "1")


@pytest.mark.parametrize(
    ("result", "score", "status", "parts"),
    [
        (1, 1.0, "ok", {}),
        (0.5, 0.5, "wrong", {}),
        (True, 1.0, "ok", {}),
        (np.float32(2.0), 2.0, "ok", {}),
        ({"score": 0.1, "acc": True, "format": 1}, 0.1, "ok", {"acc": 1.0, "format": 1.0}),
        ({"score": 1.0, "acc": False}, 1.0, "wrong", {"acc": 0.0}),
        ({"score": 1.0, "status": "wrong", "text": "x", "bad": math.nan}, 1.0, "wrong", {}),
        ({"score": 1, "parts": {"a": 2, "b": "x"}, "reason": "none"}, 1.0, "ok", {"a": 2.0}),
        ({"score": 0, "status": "error"}, 0.0, "error", {}),
        ({"score": 1.0, "acc": None}, 1.0, "ok", {}),
        ({"score": 0.0, "acc": np.bool_(True)}, 0.0, "ok", {"acc": 1.0}),
        (np.bool_(True), 1.0, "ok", {}),
        (np.array(0.5), 0.5, "wrong", {}),
        (torch.tensor(1), 1.0, "ok", {}),
        ({"score": torch.tensor(-1.0), "acc": 0.5}, -1.0, "wrong", {"acc": 0.5}),
        (
            {"score": 0, "acc": torch.tensor(True), "f": np.array(2.0), "ids": np.arange(2)},
            0.0,
            "ok",
            {"acc": 1.0, "f": 2.0},
        ),
    ],
)
def test_results_become_verdicts(result: Any, score: float, status: str, parts: dict[str, float]) -> None:
    assert to_verdict(result) == {"score": score, "status": status, "parts": parts}


@pytest.mark.parametrize(
    "result",
    [
        None,
        "1",
        [1.0],
        1j,
        math.inf,
        {"acc": 1},
        {"score": "1"},
        {"score": 1, "status": "fine"},
        {"score": 0, "acc": math.nan},
        {"score": 0, "acc": "yes"},
        np.array([1.0]),
        torch.tensor(math.nan),
    ],
)
def test_other_results_are_refused(result: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="compute_score"):
        to_verdict(result)


@pytest.mark.parametrize(
    "many",
    [{f"part{k}": 1.0 for k in range(100_000)}, {"a\ud800": 1.0}, {"x" * 201: 1.0}],
    ids=["number", "surrogate", "length"],
)
@pytest.mark.parametrize("inner", [False, True])
def test_parts_are_bounded_and_have_valid_names(many: dict[str, float], inner: bool) -> None:
    with pytest.raises(ValueError, match="compute_score returned (100000 parts; at most 256|a part named)"):
        to_verdict({"score": 1.0, "parts": many} if inner else {"score": 1.0, **many})


def test_the_reason_of_an_error_is_bounded_valid_text() -> None:
    reason = to_verdict({"score": 0.0, "status": "error", "reason": "\ud800" + "x" * 10_000})["reason"]
    assert len(reason) == 2000 and reason.startswith("?x")


def run_pool(config: RewardConfig, work: Callable[[RewardPool], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with RewardPool(config) as pool:
            return await work(pool)

    return asyncio.run(main())


@pytest.fixture
def user_config(tmp_path: Path) -> RewardConfig:
    path = tmp_path / "reward.py"
    path.write_text(USER_FILE)
    return RewardConfig(path=str(path), timeout_s=60.0)


@pytest.mark.parametrize("own", [False, True])
def test_equal_answers_are_scored_once_by_verifiers_of_megarl(
    user_config: RewardConfig, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    asked: list[str] = []
    score = Worker.score

    async def counted(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request["solution_str"])
        return await score(worker, request)

    monkeypatch.setattr(Worker, "score", counted)

    async def work(pool: RewardPool) -> list[Verdict]:
        first = await asyncio.gather(*(pool.score(LIGHT, text) for text in ["12", "13", "12", "12"]))
        later = [
            await pool.score(LIGHT, "12"),
            await pool.score(replace(LIGHT, reward_model={"ground_truth": 13}), "12"),
        ]
        return [*first, *later]

    verdicts = run_pool(user_config if own else RewardConfig(workers=2), work)
    assert len(asked) == (6 if own else 3) and all(v.tries == 1 and v.kills == 0 for v in verdicts)
    if not own:
        assert [v.reward.score for v in verdicts] == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]


def test_who_waits_for_an_equal_answer_scores_it_where_the_first_was_cancelled() -> None:
    async def work(pool: RewardPool) -> tuple[bool, Verdict]:
        first = asyncio.create_task(pool.score(LIGHT, "12"))
        await asyncio.sleep(0)
        second = asyncio.create_task(pool.score(LIGHT, "12"))
        await asyncio.sleep(0)
        first.cancel()
        return first.cancelled(), await second

    _, verdict = run_pool(RewardConfig(workers=1), work)
    assert (verdict.reward.score, verdict.reward.status) == (1.0, "ok")


def test_the_pool_scores_with_reasoning_gym() -> None:
    async def work(pool: RewardPool) -> list[Verdict]:
        return await asyncio.gather(*(pool.score(TASK, text) for text in ["12", "13", "12"]))

    verdicts = run_pool(RewardConfig(workers=1), work)
    assert [v.reward for v in verdicts] == [Reward(1.0, "ok"), Reward(0.0, "wrong"), Reward(1.0, "ok")]
    assert {(v.message, v.verifier, v.tries, v.kills) for v in verdicts} == {(None, "reasoning_gym", 1, 0)}
    assert set(verdicts[0].record) == {"verifier", "seconds", "waited_s", "tries", "kills"}


def test_our_verifiers_cannot_take_all_memory() -> None:
    """They may take 8 GiB beside what the process was forked with."""

    async def read(pool: RewardPool) -> tuple[str, str]:
        process = Path(f"/proc/{pool.pids[0]}")
        return (process / "limits").read_text(), (process / "statm").read_text()

    limits, sizes = run_pool(RewardConfig(), read)
    limit = re.search(r"Max address space +([0-9]+) ", limits)
    assert limit is not None
    assert 7 * 2**30 < int(limit[1]) - int(sizes.split()[0]) * resource.getpagesize() <= 8 * 2**30


def test_loading_a_verifier_is_no_part_of_a_tasks_time() -> None:
    """reasoning-gym takes longer to import than this limit; scoring takes 0.1 ms."""
    verdict = run_pool(RewardConfig(timeout_s=0.5), lambda pool: pool.score(TASK, "12"))
    assert verdict.reward.status == "ok"


def test_verifiers_of_known_sources_are_imported_before_the_first_answer() -> None:
    """Neither the judge's, nor one that is unknown, which the first answer reports."""

    async def main() -> tuple[set[str], Verdict, Verdict]:
        sources = ["chat/helpful", "no such family", TASK.data_source]
        config = RewardConfig(routes={"chat": "judge"})
        async with RewardPool(config, CountingJudge(), sources=sources) as pool:
            known = await pool.score(TASK, "12")
            unknown = await pool.score(replace(TASK, data_source="no such family"), "12")
            return pool.workers[0].prepared, known, unknown

    prepared, known, unknown = asyncio.run(main())
    assert prepared == {TASK.data_source}
    assert (known.reward.status, unknown.reward.status) == ("ok", "error")


def test_a_users_function_that_fails_costs_one_sample(
    user_config: RewardConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_process, "MAX_LINE_BYTES", 2**16)

    async def work(pool: RewardPool) -> list[Verdict]:
        return [
            await pool.score(TASK, text)
            for text in ["12", "loop", "12", "die", "12", "raise", "nan", "none", "surrogate", "much", "13"]
        ]

    good, loop, after_loop, die, after_death, raised, nan, none, surrogate, much, wrong = run_pool(
        replace(user_config, timeout_s=2.0), work
    )
    assert good.reward == after_loop.reward == after_death.reward == Reward(1.0, "ok", {"format": 1.0})
    assert wrong.reward == Reward(0.0, "wrong", {"format": 1.0})
    assert (loop.tries, loop.kills, raised.tries, raised.kills, die.tries, die.kills) == (2, 2, 2, 0, 3, 3)
    assert loop.reward.status == "timeout" and loop.message == "no verdict within 2 s"
    assert die.reward.status == "error"
    assert die.message == "quarantined after 3 reward processes: the reward process ended with code 3 while scoring"
    assert raised.reward.status == "error" and "KeyError: 'boom' (reward.py:10)" in raised.message
    assert nan.reward.status == "error" and "must be finite" in nan.message
    assert none.reward.status == "error" and "NoneType" in none.message
    assert surrogate.reward.status == "error" and "ValueError: ? (reward.py:14)" in surrogate.message
    assert much.reward.status == "error" and "more than 65536 bytes" in much.message
    assert all(math.isnan(v.reward.score) for v in (loop, die, raised, nan, none, surrogate, much)), (
        "an error must not look like a 0"
    )


CARELESS = """
import multiprocessing, os, signal, time
def double(x): return 2 * x
def ring(*_): raise RuntimeError("alarm")
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str.startswith("fork"):
        child = os.fork()
        if child == 0 and solution_str == "fork and raise": raise ValueError
        if child == 0: return 9.0
        return float(os.waitpid(child, 0)[1])
    if solution_str == "alarm":
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        return 0.1
    if solution_str == "sleep": time.sleep(0.4); return 0.2
    if solution_str == "spawn":
        with multiprocessing.get_context("spawn").Pool(1) as pool: return float(pool.map(double, [3])[0])
    return float(solution_str)
"""


@pytest.mark.parametrize("local", [True, False])
def test_what_a_function_leaves_behind_changes_no_later_verdict(tmp_path: Path, local: bool) -> None:
    """A child that returns too, and an alarm that rings later; a process that is spawned finds the file's functions."""
    (tmp_path / "reward.py").write_text(CARELESS)
    texts = ["fork", "3", "fork and raise", "4", "alarm", "sleep", "spawn", "5"]

    async def main() -> list[Verdict]:
        async with RewardHost("127.0.0.1", 0, KEY, workers=1) as host:
            config = RewardConfig(path=str(tmp_path / "reward.py"), timeout_s=60.0, retries=0, max_kills=1)
            pool = RewardPool(config, key=KEY)
            if not local:
                pool.workers[:] = [Worker(config, RemoteRewardProcess(f"127.0.0.1:{host.port}", KEY))]
            async with pool:
                return [await pool.score(TASK, text) for text in texts]

    found = asyncio.run(main())
    assert [verdict.message for verdict in found] == [None] * 8
    assert [verdict.reward.score for verdict in found] == [0.0, 3.0, 0.0, 4.0, 0.1, 0.2, 6.0, 5.0]


def test_a_reply_to_another_request_is_no_verdict() -> None:
    async def work(pool: RewardPool) -> list[Verdict]:
        first = await pool.score(LIGHT, "12")
        [worker] = pool.workers
        assert worker.writer is not None
        worker.writer.write(b'{"id": 999, "prepare": "vision/count"}\n')
        return [first, *[await pool.score(LIGHT, text) for text in ("13", "14", "12 ")]]

    found = run_pool(RewardConfig(workers=1), work)
    assert [(v.reward.status, v.kills) for v in found] == [("ok", 0), ("wrong", 1), ("wrong", 0), ("ok", 0)]


def test_a_response_that_a_verifier_cannot_judge_is_wrong_and_a_row_has_no_verdict() -> None:
    """It would else choose to have no verdict, and its group would be left out of training."""
    metadata = {"metadata": {"numbers": [9], "target": 9}}
    row = replace(TASK, data_source="reasoning_gym/countdown", extra_info=metadata)

    async def work(pool: RewardPool) -> list[Verdict]:
        return [await pool.score(row, text) for text in ("9**9**9**9", "(" * 50 + "9" + ")" * 50)]

    config = RewardConfig(workers=1, timeout_s=3.0, retries=9, max_kills=10, format=FormatConfig(weight=0.5))
    endless, nested = run_pool(config, work)
    assert endless.reward == Reward(0.0, "wrong", {"format": 0.0, "answer": 0.0}) and endless.kills >= 1
    assert nested.reward.status == "ok"


def test_a_worker_that_an_answer_has_filled_is_replaced() -> None:
    """What SymPy's caches keep of one answer would fill the machine's memory, and fail later answers."""
    row = replace(TASK, data_source="reasoning_gym/countdown", extra_info={"metadata": {"numbers": [9], "target": 9}})

    async def work(pool: RewardPool) -> list[tuple[Verdict, list[int]]]:
        return [(await pool.score(row, text), pool.pids) for text in ("9", " 9", "1<<(9*10**9)", "(9)", "+9")]

    (_, first), (_, second), (filling, _), (right, replaced), (also, last) = run_pool(RewardConfig(workers=1), work)
    assert first == second and first != replaced == last, "the worker that was filled is replaced, and no other"
    assert (filling.reward.status, filling.kills) == ("wrong", 0)
    assert [(v.reward.status, v.kills, v.tries) for v in (right, also)] == [("ok", 0, 1)] * 2


def test_a_score_that_is_no_number_is_the_responses_fault() -> None:
    def odd(text: str, truth: Any, info: Any) -> float:
        return math.nan if text else 0.0

    assert verdict_of(odd, "x", "1", {}) == {"score": 0.0, "status": "wrong"}


def test_an_error_of_a_verifier_is_the_responses_fault_unless_an_empty_one_causes_it_too() -> None:
    def fails(text: str, truth: Any, info: Any) -> float:
        if truth == "disk":
            raise OSError(28, "No space left on device")
        if text or truth == "row":
            raise MemoryError
        return 0.0

    assert verdict_of(fails, "x", "1", {}) == {"score": 0.0, "status": "wrong"}
    for truth, error in (("row", MemoryError), ("disk", OSError)):
        with pytest.raises(error):
            verdict_of(fails, "x", truth, {})


def test_a_hanging_sample_does_not_hold_up_another_worker(user_config: RewardConfig) -> None:
    async def work(pool: RewardPool) -> tuple[bool, Verdict]:
        hanging = asyncio.create_task(pool.score(TASK, "loop"))
        await asyncio.sleep(0.05)
        verdict = await pool.score(TASK, "12")
        held_up = hanging.done()
        hanging.cancel()
        return held_up, verdict

    config = replace(user_config, workers=2, retries=0)
    held_up, verdict = run_pool(config, work)
    assert not held_up and verdict.reward.status == "ok"


def test_a_cancelled_score_does_not_answer_the_next_one(user_config: RewardConfig) -> None:
    async def work(pool: RewardPool) -> Verdict:
        slow = asyncio.create_task(pool.score(TASK, "wait"))
        while not Path(f"{user_config.path}.waits").exists():
            await asyncio.sleep(0.01)
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        Path(f"{user_config.path}.go").touch()
        return await pool.score(TASK, "13")

    assert run_pool(user_config, work).reward == Reward(0.0, "wrong", {"format": 1.0})


def test_the_functions_input_and_output_are_not_the_protocol(user_config: RewardConfig) -> None:
    assert run_pool(user_config, lambda pool: pool.score(TASK, "stdin")).reward.score == 0.0


def test_closing_the_pool_ends_its_processes(user_config: RewardConfig) -> None:
    pid = int(run_pool(user_config, lambda pool: pool.score(TASK, "pid")).reward.score)
    assert not Path(f"/proc/{pid}").exists()


def test_a_killed_explorer_takes_looping_workers_with_it(user_config: RewardConfig) -> None:
    """Nobody is left to time the loop out: the kernel must end the worker."""
    code = f"""
import asyncio
import json
from megarl.explore import rewards
from megarl.config.rewards import RewardConfig
from megarl.rewards import RewardPool
from tests.unit.test_rewards import TASK
async def main():
    async with RewardPool(RewardConfig(path={user_config.path!r}, timeout_s=60)) as pool:
        print(int((await pool.score(TASK, "pid")).reward.score), flush=True)
        await pool.score(TASK, "loop")
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as explorer:
        assert explorer.stdout is not None
        worker = int(explorer.stdout.readline())
        deadline = time.monotonic() + 60
        while not Path(f"{user_config.path}.loop").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert Path(f"/proc/{worker}").exists()
        explorer.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while _running(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _running(worker)


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


FORKS = """
import os, pathlib, subprocess, time
CHILD = 'echo $$ > "$0.new"; mv "$0.new" "$0"; exec sleep 600'
FOLDER = pathlib.Path(__file__).parent
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    how, _, then = solution_str.partition(" ")
    if how == "fork":
        if os.fork() == 0:
            (FOLDER / "new").write_text(str(os.getpid()))
            (FOLDER / "new").rename(FOLDER / "child_fork")
            time.sleep(600)
    elif how:
        subprocess.Popen(["sh", "-c", CHILD, str(FOLDER / f"child_{how}")], start_new_session=how == "session")
    while how and not (FOLDER / ("child_" + how)).exists(): time.sleep(0.01)
    if then == "die": os._exit(3)
    while then == "hang": time.sleep(1)
    return 1.0
"""


@pytest.mark.parametrize(
    ("how", "then", "local"),
    [
        ("fork", "hang", True),
        ("fork", "die", True),
        ("spawn", "return", True),
        ("session", "hang", True),
        ("fork", "hang", False),
        ("spawn", "die", False),
    ],
)
def test_what_a_function_started_holds_nothing_up_and_ends_with_its_worker(
    tmp_path: Path, how: str, then: str, local: bool
) -> None:
    """It has inherited every descriptor of the worker, which must be neither waited for nor left open."""
    path = tmp_path / "reward.py"
    path.write_text(FORKS)

    async def work(hosts: list[str]) -> Verdict:
        limits = {"timeout_s": 3.0 if then == "hang" else 60.0, "retries": 0, "max_kills": 1}
        config = RewardConfig(path=str(path), workers=int(local), hosts=hosts, **limits)
        async with RewardPool(config, key=KEY) as pool:
            return await pool.score(TASK, f"{how} {then}")

    async def main() -> Verdict:
        async with asyncio.timeout(60), RewardHost("127.0.0.1", 0, KEY, workers=1) as host:
            return await work([] if local else [f"127.0.0.1:{host.port}"])

    verdict = asyncio.run(main())
    assert verdict.reward.status == {"hang": "timeout", "die": "error", "return": "ok"}[then]
    ended(int((tmp_path / f"child_{how}").read_text()))


def ended(pid: int) -> None:
    deadline = time.monotonic() + 30
    while _running(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.02)


def test_a_prompt_that_opens_a_thought_and_a_question_are_known_to_the_verifier() -> None:
    """A chat template wrote <think>: what the cut-off thought tries is no answer. The question: an answer must not
    repeat it."""

    async def work(pool: RewardPool) -> list[str]:
        task = replace(
            TASK,
            data_source="math",
            prompt=({"role": "user", "content": r"Expand $(x+1)(x-1)+1$."},),
            reward_model={"ground_truth": "x^2"},
        )
        texts = [
            (r"try \boxed{x^2} wait", True),
            (r"x</think> \boxed{x^2}", True),
            (r"\boxed{x^2}", False),
            (r"\boxed{(x+1)(x-1)+1}", False),
        ]
        return [(await pool.score(task, text, in_thinking=opened)).reward.status for text, opened in texts]

    assert run_pool(RewardConfig(), work) == ["wrong", "ok", "ok", "wrong"]


def test_a_users_route_has_a_subtype_of_its_own() -> None:
    config = RewardConfig(routes={"gsm": "math", "dogs": "vision/count", "sums": "reasoning_gym/chain_sum"})
    right = [compute_score(source, answer, truth, config=config)["status"] for source, answer, truth in
             (("gsm8k-plus", r"\boxed{7}", "7"), ("dogs/2", "three", 3), ("sums2", "12", "12"))]  # fmt: skip
    assert right == ["ok"] * 3


class CountingJudge:
    """Stands for ``judge.Judge``, whose own tests are in test_rewards_judge.py: here only who is asked what."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    async def score(self, *request: Any) -> dict[str, Any]:
        self.asked.append(request)
        return {"score": 0.5, "status": "wrong", "votes_for": 1}


def test_the_judges_answers_wait_in_no_worker() -> None:
    judge = CountingJudge()
    chat = replace(TASK, data_source="chat/helpful")
    config = RewardConfig(routes={"chat": "judge"}, weight=2.0, repetition=RepetitionConfig(weight=0.5, ngram=1))

    async def main() -> Verdict:
        async with RewardPool(config, judge) as pool:
            return await pool.score(chat, "so so")

    verdict = asyncio.run(main())
    assert judge.asked == [("so so", "12", {}, "9 + 3 =")]
    assert verdict.reward == Reward(0.75, "wrong", {"votes_for": 1.0, "repetition": -0.5, "answer": 0.5})
    assert verdict.verifier == "judge"


def test_shape_rewards_are_added_with_their_weights(user_config: RewardConfig) -> None:
    config = replace(user_config, weight=0.5, format=FormatConfig(weight=0.1, form="think"))

    async def work(pool: RewardPool) -> list[Verdict]:
        return [
            await pool.score(TASK, "12"),
            await pool.score(TASK, "9 and 3</think> 12", in_thinking=True),
            await pool.score(TASK, "nan"),
        ]

    bare, thought, none = run_pool(replace(config, retries=0), work)
    assert bare.reward == Reward(0.5, "ok", {"format": 0.0, "answer": 1.0, "user_format": 1.0})
    assert thought.reward == Reward(0.1, "wrong", {"format": 1.0, "answer": 0.0, "user_format": 1.0})
    assert math.isnan(none.reward.score) and none.reward.status == "error"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "no such file"),
        ("def compute_scores(): pass", "defines no function compute_score"),
        ("import no_such_module", r"cannot be imported: ModuleNotFoundError: .* \(reward.py:1\)"),
    ],
)
def test_a_file_that_cannot_be_used_stops_the_job_at_once(tmp_path: Path, source: str | None, message: str) -> None:
    path = tmp_path / "reward.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ConfigError, match=message):
        run_pool(RewardConfig(path=str(path)), lambda pool: pool.score(TASK, "1"))


def test_the_workers_imports_are_light() -> None:
    code = (
        "import sys, megarl.rewards.pool.worker; sys.exit(bool({'torch', 'sqlalchemy', 'reasoning_gym'} & "
        "set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ}).returncode == 0


def test_who_waits_for_a_worker_is_told_when_the_pool_closes_or_gets_stuck(
    user_config: RewardConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(user_config, timeout_s=60.0)

    async def close() -> list[Verdict]:
        async with asyncio.timeout(60):
            pool = await RewardPool(config).__aenter__()
            scoring = [asyncio.create_task(pool.score(TASK, "loop")) for _ in range(3)]
            await asyncio.sleep(0.2)
            await pool.close()
            return await asyncio.gather(*scoring)

    assert {verdict.reward.status for verdict in asyncio.run(close())} == {"error"}

    async def stuck() -> Verdict:
        async with asyncio.timeout(60), RewardPool(replace(config, timeout_s=0.2)) as pool:
            await pool.queue.take()  # its worker is lost to a fault of the pool
            return await pool.score(TASK, "12")

    monkeypatch.setattr(worker_queue, "STUCK_S", 0.1)
    verdict = asyncio.run(stuck())
    assert verdict.reward.status == "error" and "none has become free" in str(verdict.message)


def test_the_page_names_every_prefix_with_its_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    table = page.split("## Which verifier")[1].split("Rows are verl's")[0]
    rows = re.findall(r"^\| (`.*`) \| `(\w+)` \|", table, re.MULTILINE)
    listed = {prefix: family for prefixes, family in rows for prefix in re.findall(r"`([^`]+)`", prefixes)}
    assert {prefix.rstrip("/"): family for prefix, family in listed.items()} == ROUTES


def test_a_workflow_gives_scalars_of_numpy_and_torch_too() -> None:
    for one in (np.bool_(True), np.array(1.0), torch.tensor(1, dtype=torch.bfloat16)):
        assert recorded_reward(Reward(one, "ok", {"part": one})) == Reward(1.0, "ok", {"part": 1.0})
    with pytest.raises(TypeError, match=r"Reward.score must be a number, got tensor\(\[1\]\)"):
        Reward(torch.tensor([1]), "ok")


def test_a_worker_that_was_interrupted_in_sympy_is_replaced() -> None:
    """SymPy marks a property of an expression as unknown while it computes it, and keeps the mark."""
    program = (
        "import sys\nfrom megarl.rewards.math import verifier\nfrom megarl.rewards.pool import worker\n"
        "verifier.TIME_LIMIT_S = 0.2\nworker.serve(sys.stdin, sys.stdout)"
    )
    given = ["12", "\\boxed{12}", "\\boxed{e^{e^{e^{e^{e^x}}}}}"]
    row = {"data_source": "math", "ground_truth": "x^2", "extra_info": {}, "question": "", "in_thinking": False}
    scores = [{"score": {**row, "solution_str": text}} for text in given]
    lines = [json.dumps(request) for request in ({"config": {}}, *scores)]
    done = subprocess.run(
        [sys.executable, "-c", program], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert [reply.get("last", False) for reply in replies] == [False, False, False, True], done.stdout
