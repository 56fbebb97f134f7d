"""Responses of groups side by side as one self-contained HTML file.

Also the page's CSS and script, in addition to the report's.

Responses are untrusted: all texts from the store go through ``escape`` or an escaping template.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from megarl.buffer.store import Selection, StoredGroup
from megarl.core.durable import write_text
from megarl.core.errors import ConfigError
from megarl.core.schema import GREEDY, TEACHER, Task, Trajectory, Turn
from megarl.run.data.open_run import StoredRun, progress
from megarl.run.data.show import Token, context_of, rewards_of, spans_text, tokens_of, use_of, versions_text
from megarl.run.report import svg
from megarl.run.report.pieces import CSS as REPORT_CSS
from megarl.run.report.pieces import PIECES as FRAME
from megarl.run.report.pieces import macros
from megarl.run.report.text import VERDICTS, clean

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


TOKENS_OF_PAGE = 100_000
"""Maximum tokens of the model on a page, about 7 MB; no further group is added then."""
TOKENS_OF_TURN = 4_000
"""Maximum tokens shown of a turn, from its start."""
MEMBERS = 32
"""Maximum responses shown of a group, from its first."""
FOLDED = 1_200
"""Characters above which a text is folded; a line counts as at least 60."""
BOUNDS = (0.9, 0.5, 0.1, 0.01)
"""Probabilities between the colours of tokens."""


SPLITS = {"train": ("Training", "train", "step {}"), "eval": ("Held-out tasks", "held-out", "after step {}")}
"""Kind of a rollout -> (heading, name of a group, form of its step)."""


def write_page(run: StoredRun, selection: Selection, path: Path, limit: int, filters: Sequence[str]) -> str:
    """Write the page of the last ``limit`` groups with a matching trajectory; return a text with its path and contents.

    Training and held-out tasks each have a heading and a share of the groups, the last group first.

    Raises:
        ConfigError: no trajectory matches, or the folder is missing.
    """
    found = {kind: run.last_matching(replace(selection, kinds=(kind,)), limit) for kind in selection.kinds}
    found = {kind: (groups, count) for kind, (groups, count) in found.items() if groups}
    if not found:
        raise ConfigError(f"{run.run_dir}: no trajectory matches {' '.join(filters) or 'yet'}")
    if path.parent == run.run_dir / "report":
        path.parent.mkdir(exist_ok=True)
    elif not path.parent.is_dir():
        raise ConfigError(f"-o {path}: there is no folder {path.parent}; make it, or give another path")
    parts, shown = list[Markup](), list[str]()
    for number, (kind, (groups, count)) in enumerate(found.items()):
        most = limit // len(found) + (number < limit % len(found))
        chosen, room = groups[len(groups) - most :] if most < len(groups) else groups, TOKENS_OF_PAGE // len(found)
        with progress(len(chosen), "groups") as bar:
            sections, links = group_sections(run, selection, _counted(reversed(chosen), bar.update), room, kind)
        title, noun, _ = SPLITS[kind]
        shown.append(f"{len(sections)} of {count} {noun} groups" if len(sections) < count else f"{count} {noun} groups")
        left = "" if len(sections) == count else f", the last {len(sections)} of {count} groups, the last one first"
        parts += [PIECES.split(f"{title}{left}"), PIECES.jump(links), *sections]
    notes = [" ".join(filters)] if filters else []
    notes += ["" if len(found) == 1 else "kind=train or kind=eval leaves one of them; --groups N shows more."]
    name = f"{run.config.run.name} · {run.config.algorithm.name}"
    head = PIECES.head(name, ", ".join(shown), [note for note in notes if note])
    parts = [head, *parts, Markup(f"<script>{SCRIPT}</script>")]
    write_text(path, str(FRAME.page(f"{run.config.run.name}: responses", Markup(REPORT_CSS + CSS), Markup(), parts)))
    return f"{path}: {', '.join(shown)}"


def group_sections(
    run: StoredRun, selection: Selection, groups: Iterable[StoredGroup], room: int, kind: str
) -> tuple[list[Markup], list[tuple[str, str, int, int]]]:
    """Return groups in the given order, as many as fit ``room`` tokens of the model and at least one, and their links.

    Args:
        kind: Of their rollouts; anchors begin with its first letter.
    """
    sections, links = list[Markup](), list[tuple[str, str, int, int]]()
    for number, group in enumerate(groups):
        members = [each for each in run.store.selection.members([group.group_id]) if each.index != GREEDY]
        if not members:  # pruned or requested again after the count
            continue
        room -= sum(each.response_length for each in members)
        if room < 0 and sections:
            break
        anchor = f"{kind[0]}{number}"
        sections.append(_group(run, group, members, selection, anchor))
        right = sum(each.reward.status == "ok" for each in members)
        links.append((anchor, group.group_id, right, len(members)))
    return sections, links


def _counted(groups: Iterable[StoredGroup], count: Callable[[], object]) -> Iterator[StoredGroup]:
    for group in groups:
        yield group
        count()


def _group(
    run: StoredRun, group: StoredGroup, members: Sequence[Trajectory], selection: Selection, anchor: str
) -> Markup:
    task = run.store.selection.tasks_named([group.task_id]).get(group.task_id)
    matching = {
        g.number for g in run.store.selection.glances([group], ends=bool(selection.ends)) if selection.matches(g)
    }
    shared, excluded = members[0].prompt, run.store.journal.excluded([group.group_id])
    responses = [
        _response(run, each, shared, excluded, f"{anchor}-{each.index}", other=each.index not in matching)
        for each in members[:MEMBERS]
    ]
    dots = [
        (f"{anchor}-{each.index}", _css(each), f"[{each.index}] {_score(each)} {each.reward.status}, {each.end}")
        for each in members[:MEMBERS]
    ]
    note = f"The first {MEMBERS} of {len(members)} responses." if len(members) > MEMBERS else ""
    truth = None if task is None else task.reward_model.get("ground_truth")
    shown = truth if truth is None or isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)
    prompt = _prompt(run, task, shared, anchor)
    return PIECES.group(anchor, group.group_id, _facts(group, members, excluded), dots, prompt, shown, responses, note)


def _facts(
    group: StoredGroup, members: Sequence[Trajectory], excluded: Mapping[tuple[str, int], str]
) -> list[tuple[str, str]]:
    lengths = [each.response_length for each in members]
    right = sum(each.reward.status == "ok" for each in members)
    _, noun, step = SPLITS[group.kind]
    facts = [(noun, step.format(group.at_step)), ("", use_of(group)), ("task", group.task_id)]
    facts += [("source", group.data_source)] if group.data_source else []
    facts += [("right", f"{right} of {len(members)}")]
    if (mean_std := rewards_of(members, excluded)) is not None:
        mean, std = mean_std
        facts += [("reward", f"{mean:.3g} ± {std:.3g}" + ("" if std else " (zero variance)"))]
    return [*facts, ("tokens", f"{min(lengths)}–{max(lengths)}, mean {sum(lengths) / len(lengths):.0f}")]


def _prompt(run: StoredRun, task: Task | None, first: Turn, anchor: str) -> Markup:
    """Return the messages of the task; if the task is gone, the model's input text."""
    if task is None:
        return _turn(first.author, f"{len(first)} tokens", _decoded(run, first), f"{anchor}-p")
    turns = [
        _turn(message["role"], "", _content(message.get("content")), f"{anchor}-p{i}")
        for i, message in enumerate(task.prompt)
    ]
    return Markup().join(turns)


