"""Chat template of a checkpoint, rendered as by transformers, its check, and its marks of thoughts.

Sources: chat templates of Seed-OSS, Magistral and Granite 3; OpenAI's harmony format for gpt-oss.

Templates may skip unknown roles, second calls and unknown contents. So the conversation is rendered again with a marker
in place of each content and each call's arguments. Every marker must be in the text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from megarl.core.durable import read_json
from megarl.core.errors import CheckpointError, DataError
from megarl.core.text import CLOSE, OPEN


class ThoughtMarks(NamedTuple):
    """Marks around the thoughts of a model family."""

    tokens: frozenset[str]
    """Special tokens that ``common`` reads."""
    common: Callable[[str], str]
    """Rewrites a response, its ``tokens`` included, to one with thoughts between ``<think>`` and ``</think>``."""


def _replaced(opening: str, closing: str) -> ThoughtMarks:
    return ThoughtMarks(frozenset((opening, closing)), lambda text: text.replace(opening, OPEN).replace(closing, CLOSE))


_PART = re.compile(r"<\|(?:start|end|call|return|message)\|>")
_RECIPIENT = re.compile(r"\bto=(functions\.[^\s<]+)")


def _of_harmony(text: str) -> str:
    """Rewrite messages of channels: ``analysis`` is thought, a message to a function stays a call, others are text.

    A call becomes ``<|start|>functions.NAME<|message|>ARGUMENTS<|call|>``. The header of a truncated message is
    dropped.
    """
    parts, header, opened, at = list[str](), "", False, 0
    for mark in [*_PART.finditer(text), None]:
        first, piece = at == 0, text[at : mark.start() if mark else len(text)]
        at, kind = (mark.end(), mark.group()) if mark else (len(text), "")
        if opened:
            parts.append(_harmony_message(header, piece, kind))
            header, opened = "", False
        elif kind == "<|message|>":
            header, opened = header + piece, True
        elif kind == "<|end|>":  # end of a thought opened by the prompt
            parts.append(piece + CLOSE)
        elif first and kind in ("", "<|return|>") and "<|channel|>" not in piece:
            parts.append(piece)  # no message, or a message opened by the prompt
    return "".join(parts)


def _harmony_message(header: str, content: str, end: str) -> str:
    if recipient := _RECIPIENT.search(header.replace("<|channel|>", " ")):
        return f"<|start|>{recipient[1]}<|message|>{content}{'<|call|>' if end == '<|call|>' else ''}"
    if header.partition("<|channel|>")[2].startswith("analysis"):
        return f"{OPEN}{content}{CLOSE if end else ''}"
    return content


_HARMONY = ThoughtMarks(
    frozenset(f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "call", "return")),
    _of_harmony,
)
_SPECIAL = (_replaced("<seed:think>", "</seed:think>"), _replaced("[THINK]", "[/THINK]"), _HARMONY)
_GRANITE = re.compile(r"Here(?: is|'s) my (?:thought process|response):")
GRANITE = ThoughtMarks(
    frozenset(), lambda text: _GRANITE.sub(lambda found: CLOSE if "response" in found[0] else OPEN, text)
)
COMMON = ThoughtMarks(frozenset(), str)
"""Marks of model families with ``<think>`` or without thoughts."""


def thought_marks(special: Collection[str], template: str) -> ThoughtMarks:
    """Return the marks of a model.

    Args:
        special: Special tokens of its tokenizer.
        template: Source of its chat template.
    """
    found = next((marks for marks in _SPECIAL if marks.tokens <= {*special, "<|constrain|>"}), COMMON)
    return GRANITE if found is COMMON and "Here is my thought process:" in template else found


Messages = Sequence[Mapping[str, Any]]
"""``{role, content, …}``; content is a text, None with tool calls, or a list of parts as in ``chat_messages``."""
MARKER = "0f1e2d3c{:06d}"
MOST = 1024
"""Maximum cached conversation shapes."""


class ShownMessages:
    """Cache of conversation shapes that a template renders completely: roles, fields, kinds of contents, options."""

    def __init__(self) -> None:
        self._whole: set[bytes] = set()
        """Digests of the shapes, because options may be long documents."""

    def check(self, messages: Messages, key: Any, render: Callable[[Messages], str]) -> None:
        """Raise DataError for a message or call missing in the text of ``render``.

        Args:
            key: The template's other inputs.
        """
        shape = hashlib.sha256(ascii((key, [_shape(message) for message in messages])).encode()).digest()
        if shape in self._whole:
            return
        marked = _Marked(messages)
        try:
            text = render(marked.messages)
        except DataError:  # a template that reads contents and accepts only the real ones
            text = render(messages)
            lost = next((what for _, what, given in marked.places if not _is_in(given, text)), None)
        else:
            lost = next((what for marker, what, _ in marked.places if marker not in text), None)
        if lost is not None:
            raise DataError(
                f"the model's chat template leaves out {lost}; write it as the template does (another role, one call a "
                "message), or take a template that writes it"
            )
        if len(self._whole) >= MOST:
            self._whole.clear()
        self._whole.add(shape)


class _Marked:
    """A conversation with markers in place of its texts, and the texts that they replace."""

    def __init__(self, messages: Messages) -> None:
        self.places: list[tuple[str, str, str]] = []
        """(marker, description of the text, the text)"""
        self.messages = [self._message(number, message) for number, message in enumerate(messages)]

    def _mark(self, what: str, text: str) -> str:
        marker = MARKER.format(len(self.places))
        self.places.append((marker, f"{what}: {text[:60]!r}", text))
        return marker

    def _message(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        found, what = dict(message), f"message {number} ({message.get('role')})"
        content = message.get("content")
        if isinstance(content, str) and content.strip():
            found["content"] = self._mark(what, content)
        elif isinstance(content, list):
            found["content"] = [self._part(what, part) for part in content]
        if calls := message.get("tool_calls"):
            found["tool_calls"] = [self._call(f"call {i + 1} of {what}", call) for i, call in enumerate(calls)]
        return found

    def _part(self, what: str, part: Any) -> Any:
        text = part.get("text") if isinstance(part, dict) else None
        return {**part, "text": self._mark(what, text)} if isinstance(text, str) and text.strip() else part

    def _call(self, what: str, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function") or call
        name, arguments = function.get("name"), function.get("arguments")
        marked: dict[str, Any] = {}
        if isinstance(arguments, dict) and arguments:
            marked = {"arguments": {key: self._mark(what, str(key)) for key in arguments}}
        elif isinstance(arguments, str) and arguments:
            marked = {"arguments": json.dumps({"a": self._mark(what, arguments)})}
        elif isinstance(name, str) and name:
            marked = {"name": self._mark(what, name)}
        return {**call, "function": {**function, **marked}} if "function" in call else {**call, **marked}


def _shape(message: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a message that a template may depend on: role, fields and kinds of values."""
    return [message.get("role"), *((name, _kind(value)) for name, value in message.items() if name != "role")]


