"""Marks around a final answer, and sentences that state their only number or formula.

A whitelist: before the number is a carrier phrase ("there are", ``x =``, 一共有), after it a unit, a counted noun or
nothing. The sentence must have no negation or doubt, and no operation after the number.
"""

from __future__ import annotations

import re

from megarl.rewards.answer import units

NAMES = r"\bans(?:wers?\b|\b\.?)"
"""Names of a final answer before a sign of ``SIGNS``."""
SIGNS = r":|：|=|[→⇒➜➔⟶⟹]|->|=>|\$?\\(?:to|rightarrow|Rightarrow|implies)(?![a-zA-Z])\$?|(?<=\s)[-–—](?=\s)"
_BOLD = r"(?:\*\*|__|[*_])?"
_CHINESE = r"(?:正确|最终|最后)?的?(?:答案|结果)"
LINE = re.compile(
    rf"(?:[\[(【「][*_]*)?(?:\b(?:final|correct)\s+)?(?:{NAMES}{_BOLD}\s*(?:{SIGNS})|\bans\.(?=\s*[\d$\\(*-])|{_CHINESE}{_BOLD}\s*[:：])"
    rf"\s*{_BOLD}",
    re.IGNORECASE,
)
"""Start of an ``Answer:`` line, with the bracket of ``[Answer: 73]``."""

PICTURES = r"[\U0001F300-\U0001FAFF\u2B50\u2728\u2B55\u26A1\uFE0F\u2764]"
CHECKS = r"[✅✓✔☑]"
_ENDS = r"\\(?:blacksquare|qedsymbol|qed|square|Box|checkmark)(?![a-zA-Z])|[∎■□◼▪]|\bQ\.?E\.?D\b\.?"
_DECORATION = re.compile(
    rf"(?:\s*(?:(?<=[\s.$*)}}\]。])(?:\$\$?\s*(?:{_ENDS})\s*\$\$?|\\\(\s*(?:{_ENDS})\s*\\\)|{_ENDS})"
    rf"|(?<![,;、，；])(?:{PICTURES}|{CHECKS})))+\s*$"
)
_LEADING = re.compile(rf"^(?:(?:{PICTURES}|{CHECKS}|[👉➡▶])\s*)+(?=[^\s,;、，；])")
_HEADINGS = """step part case solution explanation verification check conclusion method approach reasoning analysis
problem summary given final answer result"""
HEADING = re.compile(
    rf"[\s*]*(?:\d+[.)]\s*)?(?:{'|'.join(_HEADINGS.split())})\b(?:\s+(?:\d+|answer|result|[A-Z]))?[\s*]*(?:[:：].*|$)",
    re.IGNORECASE,
)
"""Text of a ``####`` line that is a section heading, not an answer."""
_BOLD_WORDS = re.compile(r"(?<![\w)*])\*\*(?=[^\s*])([^*\n]*[^\s*])\*\*(?![\w(*])")


def undecorated(text: str) -> str:
    """Remove check marks, pictures and proof ends from the end of a text. Several check marks are kept: they may be
    answers."""
    if not text or text[-1] in "0123456789}abcdefghijklmnopqrstuvwxyz" and not text.endswith(_ENDINGS):
        return text
    if (found := _DECORATION.search(text[-80:])) is None:
        return text
    rest = text[: len(text) - len(found.string) + found.start()]
    return rest if rest.strip(" $*\\([") and not re.search(CHECKS, rest) else text


_ENDINGS = ("square", "qed", "qedsymbol", "checkmark")


def unled(text: str) -> str:
    """Remove check marks and pictures from the start of a text."""
    return _LEADING.sub("", text) if text and text[0] > "\u2000" and not re.search(CHECKS, text[1:]) else text


_TAGS = re.compile(r"\[(/?)ANSWER\]|<(/?)final(?:_answer)?>", re.IGNORECASE)
_CLOSED = re.compile(r"\[/ANSWER\]|</final(?:_answer)?>", re.IGNORECASE)


def with_answer_tags(text: str) -> str:
    """Rewrite ``[ANSWER]…[/ANSWER]`` and ``<final>…</final>`` as ``<answer>…</answer>``."""
    if "/" not in text or not _CLOSED.search(text):
        return text
    return _TAGS.sub(lambda tag: f"<{tag[1] or tag[2] or ''}answer>", text)


_ALIGNED = re.compile(r"\s*\\begin\{(aligned|gathered|split)\}(.*)\\end\{\1\}\s*", re.DOTALL)


