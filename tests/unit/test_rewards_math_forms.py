"""Ways to write a final answer, multiplied by answers: every right one is taken, every wrong one is not."""

from __future__ import annotations

import time

import pytest

from megarl.rewards import compute_score
from megarl.rewards.answer.marks import undecorated

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
    "Answer: ✅ $%$",
    "👉 Answer: $%$",
    "Answer ⟹ $%$",
    "Answer: $%$</s>",
    "Answer: $%$, as required.",
    "Answer: option C, $%$",
]
"""``%`` is the answer."""
SAID = ["The answer is $%$ ✔", "So the value is **$%$**. ■", "答案是$%$。🎉"]
BOXED = [r"\boxed{%} ✅", r"\boxed{%}. $\square$", r"First \boxed{9}, then \boxed{%}", r"**\boxed{%}**"]
HASHED = ["#### %", r"#### \boxed{%}", r"#### $\boxed{%}$", "#### % ✅", "#### **%**", r"#### The answer is \boxed{%}."]
HASHED += ["#### Answer: $%$", "#### The answer is $%$."]
HEADED = ["#### Step 2: Add\nWe add.\n\nAnswer: $%$", "#### Final Answer\n$%$", "#### Solution:\nThe value is $%$."]


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
        ("math", MARKED + SAID + BOXED + HASHED + HEADED),
        ("math_dapo", MARKED + SAID + BOXED + HASHED + HEADED),
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


def test_a_factorial_is_no_exclamation() -> None:
    assert compute_score("math", "Answer: $5!$", "5")["status"] == "wrong"
    assert compute_score("math", "Answer: $5!$", "5!")["status"] == "ok"
    assert compute_score("math", "Answer: $5$!", "5")["status"] == "ok"


@pytest.mark.parametrize(
    "sign",
    ["👉", "✅ ", r"\blacksquare", "#### Step 1:\n", "Answer: ", "Ans. ", "**", r"1 \over "]
    + [
        "| Answer | ",
        "| Answer |" + " " * 500,
        "[Answer: ",
        '"',
        "####\n",
        "A. ",
        "(1)^T",
        "? ",
        "12u^",
        "```\n",
        ". wait ",
        "\n",
        "<b></",
        "| Answer |\n",
    ]
    + ["| Answer |\n|--|\n", ". Actually 7", "suppose the answer is ", '{"answer": "', "{", "<p>|"],
)
def test_many_marks_cost_little(sign: str) -> None:
    began = time.process_time()
    for source in ("math", "math_dapo", "openai/gsm8k"):
        assert compute_score(source, sign * 10_000, "73")["status"] == "wrong"
    assert time.process_time() - began < 1.5


def test_a_bold_number_in_the_last_sentence() -> None:
    assert not misjudged("math", EARNS, [("18", "81"), ("4", "6"), ("120", "12"), ("2.5", "5.2"), ("7", "17")])
    for text in ("She earns not **18** per day.", "She earns **18** or **20**.", "**2**3 is more."):
        assert compute_score("math", text, "18")["status"] == "wrong"


EQUAL_UNITS = [
    ("25 cm", "0.25 m", "250 mm", "2.5 dm"),
    ("5 minutes", "300 seconds", "300 s", "5 min"),
    ("1.5 hours", "90 minutes", "1 h 30 min", "5400 s"),
    ("3 kg", "3000 g", "0.003 tonnes", "3,000 grams"),
    ("2 L", "2000 mL", r"2000\text{ cm}^3", "2 liters"),
    ("72 km/h", "20 m/s", "0.02 km/s", "72 kph"),
    (r"3\text{ m}^2", r"30000\text{ cm}^2", "3 square meters", "300 dm^2"),
    (r"12\pi\text{ cm}", r"120\pi\text{ mm}", r"\frac{3\pi}{25}\text{ m}", r"12\pi"),
    (r"\sqrt{2}\text{ km}", r"1000\sqrt{2}\text{ m}", r"\sqrt{2}", r"100000\sqrt{2}\text{ cm}"),
    ("5 dollars", "500 cents", r"\$5", "5"),
]
"""Answers of one row are equal; the first is the gold."""
OTHER_UNITS = ["25 m", "25 kg", "25 米", "2.5 mm", "5 hours", "300 minutes", "1.5 minutes", "3 g", "2 mL", "20 km/h"]
OTHER_UNITS += [r"3\text{ cm}^2", r"12\pi\text{ m}", r"\sqrt{2}\text{ mm}", "5 cents", "90 hours", "0.25 cm", "72 m"]
IN_TEXT = [r"\boxed{%}", "The answer is %.", "Answer: %", "**Final answer:** %"]


