"""A job with two teachers, one of them behind a URL: a real vLLM server, which is also slow, wrong and killed."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.buffer.store import Store
from megarl.config import Config, compose
from megarl.config.schema import ModelConfig, RolloutConfig, TeacherConfig, TrainerConfig
from megarl.core.metrics import records
from megarl.core.schema import TEACHER, End, Trajectory
from megarl.rewards.teacher_server import TeacherServers
from megarl.run.checks import job as checks
from megarl.run.data.teach import teach
from megarl.tasks import ChatTokenizer, encode_demonstrations, read_rows
from tests.loop.engines import KEY, RunningEngine, tiny_engine
from tests.loop.same_run import NOT_COMPARED, steps_of
from tests.loop.test_distill_job import save_other
from tests.loop.zygote import Zygote
from tests.parallel.grid import run_grid
from tests.system.jobs import START_S, TINY, Job, last_of_each
from tests.unit.small_rows import write

EXCLUDED = "select group_id, \"index\" from excluded where reason in ('teacher_error', 'teacher_timeout')"
ROLLOUT = RolloutConfig(
    max_prompt_tokens=40, max_response_tokens=20, max_num_seqs=64, kv_cache_bytes=2**24, start_timeout_s=240.0
)
TIMEOUT_S = 4
"""Time limit of a request; a loaded machine must not reach it."""
FAULTS = 13
"""Of the trajectories, about five in this number get a bad reply; which ones depends on their tokens alone."""


class Proxy:
    """Forwards requests to the teacher's server, and spoils some replies; it kills the server after ``last`` replies.

    A trajectory is spoiled by the sum of its tokens, so that every run of the same trajectories meets the same faults.
    """

    def __init__(self, engine: RunningEngine) -> None:
        self._engine, self.last, self.replies = engine, math.inf, 0
        self._slow: list[int] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)

    async def _listen(self) -> str:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._session = aiohttp.ClientSession()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    def stop(self) -> None:
        async def end() -> None:
            await self._session.close()
            await self._runner.cleanup()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    async def _forward(self, request: web.Request) -> web.Response:
        body = await request.read()
        asked = request.path == "/v1/completions"
        if asked and self.replies >= self.last:
            self._engine.stop()
        headers = {"Authorization": request.headers["Authorization"], "Content-Type": "application/json"}
        try:
            call = self._session.request(request.method, self._engine.url + request.path, data=body, headers=headers)
            async with call as answer:
                status, text = answer.status, await answer.text()
        except aiohttp.ClientError:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if asked and status == 200 and len(ids := json.loads(body)["prompt"]) > 8:  # the check before the start has 8
            self.replies += 1
            text = await self._spoiled(ids, text)
        return web.Response(status=status, text=text, content_type="application/json")

    async def _spoiled(self, ids: list[int], text: str) -> str:
        answer, kind = json.loads(text), sum(ids) % FAULTS
        places = answer["choices"][0]["prompt_logprobs"]
        if kind == 0:
            answer["model"] = "another"
        elif kind == 1:
            places.pop()
        elif kind in (2, 3):
            next(iter(places[-1].values()))["logprob"] = (math.nan, 0.5)[kind - 2]
        elif kind == 4:
            self._slow = self._slow or ids  # one alone, because each takes the whole time limit
            await asyncio.sleep(TIMEOUT_S + 1 if ids == self._slow else 0)
        return json.dumps(answer)


@pytest.fixture
def teacher(tmp_path: Path, zygote: Zygote) -> Iterator[RunningEngine]:
    engine = tiny_engine(tmp_path / "teacher", rollout=ROLLOUT)
    engine.zygote = zygote
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture
def proxy(teacher: RunningEngine) -> Iterator[Proxy]:
    proxy = Proxy(teacher)
    try:
        yield proxy
    finally:
        proxy.stop()


@pytest.mark.timeout(400)
def test_a_teacher_behind_a_url(
    tmp_path: Path, teacher: RunningEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGARL_TEACHER_KEY", KEY)
    made = tmp_path / "made"
    checks.check(compose([*last_of_each(TINY), f"run.dir={made}"]))
    for file in (made / "model").glob("*token*"):
        (teacher.model_path / file.name).write_bytes(file.read_bytes())
    save_other(teacher.model_path, made / "model" / "tokenizer.json", vocab_size=128)
    teacher.ready()
    rows = pq.read_table(made / "data" / "train.parquet").to_pylist()
    for i, row in enumerate(rows):
        row["data_source"] = ("sums/left", "right")[i % 2]
    settings = [
        *TINY,
        f"model.path={made}/model",
        f"taskset.train={write(tmp_path / 'train.parquet', rows)}",
        "trainer.warm_start.steps=0",
        "trainer.steps=3",
        "trainer.checkpoint_interval=1",
        "trainer.eval_interval=0",
        "algorithm=distill",
        "algorithm.kl.coef=0",
        "reward.routes={sums/left: reasoning_gym/chain_sum, right: reasoning_gym/chain_sum}",
        "reward.on_error=mask",
        f"teachers.same={{path: {made}/model, sources: [sums/]}}",
        f"teachers.other={{url: {proxy.url}, timeout_s: {TIMEOUT_S}, retries: 0, outage_s: 1}}",
    ]
    whole = run(tmp_path / "whole", settings)
    first = steps_of(whole)[0]
    assert first["teacher/kl/same"] == pytest.approx(0.0, abs=1e-6) and first["teacher/kl/other"] > 0.5
    trained, failed = stored(whole)
    words = (
        "of the model 'another'",
        "prompt_logprobs for",
        "nan of token",
        "0.5 of token",
        f"no answer within {TIMEOUT_S} s",
    )
    assert all(any(word in message for message in failed.values()) for word in words), set(failed.values())
    worst = compared(teacher.model_path, made / "model", trained)
    assert worst < 1e-4
    assert likeliest_difference(teacher, trained[0]) < 1e-4
    sft_on_scores(tmp_path, teacher, made)

    proxy.last, proxy.replies = proxy.replies // 2, 0
    job = Job(tmp_path / "killed", settings).start()
    try:
        assert job.wait(START_S) == 1
        assert "cannot be reached" in job.output.read_text() and "teachers.other.outage_s=1" in job.output.read_text()
        assert len(job.steps()) < 3
    finally:
        job.clean_up()
    proxy.last = math.inf
    teacher.ready()
    killed = run(tmp_path / "killed", settings)
    assert stored(killed)[1] == failed
    alike = [load_file(folder / "hf" / "model.safetensors") for folder in (whole, killed)]
    assert all(torch.equal(tensor, alike[1][name]) for name, tensor in alike[0].items())
    metrics = [
        [{k: v for k, v in s.items() if not NOT_COMPARED.match(k)} for s in steps_of(x)] for x in (whole, killed)
    ]
    assert metrics[0] == metrics[1]


def sft_on_scores(folder: Path, teacher: RunningEngine, made: Path) -> None:
    """Scores of demonstrations by the server equal those of transformers, and SFT comes nearer to them."""
    rows = pq.read_table(made / "data" / "warm_start.parquet").to_pylist()[:24]
    for i, row in enumerate(rows):
        row["data_source"] = ("sums/left", "right")[i % 2]
    source, taught = write(folder / "demonstrations.parquet", rows[:16]), folder / "taught.parquet"
    urls = [f"teachers.{name}.url={teacher.url}/v1" for name in ("left", "other")]
    words = [f"model.path={made}/model", *urls, "teachers.left.sources=[sums/]"]
    teach(Path(source), words, top_k="5", out=str(taught))
    scored = pq.read_table(taught).to_pylist()
    assert [row["teacher"] for row in scored] == ["left", "other"] * 8
    tasks = read_rows(taught, require_response=True, split="train")
    model = AutoModelForCausalLM.from_pretrained(teacher.model_path, dtype=torch.float32)
    for row, pair in zip(scored, encode_demonstrations(tasks, ChatTokenizer.open(made / "model")), strict=True):
        prompt, response = (torch.from_numpy(ids).long() for ids in pair)
        with torch.no_grad():
            logp = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert row["teacher_topk_logp"] == pytest.approx(logp.topk(5)[0].numpy(), abs=1e-4)
        assert row["teacher_logp"] == pytest.approx(logp.gather(1, response[:, None])[:, 0].numpy(), abs=1e-4)
    settings = [
        *TINY,
        "algorithm=sft",
        f"model.path={made}/model",
        f"taskset.train={taught}",
        f"taskset.eval={write(folder / 'held_out.parquet', rows[16:])}",
    ]
    settings += [
        "model.from_scratch=null",
        "taskset.generate=null",
        "taskset.warm_start=null",
        "trainer.warm_start.steps=0",
        "trainer.updates_per_step=1",
    ]
    settings += ["algorithm.divergence=forward_kl", "algorithm.cross_entropy_coef=0", "trainer.tasks_per_step=16"]
    settings += ["trainer.steps=6", "trainer.eval_interval=0", "trainer.optimizer.lr=4e-3"]
    found = [
        s["teacher/divergence"]
        for s in records(run(folder / "sft", settings) / "metrics.jsonl")
        if "teacher/divergence" in s
    ]
    assert len(found) == 6 and found[-1] < 0.5 * found[0]


def run(run_dir: Path, settings: Sequence[str]) -> Path:
    """Directory of a job that ends well."""
    job = Job(run_dir, settings).start()
    try:
        assert job.wait(START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    return run_dir


def stored(run_dir: Path) -> tuple[list[Trajectory], dict[str, str]]:
    """Scored trajectories, and the message of each that the teacher failed on; no other is unscored."""
    store = Store(f"sqlite:///{run_dir}/store.db", read_only=True)
    rollouts = [f"train-{step:06d}" for step in range(3)]
    found = [each for rollout in rollouts for each in store.groups.trajectories(rollout)]
    left_out = {(row[0], row[1]) for row in sqlite3.connect(run_dir / "store.db").execute(EXCLUDED)}
    dropped = {
        group for rollout in rollouts for group, row in store.groups.states(rollout).items() if row[0] == "dropped"
    }
    store.close()
    assert {each.metadata[TEACHER] for each in found} == {"same", "other"}
    others = [each for each in found if each.metadata[TEACHER] == "other"]
    assert all(each.teacher_scores is None for each in found if each.metadata[TEACHER] == "same")
    scored = [each for each in others if each.teacher_scores is not None]
    failed = [each for each in others if each.teacher_scores is None]
    assert scored and all(each.end in (End.TEACHER_ERROR, End.TEACHER_TIMEOUT) for each in failed)
    assert all((each.group_id, each.index) in left_out or each.group_id in dropped for each in failed)
    names = [f"{each.rollout_id} {each.task_id} {each.index}" for each in failed]
    return scored, dict(zip(names, (each.metadata["reward_message"] for each in failed), strict=True))


def compared(teacher: Path, actor: Path, trajectories: Sequence[Trajectory]) -> float:
    """Largest difference between stored scores and the log-probs of the same files as a Megatron teacher."""
    [found] = run_grid(1, megatron_logp, str(teacher), str(actor), list(trajectories))
    pairs = zip(found, trajectories, strict=True)
    return max(float(abs(torch.tensor(logp) - torch.from_numpy(e.teacher_scores.logp)).max()) for logp, e in pairs)


def likeliest_difference(teacher: RunningEngine, trajectory: Trajectory) -> float:
    """Largest difference between the log-probs of the server's likeliest tokens and those of transformers."""

    async def ask() -> Trajectory:
        async with TeacherServers({"other": TeacherConfig(url=f"{teacher.url}/v1")}, top_k=5) as servers:
            return await servers.taught(trajectory, "right")

    scores = asyncio.run(ask()).teacher_scores
    assert scores is not None and np.abs(scores.logp - trajectory.teacher_scores.logp).max() < 1e-4
    prompt, response = (torch.from_numpy(ids).long() for ids in trajectory.answered())
    model = AutoModelForCausalLM.from_pretrained(teacher.model_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    logps, ids = logits.log_softmax(-1).topk(5)
    assert torch.equal(ids, torch.from_numpy(scores.ids).long())
    return float((logps - torch.from_numpy(scores.logps)).abs().max())


def megatron_logp(rank: int, teacher: str, actor: str, trajectories: list[Trajectory]) -> list[list[float]]:
    """Runs in a rank: log-probs of the responses by a teacher with a path."""
    from megarl.config.algorithms import DistillConfig, KLConfig
    from megarl.learn import algorithms
    from megarl.learn.parallel import process_groups
    from megarl.train.inference.inference import Inference
    from megarl.train.inference.models import Models
    from megarl.train.ranks import Ranks
    from megarl.train.update.learner import Learner, UpdateFilter

    config = Config(
        model=ModelConfig(path=actor, dtype="float32"),
        algorithm=DistillConfig(name="distill", kl=KLConfig(0.0)),
        teachers={"other": TeacherConfig(teacher)},
        trainer=TrainerConfig(max_tokens_per_micro_batch=4096),
    )
    process_groups.initialize(config.parallel, seed=1)
    algorithm = algorithms.get("distill")
    models = Models(config, algorithm)
    models.make_actor(None)
    models.load_beginning()
    models.build(0, None, Path("none"), lambda phase: None)
    inference = Inference(config, algorithm, models, lambda phase: None)
    reporter: Any = SimpleNamespace(log=lambda text: None, event=lambda kind, data: None)
    learner = Learner(config, algorithm, inference, UpdateFilter(config.trainer.update_filter, reporter), Ranks())
    batch = learner.batch_of(trajectories)
    inference.fill(batch)
    sequences = batch.sequences
    assert sequences.teacher_logp is not None
    ends = sequences.cu_seqlens[1:].tolist()
    found = []
    for end, each in zip(ends, trajectories, strict=True):
        found.append(sequences.teacher_logp[end - 1 - each.response_length : end - 1].tolist())
    return found
