"""Sixteen jobs that are killed, continued or left alone, with every pair of settings of pacing, evaluation, checkpoints
and placement.

In admission order a disturbed job has the bits of one that was left alone. In every order each step trains on groups of
its own, and no token is older than ``sync.max_staleness`` allows. ``tests/unit/test_course.py`` has all combinations
without engines.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from sqlalchemy import select

from megarl.buffer.order.pacing import Pacing
from megarl.buffer.store import Store
from megarl.buffer.store.tables import GROUPS
from tests.loop.same_run import learned, left_alone
from tests.system.jobs import START_S, TINY, Job

STEPS, FIRST, EACH = 6, 3, 4
"""Steps of a job, steps before a job is killed or continued, groups of a step."""


class Row(NamedTuple):
    """Settings of a job, and what becomes of it."""

    max_staleness: int
    interval: int
    eval_interval: int
    checkpoint_interval: int
    order: Literal["admission", "completion", "keep"]
    """``sync.order``; ``keep``: in completion order with updates in flight."""
    placement: Literal["separate", "colocated"]
    fate: Literal["killed", "continued", "alone"]

    def is_allowed(self) -> bool:
        """Return True if the checks before a start take the settings."""
        return (
            self.interval <= self.max_staleness + 1
            and (self.order == "admission" or self.max_staleness > 0)
            and (self.placement == "separate" or (self.order == "admission" and self.interval == 1))
        )

    def settings(self, steps: int = STEPS) -> list[str]:
        """Settings of the job; those with partial rollouts where only these let colocated engines sample ahead."""
        given = [
            *TINY,
            "parallel=tp1",
            "algorithm.group_size=4",
            "algorithm.correction=truncate",
            "taskset.eval_size=8",
            f"trainer.steps={steps}",
            f"trainer.tasks_per_step={EACH}",
            f"trainer.eval_interval={self.eval_interval}",
            f"trainer.checkpoint_interval={self.checkpoint_interval}",
            f"sync.max_staleness={self.max_staleness}",
            f"sync.interval={self.interval}",
            f"sync.order={'admission' if self.order == 'admission' else 'completion'}",
            f"sync.pause={'keep' if self.order == 'keep' else 'wait'}",
            f"sync.deterministic={str(self.order == 'admission').lower()}",
            f"rollout.placement={self.placement}",
        ]
        if self.placement == "colocated" and self.max_staleness:
            given += ["rollout.budget_tokens=4", "rollout.segment_tokens=2"]
        return given

    def repeats(self) -> bool:
        """Return True if the job has the bits of one that is left alone. A continued one has them where no group of a
        later step would have been asked for before its first end."""
        ends = Pacing(self.max_staleness, self.interval).asked(FIRST - 1) <= FIRST
        return self.order == "admission" and (self.fate == "killed" or (self.fate == "continued" and ends))


ROWS = (
    Row(0, 1, 1, 2, "admission", "colocated", "continued"),
    Row(0, 1, 2, 1, "admission", "separate", "killed"),
    Row(0, 1, 3, 3, "admission", "colocated", "alone"),
    Row(1, 1, 1, 2, "admission", "colocated", "killed"),
    Row(1, 1, 3, 1, "completion", "separate", "continued"),
    Row(1, 2, 2, 3, "keep", "separate", "alone"),
    Row(2, 1, 1, 2, "keep", "separate", "continued"),
    Row(2, 1, 1, 3, "admission", "colocated", "killed"),
    Row(2, 2, 3, 1, "admission", "separate", "killed"),
    Row(2, 3, 2, 2, "completion", "separate", "alone"),
    Row(2, 3, 3, 3, "admission", "separate", "continued"),
    Row(3, 1, 2, 1, "admission", "colocated", "continued"),
    Row(3, 2, 1, 3, "completion", "separate", "continued"),
    Row(3, 2, 3, 2, "keep", "separate", "killed"),
    Row(3, 3, 1, 1, "keep", "separate", "alone"),
    Row(3, 3, 3, 1, "completion", "separate", "killed"),
)


def pairs(row: Row) -> set[Any]:
    """Every two settings of a row, with their values."""
    return set(itertools.combinations(row._asdict().items(), 2))


def test_rows_have_every_pair_of_settings() -> None:
    values = ((0, 1, 2, 3), (1, 2, 3), (1, 2, 3), (1, 2, 3), ("admission", "completion", "keep"))
    places, fates = ("separate", "colocated"), ("killed", "continued", "alone")
    allowed = [row for values in itertools.product(*values, places, fates) if (row := Row(*values)).is_allowed()]
    assert all(row in allowed for row in ROWS)
    assert set().union(*map(pairs, ROWS)) == set().union(*map(pairs, allowed))


def run(run_dir: Path, row: Row) -> None:
    """Run a job to its end. It is killed in the evaluation after the third step, or else after that step's record; or
    it makes ``FIRST`` steps and is continued; or it is left alone."""
    job = Job(run_dir, row.settings(FIRST if row.fate == "continued" else STEPS)).start()
    try:
        if row.fate == "killed":
            evaluated = f"select 1 from rollouts where rollout_id = 'eval-{FIRST}'"
            in_evaluation = FIRST % row.eval_interval == 0
            what = "the evaluation" if in_evaluation else "the step"
            job.until(lambda: bool(job.query(evaluated)) if in_evaluation else FIRST in job.steps(), what, poll_s=0.002)
            job.kill_all()
        else:
            assert job.wait(START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    if row.fate != "alone":
        with left_alone(run_dir, row.settings()):
            pass


def sampled(run_dir: Path) -> dict[str, Any]:
    """What each training sample and evaluation has: task, tokens, log-probs, steps in the weights, score."""
    found: dict[str, Any] = {}
    with closing(Store(f"sqlite:///{run_dir}/store.db", read_only=True)) as store:
        names = [f"train-{step:06d}" for step in range(STEPS)]
        for rollout in (*names, "eval-before", *(f"eval-{step}" for step in range(1, STEPS)), "eval-after"):
            for e in store.groups.trajectories(rollout):
                logp = [None if turn.logp is None else turn.logp.tobytes().hex() for turn in e.turns]
                steps = store.pacing.version_steps({span.version for turn in e.turns for span in turn.spans})
                weights = [[(s.start, s.end, steps[s.version]) for s in turn.spans] for turn in e.turns]
                tokens = [turn.token_ids.tolist() for turn in e.turns]
                found[f"{rollout} {e.group_id} {e.index}"] = (e.task_id, tokens, logp, weights, e.reward.score)
    return found


def check_accounts(run_dir: Path, row: Row) -> None:
    """Each step trained on groups of its own within the bound, and each due evaluation was reported."""
    pacing = Pacing(row.max_staleness, row.interval)
    query = select(GROUPS).where(GROUPS.c.used_by.is_not(None))
    with closing(Store(f"sqlite:///{run_dir}/store.db", read_only=True)) as store:
        used = store.database.read(lambda connection: connection.execute(query).all())
        assert Counter(group.used_by for group in used) == dict.fromkeys(range(1, STEPS + 1), EACH)
        assert len({group.task_id for group in used}) == len(used)
        assert store.pacing.unused() == []
        for group in used:
            found = store.groups.read([group.group_id])
            assert len({e.index for e in found}) == len(found) == 4
            versions = {span.version for e in found for turn in e.turns for span in turn.spans}
            lags = [group.used_by - 1 - step for step in store.pacing.version_steps(versions).values()]
            assert lags and min(lags) >= 0 and max(lags) <= pacing.max_staleness
            if row.fate == "alone" and row.order == "admission":
                assert max(lags) == pacing.lag_of_step(group.used_by - 1)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {record["step"] for record in records if "actor/pg_loss" in record} == set(range(1, STEPS + 1))
    evaluated = {record["step"] for record in records if "val/accuracy" in record}
    assert evaluated >= {0, *range(0, STEPS, row.eval_interval), STEPS}


@pytest.mark.soak
@pytest.mark.timeout(4 * START_S)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_a_job_ends_by_itself_with_all_its_groups(tmp_path: Path, row: Row) -> None:
    run(tmp_path / "disturbed", row)
    check_accounts(tmp_path / "disturbed", row)
    if row.repeats():
        with left_alone(tmp_path / "whole", row.settings()):
            for look in (sampled, learned):
                whole, mine = look(tmp_path / "whole"), look(tmp_path / "disturbed")
                assert whole and [key for key in whole if mine.get(key) != whole[key]] == []
