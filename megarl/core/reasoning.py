"""reasoning-gym, imported without what one of its families draws pictures with."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _AtFirstUse(ModuleType):
    """Stands for a module until one of its names is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def reasoning_gym() -> ModuleType:
    """Import reasoning-gym where rows are made or scored: half a second.

    Two of its families need cellpylib, whose matplotlib takes 0.2 s more: those import it when they make a row.
    """
    sys.modules.setdefault("cellpylib", _AtFirstUse("cellpylib"))
    return import_module("reasoning_gym")
