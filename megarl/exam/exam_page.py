"""Page of the exam: shares found and named rightly by area, faults missed, and all faults with their reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.exam.fault import Fault
from megarl.exam.runner import ExamResult

HEAD = """# Exam of silent failures

Known faults of systems for reinforcement learning, put into small jobs one at a time: does the job notice, and does it
name the cause?

```bash
megarl exam --healthy 100 --write docs/benchmarks/exam.md  # resumable; docs/alarms.md
```

Each fault comes from a public report and is a patch of a job of a few steps ([sources](../../megarl/exam/areas)).
*Found*: the job is refused, ends with an error, or gives an alarm. *Right*: the alarm at its first step, or the error,
is the one that must name the fault. *In time*: at the start, or within the steps of its row, usually one. *Before*: by
errors and refusals alone, without alarms of steps.
"""


def page(rows: Mapping[str, Sequence[Fault]], results: Mapping[str, ExamResult], healthy: Sequence[ExamResult]) -> str:
    """Return the page; arguments as in ``summary``."""
    lines = ["", "## Faults", "| fault | report | what goes wrong | alarm | step |", "|---|---|---|---|--:|"]
    for fault in (fault for faults in rows.values() for fault in faults if fault.name in results):
        repository, _, number = fault.report.partition("#")
        link = f"[{fault.report}](https://github.com/{repository}/issues/{number})"
        at = results[fault.name].at
        lines.append(f"| {fault.name} | {link} | {fault.breaks} | {fault.alarm} | {'–' if at is None else at} |")
    return f"{HEAD}\n{summary(rows, results, healthy)}\n" + "\n".join(lines) + "\n"


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
            said = ", ".join(dict.fromkeys([*(name for _, name in result.alarms), *result.errors]))
            said = said or ("an error of no name" if result.status not in (0, None) else "nothing")
            lines.append(f"| {fault.name} | {fault.alarm} | {said} | {fault.unseen} |")
    return "\n".join(lines)


def _before(fault: Fault, result: ExamResult) -> bool:
    return result.status not in (0, None) and bool(result.errors)


def _found(fault: Fault, result: ExamResult) -> bool:
    return result.found


def _in_time(fault: Fault, result: ExamResult) -> bool:
    return result.found and (result.at or 0) < fault.begins + max(fault.within, 1)


def _right(fault: Fault, result: ExamResult) -> bool:
    return result.found and result.names(fault)
