"""Answers read from an image: one whole number, or a text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from megarl.rewards.answer.grammar import after_thinking, last_tag, unmarked
from megarl.rewards.answer.marks import stated
from megarl.rewards.answer.measures import TENS, with_digits
from megarl.rewards.answer.normalize import half_width
from megarl.rewards.answer.units import NUMERALS

MAX_TEXT = 300

_WORDS = rf"(?:{'|'.join(TENS)}|{'|'.join(sorted(NUMERALS, key=len, reverse=True))}|hundred|thousand|million)"
_HAN = "零〇一二两三四五六七八九十百千万"
_GROUPS = re.compile(
    rf"\b(?:(?:an?|one)\s+)?half\s+(?:a\s+)?dozen\b|\b(?:an?|{_WORDS}|"
    r"\d+)\s+dozen\b|\b(?:a|one)\s+(?:pair|couple)\b(?:\s+of\b)?|"
    r"\ba\s+(?:single|hundred|thousand|trio)\b|^single$|^dozen$"
    rf"|半打|[{_HAN}]打|[一][对双](?![一-鿿]*[对双])|俩|仨",
    re.IGNORECASE,
)
"""Counts of several words: ``two dozen``, ``a pair of``."""
_LOOSE = re.compile(
    r"\b(?:dozens?|couples?|hundreds|thousands|trios?|pairs?(?!\s+of\s+(?:\w+\s+)?(?:glasses|"
    r"sunglasses|goggles|scissors|pants|trousers|jeans|shorts|pliers|tweezers)\b))\b|几|[对双打](?=$|[一-鿿])",
    re.IGNORECASE,
)
"""Remaining words of another count: ``two pairs``, ``dozens``."""
_COUNT = re.compile(
    rf"(?P<digits>(?<![A-Za-z0-9_.])(?<!\d,)[+-]?(?:\d{{1,3}}(?:,\d{{3}})+|"
    rf"\d+)(?:\.\d+)?(?![\d,.]*[\dA-Za-z_])(?P<behind>\s*(?:[%/^*×:=+-]|\\)\s*[\d{{]?|\s*%)?)"
    rf"|\b(?P<words>(?:(?:minus|negative)\s+)?{_WORDS}(?:(?:\s+and\s+|[\s-]+){_WORDS})*)\b"
    rf"|(?P<han>负?(?:[{_HAN}]+)(?:点[{_HAN}]+)?)",
    re.IGNORECASE,
)
_NO_COUNT = re.compile(
    r"\b(?:or|not|least|most|than|between|maybe|possibly|either|"
    r"cannot|about|around|approximately|roughly|over|under(?!\s+the\b)|almost|nearly|some|several)\b"
    r"|n't\b|或|不是|至少|至多|大约|左右|超过|可能|[~≈<>≤≥±]",
    re.IGNORECASE,
)
_SECOND_COUNT = re.compile(
    r"(?<!the )(?<!in )(?<!of )(?<!\d)\d+(?:st|nd|rd|th)\b|\b[xX×]\s?\d|"
    r"\d\s?[xX×](?![\w-])|\b(?=[VX]|I[IVX])X{0,3}(?:IX|IV|V?I{0,3})\b(?!-)"
)
"""Numbers next to the count that _COUNT does not match: ``4th``, ``x4``, ``IV``; not "the 2nd image", not "A4"."""
_NOT_COUNTS = re.compile(
    r"一共|一起|一张|一幅|[图画][片像中里]*[一二三]|第[零一二三四五六七八九十]+|\b(?:the|this|that|each|no|which"
    r"|every)\s+one\b|\bone\s+of\b",
    re.IGNORECASE,
)
_NONE = re.compile(
    r"(?:there\s+(?:is|are)\s+)?(?:none|nothing|no\s+[a-z ]{1,40})\.?|there\s+(?:is|are)(?:n[' "
    r"]t|\s+not)\s+any(?:\s+[a-z ]{1,40})?|(?:[图画][片像面]?[中里上]?)?没有.{0,12}|无",
    re.IGNORECASE,
)
_THINGS = (
    r"(?!(?:(?!in\b|on\b)[a-z]+\s+)*(?:image|picture|photo|photograph|figure|diagram|attachment|file|difference|reason|number|problem|but|and|or|"
    rf"other|besides|except|more|less|beyond|without|clearly|{_WORDS})s?\b)[a-z ]{{1,40}}"
)
_UNSEEN = re.compile(
    rf"(?:I|we|you)\s+(?:(?:do\s+not|don\s?t|can\s?not|can\s?t|could\s?n\s?t)\s+(?:see|find|spot)\s+any|"
    rf"(?:can\s+)?(?:see|find|spot|count)\s+no)\s+{_THINGS}"
    rf"|there\s+is\s?n\s?t\s+(?:an?|any)\s+{_THINGS}"
    rf"|no\s+{_THINGS}\s+(?:is|are|can\s+be)\s+(?:visible|seen|shown|present|there)(?:\s+in\s+the\s+\w+)?"
    r"|(?:我|[图画][片像面]?[中里上]?)?(?:没有?看[到见]|看不[到见]|找不到|未见)(?:任何|有)?(?![^,，。]*(?:[图像片]|数量|区别|不同|清楚))[一-鿿]{1,8}",
    re.IGNORECASE,
)
"""Sentence that denies a thing: "I don't see any dogs", 没有看到狗. "I can't see any image" denies none."""
_PLACE = (
    r"(?:(?:are|is|of\s+(?:them|which))\s+)?(?:on|in|at|to|under|behind|beside|near|above|below|by|inside|outside|"
    r"next\s+to)\s+(?:the|its|a|an)\s+[a-z ]{1,30}"
)
_PARTS = re.compile(
    r"\s*(?P<noun>[a-z]+(?:\s+(?!on\b|in\b|at\b|of\b)[a-z]+)?|[一-鿿]{1,4})?"
    r"(?:\s+(?:in|on)\s+(?:the|this)\s+[a-z]+|\s+in\s+total)?\s*"
    r"(?:[,:;(]|[-—]+|[,:]?\s*(?:including|其中|包括))\s*(?=.*\S)",
    re.IGNORECASE,
)
"""Text between a total and its parts: "3 dogs in the image, "."""


def read_count(text: str) -> int | None:
    """Return the one whole number that an answer states, in digits or words; None for no number, several, or a
    guess."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 ", half_width(text).strip())
    text = re.sub(r"[$*`\"'{}]|\\[,;!() ]", " ", text).strip().rstrip(".!").strip()
    if not text or len(text) > MAX_TEXT:
        return None
    if _NONE.fullmatch(text) or _UNSEEN.fullmatch(text):
        return 0
    text = _GROUPS.sub(lambda match: f" {with_digits(re.sub(' +', ' ', match.group())).strip()} ", text)
    if _NO_COUNT.search(text) or _SECOND_COUNT.search(text) or _LOOSE.search(text):
        return None
    text = _NOT_COUNTS.sub(" ", text)
    found = list(_COUNT.finditer(text))
    if len(found) > 2 and _SUM.search(text[found[-2].end() : found[-1].start()]):
        return _total(found, text[: found[-1].start()], text[found[-1].end() :])
    if len(found) > 2 and (whole := _PARTS.match(text[found[0].end() :])):
        return _divided(found, text, found[0].end() + whole.end("noun"))
    if len(found) != 1 or not stated(text[: found[0].start()], text[found[0].end() :]):
        return None
    match = found[0]
    if match["digits"]:
        return None if match["behind"] else _whole_number(match["digits"].replace(",", ""))
    return _whole_number(with_digits(" ".join(match.group().split())).strip())


