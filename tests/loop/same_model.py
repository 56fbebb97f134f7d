"""Comparison of two jobs that must have trained the same model on the same trajectories."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.buffer.store import Store


def steps(run_dir: Path) -> list[dict[str, float]]:
    """Metrics of the training steps."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "actor/pg_loss" in record]


def assert_same_model(first: Path, second: Path, count: int, trajectories: int) -> None:
    """Both have ``count`` steps of so many trajectories with the same tokens and rewards, and the same final bits."""
    stores = [Store(f"sqlite:///{run_dir}/store.db", read_only=True) for run_dir in (first, second)]
    for step in range(count):
        found = [
            [
                ([turn.token_ids.tolist() for turn in e.turns], e.reward.score)
                for e in store.groups.trajectories(f"train-{step:06d}")
            ]
            for store in stores
        ]
        assert found[0] == found[1] and len(found[0]) == trajectories
    for store in stores:
        store.close()
    bits = [(run_dir / "hf" / "model.safetensors").read_bytes() for run_dir in (first, second)]
    assert bits[0] == bits[1]
