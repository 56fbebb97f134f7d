"""Trainer ranks that wait for engines when their job is asked to stop."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.config.schema import Config, ModelConfig, ParallelConfig, RolloutConfig
from megarl.core.errors import EngineError, WeightSyncError
from megarl.engines.client.control import EngineControl
from megarl.engines.client.names import JobAddresses
from megarl.learn.parallel.grid import megatron_grid
from megarl.run.process import ports
from megarl.train.sync.connection import EngineConnection
from megarl.weights.reshard.layouts import megatron_layout
from tests.engine_rows import FixedEngines
from tests.unit.reshard_cases import qwen3_config

HOST = "127.0.0.1"
pytestmark = pytest.mark.timeout(60)


def test_a_stop_ends_the_wait_for_an_engine() -> None:
    [port] = ports.choose(HOST, 1, None)
    with pytest.raises(EngineError, match="asked to stop"):
        EngineControl(f"http://{HOST}:{port}", "key").wait_ready(600, stopping=lambda: True)


def test_a_stop_ends_the_wait_of_every_rank() -> None:
    """Rank 0 looks at the request; the others wait for its word."""
    engine, link = ports.choose(HOST, 2, None)
    addresses, engines = JobAddresses(HOST, link, "key"), [f"http://{HOST}:{engine}"]
    config = Config(
        model=ModelConfig(path="unused"), parallel=ParallelConfig(tp=2), rollout=RolloutConfig(start_timeout_s=600)
    )
    hf_config = qwen3_config()
    layout = megatron_layout(hf_config, megatron_grid(config.parallel))
    asked, look = threading.Event(), FixedEngines(lambda: engines, "key")
    ranks = [
        EngineConnection(config, layout, hf_config, rank, look=look, addresses=addresses, stopping=asked.is_set)
        for rank in range(2)
    ]

    def connect(connection: EngineConnection) -> str:
        with pytest.raises((EngineError, WeightSyncError)) as raised:
            connection.connect()
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(connect, connection) for connection in ranks]
        assert not any(future.done() for future in waiting)
        asked.set()
        assert all("asked to stop" in future.result() for future in waiting)
