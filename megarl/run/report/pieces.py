"""Pieces of the report's HTML: templates that escape every text, unless it is ``Markup`` already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from megarl.run.report import svg
from megarl.run.report.text import clean

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
    """Macros of a template as attributes, each a function that returns Markup; ``cleaned`` is their filter ``clean``
    for texts that are none."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["clean"] = lambda value: value if isinstance(value, Markup) else cleaned(str(value))
    environment.globals["number"] = svg.number
    return environment.from_string(templates).module


PIECES: Any = macros(_TEMPLATES, clean)
"""Each macro above as a function that returns Markup."""