_SUM = re.compile(
    r"^[^.;]*[,，]\s*(?:so|in\s+total|for\s+a\s+total\s+of|所以|共)\s*(?:there\s+are\s+|有|是)?$", re.IGNORECASE
)


def _total(found: Sequence[re.Match[str]], before: str, behind: str) -> int | None:
    """Return ``5`` of ``2 cats and 3 dogs, so 5``; None if the parts have another sum."""
    values = [
        None
        if match["behind"]
        else _whole_number(with_digits(" ".join(match.group().replace(",", "").split())).strip())
        for match in found
    ]
    *parts, total = values
    if total is None or None in parts or not stated(before, behind, equation=True):
        return None
    return total if sum(part for part in parts if part is not None) == total else None


_PART = re.compile(
    rf"(?:(?:\s+(?P<noun>[a-z]+))?\s+{_PLACE}|只|个|条|名|位|人|辆|朵|本|匹|头)(?:在[左右上下中前后][一-鿿]{{0,3}})?"
    r"(?:\s*(?:[,;]|\band\b|和|,\s*and\b)\s*)?(?:其?在?[左右上下中前后][一-鿿]{0,3}有?)?[\s)]*",
    re.IGNORECASE,
)
"""Remaining text of one part: `` on the left and ``, 只，右边."""
_HAN_PLACE = re.compile(r"\s*(?:在?[左右上下中前后][一-鿿]{0,3}有?)?\s*")


