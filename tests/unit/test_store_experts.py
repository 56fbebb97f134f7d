"""Expert experiences in the store: each once, in order, all of an import or nothing; and the rows that files and runs
give."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.buffer.store import ExpertExperience, Store
from megarl.cli import main
from megarl.core.errors import ConfigError
from megarl.core.schema import Reward
from megarl.run.checks.inputs import ExpertCheck
from megarl.run.launch.records import fill_experts
from megarl.run.run_dir.rows import from_source, read_experts, read_run
from megarl.tasks import ChatTokenizer, tokenizer_digest
from tests.stores import VERSION, expert, make_task, make_trajectory, rows
from tests.trajectories import one_turn
from tests.unit.small_job import SMALL, config_of

KILLED = """
import os, signal, sys
from megarl.buffer.store import Store
from tests.stores import expert
def advance(count):
    os.kill(os.getpid(), signal.SIGKILL)
Store(sys.argv[1]).experts.import_sources([("big", [expert(i) for i in range(2500)])], advance=advance)
"""


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    made: str = request.getfixturevalue("new_postgres")()
    return made


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    store = Store(store_url)
    yield store
    store.close()


def held(store: Store) -> list[str]:
    return [str(found.task.response) for part in store.experts.read() for found in part]


def test_each_row_is_stored_once_and_counted(store: Store) -> None:
    first = store.experts.import_sources(
        [("a", [expert(3), expert(1), expert(3, row=2)]), ("b", [expert(1), expert(0)])]
    )
    assert [each[:4] for each in first] == [(1, "a", 3, 2), (2, "b", 2, 1)]
    (again,) = store.experts.import_sources([("a", [expert(3), expert(1)])])
    assert (again.number, again.given, again.added) == (0, 2, 0)
    assert [each[:5] for each in store.experts.imports()] == [(1, "a", 3, 2, 2), (2, "b", 2, 1, 1)]
    assert store.experts.count() == 3
    assert held(store) == ["2", "4", "1"], "by import, then by row"


def test_scores_and_log_probs_come_back_exactly(store: Store) -> None:
    logp = np.array([-1e-42, -0.1, -3.4e38], np.float32)
    store.experts.import_sources([("a", [expert(0, score=0.1 + 0.2, teacher_logp=logp, tokenizer="t"), expert(1)])])
    ((first, second),) = store.experts.read()
    assert (first.score, first.tokenizer, second.score, second.teacher_logp) == (0.1 + 0.2, "t", None, None)
    assert first.teacher_logp is not None and first.teacher_logp.tobytes() == logp.tobytes()
    assert first.experience_id == expert(0).experience_id != second.experience_id


def test_a_message_and_template_options_come_back(store: Store) -> None:
    answer = {"role": "assistant", "content": "ä\0", "reasoning_content": "b"}
    task = replace(expert(0).task, answer=answer, response="ä\0", chat_template_kwargs={"enable_thinking": True})
    store.experts.import_sources([("a", [ExpertExperience(task), expert(0, row=1)])])
    ((found, _),) = store.experts.read()
    for name in ("prompt", "response", "answer", "chat_template_kwargs", "task_id"):
        assert getattr(found.task, name) == getattr(task, name)


def test_the_rows_of_the_setting_are_replaced_and_those_of_imports_stay(store: Store) -> None:
    store.experts.import_sources([("a", [expert(1)])])
    file = [expert(2, row=0), expert(1, row=1), expert(0, row=2)]
    assert store.experts.replace_source("f", file) is not None
    assert held(store) == ["2", "3", "1"]
    assert store.experts.replace_source("f", file) is None, "nothing has changed"
    assert store.experts.replace_source("f", [expert(0), expert(2)]) is not None
    assert held(store) == ["2", "1", "3"], "in the order of the new file"
    assert store.experts.replace_source("f", []) is not None
    assert held(store) == ["2"]


def test_many_rows_are_read_in_parts_in_order(store: Store) -> None:
    seen: list[int] = []
    store.experts.import_sources([("a", [expert(i) for i in range(2500)])], advance=seen.append)
    assert sum(seen) == 2500 and len(seen) > 2
    assert [len(part) for part in store.experts.read()] == [1000, 1000, 500]
    assert held(store) == [str(i + 1) for i in range(2500)]


def test_an_import_that_is_killed_leaves_nothing(store: Store, store_url: str) -> None:
    before = rows(store_url)
    killed = subprocess.run([sys.executable, "-c", KILLED, store_url], timeout=60, capture_output=True)
    assert killed.returncode == -9, killed.stderr
    assert rows(store_url) == before
    (done,) = store.experts.import_sources([("big", [expert(i) for i in range(2500)])])
    assert (done.number, done.added) == (1, 2500)


@pytest.mark.parametrize("write", ["import_sources", "replace_source"])
def test_a_commit_that_nobody_heard_of_is_not_repeated(store: Store, store_url: str, write: str) -> None:
    once, answers = store.database.write, list[Any]()

    def twice(work: Callable[..., Any]) -> Any:
        answers.append(once(lambda connection, again: work(connection, False)))
        found.append(rows(store_url))
        answers.append(once(lambda connection, again: work(connection, True)))
        return answers[-1]

    found: list[Any] = []
    store.database.write = twice  # type: ignore[assignment]
    if write == "import_sources":
        store.experts.import_sources([("a", [expert(0), expert(1)])])
    else:
        store.experts.replace_source("a", [expert(0), expert(1)])
    assert answers[0] == answers[1] and rows(store_url) == found[0]
    assert held(store) == ["1", "2"]


CHAT = {"messages": [{"role": "user", "content": "12 - 7 ="}, {"role": "assistant", "content": "5"}]}
TEXTS = {"prompt": "14 - 7 =", "completion": "7"}
VERL = {"prompt": [{"role": "user", "content": "19 - 7 ="}], "response": "12", "score": 1}


def write_jsonl(path: Path, *found: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return str(path)


def test_the_command_imports_every_format_and_refuses_all_for_one_row(
    prepared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    end = ["taskset.expert=null", "algorithm=mix", f"run.dir={prepared}", f"store.url=sqlite:///{tmp_path}/store.db"]
    good = [write_jsonl(tmp_path / f"{i}.jsonl", row) for i, row in enumerate((CHAT, TEXTS, VERL))]
    bad = write_jsonl(tmp_path / "bad.jsonl", VERL, {"prompt": VERL["prompt"], "response": "1 2 3 4 " * 40})
    assert main(["data", "import-experts", *good, bad, *SMALL, *end]) == 2
    assert f"{bad}: line 2" in caplog.text and "context is 128" in caplog.text
    assert not (tmp_path / "store.db").exists()
    for new in (1, 0):
        caplog.clear()
        assert main(["data", "import-experts", *good, good[0], *SMALL, *end]) == 0
        assert f"{good[2]}: 1 rows, {new} new, {1 - new} already stored" in caplog.text
        assert "3 expert rows in the store" in caplog.text
    store = Store(f"sqlite:///{tmp_path}/store.db")
    found = [each for part in store.experts.read() for each in part]
    assert [(each.task.question, each.task.response, each.score) for each in found] == [
        ("12 - 7 =", "5", None),
        ("14 - 7 =", "7", None),
        ("19 - 7 =", "12", 1.0),
    ]
    store.close()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (VERL | {"score": "good"}, r"line 2: score must be a finite number or null, got 'good'"),
        (VERL | {"teacher_logp": [-0.5]}, r"line 2: teacher_logp must be as long as the response, 3 tokens .* got 1"),
        (VERL | {"teacher_logp": [-0.5, 0.5, -1.0]}, r"line 2: teacher_logp must be a list of log-probs, none above 0"),
        ({"prompt": VERL["prompt"]}, r"line 2: response must be"),
    ],
)
def test_a_row_that_is_no_experience_is_named(prepared: Path, tmp_path: Path, row: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_experts(from_source(config_of(prepared), write_jsonl(tmp_path / "a.jsonl", VERL, row)))


def test_teacher_log_probs_are_of_the_models_tokens(prepared: Path, tmp_path: Path) -> None:
    row = VERL | {"teacher_logp": [-0.5, -0.25, 0]}
    (found,) = read_experts(from_source(config_of(prepared), write_jsonl(tmp_path / "a.jsonl", row)))
    assert found.teacher_logp is not None and found.teacher_logp.tolist() == [-0.5, -0.25, 0]
    assert found.tokenizer == tokenizer_digest(prepared / "model") and found.score == 1


def test_a_question_of_eval_is_refused_whatever_its_source(prepared: Path) -> None:
    config = config_of(prepared)
    check = ExpertCheck(config)
    (held_out, *_) = read_experts(from_source(config, str(prepared / "data" / "warm_start.parquet")))
    from megarl.run.run_dir.rows import read_split

    asked = replace(held_out.task, prompt=read_split(config, "eval")[0].prompt)
    check.rows("run:other", [held_out])
    with pytest.raises(ValueError, match=r"run:other: row .* asks a question of taskset.eval"):
        check.rows("run:other", [held_out, ExpertExperience(asked)])


def other_run(prepared: Path, folder: Path) -> Path:
    """A run's directory with three groups of two responses, the first of two of them right."""
    from megarl.config import to_dict

    config = config_of(prepared, f"store.url=sqlite:///{folder}/other.db")
    run_dir = folder / "other"
    run_dir.mkdir()
    (run_dir / "resolved.json").write_text(json.dumps(to_dict(config)))
    tokenizer = ChatTokenizer.of(config)
    store = Store(config.store.url)
    store.tasks.add("train", [make_task(i) for i in range(3)])
    store.rollouts.request("r", "train", 0, VERSION, store.tasks.ids("train"), 2, {})
    for claim in store.groups.claim("a", 3):
        ids = tokenizer.response_ids(str(claim.position + 1))
        logp = np.linspace(-1, 0, len(ids), dtype=np.float32)
        turns = one_turn(range(5), ids, logp, version=claim.version)
        members = [
            replace(make_trajectory(claim, i), turns=turns, reward=Reward(float(claim.position != 1 and i == 0), "ok"))
            for i in range(2)
        ]
        assert store.groups.put(claim, members)
    store.close()
    return run_dir


