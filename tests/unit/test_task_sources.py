"""Files of tasks in verl's, slime's and others' columns, several of them, a user's function, templates, filters."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from megarl.buffer.store import Store
from megarl.config import Config, compose, load_resolved, save_resolved
from megarl.config.rewards import JudgeConfig
from megarl.config.taskset import SourceConfig, TasksetConfig
from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Task
from megarl.run.checks import job as checks
from megarl.run.checks import tasksets
from megarl.run.launch.job import fill_store
from megarl.tasks import difficulty_of, place_of_row, processed, read_rows, read_tasks, write_rows
from tests.unit.small_job import config_of, refused
from tests.unit.small_rows import write

GSM8K = {"question": "Natalia sold 72 clips. How many?", "answer": "All of them.\n#### 72", "level": 3}
SLIME = {"prompt": "1 + 1 =", "label": "2", "metadata": {"level": 1}}
COLUMNS = {"prompt": "question", "ground_truth": "answer"}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_columns_of_an_hf_dataset(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"d.{suffix}", [GSM8K])
    columns = COLUMNS | {"extra_info.level": "level"}
    [task] = read_rows(path, split="train", columns=columns, data_source="openai/gsm8k")
    assert task.prompt == ({"role": "user", "content": GSM8K["question"]},)
    assert (task.data_source, task.ground_truth, task.extra_info) == ("openai/gsm8k", GSM8K["answer"], {"level": 3})


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_rows_of_slime(tmp_path: Path, suffix: str) -> None:
    rows = [SLIME, SLIME | {"metadata": {"level": 2}}]
    tasks = read_rows(write(tmp_path / f"d.{suffix}", rows), split="train", data_source="math")
    assert [task.extra_info for task in tasks] == [{"level": 1}, {"level": 2}]
    assert tasks[0].prompt == ({"role": "user", "content": "1 + 1 ="},) and tasks[0].ground_truth == "2"


def test_a_rows_own_data_source_counts(tmp_path: Path) -> None:
    rows = [SLIME | {"data_source": "math/own"}, SLIME | {"data_source": None}]
    tasks = read_rows(write(tmp_path / "d.jsonl", rows), data_source="math")
    assert [task.data_source for task in tasks] == ["math/own", "math"]


@pytest.mark.parametrize(
    ("columns", "error", "words"),
    [
        ({"answer": "answer"}, ConfigError, r"taskset.columns has 'answer', which is not a field .* ground_truth"),
        (
            {"prompt": "quest"},
            DataError,
            r"d.jsonl: taskset.columns.prompt=quest: there is no such column; .*'question'",
        ),
        ({"prompt": "question"}, DataError, r"d.jsonl: column 'reward_model' is missing"),
        (COLUMNS | {"prompt": "level"}, DataError, r"d.jsonl: line 1: prompt must be a non-empty list"),
    ],
)
def test_columns_that_cannot_be(tmp_path: Path, columns: Any, error: type[Exception], words: str) -> None:
    path = write(tmp_path / "d.jsonl", [GSM8K])
    with pytest.raises(error, match=words):
        read_rows(path, columns=columns, data_source="math")


def test_rows_without_a_data_source_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="column 'data_source' is missing"):
        read_rows(write(tmp_path / "d.jsonl", [SLIME]))


def two_files(tmp_path: Path) -> TasksetConfig:
    write(tmp_path / "a.jsonl", [SLIME, SLIME | {"prompt": "2 + 2 ="}])
    write(tmp_path / "b.parquet", [GSM8K])
    train = {
        "sums": SourceConfig(str(tmp_path / "a.jsonl"), 3.0, data_source="math"),
        "words": SourceConfig(str(tmp_path / "b.parquet"), columns=COLUMNS, data_source="openai/gsm8k"),
    }
    return TasksetConfig(train=train)


def test_several_files_of_different_columns(tmp_path: Path) -> None:
    taskset = two_files(tmp_path)
    tasks = read_tasks(taskset, "train")
    assert [task.task_id for task in tasks] == ["train/sums/0", "train/sums/1", "train/words/0"]
    assert [task.data_source for task in tasks] == ["math", "math", "openai/gsm8k"]
    places = [place_of_row(taskset, "train", task) for task in tasks]
    assert places == [f"{tmp_path}/a.jsonl: line 1", f"{tmp_path}/a.jsonl: line 2", f"{tmp_path}/b.parquet: row 1"]


def test_sources_on_the_command_line(tmp_path: Path) -> None:
    override = (
        f"taskset.train={{easy: {{path: {tmp_path}/a.parquet, weight: 3}}, hard: {{path: {tmp_path}/b.parquet}}}}"
    )
    config = compose(["experiment=quickstart", override, "taskset.columns={prompt: question, extra_info.n: n}"])
    assert config.taskset.train == {
        "easy": SourceConfig(f"{tmp_path}/a.parquet", 3.0),
        "hard": SourceConfig(f"{tmp_path}/b.parquet"),
    }
    assert config.taskset.columns == {"prompt": "question", "extra_info.n": "n"}
    save_resolved(config, tmp_path / "resolved.json")
    assert load_resolved(tmp_path / "resolved.json") == config


def test_a_list_of_files_is_named_after_them() -> None:
    def sources(files: str) -> Any:
        return compose(["experiment=quickstart", f"taskset.eval={files}"]).taskset.eval

    assert sources("[a.parquet,/data/b-1.2.jsonl]") == {
        "a": SourceConfig("a.parquet"),
        "b-1_2": SourceConfig("/data/b-1.2.jsonl"),
    }
    assert list(sources("[gsm8k/test.parquet,math/test.parquet]")) == ["gsm8k_test", "math_test"]
    for files, words in (("[a/x.parquet,a/x.jsonl]", "two files have one name"), ("[1,2]", "is no list of files")):
        with pytest.raises(ConfigError, match=words):
            sources(files)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("{a: {path: x, weight: 0}}", r"taskset.train.a.weight=0 must be above 0"),
        ("{a: {weight: 2}}", r"no value for taskset.train.a.path"),
        ("{a: {file: x}}", r"unknown setting 'taskset.train.a.file'"),
        ("{a/b: {path: x}}", r"a source is called 'a/b'; take a name of letters"),
        ("{}", r"names no file"),
    ],
)
def test_sources_that_cannot_be(train: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compose(["experiment=quickstart", f"taskset.train={train}"])


def task(content: str, **more: Any) -> Task:
    return Task("train/0", "math", ({"role": "user", "content": content},), "", {"ground_truth": "2"}, **more)


def of_file(tmp_path: Path, text: str, **settings: Any) -> TasksetConfig:
    (tmp_path / "mine.py").write_text(text)
    return TasksetConfig(train=str(tmp_path / "d.parquet"), process=str(tmp_path / "mine.py"), **settings)


PROCESS = """
from dataclasses import replace

