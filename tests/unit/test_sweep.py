"""Sweeps: which combinations there are, that all are checked before one runs, and what a job array does with them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cli import main
from megarl.config import Config, compose
from megarl.core.errors import ConfigError, JobError
from megarl.run.checks import job as checks
from megarl.run.launch import job
from megarl.run.launch.sweep import combinations, expand, folder_name
from megarl.run.run_dir import resume
from tests.unit.small_job import SMALL

SWEEP = ["run.name=s", "trainer.seed=1,2"]


def swept(*overrides: str) -> list[str]:
    return [" ".join(words) for _, words in expand(overrides)]


# ------------------------------------------------------------------ which


def test_every_combination_has_its_settings_and_its_directory() -> None:
    found = combinations([*SWEEP, "trainer.optimizer.lr=1e-5,3e-5"])
    assert [(c.config.trainer.seed, c.config.trainer.optimizer.lr) for c in found] == list(
        product((1, 2), (1e-5, 3e-5))
    )
    assert found[1].slug == "trainer.seed=1,trainer.optimizer.lr=3e-05"
    plain = compose(["run.name=s", "trainer.seed=1", "trainer.optimizer.lr=3e-5"])
    folder = f"runs/s/{found[1].slug}"
    assert found[1].config.run.dir == folder and found[1].config.store.url == f"sqlite:///{folder}/store.db"
    assert (
        replace(
            found[1].config,
            run=plain.run,
            store=plain.store,
            model=plain.model,
            taskset=plain.taskset,
            reward=plain.reward,
        )
        == plain
    )


def test_hydras_syntax() -> None:
    assert swept("algorithm=glob(*grpo)") == ["algorithm=dr_grpo", "algorithm=grpo"]
    assert swept("trainer.steps=range(1,6,2)") == ["trainer.steps=1", "trainer.steps=3", "trainer.steps=5"]
    assert swept("trainer.seed=choice(3,1)", "taskset.options={min_terms:2,max_terms:3}") == [
        "trainer.seed=3",
        "trainer.seed=1",
    ]
    assert swept("critic.parallel={tp:2,dp:1},null", "reward.hosts=[a:1,b:2]") == [
        "critic.parallel={tp:2,dp:1}",
        "critic.parallel=null",
    ]
    [(first, _), _] = expand(["reward.path='a,b'", "trainer.seed=1,2", "~reward.judge"])
    assert first == ["reward.path='a,b'", "trainer.seed=1", "~reward.judge"], (
        "what is not swept stays as it was written"
    )


def test_a_swept_run_name_and_a_given_directory() -> None:
    assert [c.config.run.dir for c in combinations(["run.name=a,b"])] == ["runs/a/run.name=a", "runs/b/run.name=b"]
    [first, _] = combinations(["trainer.seed=1,2", "run.dir='/tmp/all mine'"])
    assert first.config.run.dir == "/tmp/all mine/trainer.seed=1"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.stesp=1,2"], "combination 0, trainer.stesp=1: unknown setting 'trainer.stesp'; did you mean "
                                "'trainer.steps'"),
        (["trainer.steps=1,x"], "combination 1, trainer.steps=x: trainer.steps='x' must be of type int"),
        (["trainer.optimizer.lr=1e-5,-1"], "combination 1, trainer.optimizer.lr=-1: trainer.optimizer.lr=-1 must be at "
                                           "least 0"),
        (["algorithm=grpo,grop"], "combination 1, algorithm=grop: no configs/algorithm/grop.yaml; did you mean 'grpo'"),
        (["algorithm=glob(nothing*)"], "matches nothing"),
        (["trainer.seed=1,1"], "two combinations would both run in runs/quickstart/trainer.seed=1"),
        (["trainer.seed=1"], "-m without anything to sweep"),
        (["trainer.seed=shuffle(1,2)"], "leave shuffle out"),
        (["trainer.optimizer.lr=interval(0,1)"], "an interval has no list of values"),
        (["trainer.seed=1,2", "trainer.steps={"], "the sweep could not be read"),
    ],
)  # fmt: skip
def test_what_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        combinations(overrides)
    assert words in str(raised.value)


@settings(max_examples=25)
@given(st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=3))
def test_slugs_are_names_of_directories(words: list[str]) -> None:
    slug = folder_name(words)
    assert "/" not in slug and slug.isascii() and slug.isprintable() and 0 < len(slug) < 200
    assert slug == folder_name(words)


def test_long_slugs_differ_by_their_ends() -> None:
    long = "x" * 300
    assert folder_name([f"a={long}1"]) != folder_name([f"a={long}2"])


# ------------------------------------------------------------------ runs


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names the runs that were started; what each does is ``outcome``'s to say. Nothing is really checked or
    launched."""
    started: list[str] = []
    monkeypatch.setattr(checks, "check", lambda config, **_: {})
    monkeypatch.setattr(job, "run", lambda config: started.append(Path(config.run.dir).name) or 0)
    monkeypatch.setattr(resume, "is_finished", lambda config, folder: False)
    return started


