"""A group, a trajectory or a verdict as text for the terminal.

Verifiers run in a reward worker process, with its limits, since responses are untrusted.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from megarl.buffer.store import Glance, Selection, StoredGroup
from megarl.buffer.store.tables import SAMPLED
from megarl.config.rewards import RewardConfig
from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import GREEDY, Task, Trajectory, Turn
from megarl.rewards.pool.process import LocalRewardProcess, Worker, WorkerError, WorkerSpent
from megarl.rewards.routes import JUDGE, check_row, imports_of, route
from megarl.rewards.verdict import LATE
from megarl.run.data.open_run import StoredRun
from megarl.run.report.text import clean
from megarl.tasks import ChatTokenizer, text_of_tokens
from megarl.tasks.row_files import place_of
from megarl.tasks.rows import read_rows


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


MAX_SHOWN = 300
"""Maximum characters of a printed text."""


async def explanations(path: Path, config: RewardConfig) -> AsyncIterator[str]:
    """Yield one block of text for each row of a parquet or jsonl file with verl's columns and ``response``.

    Raises:
        DataError: the file or a row cannot be used; the message names file, row, field and fix. All rows are checked
            before the first verdict.
        ConfigError: ``reward.path`` is set.
    """
    if config.path is not None:
        raise ConfigError(f"reward.path={config.path}: only megarl's own verifiers explain a verdict; leave it out")
    tasks = read_rows(path)
    families = [_family(task, place_of(path, number), config) for number, task in enumerate(tasks)]
    worker = Worker(config, LocalRewardProcess(None, imports_of({task.data_source for task in tasks}, config.routes)))
    try:
        for number, (task, family) in enumerate(zip(tasks, families, strict=True)):
            lines = [("verifier", f"{family} (data_source {shown(task.data_source)})"), *await _explained(task, worker)]
            yield "\n".join([place_of(path, number), *(f"  {name:<9} {text}" for name, text in lines)]) + "\n"
    finally:
        await worker.kill()


def _family(task: Task, place: str, config: RewardConfig) -> str:
    """Return the row's verifier. Raises DataError if there is none, or if it cannot judge the row."""
    if not task.response:
        raise DataError(f"{place}: response must be the text to judge, got {task.response!r}; add it to the row")
    try:
        family, _ = route(task.data_source, config.routes)
        check_row(task.data_source, task.reward_model["ground_truth"], task.extra_info, config)
    except DataError as error:
        raise DataError(f"{place}: {error}") from error
    if family in (JUDGE, LATE):
        raise DataError(
            f"{place}: data_source {task.data_source!r} belongs to the family {family}, whose rewards no program here "
            "computes; leave the row out, or send it to a verifier by reward.routes"
        )
    return family


async def _explained(task: Task, worker: Worker) -> list[tuple[str, str]]:
    """Return (name, text) of each line about one row."""
    request = {
        "data_source": task.data_source,
        "solution_str": task.response,
        "ground_truth": task.reward_model["ground_truth"],
        "extra_info": task.extra_info,
        "question": task.question,
        "in_thinking": False,
    }
    try:
        await worker.ready()
        await worker.prepare(task.data_source)
        reply = await worker.explain(request)
    except WorkerSpent as error:
        return [("verdict", f"wrong, score 0: the response costs too much to judge ({error})")]
    except (WorkerError, TimeoutError) as error:
        return [("verdict", f"error, no score: {shown(str(error))}")]
    return [*_steps(reply["steps"], task.response or ""), ("verdict", _verdict(reply))]


def _steps(steps: Sequence[Sequence[str]], response: str) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for kind, rule, text in steps:
        if kind == "asked":
            line = ("asked for", text)
        elif kind == "read":
            line = ("read", f"{shown(text)} by the form '{rule}'{_place(text, response)}")
        else:
            line = ("compared", f"{shown(text)} by '{rule}'")
        if line not in lines:
            lines.append(line)
    return lines


def _verdict(reply: dict[str, Any]) -> str:
    compared = [(rule, text) for kind, rule, text in reply["steps"] if kind == "compared"]
    reason = reply.get("reason")
    if reason is None and compared:
        reason = f"decided by '{compared[-1][0]}'"
    elif reason is None and reply["status"] == "wrong":
        reason = "no answer was read that could be compared"
    score = "no score" if reply["status"] in ("error", "timeout") else f"score {reply['score']:g}"
    return f"{reply['status']}, {score}" + (f": {shown(reason, quote=False)}" if reason else "")


def _place(text: str, response: str) -> str:
    """Return line and column, from 1, of the text's only whole-word occurrence in the response; "" for several or
    none."""
    found = [match.start() for match in re.finditer(rf"(?<!\w){re.escape(text)}(?!\w)", response)] if text else []
    if len(found) != 1:
        return ""
    line = response.count("\n", 0, found[-1]) + 1
    return f", line {line}, column {found[-1] - response.rfind(chr(10), 0, found[-1])} of the response"


def shown(text: str, quote: bool = True) -> str:
    """Return untrusted text on one line, with control characters escaped for the terminal."""
    text = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
    escaped = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
    return f"`{escaped}`" if quote else escaped
