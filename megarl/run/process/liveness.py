"""Liveness probe of an engine, by its node's supervisor: the core answers between two steps, no process is stopped.

vLLM's ``/health`` is answered by the HTTP server, even if the core waits forever for a worker. The core's answer may
take as long as one of its steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from megarl.core.errors import EngineError
from megarl.engines.client.control import EngineControl
from megarl.run.process.stacks import STOPPED, group_state

log = logging.getLogger(__name__)

EVERY_S = 1.0
ANSWER_S = 600.0
"""Timeout in seconds of one request. A pending request does not count as progress; the watchdog's timeout is less."""


class Probe:
    """Probes an engine every second until ``alive`` returns False.

    Args:
        url: "" for an engine's part without a server: only the states of its processes are checked.
    """

    def __init__(self, url: str, key: str, group: int, alive: Callable[[], bool]) -> None:
        self.count = 0
        """Number of successful probes."""
        self._url = url
        self._engine = EngineControl(url, key) if url else None
        self._group = group
        self._alive = alive
        threading.Thread(target=self._run, daemon=True, name=f"probe of {url or group}").start()

    @property
    def state(self) -> str:
        """Linux process state of the group's leader; T if any process of the group is stopped."""
        return group_state(self._group)

    def _run(self) -> None:
        while self._alive():
            try:
                if self.state != STOPPED and self._answers():
                    self.count += 1
            except (
                OSError
            ) as error:  # e.g. no free descriptor: this thread must go on, or the engine would count as stalled
                log.warning("the engine at %s cannot be looked at: %s", self._url or "another node's server", error)
            time.sleep(EVERY_S)

    def _answers(self) -> bool:
        if self._engine is None:
            return True
        try:
            self._engine.state(ANSWER_S)
        except EngineError:
            return False
        return True
