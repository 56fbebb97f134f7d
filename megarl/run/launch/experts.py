"""Import of expert experiences into a run's store: ``megarl data import-experts``, and ``taskset.expert`` at a job's
start."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from megarl.buffer.store import ExpertExperience, Store
from megarl.config import Config
from megarl.core.errors import ConfigError
from megarl.run.checks.inputs import ExpertCheck
from megarl.run.job_store import store_of_run
from megarl.run.run_dir.prepare import make
from megarl.run.run_dir.rows import RUN, from_source, needs_expert_rows, read_experts, read_run
from megarl.tasks.image_rows import with_inline_images, without_inline_images

log = logging.getLogger(__name__)


def import_experts(config: Config, sources: Sequence[str], min_score: float) -> None:
    """Check the rows of all sources, then write the new ones into the run's store, in one transaction.

    Args:
        sources: Parquet, json or jsonl files of demonstrations, or ``run:DIR``.
        min_score: Minimum score of another run's trajectories.

    Raises:
        ConfigError, DataError: names file and row; nothing is written then.
    """
    config = make(config)
    check, found = ExpertCheck(config), list[tuple[str, list[ExpertExperience]]]()
    for source in sources:
        folder = Path(source.removeprefix(RUN))
        if source.startswith(RUN):
            rows = read_run(folder, min_score)
        else:
            rows = read_experts(from_source(config, source))
        check.rows(source, rows)
        found.append((source, rows))
    count = sum(len(rows) for _, rows in found)
    with (
        store_of_run(config.store.url, Path(config.run.dir)) as store,
        tqdm(total=count, desc="expert rows", unit=" rows", leave=False, disable=None, file=sys.stderr) as bar,
    ):
        done = store.experts.import_sources([(name, _stored(rows)) for name, rows in found], advance=bar.update)
        bar.close()
        for each in done:
            log.info(
                "%s: %d rows, %d new, %d already stored", each.source, each.given, each.added, each.given - each.added
            )
        log_counts(store)


def log_counts(store: Store) -> None:
    """Log the number of expert experiences of each import in the store."""
    for each in store.experts.imports():
        kind = "taskset.expert" if each.by_setting else f"import {each.number}"
        log.info("%s, %s: %d expert rows", kind, each.source, each.stored)
    log.info("%d expert rows in the store", store.experts.count())


def fill_experts(config: Config, store: Store) -> None:
    """Import ``taskset.expert`` at a job's start if the algorithm trains on expert rows; check earlier imports.

    Raises:
        ConfigError: the store has no expert rows.
        DataError: a row of an earlier import does not fit these settings.
    """
    if not needs_expert_rows(config):
        return
    source = config.taskset.expert
    rows = [] if source is None else _stored(read_experts(config))
    done = store.experts.replace_source(source or "taskset.expert=null", rows)
    if done is not None:
        data = {"source": done.source, "rows": done.given, "stored": done.stored}
        store.journal.record_event("supervisor", "experts", data)
    imports = [each for each in store.experts.imports() if not each.by_setting and each.stored]
    if imports:
        log_counts(store)
        check = ExpertCheck(config)
        for each in imports:
            found = [row for part in store.experts.read(each.number) for row in part]
            check.rows(each.source, [replace(row, task=without_inline_images(row.task)) for row in found])
    if not store.experts.count():
        raise ConfigError(
            f"algorithm.name={config.algorithm.name} needs expert rows, and the store has none; set taskset.expert to "
            "a file of rows with a response, or import some (megarl data import-experts)"
        )


def _stored(rows: Sequence[ExpertExperience]) -> list[ExpertExperience]:
    """Return the rows in the store's form, with their images inside the prompts."""
    return [replace(row, task=with_inline_images(row.task)) for row in rows]
