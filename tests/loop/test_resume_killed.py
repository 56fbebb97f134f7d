"""A job killed with SIGKILL in the middle of an update and of a checkpoint's writing ends with the bits of one that was
not.

An offline job: its trainers do all that those of an online job do with a step's rows. That rollouts too are the same
again is shown by ``test_roles.py``, and at many more moments by ``make soak``.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.run.report.goodput import account_of
from megarl.weights.checkpoint.training.manifest import latest, read_manifest
from tests.system.jobs import Job

pytestmark = pytest.mark.timeout(900)  # four starts before the first test

STEPS, EVERY = 6, 2
SETTINGS = (
    "experiment=sft",
    "parallel=tp1",
    f"trainer.steps={STEPS}",
    f"trainer.checkpoint_interval={EVERY}",
    "trainer.keep_checkpoints=10",
    "trainer.tasks_per_step=256",
    "trainer.updates_per_step=4",
    "trainer.warm_start.steps=0",
    "trainer.optimizer.lr=1e-3",
    "taskset.train_size=600",
    "taskset.eval_size=20",
    "taskset.warm_start_size=20",
)
NOT_COMPARED = re.compile(r"timing_s|perf|training/attempt")


def start(run_dir: Path, started: list[Job]) -> Job:
    started.append(Job(run_dir, SETTINGS).start())
    return started[-1]


def unfinished(folder: Path) -> list[Path]:
    """Checkpoints that are being written, that of the start left out."""
    return [path for path in folder.glob("global_step_*.attempt_*") if not path.name.startswith("global_step_0")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    root = tmp_path_factory.mktemp("killed")
    started: list[Job] = []
    try:
        whole = start(root / "whole", started)
        assert whole.wait(240) == 0, whole.output.read_text()

        folder = root / "killed" / "checkpoints"
        job = start(root / "killed", started)
        job.until(lambda: latest(folder) is not None, "the checkpoint of the start")
        os.kill(job.writer(), signal.SIGSTOP)  # the next checkpoint stays unfinished
        job.until(lambda: bool(unfinished(folder)), "a checkpoint that is being written")
        job.kill_all()
        assert unfinished(folder), "it was finished before the job was killed"
        before = latest(folder)
        assert before is not None

        job = start(root / "killed", started)
        job.until(lambda: latest(folder) != before, "another checkpoint")
        os.kill(job.writer(), signal.SIGSTOP)  # the job does not end
        job.until(lambda: job.steps()[-1] > EVERY, "a step behind it")
        job.kill_all()
        assert f"resumed from {before}" in job.output.read_text()
        job = start(root / "killed", started)
        assert job.wait(240) == 0, job.output.read_text()
        yield root / "whole", root / "killed"
    finally:
        for job in started:
            job.clean_up()


def records(run_dir: Path) -> dict[tuple[str, int], dict[str, float]]:
    """(evaluation or step, number) -> its metrics. A job that resumes where an evaluation was due does it again, with
    the same result."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = {name: value for name, value in json.loads(line).items() if not NOT_COMPARED.match(name)}
        key = ("step" if "actor/grad_norm" in record else "evaluation", int(record["step"]))
        assert found.setdefault(key, record) == record, key
    return found


def test_every_checkpoint_has_the_same_bits(runs: tuple[Path, Path]) -> None:
    """Parameters, moments and random states of all steps, by the digests of their files."""
    whole, killed = (
        {path.name: read_manifest(path) for path in sorted((run / "checkpoints").glob("global_step_*"))} for run in runs
    )
    assert list(whole) == list(killed) and len(whole) == 1 + STEPS // EVERY
    for name, manifest in whole.items():
        files = {
            file: found for file, found in manifest["files"].items() if file.endswith((".distcp", "common.pt", ".json"))
        }
        assert files and files == {file: found for file, found in killed[name]["files"].items() if file in files}, name
    assert (
        whole[f"global_step_{STEPS}"]["made"]["attempt"] == 1 and killed[f"global_step_{STEPS}"]["made"]["attempt"] == 3
    )


def test_every_step_has_the_same_metrics(runs: tuple[Path, Path]) -> None:
    whole, killed = (records(run) for run in runs)
    assert {("step", number) for number in range(1, STEPS + 1)} <= whole.keys()
    assert whole == killed


def test_every_second_of_the_killed_job_has_a_cause(runs: tuple[Path, Path]) -> None:
    """From the first start to the end, two kills and two resumes included."""
    whole, killed = (account_of(run) for run in runs)
    assert whole is not None and killed is not None
    for found, run in ((whole, runs[0]), (killed, runs[1])):
        phases = [json.loads(line) for path in (run / "timeline").glob("*.jsonl") for line in path.open()]
        wall = max(p["start"] + p["seconds"] for p in phases) - min(p["start"] for p in phases)
        assert found.wall_s == pytest.approx(wall, abs=0.01) == pytest.approx(sum(found.seconds.values()), abs=0.01)
    assert not whole.seconds.keys() & {"lost work", "down", "restart", "notice"}
    assert killed.seconds["lost work"] > 0
    commands = [json.loads(line) for line in (runs[1] / "timeline" / "command.jsonl").open()]
    middles = [phase["start"] + phase["seconds"] / 2 for phase in commands if phase["phase"] in ("import", "check")]
    assert len(middles) == 6
    for middle in middles:
        assert [span.cause for span in killed.spans if span.start <= middle < span.end] == ["start"]
