"""The names that docs/metrics.md lists, as one pattern."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def unlisted(names: set[str]) -> set[str]:
    """Metrics that the page does not name. There ``a/x|y`` is two metrics, ``<part>`` any text without a slash and
    ``<source>`` any text."""
    listed = []
    for line in PAGE.read_text().splitlines():
        for name in re.findall(r"`([^`]+/[^`]+|step)`", line.split(": ")[0] if line.startswith("- ") else line):
            head, _, tail = name.replace("\\|", "|").rpartition("/")
            ends = "|".join(map(re.escape, tail.split("|"))) if "<" not in tail else re.escape(tail)
            pattern = f"{re.escape(head)}/({ends})" if head else ends
            listed.append(re.sub(r"<\w+>", r"[^/]+", pattern.replace("<source>", ".+")))
    known = re.compile("|".join(f"({pattern})" for pattern in listed))
    return {name for name in names if not known.fullmatch(name)}
