"""Checks of a run directory before a resume: complete files, unfinished, the same settings."""

from __future__ import annotations

import itertools
import logging
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.buffer.store import Store, sqlite_file
from megarl.buffer.store.database import is_pending, shown
from megarl.config import Config, load_resolved
from megarl.config.derived import ROLES
from megarl.core.durable import exists, write_text
from megarl.core.errors import CheckpointError, ConfigError
from megarl.core.schema import Task
from megarl.explore.bench import RESULT
from megarl.learn import algorithms
from megarl.run.run_dir.changes import (
    Change,
    changes_since_last_start,
    described,
    has_checkpoints,
    is_in,
    listed,
    of_any_teacher,
)
from megarl.run.run_dir.owner import run_id
from megarl.run.run_dir.rows import place
from megarl.weights.checkpoint.formats.dist import COMMON, DistFiles, keeps_common_state
from megarl.weights.checkpoint.formats.hf_source import HF_FOLDER
from megarl.weights.checkpoint.training.disk_space import writing
from megarl.weights.checkpoint.training.manifest import (
    LATEST,
    MANIFEST,
    PREFIX,
    fault_of_files,
    finished,
    in_order,
    latest,
    read_state,
    recover,
    unfounded_latest,
)

log = logging.getLogger(__name__)

SIZES = ("parallel.dp", "rollout.replicas", *(f"{role}.parallel.dp" for role in (*ROLES, "teachers.*")))
"""Settings that an attempt on fewer nodes may reduce (``run/nodes/fit.py``)."""
FIXED = ("model", "taskset")
"""Groups of settings that a run must keep; see also ``_needs_another_past``."""


def is_finished(config: Config, run_dir: Path) -> bool:
    """Return True if the run has finished with these settings."""
    if config.run.mode == "bench":
        return (run_dir / RESULT).is_file()
    found = latest(run_dir / "checkpoints")
    if found is None or not (run_dir / "hf" / "config.json").is_file():
        return False
    saved = read_state(found)
    if saved["phase"] != "rl" or int(saved["step"]) < config.trainer.steps:
        return False
    if is_pending(config.store.url):
        return False  # checked again after the job has started its store
    path = sqlite_file(config.store.url)
    if path is not None and not (path.is_file() and path.stat().st_size):
        return False
    store = Store(config.store.url, read_only=True, outage_s=config.store.outage_s)
    try:
        # The job is closed last: the files may be of an earlier end at fewer steps.
        return store.journal.job_state() == "closed"
    finally:
        store.close()


def check_settings_of_run(config: Config, run_dir: Path) -> None:
    """Refuse changed settings of a run's model and tasks, of roles without a model in its checkpoints, and any change
    of a finished run.

    Other changes of training need ``run.allow_changes``; ``FREE`` settings may change, and all accepted changes are
    logged.

    Raises:
        ConfigError: settings differ that must not, or are not confirmed; names both values.
    """
    if not has_checkpoints(run_dir):
        return
    changed = changes_since_last_start(config, run_dir)
    found = latest(run_dir / "checkpoints")
    has_trained = _has_trained(run_dir)
    begun = found is not None and int(read_state(found)["step"]) > 0  # the roles' models are made at step 0
    fixed = [c for c in changed if c.setting.partition(".")[0] in FIXED or (begun and _needs_another_past(c))]
    fix = "take another run.name (or run.dir, where it is set), or remove the directory"
    if fixed:
        lost = "" if has_trained else " (it has trained no step, so nothing is lost)"
        raise ConfigError(f"run.dir={run_dir} holds a run with other settings: {described(fixed)}; {fix}{lost}")
    if any(of_any_teacher(change.setting) not in SIZES for change in changed) and is_finished(config, run_dir):
        raise ConfigError(
            f"run.dir={run_dir} holds a finished run with other settings: {described(changed)}; {fix} "
            "(or raise trainer.steps to train that run further)"
        )
    of_training = [c for c in changed if c.trains()]
    unconfirmed = [c for c in of_training if not is_in(c.setting, config.run.allow_changes)]
    if unconfirmed and has_trained:
        raise ConfigError(
            f"run.dir={run_dir} holds a run that was trained with other settings: {', '.join(listed(unconfirmed))}; "
            "set them back, take another run.name (or run.dir), or confirm them with "
            f"run.allow_changes=[{','.join(c.setting for c in of_training)}]"
        )
    if changed:
        log.warning("the run in %s goes on with other settings: %s", run_dir, described(changed))


