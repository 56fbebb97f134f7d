"""A disk that is really full: what may be lost on it, what waits for room, and what stays whole."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.buffer.store import Store
from megarl.config import compose, load_resolved
from megarl.core.errors import DiskFullError, JobError
from megarl.core.metrics import MetricWriter, Timeline
from megarl.run.launch.job import begin_attempt
from megarl.run.process.interrupt import StopRequest
from megarl.run.supervise.process_specs import record_settings
from megarl.weights.checkpoint.training import manifest
from megarl.weights.checkpoint.training.disk_space import free_space, writing
from tests import disks
from tests.parallel.grid import run_grid
from tests.parallel.models import save_tiny_qwen3
from tests.stores import make_task
from tests.unit.test_checkpoint_state import checkpoint, names


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with disks.small_disk(tmp_path / "small", "4m") as place:
        yield place


def test_records_are_left_out_whole_and_come_again_with_room(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline(small, "trainer_0")
    timeline.add("first", 1.0, 2.0)
    ballast = disks.fill(small)
    for i in range(300):
        timeline.add("x" * 100, float(i), 1.0)
    lines = [json.loads(line) for line in (small / "trainer_0.jsonl").read_text().splitlines()]
    assert 1 < len(lines) < 301, "the last page is filled"
    assert timeline.seconds["x" * 100] == 300.0
    assert caplog.text.count("cannot be written: [Errno 28] No space left on device") == 1
    ballast.unlink()
    timeline.add("last", 3.0, 4.0)
    assert json.loads((small / "trainer_0.jsonl").read_text().splitlines()[-1])["phase"] == "last"


def test_a_start_waits_for_room_for_its_number(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each restart writes one; and it says so where there is none in time."""
    config = compose(["experiment=quickstart", f"run.dir={small}", "store.outage_s=60"])
    assert begin_attempt(config, StopRequest()) == 1
    ballast = disks.fill(small)
    asked = StopRequest()
    asked.count = 1
    with pytest.raises(DiskFullError, match=f"{small}/attempt cannot be written .*make room there"):
        begin_attempt(config, asked)
    assert manifest.current_attempt(small) == 1
    threading.Timer(1.5, ballast.unlink).start()
    assert begin_attempt(config, StopRequest()) == 2
    assert "waiting for it (store.outage_s=60)" in caplog.text


def test_a_start_waits_for_room_for_its_settings(small: Path) -> None:
    config = compose(["experiment=quickstart", f"run.dir={small}", "store.outage_s=60"])
    ballast = disks.fill(small)
    threading.Timer(1.5, ballast.unlink).start()
    record_settings(config)
    assert load_resolved(small / "resolved.json") == config


def test_a_number_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "attempt").write_text("")
    with pytest.raises(JobError, match=f"{tmp_path}/attempt has no number but ''"):
        manifest.current_attempt(tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own
def test_metrics_stop_no_training(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = MetricWriter(small)
    writer.write(1, {"actor/loss": 1.0})
    ballast = disks.fill(small)
    for step in range(2, 300):
        writer.write(step, {f"actor/{'x' * 50}": 1.0})
    assert (
        "TensorBoard gets no more metrics in this start" in caplog.text
        and "metrics.jsonl cannot be written" in caplog.text
    )
    ballast.unlink()
    writer.write(300, {"actor/loss": 2.0})
    writer.close()
    steps = [json.loads(line)["step"] for line in (small / "metrics.jsonl").read_text().splitlines()]
    assert steps[0] == 1 and steps[-1] == 300 and len(steps) < 300


def test_going_back_drops_later_metrics(tmp_path: Path) -> None:
    writer = MetricWriter(tmp_path)
    for step in range(1, 6):
        writer.write(step, {"actor/loss": 1.0})
    writer.rewind(0, 3)
    writer.write(4, {"actor/loss": 2.0})
    writer.close()
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["actor/loss"]) for r in found] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


def store_on(place: Path, outage_s: float) -> Store:
    store = Store(f"sqlite:///{place}/store.db", outage_s=outage_s)
    store.tasks.add("train", [make_task(i) for i in range(3)])
    return store


def many(store: Store) -> None:
    for i in range(20):
        store.journal.record_event("trainer", "note", {"i": i, "text": "x" * 8192})


def test_the_store_waits_for_room(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_on(small, outage_s=60.0)
    ballast = disks.fill(small, leave=8192)

    def make_some() -> None:
        deadline = time.monotonic() + 50
        while "trying again" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        ballast.unlink()

    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=make_some)
        thread.start()
        many(store)
        thread.join()
    assert "database or disk is full; trying again" in caplog.text and "back after" in caplog.text
    assert [event["data"]["i"] for event in store.journal.events("note")] == list(range(20)), "each once"
    store.close()


def test_a_store_without_room_ends_the_job_and_says_so(small: Path) -> None:
    store = store_on(small, outage_s=0.2)
    ballast = disks.fill(small, leave=8192)
    with pytest.raises(JobError, match=r"store\.outage_s=0\.2\): database or disk is full; make room on its disk"):
        many(store)
    ballast.unlink()
    again = Store(f"sqlite:///{small}/store.db")
    assert len(again.tasks.ids("train")) == 3
    again.close()
    store.close()


