"""Names of processes and their kinds, and the table of jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import compose
from megarl.core.errors import ConfigError
from megarl.core.jobs import JOBS, Mode, ProcessKind, kind_of, logs_of, unit_of, worker_of
from megarl.learn.algorithms import job_of
from megarl.run.checks.settings import check_mode
from megarl.run.launch.joining import differences
from megarl.run.nodes.plan import NodeInfo, plan_job
from megarl.run.supervise.process_specs import Addresses, specs


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
    ("mode", "ranks", "engines"),
    [("both", 2, 2), ("explore", 0, 2), ("train", 2, 0), ("offline", 2, 0), ("bench", 0, 2)],
)
def test_a_job_has_the_processes_of_its_row(mode: Mode, ranks: int, engines: int) -> None:
    """On two nodes, of which the second has reward workers too; in the order of the row."""
    overrides = ["parallel=tp2", "rollout.replicas=2", f"algorithm={'sft' if mode == 'offline' else 'grpo'}"]
    own = ["experiment=sft"] if mode == "offline" else ["experiment=quickstart", f"run.mode={mode}"]
    config = compose([*own, *overrides])
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


def test_programs_of_a_run_have_names_of_their_own(tmp_path: Path) -> None:
    first, second = (
        job_of(compose(["experiment=quickstart", "run.mode=explore", f"run.number={number}"])) for number in (0, 1)
    )
    assert (first.program, second.program, JOBS["train"].program) == ("explore-0", "explore-1", "train")
    programs = ("train", "explore-0", "explore-1")
    assert [worker_of(program) for program in programs] == ["explorer-0", "explorer_explore-0", "explorer_explore-1"]
    assert len({worker_of(program, number) for program in programs for number in range(2)}) == 6
    assert len({logs_of(tmp_path, 1, program) for program in programs}) == 3
    assert [JOBS[mode].is_alone for mode in ("both", "offline", "bench", "train", "explore")] == [
        *[True] * 3,
        *[False] * 2,
    ]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["experiment=sft", "run.mode=explore"], ["run.mode=explore", "leave run.mode out"]),
        (["experiment=quickstart", "sync.method=checkpoint"], ["run.mode=both", "sync.method=direct"]),
        (["experiment=quickstart", "run.number=1"], ["run.number=1", "set run.mode=explore"]),
        (
            ["experiment=quickstart", "run.mode=train", "rollout.placement=colocated"],
            ["rollout.placement=colocated", "set run.mode=both"],
        ),
    ],
)
def test_a_part_of_a_run_that_does_not_fit_is_refused(overrides: list[str], words: list[str]) -> None:
    config = compose(overrides)
    with pytest.raises(ConfigError) as refused:
        check_mode(config, job_of(config))
    assert all(word in str(refused.value) for word in words)


def test_an_explore_program_has_the_settings_of_its_run() -> None:
    """But for those of the trainer's ranks."""
    run = compose(["experiment=quickstart", "run.mode=train"])
    own = ["experiment=quickstart", "run.mode=explore", "trainer.steps=9", "rollout.replicas=2", "cluster.stall_s=5"]
    assert differences(run, compose(own)) == []
    others = compose([*own, "rollout.tp=2", "reward.timeout_s=1", "sync.method=checkpoint"])
    changed = {change.setting for change in differences(run, others)}
    assert changed == {"rollout.tp", "reward.timeout_s", "sync.method"}
