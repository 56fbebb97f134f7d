"""A group or a trajectory as text for the terminal, with the log-prob of each token."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import NamedTuple

from megarl.buffer.store import Glance, Selection, StoredGroup
from megarl.buffer.store.tables import SAMPLED
from megarl.core.errors import ConfigError
from megarl.core.schema import GREEDY, Task, Trajectory, Turn
from megarl.run.data.open_run import StoredRun
from megarl.run.report.text import clean
from megarl.tasks import ChatTokenizer, text_of_tokens


class Token(NamedTuple):
    """A token written by a model."""

    text: str
    """"" for the first bytes of a character that a later token completes."""
    token_id: int
    logp: float
    version: str


def tokens_of(turn: Turn, tokenizer: ChatTokenizer, limit: int) -> list[Token]:
    """Return the first ``limit`` tokens of a model's turn; their joined texts are the turn's text with special
    tokens."""
    assert turn.logp is not None, "a turn of the model has log-probs"
    ids = turn.token_ids[:limit].tolist()
    versions = [str(span.version) for span in turn.spans for _ in range(span.start, span.end)]
    found = zip(text_of_tokens(tokenizer, ids), ids, turn.logp[:limit].tolist(), versions[:limit], strict=True)
    return [Token(*token) for token in found]


def spans_text(turn: Turn) -> str:
    """Return the weights versions of a turn, with the number of tokens of each if there are several."""
    if len(turn.spans) == 1:
        return str(turn.spans[0].version)
    return ", ".join(f"{span.version} ({span.end - span.start})" for span in turn.spans)


def versions_text(turns: Sequence[Turn]) -> str:
    """Return the weights versions of turns, in order."""
    return ", ".join(dict.fromkeys(str(span.version) for turn in turns for span in turn.spans))


STRIP = 10_000
"""Maximum tokens of a turn that ``--tokens`` prints."""
RULE = "─" * 80


def show(run: StoredRun, name: str, *, tokens: bool = False) -> str:
    """Return the text of a group (``train-000003/5``) or of one of its trajectories (``train-000003/5[2]``).

    Raises:
        ConfigError: the group or trajectory does not exist, or its trajectories were pruned.
    """
    found = re.fullmatch(r"(.+?)(?:\[(-?\d+)\])?", name)
    group = run.store.selection.group(found[1]) if found else None
    if found is None or group is None:
        raise ConfigError(
            f"{name}: no such group; write GROUP or GROUP[INDEX], as train-000003/5 or 'train-000003/5[2]'; "
            f"`megarl data sample {run.run_dir}` prints some"
        )
    members = run.store.selection.members([group.group_id])
    if not members:
        why = "they were pruned" if group.state in SAMPLED else "it is not sampled yet"
        raise ConfigError(f"{name}: no trajectories of this group ({group.state}) are in the store; {why}")
    if found[2] is not None:
        index = int(found[2])
        if not (chosen := [each for each in members if each.index == index]):
            raise ConfigError(f"{name}: the group has {', '.join(f'[{each.index}]' for each in members)}")
        members = chosen
    task = run.store.selection.tasks_named([group.task_id]).get(group.task_id)
    excluded = run.store.journal.excluded([group.group_id])
    texts = [_trajectory_text(run, each, excluded.get((each.group_id, each.index)), tokens) for each in members]
    parts = [_group_text(group, members, task, excluded), *texts]
    return "\n".join(parts)


def sample(run: StoredRun, selection: Selection, count: int, seed: int) -> str:
    """Return the text of ``count`` matching trajectories, drawn uniformly; equal for equal seed and store."""
    chosen = sorted(_reservoir(run, selection, count, seed), key=lambda each: (each.group.group_id, each.number))
    return "\n".join(show(run, f"{each.group.group_id}[{each.number}]") for each in chosen)


def _reservoir(run: StoredRun, selection: Selection, count: int, seed: int) -> list[Glance]:
    """Draw ``count`` matching trajectories in one pass (algorithm R)."""
    draws = random.Random(seed)
    kept: list[Glance] = []
    for number, glance in enumerate(_matching(run, selection)):
        if number < count:
            kept.append(glance)
        elif (place := draws.randrange(number + 1)) < count:
            kept[place] = glance
    return kept


def _matching(run: StoredRun, selection: Selection) -> Iterator[Glance]:
    return (glance for _, members in run.glances(selection) for glance in members if selection.matches(glance))


def use_of(group: StoredGroup) -> str:
    """Describe the state of a group: ``consumed by step 4``, ``dropped by step 4: surplus``, ``ready``."""
    if group.used_by is None:
        return group.state
    return f"{group.state} by step {group.used_by}" + (f": {group.reason}" if group.reason else "")


def context_of(turns: Sequence[Turn], number: int) -> str | None:
    """Describe a turn's predecessor if it is not the previous turn, i.e. after a rewritten context; None otherwise."""
    follows = turns[number].follows
    if follows == number - 1:
        return None
    return "begins a new context" if follows < 0 else f"continues turn {follows}"


