"""Reader of shell scripts that start verl. It runs nothing: words, quotes, assignments, arrays and arithmetic alone.

Command substitutions and unset variables stay in the text as they are written, with their ``$``.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=")
_OPENS = ("if", "for", "while", "until", "case", "{", "function")
_CLOSES = ("fi", "done", "esac", "}")
_MIDDLE = ("then", "else", "elif", "do", "in")
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MAX_NUMBER = 10**18
MAX_DEPTH = 32
"""Most levels of nested ``${...}``."""


@dataclass(frozen=True)
class ShellScript:
    """Commands of a script, with variables replaced, and notes on lines that only a shell could follow."""

    commands: list[list[str]]
    notes: list[str]


def read_script(text: str, variables: Mapping[str, str], arguments: list[str] | None = None) -> ShellScript:
    """Return the commands of a script.

    ``variables``: values that a caller would export. ``arguments``: words in place of ``$@``. Assignments inside
    conditions and loops are not followed; a note names each.
    """
    return _Reader(_without_heredocs(text), dict(variables), list(arguments or [])).read()


def arithmetic(expression: str) -> int | None:
    """Return the value of an integer expression with + - * / % and brackets; None if it is anything else."""
    try:
        return _value(ast.parse(expression.strip().replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
        if abs(value) <= _MAX_NUMBER:
            return value
    raise ValueError(ast.dump(node))


def _without_heredocs(text: str) -> str:
    """Return the text without bodies of here-documents, which are data of other programs."""
    kept: list[str] = []
    end = None
    for line in text.splitlines():
        if end is not None:
            end = None if line.strip() == end else end
            continue
        kept.append(line)
        if (found := re.search(r"(?<!<)<<-?\s*['\"]?(\w+)['\"]?", line)) and not line.lstrip().startswith("#"):
            end = found[1]
    return "\n".join(kept) + "\n"


@dataclass
class _Reader:
    text: str
    variables: dict[str, str]
    arguments: list[str]
    arrays: dict[str, list[str]] = field(default_factory=dict)
    at: int = 0
    depth: int = 0
    commands: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def read(self) -> ShellScript:
        while self.at < len(self.text):
            self._statement()
        return ShellScript(self.commands, self.notes)

    def _statement(self) -> None:
        """Read up to the end of a line, or to a separator outside quotes."""
        words: list[str] = []
        assigned: list[tuple[str, str | list[str]]] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char in " \t\r":
                self.at += 1
            elif char == "#":
                self._skip_comment()
            elif char in "\n;&|()":
                self.at += 1
                break
            elif char in "<>":
                if words and words[-1].isdigit() and self.text[self.at - 1].isdigit():
                    words.pop()  # number of a stream, as in 2>&1
                self.at += 1
                self._skip_target()
            elif not words and (found := _ASSIGNED.match(self.text, self.at)):
                self.at = found.end()
                assigned.append((found[1], self._assigned_value()))
            else:
                words += self._word()
                words = words[1:] if words[:1] == ["export"] or words[:1] == ["local"] else words
        self._finish(words, assigned)

    def _finish(self, words: list[str], assigned: list[tuple[str, str | list[str]]]) -> None:
        while words and words[0] in (*_OPENS, *_CLOSES, *_MIDDLE):
            self.depth += (words[0] in _OPENS) - (words[0] in _CLOSES)
            first, words = words[0], words[1:]
            if first in ("for", "case", "function"):
                words = []
            if first in _MIDDLE and words and (found := _ASSIGNED.match(words[0])):
                assigned, words = [*assigned, (found[1], words[0][found.end() :])], words[1:]
        self.depth = max(self.depth, 0)
        if words:
            self.commands.append(words)  # variables before a command are its environment alone
            return
        for name, value in assigned:
            if self.depth:
                self.notes.append(f"{name} is assigned inside a condition or loop, which is not followed")
            elif isinstance(value, list):
                self.arrays[name] = value
            else:
                self.variables[name] = value

    def _skip_comment(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _skip_target(self) -> None:
        """Skip the file of a redirection."""
        while self.at < len(self.text) and self.text[self.at] in "<>& \t":
            self.at += 1
        if self.at < len(self.text) and self.text[self.at] != "\n":
            self._word()

    def _assigned_value(self) -> str | list[str]:
        if self.at < len(self.text) and self.text[self.at] == "(":
            self.at += 1
            return self._array()
        if self.at >= len(self.text) or self.text[self.at] in " \t\r\n;&|":
            return ""
        return " ".join(self._word(splits=False))

    def _array(self) -> list[str]:
        words: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            char = self.text[self.at]
            if char == "#":
                self._skip_comment()
            elif char in " \t\r\n" or self.text.startswith("\\\n", self.at):
                self.at += 1
            else:
                words += self._word(ends=")")
        self.at += 1
        return words

    def _word(self, splits: bool = True, ends: str = "") -> list[str]:
        """Return the words of one shell word: several if an unquoted variable has spaces, or for an array."""
        words, is_quoted = [""], False
        while self.at < len(self.text) and self.text[self.at] not in " \t\r\n;|&<>" + ends:
            char = self.text[self.at]
            if char == "\\":
                words[-1] += (
                    "" if self.text[self.at + 1 : self.at + 2] == "\n" else self.text[self.at + 1 : self.at + 2]
                )
                self.at += 2
            elif char == "'":
                end = self.text.find("'", self.at + 1)
                end = len(self.text) if end < 0 else end
                words[-1] += self.text[self.at + 1 : end]
                self.at, is_quoted = end + 1, True
            elif char == '"':
                is_quoted = True
                self._double_quoted(words)
            elif char in "$`":
                self._join(words, self._dollar(), splits)
            else:
                words[-1] += char
                self.at += 1
        return [word for word in words if word or is_quoted]

    def _double_quoted(self, words: list[str]) -> None:
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                words[-1] += "" if following == "\n" else following if following in '"\\$`' else char + following
                self.at += 2
            elif char in "$`":
                self._join(words, self._dollar(), splits=False)
            else:
                words[-1] += char
                self.at += 1
        self.at += 1

    def _join(self, words: list[str], value: str | list[str], splits: bool) -> None:
        """Append a replaced variable to the last word; arrays, and unquoted values with spaces, make further words."""
        parts = value if isinstance(value, list) else [value]
        if splits and isinstance(value, str) and " " in value.strip() and not any(sign in value for sign in "$`"):
            parts = value.split()
        if parts:
            words[-1] += parts[0]
            words += parts[1:]

    def _dollar(self) -> str | list[str]:
        start = self.at
        if self.text[start] == "`":
            end = self.text.find("`", start + 1)
            self.at = len(self.text) if end < 0 else end + 1
            return self.text[start : self.at]
        if self.text.startswith("$((", start):
            self.at = _closing(self.text, start + 1, "(", ")")
            raw = self.text[start : self.at]
            result = arithmetic(self._with_values(raw[3:-2]))
            return raw if result is None else str(result)
        if self.text.startswith("$(", start):
            self.at = _closing(self.text, start + 1, "(", ")")
            raw = self.text[start : self.at]
            return self.variables.get("PWD", raw) if raw == "$(pwd)" else raw
        if self.text.startswith("${", start):
            self.at = _closing(self.text, start + 1, "{", "}")
            return self._braced(self.text[start : self.at])
        if self.text.startswith(("$@", "$*"), start):
            self.at += 2
            return list(self.arguments)
        found = _NAME.match(self.text, start + 1)
        self.at = found.end() if found else min(start + 2, len(self.text))
        raw = self.text[start : self.at]
        if found and found[0] in self.arrays:
            return self.arrays[found[0]][0] if self.arrays[found[0]] else ""
        return self.variables.get(found[0], raw) if found else raw

    def _braced(self, raw: str) -> str | list[str]:
        inner = raw[2:-1]
        if (found := re.fullmatch(r"([A-Za-z_]\w*)\[[@*]\]", inner)) and found[1] in self.arrays:
            return list(self.arrays[found[1]])
        found = re.fullmatch(r"([A-Za-z_]\w*|\d|@)(?:(:?[-=+])(.*))?", inner, re.DOTALL)
        if not found:
            return raw
        name, operation, word = found[1], found[2], found[3]
        if name == "@":
            return list(self.arguments)
        value = self.variables.get(name)
        if not operation:
            return raw if value is None else value
        has_value = value is not None and (value != "" or ":" not in operation)
        if operation.endswith("+"):
            return self._nested(word) if has_value else ""
        result = value if has_value and value is not None else self._nested(word)
        if operation.endswith("="):
            self.variables[name] = result
        return result

    def _nested(self, text: str) -> str:
        """Return the text of a default, with its own quotes and variables replaced."""
        if self.depth > MAX_DEPTH:
            return text
        reader = _Reader(text, self.variables, self.arguments, self.arrays, depth=self.depth + 1)
        words = [""]
        while reader.at < len(text):
            if text[reader.at] in " \t\n;|&<>()":
                words[-1] += text[reader.at]
                reader.at += 1
            else:
                words[-1] += " ".join(reader._word(splits=False, ends="()"))
        return words[0]

    def _with_values(self, expression: str) -> str:
        """Return an arithmetic expression with variables replaced by their values, in brackets."""
        for _ in range(MAX_DEPTH):
            replaced = re.sub(
                r"\$?\{?\b([A-Za-z_]\w*)\b\}?",
                lambda m: f"({self.variables[m[1]]})" if m[1] in self.variables else m[0],
                expression,
            )
            replaced = re.sub(r"\$\{([A-Za-z_]\w*):?-(\d+)\}", lambda m: self.variables.get(m[1], m[2]), replaced)
            if replaced == expression or len(replaced) > 10_000:
                break
            expression = replaced
        return expression.replace("$((", "((")


def _closing(text: str, start: int, opens: str, closes: str) -> int:
    """Return the place after the bracket that closes the one at ``start``; quoted ones do not count."""
    depth, quote, at = 0, "", start
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'":
            at += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in opens + closes:
            depth += 1 if char in opens else -1
            if not depth:
                return at + 1
        at += 1
    return len(text)