def process(task):
    if "drop" in task.question:
        return None
    return replace(task, task_id="mine", extra_info={"length": len(task.question)})
"""


def test_a_function_changes_and_drops_tasks(tmp_path: Path) -> None:
    dropped: Counter[str] = Counter()
    found = processed([task("drop me"), task("four")], of_file(tmp_path, PROCESS), "train", dropped)
    assert [(t.task_id, t.extra_info) for t in found] == [("train/0", {"length": 4})] and dropped == {"process": 1}


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("x = 1", ConfigError, r"taskset.process=.*mine.py has no def process\(task\)"),
        ("def process(task):\n    return 1 / 0", DataError, r"d.parquet: row 1: .*ZeroDivisionError: .*mine.py:2"),
        ("def process(task):\n    return 3", DataError, r"d.parquet: row 1: .* must return a .*Task .*got int"),
        (
            "def process(task):\n    task.extra_info['a'] = {1}\n    return task",
            DataError,
            r"row 1: .* JSON values .*tolist",
        ),
        ("def process(task):\n    task.extra_info[(1, 2)] = 3\n    return task", DataError, r"row 1: .* JSON values"),
        ("def process(task): pass", DataError, r"drops all 1 rows of taskset.train"),
    ],
)
def test_functions_that_cannot_be(tmp_path: Path, text: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        processed([task("a")], of_file(tmp_path, text), "train")


RATE = """
from dataclasses import replace

