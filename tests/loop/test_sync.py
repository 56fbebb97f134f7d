"""Weights go from two trainer ranks (tp=2 shards of Megatron's layout) to a real engine, and both sides prove it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from megarl.config.schema import ParallelConfig, RolloutConfig, SyncConfig
from megarl.core.errors import EngineError, WeightsDiffer, WeightSyncError
from megarl.core.schema import WeightsVersion
from megarl.engines.client.client import Prompt, Sampling
from megarl.engines.client.names import UNTIL_PUBLISHED
from megarl.engines.client.probe import FarText, Probed, ProbeText, check_probe
from megarl.engines.sync.shared import SharedMemorySender
from megarl.learn.training.optimizer import whole_digests
from megarl.train.sync import weights
from megarl.train.sync.publish import LEAST_BUCKET
from megarl.train.sync.weights import WeightSync
from megarl.weights.reshard.buckets import HEADER
from tests.loop.engines import RunningEngine, perturbed, some_prompts, tiny_engine, transformers_logp, worst_difference
from tests.loop.trainers import (
    Breaking,
    Flipping,
    Losing,
    Ranks,
    checkpoint_tensors,
    probe,
    ranks_of,
    refusing,
    shards,
    versions,
)
from tests.loop.zygote import Zygote

FP32_TOLERANCE = 1e-4
SAMPLING = Sampling(max_tokens=8, ignore_eos=True)


def difference(engine: RunningEngine, model: Qwen3ForCausalLM, prompts: list[Prompt] | None = None) -> float:
    prompts = prompts or some_prompts()
    return worst_difference(model, prompts, engine.generate(prompts, SAMPLING))


@pytest.fixture(scope="module")
def model(shared_engine: RunningEngine) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(shared_engine.model_path, attn_implementation="eager").eval()


@pytest.fixture
def ranks(engine: RunningEngine, linked: dict[str, Ranks]) -> Ranks:
    """Linked to the engine that runs now."""
    if engine.url not in linked:
        linked[engine.url] = ranks_of(engine)
    return linked[engine.url]


@pytest.fixture(scope="module")
def linked() -> Iterator[dict[str, Ranks]]:
    yield {}


def test_published_weights_are_what_the_engine_computes_with(
    engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM
) -> None:
    for seed in (1, 2):
        new = perturbed(model, seed)
        before = difference(engine, new)
        report = ranks.publish_whole(new)
        assert before > 0.05
        assert difference(engine, new) < FP32_TOLERANCE
        assert report.bytes == 4 * sum(p.numel() for p in new.parameters())
        assert report.digests == len(list(new.parameters()))


def test_samples_carry_the_version_that_sampled_them(
    engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM
) -> None:
    ranks.publish_whole(model)
    version = str(WeightsVersion(1, next(versions).n - 1))
    assert engine.control.state().version == version
    for completion in engine.generate(some_prompts(), SAMPLING):
        assert completion.versions == ((version, 0, len(completion.token_ids)),)


def test_an_engine_refuses_requests_for_newer_weights(
    engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM
) -> None:
    """As one does that a publication has left out, and that knows nothing of it."""
    ranks.publish_whole(model)
    version = WeightsVersion.parse(engine.control.state().version)
    newer = version._replace(n=version.n + 1)
    assert engine.generate(some_prompts(1), Sampling(max_tokens=2, oldest=version))
    with pytest.raises(EngineError, match=rf"409 .*weights {version} are older than {newer}"):
        engine.generate(some_prompts(1), Sampling(max_tokens=2, oldest=newer))


def test_many_publications_leave_no_pile_of_keys(ranks: Ranks, model: Qwen3ForCausalLM) -> None:
    counts = []
    for _ in range(4):
        ranks.publish_whole(model)
        counts.append(ranks.publishers[0].connection.messages.store.num_keys())
    assert len(set(counts[1:])) == 1


def test_one_perturbed_weight_changes_the_log_probs_as_transformers_says(
    engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM
) -> None:
    tokens = [1, 9, 77, 150, 199, 4, 4, 31]
    ranks.publish_whole(model)
    before = torch.tensor(engine.control.probe(tokens).prefill)
    other = perturbed(model, 0)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight[3, 5] += 1.0
    ranks.publish_whole(other)
    after = torch.tensor(engine.control.probe(tokens).prefill)
    predicted = transformers_logp(other, tokens[:1], tokens[1:]) - transformers_logp(model, tokens[:1], tokens[1:])
    assert predicted.abs().max() > 1e-3
    torch.testing.assert_close(after - before, predicted, atol=FP32_TOLERANCE, rtol=0)


def test_no_stale_prefix_cache(engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM) -> None:
    prompts = some_prompts(length=100)  # three whole blocks of 32, which the engine keeps
    ranks.publish_whole(model)
    assert difference(engine, model, prompts) < FP32_TOLERANCE
    new = perturbed(model, 3)
    ranks.publish_whole(new)
    assert difference(engine, new, prompts) < FP32_TOLERANCE


def test_signed_zeros_and_subnormals_are_proven_too(
    engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM
) -> None:
    """A product with the identity loses them; a weight that decays to nothing must not stop the job."""
    new = perturbed(model, 4)
    with torch.no_grad():
        new.model.layers[0].self_attn.k_proj.weight[0, :4] = torch.tensor([-0.0, 1e-40, -1e-40, 0.0])
        new.lm_head.weight[7] = -0.0
    ranks.publish_whole(new)
    assert difference(engine, new) < FP32_TOLERANCE


def test_one_flipped_bit_names_its_tensor_and_a_retry_mends_it(
    engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM
) -> None:
    ranks.publish_whole(model)
    publisher = ranks.publishers[1]
    publisher.connection.transport = Flipping(publisher.connection.transport, nth=0)
    new = perturbed(model, 5)
    failures = ranks.publish(new, next(versions))
    assert (
        isinstance(failures[0], WeightsDiffer) and ranks.publishers[0].died() == []
    )  # for a job the end, whatever it may replace
    for failure in failures:
        assert isinstance(failure, WeightSyncError)
        assert "model.embed_tokens.weight" in str(failure)
        assert str(failure).count("digest sent") == 1
    assert "model.embed_tokens.weight" in refusing(engine)
    ranks.publish_whole(new)
    assert difference(engine, new) < FP32_TOLERANCE


def test_buckets_without_memory_are_halved_and_the_weights_proven(
    engine: RunningEngine, linked: dict[str, Ranks], model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender really fails to allocate the first size; the engine is told the second one when it is joined again."""
    sizes, most, allocate = [], LEAST_BUCKET + HEADER, SharedMemorySender.allocate

    def limited(sender: SharedMemorySender, nbytes: int) -> torch.Tensor:
        sizes.append(nbytes)
        if nbytes > most:
            torch.empty(1 << 50)
        return allocate(sender, nbytes)

    monkeypatch.setattr(SharedMemorySender, "allocate", limited)
    config = replace(engine.config, parallel=ParallelConfig())
    ranks = ranks_of(engine, replace(config, sync=SyncConfig(bucket_bytes=2 * LEAST_BUCKET)))
    linked.clear()  # the engine leaves the link of others
    [publisher] = ranks.publishers
    new, said, tokens = perturbed(model, 8), [], [1, 9, 77, 150]
    tensors = shards(checkpoint_tensors(new), ranks.layout, 0)
    written = whole_digests(tensors)
    one: Any = SimpleNamespace(agree=lambda yes: yes, stop_requested=lambda: False, log=said.append)
    models: Any = SimpleNamespace(
        head=None, actor=SimpleNamespace(model=SimpleNamespace(adapters=None, tensors=tensors, written=lambda: written))
    )
    context: Any = SimpleNamespace(attempt=1, rank=0, config=config)
    turns: Any = SimpleNamespace(enter=lambda phase: None, engines=None)
    sync = WeightSync(context, one, one, models, publisher, turns, lambda *version: None, links=publisher)
    text = ProbeText(tokens, transformers_logp(new, tokens[:1], tokens[1:]).tolist(), 1e-3)
    monkeypatch.setattr(weights, "probe_text", lambda *_, **__: text)
    sync.connect()
    sync.version = next(versions)
    assert sync.publish(0)["sync/digests"] == len(list(new.parameters()))
    assert f"sync.bucket_bytes {2 * LEAST_BUCKET} -> {LEAST_BUCKET}" in said[0] and len(said) == 1
    assert "can't allocate memory" in said[0] and sizes[0] > most and len(sizes) == 3
    assert difference(engine, new) < FP32_TOLERANCE


