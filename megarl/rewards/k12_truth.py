"""True or false: a sign, a word, a short sentence, or a judgement with its reason; two negations cancel out."""

from __future__ import annotations

import re

from megarl.rewards.normalize import half_width

_TRUE = frozenset((
    "true", "t", "yes", "y", "correct", "right", "对", "正确", "是", "√", "✓", "✔", "对的", "正确的", "真", "是的", "成立", "v", "\\checkmark", "checkmark", "没错", "无误",
))  # fmt: skip
_FALSE = frozenset(["false", "f", "no", "n", "incorrect", "wrong", "错", "错误", "否", "×", "✗", "✘", "x", "错的", "错误的", "假", "不是", "不对", "不正确", "不成立", "\\times", "times", "不是的", "untrue"]) | {"not true", "not correct", "not right"}
_DOUBT = re.compile(r"\b(?:or|n?either|nor|maybe|perhaps|possibly|unsure|not sure|probably)\b|[?？]|或|(?<!不)可能|不知道|不确定|不清楚|无法")
_NEVER = r"(?:not|never|cannot|can't|isn't|isnt|aren't|wasn't|doesn't|don't|no\s+longer|不可能|并非|并不|不是|没有|不能|不|没|非|无|未)"
_BETWEEN = r"(?:\s*(?:be|a|an|the|at\s+all|really|actually|in\s+fact|logically|mathematically|strictly|是|能|会|够)\b|\s*(?:是|能|会|说|认为))*\s*"
_PARTLY = r"(?:always|entirely|completely|necessarily|fully|totally|exactly|wholly|altogether|perfectly|universally|generally|all|quite|strictly\s+speaking|完全|一定|必然|总是|总|全|都)"
_UNSURE = re.compile(rf"(?:{_NEVER}{_BETWEEN}{_PARTLY}|未必|不见得){_BETWEEN}$")
_NEGATIONS = re.compile(rf"(?:{_NEVER}{_BETWEEN})+$")
_BELIEF = re.compile(r"(?:not|n't|never)\s+(?:think|believe|agree|say|consider|find)\b[^.,;]{0,40}$|(?:不认为|不觉得|不同意)[^,.;]{0,20}$")
_NOUN = r"(?!\s+(?:answers?|values?|terms?|numbers?|order|spelling|angles?|angled|triangles?|sides?|hand|forms?|words?|sums?|results?|units?|formula|name)\b)"
_PREDICATE = re.compile(
    rf"(?P<true>\b(?:true|correct|right|accurate|valid)\b{_NOUN}|正确(?!的?(?:答案|顺序|结果|值|读法|写法|是[^的]|应)|的(?:说法|表述)(?:是|为|应))|成立|(?<!相)(?<!绝)(?<!面)对(?![于应称边角比照话数顶象面立])|(?<![认天])真(?!分|空|正|实)|√|✓|✔|\\checkmark)"
    rf"|(?P<false>\b(?:false|incorrect|wrong|untrue|inaccurate|invalid)\b{_NOUN}|错误?|有误|(?<=无)误|假(?![如设使定若分])|×|✗|✘)"
)
_HEAD = re.compile(
    r"(?P<word>true|false|yes|no|correct|incorrect|right|wrong|对的?|错的?|正确的?|错误的?|是的?|否|不是|不对|不正确|不成立|√|×|✓|✗|✔|✘|\\checkmark|\\times)"
    r"\s*(?:[,.:;!。()]|[-–—]+\s|\\\\|\n|(?=\s+(?:because|since|as|for|due|when|given)\b)|(?=因为|由于|理由|应[是为该改当]))"
    r"|(?P<letter>[tf])\s*[,.:;]"
)
_CLAIM = re.compile(
    r"\b(?:it|this|that|which|statement|claim|sentence|answer|judge?ment|proposition|conclusion|assertion)(?:\s+(?:above|given|here|itself))?"
    r"(?:(?:\s+(?:is|was|must\s+be|should\s+be|has\s+to\s+be|cannot\s+be)|'s|\s+isn't)\b)[^,.;:!。]*"
    r"|(?:说法|结论|判断|命题|题目|题|答案|这句话|句子|此|这|它)(?:[^,.;:!。]{0,8})(?:正确|错|对|成立|有误)|应该?[是为]\s*[对错正√×][^,.;:!。]{0,3}$"
)
_CONDITION = re.compile(r"\bif\b|\bwere\b|\bwould\b|\bonly\b|如果|假如|若|只有|\bunless\b")
_NOT_THE_ANSWER = re.compile(r"(?:\b(?:is|was)\s+not|\bisn't)\s+(?:the|my|an?)\s+(?:\w+\s+)?(?:answer|choice|verdict)\b|不是(?:正确)?答案")
_CLAUSE = re.compile(r"[,.;:!?/()。]|\\\\|\bbut\b|\band\b|\bso\b|\bwait\b|\bactually\b|\btherefore\b|\bhence\b|但是?|所以|因此|然而|其实")


