"""Published chat templates, rendered by megarl and by transformers' ``apply_chat_template``.

``python -m tests.chat_battery docs/chat_templates.md`` compares all cells and writes the table;
``test_chat_templates.py`` asks that the page is what this writes, and that no cell differs.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from megarl.core.errors import DataError
from megarl.tasks import ChatTokenizer

FOLDER = Path(__file__).parent / "data" / "chat_templates"
SPECIAL = re.compile(
    r"<\|\w+\|>|<｜[^｜]+｜>|\[\|\w+\|\]|\[/?[A-Z_]{3,}\]|</?s>|<bos>|"
    r"<eos>|<(?:start|end)_of_turn>|</?think>|\[gMASK\]|<sop>"
)


@dataclass(frozen=True)
class Published:
    """A template and the special tokens of the checkpoints that ship it."""

    models: str
    bos: str | None
    eos: str
    """tokenizer_config.json's eos_token."""
    ends: tuple[str, ...]
    """generation_config.json's eos_token_id."""
    end: str
    """The token that ends demonstrations."""


DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ("<｜end▁of▁sentence｜>",), "<｜end▁of▁sentence｜>")
LLAMA = ("<|begin_of_text|>", "<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), "<|eot_id|>")
QWEN = (None, "<|im_end|>", ("<|endoftext|>", "<|im_end|>"), "<|im_end|>")
TEMPLATES = {
    "chatml": Published("ChatML", *QWEN),
    "cohere2": Published(
        "Tiny Aya (Cohere 2)",
        "<BOS_TOKEN>",
        "<|END_OF_TURN_TOKEN|>",
        ("<|END_OF_TURN_TOKEN|>",),
        "<|END_OF_TURN_TOKEN|>",
    ),
    "deepseek_r1_distill": Published("DeepSeek-R1-Distill", *DEEPSEEK),
    "deepseek_v2": Published("DeepSeek-V2.5", *DEEPSEEK),
    "deepseekv3": Published("DeepSeek-V3", *DEEPSEEK),
    "exaone4": Published("EXAONE 4.0", "[BOS]", "[|endofturn|]", ("[|endofturn|]",), "[|endofturn|]"),
    "gemma": Published("Gemma, Gemma 2", "<bos>", "<eos>", ("<eos>", "<end_of_turn>"), "<end_of_turn>"),
    "gemma3": Published("Gemma 3", "<bos>", "<eos>", ("<eos>", "<end_of_turn>"), "<end_of_turn>"),
    "glm4moe": Published(
        "GLM-4.5", None, "<|endoftext|>", ("<|endoftext|>", "<|user|>", "<|observation|>"), "<|endoftext|>"
    ),
    "gptoss": Published(
        "gpt-oss", "<|startoftext|>", "<|return|>", ("<|return|>", "<|endoftext|>", "<|call|>"), "<|return|>"
    ),
    "lfm2_2_5": Published("LFM2.5", "<|startoftext|>", "<|im_end|>", ("<|im_end|>",), "<|im_end|>"),
    "llama3": Published(
        "Llama 3 Instruct", "<|begin_of_text|>", "<|end_of_text|>", ("<|end_of_text|>", "<|eot_id|>"), "<|eot_id|>"
    ),
    "llama3_1": Published("Llama 3.1 Instruct", *LLAMA),
    "llama3_2": Published("Llama 3.2 Instruct", *LLAMA),
    "mistral_v2v3": Published("Mistral 7B Instruct v0.3", "<s>", "</s>", ("</s>",), "</s>"),
    "mistral_v7_tekken": Published("Mistral Small 3", "<s>", "</s>", ("</s>",), "</s>"),
    "phi3": Published("Phi-3", "<s>", "<|endoftext|>", ("<|endoftext|>", "<|assistant|>", "<|end|>"), "<|end|>"),
    "phi_4": Published("Phi-4-reasoning", "<|endoftext|>", "<|im_end|>", ("<|im_end|>",), "<|im_end|>"),
    "qwen2_5": Published("Qwen2.5 Instruct", *QWEN),
    "qwen3": Published("Qwen3", *QWEN),
    "qwen3_instruct_2507": Published("Qwen3 Instruct 2507", *QWEN),
    "qwen3_training": Published("Qwen3, TRL's own with {% generation %}", *QWEN),
}

DAY = date(2024, 2, 29)
USER, SYSTEM = (
    {"role": "user", "content": "Wie viel ist 12 + 3?\n"},
    {"role": "system", "content": "Be brief; say «so»."},
)
ANSWER = {"role": "assistant", "content": "It is 15."}
THOUGHT = {**ANSWER, "reasoning_content": "12 and 3 are 15."}
FIELD = {"gptoss": "thinking", "lfm2_2_5": "thinking"}
"""What templates call a thought that do not call it reasoning_content."""
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": "<3>"}}}
    ],
}
WORDS = {**CALL, "content": ""}
"""The same with an empty text, which some templates ask for where others ask for null."""
RESULT = {"role": "tool", "content": "15", "name": "add", "tool_call_id": "call00001"}
SECOND = {"id": "call00002", "type": "function", "function": {"name": "add", "arguments": {"a": 15, "b": "é"}}}
CALLS = {**WORDS, "tool_calls": [*CALL["tool_calls"], SECOND]}
SECOND_RESULT = {**RESULT, "content": "16", "tool_call_id": "call00002"}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "description": "a number"}, "b": {"type": "string", "enum": ["é", "<3>"]}},
    "required": ["a"],
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds <two> numbers.", "parameters": PARAMETERS}}
]
NEXT = {"role": "user", "content": "And 1 more?"}


