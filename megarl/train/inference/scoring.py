"""The actor of a job that trains a reward model: a language model at first, then the same one with a score head.

A checkpoint of step 0 holds the weights after the warm start, later ones the reward model. Without a warm start the job
may go on with a sequence-classification checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from megarl.config import Config
from megarl.learn.algorithms import Algorithm
from megarl.weights.checkpoint.formats.hf_source import has_score
from megarl.weights.checkpoint.training import state


def trains_scores(algorithm: Algorithm) -> bool:
    """True if the model to train is a reward model."""
    return "actor" not in algorithm.roles


def in_warm_start(config: Config, checkpoint: Path | None) -> bool:
    """True if the actor of ``checkpoint`` is one of the warm start, or what that left: a language model without
    adapters. None is the run's beginning."""
    return bool(config.trainer.warm_start.steps) and (
        checkpoint is None or state.manifest_of(checkpoint)["step"] == 0 or checkpoint.parent.name == "warm_start"
    )


def score_source(path: Path) -> Literal["stored", "zeros"]:
    """Source of the score head that a reward model begins with (``Model.load_hf``)."""
    return "stored" if has_score(path) else "zeros"
