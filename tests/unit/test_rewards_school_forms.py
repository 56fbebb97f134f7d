"""Forms of final answers of school questions: every form with letters, words and numbers put in, right and wrong."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from megarl.rewards.answer.grammar import beside_refused, boxes_in_a_row, named
from megarl.rewards.school.final import concluded
from megarl.rewards.school.verifier import score
from megarl.rewards.vision.verifier import score_count

LETTERS = (("B", "A", "C"), ("D", "C", "A"), ("A", "B", "D"))
"""(the letter that is named, two others)"""

LETTER_FORMS = (
    "【答案】{x}\n【解析】因为它最大。",
    "【答案】{x}【解析】因为它最大。",
    "【正确答案】{x}\n【分析】{y}错误，{z}错误。",
    "本题选{x}",
    "本题应选{x}。",
    "此题选{x}项。",
    "综上所述，选{x}。",
    "综上，本题选{x}。",
    "{y}、{z}错误，本题选{x}。",
    "{x}项正确",
    "{x}选项正确。",
    "只有{x}项符合题意。",
    "{y}项错误，{x}项正确。",
    "{x}\n\nExplanation: because the others are too small.",
    "{x}\n解析：其余的太小。",
    "({x})\n\n**Explanation:** it is the largest.",
    "{x}. 12\nBecause 12 is the largest.",
    "{x}) 12\nSince 12 is even.",
    "{x}\n\nExplanation: {y} is wrong and {z} is too small.",
    "The pressure increases, so {x}.",
    "The pressure does not change, so {x}.",
    "It is the largest; therefore, {x}.",
    "The pressure increases, so the answer's {x}.".replace("'s", " is"),
    "The others are too small, so it's {x}.",
    "{y} is wrong, so {x}.",
    "That leaves {x}.",
    "{x}正确，其余错误",
    "{x} is correct, the others are wrong.",
    "The pressure increases, making {x} correct.",
    r"\boxed{{{x}}}, \boxed{{{x}}}",
)
LETTER_FORMS_WRONG = (
    "【答案】{y}\n【解析】{x}错误。",
    "本题不选{x}",
    "本题不应选{x}。",
    "本题选{y}，不选{x}",
    "本题选{x}或{y}",
    "本题选{x}吗？",
    "如果它最大，本题选{x}。",
    "{x}项错误",
    "{x}项不正确",
    "{x}项正确吗？",
    "{x}项、{y}项正确",
    "{y}项正确\n{x}项正确",
    "排除{x}，选{y}",
    "{x}\n\nExplanation: {x} is wrong.",
    "{x}\n\nExplanation: wait, {y} is larger.",
    "{x}\n\nExplanation: the largest is {y}.",
    "{y}. 12\nBecause 12 is the largest.",
    "If the pressure increases, so {x}.",
    "The pressure increases, so not {x}.",
    "The pressure increases, so {x} or {y}.",
    "The pressure might increase, so {x}.",
    "The pressure increases, so {y}.",
    "A student says that it is the largest, so {x}.",
    r"\boxed{{{y}}}, \boxed{{{x}}}",
    r"\boxed{{{x}}} and \boxed{{{y}}}",
    r"\boxed{{{x}}} or \boxed{{{y}}}",
    "That leaves {x} or {y}.",
    "小明认为，本题选{x}",
    "小明说：选{x}",
)

SEVERAL_FORMS = (
    r"\boxed{{{x}}}, \boxed{{{y}}}, \boxed{{{z}}}",
    r"\boxed{{{x}}}、\boxed{{{y}}}和\boxed{{{z}}}",
    r"\boxed{{{z}}} \boxed{{{x}}} \boxed{{{y}}}",
    "本题选{x}{y}{z}",
    "{x}、{y}、{z}项正确",
    "They are all even, so {x}, {y} and {z}.",
    "{x}{y}{z}\n\nExplanation: all of them are even.",
    "【答案】{x}{y}{z}\n【解析】都是偶数。",
)
SEVERAL_FORMS_WRONG = (
    r"\boxed{{{x}}}, \boxed{{{y}}}",
    r"\boxed{{{x}}}, \boxed{{{y}}} or \boxed{{{z}}}",
    "本题选{x}{y}",
    "{x}、{y}、{z}项错误",
    "They are all even, so {x}, {y} or {z}.",
    "{x}{y}\n\nExplanation: both are even.",
)

WORDS = (("Paris", "London"), ("photosynthesis", "respiration"), ("a square", "a rhombus"), ("1912", "1911"))
HAN_WORDS = (("巴黎", "伦敦"), ("光合作用", "呼吸作用"), ("李白", "杜甫"))
BESIDE_FORMS = (
    "The answer is {x}, not {y}.",
    "{x}, not {y}",
    "It is {x}, not {y}.",
    "{x} rather than {y}",
    "The answer is {x} instead of {y}.",
    "The answer is not {y} but {x}.",
    "Not {y}, but {x}.",
)
BESIDE_FORMS_WRONG = (
    "The answer is {y}, not {x}.",
    "{y}, not {x}",
    "Not {x}, but {y}.",
    "{x}, not only {y}",
    "{x} or {y}, not both",
    "{y} rather than {x}",
    "Maybe {x}, not {y}",
    "not {x}",
)
HAN_BESIDE_FORMS = ("答案是{x}，不是{y}。", "{x}，而不是{y}", "{x}而非{y}", "不是{y}，而是{x}。", "并非{y}而是{x}")
HAN_BESIDE_FORMS_WRONG = ("答案是{y}，不是{x}。", "{y}而非{x}", "不是{x}，而是{y}。", "不是{x}", "{x}或{y}，不是别的")
NAME_FORMS = (
    "It is called {x}.",
    "This is known as {x}",
    "The process is called {x}.",
    "It's {x}.",
    "It's {x}, not {y}.",
)
NAME_FORMS_WRONG = (
    "It is not called {x}.",
    "It used to be called {x}.",
    "It is called {y}.",
    "It is called {x} or {y}.",
)
HAN_NAME_FORMS = ("这叫做{x}。", "它被称为{x}。", "这一过程叫{x}")
HAN_NAME_FORMS_WRONG = ("这不叫{x}。", "它被称为{y}。", "这叫做{x}或{y}。")

DIVISION_FORMS = (
    "{q}余{r}", "{q}...{r}", "{q}……{r}", "{q}…{r}", "{q} remainder {r}", "{q} R {r}", "{q}R{r}", "{q} r {r}",
    "商{q}余{r}", "{q} with a remainder of {r}", r"${q}\cdots\cdots{r}$", "The answer is {q} remainder {r}.",
    "答案是{q}余{r}。", "商是{q}，余数是{r}", "The quotient is {q} and the remainder is {r}.",
)  # fmt: skip
DIVISION_FORMS_WRONG = (
    "{r}余{q}", "{q}...{q}", "{q}", "{q}, {r}", "{q} or {r}", "{q} remainder not {r}", "{q} R -{r}", "{q}.{r}",
)  # fmt: skip

WAY_FORMS = (
    "There are {n} steps to solve this.",
    "There are {n} methods to solve this problem.",
    "We need {n} steps to find the answer.",
    "There are {n} things to consider.",
    "≈{n}",
    r"\boxed{{\approx {n}}}",
    r"\boxed{{{m}}}, \boxed{{{n}}}",
    "{n}\nSince this does not work, {m}",
    "{n}\n\nSolution: x = {m}",
)
"""Wrong for ``n``."""
NUMBER_FORMS = (
    "There are {n} apples.",
    "There are {n} ways to arrange the books.",
    "She walks {n} steps.",
    "{n}\n\nExplanation: we add them.",
    "{n}, not {m}",
    "The answer is {n}, not {m}.",
    r"\boxed{{{n}}}, \boxed{{{n}}}",
)

Case = tuple[str, Any, bool]


def _cases() -> Iterator[Case]:
    """(response, ground truth, right?)"""
    for x, y, z in LETTERS:
        for right, forms in ((True, LETTER_FORMS), (False, LETTER_FORMS_WRONG)):
            yield from ((form.format(x=x, y=y, z=z), x, right) for form in forms)
    for x, y, z in (("A", "C", "D"), ("A", "B", "C"), ("B", "C", "D")):
        for right, forms in ((True, SEVERAL_FORMS), (False, SEVERAL_FORMS_WRONG)):
            yield from ((form.format(x=x, y=y, z=z), x + y + z, right) for form in forms)
    for words, right, forms in (
        (WORDS, True, BESIDE_FORMS + NAME_FORMS),
        (WORDS, False, BESIDE_FORMS_WRONG + NAME_FORMS_WRONG),
        (HAN_WORDS, True, HAN_BESIDE_FORMS + HAN_NAME_FORMS),
        (HAN_WORDS, False, HAN_BESIDE_FORMS_WRONG + HAN_NAME_FORMS_WRONG),
    ):
        yield from ((form.format(x=x, y=y), x, right) for (x, y), form in itertools.product(words, forms))
    for (q, r), gold in itertools.product(((7, 2), (12, 5)), ("{q}……{r}", "{q} R {r}", "{q}余{r}")):
        for right, forms in ((True, DIVISION_FORMS), (False, DIVISION_FORMS_WRONG)):
            yield from ((form.format(q=q, r=r), gold.format(q=q, r=r), right) for form in forms)
    for n, m in ((3, 4), (5, 2)):
        yield from ((form.format(n=n, m=m), str(n), False) for form in WAY_FORMS)
        yield from ((form.format(n=n, m=m), str(n), True) for form in NUMBER_FORMS)


def test_every_form_is_judged_as_a_person_would() -> None:
    cases = list(dict.fromkeys(_cases()))
    assert all(sum(right is side for *_, right in cases) >= 150 for side in (True, False))
    misjudged = [case for case in cases if score(case[0], case[1])["status"] != ("ok" if case[2] else "wrong")]
    assert not misjudged, "\n".join(map(repr, misjudged))


def test_an_option_by_its_text_beside_a_refused_one() -> None:
    cities = {"options": ["London", "Paris", "Rome"]}
    for text, right in (
        ("The answer is Paris, not London.", True),
        ("It is Paris rather than Rome.", True),
        ("The answer is London, not Paris.", False),
        ("Not Paris, but Rome.", False),
        ("B. Paris\nBecause Paris is the largest.", True),
        ("B. Rome\nBecause Rome is the largest.", False),
        ("B\n\nExplanation: Paris is small; it is Rome.", False),
        ("B. Paris\nBecause Rome is the capital, choose Rome.", False),
    ):
        assert score(text, "B", cities)["status"] == ("ok" if right else "wrong"), text


def test_a_question_that_asks_for_a_rounded_number() -> None:
    assert score("≈3", "3", {"question": "Round to the nearest whole number: 2.9"})["status"] == "ok"
    assert score("≈3.14", "3.14")["status"] == "ok"
    assert score("37÷5=7……2", "7……2")["status"] == "ok" and score("38÷5=7……2", "7……2")["status"] == "wrong"


def test_boxes_in_a_row_for_other_types() -> None:
    assert score(r"\boxed{True}, \boxed{False}", False)["status"] == "wrong"
    assert score(r"\boxed{False}, \boxed{False}", False)["status"] == "ok"
    assert score(r"\boxed{3}, \boxed{5}", ["5"], {"type": "blanks"})["status"] == "wrong"
    assert score(r"\boxed{3}, \boxed{5}", ["3", "5"], {"type": "blanks"})["status"] == "ok"
    assert score_count(r"\boxed{2}, \boxed{3}", 3)["status"] == "wrong"
    assert score_count(r"\boxed{3} \boxed{3}", 3)["status"] == "ok"


def test_reading_of_forms() -> None:
    assert concluded("The pressure increases, so B.") == {"B"} and concluded("So far, so good.") is None
    assert boxes_in_a_row(r"\boxed{A}, \boxed{C}") == ["A", "C"]
    assert boxes_in_a_row(r"First \boxed{A}. Then \boxed{C}") == [] == boxes_in_a_row(r"\boxed{A}")
    assert boxes_in_a_row(r"\boxed{A} or \boxed{C}") == ["A or C"]
    assert beside_refused("Paris, not London") == ("Paris", "London") and beside_refused("not Paris") is None
    assert named("It is called photosynthesis.") == "photosynthesis" and named("It is not called that.") == ""
