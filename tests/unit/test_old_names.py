"""Names that modules had before they were moved."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from megarl.old_names import MOVED

AS_SHOWN = """
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from megarl.explore.tasksets import Entry, Generator, write_rows
    from megarl.explore.rewards.answer.grammar import last_box
    from megarl.core.config.schema import Config
import megarl.config.schema, megarl.rewards.answer.grammar, megarl.tasks
assert Generator is megarl.tasks.Generator and Config is megarl.config.schema.Config
grammar = megarl.rewards.answer.grammar
assert last_box is grammar.last_box and grammar.__name__ == "megarl.rewards.answer.grammar"
print(*(str(each.message) for each in said), sep="|")
"""


def test_imports_of_old_pages_work_with_a_warning() -> None:
    done = subprocess.run([sys.executable, "-c", AS_SHOWN], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().split("|") == [
        f"{old} is {MOVED[old]} now; change the import"
        for old in ("megarl.explore.tasksets", "megarl.explore.rewards", "megarl.core.config")
    ]


@pytest.mark.filterwarnings("ignore:.* is .* now:FutureWarning")
def test_old_names_lead_to_modules() -> None:
    for old, new in MOVED.items():
        assert importlib.import_module(old) is importlib.import_module(new)
    with pytest.raises(ModuleNotFoundError, match=r"megarl\.buffer\.store\.nothing"):
        importlib.import_module("megarl.explore.store.nothing")
