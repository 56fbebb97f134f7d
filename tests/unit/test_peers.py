"""benchmarks/peers.py: TRL gets megarl's settings and reward, and both runs are read in the same way."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config import compose
from megarl.rewards import compute_score
from megarl.tasks.generators.entries import Entry

ROOT = Path(__file__).parents[2]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    return _module(monkeypatch, "benchmarks", "peers")


def _module(monkeypatch: pytest.MonkeyPatch, folder: str, name: str) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / folder))
    for known in (name, "page"):
        monkeypatch.delitem(sys.modules, known, raising=False)
    return __import__(name)


def test_trl_gets_the_settings_of_the_quickstart(peers: Any, tmp_path: Path) -> None:
    config = compose([*peers.shared(peers.SIZES["quickstart"], tmp_path, 20), "run.dir=-"])
    settings = peers.trl_settings(config, tmp_path)
    expected = {
        "max_steps": 40,
        "per_device_train_batch_size": 256,
        "steps_per_generation": 2,
        "num_generations": 8,
        "loss_type": "bnpo",
        "beta": 0.2,
        "learning_rate": 5e-5,
        "weight_decay": 0.0,
        "max_completion_length": 8,
        "temperature": 1.0,
        "bf16": False,
    }
    assert {name: settings[name] for name in expected} == expected


@pytest.mark.parametrize(
    "override",
    ["algorithm.entropy_coef=0.1", "algorithm.aggregation=seq_mean_token_mean", "trainer.updates_per_step=3"],
)
def test_settings_without_an_equal_in_trl_are_refused(peers: Any, tmp_path: Path, override: str) -> None:
    config = compose([*peers.shared(peers.SIZES["quickstart"], tmp_path, 20, [override]), "run.dir=-"])
    with pytest.raises(ValueError, match=override.partition("=")[0]):
        peers.trl_settings(config, tmp_path)


def test_settings_of_every_size_and_grid_compose(peers: Any, tmp_path: Path) -> None:
    for size, grid in itertools.product(peers.SIZES.values(), peers.VARIANTS.values()):
        overrides = [*peers.shared(size, tmp_path, 4), *grid, "run.dir=-"]
        config = compose(peers.last_of_each(overrides))
        assert config.parallel.world_size * config.trainer.num_threads == peers.CORES
        assert config.trainer.eval_interval == 0  # a run ends with one anyway
        compose(peers.last_of_each(["experiment=quickstart", *size.settings, "run.dir=-"]))


@pytest.mark.parametrize(
    "text", ["12", " 12 ", "012", "12.0", "+12", "112", "13", "", "1,2", "12 13", "a <answer>12</answer> b", "x"]
)
def test_the_reward_is_megarls(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    score = _module(monkeypatch, "benchmarks/against", "trl_grpo").score
    assert score(text, "12") == compute_score("reasoning_gym/chain_sum", text, "12", {})["score"]


def test_lengths_of_counts_have_a_long_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = _module(monkeypatch, "benchmarks/against", "counting")
    found: list[Entry] = list(itertools.islice(counting.entries(1, counting.OPTIONS), 2000))
    lengths = sorted(len(entry.response.split()) - 1 for entry in found)
    assert (lengths[0], lengths[-1]) == (2, 38)
    assert lengths[1000] < 5 and lengths[1900] > 15
    assert all(entry.response.endswith(f"<answer>{entry.answer}</answer>") for entry in found)
    assert all(entry.slip != entry.response for entry in found)


def test_runs_of_both_are_read_alike(peers: Any) -> None:
    """Both begin at 100, are ready at 105, evaluate until 107, have steps of 2 s and an evaluation of 1 s between."""
    marks = [
        {"kind": "ready", "time": 105.0},
        {"kind": "evaluation", "time": 107.0, "seconds": 2.0, "step": 0, "accuracy": 0.1},
        {"kind": "begin", "time": 107.0},
        {"kind": "rollout", "time": 108.0, "tokens": 30},
        {"kind": "step", "time": 109.0, "step": 1},
        {"kind": "evaluation", "time": 110.0, "seconds": 1.0, "step": 1, "accuracy": 0.6},
        {"kind": "rollout", "time": 111.0, "tokens": 20},
        {"kind": "step", "time": 112.0, "step": 2},
        {"kind": "evaluation", "time": 113.0, "seconds": 1.0, "step": 2, "accuracy": 0.7},
    ]
    phases = [
        {"phase": "evaluation", "start": 105.0, "seconds": 2.0, "step": 0},
        {"phase": "step", "start": 107.0, "seconds": 2.0, "step": 0},
        {"phase": "evaluation", "start": 109.0, "seconds": 1.0, "step": 1},
        {"phase": "step", "start": 110.0, "seconds": 2.0, "step": 1},
        {"phase": "evaluation", "start": 112.0, "seconds": 1.0, "step": 2},
    ]
    metrics = [
        {"step": 0, "val/accuracy": 0.1},
        _step(1, 3.0),
        {"step": 1, "val/accuracy": 0.6},
        _step(2, 2.0),
        {"step": 2, "val/accuracy": 0.7},
    ]
    trl, megarl = peers.of_trl(marks, 100.0, 15.0), peers.of_megarl(phases, metrics, 100.0, 15.0)
    assert trl == megarl
    assert (trl.start, trl.steps, trl.tokens, trl.speed) == (5.0, (2.0, 2.0), (30, 20), 10.0)
    assert (trl.reached(0.5), trl.reached(0.9), trl.final) == (10.0, None, 0.7)


def _step(number: int, length: float) -> dict[str, float]:
    ends = {"ends/finished": 9.0, "ends/truncated": 1.0}
    return {"step": number, "training/global_step": number, "response_length/mean": length, **ends}


def test_table_has_a_row_for_each_and_the_ratio_to_trl(peers: Any) -> None:
    fast = peers.Outcome(5.0, (9.0, 1.0), (10.0, 10.0), ((0, 6.0, 0.1), (2, 9.0, 0.7)), 12.0)
    slow = peers.Outcome(8.0, (9.0, 2.0), (10.0, 10.0), ((0, 9.0, 0.1), (2, 19.0, 0.4)), 22.0)
    lines = peers.table({"trl": [fast, fast], "dp2": [slow, slow]}, 0.5)
    assert len({line.count("|") for line in lines}) == 1
    assert "| TRL | 5.0 (5.0–5.0) s | 1.00 (1.00–1.00) s | 1.00 × |" in lines[2]
    assert "| megarl, `dp2` |" in lines[3] and "| 2.00 × |" in lines[3] and "| –; not in 2 of 2 |" in lines[3]


def test_every_other_round_is_run_backwards(peers: Any) -> None:
    assert peers.in_turns(["trl", "dp2"], 2) == [(0, "trl"), (0, "dp2"), (1, "dp2"), (1, "trl")]
