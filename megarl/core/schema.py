"""Data types passed between packages: tasks, preferences, trajectories and their samples, versions.

Numpy only: the explorer and the store handle these without importing torch.

Shape legend: T tokens of a turn, P prompt tokens, R response tokens of a sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import StrEnum
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

GREEDY = -1
"""Index of the greedy trajectory of a group. It is a baseline for the sampled ones, never trained on."""

RewardStatus = Literal["ok", "wrong", "error", "timeout", "late"]
FinishReason = Literal["stop", "length", "abort", "repetition"]
Author = Literal["system", "user", "environment", "tool", "model"]


class End(StrEnum):
    """Cause of a trajectory's end. Only ends that the policy can cause are trained on."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    """The response or the trajectory reached its limit."""
    REPETITION = "repetition"
    """The last response repeated one sequence of tokens and was stopped."""
    WORKFLOW_ERROR = "workflow_error"
    """The workflow, or the agent, raised an exception."""
    WORKFLOW_TIMEOUT = "workflow_timeout"
    TOOL_TIMEOUT = "tool_timeout"
    """A tool (a function of the user) timed out, and ``rollout.on_tool_timeout`` is ``end``."""
    ABANDONED = "abandoned"
    """The workflow, or the agent, stopped waiting for a response that it had requested."""
    ENVIRONMENT_ERROR = "environment_error"
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_LATE = "reward_late"
    """The reward comes later; at the step that needs it, it has not arrived."""
    TEACHER_ERROR = "teacher_error"
    """A teacher at a URL failed, or its reply has no valid log-probs for the trajectory."""
    TEACHER_TIMEOUT = "teacher_timeout"

    @property
    def by_policy(self) -> bool:
        """True for ends that the policy can cause."""
        return self in (End.FINISHED, End.TRUNCATED, End.REPETITION)

    @property
    def by_reward(self) -> bool:
        """True if the verifier gave no verdict."""
        return self in (End.REWARD_ERROR, End.REWARD_TIMEOUT, End.REWARD_LATE)


ENDS: Mapping[FinishReason | None, End] = {"length": End.TRUNCATED, "repetition": End.REPETITION}
"""Ends other than ``FINISHED``, by the finish reason of the model's last turn."""

Message = dict[str, Any]
"""A chat message: ``role``, ``content`` (``None`` with tool calls), and other keys for the chat template
(``reasoning_content``, …)."""


class WeightsVersion(NamedTuple):
    """Names one published set of weights. ``n`` counts synchronisations within a job attempt and is never reused.
    Versions compare by attempt, then by ``n``."""

    attempt: int
    n: int

    def __str__(self) -> str:
        return f"{self.attempt}.{self.n}"

    @classmethod
    def parse(cls, text: str) -> WeightsVersion:
        """Read ``attempt.n``."""
        attempt, n = text.split(".")
        return cls(int(attempt), int(n))


@dataclass(frozen=True)
class Task:
    """One verl data row: a prompt as chat messages and the data that its verifier needs."""

    task_id: str
    data_source: str
    prompt: tuple[Message, ...]
    ability: str
    reward_model: dict[str, Any]
    """verl's {style, ground_truth}; may be empty for demonstrations."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    response: str | None = None
    """The demonstration; only in supervised rows."""
    images: tuple[bytes, ...] = field(default=(), repr=False)
    """Image files for the ``<image>`` placeholders of the prompt, in order."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template in addition to the messages: ``tools``, ``enable_thinking``, …."""
    answer: Message | None = None
    """The demonstration as an assistant message for the chat template; ``None`` if ``response`` is its exact text."""

    @property
    def ground_truth(self) -> Any:
        """The correct answer, for the verifier."""
        return self.reward_model["ground_truth"]

    @property
    def question(self) -> str:
        """Content of the user's last message, or of the last message if there is no user."""
        return next(
            (m["content"] for m in reversed(self.prompt) if m["role"] == "user"), self.prompt[-1].get("content") or ""
        )

    def copy(self) -> Task:
        """Return a deep copy."""
        return deepcopy(self)


@dataclass(frozen=True)
class Preference:
    """One preference row: a prompt as chat messages, a chosen and a rejected answer."""

    task_id: str
    data_source: str
    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    margin: float = 0.0
    """Minimum difference between the scores of chosen and rejected answer, for reward models that use a margin."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, as for a task."""
    answers: tuple[Message | None, Message | None] = (None, None)
    """The chosen and the rejected answer, if they are messages, as ``Task.answer``."""
    images: tuple[bytes, ...] = field(default=(), repr=False)
    """Files of the prompt's images, as in ``Task.images``."""


