"""``megarl bench``: runs a separate job for each model in turn, and compares their counts on one page."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from megarl.buffer.store import sqlite_file
from megarl.config import Config, to_dict
from megarl.config.algorithms import AlgorithmConfig
from megarl.config.job import BufferConfig
from megarl.config.schema import (
    CriticConfig,
    ModelConfig,
    ParallelConfig,
    ReferenceConfig,
    RewardModelConfig,
    TrainerConfig,
)
from megarl.core.durable import write_text
from megarl.core.errors import ConfigError, InputError, JobError
from megarl.explore.bench import RESULT, read_result
from megarl.run.checks.job import SPLIT, check, check_place
from megarl.run.launch.job import UNFINISHED, run
from megarl.run.launch.subjects import Subject, short_names, subject_of
from megarl.run.nodes import gpu_state
from megarl.run.nodes.fit import planned as described_plan
from megarl.run.nodes.node import find
from megarl.run.nodes.plan import NodeInfo
from megarl.run.process.process import ForkServers
from megarl.run.report.bench import Measured, table, write_bench
from megarl.run.run_dir.changes import FREE, Change, changes, described, is_in
from megarl.run.run_dir.prepare import no_bytecode, prepare_data
from megarl.run.run_dir.resume import is_finished
from megarl.run.run_dir.rows import read_split

log = logging.getLogger(__name__)

SETTINGS = "settings.json"
MODEL = "model.json"
MEASURED = ("model", "trainer.seed", "taskset", "rollout", "evaluation", "reward")
"""Settings, and groups of settings, that answers and verdicts depend on, except ``changes.FREE``."""
OF_NO_ROW = (
    "model.path",
    "model.router",
    "taskset.date",
    *(f"taskset.{name}" for name in ("train", "warm_start", "expert")),
)


class _Planned(NamedTuple):
    subject: Subject
    config: Config
    """Settings of the model's job."""

    @property
    def folder(self) -> Path:
        return Path(self.config.run.dir)


def run_bench(models: Sequence[str], config: Config, servers: ForkServers | None, *, check_only: bool) -> int:
    """Measure the unmeasured models, one after another; write the comparison of all measured ones.

    Returns:
        0 if all are measured, 1 if one failed (the others are still measured), 130 after a stop.

    Raises:
        InputError: settings, rows or a model are invalid; raised before any process starts.
    """
    if find().nodes > 1:
        raise ConfigError("a bench runs on one machine; start it without the launcher of several nodes")
    folder = Path(config.run.dir)
    check_place(folder)
    base = config_of_bench(config, folder)
    planned = [_Planned(subject, _config_of(base, subject)) for subject in _subjects(models)]
    _check_same_settings(base, folder)
    for each in planned:
        _check_same_model(each)
    left = [each for each in planned if not is_finished(each.config, each.folder)]
    with no_bytecode() if check_only else nullcontext():
        _prepare(base, folder, left, check_only=check_only)
    if check_only:
        here = NodeInfo(0, "", "all", len(gpu_state.visible()))
        log.info("of each model in turn: %s", described_plan(planned[0].config, [here]))
        log.info("the settings, rows and models fit; nothing was started or written")
        return 0
    status = _run_all(planned, servers)
    names = short_names([each.subject for each in planned])
    measured = [
        Measured(name, str(each.subject.path), read_result(each.folder / RESULT))
        for name, each in zip(names, planned, strict=True)
        if is_finished(each.config, each.folder)
    ]
    if measured:
        page = write_bench(folder / "bench", base, measured)
        log.info("%s\n\npage: %s\nnumbers: %s", table(measured), page, page.with_name("results.json"))
    return status


def _subjects(models: Sequence[str]) -> list[Subject]:
    found = [subject_of(word) for word in models]
    slugs = [subject.slug for subject in found]
    if twice := [subject.name for subject in found if slugs.count(subject.slug) > 1]:
        raise ConfigError(f"MODEL {twice[0]} is given twice; give each model once")
    return found


_OF_ENGINES = ("path", "dtype", "head_dtype", "min_image_pixels", "max_image_pixels")
"""Settings of ``model`` that engines use."""


def config_of_bench(config: Config, folder: Path) -> Config:
    """Return the settings of a bench in ``folder``, without the trainer's: its grid and sizes must not refuse a
    model."""
    day = config.taskset.date or _noted(folder).get("date") or date.today().isoformat()
    trainer = TrainerConfig(seed=config.trainer.seed, verify_checkpoints=config.trainer.verify_checkpoints, trackers=[])
    return replace(
        config,
        run=replace(config.run, mode="bench"),
        model=replace(ModelConfig(), **{name: getattr(config.model, name) for name in _OF_ENGINES}),
        parallel=ParallelConfig(backend=config.parallel.backend),
        algorithm=AlgorithmConfig(group_size=max(config.evaluation.samples, 2)),  # determines the explorer's capacity
        reference=ReferenceConfig(),
        critic=CriticConfig(),
        reward_model=RewardModelConfig(),
        teachers={},
        trainer=trainer,
        rollout=replace(config.rollout, placement="separate"),
        taskset=replace(config.taskset, date=day),
        buffer=BufferConfig(),
    )


