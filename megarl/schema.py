"""The nouns that travel between the rooms: tasks, preferences, experiences, versions.

Numpy only: the explorer and the store handle these without importing torch.

Shape legend: P prompt tokens, R response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

GREEDY = -1
"""Index of the greedy answer beside a group's sampled ones: it is compared with, never trained on."""

RewardStatus = Literal["ok", "wrong", "error", "timeout"]
FinishReason = Literal["stop", "length", "abort"]


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


@dataclass(frozen=True)
class Reward:
    """A verdict: ``score`` is what the algorithm sees; an error is a status, never a silent 0."""

    score: float
    status: RewardStatus
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupStats:
    """Sufficient statistics of a whole group's rewards (std is the unbiased one; 0 for all-equal and single groups)."""

    mean: float
    std: float
    size: int


@dataclass(frozen=True)
class Segment:
    """Tokens ``[start, end)`` of a response that one set of weights sampled. Segments tile the response, and their
    versions never decrease: an engine goes on with newer weights, never with older ones."""

    start: int
    end: int
    version: WeightsVersion
    finish_reason: FinishReason


@dataclass(frozen=True, eq=False)
class Experience:
    """One sampled response with its reward. Token ids are exactly those that the engine sampled."""

    rollout_id: str
    task_id: str
    group_id: str
    index: int
    """Position within the group, 0 .. group_size-1; ``GREEDY`` for the greedy answer."""
    group_size: int
    prompt_ids: np.ndarray
    """int32 [P]; of a prompt with images as the engine computed it, each image's placeholder as many times as it has
    vectors."""
    response_ids: np.ndarray
    """int32 [R], including the end-of-sequence token when the engine sampled it."""
    response_mask: np.ndarray
    """bool [R]; False leaves a token out of every loss."""
    engine_logp: np.ndarray
    """float32 [R]; log-prob of each sampled token under the distribution that the engine sampled from (temperature
    applied)."""
    reward: Reward
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    group_stats: GroupStats | None = None
    """Set once the group is whole."""
    metadata: dict[str, Any] = field(default_factory=dict)
    greedy: Experience | None = None
    """The greedy answer to the same prompt, where the rollout asked for one (ReMax's baseline)."""

    @property
    def prompt_length(self) -> int:
        """P."""
        return len(self.prompt_ids)

    @property
    def response_length(self) -> int:
        """R."""
        return len(self.response_ids)


@dataclass(frozen=True)
class Sample:
    """An Experience without its arrays: what a step needs of it once the batch has its tokens."""

    rollout_id: str
    group_id: str
    index: int
    prompt_length: int
    response_length: int
    reward: Reward
    finish_reason: FinishReason
    group_stats: GroupStats | None
    greedy: Sample | None

    @classmethod
    def of(cls, e: Experience) -> Sample:
        """Take the facts of an experience, without its arrays."""
        greedy = None if e.greedy is None else cls.of(e.greedy)
        return cls(
            e.rollout_id,
            e.group_id,
            e.index,
            e.prompt_length,
            e.response_length,
            e.reward,
            e.finish_reason,
            e.group_stats,
            greedy,
        )
