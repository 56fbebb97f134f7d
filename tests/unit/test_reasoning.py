"""reasoning-gym without matplotlib, and with it where a family needs it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from megarl.core.imports import reasoning_gym

gym = reasoning_gym()
assert "matplotlib" not in sys.modules
for family in ("game_of_life", "game_of_life_halting"):
    dataset = gym.create_dataset(family, seed=1, size=1)
    assert dataset.score_answer(dataset[0]["answer"], dataset[0]) == 1.0
assert "matplotlib" in sys.modules and sys.modules["cellpylib"].__file__
assert reasoning_gym() is gym
"""


def test_only_families_that_draw_import_matplotlib() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
