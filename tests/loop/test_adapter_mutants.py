"""Faulty weight syncs of adapters are refused, healthy ones are not: each kind once, merged and as adapters of the
engine's own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.loop.zygote import Zygote

WAYS = ("merged", "separate")
LEAST = 38
"""Kinds of mutants of each way."""


def check(zygote: Zygote, folder: Path, *, each: int, healthy: int, timeout_s: float) -> None:
    """Run both ways at the same time."""
    programs = {}
    for way in WAYS:
        argv = [sys.executable, "-m", "tests.loop.adapter_mutants", way, str(each), str(healthy)]
        programs[way] = zygote.start(argv, {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}, folder / way)
    for way, program in programs.items():
        ended, log = program.wait(timeout_s), (folder / way).read_text()
        caught = re.fullmatch(r"(\d+) of (\d+) mutants caught, 0 alarms in (\d+) healthy syncs", log.splitlines()[-1])
        assert ended and caught, log
        assert caught[1] == caught[2] and int(caught[2]) >= LEAST * each and int(caught[3]) >= healthy, log


@pytest.mark.timeout(240)
def test_faulty_syncs_of_adapters_are_caught_and_healthy_ones_pass(zygote: Zygote, tmp_path: Path) -> None:
    check(zygote, tmp_path, each=1, healthy=LEAST, timeout_s=110)


@pytest.mark.soak
@pytest.mark.timeout(1900)
def test_a_thousand_healthy_syncs_of_adapters(zygote: Zygote, tmp_path: Path) -> None:
    check(zygote, tmp_path, each=5, healthy=1000, timeout_s=900)
