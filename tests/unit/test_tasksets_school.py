"""Rows for megarl's own verifiers: what a teacher writes is right, what a careless one writes is wrong, and each preset
holds its rows."""

from __future__ import annotations

import ast
import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config import compose, config_dir
from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Preference, Task
from megarl.rewards import compute_score
from megarl.run.run_dir.prepare import prepare_data
from megarl.tasks import generate, read_preferences, read_recipe, read_rows

PRESETS = sorted(path.stem for path in (config_dir() / "taskset").glob("*.yaml"))
SIZES = {"train": 300, "eval": 100, "warm_start": 300}
SAMPLE = 20
Taught = dict[str, list[tuple[Task, str, str]]]
NEEDS_SANDBOX = [pytest.param(name, marks=pytest.mark.sandbox) if name == "code" else name for name in PRESETS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("school")
    for name in PRESETS:
        (folder / name).mkdir()
        generate(name, paths(folder / name), SIZES, seed=3, options={"slip_percent": 70})
    return folder


def paths(folder: Path) -> dict[str, Path]:
    return {split: folder / f"{split}.parquet" for split in SIZES}


def rows(folder: Path, name: str, split: str = "train") -> list[Task]:
    return read_rows(paths(folder / name)[split], require_response=split == "warm_start")


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    """Demonstrations with the right and the careless answer."""
    path = {"warm_start": tmp_path_factory.mktemp("taught") / "warm_start.parquet"}
    found = {}
    for name in PRESETS:
        right, wrong = (
            generate(name, path, SIZES, seed=3, options={"slip_percent": share})["warm_start"] for share in (0, 100)
        )
        found[name] = [
            (task, task.response or "", other.response or "") for task, other in zip(right, wrong, strict=True)
        ]  # type: ignore[union-attr]
    return found


def asked(row: Task | Preference) -> str:
    return row.prompt[0]["content"]


def status(task: Task, answer: str) -> str:
    verdict = compute_score(task.data_source, answer, task.ground_truth, task.extra_info)
    assert verdict["score"] == float(verdict["status"] == "ok"), verdict
    return str(verdict["status"])


# ---------------------------------------------------------------- the rows and their verifiers


@pytest.mark.parametrize("name", NEEDS_SANDBOX)
def test_the_teacher_is_right_and_the_careless_one_wrong(taught: Taught, name: str) -> None:
    for task, right, wrong in taught[name][:SAMPLE]:
        assert (status(task, right), status(task, wrong)) == ("ok", "wrong"), (right, wrong)


@pytest.mark.parametrize("name", PRESETS)
def test_the_share_of_slips(folder: Path, taught: Taught, name: str) -> None:
    found = [
        (task.response, right, wrong)
        for task, (_, right, wrong) in zip(rows(folder, name, "warm_start"), taught[name], strict=True)
    ]
    assert all(response in (right, wrong) for response, right, wrong in found)
    assert 0.6 < sum(response == wrong for response, _, wrong in found) / len(found) < 0.8
    assert all(task.response is None for task in rows(folder, name, "train"))


def test_mathematics_is_compared_by_value(folder: Path) -> None:
    kinds = set()
    for task in rows(folder, "math")[: 3 * SAMPLE]:
        gold = task.ground_truth
        whole = "." not in gold
        kinds.add((whole, asked(task).split()[0]))
        tenths = round(float(gold) * 10)
        for same in (
            rf"\boxed{{{gold}}}",
            rf"So it is \boxed{{{tenths}/10}}.",
            rf"$\boxed{{\frac{{{tenths}}}{{10}}}}$",
            f"The answer is {gold}.",
        ):
            assert status(task, same) == "ok", (gold, same)
        copied = re.sub(r"^What is (.*)\?.*$", r"\1", asked(task))
        assert status(task, rf"\boxed{{{copied}}}") == "wrong", "the question is no answer"
    assert kinds == {(True, "What"), (True, "Solve"), (False, "What")}


def test_school_questions_are_of_both_kinds(folder: Path) -> None:
    kinds = {"choice": 0, "short": 0}
    for task in rows(folder, "k12"):
        info, gold = task.extra_info, task.ground_truth
        kinds[info["type"]] += 1
        if info["type"] == "short":
            continue
        assert len(set(info["options"])) == 4 and info["options"]["ABCD".index(gold)] == str(sum_of(task))
        assert all(f"{letter}. {option}" in asked(task) for letter, option in zip("ABCD", info["options"], strict=True))
    assert min(kinds.values()) > 0.3 * SIZES["train"]
    for task in rows(folder, "k12")[:SAMPLE]:
        if task.extra_info["type"] == "choice":
            text = task.extra_info["options"]["ABCD".index(task.ground_truth)]
            for same in (task.ground_truth, f"({task.ground_truth})", text, f"{task.ground_truth}. {text}"):
                assert status(task, same) == "ok"
            assert {status(task, letter) for letter in "ABCD" if letter != task.ground_truth} == {"wrong"}
        else:
            assert status(task, f"{task.ground_truth}") == status(task, f"Answer: {task.ground_truth} cards") == "ok"


def sum_of(task: Task) -> int:
    return sum(map(int, terms(task)))


def terms(task: Task) -> tuple[str, ...]:
    """The numbers with their signs that a question of k12 or code is about, in whichever words."""
    text = asked(task).partition("?")[0]
    text = text.replace("gives ", "- ").replace("minus ", "- ").replace("gets ", "+ ").replace("plus ", "+ ")
    return tuple(sign + number for sign, number in re.findall(r"(-|\+|) ?(\d+)", text))


@pytest.mark.parametrize("name", ["k12", "code"])
def test_a_held_out_sum_is_held_out_in_every_form(folder: Path, name: str) -> None:
    held_out = {terms(task) for task in rows(folder, name, "eval")}
    assert len(held_out) == SIZES["eval"] and {len(sum_) for sum_ in held_out} == {2}
    for split in ("train", "warm_start"):
        assert not held_out & {terms(task) for task in rows(folder, name, split)}


def test_programs_are_python_and_written_in_two_ways(folder: Path, taught: Taught) -> None:
    answers = [right for _, right, _ in taught["code"]]
    for answer in answers:
        ast.parse(answer)
    turned = ["return a *" in answer for answer in answers]
    assert any(turned) and not all(turned)
    kinds = {"fn_name" in task.ground_truth for task in rows(folder, "code")}
    assert kinds == {True, False}, "calls and assertions"


@pytest.mark.sandbox
def test_programs_are_judged_by_what_they_do(folder: Path) -> None:
    for task in rows(folder, "code")[:6]:
        a, b = map(int, terms(task))
        for same in (
            f"def f(a, b):\n    return {b} * b + {a} * a",
            f"f = lambda x, y: {a} * x + y * ({b})",
            f"```python\ndef f(a, b): return a*{a} + b*{b}\n```",
        ):
            assert status(task, same) == "ok"
        for wrong in (
            f"def f(a, b):\n    return {a} * b + {b} * a",
            f"def f(a, b):\n    return {a} * a",
            "def g(a, b):\n    return 1",
            "def f(a, b):\n    return",
        ):
            assert status(task, wrong) == "wrong"


PIECES = [
    "\\",
    "boxed",
    "{",
    "}",
    "x=",
    "1",
    "7",
    ".",
    "-",
    "+",
    " pens",
    "Answer",
    ":",
    " A",
    " B",
    "<|unk|>",
    "\n    ",
    "def",
    " f",
    "(",
    "a",
    ", ",
    "b",
    "):",
    "return",
    " * ",
    "not",
]


def _junk() -> st.SearchStrategy[str]:
    """What an untrained model says: tokens of the right texts in no order, or anything."""
    return st.one_of(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.text(max_size=30))


@pytest.mark.parametrize("name", ["math", "k12"])
def test_junk_is_wrong_and_no_error(folder: Path, name: str) -> None:
    tasks = rows(folder, name)[:SAMPLE]

    @settings(max_examples=150)
    @given(st.sampled_from(tasks), _junk())
    def check(task: Task, answer: str) -> None:
        assert status(task, answer) in ("ok", "wrong")

    check()


@pytest.mark.sandbox
def test_junk_programs_are_wrong_and_no_error(folder: Path) -> None:
    dice = random.Random(1)
    fixed = ["", "\x00", "return 1", "def f(a, b):\n    return" + "(" * 200, "f = 1", "\ud800", "exit()"]
    for task, answer in zip(
        rows(folder, "code"), [*fixed, *("".join(dice.choices(PIECES, k=20)) for _ in range(SAMPLE))], strict=False
    ):
        assert status(task, answer) == "wrong", answer


@pytest.mark.parametrize("name", NEEDS_SANDBOX)
def test_preferences(tmp_path: Path, folder: Path, name: str) -> None:
    path = tmp_path / "train.parquet"
    written = generate(name, {"train": path}, SIZES, seed=3, kind="preferences")["train"]
    found = read_preferences(path)
    assert found == written
    tasks = {asked(task): task for task in rows(folder, name)}
    for pair in found[: SAMPLE // 2]:
        assert isinstance(pair, Preference)
        task = tasks[asked(pair)]
        assert (status(task, pair.chosen), status(task, pair.rejected)) == ("ok", "wrong")


# ---------------------------------------------------------------- files and options


@pytest.mark.parametrize("name", PRESETS)
def test_files_are_read_back_and_made_again_to_the_byte(folder: Path, tmp_path: Path, name: str) -> None:
    again = generate(name, paths(tmp_path), SIZES, seed=3, options={"slip_percent": 70})
    for split, path in paths(folder / name).items():
        assert rows(folder, name, split) == again[split]
        assert path.read_bytes() == paths(tmp_path)[split].read_bytes()
        made_with = read_recipe(path)
        assert (
            made_with is not None
            and made_with["taskset.generate"] == name
            and made_with["taskset.options.slip_percent"] == 70
        )
    held_out = {asked(task) for task in rows(folder, name, "eval")}
    assert not held_out & {asked(task) for split in ("train", "warm_start") for task in rows(folder, name, split)}


@pytest.mark.parametrize("name", PRESETS)
def test_longer_sums(tmp_path: Path, name: str) -> None:
    options = {"min_terms": 3, "max_terms": 4, "max_number": 40}
    for task in generate(name, {"train": tmp_path / "t.parquet"}, {"train": 50}, seed=1, options=options)["train"]:
        assert isinstance(task, Task)
        if name == "code":
            assert len(terms(task)) in (3, 4)
        elif name == "k12" and task.extra_info["type"] == "short":
            assert sum_of(task) == int(task.ground_truth)


@pytest.mark.usefixtures("soon_dry")
def test_an_unreachable_size_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"taskset.train_size=300 cannot be reached: k12 with"):
        generate("k12", {"train": tmp_path / "t.parquet"}, {"train": 300}, seed=1, options={"max_digits": 1})


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    path = {"train": tmp_path / "t.parquet"}
    with pytest.raises(ConfigError, match=r"taskset.options.allow_negation is not an option of math; known: min_terms"):
        generate("math", path, SIZES, seed=1, options={"allow_negation": 1})
    with pytest.raises(ConfigError, match=r"code takes sums of 2 to 5 terms, got 2 to 6"):
        generate("code", path, SIZES, seed=1, options={"max_terms": 6})
    with pytest.raises(ConfigError, match=r"k12 takes sums of 2 to 100 terms, got 1 to 2"):
        generate("k12", path, SIZES, seed=1, options={"min_terms": 1})


# ---------------------------------------------------------------- the presets


@pytest.mark.parametrize("name", PRESETS)
def test_one_override_chooses_the_tasks(name: str) -> None:
    config = compose(["experiment=quickstart", f"taskset={name}"])
    assert config == compose([f"taskset={name}", "experiment=quickstart"]), "in whichever order"
    plain = compose(["experiment=quickstart"])
    assert (config.taskset.generate, config.run.dir) == (name, f"runs/{name}") and plain.taskset.generate == "chain_sum"
    assert (
        dataclasses.replace(config.taskset, generate="chain_sum", train=plain.taskset.train).options
        == plain.taskset.options
    )
    assert compose([f"taskset={name}", "trainer.tasks_per_step=4", "run.name=mine"]).trainer.tasks_per_step == 4, (
        "one's own setting wins"
    )


def test_a_taskset_that_is_not_there() -> None:
    with pytest.raises(
        ConfigError, match=r"no configs/taskset/maths.yaml; did you mean 'math'\? there are code, k12, math"
    ):
        compose(["taskset=maths"])


@pytest.mark.parametrize("name", PRESETS)
def test_the_preset_has_room_for_its_rows(folder: Path, name: str) -> None:
    """Prompts and answers fit ``rollout``'s limits, and the tokenizer knows each of their characters."""
    from megarl.learn.models.from_scratch import UNK, train_tokenizer

    config: Any = compose([f"taskset={name}"])
    model, rollout = config.model.from_scratch, config.rollout
    assert rollout.max_prompt_tokens + rollout.max_response_tokens <= model.max_position_embeddings
    demonstrations = rows(folder, name, "warm_start")
    tokenizer = train_tokenizer([asked(task) for task in demonstrations], model.vocab_size)
    for task in demonstrations:
        prompt, answer = tokenizer.encode(asked(task)).tokens, tokenizer.encode(task.response or "").tokens
        assert UNK not in answer
        assert len(prompt) + 2 <= rollout.max_prompt_tokens, task
        assert len(answer) + 1 <= rollout.max_response_tokens, task


def test_other_tasks_are_made_anew(tmp_path: Path) -> None:
    """In a directory in which nothing was trained yet."""
    few = [f"run.dir={tmp_path}", *(f"taskset.{split}_size=20" for split in SIZES)]
    for name, options in (("math", []), ("k12", []), ("k12", ["taskset.options.max_number=50"])):
        prepare_data(compose([f"taskset={name}", *few, *options]))
        tasks = read_rows(tmp_path / "data" / "train.parquet")
        assert len(tasks) == 20 and {task.data_source for task in tasks} == {f"{name}/sums"}
    assert max(abs(int(number)) for task in tasks for number in terms(task)) <= 50
