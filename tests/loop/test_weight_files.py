"""A run whose weights go by way of files (``sync.method=checkpoint``): one explore program of two explorers and one
trainer, which share nothing but a folder. What was sampled and learned is what a job with links has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from megarl.core.errors import EngineError
from megarl.core.published import KEPT, PublishedWeights, folder_of, whole_versions
from megarl.core.schema import WeightsVersion
from megarl.engines.client.client import Sampling
from megarl.engines.client.probe import PROBE_TOLERANCES
from megarl.explore.explorer.weight_files import FileFedEngine
from megarl.learn.training.optimizer import whole_digests
from tests.loop.conftest import WHOLE
from tests.loop.engines import RunningEngine, perturbed, some_prompts, transformers_logp, worst_difference
from tests.loop.same_run import items, learned, steps_of
from tests.system.jobs import START_S, Job

pytestmark = pytest.mark.timeout(3 * START_S)
STEPS = 3
EXPLORERS = ("rollout.explorers=2", "reward.workers=2")


ADAPTERS = ("model.lora.rank=4", "trainer.optimizer.lr=0.003", "algorithm.group_size=4", "taskset.eval_size=8")
each_run = pytest.mark.parametrize(
    "run", [(), pytest.param(ADAPTERS, marks=pytest.mark.slow)], indirect=True, ids=["model", "adapters"]
)


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """The trainer's program after its end; the explore program has ended too. Its parameter has more settings."""
    run_dir = tmp_path_factory.mktemp("files") / "run"
    settings = (*WHOLE, "sync.method=checkpoint", "cluster.heartbeat_s=2", *EXPLORERS, *request.param)
    explore = Job(run_dir, settings, ("explore",)).start()
    train = Job(run_dir, [*settings, "run.mode=train"]).start()
    try:
        assert train.wait(START_S) == 0, train.output.read_text()
        assert explore.wait(START_S) == 0, explore.output.read_text()
        yield train
    finally:
        train.clean_up()
        explore.clean_up()


def log_of_explorer(run_dir: Path, name: str) -> str:
    return (run_dir / "logs" / "attempt_1_explore-0" / f"{name}.log").read_text()


@pytest.mark.parametrize("run", [()], indirect=True, ids=["model"])
def test_the_same_was_sampled_and_learned_as_with_links(run: Job, whole_job: Job) -> None:
    assert whole_job.poll() == 0
    mine, others = items(run.run_dir), items(whole_job.run_dir)
    assert mine.keys() == others.keys()
    assert [key for key in mine if mine[key] != others[key]] == []
    assert learned(run.run_dir) == learned(whole_job.run_dir)


@each_run
def test_engines_proved_every_version(run: Job) -> None:
    """The first explorer alone gives them files."""
    versions = [WeightsVersion(1, n) for n in range(1, STEPS + 2)]
    first, second = (log_of_explorer(run.run_dir, name) for name in ("explorer", "explorer_1"))
    read = [line for line in first.splitlines() if "read from files" in line]
    assert "read from files" not in second
    assert all(f"weights {version} read" in line for version, line in zip(versions, read, strict=True))
    known = dict(run.query("select version, step from versions"))
    assert sorted(known) == [str(version) for version in versions]
    assert whole_versions(run.run_dir) == versions[-KEPT:]
    for record in steps_of(run.run_dir):
        assert record["sync/bytes"] > 0 and "sync/probe_diff_max" not in record


@each_run
def test_the_last_version_is_an_hf_checkpoint_of_the_exported_weights(run: Job) -> None:
    folder = folder_of(run.run_dir, whole_versions(run.run_dir)[-1])
    published, exported = load_file(folder / "model.safetensors"), load_file(run.run_dir / "hf" / "model.safetensors")
    assert published.keys() == exported.keys() == PublishedWeights.read(folder).digests.keys()
    assert all((published[name] == exported[name]).all() for name in published)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"


def published(run_dir: Path, n: int, source: Path, model: Qwen3ForCausalLM) -> WeightsVersion:
    """Publish a model without a trainer: digests of its tensors, log-probs that transformers computes."""
    folder = folder_of(run_dir, version := WeightsVersion(1, n))
    shutil.copytree(source, folder)
    save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, folder / "model.safetensors")
    digests = {
        name: f"{digest:016x}"
        for name, digest in whole_digests({n: p.detach() for n, p in model.named_parameters()}).items()
    }
    probe = [1, 9, 77, 150, 199, 4, 4, 31]
    logp = transformers_logp(model, probe[:1], probe[1:]).tolist()
    PublishedWeights(str(version), digests, probe, logp, PROBE_TOLERANCES["float32"]).write(folder)
    return version


def test_an_engine_takes_files_only_when_they_are_what_was_published(engine: RunningEngine, tmp_path: Path) -> None:
    model = Qwen3ForCausalLM.from_pretrained(engine.model_path, attn_implementation="eager").eval()
    fed = FileFedEngine(engine.control, tmp_path)
    new = perturbed(model, 11)
    assert fed.give(published(tmp_path, 1, engine.model_path, new))
    state = engine.control.state()
    assert (state.version, state.refusing, state.paused) == ("1.1", None, False)
    prompts, sampling = some_prompts(), Sampling(max_tokens=8)
    assert worst_difference(new, prompts, engine.generate(prompts, sampling)) < PROBE_TOLERANCES["float32"]

    bad = published(tmp_path, 2, engine.model_path, other := perturbed(model, 12))
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight[3, 5] += 2**-10
    tensors = {name: p.detach().contiguous() for name, p in other.named_parameters()}
    save_file(tensors, folder_of(tmp_path, bad) / "model.safetensors")
    with pytest.raises(EngineError, match=r"1\.2 are refused .*: model\.layers\.1\.mlp\.down_proj\.weight: published"):
        fed.give(bad)
    assert "down_proj" in (engine.control.state().refusing or "")
    with pytest.raises(EngineError, match="down_proj"):
        engine.generate(prompts, sampling)

    wrong = published(tmp_path, 3, engine.model_path, other)
    manifest = PublishedWeights.read(folder_of(tmp_path, wrong))
    replace(manifest, logp=[x - 0.01 for x in manifest.logp]).write(folder_of(tmp_path, wrong))
    with pytest.raises(EngineError, match=r"1\.3 are refused .*log-probs of the probe text"):
        fed.give(wrong)
    assert "log-prob" in (engine.control.state().refusing or "")

    gone = published(tmp_path, 4, engine.model_path, model)
    (folder_of(tmp_path, gone) / "published.json").unlink()
    assert not fed.give(gone), "a newer version is looked for"
    assert fed.give(published(tmp_path, 5, engine.model_path, model))
    assert worst_difference(model, prompts, engine.generate(prompts, sampling)) < PROBE_TOLERANCES["float32"]
