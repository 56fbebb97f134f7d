"""Pieces of the report: templates of HTML that escape every text, and the main curve as PNG.

Also the page's CSS and shared SVG definitions: light or dark by the reader's setting, no external files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from megarl.run.report import offline, svg
from megarl.run.report.data import ReportData
from megarl.run.report.text import clean, status

_TEMPLATES = """
{% macro page(title, css, hatch, sections) -%}
<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<style>{{ css }}</style></head><body>{{ hatch }}<main>
{% for section in sections %}{{ section }}{% endfor %}
</main></body></html>
{% endmacro %}

{% macro headline(name, head, status, notes, tiles) -%}
<header><div class="soft">{{ name }}</div><h1>{{ head }}</h1><div class="soft">{{ status }}</div></header>
{% for note in notes %}<p class="note">{{ note|clean }}</p>{% endfor %}
<div class="tiles">
{% for label, value in tiles %}<div class="card"><b>{{ value }}</b><span>{{ label }}</span></div>{% endfor %}
</div>
{%- endmacro %}

{% macro section(title, note, body="") -%}
<section><h2>{{ title }}</h2>{% if note %}<p class="soft">{{ note }}</p>{% endif %}{{ body }}</section>
{%- endmacro %}

{% macro card(body, scroll=false) -%}
<div class="card wide{{ " scroll" if scroll }}">{{ body }}</div>
{%- endmacro %}

