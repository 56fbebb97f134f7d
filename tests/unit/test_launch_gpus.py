"""Jobs on nodes with GPUs: groups stay within nodes, no GPU is idle, and a refusal names sizes that fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config import Config, compose
from megarl.config.schema import ParallelConfig
from megarl.core.errors import ConfigError, JobError
from megarl.core.jobs import ProcessKind
from megarl.learn.parallel.grid import check_roles
from megarl.run.nodes.fit import COMMAND, advice, fit, number_of_nodes, planned
from megarl.run.nodes.plan import NodeInfo, Plan, groups_of, idle_gpus, plan_job, workers_of
from tests.unit.test_configs import NODES, YOURS

PRESETS = (*NODES, "own_gpu")
CLUSTER_PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cluster.md").read_text()


@cache
def preset(name: str, *overrides: str) -> Config:
    return compose([f"experiment={name}", *(YOURS if name == "own_gpu" else ()), *overrides])


def nodes(count: int, gpus: int = 8, role: str = "all") -> list[NodeInfo]:
    return [NodeInfo(rank, "", role, gpus) for rank in range(count)]  # type: ignore[arg-type]


def anything(config: Config) -> None:
    """A job whose models have every size."""


def check_plan(config: Config, plan: Plan, places: Sequence[NodeInfo]) -> None:
    """Check that groups are whole and loads equal, and that no GPU is given twice, except to a rank and an engine that
    share it."""
    gpus, ranks, parts = places[0].gpus, plan.of(ProcessKind.TRAINER), plan.of(ProcessKind.ENGINE)
    where = [rank.node for rank in ranks]
    assert len(set(Counter(where).values())) <= 1, "equal blocks"
    for group in groups_of(config):
        for i in range(0, len(where), group.size):
            block = Counter(where[i : i + group.size])
            assert len(block) == 1 or set(block.values()) == {gpus}, f"{group} spans nodes without filling them"
    assert len(parts) == config.rollout.replicas * config.rollout.nodes or not parts
    for part in parts:
        assert len(part.gpus) == workers_of(config) // config.rollout.nodes
        assert len(part.gpus) % config.rollout.tp == 0 or len(part.gpus) == gpus
    for node in places:
        engines = [gpu for part in parts if part.node == node.rank for gpu in part.gpus]
        trained = next((rank.gpus for rank in ranks if rank.node == node.rank), ())
        assert len(trained) == where.count(node.rank)
        taken = engines if config.rollout.placement == "colocated" else [*trained, *engines]
        assert len(set(taken)) == len(taken) and set(taken) <= set(range(gpus))


def with_settings(config: Config, line: str) -> Config:
    """The job with the overrides of a line of advice."""
    for override in line.partition(": ")[2].split():
        setting, _, value = override.partition("=")
        *sections, name = setting.split(".")
        changed = {name: value == "true" if value in ("true", "false") else int(value)}
        inner = config
        holders = []
        for section in sections:
            holders.append((inner, section))
            inner = getattr(inner, section)
        made = replace(inner, **changed)  # type: ignore[arg-type]
        for holder, section in reversed(holders):
            made = replace(holder, **{section: made})
        config = made
    return config


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PRESETS), st.integers(1, 16), st.sampled_from([4, 8]), st.booleans())
def test_every_preset_fits_or_is_told_what_does(name: str, count: int, gpus: int, colocated: bool) -> None:
    config, places = preset(name), nodes(count, gpus)
    if colocated:
        config = replace(config, rollout=replace(config.rollout, placement="colocated"))
    try:
        fitted = fit(config, places, places, anything)
    except ConfigError as error:
        lines = {line.split(":")[0].strip(): line for line in str(error).splitlines()[1:]}
        with_all = lines.get(f"to use all {count * gpus} GPUs")
        if with_all is not None:
            other = with_settings(config, with_all)
            check_roles(other)
            plan = fit(other, places, places, anything).plan
            check_plan(other, plan, places)
            assert not idle_gpus(plan, places)
        as_it_is = lines.get("to run it as it is")
        if as_it_is is not None:
            number = int(as_it_is.split("--nodes=")[1].split()[0])
            same = with_settings(config, ": " + as_it_is.partition("slurm/train_grpo.sh ...")[2])
            fit(same, nodes(number, gpus), nodes(number, gpus), anything)
        assert with_all or as_it_is or count * gpus < workers_of(config) + config.parallel.tp, str(error)
    else:
        check_plan(config, fitted.plan, places)
        assert 4 * sum(map(len, idle_gpus(fitted.plan, places).values())) <= count * gpus


@pytest.mark.parametrize("name", NODES)
def test_the_documented_number_of_nodes_is_the_one_that_is_advised(name: str) -> None:
    assert number_of_nodes(preset(name), 8) == NODES[name]


def test_a_job_of_seven_billion_on_two_nodes_is_told_how_to_use_sixteen_gpus() -> None:
    """3 of 16 GPUs, and a pair on two nodes, were the plan before."""
    config = preset("own_gpu", "parallel.tp=2", "rollout.replicas=1")
    with pytest.raises(ConfigError, match="13 of 16 GPUs would be idle") as raised:
        fit(config, nodes(2), nodes(2), anything)
    said = [line.strip() for line in str(raised.value).splitlines()]
    assert "\n".join(f"    {'  ' * bool(i)}{line}" for i, line in enumerate(said)) in CLUSTER_PAGE
    other = with_settings(config, said[1])
    plan = fit(other, nodes(2), nodes(2), anything).plan
    check_plan(other, plan, nodes(2))
    assert not idle_gpus(plan, nodes(2)) and other.parallel.tp == 2
    allowed = replace(config, cluster=replace(config.cluster, allow_idle=True))
    assert "idle: GPUs 1-7" in planned(allowed, nodes(2)) or "idle: GPUs 2-7" in planned(allowed, nodes(2))


SEPARATE = (
    "rollout.placement=separate", "rollout.tp=4", "rollout.replicas=16", "trainer.offload=none",
    "reference.offload=none",
)  # fmt: skip
"""Engines of ``grpo_qwen2_5_32b`` on eight nodes beside the trainer's eight."""


