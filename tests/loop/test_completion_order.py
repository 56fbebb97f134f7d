"""Jobs in completion order with two engines: no token is older than ``sync.max_staleness``, also after a kill."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import select

from megarl.buffer.store import Store
from megarl.buffer.store.tables import GROUPS
from tests.loop.held import Held
from tests.loop.same_run import steps_of
from tests.system.jobs import START_S, TINY, Job

pytestmark = pytest.mark.timeout(3 * START_S)
STEPS, EACH, K = 6, 8, 2
SETTINGS = (
    *TINY,
    f"trainer.steps={STEPS}",
    "rollout.replicas=2",
    "sync.order=completion",
    f"sync.max_staleness={K}",
    "algorithm.correction=truncate",
)


@pytest.mark.soak  # tests/loop/test_meanwhile.py has a job in completion order that is not killed
def test_no_token_is_older_than_the_bound_and_no_group_is_used_twice(tmp_path: Path) -> None:
    """A group of the first weights is held back until the step of its deadline. Killed when the third step is recorded
    and an answer is held back, the job is started again."""
    held = Held(tmp_path)
    held.hold("train")
    job = Job(tmp_path / "run", (*SETTINGS, *held.settings)).start()
    try:
        job.until(lambda: held.holds("train") and job.steps() == list(range(1, K + 1)), "the steps before the deadline")
        held.until(job, "train", lambda: K + 1 in job.steps(), "the step of the deadline")
        job.kill_all()
        held.release("train")
        job.start()
        assert job.wait(START_S) == 0, job.output.read_text()
        assert "resumed from" in job.output.read_text()
    finally:
        job.clean_up()
    records = steps_of(tmp_path / "run")
    assert sorted({record["training/global_step"] for record in records}) == [float(s + 1) for s in range(STEPS)]
    lags = [record["rollout/lag/max"] for record in records]
    assert max(lags) == K and min(lags) >= 0
    store = Store(f"sqlite:///{tmp_path}/run/store.db", read_only=True)
    query = select(GROUPS.c.rollout_id, GROUPS.c.group_id, GROUPS.c.used_by).where(GROUPS.c.state == "consumed")
    rows = [row for row in store.database.read(lambda c: c.execute(query).all()) if row.rollout_id.startswith("train")]
    assert all(0 < used <= EACH for used in Counter(row.used_by for row in rows).values())
    assert {row.used_by for row in rows} == set(range(1, STEPS + 1)) and store.pacing.unused() == []
    for row in rows:
        spans = {span.version for e in store.groups.read([row.group_id]) for turn in e.turns for span in turn.spans}
        assert all(0 <= row.used_by - 1 - step <= K for step in store.pacing.version_steps(spans).values())
    store.close()
