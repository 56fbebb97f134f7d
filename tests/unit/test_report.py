"""The report of a run directory: whole, half done, damaged; nothing from outside, nothing unescaped."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from megarl.buffer.store import Store
from megarl.config import Config, save_resolved
from megarl.config.algorithms import AlgorithmConfig
from megarl.config.job import RunConfig, StoreConfig
from megarl.config.schema import ModelConfig, ParallelConfig, TasksetConfig, TrainerConfig
from megarl.core.errors import ConfigError
from megarl.core.metrics import COMMAND, DROPPED, Timeline
from megarl.core.schema import Reward, Task, Trajectory, WeightsVersion
from megarl.run.launch.job import report_end
from megarl.run.report import svg
from megarl.run.report.data import changed_settings, load
from megarl.run.report.html import page, summary, write_report
from megarl.run.report.svg import TimedPhase, exclusive, last_start, seconds_by_phase, seconds_by_step, union
from tests import disks
from tests.trajectories import one_turn

TASKS = 40
VERSION = WeightsVersion(1, 1)
HOSTILE = '<script>alert("1")</script>&\x1b[31m'
VOID = {"meta"}


class Page(HTMLParser):
    """Collects text and attributes; fails on tags that are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def make_config(run_dir: Path, steps: int) -> Config:
    return replace(
        Config(),
        run=RunConfig(name="tiny", dir=str(run_dir)),
        model=ModelConfig(path=str(run_dir / "model")),
        parallel=ParallelConfig(tp=2),
        algorithm=AlgorithmConfig(group_size=16),
        trainer=TrainerConfig(steps=steps),
        taskset=TasksetConfig(train="t.parquet", eval="e.parquet"),
        store=StoreConfig(url=f"sqlite:///{run_dir}/store.db"),
    )


def make_store(config: Config, words: list[str], tasks: int = TASKS) -> Store:
    """A store with held-out tasks and a tokenizer of whole answers."""
    model = Path(config.model.path)
    model.mkdir()
    Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])).save(
        str(model / "tokenizer.json")
    )
    store = Store(config.store.url)
    prompts = [({"role": "user", "content": f"What is {i} + {i}?"},) for i in range(tasks)]
    store.tasks.add(
        "eval", [Task(f"e{i}", "sums", prompts[i], "math", {"ground_truth": str(2 * i)}) for i in range(tasks)]
    )
    return store


def answer_all(
    store: Store, rollout_id: str, step: int, right: int, token: int, statuses: tuple[str, ...] = ()
) -> None:
    """Greedy answers to all tasks, the first ``right`` of them right."""
    ids = store.tasks.ids("eval")
    store.rollouts.request(rollout_id, "eval", step, VERSION, ids, 1, {"temperature": 0.0})
    for claim in store.groups.claim("w", len(ids)):
        i = claim.position
        status = "ok" if i < right else statuses[i % len(statuses)] if statuses else "wrong"
        trajectory = Trajectory(
            rollout_id=rollout_id,
            task_id=claim.task.task_id,
            group_id=claim.group_id,
            index=0,
            group_size=1,
            turns=one_turn([0] * 3, [token] * (1 + i % 2), version=VERSION),
            reward=Reward(float(status == "ok"), status),
        )
        assert store.groups.put(claim, [trajectory])
    store.journal.record_event(
        "trainer", "evaluation", {"rollout_id": rollout_id, "step": step, "accuracy": right / len(ids)}
    )


def make_timelines(folder: Path, steps: int, start: float = 1_000_000.0) -> None:
    """Two trainer ranks and an explorer: a step lasts 1 s, of which 0.1 s is in no phase."""
    for rank in (0, 1):
        timeline = Timeline(folder, f"trainer_{rank}")
        timeline.add("load", start - 4, 1.5)
        timeline.add("warm_start", start - 2, 2.0)
        for step in range(steps):
            at = start + step
            timeline.add("sync", at, 0.1, step=step)
            timeline.add("rollout", at + 0.1, 0.4, step=step)
            timeline.add("inference", at + 0.5, 0.1, step=step)
            timeline.add("update", at + 0.6, 0.2, step=step)
            timeline.add("checkpoint", at + 0.81, 0.08)  # twice, as a commit within a step is written
            timeline.add("checkpoint", at + 0.8, 0.1, step=step)
            timeline.add("step", at, 1.0, step=step)
    explorer = Timeline(folder, "explorer")
    for step in range(steps):
        explorer.add("generation", start + step + 0.1, 0.3)
        explorer.add("reward", start + step + 0.2, 0.3)