def _content(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _response(
    run: StoredRun, each: Trajectory, shared: Turn, excluded: Mapping[tuple[str, int], str], anchor: str, *, other: bool
) -> Markup:
    verdict, css = VERDICTS[each.reward.status]
    facts = f"{each.response_length} tokens · weights {versions_text(each.turns) or '—'}"
    reason = excluded.get((each.group_id, each.index))
    why = [] if reason is None else [f"not trained: {reason}"]
    why += [str(each.metadata["reward_message"])] if "reward_message" in each.metadata else []
    record = each.metadata.get("reward")
    if isinstance(record, dict):
        texts = {name: value for name, value in record.items() if isinstance(value, str)}
        why += [f"{name}: {value}" for name, value in texts.items() if name != "verifier"]
        facts += f" · verifier {record['verifier']}" if "verifier" in record else ""
    facts += f" · teacher {each.metadata[TEACHER]}" if TEACHER in each.metadata else ""
    skipped = each.prompt.author != "model" and each.prompt.token_ids.tolist() == shared.token_ids.tolist()
    turns = [_turn_of(run, each.turns, i, f"{anchor}-{i}") for i in range(int(skipped), len(each.turns))]
    score = each.reward.score if math.isfinite(each.reward.score) else -1e300
    parts = list(each.reward.parts.items())
    hurt = str(each.end) != "finished"
    return PIECES.response(
        anchor, each.index, _score(each), score, other, verdict, css, each.end, hurt, facts, parts, why, turns
    )


def _turn_of(run: StoredRun, turns: Sequence[Turn], number: int, anchor: str) -> Markup:
    turn = turns[number]
    facts = [f"turn {number}"] if len(turns) > 2 else []
    facts += [f"{len(turn)} tokens"]
    facts += [] if (context := context_of(turns, number)) is None else [context]
    facts += [] if turn.finish_reason is None else [turn.finish_reason]
    facts += [f"weights {spans_text(turn)}"] if len(turn.spans) > 1 else []
    facts += [] if turn.reward is None else [f"reward {turn.reward:.3g}"]
    if turn.logp is None:
        return _turn(turn.author, " · ".join(facts), _decoded(run, turn), anchor)
    tokens = tokens_of(turn, run.tokenizer, TOKENS_OF_TURN)
    text = "".join(token.text for token in tokens)
    cells = PIECES.more(strip(tokens), len(turn) - len(tokens))
    return PIECES.turn(turn.author, " · ".join(facts), cells, anchor if _is_long(text) else "")


def strip(tokens: Sequence[Token]) -> Markup:
    """Return each token as a cell in the colour of its probability, with a mark where the weights version changes."""
    several = len({token.version for token in tokens}) > 1
    cells, version = list[str](), ""
    for token in tokens:
        if several and token.version != version:
            version = token.version
            cells.append(f"<u>{escape(version)}</u>")
        level = sum(math.exp(token.logp) < bound for bound in BOUNDS)
        text = visible(token.text).replace("\n", "↵\n")
        facts = f"{token.logp:.4f} · {token.version} · {token.token_id}"
        cells.append(f'<i class="a{level}" title="{escape(facts)}">{escape(text)}</i>')
    return Markup("".join(cells))


def _decoded(run: StoredRun, turn: Turn) -> str:
    """Return the text of a turn that the model read but did not write."""
    text = run.tokenizer.decode(turn.token_ids[:TOKENS_OF_TURN], special=True)
    left = len(turn) - TOKENS_OF_TURN
    return text if left <= 0 else f"{text} … {left} more tokens are left out"


def _turn(author: str, facts: str, text: str, anchor: str) -> Markup:
    return PIECES.turn(author, facts, text, anchor if _is_long(text) else "")


def _is_long(text: str) -> bool:
    return len(text) + 60 * text.count("\n") > FOLDED


def _score(each: Trajectory) -> str:
    return svg.number(each.reward.score) if math.isfinite(each.reward.score) else "—"


def _css(each: Trajectory) -> str:
    return {"ok": "right", "wrong": "wrong"}.get(each.reward.status, "")
