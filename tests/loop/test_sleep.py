"""An engine sleeps while a trainer uses its machine's memory; after the next publication it computes the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3ForCausalLM

from megarl.config.schema import ParallelConfig
from megarl.core.errors import EngineError, WeightSyncError
from megarl.core.processes.machine import group_members, resident_bytes
from megarl.engines.client.client import Sampling
from megarl.engines.client.control import EngineControl
from megarl.engines.client.frames import Completion
from megarl.engines.client.names import UNTIL_PUBLISHED
from tests.loop.conftest import TINY_ROLLOUT
from tests.loop.engines import RunningEngine, perturbed, some_prompts, tiny_engine
from tests.loop.test_sync_families import EXPERTS, Cell, engine_of
from tests.loop.trainers import Breaking, Ranks, ranks_of, refusing, versions
from tests.loop.under_way import OPTIONS, under_way, until
from tests.loop.zygote import Zygote

GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
KV_BYTES = 2**28
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""25 million parameters, whose bytes stand out from an engine's other memory."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Iterator[RunningEngine]:
    rollout = replace(TINY_ROLLOUT, kv_cache_bytes=KV_BYTES)
    engine = tiny_engine(tmp_path_factory.mktemp("engine"), rollout=rollout, sizes=SIZES)
    engine.config = replace(engine.config, sync=replace(engine.config.sync, bucket_bytes=2**22))
    engine.zygote, engine.environment, engine.options = zygote, {UNTIL_PUBLISHED: "1"}, OPTIONS
    try:
        yield engine
    finally:
        engine.stop()
    assert engine.leftovers() == []


@pytest.fixture(scope="module")
def model(server: RunningEngine) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(server.model_path).eval()


@pytest.fixture(scope="module")
def linked() -> dict[str, Ranks]:
    return {}


@pytest.fixture
def engine(server: RunningEngine) -> RunningEngine:
    """Runs; a test may find it asleep."""
    return server.ready()


@pytest.fixture
def ranks(engine: RunningEngine, linked: dict[str, Ranks]) -> Ranks:
    """Linked to the engine that runs now."""
    if engine.url not in linked:
        linked[engine.url] = ranks_of(engine)
    return linked[engine.url]


def wake_and_publish(engine: RunningEngine, ranks: Ranks, model: PreTrainedModel) -> None:
    """Wake as a trainer does it: weights, their values, then the KV cache."""
    engine.control.wake("weights")
    ranks.publish_whole(model)
    engine.control.wake("kv_cache")


def worker_bytes(engine: RunningEngine) -> int:
    """Resident bytes of the engine's process that has the weights."""
    return max(resident_bytes(pid) for pid in group_members(engine.pid))


def greedy(engine: RunningEngine) -> list[Completion]:
    """One prompt after the other: the sizes of batches, which the time decides, change bits without any sleep."""
    return [completion for prompt in some_prompts(4) for completion in engine.generate([prompt], GREEDY)]


