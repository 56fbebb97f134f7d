"""Comparison of settings with those that a run directory was made with. No heavy imports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config import Config, hub, load_resolved, to_dict
from megarl.config.rewards import JUDGE_IS_ROLLOUT
from megarl.core.errors import first_of, masked_text

SHOWN = 8
HARMLESS = (
    "run.name", "run.allow_changes", "run.fork_servers", "run.host", "run.port", "run.shutdown_grace_s",
    "run.mode", "run.number",
    "rollout.nodes", "store.outage_s", "store.folder", "trainer.trackers",
)  # fmt: skip
"""Settings that change neither a run's results nor its paths."""
FREE = (
    "run",
    "cluster",
    "store",
    *(f"sync.{name}" for name in ("bucket_bytes", "transport", "shared_memory", "timeout_s", "probe_tokens")),
    "sync.probe_tolerance",
    "sync.sample_tolerance",
    "sync.cold_interval",
    "sync.deterministic",
    "sync.method",
    "model.recompute",
    "model.recompute_modules",
    "model.fusions",
    "model.moe_dispatcher",
    "evaluation",
    "parallel",
    "reference.parallel",
    "critic.parallel",
    "reward_model.parallel",
    "teachers.*.parallel",
    "teachers.*.offload",
    "teachers.*.concurrency",
    "reference.offload",
    "critic.offload",
    "reward_model.offload",
    *(
        f"trainer.{name}"
        for name in (
            "steps",
            "packing",
            "max_tokens_per_micro_batch",
            "max_patches_per_micro_batch",
            "micro_batch_size",
            "checkpoint_interval",
            "keep_state",
            "keep_checkpoints",
            "keep_best",
            "remote",
            "async_checkpoint",
            "verify_checkpoints",
            "max_failed_checkpoints",
            "eval_interval",
            "eval_engines",
            "num_threads",
            "logits_bytes",
            "kernels",
            "keep_batches",
            "trackers",
            "offload",
            "offload_disk_bytes",
            "stream_optimizer_bytes",
            "warm_start.checkpoint_interval",
        )
    ),
    *(
        f"rollout.{name}"
        for name in (
            "tp",
            "pp",
            "expert_parallel",
            "replicas",
            "nodes",
            "placement",
            "offload",
            "max_num_seqs",
            "block_size",
            "kv_cache_bytes",
            "gpu_memory_utilization",
            "num_threads",
            "start_timeout_s",
            "request_timeout_s",
            "concurrent_groups",
            "explorers",
        )
    ),
    *(
        f"reward.{name}"
        for name in ("workers", "hosts", "backlog", "code.url", "code.python", "judge.concurrency", "judge.cache")
    ),
)
"""Settings, and groups of settings, that change neither training nor verdicts: where and how fast a job computes,
timeouts, logs, retention. Timeouts and retries of rewards are not included: an answer without a verdict is dropped.
When a run goes on, ``run.allow_changes`` must confirm all other changes."""


ORDERED = ("buffer.operators",)
"""Groups of settings with a significant order."""


class Change(NamedTuple):
    """A setting with a changed value."""

    setting: str
    old: Any
    new: Any

    def trains(self) -> bool:
        """Return True if the change may affect what a run learns, verdicts included, so that it must be confirmed."""
        if self.setting == "reward.judge.url":
            return not {None, JUDGE_IS_ROLLOUT}.isdisjoint(
                (self.old, self.new)
            )  # otherwise the same judge at another address
        setting = of_any_teacher(self.setting)
        if setting == "teachers.*.url":
            return None in (self.old, self.new)  # otherwise the same teacher at another address
        return not is_in(setting, FREE)


def of_any_teacher(setting: str) -> str:
    """Return the name of a setting with ``*`` in the place of a teacher's name."""
    return re.sub(r"^teachers\.[^.]+", "teachers.*", setting)


def changes(old: Mapping[str, Any], new: Mapping[str, Any], where: str = "") -> Iterator[Change]:
    """Yield the differences between two trees of settings."""
    for key in dict.fromkeys([*old, *new]):
        before, after, name = old.get(key), new.get(key), f"{where}.{key}" if where else key
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            if name in ORDERED and before.keys() == after.keys() and list(before) != list(after):
                yield Change(name, list(before), list(after))
            yield from changes(before, after, name)
        elif before != after:
            yield Change(name, before, after)


def described(changed: Iterable[Change]) -> str:
    """Return ``trainer.seed was 1, now 2, …`` for the first ``SHOWN`` changes."""
    return first_of(listed(changed), SHOWN)


def listed(changed: Iterable[Change]) -> list[str]:
    """Describe each change, without the passwords in URLs."""
    return [f"{c.setting} was {masked_text(str(c.old))}{_lost(c.old)}, now {masked_text(str(c.new))}" for c in changed]


def _lost(value: Any) -> str:
    command = hub.lost(value) if isinstance(value, str) else None
    return f" (no longer in the cache; {command} restores it)" if command else ""


def is_in(setting: str, names: Iterable[str]) -> bool:
    """Return True if ``names`` has the setting or one of its groups."""
    return any(setting == name or setting.startswith(f"{name}.") for name in names)


def changes_since_last_start(config: Config, run_dir: Path) -> list[Change]:
    """Return the relevant changes since the run's last start; [] if it never started.

    Raises:
        ConfigError: ``resolved.json`` cannot be read.
    """
    resolved = run_dir / "resolved.json"
    if not resolved.is_file():
        return []
    found = changes(to_dict(load_resolved(resolved)), to_dict(config))
    return [change for change in found if change.setting not in HARMLESS and not change.setting.startswith("cluster.")]


def has_checkpoints(run_dir: Path) -> bool:
    """Return True if the directory has a finished checkpoint, also of a warm start."""
    return any((run_dir / "checkpoints").rglob("state.json"))
