"""A job of mix with ``algorithm.expert_loss=off_policy`` learns from responses with a teacher's log-probs; killed and
resumed, it has the same bits.

The teacher is the warm-started model itself, which says of each token half of what it would: the ratio must begin at 2.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.buffer.store import Store
from megarl.core.schema import End
from megarl.tasks import ChatTokenizer
from tests.loop.conftest import WHOLE
from tests.loop.same_run import NOT_COMPARED, left_alone, steps_of, whole_and_killed
from tests.system.jobs import START_S, Job

pytestmark = [pytest.mark.timeout(4 * START_S), pytest.mark.soak]
STEPS = 4


def write_teacher(run_dir: Path, target: Path) -> None:
    """Responses of a run's first rollout, right or wrong, with log-probs that are lower by log 2."""
    tokenizer = ChatTokenizer.open(run_dir / "model")
    store = Store(f"sqlite:///{run_dir}/store.db", read_only=True)
    tasks = {task.task_id: task for task in store.tasks.read("train")}
    rows = []
    for answer in store.groups.trajectories("train-000000"):
        ids = answer.response.token_ids.tolist()
        text = tokenizer.decode(ids[:-1], special=True)
        if text and answer.end is End.FINISHED and list(tokenizer.response_ids(text)) == ids:
            logp = [float(x) - math.log(2) for x in answer.response.logp]
            rows.append({"prompt": list(tasks[answer.task_id].prompt), "response": text, "teacher_logp": logp})
    store.close()
    assert len(rows) > 20
    target.write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def settings(whole_job: Job, tmp_path: Path) -> tuple[str, ...]:
    assert whole_job.poll() == 0
    write_teacher(whole_job.run_dir, tmp_path / "teacher.jsonl")
    return (
        *WHOLE,
        "algorithm=mix",
        "algorithm.group_size=8",
        "algorithm.expert_loss=off_policy",
        "algorithm.expert_ratio=0.5",
        "algorithm.mu=0.5",
        f"taskset.expert={tmp_path}/teacher.jsonl",
        f"trainer.steps={STEPS}",
        "trainer.updates_per_step=1",
        "trainer.eval_interval=0",
    )


def test_the_teachers_ratio_was_used(settings: tuple[str, ...], tmp_path: Path) -> None:
    with left_alone(tmp_path / "run", settings) as run_dir:
        steps = steps_of(run_dir)
    assert len(steps) == STEPS
    assert steps[0]["actor/expert_ratio/mean"] == pytest.approx(2, abs=2e-3)  # no update yet
    # −f(x) of a token, x / (x + γ): the mean over the expert rows' tokens, of which each has x = 2
    assert steps[0]["actor/expert_loss"] == pytest.approx(-2 / 2.1, abs=1e-3)
    assert all("actor/sft_loss" not in step for step in steps)
    ratios = [step["actor/expert_ratio/mean"] for step in steps]
    assert all(abs(ratio - 2) > 1e-4 for ratio in ratios[1:]), "no update has moved the expert rows' tokens"


def test_a_killed_job_has_the_same_bits(settings: tuple[str, ...], tmp_path: Path) -> None:
    """Killed in its fourth step, and resumed after its second."""
    with whole_and_killed(tmp_path, settings, 3, 2) as runs:
        assert_same(*runs)


def assert_same(*runs: Path) -> None:
    whole, killed = (load_file(run / "hf" / "model.safetensors") for run in runs)
    assert whole.keys() == killed.keys() and all(torch.equal(whole[name], killed[name]) for name in whole)
    for first, second in zip(*map(steps_of, runs), strict=True):
        assert {k: v for k, v in first.items() if not NOT_COMPARED.match(k)} == {
            k: v for k, v in second.items() if not NOT_COMPARED.match(k)
        }
