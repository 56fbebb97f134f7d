"""Compare a predicted answer with the gold: structure first, then atoms as words, numbers, equations, expressions."""

from __future__ import annotations

import re

from megarl.rewards.answer import measures, trace, units
from megarl.rewards.answer.marks import asks
from megarl.rewards.answer.measures import TENS, with_digits
from megarl.rewards.answer.normalize import MIN_ROUNDED_DIGITS, Quantity, clean, quantity, same_quantity, squash, words
from megarl.rewards.answer.units import NUMERALS
from megarl.rewards.math import algebra as math_algebra
from megarl.rewards.math.structure import Expression, is_constant, is_name, parse, split

MAX_ANSWER = 2000
"""Maximum characters of a predicted answer; a longer one is wrong unless it equals the gold's text."""

_TIME = re.compile(r"(\d{1,2}:\d{2})(?::\d{2})?\s*(a\.?m|p\.?m)?\.?", re.IGNORECASE)
_EQUALS = re.compile(r"(?<![<>!:\\])=|\\equiv(?![a-z])")
_APPROX = re.compile(r"\\approx(?![a-z])|\\simeq|\\doteq|\\sim(?![a-z])")
_FUNCTION = re.compile(
    r"[fghFGHPQTN](?:_\{?\w+\}?)?'*\s*\(.*\)|(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?'*\s*\((?:[A-Za-z],?\s*)+\)|"
    r"[A-Za-z]\^\{-1\}\s*\([A-Za-z]\)|[A-Z]{1,3}|[A-Za-z]{2,}(?:\s[A-Za-z]+){0,4}"
)
_CONDITION = re.compile(
    r"(?:if|suppose|let|assum\w*|unless|not|never|without|except|exclud\w*|we\s+(?:exclude|reject|discard))\b",
    re.IGNORECASE,
)
_TUPLE_NAME = re.compile(
    r"[A-Za-z]\w{0,3}(?:\([a-z]\))?|\([A-Za-z_0-9{}, \\]+\)|\\[a-z]+|\\(?:vec|overline|mathbf)\s*\{\w+\}|\\vec \w"
)
_CHOICE = re.compile(r"\(?\s*([A-J])\s*\)?\s*(?:[.:)]\s*\S.*|\([^()]*\))?", re.DOTALL)

_LABEL = re.compile(r"(?i:option|choice)\s+[A-J]\s*[,:]|\(\s*[A-J]\s*\)|[A-J](?:\s*\)|[.:](?=\s))")
_LABEL_AFTER = re.compile(r"\(\s*(?:(?i:option|choice|answer)\s+|选项)?[A-J]\s*\)$")
_NUMERAL = re.compile(
    rf"(?:{'|'.join([*NUMERALS, *TENS, 'minus', 'negative'])})\b|负?[一二两三四五六七八九十百千]", re.IGNORECASE
)
_COUNTED = re.compile(r"-?[\d./]+%?(?:\s*(?!of\b)\S+){0,2}")
_PERCENT = re.compile(r"per\s?cent|%|百分", re.IGNORECASE)
_INTEGRATED = re.compile(r"\+\s*[cKk]$")
_LETTERS = re.compile(r"\W*(?:[A-J]{1,4}\b\W*)+")
"""``A C D`` after a letter and a full stop."""


def equal(gold: str, pred: str, question: str = "") -> bool:
    """Return True if ``pred`` is the answer ``gold``, both as written, and no copy from ``question``."""
    if len(pred) > MAX_ANSWER and len(pred) > 2 * len(gold):
        return False
    first, second = clean(gold), clean(pred)
    if not first or not second:
        return trace.compared("nothing to compare", first, second, False)
    if asks(pred) and not asks(gold):
        return trace.compared("a question", first, second, False)
    if "u" in second and _IN_UNITS.search(gold):
        second = _U.sub("", second)
    if squash(first) == squash(second):
        return trace.compared("same text", first, second, True)
    if _echo(second, question):
        return trace.compared("copied from the question", first, second, False)
    if len(second) > MAX_ANSWER:
        return trace.compared(f"longer than {MAX_ANSWER} characters", first, second, False)
    ours, theirs = parse(first), parse(_as_written_by(first, second))
    if ours.kind != "atom" or theirs.kind != "atom":
        return trace.compared(f"{ours.kind} and {theirs.kind}", first, second, _same(ours, theirs)) or _converted(
            first, second, question
        )
    return _same(ours, theirs) or _converted(first, second, question)


