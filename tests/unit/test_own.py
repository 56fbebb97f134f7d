"""Experiments and generators of one's own, outside the checkout."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config import compose
from megarl.core.errors import ConfigError, DataError
from megarl.run.checks.job import check
from megarl.run.launch.sweep import combinations
from megarl.run.run_dir.prepare import prepare_data
from megarl.tasks import read_preferences, read_rows
from tests.unit.small_job import SMALL, config_of, refused

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "own_experiments.md").read_text()
[EXPERIMENT] = re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)
[GENERATOR] = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```bash\n(.*?)```", DOCS, re.DOTALL)
    for line in block.splitlines()
]
"""Commands of the page, without their comments."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(EXPERIMENT)
    return tmp_path / "conf"


# ------------------------------------------------------------------ settings


def test_an_experiment_of_ones_own(folder: Path) -> None:
    config = compose(["experiment=mine"], own=folder)
    assert (config.run.name, config.trainer.steps, config.taskset.generate) == ("mine", 7, "chain_sum")
    assert compose(["experiment=mine", "trainer.steps=8", "algorithm=ppo"], own=folder).trainer.steps == 8
    assert compose(["experiment=quickstart"], own=folder) == compose(["experiment=quickstart"])
    with pytest.raises(ConfigError, match=r"no configs/experiment/mine.yaml; .*there are .*quickstart"):
        compose(["experiment=mine"])
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        compose(["experiment=mime"], own=folder)


def test_the_command_takes_the_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [setting for setting in SMALL if not setting.startswith("experiment")]
    assert (
        main(["train", "--check", "--config-dir", str(folder), "experiment=mine", *small, f"run.dir={tmp_path}/run"])
        == 0
    )
    assert main(["config", "experiment=mine", "--config-dir", str(folder)]) == 0
    assert '"steps": 7' in capsys.readouterr().out
    assert main(["data", "--config-dir", str(folder), "experiment=mine", *small, f"run.dir={tmp_path}/run"]) == 0
    assert len(read_rows(tmp_path / "run" / "data" / "train.parquet")) == 30


def test_a_sweep_over_ones_own_files(folder: Path) -> None:
    (folder / "experiment" / "mine_too.yaml").write_text(EXPERIMENT.replace("7", "9"))
    found = combinations(["experiment=glob(mine*)"], own=str(folder))
    assert [c.config.trainer.steps for c in found] == [7, 9]


@pytest.mark.parametrize("fault", ["missing", "shadowed", "key"])
def test_a_folder_that_cannot_be_used(folder: Path, fault: str) -> None:
    words = {
        "missing": "no such directory",
        "shadowed": "experiment/sft.yaml is also the name",
        "key": "did you mean 'trainer.steps'",
    }[fault]
    if fault == "shadowed":
        (folder / "experiment" / "sft.yaml").write_text(EXPERIMENT)
    if fault == "key":
        (folder / "experiment" / "mine.yaml").write_text(EXPERIMENT.replace("steps", "stesp"))
    with pytest.raises(ConfigError, match=words):
        compose(["experiment=mine"], own=folder / "none" if fault == "missing" else folder)


# ------------------------------------------------------------------ generators


def own(folder: Path, text: str = GENERATOR) -> list[str]:
    (folder / "products.py").write_text(text)
    return [f"taskset.generate={folder}/products.py", "~taskset.options"]


def test_the_command_of_the_page_with_its_generator(tmp_path: Path) -> None:
    [command] = [command for command in COMMANDS if any("products.py" in word for word in command)]
    (tmp_path / "products.py").write_text(GENERATOR)
    command = [word.replace("path/to", str(tmp_path)) for word in command]
    assert main([*command[1:], "--check", f"run.dir={tmp_path}/run"]) == 0


