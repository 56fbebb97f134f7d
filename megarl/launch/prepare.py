"""Makes what a run needs and does not have yet: its tasks, and a model from scratch."""

from __future__ import annotations

import logging
from pathlib import Path

from megarl.config import Config
from megarl.errors import ConfigError
from megarl.tasksets import generate, read_rows

log = logging.getLogger(__name__)


def prepare_data(config: Config, *, verbose: bool = False) -> None:
    """Write the taskset's files when one of them is missing and it names a generator.

    Raises:
        ConfigError: a file is missing and there is no generator, or the generator is unknown.
    """
    taskset = config.taskset
    files = {"train": taskset.train, "eval": taskset.eval, "warm_start": taskset.warm_start}
    missing = {name: Path(path) for name, path in files.items() if path is not None and not Path(path).is_file()}
    if missing:
        if taskset.generate is None:
            named = ", ".join(f"taskset.{name}={path}" for name, path in missing.items())
            raise ConfigError(f"{named}: no such file; give the file, or set taskset.generate")
        log.info("writing tasks of %s: %s", taskset.generate, ", ".join(missing))
        generate(
            taskset.generate,
            missing,
            {"train": taskset.train_size, "eval": taskset.eval_size, "warm_start": taskset.warm_start_size},
            seed=taskset.seed,
            options=taskset.options,
        )
    if verbose:
        for name, path in files.items():
            if path is not None:
                log.info("%s: %d rows in %s", name, len(read_rows(Path(path))), path)


def prepare_model(config: Config) -> None:
    """Write a randomly initialised HF checkpoint to ``model.path`` when there is none and the settings describe one.

    Raises:
        ConfigError: there is no checkpoint and ``model.from_scratch`` is not set.
    """
    path = Path(config.model.path)
    if (path / "config.json").is_file():
        return
    if config.model.from_scratch is None:
        raise ConfigError(f"model.path={path} has no config.json; give an HF checkpoint, or describe one in model.from_scratch")
    from megarl.models.from_scratch import create

    log.info("making a %s model from scratch in %s", config.model.from_scratch.model_type, path)
    source = config.taskset.warm_start or config.taskset.train
    corpus = (m["content"] for task in read_rows(Path(source)) for m in task.prompt)
    create(path, config.model.from_scratch, corpus, config.trainer.seed)
