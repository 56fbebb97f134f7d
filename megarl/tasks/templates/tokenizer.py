"""Convert chat prompts to token ids and back, with the checkpoint's tokenizer.json and chat template.

transformers' AutoTokenizer gives the same ids (tested) but imports torch (3.6 s and 300 MB against 0.05 s here), which
the explorer and the launcher do not need otherwise.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from megarl.config import Config
from megarl.core.durable import read_json
from megarl.core.errors import CheckpointError, ConfigError, DataError
from megarl.core.schema import Message, Preference, Task
from megarl.tasks.image_rows import chat_messages
from megarl.tasks.row_files import place_of
from megarl.tasks.templates.template import IDENTIFIERS, ChatTemplate, Messages, read_template, thought_marks
from megarl.tasks.tools.functions import template_tools

PROCESSOR = ("processor_config.json", "preprocessor_config.json")
"""Configuration files of a multimodal model's processor."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens passed to a template, as in transformers."""
AT_ONCE = 1024
"""Number of texts per encoding batch."""
TAGS = frozenset({"<think>", "</think>", "<answer>", "</answer>"})
"""Tags that verifiers read, although a tokenizer may have them as special tokens."""
LONGEST_CHARACTER = 4
"""Maximum bytes, and so tokens, of a UTF-8 character."""
PROBE = "0f1e2d3c"
"""Probe answer that locates the text which a template writes after answers."""


