"""An algorithm: one value made of pure functions. The trainer computes only what ``needs`` lists.

Shape legend: T tokens of a micro-batch or of a step, flat; ``row`` (or ``cu_seqlens``) maps each to its sequence, so
padded and packed batches look the same. N sequences of a step. K parts of a loss with a global denominator each. A rank
may hold n of a step's N sequences; then T are the positions of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from megarl.config.algorithms import AlgorithmConfig, expert_ratio
from megarl.core.errors import ConfigError
from megarl.core.schema import GroupStats
from megarl.learn.algorithms.terms.reduction import Together, Tokens, alone, repeated

NEEDS = frozenset(
    {"old_logp", "ref_logp", "teacher_logp", "kl", "advantages", "group", "values", "pairs", "greedy", "expert"}
)
ROLES = frozenset({"actor", "critic", "reference", "reward", "teacher"})


@dataclass(frozen=True)
class LossInput:
    """Flat tokens of one micro-batch; fields that the algorithm does not need may be None."""

    logp: torch.Tensor
    """float [T], log-probs of the weights in training, with gradient. (0 for a scoring model, see ``scores``.)"""
    entropy: torch.Tensor | None
    """float [T], with gradient."""
    old_logp: torch.Tensor | None
    """float [T], by the trainer with the update's starting weights (never the engine's)."""
    ref_logp: torch.Tensor | None
    """float [T], of the reference model."""
    advantages: torch.Tensor | None
    """float [T]."""
    mask: torch.Tensor
    """bool [T]; other tensors' values are ignored where it is False, even NaN."""
    row: torch.Tensor
    """int64 [T], sequence number within the micro-batch, 0 .. num_rows-1, never decreasing. If ``needs`` has ``pairs``,
    rows 2i and 2i+1 are the chosen and the rejected response of pair i."""
    num_rows: int
    engine_logp: torch.Tensor | None = None
    """float [T], by the engine that sampled the tokens: only for ``correction``, never instead of ``old_logp``. For
    expert rows the teacher's, with ``expert_loss=off_policy``."""
    expert: torch.Tensor | None = None
    """bool [num_rows]: True for demonstrated rows (mix, distill)."""
    scores: torch.Tensor | None = None
    """float [num_rows], with gradient: output of a scalar head at each row's last token (reward_model)."""
    share: torch.Tensor | None = None
    """float64 [num_rows]: share of each row in the kept tokens of its trajectory; None if each trajectory is one
    row."""
    first: torch.Tensor | None = None
    """bool [num_rows]: True for the first row with a kept token of each trajectory; None like ``share``."""
    margin: torch.Tensor | None = None
    """float [num_rows / 2]: known margin by which each pair's chosen response is better (reward_model)."""
    divergence: torch.Tensor | None = None
    """float [T], with gradient: divergence of each token's distribution from the teacher's, 0 without a teacher; None
    with ``divergence=sampled``."""
    teacher_weights: torch.Tensor | None = None
    """float64 [num_rows], ``weight`` of each row's teacher; 0 without a teacher. None as ``divergence``."""
    taught: torch.Tensor | None = None
    """bool [T]: tokens with the teacher's term (``teacher_tokens``); None for all."""

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int64 [num_rows + 1]: sequence i is tokens ``cu_seqlens[i] .. cu_seqlens[i + 1]``."""
        return torch.searchsorted(self.row, torch.arange(self.num_rows + 1, device=self.row.device))

    def to(self, device: torch.device) -> LossInput:
        """Return a copy with every tensor on ``device``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: x.to(device) for name, x in values.items() if isinstance(x, torch.Tensor)}
        return replace(self, **moved)


class Loss(NamedTuple):
    """Sums, never divided: only the trainer divides, by the global count."""

    total: torch.Tensor
    """Loss with gradient: a scalar, or [K] for a loss of K parts. The trainer minimizes Σ_k total_k / global
    count_k."""
    metrics: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """verl's name -> (sum, count), scalars without gradient."""

    @property
    def totals(self) -> torch.Tensor:
        """``total`` as [K]."""
        return self.total.reshape(-1)