@pytest.mark.parametrize("row", EQUAL_UNITS, ids=lambda row: row[0])
def test_units_of_one_dimension(row: tuple[str, ...]) -> None:
    gold = row[0]
    wrong = [unit for unit in OTHER_UNITS if unit not in row]
    for form in IN_TEXT:
        for answer, status in [*((text, "ok") for text in row), *((text, "wrong") for text in wrong)]:
            assert compute_score("math", form.replace("%", answer), gold)["status"] == status, (form, answer)


def test_a_unit_that_the_question_names_is_not_converted() -> None:
    asked = {"question": "How long is the rope, in cm?"}
    assert compute_score("math", r"\boxed{0.25\text{ m}}", "25 cm", asked)["status"] == "wrong"
    assert compute_score("math", r"\boxed{25\text{ cm}}", "25 cm", asked)["status"] == "ok"


NAMELESS = [r"%\text{ square units}", r"%\text{ units}^2", r"%\text{ cubic units}", r"%\text{ units}", "% sq. units"]
NAMELESS += ["% units squared", r"%~\mathrm{units}^{3}", "%平方单位"]


def test_units_without_a_name_are_left_out() -> None:
    forms = [r"\boxed{" + form + "}" for form in NAMELESS]
    assert not misjudged(
        "math", forms, [("12", "21"), (r"12\pi", "12"), (r"\frac{3}{4}", r"\frac{4}{3}"), ("2x", "3x")]
    )
    assert compute_score("math", r"\boxed{12\text{ dollars per unit}}", "12 cents")["status"] == "wrong"


LABELLED = [r"\textbf{(B)}\ %", r"\text{(B)} %", "(B) %", "B. %", r"\textbf{(B) } %", r"% (\text{Option C})", "% (B)"]
COLOURED = [r"\color{red}{%}", r"\color{blue} %", r"\textcolor{red}{%}", r"{\color{red} %}", r"\Large %"]
COLOURED += [r"\underline{%}", r"\large\textbf{%}"]


def test_dress_of_a_value() -> None:
    forms = [r"\boxed{" + form + "}" for form in LABELLED + COLOURED]
    assert not misjudged("math", forms, [("12", "21"), ("-4", "4"), (r"\frac{3}{4}", r"\frac{4}{3}"), ("x+1", "x-1")])
    assert compute_score("math", "Answer: 73 (Option C)", "73")["status"] == "ok"
    for text in ("(A) 12 or (B) 13", "(A) (B) 12", "12 (A) (B)", "(B)", "B. 12, C. 13"):
        assert compute_score("math", rf"\boxed{{{text}}}", "12")["status"] == "wrong"
    assert compute_score("math", r"\boxed{(B) 12}", "C")["status"] == "wrong"


WORDS = [("73", "seventy-three", "seventy-four"), ("12", "twelve", "twenty"), ("-5", "negative five", "five")]
WORDS += [("105", "one hundred and five", "one hundred and fifty"), (r"\frac{2}{3}", "two thirds", "three halves")]
WORDS += [("7", "seven apples", "seven hundred"), ("3000", "three thousand", "three"), ("30", "三十", "十三")]


def test_numerals_in_words() -> None:
    for gold, right, wrong in WORDS:
        assert not misjudged_words(gold, right, wrong)
    for text in (
        "three or four",
        "three four",
        "one of the numbers",
        "three hundred or so",
        "not three",
        "twenty third",
    ):
        for gold in ("3", "1", "4", "20", "23", "300"):
            assert compute_score("math", f"Answer: {text}", gold)["status"] == "wrong", (text, gold)


