"""Tokens of responses with the teacher's term (``algorithm.teacher_tokens``): those of the thought, or of the answer.

A response in the loss, of the model or of an expert row, is a run of tokens in the mask.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch

from megarl.config import Config
from megarl.config.algorithms import DistillConfig
from megarl.core.text import CLOSE, OPEN, as_written, opens_thinking
from megarl.learn.batching import Sequences
from megarl.tasks import ChatTokenizer
from megarl.train.batch.batch import StepBatch
from megarl.train.part import Part
from megarl.train.ranks import TrainState

LONGEST_OPENING = 64
"""Tokens at the end of a prompt that show if it ends inside a thought."""


def teaches_a_part(config: Config) -> bool:
    """True if some tokens of responses have no teacher's term."""
    return isinstance(config.algorithm, DistillConfig) and config.algorithm.teacher_tokens != "all"


class TaughtTokens(Part):
    """Marks the tokens with the teacher's term before the update."""

    def __init__(self, config: Config) -> None:
        self._tokenizer = ChatTokenizer.of(config)
        self._of_thoughts = (
            isinstance(config.algorithm, DistillConfig) and config.algorithm.teacher_tokens == "thinking"
        )

    def before_update(self, state: TrainState, batch: StepBatch) -> None:
        thoughts = in_thoughts(batch.sequences, self._tokenizer)
        batch.taught = thoughts if self._of_thoughts else batch.sequences.mask & ~thoughts


def in_thoughts(sequences: Sequences, tokenizer: ChatTokenizer) -> torch.Tensor:
    """Return bool [T]: positions in the loss whose next token belongs to the thought of its response."""
    found, tokens, mask = torch.zeros_like(sequences.mask), sequences.tokens.numpy(), sequences.mask.numpy()
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    begins = sequences.cu_seqlens.numpy()
    for first, last in edges.tolist():
        begin = int(begins[np.searchsorted(begins, first, side="right") - 1])
        prompt, response = tokens[begin : first + 1], tokens[first + 1 : last + 1]
        found[first : first + thought_length(tokenizer, prompt.tolist(), response.tolist())] = True
    return found


def thought_length(tokenizer: ChatTokenizer, prompt: Sequence[int], response: Sequence[int]) -> int:
    """Return the number of the response's first tokens up to the last mark that closes a thought: 0 without a thought,
    all of them if it opens or continues a thought and closes none."""
    before, text = tokenizer.decode(prompt[-LONGEST_OPENING:], special=True), tokenizer.decode(response)
    closed = text.count(CLOSE)
    if not closed:
        return len(response) if OPEN in as_written(text, opens_thinking(before)) else 0
    return bisect_left(range(len(response)), closed, key=lambda n: tokenizer.decode(response[:n]).count(CLOSE))
