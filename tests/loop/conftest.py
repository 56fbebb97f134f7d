"""One engine server for all tests of this folder that can share it: a start costs 15 to 40 s."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megarl.config.schema import RolloutConfig
from tests.loop.engines import RunningEngine, tiny_engine

TINY_ROLLOUT = RolloutConfig(
    max_prompt_tokens=128, max_response_tokens=64, max_num_seqs=64, kv_cache_bytes=2**26, start_timeout_s=240.0
)


@pytest.fixture(scope="session")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    engine = tiny_engine(tmp_path_factory.mktemp("engine"), rollout=TINY_ROLLOUT)
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture
def engine(shared_engine: RunningEngine) -> RunningEngine:
    return shared_engine.ready()
