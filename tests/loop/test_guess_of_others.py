"""The game ``guess`` as own environment, of gymnasium, verifiers and OpenEnv: a step trains the same bits."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megarl.run.process import ports
from tests import games
from tests.loop.same_model import assert_same_model
from tests.system.jobs import START_S, Job

VERIFIERS = os.environ.get("MEGARL_VERIFIERS_PYTHON", "")
OPENENV = os.environ.get("MEGARL_OPENENV_PYTHON", "")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(6 * START_S),
    pytest.mark.skipif(not (VERIFIERS and OPENENV), reason="MEGARL_VERIFIERS_PYTHON or MEGARL_OPENENV_PYTHON not set"),
]
GAMES = Path(games.__file__).parent
TASKS = 8
SETTINGS = (
    "experiment=guess", "trainer.steps=1", f"trainer.tasks_per_step={TASKS}", "trainer.eval_interval=0",
    "trainer.warm_start.steps=20", "taskset.train_size=100", "taskset.eval_size=20", "taskset.warm_start_size=1000",
)  # fmt: skip


def run(folder: Path, *more: str) -> Path:
    job = Job(folder, (*SETTINGS, *more)).start()
    try:
        assert job.wait(2 * START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    return job.run_dir


def test_a_step_with_each_environment_trains_the_same_bits(tmp_path: Path) -> None:
    own = run(tmp_path / "own")
    data = tuple(f"taskset.{name}={own}/data/{name}.parquet" for name in ("train", "eval", "warm_start"))
    rows = pq.read_table(own / "data" / "train.parquet").to_pylist()
    tasks = [
        {
            "prompt": row["prompt"][0]["content"],
            "ground_truth": row["reward_model"]["ground_truth"],
            "tries": row["extra_info"]["tries"],
        }
        for row in rows
    ]
    (tmp_path / "rows.json").write_text(json.dumps(tasks))
    [port] = ports.choose("127.0.0.1", 1, None)
    server = subprocess.Popen([OPENENV, str(GAMES / "guess_openenv.py"), str(port), "512"])
    options = {
        "gymnasium": "{id: 'tests.games.guess_gymnasium:Guess-v0'}",
        "openenv": f"{{url: 'http://127.0.0.1:{port}', observation: text}}",
        "verifiers": f"{{python: {VERIFIERS}, path: {GAMES}, "
        f"env: {{taskset: {{id: guess_verifiers, file: {tmp_path}/rows.json}}}}}}",
    }
    try:
        while server.poll() is None:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.1)
        for name, given in options.items():
            other = run(tmp_path / name, f"rollout.environment={name}", f"rollout.options={given}", *data)
            assert_same_model(own, other, 1, TASKS * 8)
    finally:
        server.kill()
        server.wait()
