"""Counts of the answers to each task of a bench, as they are kept in ``bench.json``."""

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
"""Tokens at the end of a prompt that show whether it opens a thought."""
Vote = Callable[[Trajectory], str | None]
"""Answer that a response gives: "" where it gives none, None where the task's verifier extracts none."""


def written_response(answer: Trajectory, tokenizer: ChatTokenizer) -> str:
    """Text of an answer's last response with the ``<think>`` that its prompt ended with, as verifiers get it."""
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
    """Sum of the scores of answers that have a verdict."""
    judged: int = 0
    """Answers that have a verdict."""
    tokens: int = 0
    truncated: int = 0
    votes: list[tuple[str, int, int]] | None = field(default_factory=list)
    """(answer, times that it was given, right ones of them); None where the verifier extracts no answer."""

    @property
    def mean_score(self) -> float | None:
        """Mean score of the answers that have a verdict; None without any."""
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
    """Seconds from the start of the process that asks until all answers were there; of the last start, after a stop."""
    tasks: tuple[TaskAnswers, ...]

    def to_json(self) -> str:
        """Return the counts as JSON."""
        return json.dumps(asdict(self), indent=1)


def read_result(path: Path) -> ModelAnswers:
    """Read what ``to_json`` wrote. Raises DataError for a file that is damaged or another version's."""
    try:
        values: Mapping[str, Any] = json.loads(path.read_text())
        tasks = tuple(TaskAnswers(**task) for task in values["tasks"])
        return ModelAnswers(**{**values, "tasks": tasks})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove it, and the same command measures again") from error
