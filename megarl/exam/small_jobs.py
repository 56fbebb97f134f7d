"""Small jobs that get faults: settings of each, on one machine without a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FEW = (
    "taskset.train_size=300",
    "taskset.eval_size=20",
    "taskset.warm_start_size=2000",
    "trainer.tasks_per_step=8",
    "trainer.updates_per_step=2",
    "trainer.checkpoint_interval=2",
    "rollout.kv_cache_bytes=33554432",
    "rollout.max_num_seqs=64",
    "rollout.max_prompt_tokens=null",
    "cluster.restarts=0",
)
SUMS = ("experiment=quickstart", *FEW)
NOT_AGAIN = ("model.from_scratch=null", "trainer.warm_start.steps=0")
TINY = (*SUMS, "model.path={folder}/sums", *NOT_AGAIN)
GUESS = ("experiment=guess", *FEW, "parallel=tp1")


@dataclass(frozen=True)
class SmallJob:
    """Settings of a small job.

    Attributes:
        settings: ``{folder}`` stands for the folder of ``make_files``.
        stops: Steps at which the job ends, one start for each; the last start goes to the last step.
    """

    settings: tuple[str, ...]
    stops: tuple[int, ...] = (4,)


ONE_RANK = (*TINY, "parallel=tp1")
JOBS: Mapping[str, SmallJob] = {
    "tiny": SmallJob(ONE_RANK),
    "dp2": SmallJob((*TINY, "parallel=dp2")),
    "tp2": SmallJob((*TINY, "parallel=tp2")),
    "pp2": SmallJob((*TINY, "parallel=pp2")),
    "packed": SmallJob((*TINY, "parallel=dp2", "trainer.max_tokens_per_micro_batch=160")),
    "kl": SmallJob((*ONE_RANK, "algorithm.kl.coef=0.5")),
    "ppo": SmallJob((*ONE_RANK, "algorithm=ppo")),
    "lora": SmallJob((*ONE_RANK, "model.lora.rank=4", "model.lora.alpha=8")),
    "late": SmallJob((*ONE_RANK, "sync.max_staleness=1", "sync.order=completion", "algorithm.correction=truncate")),
    "colocated": SmallJob((*ONE_RANK, "rollout.placement=colocated")),
    "evaluated": SmallJob((*ONE_RANK, "trainer.eval_interval=2")),
    "resume": SmallJob(ONE_RANK, stops=(2, 4)),
    "reward": SmallJob((*ONE_RANK, "reward.path={folder}/reward.py")),
    "moe": SmallJob((*ONE_RANK, "model.path={folder}/experts", "rollout.routing_replay=true")),
    "turns": SmallJob((*GUESS, "model.path={folder}/guess", *NOT_AGAIN)),
    "dpo": SmallJob(("experiment=dpo", "parallel=tp1", *FEW, "trainer.warm_start.steps=20")),
}
"""Name -> job."""
MODELS: Mapping[str, tuple[str, ...]] = {
    "sums": (*SUMS, "parallel=tp1", "trainer.warm_start.steps=300"),
    "guess": (*GUESS, "trainer.warm_start.steps=100"),
    "tied": (*SUMS, "parallel=tp1", "trainer.warm_start.steps=20", "model.from_scratch.tie_word_embeddings=true"),
    "padded": (*SUMS, "parallel=tp1", "trainer.warm_start.steps=20", "model.from_scratch.vocab_size=100"),
    "long": (*SUMS, "parallel=tp1", "trainer.warm_start.steps=20", "model.from_scratch.max_position_embeddings=192"),
    "experts": (
        *SUMS,
        "parallel=tp1",
        "model.path={folder}/raw_experts",
        "model.from_scratch=null",
        "trainer.warm_start.steps=200",
    ),
}
"""Folder of a model -> settings of the job whose warm start makes it. Untrained models have no rewards that differ."""
REWARD = '''"""Reward of the exam's job ``reward``: 1 where the last number of a response is the answer."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    numbers = re.findall(r"-?\\d+", solution_str)
    return float(bool(numbers) and numbers[-1] == str(ground_truth))
'''
HIDDEN, HEADS, EXPERTS, CHOSEN = 64, 2, 8, 3


def make_files(folder: Path) -> None:
    """Write the files that settings name as ``{folder}/…``: a reward function, and an untrained model with experts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    if not (folder / "raw_experts" / "config.json").is_file():
        _save_experts(folder / "raw_experts")


def _save_experts(folder: Path) -> None:
    """Save the quickstart's tokenizer with a model of eight experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from megarl.config.schema import FromScratchConfig
    from megarl.learn.models.from_scratch import create

    create(folder, FromScratchConfig(max_position_embeddings=160), ["1 + 2 = 34567890 - "], seed=1,
           characters="0123456789+-= ")  # fmt: skip
    plain = json.loads((folder / "config.json").read_text())
    sizes = {name: plain[name] for name in ("vocab_size", "pad_token_id", "eos_token_id", "bos_token_id")}
    config = Qwen3MoeConfig(
        **sizes, hidden_size=HIDDEN, intermediate_size=96, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=32, num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN, norm_topk_prob=True, max_position_embeddings=160, initializer_range=0.1,
        tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def settings_of(job: SmallJob, folder: Path, run_dir: Path, more: tuple[str, ...], stop: int) -> list[str]:
    """Return the settings of one start, each once with the value given last."""
    given = [*job.settings, *more, f"trainer.steps={stop}", f"run.dir={run_dir}"]
    last = {setting.partition("=")[0]: setting for setting in given}
    return [setting.replace("{folder}", str(folder)) for setting in last.values()]
