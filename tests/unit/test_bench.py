"""What a bench counts, compares and refuses, against counting by hand; no engine."""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl import cli
from megarl.buffer.experience.held_out import interval, majority_at, paired, t_quantile
from megarl.buffer.store import Store
from megarl.config import Config, compose
from megarl.config.lora import LoraConfig
from megarl.config.rewards import RewardConfig
from megarl.config.schema import EvaluationConfig
from megarl.core.errors import CheckpointError, ConfigError, DataError, EngineError, WeightsDiffer
from megarl.core.published import PublishedWeights, folder_of
from megarl.core.schema import Reward, RewardStatus, Task, Trajectory
from megarl.engines.client.control import EngineControl, EngineState
from megarl.engines.fleet import EngineRow, EngineStatus
from megarl.engines.sync.files import compare_with_files
from megarl.explore.bench import (
    FROM_FILES,
    RESULT,
    ROLLOUT,
    BenchDriver,
    ModelAnswers,
    ModelFiles,
    TaskAnswers,
    read_result,
    written_response,
)
from megarl.explore.explorer.other_explorers import record_evaluations
from megarl.rewards.routes import extractor
from megarl.run.checks.job import check_bench
from megarl.run.launch import bench
from megarl.run.launch.bench import run_bench
from megarl.run.launch.subjects import Subject, short_names, subject_of
from megarl.run.report.bench import OVERALL, Measured, Row, compare, table, write_bench
from megarl.tasks import ChatTokenizer
from megarl.weights.checkpoint.formats import peft
from megarl.weights.reshard.layouts import vllm_layout
from tests.chat_battery import checkpoint
from tests.engine_rows import serving_row
from tests.parallel.models import save_tiny_qwen3
from tests.parallel.peft_twin import save_adapter
from tests.trajectories import one_turn
from tests.unit import small_job

# ------------------------------------------------------------------ statistics


def by_hand(k: int, answers: Sequence[str], right: Sequence[bool]) -> Fraction:
    """Share of the choices of k samples whose majority is right; "-" is no answer."""
    total, number = Fraction(0), 0
    for chosen in itertools.combinations(range(len(answers)), k):
        number += 1
        counts = Counter(answers[i] for i in chosen if answers[i] != "-")
        winners = [answer for answer in counts if counts[answer] == max(counts.values())]
        for answer in winners:
            given = [right[i] for i in range(len(answers)) if answers[i] == answer]
            total += Fraction(sum(given), len(given)) / len(winners)
    return total / number


def test_majority_at_k_is_the_share_of_choices_whose_majority_is_right() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        n = int(random.integers(1, 8))
        answers = [str(random.choice(list("abc-"))) for _ in range(n)]
        right = [answer == "a" or (answer != "-" and bool(random.random() < 0.3)) for answer in answers]
        counts = Counter(answer for answer in answers if answer != "-")
        votes = [(counts[a], sum(r for r, b in zip(right, answers, strict=True) if b == a)) for a in counts]
        for k in range(1, n + 1):
            assert majority_at(k, votes, n) == pytest.approx(float(by_hand(k, answers, right)), abs=1e-12)


def test_majority_of_one_is_the_accuracy_and_of_all_is_the_vote() -> None:
    assert majority_at(1, [(3, 3), (4, 0)], 8) == 3 / 8
    assert majority_at(8, [(3, 3), (4, 0)], 8) == 0.0 and majority_at(8, [(4, 4), (4, 0)], 8) == 0.5
    assert majority_at(512, [(300, 300), (700, 0)], 1024) < 1e-9  # integers as large as these are no floats


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (9, 2.2622), (29, 2.0452), (499, 1.9647)]
)
def test_quantiles_of_student(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=1e-4)


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    """Of 2,000 draws: shares of 8 answers to 40 tasks, and 0 or 1 of 40 tasks."""
    random, covered = np.random.default_rng(1), np.zeros((2, 2000), dtype=bool)
    for draw in range(2000):
        chances = random.beta(1, 2, size=40)
        for kind, values in enumerate((random.binomial(8, chances) / 8, random.binomial(1, chances).astype(float))):
            found = interval(values)
            assert found.low is not None and found.high is not None
            covered[kind, draw] = found.low <= 1 / 3 <= found.high
    assert (np.abs(covered.mean(axis=1) - 0.95) < 0.02).all()


