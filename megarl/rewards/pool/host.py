"""``megarl rewards serve``: worker processes for a job's pool on another machine. Each connection has one process,
which ends with it.

Both sides first prove that they know the key (``processes/secrets.py``); no process starts before. Then lines are
forwarded unchanged, in the protocol of ``worker.py``. A last line reports a process that has computed for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable

from megarl.core.processes import heartbeat, secrets
from megarl.rewards.pool.child import PrintedOutput, RewardProcess
from megarl.rewards.pool.process import (
    CALLER,
    CONNECT_S,
    CPU_SPENT,
    HOST,
    MAX_LINE_BYTES,
    START_TIMEOUT_S,
    keep_alive,
    send_line,
)

log = logging.getLogger(__name__)

MIN_KEY = 16
LEFT = ""
"""Answer to a caller that leaves without a proof, as a supervisor does to see whether the host listens."""
GREETING_BYTES = 2**14
"""Maximum bytes of the proof line, which this process buffers for an unauthenticated client."""


class RewardHost:
    """Accepts connections until closed. Use as an async context manager.

    Args:
        port: 0 selects a free port, see ``port``.
        workers: Maximum concurrent processes; further connections are refused with the reason.
        output: Receives what reward functions print; by default it goes to stderr.

    Raises:
        ValueError: the key is shorter than 16 characters.
        OSError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, key: str, workers: int, output: PrintedOutput | None = None) -> None:
        if len(key) < MIN_KEY:
            raise ValueError(f"the key of a reward host must have at least {MIN_KEY} characters")
        self._address = (host, port)
        self._key = key
        self._most = workers
        self._output = output
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> RewardHost:
        self._server = await asyncio.start_server(self._accept, *self._address, limit=GREETING_BYTES, reuse_port=True)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    @property
    def busy(self) -> int:
        """Number of running processes."""
        return len(self._open)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            keep_alive(writer)
            refusal = await self._refusal(reader, writer)
            if refusal is None:
                task = asyncio.current_task()
                assert task is not None
                self._open.add(task)
                try:
                    await self._serve(reader, writer)
                finally:
                    self._open.discard(task)
            elif refusal is not LEFT:
                log.warning("%s: %s", writer.get_extra_info("peername"), refusal)
                await send_line(writer, error=refusal)
        except OSError as error:
            log.warning("%s: %s", writer.get_extra_info("peername"), error)
        finally:
            writer.close()

    async def _refusal(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
        """Check the caller's proof and send this host's. Return the reason for a refusal, ``LEFT``, or None."""
        mine = secrets.challenge()
        with contextlib.suppress(ValueError, TypeError, KeyError, TimeoutError, RecursionError):
            async with asyncio.timeout(CONNECT_S):
                await send_line(writer, challenge=mine)
                try:
                    line = await reader.readline()
                except ConnectionError:
                    return LEFT
                if not line:
                    return LEFT
                greeting = json.loads(line)
                if secrets.is_proof(greeting["proof"], self._key, mine, CALLER):
                    await send_line(writer, proof=secrets.prove(self._key, str(greeting["challenge"]), HOST))
                    return f"all {self._most} workers are taken" if self.busy >= self._most else None
        return "wrong key"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        process = await RewardProcess.start(MAX_LINE_BYTES, self._output)
        ways = [asyncio.create_task(_copy(reader, process.writer)), asyncio.create_task(_copy(process.reader, writer))]
        try:
            writer.write(b'{"ready": true}\n')
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)  # the caller left, or the process ended
            if ways[1].done() and await process.status() == CPU_SPENT:
                await send_line(writer, spent=True)
        finally:
            for way in ways:
                way.cancel()
            await process.end()  # kills before it waits, so that a cancellation here leaves no process behind
            await asyncio.gather(*ways, return_exceptions=True)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        target.write(data)
        async with asyncio.timeout(START_TIMEOUT_S):  # a client that does not read is stuck or gone
            await target.drain()


async def serve(
    host: str, port: int, key: str, workers: int, started: Callable[[int], None], output: PrintedOutput | None = None
) -> None:
    """Serve until cancelled; calls ``started`` with the port."""
    try:
        async with RewardHost(host, port, key, workers, output) as service:
            started(service.port)
            await heartbeat.beat_periodically()
    finally:
        if output is not None:
            output.close()
