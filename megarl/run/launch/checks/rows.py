"""Kinds of rows in the files of a job: the algorithm decides, the generator writes what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.core.config import Config
from megarl.core.schema import Preference, Task
from megarl.explore.tasksets import Kind, read_preferences, read_rows

Rows = Sequence[Task | Preference]
SPLITS = ("train", "eval")


def needs_expert_rows(config: Config) -> bool:
    """Return True if the algorithm trains on ``taskset.expert``.

    Raises:
        ConfigError: there is no such algorithm.
    """
    from megarl.learn import algorithms  # imports torch

    return "expert" in algorithms.get(config.algorithm.name).needs


def kind_of_rows(config: Config) -> Kind:
    """Kind of the rows of train and eval. Rows of warm_start and expert are demonstrations whatever the algorithm.

    Raises:
        ConfigError: there is no such algorithm.
    """
    from megarl.learn import algorithms  # imports torch

    algorithm = algorithms.get(config.algorithm.name)
    if algorithm.job.rollouts:
        return "tasks"
    return "preferences" if "pairs" in algorithm.needs else "demonstrations"


def read_split(config: Config, split: str) -> Rows:
    """Rows of train, eval, warm_start or expert; their ids begin with the split's name, since two files may have one.

    Raises:
        DataError: a row is not what the algorithm needs, with file, row and field.
    """
    path = Path(getattr(config.taskset, split))
    kind = kind_of_rows(config) if split in SPLITS else "demonstrations"
    if kind == "preferences":
        return read_preferences(path, split=split)
    return read_rows(path, require_response=kind == "demonstrations", split=split)