def test_wilson_by_its_defining_equation() -> None:
    """Its ends are the shares p with (found - p)^2 = z^2 p (1 - p) / n."""
    found = interval(np.array([1.0] * 7 + [0.0] * 13))
    for end in (found.low, found.high):
        assert end is not None
        assert (0.35 - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / 20, rel=1e-5)
    nothing = interval(np.zeros(20))
    assert nothing.low == 0.0 and nothing.high == pytest.approx(0.1611, abs=1e-4)


def test_a_paired_difference_is_known_better_than_two_means() -> None:
    first = np.array([0.0, 0.25, 0.5, 0.75, 1.0] * 8)
    second = np.clip(first + np.array([0.25, 0.0, 0.25, 0.25] * 10), 0, 1)
    found, apart = paired(first, second), interval(first)
    assert found.low is not None and found.high is not None and apart.low is not None and apart.high is not None
    assert found.excludes_zero and found.high - found.low < (apart.high - apart.low) / 2
    values = second - first
    assert found.high - found.mean == pytest.approx(2.0227 * values.std(ddof=1) / math.sqrt(40), rel=1e-4)
    assert paired(first, first).low is None, "no task differs: no interval"


# --------------------------------------------------------------------- answers


def answer_of(task_id: str, index: int, text: Sequence[int], status: RewardStatus, score: float) -> Trajectory:
    return Trajectory(ROLLOUT, task_id, f"{ROLLOUT}/{task_id}", index, 4, one_turn([1], text), Reward(score, status))


def test_counts_of_a_task() -> None:
    given = [("ok", 1.0, "5"), ("ok", 1.0, "5"), ("wrong", 0.25, "7"), ("error", 0.0, "")]
    answers = [answer_of("a", i, [i] * 3, status, score) for i, (status, score, _) in enumerate(given)]  # type: ignore[arg-type]
    found = TaskAnswers.of("a", "math", answers, lambda answer: given[answer.index][2])
    assert (found.samples, found.right, found.judged, found.mean_score) == (4, 2, 3, 0.75)
    assert found.votes == [("5", 2, 2), ("7", 1, 0)] and found.tokens == 12
    assert TaskAnswers.of("a", "code", answers, lambda answer: None).votes is None


@pytest.mark.parametrize(
    ("source", "text", "vote"),
    [
        ("math", r"so \boxed{\dfrac{1}{2}}", r"\frac{1}{2}"),
        ("lighteval/MATH", "the answer is 4", ""),
        ("openai/gsm8k", "work\n#### 18", "18"),
        ("reasoning_gym/chain_sum", "<think>3</think> 12 ", "12"),
        ("k12", "答案是 B", "B"),
    ],
)
def test_votes_are_what_the_verifier_extracts(source: str, text: str, vote: str) -> None:
    task = Task("a", source, ({"role": "user", "content": "?"},), "", {"ground_truth": "1"})
    read = extractor(task, RewardConfig())
    assert read is not None and read(text) == vote


