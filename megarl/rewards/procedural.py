"""reasoning-gym's scorers (Apache-2.0), one per task family.

Ten of them pass an answer, or text of the row, to Python's ``eval`` or sympy's ``parse_expr``. Such text is parsed here
first, and passed on only if it is a literal, or a formula that calls only mathematical functions.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from megarl.core.errors import DataError
from megarl.core.imports import reasoning_gym
from megarl.rewards.answer.grammar import after_thinking

VERSION = "0.1.25"
"""Release whose scorers were read for the tables below; ``tests/unit/test_payloads.py`` scans its source."""
PLAIN = frozenset(
    (
        "ab", "acre", "advanced_geometry", "aiw", "arc_1d", "arc_agi", "base_conversion", "basic_arithmetic",
        "bf", "binary_alternation", "bitwise_arithmetic", "boxnet", "caesar_cipher", "calendar_arithmetic",
        "chain_sum", "circuit_logic", "codeio", "coin_flip", "color_cube_rotation", "complex_arithmetic",
        "count_bits", "count_primes", "course_schedule", "cryptarithm", "decimal_arithmetic",
        "decimal_chain_sum", "dice", "emoji_mystery", "family_relationships", "figlet_font",
        "fraction_simplification", "futoshiki", "game_of_life", "game_of_life_halting", "gcd", "graph_color",
        "group_anagrams", "gsm_symbolic", "isomorphic_strings", "jugs", "kakurasu", "knight_swap",
        "knights_knaves", "largest_island", "lcm", "leg_counting", "letter_counting", "letter_jumble",
        "list_functions", "mahjong_puzzle", "manipulate_matrix", "maze", "mini_sudoku", "modulo_grid",
        "needle_haystack", "number_filtering", "number_format", "number_sequence", "number_sorting",
        "palindrome_generation", "palindrome_partitioning", "path_star", "polynomial_equations", "pool_matrix",
        "power_function", "prime_factorization", "products", "propositional_logic", "quantum_lock",
        "ransom_note", "rearc", "rectangle_count", "rotate_matrix", "rotten_oranges", "rubiks_cube",
        "rush_hour", "self_reference", "sentence_reordering", "shortest_path", "simple_equations",
        "simple_geometry", "sokoban", "spell_backward", "string_manipulation", "string_splitting",
        "string_synthesis", "sudoku", "survo", "syllogism", "time_intervals", "tower_of_hanoi", "tsumego",
        "word_ladder", "word_sequence_reversal", "word_sorting", "zebra_puzzles",
    )
)  # fmt: skip
"""Families with scorers that never evaluate an answer's text."""


def is_literal(text: object) -> bool:
    """Return True for text of numbers, strings, lists, tuples, sets and dicts."""
    return _consists_of(text, lambda node: isinstance(node, _LITERAL))


def is_formula(text: object) -> bool:
    """Return True for text of numbers, variables (``x``, ``C_1``), operators and calls of ``FUNCTIONS``.

    Text with a comment, which is not parsed here, is not a formula.
    """
    return _consists_of(text, _in_formula) and "#" not in str(text)


def is_arithmetic(text: object) -> bool:
    """Return True for a formula of decimal integers, without other numbers."""
    return is_formula(text) and _ARITHMETIC.fullmatch(str(text)) is not None


def is_list(text: object) -> bool:
    """Return True for a literal, or JSON."""
    try:
        json.loads(text)  # type: ignore[arg-type]  # TypeError is caught
    except (TypeError, ValueError, RecursionError):
        return is_literal(text)
    return True


EVALUATED: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), is_literal),
    **dict.fromkeys(("intermediate_integration", "polynomial_multiplication", "simple_integration"), is_formula),
    **dict.fromkeys(("countdown", "puzzle24"), is_arithmetic),
}
"""Family whose scorer evaluates an answer -> test of the answers that it may evaluate. Other answers are withheld,
except the ground truth. ``countdown`` and ``puzzle24`` count the integers in the text: in ``0x18 + 0*(1+2+3+4)`` and
``(x+x)/x # 1 2 3 4`` they count other integers than the value uses."""

EVALUATED_OF_ROW: dict[str, tuple[str, Callable[[object], bool]]] = {
    "bitwise_arithmetic": ("problem", is_formula),
    "intermediate_integration": ("integrand", is_formula),
    "number_sorting": ("answer", is_list),
    "polynomial_multiplication": ("answer", is_formula),
    "simple_integration": ("integrand", is_formula),
}
"""Family whose scorer evaluates text of the row -> its field, and a test of the field. The field is the ground truth
(``answer``) or an entry of the metadata."""

MAY_BE_RIGHT: dict[str, Callable[[str, Any, dict[str, Any]], bool]] = {
    "coin_flip": lambda answer, truth, metadata: not _is_cut(answer, str(truth)),
    "complex_arithmetic": lambda answer, truth, metadata: "nan" not in "".join(answer.lower().split()),
    "game_of_life_halting": lambda answer, truth, metadata: answer.lower() == str(truth).lower(),
    "puzzle24": lambda answer, truth, metadata: _integers(answer) == sorted(metadata.get("numbers", _integers(answer))),
}
"""Family whose scorer gives 1.0 to some answer for every row -> test of the answers that may be right. Others score as
no answer. The scorers accept ``0`` and ``0.3`` for 0.375, ``nan``, any text for ``False``, and ``1*2*3*4`` for 24 of
other numbers."""

