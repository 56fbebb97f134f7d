"""Send HTTP requests to the servers of a model: with retries, limited concurrency, and errors that hide the key."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

import aiohttp

from megarl.core.errors import ConfigError

BACKOFF_S = 0.5
"""Seconds before the first retry; doubled for each further one, times a random 0.5 to 1.5."""
MAX_WAIT_S = 60.0
REFUSALS = (400, 413, 422)
"""HTTP statuses with which a server refuses a request's content."""

T = TypeVar("T")


class RequestFailed(RuntimeError):
    """A request got no usable reply after all retries."""

    def __init__(
        self,
        message: str,
        status: Literal["error", "timeout"] = "error",
        wait_s: float | None = 0.0,
        *,
        away: bool = False,
        http_status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.wait_s = wait_s
        """Seconds until a retry; None if a retry is useless."""
        self.away = away
        """True if one of the job's engines is down or has no weights yet, because it is being replaced."""
        self.http_status = http_status
        """HTTP status of the reply; None without a reply, or for a reply of status 200 that cannot be used."""

    @property
    def refused(self) -> bool:
        """True if the server refuses the request's content, for example because it is too long."""
        return self.http_status in REFUSALS


class RequestLimits(Protocol):
    """Settings of requests to a server."""

    @property
    def concurrency(self) -> int:
        """Most requests in flight."""

    @property
    def timeout_s(self) -> float:
        """Timeout in seconds of one request."""

    @property
    def retries(self) -> int:
        """Retries of a failed request."""


class ModelServer:
    """OpenAI-compatible servers of one model, used in turn.

    Args:
        name: Name of the model in messages, for example "the judge".
        setting: Section of its settings, for messages.
        key_variable: Environment variable with its key, for messages.
        bases: Returns the current base URLs of the servers, at least one.
        key: Sent as bearer token; None for none.
        engine_timeout_s: Seconds to wait for one of the job's own engines that is being replaced.
    """

    def __init__(
        self,
        name: str,
        setting: str,
        key_variable: str,
        bases: Callable[[], Sequence[str]],
        key: str | None,
        config: RequestLimits,
        engine_timeout_s: float = 0.0,
    ) -> None:
        self._name, self._setting, self._key_variable = name, setting, key_variable
        self._bases = bases
        self._turns = itertools.count()
        self._key = key
        self._config = config
        self._engine_timeout_s = engine_timeout_s
        self._slots = asyncio.Semaphore(config.concurrency)
        self._session: aiohttp.ClientSession | None = None
        self.counts: Counter[str] = Counter()
        """Requests and retries."""

    def open(self) -> None:
        """Open the connections' session, in the event loop that uses it."""
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=aiohttp.ClientTimeout(total=self._config.timeout_s),
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def models(self) -> dict[str, int | None]:
        """Return the name of each model of the server -> its most tokens; None if the server does not name them.

        Raises ConfigError if it has no model.
        """
        try:
            names = await self.request(
                "GET", "/models", None, lambda answer: {str(e["id"]): e.get("max_model_len") for e in answer["data"]}
            )
        except RequestFailed as failure:
            raise ConfigError(
                f"{failure}; correct the URL or the key ({self._key_variable}), or set {self._setting}.model"
            ) from failure
        if not names:
            raise ConfigError(
                f"{self._setting}.url={self._bases()[0]} has no models; set {self._setting}.model, or start one there"
            )
        return names

    async def request(self, method: str, path: str, body: dict[str, Any] | None, read: Callable[[Any], T]) -> T:
        """Return ``read`` of the response's JSON. A request whose connection or server fails goes to the next base URL.

        Raises RequestFailed.
        """
        attempt, until = 0, time.monotonic() + self._engine_timeout_s
        while True:
            self.counts["requests"] += 1
            self.counts["retries"] += attempt > 0
            try:
                async with self._slots:
                    return await self._once(method, self._next_base() + path, body, read)
            except RequestFailed as failure:
                waiting = failure.away and time.monotonic() < until
                if failure.wait_s is None or (attempt >= self._config.retries and not waiting):
                    raise
                backoff = BACKOFF_S * 2.0 ** min(attempt, 3 if waiting else attempt) * random.uniform(0.5, 1.5)
                attempt += 1
                await asyncio.sleep(min(MAX_WAIT_S, max(backoff, failure.wait_s)))

    def _next_base(self) -> str:
        bases = self._bases()
        return bases[next(self._turns) % len(bases)]

    async def _once(self, method: str, url: str, body: dict[str, Any] | None, read: Callable[[Any], T]) -> T:
        assert self._session is not None, "open() comes first"
        try:
            # No redirects: they would send texts and the key to a server that the settings do not name.
            async with self._session.request(method, url, json=body, allow_redirects=False) as answer:
                text = (await answer.read()).decode(errors="replace")
                status, wait_s = answer.status, _retry_after(answer.headers.get("Retry-After"))
        except TimeoutError:
            raise RequestFailed(
                f"{self._name} at {url} gave no answer within {self._config.timeout_s:g} s", "timeout"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed(
                self._hide(f"{self._name} at {url} cannot be reached: {type(error).__name__}: {error}"), away=True
            ) from None
        if status != 200:
            again = status in (408, 429) or status >= 500
            raise RequestFailed(
                self._hide(f"{self._name} at {url} answered {status}: {text[:300]}"),
                wait_s=wait_s if again else None,
                away=status == 503,
                http_status=status,
            )
        try:
            return read(json.loads(text))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise RequestFailed(
                self._hide(f"{self._name} at {url} answered what is no reply: {text[:300]!r}")
            ) from None

    def _hide(self, text: str) -> str:
        """Remove the key from a server's message."""
        return text.replace(self._key, "***") if self._key else text


def check_url(setting: str, url: str, key_variable: str, what: str = "") -> None:
    """Raise ConfigError unless ``url`` is a base URL without a password.

    Args:
        key_variable: Environment variable for the server's key.
        what: Other values of the setting, for the message, for example " or rollout".
    """
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ConfigError(f"{setting} holds a user or password; put the key into the environment, {key_variable}")
    path = parts.path.rstrip("/")
    if parts.scheme not in ("http", "https") or not parts.hostname or path.endswith("/completions"):
        raise ConfigError(
            f"{setting}={url!r} is no base URL; write http://HOST:PORT/v1 (what stands before /chat/completions or "
            f"/completions){what}"
        )


def _retry_after(header: str | None) -> float:
    """Return the seconds of the header, or until its date; 0 if missing or invalid."""
    if header is None:
        return 0.0
    with contextlib.suppress(ValueError):
        seconds = float(header)
        return seconds if 0 <= seconds < float("inf") else 0.0
    with contextlib.suppress(ValueError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return 0.0