def assert_same_bits(first: Sequence[Completion], second: Sequence[Completion]) -> None:
    assert len(first) == len(second) == len(some_prompts(4))
    for a, b in zip(first, second, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert np.array_equal(a.logprobs.view(np.int32), b.logprobs.view(np.int32))


def test_an_engine_sleeps_before_it_has_ever_had_weights(
    engine: RunningEngine, linked: dict[str, Ranks], model: Qwen3ForCausalLM
) -> None:
    """Its trainer joins while it sleeps."""
    [answer] = engine.control.sleep()
    assert answer["freed"] > KV_BYTES
    assert "sleeps" in refusing(engine)
    linked[engine.url] = ranks_of(engine)
    assert linked[engine.url].call(lambda rank, p: p.connect()) == [None, None]
    wake_and_publish(engine, linked[engine.url], model)
    assert len(greedy(engine)) == len(some_prompts(4))


def test_sleep_frees_the_memory_and_a_publication_brings_back_the_same_bits(
    engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM
) -> None:
    wake_and_publish(engine, ranks, model)  # waking what is awake does nothing
    before, awake = greedy(engine), worker_bytes(engine)
    size = KV_BYTES + 4 * sum(p.numel() for p in model.parameters())

    [answer] = engine.control.sleep()
    asleep = worker_bytes(engine)
    assert awake - asleep > 0.9 * size
    assert answer["freed"] > 0.9 * size and abs(answer["rss"] - asleep) < 2**24
    assert "sleeps" in refusing(engine)
    assert abs(engine.control.sleep()[0]["freed"]) < 2**24  # twice does nothing
    assert worker_bytes(engine) < asleep + 2**24

    engine.control.wake("weights")
    assert "sleeps" in refusing(engine)
    report = ranks.publish_whole(model)
    assert report.digests == len(list(model.parameters()))
    assert worker_bytes(engine) < awake - 0.9 * KV_BYTES  # the trainer may still be there
    assert "KV cache sleeps" in refusing(engine)
    assert engine.control.state().paused
    [answer] = engine.control.wake("kv_cache")
    assert answer["taken"] > 0.9 * KV_BYTES
    assert not engine.control.state().paused
    assert_same_bits(before, greedy(engine))
    assert worker_bytes(engine) < awake + 2**25


def test_weights_are_kept(engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM) -> None:
    wake_and_publish(engine, ranks, model)
    before, weights = greedy(engine), 4 * sum(p.numel() for p in model.parameters())
    [answer] = engine.control.sleep(keep_weights=True)
    assert answer["freed"] > 0.9 * KV_BYTES and "sleeps" in refusing(engine)
    [answer] = engine.control.sleep()
    assert answer["freed"] > 0.9 * weights, "they were there until now"
    wake_and_publish(engine, ranks, model)
    assert_same_bits(before, greedy(engine))


def test_weights_may_come_after_the_kv_cache(engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM) -> None:
    wake_and_publish(engine, ranks, model)
    before = greedy(engine)
    engine.control.sleep()
    engine.control.wake("kv_cache")
    assert "sleeps" in refusing(engine)
    assert engine.control.state().paused
    engine.control.wake("weights")
    ranks.publish_whole(perturbed(model, 1))
    other = greedy(engine)
    ranks.publish_whole(model)
    assert_same_bits(before, greedy(engine))
    assert any(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(before, other, strict=True))


def test_a_request_that_the_pause_did_not_end_waits_for_the_kv_cache(
    engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that passed the gate before the sleep and reached vLLM after its pause: a publication's resume must not run
    it while the KV cache has no memory."""
    wake_and_publish(engine, ranks, model)
    before = greedy(engine)
    engine.control.pause()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(greedy, engine)
        until(lambda: bool(under_way(engine)))
        monkeypatch.setattr(EngineControl, "pause", lambda self, mode="wait": None)  # it would end what is queued
        engine.control.sleep()
        monkeypatch.undo()
        engine.control.wake("weights")
        ranks.publish_whole(model)
        assert engine.control.state().paused and under_way(engine) == [0]
        engine.control.wake("kv_cache")
        assert_same_bits(before, waiting.result(60))


def test_steps_that_need_weights_name_the_sleep(engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM) -> None:
    wake_and_publish(engine, ranks, model)
    engine.control.sleep()
    with pytest.raises(EngineError, match=r"asleep: megarl_wake\('weights'\) comes before megarl_digests"):
        engine.control.workers("megarl_digests")
    for failure in ranks.publish(model, next(versions)):
        assert "comes before start_weight_update" in str(failure)
    refusing(engine)
    with pytest.raises(EngineError, match="megarl_wake takes one of weights, kv_cache"):
        engine.control.workers("megarl_wake", "everything")
    engine.control.wake("weights")
    with pytest.raises(EngineError, match="no publication has brought them since"):
        engine.control.workers("megarl_digests")
    wake_and_publish(engine, ranks, model)
    assert greedy(engine)


def test_an_update_cut_midway_does_not_keep_it_awake(
    engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM
) -> None:
    """vLLM's reload has then put some tensors aside."""
    wake_and_publish(engine, ranks, model)
    before = greedy(engine)
    ranks.publishers[1].connection.transport = Breaking(ranks.publishers[1].connection.transport, nth=5)
    assert all("the cable was cut" in str(failure) for failure in ranks.publish(model, next(versions)))
    [answer] = engine.control.sleep()
    assert answer["freed"] > 0.9 * (KV_BYTES + 4 * sum(p.numel() for p in model.parameters()))
    wake_and_publish(engine, ranks, model)
    assert_same_bits(before, greedy(engine))


def test_killed_while_asleep_it_leaves_nothing(engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM) -> None:
    engine.control.sleep()
    engine.stop()
    assert engine.leftovers() == []
    engine.ready()
    engine.control.wake("weights")  # asked of the one in its place
    engine.control.wake("kv_cache")
    assert "have not been published" in refusing(engine)


TP2 = ParallelConfig(tp=2)
EXPERT_SIZES = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 16, "num_hidden_layers": 4}
LATENT_SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
}
CELLS = (
    Cell("qwen3_moe", TP2, EXPERTS, changes=EXPERT_SIZES),
    Cell("deepseek_v3", TP2, changes=LATENT_SIZES),
    Cell("llama3", TP2, {"pp": 2}),
    Cell("qwen3", TP2, {"tp": 2}, "bfloat16", changes={"tie_word_embeddings": True}),
)
"""Packed experts and latent attention, of 26 million parameters each; stages, and workers in processes of their own."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=pytest.mark.soak if cell.family == "llama3" else ()) for cell in CELLS],
    ids=lambda cell: f"{cell.family}-{cell.dtype}",
)
def test_other_engines_sleep(cell: Cell, tmp_path: Path, zygote: Zygote) -> None:
    with engine_of(cell, tmp_path, zygote) as (engine, ranks, model):
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        new = perturbed(model, 1)
        ranks.publish_whole(new)
        before = greedy(engine)
        freed = [answer["freed"] for answer in engine.control.sleep()]
        # The cache's last pages may be none of its own.
        assert sum(freed) > 0.9 * weights + 0.5 * engine.config.rollout.kv_cache_bytes * len(freed)
        refusing(engine)
        wake_and_publish(engine, ranks, new)
        assert_same_bits(before, greedy(engine))


class DeviceWorker:
    """A worker on a GPU as far as its sleep goes; no test has run on one."""

    def __init__(self, *, sleeps: bool = True) -> None:
        self.model_config = SimpleNamespace(enable_sleep_mode=sleeps)
        self.model_runner = SimpleNamespace(kv_caches=[torch.ones(4)])
        self.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
        self.calls: list[Any] = []

    def sleep(self, level: int) -> None:
        self.calls.append(level)

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(tags)


def test_on_a_gpu_vllm_sleeps_once_and_wakes_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.engines.sync import sleep

    free = iter([10, 70, 70, 70, 70, 30, 30, 30, 30, 10, 10, 10])
    monkeypatch.setattr(sleep, "device_bytes_free", lambda: next(free))
    worker = DeviceWorker()
    sleeper = sleep.DeviceSleeper(worker)
    assert [sleeper.sleep(False)["freed"], sleeper.sleep(False)["freed"]] == [60, 0]
    assert [sleeper.wake("weights")["taken"], sleeper.wake("weights")["taken"]] == [40, 0]
    assert [sleeper.wake("kv_cache")["taken"], sleeper.wake("kv_cache")["taken"]] == [20, 0]
    assert worker.calls == [2, ["weights"], ["kv_cache"]]
    assert worker.model_runner.kv_caches[0].tolist() == [0] * 4
    with pytest.raises(WeightSyncError, match="started without --enable-sleep-mode"):
        sleep.DeviceSleeper(DeviceWorker(sleeps=False)).sleep(False)
    monkeypatch.setattr(sleep, "device_bytes_free", lambda: 0)
    keeps = DeviceWorker()
    sleep.DeviceSleeper(keeps).sleep(keep_weights=True)
    assert keeps.calls == [1]
