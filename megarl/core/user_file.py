"""Import Python files that users write: generators, algorithms, reward functions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from megarl.core.errors import ConfigError, describe

T = TypeVar("T")


def import_file(path: str, setting: str, wanted: str) -> ModuleType:
    """Import the file that a setting names. Raises ConfigError with the setting and the failing line if that fails."""
    where = f"{setting}={path}"
    if not Path(path).is_file():
        raise ConfigError(f"{where}: no such file; give a Python file with {wanted}")
    name = f"megarl_user_{setting.partition('.')[0]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: not a Python file, whose name ends in .py; give one with {wanted}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and typing look up annotations there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{where} cannot be imported: {describe(error, path)}") from error
    return module


def import_value(path: str, setting: str, name: str, kind: type[T]) -> T:
    """Return variable ``name`` of the file, an instance of the public class ``kind``. Errors as in ``import_file``."""
    public = f"{'.'.join(kind.__module__.split('.')[:3])}.{kind.__name__}"
    value = getattr(import_file(path, setting, f"{name}, a {public}"), name, None)
    if not isinstance(value, kind):
        found = "nothing" if value is None else f"a {type(value).__name__}"
        raise ConfigError(f"{setting}={path} has {found} called {name}; it must be a {public}")
    return value
