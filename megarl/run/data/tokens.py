"""Tokens of a turn as pieces of text, each with its log-prob and weights version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megarl.core.schema import Turn
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
