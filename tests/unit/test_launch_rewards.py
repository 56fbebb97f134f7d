"""Settings of rewards that cannot work are refused before any process is launched; tasks for choice are left out on
demand."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import ConfigError, DataError
from megarl.run.checks import job as checks
from megarl.sandbox import bubblewrap, client, selftest
from megarl.tasks import read_rows
from tests.unit.small_job import config_of, refused
from tests.unit.small_rows import write
from tests.unit.test_launch_data import rewritten


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["reward.routes.my_set=mathh"], ["reward.routes.my_set=mathh", "not a family", "math"]),
        *(
            (
                [given, f"reward.path={__file__}"],
                [f"{given.partition('=')[0]} does nothing beside reward.path", "leave"],
            )
            for given in ("reward.routes={my_set: math}", "reward.judge.url=rollout")
        ),
        (["reward.hosts=[127.0.0.1:9]"], ["reward.hosts", "MEGARL_JOB_KEY"]),
        (
            ["reward.length.weight=0.1", "algorithm=reinforce_pp", "algorithm.group_size=1"],
            ["reward.length.weight=0.1", "group_size is 1"],
        ),
        (["reward.judge.url=http://127.0.0.1:9/v1"], ["http://127.0.0.1:9/v1", "cannot be reached"]),
        (["reward.hosts=[node1:7000*4,node2]"], ["reward.hosts", "'node2'", "HOST:PORT*N", "megarl rewards serve"]),
        (["reward.hosts=[node2:7000*0]"], ["'node2:7000*0'"]),
        (["reward.hosts=node2:7000"], ["reward.hosts", "must be a list"]),
        (["reward.routes={reasoning_gym: judge}"], ["reward.judge.url is not set", "http://HOST:PORT/v1"]),
        (
            ["reward.routes={reasoning_gym: judge}", "reward.judge.url=rollout"],
            ["reward.judge.max_tokens=1024", "56 tokens"],
        ),
        (["reward.retries=-1"], ["reward.retries=-1", "at least 0"]),
        (["reward.format.form=thinking"], ["reward.format.form", "think_answer"]),
    ],
)
def test_settings_that_cannot_work(prepared: Path, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        checks.check(config_of(prepared, *overrides))
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"


def test_hosts_are_asked_before_anything_starts(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_JOB_KEY", "sixteen letters..")
    refused(
        ConfigError,
        config_of(prepared, "reward.hosts=[127.0.0.1:9*2]"),
        "127.0.0.1:9",
        "cannot be reached",
        "megarl rewards serve",
    )


def test_the_judges_cache_lies_in_the_run(prepared: Path) -> None:
    assert config_of(prepared).reward.judge.cache == f"{prepared}/judge_cache.db"


def test_a_data_source_goes_where_the_settings_send_it(prepared: Path, tmp_path: Path) -> None:
    override = rewritten(prepared, "train", tmp_path / "train.parquet", 3, data_source="my_set/7")
    refused(DataError, config_of(prepared, override), "row 4", "taskset.train", "'my_set/7'", "reward.routes")
    checks.check(config_of(prepared, override, "reward.routes.my_set=math"))
    agent = tmp_path / "agent.py"
    agent.write_text("async def run(base_url, prompt, request_kwargs, metadata):\n    return 1.0\n")
    agents = ["rollout.workflow=agent", f"rollout.agent={agent}"]
    refused(DataError, config_of(prepared, override, *agents), "'my_set/7'", "set rollout.agent_rewards=true")


def test_programs_need_a_sandbox_before_anything_starts(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = {"style": "rule", "ground_truth": '{"inputs": ["1"], "outputs": ["2"]}'}
    override = rewritten(prepared, "train", tmp_path / "train.parquet", 3, data_source="code/own", reward_model=tests)
    refused(
        ConfigError, config_of(prepared, override, "reward.timeout_s=5"), "reward.code.item_s=8", "reward.timeout_s=10"
    )
    service = config_of(prepared, override, "reward.code.url=http://127.0.0.1:9")
    monkeypatch.setenv("MEGARL_SANDBOX_KEY", "sixteen letters..")
    monkeypatch.setattr(client, "BUSY_S", 0.2)
    refused(ConfigError, service, "not run unless they can be isolated", "http://127.0.0.1:9")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(selftest, "known", {})  # by another test of this process
    bubblewrap.find.cache_clear()
    refused(ConfigError, config_of(prepared, override), "not run unless they can be isolated", "bwrap")


def test_rows_that_no_answer_can_be_judged_by(prepared: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(prepared, tmp_path / "run"))  # which records what is left out
    override = rewritten(
        prepared, "train", tmp_path / "train.parquet", 3, data_source="k12/x", extra_info={"type": "essay"}
    )
    refused(DataError, config_of(prepared, override), "row 4 (taskset.train)", "'essay'", "taskset.bad_rows=drop")
    tasks = checks.check(config_of(run, override, "taskset.bad_rows=drop"))
    assert len(tasks["train"].tasks) == 29 and "train/3" not in {task.task_id for task in tasks["train"].tasks}


@pytest.mark.parametrize("missing", [None, {"style": "rule", "ground_truth": None}])
def test_rows_without_a_ground_truth_are_left_out_where_asked(prepared: Path, tmp_path: Path, missing: Any) -> None:
    run = Path(shutil.copytree(prepared, tmp_path / "run"))
    override = rewritten(prepared, "train", tmp_path / "train.parquet", 3, reward_model=missing)
    refused(DataError, config_of(prepared, override), "row 4", "reward_model")
    found = checks.check(config_of(run, override, "taskset.bad_rows=drop"))["train"]
    assert len(found.tasks) == 29 and found.dropped == {"bad_row": 1}
    assert "train/3" not in {task.task_id for task in found.tasks}
    path = write(tmp_path / "none.jsonl", [{"data_source": "math", "prompt": "q", "reward_model": missing}])
    drop = config_of(run, f"taskset.train={path}", "taskset.bad_rows=drop")
    refused(DataError, drop, "none.jsonl", "leaves none of the 1 rows", "reward_model")


def test_tasks_for_choice_are_left_out(prepared: Path, tmp_path: Path) -> None:
    """Of training, not of what is held out; by the row's own options, whatever its data source."""

    def options(split: str, row: int, path: Path, **changes: Any) -> str:
        return rewritten(prepared, split, path, row, extra_info={"options": ["1", "2"]}, **changes)

    overrides = [options("train", 3, tmp_path / "train.parquet"), options("eval", 2, tmp_path / "eval.parquet")]
    kept = checks.check(config_of(prepared, *overrides))
    left = checks.check(config_of(prepared, *overrides, "taskset.multiple_choice=drop"))
    assert [len(kept["train"].tasks), len(kept["eval"].tasks)] == [30, 10] and len(left["eval"].tasks) == 10
    assert [task.task_id for task in kept["train"].tasks if task not in left["train"].tasks] == ["train/3"]
    rows = read_rows(tmp_path / "train.parquet")
    assert len(rows) == 30, "the file is as it was"


def test_the_command_that_offers_workers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megarl.cli", "rewards", "serve", "--port", "0", "--workers", "2"]
    env = {**os.environ, "MEGARL_JOB_KEY": "sixteen letters.."}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as service:
        assert service.stderr is not None
        assert service.stderr.readline().startswith("up to 2 reward processes on 127.0.0.1:")
        service.send_signal(signal.SIGINT)
        assert service.wait(30) == 130
    env["MEGARL_JOB_KEY"] = "short"
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "MEGARL_JOB_KEY" in done.stderr and "16 characters" in done.stderr
