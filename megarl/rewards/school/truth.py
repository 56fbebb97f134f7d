"""Read true or false from a sign, word, short sentence, or judgement with its reason; two negations cancel out."""

from __future__ import annotations

import re

from megarl.rewards.answer.normalize import half_width

_TRUE = frozenset(
    (
        "true",
        "t",
        "yes",
        "y",
        "correct",
        "right",
        "对",
        "正确",
        "是",
        "√",
        "✓",
        "✔",
        "对的",
        "正确的",
        "真",
        "是的",
        "成立",
        "v",
        "\\checkmark",
        "checkmark",
        "没错",
        "无误",
    )
)
_FALSE = frozenset(
    [
        "false",
        "f",
        "no",
        "n",
        "incorrect",
        "wrong",
        "错",
        "错误",
        "否",
        "×",
        "✗",
        "✘",
        "x",
        "错的",
        "错误的",
        "假",
        "不是",
        "不对",
        "不正确",
        "不成立",
        "\\times",
        "times",
        "不是的",
        "untrue",
    ]
) | {"not true", "not correct", "not right"}
_DOUBT = re.compile(
    r"\b(?:or|n?either|nor|maybe|perhaps|possibly|unsure|not sure|probably)\b|[?？]"
    r"|或|(?<!不)可能|不知道|不确定|不清楚|无法"
)
_NEVER = (
    r"(?:not|never|cannot|can't|isn't|isnt|aren't|wasn't|doesn't|don't|no\s+longer"
    r"|不可能|并非|并不|不是|没有|不能|不|没|非|无|未)"
)
_BETWEEN = (
    r"(?:\s*(?:be|a|an|the|at\s+all|really|actually|in\s+fact|"
    r"logically|mathematically|strictly|是|能|会|够)\b|\s*(?:是|能|会|说|认为))*\s*"
)
_PARTLY = (
    r"(?:always|entirely|completely|necessarily|fully|totally|"
    r"exactly|wholly|altogether|perfectly|universally|generally|all|quite|strictly\s+speaking|完全|一定|必然|总是"
    r"|总|全|都)"
)
_UNSURE = re.compile(rf"(?:{_NEVER}{_BETWEEN}{_PARTLY}|未必|不见得){_BETWEEN}$")
_NEGATIONS = re.compile(rf"(?:{_NEVER}{_BETWEEN})+$")
_BELIEF = re.compile(
    r"(?:not|n't|never)\s+(?:think|believe|agree|say|consider|find)\b[^.,;]{0,40}$|(?:不认为|不觉得"
    r"|不同意)[^,.;]{0,20}$"
)
_NOUN = (
    r"(?!\s+(?:answers?|values?|terms?|numbers?|order|spelling|"
    r"angles?|angled|triangles?|sides?|hand|forms?|words?|sums?|results?|units?|formula|name)\b)"
)
_PREDICATE = re.compile(
    rf"(?P<true>\b(?:true|correct|right|accurate|valid)\b{_NOUN}|"
    r"正确(?!的?(?:答案|顺序|结果|值|读法|写法|是[^的]|应)|的(?:说法|表述)(?:是|为|应))|"
    r"成立|(?<!相)(?<!绝)(?<!面)(?<!反)对(?![于应称边角比照话数顶象面立])|(?<![认天])真(?!分|空|正|实)|√|✓|✔"
    r"|\\checkmark)"
    rf"|(?P<false>\b(?:false|incorrect|wrong|untrue|inaccurate|invalid)\b{_NOUN}|错误?|有误|(?<=无)误|假"
    r"(?![如设使定若分])|×|✗|✘)"
)
_HEAD = re.compile(
    r"(?P<word>true|false|yes|no|correct|incorrect|right|wrong|"
    r"对的?|错的?|正确的?|错误的?|是的?|否|不是|不对|不正确|不成立|√|×|✓|✗|✔|✘|\\checkmark|\\times)"
    r"\s*(?:[,.:;!。()]|[-–—]+\s|\\\\|\n|(?=\s+(?:because|since|as|for|due|when|given)\b)|(?=因为|由于|理由"
    r"|应[是为该改当]))"
    r"|(?P<letter>[tf])\s*[,.:;]"
)
_CLAIM = re.compile(
    r"\b(?:it|this|that|which|statement|claim|sentence|answer|"
    r"judge?ment|proposition|conclusion|assertion)(?:\s+(?:above|given|here|itself))?"
    r"(?:(?:\s+(?:is|was|must\s+be|should\s+be|has\s+to\s+be|cannot\s+be)|'s|\s+isn't)\b)[^,.;:!。]*"
    r"|(?:说法|结论|判断|命题|题目|题|答案|这句话|句子|此|这|它)(?:[^,.;:!。]{0,8})(?:正确|错|对|成立|有误)"
    r"|应该?[是为]\s*[对错正√×][^,.;:!。]{0,3}$"
)
_CONDITION = re.compile(r"\bif\b|\bwere\b|\bwould\b|\bonly\b|如果|假如|若|只有|\bunless\b")
_NOT_THE_ANSWER = re.compile(
    r"(?:\b(?:is|was)\s+not|\bisn't)\s+(?:the|my|an?)\s+(?:\w+\s+)?(?:answer|choice|verdict)\b|不是(?:正确)?答案"
)
_SURE = (
    r"(?:a|an|also|definitely|certainly|indeed|clearly|obviously|"
    r"always|absolutely|totally|completely|entirely|fully|perfectly|"
    r"in\s+fact|really|actually|so|thus|therefore|simply|just|logically|mathematically|strictly)"
)
_CARRIED = re.compile(
    r"(?:^|[,.;:(\"'。√×✓✗✔✘]|\s[-–—]+|\b(?:is|are|was|be|as|say|"
    rf"holds?|remains?|answer|hence|thus|therefore|so|statement|claim)\b|['’]s\b)\s*(?:{_SURE}\s+)*$"
    r"|(?:说法|结论|命题|题目?|话|句子?|推理|观点|表述|语句|叙述|描述|判断|[等式]式|定理|答案|"
    r"计算|解法|论述|陈述|想法|看法|理解|选项|[这那此它其者都均全也就]|显然|当然|确实|的确|必然|一定|完全|绝对"
    r"|肯定|十分|非常|[是为应选填算能]|认为|觉得|所以|因此|故|说|正确|对|错误?)\s*$"
)
"""Text before a judgement and its negations in a sentence that judges: "is", 说法; not "rarely", 部分."""
_SETTLED = re.compile(
    r"\s*(?:$|[,.;:!)(\"'。\\√×✓✗✔✘—–]|-(?!ish|like)|(?:because|"
    r"since|as|that|to\s+say|at\s+all|for\s+(?:all|any|every)|"
    r"in\s+(?:all|every)|by|and|so|here|statement|claim|sentence|proposition|assertion|conclusion|judge?ment)\b"
    r"|[正错对]|了?的?(?:说法|表述|判断|命题|结论)?(?:的|了)?(?:$|[,.;:!。(]|因为|由于|理由))"
)
_HEDGED = re.compile(
    r"\b(?:some|part|partly|partially|half|mostly|rarely|seldom|"
    r"sometimes|hardly|barely|scarcely|almost|nearly|usually|often|"
    r"doubt\w*|suspect\w*|den(?:y|ies|ied)|disput\w*|wonder|whether|seem\w*|appear\w*|opposite|contrary|far\s+from"
    r"|but|disagree|hard|unclear|supposed\w*|alleged\w*|pretend\w*|too|most|many|few|either)\b"
    r"|部分|有些|有的|有时|偶尔|多数|一半|基本|几乎|貌似|似乎|好像|看似|也许|据说|怀疑|是否|难说|很难|不敢|谈不上"
    r"|近乎|差不多|反对|否认|与否|吗"
)
_HEDGE_BEHIND = re.compile(
    r"\s*(?:but\s+|though\s+)?(?:only\s+)?(?:mostly|partly|partially|"
    r"in\s+part|sometimes|rarely|almost|nearly|usually|often|to\s+some\s+extent|"
    r"for\s+the\s+most\s+part|部分|有时|基本上?|也许|大概)\b[^,;.]{0,12}$|[?？]\s*$"
)
_APOLOGY = re.compile(r"^(?:对不起|抱歉|不好意思|(?:i['’]?m\s+)?sorry)\s*[,.!;:]?\s*", re.IGNORECASE)
_CLAUSE = re.compile(
    r"[,.;:!?/()。]|\\\\|\bbut\b|\band\b|\bso\b|\bwait\b|\bactually\b|\btherefore\b|\bhence\b|但是?|所以|因此|然而|其实"
)


