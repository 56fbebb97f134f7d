"""Compare orders and selections: ``③①④②`` as ``3142``, ``B→A→C`` as ``BAC``, ``a>b>c`` as ``c<b<a``, ``①③`` in any
order."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from megarl.rewards.answer.normalize import half_width

_RUNS = ((0x2460, 20), (0x2474, 20), (0x2776, 10), (0x24F5, 10))
"""First sign and length of each series of number signs: ① ⑴ ❶ ⓵."""
_CIRCLED = {chr(first + k): k + 1 for first, length in _RUNS for k in range(length)} | {
    "➀": 1,
    "➁": 2,
    "➂": 3,
    "➃": 4,
    "➄": 5,
}
_SIGN = f"[{''.join(_CIRCLED)}]"
_TEXTS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|textcircled)\s*\{([^{}]*)\}")
_ARROW = r"(?:-*[-=]>|→|⟶|➔|➡️?|⇒|\\(?:to|rightarrow|longrightarrow|Rightarrow)(?![a-z]))"
_SEPARATOR = rf"\s*(?:(?:{_ARROW}|[,;、>|]|-+(?![->])|—+(?!—)|\band\b|和|与|及|\bthen\b)\s*){{1,3}}"
_MARKED = rf"(?:\(\s*{_SIGN}\s*\)|{_SIGN}|\(\s*\d{{1,2}}\s*\))"
_NUMBER = rf"(?:{_MARKED}|\d{{1,2}}(?!\d))"
_NOISE = re.compile(
    r"^(?:(?:the\s+)?(?:correct\s+)?(?:options?|choices?|answers?|"
    r"order)\s*(?:is|are|:)?|(?:正确的?)?(?:选项|答案|顺序|序号|选择|应选|故选|选|第|只有|只)(?:是|为|:)?"
    r"|only)\s*|\s*[个项]?[.。;!]*$",
    re.IGNORECASE,
)
_NUMBERS = re.compile(rf"{_NUMBER}(?:(?:{_SEPARATOR}|\s+){_NUMBER})*|{_MARKED}(?:(?:{_SEPARATOR}|\s*){_MARKED})*")
_LETTERS = re.compile(rf"[A-J](?:(?:{_SEPARATOR}|\s*)[A-J])+|[a-j](?:(?:{_SEPARATOR}|\s*)[a-j])+")
_ARROWS = re.compile(_ARROW)
_TURNED_ARROW = re.compile(r"\s*(?:←|⟵|⇐|\\(?:leftarrow|longleftarrow|gets)(?![a-z]))\s*")
_LISTED = re.compile(r"\s*[;\n|]\s*|\s*[、,]\s*|\s+and\s+|-{2,}|—+")
_CHAIN = re.compile(r"(<|>|≤|≥)")
_RELATIONS = (
    (re.compile(r"\\leq?(?:slant)?(?![a-z])|<=|⩽"), "≤"),
    (re.compile(r"\\geq?(?:slant)?(?![a-z])|>=|⩾"), "≥"),
    (re.compile(r"\\lt(?![a-z])"), "<"),
    (re.compile(r"\\gt(?![a-z])"), ">"),
)
_TURNED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}
Same = Callable[[str, str], bool]


def _bare(text: str) -> str:
    text = re.sub(r"\\textcircled\s*\{?\s*(\d)\s*\}?", lambda match: chr(0x245F + int(match[1])), text)
    text = _TEXTS.sub(r" \1 ", half_width(text.replace("、", "\0")).replace("\0", "、"))
    return re.sub(r"\$|\\[()\[\],;! ]|\*\*|`|[\"']", " ", text).strip()


def _forward(text: str) -> str:
    """Return ``B→A→C`` for ``C←A←B``; a text with arrows in both directions is unchanged."""
    items = _TURNED_ARROW.split(text)
    return text if len(items) < 2 or re.search(_ARROW, text) else "→".join(reversed(items))


def circled(text: str) -> list[int] | None:
    """Return the numbers of a text that has only circled (or bracketed) numbers: a gold ``②`` or ``①→③→②``."""
    text = _NOISE.sub("", _NOISE.sub("", _bare(text)))
    if not re.search(_SIGN, text) or re.search(r"\d", text) or not _NUMBERS.fullmatch(text):
        return None
    return [_CIRCLED[sign] for sign in re.findall(_SIGN, text)]


def numbers(text: str) -> list[int] | None:
    """Return a prediction's numbers, circled, bracketed or in digits; None if it has other text."""
    text = _NOISE.sub("", _NOISE.sub("", _bare(text)))
    if not _NUMBERS.fullmatch(text):
        return None
    return [_CIRCLED.get(sign) or int(sign) for sign in re.findall(rf"{_SIGN}|\d+", text)]


def circled_in(text: str) -> list[int]:
    """Return every circled number of a text."""
    return [_CIRCLED[sign] for sign in re.findall(_SIGN, text)]


def label(name: str) -> int | None:
    """Return the number of an option named ``②`` or ``2``."""
    found = numbers(name)
    return found[0] if found and len(found) == 1 else None


