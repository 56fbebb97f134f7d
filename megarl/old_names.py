"""Import hook for old module names: importing one returns the module under its current name, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "megarl.core.config": "megarl.config",
    "megarl.core.phases": "megarl.learn.memory.phases",
    "megarl.core.thoughts": "megarl.core.text",
    "megarl.engine": "megarl.engines",
    "megarl.explore.experience": "megarl.buffer.experience",
    "megarl.explore.order": "megarl.buffer.order",
    "megarl.explore.rewards": "megarl.rewards",
    "megarl.explore.sandbox": "megarl.sandbox",
    "megarl.explore.store": "megarl.buffer.store",
    "megarl.explore.tasksets": "megarl.tasks",
    "megarl.explore.tools": "megarl.tasks.tools",
    "megarl.learn.algorithms.dpo": "megarl.learn.algorithms.pairs",
    "megarl.learn.algorithms.grpo": "megarl.learn.algorithms.group_relative",
    "megarl.learn.algorithms.ppo": "megarl.learn.algorithms.token_returns",
    "megarl.learn.algorithms.sft": "megarl.learn.algorithms.supervised",
    "megarl.train.batch.accounts": "megarl.train.batch.samples",
    "megarl.train.rank.ranks": "megarl.train.ranks",
    "megarl.train.rank.state": "megarl.train.ranks",
    "megarl.train.rollout.awaited": "megarl.train.rollout.group_part",
    "megarl.train.rollout.found": "megarl.train.rollout.group_part",
}
"""Old name of a package or module that users' files import -> its current name."""
GONE = ("megarl.train.rank",)
"""Packages of old names that have no module of their own any more."""


def name_now(name: str) -> str | None:
    """Return the current name of a module; None if it was not moved."""
    if not name.startswith("megarl."):  # runs for every import of every package
        return None
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return None


class OldNames(MetaPathFinder, Loader):
    """Finds modules of ``MOVED`` under their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a moved module or its package; None for every other name."""
        known = fullname in GONE or name_now(fullname) is not None
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None: the import system makes an empty module, which ``exec_module`` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace an empty module with the module under its current name. Raises ModuleNotFoundError if that is
        missing."""
        old = module.__name__
        now = name_now(old)
        if now is None:  # a package without modules of its own
            return
        if old in MOVED:  # modules below it do not warn again
            warnings.warn(f"{old} is {now} now; change the import", FutureWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(now)


def keep_old_names() -> None:
    """Make imports find moved modules under their old names."""
    # First: a moved package has a path, where the import system would find a second copy of its modules.
    sys.meta_path.insert(0, OldNames())
