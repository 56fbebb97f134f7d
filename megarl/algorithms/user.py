"""A user's own algorithm: a Python file with ``ALGORITHM = Algorithm(...)``, named by ``algorithm.name``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms.types import Algorithm, Loss, LossInput
from megarl.config.schema import AlgorithmConfig
from megarl.errors import ConfigError, describe
from megarl.schema import GroupStats

NEEDS = frozenset({"old_logp", "ref_logp", "advantages", "group"})
ROLES = frozenset({"actor", "reference"})
"""What the trainer has."""


def load(path: str) -> Algorithm:
    """``ALGORITHM`` of a file. Raises ConfigError naming what the file lacks."""
    where = f"algorithm.name={path}"
    if not Path(path).is_file():
        raise ConfigError(f"{where}: no such file; give a Python file with ALGORITHM, a megarl.algorithms.Algorithm")
    spec = importlib.util.spec_from_file_location("megarl_user_algorithm", path)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{where} cannot be imported: {describe(error, path)}") from error
    algorithm = getattr(module, "ALGORITHM", None)
    if not isinstance(algorithm, Algorithm):
        found = "nothing" if algorithm is None else f"a {type(algorithm).__name__}"
        raise ConfigError(f"{where} has {found} called ALGORITHM; it must be a megarl.algorithms.Algorithm")
    for name in ("advantage", "count", "loss"):
        if not callable(getattr(algorithm, name)):
            raise ConfigError(f"{where}: ALGORITHM.{name} must be a function, got {getattr(algorithm, name)!r}")
    for name, given, known in (("needs", algorithm.needs, NEEDS), ("roles", algorithm.roles, ROLES)):
        if strange := sorted(set(given) - known):
            raise ConfigError(
                f"{where}: ALGORITHM.{name} has {', '.join(strange)}; known are {', '.join(sorted(known))}"
            )
    return algorithm


def try_out(algorithm: Algorithm, token: LossInput, config: AlgorithmConfig) -> None:
    """Advantages of a group and the loss of one ``token``: what its settings or its inputs do not admit is told before launch.

    Raises:
        ConfigError: of the algorithm itself, or with what went wrong in a user's file and where.
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
    group = GroupStats(0.5, 0.5**0.5, 2)
    advantages = algorithm.advantages([(0.0, group), (1.0, group)], [3, 5], config)
    if len(advantages) != 2 or not all(isinstance(a, float | int) for a in advantages):
        raise ConfigError(f"{algorithm.name}: the advantages of two responses must be two numbers, got {advantages!r}")
    needed = {"old_logp": token.old_logp, "ref_logp": token.ref_logp, "advantages": token.advantages}
    given: dict[str, Any] = {name: value if name in algorithm.needs else None for name, value in needed.items()}
    token = LossInput(
        token.logp,
        token.entropy,
        mask=token.mask,
        row=token.row,
        num_rows=token.num_rows,
        engine_logp=token.engine_logp,
        **given,
    )
    result = algorithm.loss(token, config)
    if not isinstance(result, Loss) or not _is_scalar(result.total) or not result.total.requires_grad:
        raise ConfigError(
            f"{algorithm.name}: loss must give a megarl.algorithms.Loss whose total is a scalar that depends on logp"
        )
    if not isinstance(result.metrics, Mapping) or not all(_is_sum(value) for value in result.metrics.values()):
        raise ConfigError(
            f"{algorithm.name}: each metric must be a pair (sum, count) of scalar tensors without gradient"
        )
    count = algorithm.count(token.mask, token.row, token.num_rows, config)
    if not _is_scalar(count):
        raise ConfigError(f"{algorithm.name}: count must give a scalar tensor, got {count!r}")


def _is_scalar(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _is_sum(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(_is_scalar(v) and not v.requires_grad for v in value)
