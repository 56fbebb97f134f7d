"""Verifier for school questions with a short answer, Chinese or English. Accepted forms: docs/rewards_math.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarl.core.errors import DataError
from megarl.rewards.answer import grammar, measures, selections, trace
from megarl.rewards.answer.grammar import after_thinking, boxes, extract, unmarked
from megarl.rewards.answer.marks import asks
from megarl.rewards.answer.normalize import half_width
from megarl.rewards.math.compare import MAX_ANSWER, other_percent
from megarl.rewards.math.verifier import (
    TIME_LIMIT_S,
    MathScorer,
    OutOfTime,
    _warm,
    check_listed,
    listed,
    out_of_time,
    time_limit,
    verdict,
)
from megarl.rewards.school import final as k12_final
from megarl.rewards.school import read as k12_read
from megarl.rewards.school import truth as k12_truth
from megarl.rewards.school.read import same_short, states_division

TYPES = ("choice", "multiple_choice", "blanks", "true_false", "short")
_FORMULA = re.compile(r"[\d\\=^]|[零一二两三四五六七八九十]|\bhalf\b")
_PROMPT_OPTION = re.compile(r"(?:^|[\s(（])([A-H])\s*[.．、:：)）]\s*\S")
_LINE_OPTION = re.compile(r"^[ \t]*[(（]?([A-H])\s*[.．、)）:：][ \t]*\S.*$", re.MULTILINE)
_INLINE_OPTION = re.compile(r"(?:[(（]\s*([A-H])\s*[)）]|(?<![A-Za-z0-9(（])([A-H])\s*(?:[.．、](?!\d)|\)))\s*(?=\S)")
_LABEL_DRESS = re.compile(
    r"\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{\s*(\(?[A-H][).]?)\s*\}|\$|\\q?quad(?![a-z])|\\[ ,;]"
)


def question_type(ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> str:
    """Return ``extra_info.type``, or the type that the ground truth looks like. Raises DataError if it is not in
    TYPES."""
    info = extra_info if isinstance(extra_info, Mapping) else {}
    ground_truth = listed(ground_truth)
    given = info.get("type")
    if given is not None:
        if given not in TYPES:
            raise DataError(f"extra_info.type {given!r}: expected one of {', '.join(TYPES)}")
        return str(given)
    if isinstance(ground_truth, bool):
        return "true_false"
    if isinstance(ground_truth, Sequence) and not isinstance(ground_truth, str):
        letters = [k12_read.letters(str(item)) for item in ground_truth]
        texts = (
            {k12_read.plain(text) for text in k12_read.options_of(info).values()}
            if k12_read.given_options(info) is not None
            else set()
        )
        if letters and (
            all(found and len(found) == 1 for found in letters)
            or all(k12_read.plain(str(item)) in texts for item in ground_truth)
        ):
            return "choice" if len(letters) == 1 else "multiple_choice"
        return "blanks"
    text = half_width(str(ground_truth)).strip()
    if k12_truth.exact_truth(text) is not None and not re.fullmatch("[TF]", text):
        return "true_false"
    letters_found = k12_read.letters(text) if not re.search(r"[a-z]", text[:2]) else None
    if letters_found:
        in_order = list(letters_found) == sorted(letters_found)  # "BA" is more likely a line through two points
        if len(letters_found) == 1 or (in_order and len(letters_found) <= 6):
            return "choice" if len(letters_found) == 1 else "multiple_choice"
    if k12_read.given_options(info) is not None:
        return "choice"
    return "blanks" if len(k12_read.split_blanks(text)) > 1 else "short"


def is_multiple_choice(row: Mapping[str, Any]) -> bool:
    """Return True if a verl row asks for one or more given options. For filters: Kimi k1.5 dropped such items, R1 kept
    them.

    By ``extra_info.type`` or ``options`` if a row has them, for any data source; else by a ground truth that is a
    letter, or a prompt that lists options A, B and C. Never raises: a row without these returns False.
    """
    info = row.get("extra_info")
    info = info if isinstance(info, Mapping) else {}
    if info.get("type") in TYPES:
        return info["type"] in ("choice", "multiple_choice")
    if k12_read.given_options(info) is not None:
        return True
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else row.get("ground_truth")
    prompt = row.get("prompt")
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        prompt = "\n".join(str(message.get("content", "")) for message in prompt if isinstance(message, Mapping))
    school = str(row.get("data_source", "")).startswith(("k12", "vision/choice"))
    if isinstance(prompt, str) and (
        _lists_options(prompt) or (school and {"A", "B", "C"} <= set(_PROMPT_OPTION.findall(prompt)))
    ):
        return True
    if not school or truth is None:
        return False
    return question_type(truth) in ("choice", "multiple_choice")


def _lists_options(prompt: str) -> bool:
    """Return True if options A, B, C … follow in order, one per line, or on one line after the question. The vertices
    "A: (0,0), B: (1,0)" are not options."""
    text = _LABEL_DRESS.sub(lambda match: f" {match[1] or ''} ", prompt)
    lines = list(_LINE_OPTION.finditer(text))
    if _in_order([match[1] for match in lines]):
        colons = re.search(r"^[ \t]*[A-H]\s*[:：]", text, re.MULTILINE)  # points may look so, but before the question
        return not colons or not text[lines[-1].end() :].strip()
    marks = list(_INLINE_OPTION.finditer(text))
    starts = [k for k, match in enumerate(marks) if (match[1] or match[2]) == "A"]
    if not starts:
        return False
    marks = marks[starts[-1] :]
    if not _in_order([match[1] or match[2] for match in marks]):
        return False
    before = text[: marks[0].start()].rstrip(" \t")
    behind_question = bool(marks[0][1]) or not before or before[-1] in "?？.。:：)）_\n"
    between = [text[first.end() : second.start()].rstrip() for first, second in zip(marks, marks[1:], strict=False)]
    return behind_question and not any(re.search(r"(?:[,，、]|\band|\bor|和|与)$", part) for part in between)


def _in_order(letters: list[str]) -> bool:
    return len(letters) >= 3 and letters == list("ABCDEFGH"[: len(letters)])


def score(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return score 1.0 if everything is right, else 0.0; ``partial`` is the share that is right. The status is
    ``error`` for a row without an answer or of unknown type."""
    info = extra_info if isinstance(extra_info, Mapping) else {}
    ground_truth = listed(ground_truth)
    if ground_truth is None or (isinstance(ground_truth, (str, list, tuple)) and not ground_truth):
        return verdict("error", "", f"ground_truth {ground_truth!r} holds no answer; give a text, a bool or a list")
    try:
        kind = question_type(ground_truth, info)
    except DataError as error:
        return verdict("error", "", str(error))
    trace.asked(f"a school answer of type {kind}")
    pred = ""
    try:
        with time_limit(TIME_LIMIT_S):
            pred = extract(solution_str)
            if len(pred) > MAX_ANSWER or (asks(pred) and not _may_ask(ground_truth, info)):
                trace.compared("a question, or too long", str(ground_truth), pred, False)
                return _judge(pred, 0.0)
            return _SCORE[kind](solution_str, pred, ground_truth, info)
    except OutOfTime:
        return out_of_time(pred, lambda: _SCORE[kind]("0", "0", ground_truth, info))
    except RecursionError:
        return verdict("wrong", pred)