@dataclass(frozen=True)
class StepInput:
    """Sequences of a step, prompts included. Values per response cover all N, values per token the n that this rank
    holds. Reductions over tokens go through ``together`` (``kept``), so results do not depend on how rows are split."""

    rewards: torch.Tensor
    """float64 [N]"""
    stats: Sequence[GroupStats]
    """[N], statistics of each reward's whole group."""
    cu_seqlens: torch.Tensor
    """int64 [n + 1]: held sequence i is positions ``cu_seqlens[i] .. cu_seqlens[i + 1]``."""
    mask: torch.Tensor
    """bool [T]; True if the next token is in the loss. Values at other positions are ignored, even NaN."""
    tokens: torch.Tensor
    """int64 [N]: number of each sequence's tokens in the loss."""
    old_logp: torch.Tensor | None = None
    """float32 [T], like ``ref_logp`` and ``values``."""
    ref_logp: torch.Tensor | None = None
    teacher_logp: torch.Tensor | None = None
    """Log-probs by each sequence's teacher; 0 for sequences without one."""
    values: torch.Tensor | None = None
    """The critic's value of the state before each position's next token."""
    bootstrap: torch.Tensor | None = None
    """float32 [n], value after the last token of a truncated sequence, 0 for a finished one; None for zeros."""
    greedy: torch.Tensor | None = None
    """float64 [N], reward of the greedy response to each sequence's prompt."""
    teacher_weights: torch.Tensor | None = None
    """float64 [N], ``weight`` of each sequence's teacher; 0 for sequences without one."""
    taught: torch.Tensor | None = None
    """bool [T], like ``LossInput.taught``."""
    expert: torch.Tensor | None = None
    """bool [N], True for demonstrated rows: they have no reward, and advantages of 0."""
    own: torch.Tensor | None = None
    """int64 [n], ascending: indices of the sequences that this rank holds; None if it holds all."""
    together: Together = alone
    """Gathers values of held sequences into values of the whole step."""

    @property
    def num_rows(self) -> int:
        """Number of rows, N."""
        return len(self.stats)

    @property
    def row(self) -> torch.Tensor:
        """int64 [T]: index of the held sequence (0 .. n-1) of each position."""
        return torch.repeat_interleave(self.cu_seqlens.diff(), output_size=self.mask.numel())

    @property
    def kept(self) -> Tokens:
        """Tokens in the loss, for reductions over the whole step."""
        return Tokens(self.mask, self.cu_seqlens.diff(), self.together)

    def held(self, values: torch.Tensor) -> torch.Tensor:
        """Select the held sequences' [n] from ``values`` [N] of all."""
        return values if self.own is None else values[self.own]


class Estimate(NamedTuple):
    """Advantages and returns of a step. 0 where the mask is False."""

    advantages: torch.Tensor
    """float32 [T]"""
    returns: torch.Tensor | None
    """float32 [T], the critic's targets; None without a critic."""
    metrics: dict[str, float]
    """verl's name -> value of the whole step, the same on every rank."""


Count = Callable[..., torch.Tensor]
C = TypeVar("C", bound=AlgorithmConfig)