_IN_UNITS = re.compile(r"\b(?:sq(?:uare)?\.?\s*|cubic\s*)?units?\b|单位", re.IGNORECASE)
_U = re.compile(r"(?<=[\d)}])\s*(?:sq(?:uare)?\.?\s*)?u(?:\s*\^\s*\{?\s*[23]\s*\}?)?$")
"""``u^2``: square units in a ground truth; elsewhere ``u`` is a variable."""


def other_percent(gold: str, pred: str, question: str = "") -> bool:
    """Return True if one is ``25`` and the other ``25\\%``, unless the question asks for per cent."""
    if not (_PERCENT.search(gold) or _PERCENT.search(pred)) or _PERCENT.search(question):
        return False
    first, second = quantity(clean(gold)), quantity(_outer(clean(pred), _EQUALS)[-1])
    other = bool(first and second and first.percent != second.percent and first.value == second.value != 0)
    if other:
        trace.compared("per cent, which the question does not ask for", gold, pred, False)
    return other


def _as_written_by(gold: str, pred: str) -> str:
    """Drop what the gold leaves out from a prediction: option letter, numeral in words, another name of the
    constant."""
    if not (pred[0] == "(" or pred[0].isalpha() or pred[-1] in ")cKk"):
        return pred
    if not re.search(r"[A-J]", gold) and (label := _LABEL.match(pred) or _LABEL_AFTER.search(pred)):
        bare = (pred[: label.start()] + pred[label.end() :]).strip()
        if bare and not re.search(r"[A-J]", bare):
            pred = bare
    if _NUMERAL.match(pred) and quantity(gold):
        digits = with_digits(pred)
        return digits if _COUNTED.fullmatch(digits) else pred
    if gold.endswith("C") and (constant := _INTEGRATED.search(pred)):
        letters = re.sub(r"\\[a-zA-Z]+", "", gold[:-1] + pred[: constant.start()])
        if re.search(r"\+\s*C$", gold) and not re.search(rf"[A-Z{pred[-1]}]", letters):
            return f"{pred[:-1]}C"
    return pred


def _converted(gold: str, pred: str, question: str) -> bool:
    """Return True if two values of one dimension are equal after conversion, unless the question asks for a unit."""
    first = quantity(gold)
    bare, unit = ("", first.unit) if first else _without_unit(gold)
    if not unit or measures.asks_for_unit(question):
        return False
    sides = _outer(pred, _EQUALS)
    if len(sides) == 2 and sides[0] and _is_lhs(sides[0]):
        pred = sides[1]
    if first or quantity(pred):
        same = bool(first and measures.same(gold, pred, convert=True))
        return trace.compared("units of one dimension", gold, pred, same)
    gold, (pred, other) = bare, _without_unit(pred)
    times = measures.ratio(unit, other) if unit and other and unit != other else None
    if times is None or not math_algebra.worked_out(pred):
        return False
    return trace.compared(
        "units of one dimension",
        gold,
        pred,
        math_algebra.same(gold, rf"\frac{{{times.numerator}}}{{{times.denominator}}}({pred})"),
    )


def _echo(pred: str, question: str) -> bool:
    """Return True if an expression is copied from the question. Numbers and names do not count: both may contain
    them."""
    text = squash(pred)
    if len(text) < 4 or not question or not re.search(r"[+\-*/^=\\!]", text) or quantity(pred) is not None:
        return False
    return text in squash(clean(question[-MAX_ANSWER:]))


