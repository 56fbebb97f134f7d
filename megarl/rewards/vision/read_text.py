"""Text read from an image: its distance from an accepted text, and quotations in an answer."""

from __future__ import annotations

import re
import unicodedata

from megarl.rewards.answer.grammar import after_thinking, last_tag, unmarked

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
