"""Comparison of a batch's sequences with the recorded turns that they were made of, by code of its own.

Shares nothing with ``Trajectory.samples``, ``explore/recording`` and ``tasks/templates/turns.py``, so that a fault
there shows as a difference.

Shape legend: T tokens of a sequence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import numpy as np

from megarl.core.errors import DataError
from megarl.core.schema import JUDGED, Task, Trajectory, Turn, text_digest
from megarl.tasks import ChatTokenizer

MARK, ANSWER = "7c9e12ab", "4d51f0b8"
"""Contents that no chat template writes by itself."""
EXACT = ("single_turn", "reflect", "best_of_n", "tools")
"""Workflows whose first turn is the task's prompt, without an observation."""
ROLES = ("user", "tool")
"""Roles of messages between responses."""


class Line(NamedTuple):
    """A sequence as the recorded turns give it."""

    tokens: np.ndarray
    """int32 [T]"""
    mask: np.ndarray
    """bool [T]: tokens in the loss."""
    logp: np.ndarray
    """float32 [T]: the engine's log-probs; 0 outside the loss."""


def lines_of(turns: Sequence[Turn]) -> Iterator[Line]:
    """Yield the sequences of a trajectory: each ends at a turn of the model that nothing follows; the loss has each
    turn of the model once."""
    followed, trained = {turn.follows for turn in turns}, set[int]()
    for last in range(len(turns)):
        line = [] if last in followed else [last]
        while line and turns[line[0]].follows >= 0:
            line.insert(0, turns[line[0]].follows)
        while line and (turns[line[-1]].author != "model" or line[-1] in trained):
            line.pop()
        if not line:
            continue
        new = [turns[i].author == "model" and i not in trained for i in line]
        trained |= set(line)
        own = [turns[i] for i in line]
        logp = [t.logp if n and t.logp is not None else np.zeros(len(t)) for t, n in zip(own, new, strict=True)]
        mask = [np.full(len(turn), n) for turn, n in zip(own, new, strict=True)]
        yield Line(np.concatenate([t.token_ids for t in own]), np.concatenate(mask), np.concatenate(logp))


def difference(line: Line, tokens: np.ndarray, mask: np.ndarray, logp: np.ndarray | None) -> tuple[str, str] | None:
    """Return (alarm, text) of the first difference of a batch's sequence from a recorded line; None if they are equal.

    Args:
        mask: bool [T]: position i has the token after it; ``logp``, float32 [T], likewise.
    """
    if not np.array_equal(line.tokens, tokens):
        return "tokens", f"its {len(tokens)} tokens are not the {len(line.tokens)} that its turns have"
    wanted = np.append(line.mask[1:], False)
    if (places := np.flatnonzero(wanted != mask)).size:
        more = int(np.count_nonzero(mask & ~wanted))
        text = f"{more} tokens in the loss were not sampled for it, {places.size - more} that were are not in the loss"
        return "mask", f"{text} (the first is token {int(places[0]) + 2} of {len(tokens)})"
    if logp is not None and (places := np.flatnonzero(mask & (np.append(line.logp[1:], 0.0) != logp))).size:
        return "log-probs", f"{places.size} log-probs of the engine are not those of its tokens"
    return None


def _unnumbered(text: str) -> str:
    """Return a text with equal digits: templates write numbers of calls."""
    return re.sub(r"\d", "0", text)


class Templates:
    """Compares recorded turns with the text that the chat template makes of messages.

    Args:
        workflow: ``rollout.workflow``.
    """

    def __init__(self, tokenizer: ChatTokenizer, workflow: str) -> None:
        self._tokenizer, self._workflow = tokenizer, workflow
        self._around: dict[tuple[str, str], tuple[str, str] | None] = {}
        """(role, template options) -> text before and after a message that follows a response."""

    def difference(self, trajectory: Trajectory, task: Task) -> tuple[str, str] | None:
        """Return (alarm, text) of a turn or a judged text that differs; None if none is known to."""
        turns = trajectory.turns
        judged, response = trajectory.metadata.get(JUDGED), trajectory.response
        if judged is not None and judged != text_digest(self._tokenizer.decode(response.token_ids)):
            return "text", "the text that was judged is not the text of its last response's tokens"
        if self._workflow not in (*EXACT, "environment") or any(turn.images for turn in turns):
            return None
        if (text := self._prompt(turns[0], task)) is not None:
            return "template", text
        for i, turn in enumerate(turns):
            before = turns[turn.follows] if turn.follows >= 0 else None
            if before is not None and before.author == "model" and not self._fits(before, turn, task):
                return "template", f"turn {i + 1} (of the {turn.author}) does not begin or end as the template writes"
        return None

    def _prompt(self, turn: Turn, task: Task) -> str | None:
        messages = [dict(message) for message in task.prompt]
        ids = self._tokenizer.rendered_ids(self._tokenizer.render(messages, task.chat_template_kwargs))
        if np.array_equal(ids, turn.token_ids):
            return None
        if self._workflow == "environment":  # an observation is part of the last message
            if messages[-1]["role"] == "user":
                messages[-1]["content"] += MARK
            else:
                messages.append({"role": "user", "content": MARK})
            before, _, after = self._tokenizer.render(messages, task.chat_template_kwargs).partition(MARK)
            text = self._tokenizer.decode(turn.token_ids, special=True)
            if text.startswith(before) and text.endswith(after):
                return None
        return f"its prompt has {len(turn)} tokens that differ from the {len(ids)} that the template makes of its row"

    def _fits(self, before: Turn, turn: Turn, task: Task) -> bool:
        """Return True if a message after a response begins and ends as the template writes it in some role; also if
        the response has not ended, or the template writes no such message."""
        ended = int(before.token_ids[-1])
        if ended not in self._tokenizer.eos_ids:
            return True
        suffix = self._tokenizer.rendered_ids(self._tokenizer.suffix)
        written = next((i + 1 for i, token in enumerate(suffix) if token in self._tokenizer.eos_ids), 0)
        end, text = self._tokenizer.token(ended) or "", self._tokenizer.decode([ended, *turn.token_ids], special=True)
        known = [around for role in ROLES if (around := self._decoration(role, task.chat_template_kwargs)) is not None]
        for first, last in known:
            # The token that ended the response replaces the template's, or is the message's own first token.
            ids = self._tokenizer.rendered_ids(first)[written:]
            heads = [end + self._tokenizer.decode(ids, special=True), *([] if written else [first])]
            heads, tail = [_unnumbered(head) for head in heads], _unnumbered(last)
            if _unnumbered(text).startswith(tuple(heads)) and _unnumbered(text).endswith(tail):
                return True
        return not known

    def _decoration(self, role: str, options: Mapping[str, Any]) -> tuple[str, str] | None:
        key = role, repr(options)
        if key not in self._around:
            message = {"role": role, "content": MARK} | ({"tool_call_id": "c00000000"} if role == "tool" else {})
            chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWER}, message]
            try:
                text = self._tokenizer.render(chat, options).partition(ANSWER)[2]
            except (DataError, jinja2.TemplateError):
                text = ""
            first, mark, last = text.partition(MARK)
            self._around[key] = (first, last) if mark else None
        return self._around[key]
