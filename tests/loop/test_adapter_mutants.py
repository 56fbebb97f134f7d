"""Faulty weight syncs of adapters are refused, healthy ones are not: each kind once, merged and as adapters of the
engine's own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.loop.zygote import Zygote

LAST = r"(\d+) of (\d+) mutants caught, 0 alarms in (\d+) healthy syncs"


def run(zygote: Zygote, log: Path, way: str, each: int, healthy: int, timeout_s: float) -> None:
    argv = [sys.executable, "-m", "tests.loop.adapter_mutants", way, str(each), str(healthy)]
    program = zygote.start(argv, {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}, log)
    ended = program.wait(timeout_s)
    caught = re.fullmatch(LAST, log.read_text().splitlines()[-1])
    assert ended and caught, log.read_text()
    assert caught[1] == caught[2] and int(caught[2]) >= 38 * each and int(caught[3]) >= healthy, log.read_text()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", ["merged", "separate"])
def test_faulty_syncs_of_adapters_are_caught_and_healthy_ones_pass(zygote: Zygote, tmp_path: Path, way: str) -> None:
    run(zygote, tmp_path / "log", way, each=1, healthy=40, timeout_s=200)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", ["merged", "separate"])
def test_a_thousand_healthy_syncs_of_adapters(zygote: Zygote, tmp_path: Path, way: str) -> None:
    run(zygote, tmp_path / "log", way, each=5, healthy=1000, timeout_s=1700)