def _may_ask(ground_truth: Any, info: Mapping[str, Any]) -> bool:
    """Return True if a ground truth or an option is itself a question, as in a dialogue."""
    return "?" in half_width(f"{ground_truth} {list(k12_read.options_of(info).values())}")


def check_row(ground_truth: Any, extra_info: Mapping[str, Any] | None) -> None:
    """Raise DataError for a row that no answer can satisfy. Reads texts only: about 0.1 ms, no SymPy."""
    info = extra_info if isinstance(extra_info, Mapping) else {}
    check_listed(ground_truth)
    truth = listed(ground_truth)
    shown = f"ground_truth {ground_truth!r:.80}"
    values = list(truth) if isinstance(truth, (list, tuple)) else [truth]
    leaves = [leaf for value in values for leaf in (value if isinstance(value, (list, tuple)) else [value])]
    if not leaves or any(not isinstance(leaf, (str, int, float)) or not str(leaf).strip() for leaf in leaves):
        raise DataError(f"{shown} holds no answer, or an empty one; give a text, a bool or a list of texts")
    given = k12_read.given_options(info)
    if given is not None and not isinstance(given, (Mapping, list, tuple)):
        raise DataError(f"extra_info.options {given!r:.40}: expected a list of texts, or a mapping of letters to texts")
    kind, options = question_type(truth, info), k12_read.options_of(info)
    if kind in ("choice", "multiple_choice") and selections.circled("".join(map(str, values))):
        return
    if kind == "true_false" and not isinstance(truth, bool) and k12_truth.truth(str(truth)) is None:
        raise DataError(f"{shown} is neither true nor false; give a bool, or set extra_info.type to what it is")
    if kind not in ("choice", "multiple_choice"):
        return
    texts = {k12_read.plain(text) for text in options.values()} - {""}
    for value in map(str, values):
        letters = k12_read.letters(value)
        if k12_read.plain(value) in texts or (
            letters and set(letters) <= set(options or letters) and (kind == "multiple_choice" or len(letters) == 1)
        ):
            continue
        formulas = not letters and all(
            any(map(_FORMULA.search, of)) for of in ([value], options.values())
        )  # may be equal: only the scorer can decide
        if not formulas and (options or kind == "multiple_choice"):
            among = (
                f"none of the options {', '.join(options)}"
                if options
                else "no letters, and the row has no extra_info.options"
            )
            raise DataError(
                f"{shown} names {among}; fix it, or extra_info.options, or set extra_info.type ({', '.join(TYPES)})"
            )


