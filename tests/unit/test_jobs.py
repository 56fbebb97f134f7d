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


@pytest.mark.parametrize(
    ("mode", "experiment", "algorithm", "ranks", "engines"),
    [("both", "quickstart", "grpo", 2, 2), ("offline", "sft", "sft", 2, 0), ("bench", "quickstart", "grpo", 0, 2)],
)
def test_a_job_has_the_processes_of_its_row(
    mode: Mode, experiment: str, algorithm: str, ranks: int, engines: int
) -> None:
    """On two nodes, of which the second has reward workers too; in the order of the row."""
    overrides = ["parallel=tp2", "rollout.replicas=2", f"algorithm={algorithm}"]
    overrides += ["run.mode=bench"] if mode == "bench" else []
    config = compose([f"experiment={experiment}", *overrides])
    plan = plan_job(config, [NodeInfo(0, "a", "all"), NodeInfo(1, "b", "all")])
    ports = iter(f"127.0.0.1:{port}" for port in range(1000, 2000))
    servers = (ProcessKind.ENGINE, ProcessKind.REWARD_HOST)
    serving, hosts = (tuple(next(ports) for _ in plan.of(kind)) for kind in servers)
    addresses = Addresses(next(ports), next(ports), serving, ("",) * len(serving), hosts)
    job = plan.job
    assert job == JOBS[mode]
    found = specs(config, plan, addresses, {}, Path("logs"))
    kinds = [kind_of(spec.name) for _, spec in found]
    assert tuple(dict.fromkeys(kinds)) == job.processes
    assert kinds.count(ProcessKind.TRAINER) == ranks and kinds.count(ProcessKind.ENGINE) == engines
    assert [kind_of(spec.name) for _, spec in found if spec.echo] == [job.until]
