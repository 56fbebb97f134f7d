"""Responses of groups side by side as one HTML file that needs nothing beside it.

Responses are untrusted: whatever comes from the store goes through ``escape`` or a template that escapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup, escape

from megarl.buffer.store import Selection, StoredGroup
from megarl.core.durable import write_text
from megarl.core.errors import ConfigError
from megarl.core.schema import GREEDY, Task, Trajectory, Turn
from megarl.run.data.open_run import StoredRun, progress
from megarl.run.data.page_pieces import CSS, PIECES, SCRIPT, visible
from megarl.run.data.show import rewards_of, use_of
from megarl.run.data.tokens import Token, spans_text, tokens_of, versions_text
from megarl.run.report import svg
from megarl.run.report.pieces import CSS as REPORT_CSS
from megarl.run.report.pieces import PIECES as FRAME
from megarl.run.report.text import VERDICTS

TOKENS_OF_PAGE = 100_000
"""Tokens of the model after which no further group is added; about 7 MB."""
TOKENS_OF_TURN = 4_000
"""Tokens of a turn that are shown, the first ones."""
MEMBERS = 32
"""Responses of a group that are shown, the first ones."""
FOLDED = 1_200
"""Characters, or lines of 60, above which a text is folded."""
BOUNDS = (0.9, 0.5, 0.1, 0.01)
"""Probabilities between the colours of tokens."""


def write_page(run: StoredRun, selection: Selection, path: Path, limit: int, filters: Sequence[str]) -> str:
    """Write the page of the last ``limit`` groups that have a matching trajectory, the last one first; return its path
    and what is on it.

    Raises:
        ConfigError: no trajectory matches, or the folder is missing.
    """
    groups, count = run.last_matching(selection, limit)
    if not groups:
        raise ConfigError(f"{run.run_dir}: no trajectory matches {' '.join(filters) or 'yet'}")
    if path.parent == run.run_dir / "report":
        path.parent.mkdir(exist_ok=True)
    elif not path.parent.is_dir():
        raise ConfigError(f"-o {path}: there is no folder {path.parent}; make it, or give another path")
    sections, links, room = list[Markup](), list[tuple[str, str, int, int]](), TOKENS_OF_PAGE
    with progress(len(groups), "groups") as bar:
        for number, group in enumerate(reversed(groups)):
            members = [each for each in run.store.selection.members([group.group_id]) if each.index != GREEDY]
            if not members:  # pruned, or asked for again, since they were counted
                continue
            room -= sum(each.response_length for each in members)
            if room < 0 and sections:
                break
            sections.append(_group(run, group, members, selection, f"g{number}"))
            right = sum(each.reward.status == "ok" for each in members)
            links.append((f"g{number}", group.group_id, right, len(members)))
            bar.update()
    shown = f"{len(sections)} of {count} groups" if len(sections) < count else f"{count} groups"
    notes = [" ".join(filters) or "all trajectories of training and evaluation"]
    if len(sections) < count:
        notes.append(f"The last ones, the last first; {count - len(sections)} earlier groups are left out.")
    name = f"{run.config.run.name} · {run.config.algorithm.name}"
    parts = [PIECES.head(name, shown, notes), PIECES.jump(links), *sections, Markup(f"<script>{SCRIPT}</script>")]
    write_text(path, str(FRAME.page(f"{run.config.run.name}: responses", Markup(REPORT_CSS + CSS), Markup(), parts)))
    return f"{path}: {shown}"


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
    facts = [(group.kind, f"step {group.at_step}"), ("", use_of(group)), ("task", group.task_id)]
    facts += [("source", group.data_source)] if group.data_source else []
    facts += [("right", f"{right} of {len(members)}")]
    if (mean_std := rewards_of(members, excluded)) is not None:
        mean, std = mean_std
        facts += [("reward", f"{mean:.3g} ± {std:.3g}" + ("" if std else " (zero variance)"))]
    return [*facts, ("tokens", f"{min(lengths)}–{max(lengths)}, mean {sum(lengths) / len(lengths):.0f}")]


def _prompt(run: StoredRun, task: Task | None, first: Turn, anchor: str) -> Markup:
    """Messages of the task; of one that is gone, the text that the model was given."""
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
    facts = [f"{len(turn)} tokens"]
    facts += [f"continues turn {turn.follows}"] if turn.follows != number - 1 else []
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
    """Each token as a cell in the colour of its probability; a mark where the weights version changes."""
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
    """Text of a turn that no model wrote, as the model read it."""
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
