"""``make test``: the unit tests beside all others, in two pytest processes, since most of the latter wait for something
half of the time.

``python -m tests.both [options of pytest]`` prints what the others print, then the unit tests' output, then one summary
line of both. Status 1 when either failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter

UNIT = ["tests/unit"]
OTHERS = ["tests/loop", "tests/parallel", "tests/system"]
SUMMARY = re.compile(r"^=+ (.*) in [\d.]+s.* =+$")
ORDER = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warning", "warnings", "error", "errors")


def counts(output: str) -> Counter[str]:
    """What a pytest process's last line says: outcome -> number."""
    lines = [match[1] for line in output.splitlines() if (match := SUMMARY.match(line))]
    found: Counter[str] = Counter()
    for part in lines[-1].split(", ") if lines else ["1 error"]:  # it ended without one
        number, _, outcome = part.partition(" ")
        found[outcome] = int(number) if number.isdigit() else 0
    return found


def line(found: Counter[str], seconds: float) -> str:
    text = ", ".join(f"{found[outcome]} {outcome}" for outcome in ORDER if found[outcome])
    minutes, rest = divmod(int(seconds), 60)
    return f" {text} in {seconds:.2f}s ({minutes // 60}:{minutes % 60:02d}:{rest:02d}) ".center(80, "=")


def main() -> int:
    start = time.monotonic()
    pytest = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    with tempfile.TemporaryFile("w+") as unit_output:
        unit = subprocess.Popen([*pytest, *UNIT], stdout=unit_output, stderr=subprocess.STDOUT)
        others = subprocess.Popen([*pytest, *OTHERS], stdout=subprocess.PIPE, text=True)
        assert others.stdout is not None
        said = []
        try:
            while piece := others.stdout.read(1):
                said.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
            statuses = [others.wait(), unit.wait()]
        finally:
            for process in (others, unit):
                process.terminate()  # after Ctrl-C; else both have ended
        unit_output.seek(0)
        unit_said = unit_output.read()
    sys.stdout.write(unit_said)
    found = counts("".join(said)) + counts(unit_said)
    sys.stdout.write(line(found, time.monotonic() - start) + "\n")
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
