"""Normalize answers as plain text: full-width signs, LaTeX notation, and numbers with their units.

String operations in linear time, without evaluating expressions.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fractions import Fraction

from megarl.rewards.answer import units

MAX_DIGITS = 2000
"""Maximum digits, and largest power of ten, of numbers compared by value; others are compared as text."""
MIN_ROUNDED_DIGITS = 6
"""Minimum significant digits for a decimal to equal an exact value that it rounds (math-verify's places)."""

_REMEMBERED = 300
"""Maximum characters of texts with a cached cleaned form: one verdict cleans the same few texts several times."""

_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_SIGNS: dict[int, str] = {
    ord(sign): plain
    for signs, plain in (
        ("\u3000\u00a0\u2009\u202f\u2002\u2003", " "), ("\u200b\ufeff", ""), ("−–—－﹣", "-"), ("、﹐", ","),
        ("。｡", "."),
        ("【〔「『〖", "["), ("】〕」』〗", "]"), ("“”", '"'), ("‘’", "'"), ("％﹪", "%"), ("￥", "¥"), ("＄", "$"),
    )
    for sign in signs
}  # fmt: skip
_MATH_SIGNS = str.maketrans(
    {
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "∙": r"\cdot ",
        "÷": "/",
        "∕": "/",
        "⁄": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "±": r"\pm ",
        "≤": r"\leq ",
        "≥": r"\geq ",
        "⩽": r"\leq ",
        "⩾": r"\geq ",
        "≠": r"\neq ",
        "≈": r"\approx ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "∨": r"\lor ",
        "∧": r"\land ",
        "¬": r"\neg ",
        "∠": r"\angle ",
        "ℝ": r"\mathbb{R}",
        "θ": r"\theta ",
        "α": r"\alpha ",
        "β": r"\beta ",
        "λ": r"\lambda ",
        "²": "^{2}",
        "³": "^{3}",
        "°": " degrees ",
        "℃": " degrees C ",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "⅓": r"\frac{1}{3}",
        "⅔": r"\frac{2}{3}",
        "∶": ":",
        "″": "''",
        "′": "'",
    }
)

_WORDS = re.compile(
    r"\\(?:text|mbox|textbf|textit|textrm|textnormal|mathrm|mathbf|"
    r"mathit|mathsf|operatorname|bm|boldsymbol)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_SUPERSCRIPTS = {sign: plain for sign, plain in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-", strict=True)}
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]{2,}|[⁰¹⁴⁵⁶⁷⁸⁹]")
_REPLACEMENTS = [
    (re.compile(pattern), to)
    for pattern, to in (
        (r"\\left\s*\.|\\right\s*\.", ""),
        (
            r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits|rm|bf|it|tiny|small|normalsize|[lL]arge|LARGE|[hH]uge"
            r"|underline)(?![a-zA-Z])",
            "",
        ),
        (r"^\s*\\(?:therefore|implies|Rightarrow|because)(?![a-zA-Z])", ""),
        (r"\\colon(?![a-zA-Z])|\{:\}", ":"),
        (r"\{\s*([^{}]+?)\s*\\over(?![a-zA-Z])\s*([^{}]+?)\s*\}", r"\\frac{\1}{\2}"),
        (r"\\(?:[dtc]|nice|s)frac(?![a-zA-Z])", r"\\frac"),
        (r"^\^\s*\{?\s*(\d+)\s*\}?\s*/\s*_\s*\{?\s*(\d+)\s*\}?$", r"\\frac{\1}{\2}"),
        (r"^\{\s*(\d+)\s*\}\s*/\s*\{\s*(\d+)\s*\}$", r"\1/\2"),
        (r"(\\(?:overline|bar|dot))\s*(\d)", r"\1{\2}"),
        (r"(?<=\d)\.\((\d{1,6})\)", r".\\overline{\1}"),
        (
            r"(?<![\d.])(\d{1,12}\.\d{0,12}?)(?:(\d)\2{2,}|(\d{2,6})\3+)\s*(?:\\[lc]?dots(?![a-z])|\.{3}|…)",
            r"\1\\overline{\2\3}",
        ),
        (r"^\((\w+)\)\s*_\s*\{?\s*\(?(\d+)\)?\s*\}?$", r"\1_{\2}"),
        (r"_\s*\{\s*\((\d+)\)\s*\}", r"_{\1}"),
        (r"(?<=\d)(?:\{,\}|\\,|\\!|,\\!|\\ |~)(?=\d{3}(?!\d))", ","),
        (r"(?<=\d)\s*(?:\{,\s*\}|,\\!)\s*(?=\d{3}(?!\d))", ","),
        (r"\{,\}", ","),
        (r"\\!", ""),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad|\\thinspace|\\enspace|\\hspace\s*\{[^{}]*\}|\\nonumber", " "),
        (r"\\phantom\s*\{[^{}]*\}", " "),
        (r"\s+", " "),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degrees?(?![a-zA-Z])|\\textdegree", " degrees "),
        (r"\\leq?(?:slant)?(?![a-zA-Z])|<=", r"\\leq "),
        (r"\\geq?(?:slant)?(?![a-zA-Z])|>=", r"\\geq "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\neq?(?![a-zA-Z])|!=", r"\\neq "),
        (r"\\(?:infin|infinity)(?![a-zA-Z])", r"\\infty"),
        (r"\\(?:varnothing)(?![a-zA-Z])", r"\\emptyset"),
        (r"\\(?:lbrace|lbrack)(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10} "),
        (r"\\%", "%"),
        (r"\\(?:\$|textdollar|dollar)", "$"),
        (r"\\#", "#"),
        (r"\\&", "&"),
        (r"(?<!\\)\\_", "_"),
        (r"\\(?:frac)\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\(?:frac)\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\(?:frac)\s*\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}", r"\\frac{\1}{\2}"),
        (r"(?<=\d)\s*\{\s*(\\frac\s*\{[^{}]*\}\s*\{[^{}]*\})\s*\}", r" \1"),
        (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"√\s*\(([^()]*)\)|√\s*\{([^{}]*)\}|√\s*(\d+|[a-z])", r"\\sqrt{\1\2\3}"),
        (r"\*\*", "^"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"\^\s*(-?\d{2,}|-\d)", r"^{\1}"),
        (r"(?<!\\)\*|\\ast(?![a-zA-Z])", r"\\cdot "),
        (r"(?<![\\a-zA-Z])(sin|cos|tan|cot|sec|csc|ln|log|exp|pi)(?![a-zA-Z])", r"\\\1 "),
        (r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
        (r"\s*(?:或者|或是|或)\s*", " or "),
        (r"(?<=[\w})])\s*(?:和|与|以及|且)\s*(?=[\w\\({-])", " and "),
        (r"\\vee(?![a-zA-Z])", r"\\lor "),
        (r"\\wedge(?![a-zA-Z])", r"\\land "),
        (r"\\lnot(?![a-zA-Z])", r"\\neg "),
        (r"\\angle\s*\{\s*([A-Z]\s*[A-Z]\s*[A-Z])\s*\}", r"\\angle \1"),
        (
            r"\s*[,(]?\s*(?:where |for )?(?:any |all )?(?:integers? "
            r")?[kmn]\s*(?:\\in\s*\\(?:mathbb|mathbf)\s*\{?\s*Z\s*\}?|is an integer|integer)\s*\)?\s*$",
            "",
        ),
        (r"\s+", " "),
    )
]

_VALUES = re.compile(r"[=<>]|\\(?:leq|geq|neq|in|approx|pm|mp)(?![a-zA-Z])|(?<![\^_\d])(?<![\^_]\{)\d")
"""Signs of statements in a list joined by \\lor and \\land: equations, inequalities, numbers. Without them the formula
is logic."""
_COLOUR = re.compile(r"\\(?:color|textcolor|colorbox)\s*(?:\[\w+\]\s*)?\{[\w!. -]*\}")
_OVER = re.compile(r"(?P<name>.*=)?(?P<sign>\s*-)?(?P<top>.+?)\\over(?![a-zA-Z])(?P<bottom>.+)", re.DOTALL)
"""``1 \\over 4`` without braces around it."""
_NAMELESS_UNIT = re.compile(
    r"(?<=[\d)}\]!])(\s?[a-z]|\\pi|\\infty)?\s*(?:\s(?:(?:square|sq\.?|cubic|cu\.?)\s+)?units?"
    r"(?:\s*\^\s*\{?[23]\}?|\s+(?:squared|cubed))?|\s?(?:平方|立方|个)?单位)$"
)
"""``square units``, which name no unit."""
_ANGLE = re.compile(r"\\angle\s*([A-Z])\s*([A-Z])\s*([A-Z])(?![A-Za-z'_])")


def half_width(text: str) -> str:
    """Replace full-width letters, digits and punctuation, dashes and quotation marks by ASCII."""
    return text if text.isascii() else text.translate(_WIDE).translate(_SIGNS)


def clean(text: str) -> str:
    """Normalize an answer's LaTeX: no delimiters, no spacing, words without ``\\text``, no final full stop."""
    return _clean_short(text) if len(text) <= _REMEMBERED else _clean(text)


@functools.lru_cache(maxsize=512)
def _clean_short(text: str) -> str:
    return _clean(text)


_CHOOSE = re.compile(r"\{\s*([\w+-]+)\s*\\choose\s+([\w+-]+)\s*\}|^\s*([\w+-]+)\s*\\choose\s+([\w+-]+)\s*$")


def _clean(text: str) -> str:
    text = _CHOOSE.sub(lambda match: rf"\binom{{{match[1] or match[3]}}}{{{match[2] or match[4]}}}", text)
    if not text.isascii():
        text = _SUPERSCRIPT.sub(lambda run: "^{" + "".join(_SUPERSCRIPTS[sign] for sign in run.group()) + "}", text)
        text = half_width(text).translate(_MATH_SIGNS)
    text = re.sub(r"\s+", " ", text).strip().strip("`").strip()
    text = re.sub(r"^\*\*(.*)\*\*$", r"\1", text, flags=re.DOTALL)
    if r"\\" in text and r"\begin" not in text:  # written with JSON escapes
        text = re.sub(r"\\\\(?=[a-zA-Z(){}\[\]|])", r"\\", text)
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)
    if len(re.findall(r"(?<!\\)\$", text)) % 2 == 0:  # an odd one is money
        text = re.sub(r"(?<!\\)\$", "", text)
    for _ in range(3):
        text, changed = _WORDS.subn(r" \1 ", text)
        if not changed:
            break
    if "color" in text:
        text = _COLOUR.sub(" ", text)
    for pattern, to in _REPLACEMENTS:
        text = pattern.sub(to, text)
    text = _ANGLE.sub(_angle, text)
    if _VALUES.search(text):  # "x=1 \lor x=2" lists solutions, "p \lor q" is logic
        text = re.sub(r"\s*\\lor(?![a-zA-Z])\s*", " or ", text)
        text = re.sub(r"\s*\\land(?![a-zA-Z])\s*", " and ", text)
    text = text.strip().rstrip(".,;: ").strip()
    if r"\over" in text and (over := _OVER.fullmatch(text)) and _balanced(over["top"], over["bottom"]):
        fraction = rf"\frac{{{over['top'].strip()}}}{{{over['bottom'].strip()}}}"
        text = f"{over['name'] or ''}{over['sign'] or ''}{fraction}"
    if "unit" in text or "单位" in text:
        text = _NAMELESS_UNIT.sub(lambda match: match[1] or "", text)
    while len(text) > 2 and text[0] == "{" and text.endswith("}") and _one_group(text):
        text = text[1:-1].strip()
    return text


def _angle(match: re.Match[str]) -> str:
    """Return ``\\angle B_{AC}`` for ABC and CBA. Algebra would read them as products, equal to the product ACB."""
    first, vertex, last = match.groups()
    return rf"\angle {vertex}_{{{min(first, last)}{max(first, last)}}}"


def _balanced(*texts: str) -> bool:
    """Return True if each text closes its braces and has no further ``\\over``."""
    return all(text.count("{") == text.count("}") and r"\over " not in f"{text} " for text in texts)


def _one_group(text: str) -> bool:
    depth = 0
    for index, sign in enumerate(text):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if depth == 0:
            return index == len(text) - 1
    return False


def squash(text: str) -> str:
    """Normalize for comparison as text: white space only between digits, no braces around a single sign."""
    return re.sub(r"\{(\w)\}", r"\1", re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text))