def _kind(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: value[name] if name == "type" else _kind(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_kind(part) for part in value]
    return type(value).__name__, bool(value.strip() if isinstance(value, str) else value)


def _is_in(given: str, text: str) -> bool:
    """Return True if a text contains the given text, plain or as JSON."""
    return any(form in text for form in (given.strip(), json.dumps(given.strip(), ensure_ascii=False)[1:-1]))


# ---------------------------------------------------------------- arguments that are JSON text


def argument_texts(messages: Messages) -> Iterator[str]:
    """Yield call arguments that are texts (OpenAI's wire format)."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = (call.get("function") or call).get("arguments")
            if isinstance(arguments, str):
                yield arguments


def is_verbatim(arguments: str, text: str) -> bool:
    """Return True if a rendered text has the arguments verbatim, not as a JSON string; False for empty arguments."""
    encoded = (json.dumps(arguments, ensure_ascii=ascii_only) for ascii_only in (False, True))
    return bool(arguments.strip()) and arguments.strip() in text and not any(form in text for form in encoded)


def with_objects(messages: Messages) -> list[dict[str, Any]]:
    """Return messages with call arguments parsed from JSON text to objects; other texts are unchanged."""

    def parsed(call: Mapping[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return {**call, "function": parsed(call["function"])}
        arguments = call.get("arguments")
        if not isinstance(arguments, str):
            return dict(call)
        try:
            return {**call, "arguments": json.loads(arguments) if arguments.strip() else {}}
        except ValueError:
            return dict(call)

    return [
        {**message, "tool_calls": [parsed(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


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
