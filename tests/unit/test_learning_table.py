"""benchmarks/learning.py: every run's settings are ones that megarl takes, and the table says what was measured and
nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import learning
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tqdm import tqdm

from megarl.config import compose, config_dir
from megarl.learn import algorithms

START = {"accuracy": 0.178, "seconds": 60.0, "commit": "abc"}


def all_cells(runs: Path, *extra: str) -> list[learning.Cell]:
    return learning.cells(runs, list(learning.ROWS), None, extra)


def test_every_run_composes_and_begins_with_the_same_model(tmp_path: Path) -> None:
    cells = all_cells(tmp_path)
    assert len({cell.folder for cell in cells}) == len(cells)
    for cell in cells:
        if cell.seed > 1:
            continue  # as the first but for the seed, and a composition takes a tenth of a second
        config = compose([*cell.overrides, f"run.dir={tmp_path}"])
        row = learning.ROWS[cell.row]
        if not cell.control:
            preset = compose([f"algorithm={row.preset or cell.row}"]).algorithm.name
            assert config.algorithm.name == preset, "the experiment names another algorithm"
        assert config.model.path == str(learning.model_of(tmp_path)) and config.trainer.warm_start.steps == 0
        optimizer = config.trainer.optimizer
        assert (optimizer.lr, optimizer.min_lr or 0.0) == (0.0, 0.0) if cell.control else optimizer.lr > 0
        assert algorithms.get(config.algorithm.name).offline == (row.experiment != "quickstart")
        rows = config.trainer.tasks_per_step * config.algorithm.group_size
        assert algorithms.get(config.algorithm.name).offline or rows == 512, "runs are to cost the same"


def test_every_preset_has_a_row() -> None:
    presets = {row.preset or name for name, row in learning.ROWS.items()}
    with_teacher = {"distill"}  # another model's: docs/distillation.md
    assert presets == {p.stem for p in (config_dir() / "algorithm").glob("*.yaml")} - with_teacher
    seeds = {name for name, row in learning.ROWS.items() if row.seeds == 3}
    assert seeds == {"grpo", "grpo_ahead", "grpo_partial", "ppo", "dpo", "mix", "opmd"}


def test_other_settings_are_another_run(tmp_path: Path) -> None:
    names = {cell.name for cell in all_cells(tmp_path)}
    assert names == {cell.name for cell in all_cells(tmp_path)}
    assert not names & {cell.name for cell in all_cells(tmp_path, "trainer.tasks_per_step=16")}


def test_what_cannot_run_is_pending_with_its_reason(tmp_path: Path) -> None:
    ready = {cell.row: cell for cell in learning.cells(tmp_path, ["grpo", "sft"], None, [])}
    assert [learning.pending(cell) for cell in ready.values()] == [None, None]
    cell = learning.Cell(tmp_path, "grpo", 1, False, ("experiment=quickstart", "algorithm.name=grqo"))
    assert "grqo" in (learning.pending(cell) or "")
    table = learning.table(["grpo"], {}, {("grpo", 1, False): {"pending": "no algorithm 'grqo'"}})
    assert "pending; not run yet; not run yet" in table and "- `grpo`: no algorithm 'grqo'" in table
    assert "%" not in table and "points" not in table, "a number that nobody measured"


def test_a_finished_run_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = learning.cells(tmp_path, ["grpo"], 4, [])[0]
    cell.folder.mkdir(parents=True)
    found = {"before": 0.178, "after": 0.9, "seconds": 150.0, "commit": "abc"}
    (cell.folder / "result.json").write_text(json.dumps(found))
    monkeypatch.setattr(learning, "train", lambda *args: pytest.fail("it ran again"))
    assert learning.run(cell, START, tqdm(disable=True)) == found


def test_the_table(tmp_path: Path) -> None:
    def measured(after: float) -> dict[str, Any]:
        return {"before": 0.178, "after": after, "seconds": 120.0}

    results = {
        ("mix", 1, False): measured(0.878),
        ("mix", 2, False): measured(0.778),
        ("mix", 3, False): {"failed": "the engine is gone (exit status 1; x.log)"},
        ("mix", 1, True): {"same": True, "seconds": 60.0},
        ("ppo", 1, True): {"same": False, "seconds": 60.0},
        ("reward_model", 1, False): {"before": 0.5, "after": 0.96, "seconds": 60.0},
    }
    table = learning.table(["mix", "ppo", "reward_model"], START, results)
    assert "| `mix` | 17.8% → 87.8%; 17.8% → 77.8%; failed | +65.0 points | same weights | 2.0 |" in table
    assert "**weights moved**" in table and "50.0% → 96.0% preferred" in table and "Start: 17.8%" in table
    assert "- `mix`: the engine is gone (exit status 1; x.log)" in table


@pytest.mark.parametrize("change", [None, "bit", "sign of zero", "name", "head"])
def test_weights_are_the_same_bit_for_bit(tmp_path: Path, change: str | None) -> None:
    tensors = {"model.norm.weight": torch.tensor([1.0, -0.0]), "lm_head.weight": torch.ones(2, 2)}
    other = {name: tensor.clone() for name, tensor in tensors.items()}
    if change == "bit":
        other["model.norm.weight"] = torch.tensor([np.nextafter(np.float32(1), np.float32(2)), -0.0])
    if change == "sign of zero":
        other["model.norm.weight"] = torch.tensor([1.0, 0.0])
    if change == "name":
        other["model.more.weight"] = torch.ones(1)
    if change == "head":
        other["score.weight"] = other.pop("lm_head.weight")
    for name, found in (("a", tensors), ("b", other)):
        (tmp_path / name).mkdir()
        save_file(found, tmp_path / name / "model.safetensors")
    assert learning.same_weights(tmp_path / "a", tmp_path / "b") == (change in (None, "head"))


def test_prompts_are_grouped_by_length() -> None:
    prompts = [np.arange(n) for n in (3, 2, 3, 1)]
    found = list(learning.by_length(prompts))
    assert [[i for i, _ in same] for same in found] == [[3], [1], [0, 2]]
    assert all(len(ids) == len(prompts[i]) for same in found for i, ids in same)