def _divided(found: Sequence[re.Match[str]], text: str, end_of_noun: int) -> int | None:
    """Return ``3`` of ``3 dogs, 2 on the left and 1 on the right``; None if the parts have another sum or count other
    things."""
    total, *parts = [
        None
        if match["behind"]
        else _whole_number(with_digits(" ".join(match.group().replace(",", "").split())).strip())
        for match in found
    ]
    thing = text[found[0].end() : end_of_noun].strip().casefold()
    behind = [
        _PART.fullmatch(text[one.end() : (found[at + 2].start() if at + 2 < len(found) else len(text))])
        for at, one in enumerate(found[1:])
    ]
    if not thing or total is None or None in parts or not all(behind):
        return None
    if any(match and (match["noun"] or thing).casefold() not in thing for match in behind):
        return None
    if not stated(text[: found[0].start()], f" {thing}"):
        return None
    return total if sum(part for part in parts if part is not None) == total else None


def _whole_number(text: str) -> int | None:
    """Return 3 for ``3`` and ``3.0``; None for ``3.5`` and numbers of more than 15 digits."""
    match = re.fullmatch(r"([+-]?\d{1,15})(?:\.0+)?", text)
    return int(match.group(1)) if match else None


THRESHOLD = 0.5
"""Default threshold of ANLS (ST-VQA, 1905.13648) and of IoU."""

_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|textit|emph)\s*\{([^{}]*)\}")
_PLAIN = str.maketrans(
    {sign: plain for signs, plain in (("‐‑‒–—−﹣", "-"), ("“”„«»", '"'), ("‘’‚", "'")) for sign in signs}
)
_ACCENTS = {"'": "\u0301", "`": "\u0300", "^": "\u0302", '"': "\u0308", "~": "\u0303"}
_ACCENT = re.compile(r"\\(['`^\"~])\s*\{?([A-Za-z])\}?")
_BREAKS = re.compile(r"\\\\|<br\s*/?>|\\n(?=[A-Z\s]|$)|\\newline(?![a-z])", re.IGNORECASE)
_THING = (
    r"(?:image|picture|photo|photograph|figure|diagram|sign|text|"
    r"word|words|label|board|poster|caption|title|screen|banner|plate|book|shirt|it|this)"
)
_QUOTED = re.compile(
    rf"(?:(?:the|this)\s+)?{_THING}(?:\s+(?:in|on|of|at)\s+(?:the|"
    r"this)\s+\w+)?\s+(?:says?|reads?|states?|is|are|shows?)\s*[:,]?\s*(?P<en>.+)"
    r"|(?:图[片中里像上]*|招牌|牌子|标志|屏幕)?(?:上|中|里)?的?(?:文字|字|内容)?(?:写着|写的是|是|为)\s*[:,]?\s*"
    r"(?P<zh>.+)",
    re.DOTALL | re.IGNORECASE,
)
_SHOWN = re.compile(
    r"(?!.*[.!?]\s+(?:it|this|that|there|the|no|not|or|but|so|I|we|wait|actually)\b)(?:(?:the|this)\s+(?:image|picture|photo|photograph|figure)\s+(?:shows|depicts|displays|contains)"
    r"|there\s+is|there\s+are|(?:it|this)(?:\s+is|'s)|(?:I|we)\s+(?:can\s+)?see)\s+(.+?)"
    r"(?:\s+in\s+(?:the|this)\s+(?:image|picture|photo|photograph|figure))?\.?",
    re.IGNORECASE,
)


