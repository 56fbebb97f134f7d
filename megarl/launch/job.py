"""A training job from its settings: check everything, prepare, run, report."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from megarl import algorithms, rewards
from megarl.architectures import architecture
from megarl.checkpoint.hf import read_hf_config
from megarl.checkpoint.state import latest, read_state
from megarl.config import Config, load_resolved
from megarl.errors import ConfigError, DataError
from megarl.launch import ports
from megarl.launch.prepare import prepare_data, prepare_model
from megarl.launch.supervisor import own_run_dir, run_job
from megarl.reshard.layouts import MegatronGrid, hf_layout, megatron_layout, vllm_layout
from megarl.reshard.plan import build_plan
from megarl.schema import Task
from megarl.store import Store
from megarl.tasksets import ChatTokenizer, check_prompts, read_rows

log = logging.getLogger(__name__)

ENGINE_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vllm 0.32, v1/attention/backends/cpu_attn.py: another size fails at the first request, after the warm start."""


def run(config: Config) -> int:
    """Run the job to its end; exit status 0 when it finished, 130 when it was stopped and can be resumed."""
    run_dir = Path(config.run.dir)
    start = time.monotonic()
    with own_run_dir(run_dir) as lock:
        _check_same_run(config, run_dir)
        tasks = check(config)
        if _is_finished(config, run_dir):
            log.info("%s is finished; raise trainer.steps to go on, or take another run.name to begin anew", run_dir)
        else:
            _fill_store(config, tasks)
            run_job(config, lock)
        # A rank that was told to end, by whomever, ends in order: only the run itself says whether it is finished.
        finished = _is_finished(config, run_dir)
        if finished:  # its report too, which may not have been written when it ended
            from megarl.report.html import summary, write_report

            report = write_report(run_dir)
            log.info("%s", summary(run_dir))
            log.info("report:        %s", report)
            log.info("HF checkpoint: %s", run_dir / "hf")
            log.info("whole job:     %.0f s", time.monotonic() - start)
    if not finished:
        log.warning("stopped; run the same command again to resume")
    return 0 if finished else 130


def _check_same_run(config: Config, run_dir: Path) -> None:
    """A run directory keeps its model and its tasks; anything else may change between attempts.

    Raises:
        ConfigError: the directory holds a run of another model or taskset.
    """
    if not (run_dir / "resolved.json").is_file():
        return
    before = load_resolved(run_dir / "resolved.json")
    for name in ("model", "taskset"):
        old, new = getattr(before, name), getattr(config, name)
        if old != new:
            changed = [f.name for f in fields(old) if getattr(old, f.name) != getattr(new, f.name)]
            raise ConfigError(
                f"run.dir={run_dir} holds a run with other settings: {', '.join(f'{name}.{c}' for c in changed)}; "
                "take another run.name, or remove the directory"
            )


def _is_finished(config: Config, run_dir: Path) -> bool:
    found = latest(run_dir / "checkpoints")
    if found is None or not (run_dir / "hf" / "config.json").is_file():
        return False
    saved = read_state(found)
    if saved["phase"] != "rl" or int(saved["step"]) < config.trainer.steps:
        return False
    store = Store(config.store.url)
    try:
        # Closed last of all: the files of an earlier end, at fewer steps, may still be there.
        return store.job_state() == "closed"
    finally:
        store.close()


