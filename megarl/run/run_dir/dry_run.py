"""A check without lasting files: missing rows and models are made in a temporary folder, which is removed."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.core.errors import InputError
from megarl.run.run_dir.owner import check_writable
from megarl.run.run_dir.prepare import missing_data, needs_model, with_prompt_limit, write_data, write_model


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