def _judge(pred: str, partial: float, **parts: float) -> dict[str, Any]:
    return verdict("ok" if partial == 1.0 else "wrong", pred, parts={"partial": partial} | parts)


def _choice(response: str, pred: str, truth: Any, info: Mapping[str, Any]) -> dict[str, Any]:
    """Score one option, named by its letter or its text."""
    options = k12_read.options_of(info)
    gold_text = str(truth[0] if isinstance(truth, (list, tuple)) else truth)
    if circled := selections.circled(gold_text):
        return _judge(pred, float(len(circled) == 1 and k12_final.same_circled(circled, pred, options)))
    gold = k12_final.named(gold_text, options)
    if not gold or len(gold) != 1:
        if options:
            return verdict("error", pred, f"ground_truth {truth!r:.80} is not one of the options {', '.join(options)}")
        return _judge(pred, float(same_short(gold_text, pred)))
    row = grammar.boxes_in_a_row(response)
    if row:
        return _judge(pred, float(all(k12_final.named(box, options) == gold for box in row)))
    text = unmarked(response)
    found = _first(
        ("letter before its explanation", lambda: k12_final.letters_before_explanation(text, options)),
        ("option of the answer", lambda: k12_final.named(pred, options)),
        ("letter beside refused ones", lambda: k12_final.settled_last(pred, text)),  # "Option B is correct."
        ("choice in the text", lambda: k12_final.chosen(after_thinking(response))),
        ("sentence that chooses", lambda: k12_final.sole_choice(text, pred)),
        ("conclusion", lambda: k12_final.concluded(text)),
        ("option beside a refused one", lambda: _beside_refused(pred, options)),
    )
    return _judge(pred, float(_same_letters(gold, found)))


