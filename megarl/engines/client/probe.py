"""Comparison of a fixed text's log-probs on both sides of a weight sync, and of an engine's two ways to compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.core.errors import WeightsDiffer

PROBE_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}
"""sync.probe_tolerance where it is not set. On toy models two implementations were 1e-6 apart in float32, 0.004 in
bfloat16. One layer's old norm of keys, in decode alone, made 6e-4."""
WORST = 4.0
"""Multiples of the tolerance that a single token may be off. In bfloat16 a router now and then chooses another expert:
that is one token, and wrong weights are most of them."""
DECODED = 8
"""Tokens that an engine samples after the probe text, where the context has room."""


class Probed(NamedTuple):
    """An engine's log-probs, at temperature 1."""

    prefill: Sequence[float]
    """Those of the probe text's tokens from the second on, computed as a prompt's."""
    decode: Sequence[float] = ()
    """Those of tokens that it sampled after the text, one at a time: on a GPU by captured graphs."""
    again: Sequence[float] = ()
    """Those of the same tokens, computed as a prompt's."""
    tokens: Sequence[int] = ()
    """These tokens."""


class Scores(NamedTuple):
    """Log-probs in an engine's answer to one request, at temperature 1."""

    prompt: list[float]
    """Those of the prompt's tokens from the second on."""
    tokens: list[int]
    """Sampled after the prompt."""
    sampled: list[float]
    """Their log-probs."""

    @staticmethod
    def request(
        token_ids: Sequence[int], sample: int, *, first: str | None = None, among: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Body of vLLM's ``/inference/v1/generate``; ``first``: name of a request that goes before those that wait.

        ``among``: tokens to sample from, whose log-probs are then those among them; the prompt's are left out, since
        they would need logits of all its positions at once.
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
        """Read an answer. Raises LookupError, TypeError or ValueError where it is none to that request."""
        asked = zip(answer["prompt_logprobs"][1:], token_ids[1:], strict=True) if prompt else ()
        [choice] = answer["choices"]
        sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        if not len(sampled) == len(choice["token_ids"]) == sample:
            raise ValueError(f"{sample} tokens were asked for")
        return cls([entry[str(token)]["logprob"] for entry, token in asked], choice["token_ids"], sampled)


@dataclass(frozen=True)
class FarText:
    """A fixed text as long as an engine's context, and tokens that may follow it. A short text shows neither a window
    of attention nor a rotary scaling that only one side has."""

    token_ids: Sequence[int]
    candidates: Sequence[int]
    """Tokens of which an engine samples one."""
    trainer_logp: Sequence[float]
    """Their log-probs at temperature 1; they count on rank 0 only."""
    tolerance: float

    def check(self, engine: Scores) -> None:
        """Compare the log-prob, among the candidates, of the one that an engine has sampled. Raises WeightsDiffer."""
        [token], [logp] = engine.tokens, engine.sampled
        largest = max(self.trainer_logp)
        whole = largest + math.log(sum(math.exp(x - largest) for x in self.trainer_logp))
        expected = self.trainer_logp[self.candidates.index(token)] - whole
        [share] = _shares([logp], [expected])
        if not share <= WORST * self.tolerance:
            raise WeightsDiffer(
                f"after {len(self.token_ids)} tokens the log-prob of token {token} among {len(self.candidates)} is "
                f"{logp:.6f} in the engine and {expected:.6f} in the trainer, {share:.2e} of max(1, its size) apart, "
                f"more than {WORST:g} times sync.probe_tolerance={self.tolerance:g}; if the short probe text agrees, "
                "one side has a window of attention or another rotary scaling: compare sliding_window and rope of "
                "config.json with rollout.engine_options"
            )


@dataclass(frozen=True)
class ProbeText:
    """A short fixed text, and what the trainer computes for it."""

    token_ids: Sequence[int]
    trainer_logp: Sequence[float]
    """Log-probs of ``token_ids[1:]`` at temperature 1; they count on rank 0 only."""
    tolerance: float
    decode: int = DECODED
    """Tokens that an engine samples after it."""
    far: Sequence[FarText] = ()
    """Compared besides."""

    def check(self, engine: Probed) -> float:
        """Return the largest difference of an engine's log-probs from the trainer's. Raises WeightsDiffer."""
        return check_probe(engine, self.trainer_logp, self.tolerance).max_difference


class ProbeResult(NamedTuple):
    """Log-probs of the probe text on both sides: largest difference, and where the largest share of a log-prob is."""

    max_difference: float
    position: int


def check_probe(engine: Probed, trainer: Sequence[float], tolerance: float) -> ProbeResult:
    """Compare log-probs of the same fixed tokens, as the engine and the trainer compute them with the same weights,
    and those of tokens that the engine sampled with its own of the same tokens as a prompt.

    A token's difference counts in multiples of max(1, |log-prob|), which stands for the size of its logit: rounded to
    bfloat16 that is off by up to 2^-9 of itself, so that of an unlikely token 0.06 is a rounding. The mean may be
    ``tolerance``, and a token of the fixed text ``WORST`` times as much; the sampled ones are others each time.

    Raises:
        WeightsDiffer: they differ by more, or are not numbers; equal stored weights that compute something else (an old
            packed copy, stale keys and values, another rope, a captured graph that reads freed weights) show here.
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
    """Mean difference, in multiples of max(1, |expected|); 0 of none."""
    shares = _shares(found, expected)
    return sum(shares) / len(shares) if shares else 0.0


def _shares(found: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Differences in multiples of max(1, |expected|)."""
    return [abs(a - b) / max(1.0, abs(b)) for a, b in zip(found, expected, strict=True)]


def _largest(shares: Sequence[float]) -> int:
    """Place of the largest; NaN is above all."""
    return max(range(len(shares)), key=lambda i: (shares[i] != shares[i], shares[i]))