def stripped(text: str) -> str:
    """Return a short answer without markdown, quotes, brackets and final full stops."""
    text = half_width(text).strip().replace("**", "").replace("`", "")
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(?<!\\)\$|\\[()]", "", text).strip()
    return re.sub(r"^[\"'(\[{]+|[\"')\]}.,;:!。]+$", "", text).strip() if re.search(r"\w|[√×✓✗✔✘]", text) else text


def exact_truth(text: str) -> bool | None:
    """Return True or False for a word or sign that means it; None for other text."""
    word = stripped(text).casefold()
    return True if word in _TRUE else False if word in _FALSE else None


def truth(text: str) -> bool | None:
    """Return True or False for a sign, word or sentence that means exactly one of them; otherwise None."""
    text = _APOLOGY.sub("", half_width(text).strip())
    exact = exact_truth(text)
    if exact is not None:
        return exact
    sentence = stripped(text).casefold()[:300]
    if head := _HEAD.match(sentence):
        said = head["letter"] == "t" if head["letter"] else exact_truth(head["word"])
        return (
            None
            if said is None or _taken_back(sentence[head.end() :], said) or _HEDGE_BEHIND.match(sentence[head.end() :])
            else said
        )
    if _DOUBT.search(sentence) or _CONDITION.search(sentence):
        return None
    found = _predicates(sentence, strict=True)
    said = found.pop() if len(found) == 1 else None
    return None if said is None or _NOT_THE_ANSWER.search(sentence) or _opposite_clause(sentence, said) else said


