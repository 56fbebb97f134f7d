"""Metrics of how a step's responses were sampled, for alarms: ends, equal responses, and likeliest tokens.

Sampling is a game of known odds. With the samples of a group in order, the next one equals one of those before it with
the probability p that these have, by the engine's own log-probs. Likewise a token is among the likeliest ones with the
trainer's probability p. Let e be 1 if it happens, else 0. The sum of e - p over a step has mean 0 and variance
v = sum(p (1 - p)), whatever the model is. By Freedman's inequality it exceeds s with a probability below
exp(-s^2 / (2 (v + s/3))). The negative exponent is the evidence, in nats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache

import numpy as np
import torch
import torch.distributed as dist

from megarl.config import Config
from megarl.core.schema import Outcome
from megarl.learn.algorithms.terms.reduction import counts
from megarl.learn.batching import Sequences
from megarl.learn.memory.phases import Phase
from megarl.learn.models.teaching import LikeliestTokens
from megarl.tasks import ChatTokenizer
from megarl.train.batch.batch import StepBatch
from megarl.train.inference.models import Models
from megarl.train.inference.sampled_ends import WatchedHead, drops_by_length, early_ends
from megarl.train.memory import PhaseMemory
from megarl.train.part import Metrics, Part
from megarl.train.ranks import TrainState

EVERY = 10
"""Steps from one forward pass over ``TOKENS`` tokens to the next, so that it costs little in small jobs too."""
TOKENS = 2048
FIRST_TIMES = 4
"""Factor of ``TOKENS`` in a run's first step: most faults are there from the start."""
LIKELIEST = 16
"""Tokens of a place that are compared with the sampled one."""
SHARES = (0.5, 0.8, 0.9, 0.95)
"""Probabilities of the smallest sets of likeliest tokens that count as one event: top-p of about this size makes it
certain."""


class SamplingChecks(Part):
    """Adds ``check/no_end``, ``check/past_end``, ``check/equal_samples``, ``check/likeliest``,
    ``check/early_ends`` and ``check/head_dtype`` to the metrics."""

    def __init__(self, config: Config, models: Models, memory: PhaseMemory) -> None:
        self._config, self._models, self._memory = config, models, memory
        self._found: Metrics = {}

    @cached_property
    def _ends(self) -> torch.Tensor:
        return torch.tensor(ChatTokenizer.of(self._config).eos_ids)

    def before_update(self, state: TrainState, batch: StepBatch) -> None:
        sequences, rows = batch.sequences, batch.rows
        without, beyond = end_faults(sequences, self._ends)
        stopped = torch.tensor([reason == "stop" for reason in batch.finish_reasons], dtype=torch.bool)
        of_rows = [sequences.together(each)[: len(rows)] for each in (without.to(torch.int8), beyond.to(torch.int8))]
        self._found = {
            "check/no_end": float((of_rows[0].bool() & stopped).sum() / stopped.sum().clamp(min=1)),
            "check/past_end": float(of_rows[1].double().mean()),
        }
        if self._config.rollout.spare:  # the first samples to end are more alike
            return
        texts, logp = (sequences.together(each)[: len(rows)] for each in whole_responses(sequences))
        self._found["check/equal_samples"] = evidence(repeats(rows, texts.tolist(), logp.exp().tolist()))
        if state.step % EVERY == 0:  # of the step alone: a resumed run has the metrics of one left alone
            self._found |= self._likeliest(batch, TOKENS * (1 if state.step else FIRST_TIMES))

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        metrics |= self._found

    def _likeliest(self, batch: StepBatch, most: int) -> Metrics:
        """Compare some of the step's tokens with the likeliest ones of the weights that sampled them. Every rank calls
        it."""
        sequences = some_of(batch.sequences, len(batch.rows), most)
        if sequences is None or batch.sequences.images is not None:
            return {}
        self._memory.enter(Phase.UPDATE)  # the next phase, which has the actor
        model, size = self._models.actor.model, self._models.head.vocab_size
        k, head = min(LIKELIEST, size), WatchedHead(LikeliestTokens(min(LIKELIEST, size), size))
        top = torch.zeros(len(sequences.tokens), 2 * k)
        model.outputs(sequences, [model.micro_batches(sequences)], columns=head, more=top)
        sequences.add_up(top)
        known = sequences.mask
        ids, probabilities = top[known, :k].long(), top[known, k:].double().exp()
        sampled = sequences.tokens.roll(-1)[known].long()
        found = {"check/likeliest": likeliest(sampled, ids, probabilities)}
        if self._config.model.head_dtype == "float32":
            found["check/head_dtype"] = head.other_than(torch.float32)
        if not drops_by_length(self._config):
            found["check/early_ends"] = evidence(early_ends(sampled, ids, probabilities, self._ends))
        return found