class ChatTokenizer:
    """The tokenizer and chat template of an HF checkpoint directory."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        eos_ids: tuple[int, ...],
        own_eos: int | None = None,
        multimodal: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        special = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._thoughts = thought_marks(special.values(), template.text)
        self._dropped = frozenset(i for i, token in special.items() if token not in TAGS | self._thoughts.tokens)
        self.kwargs = dict(kwargs or {})
        """Options of the template; a row's own options take precedence."""
        self.eos_ids = eos_ids
        """Tokens that end a response: from generation_config.json, else the tokenizer's end token."""
        self.multimodal = multimodal
        """True if the model has a processor. Some templates then skip content that is a plain text."""
        self.suffix = self._after_answers()
        """Text that the template writes after a response; "" if unknown."""
        written = next((i for i in self.encode(self.suffix).ids if i in eos_ids), None)
        self.end_id: int = next(i for i in (written, own_eos, eos_ids[0]) if i in eos_ids)
        """Token that ends demonstrations: the template's token after an answer if sampling stops at it, else the
        tokenizer's eos_token, else the first of ``eos_ids``."""
        self.ends_otherwise: str | None = self.suffix.strip() or None if written is None else None
        """Text that the template writes after an answer if sampling does not stop at it; else None."""

    @classmethod
    def of(cls, config: Config) -> ChatTokenizer:
        """Open the tokenizer of ``model.path``, with the template options of ``taskset`` and the tools of
        ``rollout.tools``. Raises as :meth:`open`, and ConfigError."""
        taskset = config.taskset
        try:
            day = None if taskset.date is None else date.fromisoformat(taskset.date)
        except ValueError as error:
            raise ConfigError(
                f"taskset.date={taskset.date} is not a date; write it as 2025-01-31, or leave it out"
            ) from error
        kwargs = {**taskset.chat_template_kwargs, **template_tools(config.rollout)}
        return cls.open(config.model.path, kwargs, day)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], kwargs: Mapping[str, Any] | None = None, day: date | None = None
    ) -> ChatTokenizer:
        """Read tokenizer.json, the chat template and the end tokens. ``kwargs``: template options, overridden by a
        row's. ``day``: date for templates that write one. Raises CheckpointError naming a missing or damaged file."""
        folder = Path(path)
        tokenizer = read_tokenizer(folder / "tokenizer.json")
        config = read_json(folder / "tokenizer_config.json")
        variables = {name: _content(config[name]) for name in SPECIAL_TOKENS if config.get(name) is not None}
        template = read_template(folder, config, variables, day)
        own = tokenizer.token_to_id(variables["eos_token"]) if "eos_token" in variables else None
        ends = read_json(folder / "generation_config.json").get("eos_token_id")
        ends = own if ends is None else ends
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not ends:
            raise CheckpointError(
                f"{folder}: no end-of-sequence token in generation_config.json or tokenizer_config.json"
            )
        multimodal = any((folder / name).is_file() for name in PROCESSOR)
        return cls(tokenizer, template, tuple(ends), own, multimodal, kwargs)

    @property
    def template(self) -> str:
        """Source of the chat template."""
        return self._template.text

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def largest_id(self) -> int:
        """Largest token id, added tokens included."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def token(self, number: int) -> str | None:
        """Text of a token by its id."""
        return self._tokenizer.id_to_token(number)

    def render(self, messages: Messages, kwargs: Mapping[str, Any] | None = None, *, answered: bool = False) -> str:
        """Return the text of a conversation up to the start of the model's answer.

        Args:
            kwargs: Template options of the row.
            answered: The last message is the model's answer, and no further answer begins.
        """
        if self.multimodal:
            messages = [
                {name: _as_parts(value) if name == "content" else value for name, value in message.items()}
                for message in messages
            ]
        return self._template.render(messages, {**self.kwargs, **(kwargs or {})}, answered=answered)

    def prompt_ids(self, messages: Messages, kwargs: Mapping[str, Any] | None = None) -> np.ndarray:
        """Return int32 [P]: ids of the prompt rendered by :meth:`render`."""
        return self.rendered_ids(self.render(messages, kwargs))

    def rendered_ids(self, text: str) -> np.ndarray:
        """Return int32 [P]: ids of a rendered prompt. The template writes the special tokens, so none are added."""
        return _array(self.encode(text).ids)

    def response_ids(self, text: str) -> np.ndarray:
        """Return int32 [R]: ids of a demonstration's text with the end-of-sequence token."""
        return self.encode_responses([text])[0]

    def answer_ids(self, messages: Messages, answer: Message, kwargs: Mapping[str, Any] | None = None) -> np.ndarray:
        """Return int32 [R]: ids of an answer rendered after the prompt, up to its end-of-sequence token.

        Raises DataError if the template drops a part of the answer or changes the prompt before it.
        """
        rendered = self.render_answer(messages, answer, kwargs)
        return self.truncate_answer(answer, rendered, list(self.encode_texts(rendered)))

    def render_answer(
        self, messages: Messages, answer: Message, kwargs: Mapping[str, Any] | None = None
    ) -> tuple[str, str]:
        """Return (prompt's text, conversation's text beginning with it). Raises as :meth:`answer_ids`."""
        prompt, whole = self.render(messages, kwargs), self.render([*messages, answer], kwargs, answered=True)
        if not whole.startswith(prompt):
            raise DataError(
                "the model's chat template renders the prompt in another way once the answer follows (such as without "
                "a thought that the prompt opens); give the answer as a text, in response or completion, exactly as "
                "the model should write it"
            )
        return prompt, whole

    def truncate_answer(self, answer: Message, rendered: tuple[str, str], encodings: Sequence[Encoding]) -> np.ndarray:
        """Return the tokens after the prompt in the ``rendered`` texts, given their ``encodings``. Raises as
        :meth:`answer_ids`."""
        (prompt, whole), (start, encoding) = rendered, encodings
        text = whole[len(prompt) :]
        ids, ends = self._following(prompt, whole, start, encoding)
        last = next((i for i, token in enumerate(ids) if token in self.eos_ids), None)
        if last is not None:
            ids, text = ids[: last + 1], text[: ends[last]]
        elif text.endswith(self.suffix):
            text = text[: len(text) - len(self.suffix)]
            ids = [*self._following(prompt, prompt + text, start, self.encode(prompt + text))[0], self.end_id]
        else:
            raise DataError(
                f"the model's chat template ends the answer with none of the end tokens {list(self.eos_ids)}: "
                f"{text[-40:]!r}"
            )
        if (lost := next((piece for piece in _pieces(answer) if piece not in text), None)) is not None:
            raise DataError(
                f"the model's chat template drops or truncates a part of the answer: {lost[:60]!r}; give the answer as "
                "a text, in response or completion, exactly as the model should write it"
            )
        return _array(ids)

    def encode_texts(self, texts: Sequence[str]) -> Iterator[Encoding]:
        """Encode rendered texts on all cores, ``AT_ONCE`` per batch, since encodings are much larger than ids."""
        for first in range(0, len(texts), AT_ONCE):
            yield from self._tokenizer.encode_batch(texts[first : first + AT_ONCE], add_special_tokens=False)

    def encode_responses(self, texts: Iterable[str]) -> list[np.ndarray]:
        """Return :meth:`response_ids` of many texts in one call."""
        return [_array([*encoding.ids, self.end_id]) for encoding in self.encode_texts(list(texts))]

    def encode_prompts(
        self, prompts: Iterable[Messages], kwargs: Iterable[Mapping[str, Any]] | None = None
    ) -> list[np.ndarray]:
        """Return :meth:`prompt_ids` of many prompts in one call, each with its ``kwargs``."""
        found = list(prompts)
        options = [{} for _ in found] if kwargs is None else kwargs
        texts = [self.render(messages, given) for messages, given in zip(found, options, strict=True)]
        return [_array(encoding.ids) for encoding in self.encode_texts(texts)]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of tokens.

        Args:
            special: Keep all special tokens. Otherwise return a response's text: thoughts between ``<think>`` and
                ``</think>``, and no other special tokens than ``TAGS``.
        """
        if special:
            return self._tokenizer.decode(list(map(int, ids)), skip_special_tokens=False)
        kept = [i for i in map(int, ids) if i not in self._dropped]
        return self._thoughts.common(self._tokenizer.decode(kept, skip_special_tokens=False))

    def with_calls(self, ids: Iterable[int]) -> str:
        """Return a response's text with its special tokens, as tool call formats need them; thoughts as in
        :meth:`decode`."""
        return self._thoughts.common(self.decode(ids, special=True))

    def encode(self, text: str) -> Encoding:
        """Return the ids of a text and the position of each in it; no special token is added."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _following(self, prompt: str, whole: str, start: Encoding, encoding: Encoding) -> tuple[list[int], list[int]]:
        """Return (ids after the prompt's ids, end of each after the prompt); ``whole`` begins with ``prompt``."""
        count = len(start.ids)
        if encoding.ids[:count] == start.ids:
            return encoding.ids[count:], [end - len(prompt) for _, end in encoding.offsets[count:]]
        encoding = self.encode(
            whole[len(prompt) :]
        )  # if a token crosses the border: sampling begins after the prompt's ids
        return encoding.ids, [end for _, end in encoding.offsets]

    def _after_answers(self) -> str:
        """Return the text that the template writes after an answer; "" if it refuses a minimal conversation."""
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}]
        try:
            return self.render(chat, None, answered=True).rpartition(PROBE)[2]
        except DataError:
            return ""


