"""Checks of engines that verify drafts (``rollout.speculative``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from megarl.config import Config
from megarl.core.errors import ConfigError

PACKAGES: Mapping[str, tuple[str, str]] = {
    "ngram": ("numba", "numba==0.65.0"),
    "suffix": ("arctic_inference", "arctic-inference"),
}
"""Method -> (module that vLLM imports for it, package to install)."""


def check_speculation(config: Config) -> None:
    """Raise ConfigError if engines cannot draft with these settings, or would draft with old weights."""
    method, rollout = config.rollout.speculative, config.rollout
    if method == "none":
        return
    given = f"rollout.speculative={method}"
    if method == "mtp":
        raise ConfigError(
            f"{given}: no sync replaces or verifies the draft layers of an engine, so they would keep the weights of "
            "model.path; set it to ngram or none"
        )
    if rollout.routing_replay:
        raise ConfigError(
            f"{given} with rollout.routing_replay=true: expert ids of rejected drafts would be recorded as those of "
            "sampled tokens; set one of them back"
        )
    if rollout.pp > 1:
        raise ConfigError(
            f"{given} with rollout.pp={rollout.pp}: vLLM 0.32 looks for a drafter on every pipeline stage and has it on "
            "the last alone; set rollout.pp=1 and raise rollout.tp, or set speculative to none"
        )
    module, package = PACKAGES[method]
    if importlib.util.find_spec("vllm") and importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"{given}: vLLM drafts with {module}, which is not installed; pip install {package}, or set it to none"
        )
