"""A user's own algorithm: a Python file with ``ALGORITHM = Algorithm(...)``, named by ``algorithm.name``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megarl.config.algorithms import AlgorithmConfig, ReMaxConfig, reads_distribution
from megarl.core.errors import ConfigError, describe
from megarl.core.imports import import_value
from megarl.core.schema import GroupStats
from megarl.learn.algorithms.types import NEEDS, ROLES, Algorithm, Estimate, Loss, LossInput, StepInput


def load(path: str) -> Algorithm:
    """Load ``ALGORITHM`` from a file. Raises ConfigError that names what is missing."""
    where = f"algorithm.name={path}"
    algorithm = import_value(path, "algorithm.name", "ALGORITHM", Algorithm)
    given = [
        n for n in ("advantage", "estimate", "choose_pairs", "finish_advantages") if getattr(algorithm, n) is not None
    ]
    by_rewards = ["advantage"] if not algorithm.offline and not set(given) & {"estimate", "choose_pairs"} else []
    for name in dict.fromkeys(["count", "loss", *by_rewards, *given]):
        if not callable(getattr(algorithm, name)):
            raise ConfigError(f"{where}: ALGORITHM.{name} must be a function, got {getattr(algorithm, name)!r}")
    for name, listed, known in (("needs", algorithm.needs, NEEDS), ("roles", algorithm.roles, ROLES)):
        if strange := sorted(set(listed) - known):
            raise ConfigError(
                f"{where}: ALGORITHM.{name} has {', '.join(strange)}; known are {', '.join(sorted(known))}"
            )
    return algorithm


def try_out(algorithm: Algorithm, token: LossInput, config: AlgorithmConfig) -> None:
    """Compute a group's advantages and the loss of one ``token``, to report faults of settings and inputs early.

    Raises:
        ConfigError: from the algorithm itself, or with the error and its place in a user's file.
    """
    path = config.name if config.name.endswith(".py") else None
    try:
        _try_out(algorithm, token, config)
    except ConfigError:
        raise
    except Exception as error:
        if path is None:
            raise
        raise ConfigError(f"algorithm.name={path}: {describe(error, path, algorithm.loss)}") from error


def _try_out(algorithm: Algorithm, token: LossInput, config: AlgorithmConfig) -> None:
    check_settings(algorithm, config)
    if "critic" in algorithm.roles and (algorithm.estimate is None or "values" not in algorithm.needs):
        raise ConfigError(
            f"{algorithm.name}: a critic learns returns; give an estimate that has them, and values in the needs"
        )
    _try_advantages(algorithm, config)
    if algorithm.choose_pairs is not None:
        chosen = algorithm.choose_pairs([0.0, 1.0], config)
        if not isinstance(chosen, list) or not all(len(pair) == 2 and set(pair) <= {0, 1} for pair in chosen):
            raise ConfigError(
                f"{algorithm.name}: choose_pairs must give (chosen, rejected) positions within the group, got "
                f"{chosen!r}"
            )
    batch = _two_rows(algorithm, token, config)
    result = algorithm.loss(batch, config)
    if not isinstance(result, Loss) or not _is_sums(result.total) or not result.total.requires_grad:
        raise ConfigError(
            f"{algorithm.name}: loss must give a megarl.learn.algorithms.Loss whose total is a scalar, or [K] sums "
            "with a denominator each, that depends on logp"
        )
    if not isinstance(result.metrics, Mapping) or not all(_is_sum(value) for value in result.metrics.values()):
        raise ConfigError(
            f"{algorithm.name}: each metric must be a pair (sum, count) of scalar tensors without gradient"
        )
    more = (batch.expert,) if "expert" in algorithm.needs else ()
    count = algorithm.count(batch.mask, batch.row, batch.num_rows, config, *more)
    if not _is_sums(count) or count.numel() != result.total.numel():
        raise ConfigError(
            f"{algorithm.name}: count must give a scalar tensor, or one number for each of the {result.total.numel()} "
            f"parts of the loss, got {count!r}"
        )


def check_settings(algorithm: Algorithm, config: AlgorithmConfig) -> None:
    """Raise ConfigError for settings that contradict each other for any algorithm."""
    kl = config.kl
    if kl.place == "reward" and algorithm.estimate is None:
        raise ConfigError(
            f"algorithm.kl.place=reward: {algorithm.name} has no rewards of single tokens that the KL could be taken "
            "off; set it to loss, or take ppo, remax or reinforce_pp"
        )
    if kl.target is not None and kl.coef == 0.0:
        raise ConfigError(
            f"algorithm.kl.target={kl.target} with kl.coef=0: the adaptive coefficient is multiplied from step to step "
            "and stays 0; set algorithm.kl.coef to where it begins"
        )
    if kl.target is not None and not {"old_logp", "ref_logp"} <= algorithm.needs_with(config):
        raise ConfigError(
            f"algorithm.kl.target={kl.target}: {algorithm.name} has no KL whose coefficient could follow it; leave it "
            "out"
        )
    if config.entropy_coef and "advantages" not in algorithm.needs:
        raise ConfigError(
            f"algorithm.entropy_coef={config.entropy_coef}: the loss of {algorithm.name} has no entropy term; set it "
            "to 0"
        )
    if isinstance(config, ReMaxConfig) and config.whiten_advantages and algorithm.estimate is None:
        raise ConfigError(
            f"algorithm.whiten_advantages=true is for advantages of single tokens (ppo, remax), {algorithm.name} has "
            "one for a whole answer; set it to false, or take reinforce_pp_baseline"
        )
    if config.dynamic_sampling and algorithm.offline:
        raise ConfigError(
            f"algorithm.dynamic_sampling=true: {algorithm.name} learns from a file, which has no groups to replace; "
            "set it to false"
        )
    if config.correction != "none" and "advantages" not in algorithm.needs:
        raise ConfigError(
            f"algorithm.correction={config.correction} weighs the surrogate of sampled tokens, {algorithm.name} has "
            "none; set it to none"
        )
    if config.dynamic_sampling and config.group_size == 1:
        raise ConfigError(
            "algorithm.dynamic_sampling=true with algorithm.group_size=1 would replace every group, a single answer is "
            "all right or all wrong; set group_size to 2 or more"
        )


def _try_advantages(algorithm: Algorithm, config: AlgorithmConfig) -> None:
    """Compute advantages of a group of two responses, with 3 and 5 tokens; the second has one token masked."""
    if "advantages" not in algorithm.needs:
        return
    group = GroupStats(0.5, 0.5**0.5, 2)
    if algorithm.estimate is None:
        if algorithm.advantage is None:
            raise ConfigError(
                f"{algorithm.name} needs advantages, but has neither advantage nor estimate to compute them"
            )
        advantages = algorithm.advantages([(0.0, group), (1.0, group)], [3, 5], config)
        if len(advantages) != 2 or not all(isinstance(a, float | int) and math.isfinite(a) for a in advantages):
            raise ConfigError(
                f"{algorithm.name}: the advantages of two responses must be two finite numbers, got {advantages!r}"
            )
        return
    zeros = torch.zeros(8)
    inputs: dict[str, Any] = {
        name: zeros
        for name in ("old_logp", "ref_logp", "teacher_logp", "values")
        if name in algorithm.needs_with(config)
    }
    step = StepInput(
        rewards=torch.tensor([0.0, 1.0], dtype=torch.float64),
        stats=[group, group],
        cu_seqlens=torch.tensor([0, 3, 8]),
        mask=torch.tensor([True] * 4 + [False] + [True] * 3),
        tokens=torch.tensor([3, 4]),
        bootstrap=torch.zeros(2),
        greedy=torch.zeros(2, dtype=torch.float64) if "greedy" in algorithm.needs else None,
        teacher_weights=torch.ones(2, dtype=torch.float64) if "teacher_logp" in algorithm.needs else None,
        **inputs,
    )
    whole: list[torch.Tensor] = []

    def together(values: torch.Tensor) -> torch.Tensor:
        whole.append(values)
        return values

    result = algorithm.estimate(replace(step, together=together), config)
    fits = isinstance(result, Estimate) and all(
        isinstance(x, torch.Tensor) and x.shape == step.mask.shape
        for x in (result.advantages, result.returns)
        if x is not None
    )
    if not fits or (result.returns is None and "critic" in algorithm.roles):
        raise ConfigError(
            f"{algorithm.name}: estimate must give a megarl.learn.algorithms.Estimate with advantages (and, for a "
            f"critic, returns) of every position, got {result!r}"
        )
    if algorithm.shares:
        for number in range(2):
            _try_share(algorithm, step, config, number, result, whole)


def _try_share(
    algorithm: Algorithm,
    step: StepInput,
    config: AlgorithmConfig,
    number: int,
    result: Estimate,
    whole: list[torch.Tensor],
) -> None:
    """Repeat the estimate for a rank that holds only response ``number``.

    Args:
        result: Estimate of a rank that holds both.
        whole: Values that this rank gathered, in order.
    """
    assert algorithm.estimate is not None, "algorithms without one have nothing to share"
    place, others = slice(*step.cu_seqlens[number : number + 2].tolist()), iter(whole)

    def own(values: torch.Tensor | None, at: slice = place) -> torch.Tensor | None:
        return None if values is None else values[at]

    share = replace(
        step,
        cu_seqlens=step.cu_seqlens[number : number + 2] - step.cu_seqlens[number],
        mask=step.mask[place],
        old_logp=own(step.old_logp),
        ref_logp=own(step.ref_logp),
        teacher_logp=own(step.teacher_logp),
        values=own(step.values),
        bootstrap=own(step.bootstrap, slice(number, number + 1)),
        own=torch.tensor([number]),
        together=lambda values: next(others),
    )
    try:
        held = algorithm.estimate(share, config)
    except Exception as error:
        raise ConfigError(f"{_not_shared(algorithm.name)}: {describe(error)}") from error
    for x, y in ((held.advantages, own(result.advantages)), (held.returns, own(result.returns))):
        if x is not y and (x is None or y is None or not torch.equal(x, y)):
            raise ConfigError(f"{_not_shared(algorithm.name)}: got {x}, not {y}")


def _not_shared(name: str) -> str:
    return (
        f"{name} says shares=True, but its estimate fails or gives other numbers where a rank holds one of two answers "
        "(of all answers are rewards, stats, tokens: take step.held of them; reduce over the step by step.together); "
        "leave shares out"
    )


def _two_rows(algorithm: Algorithm, token: LossInput, config: AlgorithmConfig) -> LossInput:
    """Return ``token`` twice, as two sequences, with only the fields that the algorithm needs."""
    twice = [0, 0]
    given: dict[str, Any] = {}
    for name in ("old_logp", "ref_logp", "advantages"):
        value = getattr(token, name)
        given[name] = value[twice] if name in algorithm.needs_with(config) and value is not None else None
    if "expert" in algorithm.needs:
        given["expert"] = torch.tensor([False, True])
    if "actor" not in algorithm.roles:
        given["scores"] = token.logp[twice]
    if reads_distribution(config):
        given |= {"divergence": token.logp[twice], "teacher_weights": torch.ones(2, dtype=torch.float64)}
    return LossInput(
        logp=token.logp[twice],
        entropy=None if token.entropy is None else token.entropy[twice],
        mask=token.mask[twice],
        row=torch.tensor([0, 1]),
        num_rows=2,
        engine_logp=None if token.engine_logp is None else token.engine_logp[twice],
        **given,
    )


def _is_sums(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() <= 1


def _is_scalar(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _is_sum(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(_is_scalar(v) and not v.requires_grad for v in value)
