"""One trainer rank: ``python -m megarl.run.start trainer --config RUN/resolved.json``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable

import torch

from megarl import ops
from megarl.config import Config, load_resolved
from megarl.core.errors import MegarlError, MemoryFullError, NonRetryableError
from megarl.core.imports import import_file
from megarl.core.jobs import Mode
from megarl.learn import algorithms
from megarl.train.loop.course import Course, Steps
from megarl.train.loop.offline import OfflineSteps
from megarl.train.loop.rank import TrainerRank
from megarl.train.memory import memory_explained
from megarl.train.parts import PARTS
from megarl.train.step import OnlineSteps
from megarl.weights.megatron_private import silence

log = logging.getLogger(__name__)

STEPS: dict[Mode, Callable[[TrainerRank], Steps]] = {"both": OnlineSteps, "train": OnlineSteps, "offline": OfflineSteps}


def loop_of(config: Config) -> Callable[[TrainerRank], None]:
    """Return the training loop: megarl's for this kind of job, or ``trainer.loop``'s. Raises ConfigError."""
    path = config.trainer.loop
    if path is not None:
        parts = ", ".join(part.__name__ for wanted, part in PARTS if wanted(config))
        log.info("trainer.loop=%s calls the hooks of these parts, or goes without them: %s", path, parts)
        return import_file(path, "trainer.loop", "run(rank)").run
    steps = STEPS[algorithms.job_of(config).mode]
    return lambda rank: Course(rank, steps(rank)).train()


def main(argv: list[str] | None = None) -> int:
    """Run one trainer rank; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m megarl.run.start trainer", description="One rank of the trainer.")
    parser.add_argument("--config", required=True, help="resolved.json of the run")
    config = load_resolved(parser.parse_args(argv).config)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    silence()
    torch.set_num_threads(config.trainer.num_threads)
    ops.use(config.trainer.kernels)
    try:
        run = loop_of(config)
        with TrainerRank(config) as rank, memory_explained(rank.memory, rank.models):
            run(rank)
    except MegarlError as error:
        log.error("trainer: %s", error)
        return error.STATUS if isinstance(error, NonRetryableError | MemoryFullError) else 1
    return 0
