"""Pages of `megarl watch`, from the pieces of the report and of `megarl data page`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from megarl.buffer.store import GroupPlace, NewestGroups, Selection, StoredGroup
from megarl.buffer.store.selection import SEARCH_S
from megarl.engines.fleet import EngineRow
from megarl.run.data import page as groups_page
from megarl.run.data.filters import FORMS, selection_of
from megarl.run.data.open_run import stored_run
from megarl.run.report import html, svg
from megarl.run.report.data import ReportData, end_of, logs_of
from megarl.run.report.pieces import CSS, HATCH, macros
from megarl.run.report.pieces import PIECES as FRAME
from megarl.run.report.text import clean, duration, status
from megarl.run.watch.watched import RunNow, WatchedRun

GROUPS = 6
"""Groups of a page."""
TOKENS = 60_000
"""Most tokens of the model on a page of groups."""
LOG_BYTES = 2**17
"""Bytes shown of a log."""
METRICS = (
    "critic/rewards/mean", "response_length/mean", "actor/entropy", "training/rollout_logp_diff_mean",
    "actor/grad_norm", "actor/kl_loss", "perf/throughput", "timing_s/step",
)  # fmt: skip
"""Metrics on which runs are compared unless the reader names one."""
VIEWS = (("", "Overview", "o"), ("groups", "Groups", "g"), ("log", "Log", "l"))
"""(path, title, key) of the pages of a run."""

_TEMPLATES = """
{% macro frame(root, run, at, views) -%}
<nav class="top"><a class="home" href="{{ root }}" title="h" data-key="h">megarl</a>
{% if run %}<b>{{ run|clean }}</b>{% for path, title, key in views %}<a href="{{ root }}{{ run|urlencode }}/{{ path }}"
{%- if path == at %} aria-current="page"{% endif %} title="{{ key }}" data-key="{{ key }}">{{ title }}</a>{% endfor %}
{% endif %}<span id="live" class="soft" role="status"></span></nav>
{%- endmacro %}

{% macro runs(root, rows) -%}
<header><h1>Runs</h1></header>
<form action="{{ root }}compare"><table><thead><tr><th></th><th scope="col">run</th><th scope="col">state</th>
<th scope="col" class="n">steps</th><th scope="col" class="n">reward</th><th scope="col" class="n">held-out</th>
<th scope="col">last change</th><th scope="col">alarms</th></tr></thead><tbody>
{% for name, state, steps, reward, accuracy, age, alarms in rows %}
<tr><td><input type="checkbox" name="run" value="{{ name }}" checked aria-label="compare {{ name }}"></td>
<th scope="row"><a href="{{ root }}{{ name|urlencode }}/">{{ name|clean }}</a></th><td>{{ state|clean }}</td>
<td class="n">{{ steps }}</td><td class="n">{{ reward }}</td><td class="n">{{ accuracy }}</td><td>{{ age }}</td>
<td>{{ alarms|clean }}</td></tr>
{% endfor %}</tbody></table><p><button>Compare</button></p></form>
{%- endmacro %}

{% macro compared(root, css, metric, known, charts) -%}
<header><h1>{{ css|length }} runs</h1></header>
<form class="tools"><label>metric <input name="metric" list="metrics" value="{{ metric }}"></label>
{% for name in css %}<input type="hidden" name="run" value="{{ name }}">{% endfor %}
<datalist id="metrics">{% for name in known %}<option value="{{ name }}">{% endfor %}</datalist>
<button>Show</button></form>
<ul class="legend">{% for name, line in css.items() %}<li><svg viewBox="0 0 14 14" aria-hidden="true">
<line class="{{ line }}" x1="0" x2="14" y1="7" y2="7"/></svg>
<a href="{{ root }}{{ name|urlencode }}/">{{ name|clean }}</a></li>{% endfor %}</ul>
<div class="charts pair">{% for title, drawn in charts %}<div class="card"><h3>{{ title }}</h3>{{ drawn }}</div>
{% endfor %}</div>
{%- endmacro %}

{% macro search(filters, words, forms, newer, older, note) -%}
<form class="tools"><label>filters <input name="filters" value="{{ filters }}" size="34"
placeholder="steps=3-10 reward=..0 kind=eval" title="{{ forms }}"></label>
<label>text <input name="words" value="{{ words }}" placeholder="prompt, ground truth or id"></label>
<button>Search</button>
{% if newer %}<a href="{{ newer }}" data-key="k" title="k">newer</a>{% endif %}
{% if older %}<a href="{{ older }}" data-key="j" title="j">older</a>{% endif %}
<label><input type="checkbox" id="colours" checked> token colours</label>
<label><input type="checkbox" id="unfold"> unfold all</label>
<label><input type="checkbox" id="best"> best reward first</label></form>
{% if note %}<p class="note">{{ note|clean }}</p>{% endif %}
{%- endmacro %}

