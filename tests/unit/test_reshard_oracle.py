"""The oracle of the resharding tests against the engines that it speaks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import SOAK

LEAST = {"megatron": 950 if SOAK else 510, "checkpoint": 88, "vllm": 73}
"""Engine -> how many cases it has at least."""


PROCESSES = ("megatron,checkpoint", "vllm")
"""Engines of each process; an engine takes over the one that imports it. They run beside each other."""
Cases = list[tuple[str, Any]]
"""Name of a case, and how the oracle differs from the engine in it."""


@pytest.fixture(scope="module")
def cases_of() -> dict[str, Cases]:
    """Cases of each engine."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.unit.reshard_engines", *PROCESSES]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, Cases] = {engine: [] for engine in LEAST}
    for engine, *case in (json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")):
        found[engine].append(tuple(case))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engine", LEAST)
def test_the_oracle_holds_what_the_engine_holds(engine: str, cases_of: dict[str, Cases]) -> None:
    cases = cases_of[engine]
    assert [case for case in cases if case[1] is not None] == []
    assert len(cases) >= LEAST[engine]
