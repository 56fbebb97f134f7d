"""Rollouts that stay open for as long as a test needs: one answer's score is held back while a file exists."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

SCORER = """
import os
import time
from pathlib import Path
from megarl.explore.rewards import compute_score as score

FOLDER = Path({folder!r})


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    split = extra_info["split"]
    held, holder = FOLDER / f"held.{{split}}", FOLDER / f"holder.{{split}}"
    if solution_str != ground_truth and held.exists():  # the check before the launch answers with the ground truth
        try:
            os.close(os.open(holder, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            while held.exists():
                time.sleep(0.01)
    return score(data_source, solution_str, ground_truth, extra_info)
"""
Split = Literal["train", "eval"]


class Held:
    """Files of a folder that hold one answer of a split's rollout back, and the settings of a job that heeds them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        scorer = folder / "held_scorer.py"
        scorer.write_text(SCORER.format(folder=str(folder)))
        self.settings = (f"reward.path={scorer}", "reward.timeout_s=600", "reward.workers=2")
        """A second worker scores the other answers."""

    def hold(self, split: Split) -> None:
        (self._folder / f"holder.{split}").unlink(missing_ok=True)
        (self._folder / f"held.{split}").touch()

    def holds(self, split: Split) -> bool:
        """Return True once an answer is held back."""
        return (self._folder / f"holder.{split}").exists()

    def release(self, split: Split) -> None:
        (self._folder / f"held.{split}").unlink()
