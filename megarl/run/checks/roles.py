"""Checks of a job's roles: grids, models, and settings that only some algorithms use."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.buffer.store import sqlite_file
from megarl.buffer.store.database import is_pending
from megarl.config import Config, hub
from megarl.config.derived import context_tokens, is_teacher, path_of, sections_of
from megarl.config.schema import CriticConfig, RewardModelConfig
from megarl.core.errors import CheckpointError, ConfigError
from megarl.learn.algorithms import Algorithm
from megarl.learn.algorithms.terms import token_rewards
from megarl.learn.models.specs import check_layers
from megarl.learn.parallel.grid import check_parallel, check_roles, megatron_grid, role_grids, roles_of
from megarl.run.checks.dispatcher import check_dispatcher
from megarl.run.checks.distillation import check_teacher_settings, check_top_k
from megarl.run.checks.lora import check_adapters
from megarl.weights.architectures import Head, architecture
from megarl.weights.checkpoint.formats.hf_source import check_hf, open_hf, read_hf_config
from megarl.weights.checkpoint.formats.score_files import ScoreFiles
from megarl.weights.reshard.layout import Layout
from megarl.weights.reshard.layouts import megatron_layout

log = logging.getLogger(__name__)


def check_role_settings(config: Config, algorithm: Algorithm) -> None:
    """Check role settings without a model: refuse settings without effect, or that cannot work.

    Raises:
        ConfigError: names setting, value and fix.
    """
    check_teacher_settings(config, algorithm)
    check_roles(config, roles_of(config, algorithm))
    check_streaming(config, algorithm)
    name, refresh, kl_config = algorithm.name, config.reference.refresh, config.algorithm.kl
    if refresh != "never" and not algorithm.has_reference(config.algorithm):
        why = f" with algorithm.kl.coef={kl_config.coef:g}" if "kl" in algorithm.needs else ""
        raise ConfigError(f"reference.refresh={refresh}, but {name}{why} has no reference; leave it at never")
    if refresh == "every_iteration" and (kl_config.place == "reward" or kl_config.target is not None):
        what = "algorithm.kl.place=reward" if kl_config.place == "reward" else f"algorithm.kl.target={kl_config.target}"
        raise ConfigError(
            f"reference.refresh=every_iteration with {what}: the KL to a reference that each step begins with is 0 "
            "where it is measured; refresh every N steps, or keep the KL in the loss with a fixed coefficient"
        )
    if config.reward.shuffle and config.reward_model.path is not None:
        raise ConfigError(
            "reward.shuffle=true with reward_model.path: the model's scores would not be shuffled, so this is no "
            "control; leave one out"
        )
    if algorithm.has_experts(config.algorithm) and config.taskset.expert is None and not _may_have_experts(config):
        raise ConfigError(
            f"algorithm.name={name} needs taskset.expert, a file of rows with a response, or imported rows in its "
            "store (megarl data import-experts)"
        )
    if "greedy" in algorithm.needs and config.reward_model.path is not None:
        raise ConfigError(
            f"reward_model.path with algorithm.name={name}: the greedy answers that others are compared with get no "
            "model score; leave it out, or take another algorithm"
        )
    unused = {"critic": CriticConfig(), "reward_model": RewardModelConfig()}
    for role in sorted(unused.keys() - set(roles_of(config, algorithm))):
        if getattr(config, role) != unused[role]:
            log.warning("%s.*: this job has no %s; these settings do nothing", role, role.replace("_", " "))
    if algorithm.offline:
        return
    rollout, buffer = config.rollout, config.reward.overlong_buffer
    if buffer is not None and buffer > rollout.max_response_tokens:
        raise ConfigError(
            f"reward.overlong_buffer={buffer} is more than rollout.max_response_tokens={rollout.max_response_tokens}; "
            "lower it"
        )
    responses = config.trainer.tasks_per_step * config.algorithm.group_size
    token_rewards.adapted(0.0, responses, config.algorithm.kl)


def check_streaming(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError if ``trainer.stream_optimizer_bytes`` has no effect or cannot work."""
    size = config.trainer.stream_optimizer_bytes
    if size is None:
        return
    if config.trainer.offload == "none" and ("critic" not in algorithm.roles or config.critic.offload == "none"):
        raise ConfigError(
            f"trainer.stream_optimizer_bytes={size} without an offloaded optimizer: it stays on the device; set "
            "trainer.offload to memory or disk"
        )
    if algorithm.restarts_optimizer and config.trainer.offload != "none":
        raise ConfigError(
            f"trainer.stream_optimizer_bytes={size} with algorithm.name={algorithm.name}, which resets the moments of "
            "the whole optimizer in each step; set trainer.stream_optimizer_bytes to null"
        )


def _may_have_experts(config: Config) -> bool:
    """Return False if the store does not exist yet; an existing store's rows are counted when the job has opened it."""
    path = None if is_pending(config.store.url) else sqlite_file(config.store.url)
    return path is None or path.is_file()


def check_budget(config: Config, algorithm: Algorithm) -> None:
    """Check that the longest sequence or pair fits a micro-batch of every role.

    Raises:
        ConfigError: names the budget and the value to raise it to.
    """
    if algorithm.offline:
        return
    longest = context_tokens(config.rollout)
    budget = config.trainer.max_tokens_per_micro_batch
    pair = 2 if "pairs" in algorithm.needs else 1
    for setting, parallel in role_grids(config, roles_of(config, algorithm)).items():
        piece = 2 * parallel.cp if parallel.cp > 1 else 1
        if config.trainer.packing and (wanted := pair * (longest + -longest % piece)) > budget:
            raise ConfigError(
                f"trainer.max_tokens_per_micro_batch={budget} does not hold "
                f"{'a pair of sequences' if pair > 1 else 'one sequence'} of rollout.max_prompt_tokens + "
                f"rollout.max_response_tokens = {longest} tokens ({setting}.cp={parallel.cp}); raise it to {wanted}"
            )