def test_an_old_copy_is_not_sent(engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM) -> None:
    """Of weights that a step of learning rate 1e-5 has changed, far below what the probe can see."""
    ranks.publish_whole(model)
    new = perturbed(model, 0)
    new.load_state_dict(model.state_dict())
    with torch.no_grad():
        new.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-5
    failures = ranks.publish(model, next(versions), trained=new)
    assert all(isinstance(failure, WeightsDiffer) for failure in failures)
    assert "decoder.layers.1.mlp.linear_fc2.weight" in str(failures[0]) and "what the optimizer last wrote" in str(
        failures[0]
    )
    assert "decoder.layers.1.mlp.linear_fc2.weight" in refusing(engine)
    ranks.publish_whole(new)
    assert difference(engine, new) < FP32_TOLERANCE


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_cut_midway_refuses_and_a_retry_mends_it(
    engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM, rank: int
) -> None:
    ranks.publish_whole(model)
    publisher = ranks.publishers[rank]
    publisher.connection.transport = Breaking(publisher.connection.transport, nth=3)
    new = perturbed(model, 6)
    failures = ranks.publish(new, next(versions))
    assert all(isinstance(failure, WeightSyncError) for failure in failures)
    assert all("the cable was cut" in str(failure) for failure in failures)
    assert not isinstance(failures[0], WeightsDiffer) and ranks.publishers[0].died() == []
    refusing(engine)
    ranks.publish_whole(new)
    assert difference(engine, new) < FP32_TOLERANCE


