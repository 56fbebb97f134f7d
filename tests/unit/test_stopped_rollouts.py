"""Starts keep the samples of the checkpoint's weights."""

from __future__ import annotations

from pathlib import Path

from megarl.buffer.store import Claim, Store
from megarl.core.jobs import TRAIN, worker_of
from megarl.core.schema import WeightsVersion
from megarl.run.launch import job
from tests.stores import VERSION, finish, make_segment, make_task, request
from tests.unit.small_job import config_of
from tests.unit.test_resume import finished_checkpoint


def cut_off(tmp_path: Path, saved: bool) -> tuple[Store, Claim, Claim]:
    """The store after another start: one group was whole, one had a segment, when the job's processes ended; an explore
    program went on with a third."""
    config = config_of(tmp_path)
    job.fill_store(config, {}, 1, config)
    store = Store(config.store.url, attempt=1)
    store.pacing.record_version(VERSION, 0)
    store.pacing.record_live(VERSION)
    store.tasks.add("train", [make_task(i) for i in range(4)])
    request(store, "train-000000", groups=4)
    whole, claim = store.groups.claim(worker_of(TRAIN), 2)
    [elsewhere] = store.groups.claim(worker_of("explore-0"), 1)
    assert finish(store, whole)
    store.segments.append([(claim, make_segment(0))])
    store.rollouts.request("eval-before", "eval", 0, VERSION, ["train/0"], 1, {})
    store.close()
    if saved:
        finished_checkpoint(tmp_path, 0)
    job.fill_store(config, {}, 2, config)
    return Store(config.store.url, attempt=2), claim, elsewhere


def test_responses_of_the_saved_weights_go_on(tmp_path: Path) -> None:
    store, claim, elsewhere = cut_off(tmp_path, saved=True)
    assert store.rollouts.progress("train-000000") == (1, 4) and finish(store, elsewhere)
    assert store.rollouts.progress("eval-before") == (0, 0), "it is asked for again"
    again = WeightsVersion(2, 1)
    assert store.groups.claim("another", 3) == [], "no engine has the weights yet"
    store.pacing.record_version(again, 0)
    store.pacing.record_live(again)
    first, other = store.groups.claim("another", 3)
    assert [one.group_id for one in (first, other)] == [claim.group_id, "train-000000/3"]
    assert [len(segment.token_ids) for segment in first.segments[0]] == [4] and not other.segments
    store.close()


def test_without_a_checkpoint_they_are_sampled_again(tmp_path: Path) -> None:
    """The model or rows may have changed."""
    store, *_ = cut_off(tmp_path, saved=False)
    assert store.rollouts.progress("train-000000") == (0, 0)
    store.close()
