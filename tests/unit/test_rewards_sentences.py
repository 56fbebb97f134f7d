"""Answers in short sentences that verifiers take, each beside what must stay wrong."""

from __future__ import annotations

import pytest

from megarl.rewards import compute_score
from megarl.rewards.math.verifier import score as score_math
from megarl.rewards.school.verifier import score as score_school
from megarl.rewards.vision.verifier import score_choice, score_count

ANIMALS = {"options": {"A": "cat", "B": "dog", "C": "bird", "D": "fish"}}


@pytest.mark.parametrize("text", ["B is correct", "Option B is correct.", "B是正确的", "选项B正确", "选项B是正确的。"])
def test_an_option_as_a_subject(text: str) -> None:
    assert score_school(text, "B", ANIMALS)["score"] == 1.0
    assert score_school(text, "C", ANIMALS)["score"] == 0.0


@pytest.mark.parametrize(
    "text",
    ["B is not correct", "B is incorrect", "B或C正确", "选项B不正确", "Is B correct?", "B is correct, but so is C"],
)
def test_a_subject_that_is_not_chosen(text: str) -> None:
    assert score_school(text, "B", ANIMALS)["score"] == 0.0


def test_blanks_in_one_sentence() -> None:
    for text in ("第一空填3，第二空填5", "第一个空是3，第二个空是5。"):
        assert score_school(text, ["3", "5"], {"type": "blanks"})["score"] == 1.0
        assert score_school(text, ["5", "3"], {"type": "blanks"})["score"] == 0.0


def test_a_recited_line_as_a_blank() -> None:
    line = "床前明月光，疑是地上霜。"
    assert score_school(line, [line], {"type": "blanks"})["score"] == 1.0
    assert score_school(line, ["举头望明月，低头思故乡。"], {"type": "blanks"})["score"] == 0.0


def test_choose() -> None:
    assert score_math(r"\boxed{{n \choose k}}", r"\binom{n}{k}")["score"] == 1.0
    assert score_math(r"\boxed{\binom{n}{k}}", r"{n \choose k}")["score"] == 1.0
    assert score_math(r"\boxed{{k \choose n}}", r"\binom{n}{k}")["score"] == 0.0


def test_sums_of_counts() -> None:
    for text in ("2 cats and 3 dogs, so 5", "There are 2 cats and 3 dogs, so 5 animals."):
        assert score_count(text, "5")["score"] == 1.0
        assert score_count(text, "3")["score"] == 0.0
    for text in ("3 cats and 3 dogs, so 5", "2 cats and 3 dogs", "2 cats and 3 dogs, so not 5", "2 or 3, so 5"):
        assert score_count(text, "5")["score"] == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "Not option B",
        "neither option A nor option B",
        "rule out option B",
        "either option B or C",
        "options B and C are correct",
        "Option A or option B",
        "It must be option C since option B is too small",
        "不应选B",
        "故选B不对",
        "故选B或C",
        "Not A, so B. Option C is correct",
        "A is wrong and B",
        "anything but option B",
        "the answer cannot be option B",
        "option B is the wrong choice",
        "option B does not work",
        "option B contradicts the picture",
    ],
)
def test_an_option_that_is_refused_or_one_of_two(text: str) -> None:
    assert score_school(text, "B", ANIMALS)["score"] == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "Therefore, option B.",
        "故选B，不选A",
        "Since option A is too small, it has to be option B",
        "Not A, so B. dog",
        "So option B, because the others do not bark",
        "The incorrect statement is option B",
        "(B) is correct",
    ],
)
def test_an_option_beside_refused_ones(text: str) -> None:
    assert score_school(text, "B", ANIMALS)["score"] == 1.0


def test_only_one_sentence_describes_the_picture() -> None:
    assert score_choice("It is B.", "B", ANIMALS)["score"] == 1.0
    assert score_choice("It is B. It is C.", "B", ANIMALS)["score"] == 0.0
    assert score_choice("It is Mt. Rigi.", "A", {"options": {"A": "Mt. Rigi", "B": "Mt. Cook"}})["score"] == 1.0


