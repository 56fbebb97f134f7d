"""Rows of engines for tests that need no supervisor."""

from __future__ import annotations

from typing import Any

from megarl.core.jobs import TRAIN
from megarl.engine.fleet import EngineRow, EngineStatus


def serving_row(number: int, url: str, program: str = TRAIN, **columns: Any) -> EngineRow:
    """An engine of one worker that serves at ``url``."""
    of = {"state": EngineStatus.SERVING, "start": number + 1, "workers": 1, **columns}
    return EngineRow(program, number, url=url, **of)
