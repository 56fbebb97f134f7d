"""The trainer's grid as settings give it: what sizes go together, and the same grid as weight layouts name it."""

from __future__ import annotations

from dataclasses import fields

from megarl.architectures import ModelSizes
from megarl.config.schema import GridSizes, ParallelConfig
from megarl.errors import ConfigError
from megarl.reshard.grid import MegatronGrid, divisors


def megatron_grid(parallel: ParallelConfig) -> MegatronGrid:
    """The one way from settings to ``reshard.layouts``."""
    return MegatronGrid(**{field.name: getattr(parallel, field.name) for field in fields(GridSizes)})


def check_parallel(parallel: ParallelConfig, sizes: ModelSizes | None = None) -> None:
    """Raise ConfigError naming setting, value and mend when the sizes make no grid, or (with ``sizes``) none to train the model on.

    What divides the model is ``reshard.layouts.megatron_layout``'s to say.
    """
    megatron_grid(parallel).check()
    if sizes is not None:
        _check_training(parallel, sizes)


def _check_training(parallel: ParallelConfig, sizes: ModelSizes) -> None:
    heads = sizes.heads // parallel.tp
    if heads % parallel.cp:
        raise ConfigError(
            f"parallel.cp={parallel.cp} does not divide the {heads} attention heads that parallel.tp={parallel.tp} leaves to a rank, "
            f"and context-parallel ranks share them; set parallel.cp to {divisors(heads)}"
        )
    if sizes.experts and parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"parallel.tp={parallel.tp} with the {sizes.experts} experts of this model needs parallel.sequence_parallel=true: "
            "Megatron-Core's experts take their tokens from a split sequence"
        )