@dataclass(frozen=True)
class Algorithm(Generic[C]):
    """One algorithm. C: the settings that its functions read (``config/algorithms.py``)."""

    name: str
    source: str
    """Paper."""
    roles: frozenset[str]
    """Members of ``ROLES``."""
    needs: frozenset[str]
    """Members of ``NEEDS``. old_logp, ref_logp, teacher_logp, advantages, values; ``kl``: ref_logp if ``kl.coef`` is
    not 0; ``group``: at least two responses per task, to compare; ``pairs``: rows of a micro-batch are chosen and
    rejected, alternating; ``greedy``: the reward of each prompt's greedy response; ``expert``: demonstrated rows
    too."""
    advantage: Callable[[float, GroupStats, C], float] | None
    """(reward, statistics of its whole group, settings) -> the advantage of every token of the response."""
    count: Count
    """(mask [T], row [T], num_rows, settings) -> this micro-batch's share of the global denominator, scalar or [K]. If
    ``needs`` has ``expert``, a fifth argument follows, bool [num_rows]. Unless ``aggregation`` is token_mean, the mask
    keeps only a trajectory's first row, so that rows with a kept token are trajectories."""
    loss: Callable[[LossInput, C], Loss]
    finish_advantages: Callable[[Sequence[float], Sequence[int], C], list[float]] | None = None
    """(advantages of all responses of a step, their token counts in the loss, settings) -> final advantages. Every rank
    has the whole step, so the result does not depend on how rows are split."""
    restarts_optimizer: bool = False
    """True if the optimizer's moments are reset at the start of each step, before its first update."""
    estimate: Callable[[StepInput, C], Estimate] | None = None
    """Replaces ``advantage`` if tokens of a response differ, or need more than its reward."""
    shares: bool = False
    """True if ``estimate`` accepts a part of the step's sequences: it reduces over tokens only by ``StepInput.kept`` or
    ``together``. Otherwise every rank holds the whole step."""
    offline: bool = False
    """Trains on rows of a file, without rollouts."""
    choose_pairs: Callable[[Sequence[float], C], list[tuple[int, int]]] | None = None
    """Chooses pairs of sampled responses: (rewards of a whole group, settings) -> (chosen, rejected) positions in the
    group."""

    @property
    def whole_step(self) -> bool:
        """True if every rank must hold all sequences of a step when it estimates advantages."""
        return self.estimate is not None and not self.shares

    def has_experts(self, config: C) -> bool:
        """Return True if the trainer adds expert rows to each step."""
        return "expert" in self.needs and expert_ratio(config) > 0

    def has_reference(self, config: C) -> bool:
        """Return True if the trainer computes ``ref_logp``, and has a model for it."""
        return "ref_logp" in self.needs_with(config)

    def needs_with(self, config: C) -> frozenset[str]:
        """Return ``needs`` with ``kl`` replaced: by ``ref_logp`` with these settings, or by nothing."""
        return self.needs - {"kl"} | ({"ref_logp"} if "kl" in self.needs and config.kl.coef != 0.0 else set())

    def advantages(self, rewards: Sequence[tuple[float, GroupStats]], tokens: Sequence[int], config: C) -> list[float]:
        """Return the advantages of all responses of a step, from their rewards and group statistics, and their numbers
        of tokens in the loss."""
        assert self.advantage is not None, f"algorithm {self.name} has no advantages of whole responses"
        values = [self.advantage(reward, stats, config) for reward, stats in rewards]
        return values if self.finish_advantages is None else self.finish_advantages(values, tokens, config)

    def step_advantages(self, step: StepInput, config: C) -> Estimate:
        """Return the advantages of every held token of a step, by ``estimate`` or by ``advantage`` and
        ``finish_advantages``. Every rank calls it.

        Raises:
            ConfigError: ``kl.place=reward`` with one advantage per response, which has no reward per token.
        """
        assert step.own is None or not self.whole_step, f"the estimate of {self.name} must be given the whole step"
        if self.estimate is not None:
            result = self.estimate(step, config)
        else:
            result = self._of_responses(step, config)
        kept, lengths = step.kept, step.cu_seqlens.diff()
        if step.expert is not None:
            kept = replace(kept, mask=step.mask & repeated(~step.held(step.expert), lengths))
        shown = kept.totals(torch.Tensor.double, result.advantages).spread("critic/advantages")
        return result._replace(metrics=shown | result.metrics)

    def _of_responses(self, step: StepInput, config: C) -> Estimate:
        if config.kl.place == "reward":
            raise ConfigError(
                f"algorithm.kl.place=reward: {self.name} has one advantage for a whole response, so the KL of its "
                "tokens has no place in it; set it to loss"
            )
        sampled = [True] * step.num_rows if step.expert is None else [not e for e in step.expert.tolist()]
        rows = [i for i, is_sampled in enumerate(sampled) if is_sampled]
        rewards, tokens = step.rewards.tolist(), step.tokens.tolist()
        values = self.advantages([(rewards[i], step.stats[i]) for i in rows], [tokens[i] for i in rows], config)
        by_row = torch.zeros(step.num_rows, dtype=torch.float64)
        by_row[rows] = torch.tensor(values, dtype=torch.float64)
        dtype = torch.float32 if step.old_logp is None else step.old_logp.dtype
        lengths = step.cu_seqlens.diff()
        advantages = repeated(step.held(by_row).to(dtype), lengths).masked_fill_(~step.mask, 0.0)
        return Estimate(advantages, None, {})

    def denominators(
        self, mask: torch.Tensor, row: torch.Tensor, num_rows: int, config: C, expert: torch.Tensor | None = None
    ) -> torch.Tensor:
        """float64 [K]: this micro-batch's share of the global denominators, to be summed over micro-batches and
        ranks."""
        more = (expert,) if "expert" in self.needs else ()
        return self.count(mask, row, num_rows, config, *more).double().reshape(-1)
