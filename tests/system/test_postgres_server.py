"""A job's own PostgreSQL server: how it starts and ends, who may use it, which user it runs as."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import psycopg
import pytest
from sqlalchemy.engine import make_url

from megarl.buffer.store import OWN_SERVER, VARIABLE, Store, check_url
from megarl.cli import main
from megarl.config import compose, to_dict
from megarl.core.errors import ConfigError
from megarl.run import postgres
from megarl.run.job_store import job_store, live_url
from megarl.run.postgres import Server, find_server

pytestmark = pytest.mark.postgres

CHILD = """
import sys, time
from pathlib import Path
from megarl.run.postgres import Server
server = Server(Path(sys.argv[1]), "another key", host="127.0.0.2", settings={"fsync": "off"})
server.start()
print(server.pid, server.url, flush=True)
time.sleep(1000)
"""


def test_a_server_ends_with_its_process_and_the_next_goes_on_with_its_data(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(url, outage_s=200)
    store.journal.record_event("trainer", "kept", {})
    server.stop()
    # Left by a killed server, with the number of a process that lives and is no server.
    (server.data / "postmaster.pid").write_text(
        f"{os.getpid()}\n{server.data}\n1\n{server.port}\n\n127.0.0.1\n  1 1\nready\n"
    )
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(server.folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        pid, their_url = child.stdout.readline().split()
        listening = {
            c.laddr for c in psutil.Process(int(pid)).net_connections("inet") if c.status == psutil.CONN_LISTEN
        }
        port = make_url(their_url).port
        assert listening == {("127.0.0.1", port), ("127.0.0.2", port)}
        ours = make_url(server.url).set(port=port)
        with pytest.raises(ConfigError, match="password authentication failed"):
            check_url(ours.render_as_string(hide_password=False))
        as_superuser = ours.set(drivername="postgresql", username="postgres").render_as_string(hide_password=False)
        with pytest.raises(psycopg.OperationalError, match="authentication failed"):
            psycopg.connect(as_superuser)
        with (
            psycopg.connect(their_url.replace("+psycopg", "")) as connection,
            pytest.raises(psycopg.errors.InsufficientPrivilege),
        ):
            connection.execute("COPY (SELECT 1) TO PROGRAM 'true'")
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match="is in use by another PostgreSQL server"):
            patch.setattr(postgres, "LOCK_S", 0.2)
            server.start()
    finally:
        child.kill()
        child.wait()
    server.start()  # waits until the child's is gone
    assert [event["kind"] for event in store.journal.events()] == ["kept"]
    assert "received fast shutdown request" in server.log.read_text().rpartition("127.0.0.2")[2], (
        "it did not end in order"
    )
    store.close()


def test_a_jobs_own_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    run_dir = server.folder.parent
    with job_store("sqlite:///store.db", run_dir, "key", host="127.0.0.1") as none:
        assert none is None and VARIABLE not in os.environ
    server.stop()
    with job_store(OWN_SERVER, run_dir, "key", host="127.0.0.1", port=server.port, connections=7) as own:
        assert own is not None and os.environ[VARIABLE] == own.url
        check_url(OWN_SERVER, nodes=2)
        stores = [Store(OWN_SERVER) for _ in range(7)]
        for store in stores:
            store.close()
        with job_store(OWN_SERVER, run_dir, "key", host="127.0.0.1") as inner:
            assert inner is None, "the URL is there: somebody else has started it"
    assert own.poll() == 0 and VARIABLE not in os.environ
    with pytest.raises(ConfigError, match="MEGARL_STORE_URL is not in the environment; the job's server is not up"):
        Store(OWN_SERVER)


def test_the_report_of_a_job_that_is_running(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It reads the job's server with the job's key, and says without it what to do; the server is not disturbed."""
    run_dir = server.folder.parent
    resolved = to_dict(compose(["experiment=quickstart", f"run.dir={run_dir}", f"store.url={OWN_SERVER}"]))
    (run_dir / "resolved.json").write_text(json.dumps(resolved))
    monkeypatch.delenv(VARIABLE, raising=False)
    for key in (None, "another key"):
        with pytest.raises(
            ConfigError, match=rf"running, with a PostgreSQL .*127.0.0.1:{server.port}.* export MEGARL_JOB_KEY"
        ):
            live_url(run_dir, key)
    monkeypatch.setenv("MEGARL_JOB_KEY", "key of the tests")
    assert live_url(run_dir, "key of the tests") == server.url
    monkeypatch.setenv(VARIABLE, "for the end of the test")
    monkeypatch.delenv(VARIABLE)
    assert main(["report", str(run_dir)]) == 0
    assert (run_dir / "report" / "report.html").is_file() and server.poll() is None
    server.stop()
    assert live_url(run_dir, None) is None and live_url(tmp_path, None) is None


def test_a_missing_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = find_server()
    assert (found / "postgres").is_file()
    with pytest.raises(ConfigError, match=r"the run's data are PostgreSQL 9's, here is \d+; install it"):
        find_server("9")
    monkeypatch.setenv("PATH", str(found))
    monkeypatch.setattr(postgres, "DEBIAN", tmp_path)
    assert find_server() == found.resolve()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"initdb is neither in PATH nor in .*; install it \(Debian: apt install postgresql; without"
    ):
        Server(tmp_path / "postgres", "key").start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to become somebody else")
def test_root_becomes_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user where others may enter; a user of a namespace where only root may; else one error."""
    with tempfile.TemporaryDirectory() as closed:  # 0700
        check_identities(Path(closed), monkeypatch)


def check_identities(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = closed / "postgres"
    folder.mkdir()
    (folder / "file").touch()

    def runs_as(identity: postgres.Identity) -> int:
        said = subprocess.run(["id", "-u"], stdout=subprocess.PIPE, text=True, **identity.options).stdout
        assert {path.stat().st_uid for path in (folder, folder / "file")} == {identity.uid}
        return int(said)

    assert runs_as(postgres.identity_of(folder)) == 65534

    def forbidden() -> None:
        raise OSError("no namespaces here")

    monkeypatch.setattr(postgres, "rename_root", forbidden)
    with pytest.raises(ConfigError, match=f"refuses to run as root.*enter {folder}.*run the job as another user"):
        postgres.identity_of(folder)
    closed.chmod(0o755)
    other = postgres.identity_of(folder)
    assert other.name in ("postgres", "nobody") and runs_as(other) == other.uid
