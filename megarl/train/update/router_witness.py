"""Witness of the routers' losses: their gradient by each logit against plain formulas, in some steps."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarl.config.schema import RouterConfig
from megarl.learn import plain
from megarl.learn.models.experts import routers
from megarl.learn.training.model import TrainedModel
from megarl.train.batch.batch import StepBatch

EVERY = 10
"""Steps from one comparison to the next."""


class RouterWitness:
    """Compares the updates of a step while their micro-batches pass. Every rank makes one.

    Args:
        step: Steps done before.
    """

    def __init__(self, batch: StepBatch, trained: TrainedModel, settings: RouterConfig, step: int) -> None:
        self._settings, lengths = settings, batch.sequences.step_lengths
        found = routers(trained.model.chunks) if settings.is_used and not step % EVERY else []
        # A softmax over all experts, and all tokens of a sequence on one rank.
        self._routers = [one for one in found if one.score_function == "softmax" and one.tp_cp_group.size() == 1]
        numbers = [[number for unit in update for number in unit] for update in batch.updates]
        self._sizes = [(len(own), int(lengths[own].sum())) for own in numbers]
        self._sums = torch.zeros(2, dtype=torch.float64)
        """Sum of differences of gradients, and of their sizes."""

    def begin(self, update: int) -> None:
        """Watch an update, counted from 0; epochs of the step count on."""
        sequences, tokens = self._sizes[update % len(self._sizes)]
        for router in self._routers:
            router.witness = lambda logits, row, loss, topk=router.topk: self._compare(
                logits, row, loss, topk, sequences, tokens
            )

    def end(self) -> None:
        """End an update."""
        for router in self._routers:
            router.witness = None

    def _compare(
        self, logits: torch.Tensor, row: torch.Tensor, loss: torch.Tensor, topk: int, sequences: int, tokens: int
    ) -> None:
        gradient = None
        if loss.requires_grad:
            gradient = torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)[0]
        found = torch.zeros_like(logits) if gradient is None else gradient
        settings = self._settings
        wanted = plain.router_gradient(
            logits.detach().double(), row, topk, (settings.aux_loss_coef, settings.z_loss_coef), (sequences, tokens)
        )
        self._sums += torch.stack([(found.double() - wanted).abs().sum(), wanted.abs().sum()]).cpu()

    def metrics(self) -> dict[str, float]:
        """Return ``check/router``, the relative difference of the gradients; nothing where none was compared. Every
        rank calls it."""
        if not self._settings.is_used:
            return {}
        dist.all_reduce(self._sums)
        apart, size = self._sums.tolist()
        return {"check/router": apart / size} if size else {}
