"""Python files of a user's own: generators, algorithms, reward functions."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import ConfigError
from megarl.learn.algorithms import user as algorithms
from megarl.rewards.pool.worker import load_function
from megarl.tasks.generators import entries as tasksets

LOADERS: dict[str, Callable[[str], Any]] = {
    "taskset.generate": tasksets.load,
    "algorithm.name": algorithms.load,
    "reward.path": load_function,
}
NAMES = {"taskset.generate": "GENERATOR", "algorithm.name": "ALGORITHM", "reward.path": "compute_score"}
FILE = """\
from __future__ import annotations
from dataclasses import dataclass, replace
from megarl.learn.algorithms.group_relative import GRPO
from megarl.tasks import Generator

@dataclass
class Settings:
    largest: int = 9

GENERATOR = Generator(lambda seed, options: iter(()), {"largest": Settings().largest})
ALGORITHM = replace(GRPO, name="mine")

def compute_score(**row):
    return float(Settings().largest)
"""


@pytest.mark.parametrize("setting", LOADERS)
def test_a_file_with_a_dataclass_and_postponed_annotations(tmp_path: Path, setting: str) -> None:
    """``dataclasses`` looks for the module in ``sys.modules``."""
    (tmp_path / "mine.py").write_text(FILE)
    assert LOADERS[setting](str(tmp_path / "mine.py"))


@pytest.mark.parametrize("setting", LOADERS)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such file; give a Python file with NAME"),
        ("import no_such_module", r"cannot be imported: ModuleNotFoundError: .* \(mine.py:1\)"),
        ("def f(:", "cannot be imported: SyntaxError: .*"),
        ("OTHER = 1", "(has nothing called|defines no function) NAME"),
        ("NAME = 1", "(has a int called|defines no function) NAME"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, setting: str, text: str | None, words: str) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text.replace("NAME", NAMES[setting]))
    with pytest.raises(
        ConfigError, match=rf"^{setting}={re.escape(str(path))}:? {words.replace('NAME', NAMES[setting])}"
    ):
        LOADERS[setting](str(path))


def test_no_part_of_a_module_is_left(tmp_path: Path) -> None:
    before = {**sys.modules}
    (tmp_path / "mine.py").write_text("raise ValueError")
    with pytest.raises(ConfigError):
        load_function(str(tmp_path / "mine.py"))
    assert not [name for name, module in sys.modules.items() if before.get(name) is not module and "user" in name]