def same_selection(gold: Sequence[int], pred: str) -> bool:
    """Return True if ``pred`` has the same numbers, in any order."""
    found = numbers(pred)
    return found is not None and len(found) == len(set(found)) and set(found) == set(gold)


def compare(gold: str, pred: str, same: Same) -> bool | None:
    """Return True if ``pred`` is the order or selection ``gold``; None if gold is neither. ``same`` compares items."""
    gold, pred = _forward(gold.strip(" $")), _forward(pred.strip(" $"))
    if not re.search(rf"{_ARROW}|{_SIGN}|[<>＜＞≤≥]|\\[lg][et]|[A-JＡ-Ｊ]\W*[A-JＡ-Ｊ]|\d\D{{0,3}}\d", gold):
        return None
    for read in (_of_circled, _of_chain, _of_digits, _of_letters, _of_arrows):
        verdict = read(_bare(gold), pred, same)
        if verdict is not None:
            return verdict
    return None


def _of_circled(gold: str, pred: str, same: Same) -> bool | None:
    wanted = circled(gold)
    if wanted is None:
        return None
    selection = not _ARROWS.search(gold) and wanted == sorted(wanted)
    if selection and (len(wanted) < 3 or wanted != list(range(1, len(wanted) + 1))):  # ①②③ may be an order
        return same_selection(wanted, pred)
    return _in_order(wanted, pred)


def _of_digits(gold: str, pred: str, same: Same) -> bool | None:
    """Compare ``3142`` or ``3, 1, 4, 2``: every number once, and either not ascending or with arrows."""
    digits = [int(digit) for digit in gold] if re.fullmatch(r"\d{3,9}", gold) else numbers(gold)
    arrows = bool(_ARROWS.search(gold))
    if digits is None or len(digits) < (2 if arrows else 3) or sorted(digits) != list(range(1, len(digits) + 1)):
        return None
    if not arrows and digits == sorted(digits):
        return None
    return _in_order(digits, pred) or (re.fullmatch(r"\d+", gold) is not None and same(gold + ".0", pred))


def _in_order(wanted: list[int], pred: str) -> bool:
    together = _NOISE.sub("", _bare(pred))
    if len(wanted) > 2 and max(wanted) < 10 and together == "".join(map(str, wanted)):
        return True
    return numbers(pred) == wanted


def _of_letters(gold: str, pred: str, same: Same) -> bool | None:
    if not _LETTERS.fullmatch(gold):
        return None
    wanted = re.findall(r"[A-Ja-j](?![a-z]{2})", _words_out(gold))
    arrows = bool(_ARROWS.search(gold))
    if (
        len(wanted) < (2 if arrows else 3)
        or len(set(wanted)) < len(wanted)
        or (wanted == sorted(wanted) and not arrows)
        or gold.islower()
    ):
        return None
    text = _NOISE.sub("", _NOISE.sub("", _bare(pred)))
    return (
        bool(_LETTERS.fullmatch(text))
        and [letter.upper() for letter in re.findall("[A-Ja-j]", _words_out(text))] == wanted
    )


def _words_out(text: str) -> str:
    return re.sub(r"\\[a-zA-Z]+|\band\b|\bthen\b", " ", text)


def _of_chain(gold: str, pred: str, same: Same) -> bool | None:
    """Compare two or more < or > between names or constants; ``1<x<2`` is an interval and not compared here."""
    items, signs = _chain(gold)
    constants = [not re.search(r"[A-Za-z一-鿿]", re.sub(r"\\[a-z]+", "", item)) for item in items]
    if len(items) < 3 or len({sign in "<≤" for sign in signs}) > 1 or (any(constants) and not all(constants)):
        return None
    found, theirs = _chain(_bare(pred))
    if len(found) == len(items) and [_TURNED[sign] for sign in reversed(theirs)] == signs:
        found, theirs = found[::-1], signs
    if len(found) == 1 and set(signs) <= {"<", ">"}:  # 3, 2, 1 for 3>2>1
        found, theirs = _parts(_bare(pred)), signs
    return theirs == signs and _pairwise(items, found, same)


def _chain(text: str) -> tuple[list[str], list[str]]:
    for pattern, sign in _RELATIONS:
        text = pattern.sub(sign, text)
    parts = [part.strip() for part in _CHAIN.split(re.sub(_ARROW, "\0", text))]
    return parts[::2], parts[1::2]


def _of_arrows(gold: str, pred: str, same: Same) -> bool | None:
    items = [part.strip() for part in _ARROWS.split(gold)]
    if len(items) < 2 or not all(items) or any(len(item) > 60 for item in items):
        return None
    bare = re.sub(r"[.。]$", "", _bare(pred))
    if all(re.fullmatch("[一-鿿]", item) for item in items) and bare == "".join(items):
        return True
    found = [part.strip() for part in _ARROWS.split(bare)]
    return _pairwise(items, found if len(found) > 1 else _parts(bare), same)


def _parts(text: str) -> list[str]:
    return [re.sub(r"^and\s+", "", part.strip()) for part in _LISTED.split(text) if part.strip()]


def _pairwise(gold: list[str], pred: list[str], same: Same) -> bool:
    return len(gold) == len(pred) and all(pred) and all(map(same, gold, pred))
