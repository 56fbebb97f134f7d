"""Bounds of each number of ``schema`` in one table, and the few rules for texts. Checked before anything is written.

Rules that need a model, a grid or a machine are not here: ``launch/checks.py`` calls the checks of those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from megarl.config.schema import Config, FromScratchConfig, ModelConfig
from megarl.errors import ConfigError, masked_text


class Bound(NamedTuple):
    """``low`` <= value <= ``high``, both finite or open; ``above`` and ``below`` leave the end itself out."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False
    multiple: int = 1

    def admits(self, value: float) -> bool:
        if not math.isfinite(value) or (self.multiple > 1 and value % self.multiple):
            return False
        return (value > self.low if self.above else value >= self.low) and (
            value < self.high if self.below else value <= self.high
        )

    def __str__(self) -> str:
        text = f"{'above' if self.above else 'at least'} {_text(self.low)}"
        if self.high < math.inf:
            text += f" and {'below' if self.below else 'at most'} {_text(self.high)}"
        return text + (f" and a multiple of {self.multiple}" if self.multiple > 1 else "")


COUNT = Bound(1)
NUMBER = Bound(0)
SEED = Bound(0, 2**31 - 1)
RANKS = Bound(1, 65536)
THREADS = Bound(1, 1024)
WEIGHT = Bound(0)
"""A coefficient of a loss term."""
SECONDS = Bound(0, 30 * 86400, above=True)

_OPTIMIZER = {
    "lr": Bound(0, 1),  # 0 is a control experiment
    "min_lr": Bound(0, 1),
    "warmup_steps": NUMBER,
    "decay_steps": COUNT,
    "weight_decay": Bound(0, 100),
    "beta1": Bound(0, 1, below=True),
    "beta2": Bound(0, 1, below=True),
    "eps": Bound(0, 1, above=True),
    "clip_grad": WEIGHT,  # 0: gradients are not clipped
}

_GRID = {
    **dict.fromkeys(("tp", "pp", "dp", "cp", "ep", "etp"), RANKS),
    **dict.fromkeys(("vpp", "first_stage_layers", "last_stage_layers"), COUNT),
}
_ROLES = ("reference.", "critic.", "reward_model.")