def plain(value: Any) -> Any:
    """Convert a numpy or torch scalar to a Python number; return any other value unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)) else value


@dataclass(frozen=True)
class Reward:
    """A verdict: ``score`` is the algorithm's input; an error is a status, never a silent 0."""

    score: float
    status: RewardStatus
    parts: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(plain(self.score), Real):
            raise TypeError(f"Reward.score must be a number, got {self.score!r:.60}")
        if self.status not in get_args(RewardStatus):
            names = ", ".join(get_args(RewardStatus))
            raise ValueError(f"Reward.status must be one of {names}, got {self.status!r:.60}")


@dataclass(frozen=True)
class GroupStats:
    """Sufficient statistics of a whole group's rewards (unbiased std; 0 for equal rewards and groups of one)."""

    mean: float
    std: float
    size: int


@dataclass(frozen=True)
class WeightsSpan:
    """Tokens ``[start, end)`` of a turn, sampled with one version of the weights. The spans tile the turn. Their
    versions never decrease, because an engine continues only with newer weights."""

    start: int
    end: int
    version: WeightsVersion


class TokenBounds(NamedTuple):
    """Bounds of the values in a turn's arrays, from which a turn is checked without its arrays."""

    smallest: int
    """Smallest token id."""
    largest: int
    """Largest token id."""
    at: int = -1
    """Token with the first non-finite log-prob, else with the largest; -1 without log-probs."""
    logp: str = ""
    """The log-prob of token ``at`` as text, because JSON has no NaN."""

    @classmethod
    def of(cls, token_ids: np.ndarray, logp: np.ndarray | None) -> TokenBounds | None:
        """Compute the bounds of a turn's arrays; None for a turn without tokens."""
        if not len(token_ids):
            return None
        ids = int(token_ids.min()), int(token_ids.max())
        if logp is None or not len(logp):
            return cls(*ids)
        finite = np.isfinite(logp)
        at = int(np.argmax(logp) if finite.all() else np.argmin(finite))
        return cls(*ids, at, str(logp[at]))


@dataclass(frozen=True, eq=False)
class Turn:
    """Tokens that one author wrote, exactly as the engine processed them."""

    author: Author
    token_ids: np.ndarray
    """int32 [T]. A model's turn: as sampled, with the end-of-sequence token. Other turns: with the chat template's
    tokens around them, and each image's placeholder repeated once for each vector of the image."""
    follows: int = -1
    """Index of the turn that it continues; -1 for a first turn. If that is not the previous turn, the context was
    rewritten or belongs to a sub-agent."""
    logp: np.ndarray | None = None
    """float32 [T] of a model's turn: log-prob of each token under the distribution that the engine sampled from
    (temperature applied)."""
    spans: tuple[WeightsSpan, ...] = ()
    """Weights versions of a model's turn."""
    finish_reason: FinishReason | None = None
    """Finish reason of a model's turn."""
    reward: float | None = None
    """Reward of this turn alone, if an environment or a workflow gave one; used by ``algorithm.turn_rewards``."""
    images: tuple[str, ...] = ()
    """Digests (``file_digest``) of the image files behind its placeholders, in order."""
    routing: np.ndarray | None = None
    """int8 or int16 [N, L, K] of a model's turn: ids of the K experts that the engine chose in each of L MoE layers. N
    counts the tokens of its line, without the last, that earlier turns have no routing for."""
    bounds: TokenBounds | None = None
    """Bounds of arrays that are not read and have their shape alone; ``None`` for arrays that are read."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def token_bounds(self) -> TokenBounds:
        """Bounds of the arrays of a turn with tokens."""
        found = self.bounds or TokenBounds.of(self.token_ids, self.logp)
        assert found is not None, "the turn has tokens"
        return found


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive tokens of one response that an engine sampled in a single request."""

    index: int
    """Index of the trajectory in its group."""
    turn: int
    """Number of the response among those that the trajectory has requested."""
    start: int
    """Number of tokens of the response before this segment."""
    context: str
    """``digest_of`` the tokens before the response."""
    token_ids: np.ndarray
    """int32 [T]"""
    logp: np.ndarray
    """float32 [T]"""
    spans: tuple[WeightsSpan, ...]
    """Weights versions that sampled the tokens, from 0 to T."""
    finish_reason: FinishReason | None = None
    """Finish reason, if the response ended with this segment; ``None`` if more tokens follow."""
    prompt_ids: np.ndarray | None = None
    """int32 [P]: prompt ids with expanded placeholders; only in the first segment after a prompt with images."""
    routing: np.ndarray | None = None
    """int8 or int16 [N, L, K], as in ``Turn.routing``."""
    computed: str = ""
    """``digest_of`` the tokens in the engine up to the segment's end; "" in a segment that the store has kept."""

    def before(self, dead: Collection[str]) -> Segment | None:
        """Return the part before the first token of a ``dead`` version; ``None`` if that part is empty."""
        cut = min((span.start for span in self.spans if str(span.version) in dead), default=len(self.token_ids))
        if cut == len(self.token_ids):
            return self
        if not cut:
            return None
        spans = tuple(replace(span, end=min(span.end, cut)) for span in self.spans if span.start < cut)
        routing = None if self.routing is None else self.routing[: cut - len(self.token_ids)]
        return replace(
            self,
            token_ids=self.token_ids[:cut],
            logp=self.logp[:cut],
            spans=spans,
            finish_reason=None,
            routing=routing,
            computed="",
        )


