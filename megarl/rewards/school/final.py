"""Options that a school answer names: by letter, number or text, in a sentence.

- A conclusion: "The pressure increases, so B.", 本题选B, B项正确.
- Letters before an explanation that supports them: ``【答案】B`` before ``【解析】``, "B" before "Explanation:".
- Letters next to refused ones: "B, not A", A不对，选B, "A and C but not B".
- A sentence that chooses: "I choose B", "B is the answer".
- A choice in the text: 故选B, "so option B".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megarl.rewards.answer import selections
from megarl.rewards.answer.grammar import MAX_LINE_READ, TAKEN_BACK, UNDECIDED, explained
from megarl.rewards.answer.normalize import half_width
from megarl.rewards.school import read as k12_read
from megarl.rewards.school.read import same_short

_ALONE_FORM = r"(?<![A-Za-z0-9]){}(?![A-Za-z0-9])"
_ALONE_OPTION = re.compile(_ALONE_FORM.format("[A-H]"))
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
    return set(_ALONE_OPTION.findall(_ARTICLE.sub("", _plain(text))))


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


LETTER_FORMS: dict[str, tuple[tuple[str, str], ...]] = {
    "letter before its explanation": (("【答案】B【解析】因为它最大。", "B"), ("B\n\nExplanation: A is wrong.", "B")),
    "option of the answer": (
        ('{"answer": "B"}', "B"), (r"\boxed{B}", "B"), ("The answer is (B).", "B"), ("答案：dog", "B"),
        ("Answer: B?", ""),
    ),
    "letter beside refused ones": (("Option B is correct.", "B"), ("Only B is correct.", "B"),
        ("Among the options, B is correct.", "B"), (r"\boxed{B, not A}", "B"), ("A不对，选B", "B")),
    "choice in the text": (("故选B。\n谢谢！", "B"), ("The answer is A or B. So option B", "B"), ("B或C正确", "")),
    "sentence that chooses": (("I choose B", "B"), ("I think it's B because 5 is prime.", "B"), ("Is it B or C?", "")),
    "conclusion": (("The pressure increases, so B.", "B"), ("本题选B", "B"), ("If it rises, so B.", "")),
    "option beside a refused one": (("The answer is dog, not cat.", "B"), ("It is not a dog.", "")),
}  # fmt: skip
"""Form in which a school answer names a letter -> examples (response, letter, or '' for a response that names none).
The first form that names a letter counts; boxes in a row are read before all forms."""

# ---------------------------------------------------------------- letters next to letters

_ALONE = re.compile(r"(?<![A-Za-z])(?:A(?![A-Za-z'’]|\s+[a-z]{3,}(?<!are)(?<!and)(?<!has))|[B-H](?![A-Za-z'’]))")
_REFUSED_BEFORE = re.compile(
    r"(?:\b(?:not|cannot|never|neither|nor|than|over|instead\s+of|without|unlike|except|except\s+for|"
    r"(?:all|any|anything|everything|none)\s+but|exclud\w+|eliminat\w+|discard\w*|reject\w*|rul\w+\s+out)\s+"
    r"(?:be\s+)?(?:the\s+)?|n['’]t\s+(?:(?:be|choose|pick|select|take)\s+)?|[不非没勿])$",
    re.IGNORECASE,
)
_REFUSED_BEHIND = re.compile(
    r"\)?\s*+(?:(?:[,/&或]|还是|\b(?:or|and|nor)\b)\s*(?:options?\s*|选项\s*)?\(?[A-H](?![A-Za-z])|(?:都|是|为|也)?[不错误]|"
    r"(?:(?!\b(?:because|since|as|for|which|so)\b)[^.,;:!?\n])*(?:\b(?:not|no|never|cannot|wrong|incorrect|false|too|"
    r"fails?|contradicts?|violates?|impossible|excluded|eliminated|ruled\s+out)\b|n['’]t\b))",
    re.IGNORECASE,
)


def is_refused(before: str, after: str) -> bool:
    """Return True if the letter between ``before`` and ``after`` is refused: "not B", "B is too small", B错误."""
    return bool(_REFUSED_BEFORE.search(before) or _REFUSED_BEHIND.match(after))


def _supports(text: str, letters: set[str]) -> bool:
    """Return True if a text refuses every other letter that it names, and none of ``letters``."""
    for match in _ALONE.finditer(text):
        before, after = text[max(0, match.start() - 40) : match.start()], text[match.end() : match.end() + 120]
        refused = is_refused(before, after)
        if refused == (match.group() in letters):
            return False
    return True


# ---------------------------------------------------------------- conclusions

_LETTERS = r"\(?[A-H]\)?(?:(?:\s*(?:,|、|&|\band\b|和|与|及)\s*)*\(?[A-H]\)?)*"
_CONCLUSION = re.compile(
    rf"(?:^|[,;:.—–]\s*)(?:and\s+)?(?:so|thus|therefore|hence|∴)\s*,?\s*(?:it['’]?s\s+|it\s+is\s+)?"
    rf"(?:(?:the\s+)?(?:(?:correct|right|best|final)\s+)?(?:answer|option|choice)s?\s*(?:is|are|must\s+be|:)?\s*)?"
    rf"(?P<so>{_LETTERS})$"
    rf"|(?:^|[,;:.]\s*)(?:that|this|which)\s+leaves\s+(?:only\s+|us\s+with\s+)?(?:option\s+)?(?P<left>\(?[A-H]\)?)$"
    r"|[,;:.]\s*(?:which\s+)?(?:making|makes)\s+(?:option\s+)?(?P<made>\(?[A-H]\)?)\s+(?:the\s+)?"
    r"(?:correct|right|best)(?:\s+(?:answer|option|choice))?$"
    rf"|(?:^|[,;:.。]\s*)(?:综上(?:所述)?|故|所以|因此|因而|于是|可见|可知|∴)?,?(?:答案|本题|此题|该题|这道?题|正确(?:答案|选项))?"
    rf"(?:的?(?:正确)?(?:答案|选项))?,?(?:应该?|应当|只能|就|必须)?选(?:择|项|取)?(?:是|为|:)?\s*(?P<chosen>{_LETTERS})\s*(?:选?项)?$",
    re.IGNORECASE,
)
_RIGHT = re.compile(
    rf"(?:^|[,;:.。]\s*)(?:综上(?:所述)?|故|所以|因此|可见|可知|∴)?,?(?:只有|选项)?\s*(?P<right>{_LETTERS})\s*(?:选?项|选择)?\s*"
    r"(?:是|都是|都|均|才是)?\s*(?:正确|对|符合题意)的?$"
)


def concluded(text: str) -> set[str] | None:
    """Return the letters that the last line concludes with; None if the line is undecided or also names others."""
    line = half_width(text.rstrip().rsplit("\n", 1)[-1]).replace("**", "").replace("$", "").strip().rstrip(".!。 ")
    if len(line) > MAX_LINE_READ or UNDECIDED.search(line):
        return None
    match = _CONCLUSION.search(line)
    if match:
        named, context = match["so"] or match["left"] or match["made"] or match["chosen"], line[: match.start()]
    elif match := _RIGHT.search(line):
        named, context = match["right"], half_width(text)[-2000:][: -len(line)] + line[: match.start()]
    else:
        return None
    letters = set(re.findall("[A-H]", named))
    return letters if _supports(context, letters) else None


# ---------------------------------------------------------------- answers before their explanation


def letters_before_explanation(text: str, options: Mapping[str, str], several: bool = False) -> set[str] | None:
    """Return the letters before an explanation that supports them."""
    found = explained(text)
    if found is None or not k12_read.letters(found[0]):
        return None
    letters = named(found[0], options, several)
    rest = half_width(found[1])[-4000:]
    others = [text for letter, text in options.items() if letter not in (letters or ()) and text.strip() in rest]
    if not letters or others or TAKEN_BACK.search(rest) or not _supports(rest, letters):
        return None
    return letters


# ---------------------------------------------------------------- letters next to refused ones

MAX_TEXT = 80
_NAME = r"(?:options?\s*|选项\s*)?\(?(?<![A-Za-z])[A-H](?![A-Za-z])\)?(?:\s*选?项)?"
_NAMES = rf"{_NAME}(?:\s*(?:,|、|\bor\b|\band\b|\bnor\b|和|或|与)\s*{_NAME})*"
_WRONG = (
    r"(?:(?:is|are)\s+(?:wrong|incorrect|false|not\s+(?:right|"
    r"correct|true))|(?:是|都|均|全)?(?:不对|错误?的?|不正确|不符合?(?:题意)?|不成立|不选))"
)
_REFUSED = re.compile(
    r"[,;(]?\s*(?:\b(?:but|and)\s+)?(?:\b(?:it\s+is\s+|it's\s+)?(?:not|"
    rf"rather\s+than|instead\s+of)\b|而?非|而?不是|而?不选|排除)\s*(?P<refused>{_NAMES})\s*\)?"
    rf"|(?P<wrong>{_NAMES})\s*{_WRONG}",
    re.IGNORECASE,
)
_AFFIRMED = re.compile(
    r"(?:(?:among|of)\s+(?:all\s+)?(?:the|these|those)\s+(?:\w+\s+)?(?:options|choices|answers)\s*,?\s*)?(?:only\s+)?"
    rf"({_NAME})\s*(?:is\s+(?:the\s+)?(?:correct|right)(?:\s+(?:answer|option|choice))?|是?(?:正确|对)的?(?:答案"
    r"|选项)?|符合题意)$",
    re.IGNORECASE,
)
_JUDGED = re.compile(
    r"(?:\b(?:is|are|also)\s+(?:\w+\s+){0,2}(?:correct|right|wrong|incorrect|false|true)\b|正确|错误|不对|"
    r"\b(?:it\s+is|it's|options?|choose)\s+\(?[A-H](?![A-Za-z])|选项?\s*[A-H])",
    re.IGNORECASE,
)
"""Text after ``A.`` that is not the option's text: "A. Option B is correct"."""
_OTHERS_REFUSED = re.compile(
    rf"\s*[,;]?\s*(?:(?:and|while)\s+)?(?:(?:(?:all\s+)?the\s+)?(?:others?|rest)(?:\s+options?)?|其[余他它](?:选?项|各项)?)\s*{_WRONG}$",
    re.IGNORECASE,
)
_SETTLING = re.compile(
    r"^(?:[\s,;.:]|\b(?:so|but|therefore|thus|hence|it\s+is|it's|"
    r"choose|the\s+answer\s+is)\b|而是|所以|因此|故|应该?|选(?!项)择?|答案|是|为)+",
    re.IGNORECASE,
)


