"""The vision verifiers against their table, and what holds for all boxes, matchings and texts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.errors import DataError
from megarl.rewards import compute_score
from megarl.rewards.routes import scorer_for
from megarl.rewards.vision.bounding_boxes import best_assignment, iou, shapes
from megarl.rewards.vision.readings import anls, levenshtein, read_count
from megarl.rewards.vision.verifier import SUBTYPES, check_row, score_anls, score_box

TABLE = Path(__file__).parent / "cases" / "vision.tsv"
STATUS = {"1": "ok", "0": "wrong", "e": "error"}


def cases() -> list[tuple[str, str, Any, str, dict[str, Any]]]:
    """(subtype, status, ground truth, response, extra_info); its first line says how the file is written."""
    found = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        subtype, right, gold, pred, info = [*line.split("\t"), ""][:5]
        response = pred[2:].replace("⏎", "\n") if pred.startswith("> ") else f"\\boxed{{{pred}}}"
        truth = json.loads(gold[1:]) if gold.startswith("!") else gold
        found.append((subtype, STATUS[right], truth, response, json.loads(info) if info else {}))
    return found


def test_the_table_is_large_and_has_every_status_of_every_subtype() -> None:
    rows = cases()
    assert len(rows) >= 700
    for subtype in SUBTYPES:
        assert {status for name, status, *_ in rows if name == subtype} == set(STATUS.values()), subtype


def test_every_row_of_the_table() -> None:
    disagree = []
    for subtype, status, gold, response, info in cases():
        result = SUBTYPES[subtype](response, gold, info)
        if (
            result["status"] != status
            or result["acc"] is not (status == "ok")
            or ("reason" in result) != (status == "error")
        ):
            disagree.append(f"{subtype}: gold {gold!r} response {response!r} {info}: {result}")
    assert not disagree, "\n".join(disagree)


def test_rows_are_checked_before_any_answer() -> None:
    for subtype, status, gold, _, info in cases():
        if status != "error":
            check_row(subtype, gold, info)
            continue
        with pytest.raises(DataError, match="ground_truth|extra_info|coordinates"):
            check_row(subtype, gold, info)


def test_the_router_knows_the_subtypes() -> None:
    assert compute_score("vision/count", "There are three.", 3)["score"] == 1.0
    assert compute_score("vision/math/geo3k", r"\boxed{4}", "4")["score"] == 1.0
    assert compute_score("hiyouga/geometry3k", r"\boxed{4}", "4")["score"] == 1.0
    for unknown in ("vision", "vision/", "vision/caption", "vision-box", "visionary"):
        with pytest.raises(DataError, match="vision/<subtype> with one of math, choice, count, anls, box, point"):
            scorer_for(unknown)


def test_a_row_with_a_fault_says_which() -> None:
    truth = [10, 20, 110, 220]
    assert "holds no box [x1, y1, x2, y2]" in score_box("[1,2,3,4]", "dog")["reason"]
    assert "expected x1 < x2" in score_box("[1,2,3,4]", [5, 5, 1, 1])["reason"]
    needs = score_box("[1,2,3,4]", truth, {"coordinates": "0-1", "gt_coordinates": "pixels"})
    assert "need extra_info.width and height" in needs["reason"]
    assert (
        "extra_info.threshold 2: expected a number above 0 and at most 1"
        in score_box("[1,2,3,4]", truth, {"threshold": 2})["reason"]
    )


def test_the_score_of_texts_is_their_anls() -> None:
    assert score_anls(r"\boxed{Pariss}", "Paris")["score"] == pytest.approx(5 / 6)
    assert score_anls(r"\boxed{Pariss}", "Paris")["status"] == "wrong"
    assert score_anls(r"\boxed{Paris}", ["Rome", "paris"]) | {"pred": ""} == {
        "score": 1.0, "acc": True, "status": "ok", "pred": "", "extracted": 1.0, "exact": 1.0,
    }  # fmt: skip
    assert (anls("ab", "a"), anls("abc", "a"), anls("ab", "a", 0.6)) == (0.5, 0.0, 0.0)


def test_the_score_of_boxes_and_its_parts() -> None:
    two = [[0, 0, 10, 10], [20, 20, 30, 30]]
    half = score_box("[0,0,10,10]", two)
    assert (half["score"], half["iou"], half["precision"], half["recall"]) == (0.0, 0.5, 1.0, 0.5)
    assert score_box("[0,0,10,10]", two, {"score": "iou"})["score"] == 0.5
    assert score_box("[[0,0,10,10],[20,20,30,30],[0,0,1,1]]", two, {"score": "iou"})["score"] == pytest.approx(2 / 3)
    # The largest sum of overlaps (1.0 + 0.25) matches one box, another way matches both.
    crossed = score_box("[[0,0,10,10],[0,0,10,20]]", [[0, 0, 10, 10], [0, 0, 10, 5]])
    assert (crossed["status"], crossed["iou"]) == ("ok", 0.5)


@pytest.mark.parametrize(
    ("text", "count"),
    [("forty-two", 42), ("负三", -3), ("第三张图有两只", 2), ("one of the three", 3), ("x" * 400, None)],
)
def test_counts_are_read(text: str, count: int | None) -> None:
    assert read_count(text) == count


number = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 2))
box = st.tuples(number, number, st.floats(0.5, 1e6), st.floats(0.5, 1e6)).map(
    lambda b: (b[0], b[1], b[0] + b[2], b[1] + b[3])
)
anything = st.tuples(*[st.one_of(number, st.sampled_from([0.0, 1e308, -1e308, 5e-324]))] * 4)


@given(st.one_of(box, anything), st.one_of(box, anything))
def test_iou_is_symmetric_and_a_share(first: tuple[float, ...], second: tuple[float, ...]) -> None:
    assert 0.0 <= iou(first, second) <= 1.0
    assert iou(first, second) == pytest.approx(iou(second, first))


@given(box, st.sampled_from([0.001, 2.0, 640.0]), st.sampled_from([0.5, 480.0]))
def test_a_box_is_itself_at_any_scale(first: tuple[float, ...], width: float, height: float) -> None:
    scaled = tuple(value * (width, height)[i % 2] for i, value in enumerate(first))
    other = tuple(value + 0.25 for value in first)
    assert iou(scaled, scaled) == 1.0
    assert iou(scaled, tuple(v * (width, height)[i % 2] for i, v in enumerate(other))) == pytest.approx(
        iou(first, other), abs=1e-6
    )


@given(st.lists(box, min_size=1, max_size=5), st.lists(box, min_size=1, max_size=5), st.randoms())
@settings(max_examples=60)
def test_the_order_of_boxes_makes_no_difference(golds: list[Any], found: list[Any], draw: Any) -> None:
    def answer(boxes: list[Any]) -> str:
        return f"<answer>{json.dumps(boxes)}</answer>"

    before = score_box(answer(found), golds, {"score": "iou"})
    mixed_golds, mixed = draw.sample(golds, len(golds)), draw.sample(found, len(found))
    after = score_box(answer(mixed), mixed_golds, {"score": "iou"})
    assert after["status"] == before["status"] and after["score"] == pytest.approx(before["score"])
    assert score_box(answer(mixed_golds), golds)["status"] == "ok"
    assert shapes(json.dumps(found), 4) == [tuple(b) for b in found]


@given(st.integers(1, 5).flatmap(lambda rows: st.integers(1, 5).flatmap(lambda columns: st.lists(
    st.lists(st.floats(0, 7), min_size=columns, max_size=columns), min_size=rows, max_size=rows))))  # fmt: skip
def test_the_assignment_is_the_best(weights: list[list[float]]) -> None:
    rows, columns = len(weights), len(weights[0])
    pairs = best_assignment(weights)
    assert len(pairs) == min(rows, columns) == len({r for r, _ in pairs}) == len({c for _, c in pairs})
    table = weights if rows <= columns else [list(column) for column in zip(*weights, strict=True)]
    every = itertools.permutations(range(max(rows, columns)), min(rows, columns))
    best = max(sum(table[i][j] for i, j in enumerate(order)) for order in every)
    assert sum(weights[r][c] for r, c in pairs) == pytest.approx(best)


texts = st.text(alphabet="abc 京é", max_size=12)


@given(texts, texts, texts)
def test_the_distance_is_one(first: str, second: str, third: str) -> None:
    distance = levenshtein(first, second)
    assert distance == levenshtein(second, first) and (distance == 0) == (first == second)
    assert abs(len(first) - len(second)) <= distance <= max(len(first), len(second))
    assert distance <= levenshtein(first, third) + levenshtein(third, second)


@given(texts, texts, st.floats(0.01, 1.0))
def test_anls_is_0_or_from_its_threshold_to_1(first: str, second: str, threshold: float) -> None:
    value = anls(first, second, threshold)
    assert value == 0.0 or threshold <= value <= 1.0
    assert value == anls(second, first, threshold)
    assert (value == 1.0) == (first.lower().split() == second.lower().split() != [])


@given(
    st.text(alphabet='[](){}<>0123456789,. -eENaInfinity"bbox_2d:pointxy=orn三两', max_size=60),
    st.sampled_from(sorted(SUBTYPES)),
)
@settings(max_examples=150)
def test_any_text_gets_a_verdict(text: str, subtype: str) -> None:
    truth: Any = {"count": 3, "box": [0, 0, 5, 5], "point": [0, 0, 5, 5], "choice": "B"}.get(subtype, "3")
    for response in (text, f"\\boxed{{{text}}}", f"<answer>{text}</answer>"):
        result = SUBTYPES[subtype](response, truth, {})
        assert result["status"] in ("ok", "wrong") and 0.0 <= result["score"] <= 1.0


@pytest.mark.parametrize(
    "response",
    [
        "[" * 30_000,
        "[1," * 9_000,
        "(" + "1 " * 9_000,
        '{"bbox":' * 2_000,
        "9" * 19_000,
        "<point x=" * 2_000,
        "one " * 9000,
    ],
)
def test_a_hostile_text_is_wrong_and_soon(response: str) -> None:
    for subtype, truth in (("box", [0, 0, 5, 5]), ("point", [0, 0, 5, 5]), ("count", 3), ("anls", "x" * 1000)):
        for text in (response, f"<answer>{response}</answer>"):
            assert SUBTYPES[subtype](text, truth, {})["status"] == "wrong"


THINGS = (("dogs", "狗"), ("birds", "鸟"), ("red cars", "红车"))
TOTAL_OF_PARTS = (
    "{n} {en} in the image, {a} on the left and {b} on the right",
    "There are {n} {en} in the picture: {a} in the tree, {b} on the ground.",
    "I see {n} {en}, {a} of them on the roof and {b} under the table",
    "图中有{n}只{zh}，左边{a}只，右边{b}只。",
    "共{n}只{zh}，{a}只在左边，{b}只在右边。",
    "{n}只{zh}（左边{a}只，右边{b}只）",
)
NOT_A_TOTAL = (
    "Not {n} {en}, {a} on the left and {b} on the right",
    "{n} {en}, {a} cats on the left and {b} cats on the right",
    "about {n} {en}, {a} on the left and {b} on the right",
    "If there were {n} {en}, {a} on the left and {b} on the right",
    "图中没有{n}只{zh}，左边{a}只，右边{b}只。",
    "图中大约有{n}只{zh}，左边{a}只，右边{b}只。",
)


def test_a_total_with_its_parts() -> None:
    for (en, zh), (n, a, b) in itertools.product(THINGS, ((3, 2, 1), (5, 1, 4), (12, 7, 5))):
        for form in TOTAL_OF_PARTS:
            text = form.format(n=n, a=a, b=b, en=en, zh=zh)
            assert read_count(text) == n, text
            assert read_count(form.format(n=n, a=a, b=b + 1, en=en, zh=zh)) is None, text
        for form in NOT_A_TOTAL:
            text = form.format(n=n, a=a, b=b, en=en, zh=zh)
            assert read_count(text) is None, text


def test_a_thing_that_is_not_seen() -> None:
    for en, zh in THINGS:
        for form in (
            "I don't see any {en}.", "I do not see any {en} in the image", "I can't see any {en}", "I see no {en}.",
            "No {en} are visible in the image.", "There aren't any {en}.",
            "我没有看到{zh}。", "图中看不到{zh}", "没看到任何{zh}",
        ):  # fmt: skip
            assert read_count(form.format(en=en, zh=zh)) == 0, form.format(en=en, zh=zh)
        for form in (
            "I don't see any {en} but two cats", "I can't see any {en} other than two",
            "I don't see more than two {en}",
            "I don't see any image of {en}", "我看不到{zh}的图片", "I can't see any {en} clearly",
        ):  # fmt: skip
            assert read_count(form.format(en=en, zh=zh)) is None, form.format(en=en, zh=zh)


def test_coordinates_by_their_names() -> None:
    for x, y in ((60, 100), (7.5, 3), (1, 0)):
        for form in (
            "x={x}, y={y}", "y={y}, x={x}", "x: {x}, y: {y}", "The point is at x={x}, y={y}.", "(x={x}, y={y})",
            "x = {x} and y = {y}", "x={x}px, y={y}px", "横坐标{x}，纵坐标{y}", "x＝{x}，y＝{y}",
            r"\boxed{{x={x}, y={y}}}",
        ):  # fmt: skip
            text = form.format(x=x, y=y)
            assert SUBTYPES["point"](text, [x, y], {"radius": 0.1})["status"] == "ok", text
            assert SUBTYPES["point"](text, [y, x], {"radius": 0.1})["status"] == "wrong", text
        for form in (
            "x={x}",
            "x={x} or y={y}",
            "not x={x}, y={y}",
            "x={x}, y={y}, x=2",
            "x={x}, z={y}",
            "x={x}, y={y}%",
        ):
            text = form.format(x=x, y=y)
            assert SUBTYPES["point"](text, [x, y], {"radius": 0.1})["status"] == "wrong", text
    assert score_box("x1=10, y1=20, x2=110, y2=220", [10, 20, 110, 220])["status"] == "ok"
