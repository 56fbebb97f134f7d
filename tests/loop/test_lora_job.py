"""A job with adapters: killed and resumed with the same bits, and its files read by transformers and PEFT."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.buffer.store import Store
from megarl.run.launch.subjects import subject_of
from tests.loop.engines import transformers_logp
from tests.loop.same_run import steps_of
from tests.system.jobs import START_S, TINY, Job

STEPS = 4
SETTINGS = (
    *TINY,
    "parallel=tp2",
    f"trainer.steps={STEPS}",
    "trainer.optimizer.lr=0.003",
    "model.lora.rank=4",
    "model.lora.alpha=8",
    "sync.adapter=separate",
    "rollout.replicas=2",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Directories of a run with colocated engines that keep their weights, and of one with engines apart that was
    killed after a checkpoint. One of its two engines was killed after it went on: the other one is joined again then,
    and needs all weights too."""
    root = tmp_path_factory.mktemp("lora")
    jobs: list[Job] = []
    try:
        jobs.append(Job(root / "whole", (*SETTINGS, "rollout.placement=colocated", "rollout.offload=memory")).start())
        assert jobs[-1].wait(START_S) == 0, jobs[-1].output.read_text()
        jobs.append(Job(root / "killed", SETTINGS).start())
        jobs[-1].until(lambda: (root / "killed" / "checkpoints" / "global_step_2").is_dir(), "a checkpoint")
        jobs[-1].kill_all()
        jobs.append(Job(root / "killed", SETTINGS).start())
        jobs[-1].until(lambda: "resumed from" in jobs[-1].output.read_text(), "the steps of before forgotten")
        jobs[-1].until(lambda: STEPS - 1 in jobs[-1].steps(), "a step after the kill", poll_s=0.01)
        os.kill(jobs[-1].pid_of("engine"), signal.SIGKILL)
        assert jobs[-1].wait(START_S) == 0, jobs[-1].output.read_text()
        assert "was ended by signal 9" in jobs[-1].output.read_text()
        yield [root / "whole", root / "killed"]
    finally:
        for job in jobs:
            job.clean_up()


@pytest.mark.slow
def test_a_killed_job_ends_with_the_same_adapter(runs: list[Path]) -> None:
    whole, killed = (load_file(run / "adapter" / "adapter_model.safetensors") for run in runs)
    assert whole.keys() == killed.keys() and all(torch.equal(whole[name], killed[name]) for name in whole)
    assert all(tensor.any() for tensor in whole.values()), "every B has moved"
    base, merged = (load_file(runs[0] / folder / "model.safetensors") for folder in ("reference", "hf"))
    moved = {name.rpartition(".")[0] for name in base if not torch.equal(base[name], merged[name])}
    assert moved == {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in whole}


@pytest.mark.slow
def test_engines_got_what_was_trained(runs: list[Path]) -> None:
    """The answers after training have the log-probs of PEFT's model; a step has sent the adapters alone."""
    records = steps_of(runs[0])
    assert max(record["training/rollout_logp_diff_max"] for record in records) < 1e-4
    adapter = load_file(runs[0] / "adapter" / "adapter_model.safetensors")
    assert records[-1]["sync/bytes"] == 2 * sum(tensor.nbytes for tensor in adapter.values())
    assert records[-1]["sync/digests"] == 2 * len(adapter)

    model = AutoModelForCausalLM.from_pretrained(
        runs[0] / "reference", dtype=torch.float32, attn_implementation="eager"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = PeftModel.from_pretrained(model, str(runs[0] / "adapter")).eval()
    store = Store(f"sqlite:///{runs[0]}/store.db", read_only=True)
    samples = [sample for t in store.groups.trajectories("eval-after") for sample in t.samples()]
    store.close()
    differences = []
    for sample in samples:
        prompt, answer = sample.prompt_ids.tolist(), sample.response_ids.tolist()
        expected = transformers_logp(adapted, prompt, answer)
        torch.testing.assert_close(torch.as_tensor(sample.engine_logp), expected, rtol=0, atol=1e-4)
        with adapted.disable_adapter():
            differences.append(float((transformers_logp(adapted, prompt, answer) - expected).abs().max()))
    assert max(differences) > 1e-2, "the adapter changes what is sampled"


@pytest.mark.slow
def test_a_checkpoint_names_the_base_that_its_adapter_is_for(runs: list[Path]) -> None:
    states = [json.loads((run / "checkpoints" / f"global_step_{STEPS}" / "state.json").read_text()) for run in runs]
    assert states[0]["made"]["base"] == states[1]["made"]["base"]


@pytest.mark.slow
def test_a_checkpoint_has_the_adapter_that_the_run_exports(runs: list[Path], tmp_path: Path) -> None:
    """And the model that a bench makes of it is the exported one."""
    subject = subject_of(f"run:{runs[0]}@{STEPS}")
    assert subject.path == runs[0] / "reference"
    subject.convert(tmp_path)
    for made, exported, file in (
        (tmp_path / "adapter", "adapter", "adapter_model"),
        (tmp_path / "model", "hf", "model"),
    ):
        found, wanted = (load_file(folder / f"{file}.safetensors") for folder in (made, runs[0] / exported))
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    configs = [
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (tmp_path / "adapter", runs[0] / "adapter")
    ]
    assert configs[0] == configs[1]