def settled(text: str) -> set[str] | None:
    """Return the letters that a text names except refused ones; None if it has other text or retracts a letter."""
    text = half_width(text).strip().rstrip(".。! ")
    if len(text) > MAX_TEXT:
        return None
    text = _OTHERS_REFUSED.sub("", text)
    refused = {
        letter
        for match in _REFUSED.finditer(text)
        for letter in re.findall("[A-H]", match["refused"] or match["wrong"] or "")
    }
    rest = _SETTLING.sub("", _REFUSED.sub(" ", text)).strip().rstrip(",;. ")
    if re.match(r"(?:and|or|nor)\b|[和与或]", rest):  # "A is wrong and B"
        return None
    affirmed = _AFFIRMED.fullmatch(rest)
    names = k12_read.letters(affirmed[1] if affirmed else rest) if refused or affirmed else None
    if not names or refused & set(names) or (not affirmed and _JUDGED.search(k12_read.after_letter(rest))):
        return None
    return set(names)


_SO = re.compile(r"\W*(?:so|thus|therefore|hence|finally|故|所以|因此|综上|可见)", re.IGNORECASE)


def settled_last(pred: str, text: str) -> set[str] | None:
    """Return ``settled`` of an answer, or else of the last line of its text.

    None if an earlier line settles on other letters and the last draws no conclusion: "A is right" and "B is right" are
    two judgements.
    """
    *before, last = text.split("\n")
    found = settled(pred) or settled(last)
    if found and before and not _SO.match(last) and any((settled(line) or found) != found for line in before[-20:]):
        return None
    return found


