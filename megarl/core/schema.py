"""The nouns that travel between the packages: tasks, preferences, trajectories and their samples, versions.

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
"""Index of the greedy trajectory beside a group's sampled ones: it is compared with, never trained on."""

RewardStatus = Literal["ok", "wrong", "error", "timeout", "late"]
FinishReason = Literal["stop", "length", "abort", "repetition"]
Author = Literal["system", "user", "environment", "tool", "model"]


class End(StrEnum):
    """Cause of a trajectory's end. Only what the policy can have caused is trained on."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    """At the limit of a response, or of the trajectory."""
    REPETITION = "repetition"
    """Its last response repeats one sequence of tokens, and was stopped there."""
    WORKFLOW_ERROR = "workflow_error"
    """The workflow, or the agent, has raised an exception."""
    WORKFLOW_TIMEOUT = "workflow_timeout"
    TOOL_TIMEOUT = "tool_timeout"
    """A tool that is a function of the user's has not returned in time, and ``rollout.on_tool_timeout`` is ``end``."""
    ABANDONED = "abandoned"
    """The workflow, or the agent, has not waited for a response that it had asked for."""
    ENVIRONMENT_ERROR = "environment_error"
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_LATE = "reward_late"
    """Its reward comes later; at a step, it has not come in time."""

    @property
    def by_policy(self) -> bool:
        """True for ends that the policy can have caused."""
        return self in (End.FINISHED, End.TRUNCATED, End.REPETITION)

    @property
    def by_reward(self) -> bool:
        """True for trajectories that the verifier gave no verdict of."""
        return self in (End.REWARD_ERROR, End.REWARD_TIMEOUT, End.REWARD_LATE)


ENDS: Mapping[FinishReason | None, End] = {"length": End.TRUNCATED, "repetition": End.REPETITION}
"""Ends by the reason of the model's last turn, where they are others than ``FINISHED``."""

Message = dict[str, Any]
"""A chat message: ``role``, ``content`` (None beside tool calls), and what else a chat template renders
(``reasoning_content``, …)."""


class WeightsVersion(NamedTuple):
    """Names one published set of weights: ``n`` counts synchronisations within a job attempt, never reused. Later ones
    compare greater, by attempt and then by ``n``."""

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
    """One verl data row: a prompt as chat messages and what its verifier needs."""

    task_id: str
    data_source: str
    prompt: tuple[Message, ...]
    ability: str
    reward_model: dict[str, Any]
    """verl's {style, ground_truth}; demonstrations may have none."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    response: str | None = None
    """The demonstration, for supervised rows only."""
    images: tuple[bytes, ...] = field(default=(), repr=False)
    """Files of the images that the prompt's ``<image>`` stand for, in order."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template beside the messages: ``tools``, ``enable_thinking``, …."""
    answer: Message | None = None
    """The demonstration as the assistant's message, rendered by the chat template; None where ``response`` is its exact
    text."""

    @property
    def ground_truth(self) -> Any:
        """The right answer, for the verifier."""
        return self.reward_model["ground_truth"]

    @property
    def question(self) -> str:
        """Content of the user's last message; of the last message where there is none."""
        return next(
            (m["content"] for m in reversed(self.prompt) if m["role"] == "user"), self.prompt[-1].get("content") or ""
        )

    def copy(self) -> Task:
        """Return a task that shares nothing with this one that can be changed."""
        return deepcopy(self)


@dataclass(frozen=True)
class Preference:
    """One data row of a preference: a prompt as chat messages, a better and a worse answer to it."""

    task_id: str
    data_source: str
    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    margin: float = 0.0
    """Least difference by which the chosen answer's score should be above the other's, for reward models that ask."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, as for a task."""
    answers: tuple[Message | None, Message | None] = (None, None)
    """The chosen and the rejected answer where they are messages, as ``Task.answer``."""
    images: tuple[bytes, ...] = field(default=(), repr=False)
    """Files of the prompt's images, as of a task."""


def plain(value: Any) -> Any:
    """The number of a scalar of numpy or torch; all else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)) else value


@dataclass(frozen=True)
class Reward:
    """A verdict: ``score`` is what the algorithm sees; an error is a status, never a silent 0."""

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
    """Sufficient statistics of a whole group's rewards (std is the unbiased one; 0 for all-equal and single groups)."""

    mean: float
    std: float
    size: int


@dataclass(frozen=True)
class WeightsSpan:
    """Tokens ``[start, end)`` of a turn that one set of weights sampled. The spans tile the turn, and their versions
    never decrease: an engine goes on with newer weights, never with older ones."""

    start: int
    end: int
    version: WeightsVersion