def _first(*forms: tuple[str, Callable[[], set[str] | None]]) -> set[str]:
    """Return the letters of the first form that names any; empty if none does."""
    for form, read in forms:
        if found := read():
            trace.read(form, " ".join(sorted(found)))
            return found
    return set()


def _same_letters(gold: set[str], found: set[str]) -> bool:
    return trace.compared("letters", " ".join(sorted(gold)), " ".join(sorted(found)), gold == found)


def _beside_refused(pred: str, options: Mapping[str, str]) -> set[str] | None:
    """Return the option that a prediction names next to a refused option: "Paris, not London"."""
    pair = grammar.beside_refused(pred) if options else None
    found, refused = (k12_final.named(text, options) for text in pair) if pair else (None, None)
    return found if found and found != refused else None


def _multiple(response: str, pred: str, truth: Any, info: Mapping[str, Any]) -> dict[str, Any]:
    """Score several options in any order. ``partial``: the share of right options named, 0 if any is wrong."""
    options = k12_read.options_of(info)
    values = truth if isinstance(truth, (list, tuple)) else [truth]
    if circled := selections.circled("".join(map(str, values))):
        return _judge(pred, float(k12_final.same_circled(circled, pred, options)))
    gold: set[str] = set()
    for value in values:
        found = k12_final.named(str(value), options)
        if not found:
            return verdict(
                "error",
                pred,
                f"ground_truth {truth!r:.80} names no option letters; set extra_info.options or extra_info.type",
            )
        gold |= found
    if row := grammar.boxes_in_a_row(response):
        pred = ", ".join(row)
    text = unmarked(response)
    chosen = _first(
        ("letters before their explanation", lambda: k12_final.letters_before_explanation(text, options, several=True)),
        ("options of the answer", lambda: k12_final.named(pred, options, several=True)),
        ("letters beside refused ones", lambda: k12_final.settled(pred)),
        ("choice in the text", lambda: k12_final.chosen(after_thinking(response))),
        ("conclusion", lambda: k12_final.concluded(text)),
    )
    _same_letters(gold, chosen)
    return _judge(pred, len(chosen & gold) / len(gold) if chosen <= gold else 0.0, selected=float(len(chosen)))


def _true_false(response: str, pred: str, truth: Any, info: Mapping[str, Any]) -> dict[str, Any]:
    gold = truth if isinstance(truth, bool) else k12_truth.truth(str(truth))
    if gold is None:
        return verdict("error", pred, f"ground_truth {truth!r:.80} is neither true nor false")
    if row := grammar.boxes_in_a_row(response):
        return _judge(pred, float(all(k12_truth.truth(box) is gold for box in row)))
    said = _judgement(response, pred)
    return _judge(pred, float(trace.compared("judgement", str(gold), str(said), said is gold)))


def _judgement(response: str, pred: str) -> bool | None:
    """Read a judgement from the last line of a response without box or "answer is", or from a first word with its
    reason; else from the answer."""
    text = unmarked(response)
    for part in (text.rsplit("\n", 1)[-1], text) if text else ():
        said = k12_truth.truth(part)
        if said is not None:
            return said
    return None if text else k12_truth.truth(pred)


