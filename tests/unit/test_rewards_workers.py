"""Reward workers that die, are killed or run on another host: no answer is lost, none is scored twice."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.config.rewards import RewardConfig
from megarl.core.errors import ConfigError
from megarl.core.schema import Reward
from megarl.rewards import RewardPool, Verdict
from megarl.rewards.pool import pool as worker_queue
from megarl.rewards.pool import process as reward_process
from megarl.rewards.pool.child import RewardProcess
from megarl.rewards.pool.host import RewardHost
from tests.unit.test_rewards import KEY, TASK, run_pool

FLAKY = """
import asyncio, os, pathlib, signal, time
FOLDER = pathlib.Path(__file__).parent
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    with (FOLDER / "log").open("a") as log: log.write(solution_str + "\\n")
    tries = (FOLDER / "log").read_text().split().count(solution_str)
    if solution_str == "once" and tries == 1: raise OSError("for a moment")
    if solution_str == "poison": os.kill(os.getpid(), signal.SIGKILL)
    if solution_str.startswith("item"): time.sleep(0.002)
    while solution_str.startswith("held") and not (FOLDER / "go").exists(): time.sleep(0.01)
    return float(solution_str == ground_truth)
"""


@pytest.fixture
def flaky(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text(FLAKY)
    return path


def test_an_async_function_and_a_second_try(flaky: Path) -> None:
    async def work(pool: RewardPool) -> list[Verdict]:
        return [await pool.score(TASK, text) for text in ("12", "once")]

    right, once = run_pool(RewardConfig(path=str(flaky)), work)
    assert (right.reward, right.tries) == (Reward(1.0, "ok"), 1)
    assert (once.reward, once.tries, once.message) == (Reward(0.0, "wrong"), 2, None)
    (flaky.parent / "log").unlink()
    once = run_pool(RewardConfig(path=str(flaky), retries=0), lambda pool: pool.score(TASK, "once"))
    assert once.reward.status == "error" and once.message.startswith("OSError: for a moment")


def test_a_poisoned_answer_is_quarantined(flaky: Path) -> None:
    async def work(pool: RewardPool) -> list[Verdict]:
        return [await pool.score(TASK, text) for text in ("poison", "12", "poison")]

    poison, good, again = run_pool(RewardConfig(path=str(flaky), workers=2, retries=9, max_kills=2), work)
    assert (
        poison.kills == 2
        and "quarantined after 2 reward processes: the reward process ended with code -9" in poison.message
    )
    assert good.reward == Reward(1.0, "ok")
    assert again.tries == 0 and again.reward.status == "error" and math.isnan(again.reward.score)
    assert (flaky.parent / "log").read_text().split().count("poison") == 2


def test_workers_that_were_killed_while_idle_are_nobodys_fault(flaky: Path) -> None:
    async def work(pool: RewardPool) -> list[Verdict]:
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        while any(worker.up for worker in pool.workers):
            await asyncio.sleep(0.01)
        return await asyncio.gather(*(pool.score(TASK, "12") for _ in range(4)))

    verdicts = run_pool(RewardConfig(path=str(flaky), workers=2, retries=0, max_kills=1), work)
    assert [(v.reward.status, v.kills) for v in verdicts] == [("ok", 0)] * 4


def test_killing_half_of_the_workers_again_and_again_loses_no_item_and_scores_none_twice(flaky: Path) -> None:
    items, killed = 2000, 0

    async def work(pool: RewardPool) -> dict[str, list[Verdict]]:
        nonlocal killed
        found: dict[str, list[Verdict]] = {}

        async def one(name: str) -> None:
            found.setdefault(name, []).append(await pool.score(TASK, name))

        scoring = [asyncio.create_task(one(f"item{i}")) for i in range(items)]
        for wanted in (300, 700, 1100, 1500):
            while sum(map(len, found.values())) < wanted:
                await asyncio.sleep(0.005)
            for pid in pool.pids[:2]:
                os.kill(pid, signal.SIGKILL)
                killed += 1
        await asyncio.gather(*scoring)
        until = time.monotonic() + 30
        while len(pool.pids) < 4 and time.monotonic() < until:
            await asyncio.sleep(0.05)
        assert len(pool.pids) == 4, "the dead are replaced, whether or not there is work for them"
        return found

    found = run_pool(RewardConfig(path=str(flaky), workers=4, retries=0), work)
    assert killed == 8
    assert {name: [v.reward.status for v in verdicts] for name, verdicts in found.items()} == {
        f"item{i}": ["wrong"] for i in range(items)
    }
    runs = (flaky.parent / "log").read_text().split()
    again = len(runs) - len(set(runs))
    assert again <= sum(v[0].kills for v in found.values()) <= killed, "only what a killed worker had in hand ran again"


def test_a_worker_that_cannot_have_a_verifier_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two workers one has no such package: it is free first again and again, and every answer is the other's."""
    monkeypatch.setattr(worker_queue, "REVIVE_DELAYS_S", (0.05, 0.05))

    class Unfit(RewardHost):
        async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b'{"ready": true}\n')
            while line := await reader.readline():
                asked.append("prepare" if b'"prepare"' in line else "other")
                writer.write(
                    b'{"error": "no module", "of_row": false}\n' if b'"prepare"' in line else b'{"ready": true}\n'
                )

    async def main(routes: dict[str, str]) -> list[Verdict]:
        async with Unfit("127.0.0.1", 0, KEY, workers=1) as host:
            config = RewardConfig(hosts=[f"127.0.0.1:{host.port}"], routes=routes, retries=0)
            async with RewardPool(config, key=KEY) as pool:
                return await asyncio.gather(*(pool.score(TASK, f"{n} <answer>12</answer>") for n in range(40)))

    asked: list[str] = []
    assert [(v.reward.status, v.tries, v.kills) for v in asyncio.run(main({}))] == [("ok", 1, 0)] * 40
    assert asked.count("prepare") == 3, "one answer met it, and two attempts to bring it up again"
    found = asyncio.run(main({"reasoning_gym": "vision/no_such"}))
    assert {v.reward.status for v in found} == {"error"} and "no_such" in str(found[0].message), (
        "a fault of the row is no worker's"
    )


