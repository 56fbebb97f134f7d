"""Recorded turns of a trajectory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

from megarl.core.errors import JobError
from megarl.core.schema import Author, Turn
from megarl.explore.recording.end import RecordedEnd
from megarl.explore.recording.images import ImageRules, RecordedImages
from megarl.explore.recording.recorded_values import check_request, recorded_ids
from megarl.explore.recording.turn_log import TurnLog


@dataclass(frozen=True, eq=False)
class Context:
    """Context of a response, as sent to an engine."""

    number: int
    """Number of the response in the order in which turns began."""
    line: Sequence[int]
    """Indices of the turns, from the first."""
    token_ids: np.ndarray
    """int32 [T], with one placeholder for each image."""
    images: tuple[bytes, ...]
    routed: int
    """Tokens that have expert ids."""


class RecordedTurns:
    """Turns of one trajectory.

    Args:
        end: End of the trajectory; once closed, no turn is added.
        largest_id: Largest id of a token.
        limit: Most tokens of a line of turns.
        images: Rules for images besides the task's.
    """

    def __init__(self, end: RecordedEnd, largest_id: int, limit: int, images: ImageRules | None = None) -> None:
        self._end = end
        self._images = RecordedImages(images)
        self._limit = limit
        self._largest_id = largest_id
        self._log = TurnLog()
        self._in_thinking: set[int] = set()
        """Turns that end inside a thought."""
        self._rewards: dict[int, float] = {}
        """Index of a turn -> its own reward."""
        self._calls: dict[int, int] = {}
        """Id of a turn parsed for tool calls -> their number."""
        self.unread = 0
        """Number of responses in flight."""

    @property
    def turns(self) -> Sequence[Turn]:
        """Turns so far; indices do not change."""
        return self._log.turns

    def ordered(self) -> tuple[Turn, ...]:
        """Return the turns in the order in which they began, with their rewards."""
        return self._log.ordered(self._rewards)

    def rate(self, turn: Turn, reward: float) -> None:
        """Record the reward of one turn of the model. Raises ValueError unless it is a finite number."""
        self._end.check_open()
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise ValueError(f"the reward of a turn must be a finite number, got {reward!r:.60}")
        self._rewards[self.index_of(turn, "rate")] = float(reward)

    def count_calls(self, turn: Turn, number: int) -> None:
        """Record the number of tool calls in a turn; a repeated call replaces the number."""
        self._calls[id(turn)] = number

    @property
    def num_tool_calls(self) -> int | None:
        """Tool calls of all turns; None if no turn was parsed for calls."""
        return sum(self._calls.get(id(turn), 0) for turn in self.turns) if self._calls else None

    def keep(self, turn: Turn) -> None:
        """Drop all turns so far except a model's turn and its context."""
        self._end.check_open()
        self._log.keep_line(self.index_of(turn, "keep"))

    def index_of(self, turn: Turn, method: str) -> int:
        """Return the index of a model's turn. Raises ValueError, naming ``method``, for any other turn."""
        found = [i for i, one in enumerate(self.turns) if one is turn and one.author == "model"]
        if not found:
            raise ValueError(f"{method} takes a turn that generate has returned in this trajectory")
        return found[0]

    @property
    def has_response(self) -> bool:
        """True if the model has written a turn."""
        return any(turn.author == "model" for turn in self.turns)

    def begins_in_thinking(self, turn: Turn) -> bool:
        """Return True if the context of a turn ended inside a thought."""
        return turn.follows in self._in_thinking

    def begin(self, token_ids: np.ndarray, images: Sequence[bytes], in_thinking: bool) -> Turn:
        """Add a workflow's prompt that follows no turn; its token ids are checked."""
        return self.add("user", recorded_ids("user", token_ids, self._largest_id), images, -1, in_thinking)

    def write(
        self, author: Author, token_ids: np.ndarray, images: Sequence[bytes], after: int, in_thinking: bool
    ) -> Turn:
        """Add a workflow's turn; its token ids are checked. ``after``: -1 for the last turn."""
        if not self.turns:
            raise ValueError("a turn follows a prompt; ask or begin first")
        ids = recorded_ids(author, token_ids, self._largest_id)
        return self.add(author, ids, images, self._after(after), in_thinking)

    def length_of(self, token_ids: np.ndarray, images: Sequence[bytes]) -> int:
        """Return the number of tokens of a message with its images. Raises DataError as ``begin``."""
        return len(self._images.expanded(token_ids, images))

    def takes_images(self, images: Sequence[bytes], after: int | None = None) -> bool:
        """Return True if there is room for a message's images after a turn, given by index; None: at the start.

        Raises ValueError if the model takes no images, DataError if its processor refuses one.
        """
        line = [] if after is None else self._log.line(self._after(after))
        return self._images.has_room(images, line, self.turns)

    def images_beside(self, of_task: Iterable[bytes], turns: Sequence[Turn]) -> dict[str, bytes]:
        """Return digest -> file of the turns' images that are not the task's."""
        return self._images.beside(of_task, turns)

    def add(self, author: Author, ids: np.ndarray, images: Sequence[bytes], follows: int, in_thinking: bool) -> Turn:
        """Add a turn with its images. ``follows``: as in ``Turn``. Raises DataError if images and tokens do not
        match."""
        self._end.check_open()
        expanded = self._images.expanded(ids, images)
        shown = self._images.put(len(self.turns), ids, images)
        return self._add(Turn(author, expanded, images=shown), follows, in_thinking)

    def add_bare(self, prompt: np.ndarray) -> None:
        """Add a prompt, int32 [T], without its images, for a trajectory that failed before its first request."""
        self._add(Turn("user", prompt), -1)

    def begin_response(self, after: int) -> Context:
        """Begin a response after a turn. Raises NoRoom or ValueError if none may follow."""
        after = self._after(after)
        check_request(self._log, after, self._limit)
        number, line = self._log.begin(), self._log.line(after)
        images = self._images.on_line(line, self.turns)
        token_ids = self._images.context(line, self.turns) if images else self._log.tokens(after)
        self.unread += 1
        return Context(number, line, token_ids, images, self._log.routed(line))

    def refuse_response(self) -> None:
        """Stop waiting for a response that an engine has refused."""
        self.unread -= 1

    def end_response(self, context: Context, turn: Turn, computed: np.ndarray | None) -> Turn:
        """Add a response. ``computed``: its context's tokens if returned by the engine, int32 [P]. Raises JobError."""
        self._end.check_open()
        self.unread -= 1
        self._end.go_on()
        if computed is not None:
            self._expand(context.line, computed)
        return self._log.add(turn, context.line[-1], context.number)

    def _expand(self, line: Sequence[int], computed: np.ndarray) -> None:
        """Replace a task's prompt by its expanded tokens from ``computed``, int32 [P]. Raises JobError if other tokens
        differ from those sent."""
        if (turn := self._images.unexpanded(line, self.turns)) is not None:
            later = sum(len(self.turns[i]) for i in line if i != turn)
            self._log.replace_tokens(turn, computed[: len(computed) - later])
        if not np.array_equal(computed, np.concatenate([self.turns[i].token_ids for i in line])):
            raise JobError(
                "the engine has made another number of tokens of an image than the model's processor here: install the "
                "same transformers (and torchvision, or none) for both"
            )

    def room_after(self, turn: int) -> int:
        """Return the number of tokens that may follow a turn, given by index; -1 for the last one."""
        return self._limit - self._log.length(self._after(turn))

    def _after(self, turn: int) -> int:
        if not -1 <= turn < len(self.turns):
            raise ValueError(f"after={turn} is no turn; there are {len(self.turns)}")
        return turn % len(self.turns)

    def last_of_model(self) -> Turn:
        """Return the model's turn that began last."""
        return self._log.last_of_model()

    def _add(self, turn: Turn, follows: int, in_thinking: bool = False) -> Turn:
        self._end.check_open()
        if in_thinking:
            self._in_thinking.add(len(self.turns))
        return self._log.add(turn, follows)
