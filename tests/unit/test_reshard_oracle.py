"""The oracle of the resharding tests against the engines that it speaks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import SOAK

LEAST = {"megatron": 950 if SOAK else 510, "checkpoint": 88, "vllm": 73}
"""Engine -> how many cases it has at least."""


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Each in a process of its own, since they take over the one that imports them; beside each other, each on one
    core."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    started = {
        engine: subprocess.Popen(
            [sys.executable, "-m", "tests.unit.reshard_engines", engine],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for engine in LEAST
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("engine", LEAST)
def test_the_oracle_holds_what_the_engine_holds(engine: str, engines: dict[str, subprocess.Popen[str]]) -> None:
    out, said = engines[engine].communicate(timeout=280)
    assert engines[engine].returncode == 0, said[-4000:]
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
    assert [line for line in lines if line[1] is not None] == []
    assert len(lines) >= LEAST[engine]
