"""Makes a run's missing files: its tasks, and a model from scratch; for a check in a temporary folder.

Both record the settings that they were made with. Other settings make them again, unless a run has begun with them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from megarl.config import Config, hub, load_resolved
from megarl.core.durable import replace_directory
from megarl.core.errors import CheckpointError, ConfigError, InputError
from megarl.core.schema import Preference, Task
from megarl.run.run_dir.changes import Change, changes, described, has_checkpoints
from megarl.run.run_dir.owner import check_writable
from megarl.run.run_dir.rows import (
    kind_of_rows,
    lengths_with_images,
    needs_expert_rows,
    processor_of,
    read_split,
    splits_of,
)
from megarl.tasks import ChatTokenizer, generate, place_of_row, read_recipe, recipe, sources_of
from megarl.tasks.image_rows import PLACEHOLDER
from megarl.tasks.templates.template import writes_date

log = logging.getLogger(__name__)

MODEL_RECIPE = ".from_scratch.json"
"""Hidden file, so that it is not copied into an exported checkpoint."""


def prepare_data(config: Config, *, verbose: bool = False) -> None:
    """Generate the taskset's files that are missing or were made with other settings, if it names a generator. Expert
    rows are generated only for an algorithm that needs them.

    Raises:
        ConfigError: a file is missing and there is no generator; the generator or an option is unknown; or a file made
            with other settings belongs to a run that has begun, or is outside of the run's directory.
    """
    missing = missing_data(config)
    write_data(config, missing)
    for split, path in _files(config).items() if verbose else ():
        done = "written" if split in missing else "kept"
        if done == "kept" and config.taskset.generate is not None and read_recipe(path) is None:
            done = "kept, a file of your own"
        log.info("%s: %d rows in %s (%s)", split, len(read_split(config, split)), path, done)


def missing_data(config: Config) -> dict[str, Path]:
    """Return the taskset's files to generate, by split: missing ones, and files made with other settings.

    Raises ConfigError as ``prepare_data``.
    """
    taskset, files = config.taskset, _files(config)
    missing = {split: path for split, path in files.items() if not path.exists()}  # may be a folder of Harbor tasks
    missing_sources = [
        f"taskset.{split}.{name}.path={source.path}"
        for split in splits_of(config)
        if not isinstance(getattr(taskset, split), str)
        for name, source in sources_of(taskset, split).items()
        if not Path(source.path).exists()
    ]
    if missing_sources:
        raise ConfigError(f"{', '.join(missing_sources)}: no such file; files of several sources are not generated")
    if taskset.generate is None:
        if missing:
            names = ", ".join(f"taskset.{split}={path}" for split, path in missing.items())
            raise ConfigError(f"{names}: no such file; give the file, or set taskset.generate")
        return {}
    stale: dict[Change, None] = {}
    for split, path in files.items():
        wanted = recipe(
            taskset.generate,
            _sizes(config),
            seed=taskset.seed,
            options=taskset.options,
            kind=kind_of_rows(config),
            split=split,
        )
        made_with = read_recipe(path) if path.is_file() else None
        if made_with is not None and (changed := list(changes(made_with, wanted))):
            _check_replaceable(config, path, changed, "taskset.generate=null")
            missing[split] = path
            stale |= dict.fromkeys(changed)
    if stale:
        log.info("the tasks were made with other settings: %s", described(stale))
    return missing


def write_data(config: Config, files: Mapping[str, Path]) -> None:
    """Generate the rows of these splits."""
    taskset, kind = config.taskset, kind_of_rows(config)
    if files and taskset.generate is not None:
        log.info("writing %s of %s: %s", kind, taskset.generate, ", ".join(files))
        generate(taskset.generate, files, _sizes(config), seed=taskset.seed, options=taskset.options, kind=kind)


def _files(config: Config) -> dict[str, Path]:
    taskset = config.taskset
    named = {split: getattr(taskset, split) for split in splits_of(config)}
    if config.run.mode != "bench":
        named["warm_start"] = taskset.warm_start
    if needs_expert_rows(config):
        named["expert"] = taskset.expert
    return {split: Path(path) for split, path in named.items() if isinstance(path, str)}


def _sizes(config: Config) -> dict[str, int]:
    taskset = config.taskset
    sizes = {"train": taskset.train_size, "eval": taskset.eval_size, "warm_start": taskset.warm_start_size}
    return sizes | ({"expert": taskset.expert_size} if "expert" in _files(config) else {})


def prepare_model(config: Config) -> None:
    """Write a randomly initialised HF checkpoint to ``model.path`` if it is missing and the settings describe one.

    Raises:
        ConfigError: there is no checkpoint and ``model.from_scratch`` is not set, or it cannot be made here; or the
            folder of a checkpoint to make again has other files.
    """
    if needs_model(config):
        write_model(config, Path(config.model.path))


def needs_model(config: Config) -> bool:
    """Return True if ``model.path`` must be made: it is missing, or was made with other settings.

    Raises ConfigError as ``prepare_model``.
    """
    path, wanted = Path(config.model.path), config.model.from_scratch
    if path.exists() and not (path / "config.json").is_file():
        raise ConfigError(
            f"model.path={path} exists but has no config.json; give an HF checkpoint, or a path that does not exist yet"
        )
    if not path.exists() and (wanted is None or hub.is_name(config.model.path)):
        fix = (
            hub.advice("model.path", config.model.path)
            or "give an HF checkpoint, or describe one in model.from_scratch"
        )
        raise ConfigError(f"model.path={path} has no config.json; {fix}")
    if not path.exists():
        if not _is_of_run(config, path):
            raise ConfigError(
                f"model.path={path} does not exist, and is outside run.dir={config.run.dir}, where models from scratch "
                "are made; correct the path of your model, or leave model.path out to train a new, random one"
            )
        return True
    if wanted is None or has_checkpoints(Path(config.run.dir)) or not (path / MODEL_RECIPE).is_file():
        return False  # keep the model of a run that has begun, and a model without recipe, which is the user's
    changed = list(changes(_read_model_recipe(path), model_recipe(config, _texts(config))))
    if changed:
        _check_replaceable(config, path, changed, "model.from_scratch=null")
        log.info("the model was made with other settings: %s", described(changed))
    return bool(changed)


def write_model(config: Config, path: Path) -> None:
    """Make the model from scratch that the settings describe, replacing the contents of ``path``.

    Raises:
        ConfigError: the model cannot be made, or not written there.
    """
    wanted, texts = config.model.from_scratch, _texts(config)
    assert wanted is not None, "needs_model has seen it"
    log.info("making a %s model from scratch in %s", wanted.model_type, path)
    from megarl.learn.models.from_scratch import create  # the import takes seconds

    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        create(temporary, wanted, texts[0], config.trainer.seed, texts[1])
        (temporary / MODEL_RECIPE).write_text(json.dumps(model_recipe(config, texts), indent=1))
        _check_only(path, {entry.name for entry in temporary.iterdir()})
        replace_directory(temporary, path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.path={path} cannot be written ({error}); make room or give another path") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def make(config: Config) -> Config:
    """Make missing rows and a missing model, and return the settings with values derived from them.

    Raises as ``prepare_data``, ``prepare_model`` and ``with_prompt_limit``.
    """
    prepare_data(config)
    prepare_model(config)
    return with_prompt_limit(config)


def with_prompt_limit(config: Config) -> Config:
    """Return the settings with ``rollout.max_prompt_tokens`` and ``taskset.date``. A run keeps both from its start. A
    new run takes the limit from its rows, and today's date if the model's chat template writes the date.

    Raises:
        DataError, CheckpointError: rows or tokenizer cannot be read.
    """
    config = with_limit_of_run(config)
    if config.taskset.date is None and writes_date(Path(config.model.path)):
        config = replace(config, taskset=replace(config.taskset, date=date.today().isoformat()))
        log.info("taskset.date=%s: the model's chat template writes the day into prompts", config.taskset.date)
    if config.rollout.max_prompt_tokens is not None or kind_of_rows(config) != "tasks":
        return config
    tokenizer = ChatTokenizer.of(config)
    longest, place = 0, ""
    for split in splits_of(config):
        rows, place_of = read_split(config, split), partial(place_of_row, config.taskset, split)
        try:
            processor = processor_of(config, [rows])
        except CheckpointError:
            # Later checks name the cause, e.g. a model that takes text only.
            processor, rows = None, [row for row in rows if not row.images]
        lengths = lengths_with_images(rows, tokenizer, processor, path=place_of)
        for row, length in zip(rows, lengths, strict=True):
            if length > longest:
                longest, place = length, place_of(row)
    log.info("rollout.max_prompt_tokens=%d, the longest prompt: %s", longest, place)
    return replace(config, rollout=replace(config.rollout, max_prompt_tokens=longest))


def with_limit_of_run(config: Config) -> Config:
    """Return the settings with missing ``rollout.max_prompt_tokens`` and ``taskset.date`` filled in from the run in
    ``run.dir``, if it has begun."""
    resolved = Path(config.run.dir) / "resolved.json"
    rollout, taskset = config.rollout, config.taskset
    if None not in (rollout.max_prompt_tokens, taskset.date) or not (
        has_checkpoints(resolved.parent) and resolved.is_file()
    ):
        return config
    begun = load_resolved(resolved)
    if rollout.max_prompt_tokens is None:
        rollout = replace(rollout, max_prompt_tokens=begun.rollout.max_prompt_tokens)
    return replace(config, rollout=rollout, taskset=replace(taskset, date=taskset.date or begun.taskset.date))


def _texts(config: Config) -> tuple[list[str], str]:
    """Return the prompts that a tokenizer is trained on, and the characters that only their answers have."""
    rows = read_split(config, "train" if config.taskset.warm_start is None else "warm_start")
    prompts = [_text(row, m.get("content") or "") for row in rows for m in row.prompt]
    answers = (row.chosen + row.rejected if isinstance(row, Preference) else row.response or "" for row in rows)
    return prompts, "".join(sorted(set().union(*answers) - set().union(*prompts)))


def _text(row: Task | Preference, content: str) -> str:
    """Return the content without image placeholders, which the model does not read as text."""
    return content.replace(PLACEHOLDER, "") if row.images else content


def model_recipe(config: Config, texts: tuple[list[str], str]) -> dict[str, Any]:
    """Return the recipe of a generated model: its settings by name, the seed, and a digest of its tokenizer's training
    texts."""
    assert config.model.from_scratch is not None
    values = asdict(config.model.from_scratch)
    tower = values.pop("vision")
    if config.model.from_scratch.sees:
        values |= {f"vision.{name}": value for name, value in tower.items()}
    settings = {f"model.from_scratch.{name}": value for name, value in values.items()}
    return settings | {"trainer.seed": config.trainer.seed, "its tokenizer's texts": _digest([*texts[0], texts[1]])}


def _is_of_run(config: Config, path: Path) -> bool:
    """Return True if a path is in the run's directory."""
    return path.resolve().is_relative_to(Path(config.run.dir).resolve())


