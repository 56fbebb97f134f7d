"""A kept step of a job is computed again, on one process and on the job's grid; faults of the job's code, files and
records show at their stage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.core.kept_batches import KeptValues, values_path
from tests.loop.test_vision_job import SETTINGS as IMAGES
from tests.system import commands
from tests.system.jobs import TINY, Job

KEPT = (
    "trainer.keep_batches=true",
    "trainer.checkpoint_interval=1",
    "trainer.keep_checkpoints=5",
    "trainer.warm_start.steps=60",
    "taskset.warm_start_size=2000",
)
SUMS = (*TINY, *KEPT, "trainer.steps=2")
VISION = tuple(one for one in IMAGES if not one.startswith(("trainer.steps", "trainer.checkpoint", "trainer.warm")))
GRIDS = {
    "tp2": ("parallel=tp2",),
    "pp2": ("parallel=pp2",),
    "cp2": ("parallel=cp2",),
    "lora": ("parallel=tp1", "model.lora.rank=4", "model.lora.alpha=8"),
    "late": ("parallel=tp1", "sync.max_staleness=1", "sync.order=completion", "algorithm.correction=truncate"),
    "turns": ("experiment=guess", "parallel=tp1", "taskset.options.max_terms=null"),
    "images": (*KEPT[:3], *VISION, "parallel=tp2", "trainer.steps=2", "trainer.warm_start.steps=3"),
}
MOST = 1e-6
"""Largest relative difference of a gradient norm between grids."""


def replayed(run_dir: Path, *options: str, step: int = 2) -> tuple[int, str]:
    """Status and output of ``megarl replay``."""
    argv = ["-m", "megarl", "replay", str(run_dir), "--step", str(step), *options]
    return commands.run(argv, run_dir.with_suffix(".replay"))


def trained(run_dir: Path, settings: tuple[str, ...]) -> Path:
    job = Job(run_dir, settings).start()
    try:
        assert job.wait(180) == 0, job.output.read_text()
    finally:
        job.clean_up()
    return run_dir


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two steps of PPO on two data-parallel ranks."""
    yield trained(tmp_path_factory.mktemp("replay") / "ppo", (*SUMS, "algorithm=ppo", "parallel=dp2"))


def check(run_dir: Path) -> None:
    status, text = replayed(run_dir)
    assert status == 0, text
    [here, then] = re.findall(r"/grad_norm: ([\d.e-]+) here, ([\d.e-]+) trained", text)[0]
    assert float(here) == pytest.approx(float(then), rel=MOST)
    status, text = replayed(run_dir, "--same-grid")
    assert status == 0, text
    stages = {line.split("  ")[0]: line for line in text.splitlines() if re.search(r"\de[+-]\d\d  ", line)}
    exact = [name for name in stages if "plain" not in name and name != "advantages"]
    assert exact and all(" 0.00e+00 " in stages[name] for name in exact), text


def test_a_step_is_the_same_on_one_process_and_to_the_bit_on_its_grid(run: Path) -> None:
    check(run)


@pytest.mark.soak
@pytest.mark.parametrize("grid", GRIDS)
def test_steps_of_other_jobs(grid: str, tmp_path: Path) -> None:
    settings = GRIDS[grid] if grid == "images" else (*SUMS, *GRIDS[grid])
    if grid == "turns":
        settings = tuple(one for one in settings if not one.startswith(("taskset.options", "rollout.max")))
    check(trained(tmp_path / grid, settings))


def changed(array: np.ndarray, at: int) -> np.ndarray:
    found = array.copy()
    found[at] += 0.5
    return found


def test_what_was_changed_afterwards_is_named(run: Path) -> None:
    """Values and metrics of the run are changed, two stages at a time."""
    path, metrics = values_path(run, 2), run / "metrics.jsonl"
    values, lines = KeptValues.read(path), metrics.read_text()
    records = [json.loads(line) for line in lines.splitlines()]
    token = int(np.flatnonzero(values.old_logp)[3])
    rewards = replace(values, rewards=changed(values.rewards, len(values.rewards) // 2))
    of_critic = replace(values, values=changed(values.values, token))
    for given, name, stages in (
        (rewards, "actor/pg_loss", ["rewards", "advantages", "loss"]),
        (of_critic, "actor/grad_norm", ["values", "advantages", "gradient"]),
    ):
        given.write(path)
        other = [{**one, name: one[name] * 1.01 + 0.01} if name in one else one for one in records]
        metrics.write_text("".join(f"{json.dumps(one)}\n" for one in other))
        status, text = replayed(run)
        differing = [line.split("  ")[0] for line in text.splitlines() if "DIFFERS" in line]
        assert status == 1 and set(stages) <= set(differing), text
        assert f"step 2 differs first in its {stages[0]}:" in text and name in text, text
    values.write(path)
    metrics.write_text(lines)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--step", "9"], "step 9 begins with weights that no checkpoint"),
        (["--step", "3"], "has not kept step 3; kept are [1, 2]"),
    ],
)
def test_a_step_that_was_not_kept(run: Path, arguments: list[str], error: str, tmp_path: Path) -> None:
    status, text = commands.run(["-m", "megarl", "replay", str(run), *arguments], tmp_path / "log")
    assert status == 2 and error in text


FAULTS = {
    "advantages": (
        "advantage-over-batch", "advantage-std-overwritten", "advantage-of-shifted-groups", "whitened-with-padding",
        "baseline-across-prompts", "rewards-one-token-early",
    ),
    "reference": ("reference-temperature", "reference-shares-embedding", "reference-follows-actor"),
    "loss": (
        "mean-of-each-micro-batch", "mean-of-each-response", "loss-divided-by-ranks", "loss-divided-by-micro-batches",
        "kl-sign", "kl-without-reference", "kl-only-logged", "kl-twice",
    ),
    # Of ranks with denominators of their own the losses are logged rightly.
    "gradient": ("gradients-of-last-micro-batch", "gradients-not-reduced", "denominator-of-each-rank"),
}  # fmt: skip
"""Stage -> faults of ``megarl exam``, which the run has and the replay has not."""


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("stage", "name"), [(stage, name) for stage, names in FAULTS.items() for name in names])
def test_a_fault_of_the_code_shows_at_its_stage(
    stage: str, name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from megarl.exam.areas import find
    from megarl.exam.runner import Runner
    from megarl.exam.small_jobs import JOBS, settings_of

    fault = find(name)
    files = tmp_path_factory.getbasetemp() / "exam" / "files"
    if not (files / "sums").is_dir():
        Runner(files.parent, commands.server()).make_models(["sums"])
    more = (*fault.settings, *KEPT[:3])
    settings = settings_of(JOBS[fault.job], files, tmp_path / "run", more, 2)
    status, text = commands.run(["-m", "megarl.exam.processes", name, *settings], tmp_path / "log")
    assert status == 0, text
    status, text = replayed(tmp_path / "run")
    assert status == 1 and re.search(rf"differs first in its {stage}( of update 1)?(, by plain formulas)?:", text), text