def test_a_lost_message_is_named_and_a_retry_mends_it(
    engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM
) -> None:
    ranks.publish_whole(model)
    publisher = ranks.publishers[1]
    publisher.connection.transport = Losing(publisher.connection.transport, nth=2)
    for failure in ranks.publish(model, next(versions)):
        assert isinstance(failure, WeightSyncError)
        assert "message 2 (model." in str(failure)
        assert "from source rank 1 to destination rank 0 was expected" in str(failure)
    assert "message 2" in refusing(engine)
    ranks.publish_whole(model)


def test_of_two_engines_the_one_that_was_replaced_is_joined_alone(
    engine: RunningEngine, zygote: Zygote, model: Qwen3ForCausalLM, tmp_path: Path
) -> None:
    second = RunningEngine(engine.config, tmp_path, zygote).ready()
    try:
        both = ranks_of(engine, others=[second])
        both.publish_whole(model)
        links = [dict(p.connection.links.notices.links) for p in both.publishers]
        second.stop()
        second.ready()
        assert both.call(lambda rank, p: p.connect()) == [None, None]
        for before, publisher in zip(links, both.publishers, strict=True):
            after = publisher.connection.links.notices.links
            assert after[0] is before[0] and after[1] is not before[1]
        new = perturbed(model, 9)
        report = both.publish_whole(new)
        assert report.digests == 2 * len(list(new.parameters()))
        assert max(difference(engine, new), difference(second, new)) < FP32_TOLERANCE
    finally:
        second.stop()


def test_trainer_and_engine_that_do_not_agree_are_told_apart(engine: RunningEngine, ranks: Ranks) -> None:
    """Before anything joins, so at once; the engine goes on with the weights it has."""
    config = replace(engine.config, model=replace(engine.config.model, dtype="bfloat16"))
    for failure in ranks_of(engine, config).call(lambda rank, p: p.connect()):
        assert isinstance(failure, EngineError | WeightSyncError)
        assert "trainer and engine do not agree on the weights" in str(failure)
    assert engine.generate(some_prompts(1), SAMPLING)