def words(text: str) -> str:
    """Normalize for comparison of words: lower case, no articles, quotation marks, brackets or full stops, single
    spaces."""
    text = re.sub(r"[\"'`*_.,;:!?(){}\[\]$\\]|\b(?:the|an|a)\b(?=\s+\w)", " ", half_width(text).casefold())
    return " ".join(re.sub(r"(?<=\w)-(?=\w)", " ", text).split())


@dataclass(frozen=True)
class Quantity:
    """A written number with its unit and form."""

    value: Fraction
    places: int | None = None
    """Digits after the decimal point; None unless a decimal."""
    digits: int = 0
    """Significant digits of a decimal."""
    percent: bool = False
    unit: str = ""
    """Symbol of a known unit, '' for none or an unknown noun."""
    written: str = ""
    """``a:b`` for ratios."""


_INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d{1,3}(?:[ ]\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(
    rf"""\s*(?P<currency>US\$|USD|RMB|[$€£¥₹])?\s*(?P<sign>[+-]?)\s*(?P<currency2>[$€£¥₹])?\s*(?:
    (?P<whole>{_INTEGER})?\s*\\frac\s*\{{\s*(?P<fsign>-?)\s*(?P<top>{_INTEGER})\s*\}}\s*\{{\s*(?P<bsign>-?)\s*(?P<bottom>{_INTEGER})\s*\}}
    |(?:(?P<whole2>{_INTEGER})[ ]+)?\(?(?P<top2>{_INTEGER})\s*/\s*(?P<bottom2>{_INTEGER})\)?(?!\s*[/\d])
    |(?P<ratio>\d+\s*:\s*\d+)(?!\s*[:\d])
    |(?P<integer>{_INTEGER})?(?:\.(?P<decimal>\d*)(?:\\(?:overline|bar|dot)\s*\{{(?P<repeat>\d+)\}})?)?
    (?:\s*(?:\\times|\\cdot|[xX])\s*10\s*\^\s*\{{?\s*(?P<power>[+-]?\d+)\s*\}}?|[eE](?P<power2>[+-]?\d+))?)
    (?:\s*(?P<scale>(?:thousand|million|billion|trillion|dozen|hundred)\b|[百千万亿]+(?![米克瓦帕分])))?
    (?:\s*(?P<percent>%|per\s?cent\b|percentage\s+points?\b|个?百分[点比]))?
    (?P<rest>.*)$""",
    re.VERBOSE | re.DOTALL,
)
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_CHINESE_SCALES = {"百": 100, "千": 10**3, "万": 10**4, "亿": 10**8}


@functools.lru_cache(maxsize=256)
def quantity(text: str) -> Quantity | None:
    """Parse a cleaned text that is a number with at most a unit after it; None for other texts."""
    match = _NUMBER.match(text) if len(text) <= 2 * MAX_DIGITS else None
    if match is None:
        return None
    got = match.groupdict()
    value, places, digits = _value(got)
    if value is None:
        return None
    rest, currency = got["rest"], got["currency"] or got["currency2"] or ""
    unit = units.unit_of(rest)
    if unit is None or (currency and unit):
        return None
    if got["sign"] == "-":
        value = -value
    if scale := got["scale"]:
        value *= _SCALES.get(scale, 1)
        for sign in scale:
            value *= _CHINESE_SCALES.get(sign, 1)
    currency = units.unit_of(currency) or "" if currency else ""
    return Quantity(
        value, places, digits, bool(got["percent"]), unit or currency, re.sub(r"\s", "", got["ratio"] or "")
    )


def _value(got: dict[str, str | None]) -> tuple[Fraction | None, int | None, int]:
    """Return (value without sign, decimal places or None, significant digits) of a match of ``_NUMBER``."""
    if got["ratio"]:
        first, second = got["ratio"].split(":")
        return (Fraction(int(first), int(second)) if _small(first, second) and int(second) else None), None, 0
    top, bottom = got["top"] or got["top2"], got["bottom"] or got["bottom2"]
    if top is not None and bottom is not None:
        whole = got["whole"] or got["whole2"] or "0"
        if not _small(top, bottom, whole) or not int(_plain(bottom)):
            return None, None, 0
        if (got["whole"] or got["whole2"]) and int(_plain(top)) >= int(_plain(bottom)):
            return None, None, 0  # 17 23/1 is the sum of 17 and 23, not a mixed number
        value = Fraction(int(_plain(top)), int(_plain(bottom)))
        return (
            (-value if got["fsign"] != got["bsign"] and (got["fsign"] or got["bsign"]) else value) + int(_plain(whole)),
            None,
            0,
        )
    integer, decimal, repeat = _plain(got["integer"] or ""), got["decimal"], got["repeat"]
    if not integer and not decimal and not repeat:
        return None, None, 0
    power = int(got["power"] or got["power2"] or 0) if _small(got["power"] or got["power2"] or "0") else MAX_DIGITS
    if not _small(integer, decimal or "", repeat or "") or abs(power) >= MAX_DIGITS:
        return None, None, 0
    shown = integer + (decimal or "")
    value = Fraction(int(shown or "0"), 10 ** len(decimal or ""))
    if repeat:
        value += Fraction(int(repeat), (10 ** len(repeat) - 1) * 10 ** len(decimal or ""))
    if decimal is None or repeat:
        return value * Fraction(10) ** power, None, 0
    return value * Fraction(10) ** power, max(len(decimal) - power, 0), len(shown.lstrip("0"))


def _plain(integer: str) -> str:
    return integer.replace(",", "").replace(" ", "")


def _small(*numbers: str) -> bool:
    return all(len(number) < MAX_DIGITS for number in numbers)


def rounds_to(decimal: Quantity, value: Fraction) -> bool:
    """Return True if ``decimal`` is ``value`` rounded to its last place, with enough digits."""
    if decimal.places is None or decimal.digits < MIN_ROUNDED_DIGITS:
        return False
    return abs(decimal.value - value) * 2 * 10**decimal.places <= 1


def same_quantity(gold: Quantity, pred: Quantity) -> bool:
    """Return True for equal values and compatible units: a missing unit or percent sign is allowed, a wrong one is
    not."""
    if (
        (gold.unit and pred.unit and gold.unit != pred.unit)
        or (gold.percent and pred.unit)
        or (pred.percent and gold.unit)
    ):
        return False
    if pred.unit.startswith("_") and pred.unit not in (gold.unit, "_10"):
        return False  # a number in another base
    if gold.written and pred.written:
        return gold.written == pred.written
    values = [gold.value]
    if gold.percent != pred.percent:
        exact = gold.value / 100 if gold.percent else gold.value
        shown = gold.value if gold.percent else gold.value * 100
        # a per cent question means the number before the sign, unless that number may be a share
        values = [exact if pred.percent is False else shown] + ([gold.value] if abs(gold.value) > 1 else [])
    return any(_same_value(value, gold, pred) for value in values)


def _same_value(value: Fraction, gold: Quantity, pred: Quantity) -> bool:
    if value == pred.value:
        return True
    if gold.percent != pred.percent:
        return False
    return rounds_to(pred, value) or rounds_to(gold, pred.value)
