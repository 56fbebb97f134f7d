"""A training job from its settings: check everything, prepare, run, report."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megarl import algorithms
from megarl.architectures import architecture
from megarl.checkpoint.hf_source import check_hf, open_hf, read_hf_config
from megarl.checkpoint.state import latest, read_state
from megarl.config import Config
from megarl.errors import ConfigError
from megarl.launch import ports
from megarl.launch.inputs import check_demonstrations, check_held_out, check_rewards
from megarl.launch.prepare import prepare_data, prepare_model
from megarl.launch.resume import check_settings_of_run, check_store_of_run, is_finished, set_aside_damaged
from megarl.launch.supervisor import own_run_dir, run_job
from megarl.ops import rows_in_budget
from megarl.parallel.grid import check_parallel, megatron_grid
from megarl.report.doctor import available_memory
from megarl.reshard.layouts import hf_layout, megatron_layout, padded_vocab_size, vllm_layout
from megarl.reshard.plan import build_plan
from megarl.schema import Task
from megarl.store import Store, check_url
from megarl.tasksets import ChatTokenizer, check_prompts, read_rows

log = logging.getLogger(__name__)

GIB = 2**30
PROCESS_BYTES = 400 * 2**20
"""What one process takes with nothing but its imports."""
ENGINE_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vllm 0.32, v1/attention/backends/cpu_attn.py: another size fails at the first request, after the warm start."""
ENGINE_LATENT = (512, 64)
"""kv_lora_rank and qk_rope_head_dim that v1/attention/backends/mla/cpu_mla.py has a kernel for."""
ENGINE_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""What DeepSeek-V3 does and vLLM's models/deepseek_v2.py does only when it is told to."""
ENGINE_EXPERT_UNIT = 32
"""Of layers/fused_moe/experts/cpu_moe.py."""


def run(config: Config) -> int:
    """Run the job to its end; exit status 0 when it finished, 130 when it was stopped and can be resumed."""
    run_dir = Path(config.run.dir)
    start = time.monotonic()
    with own_run_dir(run_dir) as lock:
        tasks = check(config, mend=True)
        if is_finished(config, run_dir):
            log.info("%s is finished; raise trainer.steps to go on, or take another run.name to begin anew", run_dir)
        else:
            _fill_store(config, tasks)
            run_job(config, lock)
        # A rank that was told to end, by whomever, ends in order: only the run itself says whether it is finished.
        finished = is_finished(config, run_dir)
        if finished:  # its report too, which may not have been written when it ended
            from megarl.report.html import summary, write_report

            write_report(run_dir)
            log.info("%s", summary(run_dir))
            log.info("whole job:     %.0f s", time.monotonic() - start)
    if not finished:
        log.warning("stopped; run the same command again to resume")
    return 0 if finished else 130


def check(config: Config, *, mend: bool = False) -> dict[str, list[Task]]:
    """Everything that can be known to fail, before any process is launched; makes missing data and model.

    With ``mend`` damaged checkpoints are set aside. Returns the tasks by split (train, eval).

    Raises:
        ConfigError, DataError, ArchitectureError, PlanError: each with the rule, the values and the mend.
    """
    set_aside_damaged(Path(config.run.dir), rename=mend)
    check_settings_of_run(config, Path(config.run.dir))
    _check_settings(config)
    _check_memory(config)
    check_url(config.store.url)
    prepare_data(config)
    paths = {"train": config.taskset.train, "eval": config.taskset.eval}
    tasks = {split: read_rows(Path(path), split=split) for split, path in paths.items()}  # two files may have one name
    demonstrations: list[Task] = []
    if config.trainer.warm_start.steps:
        if config.taskset.warm_start is None:
            raise ConfigError("trainer.warm_start.steps > 0 needs taskset.warm_start, a parquet file with a response column")
        demonstrations = read_rows(Path(config.taskset.warm_start), require_response=True)
    check_held_out(tasks["eval"], {"train": tasks["train"], "warm_start": demonstrations})
    prepare_model(config)
    hf_config = read_hf_config(Path(config.model.path))
    _check_model(config, hf_config)
    check_rewards(config, tasks)
    tokenizer = ChatTokenizer.open(config.model.path)
    for split, path in paths.items():
        check_prompts(tasks[split], tokenizer, config.rollout.max_prompt_tokens, path=path)
    check_demonstrations(demonstrations, tokenizer, int(hf_config["max_position_embeddings"]), path=config.taskset.warm_start)
    return tasks


