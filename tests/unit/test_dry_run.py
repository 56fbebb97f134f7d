"""``megarl train --check`` writes nothing, and refuses what could not be written or trained on."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from megarl.cli import main
from megarl.config import load_resolved, save_resolved
from megarl.core.errors import ConfigError, DataError
from megarl.run.checks.job import check
from megarl.run.run_dir.prepare import make, prepare_data, with_prompt_limit
from megarl.tasks import ChatTokenizer, encode_rows, read_rows, write_rows
from tests.unit.small_job import SMALL, config_of, refused


def state(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Time and content of everything in a folder, and of itself."""
    return {
        str(p): (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in [folder, *folder.rglob("*")]
    }


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def test_a_new_run_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    before = state(work)
    elsewhere = [f"model.path={work}/runs/new/models/new", f"taskset.train={work}/data/train.parquet"]
    assert main(["train", "--check", *SMALL, f"run.dir={work}/runs/new", *elsewhere]) == 0
    assert state(work) == before
    assert not list(temporary.glob("megarl*"))


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_a_new_offline_run_leaves_nothing(tmp_path: Path, name: str) -> None:
    assert check(config_of(tmp_path / "run", f"algorithm={name}"), dry=True) == {}
    assert not (tmp_path / "run").exists()


def test_what_was_made_with_other_settings_is_kept(prepared: Path, tmp_path: Path) -> None:
    """A start would make it again."""
    shutil.copytree(prepared, tmp_path / "run")
    before = state(tmp_path / "run")
    tasks = check(config_of(tmp_path / "run", "taskset.train_size=20", "model.from_scratch.hidden_size=64"), dry=True)
    assert len(tasks["train"].tasks) == 20
    assert state(tmp_path / "run") == before


def test_a_sweep_leaves_nothing(tmp_path: Path) -> None:
    assert main(["train", "--check", "-m", *SMALL, f"run.dir={tmp_path}/run", "trainer.seed=1,2"]) == 0
    assert not list(tmp_path.iterdir())


def test_files_of_ones_own_get_no_bytecode_beside_them(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(**_):\n    return 1.0\n")
    (tmp_path / "own.py").write_text("from megarl.learn.algorithms.group_relative import GRPO as ALGORITHM\n")
    assert (
        main(
            [
                "train",
                "--check",
                *SMALL,
                f"run.dir={prepared}",
                f"reward.path={tmp_path}/reward.py",
                f"algorithm.name={tmp_path}/own.py",
            ]
        )
        == 0
    )
    assert {path.name for path in tmp_path.iterdir()} == {"reward.py", "own.py"}


def test_an_error_names_the_file_that_would_be_written(tmp_path: Path) -> None:
    """Not the temporary one that stands for it."""
    config = config_of(tmp_path / "run", "rollout.max_prompt_tokens=3")
    with pytest.raises(DataError, match=rf"^{tmp_path}/run/data/train.parquet: row 1: prompt has \d+ tokens"):
        check(config, dry=True)


@pytest.mark.parametrize("dry", [True, False])
def test_run_dir_that_cannot_be_written(tmp_path: Path, dry: bool) -> None:
    (tmp_path / "file").write_text("")
    for place in ("/proc/megarl/run", tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(
            ConfigError, match=rf"run.dir={place} cannot be made or written in .*; set it to another place"
        ):
            check(config_of(Path(place)), dry=dry)


def test_places_of_what_would_be_made(tmp_path: Path) -> None:
    setting = "taskset.train=/proc/megarl/train.parquet"
    with pytest.raises(ConfigError, match=rf"{setting} cannot be made or written in"):
        check(config_of(tmp_path, setting), dry=True)


def test_without_root_a_folder_of_others(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "theirs").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="cannot be made or written in"):
        check(config_of(tmp_path / "theirs" / "run"), dry=True)


def test_ports_of_the_system() -> None:
    with pytest.raises(ConfigError, match="run.port=80 must be at least 1024"):
        config_of(Path("run"), "run.port=80")


# ------------------------------------------------------------------ a step against its rows


def test_a_step_has_no_more_tasks_than_there_are_rows(prepared: Path) -> None:
    refused(
        ConfigError,
        config_of(prepared, "trainer.tasks_per_step=31"),
        "trainer.tasks_per_step=31",
        "30 rows",
        str(prepared),
        "30 or less",
    )
    check(config_of(prepared, "trainer.tasks_per_step=30"))


def test_a_step_has_no_more_rows_than_an_offline_file(tmp_path: Path) -> None:
    config = config_of(tmp_path, "algorithm=sft", "trainer.tasks_per_step=32", "trainer.updates_per_step=2")
    refused(ConfigError, config, "trainer.tasks_per_step=32", "30 rows")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.tasks_per_step=2", "algorithm.group_size=5", "trainer.updates_per_step=4"], "does not divide the 10 "
            "rows of a step (trainer.tasks_per_step * algorithm.group_size); set it to 2"),
        (["trainer.updates_per_step=3"], "does not divide the 128 rows"),
        (["algorithm=dpo", "trainer.updates_per_step=3"], "does not divide the 16 rows of a step "
                                                          "(trainer.tasks_per_step); set it to 2"),
        (["algorithm=online_dpo", "algorithm.kl.coef=0", "trainer.updates_per_step=32"], "is more than the 16 pairs of "
            "a step"),
    ],
)  # fmt: skip
def test_updates_have_equal_shares(prepared: Path, overrides: list[str], words: str) -> None:
    refused(ConfigError, config_of(prepared, *overrides), words)


