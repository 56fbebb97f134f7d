"""One engine server and one finished job for all tests of this folder that can share them: a start costs 15 to 40 s."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megarl.config.schema import ModelConfig, RolloutConfig
from megarl.run.supervise.process_specs import engine_process
from tests.loop.engines import HOST, KEY, RunningEngine, tiny_engine
from tests.loop.zygote import Zygote
from tests.system.jobs import TINY, Job

torch.set_num_threads(1)  # here: on models as tiny as these a second thread does nothing but wait, and takes a core

HELD_OUT = 60
WHOLE = (
    *TINY,
    f"taskset.eval_size={HELD_OUT}",
    "trainer.steps=3",
    "algorithm.group_size=8",
    "rollout.max_prompt_tokens=null",
)
"""Settings of ``whole_job``."""

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
def engine(shared_engine: RunningEngine, zygote: Zygote) -> RunningEngine:
    """First started as a job does it; from the zygote when a test has killed it."""
    running = shared_engine.ready()
    shared_engine.zygote = zygote
    return running


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """For tests of many engines: a start takes about 4 s instead of 15 to 40."""
    _, environment = engine_process("", TINY_ROLLOUT, ModelConfig(), HOST, 0)
    process = Zygote({**environment, "MEGARL_JOB_KEY": KEY})
    try:
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="session")
def whole_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Run once to its end, undisturbed."""
    job = Job(tmp_path_factory.mktemp("job") / "run", WHOLE).start()
    try:
        job.until(lambda: bool(job.steps()), "the first step")
        job.processes()  # remembers their sessions
        job.wait(120)
        yield job
    finally:
        job.clean_up()
