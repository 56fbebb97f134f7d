"""Recorded turns of a trajectory: their log, checks of recorded values, and the end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, get_args

import numpy as np

from megarl.core.errors import JobError
from megarl.core.schema import Author, End, Reward, Turn, digest_of, line_of_turns, plain
from megarl.core.text import without_surrogates
from megarl.explore.recording.images import ImageRules, RecordedImages
from megarl.rewards import Verdict
from megarl.rewards.verdict import MAX_NAME, MAX_PARTS, MAX_REASON, NO_VERDICT


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


LARGEST_LIMIT = 2**31 - 1


def recorded_ids(author: Author, token_ids: Sequence[int] | np.ndarray, largest: int) -> np.ndarray:
    """Return a copy of a turn's token ids, int32 [T]. Raises TypeError or ValueError for invalid ids."""
    if author == "model" or author not in get_args(Author):
        others = ", ".join(name for name in get_args(Author) if name != "model")
        raise ValueError(f"a turn that a workflow writes has one of the authors {others}, got {author!r:.60}")
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise TypeError(f"token ids must be a row of integers, got {ids.dtype} {ids.shape}")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= largest:
        raise ValueError(f"token ids must lie between 0 and {largest}, got {ids.min()} to {ids.max()}")
    return ids.astype(np.int32)


def recorded_reward(reward: Reward) -> Reward:
    """Return a workflow's reward with plain floats. Raises TypeError or ValueError for values that the store cannot
    keep."""
    if not isinstance(reward, Reward):
        raise TypeError(f"finish takes a Reward(score, status, parts), got {reward!r:.60}")
    if reward.status not in NO_VERDICT and not math.isfinite(reward.score):
        raise ValueError(f"the reward {reward.score} with the status {reward.status} must be finite")
    if len(reward.parts) > MAX_PARTS:
        raise ValueError(f"a reward has {len(reward.parts)} parts; at most {MAX_PARTS} are kept")
    for name, value in reward.parts.items():
        if not isinstance(name, str) or len(name) > MAX_NAME or name != without_surrogates(name):
            raise ValueError(f"the reward part {name!r:.60} needs a name of up to {MAX_NAME} characters of valid text")
        if not isinstance(plain(value), Real) or not math.isfinite(value):
            raise ValueError(f"the reward part {name!r:.60} must be a finite number, got {value!r:.60}")
    parts = {name: float(value) for name, value in reward.parts.items()}
    return Reward(float(reward.score), reward.status, parts)


class NoRoom(Exception):
    """A response was requested when the model's turns had used up the trajectory's room."""


def recorded_limit(max_tokens: Any) -> int | None:
    """Return the most tokens of a response as an int. Raises ValueError for values that an engine would refuse."""
    if max_tokens is None:
        return None
    if not isinstance(max_tokens, Integral) or max_tokens < 1:
        raise ValueError(f"generate takes max_tokens of 1 or more, a whole number, got {max_tokens!r:.40}")
    return min(int(max_tokens), LARGEST_LIMIT)


def check_request(log: TurnLog, after: int, limit: int) -> None:
    """Raise NoRoom or ValueError for a response that cannot follow a turn, or that an engine would refuse."""
    if log.turns[after].author == "model":
        raise ValueError("a response follows a response; add a message between them")
    tokens = log.length(after)
    if not tokens:
        raise ValueError("a response follows a prompt of one token or more")
    if tokens >= limit and any(log.turns[i].author == "model" for i in log.line(after)):
        raise NoRoom(f"no room for a response (rollout.max_trajectory_tokens={limit})")
    if tokens >= limit:
        raise ValueError(
            f"a prompt of {tokens} tokens leaves no room for a response; shorten it, or set "
            f"rollout.max_trajectory_tokens above its {limit}"
        )


class RecordedEnd:
    """End of one trajectory, and its verdict if the workflow gives one."""

    def __init__(self) -> None:
        self.cause: End | None = None
        """End named by the workflow or caused by a limit."""
        self.given: Verdict | None = None
        """Verdict given by the workflow."""
        self._closed = False

    def close(self) -> None:
        """Refuse further turns, from tasks that a workflow left running: the verdict would not include them."""
        self._closed = True

    def check_open(self) -> None:
        """Raise RuntimeError once the trajectory is closed."""
        if self._closed:
            raise RuntimeError("the trajectory has ended")

    def finish(self, reward: Reward) -> None:
        """Record the workflow's reward. Raises ValueError after ``fail``."""
        self.check_open()
        if self.cause is not None and not self.cause.by_policy:
            raise ValueError(f"finish after fail: the trajectory has ended as {self.cause}, which has no reward")
        self.given = Verdict(recorded_reward(reward), verifier="workflow")

    def truncate(self) -> None:
        """Name the end ``truncated``. A failed trajectory stays failed: truncation would prevent its retry and allow
        training on it."""
        self.check_open()
        if self.cause is None or self.cause.by_policy:
            self.cause = End.TRUNCATED

    def go_on(self) -> None:
        """Clear the end ``truncated``: the workflow has continued from another context."""
        if self.cause is End.TRUNCATED:
            self.cause = None

    def fail(self, reason: str, cause: End) -> None:
        """Record that there is no verdict: the status is ``error``."""
        self.check_open()
        assert not cause.by_policy, "a trajectory that the policy ended has a reward"
        self.cause = cause
        reason = without_surrogates(reason[:MAX_REASON])
        self.given = Verdict(Reward(math.nan, "error"), reason, verifier="workflow")


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
        self.judged: dict[int, str] = {}
        """Index of a turn -> ``text_digest`` of the text that a verifier has judged."""

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

    def check_computed(self, turn: Turn, digest: str) -> None:
        """Raise JobError unless the engine has computed the recorded tokens up to a turn.

        Args:
            digest: ``digest_of`` the tokens of prompt and response in the engine.
        """
        line = self._log.line(self.index_of(turn, "check_computed"))
        tokens = np.concatenate([self.turns[i].token_ids for i in line])
        if digest_of(tokens) != digest:
            raise JobError(
                f"the engine has computed other tokens than the {len(tokens)} recorded ones up to response "
                f"{len(line) // 2} of a trajectory, so training would see tokens that no engine has sampled or read: "
                "look at what decodes, encodes, cuts or extends tokens on their way to and from the engine"
            )

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
