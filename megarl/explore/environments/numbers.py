"""Numbers in responses."""

from __future__ import annotations

import re

NUMBER = re.compile(r"-?\d+")
LONGEST = 18
"""Most characters of a number, so that it fits int64; Python refuses to parse thousands of digits."""


def last_number(response: str) -> int | None:
    """Return the last whole number of a response; None without one or if it is too long."""
    found = NUMBER.findall(response)
    return int(found[-1]) if found and len(found[-1]) <= LONGEST else None
