"""Jobs of different programs in one run: a start of one ends earlier attempts of its own program alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.errors import ConfigError, FencedError
from megarl.core.jobs import TRAIN, of_program
from megarl.explore.store import RegisteredEngine, Store
from megarl.run.run_dir.owner import check_fence, next_attempt, own_run_dir
from megarl.weights.checkpoint.training.manifest import current_attempt

OTHER = "explore-0"


def test_the_trainers_files_have_no_suffix() -> None:
    assert [of_program("attempt", program) for program in (TRAIN, OTHER)] == ["attempt", f"attempt_{OTHER}"]


def test_attempts_in_a_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    trainer, explorer = Store(url), Store(url, program=OTHER)
    trainer.begin_attempt(3)
    explorer.begin_attempt(1)
    with pytest.raises(FencedError):
        Store(url, attempt=2)
    again = Store(url, program=OTHER)
    again.begin_attempt(2)
    trainer.journal.record_step(1, {})
    with pytest.raises(FencedError, match="attempt 2 has begun since"):
        explorer.journal.record_event("explorer", "retry", {})
    again.journal.record_event("explorer", "retry", {})
    for store in (trainer, explorer, again):
        store.close()


def test_engines_belong_to_the_job_that_registers_them(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    trainer, explorer = Store(url), Store(url, program=OTHER)
    trainer.engines.register([RegisteredEngine(0, "http://a", 1)])
    explorer.engines.register([RegisteredEngine(i, f"http://b{i}", 1) for i in range(2)])
    assert [engine.url for engine in trainer.engines.read()] == ["http://b0", "http://b1", "http://a"]
    explorer.engines.register([])
    assert [engine.url for engine in trainer.engines.read()] == ["http://a"] and explorer.engines.own() == []
    for store in (trainer, explorer):
        store.close()


def test_a_run_directory_has_one_job_of_each_program(tmp_path: Path) -> None:
    with own_run_dir(tmp_path), own_run_dir(tmp_path, OTHER):
        assert [next_attempt(tmp_path), next_attempt(tmp_path), next_attempt(tmp_path, program=OTHER)] == [1, 2, 1]
        assert (current_attempt(tmp_path), current_attempt(tmp_path, OTHER)) == (2, 1)
        check_fence(tmp_path, 1, OTHER)
        with pytest.raises(FencedError):
            check_fence(tmp_path, 1)
        with pytest.raises(ConfigError, match="is in use by process"), own_run_dir(tmp_path, OTHER):
            pass