def _same(gold: Expression, pred: Expression) -> bool:
    if gold.name and pred.name and gold.name != pred.name:
        return False
    gold, pred = _right_side(gold), _right_side(pred)
    if gold.kind == pred.kind == "atom":
        return same_atom(gold.text, pred.text)
    if "logic" in (gold.kind, pred.kind):
        return _joined_by(gold) == _joined_by(pred) and _same_unordered(gold.items, pred.items)
    if "," in gold.text + pred.text and {gold.kind, pred.kind} == {"atom", "list"}:  # 100,200 may be a list
        gold, pred = _as_list(gold), _as_list(pred)
    if pred.kind in ("list", "set") and _defines(gold) and not any(_EQUALS.search(item.text) for item in pred.items):
        return not pred.solutions and _same_ordered(gold.items, pred.items)
    if gold.kind in ("list", "set") and pred.kind in ("list", "set"):
        return _same_unordered(gold.items, pred.items) or _same_shared_name(gold, pred)
    if gold.kind == pred.kind == "union":
        return _same_unordered(gold.items, pred.items) or _algebra(gold.text, pred.text)
    if gold.kind == pred.kind == "tuple":
        return gold.brackets == pred.brackets and _same_ordered(gold.items, pred.items)
    if gold.kind == "tuple" and gold.brackets == "()" and not gold.name and pred.kind == "list":
        return not pred.solutions and _same_ordered(gold.items, pred.items)
    if gold.kind == "list" and pred.kind == "tuple" and pred.brackets == "()":  # x=1, y=2 as (1, 2)
        named = all(item.kind == "atom" and _EQUALS.search(item.text) for item in gold.items)
        return named and _same_ordered(gold.items, pred.items)
    if {gold.kind, pred.kind} == {"matrix", "tuple"}:
        gold, pred = _as_vector(gold), _as_vector(pred)
        if gold.kind == pred.kind == "tuple":
            return gold.brackets == pred.brackets and _same_ordered(gold.items, pred.items)
    if gold.kind == "matrix" and pred.kind == "tuple" and gold.brackets == "matrix":
        pred = _as_matrix(pred)
    if gold.kind == pred.kind == "matrix":
        same_shape = gold.brackets == pred.brackets and len(gold.items) == len(pred.items)
        return same_shape and all(_same_ordered(g.items, p.items) for g, p in zip(gold.items, pred.items, strict=True))
    if {gold.kind, pred.kind} == {"atom", "set"}:
        gold_items, pred_items = (node.items if node.kind == "set" else (node,) for node in (gold, pred))
        return _same_unordered(gold_items, pred_items)
    return _algebra(gold.text, pred.text)


def _joined_by(node: Expression) -> str:
    """Return the sign that joins statements; for ``p or q``, the sign that the word stands for."""
    if node.kind != "list" or re.search("[,;]", node.text):
        return node.brackets
    return r"\lor" if node.solutions else r"\land"


def _defines(node: Expression) -> bool:
    """Return True if the node gives values to different names: ``x=3, y=-2``."""
    if node.kind != "list" or node.solutions or not all(item.kind == "atom" for item in node.items):
        return False
    names = [sides[0] for item in node.items if len(sides := _outer(item.text, _EQUALS)) == 2 and is_name(sides[0])]
    return len(names) > 1 and len(names) == len(node.items) == len(set(names))


def _as_vector(node: Expression) -> Expression:
    """Return a matrix of one column or one row as a tuple."""
    if node.kind != "matrix" or node.brackets != "matrix":
        return node
    rows = [row.items for row in node.items]
    cells = rows[0] if len(rows) == 1 else tuple(row[0] for row in rows) if all(len(row) == 1 for row in rows) else ()
    return Expression("tuple", node.text, cells, "()") if len(cells) > 1 else node


def _as_matrix(node: Expression) -> Expression:
    """Return ``[[1,2],[3,4]]`` as a matrix."""
    rows = node.items
    nested = node.brackets == "[]" and all(row.kind == "tuple" and row.brackets == "[]" for row in rows)
    return (
        Expression("matrix", node.text, tuple(Expression("list", row.text, row.items) for row in rows), "matrix")
        if nested
        else node
    )


def _as_list(node: Expression) -> Expression:
    parts = split(node.text, {","}) or []
    if node.kind == "list" or any(re.match(r"0\d", part) for part in parts):
        return node
    return Expression("list", node.text, tuple(Expression("atom", part) for part in parts))


