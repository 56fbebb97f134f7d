"""Weights that change under requests (``sync.pause=keep``): two trainer ranks, one engine and then two of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import torch
from sqlalchemy import select
from transformers import PreTrainedModel, Qwen3ForCausalLM

from megarl.buffer.store import Store
from megarl.buffer.store.tables import GROUPS
from megarl.config.schema import RolloutConfig
from megarl.core.errors import WeightsDiffer, WeightSyncError
from megarl.core.schema import WeightsVersion
from megarl.engines.client.client import Prompt, Sampling
from megarl.engines.client.frames import Completion
from megarl.engines.client.probe import ProbeText
from megarl.train.sync.publication import SyncReport
from tests.loop.engines import RunningEngine, perturbed, some_prompts, tiny_engine, transformers_logp
from tests.loop.same_run import steps_of
from tests.loop.trainers import Flipping, Ranks, ranks_of, refusing
from tests.loop.under_way import OPTIONS, ended, hold
from tests.loop.zygote import Zygote
from tests.system.jobs import START_S, TINY, Job

TOLERANCE = 1e-4
ROLLOUT = RolloutConfig(
    max_prompt_tokens=64, max_response_tokens=1100, max_num_seqs=2, kv_cache_bytes=2**26, start_timeout_s=240.0
)
TOKENS = 800
LONG = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
"""Time enough for a pause once some tokens are there; a test asks again where it was not."""
TEXT = [1, 9, 77, 150, 199, 4, 4, 31]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Iterator[RunningEngine]:
    engine = tiny_engine(tmp_path_factory.mktemp("keeping"), rollout=ROLLOUT, sizes={"max_position_embeddings": 1280})
    engine.config = replace(engine.config, sync=replace(engine.config.sync, pause="keep"))
    engine.zygote, engine.options = zygote, OPTIONS
    try:
        yield engine.ready()
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def model(engine: RunningEngine) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(engine.model_path, attn_implementation="eager").eval()


def probe_of(model: PreTrainedModel) -> ProbeText:
    return ProbeText(TEXT, transformers_logp(model, TEXT[:1], TEXT[1:]).tolist(), 1e-3)


def published(ranks: Ranks, model: PreTrainedModel, version: WeightsVersion) -> SyncReport:
    if any(p.connection.transport is None for p in ranks.publishers):
        assert ranks.call(lambda rank, p: p.connect()) == [None] * len(ranks.publishers)
    reports = ranks.publish(model, version, probe=probe_of(model))
    assert isinstance(reports[0], SyncReport), reports
    assert reports == [reports[0]] * len(reports)
    return reports[0]


@contextmanager
def asked(engine: RunningEngine, prompts: Sequence[Prompt]) -> Iterator[Future[list[Completion]]]:
    """Requests of which the engine has begun two when the body begins: it is paused then. They are awaited after it."""
    with ThreadPoolExecutor(1) as pool:
        while True:
            answer = pool.submit(engine.generate, prompts, LONG)
            if hold(engine, answer, running=2, tokens=11):
                break
        try:
            yield answer
        finally:
            engine.control.resume()  # where the body failed
        answer.result(120)


@contextmanager
def asked_again(engine: RunningEngine, prompts: Sequence[Prompt]) -> Iterator[list[Completion]]:
    """Requests that follow one another for as long as the body lasts, and their completions. The engine is paused in
    one of them when the body begins."""
    completions: list[Completion] = []
    ended: Future[None] = Future()

    def ask() -> None:
        while not ended.done():
            completions.extend(engine.generate(prompts, LONG))

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            assert hold(engine, ended)
            yield completions
        finally:
            ended.set_result(None)
            engine.control.resume()  # where the body failed
        asking.result(120)


def test_tokens_after_the_cut_are_those_of_the_new_weights(engine: RunningEngine, model: Qwen3ForCausalLM) -> None:
    """More requests than the engine takes at once; the probe does not wait for one of them to end."""
    ranks, new = ranks_of(engine), perturbed(model, 1)
    old_version, new_version = WeightsVersion(1, 1), WeightsVersion(1, 2)
    published(ranks, model, old_version)
    prompts = some_prompts(4)
    with asked(engine, prompts) as answer:
        report = published(ranks, new, new_version)
    probe, *requests = ended(engine)[-1 - len(prompts) :]
    assert not probe.startswith("megarl-") and all(request.startswith("megarl-") for request in requests)
    assert report.digests == len(list(new.parameters())) and report.pause_seconds == report.seconds
    assert report.probe_diff_max is not None and report.probe_diff_max < TOLERANCE
    whole = answer.result()
    spans = [[(s.version, s.start, s.end) for s in c.versions] for c in whole]
    assert [[version for version, *_ in of] for of in spans] == [
        [str(old_version), str(new_version)],
        [str(old_version), str(new_version)],
        [str(new_version)],
        [str(new_version)],
    ]
    for prompt, c, [(_, start, cut), (_, again, end)] in zip(prompts, whole, spans[:2], strict=False):
        assert (start, again, end) == (0, cut, TOKENS) and cut > 10
        ids = c.token_ids.tolist()
        [after] = engine.generate([Prompt([*prompt.token_ids, *ids[:cut]], 1)], replace(LONG, max_tokens=100))
        assert after.token_ids.tolist() == ids[cut : cut + 100]
        after_logp = torch.from_numpy(after.logprobs)
        torch.testing.assert_close(torch.from_numpy(c.logprobs[cut : cut + 100]), after_logp, atol=TOLERANCE, rtol=0)
        # The engine is not its own judge: transformers says the same of both sides of the cut, with other weights.
        prefix, sampled = [*prompt.token_ids, *ids[:cut]], torch.from_numpy(c.logprobs)
        before, behind = (
            transformers_logp(model, prompt.token_ids, ids[:cut]),
            transformers_logp(new, prefix, ids[cut:]),
        )
        assert (sampled[:cut] - before).abs().max() < TOLERANCE > (sampled[cut:] - behind).abs().max()
        assert (sampled[cut:] - transformers_logp(model, prefix, ids[cut:])).abs().max() > 0.05


def test_a_flipped_bit_names_the_engine_that_has_it(
    engine: RunningEngine, model: Qwen3ForCausalLM, zygote: Zygote, tmp_path: Path
) -> None:
    """The first engine has the version already, so that the bit is one of the second's, whose ranks begin at 0."""
    second = RunningEngine(engine.config, tmp_path, zygote).ready()
    try:
        published(ranks_of(engine), model, WeightsVersion(2, 1))
        ranks = ranks_of(engine, others=[second])
        assert ranks.call(lambda rank, p: p.connect()) == [None, None]
        sender = ranks.publishers[1].connection
        assert sender.transport is not None
        sender.transport = Flipping(sender.transport, nth=0)
        for failure in ranks.publish(model, WeightsVersion(2, 1), probe=probe_of(model)):
            assert isinstance(failure, WeightsDiffer)
            assert f"the engine at {second.url}" in str(failure) and "on destination rank 0" in str(failure)
        assert (engine.control.state().refusing, engine.control.state().version) == (None, "2.1")
        assert "are refused" in refusing(second)
        assert published(ranks, model, WeightsVersion(2, 1)).digests == len(list(model.parameters()))
    finally:
        second.stop()


