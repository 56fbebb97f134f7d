"""A job on images: engine and trainer agree, its tower learns or stays, and a killed one goes on with the same bits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.explore.store import Store
from tests.loop.same_run import learned, left_alone, steps_of, whole_and_killed
from tests.system.jobs import START_S

pytestmark = pytest.mark.timeout(4 * START_S)
STEPS = 4
SETTINGS = (
    "experiment=vision",
    f"trainer.steps={STEPS}",
    "trainer.tasks_per_step=8",
    "trainer.checkpoint_interval=2",
    "trainer.eval_interval=0",
    "trainer.warm_start.steps=3",
    "trainer.max_patches_per_micro_batch=512",
    "taskset.train_size=64",
    "taskset.eval_size=16",
    "taskset.warm_start_size=64",
    "rollout.kv_cache_bytes=33554432",
    "rollout.max_num_seqs=64",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A job that was left alone, and one that was killed in its fourth step and went on from its second, with engines
    that leave while the trainer computes."""
    then = ("rollout.placement=colocated",)
    with whole_and_killed(tmp_path_factory.mktemp("vision"), SETTINGS, 3, then=then) as runs:
        yield runs


def test_engine_and_trainer_agree(runs: tuple[Path, Path]) -> None:
    steps = steps_of(runs[0])
    assert len(steps) == STEPS
    assert all(0 < step["training/rollout_logp_diff_max"] < 1e-4 for step in steps)


def test_prompts_have_a_placeholder_for_each_vector(runs: tuple[Path, Path]) -> None:
    store = Store(f"sqlite:///{runs[0]}/store.db", read_only=True)
    found = store.trajectories("train-000000")
    images = store.task_images({trajectory.task_id for trajectory in found})
    assert len(images) == len({trajectory.task_id for trajectory in found}) == 8
    assert all(int((trajectory.prompt.token_ids == 7).sum()) == 4 for trajectory in found)
    store.close()


def test_the_tower_learns(runs: tuple[Path, Path]) -> None:
    before, after = (load_file(runs[0] / name / "model.safetensors") for name in ("reference", "hf"))
    moved = [name for name in before if name.startswith("visual.") and not torch.equal(before[name], after[name])]
    assert len(moved) == sum(name.startswith("visual.") for name in before)


def test_a_killed_job_has_the_same_bits(runs: tuple[Path, Path]) -> None:
    whole, killed = map(learned, runs)
    assert whole == killed and any("actor/pg_loss" in name for name in whole)


@pytest.mark.parametrize("algorithm", [pytest.param("sft", marks=pytest.mark.soak), "dpo"])
def test_offline_jobs_have_images(tmp_path: Path, algorithm: str) -> None:
    """An evaluation after other batches finds its images again; four steps move its loss, not always down."""
    settings = (f"algorithm={algorithm}", "trainer.eval_interval=2", "trainer.optimizer.lr=1e-3")
    with left_alone(tmp_path / algorithm, (*SETTINGS, *settings)) as run:
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses = [record["val/loss"] for record in records if "val/loss" in record]
        assert len(losses) == 3 and len(set(losses)) == 3 and all(map(math.isfinite, losses))


@pytest.mark.soak
def test_a_frozen_tower_stays(tmp_path: Path) -> None:
    settings = ("model.train_vision_tower=false", "trainer.steps=1", "parallel=pp2")
    with left_alone(tmp_path / "frozen", (*SETTINGS, *settings)) as run:
        given, after = (load_file(run / name / "model.safetensors") for name in ("model", "hf"))
        tower = [name for name in given if name.startswith("visual.")]
        assert tower and all(torch.equal(given[name], after[name]) for name in tower)
        assert not torch.equal(given["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
        assert steps_of(run)[0]["training/rollout_logp_diff_max"] < 1e-4
