"""``make test``: tests of whole jobs beside those of their parts, in two pytest processes, since jobs wait for something half of the time.

``python -m tests.both [options of pytest]`` prints what the jobs' tests print, then the output of the parts', then one summary line of both.
Status 1 when either failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter

PARTS = ["tests/parallel", "tests/unit"]
JOBS = ["tests/loop", "tests/system"]
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
    with tempfile.TemporaryFile("w+") as output:
        parts = subprocess.Popen([*pytest, *PARTS], stdout=output, stderr=subprocess.STDOUT)
        jobs = subprocess.Popen([*pytest, *JOBS], stdout=subprocess.PIPE, text=True)
        assert jobs.stdout is not None
        said = []
        try:
            while piece := jobs.stdout.read(1):
                said.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
            statuses = [jobs.wait(), parts.wait()]
        finally:
            for process in (jobs, parts):
                process.terminate()  # after Ctrl-C; else both have ended
        output.seek(0)
        of_parts = output.read()
    sys.stdout.write(of_parts)
    found = counts("".join(said)) + counts(of_parts)
    sys.stdout.write(line(found, time.monotonic() - start) + "\n")
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
