"""Grammar of final answers for every subject: finds the answer in a response, and in a sentence.

``FORMS`` lists the forms of a response with examples. Below it are forms of sentences: an answer before its
explanation, boxes in a row, an answer next to a refused one, a name. ``marks.py`` has the marks around an answer,
``marks.py`` sentences that state a number, ``school/final.py`` option letters.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator

from megarl.core.text import without_thought
from megarl.rewards.answer import marks, trace
from megarl.rewards.answer.marks import stated
from megarl.rewards.answer.units import NUMERALS

FORMS: dict[str, tuple[tuple[str, str], ...]] = {
    "box": ((r"So \boxed{5}.", "5"), (r"\boxed 5.", "5"), (r"\boxed{\boxed{5}}", "5"), (r"\boxed{5", ""),
            (r"\boxed{\begin{aligned}5\end{aligned}}", "5")),
    "tag": (("<answer>5</answer>", "5"), ("<answer>x = 5</answer>", "5"), ("[ANSWER]5[/ANSWER]", "5"),
            ("<final>5</final>", "5"), (r"<answer>\boxed{5}</answer>", "5")),
    "hashes": (("#### 5", "5"), ("####\n5", "5"), ("####: 5", "5"),
               ("#### The answer is 5.", "5"), ("#### **5** ✅", "**5**")),
    "JSON object": (('{"answer": 5}', "5"), ('```json\n{"answer": "x+1"}\n```', "x+1")),
    "phrase": (
        ("Answer: 5", "5"),
        ("The answer is 5.", "5"),
        ("**Final answer:** 5", "5"),
        ("Ans. 5", "5"),
        ("答案是5。", "5"),
        ("[Answer: 5]", "5"),
        ("| Answer | 5 |", "5"),
        ('Answer: "5"', "5"),
        ("Answer: 5?", "5?"),
        ("Answer → 5 ∎", "5"),
        ("Is the answer 4? No, the answer is 5.", "5"),
        ("The answer is 4 or the answer is 5.", "4 or the answer is 5"),
    ),
    "display": (("So we get\n$$5$$", "5"), ("So\n\\[5\\]", "5")),
    "only formula": (("We have $x=5$.", "x=5"), ("So the value is $5$", "5")),
    "only number": (("There are 5 apples.", "5"), ("一共有5个苹果。", "5"), ("She earns **$5** per day.", "$5")),
    "sentence": (("The capital is Paris.", "Paris"), ("首都是巴黎。", "巴黎")),
    "last sentence": (("We add. Paris", "Paris"), ("Not 5 apples.", "Not 5 apples")),
}  # fmt: skip
"""Form of a final answer -> examples (response, answer).

