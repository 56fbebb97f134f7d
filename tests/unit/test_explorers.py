"""Several explorers of a job: their processes, and what each has of what they share."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.errors import ConfigError
from megarl.core.jobs import ProcessKind
from megarl.explore.explorer.other_explorers import check_explorers, share_of
from megarl.run.nodes.plan import NodeInfo, plan_job, table
from tests.unit.small_job import config_of


def test_processes_have_names_and_logs_of_their_own(tmp_path: Path) -> None:
    plan = plan_job(config_of(tmp_path, "rollout.explorers=3"), nodes := [NodeInfo(0, "", "all")])
    found = plan.of(ProcessKind.EXPLORER)
    assert [explorer.name for explorer in found] == ["explorer", "explorer 1", "explorer 2"]
    assert [explorer.log for explorer in found] == ["explorer.log", "explorer_1.log", "explorer_2.log"]
    assert table(plan, nodes).endswith("3 explorers and reward workers")


@pytest.mark.parametrize("explorers", [1, 2, 3])
def test_shares_add_up(tmp_path: Path, explorers: int) -> None:
    config = config_of(
        tmp_path,
        f"rollout.explorers={explorers}",
        "rollout.concurrent_groups=7",
        "reward.workers=4",
        "reward.hosts=['a:1*3']",
        "reward.judge.concurrency=5",
    )
    check_explorers(config)
    shares = [share_of(config, ["b:2*2"], number) for number in range(explorers)]
    assert sum(share.rollout.concurrent_groups for share in shares) == 7
    assert sum(share.reward.workers for share in shares) == 4
    assert sum(share.reward.judge.concurrency for share in shares) == 5
    assert sorted(host for share in shares for host in share.reward.hosts) == ["a:1"] * 3 + ["b:2"] * 2
    assert max(len(s.reward.hosts) for s in shares) - min(len(s.reward.hosts) for s in shares) <= 1


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["reward.workers=1"], "rollout.explorers=2: each needs a separate reward worker, but reward.workers=1"),
        (["reward.workers=2", "rollout.concurrent_groups=1"], "share rollout.concurrent_groups=1"),
    ],
)
def test_explorers_without_work_are_refused(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_explorers(config_of(tmp_path, "rollout.explorers=2", *overrides))
