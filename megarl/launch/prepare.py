"""Makes what a run needs and does not have yet: its tasks, and a model from scratch.

Both carry the settings that they were made with. Other settings make them anew, unless a run is based on them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from megarl.config import Config
from megarl.durable import replace_directory
from megarl.errors import ConfigError
from megarl.launch.changes import Change, changes, described, has_checkpoints
from megarl.launch.rows import kind_of_rows, needs_expert_rows, read_split
from megarl.tasksets import generate, read_recipe, recipe

log = logging.getLogger(__name__)

MODEL_RECIPE = ".from_scratch.json"
"""Hidden, so that it is not copied into an exported checkpoint."""


def prepare_data(config: Config, *, verbose: bool = False) -> None:
    """Write the taskset's files that are missing, or that were made with other settings, where it names a generator. That of
    the expert rows only for an algorithm that needs them.

    Raises:
        ConfigError: a file is missing and there is no generator; the generator or an option is unknown; or a file made with
            other settings belongs to a run that has begun, or lies where other runs may use it.
    """
    taskset = config.taskset
    named = {"train": taskset.train, "eval": taskset.eval, "warm_start": taskset.warm_start}
    if needs_expert_rows(config):
        named["expert"] = taskset.expert
    files = {split: Path(path) for split, path in named.items() if path is not None}
    to_write = {split: path for split, path in files.items() if not path.is_file()}
    if taskset.generate is None:
        if to_write:
            missing = ", ".join(f"taskset.{split}={path}" for split, path in to_write.items())
            raise ConfigError(f"{missing}: no such file; give the file, or set taskset.generate")
    else:
        sizes = {"train": taskset.train_size, "eval": taskset.eval_size, "warm_start": taskset.warm_start_size}
        sizes |= {"expert": taskset.expert_size} if "expert" in files else {}
        kind = kind_of_rows(config)
        stale: dict[Change, None] = {}
        for split, path in files.items():
            wanted = recipe(taskset.generate, sizes, seed=taskset.seed, options=taskset.options, kind=kind, split=split)
            made_with = read_recipe(path) if path.is_file() else None
            if made_with is not None and (changed := list(changes(made_with, wanted))):
                _check_replaceable(config, path, changed)
                to_write[split] = path
                stale |= dict.fromkeys(changed)
        if stale:
            log.info("the tasks were made with other settings: %s", described(stale))
        if to_write:
            log.info("writing %s of %s: %s", kind, taskset.generate, ", ".join(to_write))
            generate(taskset.generate, to_write, sizes, seed=taskset.seed, options=taskset.options, kind=kind)
    for split, path in files.items() if verbose else ():
        done = "written" if split in to_write else "kept"
        if done == "kept" and taskset.generate is not None and read_recipe(path) is None:
            done = "kept, a file of your own"
        log.info("%s: %d rows in %s (%s)", split, len(read_split(config, split)), path, done)


def prepare_model(config: Config) -> None:
    """Write a randomly initialised HF checkpoint to ``model.path`` when there is none and the settings describe one.

    Raises:
        ConfigError: there is no checkpoint and ``model.from_scratch`` is not set, or one cannot be made here.
    """
    path, wanted = Path(config.model.path), config.model.from_scratch
    if path.exists() and not (path / "config.json").is_file():
        raise ConfigError(f"model.path={path} is there but has no config.json; give an HF checkpoint, or a path that does not exist yet")
    if wanted is None:
        if not path.exists():
            raise ConfigError(f"model.path={path} has no config.json; give an HF checkpoint, or describe one in model.from_scratch")
        return
    if path.exists() and (has_checkpoints(Path(config.run.dir)) or not (path / MODEL_RECIPE).is_file()):
        return  # a run goes on with the model that it began with; a model of other making is the user's own
    source = "train" if config.taskset.warm_start is None else "warm_start"
    corpus = [m["content"] for row in read_split(config, source) for m in row.prompt]
    settings = {f"model.from_scratch.{name}": value for name, value in asdict(wanted).items()}
    settings |= {"trainer.seed": config.trainer.seed, "its tokenizer's texts": _digest(corpus)}
    if path.exists():
        changed = list(changes(_read_model_recipe(path), settings))
        if not changed:
            return
        _check_replaceable(config, path, changed)
        log.info("the model was made with other settings: %s", described(changed))
    log.info("making a %s model from scratch in %s", wanted.model_type, path)
    from megarl.models.from_scratch import create  # seconds of imports

    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        create(temporary, wanted, corpus, config.trainer.seed)
        (temporary / MODEL_RECIPE).write_text(json.dumps(settings, indent=1))
        replace_directory(temporary, path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.path={path} cannot be written ({error}); make room or give another path") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_replaceable(config: Config, path: Path, changed: list[Change]) -> None:
    """What was made with other settings may be made anew while nothing depends on it.

    Raises:
        ConfigError: a run has begun with it, or it lies outside the run's directory.
    """
    run_dir = Path(config.run.dir)
    if has_checkpoints(run_dir):
        raise ConfigError(
            f"{path} was made with other settings: {described(changed)}; the run in {run_dir} was trained on it. Take another "
            f"run.name, set what it was made with, or remove {run_dir}"
        )
    if not path.resolve().is_relative_to(run_dir.resolve()):
        raise ConfigError(
            f"{path} was made with other settings: {described(changed)}; it is outside run.dir={run_dir}, so other runs may use "
            "it. Remove it to make it anew, give another path, or set what it was made with"
        )


def _read_model_recipe(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((path / MODEL_RECIPE).read_text())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _digest(texts: list[str]) -> str:
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=8).hexdigest()