@dataclass(frozen=True, eq=False)
class Turn:
    """Tokens that one author wrote, exactly as the engine computed with them."""

    author: Author
    token_ids: np.ndarray
    """int32 [T]. Of a model: as it sampled them, the end-of-sequence token included. Of others: with all that the chat
    template puts around them, and each image's placeholder as many times as the image has vectors."""
    follows: int = -1
    """Index of the turn that it continues; -1 for a turn that nothing comes before. A turn that does not follow its
    neighbour starts again from an earlier one: a context that was rewritten, or a sub-agent's."""
    logp: np.ndarray | None = None
    """float32 [T] of a model's turn: log-prob of each token under the distribution that the engine sampled from
    (temperature applied)."""
    spans: tuple[WeightsSpan, ...] = ()
    """Weights of a model's turn."""
    finish_reason: FinishReason | None = None
    """Reason why a model's turn ended."""
    reward: float | None = None
    """Reward of this turn alone, where an environment or a workflow gave one; in the loss with
    ``algorithm.turn_rewards``."""
    images: tuple[str, ...] = ()
    """Digests of the files (``file_digest``) of the images that its tokens have placeholders for, in order."""
    routing: np.ndarray | None = None
    """int8 or int16 [N, L, K] of a model's turn: ids of the K experts that the engine chose in each of L layers with
    experts, for the N tokens of its line, up to its last but one, of which no earlier turn has them."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class Segment:
    """Tokens of one response of the model that an engine has sampled in one go."""

    index: int
    """Index of the trajectory in its group."""
    turn: int
    """Number of the response among those that the trajectory has asked for."""
    start: int
    """Tokens of the response before it."""
    context: str
    """``digest_of`` the tokens that the response follows."""
    token_ids: np.ndarray
    """int32 [T]"""
    logp: np.ndarray
    """float32 [T]"""
    spans: tuple[WeightsSpan, ...]
    """Weights that have sampled them, from 0 to T."""
    finish_reason: FinishReason | None = None
    """Reason why the response ended with it; None where more tokens follow."""
    prompt_ids: np.ndarray | None = None
    """int32 [P]; in the first segment after a prompt with images: its ids with placeholders expanded."""
    routing: np.ndarray | None = None
    """int8 or int16 [N, L, K], as of a turn."""

    def before(self, dead: Collection[str]) -> Segment | None:
        """Return the part before the first token of a ``dead`` version; None if that is the first one."""
        cut = min((span.start for span in self.spans if str(span.version) in dead), default=len(self.token_ids))
        if cut == len(self.token_ids):
            return self
        if not cut:
            return None
        spans = tuple(replace(span, end=min(span.end, cut)) for span in self.spans if span.start < cut)
        routing = None if self.routing is None else self.routing[: cut - len(self.token_ids)]
        return replace(
            self, token_ids=self.token_ids[:cut], logp=self.logp[:cut], spans=spans, finish_reason=None, routing=routing
        )


class ImagesAt(NamedTuple):
    """Tokens ``[start, end)`` of a sample, which have placeholders for images and none that the model has written."""

    start: int
    end: int
    digests: tuple[str, ...]
    """``file_digest`` of the images, in order."""


class TrainingSample(NamedTuple):
    """A sequence to train on; the tokens of the prompt are in no loss."""

    prompt_ids: np.ndarray
    """int32 [P], at least one."""
    response_ids: np.ndarray
    """int32 [R]"""
    response_mask: np.ndarray
    """bool [R]; True for tokens that the model wrote and that no earlier sample of the trajectory trains."""
    engine_logp: np.ndarray
    """float32 [R]; 0 where the mask is False."""
    finish_reason: FinishReason
    """Reason why the last turn ended."""
    lag: np.ndarray | None = None
    """int16 [R]: steps by which the weights that sampled each token are behind those that the step starts from, 0 where
    the mask is False. None where every token has lag 0."""
    images: tuple[ImagesAt, ...] = ()
    routing: np.ndarray | None = None
    """int8 or int16 [P + R - 1, L, K]: ids of the experts that the engine chose for each token but the last, in each
    layer with experts. None where engines record none."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One attempt at a task, with its reward."""

    rollout_id: str
    task_id: str
    group_id: str
    index: int
    """Number among those that were sampled for the group, from 0; ``GREEDY`` for the greedy one. At least
    ``group_size`` where a spare one is a member (``rollout.spare``)."""
    group_size: int
    turns: tuple[Turn, ...]
    """In the order in which they were written; the first is the prompt, the last model's turn is the answer."""
    reward: Reward
    group_stats: GroupStats | None = None
    """Set once the group is whole."""
    metadata: dict[str, Any] = field(default_factory=dict)
    greedy: Trajectory | None = None
    """The greedy attempt at the same task, where the rollout asked for one (ReMax's baseline)."""
    cause: End | None = None
    """End that the workflow has named; None: by the reward's status and the model's last turn."""
    images: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Digest -> file of each image of its turns that is none of the task's. The store gives them back by themselves
    (``Store.groups.images``)."""

    @property
    def end(self) -> End:
        """Cause of its end. A missing verdict comes before an end by the policy, which has a reward."""
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
        """Reason why the model's last turn ended."""
        reason = self.response.finish_reason
        assert reason is not None, "every turn of a model ended for a reason"
        return reason

    @property
    def truncated(self) -> bool:
        """True if a limit cut any turn of the model, or ended the trajectory."""
        return self.cause is End.TRUNCATED or any(
            turn.finish_reason == "length" for turn in self.turns if turn.author == "model"
        )

    @property
    def prompt_length(self) -> int:
        """Tokens of the first turn."""
        return len(self.prompt)

    @property
    def response_length(self) -> int:
        """Tokens that the model wrote."""
        return sum(len(turn) for turn in self.turns if turn.author == "model")

    def samples(self, lags: Mapping[WeightsVersion, int] | None = None) -> Iterator[TrainingSample]:
        """Yield one sample for each line of turns, from a first turn to one that nothing follows.

        Lines that share turns of the model train them once, in the first. Usually there is one line.

        Args:
            lags: Lag of every version that has sampled some of the tokens; None where all are 0.
        """
        for line, new in self.trained_lines():
            before, after = line[: line.index(new[0])], line[line.index(new[0]) : line.index(new[-1]) + 1]
            yield _sample([self.turns[i] for i in before], [(self.turns[i], i in new) for i in after], lags)

    @property
    def num_samples(self) -> int:
        """Number of ``samples``."""
        return sum(1 for _ in self.trained_lines())

    def answered(self) -> tuple[np.ndarray, np.ndarray]:
        """Return int32 [P] and [R]: the context of the model's last turn, and that turn."""
        *before, response = (self.turns[i].token_ids for i in self._answered_line)
        return _joined(before), response

    @property
    def answered_images(self) -> tuple[ImagesAt, ...]:
        """Images of ``answered``, its two parts one after the other."""
        return tuple(_images_at([self.turns[i] for i in self._answered_line]))

    @property
    def _answered_line(self) -> list[int]:
        return line_of_turns(self.turns, max(i for i, turn in enumerate(self.turns) if turn.author == "model"))

    def trained_lines(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield each line of turns that has turns to train, and those turns."""
        trained: set[int] = set()
        followed = {turn.follows for turn in self.turns}
        for line in (line_of_turns(self.turns, last) for last in range(len(self.turns)) if last not in followed):
            new = [i for i in line if self.turns[i].author == "model" and i not in trained]
            if new:
                yield line, new
                trained.update(new)


LARGEST_LAG = int(np.iinfo(np.int16).max)


def file_digest(file: bytes) -> str:
    """Digest of an image's file."""
    return hashlib.sha256(file).hexdigest()


def digest_of(token_ids: np.ndarray, images: Sequence[str] = ()) -> str:
    """Digest of the tokens that a response follows, and of the images (their digests) that these have placeholders
    for."""
    found = hashlib.blake2b(np.ascontiguousarray(token_ids, "<i4").tobytes(), digest_size=8)
    found.update("".join(images).encode())
    return found.hexdigest()


def line_of_turns(turns: Sequence[Turn], last: int) -> list[int]:
    """Return the indices of the turns from one that follows nothing to ``last``."""
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
    """Expert ids of the tokens of a line of turns, [N, L, K]; None where its turns have none."""
    found = [turn.routing for turn in turns if turn.routing is not None]
    return _joined(found) if found else None


def _images_at(turns: Sequence[Turn]) -> Iterator[ImagesAt]:
    start = 0
    for turn in turns:
        if turn.images:
            yield ImagesAt(start, start + len(turn), turn.images)
        start += len(turn)


def _lag(turn: Turn, lags: Mapping[WeightsVersion, int]) -> np.ndarray:
    """Lag of each token, int16 [T]; all 0 without ``lags``. A replayed token's is at most what fits."""
    result = np.zeros(len(turn), np.int16)
    for span in turn.spans if lags else ():
        result[span.start : span.end] = min(lags[span.version], LARGEST_LAG)
    return result


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


TOOL_CALLS = "tool_calls"
"""Key of a trajectory's metadata: number of tool calls in its responses."""
TEACHER = "teacher"
"""Key of a trajectory's metadata while a step has it: name of its teacher."""


@dataclass(frozen=True)
class Outcome:
    """A Trajectory without its tokens: what a step needs of it once the batch has them."""

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
    """None where responses were not read for tool calls."""
    teacher: str | None = None
    """Name of its teacher; None where it has none."""

    @classmethod
    def of(cls, t: Trajectory) -> Outcome:
        """Take the facts of a trajectory, without its tokens."""
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
    """Name of a trajectory in messages."""
    return f"trajectory {one.index} of group {one.group_id}"
