"""Comparison of a fixed text's log-probs on both sides of a weight sync, and of an engine's two ways to compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.core.errors import WeightsDiffer

PROBE_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}
"""Defaults of sync.probe_tolerance. On toy models the two implementations differed by 1e-6 in float32 and 0.004 in
bfloat16. One layer with an outdated key norm, in decode only, caused 6e-4."""
WORST = 4.0
"""Largest difference of a single token in multiples of the tolerance. In bfloat16 a router sometimes chooses another
expert, which affects one token; wrong weights affect most tokens."""
DECODED = 8
"""Tokens that an engine samples after the probe text, if the context has room."""


class Probed(NamedTuple):
    """An engine's log-probs, at temperature 1."""

    prefill: Sequence[float]
    """Log-probs of the probe text from its second token on, computed as a prompt."""
    decode: Sequence[float] = ()
    """Log-probs of tokens sampled after the text, one at a time: on a GPU by CUDA graphs."""
    again: Sequence[float] = ()
    """Log-probs of the sampled tokens, computed as a prompt."""
    tokens: Sequence[int] = ()
    """The sampled tokens."""


class Scores(NamedTuple):
    """Log-probs in an engine's reply to one request, at temperature 1."""

    prompt: list[float]
    """Log-probs of the prompt from its second token on."""
    tokens: list[int]
    """Tokens sampled after the prompt."""
    sampled: list[float]
    """Log-probs of the sampled tokens."""

    @staticmethod
    def request(
        token_ids: Sequence[int], sample: int, *, first: str | None = None, among: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Body of vLLM's ``/inference/v1/generate``; ``first``: name of a request with priority over waiting ones.

        ``among``: tokens to sample from, with log-probs normalised over them; the prompt's log-probs are left out,
        since they would need the logits of all positions.
        """
        sampling: dict[str, Any] = {
            "max_tokens": sample,
            "temperature": 1.0,
            "seed": 0,
            "logprobs": 0,
            "ignore_eos": True,
        }
        sampling |= {"prompt_logprobs": 0} if among is None else {"allowed_token_ids": list(among)}
        sampling |= {"detokenize": False}
        return {"token_ids": list(token_ids), "sampling_params": sampling} | (
            {} if first is None else {"priority": -1, "request_id": first}
        )

    @classmethod
    def of(cls, answer: Any, token_ids: Sequence[int], sample: int, *, prompt: bool = True) -> Scores:
        """Parse a reply. Raises LookupError, TypeError or ValueError if it does not match the request."""
        asked = zip(answer["prompt_logprobs"][1:], token_ids[1:], strict=True) if prompt else ()
        [choice] = answer["choices"]
        sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        if not len(sampled) == len(choice["token_ids"]) == sample:
            raise ValueError(f"{sample} tokens were asked for")
        return cls([entry[str(token)]["logprob"] for entry, token in asked], choice["token_ids"], sampled)


@dataclass(frozen=True)
class FarText:
    """A fixed text, and tokens that may follow it. A short text does not reveal an attention window or rotary scaling
    that only one side has. A text that comes again after each sync reveals kept keys and values of older weights."""

    token_ids: Sequence[int]
    candidates: Sequence[int]
    """Tokens from which an engine samples one."""
    trainer_logp: Sequence[float]
    """Log-probs of the candidates at temperature 1; used on rank 0 only."""
    tolerance: float
    repeated: bool = False
    """The text comes again after each sync, without its prompt's log-probs, so that the engine may answer it from its
    prefix cache."""

    def check(self, engine: Scores) -> None:
        """Compare the log-prob of an engine's sampled candidate, normalised over the candidates. Raises
        WeightsDiffer."""
        [token], [logp] = engine.tokens, engine.sampled
        largest = max(self.trainer_logp)
        whole = largest + math.log(sum(math.exp(x - largest) for x in self.trainer_logp))
        expected = self.trainer_logp[self.candidates.index(token)] - whole
        [share] = _shares([logp], [expected])
        if not share <= WORST * self.tolerance:
            if self.repeated:
                raise WeightsDiffer(
                    f"the log-prob of token {token} after a text that comes again at each sync is {logp:.6f}, by the "
                    f"trainer {expected:.6f}, {share:.2e} of max(1, its size) apart, more than {WORST:g} times "
                    f"sync.probe_tolerance={self.tolerance:g}: the engine kept its prefix cache of older weights; look "
                    "at the reset of the cache after an update"
                )
            raise WeightsDiffer(
                f"after {len(self.token_ids)} tokens the log-prob of token {token} among {len(self.candidates)} is "
                f"{logp:.6f} in the engine and {expected:.6f} in the trainer, {share:.2e} of max(1, its size) apart, "
                f"more than {WORST:g} times sync.probe_tolerance={self.tolerance:g}; if the short probe text agrees, "
                "one side has a window of attention or another rotary scaling: compare sliding_window and rope of "
                "config.json with rollout.engine_options"
            )


@dataclass(frozen=True)
class ProbeText:
    """A short fixed text and its log-probs in the trainer."""

    token_ids: Sequence[int]
    trainer_logp: Sequence[float]
    """Log-probs of ``token_ids[1:]`` at temperature 1; used on rank 0 only."""
    tolerance: float
    decode: int = DECODED
    """Tokens that an engine samples after it."""
    far: Sequence[FarText] = ()
    """Long texts compared in addition."""

    def check(self, engine: Probed) -> float:
        """Return the largest difference of an engine's log-probs from the trainer's. Raises WeightsDiffer."""
        return check_probe(engine, self.trainer_logp, self.tolerance).max_difference


class ProbeResult(NamedTuple):
    """Log-probs of the probe text on both sides: largest difference, and position of the largest relative one."""

    max_difference: float
    position: int


def check_probe(engine: Probed, trainer: Sequence[float], tolerance: float) -> ProbeResult:
    """Compare log-probs of fixed tokens in engine and trainer with the same weights, and the engine's decoded log-probs
    with its prompt log-probs of the same sampled tokens.

    A token's difference counts in multiples of max(1, |log-prob|), an estimate of its logit's size: rounding to
    bfloat16 changes a logit by up to 2^-9 of itself, up to 0.06 for an unlikely token. The mean may be up to
    ``tolerance``, a token of the fixed text up to ``WORST`` times as much; sampled tokens vary, so only their mean
    counts.

    Raises:
        WeightsDiffer: they differ by more, or are NaN. This detects equal stored weights with a different computation
            (an old packed copy, stale keys and values, another rope, a CUDA graph that reads freed weights).
    """
    shares = _shares(engine.prefill, trainer)
    at, mean = _largest(shares), mean_share(engine.prefill, trainer)
    if not (mean <= tolerance and shares[at] <= WORST * tolerance):
        raise WeightsDiffer(
            f"after a sync the log-probs of the probe text are {mean:.2e} of max(1, their size) apart on average, "
            f"{shares[at]:.2e} at token {at + 1} (engine {engine.prefill[at]:.6f}, trainer {trainer[at]:.6f}), more "
            f"than sync.probe_tolerance={tolerance:g}, of one token {WORST:g} times as much; the stored weights agree, "
            "so the engine computes from other ones or computes another function"
        )
    own, mean = _shares(engine.decode, engine.again), mean_share(engine.decode, engine.again)
    if not mean <= tolerance:
        far = _largest(own)
        raise WeightsDiffer(
            f"after a sync the log-probs of {len(own)} tokens that the engine decoded after the probe text are "
            f"{mean:.2e} of max(1, their size) from those of its own prefill on average, more than "
            f"sync.probe_tolerance={tolerance:g} (token {far + 1}: {engine.decode[far]:.6f} and "
            f"{engine.again[far]:.6f}); prefill agrees with the trainer, so decode computes from other weights (a "
            "captured graph that reads old ones) or from other keys and values"
        )
    return ProbeResult(max(abs(e - t) for e, t in zip(engine.prefill, trainer, strict=True)), at)


def mean_share(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the mean difference, in multiples of max(1, |expected|); 0 if empty."""
    shares = _shares(found, expected)
    return sum(shares) / len(shares) if shares else 0.0


def _shares(found: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Return the differences in multiples of max(1, |expected|)."""
    return [abs(a - b) / max(1.0, abs(b)) for a, b in zip(found, expected, strict=True)]


def _largest(shares: Sequence[float]) -> int:
    """Return the index of the largest; NaN counts as larger than any number."""
    return max(range(len(shares)), key=lambda i: (shares[i] != shares[i], shares[i]))
