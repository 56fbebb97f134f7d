"""Names of processes and their kinds, and the table of jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.config import compose
from megarl.core.jobs import JOBS, Mode, ProcessKind, kind_of, unit_of
from megarl.run.nodes.plan import NodeInfo, plan_job
from megarl.run.supervise.specs import Addresses, specs


@pytest.mark.parametrize("kind", ProcessKind)
def test_a_name_gives_its_kind_back(kind: ProcessKind) -> None:
    """So does the stem of a log or a timeline."""
    for name in (kind.label, kind.stem, kind.named(0), kind.named(11), kind.named(2, part=1), kind.log(2, part=1)):
        assert kind_of(name) is kind


def test_names_of_other_processes_have_no_kind() -> None:
    assert [kind_of(name) for name in ("", "reward caller 1", "supervisor", "rank 0")] == [None] * 4


def test_names_are_those_of_the_documents() -> None:
    assert ProcessKind.TRAINER.named(3) == "trainer rank 3" and ProcessKind.TRAINER.log(3) == "trainer_3.log"
    assert ProcessKind.ENGINE.named(2, part=1) == "engine 2 part 2"
    assert ProcessKind.ENGINE.log(2, part=1) == "engine_2_part_2.log"
    assert ProcessKind.REWARD_HOST.named(1) == "reward host 1" and ProcessKind.REWARD_HOST.log(1) == "reward_host_1.log"


def test_parts_of_an_engine_are_one_unit() -> None:
    parts = {unit_of(ProcessKind.ENGINE.named(2, part)) for part in range(3)}
    assert parts == {ProcessKind.ENGINE.named(2)} != {ProcessKind.ENGINE.named(1)}


@pytest.mark.parametrize(("mode", "algorithm"), [("both", "grpo"), ("offline", "sft")])
def test_a_job_has_the_processes_of_its_row(mode: Mode, algorithm: str) -> None:
    """On two nodes, of which the second has reward workers too; in the order of the row."""
    overrides = ["parallel=tp2", "rollout.replicas=2", f"algorithm={algorithm}"]
    config = compose(["experiment=quickstart" if mode == "both" else "experiment=sft", *overrides])
    plan = plan_job(config, [NodeInfo(0, "a", "all"), NodeInfo(1, "b", "all")])
    ports = iter(f"127.0.0.1:{port}" for port in range(1000, 2000))
    servers = (ProcessKind.ENGINE, ProcessKind.REWARD_HOST)
    engines, hosts = (tuple(next(ports) for _ in plan.of(kind)) for kind in servers)
    addresses = Addresses(next(ports), next(ports), engines, ("",) * len(engines), hosts)
    job = plan.job
    assert job == JOBS[mode]
    kinds = [kind_of(spec.name) for _, spec in specs(config, plan, addresses, {}, Path("logs"))]
    assert tuple(dict.fromkeys(kinds)) == job.processes
    assert kinds.count(ProcessKind.TRAINER) == 2 and kinds.count(ProcessKind.ENGINE) == (2 if mode == "both" else 0)
