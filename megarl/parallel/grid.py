"""The trainer's grid as settings give it: what sizes go together, and the same grid as weight layouts name it."""

from __future__ import annotations

from megarl.architectures import ModelSizes
from megarl.config.schema import ParallelConfig
from megarl.errors import ConfigError
from megarl.reshard.grid import MegatronGrid


def megatron_grid(parallel: ParallelConfig) -> MegatronGrid:
    """The one way from settings to ``reshard.layouts``."""
    return MegatronGrid(
        tp=parallel.tp,
        pp=parallel.pp,
        dp=parallel.dp,
        ep=parallel.ep,
        etp=parallel.etp,
        vpp=parallel.vpp,
        first_stage_layers=parallel.first_stage_layers,
        last_stage_layers=parallel.last_stage_layers,
    )


def check_parallel(parallel: ParallelConfig, sizes: ModelSizes | None = None) -> None:
    """Raise ConfigError naming setting, value and mend when the sizes make no grid, or (with ``sizes``) none to train the model on.

    What divides the model is ``reshard.layouts.megatron_layout``'s to say.
    """
    for key in ("tp", "pp", "dp", "ep", "etp", "vpp", "first_stage_layers", "last_stage_layers"):
        value = getattr(parallel, key)
        if value is not None and value < 1:
            raise ConfigError(f"parallel.{key}={value} is not a positive number; set parallel.{key} to 1 or more")
    ranks = parallel.tp * parallel.dp
    if ranks % (parallel.expert_tp * parallel.ep):
        raise ConfigError(
            f"parallel.ep={parallel.ep} * etp={parallel.expert_tp} does not divide tp*dp={parallel.tp}*{parallel.dp}={ranks}, "
            f"the ranks of a pipeline stage; set parallel.etp to 1 and parallel.ep to a divisor of {ranks}, or change parallel.dp"
        )
    wanted = {
        "vpp": parallel.vpp > 1,
        "first_stage_layers": parallel.first_stage_layers is not None,
        "last_stage_layers": parallel.last_stage_layers is not None,
    }
    for key, needs_stages in wanted.items():
        if needs_stages and parallel.pp == 1:
            raise ConfigError(f"parallel.{key}={getattr(parallel, key)} needs parallel.pp above 1; leave parallel.{key} out")
    if wanted["vpp"] and parallel.pp == 2 and wanted["first_stage_layers"] and wanted["last_stage_layers"]:
        raise ConfigError(
            f"parallel.vpp={parallel.vpp} with both parallel.first_stage_layers={parallel.first_stage_layers} and "
            f"last_stage_layers={parallel.last_stage_layers} leaves parallel.pp=2 no stage between, which Megatron-Core cannot "
            "interleave; give one of the two"
        )
    if sizes is not None:
        _check_training(parallel, sizes)


def _check_training(parallel: ParallelConfig, sizes: ModelSizes) -> None:
    if parallel.vpp > 1:
        raise ConfigError(
            f"parallel.vpp={parallel.vpp}: the trainer runs one model chunk per pipeline stage; set parallel.vpp to 1"
        )
    if sizes.experts and parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"parallel.tp={parallel.tp} with the {sizes.experts} experts of this model needs parallel.sequence_parallel=true: "
            "Megatron-Core's experts take their tokens from a split sequence"
        )
