"""A rank's share of a step: the sequences that the rank holds, and exchanges of values between all ranks.

Shape legend: N sequences of a step, n of them held by this rank, T positions of the n sequences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

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
