"""Metrics named in the source are on docs/metrics.md; what whole runs write is compared in tests/loop."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import megarl
from tests.metrics_page import unlisted

GROUPS = (
    "actor",
    "critic",
    "training",
    "val",
    "perf",
    "rollout",
    "replay",
    "taskset",
    "sync",
    "response_length",
    "prompt_length",
    "reward_model",
    "rewards",
)
WRITERS = (
    "learn/algorithms",
    "buffer/experience",
    "buffer/order",
    "explore/explorer",
    "train",
    "learn/training",
    "core/metrics.py",
)
SPREAD = {
    "critic/advantages", "critic/returns", "critic/score", "critic/turn_advantages", "critic/values",
    "reward_model/score",
}  # fmt: skip
"""First halves of names, to which /mean, /max and /min are added."""


def test_every_name_in_the_source_is_listed() -> None:
    found = set()
    for place in WRITERS:
        path = Path(megarl.__file__).parent / place
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            texts = {
                n.value
                for n in ast.walk(ast.parse(file.read_text()))
                if isinstance(n, ast.Constant) and isinstance(n.value, str)
            }
            found |= {text for text in texts if re.fullmatch(rf"({'|'.join(GROUPS)})/[\w/]*\w", text)}
    assert len(found) > 30
    assert unlisted(found - SPREAD | {f"{name}/mean" for name in SPREAD & found}) - {"critic/rewards"} == set()


def test_a_name_that_is_not_there_is_found() -> None:
    assert (
        unlisted({"actor/loss", "reward/parts/format", "reward/math/seconds/max", "val/rewards/chosen", "step"})
        == set()
    )
    assert unlisted({"actor/nothing", "reward/math/seconds/median", "critic/scores/mean"}) == {
        "actor/nothing", "reward/math/seconds/median", "critic/scores/mean"
    }  # fmt: skip
