"""A tenth of ``megarl exam``: faults of every area, in jobs of two steps, are named; healthy jobs are silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.exam.areas import faults, find
from megarl.exam.runner import Exam, Runner
from megarl.exam.small_jobs import JOBS
from tests.system import commands

TENTH = (
    "groups-of-one", "question-not-rendered", "logp-renormalised", "window-one-short", "last-batch-dropped",
    "mean-of-each-response", "kl-sign", "kl-twice", "ratio-at-another-temperature", "advantage-over-batch",
    "returns-are-values", "clipping-by-own-norm", "gradients-not-reduced", "packed-sequences-see-each-other",
    "verdicts-shifted", "form-part-zero", "verdictless-trained", "end-token-cut", "log-probs-of-the-same-position",
    "masters-of-initialisation",
)  # fmt: skip
"""Faults that show in the first steps, of jobs that begin with one model."""
HEALTHY = ("tiny", "dp2", "late", "evaluated")


@pytest.mark.timeout(600)
def test_a_tenth_of_the_faults_is_named_and_healthy_jobs_are_silent(tmp_path: Path) -> None:
    runner = Runner(tmp_path, commands.server())
    exams = [Exam(name, find(name).job, find(name), times=0.5) for name in TENTH]
    healthy = [Exam(f"healthy-{job}", job) for job in HEALTHY]
    runner.run_all([*exams, *healthy], at_once=2)
    for exam in exams:
        result = runner.outcome(exam.name)
        assert result is not None and exam.fault is not None
        assert result.found and result.names(exam.fault), (exam.name, exam.fault.alarm, result)
    for exam in healthy:
        result = runner.outcome(exam.name)
        assert result is not None and result.status == 0 and not result.found, result


def test_every_fault_has_a_report_an_alarm_and_a_job() -> None:
    from megarl.exam.alarms import ERRORS, STEPS
    from megarl.train.alarm_rules import RULES

    rows = [fault for own in faults().values() for fault in own]
    assert len(rows) >= 120 and len({fault.name for fault in rows}) == len(rows)
    known = {*ERRORS, *STEPS, *(rule.name for rule in RULES)}
    for fault in rows:
        repository, _, number = fault.report.partition("#")
        assert repository.count("/") == 1 and number.isdecimal(), fault
        assert fault.alarm in known and fault.job in JOBS and (fault.install or fault.prepare), fault
        assert fault.breaks.endswith("."), fault
