"""Notations of school subjects: chemical formulas and equations, and relation signs in words.

Case, counts, charges and coefficients matter; notation, the order of an equation's terms and conditions over its arrow
do not.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from megarl.rewards.answer.normalize import half_width

_ELEMENTS = """H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb
Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu
Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu"""
ELEMENTS = frozenset(_ELEMENTS.split())
WORDS = frozenset(("He", "In", "As", "No", "Be", "At", "I", "Os", "La", "Po", "Ho", "Pa", "Am", "Re"))
"""Symbols that are also words, names or units: alone they are not a formula."""
SINGLE_CAPITALS = frozenset(
    ["CO", "NO", "HF", "HI", "KI", "KF", "KOH", "CN", "OH", "HCN", "KCN", "CS", "BN", "HCO", "KBH", "NOF"]
)
"""Formulas of one-letter elements only; other capitals are points or abbreviations."""
MOLECULES = frozenset(["H2", "N2", "O2", "F2", "I2", "O3", "S8", "P4", "C60"])
"""Molecules of one one-letter element; any other such text is an indexed name."""
MAX_LENGTH = 200

_SUPER = {sign: plain for sign, plain in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-", strict=True)}
_SUB = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-")
_GROUP = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_REPLACEMENTS = [
    (re.compile(pattern), to)
    for pattern, to in (
        (r"\\(?:ce|mathrm|text|textrm|mathbf|textbf|mathsf|rm|operatorname|boldsymbol|bm)\s*" + _GROUP, r"\1"),
        (r"\\(?:ce|mathrm|text|textrm|mathbf|textbf|mathsf|rm|operatorname|boldsymbol|bm)\s*" + _GROUP, r"\1"),
        (r"\$|\\[()\[\],;:! ]|\*\*|`|\\q?quad(?![a-z])|\\(?:left|right|displaystyle|rm)(?![a-z])|~", " "),
        (r"\\(?:xrightarrow|xlongequal|xlongrightarrow|xrightleftharpoons)\s*(?:\[[^\]]*\])?\s*" + _GROUP, " → "),
        (
            r"\\(?:stackrel|overset|underset)\s*"
            + _GROUP
            + r"\s*\{\s*(?:=[=\s]*|-+>|→|\\[a-z]*(?:arrow|to|equal))\s*\}",
            " → ",
        ),
        (r"<=+>|<-+>|⇌|⇋|↔|\\(?:rightleftharpoons|leftrightharpoons|leftrightarrow)(?![a-z])", " ⇌ "),
        (r"[-=]+>|→|⟶|➔|⇒|\\(?:to|rightarrow|longrightarrow|Rightarrow)(?![a-z])", " → "),
        (r"→\s*\[[^\]]*\]", "→"),
        (
            r"-+\s*\(?\s*[一-鿿△Δ,、]+\s*\)?\s*-*\s*→|→\s*\^?\s*[({]\s*(?:[一-鿿△Δ,、]|\\Delta|\\triangle)+\s*[)}]",
            " → ",
        ),
        (r"=+\s*[(]?\s*(?:[一-鿿△Δ,、]+)\s*[)]?\s*=+", "="),
        (r"=(?:\s*=)*", "="),
        (r"\\uparrow|(?<=\w)\s\^(?=\s|$)", "↑"),
        (r"\\downarrow|(?<=\w)\sv(?=\s|$)", "↓"),
        (r"\\(?:cdot|bullet|ast)(?![a-z])|[·•∙⋅*]|(?<=[\da-zA-Z)])\.(?=\d*[A-Z])", "·"),
        (r"\{\}", ""),
        (r"(?<=[A-Za-z)\]])\s*_\s*\{?\s*(\d+)\s*\}?", r"\1"),
        (r"\s+(?=[_^·↑↓])|(?<=[·^_])\s+|(?<=[A-Za-z\d)\]])\s+(?=[A-Z(\[])", ""),
        (r"\^\s*(\d+)(?=[A-Z_{])", r"^{\1}"),
        (r"_\s*(\d+)", r"_{\1}"),
        (r"\^\s*(\d*[+-])(?!\d)", r"^{\1}"),
    )
]

_BODY = r"(?:[A-Z][a-z]?|[()\[\]]|(?<=[A-Za-z)\]])\d+)+"
_TERM = re.compile(
    rf"\s*(?P<coefficient>\d+(?:/\d+)?)?\s*(?:(?P<isotope>(?:[\^_]\{{\d+\}}){{0,2}})(?P<body>{_BODY}(?:·\d*{_BODY})*)|"
    rf"(?P<electron>e(?=\^\{{-|-))|(?P<han>[一-鿿]+))"
    r"(?P<charge>\^\{[^{}]*\}|[+-](?=\s*(?:\+|-\s*\d*e|$)))?(?P<state>\((?:s|"
    r"l|g|aq)\))?\s*(?P<mark>[↑↓])?\s*(?P<then>\+|-(?=\s*\d*e)|$)"
)
_ATOM = re.compile(r"([A-Z][a-z]?)(\d*)|([(\[])|[)\]](\d*)|(·)(\d*)")


@dataclass(frozen=True)
class Term:
    name: str
    """Canonical form of the name: ``SO4^2-``."""
    coefficient: str
    mark: str = ""
    """↑ or ↓."""
    state: str = ""
    telling: bool = False
    """True if it cannot be a word, an abbreviation or the name of a point."""
    atoms: Counter[str] = field(default_factory=Counter, hash=False, compare=False)


@dataclass(frozen=True)
class Reading:
    sides: tuple[tuple[Term, ...], ...]
    sign: str = ""
    """Sign of an equation: ``→`` (also for =) or ``⇌``."""


def _written(text: str) -> str:
    text = re.sub(
        "[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", lambda run: "^{" + "".join(_SUPER[sign] for sign in run.group()) + "}", text
    ).translate(_SUB)
    text = half_width(text)
    for pattern, to in _REPLACEMENTS:
        text = pattern.sub(to, text)
    return re.sub(r"\s*\([一-鿿]+\)$", "", text.strip().rstrip(".;,").strip())


def may_be(text: str) -> bool:
    """Return True for capitals without lower-case words: a cheap check before ``chemical``."""
    return len(text) <= MAX_LENGTH and bool(re.search(r"\\ce|[A-ZＡ-Ｚ]|[一-鿿]\s*\+", text))


@functools.lru_cache(maxsize=512)
def chemical(text: str) -> Reading | None:
    """Parse a gold that is unambiguously a formula or an equation; None for other texts."""
    reading = read(text)
    if reading is None:
        return None
    terms = [term for side in reading.sides for term in side]
    if reading.sign and all(term.atoms == Counter() for term in terms):
        return reading if any(len(side) > 1 for side in reading.sides) else None  # an equation in words
    if r"\ce" not in text and not any(term.telling for term in terms):
        return None
    if reading.sign and "→" not in _written(text) and "⇌" not in reading.sign and not _balanced(reading):
        return None  # P_1V_1=P_2V_2
    return reading


def read(text: str) -> Reading | None:
    """Read a formula, or the two sides of an equation."""
    if len(text) > MAX_LENGTH:
        return None
    parts = re.split("([→=⇌])", _written(text))
    sides = [_terms(side) for side in parts[::2]]
    if len(parts) > 3 or not all(sides):
        return None
    found = tuple(side for side in sides if side)
    if len(parts) == 1:
        return Reading(found) if len(found[0]) == 1 and not found[0][0].name[0] >= "一" else None
    return Reading(found, parts[1].replace("=", "→"))


def same(gold: Reading, pred: Reading | None) -> bool:
    """Return True for the same substances, counts, charges, coefficients and direction. ↑ ↓ and states are compared
    only if both have them."""
    if pred is None or gold.sign != pred.sign:
        return False
    for ours, theirs in zip(gold.sides, pred.sides, strict=True):
        if Counter((term.name, term.coefficient) for term in ours) != Counter(
            (term.name, term.coefficient) for term in theirs
        ):
            return False
    return all(_agree(gold, pred, kind) for kind in ("mark", "state"))


def _agree(gold: Reading, pred: Reading, kind: str) -> bool:
    given = [
        {(k, term.name): getattr(term, kind) for k, side in enumerate(reading.sides) for term in side}
        for reading in (gold, pred)
    ]
    return given[0] == given[1] or not all(any(marks.values()) for marks in given)


def _terms(side: str) -> tuple[Term, ...] | None:
    side, at, sign = side.strip(), 0, ""
    found: list[Term] = []
    while at < len(side):
        match = _TERM.match(side, at)
        term = _term(match, sign) if match else None
        if match is None or term is None:
            return None
        found.append(term)
        at, sign = match.end(), "-" if match["then"] == "-" else ""
        if match["then"] and at == len(side):
            return None
    return tuple(found)


def _term(match: re.Match[str], sign: str) -> Term | None:
    coefficient = sign + (match["coefficient"] or "1")
    if match["han"]:
        return Term(match["han"], coefficient, match["mark"] or "")
    if match["electron"]:
        return Term("e^-", coefficient)
    charge = (match["charge"] or "").strip("^{} ")
    body = match["body"]
    if charge and not match["charge"].startswith("^"):
        body, charge = _plain_charge(body, charge)
    atoms = _atoms(body)
    if atoms is None or not re.fullmatch(r"\d*[+-]|", charge):
        return None
    charge = charge.removeprefix("1") if len(charge) == 2 else charge
    name = f"{_ordered(match['isotope'])}{body}{'^' + charge if charge else ''}"
    telling = bool(charge or match["isotope"]) or _telling(body, bool(match["coefficient"]))
    return Term(name, coefficient, match["mark"] or "", match["state"] or "", telling, atoms)


def _plain_charge(body: str, sign: str) -> tuple[str, str]:
    """Read the charge of ``Fe3+``, ``SO42-`` and ``NH4+``: the last digit is a charge after a single atom or another
    digit."""
    digits = re.search(r"\d*$", body)
    count = digits.group() if digits else ""
    single = re.fullmatch(r"[A-Z][a-z]?\d", body)
    if single or len(count) > 1:
        return body[:-1], count[-1] + sign
    return body, sign


def _ordered(isotope: str) -> str:
    return "".join(sorted(re.findall(r"[\^_]\{\d+\}", isotope), reverse=True))


def _atoms(body: str) -> Counter[str] | None:
    """Count each element; None for other text, counts of 0 or 1, and unmatched brackets."""
    stack: list[Counter[str]] = [Counter()]
    factor, at = 1, 0
    for match in _ATOM.finditer(body):
        element, count, opened, closed, dot, water = match.groups()
        if match.start() != at or (element and element not in ELEMENTS) or (count or closed or "2") in ("0", "1"):
            return None
        at = match.end()
        if element:
            stack[-1][element] += int(count or 1) * factor
        elif opened:
            stack.append(Counter())
        elif dot:
            factor = int(water or 1)
        elif len(stack) < 2:
            return None
        else:
            inner = stack.pop()
            stack[-1].update({name: number * int(closed or 1) for name, number in inner.items()})
    return stack[0] if len(stack) == 1 and at == len(body) and stack[0] else None


def _telling(body: str, counted: bool) -> bool:
    if body in MOLECULES or body in SINGLE_CAPITALS:
        return True
    elements = re.findall(r"[A-Z][a-z]?", body)
    if any(len(element) == 2 for element in elements):
        return body not in WORDS
    return len(elements) > 1 and bool(re.search(r"\d", body)) or (counted and body in SINGLE_CAPITALS)


def _balanced(reading: Reading) -> bool:
    totals = []
    for side in reading.sides:
        total: Counter[str] = Counter()
        for term in side:
            if not re.fullmatch(r"\d+", term.coefficient):
                return True  # with electrons or fractions
            total.update({name: number * int(term.coefficient) for name, number in term.atoms.items()})
        totals.append(total)
    return totals[0] == totals[1]


_WORDS: tuple[tuple[str, str], ...] = (
    (
        "≥",
        r"(?:greater|larger|bigger|more)\s+than\s+or\s+equal\s+to|"
        r"at\s+least|(?:not|no)\s+(?:less|smaller|fewer)\s+than|大于(?:或者?)?等于|不小于|不少于|不低于",
    ),
    (
        "≤",
        r"(?:less|smaller|fewer)\s+than\s+or\s+equal\s+to|at\s+most|"
        r"(?:not|no)\s+(?:greater|more|larger|bigger)\s+than|小于(?:或者?)?等于|不大于|不多于|不超过|不高于",
    ),
    ("≠", r"not\s+equal(?:\s+to)?|unequal\s+to|不等于|不相等"),
    ("≈", r"approximately\s+equal\s+to|约等于"),
    (">", r"(?:greater|larger|bigger|more)\s+than|大于"),
    ("<", r"(?:less|smaller|fewer)\s+than|小于"),
    ("∥", r"(?<!not )parallel(?:\s+to)?|(?<!不)(?:互相)?平行于?"),
    ("⊥", r"(?<!not )perpendicular(?:\s+to)?|(?<!不)(?:互相)?垂直于?"),
    ("=", r"(?<!not )(?:equal\s+to|equals?)|(?<!不)(?<!约)等于"),
)
_COMMANDS = (
    (">", r"\\gt(?![a-z])"),
    ("<", r"\\lt(?![a-z])"),
    ("≥", r"\\geq?(?:slant)?(?![a-z])|>=|⩾"),
    ("≤", r"\\leq?(?:slant)?(?![a-z])|<=|⩽"),
    ("≠", r"\\neq?(?![a-z])|!="),
    ("≈", r"\\approx(?![a-z])"),
    ("∥", r"\\parallel(?![a-z])|//|‖"),
    ("⊥", r"\\perp(?![a-z])"),
)
_SIGNS = "".join(sign for sign, _ in _WORDS)
_TURNED = {">": "<", "<": ">", "≥": "≤", "≤": "≥"}
_LATEX = {"≥": r"\geq ", "≤": r"\leq ", "≠": r"\neq ", "≈": r"\approx "}
_WORD = re.compile("|".join(pattern for _, pattern in _WORDS))
_SAID = [(re.compile(rf"(?:\b(?:is|are|was)\s+)?(?:{pattern})"), sign) for sign, pattern in _WORDS]
_WRITTEN = [(re.compile(pattern), sign) for sign, pattern in _COMMANDS]
_BETWEEN = re.compile(r"(\S+?)\s*[与和]\s*(\S+?)\s*(?:互相)?(平行|垂直|相等)")
_DRESS = re.compile(r"\$|\\[()\[\],;! ]|\*\*|`|[\"']|\\(?:text|mathrm|mbox)\s*(?=\{)")
_SPACED = re.compile(rf"\s*([{_SIGNS}])\s*")
_FORMULA = re.compile(r"[^一-鿿]*")


@functools.lru_cache(maxsize=64)
def _signed(text: str) -> str:
    """Replace words by signs; apart from spaces nothing else changes. Cached: a comparison reads each text twice."""
    text = _DRESS.sub(" ", half_width(text)).strip().rstrip(".").strip()
    for pattern, sign in _WRITTEN:
        text = pattern.sub(sign, text)
    if match := _BETWEEN.fullmatch(text):
        text = f"{match[1]}{ {'平行': '∥', '垂直': '⊥', '相等': '='}[match[3]] }{match[2]}"
    for pattern, sign in _SAID:
        text = pattern.sub(sign, text)
    return _SPACED.sub(r"\1", text.strip(" {}"))


def in_words(text: str) -> bool:
    return bool(_WORD.search(text))


def formula(text: str) -> str:
    """Return ``x\\leq 5`` for "x is at most 5"; a text with remaining words is unchanged."""
    signed = _signed(text)
    if not in_words(text) or len(signed) < 2 or re.search(r"[一-鿿]|(?<!\\)\b[a-zA-Z]{4,}", signed):
        return text
    return re.sub("[≥≤≠≈]", lambda sign: _LATEX[sign.group()], signed)


def compare(gold: str, pred: str, same: Callable[[str, str], bool]) -> bool | None:
    """Return True if ``pred`` is the sign or comparison ``gold``, perhaps reversed or in words. None if either is no
    comparison of two plain sides, or the sides differ (False for ∥ and ⊥)."""
    if len(gold) > 80 or len(pred) > 160:
        return None
    ours = _signed(gold)
    if ours and len(ours) == 1 and ours in _SIGNS:
        return _signed(pred) == ours
    first, second = (re.split(rf"([{_SIGNS}])", text) for text in (ours, _signed(pred)))
    if len(first) != 3 or not first[0] or not first[2]:
        return None
    if len(second) != 3 or not all(_plain(part) for part in (*first, *second)):
        return None
    if first[1] == second[1] and same(first[0], second[0]) and same(first[2], second[2]):
        return True
    turned = _TURNED.get(first[1], first[1]) == second[1]
    if turned and same(first[0], second[2]) and same(first[2], second[0]):
        return True
    return False if first[1] in "∥⊥" else None


def _plain(part: str) -> bool:
    """Return True for a name, number or formula, False for words."""
    return bool(part) and not re.search(r"[一-鿿]|(?<!\\)\b[a-zA-Z]{4,}|\b(?:not|or)\b", part)
