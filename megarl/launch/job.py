"""A training job from its settings: check everything, prepare, run, report."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from megarl.checkpoint.state import latest, read_state
from megarl.config import Config
from megarl.launch.checks import check
from megarl.launch.resume import check_store_of_run, is_finished
from megarl.launch.supervisor import own_run_dir, run_job
from megarl.schema import Task
from megarl.store import Store

log = logging.getLogger(__name__)


def run(config: Config) -> int:
    """Run the job to its end; exit status 0 when it finished, 130 when it was stopped and can be resumed."""
    run_dir = Path(config.run.dir)
    start = time.monotonic()
    with own_run_dir(run_dir) as lock:
        tasks = check(config, mend=True)
        if is_finished(config, run_dir):
            log.info("%s is finished; raise trainer.steps to go on, or take another run.name to begin anew", run_dir)
        else:
            _fill_store(config, tasks)
            run_job(config, lock)
        # A rank that was told to end, by whomever, ends in order: only the run itself says whether it is finished.
        finished = is_finished(config, run_dir)
        if finished:  # its report too, which may not have been written when it ended
            from megarl.report.html import summary, write_report

            write_report(run_dir)
            log.info("%s", summary(run_dir))
            log.info("whole job:     %.0f s", time.monotonic() - start)
    if not finished:
        log.warning("stopped; run the same command again to resume")
    return 0 if finished else 130


def _fill_store(config: Config, tasks: Mapping[str, list[Task]]) -> None:
    """Tasks, and nothing that an earlier attempt asked for and the newest checkpoint knows nothing of.

    Before the explorer starts: it would claim what is still open, while no engine has the weights or even answers.
    """
    store = Store(config.store.url)
    check_store_of_run(config, Path(config.run.dir), store)
    found = latest(Path(config.run.dir) / "checkpoints")
    store.discard_rollouts(0 if found is None else int(read_state(found)["step"]))
    for split, rows in tasks.items():
        if store.tasks(split) != rows:
            store.add_tasks(split, rows)
    store.open_job()
    store.close()
