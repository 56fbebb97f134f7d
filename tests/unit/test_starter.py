"""Folders that ``megarl init`` writes: they compose for CPUs and GPUs, and nothing is overwritten."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config import compose
from megarl.run.launch.starter import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_has_all_that_a_job_needs(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "mine"
    assert main(["init", str(folder), "--kind", kind]) == 0
    config = compose(["experiment=mine"], own=folder)
    named = [config.reward.path, config.rollout.agent, config.rollout.environment]
    files = {folder / name for name in ("train.jsonl", "eval.jsonl", "job.sh", "experiment/mine.yaml")}
    assert {path for path in folder.rglob("*") if path.is_file()} == files | {
        Path(path) for path in named if path and path.endswith(".py")
    }
    assert len((folder / "train.jsonl").read_text().splitlines()) == config.trainer.tasks_per_step == 3
    subprocess.run(["bash", "-n", folder / "job.sh"], check=True)
    assert f"--config-dir {folder} experiment=mine" in (folder / "job.sh").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_for_gpus_takes_all_of_them(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder, model = tmp_path / "mine", tmp_path / "model"
    words = ["--kind", kind, "--model", str(model), "--gpus-per-node", "8", "--nodes", "2"]
    assert main(["init", str(folder), *words]) == 0
    checked, submitted = capsys.readouterr().out.splitlines()
    assert checked.endswith("--check --nodes 2 --gpus-per-node 8 store=postgres") and submitted.startswith("sbatch ")
    config = compose(["experiment=mine"], own=folder)
    assert (config.parallel.backend, config.parallel.tp * config.parallel.dp) == ("nccl", 16)
    assert config.model.path == str(model) and config.model.dtype == "bfloat16"
    if kind not in ("sft", "dpo"):
        assert (config.rollout.placement, config.rollout.replicas) == ("colocated", 16)
    script = (folder / "job.sh").read_text()
    assert "#SBATCH --nodes=2\n" in script and "#SBATCH --gpus-per-node=8\n" in script


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--name", "a b"], "--name=a b"),
        (["--name", "quickstart"], "is an experiment of megarl"),
        (["--gpus-per-node", "8"], "needs --model"),
        (["--gpus-per-node", "-1"], "--gpus-per-node=-1"),
        (["--nodes", "0"], "--nodes=0"),
        ([], "exists already"),
    ],
)
def test_bad_answers_write_nothing(
    tmp_path: Path, words: list[str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "reward.py").write_text("mine")
    assert main(["init", str(tmp_path), *words]) == 2
    assert said in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["reward.py"]


def test_a_terminal_is_asked_for_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["sft", "", "/models/mine", "4", ""])
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: (asked.append(question), next(answers))[1])
    assert main(["init", str(tmp_path / "mine")]) == 0
    config = compose(["experiment=mine"], own=tmp_path / "mine")
    assert len(asked) == 5
    assert (config.algorithm.name, config.model.path, config.parallel.tp, config.parallel.dp) == (
        "sft",
        "/models/mine",
        2,
        2,
    )
