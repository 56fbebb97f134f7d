"""Verifiers by data source, for scores and for majority votes.

A new reward family is one file, a row of ``FAMILIES`` and rows of ``ROUTES``.

Two answers count as one if their texts are equal after ``clean`` (LaTeX notation, spaces), right or wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from megarl.config.rewards import RewardConfig
from megarl.core.errors import DataError
from megarl.core.schema import Task
from megarl.rewards import code, code_tests, procedural
from megarl.rewards.answer.grammar import extract
from megarl.rewards.answer.normalize import clean
from megarl.rewards.judge import family as judge_family
from megarl.rewards.math import verifier as math_verifier
from megarl.rewards.school import verifier as k12
from megarl.rewards.verdict import LATE, to_verdict
from megarl.rewards.vision import verifier as vision

CODE = "code"
JUDGE = "judge"
"""Family judged by the pool's ``judge`` instead of a worker."""

Scorer = Callable[[str, Any, dict[str, Any] | None], Any]
"""(solution_str, ground_truth, extra_info) -> float, or a dict with ``score`` (``status`` or ``acc``, and parts)."""

FAMILIES: dict[str, Callable[[str, RewardConfig], Scorer]] = {
    "reasoning_gym": lambda rest, config: procedural.scorer(rest.removeprefix("/")),
    "math": lambda rest, config: math_verifier.scorer(rest),
    "math_named": lambda rest, config: math_verifier.named(rest),
    "math_lined": lambda rest, config: math_verifier.lined(rest),
    "math_boxed": lambda rest, config: math_verifier.boxed(rest),
    "gsm8k": lambda rest, config: math_verifier.gsm8k(rest),
    "k12": lambda rest, config: k12.scorer(rest),
    CODE: lambda rest, config: code.scorer(rest, config.code),
    LATE: lambda rest, config: lambda text, truth, info: {"score": 0.0, "status": LATE},
    JUDGE: lambda rest, config: judge_family.scorer(config),
    "vision": lambda rest, config: vision.scorer(rest),
}
"""Family -> function of the text after the prefix in ``data_source`` and of the settings that returns the scorer. Heavy
imports happen there."""

ALGEBRA = ("megarl.rewards.math.algebra", "latex2sympy2_extended.latex2sympy2", "math_verify", "sympy")
IMPORTS: dict[str, tuple[str, ...]] = {
    "reasoning_gym": ("reasoning_gym",),
    **dict.fromkeys(("math", "math_named", "math_lined", "math_boxed"), ALGEBRA),
}
"""Family -> modules of at least 0.2 s that its scorer imports late."""

RowCheck = Callable[[str, Any, dict[str, Any]], None]
ROW_CHECKS: dict[str, RowCheck] = {
    **dict.fromkeys(
        ("math", "math_named", "math_lined", "math_boxed", "gsm8k"),
        lambda rest, truth, info: math_verifier.check_row(truth, info),
    ),
    "k12": lambda rest, truth, info: k12.check_row(truth, info),
    "vision": lambda rest, truth, info: vision.check_row(rest.split("/")[1], truth, info),
    "code": lambda rest, truth, info: code_tests.check_row(truth, info),
    "reasoning_gym": lambda rest, truth, info: procedural.check_row(rest.removeprefix("/"), truth, info),
}
"""Family -> function of the text after the prefix, ground truth and extra_info. It raises DataError for a row that no
answer can satisfy."""

ROUTES: dict[str, str] = {
    "reasoning_gym": "reasoning_gym",
    "math": "math",
    "math_dapo": "math_lined",
    "aime": "math_lined",
    "numina_": "math_named",
    **dict.fromkeys(("train-math-", "test-math-"), "math_named"),
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math_boxed",
    "DigitalLearningGmbH/MATH-lighteval": "math_boxed",
    "HuggingFaceH4/MATH-500": "math_boxed",
    "k12": "k12",
    "judge": "judge",
    LATE: LATE,
    "vision": "vision",
    "hiyouga/geometry3k": "math_boxed",
    **dict.fromkeys(
        (
            "code",
            "codecontests",
            "apps",
            "codeforces",
            "taco",
            "humaneval",
            "openai_humaneval",
            "mbpp",
            "livecodebench",
            "train-code-",
            "test-code-",
        ),
        "code",
    ),
}
"""Prefix of ``data_source`` -> family: names of verl, Skywork-OR1 (``train-math-…``) and megarl."""


def route(data_source: str, routes: Mapping[str, str]) -> tuple[str, str]:
    """Return (family, text after the prefix) by the longest matching prefix, in ``routes`` (``reward.routes``) before
    megarl's table.

    For a prefix of the user the text is the subtype in ``routes`` (``vision/count``), since only after megarl's
    prefixes the rest of the name has a meaning.

    Raises:
        DataError: no prefix matches.
    """
    for table in (routes, ROUTES):
        matching = [prefix for prefix in table if data_source.startswith(prefix)]
        if matching:
            prefix = max(matching, key=len)
            if table is ROUTES:
                return ROUTES[prefix], data_source[len(prefix) :]
            family, slash, subtype = table[prefix].partition("/")
            return family, slash + subtype
    raise DataError(
        f"data_source {data_source!r} has no verifier; known prefixes: {', '.join(ROUTES)}; send it to one of them by "
        "reward.routes, or set reward.path to a Python file with compute_score"
    )


def imports_of(data_sources: Iterable[str], routes: Mapping[str, str]) -> list[str]:
    """Return the modules that the verifiers of data sources import late; sources without a verifier are skipped."""
    found: list[str] = []
    for data_source in data_sources:
        with suppress(DataError):
            found += IMPORTS.get(route(data_source, routes)[0], ())
    return sorted(set(found))


def scorer_for(data_source: str, config: RewardConfig | None = None) -> Scorer:
    """Return the verifier of a data source. Raises DataError if there is none."""
    config = config or RewardConfig()
    family, rest = route(data_source, config.routes)
    return FAMILIES[family](rest, config)


def check_source(data_source: str, config: RewardConfig) -> None:
    """Raise DataError if a data source has no verifier. Unlike ``scorer_for`` it imports no reasoning-gym."""
    family, rest = route(data_source, config.routes)
    if family == "reasoning_gym":
        procedural.check_family(rest.removeprefix("/"))
    else:
        scorer_for(data_source, config)


def check_row(data_source: str, ground_truth: Any, extra_info: dict[str, Any], config: RewardConfig) -> None:
    """Raise DataError for a row that evidently no answer can satisfy. Cheap: only reads, runs and solves nothing."""
    family, rest = route(data_source, config.routes)
    if family in ROW_CHECKS:
        ROW_CHECKS[family](rest, ground_truth, extra_info)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    config: RewardConfig | None = None,
) -> dict[str, Any]:
    """Score an answer, in verl's signature, without shape rewards, which a job's settings weigh.

    Returns ``{score, status, parts}`` and, for an error, ``reason``; ``status`` is ok, wrong, error or timeout.

    Raises:
        DataError: the data source has no verifier.
    """
    return to_verdict(scorer_for(data_source, config)(solution_str, ground_truth, extra_info))


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
