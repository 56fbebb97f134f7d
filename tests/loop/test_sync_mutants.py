"""Faulty weight syncs of every kind are refused, healthy ones are not; ``make soak`` runs a thousand and ten
thousand."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.loop.zygote import Zygote

HEALTHY = 50


@pytest.mark.timeout(240)
def test_mutants_of_every_kind_are_caught_and_healthy_syncs_pass(zygote: Zygote, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.loop.sync_mutants", "36", str(HEALTHY), str(tmp_path / "results")]
    log = tmp_path / "log"
    program = zygote.start(argv, {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}, log)
    ended = program.wait(200)
    last = log.read_text().splitlines()[-1]
    caught = re.fullmatch(r"(\d+) of (\d+) mutants caught, 0 alarms in (\d+) healthy syncs", last)
    assert ended and caught, log.read_text()
    assert caught[1] == caught[2] and int(caught[2]) >= 36 and int(caught[3]) >= HEALTHY, log.read_text()
