"""A bench of a run and of one of its checkpoints, through the command line: it is killed, and repeated."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.buffer.store import Store
from megarl.explore.bench import FROM_FILES, ROLLOUT, read_result
from tests.loop.conftest import HELD_OUT
from tests.system.jobs import Job


def tokens_of(store: Path, rollout: str) -> dict[str, list[int]]:
    """Task -> its greedy response. Ids of held-out tasks are those of the file."""
    opened = Store(f"sqlite:///{store}", read_only=True)
    try:
        return {t.task_id: t.response.token_ids.tolist() for t in opened.groups.trajectories(rollout)}
    finally:
        opened.close()


def test_a_bench_that_was_killed_goes_on_and_gives_the_answers_of_the_training_job(
    whole_job: Job, tmp_path: Path
) -> None:
    run = f"run:{whole_job.run_dir}"
    settings = (
        "experiment=quickstart",
        f"taskset.eval={whole_job.run_dir}/data/eval.parquet",
        "taskset.generate=null",
        "rollout.max_prompt_tokens=null",
        "rollout.kv_cache_bytes=33554432",
        "rollout.max_num_seqs=64",
    )
    job = Job(tmp_path / "bench", settings, command=("bench", run, f"{run}@3"))
    try:
        job.start()
        results = tmp_path / "bench" / "models"
        job.until(lambda: len(list(results.glob("*/bench.json"))) == 1, "the first model's results")
        job.kill_all()
        job.start()
        assert job.wait(120) == 0, job.output.read_text()
    finally:
        job.clean_up()
    printed = job.output.read_text()
    assert "(1 of 2): measured before, not again" in printed and "weights equal the model's files" in printed
    first, second = sorted(results.glob("*/bench.json"), key=lambda path: path.stat().st_mtime)
    assert [task.right for task in read_result(first).tasks] == [task.right for task in read_result(second).tasks]
    expected = tokens_of(whole_job.run_dir / "store.db", "eval-after")
    assert len(expected) == HELD_OUT
    for result in (first, second):
        assert tokens_of(result.with_name("store.db"), ROLLOUT) == expected, "the same weights, by other ways"
    store = Store(f"sqlite:///{second.with_name('store.db')}", read_only=True)
    versions = {s.version for t in store.groups.trajectories(ROLLOUT) for turn in t.turns for s in turn.spans}
    store.close()
    assert versions == {FROM_FILES}
    assert not second.with_name("model").exists(), "the converted model is removed once it is measured"
    comparison = json.loads((tmp_path / "bench" / "bench" / "results.json").read_text())
    assert [model["tasks"] for model in comparison["models"]] == [HELD_OUT, HELD_OUT]
    assert (tmp_path / "bench" / "bench" / "bench.html").is_file()
