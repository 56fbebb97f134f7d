"""What of a job fits on the nodes that are left: spares first, then a smaller job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megarl.config import Config
from megarl.config.algorithms import PreferenceConfig
from megarl.config.schema import ParallelConfig
from megarl.core.errors import ConfigError, JobError
from megarl.learn.parallel.grid import check_parallel, check_roles, role_grids
from megarl.run.nodes.fit import fit, planned, reductions
from megarl.run.nodes.plan import NodeInfo, plan_job
from megarl.run.run_dir.changes import Change
from tests.unit.small_job import config_of, nodes_of_engines, nodes_of_ranks


@cache
def base() -> Config:
    return config_of(Path("x"), "parallel=dp2")


def nodes(count: int, roles: str = "") -> list[NodeInfo]:
    names = {"t": "trainer", "r": "rollout", "a": "all"}
    return [NodeInfo(i, f"n{i}", names[roles[i] if roles else "a"]) for i in range(count)]  # type: ignore[arg-type]


def job(dp: int, *, tp: int = 1, replicas: int = 1, spare: int = 0, **more: object) -> Config:
    config = base()
    return replace(
        config,
        parallel=replace(config.parallel, dp=dp, tp=tp),
        rollout=replace(config.rollout, replicas=replicas),
        cluster=replace(config.cluster, spare_nodes=spare, **more),
    )


def grids(config: Config) -> None:
    """The part of the launch's checks that needs no model."""
    check_parallel(config.parallel)
    check_roles(config)