def _check_replaceable(config: Config, path: Path, changed: list[Change], kept_by: str) -> None:
    """Refuse to replace generated files that a run depends on. ``kept_by``: the setting that accepts them as they are.

    Raises:
        ConfigError: a run has begun with the file, or it is outside of the run's directory.
    """
    run_dir = Path(config.run.dir)
    if has_checkpoints(run_dir):
        raise ConfigError(
            f"{path} was made with other settings: {described(changed)}; the run in {run_dir} was trained on it. Take "
            f"another run.name, set what it was made with, or remove {run_dir}"
        )
    if not _is_of_run(config, path):
        raise ConfigError(
            f"{path} was made with other settings: {described(changed)}; it is outside run.dir={run_dir}, so other "
            f"runs may use it. Set {kept_by} to use it as it is (experiment=own does so for a model and rows of your "
            "own), or give another path"
        )


def _check_only(path: Path, names: Collection[str]) -> None:
    """Raise ConfigError if a model's directory has files besides those that making a model writes."""
    other = sorted({entry.name for entry in path.iterdir()} - set(names)) if path.exists() else []
    if other:
        raise ConfigError(
            f"model.path={path} has {other[0]}, which was not made with it; move it away to make the model again"
        )


def _read_model_recipe(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((path / MODEL_RECIPE).read_text())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _digest(texts: list[str]) -> str:
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=8).hexdigest()


