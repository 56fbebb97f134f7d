"""Import of reasoning-gym without the plotting packages that one of its families needs."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _AtFirstUse(ModuleType):
    """Placeholder that imports a module at the first use of one of its names."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def reasoning_gym() -> ModuleType:
    """Import reasoning-gym (half a second); call it where rows are made or scored.

    cellpylib, needed by two of its families, imports matplotlib (0.2 s more). It is imported when they make a row.
    """
    sys.modules.setdefault("cellpylib", _AtFirstUse("cellpylib"))
    return import_module("reasoning_gym")