def test_good_responses_of_another_run(prepared: Path, tmp_path: Path) -> None:
    run_dir = other_run(prepared, tmp_path)
    found = read_run(run_dir, 1.0)
    assert [(each.task.question, each.task.response, each.score) for each in found] == [
        ("0 + 1 =", "1", 1.0),
        ("2 + 1 =", "3", 1.0),
    ]
    assert [each.position for each in found] == [0, 1]
    assert {each.task.data_source for each in found} == {make_task(0).data_source} != {""}
    assert all(each.teacher_logp is not None and each.teacher_logp.tolist() == [-1, 0] for each in found)
    with pytest.raises(ValueError, match="no single response of training has a score of 2 or more"):
        read_run(run_dir, 2.0)


def test_a_job_without_any_expert_row_is_refused(prepared: Path, tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/store.db")
    none = config_of(prepared, "algorithm=mix", "taskset.expert=null")
    with pytest.raises(ConfigError, match="needs expert rows, and the store has none"):
        fill_experts(none, store)
    fill_experts(config_of(prepared, "algorithm=mix", f"taskset.expert={prepared}/data/warm_start.parquet"), store)
    assert store.experts.count() == 30
    assert [event["data"]["rows"] for event in store.journal.events("experts")] == [30]
    fill_experts(config_of(prepared, "algorithm=mix", f"taskset.expert={prepared}/data/warm_start.parquet"), store)
    assert len(store.journal.events("experts")) == 1, "a resumed job writes nothing"
    store.close()