def tokenizer_digest(model: Path) -> str:
    """Return the digest of a model's tokenizer.json: log-probs are valid only for its tokens."""
    return hashlib.blake2b((model / "tokenizer.json").read_bytes(), digest_size=8).hexdigest()


def text_of_tokens(tokenizer: ChatTokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token, including special tokens. A character of several tokens is assigned to the last of
    them, the others get "". Invalid bytes become ``�``."""
    pieces, start, read = list[str](), 0, 0
    for end in range(1, len(ids) + 1):
        before, text = (tokenizer.decode(ids[start:stop], special=True) for stop in (read, end))
        whole = not text.endswith("�") or end - read == LONGEST_CHARACTER or end == len(ids)
        pieces.append(text[len(os.path.commonprefix([before, text])) :] if whole else "")
        if whole:
            start, read = read, end
    return pieces


def read_tokenizer(file: Path) -> Tokenizer:
    """Read tokenizer.json without the truncation and padding that a padded call before saving left in it, as
    transformers does. Raises CheckpointError if it is missing or damaged."""
    if not file.is_file():
        raise CheckpointError(
            f"{file.parent}: tokenizer.json is missing; model.path must be an HF checkpoint with a fast tokenizer"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no narrower class
        raise CheckpointError(f"{file} cannot be read ({error}); copy the checkpoint again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _array(ids: Sequence[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Row = Task | Preference
Place = str | os.PathLike[str] | Callable[[Row], str]
"""File that has all rows in order, or a function that returns the location of a row."""


def check_prompts(tasks: Sequence[Row], tokenizer: ChatTokenizer, limit: int, *, path: Place | None = None) -> None:
    """Raise DataError naming file, row, length and limit if a prompt has more than ``limit`` tokens.

    ``tasks`` are all rows of ``path`` in order (for the message).
    """
    for row, ids in enumerate(encode_rows(tasks, tokenizer, path=path)):
        if len(ids) > limit:
            raise DataError(
                f"{where(tasks, row, path)}: prompt has {len(ids)} tokens, rollout.max_prompt_tokens is {limit}; "
                "raise it or drop the row"
            )


def encode_rows(tasks: Sequence[Row], tokenizer: ChatTokenizer, *, path: Place | None = None) -> list[np.ndarray]:
    """Return the ids of each row's prompt. Raises DataError naming file and row if the template refuses a prompt."""
    try:
        return tokenizer.encode_prompts(
            (chat_messages(row) for row in tasks), (row.chat_template_kwargs for row in tasks)
        )
    except DataError:
        for number, row in enumerate(tasks):
            with _named(tasks, number, path):
                tokenizer.render(chat_messages(row), row.chat_template_kwargs)
        raise


def encode_demonstrations(
    tasks: Sequence[Task], tokenizer: ChatTokenizer, *, path: Place | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (prompt ids, response ids with the end token) of each row, int32. Raises as :func:`encode_rows`."""
    answers = [(task.response or "", task.answer) for task in tasks]
    return list(
        zip(encode_rows(tasks, tokenizer, path=path), _encode_answers(tasks, answers, tokenizer, path), strict=True)
    )


def encode_preferences(
    rows: Sequence[Preference], tokenizer: ChatTokenizer, *, path: Place | None = None
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return (prompt, chosen, rejected) ids of each row, int32, answers with the end token. Raises as
    :func:`encode_rows`."""
    chosen = _encode_answers(rows, [(row.chosen, row.answers[0]) for row in rows], tokenizer, path)
    rejected = _encode_answers(rows, [(row.rejected, row.answers[1]) for row in rows], tokenizer, path)
    return list(zip(encode_rows(rows, tokenizer, path=path), chosen, rejected, strict=True))


def _encode_answers(
    rows: Sequence[Row], answers: Sequence[tuple[str, Message | None]], tokenizer: ChatTokenizer, path: Place | None
) -> list[np.ndarray]:
    """Return the ids of each row's answer: a text unchanged, a message as the template renders it."""
    found = tokenizer.encode_responses("" if message else text for text, message in answers)
    rendered: dict[int, tuple[str, str]] = {}
    for number, (row, (_, message)) in enumerate(zip(rows, answers, strict=True)):
        if message is not None:
            with _named(rows, number, path):
                rendered[number] = tokenizer.render_answer(chat_messages(row), message, row.chat_template_kwargs)
    encodings = tokenizer.encode_texts([text for texts in rendered.values() for text in texts])
    for number, texts in rendered.items():
        message = answers[number][1]
        assert message is not None, "only messages are rendered"
        with _named(rows, number, path):
            found[number] = tokenizer.truncate_answer(message, texts, (next(encodings), next(encodings)))
    return found


@contextmanager
def _named(rows: Sequence[Row], number: int, path: Place | None) -> Iterator[None]:
    """Add the row's file and number to DataErrors."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where(rows, number, path)}: {error}") from error


def where(tasks: Sequence[Row], row: int, path: Place | None) -> str:
    """Return the location of row number ``row`` (from 0) of ``tasks``, for messages."""
    if path is None:
        return f"task {tasks[row].task_id}"
    return path(tasks[row]) if callable(path) else place_of(path, row)


def _pieces(answer: Message) -> list[str]:
    """Return the texts that a rendered answer must contain: its fields (thought and rest separately) and names of
    tools."""
    fields = [value for name, value in answer.items() if isinstance(value, str) and name not in ("role", *IDENTIFIERS)]
    texts = [part.strip() for value in fields for half in value.split("</think>") for part in half.split("<think>")]
    calls = [call.get("function", call) for call in answer.get("tool_calls") or () if isinstance(call, dict)]
    return [text for text in (*texts, *(call.get("name") for call in calls if isinstance(call, dict))) if text]


def _content(token: str | dict[str, Any]) -> str:
    return token["content"] if isinstance(token, dict) else token
