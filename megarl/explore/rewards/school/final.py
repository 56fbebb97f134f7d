"""Final answers of school questions that a sentence or a heading gives, in English and in Chinese.

- A conclusion: "The pressure increases, so B.", 本题选B, B项正确.
- An answer before its explanation: ``【答案】B`` before ``【解析】``, "B" before "Explanation:".
- Boxes in a row: ``\\boxed{A}, \\boxed{C}``.
- An answer beside a refused one: "Paris, not London", 不是伦敦，而是巴黎.
- A name: "It is called photosynthesis", 这叫做光合作用.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from megarl.explore.rewards.answer.extract import after_thinking, boxes, last_box
from megarl.explore.rewards.answer.normalize import half_width
from megarl.explore.rewards.school import options as k12_options
from megarl.explore.rewards.school import read as k12_read

MAX_LINE = 300
"""Characters of a line that is read as a conclusion."""
MAX_ANSWER_LINE = 120
"""Characters of an answer before its explanation."""

# ---------------------------------------------------------------- letters beside letters

_ALONE = re.compile(r"(?<![A-Za-z])(?:A(?![A-Za-z'’]|\s+[a-z]{3,}(?<!are)(?<!and)(?<!has))|[B-H](?![A-Za-z'’]))")
_UNDECIDED = re.compile(
    r"\b(?:if|unless|whether|either|maybe|perhaps|possibly|probably|might|could|would|may|suppose|assum\w+|guess\w*|"
    r"claim\w*|argu\w+|says?|said|thinks?|thought|wait|actually|sorry|unsure|doubt\w*|mistake\w*|mistaken\w*|correction)\b"
    r"|[?？]|如果|假如|假设|若|除非|要是|可能|也许|或许?|是否|[吗么呢]|等等|其实|更正|改[选为]|怀疑|(?<!我)(?<!我们)(?:认为|觉得)|说\s*[,:，：]|有人|误[选认以]",
    re.IGNORECASE,
)
_TAKEN_BACK = re.compile(
    r"\b(?:wait|actually|sorry|correction|mistaken?|on\s+second\s+thought|instead)\b|更正|等等|其实|改选|我错|应[该当]?是\s*[A-H]"
    r"|(?:^|[,.;\s])不[对是][,.;\s]|\b(?:choose|pick|select)\b|\b(?:choice|answer|option)\s+(?:is|would|should)\b",
    re.IGNORECASE,
)


def _supports(text: str, letters: set[str]) -> bool:
    """Return True if a text refuses all other letters that it names, and none of ``letters``."""
    for match in _ALONE.finditer(text):
        before, after = text[max(0, match.start() - 40) : match.start()], text[match.end() : match.end() + 120]
        refused = k12_read.is_refused(before, after)
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
    """The letters that the last line of a text concludes with; None where it is undecided or names others too."""
    line = half_width(text.rstrip().rsplit("\n", 1)[-1]).replace("**", "").replace("$", "").strip().rstrip(".!。 ")
    if len(line) > MAX_LINE or _UNDECIDED.search(line):
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
    rf"{_TAKEN_BACK.pattern}|\b(?:not|no|too|wrong|incorrect|false|try|tries|fails?|so|therefore|thus|hence|then|solution)\b"
    r"|n['’]t\b|[=?？不没错非]|所以|因此|应",
    re.IGNORECASE,
)
"""Found in what follows a short answer where that may be no explanation of it."""


def _explained(text: str) -> tuple[str, str] | None:
    """(answer, rest) of an answer that its explanation follows."""
    if "\n" not in text and "【" not in text:
        return None
    if (headed := _HEADED.search(text)) and len(re.findall(r"答案[】\]]", text)) == 1:
        return headed["answer"].strip(), headed["rest"]
    match = _EXPLAINED.match(text)
    return (match["answer"].strip(), match["rest"]) if match else None


def letters_before_explanation(text: str, options: Mapping[str, str], several: bool = False) -> set[str] | None:
    """The letters that stand before an explanation, which supports them."""
    found = _explained(text)
    if found is None or not k12_read.letters(found[0]):
        return None
    letters = k12_options.named(found[0], options, several)
    rest = half_width(found[1])[-4000:]
    others = [text for letter, text in options.items() if letter not in (letters or ()) and text.strip() in rest]
    if not letters or others or _TAKEN_BACK.search(rest) or not _supports(rest, letters):
        return None
    return letters


def text_before_explanation(text: str) -> str:
    """``Paris`` of "Paris", a line break and "Explanation: …"; '' for another text, and for one that is taken back."""
    found = _explained(text)
    if found is None or len(found[1]) > MAX_LINE or _COUNTERS.search(found[1]) or _UNDECIDED.search(found[0]):
        return ""
    return found[0].rstrip(".。")


# ---------------------------------------------------------------- boxes in a row

_BETWEEN_BOXES = re.compile(
    r"[\s$.]*(?:[,;、，；]|\\(?:quad|qquad|,|;)|\\text\s*\{\s*(?:and|or|和|或)\s*\}|\b(?P<or>or)\b|(?P<han>或者?)|\band\b|和|与|及|以及|&)?"
    r"[\s$]*(?:\band\b|\b(?P<or2>or)\b)?[\s$]*(?=\\(?:boxed|fbox)(?![a-zA-Z]))"
)


def boxes_in_a_row(response: str) -> list[str]:
    """The last boxes of a response that stand in one list; [] for fewer than two. Boxes with "or" between them are one
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