# ---------------------------------------------------------------- a sentence that chooses

_ADJECTIVE = r"(?:(?:final|correct|right|best)\s+)?"
_NOUN = r"(?:answer|option|choice)"
_ONE = rf"(?:(?:the\s+)?{_ADJECTIVE}{_NOUN}\s+)?\(?(?-i:([A-H]))(?![\w'’])\)?"
_REASON = r"(?:,?\s+(?:because|since|as|given\s+that)\s+(?!well\b)(?P<reason>[^?？]+))?"
_CHOICE = re.compile(
    r"(?:(?:(?:and\s+)?(?:so|thus|therefore|hence|then)|finally|overall|in\s+conclusion)\s*,?\s+)?"
    r"(?:(?:I|we)\s+(?:think|believe|conclude)\s+(?:that\s+)?)?(?:"
    rf"{_ONE}\s+(?:is|must\s+be)\s+(?:the|my|our)\s+{_ADJECTIVE}{_NOUN}"
    rf"|(?:(?:I|we)(?:['’](?:d|ll)|\s+(?:would|will))?\s+)?(?:choose|chose|pick|select|go\s+with)\s+{_ONE}"
    rf"|(?:it|that)(?:['’]s|\s+is|\s+must\s+be)\s+{_ONE}"
    rf"){_REASON}",
    re.IGNORECASE,
)
_WITH_REASON = re.compile(rf"{_ONE}{_REASON}", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def sole_choice(text: str, pred: str) -> set[str]:
    """Return the letter named by the last sentence ("So it's B.") or by an answer with its reason ("B, as 2+3=5").
    Empty if there is none, or the line or reason names other letters."""
    line = half_width(text.rsplit("\n", 1)[-1]).replace("**", "").strip()
    *_, last = _SENTENCE.split(line)
    pred = half_width(pred).strip()
    found = _sole(_CHOICE.fullmatch(last.rstrip(".! ")), line) or _sole(_WITH_REASON.fullmatch(pred), pred)
    return set(found)


def _sole(match: re.Match[str] | None, text: str) -> str:
    if match is None:
        return ""
    reason = match.re.groupindex["reason"]
    letter = next(found for number, found in enumerate(match.groups(), 1) if found and number != reason)
    return "" if set(_ALONE.findall(text)) - {letter} else str(letter)


# ---------------------------------------------------------------- a choice in the text

_CHOSEN = re.compile(
    r"(?:故|所以|因此|应该|应|答案)\s*,?\s*(?:选择|选|是|为)\s*:?\s*([A-H](?:[\s,、和与]*[A-H])*)(?![A-Za-z]|"
    r"\s*(?:吗|[?？]))|\b(?:option|choice)s?\s+\(?([A-H])\)?(?![A-Za-z]|\s*[?？])"
)


_OPTION = re.compile(r"\b(?:[Oo]ption|[Cc]hoice)s?\s+\(?([A-H])(?![A-Za-z])")
_CONCLUDES = re.compile(
    r"\b(?:is|be|are|choose|select|pick|so|therefore|thus|hence|no|answer)[\s,:;]*(?:the\s+)?$", re.IGNORECASE
)


def chosen(text: str) -> set[str] | None:
    """Return the letters after the last "故选" or "option" of a response with no other sign of an answer; None if the
    text refuses them there or the line has other options."""
    if re.search(r"\\boxed|<answer>", text):
        return None
    text = half_width(text)[-2000:]
    matches = list(_CHOSEN.finditer(text))
    if not matches:
        return None
    last, line = matches[-1], text.rfind("\n", 0, matches[-1].start())
    if is_refused(text[: last.start()], text[last.end() :]):
        return None
    alone = set(_OPTION.findall(text[line + 1 :])) == {last[2]}
    if last[2] and not alone and not _CONCLUDES.search(text[: last.start()]):
        return None  # "option B, since option C is too small"
    return set(re.findall("[A-H]", last[1] or last[2]))
