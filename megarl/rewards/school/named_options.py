"""Options that an answer names: by letter, circled number or the option's text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megarl.rewards.answer import selections
from megarl.rewards.answer.normalize import half_width
from megarl.rewards.school import read as k12_read
from megarl.rewards.school.short import same_short

_ALONE_FORM = r"(?<![A-Za-z0-9]){}(?![A-Za-z0-9])"
_ALONE = re.compile(_ALONE_FORM.format("[A-H]"))
_ARTICLE = re.compile(r"^(?:An?|The)\s+(?=[a-z])")
_BEGINS = re.compile(r"^(?:an?|the)\s", re.IGNORECASE)
_COUNTED = re.compile(
    r"(?:\d+|[零一二两三四五六七八九十百千]+|[A-Za-z-]+)\s*(?:.*?\b(?P<noun>[A-Za-z]{3,})|[一-鿿]+(?P<han>[一-鿿]))"
)
_TEXTS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}")
_BETWEEN = re.compile(r"(?:[\s,;、&+|]|\.(?!\d)|\band\b|和|与|及|以及)+", re.IGNORECASE)
_LEAD = re.compile(r"(?:both\s+)?(?:(?:the|an?)\s+)?", re.IGNORECASE)
_PARTS = re.compile(r"\s*(?:[,;、&\n]|\band\b|和|与|以及)\s*", re.IGNORECASE)


_DENIED = {"false", "wrong", "incorrect", "not correct", "no", "错", "错误", "不对", "不正确"}
"""Text after a letter that denies it: ``B: false``."""


def named(text: str, options: Mapping[str, str], several: bool = False) -> set[str] | None:
    """Return the letters that a text names, also by option texts; None if it names none or contradicts itself."""
    if several and options and (found := by_texts(text, options)):
        return found
    matching = _matching(text, options)
    if len(matching) == 1:
        (letter,) = matching
        article = {"A"} if _BEGINS.match(options[letter]) and _BEGINS.match(_plain(text)) else set()
        others = _standing(text) & set(options) - matching - _standing(options[letter]) - article
        return None if others else matching  # "80 (A)" where option C is 80: here A is not a unit
    alone = _standing(text) & set(options)
    if len(alone) == 1:  # "80 (C)"
        (letter,) = alone
        if same_short(options[letter], re.sub(rf"[\[(（]?{_ALONE_FORM.format(letter)}[\])）]?", "", text)):
            return {letter}
    letters = k12_read.letters(text)
    if letters and len(letters) == 1 and options:
        rest = k12_read.after_letter(text)
        of_rest = {letter for letter, option in options.items() if rest and same_short(option, rest)}
        if not of_rest and rest.strip(" .。").casefold() in _DENIED:
            return None
        return set(letters) if not of_rest or set(letters) <= of_rest else None
    if letters:
        return set(letters)
    return _of_parts(text, options) if several and options else None


def _matching(text: str, options: Mapping[str, str]) -> set[str]:
    said = k12_read.plain(text)
    written = {letter for letter, option in options.items() if said and k12_read.plain(option) == said}
    exact = {letter for letter in written if options[letter].strip() == text.strip()}  # Co and CO
    return (
        exact
        or {letter for letter in written if same_short(options[letter], text)}
        or written
        or {
            letter for letter in options if same_short(options[letter], text) and not _other_noun(options[letter], text)
        }
    )


def _other_noun(option: str, text: str) -> bool:
    """Return True if two counts are of different things: ``two birds`` and ``two cats``."""
    found = _COUNTED.fullmatch(option.strip()), _COUNTED.fullmatch(_plain(text).rstrip("."))
    if not (found[0] and found[1]):
        return False
    first, second = (match["noun"] or match["han"] for match in found if match)
    return first.isascii() == second.isascii() and first.lower().rstrip("s") != second.lower().rstrip("s")


def _plain(text: str) -> str:
    """Remove ``\\text`` and markdown."""
    return _TEXTS.sub(r"\1", half_width(text).replace("**", "")).strip()


def _of_parts(text: str, options: Mapping[str, str]) -> set[str] | None:
    for parts in (k12_read.split_blanks(text), _PARTS.split(text)):
        found = [named(part, options) for part in parts if part] if len(parts) <= 2 * len(options) else []
        if len(found) > 1 and all(found):
            return set().union(*(part for part in found if part))
    return None


def _standing(text: str) -> set[str]:
    """Return the capital letters that stand alone and are not an article."""
    return set(_ALONE.findall(_ARTICLE.sub("", _plain(text))))


def by_texts(text: str, options: Mapping[str, str]) -> set[str] | None:
    """Return the letters of a text that has only option texts, each perhaps after its letter: ``A. cat and the dog``.
    Otherwise None."""
    text = _bare(text)
    texts = {letter: _bare(option) for letter, option in options.items() if _bare(option)}
    if len(text) > 1000 or not any(option in text for option in texts.values()):
        return None
    failed: set[int] = set()

    def read(at: int) -> frozenset[str] | None:
        if at >= len(text):
            return frozenset()
        if at in failed:
            return None
        for letter, end in _items(text, at, texts):
            rest = read(end)
            if rest is not None:
                return rest | {letter}
        failed.add(at)
        return None

    start = _BETWEEN.match(text)
    return set(read(start.end() if start else 0) or ()) or None


def _bare(text: str) -> str:
    text = re.sub(
        r"\$|\\[()\[\],;! ]|\*\*|`|[\"]",
        " ",
        _TEXTS.sub(r" \1 ", half_width(text.replace("、", "\0")).replace("\0", "、").replace(r"\\", ";")),
    )
    return " ".join(text.split()).rstrip(".").casefold()


def _items(text: str, at: int, texts: Mapping[str, str]) -> Sequence[tuple[str, int]]:
    """Return (letter, start of the next item) of each option at position ``at``, the longest text first."""
    lead = _LEAD.match(text, at)
    starts = {at, lead.end() if lead else at}
    found = []
    for letter, option in texts.items():
        label = re.compile(rf"[(\[]?{re.escape(letter.casefold())}[)\]]?\s*[.、:)]?\s*").match(text, at)
        for start in starts | ({label.end()} if label else set()):
            between = _BETWEEN.match(text, start + len(option))
            end = start + len(option)
            if text.startswith(option, start) and (between or end == len(text)):
                found.append((letter, between.end() if between else end))
    return sorted(found, key=lambda item: -len(texts[item[0]]))


def same_circled(wanted: Sequence[int], pred: str, options: Mapping[str, str]) -> bool:
    """Return True if a prediction names the circled numbers: ``②``, ``2``, ``(2)`` or the statements after them."""
    if selections.numbers(pred) is not None:
        return selections.same_selection(wanted, pred)
    if options:
        found = by_texts(pred, options)
        return found is not None and sorted(map(selections.label, found), key=str) == sorted(wanted, key=str)
    first, rest = pred.strip()[:1], pred.strip()[1:]  # ② osmosis
    return (
        selections.circled(first) == list(wanted)
        and selections.circled_in(rest) == []
        and not re.search(r"或|不|\bor\b|\bnot\b|\d", rest)
    )