def test_a_generator_of_ones_own(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", *own(tmp_path), "taskset.options.largest=30")
    tasks = check(config)
    assert {split: len(found.tasks) for split, found in tasks.items()} == {"train": 30, "eval": 10}
    questions = {split: {row.prompt[-1]["content"] for row in found.tasks} for split, found in tasks.items()}
    assert len(questions["train"]) == 30 and not questions["train"] & questions["eval"]
    for row in tasks["train"].tasks:
        first, _, second, _ = row.prompt[-1]["content"].split()
        assert row.ground_truth == str(int(first) * int(second)) and max(int(first), int(second)) <= 30
    warm_start = read_rows(tmp_path / "run" / "data" / "warm_start.parquet", require_response=True)
    assert all(row.response == row.ground_truth for row in warm_start)


def test_pairs_of_a_generator_of_ones_own(tmp_path: Path) -> None:
    text = GENERATOR.replace("=str(a * b)", "='yes'")
    prepare_data(config_of(tmp_path / "run", *own(tmp_path, text), "algorithm=dpo"))
    rows = read_preferences(tmp_path / "run" / "data" / "train.parquet")
    assert all(row.chosen == "yes" and row.rejected.startswith("about ") for row in rows), (
        "an answer without digits has only its slip"
    )


def test_rows_are_made_anew_when_the_file_changes(tmp_path: Path) -> None:
    prepare_data(config_of(tmp_path / "run", *own(tmp_path)))
    train = tmp_path / "run" / "data" / "train.parquet"
    before = train.stat().st_mtime_ns
    prepare_data(config_of(tmp_path / "run", *own(tmp_path)))
    assert train.stat().st_mtime_ns == before
    prepare_data(config_of(tmp_path / "run", *own(tmp_path, GENERATOR.replace(" * {b} =", " times {b} ="))))
    assert all(" times " in row.prompt[-1]["content"] for row in read_rows(train))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("GENERATOR =", "OTHER =", ["has nothing called GENERATOR"]),
        ("GENERATOR = Generator(", "GENERATOR = dict(entries=", ["has a dict called GENERATOR"]),
        ("import random", "import no_such_module", ["cannot be imported", "no_such_module", "products.py:1"]),
        ("randint(0", "randit(0", ["AttributeError", "products.py:8"]),
        ("yield Entry(", "yield dict(", ["must yield megarl.tasks.Entry or None", "dict"]),
        ("answer=str", "answer=int", ["Entry.answer must be a text", "products.py"]),
        ("answer=str", "images=['a.png'], answer=str", ["Entry.images must be a tuple of files' bytes", "['a.png']"]),
        ("answer=str", "images=(b'a',), answer=str", ["must have as many <image> as there are images (1)"]),
        ("largest\": 999", "largest\": 'x'", ["GENERATOR.options", "numbers"]),
    ],
)  # fmt: skip
def test_a_generator_that_lacks_something(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    refused(
        ConfigError,
        config_of(tmp_path / "run", *own(tmp_path, GENERATOR.replace(old, new, 1))),
        f"taskset.generate={tmp_path}/products.py",
        *words,
    )


@pytest.mark.usefixtures("soon_dry")
def test_what_else_is_refused(tmp_path: Path) -> None:
    refused(
        ConfigError,
        config_of(tmp_path / "run", *own(tmp_path), "taskset.options.largset=3"),
        "largset",
        "did you mean 'largest'",
    )
    foreign = [option for option in own(tmp_path) if option != "~taskset.options"]
    words = ["min_terms, max_terms, min_digits, max_digits, slip_percent", "known: largest", "'~taskset.options'"]
    refused(ConfigError, config_of(tmp_path / "run", *foreign), *words)
    refused(
        ConfigError,
        config_of(tmp_path / "run", "taskset.generate=/no/such.py"),
        "taskset.generate=/no/such.py",
        "no such file",
    )
    refused(
        DataError,
        config_of(tmp_path / "run", *own(tmp_path), "taskset.options.largest=1"),
        "taskset.train_size=30 cannot be reached",
    )
    ends = GENERATOR.replace("while True", "for _ in range(5)")
    refused(DataError, config_of(tmp_path / "run", *own(tmp_path, ends)), "cannot be reached")