def test_a_question_fills_no_blank() -> None:
    assert score_school("第一空填3，第二空填5吗", ["3", "5"], {"type": "blanks"})["score"] == 0.0
    assert score_school("5吗", "5", {"type": "short"})["score"] == 0.0


@pytest.mark.parametrize("doubt", ["I doubt", "If there were", "Except"])
def test_a_sum_of_counts_in_doubt(doubt: str) -> None:
    assert score_count(f"{doubt} 2 cats and 3 dogs, so 5", "5")["score"] == 0.0


SOURCES = ["math", "math_dapo", "k12"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "form",
    ['Answer: "%"', "Answer: “%”", "Answer: '%'", "Answer: `%`", "[Answer: %]", "[**Answer:** %]", "(Final answer: %)"]
    + ["【答案：%】", "[The answer is %].", "| Answer | % |", "| **Final answer** | **%** |", "| 答案 | % |"]
    + ["```\n%\n```", "Answer:\n```text\n%\n```", "[Answer] %", "<b>Answer:</b> %", "<p>The answer is %.</p>"]
    + ["| Answer |\n|---|\n| % |", "| Final Answer: | % |", "| **Result** | % |"]
    + ["| Quantity | Value |\n|---|---|\n| x | 5 |\n| Answer | % |", "The answer is “%”."],
)
def test_frames_around_an_answer(source: str, form: str) -> None:
    for gold, wrong in (("73", "74"), ("x+1", "x-1"), (r"\frac{3}{7}", r"\frac{7}{3}"), ("[1,2]", "[2,1]")):
        assert compute_score(source, "We add.\n" + form.replace("%", gold), gold)["status"] == "ok", gold
        assert compute_score(source, "We add.\n" + form.replace("%", wrong), gold)["status"] == "wrong", wrong


def test_the_head_of_a_table_is_no_answer() -> None:
    for source in SOURCES:
        assert compute_score(source, "| Answer | 73 |\n|---|---|\n| x | 5 |", "73")["status"] == "wrong"
        assert compute_score(source, "| Answer | 73 or 74 |", "73")["status"] == "wrong"


@pytest.mark.parametrize(
    "text", ["Answer: %?", "The answer is %?", "答案：%？", "%?", r"\boxed{%?}", "Answer: $%$?", "Is it %?"]
)
def test_a_question_is_no_answer(text: str) -> None:
    for source in SOURCES:
        assert compute_score(source, text.replace("%", "73"), "73")["status"] == "wrong"
    for word, gold, info in (("B", "B", ANIMALS), ("dog", "B", ANIMALS), ("Paris", "Paris", {}), ("true", True, {})):
        assert score_school(text.replace("%", word), gold, info)["score"] == 0.0
    assert score_choice(text.replace("%", "dog"), "B", ANIMALS)["score"] == 0.0
    assert score_count(text.replace("%", "5"), "5")["score"] == 0.0


def test_a_question_that_is_asked_for() -> None:
    assert score_school("Answer: How are you?", "How are you?")["score"] == 1.0
    assert (
        score_school("Answer: B. How are you?", "B", {"options": {"A": "Who is it?", "B": "How are you?"}})["score"]
        == 1.0
    )
    assert compute_score("vision/anls", "The answer is: Where are you?", "Where are you?")["status"] == "ok"


@pytest.mark.parametrize(
    "text", ["The pressure rises, so C. B", "so C. B", "故选C. B", "It is C. B", "C. B", "So, C! B"]
)
def test_two_letters_are_two_answers(text: str) -> None:
    for source in ("math", "k12"):
        for gold in "BC":
            assert compute_score(source, text, gold)["status"] == "wrong"
        assert compute_score(source, "The pressure rises. B", "B")["status"] == "ok"


def test_squares_and_units_of_area() -> None:
    for source in SOURCES:
        for text in ("12 square", "12 cubic", "12 sq", "There are 12 square"):
            for form in ("%", "Answer: %", r"\boxed{%}"):
                assert compute_score(source, form.replace("%", text), "12")["status"] == "wrong", text
        for text in ("12u^2", "12 u²", r"12\,u^2", r"12\text{ u}^2", "12 sq u", "12"):
            for gold in ("12 square units", r"12\text{ units}^2"):
                assert compute_score(source, rf"\boxed{{{text}}}", gold)["status"] == "ok", text
        assert compute_score(source, r"\boxed{12u^2}", "12")["status"] == "wrong"
        assert compute_score(source, r"\boxed{13u^2}", "12 square units")["status"] == "wrong"
        assert compute_score(source, "Answer: 12 squares", "12")["status"] == "ok"