{% macro log(files, at, text) -%}
<form class="tools"><label>file <select name="file">
{% for name in files %}<option{{ " selected" if name == at }}>{{ name }}</option>{% endfor %}</select></label>
<button>Show</button></form><div class="card"><div class="text whole">{{ text|clean }}</div></div>
{%- endmacro %}
"""
PIECES: Any = macros(_TEMPLATES, clean)
"""Each macro above as a function that returns Markup."""

WATCH_CSS = """
nav.top{display:flex;flex-wrap:wrap;gap:4px 16px;align-items:baseline;border-bottom:1px solid var(--line);
padding-bottom:8px;margin-bottom:18px}
nav.top .home{font-weight:650}
nav.top [aria-current]{color:var(--ink);text-decoration:none;border-bottom:2px solid var(--accent)}
a{color:var(--accent)}
#live{margin-left:auto;font-size:13px}
input,select,button{font:inherit;font-size:13px;color:var(--ink);background:var(--card);border:1px solid var(--line);
border-radius:6px;padding:3px 8px;max-width:86vw}
button{cursor:pointer}
.text.whole{max-height:none}
.pair{grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr))}
.run{fill:none;stroke-width:2;stroke-linejoin:round}
.r0{stroke:#2468c0}.r1{stroke:#bb3b3b}.r2{stroke:#23784f}.r3{stroke:#b25512}.r4{stroke:#6b4fc4}.r5{stroke:#0d7a8a}
.r6{stroke:#b03a76}.r7{stroke:#946200}
@media (max-width:600px){main{padding:16px 12px 40px}}
"""
SCRIPT = """
const main=()=>document.querySelector('main'),live=document.getElementById('live');
let stamp=document.body.dataset.stamp||'';
const poll=async()=>{try{
const found=await(await fetch(document.body.dataset.poll)).text();
if(found!==stamp){const next=new DOMParser().parseFromString(await(await fetch(location.href)).text(),'text/html');
const bar=document.querySelector('nav.top');main().replaceWith(next.querySelector('main'));
main().querySelector('nav.top').replaceWith(bar);stamp=found}
live.textContent='live'}catch{live.textContent='megarl watch has ended'}
setTimeout(poll,2000)};
if(document.body.dataset.poll)poll();
addEventListener('keydown',e=>{if(e.target.closest('input,select')||e.ctrlKey||e.metaKey||e.altKey)return;
const link=document.querySelector(`a[data-key="${CSS.escape(e.key)}"]`);if(link)link.click()});
"""


def whole(
    title: str, sections: Sequence[Markup], *, nonce: str, poll: str = "", stamp: str = "", more: str = ""
) -> str:
    """Return a page.

    Args:
        sections: The first is the navigation.
        nonce: Of the only scripts that the browser runs.
        poll: Path whose text changes with the page; "" for a page that stays.
        stamp: Text at ``poll`` now.
        more: Further script.
    """
    text = str(FRAME.page(title, Markup(CSS + groups_page.CSS + WATCH_CSS), Markup(HATCH), sections))
    body = Markup('<body data-poll="{}" data-stamp="{}">').format(poll, stamp)
    script = f'<script nonce="{nonce}">{SCRIPT}{more}</script></body>'
    return text.replace("<body>", str(body), 1).replace("</body>", script, 1)


def bar(root: str, run: str = "", at: str = "") -> Markup:
    """Return the navigation. ``at``: path of the page within the run's."""
    return Markup(PIECES.frame(root, run, at, VIEWS))


def overview(now: RunNow) -> list[Markup]:
    """Return the sections of a run's report, with its engines."""
    if now.data is None:
        return [FRAME.section("This run cannot be read", now.error)]
    first, *others = html.sections(now.data, now.alarms)
    return [first, _engines(now.data.engines, finished=now.data.finished), *others]


def _engines(rows: Sequence[EngineRow], *, finished: bool) -> Markup:
    """Return the table of engines that should have a process."""
    if not rows or finished:
        return Markup()
    body = [
        (
            f"{row.program} {row.number}",
            str(row.state),
            str(row.has or "—"),
            row.workers,
            row.holds_for or "",
            row.refused,
        )
        for row in rows
    ]
    head = ("engine", "state", "weights", "workers", "holds for", "refused")
    return Markup(FRAME.section("Engines", "", FRAME.card(FRAME.table(head, body, numeric=(3,)))))


def runs(root: str, found: Mapping[str, WatchedRun]) -> list[Markup]:
    """Return the table of all runs."""
    rows = []
    for name, run in found.items():
        now = run.now()
        data = now.data
        if data is None:
            rows.append((name, now.error, "", "", "", "", ""))
            continue
        steps = f"{data.steps_done} of {data.config.trainer.steps}"
        figures = (last_of(data, "critic/rewards/mean"), accuracy_of(data), age_of(run.folder))
        rows.append((name, status(data), steps, *figures, ", ".join(alarm.name for alarm in now.alarms)))
    return [PIECES.runs(root, rows)]


def last_of(data: ReportData, metric: str) -> str:
    """Return a metric of the last step that has it, as text."""
    points = data.series(metric)
    return svg.number(points[-1][1]) if points else "—"


def accuracy_of(data: ReportData) -> str:
    """Return the held-out accuracy of the last evaluation, as text."""
    return f"{data.accuracies[-1][1]:.1%}" if data.accuracies else "—"


def age_of(folder: Path) -> str:
    """Return the time since a run wrote its last metrics, as text."""
    path = folder / "metrics.jsonl"
    return f"{duration(max(time.time() - path.stat().st_mtime, 0.0))} ago" if path.is_file() else "—"


def comparison(root: str, found: Mapping[str, WatchedRun], metric: str) -> list[Markup]:
    """Return charts with a curve for each run: held-out accuracy and ``METRICS``, or one metric."""
    read = {name: data for name, run in found.items() if (data := run.now().data) is not None}
    known = sorted({name for data in read.values() for _, metrics in data.steps for name in metrics})
    shown = [metric] if metric else list(METRICS)
    css = {name: svg.curve_css(i) for i, name in enumerate(found)}
    drawn: list[tuple[str, Markup]] = []
    accuracies = {name: list(data.accuracies) for name, data in read.items() if data.accuracies}
    if accuracies and not metric:
        drawn.append(("held-out accuracy", Markup(svg.overlay_chart("held-out accuracy", accuracies, css))))
    for title in shown:
        curves = {name: points for name, data in read.items() if (points := data.series(title))}
        if curves:
            drawn.append((title, Markup(svg.overlay_chart(title, curves, css))))
    return [PIECES.compared(root, css, metric, known, drawn)]


def groups(
    folder: Path,
    filters: str,
    words: str,
    start: GroupPlace | None,
    path_of: Callable[[str, GroupPlace], str],
    *,
    newer: bool = False,
    search_s: float = SEARCH_S,
) -> tuple[list[Markup], str]:
    """Return the sections of a page of groups, the newest first, and its script.

    Args:
        filters: As `megarl data` takes them (docs/data.md).
        words: Part of the prompt, ground truth or id.
        start: Place next to which the page's groups are; None is the newest page.
        path_of: Function from "before" or "after", and a place, to the path of the page that is older or newer.
        newer: Show groups newer than ``start``, not older ones.
        search_s: As ``SelectionTable.newest``.

    Raises ConfigError for filters that cannot be read, and as ``stored_run``.
    """
    selection, _ = selection_of(filters.split())
    with stored_run(folder, selection) as run:
        find = partial(run.store.selection.newest, replace(selection, ends=()), GROUPS, words, search_s=search_s)
        found = find(start, newer=newer)
        if newer and found.at is None:  # fewer groups are newer than a page has
            start, newer, found = None, False, find()
        parts: list[Markup] = []
        shown: set[str] = set()
        for kind in ("train", "eval"):
            of_kind = [group for group in found.groups if group.kind == kind]
            sections, links = groups_page.group_sections(run, selection, _noted(of_kind, shown), TOKENS, kind)
            if sections:
                parts += [
                    groups_page.PIECES.split(groups_page.SPLITS[kind][0]),
                    groups_page.PIECES.jump(links),
                    *sections,
                ]
    after, before = _neighbours(found, shown, start, newer)
    paths = [path_of(name, place) if place else "" for name, place in (("after", after), ("before", before))]
    note = _note(found, selection, newer)
    return [PIECES.search(filters, words, "; ".join(FORMS.values()), *paths, note), *parts], groups_page.SCRIPT


def _noted(groups: Sequence[StoredGroup], shown: set[str]) -> Iterator[StoredGroup]:
    """Yield groups; note the id of each that the reader has finished."""
    for group in groups:
        yield group
        shown.add(group.group_id)


def _neighbours(
    found: NewestGroups, shown: Collection[str], start: GroupPlace | None, newer: bool
) -> tuple[GroupPlace | None, GroupPlace | None]:
    """Return the places next to which the newer and the older page are; None for a page without groups.

    Groups that had no room on the page come first on the older one.
    """
    fits = [group.group_id in shown for group in found.groups]
    places = found.places[: fits.index(False) if False in fits else None]
    last = places[-1] if places else start
    if newer:
        return found.at, last
    first = places[0] if places else start
    return first if start else None, last if False in fits else found.at


def _note(found: NewestGroups, selection: Selection, newer: bool) -> str:
    """Return the remark above a page of groups."""
    if found.at is not None and len(found.groups) < GROUPS:
        return f"The search was long and stopped here; {'newer' if newer else 'older'} searches further."
    if not found.groups:
        return "No group matches."
    return "Responses with another end are pale; groups are not filtered by it." if selection.ends else ""


def log(folder: Path, file: str) -> list[Markup]:
    """Return the end of a log of the run: ``file``, or the newest."""
    paths = {str(path.relative_to(folder / "logs")): path for path in logs_of(folder)}
    newest = max(paths.items(), key=lambda item: _written(item[1]), default=("", None))[0]
    at = file if file in paths else newest
    return [PIECES.log(list(paths), at, end_of(paths[at], LOG_BYTES) if at else "No log yet.")]


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
