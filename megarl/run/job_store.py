"""Access to the job's database (``store.url=job://postgres``): a server started here, by another program of the run, or
by a running job. Tools open a run's store during or after its job."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from megarl.buffer.store import OWN_SERVER, VARIABLE, Store, check_url
from megarl.core.errors import ConfigError, masked_text
from megarl.run.local_disk import Use, choose
from megarl.run.postgres import ADDRESS, NAME, Server, url_of
from megarl.run.process.interrupt import INTERRUPT

log = logging.getLogger(__name__)

SHARED_S = 300.0
"""Seconds to wait for the server of `megarl store`."""


@contextmanager
def job_store(
    url: str,
    run_dir: Path,
    key: str,
    *,
    host: str,
    port: int | None = None,
    connections: int = 100,
    held: Sequence[int] = (),
    folder: str = "",
    use: Use = "job",
) -> Iterator[Server | None]:
    """Start the job's PostgreSQL server if ``url`` asks for one, and put its URL into the environment of this process
    and its children. Otherwise, and if the URL is already set, do nothing and yield None.

    Args:
        connections: Maximum simultaneous connections: a trainer rank of each node, every explorer, the supervisor.
        held: Descriptors of the run directory's lock, which PostgreSQL's processes keep open like all others.
        folder: ``store.folder``.
        use: Purpose of the server; a job fills a new store (``fill_lost_store``).

    Raises as :meth:`Server.start` and ``local_disk.choose``.
    """
    if url != OWN_SERVER or VARIABLE in os.environ:
        yield None
        return
    disk = choose(run_dir, folder)
    server = Server(
        run_dir / "postgres", key, host=host, port=port, connections=connections, held=held, disk=disk, use=use
    )
    server.start()
    os.environ[VARIABLE] = server.url
    try:
        yield server
    finally:
        del os.environ[VARIABLE]
        server.stop()


@contextmanager
def shared_store(url: str, run_dir: Path, key: str, limit_s: float = SHARED_S) -> Iterator[None]:
    """Find the server that ``megarl store`` runs for several programs, if ``url`` asks for one, and put its URL into
    the environment.

    Raises:
        ConfigError: no server appears within ``limit_s``, or it cannot be reached.
    """
    if url != OWN_SERVER or VARIABLE in os.environ:
        yield None
        return
    until, said = time.monotonic() + limit_s, False
    while (found := live_url(run_dir, key, starting=True)) is None:
        if time.monotonic() > until:
            raise ConfigError(
                f"store.url={url}: no server of {run_dir} is up after {limit_s:g} s; run `megarl store` with this "
                "command's overrides, which serves all programs of the run"
            )
        if not said:
            log.info("waiting for the server of `megarl store`, up to %g s", limit_s)
        said = True
        INTERRUPT.check()
        time.sleep(0.5)
    os.environ[VARIABLE] = found
    try:
        yield None
    finally:
        del os.environ[VARIABLE]


def live_url(run_dir: Path, key: str | None, *, starting: bool = False) -> str | None:
    """Return the store URL of the job running in ``run_dir``; None if no job is running.

    Args:
        key: The job's key, if it is known here.
        starting: Also return None while the server does not accept connections yet.

    Raises:
        ConfigError: a server is running but cannot be reached from here or with this key.
    """
    lock = run_dir / "postgres" / "lock"
    try:
        with lock.open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except FileNotFoundError:
        return None
    except BlockingIOError:
        pass
    address = run_dir / "postgres" / ADDRESS
    where = address.read_text() if address.is_file() else "it is starting"
    fix = (
        f"{run_dir} has a job that is running, with its own PostgreSQL server ({where}); the job writes its "
        "report when it ends, and its metrics are in metrics.jsonl. For a report now export MEGARL_JOB_KEY, the key "
        "that the job was started with, on a node that reaches that address"
    )
    host, _, port = where.rpartition(":")
    if starting and not host:
        return None
    if not key or not host:
        raise ConfigError(fix)
    url = url_of(key, host, int(port))
    try:
        check_url(url)
    except ConfigError as error:
        if starting:
            return None
        raise ConfigError(f"{fix} ({error})") from error
    return url


def without_password(url: str) -> str:
    """Return a store's URL without its password, for unencrypted connections."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return masked_text(url)
    return parsed._replace(password=None).difference_update_query(["password", "sslpassword"]).render_as_string()


def with_own_password(url: str, key: str) -> str:
    """Return the URL of a job's own server with its password, which is derived from the job's key.

    Raises:
        ConfigError: the URL is another server's: its password is unknown.
    """
    parsed = make_url(url)
    if parsed.username != NAME or parsed.database != NAME:
        raise ConfigError(
            f"{VARIABLE} is set on node 0 only: export it on every node, its password is not sent over the network"
        )
    return url_of(key, str(parsed.host), parsed.port)


@contextmanager
def database_of_run(url: str, run_dir: Path, *, read_only: bool = False) -> Iterator[None]:
    """Make a run's database available inside the block: from its running job, or from a server started for the block.

    Raises:
        ConfigError: a running job has its own server and ``MEGARL_JOB_KEY`` is missing; or the data are on another
            host.
    """
    key = os.environ.get("MEGARL_JOB_KEY")
    live = live_url(run_dir, key) if url == OWN_SERVER and VARIABLE not in os.environ else None
    if live is not None:
        os.environ[VARIABLE] = live
    try:
        with job_store(url, run_dir, secrets.token_hex(), host="127.0.0.1", use="read" if read_only else "write"):
            yield
    finally:
        if live is not None:
            del os.environ[VARIABLE]


@contextmanager
def store_of_run(url: str, run_dir: Path, *, read_only: bool = False) -> Iterator[Store]:
    """Open a run's store. Raises as ``database_of_run``."""
    with database_of_run(url, run_dir, read_only=read_only), closing(Store(url, read_only=read_only)) as store:
        yield store
