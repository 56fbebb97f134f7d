"""``cluster.on_notice``: a node that is asked to stop leaves, and the job goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.run.nodes.notice import Departures, ready
from megarl.run.process.interrupt import StopRequest


class Leaver:
    """Another node, as the head sees it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.name, self.stop_request, self.ended = rank, f"n{rank}", StopRequest(), False

    def fault(self) -> str | None:
        return "it has ended" if self.ended else None

    def is_there(self) -> bool:
        return not self.ended

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def nodes() -> Any:
    return [Leaver(1), Leaver(2)]


def test_one_node_stops_an_attempt_and_the_job_goes_on_without_it(nodes: Any, caplog: Any) -> None:
    job = StopRequest()
    asked = Departures(job, nodes)
    assert (asked.count, asked.at, asked.goes_on()) == (0, None, False)
    nodes[1].stop_request.ask(1)
    assert asked.count == 1 and asked.at == nodes[1].stop_request.at and asked.leaving() == [nodes[1]]
    assert asked.goes_on() and "node 2 n2 leaves with notice" in caplog.text
    assert ready(nodes) == [nodes[0]] and nodes[1].ended and not nodes[0].ended
    again = Departures(job, ready(nodes))
    assert (again.count, again.at) == (0, None), "the next attempt has not been asked"


def test_a_stop_of_the_whole_job_ends_it(nodes: Any) -> None:
    """Slurm's signal comes to all nodes, in any order."""
    job = StopRequest()
    asked = Departures(job, nodes)
    nodes[0].stop_request.ask(1)
    job.ask(1)
    assert not asked.goes_on() and asked.count == 1
    job.ask(3)
    assert asked.count == 3


def test_a_spare_that_leaves_stops_nothing(nodes: Any) -> None:
    nodes[1].stop_request.ask(1)
    assert Departures(StopRequest(), nodes[:1]).count == 0 and ready(nodes) == nodes[:1]


def test_lost_nodes_are_not_ready(nodes: Any) -> None:
    nodes[0].ended = True
    assert ready(nodes) == nodes[1:]
    assert ready([SimpleNamespace(stop_request=StopRequest(), is_there=lambda: False)]) == []  # type: ignore[list-item]


def test_a_node_that_drains_stops_nothing(nodes: Any) -> None:
    """Each node is asked once. Seconds of a node that drains are no notice. A stop of the job drains no node."""
    job, drained = StopRequest(), []
    asked = Departures(job, nodes)
    asked.drain = lambda node: drained.append(node) is None and node is nodes[0]
    for node in nodes[:1]:
        node.stop_request.ask(1)
        assert (asked.count, asked.at, asked.leaving(), asked.goes_on()) == (0, None, [], False)
    nodes[1].stop_request.ask(1)
    assert asked.leaving() == [nodes[1]] and asked.at == nodes[1].stop_request.at and drained == nodes
    assert ready(nodes) == [], "a later attempt has neither"
    job.ask(1)
    assert Departures(job, nodes).count == 1 and drained == nodes
