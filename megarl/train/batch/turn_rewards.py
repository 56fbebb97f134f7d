"""Advantages of turns from turn rewards, combined with advantages of whole trajectories.

G_k = Σ_{j ≥ k} turn_gamma^(j − k)·r_j over the model's turns of a line, r_j = 0 for a turn without reward. The
algorithm's advantage of G_k is taken among the trajectories of the group with a turn k. MT-GRPO (2505.11821) compares
turns by their number; GiGPO (2505.10978) uses discounted returns and adds both advantages. A turn without counterpart
in the group gets 0. Each token of turn k then has
A = (1 − turn_rewards)·A_trajectory + turn_rewards·A_k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megarl.buffer.experience import by_group
from megarl.buffer.experience.operators import group_stats
from megarl.config.algorithms import AlgorithmConfig
from megarl.core.schema import Trajectory, Turn
from megarl.learn.algorithms import Algorithm
from megarl.learn.batching import Sequences, per_token


def turn_advantages(
    trajectories: Sequence[Trajectory], sequences: Sequences, algorithm: Algorithm, settings: AlgorithmConfig
) -> torch.Tensor:
    """Return float32 [T] for the held samples of whole groups; 0 where no token is trained."""
    of_turns: dict[tuple[int, int], float] = {}
    """(index of a trajectory, index of a turn in it) -> advantage."""
    places = {id(trajectory): i for i, trajectory in enumerate(trajectories)}
    for group in by_group(trajectories):
        returns: dict[int, dict[tuple[int, int], float]] = {}
        for trajectory in group:
            for turn, k, value in _returns(trajectory, settings.turn_gamma):
                returns.setdefault(k, {})[places[id(trajectory)], turn] = value
        for found in returns.values():
            of_turns |= _compared(found, algorithm, settings)
    every = ((place, response) for place, trajectory in enumerate(trajectories) for response in _responses(trajectory))
    held = range(len(sequences)) if sequences.share is None else set(sequences.share.numbers.tolist())
    responses = [
        np.concatenate([np.full(len(turn), of_turns.get((place, i), 0.0), np.float32) for i, turn in response])
        for number, (place, response) in enumerate(every)
        if number in held
    ]
    return per_token(responses, sequences)


def _compared(
    returns: dict[tuple[int, int], float], algorithm: Algorithm, settings: AlgorithmConfig
) -> dict[tuple[int, int], float]:
    assert algorithm.advantage is not None, "settings were checked"
    stats = group_stats(list(returns.values()))
    if stats.size == 1:
        return dict.fromkeys(returns, 0.0)
    return {place: algorithm.advantage(value, stats, settings) for place, value in returns.items()}


def _returns(trajectory: Trajectory, gamma: float) -> Iterator[tuple[int, int, float]]:
    """Yield (index of a trained turn, its number among the model's turns of its line, its return)."""
    for line, new in trajectory.trained_lines():
        value, own = 0.0, [i for i in line if trajectory.turns[i].author == "model"]
        for k in range(len(own) - 1, -1, -1):
            value = (trajectory.turns[own[k]].reward or 0.0) + gamma * value
            if own[k] in new:
                yield own[k], k, value


def _responses(trajectory: Trajectory) -> Iterator[list[tuple[int, Turn]]]:
    """Yield (index, turn) of all turns in each sample's response. Turns that are not trained are masked there."""
    for line, new in trajectory.trained_lines():
        yield [(i, trajectory.turns[i]) for i in line[line.index(new[0]) : line.index(new[-1]) + 1]]
