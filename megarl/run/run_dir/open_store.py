"""Stores of runs, opened by tools while a job runs or after it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from megarl.buffer.store import OWN_SERVER, VARIABLE, Store
from megarl.run.job_store import job_store, live_url


@contextmanager
def database_of_run(url: str, run_dir: Path, *, read_only: bool = False) -> Iterator[None]:
    """Have a run's database there: the server of a job that is running, or one that is started for as long.

    Raises:
        ConfigError: a job is running with a server of its own, and ``MEGARL_JOB_KEY`` is missing; or the store's data
            are on another host.
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
