"""Difference between the engine's and the trainer's log-probs of a step's sampled tokens: over all trained tokens, and
by lag, as the distance of their policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from megarl.config import Config
from megarl.core.errors import WeightsDiffer
from megarl.core.schema import Outcome, name_of
from megarl.learn.algorithms.terms.reduction import Tokens, Totals, counts, repeated
from megarl.learn.batching import Sequences
from megarl.train.batch.batch import StepBatch

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""Defaults of sync.sample_tolerance. Means on toy models were 1e-7 in float32 and 0.004 in bfloat16; in bfloat16 larger
models and mixtures of experts have larger ones."""
QUANTILE = 0.99


def engine_gap(batch: StepBatch, sampled: torch.Tensor, config: Config) -> dict[str, float]:
    """Check and measure the difference (``check_samples``, ``mismatch``, ``lag_metrics``) over the whole step. Every
    rank calls it. Raises WeightsDiffer, on every rank.
    """
    check_samples(batch, sampled, config)
    kept = batch.kept(sampled)
    return mismatch(batch.sequences, kept) | lag_metrics(batch.sequences, kept) | stale_keys(batch, sampled, config)


def mismatch(sequences: Sequences, kept: Tokens) -> dict[str, float]:
    """Return metrics of the difference, for equal weights and tokens.

    Args:
        kept: The tokens to compare.
    """
    old, engine = sequences.old_logp, sequences.engine_logp
    if old is None or engine is None:
        return {}
    logp, probs = kept.totals_of_each(lambda a, b: (_difference(a, b), _difference(a.exp(), b.exp())), old, engine)
    if not logp.number:
        return {}
    return {
        "training/rollout_logp_diff_mean": logp.mean,
        "training/rollout_logp_diff_p99": kept.quantile(QUANTILE, _difference, old, engine),
        "training/rollout_logp_diff_max": logp.max,
        "training/rollout_probs_diff_mean": probs.mean,
        "training/rollout_probs_diff_max": probs.max,
    }


def stale_keys(batch: StepBatch, sampled: torch.Tensor, config: Config) -> dict[str, float]:
    """Return ``check/stale_keys``: the mean difference of tokens of the step's weights in responses that older weights
    have begun; nothing without any. The engine computes their whole context again after a sync. Every rank calls it.

    Expert ids of a context may be those of the older weights, so models that replay them are left out.
    """
    sequences = batch.sequences
    old, engine = sequences.old_logp, sequences.engine_logp
    if old is None or engine is None or not config.sync.max_staleness or config.rollout.routing_replay:
        return {}
    # Other ranks' sequences may have lags even if these have none.
    lag = torch.zeros(len(old), dtype=torch.int16) if sequences.lag is None else sequences.lag
    begun = repeated(counts(sampled & (lag > 0), sequences.lengths) > 0, sequences.lengths)
    kept = batch.kept(sampled & begun & (lag == 0) & old.isfinite())
    found = kept.totals(_difference, old, engine)
    return {"check/stale_keys": found.mean} if found.number else {}


def check_samples(batch: StepBatch, sampled: torch.Tensor, config: Config) -> None:
    """Compare the engine's log-probs of sampled tokens with those of the step's starting weights.

    This checks real text through the whole rollout path: prefix cache, batches, captured graphs. Sequences with a token
    of older weights are skipped (their expert ids may be from the older weights). Tokens with a non-finite log-prob
    in the trainer are skipped: the update filter handles them. A NaN from the engine counts as the largest difference.

    Args:
        sampled: bool [T]; sampled tokens with both log-probs.
        config: Uses sync.sample_tolerance and model.dtype.

    Raises:
        WeightsDiffer: the mean exceeds the tolerance; the text has the mean, the quantile and the furthest token.
    """
    sequences = batch.sequences
    old, engine, lag = sequences.old_logp, sequences.engine_logp, sequences.lag
    if old is None or engine is None:
        return
    tolerance = config.sync.sample_tolerance or TOLERANCES[config.model.dtype]
    own = sampled & old.isfinite()
    if lag is not None:
        own &= repeated(counts(lag > 0, sequences.lengths) == 0, sequences.lengths)
    kept = batch.kept(own)
    difference = kept.totals(_difference, old, engine)
    if not difference.number or difference.mean <= tolerance:
        return
    raise WeightsDiffer(_text(kept, old, engine, difference, tolerance, batch.rows))