# ---------------------------------------------------------------- an answer beside a refused one

_UNSURE = re.compile(
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
"""Begins what "not" denies where that is no other answer: "not only London", "not counting the last"."""


def beside_refused(text: str) -> tuple[str, str] | None:
    """("Paris", "London") of "Paris, not London" and of "not London but Paris"; None for anything else."""
    text = re.sub(r"^(?:it|that|this)['’]s\s+", "", text.strip().rstrip(".!。 "), flags=re.IGNORECASE)
    if len(text) > MAX_LINE:
        return None
    match = _BUT.fullmatch(text)
    if match:
        said, other = match["said"], match["other"] or match["han"]
    elif match := _BESIDE.fullmatch(text):
        said, other = match["said"], match["other"]
    else:
        return None
    if _UNSURE.search(said) or _QUALIFIES.match(other) or re.search(r"\bbut\b|n['’]t\b|\bnot\b|[?？吗]|而是", other):
        return None
    return said.strip(), other.strip()


# ---------------------------------------------------------------- names

_NAMED = re.compile(
    r"(?:(?:so|thus|therefore|hence)\s*,?\s+)?(?:(?:it|that|this|they|these|those)|(?:the|this|that|such\s+an?)\s+[a-z]+(?:\s+[a-z]+)?)"
    r"(?:['’](?:s|re)|\s+is|\s+are)\s+(?:(?:also|usually|commonly|generally)\s+)?"
    r"(?:called|known\s+as|named|termed|referred\s+to\s+as)\s+(?P<en>[^,，。.;；]+)"
    r"|(?:so\s+)?we\s+call\s+(?:it|this|that)\s+(?P<we>[^,，。.;；]+)"
    r"|(?:it|that|this)['’]s\s+(?P<its>[^,，。.;；]+)"
    r"|(?:所以|因此)?,?(?:[这那此该其]|它)[一-鿿]{0,6}?(?<![不没])(?:被?(?:称为|称作|称之为|叫做|叫作|叫|命名为)|就?是)(?P<han>[^,，。.;；是不]+)",
    re.IGNORECASE,
)


def named(text: str) -> str:
    """``photosynthesis`` of "It is called photosynthesis."; '' where the last sentence names nothing."""
    line = re.split(r"(?<=[.!?])\s+(?=[A-Z])|(?<=[。！？])", text.rstrip(" .。!").rsplit("\n", 1)[-1])[-1].strip()
    match = _NAMED.fullmatch(line) if len(line) <= MAX_LINE else None
    said = (match["en"] or match["we"] or match["its"] or match["han"]).strip() if match else ""
    return "" if _UNSURE.search(line) else said


# ---------------------------------------------------------------- numbers that are no answers

_OF_THE_WAY = re.compile(
    r"\b(?:steps?|stages?|parts?|things?|methods?|approach(?:es)?|ways?|points?|facts?|ideas?|hints?)\s+(?:(?:are\s+)?(?:needed|"
    r"required|involved)\s+)?(?:to|for|in|of|that|we)\b.*\b(?:solv\w+|consider\w*|answer\w*|solution|tackl\w+|work\w*\s+out|find\w*|"
    r"remember|note|approach\w*)\b.*\b(?:this|it|the|that)\b|\b(?:solve|do|answer|tackle)\b.*\bin\s+\w+\s+steps?\b"
    r"|\b(?:steps?|things?|points?)\s+to\s+(?:consider|remember|note|check)\b"
    r"|[种个条]?(?:步骤?|方法|思路|解法|要点|部分|阶段)[来去]?.{0,6}(?:解|求|答|思考|分析|考虑|完成)|分[\d一二三四五六七八九十]+步",
    re.IGNORECASE,
)


def counts_the_way(text: str) -> bool:
    """Return True if the last line speaks of the solution rather than of its result: "There are 3 steps to solve
    this."."""
    return bool(_OF_THE_WAY.search(text.rstrip().rsplit("\n", 1)[-1][:MAX_LINE]))


_ROUGH = re.compile(r"[$\s\\(]*(?:[A-Za-z]\s*)?(?:≈|\\approx|≒|~|～)")
_ASKS_ROUGHLY = re.compile(
    r"\b(?:about|approximat\w+|round\w*|nearest|estimat\w+|decimal)\b|约|近似|四舍五入|估[计算]|≈"
)


def only_rough(gold: str, pred: str, question: str) -> bool:
    """Return True if a prediction is ``≈3`` where the ground truth is exact and the question asks for no rounding."""
    return (
        bool(_ROUGH.match(pred)) and not re.search(r"[.≈~～≒约]|\\approx", gold) and not _ASKS_ROUGHLY.search(question)
    )


def without_rough(pred: str, question: str) -> str:
    """Return a prediction without its sign ``≈`` where the question asks for rounding."""
    if _ROUGH.match(pred) and _ASKS_ROUGHLY.search(question):
        return re.sub(r"≈|\\approx|≒|~|～", "", pred, count=1)
    return pred