def worker_processes() -> list[psutil.Process]:
    """Of this process; other tests may have left children of other kinds."""
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it ends just now: a zombie is one of them to psutil
            if "megarl.rewards.pool.worker" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_workers_of_another_host_score_and_are_replaced_like_our_own(flaky: Path) -> None:
    """One process here, three there, which are killed in the middle; then the host itself goes away for a moment."""

    async def main() -> tuple[list[Verdict], int]:
        async with RewardHost("127.0.0.1", 0, KEY, workers=3) as host:
            port = host.port
            config = RewardConfig(path=str(flaky), hosts=[f"127.0.0.1:{port}*3"], retries=0)
            async with RewardPool(config, key=KEY) as pool:
                assert host.busy == 3
                ours, children = set(pool.pids), {p.pid for p in worker_processes()}
                texts = [f"item{i}" for i in range(25)] + [f"held{i}" for i in range(75)]
                scoring = [asyncio.create_task(pool.score(TASK, text)) for text in texts]
                log = flaky.parent / "log"
                while not log.exists() or log.read_text().count("held") < 4:  # each process has one in hand
                    await asyncio.sleep(0.005)
                for pid in children - ours:
                    os.kill(pid, signal.SIGKILL)
                (flaky.parent / "go").touch()
                found = await asyncio.gather(*scoring)
                return found, len(children - ours)

    found, remote = asyncio.run(main())
    assert remote == 3
    assert [v.reward.status for v in found] == ["wrong"] * 100
    assert sum(v.kills for v in found) == 3
    _, alive = psutil.wait_procs(worker_processes(), timeout=10)  # killed, but not yet gone
    assert not alive


def test_answers_outlive_a_host_and_end_with_the_last_worker(flaky: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host goes: what it had in hand is scored here. Then our own file goes, and the processes with it: errors, no
    waiting."""
    monkeypatch.setattr(worker_queue, "REVIVE_DELAYS_S", (0.0, 0.05))

    async def main() -> tuple[list[Verdict], Verdict]:
        async with RewardHost("127.0.0.1", 0, KEY, workers=3) as host:
            pool = RewardPool(RewardConfig(path=str(flaky), hosts=[f"127.0.0.1:{host.port}*3"], retries=0), key=KEY)
            await pool.__aenter__()
            scoring = [asyncio.create_task(pool.score(TASK, f"item{i}")) for i in range(200)]
            while sum(task.done() for task in scoring) < 40:
                await asyncio.sleep(0.005)
        found = await asyncio.gather(*scoring)
        flaky.unlink()
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        last = await asyncio.wait_for(pool.score(TASK, "12"), 60)
        await pool.close()
        return found, last

    found, last = asyncio.run(main())
    assert [v.reward.status for v in found] == ["wrong"] * 200 and sum(v.kills for v in found) <= 3
    assert last.reward.status == "error" and "no reward process comes up" in str(last.message)


def test_a_host_on_a_busy_machine_has_time_to_start_a_process(flaky: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_process, "CONNECT_S", 2.0)
    start = RewardProcess.start

    async def late(*args: Any) -> RewardProcess:
        await asyncio.sleep(2.5)
        return await start(*args)

    monkeypatch.setattr(RewardProcess, "start", late)

    async def main() -> None:
        async with (
            RewardHost("127.0.0.1", 0, KEY, workers=1) as host,
            RewardPool(RewardConfig(path=str(flaky), hosts=[f"127.0.0.1:{host.port}"]), key=KEY),
        ):
            pass

    asyncio.run(main())


def test_a_look_whether_a_host_listens_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with RewardHost("127.0.0.1", 0, KEY, workers=1) as host:
            for waits in (False, True):
                reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
                if waits:
                    await reader.readline()
                writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
            writer.write(b"{}\n")
            while b"wrong key" not in await reader.readline():
                pass
            writer.close()

    asyncio.run(main())
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == ["wrong key"]


def test_a_host_that_is_not_there_or_has_another_key_is_named(flaky: Path) -> None:
    async def enter(port: int, key: str) -> None:
        async with RewardPool(RewardConfig(path=str(flaky), hosts=[f"127.0.0.1:{port}"]), key=key):
            pass

    async def main() -> None:
        async with RewardHost("127.0.0.1", 0, KEY, workers=1) as host:
            with pytest.raises(ConfigError, match=f"127.0.0.1:{host.port} gives no worker: wrong key"):
                await enter(host.port, "another key of this length")
            async with RewardPool(RewardConfig(path=str(flaky), hosts=[f"127.0.0.1:{host.port}"]), key=KEY):
                with pytest.raises(ConfigError, match="all 1 workers are taken"):
                    await enter(host.port, KEY)
        with pytest.raises(ConfigError, match="cannot be reached .* is `megarl rewards serve` up there"):
            await enter(host.port, KEY)

    asyncio.run(main())
    with pytest.raises(ValueError, match="at least 16 characters"):
        RewardHost("127.0.0.1", 0, "short", 1)


@pytest.mark.parametrize("reply", [b"<html>\n", b"[" * 5000 + b"\n", b"[1]\n", b"{}\n", b'{"score": 1}\n'], ids=str)
def test_a_host_that_sends_no_reply_costs_no_thread_of_the_pool(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the score, and of the next connection: whoever waits gets an error."""
    monkeypatch.setattr(worker_queue, "REVIVE_DELAYS_S", (0.0, 0.01))

    class Broken(RewardHost):
        async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b'{"ready": true}\n')
            while line := await reader.readline():
                writer.write(reply if b'"score": {' in line or len(seen) > 2 else b'{"ready": true}\n')
                seen.append(line)

    seen: list[bytes] = []

    async def main() -> list[Verdict]:
        async with asyncio.timeout(60), Broken("127.0.0.1", 0, KEY, workers=1) as host:
            config = RewardConfig(hosts=[f"127.0.0.1:{host.port}"], workers=0, retries=0)
            async with RewardPool(config, key=KEY) as pool:
                return [await pool.score(TASK, "12") for _ in range(2)]

    assert [verdict.reward.status for verdict in asyncio.run(main())] == ["error"] * 2