def check_role_models(config: Config, algorithm: Algorithm, hf_config: Mapping[str, Any]) -> None:
    """Check that each role's model has a table, a grid that divides it, and complete files. ``hf_config``: the actor's.

    Raises:
        ConfigError, ArchitectureError, CheckpointError: names the role's setting.
    """
    roles = roles_of(config, algorithm)
    wanted: dict[str, tuple[str | None, Head]] = {
        f"{role}.parallel": (path_of(config, role), "lm" if role == "reference" or is_teacher(role) else "score")
        for role in roles
    }
    if "reward" in algorithm.roles:
        wanted["parallel"] = (None, "score")  # the model in training: the actor with a score head
    grids = role_grids(config, roles)
    for setting, (path, head) in wanted.items():
        role, grid = setting.removesuffix(".parallel"), grids[setting]
        files = None if path is None else role_files(role, Path(path))
        found = hf_config if files is None else role_config(role, files.base)
        check_parallel(grid, architecture(found).sizes(found), setting)
        check_layers(config.model, found)
        if role == "critic" and (files is None or files.adapter is None):  # otherwise the files decide the adapters
            check_adapters(config.model.lora, found, path or config.model.path, head)
        if role in roles:
            model = replace(config.model, dtype=sections_of(config)[role].dtype or config.model.dtype)
            check_dispatcher(model, grid, found, role)
        layout = megatron_layout(
            found, megatron_grid(grid), transformer_impl=config.model.transformer_impl, head=head, setting=setting
        )
        if files is None:
            continue
        if files.adapter is not None and config.model.transformer_impl != "local":
            raise ConfigError(
                f"{role}.path={path} is an adapter, with model.transformer_impl={config.model.transformer_impl}: "
                "TransformerEngine fuses norms into its linear layers, whose inputs adapters need; set it to local, or "
                "merge the adapter (megarl convert merge-adapter)"
            )
        _check_vocabulary(role, files.base, found["vocab_size"], Path(config.model.path), hf_config["vocab_size"])
        if head == "lm":
            _check_language_model(role, files, layout, found)
            check_top_k(config, role, found["vocab_size"], hf_config["vocab_size"])
            continue
        try:
            files.check(layout, found)
        except CheckpointError as error:
            if files.adapter is None:
                raise
            raise CheckpointError(f"{role}.path={files.adapter}: {error}") from error


def _check_language_model(role: str, files: ScoreFiles, layout: Layout, hf_config: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless a teacher's files are those of a whole language model."""
    if files.adapter is not None:
        raise CheckpointError(
            f"{role}.path={files.adapter} is an adapter; merge it into its model (megarl convert merge-adapter)"
        )
    try:
        with closing(open_hf(files.base)) as source:
            check_hf(source, layout, hf_config)
    except CheckpointError as error:
        text = str(error).replace("set model.path to", f"set {role}.path to")  # the actor's is the usual setting there
        raise CheckpointError(f"{role}.path={files.base}: {text}") from error


def role_files(role: str, path: Path) -> ScoreFiles:
    """Return the files of a role's model. Raises CheckpointError naming the role's setting."""
    try:
        return ScoreFiles.of(path)
    except CheckpointError as error:
        raise CheckpointError(f"{role}.path={path}: {error}") from error


def role_config(role: str, path: Path) -> Mapping[str, Any]:
    """Return the completed config.json of a role's model. Raises CheckpointError naming the role's setting."""
    try:
        return read_hf_config(path, f"{role}.path")
    except CheckpointError as error:
        if (fix := hub.advice(f"{role}.path", str(path))) is not None:
            raise CheckpointError(f"{role}.path={path} has no config.json; {fix}") from error
        raise CheckpointError(f"{role}.path: {error}") from error


def _check_vocabulary(role: str, path: Path, size: int, actor: Path, actor_size: int) -> None:
    """Raise ConfigError if the actor's token ids mean other tokens to the role."""
    given = "it is given the actor's token ids; use a model with the same tokenizer"
    files = [folder / "tokenizer.json" for folder in (actor, path)]
    if not all(file.is_file() for file in files):
        if size != actor_size:
            raise ConfigError(f"{role}.path={path} has vocab_size={size}, the actor {actor_size}: {given}")
        log.warning(
            "%s.path=%s: no tokenizer.json to compare with the actor's; make sure that its tokens are the same",
            role,
            path,
        )
        return
    from tokenizers import Tokenizer

    mine, other = (Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True) for file in files)
    strange = min((token for token in mine if other.get(token) != mine[token]), key=mine.__getitem__, default=None)
    if strange is not None:
        there = f"is {other[strange]}" if strange in other else "does not occur"
        raise ConfigError(
            f"{role}.path={path}: the actor's token {mine[strange]}, {strange!r}, {there} in its tokenizer.json: "
            f"{given}"
        )
    if max(mine.values()) >= size:
        raise ConfigError(
            f"{role}.path={path} has vocab_size={size}, the actor's tokens go up to {max(mine.values())}: {given}"
        )