@pytest.mark.parametrize(
    "vector", ["(1,2,3)^T", r"[1, 2, 3]^{T}", r"(1,2,3)^\top", r"\begin{pmatrix}1&2&3\end{pmatrix}^T"]
)
def test_transposed_vectors(vector: str) -> None:
    for source in SOURCES:
        text = rf"\boxed{{{vector}}}"
        assert compute_score(source, text, r"\begin{pmatrix}1\\2\\3\end{pmatrix}")["status"] == "ok"
        assert compute_score(source, text, "(1,2,3)")["status"] == "ok"
        assert compute_score(source, text, r"\begin{pmatrix}1\\3\\2\end{pmatrix}")["status"] == "wrong"
    matrix = r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}^T}"
    assert compute_score("math", matrix, r"\begin{pmatrix}1&3\\2&4\end{pmatrix}")["status"] == "ok"
    assert compute_score("math", matrix, r"\begin{pmatrix}1&2\\3&4\end{pmatrix}")["status"] == "wrong"


def test_a_number_below_its_hashes() -> None:
    for text in ("so\n####\n18", "so\n#### \n\n18", "####\n**18**", "#### 17\n####\n18"):
        for source in ("openai/gsm8k", "math"):
            assert compute_score(source, text, "18")["status"] == "ok", text
            assert compute_score(source, text, "17")["status"] == "wrong", text
    assert compute_score("openai/gsm8k", "#### 18\n####", "18")["status"] == "wrong"
    assert compute_score("openai/gsm8k", "####\n18 or 19", "18")["status"] == "wrong"


@pytest.mark.parametrize(
    "lead", ["The answer is 74. No, wait, it is %.", "The answer is 74. Actually %.", "Answer: 74\nCorrection: %"]
)
def test_a_correction_at_the_end(lead: str) -> None:
    for source in SOURCES[::2]:
        assert compute_score(source, lead.replace("%", "73"), "73")["status"] == "ok"
        assert compute_score(source, lead.replace("%", "73"), "74")["status"] == "wrong"


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 73. Wait, let me check 70 + 3. Yes.",
        "The answer is 73. Actually, I checked it twice and it holds.",
        "Wait, I made a mistake. The answer is 73.",
    ],
)
def test_second_thoughts_that_correct_nothing(text: str) -> None:
    assert compute_score("math", text, "73")["status"] == "ok"


@pytest.mark.parametrize(
    "text", ["Suppose the answer is 73.", "Assume that the answer is 73.", "假设答案是73。", "If the answer is 73."]
)
def test_a_supposition_is_no_answer(text: str) -> None:
    for source in SOURCES:
        assert compute_score(source, text, "73")["status"] == "wrong"


def test_an_object_with_a_number() -> None:
    for source in SOURCES:
        for text in ('{"answer": 73}', '{"answer": "73"}', '```json\n{"reasoning": "70+3", "answer": 73}\n```'):
            assert compute_score(source, text, "73")["status"] == "ok"
            assert compute_score(source, text, "74")["status"] == "wrong"
        for text in ('{"answer": 73, "answer": 74}', '{"answer": [73]}', '{"result": 73, "answer": 74}'):
            assert compute_score(source, text, "73")["status"] == "wrong"


@pytest.mark.parametrize("text", ["Choose B.", "I choose B", "Pick option B.", "我认为选B"])
def test_a_choice_as_a_command(text: str) -> None:
    assert score_school(text, "B", ANIMALS)["score"] == 1.0
    assert score_school(text, "C", ANIMALS)["score"] == 0.0


@pytest.mark.parametrize("text", ["他认为选B", "小明认为选B。", "Don't choose B.", "Choose B or C.", "Choose B?"])
def test_a_choice_that_is_not_made(text: str) -> None:
    assert score_school(text, "B", ANIMALS)["score"] == 0.0
