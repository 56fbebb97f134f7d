"""Read a short answer, and compare two short answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megarl.rewards.answer import measures, notations, selections, trace
from megarl.rewards.answer.measures import with_digits
from megarl.rewards.answer.normalize import clean, half_width, words
from megarl.rewards.math.compare import equal
from megarl.rewards.math.structure import split

_NOISE = re.compile(
    r"^\[?(?:the\s+)?(?:correct\s+)?(?:options?|choices?|answers?|选项|答案|选择|应选|故选|选)\]?\s*(?:is|are|为"
    r"|是|:)?\s*:?\s*",
    re.IGNORECASE,
)
_CIRCLED_LETTERS = {code: chr(ord("A") + code - 0x24B6) for code in range(0x24B6, 0x24BE)} | {
    code: chr(ord("A") + code - 0x24D0) for code in range(0x24D0, 0x24D8)
}
_ITEM = re.compile(r"[(\[]?\s*([A-H])(?![a-z0-9])\s*[)\]]?\s*(?:[.:、)]|项|选项)?")
_LABELLED = re.compile(r"[(\[]?([A-H])(?:\s*[)\]]\s*[.:,、]?|\s*[.:、]|,(?=\s*[一-鿿]))\s*(?=\S)(.*)", re.DOTALL)
_NAMES_MORE = re.compile(
    r"(?:^|[\s,(])[A-H][.、:)]|\bor\b|或|"
    r"\b(?:[Nn]o|[Ww]ait|[Aa]ctually|[Ss]orry)\b[\s,.:]*(?:it(?:['’]?s|\s+is)\s+)?(?:option\s+)?\(?[A-H](?![A-Za-z])"
)
"""Text after ``B.`` that is not the option's text: "C. 7", "or C", "no, C"."""
_JOINED = re.compile(r"(?:[\s,;&+/、]|\band\b|和|与|及|以及)*", re.IGNORECASE)


def letters(text: str) -> list[str] | None:
    """Return the option letters that an answer names, each once, in order; None if it names none or has other text."""
    text = _NOISE.sub("", _NOISE.sub("", half_width_letters(text)))
    if (
        re.fullmatch(r"\(?[a-h]\)?\.?", text)
        or re.fullmatch(r"[a-h]{2,6}", text)
        and len(set(text)) == len(text)
        and text == "".join(sorted(text))
    ):
        text = text.upper()
    found: list[str] = []
    at = 0
    while at < len(text):
        at = _joined_end(text, at)
        if at >= len(text):
            break
        item = _ITEM.match(text, at)
        if item is None:
            return _labelled(text)
        if item.group(1) not in found:
            found.append(item.group(1))
        at = item.end()
        rest = text[at:].strip()
        if rest and not (_JOINED.match(text, at).end() > at or _ITEM.match(text, at)):  # type: ignore[union-attr]
            return _labelled(text)
    return found or None


def _joined_end(text: str, at: int) -> int:
    match = _JOINED.match(text, at)
    return match.end() if match else at


def _labelled(text: str) -> list[str] | None:
    """Return the letters of ``B. seven``, or of one such option on each line."""
    lines = [line.strip() for line in re.split(r"[\n;]", text) if line.strip()]
    found = [_LABELLED.fullmatch(line) for line in lines]
    names = [match.group(1) for match in found if match]
    if len(names) != len(lines) or any(_NAMES_MORE.search(match.group(2)) for match in found if match):
        return None
    return list(dict.fromkeys(names))


def after_letter(text: str) -> str:
    """Return the text after a letter: ``seven`` of ``B. seven``; '' for a bare letter."""
    match = _LABELLED.fullmatch(_NOISE.sub("", half_width_letters(text)))
    return match.group(2).strip() if match else ""