def _has_trained(run_dir: Path) -> bool:
    """Return True unless the run's only checkpoint is of step 0, without a warm start before it."""
    found = latest(run_dir / "checkpoints")
    if found is None or int(read_state(found)["step"]) > 0:
        return True
    resolved = run_dir / "resolved.json"
    return not resolved.is_file() or load_resolved(resolved).trainer.warm_start.steps > 0


def _needs_another_past(change: Change) -> bool:
    """Return True if the run's checkpoints lack the state that the new value needs."""
    if change.setting == "reference.refresh":
        # Checkpoints have the last refreshed reference only if a number of steps was set; the reference of step 0 is
        # out of date.
        return change.new != "every_iteration" and not (isinstance(change.old, int) and isinstance(change.new, int))
    if change.setting == "algorithm.name":
        try:
            old, new = (algorithms.get(str(name)) for name in (change.old, change.new))
        except ConfigError:
            return False  # the file of an algorithm that is no longer used
        if (old.offline, "actor" in old.roles) != (new.offline, "actor" in new.roles):
            return True
        return "critic" in new.roles - old.roles
    return False


def set_aside_damaged(
    run_dir: Path, *, rename: bool = True, digests: bool = True, stopping: Callable[[], bool] = lambda: False
) -> None:
    """Rename the newest checkpoints if their files are damaged, so that the previous checkpoint is the latest.

    Each rename is logged. First, a checkpoint whose replacement was killed gets its name back.

    Checkpoints of the warm start are checked only if there is no later one. ``digests``: see
    ``trainer.verify_checkpoints``.

    Raises:
        CheckpointError: no checkpoint is whole, or the only one is gone; then nothing is renamed.
        JobError: ``stopping`` returned True before all files were read; then nothing is renamed.
    """
    folder = run_dir / "checkpoints"
    _set_aside_damaged(folder, rename, digests, stopping)
    if latest(folder) is None:
        _set_aside_damaged(folder / "warm_start", rename, digests, stopping)


def _set_aside_damaged(folder: Path, rename: bool, digests: bool, stopping: Callable[[], bool]) -> None:
    for checkpoint in recover(folder) if rename else []:
        log.warning("%s was being saved again when its job was killed: the old one is restored", checkpoint)
    candidates = in_order(folder)
    damaged: list[tuple[Path, str]] = []
    while candidates and (fault := _fault(candidates[-1], digests, stopping)) is not None:
        damaged.append((candidates.pop(), fault))
    if damaged and not candidates:
        faults = "; ".join(f"{path}: {fault}" for path, fault in damaged)
        raise CheckpointError(
            f"no checkpoint can be read: {faults}; put its files back, or remove {folder} to begin again"
        )
    for path, fault in damaged:
        log.warning("%s is damaged and does not count: %s; the run goes on from %s", path, fault, candidates[-1])
        if rename:
            _set_aside(path, "damaged")
    if damaged and rename:
        _name_latest(candidates[-1])
    elif not damaged and (fault := unfounded_latest(folder)) is not None:
        if not candidates:
            raise CheckpointError(f"{fault}, and there is no other; put it back, or remove {folder} to begin again")
        log.warning("%s; the run goes on from %s", fault, candidates[-1])


def _set_aside(checkpoint: Path, why: str) -> None:
    """Rename to ``<why>_<name>``, with a number if that name exists."""
    names = (f"{why}_{checkpoint.name}{f'.{number}' if number > 1 else ''}" for number in itertools.count(1))
    checkpoint.rename(next(path for name in names if not exists(path := checkpoint.with_name(name))))


def _name_latest(checkpoint: Path) -> None:
    """Record this checkpoint as the latest of its folder. Raises DiskFullError."""
    with writing(checkpoint.parent / LATEST):
        write_text(checkpoint.parent / LATEST, checkpoint.name.removeprefix(PREFIX))


