"""The sequences of a step that a rank holds, concatenated; their exchange between ranks.

Shape legend: N sequences of a step, n of them held by this rank, T positions of the n sequences.

Position i holds the log-prob, mask and advantage of the token at i + 1, because the model's output at i predicts it.
Shape legend: N sequences of a step, n of them held (N if a rank holds all), T tokens of the held ones together; P
prompt tokens, R response tokens; L layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.core.schema import TeacherScores, TrainingSample
from megarl.learn.batching.images import Images

PIECE = 2**20
"""Maximum values of a step per exchange between ranks; a longer sequence is exchanged alone."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by their size in bytes."""
_NOTHING = torch.iinfo(torch.int64).min
"""The smallest integer; ranks that hold a sequence send this or a larger one."""


@dataclass(frozen=True)
class StepShare:
    """The sequences of a step that a rank holds. Ranks of one replica may hold the same sequences, with equal bits."""

    numbers: torch.Tensor
    """int64 [n], ascending, at least one: indices of the held sequences within the step."""
    lengths: torch.Tensor
    """int64 [N]: lengths of all sequences of the step."""
    patches: Sequence[int] | None = None
    """[N]: image patches of each sequence of the step; None without images."""

    @classmethod
    def of(cls, taken: Collection[int], lengths: torch.Tensor, patches: Sequence[int] | None = None) -> StepShare:
        """Make the share of a rank whose models process the sequences ``taken``. Every rank calls it.

        Sequences that no model processes (they have no token in the loss) are dealt in turn, so that some rank holds
        each. A rank whose models process none holds one: padding in micro-batches reads some tokens.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        held = torch.zeros(len(lengths), dtype=torch.int64)
        held[list(taken)] = 1
        somewhere = held.clone()
        dist.all_reduce(somewhere, dist.ReduceOp.MAX)
        held[torch.nonzero(somewhere == 0)[rank::world, 0]] = 1
        if not held.any():
            held[rank % len(lengths)] = 1
        return cls(torch.nonzero(held)[:, 0], lengths, patches)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return self.numbers.nbytes + self.lengths.nbytes

    def local(self, numbers: Sequence[int]) -> list[int]:
        """Return the indices of the step's sequences ``numbers`` among the held ones."""
        wanted = torch.tensor(numbers, dtype=torch.int64)
        places = torch.searchsorted(self.numbers, wanted)
        are_held = torch.equal(self.numbers[places.clamp(max=len(self.numbers) - 1)], wanted)
        assert are_held, f"of the sequences {numbers} this rank does not hold all: its share was made for other lists"
        found: list[int] = places.tolist()
        return found

    def together(self, values: torch.Tensor) -> torch.Tensor:
        """Gather values of the held sequences [n, ...] into values of the whole step [N, ...]. Every rank calls it.

        Exact: bits are exchanged as integers, reduced by maximum.
        """
        whole = torch.full((len(self.lengths), *values.shape[1:]), _NOTHING)
        whole[self.numbers] = values.view(_BITS[values.element_size()]).long()
        dist.all_reduce(whole, dist.ReduceOp.MAX)
        return whole.to(_BITS[values.element_size()]).view(values.dtype)

    def add_up(self, values: torch.Tensor) -> None:
        """Sum ``values`` [T, ...] in place over the ranks that hold a position. Every rank calls it."""
        starts = self.lengths.cumsum(0) - self.lengths
        own = self.lengths[self.numbers]
        ends = own.cumsum(0).tolist()
        for first, end in _runs(self.lengths.tolist(), max(1, PIECE // prod(values.shape[1:]))):
            held = range(*torch.searchsorted(self.numbers, torch.tensor([first, end])).tolist())
            places = []
            for i in held:
                length, start = int(own[i]), int(starts[self.numbers[i]] - starts[first])
                places.append((slice(ends[i] - length, ends[i]), slice(start, start + length)))
            piece = values.new_zeros(int(self.lengths[first:end].sum()), *values.shape[1:])
            for mine, there in places:
                piece[there] = values[mine]
            dist.all_reduce(piece)
            for mine, there in places:
                values[mine] = piece[there]


def _runs(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield (first sequence, sequence after the last) of runs of at most ``most`` positions."""
    first, size = 0, 0
    for i, length in enumerate(lengths):
        if size and size + length > most:
            yield first, i
            first, size = i, 0
        size += length
    yield first, len(lengths)


IGNORED = -100
NO_IDS = -1
"""Expert ids in ``Sequences.routing`` of a token that no engine has computed."""


@dataclass
class Sequences:
    """A rank's share of a step, or the whole step; docs/roles.md lists the bytes in host memory.

    Values per token, and values gathered over the step, do not depend on the grid.
    """

    tokens: torch.Tensor
    """int32 [T]"""
    lengths: torch.Tensor
    """int64 [n], at least 1 each."""
    mask: torch.Tensor
    """bool [T]; positions whose next token is in the loss, never the last of a sequence. (For trained scores: exactly
    ``score_positions``.)"""
    advantages: torch.Tensor | None = None
    """float32 [T], like the following fields."""
    returns: torch.Tensor | None = None
    engine_logp: torch.Tensor | None = None
    """Log-probs by the engine; for demonstrations by their teacher if the loss reads them, else 0."""
    old_logp: torch.Tensor | None = None
    ref_logp: torch.Tensor | None = None
    teacher_logp: torch.Tensor | None = None
    """Log-probs by each sequence's teacher; 0 for sequences without one. Before inference only of
    teachers at URLs."""
    values: torch.Tensor | None = None
    expert: torch.Tensor | None = None
    """bool [n]; True for demonstrations among responses (mix)."""
    lag: torch.Tensor | None = None
    """int16 [T]: steps by which the sampling weights are older than the step's starting weights; 0 for tokens that no
    engine sampled. None if all are 0."""
    images: Images | None = None
    """None without images."""
    trajectory: torch.Tensor | None = None
    """int64 [n], never decreasing: index of each sequence's trajectory; None if each has one sequence."""
    routing: torch.Tensor | None = None
    """int8 or int16 [T, L, K]: expert ids that an engine chose for each token; ``NO_IDS`` for a sequence's last token
    and for demonstrations. None without ``rollout.routing_replay``."""
    share: StepShare | None = None
    """The share of the step that these sequences are; None if they are the whole step."""

    @property
    def step_lengths(self) -> torch.Tensor:
        """int64 [N]: lengths of all sequences of the step."""
        return self.lengths if self.share is None else self.share.lengths

    @property
    def step_patches(self) -> Sequence[int] | None:
        """[N]: image patches of each sequence of the step; None without images."""
        if self.share is not None:
            return self.share.patches
        return None if self.images is None else [self.images.patches(i) for i in range(len(self))]

    def held(self, values: torch.Tensor) -> torch.Tensor:
        """Select the held values [n, ...] from values of the whole step [N, ...]."""
        return values if self.share is None else values[self.share.numbers]

    def together(self, values: torch.Tensor) -> torch.Tensor:
        """Gather values of these sequences [n, ...] into values of the whole step [N, ...], exactly. Every rank calls
        it."""
        return values if self.share is None else self.share.together(values)

    def add_up(self, values: torch.Tensor) -> None:
        """Sum ``values`` [T, ...] over all ranks in place. Every rank calls it."""
        if self.share is None:
            dist.all_reduce(values)
        else:
            self.share.add_up(values)

    @property
    def sampled(self) -> torch.Tensor:
        """bool [T]: positions in the loss whose token an engine sampled."""
        return self.mask if self.expert is None else self.mask & torch.repeat_interleave(~self.expert, self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int64 [n + 1]: sequence i is positions ``cu_seqlens[i] .. cu_seqlens[i + 1]``."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @property
    def targets(self) -> torch.Tensor:
        """int64 [T]: the next token if it is in the loss, else ``IGNORED``. The trainer uses ``MicroBatch.targets``
        instead."""
        return torch.roll(self.tokens, -1).long().masked_fill_(~self.mask, IGNORED)

    @property
    def row(self) -> torch.Tensor:
        """int64 [T]: index of the sequence of each position."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)


def score_positions(sequences: Sequences, pad: int | None) -> torch.Tensor:
    """int64 [n]: position of each sequence's score in a score model, as in transformers: the last token that is not
    ``pad``, or the first token if all are."""
    places = sequences.cu_seqlens
    if pad is None:
        return places[1:] - 1
    index = torch.arange(len(sequences.tokens)).masked_fill(sequences.tokens == pad, -1)
    last = torch.segment_reduce(index.double(), "max", lengths=sequences.lengths).long()
    return torch.maximum(last, places[:-1])


def _join(sequences: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray | bool]]) -> Sequences:
    """Join sequences, each given by prompt ids [P], response ids [R] and the response's loss mask [R]."""
    lengths = torch.tensor([len(prompt) + len(response) for prompt, response, _ in sequences], dtype=torch.int64)
    total, start = int(lengths.sum()), 0
    tokens, mask = np.empty(total, dtype=np.int32), np.zeros(total, dtype=np.bool_)
    for prompt, response, kept in sequences:
        assert len(prompt), "a prompt without tokens: nothing predicts the first one of its response"
        middle, end = start + len(prompt), start + len(prompt) + len(response)
        tokens[start:middle], tokens[middle:end], mask[middle - 1 : end - 1] = prompt, response, kept
        start = end
    return Sequences(torch.from_numpy(tokens), lengths, torch.from_numpy(mask))


def of_demonstrations(pairs: Sequence[tuple[np.ndarray, np.ndarray]], logp: Sequence[np.ndarray] = ()) -> Sequences:
    """Make sequences from prompt and response ids; the loss covers the whole response.

    Args:
        logp: float32 [R] for each response: log-probs of the policy that generated it; empty if unknown.
    """
    result = _join([(prompt, response, True) for prompt, response in pairs])
    if len(logp):
        _put_logp(result, logp)
    return result


def of_samples(samples: Sequence[TrainingSample]) -> Sequences:
    """Make sequences from samples, with engine log-probs, lags and stored scores of teachers; the trainer computes the
    other fields."""
    result = _join([(s.prompt_ids, s.response_ids, s.response_mask) for s in samples])
    _put_logp(result, [sample.engine_logp for sample in samples])
    if any(sample.lag is not None and sample.lag.any() for sample in samples):
        result.lag = torch.zeros(len(result.tokens), dtype=torch.int16)
        lags = [np.zeros(len(s.response_ids), np.int16) if s.lag is None else s.lag for s in samples]
        _put(result.lag, lags, result.cu_seqlens[1:].tolist())
    if any(sample.teacher is not None for sample in samples):
        logp = [np.zeros(len(s.response_ids), np.float32) if s.teacher is None else s.teacher.logp for s in samples]
        result.teacher_logp = per_token(logp, result)
    if samples and all(sample.routing is not None for sample in samples):
        result.routing = _routing(samples)
    return result


def likeliest_tokens(
    responses: Sequence[tuple[int, TeacherScores | None]], sequences: Sequences
) -> torch.Tensor | None:
    """Return float32 [T, 2·k]: ids (exact below 2**24) of the k tokens that teachers prefer, then their log-probs; 0
    elsewhere. None without any.

    Args:
        responses: (tokens of the response, their stored scores) of the first sequences.
    """
    k = max((0 if scores is None else scores.top_k for _, scores in responses), default=0)
    if not k:
        return None
    found = torch.zeros(len(sequences.tokens), 2 * k)
    each = [
        np.zeros((length, 2 * k), np.float32)
        if scores is None
        else np.concatenate([scores.ids.astype(np.float32), scores.logps], -1)
        for length, scores in responses
    ]
    _put(found, each, sequences.cu_seqlens[1 : len(each) + 1].tolist())
    return found


def _routing(samples: Sequence[TrainingSample]) -> torch.Tensor:
    """Return expert ids [T, L, K]; all samples must have ids, with the same L and K."""
    rows: list[np.ndarray] = []
    for sample in samples:
        ids = sample.routing
        assert ids is not None, "each sample has some"
        assert len(ids) == len(sample.prompt_ids) + len(sample.response_ids) - 1, "those of all tokens but the last"
        rows += [ids, np.full((1, *ids.shape[1:]), NO_IDS, ids.dtype)]
    return torch.from_numpy(np.concatenate(rows))


def per_token(responses: Sequence[np.ndarray], sequences: Sequences) -> torch.Tensor:
    """float32 [T]: values of the response tokens [R] at the positions that predict them, 0 elsewhere. The responses
    belong to the first sequences."""
    result = torch.zeros(len(sequences.tokens))
    ends = sequences.cu_seqlens[1 : len(responses) + 1].tolist()
    _put(result, responses, ends)
    return result


def _put_logp(sequences: Sequences, logp: Sequence[np.ndarray]) -> None:
    """Set ``engine_logp`` to the responses' log-probs [R]."""
    sequences.engine_logp = per_token(logp, sequences)


def _put(field: torch.Tensor, responses: Sequence[np.ndarray], ends: Sequence[int]) -> None:
    """Write values of the response tokens [R] into ``field`` [T] at the positions that predict them. ``ends``: ends of
    their sequences."""
    for values, end in zip(responses, ends, strict=True):
        last = end - 1  # the last position predicts nothing
        field.numpy()[last - len(values) : last] = values  # not torch: it warns about tensors of read-only arrays


def joined(sampled: Sequences, demonstrated: Sequences) -> Sequences:
    """Concatenate two batches and mark the second as ``expert``; fields missing in the second are 0 there."""

    def together(name: str) -> torch.Tensor | None:
        value, other = getattr(sampled, name), getattr(demonstrated, name)
        if value is None:
            return None
        return torch.cat([value, value.new_zeros(len(demonstrated.tokens)) if other is None else other])

    ids, of_models = sampled.routing, ("engine_logp", "old_logp", "ref_logp", "teacher_logp", "values")
    values: dict[str, Any] = {name: together(name) for name in ("advantages", "returns", "lag", *of_models)}
    return Sequences(
        torch.cat([sampled.tokens, demonstrated.tokens]),
        torch.cat([sampled.lengths, demonstrated.lengths]),
        torch.cat([sampled.mask, demonstrated.mask]),
        **values,
        expert=torch.arange(len(sampled) + len(demonstrated)) >= len(sampled),
        images=_joined_images(sampled, demonstrated),
        routing=None
        if ids is None
        else torch.cat([ids, ids.new_full((len(demonstrated.tokens), *ids.shape[1:]), NO_IDS)]),
    )


def _joined_images(sampled: Sequences, demonstrated: Sequences) -> Images | None:
    if sampled.images is None and demonstrated.images is None:
        return None
    first, later = (part.images or Images.of_text(part.lengths) for part in (sampled, demonstrated))
    return first.followed_by(later)
