"""One job that ends where samples differ, goes on when they may, and is stopped and resumed.

Evaluations ask the moving average of its actor (``evaluation.average``); engines that begin with its weights compute
the bits of one that has them by updates (``sync.cold_interval``).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from megarl.buffer.store import Store
from megarl.engines.client.names import COLD_FOLDER, cold_mark
from megarl.weights.checkpoint.convert.convert import Settings, convert_megatron_to_hf
from tests.system.jobs import START_S, TINY, Job

pytestmark = pytest.mark.timeout(3 * START_S)
DECAY, STEPS = 0.9, 5
SETTINGS = (
    *TINY, f"evaluation.average={DECAY}", f"trainer.steps={STEPS}", "trainer.checkpoint_interval=1",
    "trainer.keep_checkpoints=9", "trainer.optimizer.lr=0.1", "trainer.optimizer.warmup_steps=0", "sync.cold_interval=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job that has ended well, after a start that a tolerance of samples ended and one that was stopped."""
    run_dir = tmp_path_factory.mktemp("average") / "run"
    refused = Job(run_dir, (*SETTINGS, "sync.sample_tolerance=1e-12")).start()  # no two implementations are so near
    job = Job(run_dir, SETTINGS)
    try:
        assert refused.wait(START_S) == 1
        words = "more than sync.sample_tolerance=1e-12 (99% within"
        assert words in refused.output.read_text() and refused.steps() == []
        job.start().until_step(1)
        job.signal(signal.SIGTERM)
        job.wait(START_S)
        assert job.start().wait(START_S) == 0, job.output.read_text()
        yield job
    finally:
        refused.clean_up()
        if job.has_started:
            job.clean_up()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    [file] = folder.glob("*.safetensors")
    return load_file(file)


def test_a_job_that_samples_had_ended_goes_on_when_they_may(job: Job) -> None:
    assert job.steps() == list(range(1, STEPS + 1))


def test_an_engine_that_begins_with_the_weights_computes_the_same_bits(job: Job) -> None:
    records = [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "actor/pg_loss" in record]
    assert [record["step"] for record in steps if "sync/cold_seconds" in record] == [3, 5]
    assert job.output.read_text().count("an engine was started with the weights' files, and computes the same") == 2
    folder = job.run_dir / COLD_FOLDER
    assert not cold_mark(folder).exists() and not list(folder.glob("*.safetensors"))


def test_evaluations_ask_the_average_of_all_steps(job: Job, tmp_path: Path) -> None:
    """The average is computed again from the actor's checkpoints; the answers again by transformers."""
    run = job.run_dir
    mean = {name: tensor.double() for name, tensor in weights(run / "reference").items()}
    for step in range(1, STEPS + 1):
        target = tmp_path / f"hf{step}"
        convert_megatron_to_hf(run / "checkpoints" / f"global_step_{step}", target, settings=Settings(progress=False))
        actor = weights(target)
        mean = {name: DECAY * value + (1 - DECAY) * actor[name].double() for name, value in mean.items()}
    found = weights(run / "hf_average")
    assert found.keys() == mean.keys()
    for name, value in mean.items():
        torch.testing.assert_close(found[name].double(), value, rtol=0, atol=1e-6, msg=name)
        assert not torch.equal(found[name], actor[name]), "the actor stood still"
    right = {name: like(run, name) for name in ("hf_average", "hf")}
    assert right["hf_average"] == 1.0 > right["hf"], right


def like(run: Path, name: str) -> float:
    """Share of the last evaluation's tokens that a model of the run finds likeliest."""
    model, equal = Qwen3ForCausalLM.from_pretrained(run / name, dtype=torch.float32), list[bool]()
    store = Store(f"sqlite:///{run}/store.db", read_only=True)
    for answer in store.groups.trajectories("eval-after"):
        prompt, response = answer.turns[0].token_ids.tolist(), answer.response.token_ids.tolist()
        with torch.no_grad():
            likeliest = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].argmax(-1)
        equal += (likeliest == torch.tensor(response)).tolist()
    store.close()
    return sum(equal) / len(equal)
