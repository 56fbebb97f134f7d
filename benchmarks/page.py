"""A benchmark's part of a page in docs/: between two marks, so that what people write around it stays.

Its first line says with which command, on which machine, at which commit and when it was measured.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- {name}: begin, written by the script -->", "<!-- {name}: end -->"
STYLE = (
    "<style>.grid{stroke:#ddd}.tick{font:10px sans-serif;fill:#666}.raw{fill:none;stroke:#bbb}"
    ".mean{fill:none;stroke:#2563eb;stroke-width:2}.hit{fill:none}.mark{fill:#d97706}"
    ".value{font:10px sans-serif;fill:#b45309}</style>"
)
"""Of a chart that stands alone."""
_started = (time.strftime("%Y-%m-%d"), os.getloadavg()[0])


def measured() -> str:
    """Command, machine, load at the start, commit and date of this process, as one line of Markdown."""
    date, load = _started
    commit = _git("describe", "--always") + ("-dirty" if _git("status", "--porcelain", "--", ":!docs") else "")
    script = Path(sys.argv[0]).resolve()
    command = shlex.join(
        ["python", str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name, *sys.argv[1:]]
    )
    text = (
        f"Measured by `{command}` at commit {commit or 'unknown'}, {date}: {machine()}; load {load:.1f} at the start."
    )
    return "\n".join(textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def machine() -> str:
    """Processor, cores, memory and GPU."""
    names = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{len(os.sched_getaffinity(0))} cores ({names[0] if names else platform.machine()}), {memory:.0f} GiB, "
        f"{_gpu()}"
    )


class Text:
    """Lines of a page, each printed as soon as it is known."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def say(self, line: str) -> None:
        print(line, flush=True)
        self._lines.append(line)

    def __str__(self) -> str:
        return "\n".join(self._lines)


def _gpu() -> str:
    try:
        import torch
    except ImportError:
        return "no GPU"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def _wrapped(text: str) -> str:
    """Lines of 120 columns at most, rows of tables aside."""
    lines = [
        [line] if line.startswith("|") else textwrap.wrap(line, 120, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    ]
    return "\n".join("\n".join(found or [""]) for found in lines)


def write(page: str, text: str, name: str | None = None) -> None:
    """Put ``text``, under the line of ``measured``, between the marks of ``name`` (default: the script) in ``page``,
    below docs/."""
    name = name or f"benchmarks/{Path(sys.argv[0]).name}"
    path = ROOT / "docs" / page
    begin, end = BEGIN.format(name=name), END.format(name=name)
    part = f"{begin}\n{measured()}\n\n{_wrapped(text.strip())}\n{end}"
    old = path.read_text() if path.is_file() else f"# {path.stem}\n\n"
    start, stop = old.find(begin), old.find(end)
    new = f"{old.rstrip()}\n\n{part}\n" if start < 0 or stop < start else old[:start] + part + old[stop + len(end) :]
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(new)
    temporary.replace(path)


def picture(name: str, chart: str) -> None:
    """Write a chart of ``megarl.run.report.svg``, with a style of its own, to docs/images/."""
    alone = chart.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", f">{STYLE}", 1)
    (ROOT / "docs" / "images" / name).write_text(alone)