def test_an_engine_that_dies_in_its_update_does_not_stop_the_other(
    engine: RunningEngine, model: Qwen3ForCausalLM, zygote: Zygote, tmp_path: Path
) -> None:
    """The first in order dies. The other takes its weights all the same, with requests under way, and is left alone
    when the first is joined again."""
    first = RunningEngine(engine.config, tmp_path, zygote).ready()
    try:
        ranks, new = ranks_of(first, others=[engine]), perturbed(model, 2)
        old_version, new_version = WeightsVersion(3, 1), WeightsVersion(3, 2)
        assert published(ranks, model, old_version).digests == 2 * len(list(model.parameters()))
        with asked_again(engine, some_prompts(1)) as completions:
            os.killpg(first.pid, signal.SIGKILL)
            failures = ranks.publish(new, new_version, probe=probe_of(new))
            assert all(isinstance(failure, WeightSyncError) and first.url in str(failure) for failure in failures)
            assert ranks.publishers[0].died()
            state = engine.control.state()
            assert (state.version, state.paused, state.refusing) == (str(new_version), False, None)
            first.ready()
            report = published(ranks, new, new_version)
        assert report.digests == len(list(model.parameters()))
        spans = [span.version for completion in completions for span in completion.versions]
        assert [version for version, _ in groupby(spans)] == [str(old_version), str(new_version)]
        assert first.control.state().version == str(new_version)
        assert published(ranks, new, new_version).digests == 0
    finally:
        first.stop()


@pytest.mark.soak  # tests/loop/test_meanwhile.py has such a job too
def test_a_job_whose_requests_outlive_their_weights(tmp_path: Path) -> None:
    """Two engines, responses longer than a step: some are sampled by two versions, and none by too old a one."""
    bound, steps = 2, 4
    settings = (
        *TINY,
        "model.from_scratch.max_position_embeddings=256",
        f"trainer.steps={steps}",
        "trainer.tasks_per_step=4",
        "trainer.warm_start.steps=1",  # a model that seldom ends by itself
        "rollout.max_response_tokens=128",
        "rollout.max_num_seqs=16",
        "rollout.replicas=2",
        "sync.order=completion",
        "sync.pause=keep",
        f"sync.max_staleness={bound}",
        "algorithm.correction=truncate",
        "taskset.eval_size=4",
    )
    job = Job(tmp_path / "run", settings).start()
    try:
        assert job.wait(START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    records = steps_of(tmp_path / "run")
    assert [record["training/global_step"] for record in records] == [float(s + 1) for s in range(steps)]
    assert max(record["rollout/lag/max"] for record in records) <= bound
    tensors = records[0]["sync/digests"]
    for record in records:
        assert record["sync/digests"] == tensors > 0 and record["sync/probe_diff_max"] < 1e-3
        assert 0 < record["sync/pause_seconds"] < record["sync/seconds"]
    store = Store(f"sqlite:///{tmp_path}/run/store.db", read_only=True)
    groups = store.database.read(lambda c: c.execute(select(GROUPS).where(GROUPS.c.state == "consumed")).all())
    mixed = 0
    for group in (row for row in groups if row.rollout_id.startswith("train")):
        for trajectory in store.groups.read([group.group_id]):
            spans = [span.version for turn in trajectory.turns for span in turn.spans]
            assert spans == sorted(spans)
            mixed += len(set(spans)) > 1
            lags = [group.used_by - 1 - step for step in store.pacing.version_steps(set(spans)).values()]
            assert all(0 <= lag <= bound for lag in lags)
    store.close()
    assert mixed > 0
