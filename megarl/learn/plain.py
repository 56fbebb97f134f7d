"""A step's advantages, loss and gradient in plain float64, from the papers' formulas: a second opinion about a step.

Shares no code with ``learn/algorithms`` and ``ops``, so that a fault there shows as a difference. Covers the algorithms
of ``COVERED``; formulas and sources stand beside those in ``learn/algorithms``.

Shape legend: N sequences of a step, n of them held; M tokens in the loss of the held sequences, one sequence after the
other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from megarl.config.algorithms import AlgorithmConfig, PPOConfig, PreferenceConfig, ReinforcePPConfig, ReMaxConfig

BY_GROUP = frozenset({"grpo", "gspo", "cispo", "rloo", "reinforce_pp_baseline"})
COVERED = BY_GROUP | {"ppo", "reinforce_pp", "remax"}
"""Names of the algorithms whose step is computed here."""
Together = Callable[[torch.Tensor], torch.Tensor]
"""Gathers values of the held sequences [n] into those of the step [N]."""


@dataclass(frozen=True)
class PlainTokens:
    """Tokens in the loss.

    Attributes:
        row: int64 [M]: index of the token's sequence among those given, never decreasing.
        logp: float64 [M], with the current weights; ``old_logp``, ``ref_logp`` and ``engine_logp`` likewise, or None.
        entropy: float64 [M].
        share: float64 [n]: share of a sequence in its trajectory's tokens; None where each is a trajectory.
    """

    row: torch.Tensor
    logp: torch.Tensor
    entropy: torch.Tensor
    advantages: torch.Tensor
    old_logp: torch.Tensor
    ref_logp: torch.Tensor | None = None
    engine_logp: torch.Tensor | None = None
    share: torch.Tensor | None = None


def covers(config: AlgorithmConfig) -> bool:
    """Return True if the step of these settings is computed here."""
    return config.name in COVERED and not config.turn_rewards


def advantages_of_responses(
    config: AlgorithmConfig, rewards: Sequence[float], groups: Sequence[Hashable], trajectories: Sequence[Hashable]
) -> torch.Tensor:
    """Return float64 [N], before whitening: of an algorithm of ``BY_GROUP``.

    Args:
        groups: [N], name of each sequence's group.
        trajectories: [N], name of each sequence's trajectory: its sequences count once in the group.
    """
    members: dict[Hashable, dict[Hashable, float]] = {}
    for reward, group, trajectory in zip(rewards, groups, trajectories, strict=True):
        members.setdefault(group, {})[trajectory] = reward
    sums = {group: _mean_and_std(list(found.values())) for group, found in members.items()}
    by_std = config.normalize_by_std and config.name not in ("rloo", "reinforce_pp_baseline")
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        number, (mean, std) = len(members[group]), sums[group]
        if number == 1:
            found.append(reward)
        elif not std:
            found.append(0.0)
        elif config.name == "rloo":
            found.append(reward - (mean * number - reward) / (number - 1))
        else:
            found.append((reward - mean) / (std + 1e-6 if by_std else 1.0))
    return torch.tensor(found, dtype=torch.float64)


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and unbiased standard deviation; (x, 0) for equal values x."""
    mean = math.fsum(values) / len(values)
    if min(values) == max(values):
        return values[0], 0.0
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))


def whitened(values: torch.Tensor, row: torch.Tensor, rows: int, together: Together) -> torch.Tensor:
    """Return (x − μ) / sqrt(σ² + 1e-8) of values [M]; μ and unbiased σ² are over the whole step."""

    def total(each: torch.Tensor) -> float:
        return float(together(_per_row(each, row, rows)).sum())

    number, mean = total(torch.ones_like(values)), 0.0
    if number:
        mean = total(values) / number
    variance = total((values - mean) ** 2) / max(1.0, number - 1)
    # Equal values have a variance that is rounding alone.
    return (values - mean) / (variance + 1e-8) ** 0.5 if variance > 1e-24 * max(1.0, mean * mean) else 0.0 * values


