"""``make soak``: what is too long for ``make test``, part by part, and the page that says what ran when.

``python -m tests.soaks [PART ...]``. A part that has passed at this commit is not run again; each writes its line into
``docs/soak.md`` as soon as it has ended. Status 1 when one failed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "runs" / "soak" / "parts.json"
PAGE = ROOT / "docs" / "soak.md"
PYTEST = (sys.executable, "-m", "pytest", "-q")
MANY = (
    "agents", "algorithms_pairs", "algorithms_reference", "checkpoint_convert", "cuda_emulated", "host_memory",
    "ops_advantage", "ops_linear", "ops_policy", "reshard_families", "reshard_oracle", "rewards_math",
)  # fmt: skip
"""Unit tests that hold more cases here than in ``make test``."""
PARTS = {
    "grids": (*PYTEST, "-m", "soak", "tests"),
    "long answers": (*PYTEST, "tests/loop/test_long_answers.py", "tests/loop/test_engine.py"),
    "slurm": (*PYTEST, "tests/system/test_slurm.py"),
    "many examples": (*PYTEST, *(f"tests/unit/test_{name}.py" for name in MANY)),
    "sync mutants": (sys.executable, "-m", "tests.loop.sync_mutants"),
    "kills": (sys.executable, "-m", "tests.system.soak"),
    "controls": (sys.executable, "benchmarks/controls.py"),
}
BEGIN, END = "<!-- begin, written by make soak -->\n", "<!-- end -->\n"
PASSED = re.compile(r"^=* ?(\d+ (?:passed|failed).*?) in ", re.MULTILINE)
LINE = 100
"""Characters of a part's last line on the page."""


def table(found: dict[str, dict[str, str]]) -> str:
    """Lines of the page for the parts that have run, in the order of ``PARTS``."""
    lines = ["| part | command | result | minutes | commit | date |", "|---|---|---|---|---|---|"]
    for part in [name for name in PARTS if name in found]:
        r = found[part]
        lines.append(f"| {part} | `{r['command']}` | {r['result']} | {r['minutes']} | {r['commit']} | {r['date']} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, found: dict[str, dict[str, str]]) -> str:
    """The page with the table between its marks. Raises ValueError where it has none."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the page has no {BEGIN.strip()} with {END.strip()} after it")
    return before + BEGIN + table(found) + END + after


def last_words(output: str) -> str:
    """Summary of a part: pytest's counts, else its last line."""
    if counts := PASSED.findall(output):
        return str(counts[-1])
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return (lines[-1] if lines else "no output")[:LINE].replace("|", "/")


def run(part: str, commit: str) -> dict[str, str]:
    """Run one part, show what it prints, and return its line."""
    command, start, said = PARTS[part], time.monotonic(), []
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "MEGARL_SOAK": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        sys.stdout.write(line)
        sys.stdout.flush()
    status = process.wait()
    return {
        "command": " ".join(["python", *command[1:]]),
        "result": last_words("".join(said)) if status == 0 else f"FAILED, status {status}: {last_words(''.join(said))}",
        "minutes": f"{(time.monotonic() - start) / 60:.0f}",
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "status": str(status),
    }


def main() -> int:
    wanted = sys.argv[1:] or list(PARTS)
    if unknown := [part for part in wanted if part not in PARTS]:
        sys.exit(f"{unknown[0]}: no such part; there are {', '.join(PARTS)}")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    found: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for part in wanted:
        if found.get(part, {}).get("commit") == commit and found[part]["status"] == "0":
            print(f"{part}: passed at {commit} before")
            continue
        found[part] = run(part, commit)
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=1))
        PAGE.write_text(with_table(PAGE.read_text(), found))
    return int(any(found[part]["status"] != "0" for part in wanted))


if __name__ == "__main__":
    sys.exit(main())
