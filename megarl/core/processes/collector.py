"""Control of Python's garbage collector while a process creates many permanent objects: modules, rows."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection in the body: it takes a fifth of the time of an import, and a third of the time of
    reading rows.

    Objects that exist at the end are frozen, so later collections skip them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
