"""Difference of the engine's log-probs from the trainer's, of the tokens that a step has sampled."""

from __future__ import annotations

import math

import torch

from megarl.core.config import Config
from megarl.core.errors import WeightsDiffer
from megarl.learn.algorithms.terms.parts import counts, doubles, repeated
from megarl.learn.batching import Sequences
from megarl.train.update.batch import StepBatch
from megarl.train.update.lags import lag_metrics

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""sync.sample_tolerance where it is not set. On toy models the means were 1e-7 in float32 and 0.004 in bfloat16; a
larger model's, and a mixture of experts', are larger in bfloat16."""
QUANTILE = 0.99


def engine_gap(batch: StepBatch, sampled: torch.Tensor, config: Config) -> dict[str, float]:
    """Check and measure the difference (``check_samples``, ``mismatch``, ``lag_metrics``). Raises WeightsDiffer."""
    check_samples(batch, sampled, config)
    return mismatch(batch.sequences, sampled) | lag_metrics(batch.sequences, sampled)


def mismatch(sequences: Sequences, sampled: torch.Tensor) -> dict[str, float]:
    """Metrics of the difference, for the same weights and tokens.

    Args:
        sampled: bool [T]; the tokens that are compared.
    """
    old, engine = sequences.old_logp, sequences.engine_logp
    if old is None or engine is None or not bool(sampled.any()):
        return {}
    logp = doubles(sampled, lambda a, b: (a - b).abs(), old, engine)
    found = {
        "training/rollout_logp_diff_mean": float(logp.mean()),
        "training/rollout_logp_diff_p99": _quantile(logp),
        "training/rollout_logp_diff_max": float(logp.max()),
    }
    del logp
    probs = doubles(sampled, lambda a, b: (a.exp() - b.exp()).abs(), old, engine)
    return found | {
        "training/rollout_probs_diff_mean": float(probs.mean()),
        "training/rollout_probs_diff_max": float(probs.max()),
    }


def check_samples(batch: StepBatch, sampled: torch.Tensor, config: Config) -> None:
    """Compare the log-probs of what the engines have sampled with the weights that the step starts from.

    Real text, through all that a rollout goes through: prefix cache, batches, captured graphs. Sequences with a token
    of older weights are left out (its expert ids may be those that they chose), and tokens whose log-prob in the
    trainer is no number, which is the update filter's affair. One that is none in the engine counts as the largest
    difference.

    Args:
        sampled: bool [T]; sampled tokens that have both log-probs.
        config: Uses sync.sample_tolerance and model.dtype.

    Raises:
        WeightsDiffer: the mean is larger; names it, the quantile and the token that is furthest off.
    """
    sequences = batch.sequences
    old, engine, lag = sequences.old_logp, sequences.engine_logp, sequences.lag
    if old is None or engine is None:
        return
    tolerance = config.sync.sample_tolerance or TOLERANCES[config.model.dtype]
    own = sampled & old.isfinite()
    if lag is not None:
        own &= repeated(counts(lag > 0, sequences.lengths) == 0, sequences.lengths)
    difference = doubles(own, lambda a, b: (a - b).abs(), old, engine)
    if not len(difference) or float(difference.mean()) <= tolerance:
        return
    at = int(own.nonzero()[int(difference.nan_to_num(nan=torch.inf).argmax())])
    row = int(sequences.row[at])
    outcome = batch.rows[row]
    raise WeightsDiffer(
        f"the engine's log-probs of {len(difference)} tokens that it sampled with this step's weights are "
        f"{float(difference.mean()):.2e} from the trainer's on average, more than sync.sample_tolerance={tolerance:g} "
        f"({QUANTILE:.0%} within {_quantile(difference):.2e}; furthest at token "
        f"{at + 1 - int(sequences.cu_seqlens[row])} of trajectory {outcome.index} of group {outcome.group_id}: engine "
        f"{float(engine[at]):.6f}, trainer {float(old[at]):.6f}); the weights were proven equal, so decode, the prefix "
        "cache or a setting of sampling differs: compare with rollout.enforce_eager=true, or raise the tolerance"
    )


def _quantile(values: torch.Tensor) -> float:
    """``QUANTILE`` of the values [M], the next higher one. Changes their order, and takes no further memory."""
    at, inside = math.ceil(QUANTILE * (len(values) - 1)), values.numpy()
    inside.partition(at)
    return float(inside[at])