def test_an_engine_that_cannot_join_says_why_and_a_retry_mends_it(
    engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, timeout = ranks.publishers[0].connection, ranks.publishers[0].connection.timeout_s
    told = leader.init_info

    def other_plan(replica: int, *places: Any) -> dict[str, Any]:
        return told(replica, *places) | ({"fingerprint": "another"} if places else {})  # with places: to join

    def connect(timeout_s: float) -> list[Any]:
        for publisher in ranks.publishers:
            publisher.connection.timeout_s = timeout_s
            publisher.connection.disconnect()
        return ranks.call(lambda rank, p: p.connect())

    with monkeypatch.context() as patched:
        patched.setattr(leader, "init_info", other_plan)
        first, second = connect(3.0)
    assert "the weight link could not be joined" in str(second)
    assert "the weight link could not be joined" in str(first) and "megarl_agree comes before" in str(first)
    assert all(publisher.connection.transport is None for publisher in ranks.publishers)
    assert connect(timeout) == [None, None]
    ranks.publish_whole(model)


def test_the_probe_compares_both_sides(engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM) -> None:
    ranks.publish_whole(model)
    tokens = [1, 9, 77, 150, 199, 4, 4, 31]
    logp = transformers_logp(model, tokens[:1], tokens[1:]).tolist()
    first, second = ranks.call(lambda rank, p: p.probe(probe(tokens, logp if rank == 0 else [])))
    assert isinstance(first, float) and first == second and first < FP32_TOLERANCE
    logp[3] += 0.01
    failures = ranks.call(lambda rank, p: p.probe(probe(tokens, logp if rank == 0 else [])))
    assert isinstance(failures[0], WeightsDiffer)
    for failure in failures:
        assert isinstance(failure, WeightSyncError) and "at token 4 (engine" in str(failure)
    assert "at token 4 (engine" in refusing(engine)
    ranks.publish_whole(model)


def test_a_token_after_a_far_text_is_compared(engine: RunningEngine, ranks: Ranks, model: Qwen3ForCausalLM) -> None:
    ranks.publish_whole(model)
    tokens = torch.randint(5, 200, (100,), generator=torch.Generator().manual_seed(2)).tolist()
    candidates = [7, 19, 60, 121]
    logp = [float(transformers_logp(model, tokens, [candidate])) for candidate in candidates]
    [token], [among] = engine.control.scores(tokens, 1, among=candidates)[1:]
    expected = torch.tensor(logp).log_softmax(0)[candidates.index(token)]
    assert among == pytest.approx(float(expected), abs=FP32_TOLERANCE) and among < 0
    short = probe(tokens[:3], transformers_logp(model, tokens[:1], tokens[1:3]).tolist())
    far = FarText(tokens, candidates, logp, 1e-4)
    assert all(isinstance(found, float) for found in ranks.call(lambda rank, p: p.probe(replace(short, far=[far]))))
    logp[candidates.index(token)] += 0.1
    for failure in ranks.call(lambda rank, p: p.probe(replace(short, far=[far]))):
        assert isinstance(failure, WeightSyncError) and "after 100 tokens the log-prob of" in str(failure)
    assert "after 100 tokens" in refusing(engine)
    ranks.publish_whole(model)


def test_check_probe_takes_no_nan_for_agreement() -> None:
    assert check_probe(Probed([-1.0, -2.0]), [-1.0, -2.0005], 1e-3).position == 1
    for wrong in ([-1.0, float("nan")], [float("nan"), -2.0]):
        for probed in (
            Probed(wrong),
            Probed([-1.0, -2.0], wrong, [-1.0, -2.0]),
            Probed([-1.0, -2.0], [-1.0] * 2, wrong),
        ):
            with pytest.raises(WeightSyncError):
                check_probe(probed, [-1.0, -2.0], 1e-3)


def test_an_engine_of_a_job_answers_nothing_before_it_has_the_jobs_weights(
    tmp_path_factory: pytest.TempPathFactory, zygote: Zygote, model: Qwen3ForCausalLM, shared_engine: RunningEngine
) -> None:
    """One that comes up in the middle of a job has the weights of the model's files. And one that has died is known to
    have."""
    engine = tiny_engine(tmp_path_factory.mktemp("engine"), rollout=shared_engine.config.rollout)
    engine.zygote, engine.environment = zygote, {UNTIL_PUBLISHED: "1"}
    try:
        engine.ready()
        assert "have not been published" in refusing(engine)
        ranks = ranks_of(engine)
        new = perturbed(model, 11)
        ranks.publish_whole(new)
        assert difference(engine, new) < FP32_TOLERANCE
        assert ranks.publishers[0].died() == []
    finally:
        engine.stop()
    [fate] = ranks.publishers[0].died()
    assert "did not answer" in fate
    failures = ranks.publish(new, next(versions))
    assert all(isinstance(failure, WeightSyncError) and not isinstance(failure, WeightsDiffer) for failure in failures)


OTHER_ENGINES: dict[str, dict[str, Any]] = {"tied": {"tied": True}, "bfloat16": {"dtype": "bfloat16"}}


@pytest.mark.slow
def test_engines_of_unequal_workers(
    engine: RunningEngine, tmp_path: Path, zygote: Zygote, model: Qwen3ForCausalLM
) -> None:
    """One of two workers takes weights alone, then beside one of a single worker, and alone again."""
    wide = RunningEngine(replace(engine.config, rollout=replace(engine.config.rollout, tp=2)), tmp_path, zygote)
    others, tensors = list[RunningEngine](), len(list(model.parameters()))
    try:
        wide.ready()
        assert (engine.control.state().workers, wide.control.state().workers) == (1, 2)
        ranks = ranks_of(wide, others=others)
        alone = 0
        for seed, beside in enumerate(([], [], [engine], [engine], [])):
            others[:] = beside
            new = perturbed(model, 20 + seed)
            assert ranks.call(lambda rank, p: p.connect()) == [None, None]
            report = ranks.publish_whole(new)
            alone = alone or report.digests
            assert report.digests == alone + len(beside) * tensors
            assert max(difference(e, new) for e in (wide, *beside)) < FP32_TOLERANCE
    finally:
        wide.stop()
    assert wide.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHER_ENGINES)
