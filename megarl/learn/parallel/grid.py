"""The trainer's grid: checks of the sizes in the settings, and conversion to the grid of weight layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from megarl.config.derived import ROLES, RoleConfig, sections_of, teacher_role, with_sections
from megarl.config.schema import Config, GridSizes, ParallelConfig
from megarl.core.errors import ConfigError
from megarl.weights.architectures import ModelSizes
from megarl.weights.reshard.grid import MegatronGrid, divisors

if TYPE_CHECKING:
    from megarl.learn.algorithms import Algorithm


def megatron_grid(parallel: ParallelConfig) -> MegatronGrid:
    """Convert settings for ``reshard.layouts``; there is no other conversion."""
    return MegatronGrid(**{field.name: getattr(parallel, field.name) for field in fields(GridSizes)})


def check_parallel(parallel: ParallelConfig, sizes: ModelSizes | None = None, setting: str = "parallel") -> None:
    """Raise ConfigError if the sizes make no grid, or (with ``sizes``) no grid that can train the model.

    ``reshard.layouts.megatron_layout`` checks that the grid divides the model. ``setting``: the grid's section in the
    settings, for the error.
    """
    megatron_grid(parallel).check(setting)
    if sizes is not None:
        _check_training(parallel, sizes, setting)


def roles_of(config: Config, algorithm: Algorithm) -> list[str]:
    """Return the settings sections of a job's models other than the actor, without teachers at URLs. An actor with
    adapters needs no reference model: it is its own reference without them."""
    there = {
        "reference": algorithm.has_reference(config.algorithm) and not config.model.lora.is_used,
        "critic": "critic" in algorithm.roles,
        "reward_model": config.reward_model.path is not None and not algorithm.offline,
    }
    here = [teacher_role(name) for name, teacher in config.teachers.items() if teacher.path is not None]
    teachers = here if "teacher_logp" in algorithm.needs else []
    return [*(role for role, is_there in there.items() if is_there), *teachers]


def role_grids(config: Config, roles: Sequence[str] = ROLES) -> dict[str, ParallelConfig]:
    """Return setting -> grid for all models; a role without a grid uses the actor's, and ``parallel`` comes first.

    ``roles``: the job's models other than the actor.
    """
    sections = sections_of(config)
    return {"parallel": config.parallel} | {
        f"{role}.parallel": sections[role].parallel or config.parallel for role in roles
    }


def check_roles(config: Config, roles: Sequence[str] = ROLES) -> None:
    """Raise ConfigError unless all roles' grids use the same ranks and the same backend.

    ``check_parallel`` checks each grid itself; ``megatron_layout`` checks it against its model.
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
    """Return the job with another ``dp``, and equally many ranks in every role's grid; None if a role's sizes do not
    divide them."""
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
    if parallel.overlap_p2p and parallel.vpp == 1:
        raise ConfigError(
            f"{setting}.overlap_p2p=true with {setting}.vpp=1: only the interleaved schedule of several chunks a stage "
            f"computes while it sends; set {setting}.vpp above 1, or leave {setting}.overlap_p2p out"
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
    if sizes.recurrent_layers and parallel.cp > 1:
        raise ConfigError(
            f"{setting}.cp={parallel.cp} with the gated delta nets or short convolutions of this model: a rank would "
            f"need the state after the tokens of others; set {setting}.cp to 1"
        )
    if sizes.experts and parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"{setting}.tp={parallel.tp} with the {sizes.experts} experts of this model needs "
            f"{setting}.sequence_parallel=true: Megatron-Core's experts take their tokens from a split sequence"
        )
