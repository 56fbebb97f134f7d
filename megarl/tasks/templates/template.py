"""Chat template of a checkpoint, rendered as by transformers (``utils/chat_template_utils.py`` of version 5)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from megarl.core.durable import read_json
from megarl.core.errors import CheckpointError, DataError
from megarl.tasks.templates.shown import Messages, ShownMessages, argument_texts, is_verbatim, with_objects

IDENTIFIERS = ("name", "tool_call_id", "id")
"""Fields of a message that a template may skip: they refer to other messages and have no content for the model."""
RESERVED = ("messages", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
"""Arguments of transformers' ``apply_chat_template`` that rows may not set."""
DEFAULT, TOOL_USE = "default", "tool_use"
_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""Errors raised by a template's code."""


class ChatTemplate:
    """A checkpoint's templates by name: ``default``, and ``tool_use`` if there is a separate one for tools."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str], day: date | None = None) -> None:
        """``variables``: the special tokens. ``day``: date for ``strftime_now`` (midnight); None is the current time.

        Raises jinja2.TemplateSyntaxError.
        """
        environment = _environment(lambda: datetime.now() if day is None else datetime.combine(day, time()))
        self.text = "\n".join(sources.values())
        """Sources of all templates."""
        self._variables = dict(variables)
        self._shown = ShownMessages()
        self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        self._names = {
            name: {node.name for node in environment.parse(source).find_all(nodes.Name)}
            for name, source in sources.items()
        }

    def render(self, messages: Messages, kwargs: Mapping[str, Any], *, answered: bool = False) -> str:
        """Return the text of a conversation up to the start of the model's answer; if ``answered``, including the
        answer.

        ``kwargs``: other inputs of the template: ``tools``, ``documents``, ``enable_thinking``, ….

        A tool call's arguments may be JSON text: a template that does not write the text verbatim gets the parsed
        object.

        Raises DataError if the template fails or refuses, ignores a field or option, or omits a message or call.
        """
        name = TOOL_USE if kwargs.get("tools") is not None and TOOL_USE in self._templates else DEFAULT
        self._check(kwargs, self._names[name])

        def write(given: Messages) -> str:
            return self._write(name, given, kwargs, answered)

        text, messages = _with_arguments(messages, write)
        self._shown.check(messages, (name, dict(kwargs), answered), write)
        return text

    def _write(self, name: str, messages: Messages, kwargs: Mapping[str, Any], answered: bool) -> str:
        """Return a template's text. Raises DataError."""
        watched = [_Message(message) for message in messages]
        given = {"tools": None, "documents": None, **self._variables, **kwargs}
        try:
            text = self._templates[name].render(messages=watched, add_generation_prompt=not answered, **given)
            text.encode()
        except DataError:
            raise
        except UnicodeEncodeError as error:
            raise DataError(
                f"the prompt has {text[error.start]!r}, half of a character, which no tokenizer takes"
            ) from error
        except _ERRORS as error:
            raise DataError(f"the model's chat template fails on the prompt: {error}") from error
        for number, message in enumerate(watched):
            if (lost := message.unseen) is not None:
                raise DataError(
                    f"the model's chat template does not look at {lost!r} of message {number} ({message.get('role')}); "
                    "drop the field, or take a template that renders it"
                )
        return text

    @staticmethod
    def _check(kwargs: Mapping[str, Any], known: set[str]) -> None:
        for name in kwargs:
            if name in RESERVED:
                raise DataError(f"chat_template_kwargs.{name} is set by megarl; leave it out")
            if name not in known:
                raise DataError(
                    f"the model's chat template does not look at {name!r}; leave it out of the row and of "
                    "taskset.chat_template_kwargs"
                )


def _with_arguments(messages: Messages, write: Callable[[Messages], str]) -> tuple[str, Messages]:
    """Return (text, messages) with JSON text arguments rendered verbatim, else parsed to objects. Raises DataError as
    ``write``."""
    texts = list(argument_texts(messages))
    if not texts:
        return write(messages), messages
    try:
        text = write(messages)
        if all(is_verbatim(arguments, text) for arguments in texts):
            return text, messages
    except DataError:  # a template that accepts only objects
        pass
    objects = with_objects(messages)
    return write(objects), objects


class _Message(dict[str, Any]):
    """A message that records access to its fields."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.fields_seen: set[object] = set()

    @property
    def unseen(self) -> str | None:
        """Return the name of a non-empty field that the template did not read, or None."""
        passed = self.fields_seen | {"role", *IDENTIFIERS}
        return next((name for name, value in super().items() if name not in passed and value not in (None, "")), None)

    def __getitem__(self, key: str) -> Any:
        self.fields_seen.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.fields_seen.add(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.fields_seen.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        self.fields_seen.update(self)
        return super().items()

    def values(self) -> Any:
        self.fields_seen.update(self)
        return super().values()

    def __iter__(self) -> Iterator[str]:
        """Define ``__iter__`` again: without it CPython's ``dict(message)`` would copy without calling the methods
        above."""
        return super().__iter__()


def read_template(
    folder: Path, config: Mapping[str, Any], variables: Mapping[str, str], day: date | None
) -> ChatTemplate:
    """Read the templates of a checkpoint directory. ``config``: its tokenizer_config.json.

    Raises CheckpointError if there is none, or it cannot be read.
    """
    sources = _sources(folder, config)
    if not sources.get(DEFAULT):
        raise CheckpointError(
            f"{folder}: no chat template; add chat_template.jinja or tokenizer_config.json's chat_template"
        )
    try:
        return ChatTemplate(sources, variables, day)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"{folder}: its chat template cannot be read (line {error.lineno}: {error})") from error


def writes_date(folder: Path) -> bool:
    """Return True if a template of this checkpoint uses the current time. Raises CheckpointError for an unreadable
    file."""
    return any(
        "strftime_now" in source for source in _sources(folder, read_json(folder / "tokenizer_config.json")).values()
    )


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return template sources by name. Files override tokenizer_config.json, as in transformers."""
    extra = {file.stem: file.read_text() for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (file := folder / "chat_template.jinja").is_file():
        return extra | {DEFAULT: file.read_text()}
    older = read_json(folder / "chat_template.json").get("chat_template")  # of processors
    source = older or config.get("chat_template")
    if isinstance(source, list):  # transformers' form for several named templates
        return {entry["name"]: entry["template"] for entry in source}
    return extra | ({DEFAULT: source} if source else {})


class _Generation(Extension):
    """``{% generation %}``: marks the model's text. Renders its content in a separate scope, as in transformers."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment(now: Callable[[], datetime]) -> jinja2.Environment:
    """Return a sandboxed environment; block tags leave no blank lines."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    return environment


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise DataError(f"the model's chat template refuses the prompt: {message}")
