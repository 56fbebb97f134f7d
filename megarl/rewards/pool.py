"""Worker processes that score answers while others are still being generated. One that hangs or dies is replaced."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from types import TracebackType
from typing import Any, NamedTuple, Self

from megarl.config.schema import RewardConfig
from megarl.errors import ConfigError
from megarl.schema import Reward, Task

START_TIMEOUT_S = 120.0
"""For starting Python and importing a verifier on a loaded machine; the task's own limit is ``reward.timeout_s``."""
MAX_LINE_BYTES = 2**24


class Verdict(NamedTuple):
    """A reward and, for an error or timeout, what happened. Without a verdict the score is NaN, never a silent 0."""

    reward: Reward
    message: str | None = None
    reported: bool = False
    """The message is what the function itself returned as its status, not a failure of the function."""


class RewardPool:
    """``reward.workers`` processes. Use as an async context manager.

    Raises ConfigError on entering when ``reward.path`` cannot be used.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._workers = [_Worker(config.path) for _ in range(config.workers)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(worker.start() for worker in self._workers))
        except ConfigError:
            await self.close()
            raise
        for worker in self._workers:
            self._idle.put_nowait(worker)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every worker, busy or not."""
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    async def score(self, task: Task, text: str) -> Verdict:
        """Score one answer. Never raises for what the reward function does: that is the verdict's status."""
        worker = await self._idle.get()
        try:
            return await self._score_on(worker, task, text)
        finally:
            self._idle.put_nowait(worker)

    async def _score_on(self, worker: _Worker, task: Task, text: str) -> Verdict:
        request = {
            "data_source": task.data_source,
            "solution_str": text,
            "ground_truth": task.ground_truth,
            "extra_info": task.extra_info,
        }
        limit = START_TIMEOUT_S
        try:
            await worker.prepare(task.data_source)
            limit = self._config.timeout_s
            reply = await worker.ask({"score": request}, limit)
        except TimeoutError:
            return Verdict(Reward(math.nan, "timeout"), f"no verdict within {limit:g} s")
        except (_WorkerError, ConfigError) as error:
            return Verdict(Reward(math.nan, "error"), str(error))
        if reply["status"] in ("error", "timeout"):
            return Verdict(
                Reward(math.nan, reply["status"], reply["parts"]),
                f"the reward function reported {reply['status']}",
                reported=True,
            )
        return Verdict(Reward(reply["score"], reply["status"], reply["parts"]))


class _WorkerError(RuntimeError):
    """The function raised, or its process died."""


class _Worker:
    """One process and what it has imported. After a kill, the next use starts a new one."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._process: asyncio.subprocess.Process | None = None
        self._prepared: set[str] = set()
        self._loaded = False

    async def start(self) -> None:
        arguments = [str(os.getpid())] if self._path is None else [str(os.getpid()), self._path]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "megarl.rewards.worker", *arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_LINE_BYTES,
        )  # fmt: skip
        self._prepared = set()
        self._loaded = False
        try:
            await self._read(START_TIMEOUT_S)
        except TimeoutError as error:
            raise ConfigError(
                f"reward.path {self._path}: not loaded within {START_TIMEOUT_S:g} s; what it does when it is imported takes too long"
            ) from error
        except _WorkerError as error:
            await self.kill()
            raise ConfigError(str(error)) from error
        self._loaded = True

    async def prepare(self, data_source: str) -> None:
        """Make sure that a process runs and has imported this verifier, so that no task pays for it."""
        if self._process is None:
            await self.start()
        if data_source not in self._prepared:
            await self.ask({"prepare": data_source}, START_TIMEOUT_S)
            self._prepared.add(data_source)

    async def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One request and its reply. A worker that does not answer in time, or whose caller gives up, is killed."""
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError:
            pass  # it has died; the read below says how
        return await self._read(timeout_s)

    async def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            await self.kill()
            raise
        except ValueError as error:  # what follows of the line would pass for the next replies
            await self.kill()
            raise _WorkerError(f"the reward process answered with more than {MAX_LINE_BYTES} bytes") from error
        if not line:
            code = await self._process.wait()
            self._process = None
            doing = "while scoring" if self._loaded else f"while it loaded reward.path {self._path}"
            raise _WorkerError(f"the reward process ended with code {code} {doing}")
        reply = json.loads(line)
        if "error" in reply:
            raise _WorkerError(reply["error"])
        return reply

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
