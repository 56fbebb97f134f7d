"""``make test``: all tests in four pytest processes beside each other. Tests of jobs wait for something half of the
time, so fewer processes leave a part of two cores idle.

``python -m tests.together [options of pytest]`` prints what the tests of jobs print, then the output of the others,
then one summary line of all. Status 1 when one failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = (
    ("tests/loop/test_[a-r]*.py",),
    ("tests/unit/test_[a-lr]*.py",),
    ("tests/system/test_*.py", "tests/unit/test_[m-qs-z]*.py"),
    ("tests/parallel/test_*.py", "tests/loop/test_[s-z]*.py"),
)
"""Files of each process; they take about as long as each other. Unit tests of reward servers expect none that tests of
sandboxes have started."""
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


def files(patterns: Sequence[str]) -> list[str]:
    """Return the files of a process, in the order of its patterns."""
    return [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def run(groups: Sequence[Sequence[str]], options: Sequence[str]) -> int:
    """Run a pytest process for each group of files and folders. Print the first one's output as it comes, the others'
    at the end, and a summary line of all. Return 1 if one failed."""
    start = time.monotonic()
    pytest = [sys.executable, "-m", "pytest", *options]
    with ExitStack() as stack:
        others = []
        for group in groups[1:]:
            output = stack.enter_context(tempfile.TemporaryFile("w+"))
            others.append((subprocess.Popen([*pytest, *group], stdout=output, stderr=subprocess.STDOUT), output))
        first = subprocess.Popen([*pytest, *groups[0]], stdout=subprocess.PIPE, text=True)
        assert first.stdout is not None
        said = []
        try:
            while piece := first.stdout.read(1):
                said.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
            statuses = [first.wait(), *(other.wait() for other, _ in others)]
        finally:
            for process in (first, *(other for other, _ in others)):
                process.terminate()  # after Ctrl-C; else all have ended
        found = counts("".join(said))
        for _, output in others:
            output.seek(0)
            other_said = output.read()
            sys.stdout.write(other_said)
            found += counts(other_said)
    sys.stdout.write(line(found, time.monotonic() - start) + "\n")
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(run([files(patterns) for patterns in PARTS], sys.argv[1:]))
