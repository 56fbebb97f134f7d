"""Checks of an offline job's steps: the loss covers each answer, and the gradient of preferences is the formula's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from megarl.config import Config
from megarl.config.algorithms import PreferenceConfig
from megarl.learn import plain
from megarl.learn.algorithms import Loss
from megarl.learn.batching import Sequences
from megarl.learn.training.objectives import LossTokens, Objective
from megarl.train.alarm_rules import RULES
from megarl.train.ranks import Reporter

Pair = tuple[np.ndarray, np.ndarray]
"""Token ids of a prompt and of its answer."""


class OfflineChecks:
    """Checks the steps of a job. Every rank makes one."""

    def __init__(self, config: Config, reporter: Reporter) -> None:
        self._config, self._reporter = config, reporter
        self._sums = torch.zeros(2, dtype=torch.float64)
        """Sum of differences of gradients, and of their sizes."""
        self._wrong: list[str] = []

    def watching(
        self, objective: Objective, sequences: Sequences, updates: Sequence[Sequence[Sequence[int]]]
    ) -> Objective:
        """Return the objective of a step on pairs of responses, whose gradients are compared as they pass; another
        objective is returned as it is.

        Args:
            updates: Numbers of the sequences of each pair of each update.
        """
        config, alarms = self._config.algorithm, self._config.alarms
        is_covered = alarms.witness and sequences.share is None
        if not is_covered or not isinstance(config, PreferenceConfig) or sequences.ref_logp is None:
            return objective
        pairs = {number: len(update) for update in updates for unit in update for number in unit}
        reference = sequences.ref_logp

        def loss(kept: LossTokens, outputs: torch.Tensor) -> Loss:
            if outputs.requires_grad and len(kept.index):
                logp = outputs.detach()[:, 0].double().cpu()
                number = pairs[int(kept.numbers[0])]
                wanted = plain.preference_gradient(config, logp - reference[kept.index].double(), kept.row) / number
                outputs.register_hook(partial(self._compare, wanted))
            return objective.loss(kept, outputs)

        return replace(objective, loss=loss)

    def _compare(self, wanted: torch.Tensor, gradient: torch.Tensor) -> None:
        apart = gradient.detach()[:, 0].double().cpu() - wanted
        self._sums += torch.stack([apart.abs().sum(), wanted.abs().sum()])

    def compare_masks(self, sequences: Sequences, pairs: Sequence[Pair]) -> None:
        """Compare some sequences' tokens in the loss with the tokens of their answers.

        Args:
            pairs: Of each sequence.
        """
        number = self._config.alarms.trajectories
        if sequences.share is not None or not number:
            return
        starts = sequences.cu_seqlens.tolist()
        for at in range(0, len(pairs), max(1, len(pairs) // number)):
            text = mask_fault(sequences.mask[starts[at] : starts[at + 1]].numpy(), *pairs[at])
            if text is not None:
                self._wrong.append(f"sequence {at + 1} of the step: {text}")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return and log what a step's checks have found. Every rank calls it.

        Args:
            step: Number of the step, from 1.
            metrics: The step's metrics.
        """
        sums, wrong = self._sums.clone(), self._wrong
        self._sums.zero_()
        self._wrong = []
        dist.all_reduce(sums)
        found = {"check/loss": float(sums[0] / sums[1])} if sums[1] else {}
        if wrong:
            found["alarm/mask"] = float(len(wrong))
            self._reporter.log(f"alarm mask: step {step}: {wrong[0]}; look at what puts answers into the loss")
        now = {**metrics, **found}
        for rule in RULES:
            if (beyond := rule.test(self._config, (), now)) is not None:
                found[f"alarm/{rule.name}"] = beyond[0]
                self._reporter.log(f"alarm {rule.name}: step {step}: {beyond[1]}; look at {rule.look_at}")
        return found


def mask_fault(mask: np.ndarray, prompt: np.ndarray, answer: np.ndarray) -> str | None:
    """Return a text if the loss does not cover all tokens of an answer, and no others; None if it does.

    Args:
        mask: bool [T], at the positions that predict the tokens in the loss.
    """
    wanted = np.zeros(len(prompt) + len(answer), bool)
    wanted[len(prompt) - 1 : -1] = True
    if len(mask) == len(wanted) and (mask == wanted).all():
        return None
    return f"{int(mask.sum())} of its tokens are in the loss, and its answer has {len(answer)}"
