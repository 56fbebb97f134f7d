"""Extract answers from responses with the verifiers, for majority votes.

Two answers count as one if their texts are equal after ``clean`` (LaTeX notation, spaces), right or wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megarl.config.rewards import RewardConfig
from megarl.core.errors import DataError
from megarl.core.schema import Task
from megarl.rewards import procedural
from megarl.rewards.answer.grammar import extract
from megarl.rewards.answer.normalize import clean
from megarl.rewards.routes import route

MAX_VOTE = 200
"""Maximum characters of a compared answer."""


def _marked(answer_format: str) -> Callable[[str, Mapping[str, Any]], str]:
    def read(text: str, info: Mapping[str, Any]) -> str:
        return clean(extract(text, info.get("answer_format") or answer_format)[:MAX_VOTE])

    return read


def _procedural(text: str, info: Mapping[str, Any]) -> str:
    return " ".join(procedural.answer_of(text).split())[:MAX_VOTE]


EXTRACTORS: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "reasoning_gym": _procedural,
    "math": _marked("any"),
    "math_named": _marked("any"),
    "math_lined": _marked("line"),
    "math_boxed": _marked("box"),
    "gsm8k": _marked("hashes"),
    "k12": _marked("any"),
}
"""Family of verifiers -> function of a response and ``extra_info`` that returns the answer, "" for none."""


def extractor(task: Task, config: RewardConfig) -> Callable[[str], str] | None:
    """Return a function that reads the answer in a response to a task; None if its verifier extracts none: programs,
    judges, images, and functions of users."""
    if config.path is not None:
        return None
    try:
        family, _ = route(task.data_source, config.routes)
    except DataError:
        return None
    read = EXTRACTORS.get(family)
    return None if read is None else lambda text: read(text, task.extra_info)
