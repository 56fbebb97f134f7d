"""Markers that need something of the machine: they skip with a reason, and fail where MEGARL_REQUIRE names them."""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

# What torch has compiled in earlier runs, with kernels held to other instructions too, has ended ranks by SIGSEGV.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="megarl-compiled-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], True)

# An OpenMP thread that waits for another spins, which on a busy machine took a hundred times the operation's CPU time:
# 2.9 ms in place of 0.03 for ``exp`` of 60,000 numbers on two threads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# No time is a test, as a machine may be busy; and how many draws fit a strategy at first is chance.
settings.register_profile(
    "tests", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
settings.load_profile("tests")


def _missing() -> dict[str, str]:
    """Marker -> why it cannot run here."""
    missing = {}
    if shutil.which("slurmctld") is None:
        missing["slurm"] = "slurmctld is not installed"
    if (
        not any(os.path.exists(f"/usr/lib/postgresql/{v}/bin/initdb") for v in range(13, 20))
        and shutil.which("initdb") is None
    ):
        missing["postgres"] = "PostgreSQL's initdb is not installed"
    if shutil.which("bwrap") is None:
        missing["sandbox"] = "bubblewrap (bwrap) is not installed"
    if not any(map(os.path.exists, ("/etc/profile.d/modules.sh", "/etc/profile.d/lmod.sh"))):
        missing["modules"] = "neither environment-modules nor Lmod is installed"
    if not os.path.exists("/dev/nvidiactl"):
        missing["gpu"] = "no NVIDIA GPU"
    return missing


MISSING = _missing()
REQUIRED = {name for name in os.environ.get("MEGARL_REQUIRE", "").split(",") if name}


SOAK = os.environ.get("MEGARL_SOAK") == "1"
"""``make soak``: tests of that marker run, and those that have sizes take the largest."""


def examples(few: int, many: int) -> int:
    """How many cases a property is held against: ``few`` in ``make test``, others each time; ``many`` in ``make soak``.

    The first cases of a broken property nearly always show it; the rest look for what is rare.
    """
    return many if SOAK else few


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of ``make soak``."""
    left_out = [] if SOAK else [item for item in items if item.get_closest_marker("soak")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection(session: pytest.Session) -> None:
    """Tests import torch and transformers, which takes a fifth longer where each module is walked again and again."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and tests stay, and take long to walk."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, reason in MISSING.items():
        if item.get_closest_marker(name) is None:
            continue
        if name in REQUIRED:
            pytest.fail(f"MEGARL_REQUIRE={os.environ['MEGARL_REQUIRE']}, but {reason}", pytrace=False)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A ``launch.postgres.Server`` for all tests, which may stop and start it; it runs when a test begins."""
    from megarl.run.postgres import Server

    server = Server(tmp_path_factory.mktemp("run") / "postgres", "key of the tests", settings={"fsync": "off"})
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def new_postgres(postgres_server: object) -> Callable[[], str]:
    """Makes the URL of an empty schema on that server at each call."""
    import psycopg
    from sqlalchemy.engine import make_url

    numbers = itertools.count()

    def make() -> str:
        schema, url = f"test_{next(numbers)}", postgres_server.url
        with psycopg.connect(url.replace("+psycopg", "")) as connection:
            connection.execute(f"CREATE SCHEMA {schema}")
        return (
            make_url(url)
            .update_query_dict({"options": f"-csearch_path={schema}"})
            .render_as_string(hide_password=False)
        )

    return make