def _same_ordered(gold: tuple[Expression, ...], pred: tuple[Expression, ...]) -> bool:
    return len(gold) == len(pred) and all(_same(g, p) for g, p in zip(gold, pred, strict=True))


def _same_unordered(gold: tuple[Expression, ...], pred: tuple[Expression, ...]) -> bool:
    """Return True if gold and predicted items match one to one, in any order."""
    if len(gold) != len(pred) or len(gold) > 40:
        return False
    rest = list(pred)
    for item in gold:
        found = next((index for index, other in enumerate(rest) if _same(item, other)), None)
        if found is None:
            return False
        del rest[found]
    return True


def _same_shared_name(gold: Expression, pred: Expression) -> bool:
    """Compare lists in which one name stands for every item: ``x=1,2``."""
    changed = [Expression(node.kind, node.text, _named(node.items)) for node in (gold, pred)]
    return (
        changed[0].items != gold.items
        and _same_unordered(changed[0].items, pred.items)
        or (changed[1].items != pred.items and _same_unordered(gold.items, changed[1].items))
    )


def _named(items: tuple[Expression, ...]) -> tuple[Expression, ...]:
    parts = _EQUALS.split(items[0].text) if items and items[0].kind == "atom" else []
    if len(parts) != 2 or not is_name(parts[0].strip()) or any(_EQUALS.search(item.text) for item in items[1:]):
        return items
    return (Expression("atom", parts[1].strip()), *items[1:])


def _right_side(node: Expression) -> Expression:
    """Return the value that ``(x, y) = (1, 2)`` or ``A = [0, 1]`` defines; any other node unchanged."""
    parts = _outer(node.text, _EQUALS) if node.kind in ("atom", "union") else []
    if len(parts) != 2 or not _TUPLE_NAME.fullmatch(parts[0]):
        return node
    defined = parse(parts[1])
    return node if defined.kind in ("atom", "list") else defined


def _outer(text: str, sign: re.Pattern[str]) -> list[str]:
    return [part.strip() for part in sign.split(text)]


def _algebra(gold: str, pred: str) -> bool:
    """Compare sets written with operations ("R without 3"). Other nodes of different kinds are unequal."""
    if not re.search(r"\\(?:setminus|cup|cap|backslash)", gold + pred):
        return False
    return math_algebra.same(gold, pred)


def same_atom(gold: str, pred: str) -> bool:
    """Compare two answers without outer commas, brackets or inequality signs."""
    if not gold or not pred:
        return False
    if squash(gold) == squash(pred):
        return True
    if re.fullmatch(r"[A-J]", gold) and (choice := _CHOICE.fullmatch(pred)):
        rest = pred[choice.end(1) :]
        return (
            choice.group(1) == gold and not re.search(r"\b[A-J][.)]|\bor\b", rest[1:]) and not _LETTERS.fullmatch(rest)
        )
    if _is_text(gold):
        return trace.compared("words", gold, pred, words(gold) == words(pred))
    if gold_time := _TIME.fullmatch(gold):
        return trace.compared("time of day", gold, pred, _same_time(gold_time, pred))
    if _EQUALS.search(gold) or _EQUALS.search(pred) or _APPROX.search(pred) or _APPROX.search(gold):
        return trace.compared("equation", gold, pred, _same_equation(gold, pred))
    return _same_value(gold, pred)


def _is_text(text: str) -> bool:
    """Return True for words, False for a product of letters."""
    if re.search(r"[\d=^+*/<>\\|]", text):
        return False
    return bool(re.search(r"[A-Za-z]{3,}|[一-鿿]|[A-Za-z]{2,}\s+[A-Za-z]{2,}|^(?:no|No|NO|up|on|in|he|it|we)$", text))