def levenshtein(first: str, second: str) -> int:
    """Return the Levenshtein distance: character insertions, deletions and substitutions between two texts."""
    row = list(range(len(second) + 1))
    for i, sign in enumerate(first, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(second, 1):
            before, row[j] = row[j], min(before + (sign != other), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def anls(gold: str, pred: str, threshold: float = THRESHOLD) -> float:
    """Return 1 − distance / longer length of the lower-case texts with single spaces; 0 below the threshold
    (1907.00490, eq. 1)."""
    gold, pred = (" ".join(text.casefold().split()) for text in (gold, pred))
    longer = max(len(gold), len(pred))
    if longer and gold == pred:
        return 1.0
    if (
        longer == 0 or 1 - abs(len(gold) - len(pred)) / longer < threshold
    ):  # the distance is at least the difference of the lengths
        return 0.0
    similarity = 1 - levenshtein(gold, pred) / longer
    return similarity if similarity >= threshold else 0.0


def similarity(gold: str, pred: str, response: str, threshold: float) -> float:
    """Return the largest ANLS of a text and an answer, each unchanged, without markup, and normalized.

    Text on several lines, or quoted in a sentence ("The sign says …"), also counts if it equals the accepted text.
    """
    golds = {gold, legible(gold)}
    best = max(anls(one, text, threshold) for one in golds for text in {pred, bare(pred), legible(pred)})
    if best == 1.0:
        return best
    exact = {legible(text).casefold() for text in _whole(response)} | {legible(quoted(pred)).casefold()}
    return 1.0 if legible(gold).casefold() in exact - {""} else best


def _whole(response: str) -> list[str]:
    """Return all lines of an answer, and its quotation, unless the answer is longer than any accepted text."""
    answer = after_thinking(response)
    tag = last_tag(answer)
    text = tag[1] if tag and not answer[tag[0] :].strip() else unmarked(response)
    return [text, quoted(text)] if text and len(text) <= 1000 else []


def bare(text: str) -> str:
    """Remove markup of an answer: quotation marks, ``\\text``, a final full stop."""
    text = _WRAPPED.sub(r"\1", text.strip())
    return text.strip(" \t\n\"'`*“”‘’「」").rstrip(".。").strip(" \"'`*“”‘’「」")


def legible(text: str) -> str:
    """Normalize as ``bare`` does; also join lines, compose characters, unify dashes and quotation marks, and remove
    LaTeX's escapes."""
    text = _ACCENT.sub(lambda match: match[2] + _ACCENTS[match[1]], _BREAKS.sub(" ", text))
    text = re.sub(r"\\([$%&_#{}])|\\[,;: ]", lambda match: match[1] or " ", _WRAPPED.sub(r"\1", text))
    text = unicodedata.normalize("NFKC", text).translate(_PLAIN)
    return re.sub(r"(?<=[一-鿿])\s+(?=[一-鿿])", "", " ".join(bare(text).split()))


def quoted(text: str) -> str:
    """Return ``STOP`` of 'The sign says "STOP".'; '' for a text without a quotation."""
    match = _QUOTED.fullmatch(text.strip())
    said = (match["en"] or match["zh"]).strip() if match else ""
    return re.sub(r"\s*[.。]$", "", said)


def shown(text: str) -> str:
    """Return ``a cat`` of "The image shows a cat."; '' for other sentences."""
    match = _SHOWN.fullmatch(text.strip())
    return match[1] if match else ""