# ------------------------------------------------------------------ tokens without an embedding


def with_tokens(prepared: Path, folder: Path, *words: str) -> str:
    """The prepared model with tokens beyond its vocabulary."""
    shutil.copytree(prepared / "model", folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    tokenizer.save(str(folder / "tokenizer.json"))
    return f"model.path={folder}"


def test_rows_with_tokens_that_the_model_lacks(prepared: Path, tmp_path: Path) -> None:
    word = "State the final"
    config = config_of(prepared, with_tokens(prepared, tmp_path / "model", word))
    refused(
        DataError,
        config,
        "train.parquet: row 1 (taskset.train)",
        f"token 128, {word!r}",
        f"model.path={tmp_path}/model",
        "vocab_size=128",
        "drop the row",
    )


def test_answers_with_tokens_that_the_model_lacks(prepared: Path, tmp_path: Path) -> None:
    rows = read_rows(prepared / "data" / "warm_start.parquet", require_response=True)
    write_rows(tmp_path / "rows.parquet", [*rows[:3], replace(rows[3], response="12 777777"), *rows[4:]])
    config = config_of(
        prepared,
        with_tokens(prepared, tmp_path / "model", "<never>", "777777"),
        f"taskset.warm_start={tmp_path}/rows.parquet",
    )
    refused(DataError, config, "rows.parquet: row 4 (taskset.warm_start)", "token 129, '777777'")


def test_a_larger_tokenizer_whose_tokens_no_row_has_is_warned_of(
    prepared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check(config_of(prepared, with_tokens(prepared, tmp_path / "model", "<never>")))
    assert "ids up to 128 and the model vocab_size=128" in caplog.text


# ------------------------------------------------------------------ prompts


def test_the_longest_prompt_of_the_rows_is_the_limit(prepared: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(prepared, "rollout.max_prompt_tokens=null")
    with caplog.at_level(logging.INFO):
        found = make(config).rollout.max_prompt_tokens
    tokenizer = ChatTokenizer.open(prepared / "model")
    rows = [read_rows(prepared / "data" / f"{split}.parquet") for split in ("train", "eval")]
    assert found == max(len(ids) for split in rows for ids in encode_rows(split, tokenizer))
    assert f"rollout.max_prompt_tokens={found}, the longest prompt: {prepared}/data/" in caplog.text
    assert check(config).keys() == {"train", "eval"}
    refused(
        ConfigError,
        config_of(prepared, "rollout.max_prompt_tokens=null", "rollout.max_response_tokens=120"),
        f"= {found + 120} is more than the model's context",
    )


def test_a_run_keeps_its_limit(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "run")
    begun = config_of(tmp_path / "run", "rollout.max_prompt_tokens=47")
    save_resolved(begun, tmp_path / "run" / "resolved.json")
    again = config_of(tmp_path / "run", "rollout.max_prompt_tokens=null")
    assert with_prompt_limit(again).rollout.max_prompt_tokens != 47, "a run without checkpoints has not begun"
    (tmp_path / "run" / "checkpoints" / "global_step_1").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "global_step_1" / "state.json").write_text("{}")
    assert with_prompt_limit(again) == begun


def begin_template(model: Path, text: str) -> None:
    """Put a text before the model's chat template."""
    source = json.loads((model / "tokenizer_config.json").read_text())["chat_template"]
    (model / "chat_template.jinja").write_text(text + source)


def test_a_run_keeps_its_day(prepared: Path, tmp_path: Path) -> None:
    """Of templates that write it: a resumed run has the prompts that it began with."""
    shutil.copytree(prepared, tmp_path / "run")
    config = config_of(tmp_path / "run")
    assert with_prompt_limit(config).taskset.date is None
    begin_template(tmp_path / "run" / "model", "{{ strftime_now('%Y') }}")
    assert with_prompt_limit(config).taskset.date == date.today().isoformat()
    refused(
        ConfigError,
        config_of(tmp_path / "run", "taskset.date=29.2.2024"),
        "taskset.date=29.2.2024 is not a date; write it as 2025-01-31",
    )
    save_resolved(
        replace(config, taskset=replace(config.taskset, date="2024-02-29")), tmp_path / "run" / "resolved.json"
    )
    (tmp_path / "run" / "checkpoints" / "global_step_1").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "global_step_1" / "state.json").write_text("{}")
    begun = with_prompt_limit(config)
    assert begun.taskset.date == "2024-02-29"
    assert ChatTokenizer.of(begun).render([{"role": "user", "content": "1"}]).startswith("2024")


def test_options_of_the_template_are_settings(prepared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(prepared, tmp_path / "run")
    config = config_of(tmp_path / "run", "taskset.chat_template_kwargs={thinking: false}")
    refused(
        DataError, config, "row 1: the model's chat template does not look at 'thinking'; leave it out of the row and"
    )
    begin_template(tmp_path / "run" / "model", "{% if thinking is false %}1{% endif %}")
    save_resolved(config, tmp_path / "resolved.json")
    text, plain = (
        ChatTokenizer.of(c).render([{"role": "user", "content": "1"}])
        for c in (load_resolved(tmp_path / "resolved.json"), config_of(tmp_path / "run"))
    )
    assert text == "1" + plain


def test_data_is_still_written_by_its_own_command(tmp_path: Path) -> None:
    prepare_data(config_of(tmp_path))
    assert (tmp_path / "data" / "train.parquet").is_file()
