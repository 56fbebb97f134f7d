"""``megarl rewards explain``: its example in the docs, its errors, and untrusted text on a terminal."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.config.rewards import RewardConfig
from megarl.core.errors import ConfigError, DataError
from megarl.rewards import compute_score
from megarl.run.data.show import explanations, shown

DOCS = Path(__file__).parents[2] / "docs" / "rewards.md"
PROMPT = [{"role": "user", "content": "How many?"}]


def row(source: str, response: Any, truth: Any, **more: Any) -> dict[str, Any]:
    model = {"ground_truth": truth}
    return {"data_source": source, "prompt": PROMPT, "reward_model": model, "response": response, **more}


def explained(file: Path, *rows: dict[str, Any], **settings: Any) -> list[str]:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    async def collect() -> list[str]:
        return [text async for text in explanations(file, RewardConfig(**settings))]

    return asyncio.run(collect())


def test_the_example_of_the_docs(tmp_path: Path) -> None:
    section = DOCS.read_text().split("## Explain verdicts")[1]
    rows, printed = section.split("```json\n")[1].split("```")[0], section.split("```text\n")[1].split("```")[0]
    lines = rows.replace("\n ", " ")
    (tmp_path / "rows.jsonl").write_text(lines)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "megarl", "rewards", "explain", "rows.jsonl"],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == printed.strip()
    assert time.monotonic() - began < 60


def test_every_family_is_explained_by_its_own_code(tmp_path: Path) -> None:
    rows = [
        row("math", r"\boxed{1+x}", "x+1"),
        row("openai/gsm8k", "####\n18", "18"),
        row("k12", "The pressure rises, so B.", "B"),
        row("k12", "true", "对"),
        row("vision/count", "There are 3 dogs.", "3"),
        row("vision/anls", "STOP", "stop"),
        row("math", r"\boxed{2}", "3"),
        row("k12", "A or B", "B"),
    ]
    texts = explained(tmp_path / "rows.jsonl", *rows)
    for one, text in zip(rows, texts, strict=True):
        verdict = compute_score(one["data_source"], one["response"], one["reward_model"]["ground_truth"])
        assert f"verdict   {verdict['status']}, score {verdict['score']:g}" in text
        assert "asked for" in text and "read" in text and "compared" in text and "of the response" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response": None}, "line 2: response must be the text to judge"),
        ({"response": 7}, "line 2: response must be a non-empty string, got 7"),
        ({"data_source": "nobody"}, "line 2: data_source 'nobody' has no verifier"),
        ({"data_source": "judge/x"}, "line 2: data_source 'judge/x' belongs to the family judge"),
        ({"data_source": "late"}, "line 2: data_source 'late' belongs to the family late"),
        (
            {"reward_model": {"ground_truth": "."}},
            "line 2: ground_truth '.' holds an answer of nothing but punctuation",
        ),
        ({"reward_model": {"ground_truth": None}}, "line 2: reward_model.ground_truth must be"),
    ],
)
def test_rows_that_cannot_be_explained(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    good = row("math", "5", "5")
    with pytest.raises(DataError, match=message.replace(".", r"\.")):
        explained(tmp_path / "rows.jsonl", good, good | change)


def test_settings_that_cannot_be_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only megarl's own verifiers"):
        explained(tmp_path / "rows.jsonl", row("math", "5", "5"), path="mine.py")
    texts = explained(tmp_path / "rows.jsonl", row("mine", "5", "5"), routes={"mine": "math"})
    assert "verifier  math (data_source `mine`)" in texts[0] and "verdict   ok" in texts[0]


def test_a_response_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    text = explained(tmp_path / "rows.jsonl", row("math", "\\boxed{\x1b[31m\r5\u202e}", "5"))[0]
    assert all(sign.isprintable() or sign == "\n" for sign in text)
    assert shown("\x1b\u2028") == r"`\x1b\u2028`" and shown("中文") == "`中文`"


def test_a_response_that_costs_too_much_is_wrong(tmp_path: Path) -> None:
    rows = [row("math", rf"\boxed{{{answer}}}", "5") for answer in (r"\prod_{k=1}^{9999999}k^k", "9^{9^{9^9}}", "5")]
    texts = explained(tmp_path / "rows.jsonl", *rows)
    assert ["ok" in text.split("verdict")[1] for text in texts] == [False, False, True]
    assert all("wrong, score 0" in text for text in texts[:2])
