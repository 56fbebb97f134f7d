"""Jobs with tiny models of families that are not Llama's: killed and resumed, exported, and read by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.buffer.store import Store
from megarl.config.schema import FromScratchConfig
from megarl.learn.models.from_scratch import create
from tests.loop.engines import transformers_logp
from tests.loop.same_run import steps_of
from tests.loop.test_sync_families import SIZES
from tests.parallel.families import FAMILIES, save
from tests.system.jobs import START_S, TINY, Job
from tests.unit.test_prediction_layers import prediction_shapes

STEPS = 3
TP2 = ("parallel=tp2",)
BF16 = ("parallel=tp2", "model.dtype=bfloat16")
EP2 = ("parallel=tp2", "parallel.sequence_parallel=true", "parallel.ep=2")


def save_model(family: str, folder: Path) -> Path:
    """The quickstart's tokenizer, with a model of the family."""
    texts = [f"{a} {sign} {b} = {a}{b}" for a in range(100) for b in range(0, 100, 7) for sign in "+-"]
    create(folder, FromScratchConfig(), texts, seed=1, characters="abcdefghijklmnopqrstuvwxyz?:.")
    plain = json.loads((folder / "config.json").read_text())
    tokens = {name: plain[name] for name in ("vocab_size", "pad_token_id", "eos_token_id", "bos_token_id")}
    if (key := "vocab_size_per_layer_input") in FAMILIES[family][1]:
        tokens[key] = tokens["vocab_size"]
    return save(family, folder, **{**SIZES[family], **tokens})


def add_prediction(folder: Path) -> dict[str, torch.Tensor]:
    """Add a prediction layer to a model's files; its tensors."""
    config = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    found = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in prediction_shapes(config).items()}
    file = folder / "model.safetensors"
    save_file(load_file(file) | found, file, metadata={"format": "pt"})
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "grid"),
    [
        *(
            pytest.param(name, TP2, id=name, marks=pytest.mark.soak)
            for name in ("olmo3", "gemma3_text", "gemma4_text", "gemma4_small", "phi3", "glm4", "exaone4")
        ),
        *(
            pytest.param(name, EP2, id=name, marks=pytest.mark.soak)
            for name in ("minimax_m2", "ernie4_5_moe", "gpt_oss")
        ),
        pytest.param("qwen3_5", BF16, id="qwen3_5"),
        pytest.param("qwen3_next", (*EP2, "model.dtype=bfloat16"), id="qwen3_next", marks=pytest.mark.soak),
    ],
)
def test_a_job_goes_on_and_its_model_is_what_was_trained(tmp_path: Path, family: str, grid: tuple[str, ...]) -> None:
    path = save_model(family, tmp_path / "model")
    prediction = add_prediction(path) if family == "qwen3_5" else {}
    settings = (
        *TINY,
        *grid,
        *(("rollout.speculative=mtp", "rollout.speculative_tokens=1") if prediction else ()),
        f"model.path={path}",
        "model.from_scratch=null",
        f"trainer.steps={STEPS}",
        "trainer.warm_start.steps=2",
        "rollout.max_prompt_tokens=80",
    )
    job = Job(tmp_path / "run", settings).start()
    try:
        job.until(lambda: (job.run_dir / "checkpoints" / "global_step_2").is_dir(), "a checkpoint")
        job.kill_all()
        job = Job(tmp_path / "run", settings).start()
        assert job.wait(START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    records = steps_of(job.run_dir)
    assert len(records) == STEPS and any(record["actor/grad_norm"] > 0 for record in records)
    assert not [key for record in records for key in record if key in ("alarm/loss", "alarm/gradient", "alarm/written")]
    exact = "model.dtype=bfloat16" not in grid  # else of the size of bfloat16's rounding
    difference = "training/rollout_logp_diff_max" if exact else "training/rollout_logp_diff_mean"
    assert max(record[difference] for record in records) < (1e-4 if exact else 0.05)

    stored = load_file(job.run_dir / "hf" / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in prediction.items()), "as in model.path"
    assert not prediction or all(0 <= record["rollout/draft_acceptance"] <= 1 for record in records)
    model = AutoModelForCausalLM.from_pretrained(job.run_dir / "hf", dtype=torch.float32, attn_implementation="eager")
    store = Store(f"sqlite:///{job.run_dir}/store.db", read_only=True)
    samples = [sample for t in store.groups.trajectories("eval-after") for sample in t.samples()]
    store.close()
    assert len(samples) == 40
    for sample in samples:
        expected = transformers_logp(model.eval(), sample.prompt_ids.tolist(), sample.response_ids.tolist())
        apart = (torch.as_tensor(sample.engine_logp) - expected).abs()
        assert (apart.max() < 1e-4) if exact else (apart.mean() < 0.1)