@pytest.mark.parametrize(
    ("keep", "left"), [(1, ["global_step_3"]), (2, ["global_step_3"]), (3, ["global_step_2", "global_step_3"])]
)
def test_what_retention_would_remove_may_go_first_but_never_the_last(
    tmp_path: Path, keep: int, left: list[str]
) -> None:
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)
    (tmp_path / "global_step_4.attempt_1").mkdir()
    free_space(tmp_path, 1, keep, refuse=True)
    assert len(names(tmp_path)) == 4, "there is room"
    with pytest.raises(
        DiskFullError, match=r"global_step|no room for a checkpoint: .* are to be written, .* are free; make room"
    ):
        free_space(tmp_path, 2**62, keep, refuse=True)
    assert names(tmp_path) == [*left, "global_step_4.attempt_1"]
    free_space(tmp_path, 2**62, keep, refuse=False)


def test_a_full_disk_and_a_quota_are_told_from_other_faults(tmp_path: Path) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT):
        with pytest.raises(DiskFullError, match="make room there"), writing(tmp_path):
            raise OSError(number, os.strerror(number))
        with pytest.raises(DiskFullError), writing(tmp_path):
            raise RuntimeError(f"safetensors: {os.strerror(number)} (os error {number})")
    with pytest.raises(JobError, match="Permission denied") as raised, writing(tmp_path):
        raise OSError(errno.EACCES, "Permission denied")
    assert not isinstance(raised.value, DiskFullError)


def saves(rank: int, model: str, folder: str) -> list[str]:
    """Runs in each rank: a checkpoint, the disk filled, one in the background and one at once; what the others said."""
    import torch.distributed as dist

    from megarl.config.schema import ParallelConfig
    from megarl.weights.checkpoint.training import state
    from tests.parallel.test_megatron_on_cpu import make_actor, parts

    root, actor = Path(folder), make_actor(model, ParallelConfig(dp=2))
    state.save(root, 1, parts(actor), {"phase": "rl"}, keep=2)
    said = []
    for leave, background in ((2**18, True), (2**18, False), (0, True)):
        if rank == 0:
            disks.fill(root, leave)
        dist.barrier()
        try:
            with writing(root):
                state.begin(root, 2, parts(actor), state.Manifest({"phase": "rl"}, 1), background=background).finish(2)
        except DiskFullError as error:
            said.append(str(error))
        dist.barrier()
        assert sorted(p.name for p in root.iterdir()) == [
            "ballast",
            "global_step_1",
            "latest_checkpointed_iteration.txt",
        ]
        dist.barrier()
        if rank == 0:
            (root / "ballast").unlink()
    dist.barrier()
    state.save(root, 2, parts(actor), {"phase": "rl"}, keep=2)
    return said


def test_a_checkpoint_without_room_leaves_the_others_whole(small: Path, tmp_path: Path) -> None:
    model = save_tiny_qwen3(tmp_path / "qwen3", layers=2)
    found: list[Any] = run_grid(2, saves, str(model), str(small))
    assert found[0] == found[1] and len(found[0]) == 3
    for said in found[0][:2]:
        assert "global_step_2.attempt_1 cannot be written (rank " in said and "No space left on device" in said
        assert "were to be written" in said and "are free without them; make room there" in said
    assert all(manifest.fault_of_files(small / f"global_step_{step}") is None for step in (1, 2))


def saves_full_on_rank_0(rank: int, model: str, folder: str) -> list[str]:
    """Runs in each rank: the disk is full for a file that rank 0 alone writes, once for each such file; returns what
    was raised."""
    import torch.distributed as dist
    from megatron.core.dist_checkpointing import serialization

    from megarl.config.schema import ParallelConfig
    from megarl.weights.checkpoint.training import disk_space, state
    from tests.parallel.test_megatron_on_cpu import make_actor, parts

    root, actor = Path(folder), make_actor(model, ParallelConfig(dp=2))
    state.save(root, 1, parts(actor), {"phase": "rl"}, keep=2)
    use_reserve, save_config, said = disk_space.use_reserve, serialization.save_config, []

    def without_room(path: Path, number: int) -> None:
        use_reserve(path, number)
        if rank == 0 and number == moment:
            disks.fill(root)

    def config_without_room(*args: Any) -> None:
        if rank == 0 and moment == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_config(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_space, "use_reserve", without_room)
        patch.setattr(serialization, "save_config", config_without_room)
        for moment in (1, 2, 3):  # common.pt; .metadata; metadata.json
            with pytest.raises(DiskFullError) as raised, writing(root):
                state.begin(root, 2, parts(actor), state.Manifest({"phase": "rl"}, 1)).finish(2)
            said.append(f"{moment}: {raised.value}")
            dist.barrier()
            if rank == 0:
                (root / "ballast").unlink(missing_ok=True)
                assert names(root) == ["global_step_1", "latest_checkpointed_iteration.txt"]
    dist.barrier()
    state.save(root, 2, parts(actor), {"phase": "rl"}, keep=2)
    return said


def test_a_disk_that_is_full_for_rank_0_alone_is_met_by_all_ranks_together(small: Path, tmp_path: Path) -> None:
    """It writes small files between collectives: the others are told, instead of going on to another collective."""
    model = save_tiny_qwen3(tmp_path / "qwen3", layers=2)
    found: list[Any] = run_grid(2, saves_full_on_rank_0, str(model), str(small), timeout_s=60)
    assert found[0] == found[1] and len(found[0]) == 3
    assert all("No space left on device" in said for said in found[0])
    assert all(manifest.fault_of_files(small / f"global_step_{step}") is None for step in (1, 2))
