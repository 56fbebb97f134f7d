"""Expert rows: asked for where the algorithm needs them, generated when they are missing, checked like
demonstrations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config import Config
from megarl.core.errors import ConfigError, DataError
from megarl.run.checks import job as checks
from megarl.tasks import read_rows, write_rows
from tests.unit.small_job import config_of, refused

ALGORITHM = """
from megarl.learn.algorithms import Algorithm, Loss, terms
def count(mask, row, num_rows, config, expert):
    return terms.denominator(mask, row, num_rows, config)
def loss(batch, config):
    mask, row, rows, share = batch.mask, batch.row, batch.num_rows, batch.share
    weights = terms.token_weights(mask, row, rows, config, share=share, dtype=batch.logp.dtype)
    return Loss(-(weights * batch.logp).sum(), {})
ALGORITHM = Algorithm(
    name="imitate", source="", roles=frozenset({"actor"}), needs=frozenset({"advantages", "expert"}),
    advantage=lambda reward, stats, config: reward, count=count, loss=loss,
)
"""


def config_with(prepared: Path, folder: Path, *overrides: str) -> Config:
    (folder / "imitate.py").write_text(ALGORITHM)
    expert = f"taskset.expert={folder}/expert.parquet"
    return config_of(
        prepared,
        f"algorithm.name={folder}/imitate.py",
        *([] if any("expert=" in o for o in overrides) else [expert]),
        *overrides,
    )


def test_a_right_answer_to_questions_that_are_not_held_out(prepared: Path, tmp_path: Path) -> None:
    kept = {path: path.read_bytes() for path in (prepared / "data").iterdir()}
    config = config_with(prepared, tmp_path)
    assert {split: len(found.tasks) for split, found in checks.check(config).items()} == {"train": 30, "eval": 10}
    rows = read_rows(tmp_path / "expert.parquet", require_response=True)
    assert len(rows) == 30 and all(row.response == row.ground_truth for row in rows), (
        "the careless teacher is not asked"
    )
    questions = {row.prompt[-1]["content"] for row in rows}
    held_out = read_rows(prepared / "data" / "eval.parquet")
    assert len(questions) == 30 and not questions & {row.prompt[-1]["content"] for row in held_out}
    written = (tmp_path / "expert.parquet").stat().st_mtime_ns
    checks.check(config)
    assert (tmp_path / "expert.parquet").stat().st_mtime_ns == written
    assert all(path.read_bytes() == content for path, content in kept.items()), "their size decides on no other file"


def test_other_algorithms_ask_for_none(prepared: Path, tmp_path: Path) -> None:
    checks.check(config_of(prepared, f"taskset.expert={tmp_path}/expert.parquet"))
    assert not (tmp_path / "expert.parquet").exists()


def test_missing_rows_are_named(prepared: Path, tmp_path: Path) -> None:
    refused(ConfigError, config_with(prepared, tmp_path, "taskset.expert=null"), "taskset.expert", "response")
    config = config_with(prepared, tmp_path, "taskset.generate=null")
    refused(ConfigError, config, f"taskset.expert={tmp_path}/expert.parquet", "no such file")
    config = config_with(prepared, tmp_path, "algorithm.expert_ratio=0")
    refused(ConfigError, config, "algorithm.expert_ratio=0", "imitate", "above 0")


def test_rows_of_another_size_are_not_replaced_where_others_may_use_them(prepared: Path, tmp_path: Path) -> None:
    checks.check(config_with(prepared, tmp_path))
    config = config_with(prepared, tmp_path, "taskset.expert_size=31")
    refused(ConfigError, config, "expert.parquet", "taskset.expert_size was 30, now 31")


@pytest.mark.parametrize("fault", ["long", "held out", "no response"])
def test_rows_that_cannot_be_used_are_named(prepared: Path, tmp_path: Path, fault: str) -> None:
    rows = read_rows(prepared / "data" / "warm_start.parquet")
    held_out = read_rows(prepared / "data" / "eval.parquet")[4]
    bad = {
        "long": replace(rows[3], response="1 2 3 4 " * 40),
        "held out": replace(rows[3], prompt=held_out.prompt),
        "no response": replace(rows[3], response=None),
    }[fault]
    write_rows(tmp_path / "expert.parquet", [*rows[:3], bad, *rows[4:]])
    words = {
        "long": ["row 4 (taskset.expert)", "context is 128"],
        "held out": ["row 4 (taskset.expert) asks", "taskset.eval"],
        "no response": ["row 4", "response must be"],
    }[fault]
    refused(DataError, config_with(prepared, tmp_path), *words)