BOUNDS: dict[str, Bound] = {
    "model.from_scratch.vocab_size": COUNT,
    "model.from_scratch.hidden_size": COUNT,
    "model.from_scratch.intermediate_size": COUNT,
    "model.from_scratch.num_hidden_layers": COUNT,
    "model.from_scratch.num_attention_heads": COUNT,
    "model.from_scratch.num_key_value_heads": COUNT,
    "model.from_scratch.head_dim": COUNT,
    "model.from_scratch.max_position_embeddings": COUNT,
    "model.from_scratch.initializer_range": Bound(0, 10, above=True),
    "model.router.aux_loss_coef": WEIGHT,
    "model.router.z_loss_coef": WEIGHT,
    "model.router.bias_update_rate": WEIGHT,
    **{f"{role}parallel.{name}": b for role in ("", *_ROLES) for name, b in _GRID.items()},
    "algorithm.group_size": COUNT,
    "algorithm.clip_low": WEIGHT,  # DeepSeek-R1 clips at 10: no lower bound
    "algorithm.clip_high": WEIGHT,
    "algorithm.dual_clip": Bound(1, above=True),
    "algorithm.aggregation_length": COUNT,
    "algorithm.entropy_coef": WEIGHT,
    "algorithm.kl.coef": WEIGHT,
    "algorithm.kl.target": Bound(0, above=True),
    "algorithm.kl.horizon": COUNT,
    "algorithm.gamma": Bound(0, 1),
    "algorithm.lam": Bound(0, 1),
    "algorithm.value_clip": Bound(0, above=True),
    "algorithm.beta": Bound(0, above=True),
    "algorithm.label_smoothing": Bound(0, 0.5, below=True),
    "algorithm.mu": Bound(0, 1),
    "algorithm.expert_ratio": Bound(0, 1, below=True),
    "algorithm.max_extra_rollouts": NUMBER,
    "algorithm.tau": WEIGHT,
    "algorithm.correction_cap": Bound(1),
    "reference.refresh": COUNT,
    **{f"critic.optimizer.{name}": bound for name, bound in _OPTIMIZER.items()},
    "critic.warmup_steps": NUMBER,
    "reward_model.coef": Bound(-100, 100),
    "trainer.steps": COUNT,
    "trainer.tasks_per_step": COUNT,
    "trainer.updates_per_step": COUNT,
    "trainer.ppo_epochs": COUNT,
    "trainer.max_tokens_per_micro_batch": COUNT,
    "trainer.micro_batch_size": COUNT,
    "trainer.checkpoint_interval": COUNT,
    "trainer.keep_checkpoints": COUNT,
    "trainer.max_failed_checkpoints": COUNT,
    "trainer.eval_interval": NUMBER,
    "trainer.update_filter.spike_factor": Bound(1, above=True),
    "trainer.update_filter.spike_window": Bound(2, 10**6),
    "trainer.update_filter.max_bad_steps": COUNT,
    "trainer.seed": SEED,
    "trainer.num_threads": THREADS,
    "trainer.logits_bytes": COUNT,
    **{f"trainer.optimizer.{name}": bound for name, bound in _OPTIMIZER.items()},
    "trainer.warm_start.steps": NUMBER,
    "trainer.warm_start.batch_size": COUNT,
    "trainer.warm_start.checkpoint_interval": COUNT,
    **{f"trainer.warm_start.optimizer.{name}": bound for name, bound in _OPTIMIZER.items()},
    "rollout.tp": RANKS,
    "rollout.pp": RANKS,
    "rollout.replicas": Bound(1, 1024),
    "rollout.max_prompt_tokens": COUNT,
    "rollout.max_response_tokens": COUNT,
    "rollout.temperature": Bound(0, 100, above=True),  # training samples: greedy answers of a group would all be one
    "rollout.max_num_seqs": COUNT,
    "rollout.block_size": Bound(32, 1024, multiple=32),  # vLLM's CPU attention takes no other
    "rollout.kv_cache_bytes": Bound(2**20),
    "rollout.num_threads": THREADS,
    "rollout.start_timeout_s": SECONDS,
    "rollout.request_timeout_s": SECONDS,
    "rollout.concurrent_groups": COUNT,
    "evaluation.samples": COUNT,
    "evaluation.temperature": Bound(0, 100),
    "evaluation.top_p": Bound(0, 1, above=True),
    "evaluation.top_k": NUMBER,
    "taskset.seed": SEED,
    "taskset.train_size": COUNT,
    "taskset.eval_size": COUNT,
    "taskset.warm_start_size": COUNT,
    "taskset.expert_size": COUNT,
    "reward.workers": THREADS,
    "reward.timeout_s": SECONDS,
    "reward.weight": Bound(-100, 100),
    "reward.retries": Bound(0, 100),
    "reward.max_kills": Bound(1, 100),
    "reward.backlog": COUNT,
    **{f"reward.{part}.weight": Bound(-100, 100) for part in ("format", "length", "repetition", "language")},
    "reward.length.warmup_steps": NUMBER,
    "reward.repetition.ngram": Bound(1, 100),
    "reward.code.cpu_s": Bound(1, 3600),
    "reward.code.wall_s": Bound(0, 3600, above=True),
    "reward.code.item_s": Bound(0, 3600, above=True),
    "reward.code.memory_mib": Bound(16, 2**20),
    "reward.judge.votes": Bound(1, 101),
    "reward.judge.temperature": Bound(0, 100),
    "reward.judge.max_tokens": COUNT,
    "reward.judge.concurrency": Bound(1, 4096),
    "reward.judge.timeout_s": SECONDS,
    "reward.judge.retries": Bound(0, 100),
    "reward.overlong_buffer": COUNT,
    "reward.overlong_penalty": WEIGHT,
    "sync.bucket_bytes": Bound(4096),  # smaller ones cost a message for every few numbers
    "sync.timeout_s": SECONDS,
    "sync.probe_tokens": Bound(2, 2**20),
    "sync.probe_tolerance": Bound(0, above=True),
    "store.poll_s": Bound(0, 60, above=True),
    "store.outage_s": Bound(0, 86400),
    "rollout.nodes": RANKS,
    "cluster.connect_timeout_s": SECONDS,
    "cluster.heartbeat_s": Bound(1, 3600),
    "cluster.stall_s": Bound(1, 86400),
    "cluster.restarts": Bound(0, 1000),
    "cluster.replacements": Bound(0, 1000),
    "cluster.spare_nodes": Bound(0, 1000),
    "cluster.max_clock_skew_s": SECONDS,
    "cluster.min_free_disk_bytes": NUMBER,
    "run.port": Bound(1024, 65535),
    "run.shutdown_grace_s": SECONDS,
}


def check_bounds(config: Config) -> None:
    """Raise ConfigError naming the setting, its value and the values that it may have."""
    for name, value in numbers(config):
        bound = BOUNDS.get(name)
        if bound is not None and not bound.admits(value):
            default = dict(numbers(Config(model=ModelConfig(from_scratch=FromScratchConfig())))).get(name)
            fix = "leave it out for none" if default is None else f"the default is {_text(default)}"
            finite = "" if math.isfinite(value) else "a finite number, "
            raise ConfigError(f"{name}={_text(value)} must be {finite}{bound}; {fix}")
    name = config.run.name
    if not name.strip() or name.startswith(".") or "/" in name or not name.isprintable():
        raise ConfigError(
            f"run.name={name!r} must be one plain name, since runs/<name> is the run's directory; "
            "set it to a word such as my-run (another place is run.dir)"
        )
    for setting, text in (
        ("run.dir", config.run.dir),
        ("model.path", config.model.path),
        ("run.host", config.run.host),
    ):
        if not text.strip():
            raise ConfigError(f"{setting} is empty; give it a value or leave it out")
    masked = masked_text(config.store.url)
    if masked != config.store.url:
        raise ConfigError(
            f"store.url={masked} holds a password, which would be written to resolved.json; leave it out and "
            "set PGPASSWORD or ~/.pgpass, or export the whole URL as MEGARL_STORE_URL and set "
            "store.url=env://MEGARL_STORE_URL"
        )


def numbers(value: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """(setting, value) of every number in a dataclass; those of free dicts are their owner's to check."""
    if is_dataclass(value):
        for field in fields(value):
            yield from numbers(getattr(value, field.name), f"{where}.{field.name}" if where else field.name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield where, value


def _text(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
