"""Rollouts that stay open for as long as a test needs: answers' scores are held back while a file exists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from tests.system.jobs import Job

SCORER = """
import os
import time
from pathlib import Path
from megarl.rewards import compute_score as score

FOLDER = Path({folder!r})


def order(held):
    try:
        return held.read_text()
    except FileNotFoundError:
        return ""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    split = extra_info["split"]
    held = FOLDER / f"held.{{split}}"
    if solution_str != ground_truth and (mine := order(held)):  # the check before the launch gives the ground truth
        try:
            os.close(os.open(FOLDER / f"holder.{{split}}.{{mine}}", os.O_CREAT | os.O_EXCL))
            first = True
        except FileExistsError:
            first = mine.startswith("all")
        while first and order(held) == mine:
            time.sleep(0.01)
    return score(data_source, solution_str, ground_truth, extra_info)
"""
Split = Literal["train", "eval"]
Which = Literal["one", "all"]


class Held:
    """Files of a folder that hold answers of a split's rollout back, and the settings of a job that heeds them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._orders = 0
        scorer = folder / "held_scorer.py"
        scorer.write_text(SCORER.format(folder=str(folder)))
        self.settings = (
            f"reward.path={scorer}",
            "reward.timeout_s=600",
            "reward.workers=2",
            "cluster.stall_s=600",
            "rollout.request_timeout_s=600",
            "alarms.verdicts=0",
        )
        """A second worker scores the other answers, where one is held back. Processes may stand still for long. The
        second verifier would be held in place of an answer."""

    def hold(self, split: Split, which: Which = "one") -> None:
        """Hold back the next wrong answer that is scored, or all of them; release those that are held."""
        self._orders += 1
        new = self._folder / "new"
        new.write_text(f"{which}-{self._orders}")
        new.rename(self._folder / f"held.{split}")

    def holds(self, split: Split) -> bool:
        """Return True once an answer is held back."""
        order = self._folder / f"held.{split}"
        return order.exists() and (self._folder / f"holder.{split}.{order.read_text()}").exists()

    def is_on(self, split: Split) -> bool:
        """Return True while answers are to be held back."""
        return (self._folder / f"held.{split}").exists()

    def release(self, split: Split) -> None:
        (self._folder / f"held.{split}").unlink()

    def until(self, job: Job, split: Split, condition: Callable[[], bool], what: str, which: Which = "one") -> None:
        """Hold one answer back after the other until the condition holds; the last one stays held."""
        job.until(lambda: self.holds(split), f"an answer that is held back before {what}", poll_s=0.01)
        while not condition():
            self.hold(split, which)
            job.until(lambda: self.holds(split), f"an answer that is held back before {what}", poll_s=0.01)
