"""Nodes without trainer ranks that leave a running attempt with notice: their engines drain, the others go on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from megarl.config import Config
from megarl.core.errors import ConfigError
from megarl.core.jobs import REWARD_HOSTS, ProcessKind, kind_of, unit_of
from megarl.core.processes.heartbeat import START
from megarl.run.nodes.node import Started
from megarl.run.nodes.remote import RemoteNode
from megarl.run.supervise.engines import EngineSupervisor
from megarl.run.supervise.process_units import Units, is_engine

log = logging.getLogger(__name__)


class Drains:
    """Takes the engines and the reward host of leaving nodes out of an attempt, then ends the nodes' supervisors.

    Engines leave as by ``megarl scale``: their samples go on elsewhere. Verdicts that a reward host was computing are
    computed by other workers.

    Args:
        started: Processes of the attempt.
        order: Orders engines to leave, by number.
        check: Raises ConfigError if the attempt cannot go on with this number of engines.
        grace_s: Seconds for a reward host to end.
    """

    def __init__(
        self,
        config: Config,
        started: Sequence[Started],
        units: Units,
        engines: EngineSupervisor,
        order: Callable[[set[int]], None],
        check: Callable[[Config, int], None],
        grace_s: float,
    ) -> None:
        self._config, self._started, self._units, self._engines = config, started, units, engines
        self._order, self._check, self._grace_s = order, check, grace_s
        self._draining: list[RemoteNode] = []
        self._ordered: set[int] = set()
        """Numbers of engines that were ordered to leave."""

    def begin(self, node: RemoteNode) -> bool:
        """Order the engines of a node to leave; return False, with nothing changed, if the job must stop for it."""
        here = self._members(node)
        numbers = {_number(s) for s in here if is_engine(s.process.name)}
        others = [row for row in self._engines.rows.values() if row.number not in numbers | self._ordered]
        left = [row for row in others if row.is_present]
        explorers = [s for s in self._started if kind_of(s.process.name) is ProcessKind.EXPLORER]
        if (
            not numbers
            or any(kind_of(s.process.name) not in (ProcessKind.ENGINE, ProcessKind.REWARD_HOST) for s in here)
            or all(row.has is None for row in left)
            or any(s.process.heartbeat().phase == START for s in explorers)  # it may still wait for reward hosts
            or self._config.reward.max_kills < 2  # a verdict under way would be given up
        ):
            return False
        try:
            self._check(self._config, len(left))
        except ConfigError:
            return False
        names = ", ".join(sorted({unit_of(s.process.name) for s in here}))
        log.warning("node %d %s leaves with notice: %s drain, and the job goes on", node.rank, node.name, names)
        self._ordered |= numbers
        self._order(numbers)
        self._draining.append(node)
        return True

    def act(self) -> None:
        """End the reward host and the supervisor of each node whose engines have ended."""
        for node in list(self._draining):
            members = self._members(node)
            if any(self._units.is_present(unit_of(s.process.name)) for s in members if is_engine(s.process.name)):
                continue
            hosts = [s for s in members if kind_of(s.process.name) is ProcessKind.REWARD_HOST]
            for host in hosts:
                self._forget(host)
            self._units.end([unit_of(s.process.name) for s in hosts], self._grace_s)
            node.end()
            self._draining.remove(node)
            log.info("node %d %s has left", node.rank, node.name)

    def _members(self, node: RemoteNode) -> list[Started]:
        return [s for s in self._started if s.node is node]

    def _forget(self, host: Started) -> None:
        """Remove a reward host from the variables of processes that may be started again."""
        assert host.spec is not None
        for s in self._started:
            if s.spec is not None and REWARD_HOSTS in s.spec.env:
                kept = [a for a in s.spec.env[REWARD_HOSTS].split(",") if a.rpartition("*")[0] != host.spec.listens]
                s.spec.env[REWARD_HOSTS] = ",".join(kept)


def _number(started: Started) -> int:
    return int(unit_of(started.process.name).rpartition(" ")[2])