@contextmanager
def scratch(config: Config) -> Iterator[Config]:
    """Yield the settings with temporary paths for missing files. Errors raised inside the block name the real paths.

    Raises:
        ConfigError: as ``prepare.make``; or a missing file could not be written to its real path.
    """
    with tempfile.TemporaryDirectory(prefix="megarl-check-") as folder:
        real: dict[str, str] = {}
        try:
            yield with_prompt_limit(_made_in(Path(folder), config, real))
        except InputError as error:
            text = str(error)
            for temporary, path in real.items():
                text = text.replace(temporary, path)
            raise type(error)(text) from error


def _made_in(folder: Path, config: Config, real: dict[str, str]) -> Config:
    """Make missing files in ``folder``; record temporary path -> real path in ``real``."""
    missing = missing_data(config)
    files = {split: folder / split / path.name for split, path in missing.items()}
    for split, path in missing.items():
        check_writable(f"taskset.{split}={path}", path.parent)
        real[str(files[split])] = str(path)
    write_data(config, files)
    moved: dict[str, Any] = {split: str(path) for split, path in files.items()}
    config = replace(config, taskset=replace(config.taskset, **moved))
    if config.taskset.process is not None and config.reward.judge.cache is not None:  # its function may ask a model
        judge = replace(config.reward.judge, cache=str(folder / "judge_cache.db"))
        config = replace(config, reward=replace(config.reward, judge=judge))
    if needs_model(config):
        path = Path(config.model.path)
        check_writable(f"model.path={path}", path.parent)
        real[str(folder / "model")] = str(path)
        write_model(config, folder / "model")
        config = replace(config, model=replace(config.model, path=str(folder / "model")))
    return config


@contextmanager
def no_bytecode() -> Iterator[None]:
    """Prevent ``__pycache__`` next to a user's files, in this process and its children."""
    name = "PYTHONDONTWRITEBYTECODE"
    before, in_environment = sys.dont_write_bytecode, os.environ.get(name)
    sys.dont_write_bytecode, os.environ[name] = True, "1"
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
        if in_environment is None:
            del os.environ[name]
        else:
            os.environ[name] = in_environment
