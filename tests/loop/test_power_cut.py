"""A power cut after a checkpoint: its steps are in the store."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from megarl.buffer.store import Store
from megarl.config import compose, save_resolved
from megarl.run.process import ports
from megarl.run.run_dir.prepare import prepare_model
from tests.loop import test_bad_updates as jobs
from tests.power_cut import ForgetfulDisk

folder = jobs.folder
RANK = """
import os, shutil, sys
from pathlib import Path
from megarl.weights.checkpoint.training import save
from megarl.train.trainer import main

complete, kept = save.complete, Path(os.environ["SYNCED"])

def then_cut(checkpoint, state, *rest):
    complete(checkpoint, state, *rest)
    cut = kept.with_name(f"cut_{state['step']}")
    cut.mkdir()
    for path in kept.glob("store.db*"):
        shutil.copy(path, cut)

save.complete = then_cut
sys.exit(main(["--config", sys.argv[1]]))
"""
"""Keeps, when a manifest is there, what the disk would have of the store then."""


def test_a_checkpoint_that_counts_has_its_steps_in_the_store(folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    disk = ForgetfulDisk(tmp_path, run_dir)
    run_dir.mkdir()
    config = compose(
        ["parallel=tp1" if setting == "parallel=dp2" else setting for setting in jobs.overrides(folder, run_dir)]
    )
    prepare_model(config)
    save_resolved(config, run_dir / "resolved.json")
    (run_dir / "attempt").write_text("1")
    store = Store(config.store.url)
    store.begin_attempt(1)
    store.close()
    shutil.copy(run_dir / "store.db", disk.kept)  # the last to close it has synced it
    grid = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports.choose("127.0.0.1", 1, None)[0]),
    }
    environment = {**os.environ, **disk.environment, **grid, "MEGARL_ATTEMPT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RANK, str(run_dir / "resolved.json")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    cuts = {int(path.name.removeprefix("cut_")): path for path in tmp_path.glob("cut_*")}
    assert len(cuts) >= 3
    for step, path in cuts.items():
        kept = Store(f"sqlite:///{path}/store.db")
        assert {number for number, _ in kept.journal.steps()} >= set(range(1, step + 1)), step
        kept.close()
