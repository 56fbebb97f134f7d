"""Answers in short sentences that verifiers take, each beside what must stay wrong."""

from __future__ import annotations

import pytest

from megarl.explore.rewards.math.verifier import score as score_math
from megarl.explore.rewards.school.verifier import score as score_school
from megarl.explore.rewards.vision.verifier import score_choice, score_count

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
