"""Counts of the answers to each task of a bench, as stored in ``bench.json``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megarl.core.errors import DataError
from megarl.core.schema import Trajectory
from megarl.core.thoughts import as_written, opens_thinking
from megarl.rewards.verdict import NO_VERDICT
from megarl.tasks import ChatTokenizer

RESULT = "bench.json"
"""File of a finished bench, in the directory of its model."""
LAST_TOKENS = 32
"""Number of tokens at the end of a prompt that are searched for an open thought."""
Vote = Callable[[Trajectory], str | None]
"""Returns a response's answer: ``""`` if it gives none, None if the task's verifier extracts no answers."""


def written_response(answer: Trajectory, tokenizer: ChatTokenizer) -> str:
    """Return the text of an answer's last response for verifiers, with a ``<think>`` from the end of its prompt."""
    before = answer.turns[answer.response.follows].token_ids[-LAST_TOKENS:]
    return as_written(
        tokenizer.decode(answer.response.token_ids), opens_thinking(tokenizer.decode(before, special=True))
    )


@dataclass
class TaskAnswers:
    """Counts of the answers to one task."""

    task_id: str
    source: str
    """``data_source`` of the task."""
    samples: int = 0
    right: int = 0
    """Right answers; one without a verdict counts as wrong, as in an evaluation."""
    score: float = 0.0
    """Sum of the scores of answers with a verdict."""
    judged: int = 0
    """Answers with a verdict."""
    tokens: int = 0
    truncated: int = 0
    votes: list[tuple[str, int, int]] | None = field(default_factory=list)
    """(answer, number of samples with it, right ones among them); None if the verifier extracts no answers."""

    @property
    def mean_score(self) -> float | None:
        """Mean score of the answers with a verdict; None without any."""
        return self.score / self.judged if self.judged else None

    @classmethod
    def of(cls, task_id: str, source: str, answers: Iterable[Trajectory], vote: Vote) -> TaskAnswers:
        """Count the answers to a task."""
        found, votes = cls(task_id, source), defaultdict[str, list[int]](lambda: [0, 0])
        for answer in answers:
            right = answer.reward.status == "ok"
            found.samples += 1
            found.right += right
            if answer.reward.status not in NO_VERDICT:
                found.judged += 1
                found.score += answer.reward.score
            found.tokens += answer.response_length
            found.truncated += answer.truncated
            given = vote(answer)
            if given is None:
                found.votes = None
            elif given:
                votes[given][0] += 1
                votes[given][1] += right
        if found.votes is not None:
            found.votes = [(given, count, right) for given, (count, right) in sorted(votes.items())]
        return found


@dataclass(frozen=True)
class ModelAnswers:
    """A finished bench of one model."""

    samples: int
    """Answers to each task."""
    temperature: float
    seconds: float
    """Seconds from the driver's (last) start until all answers were stored."""
    tasks: tuple[TaskAnswers, ...]

    def to_json(self) -> str:
        """Return the counts as JSON."""
        return json.dumps(asdict(self), indent=1)


def read_result(path: Path) -> ModelAnswers:
    """Read what ``to_json`` wrote. Raises DataError for a damaged file or another version's."""
    try:
        values: Mapping[str, Any] = json.loads(path.read_text())
        tasks = tuple(TaskAnswers(**task) for task in values["tasks"])
        return ModelAnswers(**{**values, "tasks": tasks})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove it, and the same command measures again") from error
