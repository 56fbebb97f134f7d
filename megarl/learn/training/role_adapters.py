"""Adapters of a job's models, and sharing of the actor's memory with critic and reward model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megarl.config import Config
from megarl.config.lora import LoraConfig
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from megarl.weights.checkpoint.formats.score_files import ScoreFiles

SCORING = ("critic", "reward_model")


def role_lora(config: Config, role: str) -> LoraConfig:
    """Return a role's adapter settings. A PEFT folder in the role's ``path`` sets them; otherwise the critic has the
    actor's settings, and other roles have no adapters. Raises CheckpointError for an adapter whose base model is not
    on this machine."""
    if role not in SCORING:
        return config.model.lora if role == "actor" else LoraConfig()
    path = getattr(config, role).path
    files = None if path is None else ScoreFiles.of(Path(path))
    if files is not None and files.adapter is not None:
        return replace(files.lora(read_hf_config(files.base)), dropout=config.model.lora.dropout)
    return config.model.lora if role == "critic" else LoraConfig()


def shares_base(config: Config, role: str) -> bool:
    """True if a role and the actor are adapters of one model and share its memory: they have the same dtype and grid,
    and are never offloaded. Raises as ``role_lora``."""
    if role not in SCORING:
        return False
    own, lora = getattr(config, role), config.model.lora
    as_actor = own.parallel in (None, config.parallel) and own.dtype in (None, config.model.dtype)
    if not lora.is_used or not as_actor or config.trainer.offload != "none" or own.offload != "none":
        return False
    if own.path is None:
        return role == "critic"
    files = ScoreFiles.of(Path(own.path))
    if files.adapter is None or config.trainer.warm_start.steps:  # a warm start changes the actor's model
        return False
    one_model = files.base.resolve() == Path(config.model.path).resolve()
    return one_model and set(lora.modules_to_save) <= set(role_lora(config, role).modules_to_save)
