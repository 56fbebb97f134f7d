"""The best checkpoint of a run."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.train.parts.best_kept import best_of


def test_the_best_step_is_the_earliest_of_equal_ones(tmp_path: Path) -> None:
    lines = [{"step": step, "val/accuracy": value} for step, value in ((1, 0.5), (2, 0.75), (3, 0.75), (4, 1.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert best_of(tmp_path, "val/accuracy", {1, 2, 3}) == 2
    assert best_of(tmp_path, "val/accuracy", {5}) is None
    assert best_of(tmp_path, "val/loss", {1, 2, 3, 4}) is None
