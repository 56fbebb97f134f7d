"""Starts a job's trainer ranks again after one was killed, while engines, explorers, reward hosts and store go on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from megarl.config import Config
from megarl.core.errors import MemoryFullError, NonRetryableError
from megarl.core.jobs import ProcessKind, kind_of, logs_of, unit_of
from megarl.learn.algorithms import job_of
from megarl.run.nodes.node import Started
from megarl.run.nodes.plan import Plan
from megarl.run.supervise.process_units import Units, ending, failed

log = logging.getLogger(__name__)


@dataclass
class Restarts:
    """Restarts that are left of ``cluster.restarts``. A start of the whole job takes one, and one of its ranks."""

    left: int


class Begun(NamedTuple):
    """An attempt that has begun in the run directory and in the store."""

    attempt: int
    step: int
    """Step of the checkpoint from which it goes on."""


class RankRestarts:
    """Decides whether trainer ranks are started again alone, and starts them.

    The job starts again as a whole instead where this may not help: a rank ended by itself, another process has died
    too, a node is lost, or no step was made since the last start of the ranks.

    Args:
        attempt: Number of the attempt that has started all processes.
        begin: Begins the attempt after the one given, once no rank of it lives.
        last_step: Returns the last step in the store.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        attempt: int,
        restarts: Restarts,
        begin: Callable[[int], Begun],
        last_step: Callable[[], int],
    ) -> None:
        self._config, self._restarts, self._begin, self._last_step = config, restarts, begin, last_step
        self._may = plan.job.has(ProcessKind.ENGINE) and plan.job.trains
        self.attempt = attempt
        """Number of the current attempt."""
        self._from_step = -1

    def begin(self, started: Sequence[Started], units: Units) -> bool:
        """End all trainer ranks and start new ones as the next attempt. Return False, with nothing changed, if the job
        must start again as a whole.

        Raises:
            FencedError: another job has begun an attempt.
            JobError: the attempt cannot begin, or a rank cannot be started.
        """
        ranks = [s for s in started if kind_of(s.process.name) is ProcessKind.TRAINER]
        dead = [s for s in units.present() if failed(s.process)]
        if not (self._restarts.left and self._may and self._is_cured_by_ranks(ranks, dead)):
            return False
        if self._last_step() <= self._from_step:
            return False
        self._restarts.left -= 1
        first = next(s.process for s in dead if (s.process.poll() or 0) < 0)
        log.error(
            "%s (%s); starting the trainer ranks again from the newest checkpoint (cluster.restarts: %d left); all "
            "other processes go on",
            ending(first),
            first.log,
            self._restarts.left,
        )
        names = [unit_of(s.process.name) for s in ranks]
        units.end(names, 0.0)  # the others wait in a collective for the dead one
        self.attempt, self._from_step = self._begin(self.attempt)
        for name, placed in zip(names, self._placed_again(ranks), strict=True):
            units.give_place([placed])
            units.begin(name)
        return True

    def _is_cured_by_ranks(self, ranks: Sequence[Started], dead: Sequence[Started]) -> bool:
        statuses = {s.process.poll() for s in dead}
        return (
            all(s in ranks for s in dead)
            and all(s.spec is not None and s.node.fault() is None for s in ranks)
            and any(status is not None and status < 0 for status in statuses)
            and statuses.isdisjoint((NonRetryableError.STATUS, MemoryFullError.STATUS))
        )

    def _placed_again(self, ranks: Sequence[Started]) -> list[Started]:
        """Return the ranks' places with the attempt's number and logs, and with new ports: connections of killed ranks
        may hold the old ones."""
        node = ranks[0].node
        program = job_of(self._config).program
        own = {"MEGARL_ATTEMPT": str(self.attempt), "MASTER_PORT": str(node.another_port())}
        own["MEGARL_LINK"] = f"{node.address}:{node.another_port()}"
        placed = []
        for s in ranks:
            assert s.spec is not None
            path = logs_of(self._config.run.dir, self.attempt, program) / Path(s.spec.log).name
            placed.append(s._replace(spec=replace(s.spec, env={**s.spec.env, **own}, log=str(path))))
        return placed
