"""Environments that an OpenEnv server has (BSD): ``rollout.environment=openenv``, over its WebSocket protocol.

Written for openenv-core 0.3.0, which need not be installed here. A connection is an episode.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from megarl.core.errors import describe
from megarl.core.schema import Task
from megarl.core.thoughts import without_thought
from megarl.explore.environments.options import checked, refuse
from megarl.explore.environments.types import Observation

T = TypeVar("T")
OPTIONS = {"url": str, "action": str, "observation": str}
"""``url``: of the server, http or ws; ``action``: field of an action that has the response; ``observation``: field of
an observation that has its text."""
MESSAGE_BYTES = 100 * 2**20
"""Longest message, as in OpenEnv's own client."""
CHECK_S = 30.0


class Connections:
    """Event loop of all connections, in a thread of its own, so that each is read while a model is asked."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in the loop, and wait."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="openenv", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


CONNECTIONS = Connections()


class Connection:
    """Connection to a server, which is always being read: aiohttp answers pings only while it receives, and servers
    close a connection that does not answer for some seconds."""

    def __init__(self, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._session = session
        self._socket = socket
        self._messages: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def to(cls, url: str) -> Connection:
        """Connect to a server."""
        session = aiohttp.ClientSession()
        try:
            return cls(session, await session.ws_connect(_at(url, "ws"), max_msg_size=MESSAGE_BYTES))
        except BaseException:
            await session.close()
            raise

    async def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of the reply. Raises ConnectionError, RuntimeError for an error of the
        server's."""
        with suppress(ConnectionError):  # what was read before the end says why, such as that all places are taken
            await self._socket.send_json(message)
        given = await self._messages.get()
        if given.type is not aiohttp.WSMsgType.TEXT:
            self._messages.put_nowait(given)  # the last one, for whoever asks again
            raise ConnectionError(f"the OpenEnv server has closed the connection ({given.data}: {given.extra})")
        found = json.loads(given.data)
        if found["type"] == "error":
            code, text = found["data"].get("code"), found["data"].get("message")
            hint = "; raise the server's max_concurrent_envs" if code == "CAPACITY_REACHED" else ""
            raise RuntimeError(f"OpenEnv: {code}: {text}{hint}")
        return dict(found["data"])

    async def close(self) -> None:
        """Close; who waits for a reply gets an error."""
        try:
            await self._socket.close()
            await self._reader
        finally:
            await self._session.close()

    async def _read(self) -> None:
        """Hand messages over, until there are no more."""
        more = True
        while more:
            try:
                message = await self._socket.receive()
            except Exception as error:  # in answering a ping
                message = aiohttp.WSMessage(aiohttp.WSMsgType.ERROR, error, None)
            more = message.type is aiohttp.WSMsgType.TEXT
            self._messages.put_nowait(message)


class OpenEnv:
    """One episode.

    Args:
        task: ``ground_truth`` and ``extra_info`` are arguments of the environment's ``reset``, which takes those that
            it has parameters for.
        group_seed: Its ``seed``: all trajectories of a task begin in one state.
        options: See ``OPTIONS``.
    """

    def __init__(self, task: Task, group_seed: int, options: Mapping[str, Any]) -> None:
        self._action = options.get("action", "message")
        self._field = options.get("observation")
        self._reset = {**task.extra_info, "ground_truth": task.ground_truth, "seed": group_seed}
        self._connection = CONNECTIONS.run(Connection.to(options["url"]))

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Raise ConfigError unless a server with such actions and observations answers."""
        checked("openenv", options, OPTIONS, {"url": "http://127.0.0.1:8000"})
        url = options["url"]
        try:
            schema = asyncio.run(_schema(url))
        except Exception as error:
            refuse("url", url, f"has no OpenEnv server: {describe(error)}; start it before the job")
        for name, value, kind in (
            ("action", options.get("action", "message"), "action"),
            ("observation", options.get("observation"), "observation"),
        ):
            fields = list(schema[kind].get("properties", {}))
            if value is not None and value not in fields:
                refuse(name, value, f"is no field of the {kind}s of {url}, which have {', '.join(fields)}")

    def reset(self) -> str:
        """Begin; an empty text adds nothing to the task's prompt."""
        return self._text(self._ask("reset", self._reset))

    def step(self, response: str) -> Observation:
        """Act: the response is one field of the action."""
        given = self._ask("step", {self._action: without_thought(response)})
        return Observation(self._text(given), float(given.get("reward") or 0.0), done=bool(given.get("done")))

    def kill(self) -> None:
        """End what a call waits for, which then raises."""
        CONNECTIONS.run(self._connection.close())

    def close(self) -> None:
        """Close the connection; the server closes the environment."""
        CONNECTIONS.run(self._connection.close())

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        return CONNECTIONS.run(self._connection.ask({"type": kind, "data": data}))

    def _text(self, given: Mapping[str, Any]) -> str:
        """Text of an observation; null is an empty one."""
        seen = given["observation"]
        if self._field is None:
            return json.dumps(seen)
        text = seen[self._field]
        return "" if text is None else str(text)


async def _schema(url: str) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=CHECK_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(_at(url, "schema")) as response:
        response.raise_for_status()
        return dict(await response.json())


def _at(url: str, path: str) -> str:
    """Address of a path of the server, over http: a WebSocket begins so too."""
    parts = urlsplit(url)
    scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
    return parts._replace(scheme=scheme, path=f"{parts.path.rstrip('/')}/{path}").geturl()
