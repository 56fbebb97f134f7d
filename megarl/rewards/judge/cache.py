"""Cache of judgements in one SQLite file, shared by processes and safe against kills."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megarl.core.errors import ConfigError
from megarl.core.text import without_surrogates

log = logging.getLogger(__name__)

BUSY_S = 60.0
"""Lock timeout in seconds of writers; each write takes milliseconds."""


class JudgementCache:
    """Cache of verdicts by key. The replies are stored for inspection (``SELECT result, replies FROM judgements``).

    Each write is one transaction with SQLite's ordinary journal. A separate thread reads and writes, so that an event
    loop does not wait for the disk. If the file fails later, the error is logged and the judge goes on without the
    cache.

    Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
            self._connection.execute("PRAGMA synchronous=NORMAL")
            with self._connection:
                self._connection.execute(
                    "CREATE TABLE IF NOT EXISTS judgements (key TEXT PRIMARY KEY, result TEXT NOT NULL, replies TEXT "
                    "NOT NULL) WITHOUT ROWID"
                )
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(
                f"reward.judge.cache={path}: cannot be opened ({error}); remove the file, or choose another path or "
                "null"
            ) from error
        self._thread = ThreadPoolExecutor(1, "judge-cache")

    async def get(self, key: str) -> dict[str, Any] | None:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._get, key)

    async def put(self, key: str, result: dict[str, Any], replies: Sequence[str]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._put, key, result, list(replies))

    def _get(self, key: str) -> dict[str, Any] | None:
        try:
            row = self._connection.execute("SELECT result FROM judgements WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            log.warning("reward.judge.cache=%s cannot be read: %s", self._path, error)
            return None
        return None if row is None else json.loads(row[0])

    def _put(self, key: str, result: dict[str, Any], replies: list[str]) -> None:
        row = (key, json.dumps(result), without_surrogates(json.dumps(replies, ensure_ascii=False)))
        try:
            with self._connection:
                self._connection.execute("INSERT OR REPLACE INTO judgements VALUES (?, ?, ?)", row)
        except sqlite3.Error as error:
            log.warning("reward.judge.cache=%s cannot be written: %s", self._path, error)

    def close(self) -> None:
        """Finish pending writes, then close."""
        self._thread.shutdown()
        self._connection.close()
