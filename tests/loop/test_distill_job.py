"""A job that learns from two teachers on its own samples, through the command line, on two ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from megarl.config import compose
from megarl.run.checks import job as checks
from tests.loop.test_roles import metrics
from tests.system.jobs import TINY, Job, last_of_each
from tests.unit.small_rows import write


def save_other(path: Path, tokenizer: Path, vocab_size: int = 160) -> Path:
    """A teacher of another size than the quickstart's model, far from uniform, with the same tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    shutil.copy(tokenizer, path)
    return path


@pytest.mark.timeout(400)
@pytest.mark.parametrize("divergence", ["sampled", pytest.param("jsd", marks=pytest.mark.soak)])
def test_two_teachers_by_data_source(tmp_path: Path, divergence: str) -> None:
    """The first teacher is the student itself at the start, so its KL is 0 there; the other one's is not."""
    made = tmp_path / "made"
    checks.check(compose([*last_of_each(TINY), f"run.dir={made}"]))
    rows = pq.read_table(made / "data" / "train.parquet").to_pylist()
    for i, row in enumerate(rows):
        row["data_source"] = ("sums/left", "right")[i % 2]
    train = write(tmp_path / "train.parquet", rows)
    other = save_other(tmp_path / "other", made / "model" / "tokenizer.json")
    settings = [
        *TINY,
        f"model.path={made}/model",
        f"taskset.train={train}",
        "trainer.warm_start.steps=0",
        "trainer.steps=2",
        "algorithm=distill",
        "algorithm.kl.coef=0",
        f"algorithm.divergence={divergence}",
        "reward.routes={sums/left: reasoning_gym/chain_sum, right: reasoning_gym/chain_sum}",
        f"teachers.same={{path: {made}/model, sources: [sums/]}}",
        f"teachers.other={{path: {other}, parallel: {{tp: 2}}, offload: memory}}",
    ]
    if divergence != "sampled":
        settings += ["algorithm.expert_ratio=0.25", "algorithm.teacher_tokens=answer", "teachers.other.decay_steps=2"]
    job = Job(tmp_path / "run", settings).start()
    try:
        assert job.wait(300) == 0, job.output.read_text()
    finally:
        job.clean_up()
    steps = metrics(job.run_dir)
    assert sorted(steps) == [1, 2]
    first, second = steps[1], steps[2]
    assert first["teacher/kl/same"] == pytest.approx(0.0, abs=1e-6) and first["teacher/kl/other"] > 0.5
    between = sorted((first["teacher/kl/same"], first["teacher/kl/other"]))
    assert between[0] < first["teacher/kl"] < between[1]
    assert first["actor/grad_norm"] > 0 and second["teacher/kl/same"] != 0.0
    assert ("teacher/divergence" in first) == (divergence != "sampled")
    if divergence != "sampled":
        assert (first["teacher/weight/other"], second["teacher/weight/other"]) == (1.0, 0.5)
