"""The peak of a step's host memory is the one that docs/roles.md states."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import SOAK

ROOT = Path(__file__).parents[2]


def documented(algorithm: str) -> tuple[float, float]:
    """Bytes a token: (held, peak)."""
    rows = re.findall(
        rf"^\| {algorithm},[^|]*\| (\d+) \| (\d+) \|", (ROOT / "docs" / "roles.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 1, f"docs/roles.md has {len(rows)} rows for {algorithm}"
    return float(rows[0][0]), float(rows[0][1])


@pytest.mark.parametrize("algorithm", [pytest.param("grpo", marks=pytest.mark.soak), "ppo"])
def test_a_step_peaks_within_a_tenth_of_the_documented_bytes_a_token(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million tokens in a process of its own, where a tenth is still far above what else moves; more to soak.

    PPO goes through the same stages as GRPO, and through those of a critic.
    """
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "host_memory", raising=False)
    import host_memory

    held, peak = documented(algorithm)
    found = host_memory.measured_apart(algorithm, 512 if SOAK else 128, 8192)
    assert max(p for p, _ in found.values()) == pytest.approx(peak, rel=0.1), found
    assert found["update"][1] == pytest.approx(held, rel=0.1) and found["metrics"][1] < 0.1 * held, found
    assert found["batch"][1] == pytest.approx(9.0, rel=0.1), "the arrays of the trajectories are still held"