def check(config: Config) -> dict[str, list[Task]]:
    """Everything that can be known to fail, before any process is launched; makes missing data and model.

    Returns the tasks by split (train, eval).

    Raises:
        ConfigError, DataError, ArchitectureError, PlanError: each with the rule, the values and the mend.
    """
    _check_settings(config)
    prepare_data(config)
    tasks = {name: read_rows(Path(path)) for name, path in (("train", config.taskset.train), ("eval", config.taskset.eval))}
    demonstrations: list[Task] = []
    if config.trainer.warm_start.steps:
        if config.taskset.warm_start is None:
            raise ConfigError("trainer.warm_start.steps > 0 needs taskset.warm_start, a parquet file with a response column")
        demonstrations = read_rows(Path(config.taskset.warm_start), require_response=True)
    _check_held_out(tasks["eval"], {"train": tasks["train"], "warm_start": demonstrations})
    prepare_model(config)
    hf_config = read_hf_config(Path(config.model.path))
    _check_model(config, hf_config)
    _check_rewards(config, tasks)
    tokenizer = ChatTokenizer.open(config.model.path)
    for name, path in (("train", config.taskset.train), ("eval", config.taskset.eval)):
        check_prompts(tasks[name], tokenizer, config.rollout.max_prompt_tokens, path=path)
    _check_demonstrations(demonstrations, tokenizer, int(hf_config["max_position_embeddings"]))
    return tasks


def _check_settings(config: Config) -> None:
    _check_algorithm(config)
    positive = {
        "parallel.tp": config.parallel.tp,
        "parallel.pp": config.parallel.pp,
        "parallel.dp": config.parallel.dp,
        "rollout.tp": config.rollout.tp,
        "rollout.replicas": config.rollout.replicas,
        "rollout.max_prompt_tokens": config.rollout.max_prompt_tokens,
        "rollout.max_response_tokens": config.rollout.max_response_tokens,
        "rollout.max_num_seqs": config.rollout.max_num_seqs,
        "rollout.concurrent_groups": config.rollout.concurrent_groups,
        "reward.workers": config.reward.workers,
        "trainer.steps": config.trainer.steps,
        "trainer.warm_start.batch_size": config.trainer.warm_start.batch_size,
        "trainer.tasks_per_step": config.trainer.tasks_per_step,
        "trainer.updates_per_step": config.trainer.updates_per_step,
        "trainer.micro_batch_size": config.trainer.micro_batch_size,
        "trainer.checkpoint_interval": config.trainer.checkpoint_interval,
        "trainer.keep_checkpoints": config.trainer.keep_checkpoints,
        "algorithm.group_size": config.algorithm.group_size,
        "sync.bucket_bytes": config.sync.bucket_bytes,
    }
    for name, value in positive.items():
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    rows = config.trainer.tasks_per_step * config.algorithm.group_size
    if config.trainer.updates_per_step > rows:
        raise ConfigError(
            f"trainer.updates_per_step={config.trainer.updates_per_step} is more than the {rows} rows of a step "
            f"(trainer.tasks_per_step * algorithm.group_size)"
        )
    if config.rollout.temperature <= 0:
        raise ConfigError(f"rollout.temperature={config.rollout.temperature} must be above 0: training samples")
    if config.parallel.backend == "nccl":
        raise ConfigError("parallel.backend=nccl is not finished: batches stay on the CPU; set parallel.backend to gloo")
    if config.parallel.sequence_parallel and config.parallel.tp == 1:
        raise ConfigError("parallel.sequence_parallel=true needs parallel.tp above 1; leave it out")
    for where, optimizer in (("trainer", config.trainer.optimizer), ("trainer.warm_start", config.trainer.warm_start.optimizer)):
        if (optimizer.decay_steps is None) != (optimizer.min_lr is None):
            raise ConfigError(
                f"{where}.optimizer.decay_steps={optimizer.decay_steps} with min_lr={optimizer.min_lr}: a decay needs both; set "
                "the other as well, or neither"
            )
    if config.reference.refresh != "never":
        raise ConfigError(f"reference.refresh={config.reference.refresh} is not implemented yet; leave it at never")
    ports.choose(config.run.host, ports.needed(config.rollout.replicas), config.run.port)