def misjudged_words(gold: str, right: str, wrong: str) -> list[str]:
    texts = [(form.replace("%", word), ok) for form in IN_TEXT for word, ok in ((right, "ok"), (wrong, "wrong"))]
    return [text for text, status in texts if compute_score("math", text, gold)["status"] != status]


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (
            r"\begin{pmatrix}1\\-3\end{pmatrix}",
            ["(1,-3)", r"\langle 1, -3\rangle", r"\begin{bmatrix}1\\-3\end{bmatrix}"],
            ["(-3,1)", "[1,-3]", "1,-3,0", r"\begin{pmatrix}1&-3\end{pmatrix}", r"\{1,-3\}", "(1,-3,0)"],
        ),
        (
            "(1,-3)",
            [r"\begin{pmatrix}1\\-3\end{pmatrix}", r"\begin{bmatrix} 1 \\ -3 \end{bmatrix}"],
            [r"\begin{pmatrix}-3\\1\end{pmatrix}", r"\begin{vmatrix}1\\-3\end{vmatrix}"],
        ),
        ("[1,-3]", [], [r"\begin{pmatrix}1\\-3\end{pmatrix}"]),
        (
            r"\frac14",
            [r"1 \over 4", r"{1 \over 4}", r"x = 1 \over 4"],
            [r"4 \over 1", r"-1 \over 4", r"1 \over 4 \over 1"],
        ),
        (
            r"-\frac{\sqrt3}{2}",
            [r"-\sqrt{3} \over 2", r"{-\sqrt{3}\over 2}"],
            [r"\sqrt{3} \over 2", r"-2 \over \sqrt{3}"],
        ),
        ("x^2+C", ["x^2+c", "x^2 + C", "x^2+K", "x^2+k"], ["x^2", "x^2+x", "x^3+c", "x^2-5c", "x^2+2c"]),
        (r"\ln x+C", [r"\ln x + c"], [r"\ln c+c", r"\ln x"]),
        ("A+C", ["C+A"], ["A+c"]),
        ("a+c", ["c+a"], ["a+C"]),
        ("3", ["3", "x = 3"], [r"\approx 3", "≈3", r"x \approx 3", r"\approx 3.0"]),
        ("0.5", ["0.5", r"\approx 0.5"], [r"\approx 0.6"]),
        (r"\frac23", [r"\approx 0.666667"], [r"\approx 0.67", r"\approx \frac23"]),
        ("25 cm", [r"\approx 25 cm"], [r"\approx 26 cm"]),
        ("x=3,y=-2", ["x=3, y=-2", "y=-2, x=3", "(3,-2)", "3, -2"], ["-2,3", "(-2,3)", "x=-2,y=3", "3 or -2"]),
        ("x=3,x=-2", ["-2,3", "3,-2", "x=-2 or x=3"], ["3", "2,3"]),
        ("2x", ["2x", r"2\cdot x", "x*2"], ["x2", "x^2", "x_2"]),
        ("2x+1", ["1+2x"], ["x2+1", "1+x2"]),
        (r"\frac{2x}{3}", [r"\frac23x"], [r"\frac{x2}{3}"]),
    ],
)
def test_one_way_of_writing_for_another(gold: str, right: list[str], wrong: list[str]) -> None:
    for texts, status in ((right, "ok"), (wrong, "wrong")):
        for text in texts:
            assert compute_score("math", rf"\boxed{{{text}}}", gold)["status"] == status, text


def test_a_number_is_no_percentage_unless_per_cent_is_asked_for() -> None:
    asked = {"question": "What percent of the marbles are red?"}
    for gold, share, number in ((r"25\%", "0.25", "25"), (r"12.5\%", r"\frac{1}{8}", "12.5"), (r"150\%", "1.5", "150")):
        for text, status in ((gold, "ok"), (share, "ok"), (number, "wrong"), (f"x={number}", "wrong")):
            assert compute_score("math", rf"\boxed{{{text}}}", gold)["status"] == status, text
        assert compute_score("math", rf"\boxed{{{number}}}", gold, asked)["status"] == "ok"
    for source in ("math", "k12"):
        assert compute_score(source, r"\boxed{25\%}", "25", asked)["status"] == "ok"
        assert compute_score(source, r"\boxed{25\%}", "25")["status"] == "wrong"
        assert compute_score(source, "Answer: 25 percent", "25")["status"] == "wrong"
