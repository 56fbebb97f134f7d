"""Old names of modules: an import of one gives the module of today, with a warning."""

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
    "megarl.engine": "megarl.engines",
    "megarl.explore.experience": "megarl.buffer.experience",
    "megarl.explore.order": "megarl.buffer.order",
    "megarl.explore.rewards": "megarl.rewards",
    "megarl.explore.sandbox": "megarl.sandbox",
    "megarl.explore.store": "megarl.buffer.store",
    "megarl.explore.tasksets": "megarl.tasks",
    "megarl.explore.tools": "megarl.tasks.tools",
}
"""Package or module that files of users import -> where it is now."""


def name_now(name: str) -> str | None:
    """Return the name that a module has now; None where it was not moved."""
    if not name.startswith("megarl."):  # every import of every package asks
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
        """Return the spec of a moved module; None for every other name."""
        return None if name_now(fullname) is None else ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None: the import system makes an empty module, which ``exec_module`` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of today in place of an empty one. Raises ModuleNotFoundError where there is none."""
        old = module.__name__
        now = name_now(old)
        assert now is not None
        if old in MOVED:  # names below it warn no second time
            warnings.warn(f"{old} is {now} now; change the import", FutureWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(now)


def keep_old_names() -> None:
    """Have imports find moved modules under their old names."""
    sys.meta_path.insert(0, OldNames())  # a moved package has a path, in which others would find a second copy