@dataclass(frozen=True, eq=False)
class TeacherScores:
    """Log-probs that a teacher gives to tokens of the model, at temperature 1."""

    teacher: str
    """Name of the teacher (``teachers.NAME``)."""
    logp: np.ndarray
    """float32 [n]: log-prob of each token."""
    ids: np.ndarray
    """int32 [n, k]: ids of the k tokens that the teacher prefers at each place, likeliest first."""
    logps: np.ndarray
    """float32 [n, k]: log-probs of ``ids``."""

    @property
    def top_k(self) -> int:
        """k; 0 if only the log-probs of the tokens themselves are stored."""
        return int(self.ids.shape[1])

    def part(self, start: int, end: int) -> TeacherScores:
        """Return the scores of tokens ``[start, end)``."""
        return TeacherScores(self.teacher, self.logp[start:end], self.ids[start:end], self.logps[start:end])

    def zeros(self, length: int) -> TeacherScores:
        """Return zeros for ``length`` tokens that the teacher has not scored."""
        shape = (length, self.top_k)
        ids, logps = np.zeros(shape, self.ids.dtype), np.zeros(shape, np.float32)
        return TeacherScores(self.teacher, np.zeros(length, np.float32), ids, logps)

    @classmethod
    def joined(cls, parts: Sequence[TeacherScores]) -> TeacherScores:
        """Concatenate the scores of one teacher, at least one part."""
        logp, ids, logps = ([getattr(part, name) for part in parts] for name in ("logp", "ids", "logps"))
        return cls(parts[0].teacher, _joined(logp), _joined(ids), _joined(logps))


class ImagesAt(NamedTuple):
    """Tokens ``[start, end)`` of a sample with placeholders of images; none of them was written by the model."""

    start: int
    end: int
    digests: tuple[str, ...]
    """``file_digest`` of the images, in order."""