def _same_time(gold: re.Match[str], pred: str) -> bool:
    match = _TIME.fullmatch(pred)
    if match is None:
        value, ratio = quantity(gold.group()), quantity(pred)  # 3:30 may be a ratio
        return bool(value and ratio and value.written and not gold.group(2) and same_quantity(value, ratio))
    half = [(part.group(2) or "").lower().replace(".", "") for part in (gold, match)]
    return gold.group(1).lstrip("0") == match.group(1).lstrip("0") and (half[0] == half[1] or not half[0])


def _same_equation(gold: str, pred: str) -> bool:
    """Compare equations and chains of equals signs. ``2x = 4`` does not match the gold ``x = 2``."""
    if _only_rounded(gold, pred):
        return False
    pred = re.sub(r"^\s*(?:\\approx|=)\s*(?![a-z=])", "", pred)
    exact = _outer(pred, _APPROX)
    if len(exact) > 1 and not _APPROX.search(gold):  # "\sqrt2 = … \approx 1.414" gives the exact value and a decimal
        return all(exact) and _same_approximated(gold, exact)
    gold_parts, pred_parts = _outer(_APPROX.sub("=", gold), _EQUALS), _outer(_APPROX.sub("=", pred), _EQUALS)
    if not all(gold_parts) or not all(pred_parts):
        return False
    if len(gold_parts) == 1:
        if len(pred_parts) == 2 and is_name(pred_parts[1]) and not _is_lhs(pred_parts[0]):
            pred_parts = pred_parts[::-1]  # 5=x
        chain = pred_parts[1:] if _is_lhs(pred_parts[0]) else pred_parts
        if not _is_lhs(pred_parts[0]) and not all(is_constant(part) for part in chain):
            return same_atom(gold, chain[-1]) and _identity(chain)
        return bool(chain) and same_atom(gold, chain[-1]) and all(_agree(part, chain[-1]) for part in chain[:-1])
    gold_named, pred_named = _is_lhs(gold_parts[0]), _is_lhs(pred_parts[0])
    if len(pred_parts) == 1:
        return gold_named and same_atom(gold_parts[-1], pred_parts[0])
    if gold_named and pred_named and squash(gold_parts[0]) == squash(pred_parts[0]):
        return same_atom(gold_parts[-1], pred_parts[-1]) and all(
            _agree(part, pred_parts[-1], strict=True) for part in pred_parts[1:-1]
        )
    if len(gold_parts) != 2 or len(pred_parts) != 2:
        return False
    if gold_named and is_constant(gold_parts[1]):
        turned = is_name(pred_parts[1]) and squash(pred_parts[1]) == squash(gold_parts[0])
        return turned and same_atom(gold_parts[1], pred_parts[0])
    if math_algebra.unevaluated(gold, pred):
        return False
    return math_algebra.same(gold, pred)


def _only_rounded(gold: str, pred: str) -> bool:
    """Return True if ``pred`` is ``\\approx 3`` for an exact gold 3; a decimal with enough digits is accepted."""
    sides = _outer(pred, _APPROX)
    exact = quantity(gold) if len(sides) == 2 and (not sides[0] or is_name(sides[0])) else None
    value = quantity(sides[1]) if exact and exact.places is None and not exact.unit else None
    return value is not None and (value.places is None or value.digits < MIN_ROUNDED_DIGITS)


def _same_approximated(gold: str, exact: list[str]) -> bool:
    """Return True if the value before or after all ``\\approx`` is the answer and no other value appears:
    ``n = 5 \\approx 7`` would be right for both."""
    members = [part for side in exact for part in _outer(side, _EQUALS)]
    members = [_without_unit(part)[0] for part in (members[1:] if _is_lhs(members[0]) else members)]
    if not all(members) or not all(_agree(part, exact[-1]) for part in members[:-1]):
        return False
    if same_atom(gold, exact[-1]):
        return True
    one_value = not _is_lhs(exact[0]) and all(_agree(part, exact[-1], strict=True) for part in members[:-1])
    return one_value and same_atom(gold, exact[0])


def _is_lhs(text: str) -> bool:
    """Return True for a left side that an equation may define: a variable, ``f(x)``, ``AB``, "the area"."""
    if _CONDITION.match(text):
        return False
    return (
        is_name(text)
        or bool(_FUNCTION.fullmatch(text))
        or bool(re.fullmatch(r"\\(?:angle|vec|overline|triangle|sin|cos|tan)\s*\{?\s*\w+(?:_\{\w+\})?\s*\}?", text))
    )


