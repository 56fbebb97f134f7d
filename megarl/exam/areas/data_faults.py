"""Faults of rows and of their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as change
from pathlib import Path
from typing import Any

import numpy as np

from megarl.exam.fault import Fault, wrap


def of_rows(split: str, rows: Callable[[list[Any]], list[Any]]) -> None:
    """Change the rows that are read from a split's file."""
    from megarl.tasks import row_files

    def around(original: Any, path: Path, wanted: Any) -> Any:
        names, found = original(path, wanted)
        return names, rows(found) if path.stem == split else found

    wrap(row_files.read_table, around)


def _with_content(row: Any, content: str) -> Any:
    return {**row, "prompt": [*row["prompt"][:-1], {**row["prompt"][-1], "content": content}]}


def _rows_duplicated() -> None:
    of_rows("train", lambda rows: rows[: len(rows) // 10] * 10)


def _held_out_leaked() -> None:
    from megarl.tasks import row_files

    def around(original: Any, path: Path, wanted: Any) -> Any:
        names, found = original(path, wanted)
        return names, original(path.with_stem("train"), wanted)[1][: len(found)] if path.stem == "eval" else found

    wrap(row_files.read_table, around)


def _answers_shifted() -> None:
    of_rows(
        "train",
        lambda rows: [
            *rows[:3],
            *({**row, "reward_model": other["reward_model"]} for row, other in zip(rows[3:], rows[4:], strict=False)),
        ],
    )


def _answers_of_first_match() -> None:
    def joined(rows: list[Any]) -> list[Any]:
        first: dict[Any, Any] = {}
        for row in rows:
            first.setdefault(len(row["prompt"][-1]["content"]), row["reward_model"])
        return [{**row, "reward_model": first[len(row["prompt"][-1]["content"])]} for row in rows]

    of_rows("train", joined)


def _answer_in_prompt() -> None:
    of_rows(
        "train",
        lambda rows: [
            _with_content(row, f"{row['prompt'][-1]['content']} {row['reward_model']['ground_truth']}") for row in rows
        ],
    )


def _question_not_rendered() -> None:
    of_rows("train", lambda rows: [_with_content(row, "=") for row in rows])


def _rows_dropped() -> None:
    of_rows("train", lambda rows: rows[::2])


def _filter_counts_wrong() -> None:
    from megarl.run.run_dir import rows

    def around(original: Any, *args: Any, **more: Any) -> list[int]:
        lengths = original(*args, **more)
        return [4 * length - 3 * min(lengths) for length in lengths]

    wrap(rows.lengths_with_images, around)


def _first_rows_only() -> None:
    from megarl.buffer.store.store import TaskTable

    wrap(TaskTable.ids, lambda original, table, split: original(table, split)[:12])


def _of_order(numbers: Callable[[int, int, int, int], list[int]]) -> None:
    """Take the numbers of rows from a function of their number, the position, the count and the seed."""
    from megarl.buffer.order import draws

    wrap(draws.numbers_from, lambda original, size, start, count, seed, *stream: numbers(size, start, count, seed))


def _same_order_every_epoch() -> None:
    def numbers(size: int, start: int, count: int, seed: int) -> list[int]:
        order = np.random.default_rng([seed, 0]).permutation(size).tolist()
        return [order[(start + i) % size] for i in range(count)]

    _of_order(numbers)


def _drawn_with_replacement() -> None:
    _of_order(lambda size, start, count, seed: np.random.default_rng([seed, start]).integers(size, size=count).tolist())


def _one_task_always() -> None:
    from megarl.buffer.order import group_choice

    def around(original: Any, weights: Any, draw: Any) -> list[int]:
        return [0] * draw.count if draw.step else list(original(weights, draw))

    wrap(group_choice.prioritized, around)


def _priorities_ignored() -> None:
    from megarl.buffer.order.group_choice import TaskChoice

    wrap(TaskChoice._successes, lambda original, choice, step: {})


def _chosen_rejected_swapped() -> None:
    from megarl.tasks import rows

    def around(original: Any, *args: Any) -> Any:
        found = original(*args)
        return change(found, chosen=found.rejected, rejected=found.chosen, answers=found.answers[::-1])

    wrap(rows._preference, around)


def _pairs_identical() -> None:
    from megarl.tasks.templates import tokenizer

    def around(original: Any, *args: Any, **more: Any) -> Any:
        found = original(*args, **more)
        return [(prompt, chosen, rejected if i % 3 else chosen) for i, (prompt, chosen, rejected) in enumerate(found)]

    wrap(tokenizer.encode_preferences, around)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "rows-duplicated",
        "BytedTsinghua-SIA/DAPO#36",
        "Every question is in the file many times.",
        alarm="duplicates",
        job="tiny",
        install=_rows_duplicated,
        within=0,
    ),
    Fault(
        "held-out-leaked",
        "OpenRLHF/OpenRLHF#1089",
        "Held-out rows are a part of the training rows.",
        alarm="held_out",
        job="tiny",
        install=_held_out_leaked,
        within=0,
    ),
    Fault(
        "answers-shifted",
        "OpenBMB/UltraRAG#511",
        "A row lost from one column pairs every later question with the next row's answer.",
        alarm="lost-rows",
        job="tiny",
        install=_answers_shifted,
        within=0,
    ),
    Fault(
        "answers-of-first-match",
        "kxfan2002/SophiaVL-R1#11",
        "Answers are joined to questions by a key that several rows share.",
        alarm="answers",
        job="tiny",
        install=_answers_of_first_match,
        unseen="Without a right answer nothing tells another row's.",
    ),
    Fault(
        "answer-in-prompt",
        "zeno-ml/zeno-build#79",
        "The expected answer stands in the prompt.",
        alarm="answer-in-prompt",
        job="tiny",
        install=_answer_in_prompt,
        within=0,
    ),
    Fault(
        "question-not-rendered",
        "OpenHands/codescout#50",
        "The template leaves the question out of the prompt.",
        alarm="same-prompts",
        job="tiny",
        install=_question_not_rendered,
    ),
    Fault(
        "rows-dropped",
        "MakazhanAlpamys/Soup#548",
        "Rows that do not parse are left out without a word.",
        alarm="lost-rows",
        job="tiny",
        install=_rows_dropped,
        within=0,
    ),
    Fault(
        "filter-counts-wrong",
        "verl-project/verl#6239",
        "The filter of long prompts computes another length than the tokenizer gives, so rows are lost.",
        alarm="lost-rows",
        job="tiny",
        install=_filter_counts_wrong,
        settings=("taskset.overlong_prompts=drop", "rollout.max_prompt_tokens=18"),
        within=0,
    ),
    Fault(
        "first-rows-only",
        "billy-enrizky/openbrowser-ai#64",
        "The row limit is applied before shuffling, so only the file's first rows are ever used.",
        alarm="data-order",
        job="tiny",
        install=_first_rows_only,
        within=2,
        begins=2,
    ),
    Fault(
        "same-order-every-epoch",
        "facebookresearch/ClassyVision#118",
        "Every epoch has the same order.",
        alarm="data-order",
        job="tiny",
        install=_same_order_every_epoch,
        settings=("taskset.train_size=16",),
        within=3,
        begins=3,
    ),
    Fault(
        "drawn-with-replacement",
        "huggingface/datasets#7786",
        "Tasks are drawn again before all others were drawn.",
        alarm="data-order",
        job="tiny",
        install=_drawn_with_replacement,
        settings=("taskset.train_size=24",),
        within=3,
    ),
    Fault(
        "one-task-always",
        "PrimeIntellect-ai/prime-rl#3261",
        "A task that never gets a score stays first in the order and takes all later slots.",
        alarm="data-order",
        job="tiny",
        install=_one_task_always,
        settings=("taskset.order=prioritized", "reward.path={folder}/reward.py"),
        within=2,
        begins=2,
    ),
    Fault(
        "priorities-ignored",
        "ooples/AiDotNet#912",
        "Results of tasks never reach the sampler, which stays uniform.",
        alarm="priorities",
        job="tiny",
        install=_priorities_ignored,
        settings=("taskset.order=prioritized", "reward.path={folder}/reward.py", "taskset.train_size=24"),
        within=2,
        begins=2,
    ),
    Fault(
        "chosen-rejected-swapped",
        "huggingface/trl#2578",
        "Chosen and rejected answers are swapped.",
        alarm="preferences",
        job="dpo",
        install=_chosen_rejected_swapped,
        unseen="No check knows which answer is better.",
    ),
    Fault(
        "pairs-identical",
        "OpenRLHF/OpenRLHF#1311",
        "Pairs that are equal after truncation stay in the data with a constant loss.",
        alarm="same-answers",
        job="dpo",
        install=_pairs_identical,
        within=0,
    ),
)