def likeliest(sampled: torch.Tensor, ids: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return the evidence that tokens are among the likeliest more often than their probabilities allow, for the best
    of the ``SHARES``.

    Args:
        sampled: int64 [n].
        ids: int64 [n, k], likeliest first.
        probabilities: float64 [n, k].
    """
    together = probabilities.cumsum(1)
    place = torch.where((ids == sampled[:, None]).any(1), (ids == sampled[:, None]).int().argmax(1), ids.shape[1])
    found = []
    for share in SHARES:
        last = (together < share).sum(1).clamp(max=ids.shape[1] - 1)  # chosen by the probabilities alone
        odds = together.gather(1, last[:, None])[:, 0]
        found.append(evidence(zip((place <= last).tolist(), odds.tolist(), strict=True)))
    return max(found)


def evidence(drawn: Iterable[tuple[bool, float]]) -> float:
    """Return the evidence, in nats, that events happen more often than their probabilities allow; 0 if they do not.

    Args:
        drawn: (it happened, its probability given those before) of each event.
    """
    more, variance = 0.0, 0.0
    for happened, p in drawn:
        p = min(1.0, max(0.0, p))
        more, variance = more + happened - p, variance + p * (1.0 - p)
    return more * more / (2.0 * (variance + more / 3.0)) if more > 0.0 else 0.0


def repeats(rows: Sequence[Outcome], texts: Sequence[int], probabilities: Sequence[float]) -> list[tuple[bool, float]]:
    """Return (a response equals one before it in its group, probability of that), for responses of a single turn.

    Args:
        texts: A number for each response, the same for equal ones; 0 to leave it out.
        probabilities: Each response's probability.
    """
    seen: dict[str, dict[int, float]] = {}
    found: list[tuple[bool, float]] = []
    for row, text, probability in zip(rows, texts, probabilities, strict=True):
        if row.num_turns != 2 or not text:
            continue
        before = seen.setdefault(row.group_id, {})
        if before:
            found.append((text in before, sum(before.values())))
        before.setdefault(text, probability)
    return found


def end_faults(sequences: Sequences, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bool [n] twice, for the held sequences: the last token is not an end token; a response goes on after one.

    Args:
        ends: int64 [k], ids of the end tokens.
    """
    is_end = torch.isin(sequences.tokens.long(), ends)
    without = ~is_end[sequences.cu_seqlens[1:] - 1]
    inside = sequences.sampled[:-1] & sequences.sampled[1:] & is_end[1:]
    beyond = counts(torch.cat([inside, inside.new_zeros(1)]), sequences.lengths) > 0
    return without, beyond


def whole_responses(sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 [n], a number made of the tokens in the loss (0 without any), and float64 [n], their log-prob by the
    engine, for the held sequences.

    The number is a sum of token ids, each times a random odd number of its place, so equal responses have equal ones.
    """
    held = counts(sequences.sampled, sequences.lengths)
    number = len(held)
    places = sequences.sampled[:-1].nonzero()[:, 0].numpy()
    row = np.repeat(np.arange(number), held.numpy())
    within = np.arange(len(row)) - np.repeat((held.cumsum(0) - held).numpy(), held.numpy())
    longest = int(held.max()) if number else 0
    factors = _odd_numbers(-(-longest // 64) * 64)  # rounded up, so that most steps need the same
    texts = np.zeros(number, dtype=np.uint64)
    np.add.at(texts, row, (sequences.tokens.numpy()[places + 1].astype(np.uint64) + 1) * factors[within])
    texts = np.where(held.numpy() > 0, (texts >> 2) + 1, 0).astype(np.int64)
    given = sequences.engine_logp
    logp = torch.zeros(number, dtype=torch.float64)
    if given is not None:
        logp.index_add_(0, torch.from_numpy(row), given[sequences.sampled].double())
    return torch.from_numpy(texts), logp


@lru_cache(1)
def _odd_numbers(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(2**63, size=count, dtype=np.uint64) * 2 + 1


def some_of(sequences: Sequences, rows: int, most: int) -> Sequences | None:
    """Return some of a step's sampled sequences, at most ``most`` tokens, on every rank; None if none fits. Tokens of
    older weights are not masked. Every rank calls it.

    Args:
        rows: Number of sampled sequences in the step; others follow them.
    """
    wanted, total = set[int](), 0
    for number, length in enumerate(sequences.step_lengths[:rows].tolist()):
        if total + length <= most:
            wanted.add(number)
            total += length
    numbers = range(len(sequences)) if sequences.share is None else sequences.share.numbers.tolist()
    places, found = sequences.cu_seqlens.tolist(), dict[int, tuple[list[int], list[bool]]]()
    own = sequences.sampled if sequences.lag is None else sequences.sampled & (sequences.lag == 0)
    for at, number in enumerate(numbers):
        if number in wanted:
            part = slice(places[at], places[at + 1])
            found[number] = sequences.tokens[part].tolist(), own[part].tolist()
    if sequences.share is not None:
        everyone: list[dict[int, tuple[list[int], list[bool]]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        found = {number: each for one in everyone for number, each in one.items()}
    if not any(any(mask) for _, mask in found.values()):
        return None
    each = [found[number] for number in sorted(found)]
    tokens = torch.tensor([token for ids, _ in each for token in ids], dtype=torch.int32)
    mask = torch.tensor([bool(kept) for _, masks in each for kept in masks], dtype=torch.bool)
    return Sequences(tokens, torch.tensor([len(ids) for ids, _ in each]), mask)