@pytest.mark.parametrize(
    "sent",
    [b"[" * 5000 + b"\n", b"x" * 200_000, b'{"proof": "\\ud800"}\n', b'{"proof": 3}\n', b"\xff\n", b"3\n"],
    ids=["nested", "huge", "surrogates", "number", "no text", "no object"],
)
def test_an_unauthenticated_client_of_a_host_is_refused_whatever_it_sends(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> bytes:
        async with asyncio.timeout(60), RewardHost("127.0.0.1", 0, KEY, workers=1) as host:
            reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
            assert b"challenge" in await reader.readline()
            writer.write(sent)
            try:
                return await reader.readline()
            except ConnectionResetError:  # it had not read all of it
                return b"wrong key"
            finally:
                writer.close()

    assert b"wrong key" in asyncio.run(main())
    assert "Unhandled" not in caplog.text and "Traceback" not in caplog.text


def test_whoever_listens_at_the_address_of_a_host_learns_neither_key_nor_settings() -> None:
    seen = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"challenge": "0"}\n')
        seen.extend(await reader.readline())
        writer.write(b'{"proof": "0"}\n{"ready": true}\n')
        with suppress(ConnectionResetError):
            seen.extend(await reader.read())
        writer.close()
        left.set()

    async def main() -> None:
        async with asyncio.timeout(60), await asyncio.start_server(listen, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            worker = reward_process.Worker(RewardConfig(), reward_process.RemoteRewardProcess(f"127.0.0.1:{port}", KEY))
            with pytest.raises(
                reward_process.WorkerDied, match=rf"127\.0\.0\.1:{port} gives no worker: it has another key"
            ):
                await worker.ready()
            await worker.kill()
            await left.wait()

    left = asyncio.Event()
    asyncio.run(main())
    assert b"proof" in seen and KEY.encode() not in seen and b"config" not in seen


def test_a_malformed_request_is_an_error_of_one_line() -> None:
    """After authentication, where a worker process reads what the client sends."""

    async def main() -> list[dict[str, Any]]:
        async with asyncio.timeout(60), RewardHost("127.0.0.1", 0, KEY, workers=1) as host:
            worker = reward_process.Worker(
                RewardConfig(), reward_process.RemoteRewardProcess(f"127.0.0.1:{host.port}", KEY)
            )
            await worker.ready()
            assert worker.reader is not None and worker.writer is not None
            replies = []
            for line in (
                b"[" * 5000,
                b"3",
                b"{",
                b"\xff",
                b"{}",
                b'{"score": 3}',
                b'{"prepare": "reasoning_gym/chain_sum"}',
            ):
                worker.writer.write(line + b"\n")
                replies.append(json.loads(await worker.reader.readline()))
            connection = worker.writer.get_extra_info("socket")
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), "a host that vanished is noticed"
            await worker.kill()
            return replies

    *errors, last = asyncio.run(main())
    assert all("\n" not in reply["error"] for reply in errors) and len(errors) == 6
    assert last == {"id": None, "ready": True}, "it lives"