def test_other_engines(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote, kind: str) -> None:
    options: Mapping[str, Any] = OTHER_ENGINES[kind]
    rollout = RolloutConfig(max_prompt_tokens=128, max_num_seqs=64, kv_cache_bytes=2**26, start_timeout_s=240.0)
    dtype = options.get("dtype", "float32")
    engine = tiny_engine(
        tmp_path_factory.mktemp("engine"), rollout=rollout, tied=options.get("tied", False), dtype=dtype
    )
    engine.zygote = zygote
    tolerance = FP32_TOLERANCE if dtype == "float32" else 0.05
    try:
        engine.ready()
        ranks = ranks_of(engine)
        torch_dtype = getattr(torch, dtype)
        model = Qwen3ForCausalLM.from_pretrained(
            engine.model_path, attn_implementation="eager", dtype=torch_dtype
        ).eval()
        for seed in (1, 2):
            new = perturbed(model, seed)
            assert difference(engine, new) > 0.2
            ranks.publish_whole(new)
            assert difference(engine, new) < tolerance
    finally:
        engine.stop()
    assert engine.leftovers() == []


def test_grids_without_tensor_parallelism(engine: RunningEngine, model: Qwen3ForCausalLM) -> None:
    """A pipeline of two stages, and two data-parallel copies that share the sending."""
    for parallel in (ParallelConfig(pp=2), ParallelConfig(dp=2)):
        ranks = ranks_of(engine, replace(engine.config, parallel=parallel))
        new = perturbed(model, 7 + parallel.dp)
        ranks.publish_whole(new)
        assert difference(engine, new) < FP32_TOLERANCE
