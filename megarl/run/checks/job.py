"""All checks before any process is launched, of a job and of a bench of one model.

``check`` calls all of them.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.buffer.store import OWN_SERVER, check_url, sqlite_file
from megarl.config import Config
from megarl.config.algorithms import reads_teacher
from megarl.config.derived import context_tokens, path_of, sections_of
from megarl.core.errors import CheckpointError, ConfigError
from megarl.core.processes.machine import uncollected
from megarl.core.schema import Task
from megarl.explore import workflows
from megarl.learn import algorithms
from megarl.learn.algorithms import Algorithm
from megarl.learn.models.specs import check_implementation
from megarl.learn.parallel.grid import check_roles, roles_of
from megarl.run.checks import settings
from megarl.run.checks.distillation import check_scored_rows, check_servers, check_taught, check_taught_experts
from megarl.run.checks.engine_options import check_engine_settings
from megarl.run.checks.grids import check_model
from megarl.run.checks.inputs import (
    check_environment_rows,
    check_held_out,
    check_lengths,
    check_rewards,
    check_teacher,
    check_vocabulary,
)
from megarl.run.checks.lora import check_adapters, check_tower_overlap
from megarl.run.checks.memory import check_devices, has_budget, ledger_of
from megarl.run.checks.roles import check_budget, check_role_models, role_files
from megarl.run.checks.settings import check_settings
from megarl.run.checks.summary import summary
from megarl.run.checks.tasksets import Selected, check_count, check_taskset, selected, usable
from megarl.run.checks.vision import check_image_files_of, check_images, check_patches, check_prompts_of, check_rendered
from megarl.run.run_dir.changes import has_checkpoints
from megarl.run.run_dir.odd_rows import log_odd_rows
from megarl.run.run_dir.owner import check_writable
from megarl.run.run_dir.prepare import make, scratch, with_limit_of_run
from megarl.run.run_dir.resume import check_settings_of_run, set_aside_damaged
from megarl.run.run_dir.rows import (
    SPLITS,
    Rows,
    drops,
    log_bad_rows,
    needs_expert_rows,
    processor_of,
    read_experts,
    read_split,
)
from megarl.run.run_dir.store_damage import replace_damaged_store
from megarl.tasks import ChatTokenizer, Faults, record, recorded
from megarl.weights.architectures import Head
from megarl.weights.checkpoint.convert.verify import check_digests
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from megarl.weights.checkpoint.formats.overwrite import check_export_target
from megarl.weights.checkpoint.training.remote_folder import RemoteFolder

if TYPE_CHECKING:
    from megarl.tasks.image_processor import Processor


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
        return _check_bench_inputs(make(config))
    with scratch(config) as made:
        return _check_bench_inputs(made)


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


def _check_bench_inputs(config: Config) -> dict[str, Selected]:
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


log = logging.getLogger(__name__)

EXPORTS = ("hf", "hf_average", "reference")
"""Folders of a run into which the trainer exports HF checkpoints."""


@uncollected()
def check(
    config: Config,
    *,
    repair: bool = False,
    nodes: int = 1,
    dry: bool = False,
    elsewhere: bool = False,
    verbose: bool = False,
) -> dict[str, Selected]:
    """Check everything that can be checked before a process is launched; make missing data and a missing model.

    Args:
        repair: Set damaged checkpoints and a damaged store aside.
        nodes: Machines of the job.
        dry: Make missing files in a temporary folder, which is removed.
        elsewhere: The job will run on other machines: ignore the packages installed here.
        verbose: With ``dry``, also log the memory of every phase.

    Returns:
        Tasks of the store by split (train, eval); {} for a job without an explorer.

    Raises:
        ConfigError, DataError, ArchitectureError, PlanError: each with the rule, the values and the fix.
    """
    run_dir = Path(config.run.dir)
    check_writable(f"run.dir={run_dir}", run_dir)
    if config.run.mode == "bench":
        replace_damaged_store(config, rename=repair)
        return check_bench(config, dry=dry)
    if config.trainer.remote is not None:
        RemoteFolder(config.trainer.remote).check_writable()
    set_aside_damaged(run_dir, rename=repair, digests=config.trainer.verify_checkpoints)
    replace_damaged_store(config, rename=repair)
    config = with_limit_of_run(config)
    check_settings_of_run(config, run_dir)
    algorithm = algorithms.get(config.algorithm.name)
    check_settings(config, algorithm, nodes, elsewhere=elsewhere)
    if not dry:
        tasks, _, bad = _check_inputs(make(config), algorithm, nodes, elsewhere)
        if config.taskset.bad_rows == "drop" and not has_checkpoints(run_dir):
            record(run_dir, bad)
        return tasks
    with scratch(config) as made:
        tasks, rows, bad = _check_inputs(made, algorithm, nodes, elsewhere)
        hf_config = read_hf_config(Path(made.model.path))
        ledger = ledger_of(made, algorithm, hf_config, nodes)
        log.info("%s", summary(config, hf_config, ledger, rows, {split: len(faults) for split, faults in bad.items()}))
    if verbose:
        log.info("memory of the models, on the rank that has most in each phase:\n%s", ledger.table())
    return tasks


def _check_inputs(
    config: Config, algorithm: Algorithm, nodes: int, elsewhere: bool
) -> tuple[dict[str, Selected], dict[str, int], dict[str, Faults]]:
    """Check rows, model and rewards, which all exist. Return the result of ``check``, split -> number of rows, and
    split -> dropped bad rows. Raises as ``check``."""
    if not elsewhere:
        check_implementation(config.model, config.parallel)
    check_budget(config, algorithm)
    dropped: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    bad: dict[str, Faults] = {split: {} for split in (*SPLITS, *_other_splits(config))}
    rows = {split: read_split(config, split, dropped.get(split), faults) for split, faults in bad.items()}
    check_held_out(config, rows["eval"], {split: others for split, others in rows.items() if split != "eval"})
    hf_config = read_hf_config(Path(config.model.path))
    check_images(config, hf_config, rows)
    _check_models(config, hf_config)
    if has_budget(config):
        check_devices(config, algorithm, hf_config, nodes)
    _check_exports(config)
    for setting, path in _model_paths(config).items():
        check_digests(path, setting, workers=os.cpu_count() or 1, digests=config.trainer.verify_checkpoints)
    tokenizer, processor = ChatTokenizer.of(config), processor_of(config, rows.values())
    context = int(hf_config["max_position_embeddings"])
    tasks = {}
    if algorithms.job_of(config).rollouts:
        workflows.check_template(config.rollout, tokenizer)  # before rows, which errors of the template would blame
        for split in SPLITS:
            check = partial(check_rendered, config, split, tokenizer=tokenizer, processor=processor)
            rows[split] = usable(config, split, rows[split], check, bad[split])
        found_tasks = {split: [row for row in rows[split] if isinstance(row, Task)] for split in SPLITS}
        check_environment_rows(config, found_tasks)
        check_rewards(config, found_tasks)
        tasks = {
            split: selected(config, split, found, tokenizer, dropped[split], processor, bad[split])
            for split, found in found_tasks.items()
        }
    if tasks:
        log_odd_rows(config, found_tasks["train"], tasks["train"].tasks, dropped["train"].total() + len(bad["train"]))
    for split in [split for split in rows if split not in tasks]:
        check = partial(_check_fit, config, split, bad[split], tokenizer, context, processor)
        rows[split] = usable(config, split, rows[split], check, bad[split])
        log_bad_rows(split, bad[split], len(bad[split]) + len(rows[split]))
    others = {split: found for split, found in rows.items() if split not in tasks}
    trained = others | ({"train": tasks["train"].tasks} if tasks else {})
    check_patches(config, trained, processor, pairs="pairs" in algorithm.needs)
    if tasks:
        check_taught(config, tasks["train"].tasks)
        check_servers(config, tokenizer, context_tokens(config.rollout))
    if algorithm.offline:
        check_scored_rows(config, rows["train"], tokenizer, int(hf_config["vocab_size"]))
    if "expert" in rows and reads_teacher(config.algorithm):
        check_teacher(config, read_experts(config), tokenizer)
    check_taught_experts(config, [row for row in rows.get("expert", ()) if isinstance(row, Task)])
    check_count(config, tasks["train"].tasks if tasks else rows["train"])
    if tokenizer.ends_otherwise is not None and rows.keys() - tasks.keys():
        log.warning(
            "the chat template of model.path=%s ends an answer with %r, and sampling does not end there (eos_token_id "
            "of "
            "generation_config.json): demonstrations end with %r instead; add the template's token there to teach it",
            config.model.path,
            tokenizer.ends_otherwise,
            tokenizer.token(tokenizer.end_id),
        )
    check_vocabulary(config, rows, tokenizer, int(hf_config["vocab_size"]), sampled=tuple(tasks))
    for split, found in rows.items():
        if split in tasks:
            check_prompts_of(config, split, found_tasks[split], tasks[split].tasks, tokenizer, processor)
        elif not drops(config, split):  # otherwise ``usable`` has checked them
            _check_fit(config, split, None, tokenizer, context, processor, found)
    counts = {split: len(tasks[split].tasks if split in tasks else found) for split, found in rows.items()}
    return tasks, counts, bad


def _check_fit(
    config: Config,
    split: str,
    faults: Faults | None,
    tokenizer: ChatTokenizer,
    context: int,
    processor: Processor | None,
    rows: Rows,
) -> None:
    """Check the lengths and images of demonstrations or preferences. Raises DataError naming file and row.

    Args:
        faults: Rows that are too long are added; None refuses the first.
    """
    check_lengths(config, split, rows, tokenizer, context, processor, faults)
    check_image_files_of(config, split, rows)


def _other_splits(config: Config) -> list[str]:
    """Return the splits of demonstrations that a job reads in addition to train and eval."""
    wanted = {
        "warm_start": config.trainer.warm_start.steps > 0,
        "expert": config.taskset.expert is not None and needs_expert_rows(config),
    }
    return [split for split, is_wanted in wanted.items() if is_wanted]


def check_micro_batches(config: Config) -> None:
    """Check that each sequence or pair fits a micro-batch, after all other checks have passed.

    Raises:
        ConfigError, DataError: names the setting or the row.
    """
    algorithm = algorithms.get(config.algorithm.name)
    check_budget(config, algorithm)
    tokenizer, hf_config = ChatTokenizer.of(config), read_hf_config(Path(config.model.path))
    for split in [*(SPLITS if algorithm.offline else ()), *_other_splits(config)]:
        left_out = recorded(config.taskset, Path(config.run.dir)).get(split, ())
        rows = [row for row in read_split(config, split) if row.task_id not in left_out]
        context = int(hf_config["max_position_embeddings"])
        check_lengths(config, split, rows, tokenizer, context, processor_of(config, [rows]))


def check_sizes(config: Config) -> None:
    """Check the sizes of grids and engines, after all other checks have passed. Raises as ``check``."""
    check_roles(config, roles_of(config, algorithms.get(config.algorithm.name)))
    hf_config = read_hf_config(Path(config.model.path))
    _check_models(config, hf_config)
    if has_budget(config):
        check_devices(config, algorithms.get(config.algorithm.name), hf_config, nodes=None)


def _check_models(config: Config, hf_config: Mapping[str, Any]) -> None:
    algorithm = algorithms.get(config.algorithm.name)
    scores = "actor" not in algorithm.roles and config.trainer.warm_start.steps == 0  # a warm start needs an lm head
    engines = algorithms.job_of(config).rollouts  # including engines of other programs
    check_model(config, hf_config, engines=engines, head="score" if scores else "lm")
    trained: Head = "lm" if "actor" in algorithm.roles else "score"
    check_adapters(config.model.lora, hf_config, config.model.path, trained)
    check_tower_overlap(config, hf_config)
    check_role_models(config, algorithm, hf_config)


def _model_paths(config: Config) -> dict[str, Path]:
    """Return setting -> the HF checkpoint that it names, or the base model of the adapter that it names."""
    roles = {role: path_of(config, role) for role in sections_of(config)}
    bases = {f"{role}.path": role_files(role, Path(path)).base for role, path in roles.items() if path is not None}
    return {"model.path": Path(config.model.path), **bases}


def _check_exports(config: Config) -> None:
    """Check that the folders of the job's HF exports are free, or have only older exports."""
    for name in EXPORTS:
        try:
            check_export_target(Path(config.run.dir) / name, _model_paths(config).values())
        except CheckpointError as error:
            raise ConfigError(f"run.dir={config.run.dir}: {error}") from error
