"""Records that a person gives to a run: expert experiences and late rewards.

The first writes a file of trajectories without reward, the second reads it back with rewards.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megarl.buffer.store import AwaitingReward, ExpertExperience, GivenReward, Store
from megarl.config import Config, load_resolved
from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Reward
from megarl.rewards.verdict import NO_VERDICT, check_weights, to_verdict, weigh
from megarl.run.checks.inputs import ExpertCheck
from megarl.run.job_store import store_of_run
from megarl.run.run_dir.prepare import make
from megarl.run.run_dir.rows import RUN, from_source, needs_expert_rows, read_experts, read_run
from megarl.tasks import ChatTokenizer
from megarl.tasks.image_rows import with_inline_images, without_inline_images
from megarl.tasks.row_files import RowLocation, read_table

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


def write_awaiting_rows(config: Config, target: str) -> None:
    """Write a run's trajectories that await rewards to a jsonl file."""
    config = _of_run(config)
    with store_of_run(config.store.url, Path(config.run.dir), read_only=True) as store:
        count = write_awaiting(store, ChatTokenizer.of(config), Path(target))
    log.info("%s: %d responses await a reward", target, count)


def give_rewards(config: Config, sources: Sequence[str]) -> None:
    """Write the rewards of files into a run's store in one transaction.

    Raises:
        ConfigError, DataError: names file and row; nothing is written then.
    """
    config = _of_run(config)
    given = read_rewards([Path(source) for source in sources], config)
    with store_of_run(config.store.url, Path(config.run.dir)) as store:
        done = store.late.give(given)
    log.info("%d rewards written, %d groups are ready with them", done.written, done.ready)
    if done.left_out:
        group, index = done.left_out[0]
        log.warning(
            "%d rows left out, the first of %s[%d]: rewarded already, used by a step without, sampled again, or not "
            "in the store",
            len(done.left_out),
            group,
            index,
        )


def _of_run(config: Config) -> Config:
    """Return the settings that the run of ``config`` was started with. Raises ConfigError if there is no run."""
    resolved = Path(config.run.dir) / "resolved.json"
    if not resolved.is_file():
        raise ConfigError(f"run.dir={config.run.dir} has no run; name that whose responses await rewards (run.name)")
    return load_resolved(resolved)


WHICH = ("group_id", "index", "claim")
GIVEN = ("score", "acc", "status", "parts")
"""Columns of a reward: keys of verl's reward dict."""


def awaiting_rows(store: Store, tokenizer: ChatTokenizer) -> Iterator[dict[str, Any]]:
    """Yield the rows of trajectories that await a reward: their identity, and the data that a judge needs."""
    for part in store.late.awaiting():
        for each in part:
            yield _row(each, tokenizer)


def _row(each: AwaitingReward, tokenizer: ChatTokenizer) -> dict[str, Any]:
    task, trajectory = each.task, each.trajectory
    turns = [
        {"author": turn.author, "text": tokenizer.decode(turn.token_ids, special=turn.author != "model")}
        for turn in trajectory.turns[1:]
    ]
    return {
        "group_id": trajectory.group_id,
        "index": trajectory.index,
        "claim": each.claim,
        "data_source": task.data_source,
        "prompt": list(task.prompt),
        "ground_truth": task.ground_truth,
        "response": turns[-1]["text"],
        "turns": turns,
        "score": None,
    }


def write_awaiting(store: Store, tokenizer: ChatTokenizer, path: Path) -> int:
    """Write the rows to a jsonl file; return their number. Raises ConfigError for a file that already has scores."""
    if path.exists() and _has_scores(path):
        raise ConfigError(f"{path} has scores in it, which would be lost; give another file, or remove that one")
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in awaiting_rows(store, tokenizer):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def _has_scores(path: Path) -> bool:
    """Return True unless each row of a jsonl file awaits its score."""
    try:
        with path.open(encoding="utf-8") as file:
            return any(json.loads(line)["score"] is not None for line in file if line.strip())
    except (OSError, ValueError, KeyError, TypeError):
        return True


def read_rewards(paths: Sequence[Path], config: Config) -> list[GivenReward]:
    """Return the rewards of parquet or jsonl files, one per trajectory; rows with a null ``score`` are skipped.

    Raises:
        DataError: a row names no trajectory, its reward is invalid, or an earlier row has another reward for its
            trajectory.
    """
    check_weights(config.reward)
    found: dict[tuple[str, int, str], GivenReward] = {}
    for path in paths:
        names, rows = read_table(path, (*WHICH, *GIVEN))
        if lacking := [name for name in (*WHICH, "score") if name not in names]:
            raise DataError(
                f"{path}: no column {lacking[0]!r}; a row has group_id, index, claim and score, as `megarl data "
                "awaiting` writes them"
            )
        for i, row in enumerate(rows):
            if row.get("score") is None:
                continue
            given = _given(location := RowLocation(path, i), row, config)
            if found.setdefault((given.group_id, given.position, given.claim), given) != given:
                location.refuse("score", "the reward that an earlier row gives to the same response", row["score"])
    return list(found.values())


def _given(location: RowLocation, row: dict[str, Any], config: Config) -> GivenReward:
    group, index = row.get("group_id"), row.get("index")
    if not isinstance(group, str):
        location.refuse("group_id", "the id of a group", group)
    if not isinstance(index, int) or isinstance(index, bool):
        location.refuse("index", "the number of a response in its group", index)
    if not isinstance(row.get("claim"), str):
        location.refuse("claim", "the claim that `megarl data awaiting` wrote", row.get("claim"))
    try:
        verdict = to_verdict({name: row[name] for name in GIVEN if row.get(name) is not None})
    except (TypeError, ValueError) as error:
        location.refuse("score", f"a reward ({error})", row["score"])
    if verdict["status"] in NO_VERDICT:
        location.refuse("status", "ok or wrong", verdict["status"])
    found = weigh(verdict, {}, config.reward)
    return GivenReward(group, index, row["claim"], Reward(found["score"], found["status"], found["parts"]))
