"""Prediction of the run's step by the cost model, written at the end for the report (``prediction.json``)."""

from __future__ import annotations

import json
import math

import torch

from megarl.core.durable import write_text
from megarl.planner.model_cost import DEVICES, Device
from megarl.planner.phase_seconds import Lengths
from megarl.planner.predict import JobPlan, StepWork, predict
from megarl.train.inference.models import Models
from megarl.train.part import Metrics, Part
from megarl.train.ranks import RunContext, TrainState

FILE = "prediction.json"


class PredictedSeconds(Part):
    """Predicts a step of the run's plan with the lengths that its responses had."""

    def __init__(self, context: RunContext, models: Models) -> None:
        self._context, self._models = context, models
        self._means: list[float] = []
        self._most = 1.0

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        if "response_length/mean" in metrics:
            self._means.append(metrics["response_length/mean"])
            self._most = max(self._most, metrics["response_length/max"])

    def finish(self) -> None:
        device = accelerator()
        if self._context.rank or device is None or not self._means:
            return
        lengths = Lengths.of_mean(sum(self._means) / len(self._means), math.ceil(self._most))
        work = StepWork.of(self._context.config, self._models.hf_config, lengths)
        found = predict(work, JobPlan.of(self._context.config), device)
        seconds = {phase: value for phase, value in found.seconds.items() if math.isfinite(value)}
        text = json.dumps({"device": device.name, "seconds": {**seconds, "step": found.step_s}})
        write_text(self._context.run_dir / FILE, text)


def accelerator() -> Device | None:
    """Return this process's device; None for a GPU that the cost model does not know."""
    if not torch.cuda.is_available():
        return DEVICES["cpu"]
    name = torch.cuda.get_device_name().lower()
    return max((device for key, device in DEVICES.items() if key in name), key=lambda d: len(d.name), default=None)
