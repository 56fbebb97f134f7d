"""Pieces of the page of responses: templates that escape every text, unless it is ``Markup`` already."""

from __future__ import annotations

from typing import Any

from megarl.run.report.pieces import macros
from megarl.run.report.text import clean

_TEMPLATES = """
{% macro head(name, title, notes) -%}
<header><div class="soft">{{ name }}</div><h1>{{ title }}</h1>
{% for note in notes %}<div class="soft">{{ note }}</div>{% endfor %}</header>
<div class="tools">
<label><input type="checkbox" id="colours" checked> token colours</label>
<span class="scale">probability <i>≥ .9</i><i class="a1">.5–.9</i><i class="a2">.1–.5</i>
<i class="a3">.01–.1</i><i class="a4">&lt; .01</i></span>
<label><input type="checkbox" id="unfold"> unfold all</label>
<label><input type="checkbox" id="best"> best reward first</label>
</div>
{%- endmacro %}

{% macro jump(links) -%}
<ul class="jump">
{% for anchor, name, right, count in links %}
<li><a href="#{{ anchor }}">{{ name }} <span class="soft" title="right">{{ right }}/{{ count }}</span></a></li>
{% endfor %}
</ul>
{%- endmacro %}

{% macro group(anchor, name, facts, dots, prompt, truth, responses, note) -%}
<section class="group" id="{{ anchor }}"><h2>{{ name }}</h2>
<div class="facts">
{% for label, value in facts %}<span>{{ label }} <b>{{ value|clean }}</b></span>{% endfor %}
<span class="dots">
{% for target, css, title in dots %}<a href="#{{ target }}" class="{{ css }}" title="{{ title }}"></a>{% endfor %}
</span></div>
<details class="prompt" open><summary>Prompt{% if truth is not none %} · ground truth <b>{{ truth|clean }}</b>
{%- endif %}</summary>{{ prompt }}</details>
{% if note %}<p class="small">{{ note }}</p>{% endif %}
<div class="columns">{% for response in responses %}{{ response }}{% endfor %}</div></section>
{%- endmacro %}

{% macro response(anchor, index, score, order, other, verdict, css, end, hurt, facts, parts, why, turns) -%}
<article class="response{{ " other" if other }}" id="{{ anchor }}" data-index="{{ index }}" data-score="{{ order }}">
<div class="title"><span class="soft">[{{ index }}]</span><b>{{ score }}</b>
<span class="verdict {{ css }}">{{ verdict }}</span><span class="end{{ " hurt" if hurt }}">{{ end }}</span></div>
<p class="small">{{ facts }}</p>
{% if parts %}<table class="parts"><tbody>
{% for part, value in parts %}<tr><th scope="row">{{ part|clean }}</th><td class="n">{{ number(value) }}</td></tr>
{% endfor %}</tbody></table>{% endif %}
{% for text in why %}<p class="why">{{ text|clean }}</p>{% endfor %}
{% for turn in turns %}{{ turn }}{% endfor %}</article>
{%- endmacro %}

{% macro turn(author, facts, text, fold) -%}
<div class="turn {{ author }}"><div class="who"><b>{{ author }}</b> {{ facts }}</div>
{% if fold %}<div class="fold"><input type="checkbox" id="{{ fold }}" aria-label="show all">
<div class="text">{{ text|clean }}</div><label for="{{ fold }}"></label></div>
{% else %}<div class="text">{{ text|clean }}</div>{% endif %}</div>
{%- endmacro %}

{% macro more(text, tokens) -%}
{{ text }}{% if tokens %}<span class="soft"> … {{ tokens }} more tokens are left out</span>{% endif %}
{%- endmacro %}
"""


def visible(text: str) -> str:
    """Without control characters; a tab as spaces."""
    return clean(text.replace("\t", "    ").replace("\r\n", "\n"))


PIECES: Any = macros(_TEMPLATES, visible)
"""Each macro above as a function that returns Markup."""
