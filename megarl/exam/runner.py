"""Run jobs of the exam and keep what each of them noticed, one JSON file a job."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.core.durable import write_text
from megarl.core.metrics import records
from megarl.core.processes.fork import Forked, ForkServer
from megarl.exam.alarms import named
from megarl.exam.fault import Fault
from megarl.exam.processes import AND, ENVIRONMENT, MODULES, NO_FAULT
from megarl.exam.small_jobs import JOBS, MODELS, SmallJob, make_files, settings_of

LIMIT_S = 600.0
"""Longest start of a job; one that lasts longer is ended, and counts as noticed by nobody."""
LAST_LINES = 30


@dataclass(frozen=True)
class ExamResult:
    """All that a job noticed.

    Attributes:
        status: Exit status of the last start; None: ended at ``LIMIT_S``.
        steps: Steps recorded.
        alarms: (step, name) of alarms in the metrics, in order.
        errors: Names of alarms that the last lines of the log give.
        last: Last lines of the log.
    """

    status: int | None
    steps: int
    alarms: list[tuple[int, str]]
    errors: list[str]
    last: list[str]

    @property
    def found(self) -> bool:
        """True if the job ended with an error, was refused, gave an alarm, or named a fault and set it right."""
        return self.status not in (0, None) or bool(self.alarms) or bool(self.errors)

    @property
    def at(self) -> int | None:
        """Step of the first alarm, from 1; 0 for an end before a step; None without one."""
        ends = [self.steps + 1 if self.steps or self.alarms else 0] if self.status not in (0, None) else []
        return min([*(step for step, _ in self.alarms), *ends], default=None)

    def names(self, fault: Fault) -> bool:
        """Return True if the alarm that must name the fault is among those of its first step, or in the error."""
        first = [name for step, name in self.alarms if step == self.at]
        return fault.alarm in [*first, *self.errors]


@dataclass(frozen=True)
class Exam:
    """A job of the exam.

    Attributes:
        name: Of its outcome.
        job: Key of ``jobs.JOBS``.
        fault: None in a healthy job.
        settings: Further settings of the job.
        times: Factor of the job's number of steps.
        beside: Further faults in the same job, with alarms of their own.
    """

    name: str
    job: str
    fault: Fault | None = None
    settings: tuple[str, ...] = ()
    times: float = 1.0
    beside: tuple[Fault, ...] = ()

    @property
    def faults(self) -> tuple[Fault, ...]:
        """All faults of the job."""
        return self.beside if self.fault is None else (self.fault, *self.beside)

    @property
    def own(self) -> tuple[str, ...]:
        """Settings of all faults, then ``settings``."""
        return (*(setting for fault in self.faults for setting in fault.settings), *self.settings)

    def needs(self, model: str) -> bool:
        """Return True if the job begins with a model of ``small_jobs.MODELS``."""
        return f"model.path={{folder}}/{model}" in (*JOBS[self.job].settings, *self.own)


class Runner:
    """Runs jobs, several at a time, and skips those whose outcome is kept.

    Args:
        folder: Gets ``<name>.json`` and, while it runs, a run directory of each job.
        server: Process to fork jobs from, which has imported ``MODULES``; None starts one.
    """

    def __init__(self, folder: Path, server: ForkServer | None = None) -> None:
        self.folder = folder
        make_files(folder / "files")
        self._environment = {**os.environ, **ENVIRONMENT}
        self._server = server or ForkServer.start(MODULES, self._environment)

    def close(self) -> None:
        """End the process that jobs are forked from."""
        self._server.close()

    def run_all(self, exams: Sequence[Exam], at_once: int) -> None:
        """Run those whose outcome is not kept; print a line for each."""
        due = [exam for exam in exams if not self.path(exam.name).is_file()]
        self.make_models(name for name in MODELS if any(exam.needs(name) for exam in due))
        with ThreadPoolExecutor(at_once) as pool:
            for _ in pool.map(self._keep, due):
                pass

    def make_models(self, names: Iterable[str]) -> None:
        """Make models that jobs begin with, each once. Raises RuntimeError with a log's last lines."""
        for name in names:
            self._make_model(name)

    def path(self, name: str) -> Path:
        """Path of an outcome."""
        return self.folder / f"{name}.json"

    def outcome(self, name: str) -> ExamResult | None:
        """Return a kept outcome; None if the job has not run."""
        if not self.path(name).is_file():
            return None
        kept = json.loads(self.path(name).read_text())
        return ExamResult(**{**kept, "alarms": [(int(step), str(alarm)) for step, alarm in kept["alarms"]]})

    def _keep(self, exam: Exam) -> None:
        outcome, fault = self._run(exam), exam.fault
        write_text(self.path(exam.name), json.dumps(asdict(outcome)))
        said = ", ".join(dict.fromkeys([*(alarm for _, alarm in outcome.alarms), *outcome.errors])) or "nothing"
        right = "" if fault is None else " (right)" if outcome.found and outcome.names(fault) else f" ({fault.alarm}?)"
        sys.stdout.write(f"{exam.name}: status {outcome.status}, {outcome.steps} steps, {said}{right}\n")
        sys.stdout.flush()

    def _make_model(self, name: str) -> None:
        files, run_dir = self.folder / "files", self.folder / "runs" / name
        if (files / name).is_dir():
            return
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        log = run_dir.with_suffix(".log")
        settings = settings_of(SmallJob(MODELS[name]), files, run_dir, (), 1)
        if self._start([NO_FAULT, *settings], log) != 0:
            raise RuntimeError(f"the exam's model {name} could not be made:\n{log.read_text()[-2000:]}")
        os.replace(run_dir / "hf", files / name)
        shutil.rmtree(run_dir)

    def _run(self, exam: Exam) -> ExamResult:
        run_dir, job, status = self.folder / "runs" / exam.name, JOBS[exam.job], None
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        log = run_dir.with_suffix(".log")
        log.write_text("")
        names = AND.join(fault.name for fault in exam.faults) or NO_FAULT
        for stop in job.stops:
            for fault in exam.faults:
                if fault.prepare is not None:
                    fault.prepare(run_dir)
            settings = settings_of(job, self.folder / "files", run_dir, exam.own, int(exam.times * stop))
            status = self._start([names, *settings], log)
            if status != 0:
                break
        lines = log.read_text(errors="replace").splitlines()
        every = list(records(run_dir / "metrics.jsonl"))  # evaluations have records of their own
        found = [one for one in every if "timing_s/step" in one]
        alarms = [
            (int(one["step"]), key.removeprefix("alarm/")) for one in every for key in one if key.startswith("alarm/")
        ]
        # A step that ends with an error has alarms in the log alone.
        said = [(int(step), name) for line in lines for name, step in re.findall(r"\balarm ([\w-]+): step (\d+)", line)]
        alarms += [each for each in said if each not in alarms]
        outcome = ExamResult(status, len(found), alarms, named("\n".join(lines)), lines[-LAST_LINES:])
        shutil.rmtree(run_dir, ignore_errors=True)
        return outcome

    def _start(self, argv: Sequence[str], log: Path) -> int | None:
        with log.open("ab") as output:
            pid = self._server.fork(
                ["-m", "megarl.exam.processes", *argv], self._environment, output.fileno(), {}, session=True
            )
        if pid is None:
            raise RuntimeError("the process that jobs of the exam are forked from has ended")
        command = Forked(pid)
        try:
            return command.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.kill(pid, signal.SIGTERM)
            command.wait(LIMIT_S)
            return None
        except BaseException:
            os.kill(pid, signal.SIGTERM)
            raise
