"""Tokens of a thought in rows made by hand, for the marks of several model families."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.algorithms import DistillConfig
from megarl.config.schema import Config, ModelConfig
from megarl.learn.batching import Sequences
from megarl.train.parts.taught_tokens import TaughtTokens
from megarl.train.ranks import TrainState
from tests.unit.test_thoughts import FINAL, HARMONY, with_special

Piece = tuple[str, bool]
"""A text after the prompt, and True if it is in the loss."""
THINK = ("qwen2_5", ["<think>", "</think>"])
ROWS: dict[str, tuple[tuple[str, list[str]], str, list[Piece], str]] = {
    "a thought and an answer": (THINK, "user\n", [("<think>a b</think>\n\nc d<|im_end|>", True)], "<think>a b</think>"),
    "none": (THINK, "<think>old</think> say <think> or not\n", [("c d<|im_end|>", True)], ""),
    "opened by the prompt": (THINK, "user\n<think>\n", [("a b</think>c", True)], "a b</think>"),
    "truncated": (THINK, "user\n<think>\n", [("a b", True)], "a b"),
    "truncated, opened by itself": (THINK, "user\n", [("<think>a b", True)], "<think>a b"),
    "closed twice": (THINK, "user\n", [("<think>a</think>b</think>c", True)], "<think>a</think>b</think>"),
    "two turns and a tool": (
        THINK,
        "user\n",
        [("<think>a</think>call", True), ("<tool>x</think>y</tool>\n", False), ("<think>b</think>c", True)],
        "<think>a</think><think>b</think>",
    ),
    "a turn without a thought": (
        THINK,
        "user\n",
        [("<think>a</think>call", True), ("tool\n", False), ("c", True)],
        "<think>a</think>",
    ),
    "marks of several tokens": (("qwen2_5", []), "user\n", [("<think>a</think>c", True)], "<think>a</think>"),
    "harmony": (
        ("gptoss", ["<|constrain|>"]),
        "<|start|>assistant",
        [(HARMONY.format("a") + FINAL.format("c"), True)],
        "<|channel|>analysis<|message|>a<|end|>",
    ),
    "seed": (
        ("qwen2_5", ["<seed:think>", "</seed:think>"]),
        "user\n",
        [("<seed:think>a</seed:think>c", True)],
        "<seed:think>a</seed:think>",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_thoughts_of_responses(tmp_path: Path, name: str) -> None:
    (kind, special), prompt, pieces, wanted = ROWS[name]
    tokenizer = with_special(tmp_path, kind, special)
    ids = [tokenizer.rendered_ids(text) for text in (prompt, *(text for text, _ in pieces))]
    kept = np.repeat([False, *(in_loss for _, in_loss in pieces)], [len(part) for part in ids])
    row = torch.from_numpy(np.concatenate(ids))
    mask = torch.roll(torch.from_numpy(kept), -1)  # a position is that of the token before
    sequences = Sequences(row.repeat(2), torch.tensor([len(row)] * 2), mask.repeat(2))
    found = {}
    for part in ("thinking", "answer"):
        settings: Any = DistillConfig(name="distill", teacher_tokens=part)
        batch: Any = SimpleNamespace(sequences=sequences, taught=None)
        TaughtTokens(Config(model=ModelConfig(path=str(tmp_path / kind)), algorithm=settings)).before_update(
            TrainState("rl"), batch
        )
        found[part] = batch.taught
    assert torch.equal(found["thinking"] ^ found["answer"], sequences.mask)
    shown = torch.roll(found["thinking"], 1)
    text = tokenizer.decode(sequences.tokens[shown].tolist(), special=True)
    assert text == wanted * 2