def metrics_of(step: int, steps: int) -> dict[str, float]:
    return {
        "critic/rewards/mean": 0.4 + 0.3 * step / steps,
        "actor/kl_loss": 0.001 * step,
        "actor/entropy": 0.7,
        "actor/grad_norm": float("nan") if step == 2 else 0.5,
        "response_length/mean": 3.25,
        "training/rollout_logp_diff_mean": 1.5e-7,
        "training/rollout_logp_diff_max": 2.5e-6,
        "rollout/generation_s": 0.3,
        "rollout/reward_s": 0.3,
        "rollout/overlap_s": 0.2,
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run of 30 steps: 18 of 40 right before (45.0 %), 30 of 40 after (75.0 %)."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = make_config(folder, steps=30)
    save_resolved(config, folder / "resolved.json")
    store = make_store(config, ["<unk>", "forty-two", HOSTILE])
    answer_all(store, "eval-before", 0, 18, token=1, statuses=("wrong", "wrong", "timeout"))
    answer_all(store, "eval-after", 30, 30, token=2)
    for step in range(1, 31):
        store.journal.record_step(step, metrics_of(step, 30))
    store.close()
    make_timelines(folder / "timeline", 30)
    lines = [json.dumps({"step": i, "sft/loss": 2.0 / i}) for i in range(1, 41)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    return folder


def test_report_holds_the_numbers(run_dir: Path) -> None:
    path = write_report(run_dir)
    assert path == run_dir / "report" / "report.html"
    text = Page(path.read_text()).text
    for expected in (
        "Held-out accuracy 45.0% → 75.0%",
        "+30.0 points",
        "30 of 30",
        "finished: 30 steps in 34.0 s",
        "12 tasks went from wrong to right, 0 from right to wrong",
        "algorithm.group_size 16 8",
        "parallel.tp 2 1",
        "What is 20 + 20? 40",
        str(run_dir / "hf"),
        "generation 0.30 s, reward 0.30 s, both at the same time 0.20 s",
        "sft/loss",
        "✓ right",
        "✗ wrong",
        "! reward timeout",
    ):
        assert expected in text, expected
    for metric in (
        "actor/kl_loss",
        "actor/entropy",
        "response_length/mean",
        "actor/grad_norm",
        "training/rollout_logp_diff_max",
    ):
        assert metric in text


def test_verifiers_are_summed_over_the_steps(run_dir: Path) -> None:
    def step(answers: float, mean: float, most: float, kills: float) -> dict[str, float]:
        times = {
            f"reward/math/{name}/{what}": value
            for name in ("seconds", "waited_s")
            for what, value in (("mean", mean), ("max", most))
        }
        counts = {"answers": answers, "error": 0.0, "timeout": 1.0, "retries": 2.0, "kills": kills}
        return (
            times
            | {f"reward/math/{name}": value for name, value in counts.items()}
            | {"reward/parts/format": answers / 40}
        )

    steps = ((1, step(10, 0.1, 0.5, 0)), (2, step(30, 0.3, 2.0, 3)))
    text = re.sub("<[^>]+>", " ", page(replace(load(run_dir), steps=steps)))
    assert "math 40 250.0 2000 250.0 2000 0 2 4 3" in " ".join(text.split())
    assert "format 0.750" in text


def test_accuracy_of_several_sources_is_shown_for_each(run_dir: Path) -> None:
    run = load(run_dir)
    assert "by source" not in page(run) and run.before is not None and run.after is not None
    before = replace(run.before, sources={"math500": (0.5, 30), "aime": (0.1, 10)})
    after = replace(run.after, sources={"math500": (0.6, 30), "aime": (0.2, 10)})
    text = Page(page(replace(run, before=before, after=after))).text
    assert "source tasks accuracy before after math500 30 50.0% 60.0% aime 10 10.0% 20.0%" in text
    store = Store(run.config.store.url)
    sources = {"math500": (0.6, 30), "aime": (0.2, 10)}
    store.journal.record_event(
        "w", "evaluation", {"rollout_id": "eval-after", "step": 30, "accuracy": 0.7, "sources": sources}
    )
    store.close()
    assert "  math500        — →   60.0%      30 tasks\n  aime   " in summary(run_dir)


def test_what_was_left_out_of_training_is_shown_by_reason(run_dir: Path) -> None:
    assert "Left out of training" not in page(load(run_dir)) and "left out" not in summary(run_dir)
    store = Store(load(run_dir).config.store.url)
    for step in (1, 2):
        account = {f"rollout/{unit}/sampled": 100.0 * size for unit, size in (("trajectories", 1), ("tokens", 5))}
        account |= {"rollout/trajectories/excluded/all_right": 18.0, "rollout/tokens/excluded/all_right": 20.0}
        account |= {"rollout/trajectories/excluded/mine": float(step - 1), "rollout/tokens/excluded/mine": step - 1.0}
        store.journal.record_step(step, metrics_of(step, 30) | account)
        messages = [f"group g-{step} and 3 more: the file {HOSTILE} has {step} lines", "group h: its reward is nan"]
        store.journal.record_event("trainer", DROPPED, {"step": step, "messages": messages[: 3 - step]})
    store.close()
    words = Page(page(load(run_dir))).text
    assert "all_right group whose responses are all right: no gradient (algorithm.dynamic_sampling) 36 18.0%" in words
    assert "mine reason given by an operator of the run 1 0.5% 1 0.1%" in words
    found = load(run_dir).dropped
    assert [(text[:7], steps) for text, steps in found] == [("step 1,", 2), ("step 1,", 1)] and "g-1" in found[0][0]
    assert "left out of training: 37 of the sampled trajectories, 18.5% (all_right 36, mine 1)" in summary(run_dir)


def test_memory_is_shown_where_it_moved(run_dir: Path) -> None:
    assert "Memory by phase" not in page(load(run_dir))
    moved = {"memory/sync/planned_bytes": 3.0 * 2**30, "memory/sync/bytes": 3.5 * 2**30}
    text = re.sub("<[^>]+>", " ", page(replace(load(run_dir), steps=((1, {}), (2, moved)))))
    assert "sync 3.00 GiB 3.50 GiB" in " ".join(text.split())


def test_a_finished_run_stays_finished_without_room_for_its_report(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with disks.small_disk(run_dir / "report", "1m") as report:
        ballast = disks.fill(report)
        report_end(run_dir, 0.0)
        assert f"make room there, then `megarl report {run_dir}` writes the report" in caplog.text
        threading.Timer(0.5, ballast.unlink).start()
        report_end(run_dir, 60.0)
        assert (report / "report.html").read_text().endswith("</html>\n")


def test_report_needs_nothing_beside_it(run_dir: Path) -> None:
    html = write_report(run_dir).read_text()
    page = Page(html)
    assert "://" not in html, "a reference to the network"
    assert "script" not in page.tags and not any(name.startswith("on") for name, _ in page.attributes)
    references = [value for name, value in page.attributes if name in {"src", "href", "xlink:href"}]
    assert references == ["reward_curve.png"]
    assert "prefers-color-scheme:dark" in html


def test_answers_are_escaped(run_dir: Path) -> None:
    html = write_report(run_dir).read_text()
    assert "<script" not in html and "&lt;script&gt;alert" in html
    assert "\x1b" not in html and "\x1b" not in summary(run_dir)
    assert '<script>alert("1")</script>&' in Page(html).text, "the answer is shown as it is"


def test_png_and_no_leftovers(run_dir: Path) -> None:
    write_report(run_dir)
    write_report(run_dir)
    assert (run_dir / "report" / "reward_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert {p.name for p in (run_dir / "report").iterdir()} == {"report.html", "reward_curve.png"}


def test_summary(run_dir: Path) -> None:
    assert "not written yet" in summary(run_dir)
    write_report(run_dir)
    text = summary(run_dir)
    assert re.search(r"before +45\.0% +18 +40\n", text) and re.search(r"after +75\.0% +30 +40\n", text)
    assert re.search(r"change +\+30\.0 points", text)
    assert len(re.findall(r"^What is \d+", text, re.M)) == 10
    assert "✗ forty-two" in text and "✓ <script>" in text
    for name in ("report/reward_curve.png", "report/report.html", "hf"):
        assert str(run_dir / name) in text


def test_seconds_by_cause_are_shown(run_dir: Path) -> None:
    """30 steps of 1 s with a checkpoint of 0.1 s each, 2 s of warm start; 10 s before them."""
    assert "Goodput" not in page(load(run_dir)) and "goodput" not in summary(run_dir), "no command is recorded"
    for i, name in enumerate(("import", "check", "spawn")):
        Timeline(run_dir / "timeline", COMMAND).add(name, 1_000_000.0 - 10 + i, 1.0)
    shown = Page(page(load(run_dir))).text
    assert re.search(r"Goodput [\d.]+% of .* since the first start are in steps that are kept", shown)
    assert re.search(r"checkpoints saving, and the exported model 3\.\d", shown) and "lost work" not in shown
    assert re.search(r"^goodput: [\d.]+% of 40 s in steps that are kept \(start 20", summary(run_dir), re.M)


def test_graded_scores_are_shown_beside_the_accuracy(run_dir: Path) -> None:
    store = Store(f"sqlite:///{run_dir}/store.db")
    [event] = [e["data"] for e in store.journal.events("evaluation") if e["data"]["step"] == 0]
    store.journal.record_event("trainer", "evaluation", event | {"score": 0.48, "graded": True})
    store.close()
    text = summary(run_dir)
    assert re.search(r"accuracy +right +of +mean score\n", text)
    assert re.search(r"before +45\.0% +18 +40 +0\.480\n", text) and re.search(r"after .* —\n", text)
    page = Page(write_report(run_dir).read_text()).text
    assert "mean score" in page and "0.480" in page


def test_samples_do_not_know_the_outcome(run_dir: Path) -> None:
    run = load(run_dir)
    assert [s.ground_truth for s in run.samples] == [str(8 * i) for i in range(10)]
    assert [s.before.status for s in run.samples if s.before][:5] == ["ok"] * 5


def test_job_that_was_only_started(tmp_path: Path) -> None:
    save_resolved(make_config(tmp_path, 5), tmp_path / "resolved.json")
    text = Page(write_report(tmp_path).read_text()).text
    assert "No held-out accuracy yet" in text and "not finished: 0 of 5 steps" in text and "does not exist" in text
    assert not (tmp_path / "store.db").exists(), "a report makes no store"
    assert "not exported yet" in summary(tmp_path)


def test_run_without_evaluations(tmp_path: Path) -> None:
    config = make_config(tmp_path, 5)
    save_resolved(config, tmp_path / "resolved.json")
    store = make_store(config, ["<unk>"])
    store.journal.record_step(1, metrics_of(1, 5))
    store.close()
    make_timelines(tmp_path / "timeline", 1)
    text = Page(write_report(tmp_path).read_text()).text
    assert "not finished: 1 of 5 steps" in text and "No held-out task has been answered yet" in text
    assert "Held-out accuracy 0" not in text
    assert "✓" not in summary(tmp_path)


def test_stopped_after_the_first_evaluation(run_dir: Path) -> None:
    store = Store(load(run_dir).config.store.url)
    store.journal.record_evaluation(
        "explorer-0", "eval-before", {"rollout_id": "eval-before", "step": 0}
    )  # else it would be made again
    store.rollouts.discard(2)
    store.close()
    (run_dir / "hf" / "config.json").unlink()
    (run_dir / "model" / "tokenizer.json").unlink()
    text = Page(write_report(run_dir).read_text()).text
    assert "not finished: 2 of 30 steps" in text and "no answer" in text
    assert "tokenizer.json does not exist: answers are shown as token ids." in text


def test_damaged_answers_are_left_out_and_noted(run_dir: Path) -> None:
    path = run_dir / "store.db"
    connection = sqlite3.connect(path)
    connection.execute("pragma wal_checkpoint(truncate)").fetchone()
    [root] = connection.execute("select rootpage from sqlite_master where name = 'trajectories'").fetchone()
    connection.close()
    damaged = bytearray(path.read_bytes())
    damaged[4096 * (root - 1) : 4096 * root] = b"\xff" * 4096
    path.write_bytes(damaged)
    text = Page(write_report(run_dir).read_text()).text
    assert "The answers of eval-after are left out" in text and "is damaged" in text
    assert "after" in summary(run_dir)


def test_damaged_line_is_skipped_and_noted(run_dir: Path) -> None:
    before = load(run_dir)
    with (run_dir / "timeline" / "trainer_0.jsonl").open("a") as file:
        file.write('{"phase": "upda')
    run = load(run_dir)
    assert run.timelines == before.timelines
    assert "1 unreadable line in trainer_0.jsonl skipped." in Page(write_report(run_dir).read_text()).text


def test_run_directory_may_move(run_dir: Path) -> None:
    moved = run_dir.rename(run_dir.parent / "elsewhere")
    run = load(moved)
    assert run.steps_done == 30 and run.samples[0].before is not None and run.samples[0].before.text == "forty-two"


def test_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no resolved.json"):
        write_report(tmp_path)


def test_password_of_the_store_is_not_shown(tmp_path: Path) -> None:
    config = replace(make_config(tmp_path, 5), store=StoreConfig(url="postgresql://user:secret@db/megarl"))
    settings = dict((name, value) for name, _, value in changed_settings(config))
    assert settings["store.url"] == "postgresql://user:***@db/megarl"


def test_settings_that_interpolate_to_the_default_are_not_changed() -> None:
    config = replace(
        Config(), run=RunConfig(name="a", dir="runs/a"), store=StoreConfig(url="sqlite:///runs/a/store.db")
    )
    assert [name for name, _, _ in changed_settings(config)] == ["run.name"]


# ---------------------------------------------------------------------- time


def test_nested_phases_count_once() -> None:
    phases = [
        TimedPhase("step", 0, 10, 4),
        TimedPhase("checkpoint", 6, 9, 4),
        TimedPhase("checkpoint", 6.5, 9.0000001),
        TimedPhase("sync", 1, 2, 4),
    ]
    assert seconds_by_phase("trainer_0", phases) == pytest.approx({"other": 6, "checkpoint": 3, "sync": 1})
    assert seconds_by_step(phases) == {5: pytest.approx({"other": 6, "checkpoint": 3, "sync": 1})}


def test_neighbours_that_seem_to_overlap_stay_neighbours() -> None:
    """A start is rounded and the clocks differ, so a step may seem to begin before the last one ended."""
    phases = [TimedPhase("step", i, i + 1.0003, i) for i in range(5)] + [
        TimedPhase("sync", i, i + 0.25, i) for i in range(5)
    ]
    found = seconds_by_step(phases)
    assert set(found) == {1, 2, 3, 4, 5}
    for seconds in found.values():
        assert seconds == pytest.approx({"sync": 0.25, "other": 0.75}, abs=0.001)


def test_the_last_start_lasts_from_its_command_until_the_engines_have_joined() -> None:
    command = [
        TimedPhase("import", 1, 4),
        TimedPhase("check", 4, 6),
        TimedPhase("import", 100, 103),
        TimedPhase("check", 103, 104),
    ]
    first, again = TimedPhase("wait_for_engine", 9, 11), TimedPhase("wait_for_engine", 106, 110.5)
    trainer = [
        TimedPhase("start", 6, 9),
        first,
        again,
        TimedPhase("wait_for_engine", 200, 201),
    ]  # an engine was replaced
    assert last_start({"command": command, "trainer_0": trainer}) == (100, 110.5)
    assert last_start({"command": command[:2], "trainer_0": trainer[:2]}) == (1, 11)
    assert last_start({"command": command, "trainer_0": trainer[:2]}) is None
    assert last_start({"trainer_0": trainer}) is None


def test_the_report_shows_the_last_start(run_dir: Path) -> None:
    assert "The last start" not in page(load(run_dir))
    for process, name, start, seconds in (
        (COMMAND, "import", 5e9, 2.0), (COMMAND, "spawn", 5e9 + 2, 0.5), ("engine_0", "load", 5e9 + 3, 2.5),
        ("trainer_0", "wait_for_engine", 5e9 + 4, 2.25),
    ):  # fmt: skip
        Timeline(run_dir / "timeline", process).add(name, start, seconds)
    text = page(load(run_dir))
    assert "The last start, 6.2 s from the command until the engines had joined the trainer." in text


def test_concurrent_phases_of_another_process_are_united() -> None:
    phases = [TimedPhase("reward", 0, 2), TimedPhase("reward", 1, 3), TimedPhase("generation", 0, 4)]
    assert seconds_by_phase("explorer", phases) == {"generation": 4, "reward": 3}


def test_a_step_done_again_counts_with_its_last_time() -> None:
    phases = [
        TimedPhase("step", 0, 10, 0),
        TimedPhase("sync", 0, 9, 0),
        TimedPhase("step", 20, 22, 0),
        TimedPhase("sync", 20, 21, 0),
    ]
    assert seconds_by_step(phases) == {1: {"sync": 1, "other": 1}}


def test_time_between_a_stop_and_a_resume_is_no_wall_time(run_dir: Path) -> None:
    make_timelines(run_dir / "timeline", 2, start=2_000_000.0)
    assert load(run_dir).wall_s == pytest.approx(34 + 6, abs=0.01)


def test_starts_that_were_refused_are_no_wall_time(run_dir: Path) -> None:
    before = load(run_dir).wall_s
    timeline = Timeline(run_dir / "timeline", COMMAND)
    for start, phases in ((500.0, ["import", "check"]), (1_000_000.0 - 6, ["import", "check", "spawn"])):
        for i, name in enumerate(phases):
            timeline.add(name, start + i * 0.5, 0.5)
    run = load(run_dir)
    assert [phase.name for phase in run.timelines[COMMAND]] == ["import", "check", "spawn"]
    assert run.wall_s == pytest.approx(before + 2, abs=0.01)


spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.sampled_from("abc")), max_size=12)


@given(spans)
def test_exclusive_pieces_cover_the_same_time_without_overlap(parts: list[tuple[int, int, str]]) -> None:
    """For properly nested phases; others are cut to what they lie in, so there is never an overlap."""
    phases = [TimedPhase(name, min(a, b), max(a, b)) for a, b, name in parts]
    pieces = sorted(exclusive(phases), key=lambda p: p.start)
    assert all(a.end <= b.start for a, b in zip(pieces, pieces[1:], strict=False))
    covered = {t for start, end in union(phases) for t in range(int(start), int(end))}
    assert {t for p in pieces for t in range(int(p.start), int(p.end))} <= covered
    nested = all(
        a.end <= b.start
        or b.end <= a.start
        or (a.start <= b.start and b.end <= a.end)
        or (b.start <= a.start and a.end <= b.end)
        for a in phases
        for b in phases
    )
    if nested:
        assert {t for p in pieces for t in range(int(p.start), int(p.end))} == covered


# --------------------------------------------------------------------- charts

finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(finite, min_size=1, max_size=900), st.booleans())
def test_every_point_of_a_line_lies_in_the_chart(values: list[float], zero: bool) -> None:
    chart = svg.line_chart("x", list(enumerate(values, 1)), width=340, height=150, zero=zero)
    Page(chart)
    for line in re.findall(r'points="([^"]+)"', chart):
        for x, y in (map(float, point.split(",")) for point in line.split()):
            assert 0 <= x <= 340 and 0 <= y <= 150


@given(finite, finite)
def test_ticks_are_within(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    found = svg.ticks(low, high)
    margin = 1e-6 * max(1.0, abs(low), abs(high))
    assert all(low - margin <= t <= high + margin for t in found) and len(found) <= 12


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5, "0.5"), (12.345, "12.3"), (123.4, "123"), (2.5e-6, "2.5e-6"), (1e6, "1e6"), (-0.25, "-0.25")],
)
def test_number(value: float, text: str) -> None:
    assert svg.number(value) == text


def test_long_runs_are_averaged() -> None:
    points = [(i, float(i % 5)) for i in range(10_000)]
    thin = svg.thinned(points)
    assert len(thin) == svg.MAX_POINTS and thin[-1][0] == 9_999
    assert all(value == pytest.approx(2.0) for _, value in thin)
    steps = {i: {"sync": 1.0, "update": 2.0} for i in range(1, 1001)}
    assert svg.stacked_chart("s", steps, ["sync", "update"], width=900, height=200).count("<rect") <= 240
