"""Messages between trainer ranks during a weight sync, through the key-value store of the link."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from megarl.core.errors import WeightsDiffer, WeightSyncError
from megarl.engines.sync.link import LinkAddress, open_store


class RankMessages:
    """One trainer rank's messages. Rank 0 serves the store, and removes keys when every rank has read them."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self.timeout_s = timeout_s
        self._store: TCPStore | None = None
        self._keys: list[str] = []
        """Keys that rank 0 has written or read and not yet removed."""

    @property
    def store(self) -> TCPStore:
        """Return the store; call ``open`` first."""
        assert self._store is not None, "open first"
        return self._store

    def open(self, address: LinkAddress) -> None:
        """Open the store if it is closed."""
        if self._store is None:
            self._store = open_store(address, master=self._rank == 0)

    @contextmanager
    def announcing(self, topic: str) -> Iterator[dict[str, Any]]:
        """Send the other ranks the dict that the body fills, or the error that it raises, under ``topic``."""
        self._note(topic)
        message: dict[str, Any] = {}
        try:
            yield message
        except BaseException as error:
            failed = {"error": str(error) or type(error).__name__, "differs": isinstance(error, WeightsDiffer)}
            self.store.set(topic, json.dumps(failed))
            raise
        self.store.set(topic, json.dumps(message))

    def received(self, topic: str, timeout_s: float | None = None) -> dict[str, Any]:
        """Return another rank's message under ``topic``; raise its error as a WeightSyncError."""
        timeout_s = timeout_s or self.timeout_s
        try:
            self.store.wait([topic], timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            raise WeightSyncError(f"no word of {topic} from another trainer rank in {timeout_s:.0f} s") from error
        self._note(topic)
        message = json.loads(self.store.get(topic))
        if "error" in message:
            raise (WeightsDiffer if message["differs"] else WeightSyncError)(message["error"])
        return message

    def post(self, key: str, value: Sequence[Any]) -> None:
        """Write a value for rank 0."""
        self.store.set(key, json.dumps(value))

    def posted(self, key: str) -> Any:
        """Return a value that another rank wrote for rank 0."""
        self.store.wait([key], timedelta(seconds=self.timeout_s))
        self._note(key)
        return json.loads(self.store.get(key))

    def read_by_all(self) -> list[str]:
        """Return the keys so far, to ``remove`` once every rank has read them, and start a new list."""
        keys, self._keys = self._keys, []
        return keys

    def remove(self, keys: Sequence[str]) -> None:
        """Delete keys that every rank has read."""
        for key in keys:
            self.store.delete_key(key)

    def _note(self, key: str) -> None:
        if self._rank == 0:
            self._keys.append(key)
