"""Settings that unit tests compose are those that hydra composes."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest

from megarl.config import compose
from megarl.core.errors import ConfigError
from tests.unit import kept_trees
from tests.unit.small_job import SMALL

QUICKSTART = "experiment=quickstart"
LISTS = (
    SMALL,
    [QUICKSTART, "algorithm=ppo", "parallel=tp2", "rollout.options={a: 1, b: [2, x]}", "teachers.one={path: /m}"],
    [QUICKSTART, "+rollout.options.more=3", "trainer.max_tokens_per_micro_batch=512", "~rollout.options"],
    ["experiment=own", "model.path=/m", "taskset.train=[a.parquet,b.parquet]", "taskset.eval=c.parquet"],
    ["experiment=dpo", "store=postgres", "trainer.warm_start.steps=0", "run.name='a b'", "model.lora.rank=4"],
    ["experiment=grpo_qwen3_30b_a3b", "parallel.tp=1", "run.dir=${oc.env:HOME}/x"],
)


@pytest.mark.parametrize("overrides", LISTS, ids=lambda overrides: " ".join(overrides)[:60])
def test_they_are_those_of_hydra(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert hydra.compose is kept_trees.compose
    kept = [compose(overrides), compose([*overrides, "trainer.steps=7"]), compose(overrides)]
    monkeypatch.setattr("hydra.compose", kept_trees.HYDRAS)
    assert kept == [compose(overrides), compose([*overrides, "trainer.steps=7"]), compose(overrides)]


@pytest.mark.parametrize(
    "wrong", ["trainer.steps=1,2", "trainer.steps=[", "model.path=${no.such}", "algorithm=ppo,grpo"]
)
def test_what_hydra_refuses_is_refused_in_its_words(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for function in (kept_trees.compose, kept_trees.HYDRAS):
        monkeypatch.setattr("hydra.compose", function)
        with pytest.raises(ConfigError) as raised:
            compose([QUICKSTART, wrong])
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_files_of_ones_own_are_read_each_time(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    for steps in (3, 4):
        text = f"# @package _global_\ndefaults: [quickstart]\ntrainer: {{steps: {steps}}}\n"
        (tmp_path / "experiment" / "mine.yaml").write_text(text)
        assert compose(["experiment=mine"], own=tmp_path).trainer.steps == steps
