"""Checks of an order to scale a run that is training (``megarl scale``)."""

from __future__ import annotations

from pathlib import Path

from megarl.buffer.store import EngineRoom
from megarl.config import Config
from megarl.config.rewards import JUDGE_IS_ROLLOUT
from megarl.core.errors import ConfigError
from megarl.run.checks.devices import check_engine_devices
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from megarl.weights.reshard.layouts import vllm_layout

ENGINES, TP = "engines", "tp"
"""Settings of the command that name engines."""
_ASKING = f"with reward.judge.url={JUDGE_IS_ROLLOUT} the function of reward.path may ask"


def _are_asked_by_workers(config: Config) -> bool:
    """Return True if a function of the user may ask engines as the judge: its process keeps the URLs of the start."""
    return config.reward.path is not None and config.reward.judge.url == JUDGE_IS_ROLLOUT


def check_engines(config: Config, number: int) -> None:
    """Raise ConfigError for a run whose engines must stay as they are."""
    rollout = config.rollout
    if rollout.is_colocated:
        raise ConfigError(
            "rollout.placement=colocated: each engine has devices of trainer ranks and takes turns with them; a run "
            "with rollout.placement=separate can be scaled"
        )
    if config.sync.method == "checkpoint":
        raise ConfigError(
            "sync.method=checkpoint: an explorer gives weights to the engines that it began with; start another "
            "explore program (`megarl explore --number N`), or end one"
        )
    if _are_asked_by_workers(config) and number < rollout.replicas:
        raise ConfigError(
            f"{ENGINES}={number}: {_ASKING} the rollout.replicas={rollout.replicas} engines that the run began with; "
            f"give {rollout.replicas} or more"
        )


def check_tp(config: Config) -> None:
    """Raise ConfigError where a run cannot have engines with the ``rollout.tp`` of these settings while it trains."""
    setting, rollout = f"{TP}={config.rollout.tp}", config.rollout
    if config.sync.deterministic:
        raise ConfigError(
            f"{setting}: sync.deterministic=true has the same bits in every run, and engines of another tp add in "
            "another order; set rollout.tp for a run of its own"
        )
    if _are_asked_by_workers(config):
        raise ConfigError(
            f"{setting}: {_ASKING} the engines at the ports that the run began with; engines of another tp have new "
            "ones. Set rollout.tp and start the run again"
        )
    hf_config = read_hf_config(Path(config.model.path))
    try:
        vllm_layout(hf_config, rollout.tp, pp=rollout.pp, expert_parallel=rollout.expert_parallel)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
    if config.cluster.device_bytes is not None:
        check_engine_devices(config, hf_config, config.cluster.device_bytes)


def check_room(number: int, workers: int, begun_with: int, room: EngineRoom | None) -> None:
    """Raise ConfigError where a job's devices have no room for so many engines.

    Args:
        workers: Of each engine.
        begun_with: Workers of each engine that the job began with.
    """
    if room is not None and number > (most := room.most(workers, begun_with)):
        raise ConfigError(
            f"{ENGINES}={number}: the job has room for {most} of {workers} workers each ({room.why}); give it more "
            "devices, or scale to that"
        )