async def process(task, ask):
    reply = await ask(f"How hard is {task.question}?")
    return replace(task, extra_info={"level": int(reply)}) if reply != "9" else None
"""


class Rater:
    """A server whose model writes the number of words of the prompt."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def chat(self, request: web.Request) -> web.Response:
        [message] = (await request.json())["messages"]
        self.asked.append(message["content"])
        text = str(len(message["content"].split()))
        return web.json_response({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Run in a thread; yield the base URL."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        server = TestServer(app)
        asyncio.run_coroutine_threadsafe(server.start_server(), loop).result()
        yield str(server.make_url("/v1"))
        asyncio.run_coroutine_threadsafe(server.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def test_a_model_rates_tasks_once(tmp_path: Path) -> None:
    rater, dropped = Rater(), Counter[str]()
    rows = [task("1 + 1"), task("a b"), task("1 2 3 4 5 6")]
    with rater.serve() as url:
        judge = JudgeConfig(url=url, model="m", cache=str(tmp_path / "cache.db"))
        for _ in range(2):
            found = processed(rows, of_file(tmp_path, RATE), "train", dropped, judge)
    assert [t.extra_info for t in found] == [{"level": 6}, {"level": 5}] and dropped == {"process": 2}
    assert sorted(rater.asked) == ["How hard is 1 + 1?", "How hard is 1 2 3 4 5 6?", "How hard is a b?"]


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        (JudgeConfig(), "reward.judge.url=None, give a server's base URL"),
        (JudgeConfig(url="rollout"), "before any engine runs"),
        (JudgeConfig(url="http://127.0.0.1:9/v1"), "reward.judge.cache=null"),
    ],
)
def test_models_that_cannot_be_asked(tmp_path: Path, judge: JudgeConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        processed([task("a")], of_file(tmp_path, RATE), "train", None, judge)


def test_a_model_that_does_not_answer(tmp_path: Path) -> None:
    judge = JudgeConfig(url="http://127.0.0.1:9/v1", model="m", retries=0, cache=str(tmp_path / "cache.db"))
    with pytest.raises(DataError, match=r"d.parquet: row 1: taskset.process: RequestFailed: .* cannot be reached"):
        processed([task("a")], of_file(tmp_path, RATE), "train", None, judge)


def test_templates_of_prompts() -> None:
    taskset = TasksetConfig(prompt_template="Solve {prompt} {now}!", system_prompt="Be short.")
    own = Task("train/1", "math", ({"role": "system", "content": "S"}, {"role": "user", "content": "b"}), "", {})
    first, second = processed([task("1 {x}"), own], taskset, "train")
    assert first.prompt == (
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Solve 1 {x} {now}!"},
    )
    assert [message["content"] for message in second.prompt] == ["S", "Solve b {now}!"]
    plain = task("a")
    assert processed([plain], TasksetConfig(), "train") == [plain]


def test_the_difficulty_of_a_task() -> None:
    found = task("a", extra_info={"level": 3, "meta": {"n": 0.5}, "text": "five", "yes": True, "nan": float("nan")})
    keys = ("level", "meta.n", "text", "yes", "nan", "none", "level.n")
    assert [difficulty_of(found, key) for key in keys] == [3.0, 0.5, None, None, None, None, None]


def test_duplicates_are_equal_up_to_spaces(tmp_path: Path) -> None:
    rows = [task("1 + 1 ="), task(" 1  + 1\n="), task("1 + 1 =", images=(b"x",)), task("1 + 1 = ?"), task("1 + 1 =")]
    config = Config(taskset=TasksetConfig(duplicates="drop"))
    assert tasksets.without_duplicates(config, "train", rows) == [rows[0], rows[2], rows[3]]
    assert tasksets.without_duplicates(config, "eval", rows) == rows
    assert tasksets.without_duplicates(Config(), "train", rows) == rows


def copied(prepared: Path, path: Path, *more: Task) -> str:
    write_rows(path, [*read_rows(prepared / "data" / "train.parquet", split="train"), *more])
    return f"taskset.train={path}"


def test_what_is_left_out_is_counted_in_the_store(prepared: Path, tmp_path: Path) -> None:
    rows = read_rows(prepared / "data" / "train.parquet", split="train")
    long = "7 + " * 30 + "7 ="
    override = copied(prepared, tmp_path / "t.parquet", rows[0], task(long), task("12 + 3 ="))
    text = PROCESS.replace("drop", "12 + 3 =")
    (tmp_path / "mine.py").write_text(text)
    config = config_of(
        Path(shutil.copytree(prepared, tmp_path / "run")),  # which gets a start's files
        override,
        f"taskset.process={tmp_path}/mine.py",
        "taskset.duplicates=drop",
        "taskset.overlong_prompts=drop",
        f"store.url=sqlite:///{tmp_path}/store.db",
        "reward.routes={math: math}",
    )
    found = checks.check(config)
    assert found["train"].dropped == {"process": 1, "duplicate": 1, "overlong_prompt": 1}
    assert len(found["train"].tasks) == len(rows) and found["eval"].dropped == {}
    fill_store(config, found, 1, config)
    fill_store(config, found, 2, config)
    events = [event["data"] for event in Store(config.store.url).journal.events("tasks")]
    expected = {"split": "train", "tasks": 30, "dropped": found["train"].dropped}
    assert events == [expected, {"split": "eval", "tasks": 10, "dropped": {}}], "once, not at every start"
    refused(DataError, config_of(prepared, override), "t.parquet: row 32: prompt has", "rollout.max_prompt_tokens is")


def test_limits_of_difficulty(prepared: Path, tmp_path: Path) -> None:
    limits = ("taskset.difficulty=index", "taskset.min_difficulty=5", "taskset.max_difficulty=20")
    found = checks.check(config_of(prepared, *limits))
    assert len(found["train"].tasks) == 16 and found["train"].dropped == {"difficulty": 14}
    refused(
        DataError, config_of(prepared, "taskset.difficulty=nothing"), "row 1", "extra_info.nothing must be a number"
    )
    words = ("leave none of the 30 tasks", "extra_info.index is 0 to 29")
    refused(DataError, config_of(prepared, "taskset.difficulty=index", "taskset.min_difficulty=50"), *words)


def test_a_source_with_too_few_rows_for_a_step(prepared: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "few.parquet", read_rows(prepared / "data" / "train.parquet", split="train")[:1])
    both = f"{{few: {{path: {tmp_path}/few.parquet}}, all: {{path: {prepared}/data/train.parquet}}}}"
    steps = ("trainer.tasks_per_step=4", "trainer.updates_per_step=1")
    words = ("taskset.train.few.weight=1 takes up to 2 tasks of a step", "few.parquet has 1 that are trained on")
    refused(ConfigError, config_of(prepared, f"taskset.train={both}", *steps), *words)
    missing = both.replace("few.parquet", "none.parquet")
    refused(ConfigError, config_of(prepared, f"taskset.train={missing}"), "taskset.train.few.path=", "no such file")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["taskset.order=curriculum"], "taskset.order=curriculum needs taskset.difficulty"),
        (["taskset.order=curriculum", "taskset.difficulty=index"], "needs taskset.curriculum_steps"),
        (["taskset.curriculum_steps=4"], "taskset.curriculum_steps=4 does nothing with taskset.order=shuffled"),
        (["taskset.priority_floor=0.5"], "taskset.priority_floor=0.5 does nothing"),
        (["taskset.min_difficulty=1"], "need taskset.difficulty"),
        (["taskset.difficulty=n", "taskset.min_difficulty=2", "taskset.max_difficulty=1"], "no task is in between"),
        (['taskset.prompt_template="Solve"'], "has no {prompt}, where the prompt goes"),
        (["taskset.overlong_prompts=drop", "rollout.max_prompt_tokens=null"], "needs rollout.max_prompt_tokens"),
        (["taskset.columns={question: q}"], "taskset.columns has 'question'"),
        (["taskset.eval={a: {path: x, weight: 2}}"], "evaluations take every task"),
        (["algorithm=dpo", "taskset.order=file"], "taskset.order=file is for tasks"),
        (["algorithm=sft", "taskset.train={a: {path: x}}"], "an offline job reads one"),
    ],
)
def test_settings_that_do_nothing_or_contradict(prepared: Path, overrides: list[str], words: str) -> None:
    refused(ConfigError, config_of(prepared, *overrides), words)