def outcome(monkeypatch: pytest.MonkeyPatch, ran: list[str], decide: Callable[[Config], int]) -> None:
    def run(config: Config) -> int:
        ran.append(Path(config.run.dir).name)
        return decide(config)

    monkeypatch.setattr(job, "run", run)


def test_one_after_another(ran: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert main(["train", "-m", *SWEEP]) == 0
    assert ran == ["trainer.seed=1", "trainer.seed=2"]
    assert caplog.messages[-2:] == [f"{n} {slug}: finished (status 0)" for n, slug in enumerate(ran)]


@pytest.mark.parametrize(
    "error", [JobError("engine 0 ended with status 1"), ConfigError("in use"), OSError(28, "No space", "attempt")]
)
def test_a_failed_one_does_not_stop_the_others(
    ran: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def decide(config: Config) -> int:
        if config.trainer.seed == 1:
            raise error
        return 0

    outcome(monkeypatch, ran, decide)
    with caplog.at_level(logging.INFO):
        assert main(["train", "-m", *SWEEP]) == 1
    assert ran == ["trainer.seed=1", "trainer.seed=2"]
    assert caplog.messages[-2:] == ["0 trainer.seed=1: failed (status 1)", "1 trainer.seed=2: finished (status 0)"]
    assert str(error) in caplog.messages


def test_a_stop_ends_the_sweep(
    ran: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outcome(monkeypatch, ran, lambda config: 130)
    with caplog.at_level(logging.INFO):
        assert main(["train", "-m", *SWEEP]) == 130
    assert caplog.messages[-2:] == ["0 trainer.seed=1: stopped (status 130)", "1 trainer.seed=2: not started"]


def test_a_finished_one_is_skipped(
    ran: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resume, "is_finished", lambda config, folder: folder.name == "trainer.seed=1")
    with caplog.at_level(logging.INFO):
        assert main(["train", "-m", *SWEEP]) == 0
    assert ran == ["trainer.seed=2"] and caplog.messages[-2] == "0 trainer.seed=1: finished before, skipped"


def test_index_count_and_check(
    ran: list[str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["train", "-m", *SWEEP, "--count"]) == 0 and capsys.readouterr().out == "2\n"
    assert (
        main(["train", "--check", *SWEEP, "-m"]) == 0 and main(["train", "-m", "--index", "1", "--check", *SWEEP]) == 0
    )
    assert ran == []
    assert main(["train", "-m", *SWEEP, "--index", "1"]) == 0 and ran == ["trainer.seed=2"]
    assert main(["train", "-m", *SWEEP, "--index=4"]) == 2 and "the combinations are 0 to 1" in caplog.messages[-1]
    assert main(["train", "--index=4", "experiment=quickstart"]) == 2 and "add -m" in caplog.messages[-1]
    assert len(ran) == 1


def test_all_are_really_checked_before_the_first_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[Config] = []
    monkeypatch.setattr(job, "run", lambda config: started.append(config) or 0)
    sweep = ["train", "-m", *SMALL, "trainer.warm_start.steps=0", "taskset.warm_start=null", f"run.dir={tmp_path}"]
    assert main([*sweep, "trainer.updates_per_step=1,129"]) == 2
    assert started == []
    assert (
        "combination 1, trainer.updates_per_step=129: trainer.updates_per_step=129 is more than the 128 rows"
        in caplog.messages[-1]
    )