POWERS = st.sampled_from([1, 2, 4])


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Config, list[NodeInfo], list[NodeInfo]]:
    """A job that fits its nodes, all of them, and those that are left: the head always is."""
    count, each, spare = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(0, 2))
    world = count * each
    tp, cp, pp = draw(POWERS), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    assume(world % (tp * cp * pp) == 0)
    parallel = ParallelConfig(tp=tp, cp=cp, pp=pp, dp=world // (tp * cp * pp), ep=draw(st.sampled_from([1, 2])))
    theirs = draw(st.sampled_from([None, 1, 2, 4]))
    critic = None if theirs is None else ParallelConfig(tp=theirs, dp=world // theirs)
    assume(theirs is None or world % theirs == 0)
    span = draw(st.integers(1, 2))
    roles = "t" * (count + spare) + "r" * span if draw(st.booleans()) else "a" * (count + spare)
    rollout = replace(base().rollout, nodes=span, tp=span, replicas=draw(st.integers(1, 5)))
    assume("r" in roles or span <= count)
    config = replace(
        base(),
        parallel=parallel,
        rollout=rollout,
        critic=replace(base().critic, parallel=critic),
        cluster=replace(base().cluster, spare_nodes=spare),
    )
    try:
        grids(config)
    except ConfigError:
        assume(False)
    allocated = nodes(len(roles), roles)
    lost = draw(st.sets(st.integers(1, len(allocated)), max_size=len(allocated)))
    return config, allocated, [node for node in allocated if node.rank not in lost]


def load(
    config: Config, some: Sequence[NodeInfo], trainers: int | None = None
) -> tuple[Counter[int], Counter[tuple[int, ...]]]:
    """Ranks of each node, engines of each group of nodes."""
    plan = plan_job(config, some, trainers=trainers)
    return Counter(nodes_of_ranks(plan)), Counter(nodes_of_engines(plan))


@settings(max_examples=300)
@given(jobs())
def test_what_fits_is_a_part_of_the_job(found: tuple[Config, list[NodeInfo], list[NodeInfo]]) -> None:
    config, allocated, left = found
    whole = fit(config, allocated, allocated, grids)
    trained_on = len(set(nodes_of_ranks(whole.plan)))
    assert whole.config == config
    assert len([n for n in allocated if n.role != "rollout"]) - config.cluster.spare_nodes == trained_on
    most = [max(counts.values()) for counts in load(config, whole.nodes)]
    try:
        fitted = fit(config, allocated, left, grids)
    except JobError:
        one_fits_the_head = most[0] % (config.parallel.world_size // config.parallel.dp) == 0
        alone = config.critic.parallel is None and config.parallel.ep == 1  # no other grid asks for more
        no_engine = len([n for n in left if n.role != "trainer"]) < config.rollout.nodes
        assert no_engine or not (one_fits_the_head and alone)
        return
    assert set(fitted.nodes) <= set(left) and fitted.nodes[0].rank == 0
    ranks, engines = load(fitted.config, fitted.nodes, fitted.trainers)
    assert max(ranks.values()) <= most[0] and max(engines.values()) <= most[1]
    grids(fitted.config)
    for setting, grid in role_grids(config).items():  # nothing but dp differs
        assert replace(role_grids(fitted.config)[setting], dp=grid.dp) == grid
    assert {c.setting.rpartition(".")[2] for c in reductions(config, fitted.config)} <= {"dp", "replicas"}
    assert all(c.new < c.old for c in reductions(config, fitted.config))
    assert sum(ranks.values()) == fitted.config.parallel.world_size


@settings(max_examples=300)
@given(jobs(), st.data())
def test_more_nodes_are_never_a_smaller_job(
    found: tuple[Config, list[NodeInfo], list[NodeInfo]], data: st.DataObject
) -> None:
    config, allocated, left = found
    gone = [node for node in allocated if node not in left]
    assume(gone)
    back = data.draw(st.sampled_from(gone))
    more = sorted([*left, back])
    try:
        small = fit(config, allocated, left, grids)
    except JobError:
        return
    large = fit(config, allocated, more, grids)
    assert large.config.parallel.dp >= small.config.parallel.dp
    assert large.config.rollout.replicas >= small.config.rollout.replicas


def test_a_spare_takes_the_place_of_a_lost_node() -> None:
    config, allocated = job(4, replicas=2, spare=1), nodes(3)
    assert [node.rank for node in fit(config, allocated, allocated, grids).nodes] == [0, 1]
    fitted = fit(config, allocated, [allocated[0], allocated[2]], grids)
    assert fitted.config == config and [node.rank for node in fitted.nodes] == [0, 2]


def test_without_a_spare_the_job_is_smaller() -> None:
    """Four nodes with two ranks and one engine each; with pairs of nodes for a model, one of three is left over for its
    engine."""
    allocated = nodes(4)
    left = [*allocated[:1], *allocated[2:]]
    config = job(4, tp=2, replicas=4)
    fitted = fit(config, allocated, left, grids)
    assert reductions(config, fitted.config) == [Change("parallel.dp", 4, 3), Change("rollout.replicas", 4, 3)]
    wide = fit(job(2, tp=4, replicas=4), allocated, left, grids)
    assert (wide.config.parallel.dp, wide.config.rollout.replicas, wide.trainers, len(wide.nodes)) == (1, 3, 2, 3)
    assert nodes_of_ranks(wide.plan) == (0, 0, 2, 2)


def test_other_roles_keep_their_grids_and_refuse_what_they_cannot_have() -> None:
    config = job(4)
    config = replace(config, critic=replace(config.critic, parallel=ParallelConfig(tp=2, dp=2)))
    fitted = fit(config, nodes(4), nodes(3), grids)
    assert fitted.config.parallel.dp == 2  # three ranks are none for a critic of tp=2
    assert fitted.config.critic.parallel == ParallelConfig(tp=2, dp=1)


def test_a_model_that_the_checks_refuse_is_not_taken() -> None:
    def at_most_two(config: Config) -> None:
        if config.parallel.dp > 2:
            raise ConfigError("no")

    assert fit(job(4), nodes(4), nodes(3), at_most_two).config.parallel.dp == 2


def test_what_fits_no_part_is_said() -> None:
    with pytest.raises(
        JobError,
        match=r"1 of 2 nodes .* tp\*cp\*pp = 4 trainer ranks where a node has room for 2.*cluster.shrink=false",
    ):
        fit(job(1, tp=4), nodes(2), nodes(1), grids)
    with pytest.raises(ConfigError, match=r"cluster.spare_nodes=2 leaves none of the 2 nodes"):
        fit(job(2, spare=2), nodes(2), nodes(2), grids)
    with pytest.raises(ConfigError, match="do not spread evenly"):
        fit(job(2), nodes(3), nodes(3), grids)


def test_without_shrinking_a_node_gets_more() -> None:
    config = job(4, shrink=False, replicas=4)
    fitted = fit(config, nodes(4), nodes(2), grids)
    assert fitted.config == config and nodes_of_ranks(fitted.plan) == (0, 0, 1, 1)


def test_an_offline_job_has_no_engines_to_lose() -> None:
    config = replace(job(3, replicas=3), algorithm=PreferenceConfig(name="dpo"))
    assert reductions(config, fit(config, nodes(3), nodes(2), grids).config) == [Change("parallel.dp", 3, 2)]


def test_a_plan_says_who_would_run_where() -> None:
    lines = planned(job(2, tp=2, replicas=2, spare=1), nodes(3)).splitlines()
    assert lines == [
        "node 0 n0: trainer ranks 0-1, engine 0, explorer and reward workers",
        "node 1 n1: trainer ranks 2-3, engine 1, reward workers",
        "node 2 n2: nothing",
        "mode both: the job ends when each trainer rank has ended",
    ]
    large = job(8, tp=2, replicas=8)
    assert planned(large, nodes(8)).splitlines()[1] == (
        "node 1 n1: trainer ranks 2-3, engine 1, reward workers (and 6 like it)"
    )
    assert len(planned(large, nodes(8), verbose=True).splitlines()) == 9


@pytest.mark.parametrize(
    ("spare", "span", "words"),
    [
        (1, 1, "cluster.spare_nodes=1 leaves none of the 1 nodes"),
        (0, 2, "rollout.nodes=2 for each engine, but 1 nodes may have engines"),
    ],
)
def test_a_plan_that_does_not_fit_one_machine(spare: int, span: int, words: str) -> None:
    config = replace(job(1, spare=spare), rollout=replace(base().rollout, nodes=span, tp=span))
    with pytest.raises(ConfigError, match=words):
        planned(config, nodes(1))