def _config_of(base: Config, subject: Subject) -> Config:
    """Return the settings of a model's job: with a separate directory and store, and the common rows."""
    folder = Path(base.run.dir) / "models" / subject.slug
    store = base.store
    if sqlite_file(store.url) is not None:
        store = replace(store, url=f"sqlite:///{folder}/store.db")
    return replace(
        base,
        run=replace(base.run, dir=str(folder)),
        model=replace(base.model, path=str(subject.hf_path(folder))),
        store=store,
    )


def _prepare(base: Config, folder: Path, left: Sequence[_Planned], *, check_only: bool) -> None:
    """Make missing rows and HF checkpoints, and check every job except the first, which its start checks."""
    if not check_only:
        prepare_data(base)
        _note_settings(base, folder)
    for each in left:
        if not check_only:
            each.folder.mkdir(parents=True, exist_ok=True)
            each.subject.convert(each.folder, each.config.model.dtype)
            write_text(each.folder / MODEL, json.dumps(_identity(each.subject), indent=1))
    for number, each in enumerate(left):
        if check_only and not each.subject.is_hf:
            log.info("%s: to be converted first; its model is checked then", each.subject.name)
        elif check_only or number:
            try:
                check(each.config, dry=check_only)
            except InputError as error:
                raise type(error)(f"MODEL {each.subject.name}: {error}") from error
            log.info("%s fits", each.subject.name)


def _run_all(planned: Sequence[_Planned], servers: ForkServers | None) -> int:
    status = 0
    for number, each in enumerate(planned, 1):
        name = f"{each.subject.name} ({number} of {len(planned)})"
        if is_finished(each.config, each.folder):
            log.info("%s: measured before, not again", name)
            each.subject.clean_up(each.folder)  # a kill may have left converted files
            continue
        log.info("%s: in %s", name, each.folder)
        try:
            code = run(each.config, servers)
        except (JobError, InputError, OSError) as error:
            log.error("%s: %s", each.subject.name, error)
            code = 1
        if code == 0:
            each.subject.clean_up(each.folder)
        if code == UNFINISHED:
            return UNFINISHED
        status = max(status, code)
    return status


def _check_same_model(each: _Planned) -> None:
    """Raise ConfigError if the files of a model differ from the measured ones."""
    path = each.folder / MODEL
    if not path.is_file():
        return
    noted = json.loads(path.read_text())
    if noted != _identity(each.subject):
        raise ConfigError(
            f"MODEL {each.subject.name}: its files have changed since {each.folder} was begun; remove that folder to "
            "measure it again, or take another run.name"
        )


def _identity(subject: Subject) -> dict[str, str]:
    added = {} if subject.adapter is None else {"adapter": str(subject.adapter)}
    return {"path": str(subject.path), **added, "files": subject.identity()}


def _check_same_settings(base: Config, folder: Path) -> None:
    """Raise ConfigError if the settings differ from those of the existing answers."""
    noted = _noted(folder)
    if noted and (changed := [c for c in changes(noted["settings"], _measured(base)) if _counts(c)]):
        raise ConfigError(
            f"run.dir={folder} holds a bench with other settings: {described(changed)}; take another run.name, or set "
            "them back"
        )


def _note_settings(base: Config, folder: Path) -> None:
    """Record the settings and rows of the bench. Raises ConfigError if the rows have changed."""
    rows = hashlib.blake2b(repr(list(read_split(base, SPLIT))).encode(), digest_size=16).hexdigest()
    noted = _noted(folder)
    if noted and noted["rows"] != rows:
        raise ConfigError(
            f"run.dir={folder} holds a bench on other rows than taskset.eval has now; take another run.name, or put "
            "them back"
        )
    values = {"settings": _measured(base), "rows": rows, "date": base.taskset.date}
    (folder / "bench").mkdir(parents=True, exist_ok=True)
    write_text(folder / "bench" / SETTINGS, json.dumps(values, indent=1))


def _noted(folder: Path) -> Mapping[str, Any]:
    path = folder / "bench" / SETTINGS
    try:
        noted: Mapping[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read ({error}); remove {folder} to begin again") from error
    return noted


def _measured(config: Config) -> dict[str, Any]:
    """Return the settings as they are after a round trip through JSON."""
    found: dict[str, Any] = json.loads(json.dumps(to_dict(config)))
    return found


def _counts(change: Change) -> bool:
    """Return True for a setting that answers or verdicts depend on."""
    name = change.setting
    free = is_in(name, FREE) and not is_in(name, ["evaluation"])
    return is_in(name, MEASURED) and not free and not is_in(name, OF_NO_ROW)