def unaligned(text: str) -> str:
    """Remove an environment of formulas around a text's only line."""
    found = _ALIGNED.fullmatch(text) if r"\begin" in text else None
    return found[2].replace("&", "").strip() if found and r"\\" not in found[2] else text


_QUOTED = re.compile(r"""\s*(?:"([^"]+)"|'([^']+)'|“([^“”]+)”|‘([^‘’]+)’|「([^「」]+)」|`([^`]+)`)\s*+[.。]?\s*+""")


def unquoted(text: str) -> str:
    """Remove quotation marks around a whole text, and the brackets of ``['73']``."""
    if text[:2] in ("['", '["') and text.endswith(("']", '"]')):
        text = text[1:-1]
    quoted = _QUOTED.fullmatch(text) if text and text[0] in "\"'“‘「`" else None
    return text if quoted is None else str(quoted[quoted.lastindex or 0]).strip()


def asks(text: str) -> bool:
    """Return True if a text ends as a question, which is not an answer: ``73?``."""
    return text.rstrip(" $*_\"'”’)]】}.\\").endswith(("?", "？"))


_OPENED = re.compile(r"([\[(【「])\s*[*_]*(?:(?:the|my|final|correct)\s+)*[*_]*$", re.IGNORECASE)
_CLOSING = {"[": "]", "(": ")", "【": "】", "「": "」"}


def unbracketed(before: str, answer: str) -> str:
    """Return ``73`` for "[Answer: 73]", if ``before`` ends with the bracket that ``answer`` closes."""
    opened = _OPENED.search(before[-40:])
    head, closing, rest = answer.rpartition(_CLOSING[opened[1]]) if opened else ("", "", "")
    return head.strip() if closing and not rest.strip(" .。*_") else answer


_ROW = re.compile(
    rf"^[ \t]*\|[ \t]*{_BOLD}(?:the[ \t]+)?(?:(?:final|correct)[ \t]+)?(?:answer|result|{_CHINESE})"
    rf"[ \t]*[:：]?{_BOLD}[ \t]*\|"
    r"[ \t]*+([^|\n]{0,400}[^|\s])[ \t]*+\|?[ \t]*+$(?!\n[ \t]*\|[ \t]*:?--)",
    re.IGNORECASE | re.MULTILINE,
)


_COLUMN = re.compile(
    rf"^[ \t]*\|[ \t]*{_BOLD}(?:(?:final|correct)[ \t]+)?(?:answer|{_CHINESE}){_BOLD}[ \t]*\|[ \t]*+\n"
    r"[ \t]*\|[ \t:-]{2,80}\|[ \t]*+\n[ \t]*\|[ \t]*+([^|\n]{0,400}[^|\s])[ \t]*+\|[ \t]*+$(?!\n[ \t]*\|)",
    re.IGNORECASE | re.MULTILINE,
)
"""Table of one column and one row."""


def without_tables(text: str) -> str:
    """Rewrite each table row ``| Answer | 73 |`` as the line ``Answer: 73``; a table's head stays."""
    return _ROW.sub(r"Answer: \1", _COLUMN.sub(r"Answer: \1", text))


_HTML = re.compile(r"</?(?:b|strong|i|em|u|p|span|div|h[1-6])>", re.IGNORECASE)


def without_html(text: str) -> str:
    """Remove plain HTML tags if one is closed: ``a<b>c`` is unchanged."""
    return _HTML.sub("", text) if "</" in text else text


def without_bold(text: str) -> str:
    """Remove bold marks from a line; ``2**3`` is a power."""
    return _BOLD_WORDS.sub(r"\1", text) if "**" in text else text


_REGULAR = """add answer ask average bake build buy carry charge collect complete conclude contain cook cost count
cover cut deduce deliver depict derive donate draw drink drive earn eat end equal evaluate feature
fill find finish follow gain gather get give have hold include invest jump keep last learn leave lend
lose make mean measure mow need number obtain offer order owe own pack paint pass pay pick plant play
possess pour practice print produce raise read receive remain remove repair require return run save
say score see sell serve share show sleep solve spend stand start state stay stock store study swim
take total travel use visit walk want wash watch wear weigh win work write yield"""
_IRREGULAR = """is are was were be being been 's ’s has had having became got getting gave giving made making came
left lost paid sold bought spent won took taken found kept ate drank drove rode ran flew saw held
lent grew have become come goes"""


def _forms(verb: str) -> set[str]:
    stem = verb[:-1] if verb.endswith(("e", "y")) else verb
    return {
        verb,
        f"{verb}s",
        *(stem + end for end in (("ies", "ied", "ying") if re.search("[^aeiou]y$", verb) else ("es", "ed", "ing"))),
    }