def test_groups_that_would_span_nodes_take_whole_nodes_of_their_own() -> None:
    """Four ranks and four engine workers on each node would cut every tensor-parallel group of eight in two."""
    config = preset("grpo_qwen2_5_32b", *SEPARATE)
    plan = plan_job(config, nodes(16))
    assert {rank.node for rank in plan.of(ProcessKind.TRAINER)} == set(range(8))
    assert {part.node for part in plan.of(ProcessKind.ENGINE)} == set(range(8, 16))


def test_an_engine_spans_nodes_only_where_it_fills_them() -> None:
    config = preset("own_gpu", "rollout.tp=4", "rollout.nodes=2", "parallel.tp=4")
    with pytest.raises(ConfigError, match=r"would span nodes of 8 GPUs without filling them; set rollout.nodes=1"):
        plan_job(config, nodes(2))
    plan_job(preset("own_gpu", "rollout.tp=16", "rollout.nodes=2", "parallel.tp=8", "parallel.dp=2"), nodes(4))


def test_advice_keeps_the_nodes_that_an_engine_spans() -> None:
    """One of TP8 and two stages has a stage on each of two nodes."""
    config = preset("own_gpu", "rollout.tp=8", "rollout.pp=2", "rollout.nodes=2", "parallel.tp=8")
    with_all, as_it_is = advice(config, nodes(4), anything)
    assert "rollout.nodes" not in with_all + as_it_is and "--nodes=3 " in as_it_is


def test_nodes_without_gpus_are_named() -> None:
    config = preset("own_gpu", "rollout.tp=2", "rollout.nodes=2", "parallel.tp=2")
    with pytest.raises(ConfigError, match="need 4 GPUs .* but the job has 0"):
        fit(config, nodes(2, 0), nodes(2, 0), anything)


def test_usable_sizes_alone_are_advised() -> None:
    """The checks of models have the last word."""

    def only_four(config: Config) -> None:
        if config.parallel.dp != 4:
            raise ConfigError("no")

    config = preset("own_gpu", "parallel.tp=2", "rollout.replicas=1")
    assert "parallel.dp=4 " in advice(config, nodes(2), only_four)[0]

    def none(config: Config) -> None:
        raise ConfigError("no")

    assert not any("to use all" in line for line in advice(config, nodes(2), none))


def test_the_command_of_a_slurm_job_is_repeated() -> None:
    env = {COMMAND: "slurm/train_grpo.sh experiment=grpo_qwen2_5_32b"}
    [line] = [line for line in advice(preset("grpo_qwen2_5_32b"), nodes(1), anything, env) if "as it is" in line]
    assert line.endswith("sbatch --nodes=8 --gpus-per-node=8 slurm/train_grpo.sh experiment=grpo_qwen2_5_32b")


def test_a_lost_node_of_engines_takes_its_engines_alone() -> None:
    config, places = preset("grpo_qwen2_5_32b", *SEPARATE), nodes(16)
    fitted = fit(config, places, places[:-1], anything)
    assert (fitted.config.parallel.dp, fitted.config.rollout.replicas) == (8, 14)
    check_plan(fitted.config, fitted.plan, places[:-1])
    lost_trainer = fit(config, places, [*places[:3], *places[4:]], anything)
    check_plan(lost_trainer.config, lost_trainer.plan, places)


def test_a_lost_node_of_a_job_that_shares_nodes_leaves_equal_blocks() -> None:
    config = preset("own_gpu", "parallel.tp=2", "parallel.dp=8", "rollout.replicas=16")
    places = nodes(4)
    for lost in (1, 3):
        left = [place for place in places if place.rank != lost]
        fitted = fit(config, places, left, anything)
        check_plan(fitted.config, fitted.plan, places)
        assert fitted.config.parallel.dp == 6
    with pytest.raises(JobError, match="no part of the job fits"):
        large = replace(config, parallel=ParallelConfig(tp=8, pp=2, backend="nccl"))
        fit(large, places, places[:1], anything)


def test_components_of_a_heterogeneous_job_keep_their_kinds() -> None:
    apart = ("rollout.placement=separate", "trainer.offload=none", "reference.offload=none", "sync.transport=nccl")
    config = preset("grpo_deepseek_v3", *apart)
    places = [NodeInfo(rank, "", "trainer" if rank < 128 else "rollout", 8) for rank in range(256)]
    plan = fit(config, places, places, anything).plan
    check_plan(config, plan, places)
    assert {rank.node for rank in plan.of(ProcessKind.TRAINER)} == set(range(128))


def test_the_table_names_idle_gpus() -> None:
    config = preset("own_gpu", "parallel.tp=4", "rollout.replicas=3")
    assert planned(config, nodes(1)).splitlines()[0].endswith("idle: GPU 7")
