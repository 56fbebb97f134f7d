"""tools/first_gpu.sh on a machine without a GPU: it runs to its end and says what each step would prove."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import QWEN2_5_1_5B

from megarl.cli import main
from megarl.weights.architectures.complete import complete

ROOT = Path(__file__).parents[2]
FEW_ROWS = ("taskset.train_size=100", "taskset.eval_size=20", "taskset.warm_start_size=100")
"""A check makes the data; the rows are alike."""


def run(tmp_path: Path, *steps: str, card: str = "exit 9") -> subprocess.CompletedProcess[str]:
    empty = tmp_path / "bin"
    empty.mkdir(exist_ok=True)
    (empty / "nvidia-smi").write_text(f"#!/bin/sh\n{card}\n")  # by default as where the driver is not loaded
    (empty / "nvidia-smi").chmod(0o755)
    env = os.environ | {"PATH": f"{empty}:{os.environ['PATH']}", "PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    command = ["bash", str(ROOT / "tools" / "first_gpu.sh"), *steps]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_steps_that_need_a_gpu_say_so(tmp_path: Path) -> None:
    steps = (
        "kernels",
        "learner",
        "speed",
        "sanitizer",
        "jobs",
        "loop",
        "exact",
        "apart",
        "large",
        "eight_bits",
        "eight_bit_experts",
        "eight_bit_cache",
    )
    done = run(tmp_path, *steps)
    assert done.returncode == 0 and "card: none" in done.stdout
    assert re.findall(r"^== (\w+): .+\n   not run: needs a GPU$", done.stdout, re.MULTILINE) == list(steps)


def test_the_job_of_experts_passes_the_checks_of_a_machine_with_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, python = tmp_path / "asked", tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in "-m megarl"*) echo "$*" > {asked};; *experts) exec {sys.executable} "$@";; esac\n'
    )
    python.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        old = run(tmp_path, "eight_bits", card="echo 8.6")
        assert old.returncode == 0 and "not run: vLLM multiplies in 8 bits from compute capability 8.9" in old.stdout
        assert not asked.exists()
        done = run(tmp_path, "eight_bit_experts", card="echo 9.0")
    assert done.returncode == 0, done.stdout
    job = shlex.split(asked.read_text())
    assert job[:3] == ["-m", "megarl", "train"] and "rollout.weight_dtype=fp8" in job
    monkeypatch.chdir(ROOT)
    assert main(["train", "--check", "--gpus-per-node", "1", *job[3:], *FEW_ROWS]) == 0, capsys.readouterr()


def test_the_large_job_passes_the_checks_and_has_a_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, python = tmp_path / "asked", tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in "-m megarl"*|tools*) echo "$*" >> {asked};; esac\n')
    python.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        done = run(tmp_path, "large", card="echo NVIDIA H200, 9.0")
    assert done.returncode == 0, done.stdout
    train, plan, bare = map(shlex.split, asked.read_text().splitlines())
    sizes = ("hidden_size", "intermediate_size", "vocab_size")
    small = {f"model.from_scratch.{name}": "128" for name in sizes}
    pairs = (word.partition("=") for word in train[3:])
    shrunk = [name + equals + small.get(name, value) for name, equals, value in pairs]
    monkeypatch.chdir(ROOT)
    assert main(["train", "--check", "--gpus-per-node", "1", *shrunk, *FEW_ROWS]) == 0, capsys.readouterr()
    capsys.readouterr()
    assert bare[0] == "tools/bare_engine.py"
    Path(bare[1]).mkdir(parents=True)
    Path(bare[1], "config.json").write_text(json.dumps(complete(QWEN2_5_1_5B)))
    assert main(plan[2:]) == 0
    assert "1.54 B parameters, qwen2" in (out := capsys.readouterr().out) and "\nset " in out


def test_a_step_that_fails_is_counted(tmp_path: Path) -> None:
    (tmp_path / "python").write_text('#!/bin/sh\ncase "$*" in *benchmarks*) echo no room; exit 3;; esac\n')
    (tmp_path / "python").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(tmp_path / "python"))
        done = run(tmp_path, "attention", "sync")
    assert done.returncode == 2 and done.stdout.count("no room\n== ") == 2
    assert "first_gpu: 2 steps failed" in done.stdout