_VERB = (
    rf"(?:{'|'.join(sorted(set().union(*map(_forms, _REGULAR.split()), _IRREGULAR.split()), key=len, reverse=True))})"
)
_FILLER = (
    r"(?:a\s+(?:grand\s+)?total\s+of|in\s+(?:total|all)|only|exactly|"
    r"just|simply|precisely|therefore|thus|hence|then|now|also|still|altogether|indeed|finally"
    r"|equal\s+to|the\s+(?:number|value|integer|(?:final\s+)?answer)|"
    r"him|her|them|us|me|you|it|that|there|all|his|their|my|our|its|another|the|these|those|to|be|pay|up"
    r"|(?:his|her|their|my|our|its|the|each|every)\s+(?!(?:minus|"
    r"negative|plus|double|triple|twice|half|square|cube|root)\b)[a-z]+)"
)
_MEASURE = (
    r"(?:amount|answer|area|average|age|cost|difference|distance|"
    r"height|length|maximum|mean|median|minimum|perimeter|price|"
    r"probability|profit|radius|rate|ratio|remainder|result|savings|"
    r"score|slope|speed|sum|temperature|time|total|value|volume|weight|width)s?"
)
_THING = (
    r"(?:equation|expression|formula|fraction|function|integer|"
    r"interval|line|matrix|mode|number|pair|point|polynomial|quantity|range|set|solution|vector)s?"
)
_MOVED = r"(?:increase[sd]?|decrease[sd]?|rises?|rose|falls?|fell|gr[eo]ws?|drops?|dropped|changes?|changed)"
_REACHED = (
    r"(?:equal|equals|equivalent|add(?:s|ed)?(?:\s+up)?|amounts?|"
    rf"comes?|came|sums?|simplif\w+|evaluates?|reduces?|works?\s+out|corresponds?|leads?|{_MOVED})"
)
_CARRIER = re.compile(
    rf"^\W*(?:(?:the|these|those|all)\s+)?$|(?:^|[^\w-]){_VERB}(?:(?:\s+{_FILLER}){{0,4}}\s*[:：]?|"
    rf"(?:\s+[a-z]+){{0,3}}\s+(?:for|in|at|after|with|as))\s*$"
    rf"|\b(?:{_MEASURE}\s+of|{_REACHED}\s+(?:\w+\s+)?to|(?:{_MOVED}|"
    rf"differs?)\s+by|{_MEASURE}|{_THING}|total\s+of|only|just|"
    r"exactly|altogether|that|we|therefore|thus|hence|then|so)\s*$"
    r"|[\w)'’\]}]\s*=\s*$|[:：,，。(（]\s*$"
    r"|(?:[是为有得共了需要花用卖买走跑行飞剩即则出给付第余下做种看见到距差打]|[今明去]年|每(?:[人天年月周时分次]|"
    r"小时|分钟)|等于|总[数计]|合计|答案|结果|比[^，,。]{1,12}[多少])\s*[:：]?\s*$"
)
"""Pattern for lower-case text: ignoring case would be several times slower."""
_SIGNED = re.compile(r"[-−–±∓<>≤≥≈~～≠√∛+*/^|]\s*$|(?:^|[\s,:：])[-−–√|][^=]*=\s*$|[²³<>!~≈≠]\s*=\s*$")
_DENIED = re.compile(
    r"\b(?:or|not?|never|neither|nor|none|nothing|without|except|"
    r"excluding|but|unless|if|whether|wrong|false|incorrect|inaccurate|invalid|impossible|unlikely|doubt\w*|mistake\w*"
    r"|den(?:y|ies|ied)|disagree|reject\w*|refute\w*|contradict\w*|"
    r"rather|instead|far|hardly|barely|scarcely|rarely|seldom|"
    r"nearly|almost|approx(?:imately)?|roughly|around|about|circa"
    r"|least|most|than|between|maybe|possibly|perhaps|probably|"
    r"either|can['’]?t|cannot|could|might|guess\w*|fail\w*|opposite|"
    r"negat\w+|suppose\w*|let|assum\w+|estimat\w+|hope[sd]?"
    r"|beyond|under|exclud\w*|discard\w*|ruled\s+out|extraneous|"
    r"of\s+the\s+(?:final\s+)?(?:answer|result)|answer['’]s|log|ln|fold|bis|upwards?|(?<=\0 )short|(?<!left "
    r")over|below|above|(?<!adds )(?<!add )(?<!added )(?<!sums )(?<!sum "
    r")up\s+to(?=\s*\0)|close\s+to|short\s+of|lacks?)\b|n['’]t\b|[?？]"
    r"|[或不没未莫勿]|非(?!常)|无(?!论)|(?<![分区特级])别|错|误|否|假(?![期日])|除了|"
    r"可能|也许|(?<![公节])约(?![定会数分])|大概|接近|将近|近似|吗|几乎|差点|至[多少]|最[多少]|"
    r"超[过出]|以外|如果|怀疑|相反|零下|答案的|^\s*(?:is|was|are|were|do|does|did)\s+(?:it|this|that|there)\b",
    re.IGNORECASE,
)
"""The number is replaced by ``\\0``."""
_CHANGED = re.compile(
    r"^\s*[*/^×÷+²³]|\b(?:squared|cubed|doubled|halved|tripled|"
    r"negated|factorials?|thousands?|millions?|billions?|trillions?|"
    r"hundreds?|dozens?|half|halves|thirds?|quarters?|fourths?|fifths?|sixths?|sevenths?"
    r"|eighths?|ninths?|tenths?|hundredths?|root|power|reciprocal|"
    r"inverse|modulo|mod|plus|minus|divided|multiplied|base|binary|"
    r"too\s+(?:many|few|much|little|low|high|large|small))\b"
    r"|\btimes\s+(?!(?:an?|per|each|every|in|on)\b)\w|分之|一半|的(?:平方|立方|倒数)|的[^，,。]*[倍根]|次方|阶乘"
    r"|以[上下内]|左右|上下|之外|除外",
    re.IGNORECASE,
)
_PREDICATE = re.compile(
    r"(?:is|was|remains?)\s+(?:(?:the|my|our|a|its|their)\s+)?(?:(?:final|"
    r"correct|right|required|desired|only|total|exact)\s+)?"
    r"(?:answer|result|value|solution|number|total|sum|left|correct|"
    r"right|needed|required|remaining)\b|(?:are|were)\s+\w|remain(?:s|ed|ing)?\b|can\s+be\s+seen\b",
    re.IGNORECASE,
)
_TAIL = frozenset(
    [
        "a",
        "an",
        "of",
        "in",
        "on",
        "at",
        "for",
        "per",
        "from",
        "with",
        "after",
        "during",
        "each",
        "every",
        "left",
        "by",
        "to",
        "altogether",
        "total",
        "today",
        "by",
        "this",
        "these",
        "there",
        "inside",
        "because",
        "since",
        "before",
        "until",
        "when",
        "while",
        "as",
    ]
)
_HAN_BEHIND = re.compile(
    r"^.{0,2}(?:[几万亿半]|千(?![米克瓦帕])|百(?!分))|^.?(?:[成至到加减乘和与]|倍(?!$)|"
    r"分之)|^[余来对折]|^打$|^.?多|^的.|^是(?!(?:最终|正确|最后)?的?(?:答案|结果)|正确的|对的)"
)
_CLAUSE = re.compile(r"[,;，；:：(（。!！—]")


