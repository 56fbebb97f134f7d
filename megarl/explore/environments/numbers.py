"""Numbers in responses."""

from __future__ import annotations

import re

NUMBER = re.compile(r"-?\d+")
LONGEST = 18
"""Characters of a number: all such fit int64, and Python refuses to read some thousands of digits."""


def last_number(response: str) -> int | None:
    """Last whole number of a response; None without one, or where that is too long."""
    found = NUMBER.findall(response)
    return int(found[-1]) if found and len(found[-1]) <= LONGEST else None
