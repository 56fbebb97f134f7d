"""Recognise failed allocations, on a device or in host memory. Imports no torch: the supervisor has none."""

from __future__ import annotations

import errno
import re

_TEXT = re.compile(
    r"can't allocate memory|not enough memory|cannot allocate memory|CUDA (error: )?out of memory|STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
"""Error texts of torch's CPU allocator, the system and CUDA, and of cuBLAS and cuDNN (plain RuntimeErrors)."""
_ASKED = re.compile(r"tried to allocate ([\d.]+ ?\w+)", re.IGNORECASE)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if the error, or one of its causes, is a failed allocation."""
    while error is not None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and _TEXT.search(str(error)):
            return True
        error = error.__cause__
    return False


def bytes_asked(error: BaseException) -> str | None:
    """Return the size that did not fit, in torch's words (``64 bytes``, ``2.00 GiB``); ``None`` if not in the text."""
    found = _ASKED.search(f"{error} {error.__cause__ or ''}")
    return None if found is None else found[1]
