"""Faults of weights on their way from the trainer to the engines."""

from __future__ import annotations

from megarl.exam.fault import Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        "tensor-undelivered",
        "verl-project/verl#7495",
        "A tensor of the engine is never delivered and keeps the elements of the start.",
        alarm="undelivered",
        job="tiny",
    ),
)