def _blanks(response: str, pred: str, truth: Any, info: Mapping[str, Any]) -> dict[str, Any]:
    """Score blank by blank in order (in any order with ``extra_info.unordered``). More answers than blanks score 0."""
    golds = list(truth) if isinstance(truth, (list, tuple)) else list(k12_read.split_blanks(str(truth), commas=True))
    accepted = [[str(item) for item in gold] if isinstance(gold, (list, tuple)) else [str(gold)] for gold in golds]
    parts = k12_read.split_blanks(pred, len(golds))
    if len(accepted) == 1 and _recited(response, accepted[0]):
        return _judge(pred, 1.0, blanks=1.0, right_blanks=1.0)
    found = [content for _, content in boxes(after_thinking(response))]
    if len(parts) != len(golds) and len(found) == len(golds):
        parts = found
    row = grammar.boxes_in_a_row(response)
    if len(set(row)) > len(golds):  # "\\boxed{3}, \\boxed{5}" for one blank
        parts = row
    numbered = k12_read.numbered(unmarked(response).rsplit("\n", 1)[-1])
    if len(numbered) == len(golds) > 1:  # 第一空填3，第二空填5
        parts = numbered
    right, question = 0, _question(info)
    if len(parts) <= len(golds):
        if info.get("unordered"):
            rest = list(parts)
            for golds_of_blank in accepted:
                hit = next((i for i, part in enumerate(rest) if _any_short(golds_of_blank, part, question)), None)
                if hit is not None:
                    right += 1
                    del rest[hit]
        else:
            right = sum(_any_short(gold, part, question) for gold, part in zip(accepted, parts, strict=False))
    return _judge("; ".join(parts), right / len(golds), blanks=float(len(golds)), right_blanks=float(right))


def _any_short(golds: list[str], pred: str, question: str) -> bool:
    """Return True if a prediction equals any ground truth. Another unit is accepted unless the question names one;
    another percent form only if the question asks for per cent."""
    convert = not measures.asks_for_unit(question)
    return any(same_short(gold, pred, convert) and not other_percent(gold, pred, question) for gold in golds)


def _question(info: Mapping[str, Any]) -> str:
    question = info.get("question") or info.get("problem")
    return question if isinstance(question, str) else ""


def _recited(response: str, golds: Sequence[str]) -> bool:
    """Return True if the last line is a ground truth: 床前明月光，疑是地上霜 is not an equation with 是."""
    line = k12_read.plain(unmarked(response).rsplit("\n", 1)[-1])
    return len(line) > 3 and line in map(k12_read.plain, golds)


def _short(response: str, pred: str, truth: Any, info: Mapping[str, Any]) -> dict[str, Any]:
    golds = [str(gold) for gold in (truth if isinstance(truth, (list, tuple)) else [truth])]
    question = _question(info)
    if _recited(response, golds):
        return _judge(pred, 1.0)
    if row := grammar.boxes_in_a_row(response):
        listed_so = _any_short(golds, ", ".join(row), question)
        return _judge(pred, float(listed_so or all(_any_short(golds, box, question) for box in row)))
    text = unmarked(response)
    if any(grammar.only_rough(gold, pred, question) for gold in golds):
        return _judge(pred, 0.0)
    pred = grammar.without_rough(pred, question)
    if re.fullmatch(r"\d+", pred) and text.strip() != pred and grammar.counts_the_way(text):
        return _judge(pred, 0.0)
    return _judge(pred, float(_any_short(golds, pred, question) or _said_short(text, pred, golds, question)))


def _said_short(text: str, pred: str, golds: list[str], question: str) -> bool:
    """Return True if a name, an answer before its explanation, or an answer next to a refused one is right."""
    if pair := grammar.beside_refused(pred):
        said, refused = pair
        trace.read("answer beside a refused one", said)
        return _any_short(golds, said, question) and not _any_short(golds, refused, question)
    line = text.rsplit("\n", 1)[-1]
    if any(states_division(gold, line) for gold in golds):
        return True
    said = text and (grammar.named(text) or grammar.text_before_explanation(text))
    return bool(said) and _any_short(golds, trace.read("name, or answer before its explanation", said), question)


_SCORE = {
    "choice": _choice,
    "multiple_choice": _multiple,
    "true_false": _true_false,
    "blanks": _blanks,
    "short": _short,
}


def scorer(rest: str) -> MathScorer:
    """Return the scorer of ``k12`` and ``k12/<anything>``. Raises DataError for a longer word that begins with
    ``k12``."""
    if rest and rest[0] not in "/_-.":
        raise DataError(f"data_source 'k12{rest}' has no verifier; call it k12/{rest}, or set reward.path")
    _warm()
    return score
