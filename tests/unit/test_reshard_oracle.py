"""The oracle of the resharding tests against the engines that it speaks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "least"), [("megatron", 950), ("checkpoint", 88), ("vllm", 73)])
def test_the_oracle_holds_what_the_engine_holds(engine: str, least: int) -> None:
    """In a process of its own: both engines take over the one that imports them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.reshard_engines", engine],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [line for line in lines if line[1] is not None] == []
    assert len(lines) >= least
