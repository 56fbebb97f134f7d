"""A tenth of ``megarl exam``: faults of every area, in jobs of one step, are named; a healthy job is silent."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megarl.exam.areas import faults, find
from megarl.exam.exam_page import page
from megarl.exam.runner import Exam, ExamResult, Runner
from megarl.exam.small_jobs import JOBS, MODELS, SmallJob, settings_of
from tests.system import commands
from tests.system.jobs import START_S, Job

ROOT = Path(__file__).parents[2]

TENTH = (
    ("gradients-not-reduced", "form-part-zero", "verdicts-shifted", "control-tokens-in-content"),
    ("returns-are-values", "verdictless-trained", "weight-decay-on-norms", "norm-epsilon"),
    ("advantage-over-batch", "text-cut-tokens-kept", "first-rate-zero", "rows-dropped"),
    ("kl-sign",),
    ("partial-batch", "question-not-rendered"),
    ("logp-renormalised", "answer-in-prompt", "last-batch-dropped"),
    ("window-one-short", "rows-duplicated"),
    ("masters-of-initialisation", "answers-shifted"),
)
"""Faults that show in the first step, of jobs that begin with one model. A job has faults of which none
brings about the alarm of the other, or one that ends it; it is the job of the first one's row."""
HEALTHY = ("late", "parallel=dp2")
"""Job without a fault, on two ranks."""
BRIEFLY = ("trainer.warm_start.steps=200", "trainer.warm_start.batch_size=32")
"""Warm start of the jobs' model, a tenth of the exam's: enough for rewards that differ."""


def make_model(folder: Path) -> None:
    """Make the model that all jobs begin with, in the place where the exam looks for it."""
    job = Job(folder / "model", settings_of(SmallJob(MODELS["sums"]), folder / "files", folder / "model", BRIEFLY, 1))
    try:
        assert job.start().wait(4 * START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    (folder / "model" / "hf").rename(folder / "files" / "sums")


@pytest.mark.timeout(1500)
def test_a_tenth_of_the_faults_is_named_and_a_healthy_job_is_silent(tmp_path: Path) -> None:
    runner = Runner(tmp_path, commands.server())
    make_model(tmp_path)
    exams = [
        Exam(name, find(name).job, find(name), times=0.25, beside=tuple(find(other) for other in others))
        for name, *others in TENTH
    ]
    healthy = Exam("healthy", HEALTHY[0], settings=HEALTHY[1:], times=0.5)
    runner.run_all([*exams, healthy], at_once=2)
    for exam in exams:
        result = runner.outcome(exam.name)
        assert result is not None
        for fault in exam.faults:
            assert result.found and result.names(fault), (fault.name, fault.alarm, result)
    result = runner.outcome(healthy.name)
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


def test_another_trainer_stands_beside_on_the_page(tmp_path: Path) -> None:
    rows = {"loss": [find("kl-sign"), find("kl-twice")]}
    results = {
        "kl-sign": ExamResult(0, 2, [(1, "loss")], [], []),
        "kl-twice": ExamResult(0, 2, [(1, "entropy")], [], []),
    }
    outcomes = {name: {"effect": "loss, 1: 2, not 1", "noticed": ""} for name in ("kl-sign", "kl-twice", "of-before")}
    outcomes["kl-sign"]["noticed"] = "error: ValueError: a | b"
    (tmp_path / "peer.json").write_text(json.dumps({"versions": {"trl": "1.16.0"}, "faults": outcomes}))
    text = page(rows, results, [], tmp_path / "peer.json")
    assert "**Of 2 faults TRL noticed 1; megarl found 2 and named 1 rightly**\n(trl 1.16.0)." in text
    assert "| kl-sign | loss, 1: 2, not 1 | error: ValueError: a / b | loss |" in text
    assert "| kl-twice | loss, 1: 2, not 1 | nothing | entropy |" in text and "of-before" not in text


def test_faults_of_another_trainer_are_those_of_the_exam() -> None:
    source = (ROOT / "benchmarks" / "against" / "trl_faults.py").read_text()
    names = re.findall(r'Fault\(\s*"([\w-]+)"', source)
    assert len(names) >= 40 and len(set(names)) == len(names)
    assert all(find(name) for name in names)
    kept = json.loads((ROOT / "benchmarks" / "against" / "trl_exam.json").read_text())
    assert set(kept["faults"]) == set(names)
