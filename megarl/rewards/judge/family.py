"""The judge as a plain function, for calls of ``compute_score`` alone; a job's answers go to the ``Judge`` of its
explorer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from megarl.config.rewards import RewardConfig

ENGINES = "MEGARL_ENGINES"
"""Environment variable with comma-separated engine URLs, for reward functions that call the judge themselves."""


def scorer(config: RewardConfig) -> Callable[[str, Any, dict[str, Any] | None], dict[str, Any]]:
    """Return a scorer that opens connection and cache for each answer; the question is ``extra_info['question']``. Not
    for use inside an event loop.

    ``url: rollout`` needs MEGARL_ENGINES and MEGARL_JOB_KEY. The scorer raises ConfigError for wrong settings.
    """
    from megarl.rewards.judge.judge import Judge  # importing aiohttp takes 0.3 s

    async def once(solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None) -> dict[str, Any]:
        engines = [url for url in os.environ.get(ENGINES, "").split(",") if url]
        async with Judge(config.judge, lambda: engines, os.environ.get("MEGARL_JOB_KEY")) as judge:
            return await judge.score(solution_str, ground_truth, extra_info)

    def score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> dict[str, Any]:
        return asyncio.run(once(solution_str, ground_truth, extra_info))

    return score