FUNCTIONS = frozenset(
    (
        "Abs", "Ci", "Ei", "Si", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc",
        "erf", "erfc", "erfi", "exp", "li", "ln", "log", "sec", "sin", "sinh", "sqrt", "tan", "tanh",
    )
)  # fmt: skip
"""sympy functions allowed in a formula."""
_ARITHMETIC = re.compile(r"[\d\s()+*/%<>&|^~-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z](?:_?\d+)?")
_LITERAL = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.UAdd, ast.USub, ast.Load,
)  # fmt: skip
_FORMULA = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.UAdd, ast.USub, ast.Invert, ast.Load)


def _in_formula(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Name):
        return node.id == "pi" or node.id in FUNCTIONS or _VARIABLE.fullmatch(node.id) is not None
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
    return isinstance(node, _FORMULA)


def _integers(text: str) -> list[int]:
    return sorted(map(int, re.findall(r"\d{1,9}", text, re.ASCII)))


def _is_cut(answer: str, truth: str) -> bool:
    """Return True if one number's digits are the first digits of the other."""
    try:
        found, right = (float(Fraction(text.replace(",", ""))) for text in (answer, truth))
    except (ValueError, ArithmeticError):
        return False
    return abs(found - right) > 1e-4 and f"{right:.10g}".startswith(f"{found:.10g}")


def _consists_of(text: object, allowed: Callable[[ast.AST], bool]) -> bool:
    """Return True if the text is one expression of allowed nodes. sympy's tokenizer reads ASCII as Python does."""
    if not isinstance(text, str) or not text.isascii():
        return False
    try:
        return all(map(allowed, ast.walk(ast.parse(text, mode="eval"))))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def answer_of(solution_str: str) -> str:
    """Return the content of the last ``<answer>…</answer>`` after all thoughts, else the whole text after them,
    stripped."""
    text = after_thinking(solution_str).strip()
    tagged, closed, _ = text.rpartition("</answer>")  # its search takes quadratic time in unclosed tags
    answer = reasoning_gym().utils.extract_answer(tagged + closed)
    return text if answer is None else str(answer)


def check_row(family: str, ground_truth: Any, extra_info: dict[str, Any]) -> None:
    """Raise DataError for a row with text that the family's scorer would execute."""
    if family not in EVALUATED_OF_ROW:
        return
    name, is_data = EVALUATED_OF_ROW[family]
    text = ground_truth if name == "answer" else (extra_info.get("metadata") or {}).get(name)
    if not is_data(text):
        place = "reward_model.ground_truth" if name == "answer" else f"extra_info.metadata.{name}"
        raise DataError(
            f"{place}={text!r:.200}: reasoning-gym's {family} evaluates this text; give a plain "
            f"{'formula' if is_data is is_formula else 'list'}, as the family writes it"
        )


def check_family(family: str) -> None:
    """Raise DataError for an unknown family, a family in none of the tables above, or another version of reasoning-gym.
    Does not import reasoning-gym for a known family."""
    if (version := importlib.metadata.version("reasoning-gym")) != VERSION:
        raise DataError(
            f"data_source 'reasoning_gym/{family}': reasoning-gym {version} is installed, and megarl knows which "
            f"scorers of {VERSION} run text of an answer; pip install reasoning-gym=={VERSION}, or set reward.path"
        )
    if family in PLAIN | EVALUATED.keys():
        return
    if family not in reasoning_gym().factory.DATASETS:
        raise DataError(
            f"data_source 'reasoning_gym/{family}': reasoning-gym has no such family; correct it, or set reward.path"
        )
    raise DataError(
        f"data_source 'reasoning_gym/{family}': megarl does not know whether its scorer runs text of an answer; "
        "name the family of each row, or set reward.path"
    )


@functools.cache
def scorer(family: str) -> Callable[[str, Any, dict[str, Any] | None], float]:
    """Return the scorer of ``reasoning_gym/<family>``: 1.0 for a right answer, partial credit as the family defines it.

    The answer is ``answer_of`` the response. Families other than arithmetic read ``extra_info``'s question and
    metadata. Raises DataError as ``check_family``. The scorer raises the family's error if the right answer causes it
    too; otherwise an unreadable answer is wrong.
    """
    check_family(family)
    score_answer = reasoning_gym().get_score_answer_fn(family)

    def score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> float:
        info = extra_info or {}
        check_row(family, ground_truth, info)
        metadata = info.get("metadata") or {}
        entry = {"question": info.get("question"), "answer": ground_truth, "metadata": metadata}
        answer = _given(family, answer_of(solution_str), ground_truth, metadata)
        try:
            return float(score_answer(answer, entry))
        except Exception:
            score_answer(_given(family, ground_truth, ground_truth, metadata), entry)  # raises again for a faulty row
            return 0.0

    return score


def _given(family: str, answer: Any, ground_truth: Any, metadata: dict[str, Any]) -> Any:
    """Return the answer as passed to the family's scorer; None for an answer that it would execute.

    Scorers that evaluate lists first compare the text with right answers, and do not evaluate equal ones.
    """
    is_data = EVALUATED.get(family)
    if family in MAY_BE_RIGHT and answer != ground_truth and not MAY_BE_RIGHT[family](answer, ground_truth, metadata):
        return None
    if is_data is None or is_data(answer):
        return answer
    right = metadata.get("valid_answers") if family == "n_queens" else [ground_truth]
    return answer if is_data is is_literal and isinstance(right, list) and answer in right else None