@dataclass(frozen=True)
class Case:
    messages: tuple[dict[str, Any], ...]
    kwargs: Mapping[str, Any]


CASES = {
    "user": Case((USER,), {}),
    "system": Case((SYSTEM, USER), {}),
    "developer": Case(({**SYSTEM, "role": "developer"}, USER), {}),
    "turns": Case((SYSTEM, USER, ANSWER, NEXT), {}),
    "tools": Case((SYSTEM, USER), {"tools": TOOLS}),
    "tool result": Case((USER, CALL, RESULT), {"tools": TOOLS}),
    "tool result, text": Case((USER, WORDS, RESULT), {"tools": TOOLS}),
    "two tool calls": Case((USER, CALLS, RESULT, SECOND_RESULT), {"tools": TOOLS}),
    "thought before": Case((USER, THOUGHT, NEXT), {}),
    "enable_thinking": Case((SYSTEM, USER), {"enable_thinking": False}),
    "answer": Case((SYSTEM, USER, ANSWER), {}),
    "answer to turns": Case((USER, ANSWER, NEXT, ANSWER), {}),
    "answer, no thought": Case((USER, ANSWER), {"enable_thinking": False}),
    "answer, thought": Case((USER, THOUGHT), {}),
    "answer, tool call": Case((USER, CALL), {"tools": TOOLS}),
    "answer, tool call, text": Case((USER, WORDS), {"tools": TOOLS}),
    "answer to tool": Case((USER, CALL, RESULT, THOUGHT), {"tools": TOOLS}),
}
EQUAL, REFUSED, UNSEEN, OTHER_PROMPT, DROPPED = "equal", "refused", "unseen", "other prompt", "dropped"
MEANING = {
    "does not look at": UNSEEN,
    "in another way once the answer follows": OTHER_PROMPT,
    "drops or truncates": DROPPED,
    "leaves out": DROPPED,
}
"""What megarl refuses where transformers renders, by words of the message."""
CELLS = (REFUSED, *MEANING.values())


def checkpoint(folder: Path, name: str) -> Path:
    """The small files of a checkpoint with this template: a byte-level tokenizer with the family's special tokens."""
    found = TEMPLATES[name]
    source = (FOLDER / f"{name}.jinja").read_text()
    special = dict.fromkeys(
        [found.eos, *found.ends, found.end, *SPECIAL.findall(source), *([found.bos] if found.bos else [])]
    )
    tokenizer = Tokenizer.from_str(_bytes_tokenizer())
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": found.eos, "pad_token": found.eos}
    config |= {"bos_token": found.bos} if found.bos else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [tokenizer.token_to_id(end) for end in found.ends]})
    )
    (folder / "chat_template.jinja").write_text(source)
    return folder


@cache
def _bytes_tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [message["content"] or "" for case in CASES.values() for message in case.messages]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return str(tokenizer.to_str())


