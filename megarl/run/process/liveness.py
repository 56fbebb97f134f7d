"""Liveness probe of an engine, by its node's supervisor: its core answers between two steps, and none of its processes
is stopped.

vLLM's ``/health`` is answered by the server alone, also when the core waits forever for a worker. The core's answer may
take as long as a step of it does.
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
"""Who asks waits, and is not counted meanwhile; the watchdog's timeout is less."""


class Probe:
    """Ask until ``alive`` returns False.

    Args:
        url: "" for the part of an engine that is no server: only its processes' states are looked at.
    """

    def __init__(self, url: str, key: str, group: int, alive: Callable[[], bool]) -> None:
        self.count = 0
        """Number of probes that found all well."""
        self._url = url
        self._engine = EngineControl(url, key) if url else None
        self._group = group
        self._alive = alive
        threading.Thread(target=self._run, daemon=True, name=f"probe of {url or group}").start()

    @property
    def state(self) -> str:
        """Linux' letter of its leader, T when any process of the group is stopped."""
        return group_state(self._group)

    def _run(self) -> None:
        while self._alive():
            try:
                if self.state != STOPPED and self._answers():
                    self.count += 1
            except (
                OSError
            ) as error:  # for instance no descriptor is free: without this thread the engine would count as stalled
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
