"""Turns of a running trajectory; several may be in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from megarl.core.schema import Turn, line_of_turns


class TurnLog:
    """Turns by a fixed index, in the order in which they ended.

    ``ordered`` returns them in the order in which they began, which does not depend on time.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._begun = 0
        self._numbers: list[int] = []
        """Number of each turn in the order of begins."""
        self._dropped: set[int] = set()
        """Indices of turns left out of the result."""
        self._lengths: list[int] = []
        """Tokens of the line of turns up to each turn, its own included."""
        self._context: tuple[int, np.ndarray] = -1, np.empty(0, np.int32)
        """Last argument and result of ``tokens``."""

    def begin(self) -> int:
        """Return the number of a turn that begins now."""
        self._begun += 1
        return self._begun - 1

    def add(self, turn: Turn, follows: int, number: int | None = None) -> Turn:
        """Add a turn. ``number``: result of ``begin``; None for a turn that begins and ends now."""
        turn = replace(turn, follows=follows)
        self._numbers.append(self.begin() if number is None else number)
        self._lengths.append(len(turn) + (self._lengths[follows] if follows >= 0 else 0))
        self.turns.append(turn)
        return turn

    def ordered(self, rewards: Mapping[int, float]) -> tuple[Turn, ...]:
        """Return the turns in the order in which they began: of requests and their choices, independent of their ends.

        ``rewards``: index of a turn -> its own reward.
        """
        there = [i for i in range(len(self.turns)) if i not in self._dropped]
        order = sorted(there, key=self._numbers.__getitem__)
        place = {turn: i for i, turn in enumerate(order)} | {-1: -1}
        return tuple(replace(self.turns[i], follows=place[self.turns[i].follows], reward=rewards.get(i)) for i in order)

    def last_of_model(self) -> Turn:
        """Return the model's turn that began last."""
        found = ((n, i) for i, n in enumerate(self._numbers) if i not in self._dropped)
        return self.turns[max((n, i) for n, i in found if self.turns[i].author == "model")[1]]

    def keep_line(self, last: int) -> None:
        """Drop all turns so far except the line up to ``last``."""
        self._dropped |= set(range(len(self.turns))) - set(self.line(last))

    def line(self, last: int) -> list[int]:
        """Return the indices of the turns up to a turn, from the first."""
        return line_of_turns(self.turns, last)

    def routed(self, line: Sequence[int]) -> int:
        """Return the number of a line's tokens with expert ids."""
        found = (self.turns[i].routing for i in line)
        return sum(len(routing) for routing in found if routing is not None)

    def length(self, last: int) -> int:
        """Return the number of tokens up to a turn."""
        return self._lengths[last]

    def tokens(self, last: int) -> np.ndarray:
        """Return int32 [T]: the tokens up to a turn. Reuses the last result."""
        turn, parts = last, list[np.ndarray]()
        while turn >= 0 and turn != self._context[0]:
            parts.append(self.turns[turn].token_ids)
            turn = self.turns[turn].follows
        if turn >= 0:
            parts.append(self._context[1])
        self._context = last, np.concatenate(parts[::-1])
        return self._context[1]

    def replace_tokens(self, turn: int, token_ids: np.ndarray) -> None:
        """Give a turn other tokens."""
        self.turns[turn] = replace(self.turns[turn], token_ids=token_ids)
        self._context = -1, np.empty(0, np.int32)
        for i, one in enumerate(self.turns):
            self._lengths[i] = len(one) + (self._lengths[one.follows] if one.follows >= 0 else 0)
