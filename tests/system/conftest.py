"""Fixtures of tests that use PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from megarl.run.postgres import Server


@pytest.fixture
def server(postgres_server: Server) -> Iterator[Server]:
    """The server of all tests, running before and after."""
    yield postgres_server
    if postgres_server.poll() is not None:
        postgres_server.start()


@pytest.fixture
def url(server: Server, new_postgres: Callable[[], str]) -> str:
    return new_postgres()
