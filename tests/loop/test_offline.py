"""Offline jobs through the command line: what they learn, checked by plain transformers, and the same bits after an
interruption."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from megarl.config.algorithms import PreferenceConfig
from megarl.run.report.data import load
from megarl.weights.checkpoint.training.state import latest, read_state
from tests.loop.engines import transformers_logp
from tests.metrics_page import unlisted
from tests.system.jobs import Job

STEPS, EVERY, HELD_OUT = 20, 5, 40
SMALL = (
    f"trainer.steps={STEPS}",
    f"trainer.eval_interval={2 * EVERY}",
    f"trainer.checkpoint_interval={EVERY}",
    "trainer.tasks_per_step=16",
    "trainer.updates_per_step=2",
    "trainer.max_tokens_per_micro_batch=160",
    "trainer.warm_start.steps=3",
    "trainer.warm_start.batch_size=16",
    "trainer.optimizer.lr=2e-3",
    "trainer.optimizer.warmup_steps=0",
    "taskset.warm_start_size=100",
    "model.from_scratch.hidden_size=64",
    "model.from_scratch.intermediate_size=96",
    "model.from_scratch.num_attention_heads=2",
)
GRIDS = {"dpo": "parallel=tp2", "reward_model": "parallel=dp2"}


def write_pairs(path: Path, size: int, seed: int) -> str:
    """Sums whose preferred answer, right or not, is a number below 50, whose other is above: a rule that is soon
    learned."""
    dice = random.Random(seed)
    lines = []
    for _ in range(size):
        question = f"{dice.randint(10, 99)} + {dice.randint(10, 99)} + {seed} ="  # of no other file
        row = {"prompt": [{"role": "user", "content": question}], "chosen": str(dice.randint(10, 49))}
        lines.append(json.dumps(row | {"rejected": [{"role": "assistant", "content": str(dice.randint(50, 99))}]}))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pairs")
    train, held_out = write_pairs(folder / "train.jsonl", 200, 1), write_pairs(folder / "held_out.jsonl", HELD_OUT, 2)
    bad = (
        {"prompt": "a malformed pair", "chosen": "1", "rejected": None},
        {"prompt": "1 " * 999, "chosen": "1", "rejected": "2"},
    )
    lines = Path(train).read_text().splitlines()
    Path(train).write_text("\n".join([json.dumps(bad[0]), *lines[:50], json.dumps(bad[1]), *lines[50:]]) + "\n")
    return [f"taskset.train={train}", f"taskset.eval={held_out}", "taskset.bad_rows=drop"]


def test_bad_pairs_are_left_out_and_counted(finished: Job) -> None:
    steps = [record for record in records(finished.run_dir) if "taskset/bad_rows" in record]
    assert len(steps) == STEPS and {record["taskset/bad_rows"] for record in steps} == {2}
    assert "2 of 202 rows of taskset.train are left out; the first is" in finished.output.read_text()


def job_of(run_dir: Path, name: str, files: Sequence[str]) -> Job:
    return Job(run_dir, [f"experiment={name}", GRIDS[name], *SMALL, *files])


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, files: list[str]) -> Iterator[dict[str, Job]]:
    """A job of each kind, beside each other: most of a start is one process after the other."""
    jobs = {name: job_of(tmp_path_factory.mktemp(name) / name, name, files).start() for name in sorted(GRIDS)}
    try:
        yield jobs
    finally:
        for job in jobs.values():
            job.clean_up()


@pytest.fixture(scope="module", params=sorted(GRIDS))
def finished(request: pytest.FixtureRequest, started: dict[str, Job]) -> Job:
    """A job that ran once to its end."""
    job = started[request.param]
    assert job.wait(280) == 0, job.output.read_text()
    return job


def records(run_dir: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert unlisted({name for record in records for name in record}) == set()
    return records


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run_dir / "hf" / "model.safetensors")


def test_it_learns_the_preference(finished: Job) -> None:
    evaluations = {int(r["step"]): r["val/accuracy"] for r in records(finished.run_dir) if "val/accuracy" in r}
    assert list(evaluations) == [0, 10, 20]
    assert evaluations[0] == 0.5, "a model that knows nothing prefers neither"
    assert evaluations[20] >= 0.9
    steps = [r for r in records(finished.run_dir) if "rewards/margins" in r]
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["actor/loss"] < 0.6 < steps[0]["actor/loss"] < 0.7


def test_nothing_but_trainers_ran(finished: Job) -> None:
    assert sorted(p.name for p in (finished.run_dir / "logs" / "attempt_1").iterdir()) == [
        "trainer_0.log",
        "trainer_1.log",
    ]
    finished.until_gone(60)


def test_report_and_checkpoints(finished: Job) -> None:
    run = load(finished.run_dir)
    assert run.finished and run.held_out == HELD_OUT and len(run.losses) == len(run.accuracies) == 3
    assert "preferences 50.0% → " in (finished.run_dir / "report" / "report.html").read_text()
    assert f"{HELD_OUT} held-out rows" in finished.output.read_text()
    newest = latest(finished.run_dir / "checkpoints")
    assert newest is not None and read_state(newest)["step"] == STEPS


def test_transformers_measures_the_same(finished: Job) -> None:
    """The exported model, its prompts and tokens, and the way the loss is taken, all by other means."""
    run_dir = finished.run_dir
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "hf")
    config = load(run_dir).config
    beta = config.algorithm.beta if isinstance(config.algorithm, PreferenceConfig) else 1.0  # a reward model has none
    wins, losses = [], []
    scorer = Scorer(run_dir)
    for line in Path(config.taskset.eval).read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        answers = [row["chosen"], row["rejected"][0]["content"]]
        ids = [tokenizer(text, add_special_tokens=False).input_ids + [tokenizer.eos_token_id] for text in answers]
        chosen, rejected = (scorer.reward(prompt, answer, beta) for answer in ids)
        wins.append(chosen > rejected)
        losses.append(-torch.nn.functional.logsigmoid(torch.tensor(chosen - rejected)).item())
    last = [r for r in records(run_dir) if "val/loss" in r][-1]
    assert sum(wins) / len(wins) == last["val/accuracy"]
    assert sum(losses) / len(losses) == pytest.approx(last["val/loss"], abs=1e-4)


class Scorer:
    """The reward of an answer, explicit or implied, by the exported checkpoint."""

    def __init__(self, run_dir: Path) -> None:
        self.start: PreTrainedModel | None = None
        kind = AutoModelForSequenceClassification
        if "ForCausalLM" in json.loads((run_dir / "hf" / "config.json").read_text())["architectures"][0]:
            kind = AutoModelForCausalLM
            self.start = kind.from_pretrained(run_dir / "reference", dtype=torch.float32).eval()
        self.model, report = kind.from_pretrained(run_dir / "hf", dtype=torch.float32, output_loading_info=True)
        assert not any(report.values()), report
        self.model.eval()

    @torch.no_grad()
    def reward(self, prompt: list[int], answer: list[int], beta: float) -> float:
        if self.start is None:
            return float(self.model(torch.tensor([prompt + answer])).logits)
        now, before = (transformers_logp(m, prompt, answer).sum() for m in (self.model, self.start))
        return beta * float(now - before)


def test_an_interrupted_job_ends_with_the_same_bits(finished: Job, files: list[str], tmp_path: Path) -> None:
    """DPO by Ctrl-C, which saves; the reward model by kill -9, after which steps since the last checkpoint are done
    again."""
    name = finished.run_dir.name
    job = job_of(tmp_path / name, name, files).start()
    try:
        job.until_step(EVERY + 2)
        if name == "dpo":
            job.signal(signal.SIGINT)
            assert job.wait(60) == 130, job.output.read_text()
        else:
            os.kill(job.pid, signal.SIGKILL)
            job.wait(30)
            job.until_gone(60)
        newest = latest(job.run_dir / "checkpoints")
        assert newest is not None and EVERY <= int(read_state(newest)["step"]) < STEPS
        again = job_of(job.run_dir, name, files).start()
        try:
            assert again.wait(240) == 0, again.output.read_text()
        finally:
            again.clean_up()
        assert "resumed from" in again.output.read_text()
    finally:
        with suppress(AssertionError):
            job.clean_up()
    want, got = weights(finished.run_dir), weights(job.run_dir)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[key], got[key]) for key in want)
    seen = [r["step"] for r in records(job.run_dir) if "rewards/margins" in r]
    assert seen == list(range(1, STEPS + 1)), "each step is recorded once"


def test_sft_measures_what_transformers_does(tmp_path: Path) -> None:
    """On chats in jsonl, without a warm start; the report has no accuracy to show."""
    dice, files = random.Random(3), []
    for split, size in (("train", 100), ("eval", HELD_OUT)):
        rows = [
            (f"{split} {dice.randint(10, 99)} + {dice.randint(10, 99)} =", str(dice.randint(1, 9999)))
            for _ in range(size)
        ]
        lines = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in rows]
        path = tmp_path / f"{split}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        files.append(f"taskset.{split}={path}")
    small = [s for s in SMALL if "warm_start" not in s]
    job = Job(tmp_path / "sft", ["experiment=sft", "parallel=pp2", *small, *files, "trainer.steps=10"]).start()
    try:
        assert job.wait(240) == 0, job.output.read_text()
    finally:
        job.clean_up()
    losses = [r["val/loss"] for r in records(job.run_dir) if "val/loss" in r]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.5
    tokenizer = AutoTokenizer.from_pretrained(job.run_dir / "hf")
    model = AutoModelForCausalLM.from_pretrained(job.run_dir / "hf", dtype=torch.float32).eval()
    total, count = 0.0, 0
    for line in (tmp_path / "eval.jsonl").read_text().splitlines():
        question, answer = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=False)
        ids = tokenizer(answer["content"], add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
        total -= float(transformers_logp(model, prompt, ids).sum())
        count += len(ids)
    assert losses[1] == pytest.approx(total / count, abs=1e-4)
    run = load(job.run_dir)
    assert (
        run.finished and not run.accuracies and "Held-out loss" in (job.run_dir / "report" / "report.html").read_text()
    )
