"""``megarl store``: runs a run's PostgreSQL server as a program that outlives the others."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from megarl.buffer.store import OWN_SERVER, VARIABLE, Store
from megarl.config import Config
from megarl.core.errors import ConfigError
from megarl.core.jobs import STORE
from megarl.engines.client.names import KEY_VARIABLE
from megarl.run.local_disk import choose
from megarl.run.postgres import ADDRESS, Server
from megarl.run.process.interrupt import StopRequest
from megarl.run.process.ports import is_free
from megarl.run.run_dir.owner import held_locks, own_run_dir, run_key
from megarl.run.run_dir.store_damage import fill_lost_store

log = logging.getLogger(__name__)

WATCH_S = 0.5
ENDED_S = 5.0
"""Seconds after the end of a finished run's last program until its server ends."""
CONNECTIONS = 1000
"""Maximum connections of all programs of a run: one or two of each trainer node, explorer and supervisor."""
UNFINISHED = 130
"""Exit status of a server stopped before its run was finished."""


def serve(config: Config) -> int:
    """Run the server until the run is finished and its other programs have ended; return 0, or 130 after a stop
    request.

    Raises:
        ConfigError: ``store.url`` is not for such a server, or another one is running; and as ``Server.start``.
    """
    if config.store.url != OWN_SERVER:
        raise ConfigError(
            f"store.url={config.store.url} needs no separate program; set store=postgres for a server of the run"
        )
    run_dir = Path(config.run.dir)
    key = os.environ.get(KEY_VARIABLE) or run_key(run_dir)
    with own_run_dir(run_dir, STORE) as lock:
        port = _earlier_port(run_dir, config.run.host)
        server = Server(
            run_dir / "postgres",
            key,
            host=config.run.host,
            port=port,
            connections=CONNECTIONS,
            held=[lock],
            disk=choose(run_dir, config.store.folder),
        )
        with StopRequest() as stop_request:
            server.start()
            os.environ[VARIABLE] = server.url
            try:
                fill_lost_store(config, server)
                return _watch(config, run_dir, server, stop_request)
            finally:
                server.stop()


def _watch(config: Config, run_dir: Path, server: Server, stop_request: StopRequest) -> int:
    store = Store(config.store.url, outage_s=config.store.outage_s)
    ended_at: float | None = None
    begun = False  # since this program's start: a run that was finished before may go on
    try:
        while not stop_request.count:
            if server.poll() is not None:
                log.warning("the run's PostgreSQL has ended (status %s); starting it again", server.poll())
                server.start()
            others, closed = (
                held_locks(run_dir, STORE),
                store.journal.has_begun() and store.journal.job_state() == "closed",
            )
            begun = begun or bool(others) or not closed
            ended = begun and closed and not others
            ended_at = (ended_at or time.monotonic()) if ended else None
            if ended_at is not None and time.monotonic() - ended_at > ENDED_S:
                log.info("%s is finished, and its programs have ended", run_dir)
                return 0
            time.sleep(WATCH_S)
    finally:
        store.close()
    log.warning("stopped; run the same command again to continue")
    return UNFINISHED


def _earlier_port(run_dir: Path, host: str) -> int | None:
    """Return the previous server's port, where running programs look for it; None if there is none or it is taken."""
    path = run_dir / "postgres" / ADDRESS
    before, _, port = path.read_text().rpartition(":") if path.is_file() else ("", "", "")
    return int(port) if before == host and is_free(host, int(port)) else None
