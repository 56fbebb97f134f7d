"""One trainer rank: ``python -m megarl.run.start trainer --config RUN/resolved.json``."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable

import torch

from megarl import ops
from megarl.core.config import load_resolved
from megarl.core.errors import MegarlError, MemoryFullError, NonRetryableError
from megarl.core.jobs import Mode
from megarl.learn import algorithms
from megarl.train.loop.course import Course, Steps
from megarl.train.loop.offline import OfflineSteps
from megarl.train.loop.rank import TrainerRank
from megarl.train.step import OnlineSteps
from megarl.train.update.memory import memory_explained

log = logging.getLogger(__name__)

STEPS: dict[Mode, Callable[[TrainerRank], Steps]] = {"both": OnlineSteps, "train": OnlineSteps, "offline": OfflineSteps}


def main(argv: list[str] | None = None) -> int:
    """Run one trainer rank; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m megarl.run.start trainer", description="One rank of the trainer.")
    parser.add_argument("--config", required=True, help="resolved.json of the run")
    config = load_resolved(parser.parse_args(argv).config)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # Megatron logs its settings and warns of every fusion that needs TransformerEngine or apex; `megarl doctor` reports
    # which.
    for name in ("megatron.core.rerun_state_machine", "megatron.core.optimizer"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("megatron").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    torch.set_num_threads(config.trainer.num_threads)
    ops.use(config.trainer.kernels)
    try:
        steps = STEPS[algorithms.job_of(config).mode]
        with TrainerRank(config) as rank, memory_explained(rank.memory, rank.models):
            Course(rank, steps(rank)).train()
    except MegarlError as error:
        log.error("trainer: %s", error)
        return error.STATUS if isinstance(error, NonRetryableError | MemoryFullError) else 1
    return 0
