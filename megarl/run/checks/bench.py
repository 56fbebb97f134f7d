"""Checks before a bench of one model: the checks of settings, rows and verifiers that apply to engines, none of
training."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from megarl.buffer.store import OWN_SERVER, check_url, sqlite_file
from megarl.config import Config
from megarl.core.errors import ConfigError
from megarl.core.schema import Task
from megarl.explore import workflows
from megarl.learn import algorithms
from megarl.run.checks import settings
from megarl.run.checks.engines.started_with import check_engine_settings
from megarl.run.checks.filters import Selected, selected
from megarl.run.checks.inputs import check_environment_rows, check_rewards
from megarl.run.checks.models.grids import check_model
from megarl.run.checks.models.vision import check_images, check_prompts_of
from megarl.run.checks.models.vocabulary import check_vocabulary
from megarl.run.checks.tasksets import check_taskset
from megarl.run.run_dir.changes import has_checkpoints
from megarl.run.run_dir.dry_run import scratch
from megarl.run.run_dir.prepare import make
from megarl.run.run_dir.rows import processor_of, read_split
from megarl.tasks import ChatTokenizer, Faults
from megarl.weights.checkpoint.convert.verify import check_digests
from megarl.weights.checkpoint.formats.hf_source import read_hf_config

SPLIT = "eval"


def check_bench(config: Config, *, dry: bool = False) -> dict[str, Selected]:
    """Check a bench of ``model.path`` before its processes start; make missing held-out rows.

    Args:
        dry: Make missing files in a temporary folder, which is removed.

    Returns:
        Tasks of the store, by split; only held-out tasks.

    Raises:
        ConfigError, DataError, ArchitectureError, CheckpointError: each with the rule, the values and the fix.
    """
    _check_settings(config)
    if not dry:
        return _check_inputs(make(config))
    with scratch(config) as made:
        return _check_inputs(made)


def check_place(run_dir: Path) -> None:
    """Raise ConfigError if ``run_dir`` is a training run's: its explorer and the bench's would claim each other's
    tasks."""
    if has_checkpoints(run_dir) or (run_dir / "attempt").is_file():
        raise ConfigError(
            f"run.dir={run_dir} holds a training run; take another run.name for the bench (the run itself is a MODEL: "
            f"run:{run_dir})"
        )


def _check_settings(config: Config) -> None:
    job = algorithms.job_of(config)
    if config.store.url != OWN_SERVER and sqlite_file(config.store.url) is None:
        raise ConfigError(
            "store.url names a database that all models of the bench would share; leave it out for a file for each "
            f"model, or set {OWN_SERVER}"
        )
    settings.check_builds(config, job)
    settings.check_evaluation(config, job)
    check_taskset(config, job)
    settings.check_ports(config, job)
    settings.check_memory(config, job, nodes=1)
    check_engine_settings(config, job)
    check_url(config.store.url)
    workflows.check(config.rollout, Path(config.run.dir))
    settings.check_reward_settings(config)


def _check_inputs(config: Config) -> dict[str, Selected]:
    dropped = Counter[str]()
    faults: Faults = {}
    rows = [row for row in read_split(config, SPLIT, dropped, faults) if isinstance(row, Task)]
    hf_config = read_hf_config(Path(config.model.path))
    check_images(config, hf_config, {SPLIT: rows})
    check_model(config, hf_config, engines=True)
    check_digests(
        Path(config.model.path), "MODEL", workers=os.cpu_count() or 1, digests=config.trainer.verify_checkpoints
    )
    tokenizer, processor = ChatTokenizer.of(config), processor_of(config, [rows])
    workflows.check_template(config.rollout, tokenizer)
    check_environment_rows(config, {SPLIT: rows})
    check_rewards(config, {SPLIT: rows})
    tasks = selected(config, SPLIT, rows, tokenizer, dropped, processor, faults)
    check_vocabulary(config, {SPLIT: rows}, tokenizer, int(hf_config["vocab_size"]), sampled=(SPLIT,))
    check_prompts_of(config, SPLIT, rows, tasks.tasks, tokenizer, processor)
    return {SPLIT: tasks}
