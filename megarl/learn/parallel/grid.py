"""The trainer's grid as settings give it: what sizes go together, and the same grid as weight layouts name it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from megarl.config.model_roles import ROLES, RoleConfig, sections_of, teacher_role, with_sections
from megarl.config.schema import Config, GridSizes, ParallelConfig
from megarl.core.errors import ConfigError
from megarl.weights.architectures import ModelSizes
from megarl.weights.reshard.grid import MegatronGrid, divisors

if TYPE_CHECKING:
    from megarl.learn.algorithms import Algorithm


def megatron_grid(parallel: ParallelConfig) -> MegatronGrid:
    """The one way from settings to ``reshard.layouts``."""
    return MegatronGrid(**{field.name: getattr(parallel, field.name) for field in fields(GridSizes)})


def check_parallel(parallel: ParallelConfig, sizes: ModelSizes | None = None, setting: str = "parallel") -> None:
    """Raise ConfigError if the sizes make no grid, or (with ``sizes``) none to train the model on.

    ``reshard.layouts.megatron_layout`` checks that the grid divides the model. ``setting``: the section of the settings
    that the grid comes from, for the error.
    """
    megatron_grid(parallel).check(setting)
    if sizes is not None:
        _check_training(parallel, sizes, setting)


def roles_of(config: Config, algorithm: Algorithm) -> list[str]:
    """The sections of the settings whose models a job has beside the actor. The reference of an actor with adapters is
    the actor without them."""
    there = {
        "reference": algorithm.has_reference(config.algorithm) and not config.model.lora.is_used,
        "critic": "critic" in algorithm.roles,
        "reward_model": config.reward_model.path is not None and not algorithm.offline,
    }
    teachers = map(teacher_role, config.teachers) if "teacher_logp" in algorithm.needs else ()
    return [*(role for role, is_there in there.items() if is_there), *teachers]


def role_grids(config: Config, roles: Sequence[str] = ROLES) -> dict[str, ParallelConfig]:
    """Setting of each grid of the trainer's ranks -> the grid. A role that names none has the actor's; ``parallel``
    comes first.

    ``roles``: those of the job beside the actor.
    """
    sections = sections_of(config)
    return {"parallel": config.parallel} | {
        f"{role}.parallel": sections[role].parallel or config.parallel for role in roles
    }


def check_roles(config: Config, roles: Sequence[str] = ROLES) -> None:
    """Raise ConfigError unless all roles' grids are made of the same ranks, by the same backend.

    Each grid by itself, and against its model, is ``check_parallel``'s to check, and ``megatron_layout``'s.
    """
    for setting, parallel in role_grids(config, roles).items():
        check_parallel(parallel, setting=setting)
        if parallel.sequence_parallel and parallel.tp == 1:
            raise ConfigError(f"{setting}.sequence_parallel=true needs {setting}.tp above 1; leave it out")
        _check_overlap(parallel, config, setting)
        if parallel.backend != config.parallel.backend:
            raise ConfigError(
                f"{setting}.backend={parallel.backend}, but parallel.backend={config.parallel.backend}: all roles are "
                "on the same ranks; set both to the same"
            )
        if parallel.world_size != config.parallel.world_size:
            raise ConfigError(
                f"{setting} {_product(parallel)} has {parallel.world_size} ranks, but parallel "
                f"{_product(config.parallel)} has {config.parallel.world_size}: all roles are on the same ranks; "
                f"change {setting}.dp, or leave {setting} out to take the actor's grid"
            )


def with_dp(config: Config, dp: int) -> Config | None:
    """Return the job with another number of data-parallel ranks, and as many ranks in every role's grid; None where a
    role's other sizes do not divide them."""
    ranks = config.parallel.world_size // config.parallel.dp * dp
    smaller: dict[str, RoleConfig] = {}
    for role, section in sections_of(config).items():
        if (grid := section.parallel) is not None:
            theirs = grid.world_size // grid.dp
            if ranks % theirs:
                return None
            smaller[role] = replace(section, parallel=replace(grid, dp=ranks // theirs))
    return with_sections(replace(config, parallel=replace(config.parallel, dp=dp)), smaller)


def _check_overlap(parallel: ParallelConfig, config: Config, setting: str) -> None:
    if parallel.overlap_param_gather and not parallel.overlap_grad_reduce:
        raise ConfigError(
            f"{setting}.overlap_param_gather=true needs {setting}.overlap_grad_reduce=true, whose buckets it gathers; "
            "set both, or leave it out"
        )
    if parallel.overlap_grad_reduce and config.model.train_vision_tower:
        raise ConfigError(
            f"{setting}.overlap_grad_reduce=true with model.train_vision_tower=true: a micro-batch without images "
            f"gives the tower no gradient, which Megatron-Core's overlap waits for; set {setting}.overlap_grad_reduce "
            "to false"
        )


def _product(parallel: ParallelConfig) -> str:
    return f"tp*pp*dp*cp={parallel.tp}*{parallel.pp}*{parallel.dp}*{parallel.cp}"


def _check_training(parallel: ParallelConfig, sizes: ModelSizes, setting: str) -> None:
    heads = sizes.heads // parallel.tp
    if heads % parallel.cp:
        raise ConfigError(
            f"{setting}.cp={parallel.cp} does not divide the {heads} attention heads that {setting}.tp={parallel.tp} "
            f"leaves to a rank, and context-parallel ranks share them; set {setting}.cp to {divisors(heads)}"
        )
    if sizes.experts and parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"{setting}.tp={parallel.tp} with the {sizes.experts} experts of this model needs "
            f"{setting}.sequence_parallel=true: Megatron-Core's experts take their tokens from a split sequence"
        )