def stripped(text: str) -> str:
    """A short answer without markdown, quotes, brackets and final stops."""
    text = half_width(text).strip().replace("**", "").replace("`", "")
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(?<!\\)\$|\\[()]", "", text).strip()
    return re.sub(r"^[\"'(\[{]+|[\"')\]}.,;:!。]+$", "", text).strip() if re.search(r"\w|[√×✓✗✔✘]", text) else text


def exact_truth(text: str) -> bool | None:
    """True or False for a word or sign that means it, None for everything else."""
    word = stripped(text).casefold()
    return True if word in _TRUE else False if word in _FALSE else None


def truth(text: str) -> bool | None:
    """True or False for a sign, a word or a sentence that says one of them and not both."""
    exact = exact_truth(text)
    if exact is not None:
        return exact
    sentence = stripped(text).casefold()[:300]
    if head := _HEAD.match(sentence):
        said = head["letter"] == "t" if head["letter"] else exact_truth(head["word"])
        return None if said is None or _taken_back(sentence[head.end() :], said) else said
    if _DOUBT.search(sentence) or _CONDITION.search(sentence):
        return None
    found = _predicates(sentence)
    said = found.pop() if len(found) == 1 else None
    return None if said is None or _NOT_THE_ANSWER.search(sentence) or _opposite_clause(sentence, said) else said


def _predicates(text: str) -> set[bool | None]:
    """What each "true" or "wrong" of a text says behind its negations; None for "not always wrong"."""
    found: set[bool | None] = set()
    for match in _PREDICATE.finditer(text):
        before, said = text[max(0, match.start() - 60) : match.start()], bool(match["true"])
        if _UNSURE.search(before) or _BELIEF.search(before):
            found.add(False if said else None)
            continue
        negations = _NEGATIONS.search(before)
        count = len(re.findall(_NEVER, negations.group())) if negations else 0
        found.add(said == (count % 2 == 0))
    return found


def _taken_back(reason: str, said: bool) -> bool:
    """Whether what follows a judgement says the opposite of it; a reason may well speak of other things that are true or false."""
    if _opposite_clause(reason, said):
        return True
    claims = [match.group() for match in _CLAIM.finditer(reason) if not _CONDITION.search(reason[max(0, match.start() - 12) : match.end()])]
    return any((not said) in _predicates(claim) or None in _predicates(claim) for claim in claims)


def _opposite_clause(text: str, said: bool) -> bool:
    """``true, no``: a clause that is nothing but the opposite, or ends in yes or no against it."""
    clauses = _CLAUSE.split(text)
    return any(
        (not re.fullmatch(r"\s*[a-z]?\s*", clause) and exact_truth(clause) is (not said)) or clause.split()[-1:] == ["no" if said else "yes"]
        for clause in clauses
    )
