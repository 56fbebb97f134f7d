"""Page of the exam: shares found and named rightly by area, faults missed, and all faults with their reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.exam.fault import Fault
from megarl.exam.runner import ExamResult

HEAD = """# Exam of silent failures

Known faults of systems for reinforcement learning, put into small jobs one at a time: does the job notice, and does it
name the cause?

```bash
megarl exam --healthy 100 --peer benchmarks/against/trl_exam.json --write docs/benchmarks/exam.md  # resumable
python benchmarks/exam_trl.py  # TRL's part
```

Each fault comes from a public report and is a patch of a job of a few steps ([sources](../../megarl/exam/areas)).
*Found*: the job is refused, ends with an error, or gives an alarm. *Right*: the alarm at its first step, or the error,
is the one that must name the fault. *In time*: at the start, or within the steps of its row, usually one. *Before*: by
errors and refusals alone, without alarms of steps.
"""


PEER = """## TRL
The same faults in TRL's trainers on a CPU: [changes](../../benchmarks/against/trl_faults.py) of TRL's functions, rows
or rewards. Each run differs from a clean one, first where the row says (`loss, 2`: the second loss of the run).
*Noticed*: an error, or a warning that the clean run's log lacks. TRL offers nothing else; a person may see more in its
metrics. Left out are faults of what these runs do not have: engines, sync, ranks, a critic, turns.
"""
"""Head of the peer's table."""


def page(
    rows: Mapping[str, Sequence[Fault]],
    results: Mapping[str, ExamResult],
    healthy: Sequence[ExamResult],
    peer: Path | None = None,
) -> str:
    """Return the page; ``peer`` names outcomes of another trainer, other arguments as in ``summary``."""
    lines = ["", "## Faults", "| fault | report | what goes wrong | alarm | step |", "|---|---|---|---|--:|"]
    for fault in (fault for faults in rows.values() for fault in faults if fault.name in results):
        repository, _, number = fault.report.partition("#")
        link = f"[{fault.report}](https://github.com/{repository}/issues/{number})"
        at = results[fault.name].at
        lines.append(f"| {fault.name} | {link} | {fault.breaks} | {fault.alarm} | {'–' if at is None else at} |")
    beside = "" if peer is None else f"\n{against(rows, results, peer)}\n"
    return f"{HEAD}\n{summary(rows, results, healthy)}\n{beside}" + "\n".join(lines) + "\n"


def against(rows: Mapping[str, Sequence[Fault]], results: Mapping[str, ExamResult], peer: Path) -> str:
    """Return the table of faults that another trainer had too, with both results.

    Args:
        peer: JSON file of ``benchmarks/exam_trl.py``. Faults without an effect there are left out.
    """
    kept = json.loads(peer.read_text())
    here = {fault.name: fault for faults in rows.values() for fault in faults if fault.name in results}
    both = {name: one for name, one in kept["faults"].items() if name in here and (one["effect"] or one["noticed"])}
    seen = [name for name, one in both.items() if one["noticed"]]
    found = [name for name in both if results[name].found]
    right = [name for name in both if _right(here[name], results[name])]
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    lines = [
        PEER,
        f"**Of {len(both)} faults TRL noticed {len(seen)}; megarl found {len(found)} and named {len(right)} rightly**",
        f"({versions}).",
        "",
        "| fault | differs first in TRL | TRL says | megarl says |",
        "|---|---|---|---|",
    ]
    for name, one in both.items():
        lines.append(f"| {name} | {one['effect']} | {_short(one['noticed'])} | {_said(results[name])} |")
    return "\n".join(lines) + "\n"


def _said(result: ExamResult) -> str:
    """Return the names of alarms and errors that a job gave."""
    said = ", ".join(dict.fromkeys([*(name for _, name in result.alarms), *result.errors]))
    return said or ("an error of no name" if result.found else "nothing")


def _short(text: str, most: int = 120) -> str:
    line = " ".join(text.replace("|", "/").split())
    return (line if len(line) <= most else f"{line[: most - 1]}…") or "nothing"


def summary(
    rows: Mapping[str, Sequence[Fault]], results: Mapping[str, ExamResult], healthy: Sequence[ExamResult]
) -> str:
    """Return the table of shares by area, false alarms, and the faults missed.

    Args:
        rows: Area -> faults.
        results: Name of a fault -> result of its job; faults without one are left out.
        healthy: Results of jobs without a fault.
    """
    tried = {area: [fault for fault in faults if fault.name in results] for area, faults in rows.items()}
    every = [fault for faults in tried.values() for fault in faults]
    lines = ["| area | faults | before | found | in time | right |", "|---|--:|--:|--:|--:|--:|"]
    for area, faults in [*tried.items(), ("**all**", every)]:
        counts = [
            sum(test(fault, results[fault.name]) for fault in faults) for test in (_before, _found, _in_time, _right)
        ]
        shares = [f"{n} ({n / len(faults):.0%})" if faults else "" for n in counts]
        lines.append(f"| {area} | {len(faults)} | {' | '.join(shares)} |")
    false = [result for result in healthy if result.found or result.status != 0]
    names = sorted({name for result in false for name in (*(alarm for _, alarm in result.alarms), *result.errors)})
    lines += [
        "",
        f"**{len(false)} false alarms in {len(healthy)} healthy jobs** of twice the steps, of every kind, each with "
        f"another seed and learning rate{': ' + ', '.join(names) if names else ''}.",
        "",
        "## Missed, or named otherwise",
        "| fault | must be named | said | reason |",
        "|---|---|---|---|",
    ]
    for fault in every:
        result = results[fault.name]
        if not _right(fault, result):
            lines.append(f"| {fault.name} | {fault.alarm} | {_said(result)} | {fault.unseen} |")
    return "\n".join(lines)


def _before(fault: Fault, result: ExamResult) -> bool:
    return result.status not in (0, None) and bool(result.errors)


def _found(fault: Fault, result: ExamResult) -> bool:
    return result.found


def _in_time(fault: Fault, result: ExamResult) -> bool:
    return result.found and (result.at or 0) < fault.begins + max(fault.within, 1)


def _right(fault: Fault, result: ExamResult) -> bool:
    return result.found and result.names(fault)