def test_a_thought_that_the_prompt_has_opened_has_no_vote(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.open(checkpoint(tmp_path / "qwen3", "qwen3"))
    read = extractor(Task("a", "math", (), "", {"ground_truth": "1"}), RewardConfig())
    assert read is not None
    for prompt, text, vote in (
        ("<think>\n", r"\boxed{1} or", ""),
        ("<think>\n", r"\boxed{1} or</think>\boxed{2}", "2"),
        ("<think>\n\n</think>\n\n", r"\boxed{1}", "1"),
    ):
        turns = one_turn(tokenizer.rendered_ids("x" * 99 + prompt), tokenizer.rendered_ids(text))
        answer = Trajectory(ROLLOUT, "a", "g", 0, 1, turns, Reward(0.0, "wrong"))
        assert read(written_response(answer, tokenizer)) == vote


def test_verifiers_that_extract_nothing_have_no_votes() -> None:
    task = Task("a", "code", ({"role": "user", "content": "?"},), "", {"ground_truth": "1"})
    assert extractor(task, RewardConfig()) is None
    assert extractor(replace(task, data_source="math"), RewardConfig(path="mine.py")) is None


# ------------------------------------------------------------------ comparison


def model(name: str, right: Sequence[int], votes: bool = True) -> Measured:
    """Four answers to each task, of two sources in turn."""
    tasks = tuple(
        TaskAnswers(
            f"t{i}",
            "ab"[i % 2],
            4,
            r,
            float(r),
            4,
            40,
            0,
            [("x", r, r)] * (r > 0) + [("y", 4 - r, 0)] if votes else None,
        )
        for i, r in enumerate(right)
    )
    return Measured(name, f"models/{name}", ModelAnswers(4, 1.0, 2.0, tasks))


def rows_of(measured: Sequence[Measured]) -> dict[tuple[str, str], Row]:
    return {(row.source, row.metric): row for row in compare(measured)}


def test_models_are_compared_on_all_tasks_and_on_each_source() -> None:
    first, second = [4, 2, 1, 0, 3, 2, 0, 1], [4, 3, 2, 1, 4, 2, 1, 1]
    rows = rows_of([model("one", first), model("two", second)])
    assert list(dict.fromkeys(source for source, _ in rows)) == [OVERALL, "a", "b"]
    assert [m for s, m in rows if s == "a"] == ["avg@4", "mean score", "pass@2", "pass@4", "majority@4"]
    average = rows[OVERALL, "avg@4"]
    assert [value.mean for value in average.values if value] == [sum(first) / 32, sum(second) / 32]
    (difference,) = average.differences
    assert (difference.first, difference.second, difference.interval.tasks) == (0, 1, 8)
    assert difference.interval.mean == pytest.approx((sum(second) - sum(first)) / 32)
    passed = rows["a", "pass@2"].values[0]
    assert passed is not None and passed.mean == pytest.approx(np.mean([1, 1 - 3 / 6, 1, 0]))
    majority = rows["b", "majority@4"].values[0]
    assert majority is not None and majority.mean == pytest.approx(np.mean([0.5, 0, 0.5, 0]))


def test_differences_are_of_the_tasks_that_both_have() -> None:
    rows = rows_of([model("one", [4, 2, 1, 0]), model("two", [4, 3, 2, 1, 4, 4])])
    assert rows[OVERALL, "avg@4"].differences[0].interval.tasks == 4


def test_a_majority_without_votes_is_not_shown_as_a_number(tmp_path: Path) -> None:
    measured = [model("one", [4, 2, 1, 0], votes=False), model("two", [4, 3, 2, 1])]
    assert rows_of(measured)[OVERALL, "majority@4"].values[0] is None
    page = write_bench(tmp_path, Config(evaluation=EvaluationConfig(4, 1.0)), measured).read_text()
    assert "n/a" in page and "paired differences" in page and "two − one" in page
    found = json.loads((tmp_path / "results.json").read_text())
    assert [entry["name"] for entry in found["models"]] == ["one", "two"]
    lines = table(measured).splitlines()
    assert lines[0].split() == ["one", "two"] and re.search(r"avg@4 +43\.8% \[.*\] +62\.5% \[", lines[1])


def test_counts_are_read_as_they_were_written(tmp_path: Path) -> None:
    answers = model("one", [4, 2, 1, 0]).answers
    (tmp_path / RESULT).write_text(answers.to_json())
    again = read_result(tmp_path / RESULT)
    assert compare([Measured("a", "", again)]) == compare([Measured("a", "", answers)])
    (tmp_path / RESULT).write_text(answers.to_json()[:-9])
    with pytest.raises(DataError, match=r"bench\.json cannot be read .*; remove it"):
        read_result(tmp_path / RESULT)


# ---------------------------------------------------------------------- driver


def no_engines(store: Store) -> ModelFiles:
    """Of a job whose engines have no rows: nothing is to be proven."""

    def control(row: EngineRow) -> EngineControl:
        raise AssertionError(row)

    return ModelFiles(store.engines, control)


class _Engine:
    """Control of an engine that answers with each of these starts in turn, or does not answer."""

    url, timeout_s = "http://127.0.0.1:1", 1.0

    def __init__(self, starts: list[int | None], elements: int = 7) -> None:
        self._starts = starts
        self._elements = elements
        self.calls: list[str] = []

    def state(self, timeout_s: float) -> EngineState:
        start = self._starts.pop(0)
        if start is None:
            raise EngineError("gone")
        return EngineState("default", False, "not published", start, workers=1)

    def workers(self, method: str) -> list[dict[str, int]]:
        self.calls.append(method)
        if not self._elements:
            raise EngineError("other weights")
        return [{"elements": self._elements}]

    def refuse(self, reason: str | None) -> None:
        assert reason is None
        self.calls.append("opened")


@pytest.fixture
def proved(tmp_path: Path) -> Iterator[Callable[[_Engine, Sequence[int]], Store]]:
    """Registers one engine with each start in turn, and proves it after each."""
    store = Store(f"sqlite:///{tmp_path}/rows.db", program="bench")

    def prove(engine: _Engine, starts: Sequence[int]) -> Store:
        files = ModelFiles(store.engines, lambda row: engine)  # type: ignore[arg-type, return-value]
        for start in starts:
            if [row.start for row in store.engines.own()] != [start]:
                store.engines.register([serving_row(0, engine.url, "bench", start=start)])
            files.prove()
        return store

    yield prove
    store.close()


Proved = Callable[[_Engine, Sequence[int]], Store]


def test_a_gate_is_opened_once_for_each_start_of_a_server_and_after_the_proof(proved: Proved) -> None:
    engine = _Engine([1, None, 2])
    store = proved(engine, [1, 1, 2, 2, 2])
    assert engine.calls == ["megarl_check_files", "opened"] * 2
    assert [row.has for row in store.engines.own()] == [FROM_FILES]


def test_a_gate_stays_closed_where_the_weights_differ(proved: Proved) -> None:
    engine = _Engine([1, 1], elements=0)
    with pytest.raises(EngineError, match="other weights"):
        proved(engine, [1])
    assert engine.calls == ["megarl_check_files"]


@pytest.mark.parametrize("then", [None, 2])
def test_an_engine_that_dies_while_it_is_compared_is_looked_at_again(then: int | None, proved: Proved) -> None:
    engine = _Engine([1, then], elements=0)
    assert [row.has for row in proved(engine, [1]).engines.own()] == [None]
    assert engine.calls == ["megarl_check_files"]


def test_an_engine_of_another_start_than_its_row_says_is_left_for_the_next_look(proved: Proved) -> None:
    engine = _Engine([2])
    proved(engine, [1])
    assert engine.calls == []


def test_engines_are_awaited_by_their_rows(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/rows.db", program="bench")
    files = no_engines(store)
    starting = serving_row(0, "http://a", "bench", state=EngineStatus.STARTING)
    store.engines.register([starting, serving_row(1, "http://b", "bench")])
    with pytest.raises(EngineError, match=r"engine 0 was not ready after .* \(rollout.start_timeout_s=0.01\)"):
        files.await_engines(0.01, 0.01, lambda: False)
    with pytest.raises(EngineError, match="asked to stop, and engine 0"):
        files.await_engines(9.0, 0.01, lambda: True)
    store.engines.register([serving_row(0, "http://a", "bench")])
    files.await_engines(9.0, 0.01, lambda: True)
    store.close()


def config_of(run_dir: Path, model: Path) -> Config:
    config = compose(
        ["experiment=quickstart", f"run.dir={run_dir}", f"model.path={model}", "run.mode=bench"]
        + ["evaluation.samples=4", "evaluation.temperature=1.0", "store.poll_s=0.005"]
    )
    run_dir.mkdir(parents=True)
    return config


def answer_all(store: Store, status: RewardStatus, limit: int) -> int:
    """Put answers to up to ``limit`` groups, as an explorer does."""
    claims = store.groups.claim("explorer-0", limit)
    for claim in claims:
        assert claim.version == FROM_FILES and claim.sampling["temperature"] == 1.0
        turns = one_turn([1], [5, 6], version=claim.version)
        members = [
            Trajectory(ROLLOUT, claim.task.task_id, claim.group_id, i, 4, turns, Reward(float(status == "ok"), status))
            for i in claim.indices
        ]
        store.groups.put(claim, members)
    record_evaluations(store, "explorer-0")
    return len(claims)


def test_a_bench_that_was_stopped_goes_on_with_the_answers_that_are_there(tmp_path: Path) -> None:
    from megarl.run.run_dir.prepare import make
    from tests.unit.small_job import config_of as small

    path = make(small(tmp_path / "small")).model.path
    config = config_of(tmp_path / "run", Path(path))
    tasks = [Task(f"eval/{i}", "code", ({"role": "user", "content": "?"},), "", {"ground_truth": 1}) for i in range(6)]
    store = Store(config.store.url, program="bench")
    store.tasks.add("eval", tasks)
    stop = threading.Event()

    def begin() -> None:
        own = Store(config.store.url)
        BenchDriver(config, own, no_engines(own), stop.is_set).run()

    first = threading.Thread(target=begin)
    first.start()
    while not answer_all(store, "ok", 4):
        pass
    stop.set()
    first.join(10)
    assert not (tmp_path / "run" / RESULT).exists() and store.rollouts.progress(ROLLOUT) == (4, 6)
    assert answer_all(store, "wrong", 9) == 2
    assert BenchDriver(config, store, no_engines(store), lambda: False).run()
    found = read_result(tmp_path / "run" / RESULT)
    assert [task.right for task in found.tasks] == [4, 4, 4, 4, 0, 0]
    assert [task.task_id for task in found.tasks] == [task.task_id for task in tasks]
    assert store.journal.job_state() == "closed" and {task.votes for task in found.tasks} == {None}  # type: ignore[arg-type]
    store.close()


# ----------------------------------------------------------- weights from files


def test_weights_of_an_engine_are_compared_with_the_files(tmp_path: Path) -> None:
    path = save_tiny_qwen3(tmp_path / "model", layers=2)
    config = json.loads((path / "config.json").read_text())
    from megarl.weights.checkpoint.formats.hf import load_into, read_hf_config

    layout = vllm_layout(read_hf_config(path), 2)
    for rank in range(2):
        tensors = {name: torch.empty(shape) for name, shape in layout.local_shapes(rank).items()}
        load_into(path, layout, rank, tensors)
        count = compare_with_files(layout, rank, tensors.__getitem__, path, torch.float32)
        assert count == sum(math.prod(hi - lo for lo, hi in piece.box) for piece in layout.pieces(rank))
        name = next(name for name in tensors if name.endswith("qkv_proj.weight"))
        tensors[name].view(-1)[7] += 1e-3
        with pytest.raises(WeightsDiffer, match=r"other weights than .*: 1 elements of .*q_proj\.weight differ"):
            compare_with_files(layout, rank, tensors.__getitem__, path, torch.float32)
    assert config["num_hidden_layers"] == 2


# --------------------------------------------------------------------- command


def test_words_are_models_or_overrides() -> None:
    arguments = cli.parse_arguments(
        ["bench", "a/b", "run:runs/x@40", "trainer.seed=2", "--check", "evaluation.samples=4"]
    )
    assert arguments.models == ["a/b", "run:runs/x@40"] and arguments.check
    assert arguments.overrides[:2] == ["trainer.seed=2", "evaluation.samples=4"]
    assert arguments.overrides[2:] == ["model.path='a/b'", "run.name=bench", "taskset.train=unread"]
    for words in (["trainer.seed=2"], ["a/b", "model.path=c"]):
        with pytest.raises(SystemExit):
            cli.parse_arguments(["bench", *words])


def test_models_that_are_none_are_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(ConfigError, match="has no resolved.json; give the directory of a run"):
        subject_of(f"run:{run}")
    with pytest.raises(ConfigError, match=r"has no config\.json; give the directory of an HF checkpoint or a PEFT"):
        subject_of(str(run))
    (run / "resolved.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"is the directory of a run; write run:{run}"):
        subject_of(str(run))
    with pytest.raises(ConfigError, match=r"neither an exported model \(hf/\) nor a finished checkpoint"):
        subject_of(f"run:{run}")
    with pytest.raises(ConfigError, match="no finished checkpoint of step 40; steps with one: none"):
        subject_of(f"run:{run}@40")
    for step in (20, 40):
        (run / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
        (run / "checkpoints" / f"global_step_{step}" / "state.json").write_text("{}")
    assert subject_of(f"run:{run}").name == f"run:{run}@40"
    assert subject_of(f"run:{run}@20").path.name == "global_step_20"
    with pytest.raises(ConfigError, match=r"no published weights 1\.2 in .*; versions there: none"):
        subject_of(f"run:{run}@1.2")
    (run / "hf").mkdir()
    (run / "hf" / "config.json").write_text("{}")
    exported = subject_of(f"run:{run}")
    assert exported.is_hf and exported.path == run / "hf"
    (run / "hf_step").write_text("40")
    assert subject_of(f"run:{run}") == exported
    before = exported.identity()
    (run / "hf" / "config.json").write_text("{ }")
    assert exported.identity() != before


def test_the_model_of_a_run_that_went_on_is_not_its_old_export(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (4, 8):
        (tmp_path / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"global_step_{step}" / "state.json").write_text("{}")
    (tmp_path / "hf").mkdir()
    for file in ("resolved.json", "hf/config.json"):
        (tmp_path / file).write_text("{}")
    (tmp_path / "hf_step").write_text("4")
    found = subject_of(f"run:{tmp_path}")
    assert (found.name, found.path.name) == (f"run:{tmp_path}@8", "global_step_8")
    assert "hf has the weights of step 4, and the run went on" in caplog.text


def test_published_weights_are_copied_before_their_run_removes_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for n in (9, 10):
        folder = folder_of(run, f"1.{n}")
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(str(n))
        PublishedWeights(f"1.{n}", {}, [1], [], 1e-3).write(folder)
    (run / "resolved.json").write_text("{}")
    newest, older = subject_of(f"run:{run}"), subject_of(f"run:{run}@1.9")
    assert newest.name == f"run:{run}@1.10" and newest.identity() != older.identity()
    with pytest.raises(ConfigError, match=r"no published weights 1\.8 in .*; versions there: 1\.9, 1\.10"):
        subject_of(f"run:{run}@1.8")
    newest.convert(tmp_path / "new")
    before = newest.identity()
    for subject in (newest, older):
        (subject.path / "published.json").unlink()
    assert newest.identity() == before and not newest.is_hf
    newest.convert(tmp_path / "new")  # it is there
    assert (newest.hf_path(tmp_path / "new") / "config.json").read_text() == "10"
    with pytest.raises(CheckpointError, match="was removed while it was copied"):
        older.convert(tmp_path / "old")
    assert not older.hf_path(tmp_path / "old").exists()
    newest.clean_up(tmp_path / "new")
    assert not newest.hf_path(tmp_path / "new").exists()


def test_an_adapter_is_merged_into_its_model(tmp_path: Path) -> None:
    """By itself, or behind a model; as float32 it is W + s B A, and in bfloat16 that sum rounded once."""
    base = save_tiny_qwen3(tmp_path / "base+1", layers=1)  # a plus in a folder's name is no adapter
    adapter = save_adapter(base, LoraConfig(rank=2, alpha=3.0, targets=["q_proj"]))
    alone, behind = subject_of(str(adapter)), subject_of(f"{base}+{adapter}")
    assert subject_of(str(base)).adapter is None and alone.path == behind.path == base
    assert alone.slug != subject_of(str(base)).slug and alone.identity() == behind.identity()
    name = "model.layers.0.self_attn.q_proj.weight"
    factors = load_file(adapter / peft.TENSORS)
    b, a = (factors[peft.PREFIX + name.replace(".weight", f".lora_{which}.weight")] for which in "BA")
    whole = load_file(base / "model.safetensors")[name] + 1.5 * (b @ a)
    found = {}
    for dtype in ("float32", "bfloat16"):
        alone.convert(tmp_path / dtype, dtype)
        found[dtype] = load_file(alone.hf_path(tmp_path / dtype) / "model.safetensors")[name]
    torch.testing.assert_close(found["float32"], whole, rtol=1e-6, atol=1e-8)
    assert torch.equal(found["bfloat16"], found["float32"].bfloat16())
    before = alone.identity()
    config = json.loads((adapter / peft.CONFIG).read_text())
    (adapter / peft.CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": "gone/model"}))
    assert alone.identity() != before
    with pytest.raises(ConfigError, match=r"'gone/model', which is no HF checkpoint here.*or give MODEL\+"):
        subject_of(str(adapter))
    assert subject_of(f"{base}+{adapter}").path == base
    with pytest.raises(ConfigError, match="is no PEFT adapter"):
        subject_of(f"{base}+{tmp_path}")


def test_a_bench_leaves_out_what_a_trainer_alone_reads(tmp_path: Path) -> None:
    config = small_job.config_of(tmp_path, "model.head_dtype=float32", "model.dtype=bfloat16")
    trained = small_job.config_of(
        tmp_path, "model.head_dtype=float32", "model.dtype=bfloat16", "model.moe_dispatcher=deepep",
        "model.router_dtype=float32", "model.fusions=[moe_permute_fusion]", "model.recompute=selective",
        "model.recompute_modules=[moe]", "model.transformer_impl=transformer_engine", "parallel.ep=2", "parallel.dp=2",
    )  # fmt: skip
    found = bench.config_of_bench(trained, tmp_path)
    assert found == bench.config_of_bench(config, tmp_path) and found.model.head_dtype == "float32"


def test_short_names_leave_out_what_all_begin_with() -> None:
    def short(*names: str) -> list[str]:
        return short_names([Subject(name, Path(name), is_hf=True) for name in names])

    assert short("run:/a/runs/x@20", "run:/a/runs/x@40", "/a/runs/y/hf") == ["x@20", "x@40", "y/hf"]
    assert short("models/qwen") == ["models/qwen"] and short("a/b", "a/b/c") == ["b", "b/c"]


def test_a_bench_is_refused_in_the_place_of_a_training_run(tmp_path: Path) -> None:
    (tmp_path / "attempt").write_text("1")
    with pytest.raises(ConfigError, match=r"holds a training run; take another run\.name"):
        run_bench(["x"], compose([f"run.dir={tmp_path}", "model.path=x"]), None, check_only=True)


def test_a_bench_has_no_average_to_evaluate(tmp_path: Path) -> None:
    config = bench.config_of_bench(compose(["model.path=x", "evaluation.average=0.9"]), tmp_path)
    with pytest.raises(ConfigError, match=r"evaluation\.average=0\.9 is for jobs that train .*; leave it out"):
        check_bench(config)


def test_a_training_job_has_no_mode_of_a_bench(caplog: pytest.LogCaptureFixture) -> None:
    assert cli.main(["train", "run.mode=bench"]) == 2
    assert "run.mode=bench belongs to `megarl bench`" in caplog.text
