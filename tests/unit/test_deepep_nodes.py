"""Trainer ranks whose memory DeepEP maps are on one node, or the job is refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megarl.config import Config
from megarl.config.schema import ParallelConfig
from megarl.core.errors import ConfigError
from megarl.run.nodes.fit import fit
from megarl.run.nodes.plan import NodeInfo, plan_job
from tests.unit.small_job import config_of, nodes_of_ranks


@cache
def base(algorithm: str = "grpo") -> Config:
    return config_of(Path("x"), f"algorithm={algorithm}")


def job(parallel: ParallelConfig, critic: ParallelConfig | None = None, algorithm: str = "grpo") -> Config:
    config = base(algorithm)
    config = replace(config, parallel=parallel, critic=replace(config.critic, parallel=critic))
    return replace(config, model=replace(config.model, moe_dispatcher="deepep"))


def plain(config: Config) -> Config:
    return replace(config, model=base().model)


def nodes(count: int) -> list[NodeInfo]:
    return [NodeInfo(i, f"n{i}", "all") for i in range(count)]


@pytest.mark.parametrize(
    ("count", "grid", "critic", "algorithm", "words"),
    [
        (1, ParallelConfig(dp=4, ep=4), None, "grpo", ""),
        (2, ParallelConfig(dp=8, ep=4), None, "grpo", ""),
        (2, ParallelConfig(dp=16, ep=16), None, "grpo", ""),
        (2, ParallelConfig(dp=2, ep=2, pp=2), None, "grpo", ""),
        (3, ParallelConfig(dp=4, ep=4, pp=3), None, "grpo", ""),
        (
            2,
            ParallelConfig(dp=4, ep=4),
            None,
            "grpo",
            r"every 4 neighbouring ranks .* parallel\.ep x etp .* 4 ranks on 2 .* are 2 on",
        ),
        (
            2,
            ParallelConfig(dp=4, ep=4, pp=3),
            None,
            "grpo",
            "12 ranks on 2 .* are 6 on each; have a multiple of 4 on a node",
        ),
        (
            4,
            ParallelConfig(dp=16, ep=16),
            None,
            "grpo",
            "every 8 neighbouring ranks .* 16 ranks on 4 trainer nodes are 4 on each",
        ),
        (2, ParallelConfig(tp=2, dp=2, ep=2, etp=2), None, "grpo", "every 4 neighbouring ranks"),
        (
            2,
            ParallelConfig(dp=4, ep=2),
            ParallelConfig(dp=4, ep=4),
            "ppo",
            r"lower critic\.parallel\.ep, or set .* alltoall",
        ),
        (2, ParallelConfig(dp=4, ep=2), ParallelConfig(dp=4, ep=4), "grpo", ""),
        (2, ParallelConfig(dp=4, ep=2), ParallelConfig(tp=4), "ppo", ""),
    ],
)
def test_ranks_that_map_each_others_memory_share_a_node(
    count: int, grid: ParallelConfig, critic: ParallelConfig | None, algorithm: str, words: str
) -> None:
    config = job(grid, critic, algorithm)
    with pytest.raises(ConfigError, match=f"moe_dispatcher=deepep: .*{words}") if words else nullcontext():
        plan_job(config, nodes(count))
    plan_job(plain(config), nodes(count))


def test_they_share_one_in_a_job_that_was_made_smaller_too() -> None:
    """Of 12 ranks two nodes would have 6 each."""

    def at_most_twelve(config: Config) -> None:
        if config.parallel.dp not in (4, 8, 12):
            raise ConfigError("no")

    config = job(ParallelConfig(dp=24, ep=4))
    found = [fit(each, nodes(3), nodes(2), at_most_twelve).plan for each in (config, plain(config))]
    assert [nodes_of_ranks(plan) for plan in found] == [(0,) * 8, (0,) * 6 + (1,) * 6]
