"""Answers that a verifier must not count as right: lists of the answers of other rows.

A verifier that looks for the answer anywhere in a text, or whose result is not read, takes them for right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megarl.core.schema import Task

NUMBER = 4
"""Rows whose verifier is asked."""
LISTED = 8
"""Most answers in a list."""
LONGEST = 100
"""Characters of an answer; longer ones are proofs or programs."""


class WrongAnswer(NamedTuple):
    """A text that is no answer to a task."""

    task: Task
    text: str


def wrong_answers(tasks: Sequence[Task]) -> Iterator[WrongAnswer]:
    """Yield, for a few tasks, the other tasks' answers in a line; nothing where answers are no short texts, or equal.

    Args:
        tasks: Tasks with verifiers that cost little.
    """
    truths = {
        task.task_id: str(task.ground_truth).strip() for task in tasks if isinstance(task.ground_truth, str | int)
    }
    short = [task for task in tasks if 0 < len(truths.get(task.task_id, "")) <= LONGEST]
    for task in short[:NUMBER]:
        own, kind = truths[task.task_id], task.data_source
        others = [truths[one.task_id] for one in short if one.data_source == kind]
        listed = [other for other in dict.fromkeys(others) if other.casefold() != own.casefold()][:LISTED]
        if len(listed) > 1:
            yield WrongAnswer(task, " ".join(listed))


def accepted(replies: Sequence[tuple[WrongAnswer, Mapping[str, Any]]]) -> str | None:
    """Return a text if a verifier counts half of the wrong answers as right or more; None below, or with a single one.

    Args:
        replies: Verdicts of ``rewards.again``.
    """
    right = [one for one, reply in replies if reply.get("status") == "ok"]
    if len(replies) < 2 or 2 * len(right) < len(replies):
        return None
    first = right[0]
    return (
        f"{len(right)} of {len(replies)} lists of other rows' answers count as right, the first {first.text!a:.100} "
        f"for task {first.task.task_id}, whose answer is {str(first.task.ground_truth)!a:.100}"
    )
