"""Faults by what they break; each file has a table ``FAULTS``."""

from __future__ import annotations

import importlib
import pkgutil

from megarl.exam.fault import Fault


def faults() -> dict[str, list[Fault]]:
    """Return the faults of each area."""
    modules = (importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__))
    return {module.__name__.rpartition(".")[2].removesuffix("_faults"): list(module.FAULTS) for module in modules}


def find(name: str) -> Fault:
    """Return the fault with a name. Raises LookupError."""
    for rows in faults().values():
        for fault in rows:
            if fault.name == name:
                return fault
    raise LookupError(f"the exam has no fault {name!r}; `megarl exam --list` prints all")