def _check_settings(config: Config) -> None:
    _check_algorithm(config)
    rows = config.trainer.tasks_per_step * config.algorithm.group_size
    if config.trainer.updates_per_step > rows:
        raise ConfigError(
            f"trainer.updates_per_step={config.trainer.updates_per_step} is more than the {rows} rows of a step "
            f"(trainer.tasks_per_step * algorithm.group_size)"
        )
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
    if algorithm.offline:
        raise ConfigError(
            f"algorithm.name={algorithm.name} learns from rows of a file and has no advantages, so rewards cannot train it; set it to grpo"
        )
    if "group" in algorithm.needs and config.algorithm.group_size == 1:
        raise ConfigError(
            f"algorithm.group_size=1 leaves {algorithm.name} nothing to compare an answer with; set it to 2 or more"
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


def _check_model(config: Config, hf_config: Mapping[str, Any]) -> None:
    """The architecture has a table, the trainer's grid can train it, its tensors divide over that and the engine's grid."""
    check_parallel(config.parallel, architecture(hf_config).sizes(hf_config))
    columns = padded_vocab_size(int(hf_config["vocab_size"]), config.parallel.tp) // config.parallel.tp
    try:
        rows_in_budget(columns, getattr(torch, config.model.dtype), config.trainer.logits_bytes)
    except ValueError as error:
        raise ConfigError(f"trainer.{error}") from error
    grid = megatron_grid(config.parallel)
    source = megatron_layout(hf_config, grid, transformer_impl=config.model.transformer_impl)
    rollout = config.rollout
    engines = vllm_layout(
        hf_config, rollout.tp, rollout.replicas, pp=rollout.pp, expert_parallel=rollout.expert_parallel
    )
    build_plan(source, engines).check()
    build_plan(source, hf_layout(hf_config)).check()
    files = open_hf(Path(config.model.path))
    try:
        check_hf(files, source, hf_config)  # headers and sizes: a file cut short is seen
    finally:
        files.close()
    for setting, value in asdict(config.model.from_scratch).items() if config.model.from_scratch else ():
        if hf_config.get(setting, value) != value:
            raise ConfigError(
                f"model.from_scratch.{setting}={value}, but the model in {config.model.path} has {hf_config[setting]}; "
                "remove that directory to make the model anew, or set the value that it has"
            )
    _check_engine(config.model.path, hf_config)
    context = int(hf_config["max_position_embeddings"])
    wanted = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if wanted > context:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {wanted} is more than the model's context of "
            f"{context} (max_position_embeddings); lower one of them"
        )


def _check_engine(path: str, hf_config: Mapping[str, Any]) -> None:
    """vLLM computes what the trainer does, with a model of these sizes, on CPU."""
    sizes = architecture(hf_config).sizes(hf_config)
    if sizes.kv_lora:
        for key, value in ENGINE_ROUTER.items():
            if hf_config.get(key) != value:
                raise ConfigError(
                    f"config.json of {path} has {key}={hf_config.get(key)!r}: transformers does not read it, vLLM would route "
                    f'another way without it; add "{key}": "{value}" to the file'
                )
        if (sizes.kv_lora, sizes.qk_rope) != ENGINE_LATENT:
            raise ConfigError(
                f"kv_lora_rank={sizes.kv_lora} with qk_rope_head_dim={sizes.qk_rope} of {path}: vLLM's CPU attention has only "
                f"{ENGINE_LATENT[0]} with {ENGINE_LATENT[1]}"
            )
    elif sizes.head not in ENGINE_HEAD_DIMS:
        raise ConfigError(
            f"head_dim={sizes.head} of {path} is none that vLLM's CPU attention has: {', '.join(map(str, ENGINE_HEAD_DIMS))}"
        )
    if sizes.experts and sizes.hidden % ENGINE_EXPERT_UNIT:
        raise ConfigError(
            f"hidden_size={sizes.hidden} of {path} is no multiple of {ENGINE_EXPERT_UNIT}, which vLLM's CPU experts need"
        )


def _check_memory(config: Config) -> None:
    """Even the least that the processes can take is there."""
    rollout = config.rollout
    engines = rollout.replicas * rollout.tp * rollout.pp
    least = engines * (rollout.kv_cache_bytes + PROCESS_BYTES) + config.parallel.world_size * PROCESS_BYTES
    if least > (available := available_memory()):
        raise ConfigError(
            f"rollout.replicas={rollout.replicas} with rollout.kv_cache_bytes={rollout.kv_cache_bytes} and "
            f"{config.parallel.world_size} trainer ranks take at least {least / GIB:.1f} GiB, this machine has "
            f"{available / GIB:.1f} GiB available; lower one of them"
        )


def _fill_store(config: Config, tasks: Mapping[str, list[Task]]) -> None:
    """Tasks, and nothing that an earlier attempt asked for and the newest checkpoint knows nothing of.

    Before the explorer starts: it would claim what is still open, while no engine has the weights or even answers.
    """
    store = Store(config.store.url)
    check_store_of_run(config, Path(config.run.dir), store)
    found = latest(Path(config.run.dir) / "checkpoints")
    store.discard_rollouts(0 if found is None else int(read_state(found)["step"]))
    for split, rows in tasks.items():
        if store.tasks(split) != rows:
            store.add_tasks(split, rows)
    store.open_job()
    store.close()