def half_width_letters(text: str) -> str:
    """Strip as ``_stripped`` does, but keep brackets around a letter."""
    text = half_width(text).translate(_CIRCLED_LETTERS).strip().replace("**", "").replace("`", "")
    text = re.sub(r"^\{\s*([A-H])\s*\}$", r"\1", text)
    for _ in range(2):
        text = re.sub(r"\\(?:text|mathrm|textbf|mathbf|mbox|boxed)\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"(?<!\\)\$|\\[()\s,;]|[\"']", "", text).strip().rstrip(".;!").strip()


_LISTED = re.compile(
    r"(?:^|(?<=[\s(（;；,，。?？]))[(（]?([A-H])\s*[.．、:：)）]\s*(.+?)\s*(?=[\s;；,，(（]["
    r"(（]?[A-H]\s*[.．、:：)）]|$)",
    re.DOTALL,
)


def given_options(info: Mapping[str, Any]) -> Any:
    """Return ``extra_info.options`` or ``choices`` unchanged; None without options, or if parquet filled all with
    None."""
    for name in ("options", "choices"):
        given = info.get(name)
        if given and not (isinstance(given, Mapping) and all(text is None for text in given.values())):
            return given
    return None


def options_of(info: Mapping[str, Any]) -> dict[str, str]:
    """Return letter -> text from ``extra_info.options`` / ``choices`` (mapping or list), or from a question's list."""
    given = given_options(info)
    if isinstance(given, Mapping):
        return {
            half_width(str(letter)).strip("(). ").upper(): str(text)
            for letter, text in given.items()
            if text is not None
        }
    if isinstance(given, (list, tuple)):
        texts = [re.sub(r"^[(（]?[A-H][)）.．、:：]\s*", "", str(text)) for text in given]
        return dict(zip("ABCDEFGH", texts, strict=False))
    question = info.get("question") or info.get("problem")
    if not isinstance(question, str):
        return {}
    found = {letter: text.strip() for letter, text in _LISTED.findall(question[-4000:])}
    return found if {"A", "B"} <= set(found) else {}


_NUMBERED = re.compile(
    r"(?:^|(?<=[\s,;、。]))(?:\((\d{1,2})\)|(\d{1,2})[.、:)](?!\d)|"
    r"第([一二三四五六七八九十\d])[空个题]+(?:应?[填是为])?\s*:?|\b[Bb]lank\s*(\d{1,2})\s*[.:]?)\s*|([①②③④⑤⑥⑦⑧⑨⑩])\s*"
)
_SEPARATES = re.compile(r"(?:\s|[,、]|[-=]+>|→|⇒|\\(?:to|rightarrow)(?![a-z])|\b(?:and|then)\b|和)*")
_CIRCLED = "①②③④⑤⑥⑦⑧⑨⑩"


def split_blanks(text: str, count: int | None = None, commas: bool = False) -> list[str]:
    """Split the answers to several blanks: at numbers, ;, line breaks, or (for ``count`` blanks, ``commas``) commas.

    With ``count``, the first way that gives ``count`` answers; else the first that gives more than one.
    """
    text = half_width(text.replace("、", "\0")).replace("\0", "、").strip()
    text = re.sub(r"^\$+|\$+$", "", text) if text.count("$") == 2 and text.startswith("$") else text
    ways = [_numbered(text), re.split(r";", text), re.split(r"\n+", text), re.split(r"\s*\|\s*|\\quad", text)]
    ways += [re.split(r"(?<=[一-鿿])\.", text)] if count is not None else []
    if count is not None or commas:
        joined = re.sub(r"(?:,\s*)?\\text\s*\{\s*(?:and|和)\s*\}|\s+and\s+", ",", text)
        ways += [
            text.split("、"),
            re.split(r"(?<!\d),|,(?!\d{3}(?!\d))", text) if "(" not in text else [text],
            split(text, {","}) or [text],
            split(joined, {","}) or [text],
        ]
        ways.append(re.split(r"\$?\s*(?:和|与|以及)\s*\$?", text))
        ways.append(text.split())
    ways = [[part.strip().strip(",，;、").strip() for part in way if part.strip()] for way in ways]
    if count is not None and (fitting := next((way for way in ways if len(way) == count), None)):
        return fitting
    return next((way for way in ways[:-1] if len(way) > 1), [text] if text else [])


def numbered(text: str) -> list[str]:
    """Split the answers to numbered blanks, stripped as in ``split_blanks``; without numbers return the whole text."""
    return [
        part.strip(" ,，;、。.") for part in _numbered(half_width(text.replace("、", "\0")).replace("\0", "、").strip())
    ]


def _numbered(text: str) -> list[str]:
    """Return the texts after the numbers of ``(1) 3 (2) 5`` or ``①3②5``, if they count from 1 and nothing precedes
    them."""
    marks = list(_NUMBERED.finditer(text))
    if len(marks) == 1 and text.startswith("(1)"):
        return _bracketed(text)
    if not marks or marks[0].start() != 0:
        return [text]
    numbers = [
        str(_CIRCLED.index(mark.group(5)) + 1) if mark.group(5) else next(filter(None, mark.groups())) for mark in marks
    ]
    numbers = [
        str("一二三四五六七八九十".index(number) + 1) if number in "一二三四五六七八九十" else number
        for number in numbers
    ]
    if len(marks) < 2 or numbers != [str(k + 1) for k in range(len(marks))]:
        return [text]
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    parts = [text[mark.end() : end] for mark, end in zip(marks, ends, strict=True)]
    return [text] if all(_SEPARATES.fullmatch(part) for part in parts) else parts  # ①→②→③ is an order


def _bracketed(text: str) -> list[str]:
    """Split ``(1)3(2)5``, which has no space before the numbers."""
    pieces = re.split(r"\((\d{1,2})\)", text)
    return pieces[2::2] if len(pieces) > 3 and pieces[1::2] == [str(k + 1) for k in range(len(pieces) // 2)] else [text]


def plain(text: str) -> str:
    """Normalize text for comparison: no case, articles, punctuation or 《》. Mathematical signs are kept."""
    text = clean(re.sub(r"[《》〈〉「」『』“”]", "", text))
    if re.search(r"[\\^_=<>+*/|\[\](){}]|\d", text):
        return (
            re.sub(r"\s+", "", text.casefold())
            if re.search(r"[一-鿿]|[A-Za-z]{3}", text) and not re.search(r"\\", text)
            else text
        )
    return re.sub(r"(?<=[一-鿿])\s+(?=[一-鿿])", "", words(text))


_DATE = re.compile(r"(?:(\d{2,4})\s*[年/.-]\s*)?(\d{1,2})\s*[月/.-]\s*(\d{1,2})\s*[日号]?")
_MONTHS = (
    "january", "february", "march", "april", "may", "june",
    "july", "august", "september", "october", "november", "december",
)  # fmt: skip
_ENGLISH_DATE = re.compile(
    rf"(?:({'|'.join(_MONTHS)})\s+(\d{{1,2}})|(\d{{1,2}})\s+({'|'.join(_MONTHS)}))(?:st|nd|rd|th)?(?:,?\s+(\d{{4}}))?",
    re.IGNORECASE,
)


def date(text: str) -> tuple[int, int, int] | None:
    """Return (year or 0, month, day) of a date; None for other text. A bare 3-4, 3.4 or 3/4 is not a date."""
    text = half_width(text).strip().rstrip(".")
    if match := _ENGLISH_DATE.fullmatch(text):
        month = (match.group(1) or match.group(4)).lower()
        return int(match.group(5) or 0), _MONTHS.index(month) + 1, int(match.group(2) or match.group(3))
    match = _DATE.fullmatch(text)
    if match is None or (match.group(1) is None and "月" not in text):
        return None
    year, month_number, day = int(match.group(1) or 0), int(match.group(2)), int(match.group(3))
    return (year, month_number, day) if 1 <= month_number <= 12 and 1 <= day <= 31 else None


def same_date(gold: tuple[int, int, int], pred: tuple[int, int, int]) -> bool:
    """Return True if month and day are equal, and the year if the gold has one."""
    return gold[1:] == pred[1:] and (gold[0] == pred[0] or gold[0] == 0)


_CLOCK = re.compile(
    r"(\d{1,2}):(\d{2})|(\d{1,2}|[零一二两三四五六七八九十]{1,3})[点时](?:(半)|整|(\d{1,2}"
    r"|[零一二三四五六七八九十]{1,3})分?)?"
)


def clock(text: str) -> tuple[int, int] | None:
    """Return (hour, minute) of ``8:30``, 8点30分 or 八点半; None if the text is not a time of day."""
    match = _CLOCK.fullmatch(half_width(text).strip().rstrip("."))
    if match is None:
        return None
    hour, minute = match[1] or match[3], match[2] or ("30" if match[4] else match[5] or "0")
    written = [part if part.isdigit() else with_digits(part) for part in (hour, minute)]
    if not all(re.fullmatch(r"\d{1,2}", part) for part in written):
        return None
    return (int(written[0]), int(written[1])) if int(written[0]) <= 24 and int(written[1]) < 60 else None


MAX_PREDICTION = 2000
_VERSE = re.compile(r"\W*[一-鿿]{4,}(?:[,.;:?!]+[一-鿿]{4,})+\W*")
_SENTENCE = re.compile(r"\W*(?:[A-Za-z'-]+[,;:—]?\s+){4,}[A-Za-z'-]+[.?!]\W*")

_CELSIUS = re.compile(r"℃|°\s*C|\bCelsius\b|摄氏度|\\circ\s*\}?\s*(?:\\(?:text|mathrm)\s*\{\s*)?C")
_DEGREES = re.compile(r"([-+]?\d+(?:\.\d+)?)\s*(?:C|°)")
_RATIO = re.compile(r"\d+\s*:\s*\d+")
_RATIO_IN_WORDS = re.compile(r"(\d+)\s*(?:比|to)\s*(\d+)")


_DOTS = r"(?:…{1,2}|⋯{1,2}|\.{3,6}|·{3,6}|\\[lc]?dots\s*(?:\\[lc]?dots)?)"
_DIVISION = re.compile(
    r"(?:(?P<dividend>\d+)\s*(?:÷|/|\\div)\s*(?P<divisor>\d+)\s*=\s*)?(?:商(?:是|为)?|(?:the\s+)?quotient(?:\s+(?:is|of))?:?\s*)?"
    r"\s*(?P<quotient>\d+)\s*[,，、;]?\s*(?:and\s+|with\s+)?(?:an?\s+|the\s+)?"
    rf"(?:{_DOTS}|余数?(?:是|为)?|remainder(?:\s+(?:is|of))?:?|rem\.?|r\.?)\s*(?P<remainder>\d+)",
    re.IGNORECASE,
)

_REST = re.compile(r"\d.*?(?:[…⋯余Rr]|\.\.|··|dots).*\d")


def _division(text: str) -> tuple[int, int] | None:
    """Return (quotient, remainder) of ``7……2``, 7余2, "7 remainder 2" or "7 R 2"; None for other text."""
    if len(text) >= 80 or not _REST.search(text):
        return None
    match = _DIVISION.fullmatch(re.sub(r"\$|\\text\s*\{([^{}]*)\}", r"\1", text).strip().rstrip(".。"))
    if match is None:
        return None
    quotient, remainder = int(match["quotient"]), int(match["remainder"])
    if match["dividend"] and int(match["dividend"]) != quotient * int(match["divisor"]) + remainder:
        return None
    return quotient, remainder


def states_division(gold: str, line: str) -> bool:
    """Return True if a whole line is the division with remainder ``gold``: 商是7，余数是2."""
    return bool(division := _division(gold)) and _division(line) == division


def _as_asked(gold: str, pred: str) -> str:
    """Rewrite a prediction in the ground truth's notation: ``25 C`` as 25 °C, ``3比4`` as 3:4."""
    if _CELSIUS.search(gold) and (degrees := _DEGREES.fullmatch(half_width(pred).strip())):
        return f"{degrees[1]} ℃"
    if _RATIO.fullmatch(half_width(gold).strip()) and (ratio := _RATIO_IN_WORDS.fullmatch(half_width(pred).strip())):
        return f"{ratio[1]}:{ratio[2]}"
    return pred


def same_short(gold: str, pred: str, convert: bool = True) -> bool:
    """Return True for the same words, number, date or formula. ``convert``: accept another unit of the same
    dimension."""
    if not gold.strip() or not pred.strip() or len(pred) > MAX_PREDICTION:
        return False
    if gold.strip() == pred.strip():
        return trace.compared("same text", gold, pred, True)
    if division := _division(gold):
        same = _division(pred) == division or plain(gold) == plain(pred)
        return trace.compared("division with remainder", gold, pred, same)
    pred = _as_asked(gold, pred)
    if notations.may_be(gold) and (formula := notations.chemical(gold)):
        return trace.compared("chemical formula", gold, pred, notations.same(formula, notations.read(pred)))
    if (said := plain(gold)) == plain(pred):
        return trace.compared("words", gold, pred, bool(said) and not re.fullmatch(r"[A-Za-z]", gold.strip()))
    if recited(gold):
        same = "/" in pred and said == plain(re.sub(r"\s*/+\s*", ",", pred))
        return trace.compared("lines of a text", gold, pred, same)
    for rule, compare in (("order", selections.compare), ("relation", notations.compare)):
        verdict = compare(gold, pred, same_short)
        if verdict is not None:
            return trace.compared(rule, gold, pred, verdict)
    dates = date(gold), date(pred)
    if dates[0] and dates[1]:
        return trace.compared("date", gold, pred, same_date(dates[0], dates[1]))
    clocks = clock(gold), clock(pred)
    if clocks[0] and clocks[1]:
        return trace.compared("time of day", gold, pred, clocks[0] == clocks[1])
    gold, pred = with_digits(notations.formula(gold)), with_digits(notations.formula(pred))
    measured = measures.same(gold, pred, convert)
    return equal(gold, pred) if measured is None else trace.compared("measure", gold, pred, measured)


def recited(text: str) -> bool:
    """Return True for lines of a text or a whole sentence, where word order counts: not a list, not mathematics."""
    text = half_width(text.replace("、", "\0"))
    return bool(_VERSE.fullmatch(text) or _SENTENCE.fullmatch(text))