def in_words_of(name: str, messages: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    """The messages with a thought under the template's own name for it."""
    field = FIELD.get(name, "reasoning_content")
    return [
        {field if key == "reasoning_content" else key: value for key, value in message.items()} for message in messages
    ]


def outcome(reference: Any, tokenizer: ChatTokenizer, name: str, case: Case) -> str:
    """How the two compare. Raises AssertionError where they differ."""
    messages, kwargs = in_words_of(name, case.messages), dict(case.kwargs)
    answered = messages[-1]["role"] == "assistant"
    whole = _expected(reference, messages, kwargs, answered)
    prompt = _expected(reference, messages[:-1], kwargs, False) if answered else whole
    try:
        found = _found(tokenizer, messages, kwargs, answered)
    except DataError as error:
        if whole is None or prompt is None:
            return REFUSED
        return next((meaning for words, meaning in MEANING.items() if words in str(error)), f"refused: {error}")
    assert whole is not None and prompt is not None, f"{name}: transformers refuses what megarl renders"
    text, ids, answer = found
    assert text == prompt[0] and ids == prompt[1], f"{name}: another prompt: {text!r} is not {prompt[0]!r}"
    if answered:
        end = next((i for i in range(len(ids), len(whole[1])) if whole[1][i] in tokenizer.eos_ids), len(whole[1]))
        assert ids + answer[:-1] == whole[1][:end] and answer[-1] in tokenizer.eos_ids, f"{name}: another answer"
    return EQUAL


def _expected(
    reference: Any, messages: list[dict[str, Any]], kwargs: dict[str, Any], answered: bool
) -> tuple[str, list[int]] | None:
    """transformers' text and ids; None where the template fails, with whatever error."""
    options = {**kwargs, "add_generation_prompt": not answered}
    try:
        text = reference.apply_chat_template(messages, tokenize=False, **options)
        return text, reference.apply_chat_template(messages, return_dict=False, **options)
    except Exception:
        return None


def _found(
    tokenizer: ChatTokenizer, messages: list[dict[str, Any]], kwargs: dict[str, Any], answered: bool
) -> tuple[str, list[int], list[int]]:
    prompt = messages[:-1] if answered else messages
    text, ids = tokenizer.render(prompt, kwargs), tokenizer.prompt_ids(prompt, kwargs).tolist()
    return text, ids, tokenizer.answer_ids(prompt, messages[-1], kwargs).tolist() if answered else []


class _Clock(datetime):
    """What transformers takes for the present."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime(DAY.year, DAY.month, DAY.day)


@cache
def outcomes(name: str) -> dict[str, str]:
    """Case -> outcome."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder, patch("transformers.utils.chat_template_utils.datetime", _Clock):
        path = checkpoint(Path(folder), name)
        reference = AutoTokenizer.from_pretrained(path)
        tokenizer = ChatTokenizer.open(path, day=DAY)
        return {case: outcome(reference, tokenizer, name, CASES[case]) for case in CASES}


HEAD = """# Chat templates
This page lists how megarl renders published chat templates, compared with transformers' `apply_chat_template`.
```bash
python -m tests.chat_battery docs/chat_templates.md  # writes this page; a test fails when it differs
```
Texts and token ids are compared, up to the end token if the last message is an answer. An entry names a template's
models, the template and its end token, then lists by outcome the cases that are not equal. Templates, with source and
licence: `tests/data/chat_templates/`. Rules for rows: [offline.md](offline.md#messages-and-templates).

- equal: megarl and transformers give the same text and ids
- refused: the template itself refuses the conversation, so both megarl and transformers raise an error
- unseen: megarl refuses a field that the template ignores; transformers drops it silently
- dropped: megarl refuses, because the template leaves out a message, a call or a part of the answer
- other prompt: megarl refuses, because the template renders another prompt before the answer than for sampling

{cases}
*thoughts* stands for *thought before*, *enable_thinking*, *answer, no thought* and *answer, thought* together.

"""
THOUGHTS = ("thought before", "enable_thinking", "answer, no thought", "answer, thought")
"""Cases that the page lists as one where they have one outcome."""


def table(results: Mapping[str, Mapping[str, str]]) -> str:
    """The page."""
    lines = []
    for name, given in results.items():
        cells = dict(given)
        if len({cells[case] for case in THOUGHTS}) == 1:
            cells["thoughts"] = [cells.pop(case) for case in THOUGHTS][0]
        outcomes = {cell: ", ".join(f"*{case}*" for case in cells if cells[case] == cell) for cell in cells.values()}
        outcomes.pop("equal", None)
        found = "; ".join(f"{cell}: {cases}" for cell, cases in sorted(outcomes.items()))
        text = f"- **{TEMPLATES[name].models}** (`{name}`, `{TEMPLATES[name].end}`). {found}."
        lines += textwrap.wrap(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    cases = "\n".join(textwrap.wrap(f"Cases: {', '.join(f'*{case}*' for case in CASES)}.", 120))
    return HEAD.replace("{cases}", cases) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(table({name: outcomes(name) for name in TEMPLATES}))