{# The first column names the row; all others are numbers unless ``numeric`` lists which. #}
{% macro table(head, rows, numeric=none) -%}
{% set numeric = range(1, head|length)|list if numeric is none else numeric %}
<table>
{% if head|select|list %}<thead><tr>
{% for text in head %}<th scope="col"{{ cls(loop.index0, numeric) }}>{{ text }}</th>{% endfor %}
</tr></thead>{% endif %}
<tbody>
{% for row in rows %}<tr><th scope="row">{{ row[0]|clean }}</th>
{% for cell in row[1:] %}<td{{ cls(loop.index, numeric) }}>{{ cell|clean }}</td>{% endfor %}
</tr>{% endfor %}
</tbody></table>
{%- endmacro %}

{% macro cls(column, numeric) %}{% if column in numeric %} class="n"{% endif %}{% endmacro %}

{% macro chart(title, metric, unit, last, drawn) -%}
<div class="card"><div class="head"><h3>{{ title }}</h3><span class="last">{{ number(last) }}</span></div>{{ drawn }}
<div class="head"><code>{{ metric }}</code><code>{{ unit }}</code></div></div>
{%- endmacro %}

{% macro charts(cards) %}<div class="charts">{% for card in cards %}{{ card }}{% endfor %}</div>{% endmacro %}

{% macro titled(title, drawn) %}<h3>{{ title }}</h3>{{ drawn }}{% endmacro %}

{% macro legend(swatches) -%}
<ul class="legend">
{% for css, name in swatches %}<li><svg viewBox="0 0 14 14" aria-hidden="true">
<rect class="{{ css }}" width="14" height="14" rx="2"/></svg>{{ name }}</li>{% endfor %}
</ul>
{%- endmacro %}

{% macro answer(text, css, shown) -%}
<span class="verdict {{ css }}">{{ text }}</span><div class="text">
{%- if shown.strip() %}{{ shown|clean }}{% else %}<span class="soft">(empty)</span>{% endif -%}
</div>
{%- endmacro %}

{% macro soft(text) %}<span class="soft">{{ text }}</span>{% endmacro %}
{% macro paragraph(text) %}<p class="soft">{{ text }}</p>{% endmacro %}
{% macro text(text) %}<div class="text">{{ text|clean }}</div>{% endmacro %}
{% macro code(text) %}<code>{{ text }}</code>{% endmacro %}
{% macro link(target) %}<a href="{{ target }}">{{ target }}</a>{% endmacro %}
{% macro bar(pixels) %}<span class="bar" style="width:{{ pixels|round|int }}px"></span>{% endmacro %}
"""


def macros(templates: str, cleaned: Callable[[str], str]) -> Any:
    """Return a template's macros as attributes, each a function that returns Markup. The macros' filter ``clean``
    applies ``cleaned`` to texts that are not Markup."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["clean"] = lambda value: value if isinstance(value, Markup) else cleaned(str(value))
    environment.globals["number"] = svg.number
    return environment.from_string(templates).module


PIECES: Any = macros(_TEMPLATES, clean)
"""Each macro above as a function that returns Markup."""


CSS = """
:root{color-scheme:light dark;--page:#fbfbfa;--card:#fff;--ink:#1c1d1f;--soft:#5d6167;--line:#e3e3df;--grid:#ecece8;
--accent:#2563b8;
--raw:#9dbbe2;--mark:#b4540a;--good:#17704a;--goodbg:#e5f3ec;--bad:#b02a2a;--badbg:#fbeaea;--c0:#8a8d91;--track:#f1f1ee}
@media (prefers-color-scheme:dark){:root{--page:#141517;--card:#1c1e21;--ink:#e9eaeb;--soft:#a0a5ab;--line:#303338;
--grid:#2a2d31;
--accent:#74aef2;--raw:#3d5f8c;--mark:#f0a35c;--good:#74d3a6;--goodbg:#173327;--bad:#f29494;--badbg:#3a1f20;
--c0:#6f7379;--track:#25282c}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1120px;margin:0 auto;padding:36px 24px 64px}
h1{font-size:30px;line-height:1.2;margin:2px 0 6px;letter-spacing:-.01em;font-weight:650}
h2{font-size:18px;margin:40px 0 4px;font-weight:650}
h3{font-size:13px;margin:0;font-weight:600}
p{margin:4px 0 12px;max-width:100ch}
.soft,.note{color:var(--soft)}
.note{border-left:3px solid var(--mark);padding:2px 0 2px 10px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px 16px;margin-top:12px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0 0}
.tiles .card{margin:0;padding:10px 14px}
.tiles b{display:block;font-size:21px;font-weight:600;font-variant-numeric:tabular-nums}
.tiles span{color:var(--soft);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:12px;margin-top:12px}
.charts .card{margin:0;padding:12px 12px 6px}
.head{display:flex;justify-content:space-between;gap:8px;align-items:baseline}
.head code{color:var(--soft);font-size:11px}
.last{font-variant-numeric:tabular-nums;font-weight:600;font-size:13px;white-space:nowrap}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:600;font-size:13px;color:var(--soft)}
th,td{padding:6px 14px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
tbody tr:last-child>*{border-bottom:0}
.n{text-align:right}
th[scope=row]{color:var(--ink);font-weight:500;font-size:inherit}
code,.text{font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.text{white-space:pre-wrap;overflow-wrap:anywhere;max-height:15em;overflow:auto;min-width:6em}
.verdict{display:inline-block;font-size:12px;font-weight:600;border-radius:4px;padding:0 6px;margin-bottom:3px;
white-space:nowrap}
.right{color:var(--good);background:var(--goodbg)}
.wrong{color:var(--bad);background:var(--badbg)}
.bar{display:inline-block;height:9px;background:var(--accent);border-radius:2px;vertical-align:middle}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;padding:0;margin:8px 0 0;font-size:13px;
color:var(--soft)}
.legend svg{width:14px;height:14px;margin-right:6px;vertical-align:-2px}
svg{display:block;width:100%;height:auto}
.legend svg{display:inline}
.scroll>svg{min-width:820px}
.tick{font-size:11px;fill:var(--soft)}
.value{font-size:13px;font-weight:600;fill:var(--ink);paint-order:stroke;stroke:var(--card);stroke-width:4px}
.lane{font-size:12px;fill:var(--ink)}
.grid{stroke:var(--grid)}
.raw{fill:none;stroke:var(--raw);stroke-width:1.1}
.mean{fill:none;stroke:var(--accent);stroke-width:2;stroke-linejoin:round}
.dot{fill:var(--accent)}
.hit{fill:transparent}.hit:hover{fill:var(--accent)}
.mark{fill:var(--mark);stroke:var(--card);stroke-width:1.5}
.track{fill:var(--track)}
.begin{stroke:var(--soft);stroke-dasharray:3 3}
.ink{font-size:11px;fill:#fff}.inkwait{font-size:11px;fill:var(--ink);paint-order:stroke;stroke:var(--card);
stroke-width:4px}
.wait{fill:url(#hatch);stroke:var(--soft);stroke-width:.7}
.hatchline{stroke:var(--soft);stroke-width:1.4;opacity:.65}
.c0{fill:var(--c0)}.c1{fill:#6b4fc4}.c2{fill:#946200}.c3{fill:#b03a76}.c4{fill:#0d7a8a}.c5{fill:#2468c0}.c6{
fill:#bb3b3b}.c7{fill:#23784f}.c8{fill:#b25512}
footer{margin-top:44px;color:var(--soft);font-size:13px}
@media print{.card{break-inside:avoid}}
"""

HATCH = (
    '<svg class="defs" width="0" height="0" style="position:absolute" aria-hidden="true"><defs>'
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line class="hatchline" x1="0" y1="0" x2="0" y2="6"/></pattern></defs></svg>'
)
"""Hatch pattern of waiting, defined once on the page."""


def share_axis(rewards: Sequence[tuple[int, float]]) -> bool:
    """Return True if reward and accuracy fit one scale from 0 to 1."""
    return all(-0.01 <= v <= 1.01 for _, v in rewards)


def reward_png(run: ReportData, path: Path) -> None:
    if run.offline:
        return offline.png(run, path, f"{run.config.run.name}: {status(run)}")
    from matplotlib.figure import Figure

    rewards = run.series("critic/rewards/mean")
    shared = share_axis(rewards)
    figure = Figure(figsize=(8, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots(1 if shared else 2, 1, sharex=True, squeeze=False)[:, 0]
    if rewards:
        axes[0].plot(*zip(*rewards, strict=True), color="#9dbbe2", linewidth=1, label="mean reward of a step")
        if svg.window(len(rewards)) > 1:
            label = f"running mean of {svg.window(len(rewards))} steps"
            axes[0].plot(*zip(*svg.smoothed(rewards), strict=True), color="#2563b8", linewidth=2, label=label)
    if run.accuracies:
        axes[-1].plot(*zip(*run.accuracies, strict=True), "D", color="#b4540a", label="held-out accuracy")
        for step, accuracy in run.accuracies:
            axes[-1].annotate(
                f"{accuracy:.1%}", (step, accuracy), (0, 7), textcoords="offset points", ha="center", fontsize=9
            )
    for ax in axes:
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, fontsize=9)
    if not rewards and not run.accuracies:
        axes[0].text(0.5, 0.5, "no step recorded yet", ha="center", va="center", transform=axes[0].transAxes)
    axes[-1].set_xlabel("step")
    axes[0].set_title(f"{run.config.run.name}: {status(run)}", fontsize=10, loc="left")
    figure.savefig(path, format="png")
