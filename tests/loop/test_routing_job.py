"""Jobs with routing replay: experts of two turns, in segments, also of requests that outlive their weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megarl.buffer.store import Store
from megarl.config.schema import FromScratchConfig
from megarl.learn.models.from_scratch import create
from tests.loop.same_run import steps_of
from tests.loop.test_segments import TWO_TURNS
from tests.system.jobs import START_S, TINY, Job

LAYERS, EXPERTS_OF_A_TOKEN, STEPS = 2, 3, 2


def save_model(folder: Path) -> Path:
    """The quickstart's tokenizer, with a mixture of 8 experts."""
    config = FromScratchConfig(max_position_embeddings=160)
    create(folder, config, ["1 + 2 = 34567890 - "], seed=1, characters="0123456789+-= ")
    plain = json.loads((folder / "config.json").read_text())
    sizes = {name: plain[name] for name in ("vocab_size", "pad_token_id", "eos_token_id", "bos_token_id")}
    moe = Qwen3MoeConfig(
        **sizes,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=EXPERTS_OF_A_TOKEN,
        norm_topk_prob=True,
        max_position_embeddings=160,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(moe).save_pretrained(folder)
    return folder


KEPT = ("sync.order=completion", "sync.pause=keep", "sync.max_staleness=1", "algorithm.correction=truncate")


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", [(), pytest.param(KEPT, marks=pytest.mark.soak)], ids=["own weights", "kept requests"]
)
def test_experts_of_every_token_reach_the_trainer(tmp_path: Path, order: tuple[str, ...]) -> None:
    workflow = tmp_path / "two_turns.py"
    workflow.write_text(TWO_TURNS)
    settings = (
        *TINY,
        f"model.path={save_model(tmp_path / 'model')}",
        "model.from_scratch=null",
        f"rollout.workflow={workflow}",
        f"trainer.steps={STEPS}",
        "trainer.warm_start.steps=1",
        "rollout.max_prompt_tokens=null",
        "rollout.max_response_tokens=24",
        "rollout.max_trajectory_tokens=150",
        "rollout.segment_tokens=6",
        "rollout.routing_replay=true",
        "parallel.ep=2",
        "algorithm.group_size=4",
        "taskset.eval_size=8",
        *order,
    )
    job = Job(tmp_path / "run", settings).start()
    try:
        assert job.wait(START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    records = steps_of(job.run_dir)
    assert len(records) == STEPS
    for record in records:
        assert 0 <= record["actor/routing_changed"] < (0.2 if not order else 1)
        gap = record["training/rollout_logp_diff_max"]  # of kept requests, as far as an update moves log-probs
        assert gap < 1e-4 if not order else math.isfinite(gap)
    store = Store(f"sqlite:///{job.run_dir}/store.db", read_only=True)
    trajectories = [t for step in range(STEPS) for t in store.groups.trajectories(f"train-{step:06d}")]
    store.close()
    assert trajectories
    for trajectory in trajectories:
        [sample] = trajectory.samples()
        tokens = len(sample.prompt_ids) + len(sample.response_ids)
        assert sample.routing is not None
        assert sample.routing.shape == (tokens - 1, LAYERS, EXPERTS_OF_A_TOKEN)
