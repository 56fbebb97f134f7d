"""Rows of engines for tests that need no supervisor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from megarl.core.errors import EngineError
from megarl.core.jobs import TRAIN
from megarl.core.schema import WeightsVersion
from megarl.engines.client.control import EngineControl
from megarl.engines.client.engine_choice import EngineChoice
from megarl.engines.fleet import BASE, EngineRow, EngineStatus, Fleet, Key, ProvenWeights


def serving_row(number: int, url: str, program: str = TRAIN, **columns: Any) -> EngineRow:
    """An engine of one worker that serves at ``url``, and has proven its ``version``, if any is given."""
    of = {"state": EngineStatus.SERVING, "start": number + 1, "workers": 1, **columns}
    version = of.pop("version", None)
    row = EngineRow(program, number, url=url, **of)
    return row if version is None else row.with_weights(BASE, version)


def having(row: EngineRow, version: WeightsVersion, start: int | None = None) -> EngineRow:
    """Give a row these weights, proven by its start or by another one."""
    return replace(row, weights=(ProvenWeights(BASE, version, row.start if start is None else start),))


class FixedEngines:
    """Engines at these URLs, without a store: where a trainer finds them, and notes what they have."""

    is_own = True
    _delivered: ClassVar[dict[int, WeightsVersion | None]] = {}
    """Start of an engine -> its weights, which other trainers than the one that gave them know too."""

    def __init__(self, urls: Callable[[], Sequence[str]], key: str) -> None:
        self._urls, self._key = urls, key

    def fleet(self) -> Fleet:
        rows = [serving_row(number, url, start=self._start(url)) for number, url in enumerate(self._urls())]
        return Fleet([row.with_weights(BASE, self._delivered.get(row.start)) for row in rows])

    def to_join(self) -> list[EngineRow]:
        return list(self.fleet())

    def delivered(self, starts: Mapping[Key, int], version: WeightsVersion | None) -> None:
        self._delivered.update(dict.fromkeys(starts.values(), version))

    def free(self) -> None:
        """Do nothing: none keeps its weights."""

    def _start(self, url: str) -> int:
        try:
            return EngineControl(url, self._key).state(5.0).start
        except (EngineError, ValueError):  # it is away, or within this process (``tests/loop/local_engine.py``)
            return 0


def choice_of(*urls: str, **columns: Any) -> EngineChoice:
    """A choice among engines of any start that serve at ``urls``; by default with weights newer than all others."""
    of = {"start": 0, "version": WeightsVersion(1_000_000, 0), **columns}
    return EngineChoice([serving_row(number, url, **of) for number, url in enumerate(urls)])
