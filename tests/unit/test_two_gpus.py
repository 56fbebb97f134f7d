"""tools/two_gpus.sh: without GPUs it says what it would prove; the jobs that it would start pass the checks."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cli import main

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "two_gpus.sh"
FEW_ROWS = ("taskset.train_size=100", "taskset.eval_size=20", "taskset.warm_start_size=100")
"""A check makes the data; the rows are alike."""
JOBS = ("loop", "graphs", "eager", "sockets", "nccl", "ipc", "sleep", "destroy", "keep")


def run(tmp_path: Path, gpus: int, python: str, *steps: str) -> subprocess.CompletedProcess[str]:
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "nvidia-smi").write_text(f"#!/bin/sh\nseq {gpus}\n")
    (programs / "nvidia-smi").chmod(0o755)
    env = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": python, "OUT": str(tmp_path / "out")}
    return subprocess.run(["bash", str(SCRIPT), *steps], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("gpus", [0, 1])
def test_steps_that_need_two_gpus_say_so(tmp_path: Path, gpus: int) -> None:
    done = run(tmp_path, gpus, sys.executable)
    assert done.returncode == 0 and f"{gpus} in all" in done.stdout
    named = re.findall(r"^== (\w+): .+\n   not run: needs 2 GPUs$", done.stdout, re.MULTILINE)
    assert named == ["tests", *JOBS]


def test_its_jobs_pass_the_checks_of_a_machine_with_two_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    asked = tmp_path / "asked"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *megarl*) printf "%s\\n" "$*" >> {asked};; esac\n')
    python.chmod(0o755)
    done = run(tmp_path, 2, str(python), *JOBS)
    assert done.returncode == 0, done.stdout
    jobs = [shlex.split(line) for line in asked.read_text().splitlines()]
    assert [next(word for word in job if word.startswith("run.name=")) for job in jobs] == [
        f"run.name={n}" for n in JOBS
    ]
    for job in [*jobs[1::2], jobs[JOBS.index("sleep")], jobs[JOBS.index("keep")]]:  # one of each kind
        assert job[:3] == ["-m", "megarl", "train"]
        assert main(["train", "--check", "--gpus-per-node", "2", *job[3:], *FEW_ROWS]) == 0, capsys.readouterr()


def test_a_job_that_fails_is_counted(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *megarl*) echo no room; exit 3;; esac\n')
    python.chmod(0o755)
    done = run(tmp_path, 2, str(python), "loop", "nccl")
    assert done.returncode == 2 and done.stdout.count("no room\n== ") == 2
