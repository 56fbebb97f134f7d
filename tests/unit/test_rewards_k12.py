"""The K-12 verifier against its table, partial scores, the multiple-choice filter, rows with faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.errors import DataError
from megarl.rewards import compute_score
from megarl.rewards.answer.measures import asks_for_unit, with_digits
from megarl.rewards.school.read import letters, options_of, split_blanks
from megarl.rewards.school.truth import truth
from megarl.rewards.school.verifier import TYPES, check_row, is_multiple_choice, question_type, score

TABLE = Path(__file__).parent / "cases" / "k12.tsv"


def cases() -> list[tuple[str, bool, Any, str, dict[str, Any]]]:
    """(type, right, ground truth, response, extra_info); its first line says how the file is written."""
    found = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        kind, right, gold, pred, info = [*line.split("\t"), "", ""][:5]
        extra = json.loads(info) if info else {}
        if not kind.endswith("?"):
            extra["type"] = kind
        response = pred[2:] if pred.startswith("> ") else f"\\boxed{{{pred}}}"
        found.append(
            (kind.rstrip("?"), right == "1", json.loads(gold[1:]) if gold.startswith("!") else gold, response, extra)
        )
    return found


def test_the_table_is_large_and_has_both_answers_for_every_type() -> None:
    rows = cases()
    assert len(rows) >= 2500
    for kind in TYPES:
        assert {right for name, right, *_ in rows if name == kind} == {True, False}, kind


def test_every_row_of_the_table() -> None:
    disagree = []
    for kind, right, gold, response, info in cases():
        result = score(response, gold, info)
        if question_type(gold, info) != kind or result["status"] != ("ok" if right else "wrong"):
            disagree.append(f"{kind}: gold {gold!r} response {response} {info}: {question_type(gold, info)} {result}")
    assert not disagree, "\n".join(disagree)


@pytest.mark.parametrize(
    ("gold", "response", "info", "partial"),
    [
        ("3;5", r"\boxed{3; 6}", {}, 0.5),
        ("3;5", r"\boxed{3}", {}, 0.5),
        ("3;5", r"\boxed{3; 5; 7}", {}, 0.0),
        (["1", "2", "3"], r"\boxed{1; 2; 4}", {}, 2 / 3),
        ("3;5", r"\boxed{4; 3}", {"unordered": True}, 0.5),
        ("ACD", r"\boxed{AC}", {}, 2 / 3),
        ("ACD", r"\boxed{AB}", {}, 0.0),
    ],
)
def test_partial_scores_are_a_part_and_never_the_score(
    gold: Any, response: str, info: dict[str, Any], partial: float
) -> None:
    result = score(response, gold, info)
    assert (result["partial"], result["score"], result["status"]) == (pytest.approx(partial), 0.0, "wrong")


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"data_source": "k12", "reward_model": {"ground_truth": "B"}}, True),
        ({"data_source": "k12/zh", "reward_model": {"ground_truth": "ACD"}}, True),
        ({"data_source": "k12", "reward_model": {"ground_truth": ["A", "C"]}}, True),
        ({"data_source": "k12", "reward_model": {"ground_truth": "12"}}, False),
        ({"data_source": "k12", "reward_model": {"ground_truth": True}}, False),
        ({"data_source": "k12", "reward_model": {"ground_truth": "B"}, "extra_info": {"type": "short"}}, False),
        ({"data_source": "math", "reward_model": {"ground_truth": "B"}}, False),
        ({"data_source": "math", "reward_model": {"ground_truth": "12"}, "extra_info": {"options": ["1", "12"]}}, True),
        ({"data_source": "math", "prompt": "Find x. (A) 1 (B) 2 (C) 3", "reward_model": {"ground_truth": "3"}}, True),
        ({"data_source": "math", "prompt": [{"role": "user", "content": "求值：\nA. 1\nB. 2\nC. 3"}]}, True),
        ({"data_source": "math", "prompt": [{"role": "user", "content": "Let A, B and C be points."}]}, False),
        (
            {"data_source": "math", "prompt": "Triangle with vertices A: (0,0), B: (1,0), C: (0,1). Find the area."},
            False,
        ),
        (
            {
                "data_source": "math",
                "prompt": "Find the area of the triangle.\nA: (0,0)\nB: (1,0)\nC: (0,1)\nGive a fraction.",
            },
            False,
        ),
        ({"data_source": "math", "prompt": "Which is even?\nA: 1\nB: 2\nC: 3"}, True),
        (
            {
                "data_source": "math",
                "prompt": "Consider the lines (A) y=1, (B) y=2 and (C) y=x. Find their common area.",
            },
            False,
        ),
        ({"data_source": "math", "prompt": "Points A. B. C lie on a line. Which?"}, False),
        ({"data_source": "math", "prompt": "Which? C. 1 B. 2 A. 3"}, False),
        ({"data_source": "math", "prompt": "x is ( ) A. 1 B. 2 C. 3 D. 4"}, True),
        (
            {
                "data_source": "math",
                "prompt": r"The sum is $\textbf{(A)}\ 1 \qquad\textbf{(B)}\ 2 \qquad\textbf{(C)}\ 3$",
            },
            True,
        ),
        ({"data_source": "math", "prompt": "Which?\nA) 1\nB) 2\nC) 3\nAnswer with a letter."}, True),
        ({"data_source": "k12", "prompt": "Which? A: 1, B: 2, C: 3"}, True),
        ({"data_source": "math", "extra_info": {"type": "multiple_choice"}}, True),
        ({"data_source": "math", "extra_info": None, "reward_model": None}, False),
        ({}, False),
    ],
)
def test_multiple_choice_rows(row: dict[str, Any], asked: bool) -> None:
    assert is_multiple_choice(row) is asked


@pytest.mark.parametrize(
    ("gold", "info", "message"),
    [
        (None, {}, "holds no answer"),
        ("", {}, "holds no answer"),
        ([], {}, "holds no answer"),
        ("3", {"type": "essay"}, "extra_info.type 'essay': expected one of choice"),
        ("maybe", {"type": "true_false"}, "neither true nor false"),
        ("Berlin", {"type": "choice", "options": ["London", "Paris"]}, "not one of the options A, B"),
        ("12", {"type": "multiple_choice"}, "names no option letters"),
    ],
)
def test_a_faulty_row_is_an_error(gold: Any, info: dict[str, Any], message: str) -> None:
    result = score(r"\boxed{B}", gold, info)
    assert result["status"] == "error" and message in result["message"]


def test_rows_are_checked_before_any_answer() -> None:
    for _, _, gold, _, info in cases():
        check_row(gold, info)
    for gold, info, message in (
        (None, {}, "holds no answer"),
        ("", {}, "holds no answer"),
        (["3", ""], {}, "holds no answer, or an empty one"),
        ([], {}, "holds no answer"),
        ("3", {"type": "essay"}, "expected one of choice"),
        ("maybe", {"type": "true_false"}, "neither true nor false"),
        ("Berlin", {"options": ["London", "Paris"]}, "none of the options A, B"),
        ("E", {"options": ["London", "Paris"]}, "none of the options A, B"),
        ("AE", {"options": ["London", "Paris"]}, "none of the options A, B"),
        ("12", {"type": "multiple_choice"}, "no letters, and the row has no extra_info.options"),
        ("B", {"options": 7}, "expected a list of texts"),
        (r'["\frac12", "3"]', {}, "write each backslash twice"),
    ):
        with pytest.raises(DataError, match=message):
            check_row(gold, info)
    check_row("0.5", {"options": [r"\frac12", "2"]})


def test_reading() -> None:
    assert letters("A、C和D") == ["A", "C", "D"] and letters("C, A") == ["C", "A"]
    assert letters("An apple") is None and letters("") is None and letters("A or B") is None
    assert truth("这句话不正确") is False and truth("真") is True and truth("不知道对不对") is None
    assert split_blanks("(1,2), 3", 2) == ["(1,2)", "3"] and split_blanks("3；5") == ["3", "5"]
    assert (
        with_digits("三百零五") == "305"
        and with_digits("forty-two apples") == "42 apples"
        and with_digits("苹果") == "苹果"
    )
    assert options_of({"options": {"a": "x", "b": "y"}}) == {"A": "x", "B": "y"}


def test_the_router_knows_k12() -> None:
    assert compute_score("k12", "答案是B", "B")["score"] == 1.0
    assert compute_score("k12/grade3", "答案：三", "3")["score"] == 1.0
    with pytest.raises(DataError, match="call it k12/x"):
        compute_score("k12x", "B", "B")


@given(
    st.text(alphabet="ABCD,、;；()（）.对错√×是否123 or和\\{}$", max_size=40),
    st.sampled_from(["B", "AC", "3;5", "对", "Paris"]),
)
@settings(max_examples=200)
def test_any_text_gets_a_verdict(text: str, gold: str) -> None:
    result = score(f"\\boxed{{{text}}}", gold)
    assert result["status"] in ("ok", "wrong") and 0.0 <= result["partial"] <= 1.0
    assert (result["partial"] == 1.0) == (result["score"] == 1.0)


@given(st.sets(st.sampled_from("ABCDEF"), min_size=2, max_size=5), st.randoms())
def test_letters_in_any_order(gold: set[str], draw: Any) -> None:
    shuffled = sorted(gold)
    draw.shuffle(shuffled)
    for joiner in ("", ", ", "、", " and ", "和"):
        assert (
            score(f"\\boxed{{{joiner.join(shuffled)}}}", "".join(sorted(gold)), {"type": "multiple_choice"})["score"]
            == 1.0
        )


HOSTILE = [
    "1 , , " * 300,
    "1 - , " * 300,
    "not " * 480,
    r"\text{" * 300,
    "A-" * 900,
    "1." + "1" * 1900,
    "H2+" * 600,
    "true, " * 300,
    "a dozen and " * 160,
    "①→" * 900,
    "1 h " * 450,
    "不是" * 900,
    "(" * 1900,
    "x>" * 900,
]


@pytest.mark.parametrize("kind", TYPES)
def test_a_hostile_text_is_wrong_and_soon(kind: str) -> None:
    gold = {"choice": "B", "multiple_choice": "AC", "blanks": "3;5", "true_false": "错"}.get(kind)
    info = {"type": kind, "options": ["1", "not", "2", "h"]} if kind.endswith("choice") else {"type": kind}
    for truth_ in (
        [gold] if gold else ["2H2+O2=2H2O", "③①②", "B→A→C", "a>b>c", "①③", "90 min", "12", "床前明月光，疑是地上霜。"]
    ):
        for text in HOSTILE:
            assert score(f"\\boxed{{{text}q}}", truth_, info)["status"] == "wrong", (truth_, text[:12])


@pytest.mark.parametrize(
    ("question", "asks"),
    [
        ("5 m = ____ cm", True),
        ("How many minutes does it take?", True),
        ("Give the length in centimetres.", True),
        ("花了多少元？", True),
        ("（单位：厘米）", True),
        ("How long does the film last?", False),
        ("A rope is 5 m long. How long are two of them?", False),
        ("绳子有多长？", False),
    ],
)
def test_a_question_may_ask_for_a_unit(question: str, asks: bool) -> None:
    assert asks_for_unit(question) is asks
