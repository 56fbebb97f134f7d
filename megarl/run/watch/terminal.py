"""The view of `megarl watch --text`: runs in a terminal, for clusters without a browser."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from megarl.run.report.text import clean, status
from megarl.run.watch.pages import accuracy_of, age_of, last_of
from megarl.run.watch.watched import WatchedRun

FIGURES = (
    ("reward", "critic/rewards/mean"),
    ("length", "response_length/mean"),
    ("entropy", "actor/entropy"),
    ("gap to engine", "training/rollout_logp_diff_mean"),
    ("grad norm", "actor/grad_norm"),
    ("step s", "timing_s/step"),
    ("tokens/s", "perf/throughput"),
)
"""(column, metric of the last step)"""
EVERY_S = 2.0
COLUMNS = 4
"""Most runs that are shown as columns; more are rows."""


def show(runs: Mapping[str, WatchedRun], *, once: bool) -> None:
    """Print the runs; unless ``once``, until Ctrl-C."""
    console = Console()
    if once:
        console.print(view(runs))
        return
    with Live(view(runs), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(EVERY_S)
            live.update(view(runs), refresh=True)


def view(runs: Mapping[str, WatchedRun]) -> RenderableType:
    """Return the table of runs, a column each while these fit, and the alarms and engines of each."""
    figures = {name: _figures(run) for name, run in runs.items()}
    names = list(dict.fromkeys(title for of_run in figures.values() for title in of_run))
    if len(runs) <= COLUMNS:
        table = Table("", *map(_plain, runs))
        for title in names:
            table.add_row(title, *(of_run.get(title, "") for of_run in figures.values()))
    else:
        table = Table("run", *names)
        for name, of_run in figures.items():
            table.add_row(_plain(name), *(of_run.get(title, "") for title in names))
    lines: list[str] = []
    for name, run in runs.items():
        now = run.now()
        if now.data is None:
            lines.append(_plain(f"{name}: {now.error}"))
            continue
        lines += [_plain(f"{name}: alarm {a.name}, {a.count} times: {a.text}") for a in now.alarms]
        if not now.data.finished:
            lines += [_plain(f"{name}: engine {e.number} {e.state}, weights {e.has or '—'}") for e in now.data.engines]
    return Group(table, *lines)


def _figures(run: WatchedRun) -> dict[str, str]:
    data = run.now().data
    if data is None:
        return {}
    steps = f"{data.steps_done} of {data.config.trainer.steps}"
    state = status(data).partition(":")[0]
    head = {"state": state, "steps": steps, "last change": age_of(run.folder), "held-out": accuracy_of(data)}
    return head | {title: last_of(data, metric) for title, metric in FIGURES}


def _plain(text: str) -> str:
    return escape(clean(text))
