"""Split an answer at its outermost commas, brackets and inequality signs, so that only its atoms need algebra."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

MAX_NESTING = 12

_TOKEN = re.compile(
    r"\\\\|\\[{}]|\\[lr]angle|\\begin\{\w+\*?\}|\\end\{\w+\*?\}|\\[a-zA-Z]+|[()\[\]{}]| or | and |[;,]|.", re.DOTALL
)
_OPEN = {"(", "[", "{", r"\{", r"\langle"}
_CLOSE = {")", "]", "}", r"\}", r"\rangle"}
_NAME = re.compile(r"(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?'*")
_NOT_NAMES = {r"\pi", r"\infty", "e", "i"}
_MATRIX = re.compile(r"\\begin\{([pbBvV]?matrix|smallmatrix|array)\}\s*(?:\{[lcr|\s]*\})?(.*)\\end\{\1\}", re.DOTALL)
_BUILDER = re.compile(rf"\\\{{\s*({_NAME.pattern})\s*(?:\\in\s*\\mathbb\{{R\}}\s*)?(?:\\mid|\||:)\s*([^|:]*)\\\}}")
_CASES = re.compile(
    r"(?:\\begin\{cases\}|\\\{\s*\\begin\{(?:array|aligned)\}(?:\s*\{[lcr|\s]*\})?)(.*)\\end\{(?:cases|array"
    r"|aligned)\}",
    re.DOTALL,
)
_POINT = re.compile(r"([AD-MO-TV-Z]'?)\s*(\(.*\))", re.DOTALL)
"""A named point. N(0,1), U(0,1), B(n,p) and C(5,2) are not points."""
_NO_SOLUTION = (
    "\\emptyset",
    "no solution",
    "no solutions",
    "no real solution",
    "no real solutions",
    "empty set",
    "the empty set",
    "无解",
    "空集",
)
_IMPLIES = {
    "\\" + name
    for name in ("to", "rightarrow", "Rightarrow", "implies", "leftrightarrow", "Leftrightarrow", "iff", "equiv")
}
_TURNED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq"}
_COMPARISON = re.compile(r"(<|>|\\leq|\\geq)")


@dataclass(frozen=True)
class Expression:
    """``kind``: atom, list (no brackets), set, tuple (points, vectors, intervals), union, matrix (items are rows), or
    logic (statements)."""

    kind: str
    text: str
    items: tuple[Expression, ...] = ()
    brackets: str = ""
    """Opening and closing bracket of a tuple; the kind of a matrix; the sign that joins statements."""
    name: str = ""
    """Variable of an inequality or of ``x \\in``."""
    solutions: bool = False
    """True for a list joined by "or"."""


def split(text: str, separators: set[str]) -> list[str] | None:
    """Split ``text`` at separators outside all brackets; None if brackets do not match or nest too deeply."""
    parts, start, depth = [], 0, 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in _OPEN or token.startswith(r"\begin"):
            depth += 1
        elif token in _CLOSE or token.startswith(r"\end"):
            depth -= 1
        elif depth == 0 and token in separators:
            parts.append(text[start : match.start()].strip())
            start = match.end()
        if not 0 <= depth <= MAX_NESTING:
            return None
    return [*parts, text[start:].strip()] if depth == 0 else None


def parse(text: str, depth: int = 0) -> Expression:
    """Parse a cleaned answer. Text that is not understood becomes an atom."""
    text = text.strip()
    if depth > 4 or not text:
        return Expression("atom", text)
    if match := re.match(rf"({_NAME.pattern})\s*\\in(?![a-z])\s*", text):
        return replace(parse(text[match.end() :], depth + 1), name=match.group(1))
    if text in (r"\mathbb{R}", "all real numbers", "all reals", "全体实数"):
        return _interval("(", r"-\infty", r"\infty", ")", "")
    if match := _BUILDER.fullmatch(text):
        return replace(parse(match.group(2), depth + 1), name=match.group(1))
    if text.lower() in _NO_SOLUTION:
        return Expression("set", r"\emptyset")
    for read in (
        _cases,
        _alternatives,
        _logic,
        _union,
        _transposed,
        _matrix,
        _bracketed,
        _point,
        _inequality,
        _plus_minus,
    ):
        node = read(text, depth)
        if node is not None:
            return node
    return Expression("atom", text)


def _alternatives(text: str, depth: int) -> Expression | None:
    parts = split(_protected(text), {",", ";", " or ", " and "})
    if parts is None or len(parts) < 2:
        return None
    parts = [re.sub(r"^(?:or|and)\s", "", _restored(part)) for part in parts]
    items = tuple(parse(part, depth + 1) for part in parts if part)
    solutions = split(text, {",", ";", " and "}) != split(text, {",", ";", " or ", " and "})
    if (
        solutions
        and all(item.kind == "tuple" and (item.name or r"\infty" in item.text) for item in items)
        and len({item.name for item in items}) == 1
    ):
        return Expression("union", text, items, name=items[0].name)
    return (_both(items) if " and " in text and not solutions else None) or Expression(
        "list", text, items, solutions=solutions
    )


def _logic(text: str, depth: int) -> Expression | None:
    """Parse statements joined by ``\\lor``, else by ``\\land``, which binds tighter; None if signs that bind looser
    occur."""
    if len(split(text, _IMPLIES) or ()) != 1:
        return None
    for sign in (r"\lor", r"\land"):
        parts = split(text, {sign})
        if parts is not None and len(parts) > 1:
            return Expression("logic", text, tuple(parse(part, depth + 1) for part in parts), sign)
    return None


def _both(items: tuple[Expression, ...]) -> Expression | None:
    """Return ``x \\geq 0 and x < 1`` as an interval."""
    if (
        len(items) != 2
        or any(item.kind != "tuple" or not item.name for item in items)
        or items[0].name != items[1].name
    ):
        return None
    low, high = sorted(items, key=lambda item: item.items[0].text == r"-\infty")
    if low.items[1].text != r"\infty" or high.items[0].text != r"-\infty" or low.items[0].text == r"-\infty":
        return None
    return _interval(low.brackets[0], low.items[0].text, high.items[1].text, high.brackets[1], low.name)


def _cases(text: str, depth: int) -> Expression | None:
    """Parse the solution of a system of equations, one equation per line."""
    match = _CASES.fullmatch(text)
    if match is None or "&" in match[1] or r"\begin" in match[1]:
        return None
    rows = [row.strip(" ,;") for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[1]) if row.strip(" ,;")]
    return Expression("list", ", ".join(rows), tuple(parse(row, depth + 1) for row in rows))


def _point(text: str, depth: int) -> Expression | None:
    match = _POINT.fullmatch(text)
    node = _bracketed(match[2], depth) if match else None
    return replace(node, name=match[1]) if match and node and node.kind == "tuple" and not node.name else None


def _protected(text: str) -> str:
    """Hide commas inside numbers from the splitter: all in a bare list, in brackets only next to ", "."""
    return re.sub(r"(?<![\d,.])(\d{1,3}(?:,\d{3})+)(?!\d)(?!,\d)", lambda match: match.group().replace(",", "\0"), text)


def _restored(text: str) -> str:
    return text.replace("\0", ",")


def _union(text: str, depth: int) -> Expression | None:
    parts = split(re.sub(r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup ", text), {r"\cup"})
    if parts is None or len(parts) < 2:
        return None
    return Expression("union", text, tuple(parse(part, depth + 1) for part in parts))


def _matrix(text: str, depth: int) -> Expression | None:
    match = _MATRIX.fullmatch(text)
    if match is None or r"\begin" in match.group(2):
        return None
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", match.group(2)) if row.strip()]
    items = tuple(
        Expression("list", row, tuple(Expression("atom", cell.strip()) for cell in row.split("&"))) for row in rows
    )
    kind = match.group(1) if match.group(1) in ("vmatrix", "Vmatrix") else "matrix"
    return Expression("matrix", text, items, brackets=kind)


_TRANSPOSED = re.compile(r"(.*[)\]}])\s*\^\s*(?:T|\\top|\\intercal|\{\s*(?:T|\\top|\\intercal)\s*\})", re.DOTALL)


def _transposed(text: str, depth: int) -> Expression | None:
    """Parse ``(1,2,3)^T`` as a matrix of one column, and transpose a written matrix."""
    match = _TRANSPOSED.fullmatch(text) if text[-1] in "Tp}l" and "^" in text else None
    node = (_matrix(match[1].strip(), depth) or _bracketed(match[1].strip(), depth)) if match else None
    if node is None or node.kind not in ("tuple", "matrix") or node.brackets not in ("()", "[]", "matrix"):
        return None
    rows = [row.items for row in node.items] if node.kind == "matrix" else [node.items]
    if len({len(row) for row in rows}) != 1:
        return None
    columns = tuple(Expression("list", "", column) for column in zip(*rows, strict=True))
    return Expression("matrix", text, columns, brackets="matrix")


def _bracketed(text: str, depth: int) -> Expression | None:
    for opening, closing in ((r"\{", r"\}"), (r"\langle", r"\rangle"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")")):
        if not (text.startswith(opening) and text.endswith(closing)):
            continue
        body = text[len(opening) : len(text) - len(closing)]
        parts = split(_protected(body) if ", " in body else body, {",", ";", " or ", " and "})
        if parts is None or re.search(r"\\mid|\\vert|\|.*\|?", body) and opening == r"\{":
            return None
        if opening == r"\{":
            return Expression("set", text, tuple(parse(_restored(part), depth + 1) for part in parts if part))
        if len(parts) == 1:
            return parse(body, depth + 1) if opening in "([" and closing in ")]" and body.strip() else None
        brackets = "()" if opening == r"\langle" else opening + closing
        return Expression("tuple", text, tuple(parse(_restored(part), depth + 1) for part in parts), brackets)
    return None


def is_name(text: str) -> bool:
    return bool(_NAME.fullmatch(text)) and text not in _NOT_NAMES


def is_constant(text: str) -> bool:
    """Return True if the letters of ``text`` show no variable."""
    rest = re.sub(r"\\[a-zA-Z]+|(?<![A-Za-z])[ei](?![A-Za-z])", "", text)
    return not re.search(r"[A-Za-z]", rest) and r"\theta" not in text


def _inequality(text: str, depth: int) -> Expression | None:
    if match := re.fullmatch(rf"({_NAME.pattern})\s*\\neq\s*(.+)", text):
        if is_name(match.group(1)) and is_constant(match.group(2)):
            low = _interval("(", r"-\infty", match.group(2), ")", match.group(1))
            high = _interval("(", match.group(2), r"\infty", ")", match.group(1))
            return Expression("union", text, (low, high), name=match.group(1))
        return None
    parts = [part.strip() for part in _COMPARISON.split(text)]
    if len(parts) == 3:
        left, sign, right = parts
        if is_name(right) and is_constant(left) and left:
            left, sign, right = right, _TURNED[sign], left
        if not (is_name(left) and is_constant(right) and right):
            return None
        closed = sign in (r"\leq", r"\geq")
        if sign in (">", r"\geq"):
            return _interval("[" if closed else "(", right, r"\infty", ")", left)
        return _interval("(", r"-\infty", right, "]" if closed else ")", left)
    if len(parts) == 5:
        if parts[1] in (">", r"\geq"):
            parts = [_TURNED.get(part, part) for part in reversed(parts)]
        bottom, first, name, second, top = parts
        if {first, second} - {"<", r"\leq"} or not (
            is_name(name) and is_constant(bottom) and is_constant(top) and bottom and top
        ):
            return None
        return _interval("[" if first == r"\leq" else "(", bottom, top, "]" if second == r"\leq" else ")", name)
    return None


def _interval(opening: str, low: str, high: str, closing: str, name: str) -> Expression:
    return Expression(
        "tuple",
        f"{opening}{low},{high}{closing}",
        (Expression("atom", low), Expression("atom", high)),
        opening + closing,
        name,
    )


def _plus_minus(text: str, depth: int) -> Expression | None:
    if text.count(r"\pm") + text.count(r"\mp") != 1:
        return None
    first, second = (re.sub(r"\\[pm][pm](?![a-z])\s*", sign, text) for sign in ("+", "-"))
    first = re.sub(r"(^|=|\{)\s*\+", r"\1", first)
    return Expression("list", text, (Expression("atom", first), Expression("atom", second)), solutions=True)
