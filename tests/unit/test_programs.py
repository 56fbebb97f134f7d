"""Jobs of different programs in one run: a start of one ends earlier attempts of its own program alone, and the trainer
names what it leaves out once."""

from __future__ import annotations

from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from megarl.buffer.store import Store
from megarl.core.errors import ConfigError, FencedError
from megarl.core.jobs import TRAIN, of_program
from megarl.run.process import ports
from megarl.run.run_dir.owner import check_fence, next_attempt, own_run_dir
from megarl.train.sync import look
from megarl.train.sync.look import EngineLook
from megarl.weights.checkpoint.training.manifest import current_attempt
from tests.engine_rows import serving_row
from tests.unit.test_scale import Health

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
    trainer.engines.register([serving_row(0, "http://a")])
    explorer.engines.register([serving_row(i, f"http://b{i}", OTHER) for i in range(2)])
    assert [engine.url for engine in trainer.engines.read()] == ["http://b0", "http://b1", "http://a"]
    explorer.engines.register([])
    assert [engine.url for engine in trainer.engines.read()] == ["http://a"] and explorer.engines.own() == []
    for store in (trainer, explorer):
        store.close()


def test_the_trainer_names_once_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two engines are dead and a program is silent; one engine comes, and dies again."""
    store, beating = (Store(f"sqlite:///{tmp_path}/store.db", program=f"explore-{i}") for i in (0, 1))
    chosen = ports.choose("127.0.0.1", 2, None)
    dead = [f"http://127.0.0.1:{port}" for port in chosen]
    store.engines.register([serving_row(0, "http://127.0.0.1:1", "explore-0")])
    beating.engines.register([serving_row(i, url, "explore-1") for i, url in enumerate(dead)])
    engines = EngineLook(store, "k", own=False, silence_s=60.0)

    def looks() -> list[list[str]]:
        """URLs that are there in some looks."""
        found = []
        for _ in range(4):
            beating.workers.beat(beating.program)
            found.append([row.url for row in engines.to_join() or ()])
        return found

    def said() -> list[str]:
        found = [message.partition("left out: ")[2] for message in caplog.messages]
        caplog.clear()
        return found

    assert engines.to_join() == [] and not said(), "a program that was just found may be alive"
    monkeypatch.setattr(look, "SETTLE_S", -1.0)
    assert looks() == [[]] * 4
    silent, *faults = sorted(said(), key=lambda fault: "heartbeat" not in fault)
    assert silent == "no heartbeat of explore-0" and len(faults) == 2
    assert all(any(url in fault for fault in faults) for url in dead)
    server = ThreadingHTTPServer(("127.0.0.1", chosen[0]), Health)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert looks() == [dead[:1]] * 4 and not said()
    finally:
        server.shutdown()
        server.server_close()
    assert looks() == [[]] * 4
    [fault] = said()
    assert dead[0] in fault
    for each in (store, beating):
        each.close()


def test_a_run_directory_has_one_job_of_each_program(tmp_path: Path) -> None:
    with own_run_dir(tmp_path), own_run_dir(tmp_path, OTHER):
        assert [next_attempt(tmp_path), next_attempt(tmp_path), next_attempt(tmp_path, program=OTHER)] == [1, 2, 1]
        assert (current_attempt(tmp_path), current_attempt(tmp_path, OTHER)) == (2, 1)
        check_fence(tmp_path, 1, OTHER)
        with pytest.raises(FencedError):
            check_fence(tmp_path, 1)
        with pytest.raises(ConfigError, match="is in use by process"), own_run_dir(tmp_path, OTHER):
            pass