def _agree(first: str, last: str, strict: bool = False) -> bool:
    """Return True if a member of a chain has the same constant value, since "3 = 5" hedges. ``strict``: formulas
    too."""
    if squash(first) == squash(last):
        return True
    number, value = quantity(first), quantity(last)
    if number and value:
        return same_quantity(number, value) or _rounded(number, value)
    if not is_constant(first):
        formula = strict and not _is_text(first) and not math_algebra.unevaluated("", first)
        return not formula or math_algebra.same(last, first)  # without a formula only the value is the answer
    if value and value.places is not None:
        exact = math_algebra.expression(first) if math_algebra.tractable(first) else None
        return exact is not None and _close(exact, value)
    return _same_value(last, first, strict=False)


def _rounded(first: Quantity, last: Quantity) -> bool:
    """Return True if one number is the other rounded; a decimal after \\approx may have few digits."""
    places = [quantity.places for quantity in (first, last) if quantity.places is not None]
    return bool(places) and abs(first.value - last.value) * 2 * 10 ** min(places) <= 1


def _close(exact: object, decimal: Quantity) -> bool:
    try:
        return abs(float(exact.doit()) - float(decimal.value)) <= 0.51 * 10.0 ** -(decimal.places or 0)  # type: ignore[attr-defined]
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        return False


def _identity(chain: list[str]) -> bool:
    """Return True if ``(x+1)^2 = x^2+2x+1`` holds; the last member is then the value."""
    return all(math_algebra.same(part, chain[-1]) for part in chain[:-1])


def _same_value(gold: str, pred: str, strict: bool = True) -> bool:
    """Compare numbers and expressions with their units. ``strict`` refuses a sum that is not worked out."""
    first, second = quantity(gold), quantity(pred)
    if first and second:
        return trace.compared("numbers with units", gold, pred, same_quantity(first, second))
    return trace.compared("expressions", gold, pred, _same_expression(gold, pred, first, second, strict))


def _same_expression(gold: str, pred: str, first: Quantity | None, second: Quantity | None, strict: bool) -> bool:
    """Compare expressions, at most one of them a written number."""
    if not first and not second:
        gold, gold_unit = _without_unit(gold)
        pred, pred_unit = _without_unit(pred)
        if gold_unit and pred_unit and gold_unit != pred_unit:
            return False
        if squash(gold) == squash(pred):
            return True
    elif second is None:
        pred, unit = _without_unit(pred)
        if first is None or (unit and first.unit and unit != first.unit):
            return False
        if strict and not math_algebra.stands_for(first, pred):
            return False
        return not math_algebra.unevaluated(gold, pred) and math_algebra.same_number(first, pred)
    else:
        gold, unit = _without_unit(gold)
        if unit and second.unit and unit != second.unit:
            return False
        return math_algebra.same_number(second, gold)
    if _is_text(gold) or _is_text(pred) or math_algebra.unevaluated(gold, pred):
        return False
    if strict and not math_algebra.worked_out(pred) and math_algebra.worked_out(gold):
        return False
    return math_algebra.same(gold, pred)


_TRAILING_UNIT = re.compile(
    r"(?P<value>.*[\d})!]|.*\\(?:pi|infty))\s+(?P<unit>[A-Za-z一-鿿][A-Za-z一-鿿/^{}\d "
    r"]*)|(?P<value2>.*[\d})])(?P<unit2>[一-鿿]+)"
)


def _without_unit(text: str) -> tuple[str, str]:
    """Split an expression from a known unit after it: ``12\\pi cm`` -> (``12\\pi``, ``cm``)."""
    match = _TRAILING_UNIT.fullmatch(text)
    if match is None:
        return text, ""
    unit = units.unit_of(" " + (match["unit"] or match["unit2"]))
    if not unit or (unit == "deg" and math_algebra.has_angle(text)):
        return text, ""
    return (match["value"] or match["value2"]).strip(), unit