def stated(before: str, after: str, equation: bool = False) -> bool:
    """Return True if a sentence states the text between ``before`` and ``after`` unchanged. An equation needs no
    carrier phrase."""
    if _DENIED.search(f"{before}\0{after}") or _CHANGED.search(after):
        return False
    carried = equation or (bool(_CARRIER.search(before.lower())) and not _SIGNED.search(before))
    return (
        carried and not (before.strip() == "" and after.startswith("!")) and _counted(_CLAUSE.split(after)[0].strip())
    )


def _counted(text: str) -> bool:
    """Return True if the words after a number are a unit, a counted noun or a place: ``apples in the box``, 个苹果, "is
    the answer"."""
    if re.match("[一-鿿]", text):
        return not _HAN_BEHIND.search(text[:4])
    nouns: list[str] = []
    for match in re.finditer(r"\S+", text):
        word = match.group().strip("*\"'.").lower()
        if word in _TAIL or _PREDICATE.match(text, match.start()):
            break
        nouns.append(word)
    return len(nouns) <= 5 and all(map(_harmless, nouns)) and not units.opens(" ".join(nouns[-1:]))


def _harmless(word: str) -> bool:
    if word in ("", "times", "more", "fewer", "%", "°", "$"):
        return True
    return not units.stops(word) and (
        bool(re.fullmatch(r"[a-z][a-z0-9'’/-]+|[一-鿿]+", word)) or units.unit_of(f" {word}") not in (None, "")
    )
