"""Pieces of the page of responses: templates that escape every text except ``Markup``.

Also the page's CSS and script, in addition to the report's.
"""

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

{% macro split(title) %}<h2 class="split">{{ title }}</h2>{% endmacro %}

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
    """Replace control characters, and tabs by spaces."""
    return clean(text.replace("\t", "    ").replace("\r\n", "\n"))


PIECES: Any = macros(_TEMPLATES, visible)
"""Each macro above as a function that returns Markup."""


CSS = """
:root{--a1:#fff4cf;--a2:#ffdf9e;--a3:#ffbd85;--a4:#f79a92;--tool:#0d7a8a;--user:#5d6167}
@media (prefers-color-scheme:dark){:root{--a1:#39331b;--a2:#57431a;--a3:#74401f;--a4:#8a2f35;--tool:#4fc0d0;
--user:#a0a5ab}}
main{max-width:none;padding:28px 24px 64px}
h1{margin-bottom:2px}
.tools{position:sticky;top:0;z-index:2;background:var(--page);border-bottom:1px solid var(--line);padding:8px 0;
margin-top:14px;display:flex;flex-wrap:wrap;gap:6px 18px;align-items:center;font-size:13px}
.tools label{cursor:pointer;white-space:nowrap}
.scale{display:inline-flex;align-items:center;color:var(--soft);white-space:nowrap}
.scale i{padding:0 6px;font-style:normal;color:var(--ink)}
.jump{display:flex;flex-wrap:wrap;gap:6px;margin:14px 0 0;padding:0;list-style:none;font-size:13px}
.jump a{display:block;border:1px solid var(--line);border-radius:6px;padding:3px 9px;background:var(--card);
color:inherit;text-decoration:none}
.jump a:hover{border-color:var(--accent)}
h2.split{font-size:20px;margin:34px 0 0;padding-top:14px;border-top:2px solid var(--line)}
section.group{margin-top:34px;scroll-margin-top:52px}
.group h2{margin:0}
.facts{display:flex;flex-wrap:wrap;gap:2px 18px;margin:4px 0 8px;font-size:13px;color:var(--soft)}
.facts b{color:var(--ink);font-weight:600;font-variant-numeric:tabular-nums}
.dots{display:inline-flex;gap:3px;vertical-align:-2px}
.dots a{width:14px;height:14px;border-radius:3px;background:var(--track);border:1px solid var(--line)}
.dots a.right{background:var(--good);border-color:var(--good)}
.dots a.wrong{background:var(--bad);border-color:var(--bad)}
details.prompt{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 14px}
summary{cursor:pointer;font-size:13px;color:var(--soft)}
summary b{color:var(--ink)}
.columns{display:grid;grid-auto-flow:column;grid-auto-columns:minmax(min(340px,86vw),1fr);gap:12px;overflow-x:auto;
margin-top:10px;padding-bottom:8px;align-items:start;scroll-snap-type:x proximity}
.response{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px;
scroll-snap-align:start;scroll-margin:60px 8px;min-width:0}
.response.other{opacity:.55}
.response:target{outline:2px solid var(--accent)}
.title{display:flex;flex-wrap:wrap;gap:2px 10px;align-items:baseline}
.title b{font-size:19px;font-variant-numeric:tabular-nums}
.title .verdict{margin:0}
.end{font-size:12px;border-radius:4px;padding:0 6px;background:var(--track);color:var(--soft);white-space:nowrap}
.end.hurt{color:var(--bad);background:var(--badbg)}
.small{font-size:12px;color:var(--soft);margin:2px 0}
table.parts{font-size:13px;width:auto;margin:4px 0}
.parts th,.parts td{padding:1px 14px 1px 0;border:0}
.parts th[scope=row]{font-weight:400;color:var(--soft)}
.why{font-size:13px;margin:4px 0;padding:3px 8px;border-left:3px solid var(--mark);overflow-wrap:anywhere}
.turn{border-left:3px solid var(--accent);padding-left:9px;margin-top:10px}
.turn.tool,.turn.environment{border-color:var(--tool)}
.turn.user,.turn.system{border-color:var(--user)}
.who{font-size:12px;color:var(--soft)}
.who b{color:var(--accent)}
.tool .who b,.environment .who b{color:var(--tool)}
.user .who b,.system .who b{color:var(--user)}
.turn .text{max-height:none;overflow:visible;min-width:0}
.fold{position:relative}
.fold>input{position:absolute;opacity:0;width:0;height:0}
.fold>.text{max-height:21em;overflow:hidden;-webkit-mask:linear-gradient(#000 82%,#0000);
mask:linear-gradient(#000 82%,#0000)}
.fold>label{cursor:pointer;font-size:12px;color:var(--accent)}
.fold>label::after{content:"show all"}
.fold>input:checked~label::after{content:"fold"}
.fold>input:checked~.text{max-height:none;overflow:visible;-webkit-mask:none;mask:none}
.fold>input:focus-visible~label{outline:2px solid var(--accent)}
.text i{font-style:normal;border-radius:2px}
.text i:hover{outline:1px solid var(--ink)}
.text i:empty{padding:0 2px;border-left:1px dotted var(--soft)}
.text u{text-decoration:none;font-size:10px;color:var(--card);background:var(--accent);border-radius:3px;padding:0 4px;
margin:0 2px;vertical-align:1px}
i.a1{background:var(--a1)}i.a2{background:var(--a2)}i.a3{background:var(--a3)}i.a4{background:var(--a4)}
body.plain .text i{background:none}
#tip{position:fixed;z-index:9;pointer-events:none;background:var(--ink);color:var(--page);border-radius:6px;
padding:5px 9px;font:12px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre;
display:none;max-width:90vw;overflow:hidden}
@media (max-width:600px){main{padding:16px 12px 40px}h1{font-size:23px}.tools{position:static}}
@media print{.columns{grid-auto-flow:row;overflow:visible}.tools{display:none}}
"""

SCRIPT = """
const tip=document.createElement('div');tip.id='tip';document.body.append(tip);
const show=e=>{const t=e.target.closest('i[title],i[data-t]');if(!t){tip.style.display='none';return}
if(t.title){t.dataset.t=t.title;t.removeAttribute('title')}
const [logp,version,id]=t.dataset.t.split(' \\u00b7 '),p=Math.exp(logp);
tip.textContent=JSON.stringify(t.textContent.replace('\u21b5\\n','\\n'))+
'\\nlog-prob '+logp+'   p '+(p<.001?p.toExponential(1):p.toFixed(3))+
'\\nweights  '+version+'   id '+id;tip.style.display='block';
const r=t.getBoundingClientRect(),w=tip.offsetWidth,h=tip.offsetHeight;
tip.style.left=Math.max(4,Math.min(r.left,innerWidth-w-4))+'px';
tip.style.top=(r.bottom+h+8<innerHeight?r.bottom+5:r.top-h-5)+'px'};
document.addEventListener('pointerover',show);document.addEventListener('pointerdown',show);
addEventListener('scroll',()=>tip.style.display='none',true);
const on=(id,f)=>document.getElementById(id).addEventListener('change',e=>f(e.target.checked));
on('colours',c=>document.body.classList.toggle('plain',!c));
on('unfold',c=>document.querySelectorAll('.fold>input').forEach(i=>i.checked=c));
on('best',c=>document.querySelectorAll('.columns').forEach(g=>[...g.children].sort((a,b)=>
c?b.dataset.score-a.dataset.score||a.dataset.index-b.dataset.index:a.dataset.index-b.dataset.index)
.forEach(x=>g.append(x))));
"""