def _check_algorithm(config: Config) -> None:
    """It gives advantages, and its loss of one token refuses no setting."""
    algorithm = algorithms.get(config.algorithm.name)
    if algorithm.advantage is None:
        raise ConfigError(f"algorithm.name={algorithm.name} has no advantages, so rewards cannot train it; set it to grpo")
    one = torch.zeros(1)
    token = algorithms.LossInput(one, one, one, one, one, mask=one == 0, row=torch.zeros(1, dtype=torch.int64), num_rows=1)
    algorithm.loss(token, config.algorithm)


def _check_model(config: Config, hf_config: Mapping[str, Any]) -> None:
    """The architecture has a table, and its tensors divide over the trainer's and the engine's grids."""
    architecture(hf_config)
    grid = MegatronGrid(config.parallel.tp, config.parallel.pp, config.parallel.dp)
    source = megatron_layout(hf_config, grid, transformer_impl=config.model.transformer_impl)
    build_plan(source, vllm_layout(hf_config, config.rollout.tp, config.rollout.replicas))
    build_plan(source, hf_layout(hf_config))
    for setting, value in asdict(config.model.from_scratch).items() if config.model.from_scratch else ():
        if hf_config.get(setting, value) != value:
            raise ConfigError(
                f"model.from_scratch.{setting}={value}, but the model in {config.model.path} has {hf_config[setting]}; "
                "remove that directory to make the model anew, or set the value that it has"
            )
    head_dim = architecture(hf_config).sizes(hf_config).head
    if head_dim not in ENGINE_HEAD_DIMS:
        raise ConfigError(
            f"head_dim={head_dim} of {config.model.path} is none that vLLM's CPU attention has: "
            f"{', '.join(map(str, ENGINE_HEAD_DIMS))}"
        )
    context = int(hf_config["max_position_embeddings"])
    wanted = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if wanted > context:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {wanted} is more than the model's context of "
            f"{context} (max_position_embeddings); lower one of them"
        )


def _check_rewards(config: Config, tasks: Mapping[str, list[Task]]) -> None:
    """Every row has a verifier."""
    if config.reward.path is not None:
        if not Path(config.reward.path).is_file():
            raise ConfigError(f"reward.path={config.reward.path}: no such file; give a Python file with compute_score")
        return
    for split, rows in tasks.items():
        for number, task in enumerate(rows):
            if not rewards.is_known(task.data_source):
                raise DataError(
                    f"row {number} of taskset.{split} has data_source={task.data_source!r}, which no verifier of megarl "
                    "knows; set reward.path to a Python file with compute_score"
                )


def _check_demonstrations(tasks: list[Task], tokenizer: ChatTokenizer, context: int) -> None:
    prompts = tokenizer.encode_prompts(task.prompt for task in tasks)
    for number, (task, prompt) in enumerate(zip(tasks, prompts, strict=True)):
        length = len(prompt) + len(tokenizer.response_ids(task.response or ""))
        if length > context:
            raise DataError(
                f"row {number} of taskset.warm_start has {length} tokens with its response, the model's context is {context} "
                "(max_position_embeddings); drop the row"
            )


def _check_held_out(held_out: list[Task], others: Mapping[str, list[Task]]) -> None:
    questions = {str(task.prompt) for task in held_out}
    for name, tasks in others.items():
        for number, task in enumerate(tasks):
            if str(task.prompt) in questions:
                raise DataError(f"row {number} of taskset.{name} asks a question of taskset.eval: {task.prompt[-1]['content']!r}")


def _fill_store(config: Config, tasks: Mapping[str, list[Task]]) -> None:
    """Tasks, and nothing that an earlier attempt asked for and the newest checkpoint knows nothing of.

    Before the explorer starts: it would claim what is still open, while no engine has the weights or even answers.
    """
    store = Store(config.store.url)
    found = latest(Path(config.run.dir) / "checkpoints")
    store.discard_rollouts(0 if found is None else int(read_state(found)["step"]))
    for split, rows in tasks.items():
        if store.task_ids(split) != [t.task_id for t in rows]:
            store.add_tasks(split, rows)
    store.open_job()
    store.close()
