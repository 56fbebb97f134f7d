"""Parts of what takes long, each run by a command of its own, and the page that says what ran when.

A part that has passed at this commit is not run again; each writes its line into the page as soon as it has ended.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = (sys.executable, "-m", "pytest", "-q")
BEGIN, END = "<!-- begin, written by make {name} -->\n", "<!-- end -->\n"
PASSED = re.compile(r"^=* ?(\d+ (?:passed|failed).*?) in ", re.MULTILINE)
LINE = 100
"""Characters of a part's last line on the page."""


@dataclass(frozen=True)
class Parts:
    """Commands by the names of their parts."""

    name: str
    """Target of make; the page is docs/NAME.md."""
    commands: Mapping[str, Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of all commands."""

    @property
    def page(self) -> Path:
        return ROOT / "docs" / f"{self.name}.md"

    def table(self, found: Mapping[str, Mapping[str, str]]) -> str:
        """Lines of the page for the parts that have run, in their order."""
        lines = ["| part | command | result | minutes | commit | date |", "|---|---|---|---|---|---|"]
        for part in [name for name in self.commands if name in found]:
            r = found[part]
            lines.append(
                f"| {part} | `{r['command']}` | {r['result']} | {r['minutes']} | {r['commit']} | {r['date']} |"
            )
        return "\n".join(lines) + "\n"

    def with_table(self, page: str, found: Mapping[str, Mapping[str, str]]) -> str:
        """The page with the table between its marks. Raises ValueError where it has none."""
        begin = BEGIN.format(name=self.name)
        before, _, rest = page.partition(begin)
        _, mark, after = rest.partition(END)
        if not mark:
            raise ValueError(f"the page has no {begin.strip()} with {END.strip()} after it")
        return before + begin + self.table(found) + END + after

    def run(self, part: str, commit: str) -> dict[str, str]:
        """Run one part, show what it prints, and return its line."""
        command, start, said = self.commands[part], time.monotonic(), []
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **self.environment}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            sys.stdout.write(line)
            sys.stdout.flush()
        status = process.wait()
        words = last_words("".join(said))
        return {
            "command": " ".join(["python", *command[1:]]),
            "result": words if status == 0 else f"FAILED, status {status}: {words}",
            "minutes": f"{(time.monotonic() - start) / 60:.0f}",
            "commit": commit,
            "date": time.strftime("%Y-%m-%d"),
            "status": str(status),
        }

    def main(self) -> int:
        """Run the parts that the command line names, or all; return 1 when one failed."""
        wanted = sys.argv[1:] or list(self.commands)
        if unknown := [part for part in wanted if part not in self.commands]:
            sys.exit(f"{unknown[0]}: no such part; there are {', '.join(self.commands)}")
        commit = git("describe", "--always")
        is_clean = not git("status", "--porcelain", "--", f":!docs/{self.name}.md")
        commit += "" if is_clean else "-dirty"
        results = ROOT / "runs" / self.name / "parts.json"
        found: dict[str, dict[str, str]] = json.loads(results.read_text()) if results.is_file() else {}
        for part in wanted:
            if is_clean and found.get(part, {}).get("commit") == commit and found[part]["status"] == "0":
                print(f"{part}: passed at {commit} before")
                continue
            line = self.run(part, commit)
            # Another call may have run other parts meanwhile.
            found = (json.loads(results.read_text()) if results.is_file() else {}) | {part: line}
            results.parent.mkdir(parents=True, exist_ok=True)
            results.write_text(json.dumps(found, indent=1))
            self.page.write_text(self.with_table(self.page.read_text(), found))
        return int(any(found[part]["status"] != "0" for part in wanted))


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def last_words(output: str) -> str:
    """Summary of a part: pytest's counts, else its last line."""
    if counts := PASSED.findall(output):
        return str(counts[-1])
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return (lines[-1] if lines else "no output")[:LINE].replace("|", "/")
