"""Jobs with more roles than the actor, through the command line: PPO with everybody on a grid of its own, killed and
resumed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.buffer.store import Store
from megarl.core.schema import GREEDY
from megarl.weights.checkpoint.training.state import latest, read_state
from tests.loop.held import Held
from tests.loop.same_run import kill_in_step
from tests.metrics_page import unlisted
from tests.system.jobs import TINY, Job

pytestmark = pytest.mark.timeout(900)  # three jobs before the first test

STEPS = 4
PPO = (
    *TINY,
    "algorithm=ppo",
    "algorithm.group_size=4",
    "taskset.eval_size=16",
    "algorithm.kl={coef: 0.2, target: 0.01, horizon: 100}",
    f"trainer.steps={STEPS}",
    "critic.parallel={dp: 2, overlap_grad_reduce: true, overlap_param_gather: true}",
    "critic.optimizer.lr=1e-3",
    "critic.warmup_steps=1",
    "reference.parallel={pp: 2}",
    "reference.refresh=3",
    "reward_model.parallel={dp: 2}",
    "reward_model.coef=0.5",
    "trainer.ppo_epochs=2",
    "algorithm.overlong_filtering=true",
    "evaluation={samples: 3, temperature: 0.8, top_p: 0.9}",
)
ROLES = ("trainer", "critic", "reference", "reward_model", "rollout")
AWAY = (("disk", "memory", "disk", "memory", "destroy"), ("memory", "disk", "memory", "disk", "sleep"))
"""Places of the roles' memory in the phases that do not need it, and how the engine leaves, before the kill and
after."""
NOT_COMPARED = re.compile(r"(timing_s|idle|perf|memory|rollout|sync|training/attempt)|reward/\w+/(seconds|waited_s)/")
"""What depends on the machine or counts attempts."""


def score_model(path: Path) -> Path:
    """A reward model as transformers makes it, for the quickstart's vocabulary."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        num_labels=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = Qwen3ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=0.2)
    model.save_pretrained(path)
    return path


def metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """Step -> what was recorded of it."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert unlisted({name for record in records for name in record}) == set()
    return {int(r["step"]): r for r in records if "training/global_step" in r}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """One that ran to its end, and one that was killed in its fourth step and resumed after its second, whose
    models leave the device."""
    root = tmp_path_factory.mktemp("ppo")
    scores = score_model(root / "scores")
    held, started = Held(root), list[Job]()

    def start(name: str, away: tuple[str, ...] = ()) -> Job:
        offload = [f"{role}.offload={place}" for role, place in zip(ROLES, away, strict=False)]
        offload += ["rollout.placement=colocated", "trainer.stream_optimizer_bytes=50_000"] if away else []
        job = Job(
            root / name, [*PPO, *held.settings, f"reward_model.path={scores}", f"critic.path={scores}", *offload]
        ).start()
        started.append(job)
        return job

    try:
        held.hold("train")
        second = start("killed", AWAY[0])
        kill_in_step(second, held, 3, 2)
        first = start("whole")  # beside the next one: most of a start is one process after the other
        third = start("killed", AWAY[1])
        assert first.wait(400) == 0, first.output.read_text()
        assert third.wait(400) == 0, third.output.read_text()
        yield first.run_dir, third.run_dir
    finally:
        for job in started:
            job.clean_up()


def test_all_roles_took_part(jobs: tuple[Path, Path]) -> None:
    steps = metrics(jobs[0])
    assert sorted(steps) == list(range(1, STEPS + 1))
    first = steps[1]
    assert first["critic/values/max"] > first["critic/values/min"]  # it began as the reward model
    assert "actor/pg_loss" not in first and "critic/vf_loss" in first  # critic.warmup_steps
    for step in range(2, STEPS + 1):
        assert {"actor/pg_loss", "critic/vf_loss", "critic/vf_explained_var", "critic/grad_norm"} <= steps[step].keys()
        assert steps[step]["reward_model/score/max"] > steps[step]["reward_model/score/min"]
    # The reward has half the model's score in it; the rule's is 0 or 1.
    scored = steps[2]["reward_model/score/mean"] * 0.5
    assert steps[2]["critic/score/mean"] == pytest.approx(steps[2]["training/accuracy"] + scored, abs=1e-6)


def test_evaluations_of_several_answers_are_the_same_again(jobs: tuple[Path, Path]) -> None:
    def evaluations(run_dir: Path) -> dict[float, dict[str, float]]:
        """Step -> its evaluation, the last one where a killed job did it again."""
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return {record["step"]: record for record in records if "val/accuracy" in record}

    whole, killed = map(evaluations, jobs)
    assert whole == killed and len(whole) >= 2
    assert all(
        {"val/accuracy_se", "val/pass@2", "val/pass@3", "val/pass@3_se"} <= record.keys() for record in whole.values()
    )
    assert "(avg@3)" in (jobs[0] / "report" / "report.html").read_text()


def test_the_reference_is_the_actor_of_its_last_refresh(jobs: tuple[Path, Path]) -> None:
    """Taken at step 0, kept in steps 1 and 2, taken again when 3 steps are done."""
    measured = [metrics(jobs[0])[step]["actor/kl_measured"] for step in range(1, STEPS + 1)]
    assert measured[0] == pytest.approx(0.0, abs=1e-6) and measured[3] == pytest.approx(0.0, abs=1e-6)
    assert abs(measured[2]) > 1e-6


def test_the_coefficient_adapts(jobs: tuple[Path, Path]) -> None:
    steps = metrics(jobs[0])
    responses = 8 * 4
    assert steps[2]["actor/kl_coef"] == steps[1]["actor/kl_coef"], "the actor stays in critic.warmup_steps"
    for step in range(2, STEPS):
        error = min(max(steps[step]["actor/kl_measured"] / 0.01 - 1, -0.2), 0.2)
        wanted = steps[step]["actor/kl_coef"] * (1 + error * responses / 100)
        assert steps[step + 1]["actor/kl_coef"] == pytest.approx(wanted, rel=1e-9)


def test_a_killed_job_goes_on_as_if_it_had_not_been(jobs: tuple[Path, Path]) -> None:
    """Actor, critic, both optimizers, the reference between two refreshes and the KL's coefficient: all as they
    were."""
    whole, killed = (metrics(run_dir) for run_dir in jobs)
    assert killed[STEPS]["training/attempt"] == 2
    for step in range(1, STEPS + 1):
        mine, other = ({k: v for k, v in run[step].items() if not NOT_COMPARED.match(k)} for run in (whole, killed))
        assert mine == other, step
    weights = [load_file(run_dir / "hf" / "model.safetensors") for run_dir in jobs]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    states = [read_state(_newest(run_dir)) for run_dir in jobs]
    assert states[0] == states[1] and states[0]["kl_coef"] is not None
    assert {path.name for path in _newest(jobs[0]).iterdir() if path.is_dir()} >= {"actor", "critic", "reference"}


def _newest(run_dir: Path) -> Path:
    found = latest(run_dir / "checkpoints")
    assert found is not None
    return found


ALGORITHMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "online_dpo": (
        (
            "parallel=pp2vpp2",
            "model.from_scratch.num_hidden_layers=4",
            "model.recompute=full",
            "taskset=k12",
            "reward.length.weight=0.2",
        ),
        ("rewards/margins", "rewards/accuracies", "reward/k12/answers", "reward/parts/length"),
    ),
    "remax": (
        (
            "parallel=tp2sp",
            "model.recompute=selective",
            "taskset=math",
            "reward.workers=2",
            "reward.language.weight=0.1",
            "reward.length.weight=0.2",
        ),
        ("actor/pg_loss", "reward/math/seconds/mean", "reward/parts/language", "reward/parts/answer"),
    ),
}
"""With the grids and the verifiers that no other job has. tests/system/test_faults.py has MIX under context
parallelism."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """Two steps of each algorithm that asks for other data than groups."""
    jobs = {}
    for name, (overrides, _) in ALGORITHMS.items():
        settings = [
            *TINY,
            f"algorithm={name}",
            "algorithm.group_size=8",
            "taskset.eval_size=8",
            "trainer.steps=2",
            *overrides,
        ]
        jobs[name] = Job(tmp_path_factory.mktemp(name) / "run", settings).start()
    try:
        yield jobs
    finally:
        for job in jobs.values():
            job.clean_up()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_with_data_of_their_own(trained: dict[str, Job], name: str) -> None:
    job, run_dir = trained[name], trained[name].run_dir
    assert job.wait(400) == 0, job.output.read_text()
    steps = metrics(run_dir)
    assert sorted(steps) == [1, 2]
    for found in steps.values():
        assert set(ALGORITHMS[name][1]) <= found.keys(), name
        assert found["actor/grad_norm"] > 0
    store = Store(f"sqlite:///{run_dir}/store.db")
    trajectories: list[Any] = store.groups.trajectories("train-000000")
    store.close()
    greedy = [e.greedy for e in trajectories]
    assert all((g is not None and g.index == GREEDY) == (name == "remax") for g in greedy)


@pytest.mark.soak  # the updates of a critic are compared with transformers in tests/parallel
def test_the_critic_explains_what_the_prompt_decides(tmp_path: Path) -> None:
    """A reward that only the question decides, and an actor that stays: the explained variance rises to above a
    half."""
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float('+' in extra_info['question'])\n"
    )
    settings = [
        *TINY,
        "algorithm=ppo",
        "algorithm.group_size=4",
        "parallel=tp1",
        f"reward.path={scorer}",
        "trainer.steps=16",
    ]
    settings += [
        "trainer.tasks_per_step=16",
        "trainer.optimizer.lr=0",
        "critic.optimizer.lr=2e-3",
        "trainer.checkpoint_interval=16",
    ]
    job = Job(tmp_path / "run", settings).start()
    try:
        assert job.wait(400) == 0, job.output.read_text()
    finally:
        job.clean_up()
    steps = metrics(job.run_dir)
    assert steps[1]["critic/values/max"] == steps[1]["critic/values/min"] == 0.0  # a head of zeros on the actor's body
    explained = [found["critic/vf_explained_var"] for _, found in sorted(steps.items())]
    assert sum(explained[-5:]) / 5 > 0.5, explained
    assert sum(explained[-5:]) > sum(explained[:5]) + 1.0, explained
