"""Environments of an OpenEnv server (BSD): ``rollout.environment=openenv``, over its WebSocket protocol.

Written for openenv-core 0.3.0, which need not be installed here. Each connection is one episode.
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
from megarl.core.text import without_thought
from megarl.explore.environments.types import Observation, checked, refuse

T = TypeVar("T")
OPTIONS = {"url": str, "action": str, "observation": str}
"""``url``: of the server, http or ws; ``action``: field of an action for the response; ``observation``: field of an
observation with its text."""
MESSAGE_BYTES = 100 * 2**20
"""Longest message, as in OpenEnv's own client."""
CHECK_S = 30.0


class Connections:
    """Event loop of all connections, in a separate thread, so that they are read while a model samples."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for its result."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="openenv", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


CONNECTIONS = Connections()


class Connection:
    """Connection to a server, read continuously: aiohttp replies to pings only while it receives, and servers close
    connections without replies."""

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
        """Send a message and return the data of the reply. Raises ConnectionError, or RuntimeError for a server's
        error."""
        with suppress(ConnectionError):  # messages before the close give the reason, e.g. no free place
            await self._socket.send_json(message)
        given = await self._messages.get()
        if given.type is not aiohttp.WSMsgType.TEXT:
            self._messages.put_nowait(given)  # keep the last message for later calls
            raise ConnectionError(f"the OpenEnv server has closed the connection ({given.data}: {given.extra})")
        found = json.loads(given.data)
        if found["type"] == "error":
            code, text = found["data"].get("code"), found["data"].get("message")
            hint = "; raise the server's max_concurrent_envs" if code == "CAPACITY_REACHED" else ""
            raise RuntimeError(f"OpenEnv: {code}: {text}{hint}")
        return dict(found["data"])

    async def close(self) -> None:
        """Close the connection; callers waiting for a reply get an error."""
        try:
            await self._socket.close()
            await self._reader
        finally:
            await self._session.close()

    async def _read(self) -> None:
        """Queue received messages until the connection ends."""
        more = True
        while more:
            try:
                message = await self._socket.receive()
            except Exception as error:  # in replying to a ping
                message = aiohttp.WSMessage(aiohttp.WSMsgType.ERROR, error, None)
            more = message.type is aiohttp.WSMsgType.TEXT
            self._messages.put_nowait(message)


class OpenEnv:
    """One episode.

    Args:
        task: ``ground_truth`` and ``extra_info`` are arguments of the environment's ``reset``, filtered by its
            parameters.
        group_seed: ``seed`` of ``reset``: all trajectories of a task begin in one state.
        options: See ``OPTIONS``.
    """

    def __init__(self, task: Task, group_seed: int, options: Mapping[str, Any]) -> None:
        self._action = options.get("action", "message")
        self._field = options.get("observation")
        self._reset = {**task.extra_info, "ground_truth": task.ground_truth, "seed": group_seed}
        self._connection = CONNECTIONS.run(Connection.to(options["url"]))

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Raise ConfigError unless a server with these actions and observations replies."""
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
        """Reset the environment; an empty text adds nothing to the task's prompt."""
        return self._text(self._ask("reset", self._reset))

    def step(self, response: str) -> Observation:
        """Take an action with the response as one field."""
        given = self._ask("step", {self._action: without_thought(response)})
        return Observation(self._text(given), float(given.get("reward") or 0.0), done=bool(given.get("done")))

    def kill(self) -> None:
        """Close the connection, so that a waiting call raises."""
        CONNECTIONS.run(self._connection.close())

    def close(self) -> None:
        """Close the connection; the server closes the environment."""
        CONNECTIONS.run(self._connection.close())

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        return CONNECTIONS.run(self._connection.ask({"type": kind, "data": data}))

    def _text(self, given: Mapping[str, Any]) -> str:
        """Return the text of an observation; null is an empty text."""
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
    """Return the http address of a path of the server; WebSockets start with http too."""
    parts = urlsplit(url)
    scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
    return parts._replace(scheme=scheme, path=f"{parts.path.rstrip('/')}/{path}").geturl()
