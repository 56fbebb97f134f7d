"""Online DPO (2402.04792): DPO's loss on freshly sampled responses, the best of a group against the worst by reward."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config.algorithms import AlgorithmConfig
from megarl.learn.algorithms import dpo
from megarl.learn.algorithms.terms import pairs
from megarl.learn.algorithms.types import Algorithm


def best_against_worst(rewards: Sequence[float], config: AlgorithmConfig) -> list[tuple[int, int]]:
    """Return [(chosen, rejected)] positions in the group, the first of equal rewards each; [] for a zero-variance
    group."""
    positions = range(len(rewards))
    best, worst = max(positions, key=rewards.__getitem__), min(positions, key=rewards.__getitem__)
    return [(best, worst)] if rewards[best] > rewards[worst] else []


ONLINE_DPO = Algorithm(
    name="online_dpo",
    source="Direct Language Model Alignment from Online AI Feedback, arXiv 2402.04792",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"ref_logp", "pairs", "group"}),
    advantage=None,
    count=pairs.count,
    loss=dpo.loss,
    choose_pairs=best_against_worst,
)
