"""Responses of groups side by side as one self-contained HTML file.

Responses are untrusted: all texts from the store go through ``escape`` or an escaping template.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from markupsafe import Markup, escape

from megarl.buffer.store import Selection, StoredGroup
from megarl.core.durable import write_text
from megarl.core.errors import ConfigError
from megarl.core.schema import GREEDY, TEACHER, Task, Trajectory, Turn
from megarl.run.data.open_run import StoredRun, progress
from megarl.run.data.page_pieces import CSS, PIECES, SCRIPT, visible
from megarl.run.data.show import context_of, rewards_of, use_of
from megarl.run.data.tokens import Token, spans_text, tokens_of, versions_text
from megarl.run.report import svg
from megarl.run.report.pieces import CSS as REPORT_CSS
from megarl.run.report.pieces import PIECES as FRAME
from megarl.run.report.text import VERDICTS

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
        sections, links = _sections(run, selection, chosen, room, kind)
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


def _sections(
    run: StoredRun, selection: Selection, groups: Sequence[StoredGroup], room: int, kind: str
) -> tuple[list[Markup], list[tuple[str, str, int, int]]]:
    """Return the groups, the last first, that fit ``room`` tokens of the model, and links to them."""
    sections, links = list[Markup](), list[tuple[str, str, int, int]]()
    with progress(len(groups), "groups") as bar:
        for number, group in enumerate(reversed(groups)):
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
            bar.update()
    return sections, links


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
