"""One tiny job through the command line, and everything that it must have left behind, checked by other means."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from megarl.buffer.store import Store
from megarl.core.schema import Task, Trajectory
from megarl.rewards import compute_score
from megarl.rewards.verdict import to_verdict
from megarl.tasks import ChatTokenizer, encode_rows, read_rows
from megarl.weights.checkpoint.convert.convert import Settings, convert_megatron_to_hf
from megarl.weights.checkpoint.training.state import LATEST, latest, read_state
from tests.loop.engines import transformers_logp
from tests.metrics_page import unlisted
from tests.system import commands
from tests.system.jobs import Job, last_of_each

STEPS = 3
GROUP_SIZE = 8
TASKS_PER_STEP = 8
TRAINED = [f"train-{step:06d}" for step in range(STEPS)]
EVALUATED = ["eval-before", "eval-after"]
VERL_METRICS = (
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
    "actor/lr",
    "critic/rewards/mean",
    "critic/score/mean",
    "critic/advantages/mean",
    "response_length/mean",
    "prompt_length/mean",
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max",
    "training/rollout_logp_diff_mean",
    "training/rollout_logp_diff_max",
    "timing_s/rollout",
    "timing_s/inference",
    "timing_s/update",
    "timing_s/sync",
    "timing_s/step",
    "perf/throughput",
    "perf/time_per_step",
    "perf/total_num_tokens",
)


@pytest.fixture(scope="module")
def job(whole_job: Job) -> Job:
    return whole_job


@pytest.fixture(scope="module")
def run_dir(job: Job) -> Path:
    return job.run_dir


@pytest.fixture(scope="module")
def store(run_dir: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{run_dir}/store.db")
    yield store
    store.close()


@pytest.fixture(scope="module")
def records(run_dir: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert unlisted({name for record in records for name in record}) == set()
    return records


@pytest.fixture(scope="module")
def steps(records: list[dict[str, float]]) -> list[dict[str, float]]:
    """Metrics of the reinforcement-learning steps."""
    return [record for record in records if "actor/pg_loss" in record]


@pytest.fixture(scope="module")
def tokenizer(run_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(run_dir / "hf")


def load(path: Path) -> Qwen3ForCausalLM:
    model, report = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


# ---------------------------------------------------------------- how it ended


def test_it_finished(job: Job) -> None:
    assert job.poll() == 0, job.output.read_text()


def test_no_process_is_left(job: Job) -> None:
    job.until_gone(60)


def test_a_person_was_told(job: Job, run_dir: Path) -> None:
    said = job.output.read_text()
    for step in range(1, STEPS + 1):
        assert re.search(
            rf"^step {step}/{STEPS} \| reward .* kl .* entropy .* clip .* rollout .* sync ", said, re.MULTILINE
        )
    for words in ("before", "after", "10 sample answers", str(run_dir / "hf"), str(run_dir / "report" / "report.html")):
        assert words in said


def test_prompts_may_be_as_long_as_those_of_the_rows(run_dir: Path) -> None:
    """The settings leave rollout.max_prompt_tokens to them."""
    tokenizer = ChatTokenizer.open(run_dir / "model")
    longest = max(
        len(ids)
        for split in ("train", "eval")
        for ids in encode_rows(read_rows(run_dir / "data" / f"{split}.parquet"), tokenizer)
    )
    assert json.loads((run_dir / "resolved.json").read_text())["rollout"]["max_prompt_tokens"] == longest


@pytest.mark.parametrize(("settings", "status"), [((), 0), (("algorithm.kl.coef=0.3",), 2)])
def test_a_check_of_the_finished_run_changes_no_byte(
    job: Job, run_dir: Path, settings: Sequence[str], status: int
) -> None:
    def state() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}

    before = state()
    argv = ["-m", "megarl", "train", "--check", *last_of_each([*job.overrides, *settings]), f"run.dir={run_dir}"]
    with tempfile.TemporaryFile("w+") as said:
        command = commands.start(argv, os.environ, said.fileno()) or subprocess.Popen(
            [sys.executable, *argv], stdout=said, stderr=said
        )
        ended = command.wait(120)
        said.seek(0)
        assert ended == status, said.read()
    assert state() == before


def test_report_stands_alone(run_dir: Path) -> None:
    html = (run_dir / "report" / "report.html").read_text()
    assert "computed as `megarl plan` does" in html and (run_dir / "prediction.json").is_file()
    assert "<svg" in html or "<img" in html
    assert not re.findall(r"""src=["'](?!data:)|<link|@import|url\((?!["']?(?:data:|#))""", html), (
        "it needs other files"
    )
    png = (run_dir / "report" / "reward_curve.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 5000


def test_checkpoints(run_dir: Path) -> None:
    kept = sorted(path.name for path in (run_dir / "checkpoints").glob("global_step_*"))
    assert kept == ["global_step_2", "global_step_3"]
    newest = latest(run_dir / "checkpoints")
    assert newest is not None and newest.name == "global_step_3"
    state = read_state(newest)
    assert (state["phase"], state["step"], state["kl_coef"], state["rollbacks"]) == ("rl", STEPS, None, 0)
    assert (run_dir / "checkpoints" / LATEST).read_text() == "3"


def test_a_checkpoint_converts_by_itself(run_dir: Path, tmp_path: Path) -> None:
    """Without the model that the job was started with: what training saved is what the job exported at its end."""
    source = run_dir / "checkpoints" / "global_step_3"
    convert_megatron_to_hf(source, tmp_path / "hf", settings=Settings(progress=False))
    exported, converted = load(run_dir / "hf").state_dict(), load(tmp_path / "hf").state_dict()
    assert exported.keys() == converted.keys()
    assert all(torch.equal(exported[name], converted[name]) for name in exported)
    AutoTokenizer.from_pretrained(tmp_path / "hf")


# ---------------------------------------------------------------- metrics


def test_every_step_has_verls_metrics(steps: list[dict[str, float]]) -> None:
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    for record in steps:
        missing = [name for name in VERL_METRICS if name not in record]
        assert not missing
        assert all(math.isfinite(value) for value in record.values())


def test_accuracy_before_and_after(records: list[dict[str, float]]) -> None:
    assert [record["step"] for record in records if "val/accuracy" in record] == [0, STEPS]


def test_engine_and_trainer_agree_in_every_step(steps: list[dict[str, float]]) -> None:
    for record in steps:
        assert 0 < record["training/rollout_logp_diff_max"] < 1e-4
        assert 0 < record["training/rollout_logp_diff_mean"] <= record["training/rollout_logp_diff_max"]


def test_every_sync_was_proven(steps: list[dict[str, float]], run_dir: Path) -> None:
    tensors = load(run_dir / "hf").state_dict()
    size = sum(tensor.numel() for tensor in tensors.values()) * 4
    for record in steps:
        assert record["sync/digests"] == len(tensors)
        assert record["sync/bytes"] == size
        assert record["sync/probe_diff_max"] < 1e-4


def test_parts_of_a_step_add_up(steps: list[dict[str, float]]) -> None:
    for record in steps:
        parts = [value for name, value in record.items() if name.startswith("timing_s/") and name != "timing_s/step"]
        assert 0 < sum(parts) <= record["timing_s/step"]
        assert {f"timing_s/{phase}" for phase in ("sync", "rollout", "batch", "inference", "update")} <= record.keys()


def test_the_policy_moved(steps: list[dict[str, float]]) -> None:
    """Several updates share a rollout, so the ratio leaves 1 within a step; the reference stays where it was."""
    assert all(record["actor/grad_norm"] > 0 for record in steps)
    assert steps[-1]["actor/kl_loss"] > 0
    assert steps[-1]["actor/ppo_kl"] != 0


def test_tensorboard_holds_the_same(run_dir: Path, records: list[dict[str, float]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written: dict[str, dict[int, float]] = {}
    for folder in (run_dir / "tensorboard", run_dir / "tensorboard" / "warm_start"):
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        written |= {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    for record in records:
        for name, value in record.items():
            if name != "step":
                assert written[name][int(record["step"])] == pytest.approx(value, rel=1e-6)


def test_the_store_holds_the_same(store: Store, steps: list[dict[str, float]]) -> None:
    assert [(step, metrics) for step, metrics in store.journal.steps()] == [
        (record["step"], {name: value for name, value in record.items() if name != "step"}) for record in steps
    ]
    assert store.journal.job_state() == "closed"


def test_time_of_rewards_beside_generation_is_known(store: Store) -> None:
    for rollout in TRAINED + EVALUATED:
        metrics = store.rollouts.metrics(rollout)
        assert metrics["generation_s"] > 0 and metrics["reward_s"] > 0
        assert 0 <= metrics["overlap_s"] <= min(metrics["generation_s"], metrics["reward_s"])
    assert sum(store.rollouts.metrics(rollout)["overlap_s"] for rollout in TRAINED) > 0


# ---------------------------------------------------------------- trajectories


@pytest.fixture(scope="module")
def trajectories(store: Store) -> dict[str, list[Trajectory]]:
    return {rollout: store.groups.trajectories(rollout) for rollout in TRAINED + EVALUATED}


@pytest.fixture(scope="module")
def tasks(store: Store) -> dict[str, Task]:
    return {task.task_id: task for split in ("train", "eval") for task in store.tasks.read(split)}


def test_groups_are_whole(trajectories: dict[str, list[Trajectory]]) -> None:
    for rollout in TRAINED:
        sizes = Counter(e.group_id for e in trajectories[rollout])
        assert list(sizes.values()) == [GROUP_SIZE] * TASKS_PER_STEP
        assert [e.index for e in trajectories[rollout]] == list(range(GROUP_SIZE)) * TASKS_PER_STEP
        assert len({(e.group_id, e.task_id) for e in trajectories[rollout]}) == TASKS_PER_STEP


def test_every_held_out_task_was_answered_once(trajectories: dict[str, list[Trajectory]], store: Store) -> None:
    for rollout in EVALUATED:
        assert [e.task_id for e in trajectories[rollout]] == store.tasks.ids("eval")


def test_no_training_task_is_asked_twice_in_an_epoch(trajectories: dict[str, list[Trajectory]]) -> None:
    asked = [task_id for rollout in TRAINED for task_id in {e.task_id for e in trajectories[rollout]}]
    assert len(asked) == len(set(asked))


def test_each_rollout_ran_on_its_own_weights(trajectories: dict[str, list[Trajectory]], store: Store) -> None:
    """One version per rollout, later ones newer, but for the first, which has that of the evaluation before it; and the
    version is the engine's word, not the request's."""
    order = ["eval-before", *TRAINED, "eval-after"]
    versions = [{s.version for e in trajectories[rollout] for s in e.response.spans} for rollout in order]
    assert all(len(found) == 1 for found in versions)
    flat = [version for found in versions for version in found]
    assert flat[0] == flat[1] and flat[1:] == sorted(set(flat))
    assert {version.attempt for version in flat} == {1}


def test_tokens_and_log_probs_as_the_engine_gave_them(
    trajectories: dict[str, list[Trajectory]], tasks: dict[str, Task], tokenizer: PreTrainedTokenizerBase
) -> None:
    for e in (e for rollout in trajectories.values() for e in rollout):
        asked = tokenizer.apply_chat_template(
            list(tasks[e.task_id].prompt), add_generation_prompt=True, return_dict=False
        )
        assert e.prompt.token_ids.tolist() == asked
        assert 1 <= e.response_length <= 8
        assert e.response.logp is not None and len(e.response.logp) == e.response_length
        assert np.isfinite(e.response.logp).all() and (e.response.logp <= 0).all()
        [sample] = e.samples()
        assert sample.response_mask.all()
        ended = e.response.token_ids[-1] == tokenizer.eos_token_id
        assert e.finish_reason == ("stop" if ended else "length")
        assert tokenizer.eos_token_id not in e.response.token_ids[:-1]
        assert ended or e.response_length == 8


def test_samples_of_a_group_differ(trajectories: dict[str, list[Trajectory]]) -> None:
    """Each sample is a draw of its own: one seed for all would give a group no signal."""
    for rollout in TRAINED:
        groups: dict[str, set[tuple[int, ...]]] = {}
        for e in trajectories[rollout]:
            groups.setdefault(e.group_id, set()).add(tuple(e.response.token_ids.tolist()))
        assert np.mean([len(different) for different in groups.values()]) > 2


def test_rewards_are_what_the_scorer_says_again(
    trajectories: dict[str, list[Trajectory]], tasks: dict[str, Task], tokenizer: PreTrainedTokenizerBase
) -> None:
    for e in (e for rollout in trajectories.values() for e in rollout):
        task = tasks[e.task_id]
        text = tokenizer.decode(e.response.token_ids, skip_special_tokens=True)
        verdict = to_verdict(compute_score(task.data_source, text, task.ground_truth, task.extra_info))
        assert (e.reward.score, e.reward.status, e.reward.parts) == tuple(verdict.values())


def test_metrics_of_a_step_are_those_of_its_trajectories(
    trajectories: dict[str, list[Trajectory]], steps: list[dict[str, float]]
) -> None:
    for rollout, record in zip(TRAINED, steps, strict=True):
        scores = [e.reward.score for e in trajectories[rollout]]
        assert record["critic/rewards/mean"] == pytest.approx(np.mean(scores))
        assert record["response_length/mean"] == pytest.approx(
            np.mean([e.response_length for e in trajectories[rollout]])
        )


def test_engine_logp_is_that_of_the_weights_it_was_sent(
    run_dir: Path, trajectories: dict[str, list[Trajectory]]
) -> None:
    """The first rollout ran on the weights after the warm start, which plain transformers loads from the reference."""
    reference = load(run_dir / "reference")
    worst = max(
        (
            torch.from_numpy(e.response.logp)
            - transformers_logp(reference, e.prompt.token_ids.tolist(), e.response.token_ids.tolist())
        )
        .abs()
        .max()
        .item()
        for e in trajectories[TRAINED[0]]
    )
    assert worst < 1e-4


def test_the_trainers_log_probs_are_near_the_engines(steps: list[dict[str, float]]) -> None:
    worst = [record["training/rollout_logp_diff_max"] for record in steps]
    assert len(worst) == len(TRAINED) and 0.0 < max(worst) < 1e-4


# ---------------------------------------------------------------- the exported model


def test_exported_model_is_the_trained_one(run_dir: Path) -> None:
    before, after = load(run_dir / "reference").state_dict(), load(run_dir / "hf").state_dict()
    assert set(before) == set(after)
    assert all(not torch.equal(before[name], after[name]) for name in before)


@torch.no_grad()
def test_exported_model_answers_as_the_engine_did(
    run_dir: Path, trajectories: dict[str, list[Trajectory]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Plain transformers, greedy. The sums of float32 run in another order there, so where the two best tokens are
    within 1e-4 of each other either may come out first; everywhere else the tokens must be the same.
    """
    model = load(run_dir / "hf")
    differing = []
    for e in trajectories["eval-after"]:
        prompt = torch.tensor([e.prompt.token_ids.tolist()])
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8)
        mine, theirs = out[0, prompt.shape[1] :].tolist(), e.response.token_ids.tolist()
        if mine != theirs:
            at = next(i for i in range(len(mine)) if mine[: i + 1] != theirs[: i + 1])
            context = torch.tensor([[*prompt[0].tolist(), *mine[:at]]])
            best = model(context).logits[0, -1].topk(2).values
            differing.append((e.task_id, at, float(best[0] - best[1])))
    assert all(margin < 1e-4 for _, _, margin in differing), differing
    assert len(differing) <= 1, differing