def rewards_of(members: Sequence[Trajectory], excluded: Mapping[tuple[str, int], str]) -> tuple[float, float] | None:
    """Return mean and unbiased standard deviation of a group's rewards; None if no member has a verdict.

    Args:
        excluded: Members to leave out, from ``Store.journal.excluded``.
    """
    counted = [e for e in members if e.index != GREEDY and (e.group_id, e.index) not in excluded]
    scores = [e.reward.score for e in counted if math.isfinite(e.reward.score)]
    return (mean(scores), stdev(scores) if len(scores) > 1 else 0.0) if scores else None


def _group_text(
    group: StoredGroup, members: list[Trajectory], task: Task | None, excluded: Mapping[tuple[str, int], str]
) -> str:
    head = [
        RULE,
        f"group {group.group_id}  {group.kind}, step {group.at_step}, {use_of(group)}",
        f"task {group.task_id}  {group.data_source}  asked for with weights {group.version}",
    ]
    if len(members) > 1 and (mean_std := rewards_of(members, excluded)) is not None:
        head.append(f"rewards: mean {mean_std[0]:.4g}, std {mean_std[1]:.4g}")
    if task is None:
        return "\n".join([*head, "(the task is no longer in the store)", ""])
    head += [f"ground truth: {clean(_short(task.reward_model.get('ground_truth')))}", ""]
    head += [f"{message['role']}: {clean(_short(message.get('content')))}" for message in task.prompt]
    return "\n".join([*head, ""])


def _trajectory_text(run: StoredRun, each: Trajectory, excluded: str | None, tokens: bool) -> str:
    reward, name = each.reward, "greedy" if each.index == GREEDY else f"[{each.index}]"
    lines = [
        RULE,
        f"{name}  reward {reward.score:.4g} ({reward.status}), {each.end}, {each.response_length} tokens, "
        f"weights {versions_text(each.turns) or '—'}",
    ]
    lines += [] if excluded is None else [f"  not trained: {excluded}"]
    lines += [f"  {part}: {value:.4g}" for part, value in reward.parts.items()]
    lines += [f"  {key}: {clean(_short(value))}" for key, value in each.metadata.items()]
    for number, turn in enumerate(each.turns):
        facts = [f"{len(turn)} tokens"]
        facts += [] if (context := context_of(each.turns, number)) is None else [context]
        facts += [] if turn.finish_reason is None else [turn.finish_reason, f"weights {spans_text(turn)}"]
        facts += [] if turn.reward is None else [f"reward {turn.reward:.4g}"]
        lines += ["", f"({number}) {turn.author}: {', '.join(facts)}"]
        lines.append(clean(run.tokenizer.decode(turn.token_ids, special=turn.author != "model")))
        if tokens and turn.logp is not None:
            lines += [f"    {'log-prob':>9}  {'weights':>8}  {'id':>7}  text"]
            lines += [
                f"    {token.logp:9.4f}  {token.version:>8}  {token.token_id:>7}  {token.text!r}"
                for token in tokens_of(turn, run.tokenizer, STRIP)
            ]
    return "\n".join([*lines, ""])


def _short(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