def _text(
    kept: Tokens, old: torch.Tensor, engine: torch.Tensor, difference: Totals, tolerance: float, rows: Sequence[Outcome]
) -> str:
    """Return the message of ``check_samples``, the same on every rank: all ranks get the furthest token's numbers."""
    furthest = [
        _furthest(mask, *own)
        for mask, *own in zip(*(x.split(kept.lengths.tolist()) for x in (kept.mask, old, engine)), strict=True)
    ]
    of_all = kept.together(torch.tensor(furthest, dtype=torch.float64).reshape(len(furthest), 4))
    row = int(of_all[:, 0].argmax())
    _, at, of_engine, of_trainer = of_all[row].tolist()
    return (
        f"the engine's log-probs of {difference.number} tokens that it sampled with this step's weights are "
        f"{difference.mean:.2e} from the trainer's on average, more than sync.sample_tolerance={tolerance:g} "
        f"({QUANTILE:.0%} within {kept.quantile(QUANTILE, _difference, old, engine):.2e}; furthest at token "
        f"{int(at) + 1} of {name_of(rows[row])}: engine {of_engine:.6f}, trainer {of_trainer:.6f}); "
        "the weights were proven equal, so decode, the prefix cache, a setting of sampling or attention to far tokens "
        "(a window, a rotary scaling) differs: compare with rollout.enforce_eager=true, or raise the tolerance"
    )


def _furthest(mask: torch.Tensor, old: torch.Tensor, engine: torch.Tensor) -> tuple[float, float, float, float]:
    """Return (difference, position, engine's log-prob, trainer's) of a sequence's token with the largest difference,
    which is below 0 if no token counts."""
    difference = _difference(old, engine).nan_to_num(nan=torch.inf).masked_fill(~mask, -1.0)
    at = int(difference.argmax())
    return float(difference[at]), float(at), float(engine[at]), float(old[at])


def _difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).abs()


LARGEST_NAMED = 8
"""Lags from this one on are measured together."""


def lag_metrics(sequences: Sequences, kept: Tokens) -> dict[str, float]:
    """Measure the distance of the behaviour policy (engine) from the proximal policy (trainer at the start of the
    step), by lag, over the whole step.

    With w = exp(old_logp - engine_logp) of the M tokens of a lag: the effective sample size (Σw)² / Σw², as a share of
    M, and the mean of |log w|.

    Args:
        kept: The tokens to compare.
    """
    old, engine, lag = sequences.old_logp, sequences.engine_logp, sequences.lag
    if old is None or engine is None:
        return {}
    # Other ranks' sequences may have lags even if these have none.
    named = kept.lengths.new_zeros(1).expand(len(old)) if lag is None else lag.clamp(max=LARGEST_NAMED)
    largest = kept.totals(torch.Tensor.double, named)
    metrics: dict[str, float] = {}
    for n in range(int(largest.max) + 1 if largest.number else 0):
        own = kept if not largest.max else replace(kept, mask=kept.mask & (named == n))
        log_ratio, distance = own.totals_of_each(_log_ratio_and_size, old, engine)
        if not log_ratio.number:
            continue
        total, squares = own.totals_of_each(partial(_weights_and_squares, top=log_ratio.max), old, engine)
        found = {"logp_diff": distance.mean, "ess": total.sum * total.sum / (squares.sum * log_ratio.number)}
        metrics |= {f"training/{name}/lag_{n}": value for name, value in found.items()}
    return metrics


def _log_ratio_and_size(old: torch.Tensor, engine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_ratio = old.double() - engine.double()
    return log_ratio, log_ratio.abs()


def _weights_and_squares(old: torch.Tensor, engine: torch.Tensor, top: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return w = exp(log ratio - top) and w². The factor cancels, and prevents overflow of the largest weight."""
    weights = (old.double() - engine.double() - top).exp()
    return weights, weights.square()
