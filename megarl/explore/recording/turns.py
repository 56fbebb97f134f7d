"""Turns of a trajectory, as they are recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import numpy as np

from megarl.core.errors import JobError
from megarl.core.schema import Author, Turn
from megarl.explore.recording.end import RecordedEnd
from megarl.explore.recording.images import ImageRules, RecordedImages
from megarl.explore.recording.turn_log import TurnLog
from megarl.explore.recording.values import recorded_ids


class RecordedTurns(RecordedEnd):
    """Part of a ``RolloutModel``.

    Args:
        largest_id: Largest id of a token.
        limit: Most tokens of a line of turns.
        images: Rules of images beside the task's.
    """

    def __init__(self, largest_id: int, limit: int, images: ImageRules | None = None) -> None:
        super().__init__()
        self._images = RecordedImages(images)
        self.limit = limit
        self._largest_id = largest_id
        self._log = TurnLog()
        self._in_thinking: set[int] = set()
        """Turns that end inside a thought."""
        self._rewards: dict[int, float] = {}
        """Index of a turn -> its own reward."""

    @property
    def turns(self) -> Sequence[Turn]:
        """Turns so far; an index stays what it is."""
        return self._log.turns

    def recorded(self) -> tuple[Turn, ...]:
        """Turns in the order in which they were begun, with their own rewards."""
        return self._log.ordered(self._rewards)

    def rate(self, turn: Turn, reward: float) -> None:
        """Keep the reward of one turn of the model, beside that of the trajectory. Raises ValueError unless it is a
        finite number, and the turn one of this trajectory's."""
        self._check_open()
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise ValueError(f"the reward of a turn must be a finite number, got {reward!r:.60}")
        self._rewards[self._index_of(turn, "rate")] = float(reward)

    def keep(self, turn: Turn) -> None:
        """Keep a turn of the model and those that it follows. Others are neither recorded nor trained. Raises
        ValueError unless the turn is one of this trajectory's."""
        self._check_open()
        self._log.keep_line(self._index_of(turn, "keep"))

    def _index_of(self, turn: Turn, method: str) -> int:
        found = [i for i, one in enumerate(self.turns) if one is turn and one.author == "model"]
        if not found:
            raise ValueError(f"{method} takes a turn that generate has returned in this trajectory")
        return found[0]

    @property
    def has_response(self) -> bool:
        """True if the model has written a turn."""
        return any(turn.author == "model" for turn in self.turns)

    @property
    def in_thinking(self) -> bool:
        """True if the context of the model's last turn ended inside a thought."""
        return self.begins_in_thinking(self.last_of_model())

    def begins_in_thinking(self, turn: Turn) -> bool:
        """Return True if the context of a turn ended inside a thought."""
        return turn.follows in self._in_thinking

    def begin(self, token_ids: np.ndarray, *, images: Sequence[bytes] = (), in_thinking: bool = False) -> Turn:
        """Add a rendered prompt, int32 [T], that follows no turn: a context that was rewritten, or a sub-agent's.

        Args:
            images: Files, one for each placeholder among the tokens.
            in_thinking: It ends inside a thought.

        Raises DataError where images and placeholders do not fit together.
        """
        return self._added("user", recorded_ids("user", token_ids, self._largest_id), images, -1, in_thinking)

    def write(
        self,
        author: Author,
        token_ids: np.ndarray,
        *,
        images: Sequence[bytes] = (),
        after: int = -1,
        in_thinking: bool = False,
    ) -> Turn:
        """Add a turn of another author, int32 [T], with all that the chat template puts around it.

        Args:
            images: As of ``begin``.
            after: Index of the turn that it follows, -1 for the last one.
            in_thinking: As of ``begin``.

        Raises as ``begin``.
        """
        if not self.turns:
            raise ValueError("a turn follows a prompt; ask or begin first")
        ids = recorded_ids(author, token_ids, self._largest_id)
        return self._added(author, ids, images, self._after(after), in_thinking)

    def length_of(self, token_ids: np.ndarray, images: Sequence[bytes]) -> int:
        """Number of tokens of a message with its images. Raises DataError as ``begin``."""
        return len(self._images.expanded(token_ids, images))

    def takes_images(self, images: Sequence[bytes], after: int | None = None) -> bool:
        """Return True if there is room for a message's images after a turn, by its index; None: after none.

        Raises ValueError where the model takes none, DataError for an image that its processor refuses.
        """
        line = [] if after is None else self._log.line(self._after(after))
        return self._images.has_room(images, line, self.turns)

    def _added(self, author: Author, ids: np.ndarray, images: Sequence[bytes], follows: int, in_thinking: bool) -> Turn:
        self._check_open()
        expanded = self._images.expanded(ids, images)
        shown = self._images.put(len(self.turns), ids, images)
        return self._add(Turn(author, expanded, images=shown), follows, in_thinking)

    def _expand(self, line: Sequence[int], computed: np.ndarray) -> None:
        """Take the tokens of a task's prompt that an engine has ``computed`` with, int32 [P]; others must be those that
        it was to compute with. Raises JobError."""
        if (turn := self._images.unexpanded(line, self.turns)) is not None:
            later = sum(len(self.turns[i]) for i in line if i != turn)
            self._log.replace_tokens(turn, computed[: len(computed) - later])
        if not np.array_equal(computed, np.concatenate([self.turns[i].token_ids for i in line])):
            raise JobError(
                "the engine has made another number of tokens of an image than the model's processor here: install the "
                "same transformers (and torchvision, or none) for both"
            )

    @property
    def room(self) -> int:
        """Tokens that the last line of turns may still get (``rollout.max_trajectory_tokens``)."""
        return self.room_after(-1)

    def room_after(self, turn: int) -> int:
        """Tokens that may still follow a turn, by its index."""
        return self.limit - self._log.length(self._after(turn))

    def _after(self, turn: int) -> int:
        if not -1 <= turn < len(self.turns):
            raise ValueError(f"after={turn} is no turn; there are {len(self.turns)}")
        return turn % len(self.turns)

    def last_of_model(self) -> Turn:
        """The model's turn that was begun last."""
        return self._log.last_of_model()

    def _add(self, turn: Turn, follows: int, in_thinking: bool = False) -> Turn:
        self._check_open()
        if in_thinking:
            self._in_thinking.add(len(self.turns))
        return self._log.add(turn, follows)