Of boxes, tags and ``####`` lines the one that ends last counts. Each other form counts only if the forms above it are
absent from the response.
"""

MAX_RESPONSE = 200_000
"""Maximum characters read from the end of a response, where the final answer is."""

MAX_LINE = 100
"""Maximum characters of an ``Answer:`` line before a box; a longer line is a heading with its text."""

_WRITTEN = re.compile(r"[^\n]*[^\W_][^\n]*")
"""A line with letters or digits, unlike ``$$`` and ``\\[``."""

MAX_NESTED_BOXES = 5

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
_BARE = re.compile(r"(?:[^\s$\\{}.,]|[.,](?=\d))+")
"""Matches ``5`` of ``\\boxed 5.`` and ``2.5`` of ``\\boxed 2.5``."""
_HEDGED = re.compile(
    rf"[\s$]*(?:or\b|或|\\text\s*\{{\s*or\s*\}})\s*(?:[$\\\d(+-]|(?:[A-H]|maybe|perhaps|possibly|{'|'.join(NUMERALS)})\b)",
    re.IGNORECASE,
)
"""Alternative after ``\\boxed 5``, a box without braces."""
_TAG = re.compile(r"<answer>", re.IGNORECASE)
_TAG_END = re.compile(r"</answer>", re.IGNORECASE)
_HASHES = re.compile(r"####[ \t]*:?[ \t]*(?:\n\s*(?!#))?([^\n]*)")
"""``#### 18``; the answer may be on the next line."""
_PHRASE = re.compile(
    rf"(?:{marks.NAMES}\s*(?:(?:\*\*)?\s*(?:{marks.SIGNS})\s*(?:\*\*)?|\s+(?:is|are|would\s+be|will\s+be)\b\s*:?)"
    r"|\[(?:final\s+)?answer\]\s*[:：]?|\bans\.(?=\s*[\d$\\(*-])"
    r"|(?:正确|最终|最后)?的?(?:答案|结果)\s*(?:应该|应)?\s*(?:选择|选|[是为]|[:：])+\s*)"
    r"\s*(?:\*\*)?",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\n|[。！?？](?!\d)|!(?!\d|\$|\\\))|\.(?=\s+[A-Z一-鿿]|\s*$)")
_REASON = re.compile(
    r"\s*,?\s*\b(?:because|since|which\s+is|so\s+that|I\s+hope|as\s+(?:required|desired|claimed))\b.*|[，,]\s*(?:因为|所以|因此).*",
    re.IGNORECASE | re.DOTALL,
)
_INLINE = re.compile(r"\$\$([^$]+)\$\$|(?<!\\)\$([^$]+)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_DISPLAY = re.compile(r"\$\$([^$]+)\$\$|\\\[(.+?)\\\]", re.DOTALL)
_TAIL = re.compile(r"(?:\s*(?:I hope (?:it|this) is correct\.?|<\|[a-z_]+\|>\w*|<(?:/s|end|eos|end_of_turn)>))+\s*$")
_LAST_SENTENCE = re.compile(
    r"(?<=[.!?])\s+(?=[A-Z])(?![A-H]\W*$)|(?<=[.!?])(?<![^A-Za-z][A-H][.!?])\s+(?=[A-H]\W*$)|(?<=[。！？])(?=.)"
)
"""End of a sentence. "so C. B" is one sentence, since it names two options."""
_LETTERS = re.compile(r"\W*(?:[A-H]\b\W*){2,}")
_ADVERB = re.compile(r"^(?:therefore|thus|hence|simply|just|clearly|then|now)\b[,\s]*", re.IGNORECASE)
_ONE_NUMBER = re.compile(
    r"[^\d\\]*?(?P<number>[$€£¥]?-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+|\s?%)?)(?![A-Za-z0-9_/^*+=-])[^\d\\]*"
)
_UNSURE = re.compile(
    r"\b(?:or|not|no|least|most|than|between|maybe|possibly|either|"
    r"cannot|can't|about|around|could|might|perhaps|probably)\b|n't\b|或|不|没|至少|至多|可能|[a-zA-Z]-\d",
    re.IGNORECASE,
)
_LEAD = re.compile(
    r"^(?:(?:so|thus|hence|therefore|then|finally|and)\b|(?:所以|因此|故|综上|答)[，,：:]?)[\s,，:：]*(?:we\s+"
    r"(?:get|have)\s+)?",
    re.IGNORECASE,
)
_SAID = re.compile(
    r"(?:^|.*[^\w])(?:is|are|equals|was|get|be)\s*:?\s+(?P<en>.+)$|^.*?(?:[是等于]|(?<![^我们]认)为)+[:：]?\s*(?P<zh>[^是为]+)$",
    re.IGNORECASE,
)


_DENIED_QUESTION = re.compile(
    r"[?？]\s*(?:不(?:是|对)?的?|错(?:误|了|的)?|否|并非如此|no(?:pe)?|wrong|incorrect|not\s+quite)\s*"
    r"(?:[,，.。;；:：!！]\s*|$)",
    re.IGNORECASE,
)
_AFFIRMED_QUESTION = re.compile(
    r"吗?\s*[?？]\s*(?:是的?|对的?|没错|正确|yes|right|correct)\s*[.。!！]*\s*$", re.IGNORECASE
)


_FENCE_AT_END = re.compile(r"```\w{0,10}[^\S\n]*\n([^`]*?)\s*```$")
_CORRECTED = re.compile(
    r"[.!?。！？\n]\s*+(?:no\b[,.\s]*)?(?:(?:wait|actually|correction|sorry)\b|更正|等等|不对)[\s,.:，：!！。-]*+"
    r"(?=[^\n.!?。！？]{0,20}(?:\d|\b[A-H]\b))([^\n.!?。！？]{1,60}(?:\.\d+)?[.!。]?)$",
    re.IGNORECASE,
)
"""Correction that ends a response: "Actually, 74."."""
_SUPPOSED = re.compile(
    r"(?:\b(?:suppose|assum\w+|imagine|pretend|if)\s+(?:that\s+)?(?:the\s+)?|(?:假设|假如|如果))$", re.IGNORECASE
)


def after_thinking(text: str) -> str:
    """Return the last ``MAX_RESPONSE`` characters of the answer after the thought."""
    return without_thought(text)[-MAX_RESPONSE:]


def _answered(response: str) -> str:
    """Return the answer after the thought, with table rows as lines and without plain HTML tags."""
    text = marks.with_answer_tags(after_thinking(response))
    if "|" in text:
        text = marks.without_tables(text)
    return marks.without_html(text) if "<" in text else text


def boxes(text: str) -> Iterator[tuple[int, str]]:
    """Yield (end, content) of every outermost box in order; an unclosed box has content ``''``."""
    at = 0
    while match := _BOX.search(text, at):
        start = match.end()
        if start < len(text) and text[start] == "{":
            end = _closing_brace(text, start)
            yield (end + 1, text[start + 1 : end]) if end >= 0 else (len(text), "")
            at = end + 1 if end >= 0 else len(text)
        else:  # \boxed 5
            bare = _BARE.match(text, start)
            at = max(start, bare.end()) if bare else start
            yield at, bare.group() if bare and not _HEDGED.match(text, at) else ""


def _closing_brace(text: str, start: int) -> int:
    """Return the index of the brace that closes the one at ``start``, or -1. ``\\{`` and ``\\}`` are characters, not
    braces."""
    depth = 0
    for brace in re.compile(r"(?<!\\)(?:\\\\)*([{}])").finditer(text, start):
        depth += 1 if brace.group(1) == "{" else -1
        if depth == 0:
            return brace.start(1)
    return -1


def last_box(text: str) -> str | None:
    """Return the content of the last box (the innermost if nested), or None without one."""
    answer = None
    for _ in range(MAX_NESTED_BOXES):
        found = [content for _, content in boxes(text)]
        if not found:
            break
        answer = text = found[-1]
    return answer


def last_tag(text: str) -> tuple[int, str] | None:
    """Return (end, content) of the last ``<answer>…</answer>``; an unclosed last tag has content ''."""
    opens = list(_TAG.finditer(text))
    if not opens:
        return None
    start = opens[-1].end()
    end = _TAG_END.search(text, start)
    return (end.end(), text[start : end.start()]) if end else (len(text), "")


def extract(response: str, answer_format: str = "any") -> str:
    """Return the final answer of a response, or ``''`` without one.

    ``answer_format``: ``any``, ``box`` (only a box counts), ``hashes`` (only GSM8K's ``#### answer``) or ``line`` (the
    last ``Answer:`` line, as DAPO's prompt asks; without one, as ``any``). Of boxes, ``<answer>`` tags and ``####``
    lines the one that ends last counts, even if empty. Without them: the last "answer is" / "答案是", else the
    last line.
    """
    text = _answered(response)
    line = _line(text) if answer_format == "line" else None
    answer = _any(text, "any" if answer_format == "line" else answer_format) if line is None else line
    return marks.unquoted(marks.unled(marks.undecorated(answer)))


def _any(text: str, answer_format: str) -> str:
    """Return the answer of the box, tag or ``####`` line that ends last; without one, the text's answer."""
    found: list[tuple[int, str, str, Callable[[str], str]]] = []
    if answer_format in ("any", "box") and (all_boxes := list(boxes(text))):
        found.append((all_boxes[-1][0], "box", all_boxes[-1][1], _innermost))
    if answer_format in ("any", "hashes") and "####" in text and (lines := list(_HASHES.finditer(text))):
        heads = answer_format == "any" and marks.HEADING.fullmatch(lines[-1].group(1))
        if not (heads and _WRITTEN.search(text, lines[-1].end())):
            found.append((lines[-1].end(), "hashes", lines[-1].group(1), _of_hashes))
    if answer_format == "any" and "<" in text and (tag := last_tag(text)):
        found.append((tag[0], "tag", tag[1], _of_tag))
    if found:
        _, form, content, read = found[0] if len(found) == 1 else max(found, key=lambda item: item[0])
        return trace.read(form, read(content).strip())
    return _loose(text) if answer_format == "any" else ""


def _innermost(content: str) -> str:
    inner = last_box(content)
    return marks.unaligned(content if inner is None else inner)


def _of_tag(content: str) -> str:
    inner = last_box(content)
    return _loose(content) if inner is None else inner


def _of_hashes(line: str) -> str:
    """Return the box in a ``####`` line unless a number precedes it; else the line."""
    box = _BOX.search(line)
    inner = last_box(line) if box and not re.search(r"\d", line[: box.start()]) else None
    if inner is None and _PHRASE.search(line):
        return _loose(line)
    return line if inner is None else inner


def _line(text: str) -> str | None:
    """Return the answer of the last ``Answer:`` line; None without one, and for a heading with a box further below."""
    found = list(marks.LINE.finditer(text))
    if not found:
        return None
    start, rest = found[-1].start(), text[found[-1].end() :]
    line = found_line.group() if (found_line := _WRITTEN.search(rest)) else ""
    if (inner := last_box(line)) is not None:
        return trace.read("box of an answer line", inner.strip())
    later = any(sign.search(rest) for sign in (_BOX, _TAG, _HASHES))
    if later and (not line or len(line) > MAX_LINE):
        return None
    return _loose(text[start : text.index(line, found[-1].end()) + len(line)] if later else text[start:])


@functools.lru_cache(maxsize=2)
def unmarked(response: str) -> str:
    """Return a response without a box, tag, ``####`` or "answer is"; '' for a response with one."""
    text = _answered(response).strip()
    marked = _BOX.search(text) or _TAG.search(text) or _HASHES.search(text) or _PHRASE.search(text)
    return "" if marked else text[-4000:]


def _loose(text: str) -> str:
    """Return the answer of a text without box or tag: after the last "answer is", else from the last sentence."""
    text = _TAIL.sub("", re.sub(r"[^\S\n]+", " ", text[-4000:].strip())).strip()
    text = marks.undecorated(_AFFIRMED_QUESTION.sub("", text))
    if text[:1] in ("{", "`") and (answer := of_object(text)):
        return trace.read("JSON object", answer)
    if fenced := _FENCE_AT_END.search(text):
        text = f"{text[: fenced.start()]}{fenced[1]}".strip()
    if corrected := _CORRECTED.search(text):
        return _of_sentence(corrected[1])
    if denied := list(_DENIED_QUESTION.finditer(text)):  # "Is the answer B? No, it is C."
        text = text[denied[-1].end() :]
    phrase = _after_phrase(text)
    if phrase is not None:
        return trace.read("phrase", phrase)
    if text.endswith(("$$", r"\]")) and (displays := list(_DISPLAY.finditer(text))) and displays[-1].end() == len(text):
        return trace.read("display", next(filter(None, displays[-1].groups())).strip())
    return _of_sentence(_LAST_SENTENCE.split(f" {text.rsplit(chr(10), 1)[-1]}")[-1])


def _after_phrase(text: str) -> str | None:
    """Return the text after "answer is" in the last sentence with it; after the first one if the sentence has two."""
    matches = list(_PHRASE.finditer(text))
    if not matches:
        return None
    first = last = len(matches) - 1
    while first > 0 and not _SENTENCE_END.search(text, matches[first - 1].end(), matches[first].start()):
        first -= 1  # "the answer is 3 or the answer is 4" is one answer, and a wrong one
    if not _UNSURE.search(text[matches[first].end() : matches[last].start()]):
        first = last  # in "Final Answer: The final answer is 5" the second repeats the first
    if supposed := _SUPPOSED.search(text[max(0, matches[first].start() - 40) : matches[first].start()]):
        return f"{supposed.group()}{text[matches[first].start() :]}"
    rest = _ADVERB.sub("", text[matches[first].end() :].lstrip())
    if display := _DISPLAY.match(rest):
        return next(filter(None, display.groups())).strip()
    stop = _SENTENCE_END.search(rest)
    if stop and _LETTERS.fullmatch(rest):  # "The answer is B. A C D"
        stop = None
    asked = "?" if stop and stop.group() in "?？" else ""  # kept: a question is not an answer
    answer = marks.undecorated(_REASON.sub("", rest[: stop.start()] if stop else rest)).strip().strip("*").strip()
    answer = marks.unbracketed(text[: matches[first].start()], answer) + asked
    if asked:
        return answer
    return _of_sentence(answer) if re.search(r"[a-zA-Z]{2,}\s.*\b(?:is|are|equals)\b", answer) else answer


def _states(line: str, formula: str) -> bool:
    """Return True if a line states its only formula."""
    before, _, after = _INLINE.sub("\0", line).partition("\0")
    return not _UNSURE.search(f"{before} {after}") and stated(before, after, equation="=" in formula)


def _of_sentence(line: str) -> str:
    """Return a sentence's only formula or number, or the text after "is". A sentence with "or" or "not" is not
    split."""
    line = marks.without_bold(marks.undecorated(line))
    line = _LEAD.sub("", line.strip().strip("*").strip()).rstrip(".。 ")
    formulas = [next(filter(None, match.groups())) for match in _INLINE.finditer(line)]
    outside = _INLINE.sub(" ", line)
    if len(line) > 500:
        return trace.read("last sentence", line)
    if len(formulas) == 1 and not re.search(r"\d", outside) and _states(line, formulas[0]):
        return trace.read("only formula", formulas[0].strip())
    number = _ONE_NUMBER.fullmatch(line)
    if (
        number
        and not formulas
        and not _UNSURE.search(line)
        and stated(line[: number.start("number")], line[number.end("number") :])
    ):
        return trace.read("only number", number["number"])
    said = _SAID.match(line)
    group = said and ("en" if said["en"] else "zh")
    if said and group and not _UNSURE.search(line[: said.start(group)]):
        return trace.read("sentence", said[group].strip())
    return trace.read("last sentence", line)


# ---------------------------------------------------------------- sentences

MAX_LINE_READ = 300
"""Maximum characters of a line that is read as a conclusion."""
MAX_ANSWER_LINE = 120
"""Maximum characters of an answer before its explanation."""

UNDECIDED = re.compile(
    r"\b(?:if|unless|whether|either|maybe|perhaps|possibly|probably|might|could|would|may|suppose|assum\w+|guess\w*|"
    r"claim\w*|argu\w+|says?|said|thinks?|thought|wait|actually|sorry|unsure|doubt\w*|mistake\w*|mistaken\w*|correction)\b"
    r"|[?？]|如果|假如|假设|若|除非|要是|可能|也许|或许?|是否|[吗么呢]|等等|其实|更正|改[选为]|怀疑|(?<!我)(?<!我们)(?:认为|觉得)|说\s*[,:，：]|有人|误[选认以]",
    re.IGNORECASE,
)
TAKEN_BACK = re.compile(
    r"\b(?:wait|actually|sorry|correction|mistaken?|on\s+second\s+thought|instead)\b|更正|等等|其实|改选|我错|应[该当]?是\s*[A-H]"
    r"|(?:^|[,.;\s])不[对是][,.;\s]|\b(?:choose|pick|select)\b|\b(?:choice|answer|option)\s+(?:is|would|should)\b",
    re.IGNORECASE,
)


_EXPLAINS = (
    r"[#*_>\s【\[(]*(?:(?:the\s+|an?\s+|my\s+|brief\s+)*(?:explanation|reason(?:ing)?|rationale|justification|solution|"
    r"analysis|proof)\b(?:\s+is\b)?|because\b|since\b|this\s+is\s+(?:because|since)\b|here(?:['’]s|\s+is)\s+why\b|why\b"
    r"|解析|分析|详解|解答|理由|解释|点评|说明|考点|因为|由于|原因)"
)
_EXPLAINED = re.compile(
    rf"\s*(?P<answer>[^\n【]{{1,{MAX_ANSWER_LINE}}}?)\s*(?:\n\s*|(?=【))(?P<rest>{_EXPLAINS}.*)",
    re.DOTALL | re.IGNORECASE,
)
_HEADED = re.compile(
    r"(?:^|\n)[#*\s]*[【\[](?:正确|参考|标准)?答案[】\]][*\s:：]*"
    rf"(?P<answer>[^\n【]{{1,{MAX_ANSWER_LINE}}}?)\s*(?:\n\s*|(?=【))(?P<rest>[#*\s]*【.*)",
    re.DOTALL,
)


_COUNTERS = re.compile(
    rf"{TAKEN_BACK.pattern}|\b(?:not|no|too|wrong|incorrect|false|try|tries|fails?|so|therefore|thus|hence|then|solution)\b"
    r"|n['’]t\b|[=?？不没错非]|所以|因此|应",
    re.IGNORECASE,
)
"""Text after a short answer that shows it is no explanation of the answer."""


def explained(text: str) -> tuple[str, str] | None:
    """Split an answer followed by its explanation into (answer, explanation); None for other texts."""
    if "\n" not in text and "【" not in text:
        return None
    if (headed := _HEADED.search(text)) and len(re.findall(r"答案[】\]]", text)) == 1:
        return headed["answer"].strip(), headed["rest"]
    match = _EXPLAINED.match(text)
    return (match["answer"].strip(), match["rest"]) if match else None


def text_before_explanation(text: str) -> str:
    """Return ``Paris`` of "Paris", a line break and "Explanation: …"; '' for other texts and for a retracted answer."""
    found = explained(text)
    if found is None or len(found[1]) > MAX_LINE_READ or _COUNTERS.search(found[1]) or UNDECIDED.search(found[0]):
        return ""
    return found[0].rstrip(".。")


# ---------------------------------------------------------------- boxes in a row

_BETWEEN_BOXES = re.compile(
    r"[\s$.]*(?:[,;、，；]|\\(?:quad|qquad|,|;)|\\text\s*\{\s*(?:and|or|和|或)\s*\}|\b(?P<or>or)\b|(?P<han>或者?)|\band\b|和|与|及|以及|&)?"
    r"[\s$]*(?:\band\b|\b(?P<or2>or)\b)?[\s$]*(?=\\(?:boxed|fbox)(?![a-zA-Z]))"
)


def boxes_in_a_row(response: str) -> list[str]:
    """Return the last boxes of a response if they form one list; [] for fewer than two. Boxes joined by "or" are one
    text."""
    if response.count("\\boxed") + response.count("\\fbox") < 2:
        return []
    text = after_thinking(response)
    found = [(end, content if (inner := last_box(content)) is None else inner) for end, content in boxes(text)]
    row: list[str] = []
    for (end, content), (_, following) in zip(reversed(found[:-1]), reversed(found[1:]), strict=True):
        match = _BETWEEN_BOXES.match(text, end)
        if match is None:
            break
        row = row or [following.strip()]
        if match["or"] or match["or2"] or match["han"] or "or" in match.group() or "或" in match.group():
            row[0] = f"{content.strip()} or {row[0]}"
        else:
            row.insert(0, content.strip())
    return row


# ---------------------------------------------------------------- an answer next to a refused one

_DOUBTED = re.compile(
    r"\b(?:not|or|if|either|neither|nor|maybe|perhaps|possibly|probably|might|could|may|whether|unless)\b|n['’]t\b|[?？]"
    r"|[不非没]|或|如果|若|可能|也许|[吗]",
    re.IGNORECASE,
)
_BESIDE = re.compile(
    r"(?P<said>[^,，。.;；]+?(?:\.\d+)?)\s*[,，]?\s*\(?(?:\b(?:and\s+|it\s+is\s+|it['’]s\s+)?(?:not|rather\s+than|instead\s+of|as\s+opposed\s+to)\s+"
    r"|(?:而并?不是|而非|并非|并不是|不是)\s*)(?P<other>[^,，。;；]+?)\)?",
    re.IGNORECASE,
)
_BUT = re.compile(
    r"(?:not\s+(?P<other>[^,，。;；]+?)\s*[,，;]?\s*(?:\bbut(?:\s+rather)?|\bit\s+is|\bit['’]s)\s+"
    r"|(?:并?不是|并非)\s*(?P<han>[^,，。;；]+?)\s*[,，;；]?\s*而?是\s*)(?P<said>[^,，。;；]+?)",
    re.IGNORECASE,
)
_QUALIFIES = re.compile(
    r"(?:only|just|merely|simply|solely|necessarily|always|quite|exactly|entirely|really|sure|certain|more|less|fewer|"
    r"until|if|because|by|in|on|at|for|to|including|yet|all|every|any|but)\b|\w+ing\b|[仅只一全都很太单]|必|总",
    re.IGNORECASE,
)
"""Text after "not" that names no other answer: "not only London", "not counting the last"."""


def beside_refused(text: str) -> tuple[str, str] | None:
    """Return ("Paris", "London") for "Paris, not London" and "not London but Paris"; None for other texts."""
    text = re.sub(r"^(?:it|that|this)['’]s\s+", "", text.strip().rstrip(".!。 "), flags=re.IGNORECASE)
    if len(text) > MAX_LINE_READ:
        return None
    match = _BUT.fullmatch(text)
    if match:
        said, other = match["said"], match["other"] or match["han"]
    elif match := _BESIDE.fullmatch(text):
        said, other = match["said"], match["other"]
    else:
        return None
    if _DOUBTED.search(said) or _QUALIFIES.match(other) or re.search(r"\bbut\b|n['’]t\b|\bnot\b|[?？吗]|而是", other):
        return None
    return said.strip(), other.strip()


# ---------------------------------------------------------------- names

_NAMING = re.compile(
    r"(?:(?:so|thus|therefore|hence)\s*,?\s+)?(?:(?:it|that|this|they|these|those)|(?:the|this|that|such\s+an?)\s+[a-z]+(?:\s+[a-z]+)?)"
    r"(?:['’](?:s|re)|\s+is|\s+are)\s+(?:(?:also|usually|commonly|generally)\s+)?"
    r"(?:called|known\s+as|named|termed|referred\s+to\s+as)\s+(?P<en>[^,，。.;；]+)"
    r"|(?:so\s+)?we\s+call\s+(?:it|this|that)\s+(?P<we>[^,，。.;；]+)"
    r"|(?:it|that|this)['’]s\s+(?P<its>[^,，。.;；]+)"
    r"|(?:所以|因此)?,?(?:[这那此该其]|它)[一-鿿]{0,6}?(?<![不没])(?:被?(?:称为|称作|称之为|叫做|叫作|叫|命名为)|就?是)(?P<han>[^,，。.;；是不]+)",
    re.IGNORECASE,
)


def named(text: str) -> str:
    """Return ``photosynthesis`` of "It is called photosynthesis."; '' if the last sentence names nothing."""
    line = re.split(r"(?<=[.!?])\s+(?=[A-Z])|(?<=[。！？])", text.rstrip(" .。!").rsplit("\n", 1)[-1])[-1].strip()
    match = _NAMING.fullmatch(line) if len(line) <= MAX_LINE_READ else None
    said = (match["en"] or match["we"] or match["its"] or match["han"]).strip() if match else ""
    return "" if _DOUBTED.search(line) else said


# ---------------------------------------------------------------- numbers that are not answers

_OF_THE_WAY = re.compile(
    r"\b(?:steps?|stages?|parts?|things?|methods?|approach(?:es)?|ways?|points?|facts?|ideas?|hints?)\s+(?:(?:are\s+)?(?:needed|"
    r"required|involved)\s+)?(?:to|for|in|of|that|we)\b.*\b(?:solv\w+|consider\w*|answer\w*|solution|tackl\w+|work\w*\s+out|find\w*|"
    r"remember|note|approach\w*)\b.*\b(?:this|it|the|that)\b|\b(?:solve|do|answer|tackle)\b.*\bin\s+\w+\s+steps?\b"
    r"|\b(?:steps?|things?|points?)\s+to\s+(?:consider|remember|note|check)\b"
    r"|[种个条]?(?:步骤?|方法|思路|解法|要点|部分|阶段)[来去]?.{0,6}(?:解|求|答|思考|分析|考虑|完成)|分[\d一二三四五六七八九十]+步",
    re.IGNORECASE,
)


def counts_the_way(text: str) -> bool:
    """Return True if the last line is about the solution, not its result: "There are 3 steps to solve this"."""
    return bool(_OF_THE_WAY.search(text.rstrip().rsplit("\n", 1)[-1][:MAX_LINE_READ]))


_ROUGH = re.compile(r"[$\s\\(]*(?:[A-Za-z]\s*)?(?:≈|\\approx|≒|~|～)")
_ASKS_ROUGHLY = re.compile(
    r"\b(?:about|approximat\w+|round\w*|nearest|estimat\w+|decimal)\b|约|近似|四舍五入|估[计算]|≈"
)


def only_rough(gold: str, pred: str, question: str) -> bool:
    """Return True if a prediction is ``≈3``, the ground truth is exact, and the question does not ask for rounding."""
    return (
        bool(_ROUGH.match(pred)) and not re.search(r"[.≈~～≒约]|\\approx", gold) and not _ASKS_ROUGHLY.search(question)
    )


def without_rough(pred: str, question: str) -> str:
    """Remove the sign ``≈`` from a prediction if the question asks for rounding."""
    if _ROUGH.match(pred) and _ASKS_ROUGHLY.search(question):
        return re.sub(r"≈|\\approx|≒|~|～", "", pred, count=1)
    return pred


_FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)
_KEYS_BESIDE = {"reason", "reasoning", "explanation", "rationale", "thought", "thoughts", "thinking"}
"""Names that a JSON object may have in addition to ``answer``."""


def of_object(text: str) -> str:
    """Return the ``answer`` (text or number) of a text that is a JSON object, perhaps fenced; '' for other texts."""
    text = text.strip()
    fenced = _FENCED.fullmatch(text)
    try:
        pairs = json.loads(fenced[1] if fenced else text, object_pairs_hook=list, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        return ""
    answers = [value for name, value in pairs if name == "answer"]
    if (
        len(answers) != 1
        or not isinstance(answers[0], str)
        or not {name for name, _ in pairs} <= {"answer", *_KEYS_BESIDE}
    ):
        return ""
    return answers[0]