def _predicates(text: str, strict: bool = False) -> set[bool | None]:
    """Return the value of each "true" or "wrong" in a text after its negations; None for "not always wrong".

    ``strict``: also None if the value is hedged, or no text that introduces a judgement precedes it.
    """
    found: set[bool | None] = set()
    for match in _PREDICATE.finditer(text):
        before, said = text[max(0, match.start() - 60) : match.start()], bool(match["true"])
        unsure, negations = _UNSURE.search(before), _NEGATIONS.search(before)
        if strict and not _judges(
            before, min((m.start() for m in (unsure, negations) if m), default=len(before)), text[match.end() :]
        ):
            found.add(None)
        elif unsure or _BELIEF.search(before):
            found.add(False if said else None)
        else:
            count = len(re.findall(_NEVER, negations.group())) if negations else 0
            found.add(said == (count % 2 == 0))
    return found


def _judges(before: str, at: int, after: str) -> bool:
    """Return True if a predicate between ``before`` and ``after``, with negations from ``at`` on, is a plain
    judgement."""
    carried = at < len(before) or _CARRIED.search(before)
    return bool(carried and _SETTLED.match(after)) and not _HEDGED.search(before)


def _taken_back(reason: str, said: bool) -> bool:
    """Return True if the text after a judgement says the opposite. A reason may call other things true or false."""
    if _opposite_clause(reason, said):
        return True
    claims = [
        match.group()
        for match in _CLAIM.finditer(reason)
        if not _CONDITION.search(reason[max(0, match.start() - 12) : match.end()])
    ]
    return any((not said) in _predicates(claim) or None in _predicates(claim) for claim in claims)


def _opposite_clause(text: str, said: bool) -> bool:
    """Return True for ``true, no``: a clause is only the opposite, or ends in a contradicting yes or no."""
    clauses = _CLAUSE.split(text)
    return any(
        (not re.fullmatch(r"\s*[a-z]?\s*", clause) and exact_truth(clause) is (not said))
        or clause.split()[-1:] == ["no" if said else "yes"]
        for clause in clauses
    )
