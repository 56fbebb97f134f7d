"""The first step after a resume: models, optimizer and state are those that the checkpoint was made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from megarl.config import Config
from megarl.train.inference.models import Models
from megarl.train.inference.resumed_facts import facts_of_ranks, lost
from megarl.train.part import Metrics, Part
from megarl.train.ranks import Reporter, TrainState
from megarl.weights.checkpoint.training.state import manifest_of


class Resumed(Part):
    """Compares, once, the facts of the newest checkpoint's manifest with those of the models."""

    def __init__(self, config: Config, models: Models, reporter: Reporter, newest: Callable[[], Path | None]) -> None:
        self._config, self._models, self._reporter = config, models, reporter
        self._newest, self._is_due = newest, True
        self._found: dict[str, str] = {}

    def begin(self, state: TrainState) -> None:
        if not self._is_due:
            return
        self._is_due = False
        if (checkpoint := self._newest()) is None or not state.step:
            return
        saved = manifest_of(checkpoint)
        made, before = saved.get("made", {}), TrainState.from_manifest(saved)
        if before.warming_up:
            return
        if before.step != state.step:
            self._found["step-gap"] = f"{checkpoint} was made after step {before.step}, and {state.step} are counted"
        if before.kl_coef != state.kl_coef:
            self._found["kl-coef"] = f"the KL coefficient was {before.kl_coef} and is {state.kl_coef}"
        if made.get("parallel") == asdict(self._config.parallel):
            for then, now in zip(made.get("facts", []), facts_of_ranks(self._models), strict=False):
                self._found |= lost(then, now)
        for name, text in self._found.items():  # at once: the step may end with an error of the same cause
            self._reporter.log(f"alarm {name}: step {state.step + 1}: after the resume {text}; look at what loads it")

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        metrics |= {f"alarm/{name}": 1.0 for name in self._found}
        self._found.clear()
