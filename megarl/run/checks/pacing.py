"""Checks of ``sync.max_staleness``, ``sync.interval`` and ``sync.order``."""

from __future__ import annotations

import logging

from megarl.core.config import Config
from megarl.core.errors import ConfigError
from megarl.core.jobs import Job

log = logging.getLogger(__name__)


def check_pacing(config: Config, job: Job) -> None:
    """Raise ConfigError if groups cannot be sampled that far ahead; warn without a correction."""
    sync = config.sync
    if sync.interval > sync.max_staleness + 1:
        raise ConfigError(
            f"sync.interval={sync.interval}: weights that are published every {sync.interval} steps are up to "
            f"{sync.interval - 1} steps behind, and sync.max_staleness={sync.max_staleness} allows fewer; set "
            f"sync.max_staleness={sync.interval - 1} or more, or sync.interval={sync.max_staleness + 1} or less"
        )
    if sync.order == "completion" and not sync.max_staleness:
        raise ConfigError(
            "sync.order=completion with sync.max_staleness=0: a step then has no other groups to take than its own; "
            "set sync.max_staleness to 1 or more, or sync.order=admission"
        )
    if config.algorithm.segments == "current" and not sync.max_staleness:
        raise ConfigError(
            "algorithm.segments=current with sync.max_staleness=0: one version of the weights samples a whole "
            "trajectory, so there are no earlier segments; set sync.max_staleness to 1 or more, or "
            "algorithm.segments=all"
        )
    _check_late(config)
    if sync.max_staleness and job.rollouts and config.algorithm.correction == "none":
        log.warning(
            "sync.max_staleness=%d without algorithm.correction: earlier weights sample the tokens, and the loss takes "
            "them for those of the step; set algorithm.correction=truncate (docs/algorithms.md)",
            sync.max_staleness,
        )


def _check_late(config: Config) -> None:
    """Raise ConfigError for ``reward.late_steps`` that no group, or every group, would reach."""
    sync, late = config.sync, config.reward.late_steps
    if late is None:
        return
    # In admission order the groups of a step were asked for at least so many steps before it, after the first steps.
    most = sync.max_staleness if sync.order == "completion" else sync.max_staleness + 1 - sync.interval
    if not 1 <= late <= most:
        how = f"sync.max_staleness={sync.max_staleness}, sync.interval={sync.interval}, sync.order={sync.order}"
        way = f"set it to 1 to {most}" if most else "raise sync.max_staleness"
        raise ConfigError(
            f"reward.late_steps={late}: with {how} a step waits for its groups after {most} steps at most; {way}, or "
            "leave it out to wait for rewards"
        )
    if config.algorithm.dynamic_sampling and sync.order == "admission":
        raise ConfigError(
            f"reward.late_steps={late} with algorithm.dynamic_sampling=true: further groups of a step were not asked "
            "for before it; leave late_steps out, or set sync.order=completion"
        )
