"""reasoning-gym's own scorers (Apache-2.0), one per task family."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megarl.core.errors import DataError
from megarl.explore.rewards.answer.extract import after_thinking


@functools.cache
def scorer(family: str) -> Callable[[str, Any, dict[str, Any] | None], float]:
    """The scorer of ``reasoning_gym/<family>``: 1.0 for a right answer, partial credit as the family defines it.

    The answer is what stands in the last ``<answer>…</answer>`` after all thoughts, or else the whole text after them,
    stripped. Families other than arithmetic read ``extra_info``'s question and metadata. Raises DataError for an
    unknown family. The scorer raises what the family raises for the right answer; another one that it cannot read is
    wrong.
    """
    import reasoning_gym  # 0.7 s: only in the worker that scores

    try:
        score_answer = reasoning_gym.get_score_answer_fn(family)
    except ValueError as error:
        raise DataError(
            f"data_source 'reasoning_gym/{family}': reasoning-gym has no such family; correct it, or set reward.path"
        ) from error

    def score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> float:
        info = extra_info or {}
        entry = {"question": info.get("question"), "answer": ground_truth, "metadata": info.get("metadata") or {}}
        text = after_thinking(solution_str).strip()
        answer = reasoning_gym.utils.extract_answer(text)
        try:
            return float(score_answer(text if answer is None else answer, entry))
        except Exception:
            score_answer(ground_truth, entry)  # raises too where the row is at fault
            return 0.0

    return score
