"""Watch over a job's engines: they still have the weights that they were given while their answers are awaited.
Standard library only."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType, TracebackType
from typing import Self

from megarl.core.errors import EngineError
from megarl.engine.client.control import EngineControl

EVERY_S = 1.0
ANSWER_S = 2.0


class EngineWatch:
    """Asks ``engines`` every second how they are, in a thread of its own: their answers may come late. Use as a context
    manager.

    An engine that does not answer is busy, or dead: another will come up in its place, or the supervisor ends the
    attempt. Until then the others go on.

    Args:
        kept: URL of each engine that keeps other weights than ``version`` -> their version.
    """

    def __init__(
        self,
        engines: Sequence[EngineControl],
        version: str,
        kept: Mapping[str, str] = MappingProxyType({}),
        *,
        every_s: float = EVERY_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._engines = engines
        self._version = version
        self._kept = kept
        self._every_s = every_s
        self._answer_s = answer_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine watch")
        self.lost: str | None = None
        """State of an engine that is up and has other weights than it was given, or refuses. Then it is watched no
        more."""

    def __enter__(self) -> Self:
        if self._engines:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._engines:
            self._thread.join()  # at most one answer long: the process may fork next, which no thread should see

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            for engine in self._engines:
                if self.lost is None and not self._over.is_set():
                    self._look(engine)
            if self.lost is not None:
                return

    def _look(self, engine: EngineControl) -> None:
        with suppress(EngineError):
            state = engine.state(self._answer_s)
            version = self._kept.get(engine.url, self._version)
            if state.version != version:
                self.lost = f"the engine at {engine.url} has weights {state.version} instead of {version}"
            elif state.refusing is not None:
                self.lost = f"the engine at {engine.url} refuses: {state.refusing}"