class TrainingSample(NamedTuple):
    """A sequence to train on; the prompt's tokens are not in the loss."""

    prompt_ids: np.ndarray
    """int32 [P], at least one."""
    response_ids: np.ndarray
    """int32 [R]"""
    response_mask: np.ndarray
    """bool [R]: True for tokens that the model wrote and no earlier sample of the trajectory trains."""
    engine_logp: np.ndarray
    """float32 [R]; 0 where the mask is False."""
    finish_reason: FinishReason
    """Finish reason of the last turn."""
    lag: np.ndarray | None = None
    """int16 [R]: staleness of each token's weights in steps, against the weights at the step's start; 0 where the mask
    is False. ``None`` if every token has lag 0."""
    images: tuple[ImagesAt, ...] = ()
    routing: np.ndarray | None = None
    """int8 or int16 [P + R - 1, L, K]: expert ids that the engine chose for each token but the last, in each MoE layer.
    ``None`` if engines record none."""
    teacher: TeacherScores | None = None
    """Scores of a teacher at a URL for the response's tokens; 0 where the mask is False. ``None`` without any."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One attempt at a task, with its reward."""

    rollout_id: str
    task_id: str
    group_id: str
    index: int
    """Number in the group, from 0; ``GREEDY`` for the greedy one. At least ``group_size`` for a spare trajectory that
    became a member (``rollout.spare``)."""
    group_size: int
    turns: tuple[Turn, ...]
    """Turns in the order written; the first is the prompt, the model's last one is the answer."""
    reward: Reward
    group_stats: GroupStats | None = None
    """Set once the group is complete."""
    metadata: dict[str, Any] = field(default_factory=dict)
    greedy: Trajectory | None = None
    """Greedy attempt at the same task, if the rollout requested one (ReMax's baseline)."""
    cause: End | None = None
    """End set by the workflow; ``None``: derived from the reward's status and the model's last turn."""
    images: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Digest -> file of each image in its turns that is not in the task. The store returns these separately
    (``Store.groups.images``)."""
    teacher_scores: TeacherScores | None = None
    """Scores of a teacher at a URL for the tokens of all turns of the model, in order; ``None`` without any."""

    @property
    def end(self) -> End:
        """Cause of its end. A missing verdict takes precedence over an end by the policy."""
        if self.reward.status in ("error", "timeout", "late") and (self.cause is None or self.cause.by_policy):
            return End(f"reward_{self.reward.status}")
        reasons = [turn.finish_reason for turn in self.turns if turn.author == "model"][-1:]
        return self.cause or (ENDS.get(reasons[0], End.FINISHED) if reasons else End.FINISHED)

    @property
    def prompt(self) -> Turn:
        """The first turn."""
        return self.turns[0]

    @property
    def response(self) -> Turn:
        """The last turn of the model."""
        return next(turn for turn in reversed(self.turns) if turn.author == "model")

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason of the model's last turn."""
        reason = self.response.finish_reason
        assert reason is not None, "every turn of a model ended for a reason"
        return reason

    @property
    def truncated(self) -> bool:
        """True if a limit truncated any turn of the model, or ended the trajectory."""
        return self.cause is End.TRUNCATED or any(
            turn.finish_reason == "length" for turn in self.turns if turn.author == "model"
        )

    @property
    def prompt_length(self) -> int:
        """Number of tokens in the first turn."""
        return len(self.prompt)

    @property
    def response_length(self) -> int:
        """Number of tokens that the model wrote."""
        return sum(len(turn) for turn in self.turns if turn.author == "model")

    def samples(self, lags: Mapping[WeightsVersion, int] | None = None) -> Iterator[TrainingSample]:
        """Yield one sample per line: a chain of turns from a first turn to one that no turn follows.

        A turn of the model shared by several lines is trained only in the first line. Usually there is one line.

        Args:
            lags: Lag of every version that sampled some of the tokens; ``None`` if all are 0.
        """
        for line, new in self.trained_lines():
            before, after = line[: line.index(new[0])], line[line.index(new[0]) : line.index(new[-1]) + 1]
            sample = _sample([self.turns[i] for i in before], [(self.turns[i], i in new) for i in after], lags)
            yield sample if self.teacher_scores is None else sample._replace(teacher=self._scores_of(after, new))

    def _scores_of(self, turns: Sequence[int], new: Sequence[int]) -> TeacherScores:
        """Return the teacher's scores of turns, zeros for turns other than ``new``."""
        scores = self.teacher_scores
        assert scores is not None, "the caller has looked"
        lengths = [len(turn) if turn.author == "model" else 0 for turn in self.turns]
        ends = np.cumsum(lengths)
        return TeacherScores.joined(
            [
                scores.part(ends[i] - lengths[i], ends[i]) if i in new else scores.zeros(len(self.turns[i]))
                for i in turns
            ]
        )

    @property
    def num_samples(self) -> int:
        """Number of ``samples``."""
        return sum(1 for _ in self.trained_lines())

    def answered(self) -> tuple[np.ndarray, np.ndarray]:
        """Return int32 [P] and [R]: the context of the model's last turn, and the turn itself."""
        *before, response = (self.turns[i].token_ids for i in self._answered_line)
        return _joined(before), response

    @property
    def answered_images(self) -> tuple[ImagesAt, ...]:
        """Images of the concatenated parts of ``answered``."""
        return tuple(_images_at([self.turns[i] for i in self._answered_line]))

    @property
    def _answered_line(self) -> list[int]:
        return line_of_turns(self.turns, max(i for i, turn in enumerate(self.turns) if turn.author == "model"))

    def trained_lines(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield each line (chain of turns) that has turns to train, with those turns."""
        trained: set[int] = set()
        followed = {turn.follows for turn in self.turns}
        for line in (line_of_turns(self.turns, last) for last in range(len(self.turns)) if last not in followed):
            new = [i for i in line if self.turns[i].author == "model" and i not in trained]
            if new:
                yield line, new
                trained.update(new)


LARGEST_LAG = int(np.iinfo(np.int16).max)


def file_digest(file: bytes) -> str:
    """SHA-256 of an image file."""
    return hashlib.sha256(file).hexdigest()


def digest_of(token_ids: np.ndarray, images: Sequence[str] = ()) -> str:
    """Digest of the tokens before a response and of their images (``images``: file digests)."""
    found = hashlib.blake2b(np.ascontiguousarray(token_ids, "<i4").tobytes(), digest_size=8)
    found.update("".join(images).encode())
    return found.hexdigest()


def line_of_turns(turns: Sequence[Turn], last: int) -> list[int]:
    """Return the indices of the turns from a first turn to ``last``."""
    line = [last]
    while (before := turns[line[-1]].follows) >= 0:
        line.append(before)
    return line[::-1]


def _sample(
    prompt: Sequence[Turn], response: Sequence[tuple[Turn, bool]], lags: Mapping[WeightsVersion, int] | None
) -> TrainingSample:
    logp, reason = [turn.logp if new else None for turn, new in response], response[-1][0].finish_reason
    assert reason is not None, "every turn of a model ended for a reason"
    return TrainingSample(
        _joined([turn.token_ids for turn in prompt]),
        _joined([turn.token_ids for turn, _ in response]),
        _joined([np.full(len(turn), new) for turn, new in response]),
        _joined([np.zeros(len(t), np.float32) if p is None else p for (t, _), p in zip(response, logp, strict=True)]),
        reason,
        None if lags is None else _joined([_lag(turn, lags if new else {}) for turn, new in response]),
        tuple(_images_at([*prompt, *(turn for turn, _ in response)])),
        routing_of([*prompt, *(turn for turn, _ in response)]),
    )


def routing_of(turns: Sequence[Turn]) -> np.ndarray | None:
    """Expert ids of the tokens of a line of turns, [N, L, K]; ``None`` if the turns have none."""
    found = [turn.routing for turn in turns if turn.routing is not None]
    return _joined(found) if found else None


def _images_at(turns: Sequence[Turn]) -> Iterator[ImagesAt]:
    start = 0
    for turn in turns:
        if turn.images:
            yield ImagesAt(start, start + len(turn), turn.images)
        start += len(turn)


def _lag(turn: Turn, lags: Mapping[WeightsVersion, int]) -> np.ndarray:
    """Lag of each token, int16 [T]; all 0 without ``lags``. Limited to ``LARGEST_LAG``, for replayed tokens."""
    result = np.zeros(len(turn), np.int16)
    for span in turn.spans if lags else ():
        result[span.start : span.end] = min(lags[span.version], LARGEST_LAG)
    return result


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


TOOL_CALLS = "tool_calls"
"""Key of a trajectory's metadata: number of tool calls in its responses."""
TEACHER = "teacher"
"""Key of a trajectory's metadata: name of its teacher."""
JUDGED = "judged"
"""Key of a trajectory's metadata: ``text_digest`` of the text that the verifier has judged."""


def text_digest(text: str) -> str:
    """Digest of a text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Outcome:
    """A trajectory without its tokens, for the rest of a step once the batch has them."""

    rollout_id: str
    group_id: str
    index: int
    prompt_length: int
    response_length: int
    reward: Reward
    truncated: bool
    group_stats: GroupStats | None
    greedy: Outcome | None
    num_turns: int = 2
    """Turns of all authors, the prompt included."""
    tool_calls: int | None = None
    """``None`` if responses were not searched for tool calls."""
    teacher: str | None = None
    """Name of its teacher; None without one."""

    @classmethod
    def of(cls, t: Trajectory) -> Outcome:
        """Copy the facts of a trajectory, without its tokens."""
        greedy = None if t.greedy is None else cls.of(t.greedy)
        return cls(
            t.rollout_id,
            t.group_id,
            t.index,
            t.prompt_length,
            t.response_length,
            t.reward,
            t.truncated,
            t.group_stats,
            greedy,
            len(t.turns),
            t.metadata.get(TOOL_CALLS),
            t.metadata.get(TEACHER),
        )


def name_of(one: Trajectory | Outcome) -> str:
    """Name of a trajectory for messages."""
    return f"trajectory {one.index} of group {one.group_id}"
