"""Settings of the attempt after a trainer ran out of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from megarl.config import Config
from megarl.core.errors import ConfigError, InputError, MemoryFullError, NonRetryableError
from megarl.run.checks.job import check_micro_batches
from megarl.run.run_dir.changes import Change

log = logging.getLogger(__name__)

ADVICE = (
    "lower trainer.max_tokens_per_micro_batch (with trainer.packing=false: trainer.micro_batch_size) or "
    "rollout.max_response_tokens, take models from the device (trainer.offload, critic.offload, reference.offload, "
    "reward_model.offload), set model.recompute=selective or full, or use more devices (parallel.tp, parallel.dp)"
)


class MicroBatchBudget:
    """Token budget of micro-batches, which a job may halve once. A start by hand has the configured budget again."""

    def __init__(self, fits: Callable[[Config], None] = check_micro_batches) -> None:
        self._fits = fits
        self._halved: Change | None = None

    def halve(self, config: Config, error: MemoryFullError) -> Config:
        """Return the settings with half the budget.

        Raises NonRetryableError with the settings to change if the budget was halved before or half is too little.
        """
        if self._halved is not None:
            setting, old, new = self._halved
            raise NonRetryableError(f"{error}\nout of memory again, with {setting} {old} -> {new}; {ADVICE}") from error
        try:
            smaller, self._halved = halved(config, self._fits)
        except InputError as too_small:
            raise NonRetryableError(
                f"{error}\nout of memory, and half the micro-batch is too little: {too_small}. Instead, {ADVICE}"
            ) from error
        setting, old, new = self._halved
        log.warning(
            "OUT OF MEMORY: the job goes on with %s %d -> %d. Losses and gradients are equal up to the order of "
            "summation. It is halved once, without counting in cluster.restarts; a resume by hand has %d again",
            setting,
            old,
            new,
            old,
        )
        return smaller


def halved(config: Config, fits: Callable[[Config], None] = check_micro_batches) -> tuple[Config, Change]:
    """Return the settings with half the tokens of a micro-batch (without packing: half the rows), and the change.

    Args:
        fits: Raises InputError if the run's longest sequence does not fit a micro-batch.

    Raises:
        InputError: the value is 1, or half does not fit.
    """
    trainer = config.trainer
    if trainer.packing:
        old, name = trainer.max_tokens_per_micro_batch, "max_tokens_per_micro_batch"
        trainer = replace(trainer, max_tokens_per_micro_batch=old // 2)
    else:
        old, name = trainer.micro_batch_size, "micro_batch_size"
        trainer = replace(trainer, micro_batch_size=old // 2)
    if old == 1:
        raise ConfigError(f"trainer.{name} is 1 already")
    smaller = replace(config, trainer=trainer)
    fits(smaller)
    return smaller, Change(f"trainer.{name}", old, old // 2)
