"""Nodes that leave a job with notice, while the other nodes go on (``cluster.on_notice=go_on``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from megarl.run.nodes.remote import RemoteNode
from megarl.run.process.interrupt import StopRequest

log = logging.getLogger(__name__)


class Departures:
    """Stop request of one attempt: the job's own, or that of a node which the attempt uses.

    Args:
        job: The job's own request, at its first node.
        nodes: Other nodes of the attempt, each with its own request.
    """

    def __init__(self, job: StopRequest, nodes: Sequence[RemoteNode]) -> None:
        self._job, self._nodes = job, nodes
        self.drain: Callable[[RemoteNode], bool] = lambda node: False
        """Lets a node leave while the attempt goes on; returns False if the attempt must stop for it."""
        self._asked: list[RemoteNode] = []
        """Nodes for which ``drain`` was called."""
        self._drained: list[RemoteNode] = []

    @property
    def count(self) -> int:
        """Requests to the job; 1 while only a node leaves."""
        return max(self._job.count, int(bool(self.leaving())))

    @property
    def at(self) -> float | None:
        """Unix seconds of the first request."""
        moments = [request.at for request in (self._job, *(node.stop_request for node in self.leaving()))]
        return min((moment for moment in moments if moment is not None), default=None)

    def leaving(self) -> list[RemoteNode]:
        """Return the nodes that were asked to stop and for which the attempt stops."""
        if not self._job.is_set():
            for node in self._nodes:
                if node.stop_request.is_set() and node not in self._asked:
                    self._asked.append(node)
                    if self.drain(node):
                        self._drained.append(node)
        return [node for node in self._nodes if node.stop_request.is_set() and node not in self._drained]

    def goes_on(self) -> bool:
        """Return True if nodes leave and the job was not asked to stop; logs which."""
        if self._job.is_set() or not self.leaving():
            return False
        for node in self.leaving():
            log.warning(
                "node %d %s leaves with notice: the job has saved, and goes on without it", node.rank, node.name
            )
        return True


def ready(nodes: Sequence[RemoteNode]) -> list[RemoteNode]:
    """Return the nodes that answer and do not leave; end the supervisors of those that do."""
    for node in nodes:
        if node.stop_request.is_set() and node.fault() is None:
            node.end()
    return [node for node in nodes if not node.stop_request.is_set() and node.is_there()]
