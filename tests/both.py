"""``make test``: all tests in two pytest processes, which take about as long as each other. One has the tests of jobs,
which wait for something half of the time.

``python -m tests.both [options of pytest]`` prints what the latter prints, then the output of the other process, then
one summary line of both. Status 1 when either failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter

COMPUTING = ["tests/unit", "tests/parallel"]
JOBS = ["tests/system", "tests/loop"]
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
    with tempfile.TemporaryFile("w+") as other_output:
        other = subprocess.Popen([*pytest, *COMPUTING], stdout=other_output, stderr=subprocess.STDOUT)
        jobs = subprocess.Popen([*pytest, *JOBS], stdout=subprocess.PIPE, text=True)
        assert jobs.stdout is not None
        said = []
        try:
            while piece := jobs.stdout.read(1):
                said.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
            statuses = [jobs.wait(), other.wait()]
        finally:
            for process in (jobs, other):
                process.terminate()  # after Ctrl-C; else both have ended
        other_output.seek(0)
        other_said = other_output.read()
    sys.stdout.write(other_said)
    found = counts("".join(said)) + counts(other_said)
    sys.stdout.write(line(found, time.monotonic() - start) + "\n")
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
