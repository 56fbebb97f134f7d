"""Account of jobs under faults, a line for each fault and each life: all runs add to one file. And its table."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BEGIN, END = "<!-- chaos: begin, written by tests/system/chaos.py --write -->\n", "<!-- chaos: end -->\n"
RECOVERED = "recovered"
EQUAL = "equal"


@dataclass(frozen=True)
class FaultRow:
    """A fault that was done to a job."""

    life: int
    kind: str
    detail: str
    """Process or node it was done to, and for how long."""
    phase: str
    """Phase of trainer rank 0 at that moment."""
    step: int
    """Steps committed at that moment."""
    seconds: float
    """Seconds from its beginning to the next committed step, or to the job's end."""
    outcome: str
    """``recovered``, or the failure."""


@dataclass(frozen=True)
class LifeRow:
    """A job from its first start to its end, with all its faults."""

    life: int
    seconds: float
    starts: int
    """Starts of the job's commands."""
    compared: int
    """Values compared with the undisturbed job."""
    outcome: str
    """``equal``, or the failure."""


class Account:
    """Rows of all runs in one folder, in a file that is only appended to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, row: FaultRow | LifeRow) -> None:
        """Append a row, whole or not at all for a reader."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"what": type(row).__name__, "at": time.strftime("%Y-%m-%dT%H:%M:%S"), **asdict(row)})
        with self._path.open("a") as file:
            file.write(line + "\n")

    def rows(self) -> list[FaultRow | LifeRow]:
        """Return all rows; a line that was cut off by a kill is left out."""
        found: list[FaultRow | LifeRow] = []
        for line in self._path.read_text().splitlines() if self._path.is_file() else ():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            kind = {"FaultRow": FaultRow, "LifeRow": LifeRow}[record.pop("what")]
            del record["at"]
            found.append(kind(**record))
        return found

    def next_life(self) -> int:
        """Return a number that no life has had, also none that was broken off."""
        return max((row.life for row in self.rows()), default=0) + 1


def table(rows: Iterable[FaultRow | LifeRow], kinds: Sequence[str]) -> str:
    """Return a page's table: a row for each kind in the order of ``kinds``, one for all; and a sentence on lives."""
    rows = list(rows)
    faults, lives = [r for r in rows if isinstance(r, FaultRow)], [r for r in rows if isinstance(r, LifeRow)]
    of_kind: Mapping[str, list[FaultRow]] = {
        kind: [row for row in faults if row.kind == kind] for kind in dict.fromkeys([*kinds, *(r.kind for r in faults)])
    }
    lines = ["| fault | injected | recovered | median s | largest s |", "|---|--:|--:|--:|--:|"]
    for kind, found in [*of_kind.items(), ("**all**", faults)]:
        seconds = [row.seconds for row in found if row.outcome == RECOVERED]
        middle, largest = (f"{number(seconds):.0f}" if seconds else "–" for number in (statistics.median, max))
        lines.append(f"| {kind} | {len(found)} | {len(seconds)} | {middle} | {largest} |")
    equal, hours = sum(life.outcome == EQUAL for life in lives), sum(life.seconds for life in lives) / 3600
    lines += ["", f"{len(lives)} jobs in {hours:.1f} hours with {sum(life.starts for life in lives)} starts:"]
    lines.append(f"{equal} equal the undisturbed job, {len(lives) - equal} do not.")
    return "\n".join(lines) + "\n"


def with_table(page: str, text: str) -> str:
    """Return the page with ``text`` between its marks. Raises ValueError if it has no marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN.strip()} with {END.strip()} after it")
    return before + begin + text + end + after
