"""Ways to write a final answer, multiplied by answers: every right one is taken, every wrong one is not."""

from __future__ import annotations

import pytest

from megarl.explore.rewards import compute_score
from megarl.explore.rewards.answer.marks import undecorated

VALUES = [("73", "74"), ("-4", "4"), ("2.5", "25"), (r"\frac{3}{7}", r"\frac{7}{3}"), ("x+1", "x-1")]
"""(right, wrong)"""
MARKED = [
    "Answer: $%$",
    "**Answer: $%$** ✅",
    r"Answer: $%$. $\blacksquare$",
    r"Answer: $%$. \(\square\)",
    "Answer: $%$ ∎",
    "Answer: $%$. Q.E.D.",
    "Answer: $%$ 🎉",
    "Answer: $%$ ✓\n\nLet me know if you have questions!",
    "Final Answer - $%$",
    "Final answer – $%$",
    "Answer → $%$",
    r"Answer $\to$ $%$",
    "Answer -> $%$",
    "Ans. $%$",
    "Ans: $%$",
    "**Answer** = $%$",
    "答案：$%$ ✅",
]
"""``%`` is the answer."""
SAID = ["The answer is $%$ ✔", "So the value is **$%$**. ■", "答案是$%$。🎉"]
BOXED = [r"\boxed{%} ✅", r"\boxed{%}. $\square$", r"First \boxed{9}, then \boxed{%}", r"**\boxed{%}**"]
HASHED = ["#### %", r"#### \boxed{%}", r"#### $\boxed{%}$", "#### % ✅", "#### **%**", r"#### The answer is \boxed{%}."]


def misjudged(source: str, forms: list[str], values: list[tuple[str, str]]) -> list[str]:
    """Each form with the right and with the wrong answer, where the verdict is another one."""
    found = []
    for right, wrong in values:
        for answer, status in ((right, "ok"), (wrong, "wrong")):
            texts = [form.replace("%", answer) for form in forms]
            verdicts = {text: compute_score(source, text, right)["status"] for text in texts}
            found += [f"gold {right}: {text!r}: {got}" for text, got in verdicts.items() if got != status]
    return found


@pytest.mark.parametrize(
    ("source", "forms"),
    [
        ("math", MARKED + SAID + BOXED),
        ("math_dapo", MARKED + SAID + BOXED),
        ("openai/gsm8k", HASHED),
        ("lighteval/MATH", BOXED),
    ],
)
def test_marks_around_an_answer(source: str, forms: list[str]) -> None:
    assert not misjudged(source, forms, VALUES)


@pytest.mark.parametrize("form", MARKED)
def test_an_answer_line_counts_before_a_box_where_it_was_asked_for(form: str) -> None:
    line = form.replace("%", "73")
    for text in (f"\\boxed{{34}} so wait.\n{line}", f"\\boxed{{34}} so … {line}", f"{line}\n\nThat is \\boxed{{34}}."):
        for source in ("math_dapo", "aime24"):
            assert compute_score(source, text, "73")["status"] == "ok"
            assert compute_score(source, text, "34")["status"] == "wrong"
        for source in ("math", "numina_olympiads"):
            assert compute_score(source, text, "34")["status"] == "ok"
            assert compute_score(source, text, "73")["status"] == "wrong"


@pytest.mark.parametrize(
    "text",
    [
        "**Answer:**\n\nThe value is \\boxed{73}.",
        "Answer: \\boxed{73}",
        "Answer:\n\\[\n\\boxed{73}\n\\]",
        "\\boxed{34}\nAnswer: \\boxed{73}",
        "Answer: 34\nAnswer: 73",
        "Answer:\n$$\n73\n$$",
        "The answer is \\boxed{73}",
        "Answer: we add the numbers of all rows and of all columns one after the other, and then halve the sum of "
        "both.\n\n\\boxed{73}",
    ],
)
def test_an_answer_line_may_have_its_answer_further_below(text: str) -> None:
    for source in ("math_dapo", "math"):
        assert compute_score(source, text, "73")["status"] == "ok"
        assert compute_score(source, text, "34")["status"] == "wrong"


@pytest.mark.parametrize(
    "text", ["✓", "✅", r"\square", r"$\blacksquare$", "✓, ×, ✓", "A ✓ B ✓", r"3\square", "B ✗", "3,✅"]
)
def test_marks_that_are_the_answer_stay(text: str) -> None:
    assert undecorated(text) == text


EARNS = ["She earns **$%** per day.", "There are **%** apples.", "Therefore the total is **%** dollars. ✅"]


def test_a_bold_number_in_the_last_sentence() -> None:
    assert not misjudged("math", EARNS, [("18", "81"), ("4", "6"), ("120", "12"), ("2.5", "5.2"), ("7", "17")])
    for text in ("She earns not **18** per day.", "She earns **18** or **20**.", "**2**3 is more."):
        assert compute_score("math", text, "18")["status"] == "wrong"