def _per_row(values: torch.Tensor, row: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.zeros(rows, dtype=torch.float64).index_add_(0, row, values.double())


def token_advantages(
    config: AlgorithmConfig,
    row: torch.Tensor,
    of_rows: torch.Tensor,
    *,
    together: Together,
    kl: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    bootstrap: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return float64 [M].

    Args:
        of_rows: float64 [n]: ``advantages_of_responses`` of the held sequences; of the other algorithms their rewards,
            minus the greedy response's for remax.
        kl: float64 [M]: penalty subtracted from each token's reward; None for none.
        values: float64 [M]: of the critic.
        bootstrap: float64 [n]: value after a truncated response; None for zeros.
    """
    rows = len(of_rows)
    if config.name in BY_GROUP:
        found = of_rows[row]
        return whitened(found, row, rows, together) if config.name == "reinforce_pp_baseline" else found
    assert isinstance(config, ReinforcePPConfig)
    is_last = torch.ones_like(row, dtype=torch.bool)
    is_last[:-1] = row[1:] != row[:-1]
    rewards = torch.zeros(len(row), dtype=torch.float64) if kl is None else -kl
    greedy = config.name == "remax"
    if not greedy:
        rewards[is_last] += of_rows[row[is_last]]
    if config.name != "ppo":
        found = _discounted(rewards, row, rows, config.gamma)
        if greedy:
            found += of_rows[row]
        whiten = config.name == "reinforce_pp" or (isinstance(config, ReMaxConfig) and config.whiten_advantages)
        return whitened(found, row, rows, together) if whiten else found
    assert isinstance(config, PPOConfig) and values is not None
    after = torch.zeros(rows, dtype=torch.float64) if bootstrap is None else bootstrap.double()
    following = torch.cat([values[1:], values.new_zeros(1)])
    following = torch.where(is_last, after[row], following)
    deltas = rewards + config.gamma * following - values
    found = _discounted(deltas, row, rows, config.gamma * config.lam)
    return whitened(found, row, rows, together) if config.whiten_advantages else found


def _discounted(values: torch.Tensor, row: torch.Tensor, rows: int, factor: float) -> torch.Tensor:
    """Return Σ_{u≥t} factor^(u−t)·x_u of each sequence, all sequences at once, from the last token to the first."""
    if not len(values):
        return values
    counts = torch.bincount(row, minlength=rows)
    starts = counts.cumsum(0) - counts
    found, running = torch.empty_like(values), torch.zeros(rows, dtype=torch.float64)
    for place in range(int(counts.max()) - 1, -1, -1):
        there = counts > place
        at = starts[there] + place
        running[there] = values[at] + factor * running[there]
        found[at] = running[there]
    return found


def denominator(config: AlgorithmConfig, counts: torch.Tensor, trajectories: Sequence[Hashable]) -> float:
    """Return the global denominator of an update.

    Args:
        counts: int64: tokens in the loss of each of the update's sequences.
        trajectories: Name of each sequence's trajectory.
    """
    if config.aggregation == "token_mean":
        return max(1.0, float(counts.sum()))
    return max(1.0, float(len({name for name, n in zip(trajectories, counts.tolist(), strict=True) if n})))


def loss_and_gradient(
    config: AlgorithmConfig, kl_coef: float, tokens: PlainTokens, denominators: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (terms of the loss, d loss / d logp, d loss / d entropy), float64 [M] each.

    Sequences are whole: all their tokens are given.
    """
    row, logp, old, a = tokens.row, tokens.logp, tokens.old_logp, tokens.advantages
    rows = int(row.max()) + 1 if len(row) else 0
    counts = torch.bincount(row, minlength=rows).double()
    weight = torch.full_like(logp, 1.0 / denominators)
    if config.aggregation == "seq_mean_token_mean":
        weight = weight / counts[row] * (1.0 if tokens.share is None else tokens.share[row])
    elif config.aggregation == "seq_mean_token_sum_norm":
        weight = weight / config.aggregation_length
    log_ratio = logp - old
    if config.importance == "token":
        ratio = log_ratio.exp()
    else:
        summed = _per_row(log_ratio, row, rows)
        of_row = summed / counts.clamp(min=1) if config.importance == "sequence_mean" else summed
        ratio = of_row.exp()[row]
    high, low = 1.0 + config.clip_high, 1.0 - config.clip_low
    if config.name == "cispo":
        surrogate, slope = -ratio.clamp(max=high) * a * logp, torch.zeros_like(logp)
        straight = -ratio.clamp(max=high) * a
    else:
        free, bounded = -a * ratio, -a * ratio.clamp(low, high)
        surrogate, slope = torch.maximum(free, bounded), torch.where(free >= bounded, -a, 0.0)
        slope = torch.where((ratio >= low) & (ratio <= high), -a, slope)
        if config.dual_clip is not None:
            most = -a * config.dual_clip
            above = (a < 0) & (surrogate > most)
            surrogate, slope = torch.where(above, most, surrogate), torch.where(above, 0.0, slope)
        straight = torch.zeros_like(logp)
    off_policy = torch.ones_like(logp)
    if config.correction != "none":
        assert tokens.engine_logp is not None
        off_policy = (old - tokens.engine_logp).exp()
        cap = config.correction_cap
        inside = (off_policy <= cap) & (off_policy >= 1.0 / cap)
        off_policy = off_policy.clamp(max=cap) if config.correction == "truncate" else off_policy * inside
    # d ratio / d logp: of a token its own ratio; of a sequence each token moves the ratio of all.
    moved = weight * off_policy * slope * ratio
    if config.importance != "token":
        moved = _per_row(moved, row, rows)[row]
        moved = moved / counts[row] if config.importance == "sequence_mean" else moved
    gradient = moved + weight * off_policy * straight
    terms = weight * (off_policy * surrogate - config.entropy_coef * tokens.entropy)
    if tokens.ref_logp is not None and config.kl.place == "loss" and kl_coef:
        d = tokens.ref_logp - logp
        if config.kl.estimator == "k2":
            kl, of_kl = 0.5 * d * d, -d
        else:
            kl, of_kl = d.exp() - 1.0 - d, 1.0 - d.exp()
            kl, of_kl = kl.clamp(max=10.0), torch.where(kl >= 10.0, 0.0, of_kl)
        terms, gradient = terms + weight * kl_coef * kl, gradient + weight * kl_coef * of_kl
    return terms, gradient, -weight * config.entropy_coef


def value_gradient(config: PPOConfig, values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """Return d / dV of ½·max((V − R)², (clip(V) − R)²), float64 [M]: of the critic's loss before its denominator."""
    gradient = values - returns
    if config.value_clip is None:
        return gradient
    bounded = old + (values - old).clamp(-config.value_clip, config.value_clip)
    is_bound = (bounded - returns).abs() > gradient.abs()
    inside = (values - old).abs() <= config.value_clip
    return torch.where(is_bound & ~inside, 0.0, gradient)


def router_gradient(
    logits: torch.Tensor, row: torch.Tensor, topk: int, coefficients: tuple[float, float], size: tuple[int, int]
) -> torch.Tensor:
    """Return the gradient of the routers' losses by each logit, float64 [t, E], for softmax routers.

    balance = (1/N) Σ_n Σ_e f_{n,e}·P_{n,e}, with f the experts' shares of the choices times E, and P their mean
    probabilities; z = (1/T) Σ_t logsumexp(logits_t)².

    Args:
        logits: float64 [t, E], of whole sequences.
        row: int64 [t]: sequence of each token.
        coefficients: Weights of balance and z.
        size: (N, T): sequences and tokens of the whole update.
    """
    experts, rows = logits.shape[1], int(row.max()) + 1 if len(row) else 0
    p = logits.softmax(1)
    chosen = torch.zeros_like(p).scatter_(1, p.topk(topk, 1).indices, 1.0)
    lengths = torch.bincount(row, minlength=rows).to(p).clamp(min=1.0)
    shares = torch.zeros(rows, experts).to(p).index_add_(0, row, chosen) * experts / (topk * lengths[:, None])
    of_p = (shares / lengths[:, None])[row] / size[0]
    of_balance = p * (of_p - (p * of_p).sum(1, keepdim=True))
    of_z = 2.0 * logits.logsumexp(1, keepdim=True) * p / size[1]
    return coefficients[0] * of_balance + coefficients[1] * of_z


def preference_gradient(config: PreferenceConfig, ratio: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sum of DPO's or IPO's losses by each log-prob, float64 [M].

    Args:
        ratio: float64 [M]: log-prob minus the reference's, of each token in the loss.
        row: int64 [M]: 2i of the chosen, 2i + 1 of the rejected response of pair i.
    """
    pairs = int(row.max()) // 2 + 1 if len(row) else 0
    chosen, rejected = _per_row(ratio, row, 2 * pairs).view(-1, 2).unbind(1)
    h, beta, smoothing = chosen - rejected, config.beta, config.label_smoothing
    if config.preference == "ipo":
        slope = 2.0 * (h - 0.5 / beta)
    else:
        slope = beta * ((beta * h).sigmoid() * smoothing - (-beta * h).sigmoid() * (1.0 - smoothing))
    return torch.where(row % 2 == 0, 1.0, -1.0) * slope[row // 2]
