"""An exponential moving average of the actor, which evaluations ask in its place (``evaluation.average``)."""

from __future__ import annotations

import signal
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from megarl.buffer.store import Store
from megarl.weights.checkpoint.convert.convert import Settings, convert_megatron_to_hf
from tests.system.jobs import START_S, TINY, Job

DECAY, STEPS = 0.9, 4


def weights(folder: Path) -> dict[str, torch.Tensor]:
    [file] = folder.glob("*.safetensors")
    return load_file(file)


def test_evaluations_ask_the_average_of_all_steps_of_a_job_that_was_stopped(tmp_path: Path) -> None:
    """The average is computed again from the actor's checkpoints; the answers again by transformers."""
    settings = (
        *TINY, f"evaluation.average={DECAY}", f"trainer.steps={STEPS}", "trainer.checkpoint_interval=1",
        "trainer.keep_checkpoints=9", "trainer.optimizer.lr=0.1", "trainer.optimizer.warmup_steps=0",
    )  # fmt: skip
    job = Job(tmp_path / "run", settings).start()
    try:
        job.until_step(2)
        job.signal(signal.SIGTERM)
        job.wait(START_S)
        assert job.start().wait(START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
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