def _fault(checkpoint: Path, digests: bool, stopping: Callable[[], bool]) -> str | None:
    """Return the reason why a checkpoint cannot be loaded, found from its files; None if there is none."""
    if not (checkpoint / MANIFEST).is_file():
        return f"{checkpoint / MANIFEST} is missing"
    models = {"actor"} | {path.name for path in checkpoint.iterdir() if path.is_dir() and path.name != HF_FOLDER}
    try:
        if (fault := fault_of_files(checkpoint, digests=digests, stopping=stopping)) is not None:
            return fault
        for model in sorted(models):
            DistFiles(checkpoint / model).close()
    except (CheckpointError, OSError) as error:
        return str(error)
    commons = [path / COMMON for model in sorted(models) if not keeps_common_state(path := checkpoint / model)]
    broken = [str(common) for common in commons if not zipfile.is_zipfile(common)]
    return f"{broken[0]} is missing or not whole" if broken else None


def check_owner_of_store(config: Config, run_dir: Path, store: Store) -> None:
    """Check, before the first write, that a run with checkpoints goes on with its own store, or one without a recorded
    owner.

    Raises:
        ConfigError: the store is another run's, which would lose data.
    """
    owner = store.journal.run_id()
    if owner is not None and owner != run_id(run_dir) and has_checkpoints(run_dir):
        raise ConfigError(
            f"store.url={shown(config.store.url)} is the store of another run (run {owner}; {run_dir / 'run_id'} has "
            f"{run_id(run_dir)}); give the URL that this run had before"
        )


def check_store_of_run(config: Config, run_dir: Path, store: Store) -> None:
    """Check that the store has the steps of the newest checkpoint. If it has lost the last ones, e.g. in a power cut,
    rename the checkpoints after the newest one that it covers.

    Raises:
        ConfigError: the store covers no checkpoint: it was removed or is another run's, and the report would be
            incomplete.
    """
    candidates = finished(run_dir / "checkpoints")
    steps = {path: int(read_state(path)["step"]) for path in candidates}
    recorded = {step for step, _ in store.journal.steps()}
    covered = [path for path in candidates if recorded.issuperset(range(1, steps[path] + 1))]
    if not candidates or candidates[-1] in covered:
        return
    newest, done = candidates[-1], steps[candidates[-1]]
    missing = sorted(set(range(1, done + 1)) - recorded)
    lacks = (
        f"knows nothing of {len(missing)} of the {done} steps that {newest} has behind it (the first is {missing[0]})"
    )
    if not covered or not steps[covered[-1]]:
        raise ConfigError(
            f"store.url={shown(config.store.url)} {lacks}: was the file removed or replaced? Put it back, or take "
            f"another run.name; the weights of the run so far are in {run_dir / 'checkpoints'}"
        )
    for path in candidates[candidates.index(covered[-1]) + 1 :]:
        _set_aside(path, "uncovered")
    _name_latest(covered[-1])
    log.warning(
        "THE RUN GOES BACK to %s: store.url=%s %s, as after a power cut. Later checkpoints are now named "
        "uncovered_%s*; if the store "
        "is not this run's, stop, put the right one in its place and give them their names back",
        covered[-1],
        shown(config.store.url),
        lacks,
        PREFIX,
    )


def check_rows_of_run(config: Config, store: Store, split: str, tasks: Sequence[Task]) -> None:
    """Check that the rows of a split match the store's groups. Changes of rows without a group are only logged.

    Raises:
        ConfigError: a row with groups has changed: responses would be shown, replayed and exported with other rows'
            prompts and ground truths.
    """
    changed, asked = store.tasks.changed(split, tasks)
    if asked:
        first = place(config, split, asked[0])
        raise ConfigError(
            f"run.dir={config.run.dir} holds responses to {len(asked)} rows that have changed or disappeared since; "
            f"the first is {first}. Put the rows back (or what taskset.process makes of them), or take another run.name"
        )
    if changed:
        log.warning(
            "taskset.%s: %d rows that the run has not used yet have changed or disappeared since its last start; the "
            "first is %s",
            split,
            len(changed),
            place(config, split, changed[0]),
        )
