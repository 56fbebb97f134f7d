"""The oracle of the resharding tests against the engines that it speaks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import SOAK

LEAST = {"megatron": 950 if SOAK else 510, "checkpoint": 88, "vllm": 73}
"""Engine -> how many cases it has at least."""


PROCESSES = (("megatron", "checkpoint"), ("vllm",))
"""Engines of each process; an engine takes over the one that imports it."""
Cases = list[tuple[str, Any]]
"""Name of a case, and how the oracle differs from the engine in it."""


@pytest.fixture(scope="module")
def cases_of() -> Iterator[Callable[[str], Cases]]:
    """Cases of an engine. The processes run beside each other, each on one core."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    started = {
        engines: subprocess.Popen(
            [sys.executable, "-m", "tests.unit.reshard_engines", *engines],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for engines in PROCESSES
    }
    ended: dict[tuple[str, ...], tuple[str, str]] = {}

    def of(engine: str) -> Cases:
        engines = next(engines for engines in PROCESSES if engine in engines)
        if engines not in ended:
            ended[engines] = started[engines].communicate(timeout=280)
        out, said = ended[engines]
        assert started[engines].returncode == 0, said[-4000:]
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
        return [(name, difference) for of, name, difference in lines if of == engine]

    yield of
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("engine", LEAST)
def test_the_oracle_holds_what_the_engine_holds(engine: str, cases_of: Callable[[str], Cases]) -> None:
    cases = cases_of(engine)
    assert [case for case in cases if case[1] is not None] == []
    assert len(cases) >= LEAST[engine]
