"""Chat prompts to token ids and back, by the checkpoint's own tokenizer.json and chat template.

transformers' AutoTokenizer gives the same ids but imports torch (3.6 s and 300 MB against 0.05 s here), which the
explorer and the launcher need for nothing else. A test compares the two.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer

from megarl.errors import CheckpointError, DataError
from megarl.schema import Preference, Task
from megarl.tasksets.files import place_of
from megarl.tasksets.images import chat_messages

Messages = Sequence[Mapping[str, Any]]
"""``{role, content}``; content is a text, or a list of parts as ``chat_messages`` gives it."""
PROCESSOR = ("processor_config.json", "preprocessor_config.json")
"""Files of a model that takes more than text."""


class ChatTokenizer:
    """The tokenizer and chat template of an HF checkpoint directory."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: jinja2.Template,
        variables: dict[str, Any],
        eos_ids: tuple[int, ...],
        multimodal: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._variables = variables
        self.eos_ids = eos_ids
        """Tokens that end a response: generation_config.json's, else the tokenizer's own."""
        self.multimodal = multimodal
        """Whether the model has a processor. Some of its templates then pass over a content that is a plain text."""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ChatTokenizer:
        """Read tokenizer.json, the chat template and the end tokens. Raises CheckpointError naming what is missing or damaged."""
        folder = Path(path)
        if not (folder / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{folder}: tokenizer.json is missing; model.path must be an HF checkpoint with a fast tokenizer"
            )
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing narrower
            raise CheckpointError(f"{folder / 'tokenizer.json'} cannot be read ({error}); copy the checkpoint again") from error
        config = _read_json(folder / "tokenizer_config.json")
        template_file = folder / "chat_template.jinja"
        older = _read_json(folder / "chat_template.json").get("chat_template")  # of processors
        source = template_file.read_text() if template_file.is_file() else older or config.get("chat_template")
        if isinstance(source, list):  # transformers' form for several named templates
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not source:
            raise CheckpointError(
                f"{folder}: no chat template; add chat_template.jinja or tokenizer_config.json's chat_template"
            )
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        variables = {name: _content(config[name]) for name in names if config.get(name) is not None}
        ends = _read_json(folder / "generation_config.json").get("eos_token_id")
        if ends is None and "eos_token" in variables:
            ends = tokenizer.token_to_id(variables["eos_token"])
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not ends:
            raise CheckpointError(
                f"{folder}: no end-of-sequence token in generation_config.json or tokenizer_config.json"
            )
        try:
            template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{folder}: its chat template cannot be read (line {error.lineno}: {error})") from error
        multimodal = any((folder / name).is_file() for name in PROCESSOR)
        return cls(tokenizer, template, variables, tuple(ends), multimodal)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def largest_id(self) -> int:
        """Largest token id, added tokens included."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def token(self, number: int) -> str | None:
        """Text of a token by its id."""
        return self._tokenizer.id_to_token(number)

    def render(self, messages: Messages) -> str:
        """The prompt's text, up to where the model's answer begins."""
        if self.multimodal:
            messages = [{**message, "content": _as_parts(message["content"])} for message in messages]
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._variables)
        except jinja2.TemplateError as error:
            raise DataError(f"the model's chat template fails on the prompt: {error}") from error

    def prompt_ids(self, messages: Messages) -> np.ndarray:
        """int32 [P]; ids of the rendered prompt. The template writes the special tokens, so none are added."""
        return np.asarray(self._tokenizer.encode(self.render(messages), add_special_tokens=False).ids, dtype=np.int32)

    def response_ids(self, text: str) -> np.ndarray:
        """int32 [R]; ids of a demonstration's text, ended by the end-of-sequence token."""
        return self.encode_responses([text])[0]

    def encode_responses(self, texts: Iterable[str]) -> list[np.ndarray]:
        """:meth:`response_ids` of many texts at once."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray([*encoding.ids, self.eos_ids[0]], dtype=np.int32) for encoding in encodings]

    def encode_prompts(self, prompts: Iterable[Messages]) -> list[np.ndarray]:
        """:meth:`prompt_ids` of many prompts at once."""
        encodings = self._tokenizer.encode_batch(
            [self.render(messages) for messages in prompts], add_special_tokens=False
        )
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a response without its special tokens."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Row = Task | Preference


def check_prompts(
    tasks: Sequence[Row], tokenizer: ChatTokenizer, limit: int, *, path: str | os.PathLike[str] | None = None
) -> None:
    """Refuse prompts of more than ``limit`` tokens. ``tasks`` are all rows of ``path`` in order (for the message).

    Raises DataError naming file, row, length and limit.
    """
    for row, ids in enumerate(encode_rows(tasks, tokenizer, path=path)):
        if len(ids) > limit:
            raise DataError(
                f"{_where(tasks, row, path)}: prompt has {len(ids)} tokens, rollout.max_prompt_tokens is {limit}; raise it "
                "or drop the row"
            )


def encode_rows(
    tasks: Sequence[Row], tokenizer: ChatTokenizer, *, path: str | os.PathLike[str] | None = None
) -> list[np.ndarray]:
    """Ids of each row's prompt. Raises DataError naming file and row of a prompt that the chat template refuses."""
    try:
        return tokenizer.encode_prompts(_messages(task) for task in tasks)
    except DataError:
        for row, task in enumerate(tasks):
            try:
                tokenizer.render(_messages(task))
            except DataError as error:
                raise DataError(f"{_where(tasks, row, path)}: {error}") from error
        raise


def encode_demonstrations(
    tasks: Sequence[Task], tokenizer: ChatTokenizer, *, path: str | os.PathLike[str] | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(prompt ids, response ids with the end token) of each row, int32. Raises DataError as :func:`encode_rows` does."""
    prompts = encode_rows(tasks, tokenizer, path=path)
    return list(zip(prompts, tokenizer.encode_responses(task.response or "" for task in tasks), strict=True))


def encode_preferences(
    rows: Sequence[Preference], tokenizer: ChatTokenizer, *, path: str | os.PathLike[str] | None = None
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(prompt, chosen, rejected) ids of each row, int32, answers with the end token. Raises as :func:`encode_rows` does."""
    chosen, rejected = (tokenizer.encode_responses(texts) for texts in ((r.chosen for r in rows), (r.rejected for r in rows)))
    return list(zip(encode_rows(rows, tokenizer, path=path), chosen, rejected, strict=True))


def _messages(row: Row) -> Messages:
    return chat_messages(row) if isinstance(row, Task) else row.prompt


def _where(tasks: Sequence[Row], row: int, path: str | os.PathLike[str] | None) -> str:
    return place_of(path, row) if path is not None else f"task {tasks[row].task_id}"


def _environment() -> jinja2.Environment:
    """As transformers renders chat templates: sandboxed, block tags leave no blank lines."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise DataError(f"the model's chat template refuses the prompt: {message}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text()) if path.is_file() else {}
        if not isinstance(value, dict):
            raise ValueError(f"it holds {type(value).__name__}")
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); copy the checkpoint again") from error
    return value


def _content(token: str | dict[str, Any]) -> str:
    return token["content"] if isinstance(token, dict) else token
