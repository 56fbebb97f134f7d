"""``megarl data`` on a run's store: filters, counts, rows that load back, pruning of what nothing needs, the page."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megarl.buffer.store import Claim, ExpertExperience, Selection, Store, Used
from megarl.cli import main
from megarl.config import Config, compose, save_resolved
from megarl.core.errors import ConfigError
from megarl.core.schema import Reward, Task, Trajectory, Turn, WeightsSpan, WeightsVersion
from megarl.run.data import export
from megarl.run.data.export import EXPERT, TRAJECTORY, Pruned, export_experts
from megarl.run.data.filters import selection_of
from megarl.run.data.open_run import StoredRun, count
from megarl.run.data.page import write_page
from megarl.run.data.show import context_of, sample, show, tokens_of
from megarl.tasks import read_rows, text_of_tokens
from megarl.tasks.image_rows import with_inline_images
from megarl.tasks.row_files import read_table
from tests.loop.vision_models import picture
from tests.stores import expert, make_task

SIZE = 4
"""Responses of a group."""
TEXTS = ("ja 🙂", "<script>alert(1)</script>", "a & b", "</i>\x1b[31m")
SCORES = (1.0, 0.5, -1.0, math.nan)
LATER = WeightsVersion(1, 4)


def write_model(folder: Path) -> Tokenizer:
    """A tokenizer of bytes, without merges."""
    folder.mkdir()
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    return tokenizer


def trajectory(claim: Claim, index: int, tokenizer: Tokenizer) -> Trajectory:
    """Two responses with a tool's message between them; the second has tokens of two weights versions."""
    prompt, call, reply, answer = (
        np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        for text in (claim.task.question, "call", "tool <b>", f"{TEXTS[index]}<|end|>")
    )
    spans = (WeightsSpan(0, 1, claim.version), WeightsSpan(1, len(answer), LATER))
    logp = np.linspace(-6, 0, len(answer), dtype=np.float32)
    first = (WeightsSpan(0, len(call), claim.version),)
    status = ("ok", "wrong", "wrong", "error")[index]
    return Trajectory(
        claim.rollout_id,
        claim.task.task_id,
        claim.group_id,
        index,
        SIZE,
        (
            Turn("user", prompt),
            Turn("model", call, 0, np.zeros(len(call), np.float32), first, "stop", 0.25),
            Turn("tool", reply, 1),
            Turn("model", answer, 2, logp, spans, "length" if index == 2 else "stop"),
        ),
        Reward(SCORES[index], status, {} if index == 3 else {"format": 0.5}),  # type: ignore[arg-type]
        metadata={"reward_message": "no <verdict>"} if index == 3 else {},
    )


def put_rollout(store: Store, name: str, tokenizer: Tokenizer, step: int, kind: Any = "train") -> None:
    store.pacing.record_version(WeightsVersion(1, step), step)
    store.rollouts.request(name, kind, step, WeightsVersion(1, step), store.tasks.ids("train")[:2], SIZE, {})
    for claim in store.groups.claim("a", 9):
        assert store.groups.put(claim, [trajectory(claim, i, tokenizer) for i in claim.indices])


@functools.cache
def composed(*overrides: str) -> Config:
    return compose(["experiment=quickstart", "run.name=looked", *overrides])


def config_of(folder: Path, url: str, *overrides: str) -> Config:
    config = composed(*overrides)
    return replace(
        config,
        run=replace(config.run, dir=str(folder)),
        model=replace(config.model, path=f"{folder}/model"),
        store=replace(config.store, url=url),
    )


@contextmanager
def filled(request: pytest.FixtureRequest, folder: Path) -> Iterator[StoredRun]:
    """A run with rollouts of four training steps, the last one unused, and two evaluations."""
    with pytest.MonkeyPatch.context() as patch:
        url = f"sqlite:///{folder}/store.db"
        if request.param == "postgres":
            patch.setenv("LOOKED_STORE", request.getfixturevalue("new_postgres")())
            url = "env://LOOKED_STORE"
        config = config_of(folder, url)
        save_resolved(config, folder / "resolved.json")
        tokenizer = write_model(folder / "model")
        store = Store(url)
        code = replace(make_task(1), data_source="code", extra_info={"index": 1, "x": []})
        store.tasks.add("train", [make_task(0), code])
        for step in range(4):
            put_rollout(store, f"train-{step:06d}", tokenizer, step)
        for name in ("eval-before", "eval-2"):
            put_rollout(store, name, tokenizer, 2, "eval")
            store.journal.record_evaluation("trainer", name, {"rollout_id": name, "step": 2})
        for step in range(3):
            name = f"train-{step:06d}"
            store.journal.record_step(
                step + 1, {}, Used((f"{name}/0",), {f"{name}/1": "surplus"}, (), {(f"{name}/0", 2): "dull"})
            )
        yield StoredRun(folder, config, store)
        store.close()


DATABASES = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(scope="module", params=DATABASES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredRun]:
    """One that tests read."""
    with filled(request, tmp_path_factory.mktemp("run")) as run:
        yield run


@pytest.fixture(params=DATABASES)
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoredRun]:
    """One that the test changes."""
    with filled(request, tmp_path) as run:
        yield run


def selected(run: StoredRun, *words: str) -> list[tuple[str, int]]:
    selection, _ = selection_of(words)
    return [
        (group.group_id, glance.number)
        for group, members in run.glances(selection)
        for glance in members
        if selection.matches(glance)
    ]


def test_filters_choose_by_step_reward_end_source_and_kind(run: StoredRun) -> None:
    assert len(selected(run)) == 12 * SIZE
    assert selected(run, "kind=train", "steps=2-3", "reward=1", "source=code") == [
        ("train-000001/1", 0),
        ("train-000002/1", 0),
    ]
    assert {number for _, number in selected(run, "reward=..0.5")} == {1, 2}, "none without a verdict"
    assert {number for _, number in selected(run, "end=truncated")} == {2}
    assert {number for _, number in selected(run, "end=reward_error,truncated")} == {2, 3}
    assert {group.partition("/")[0] for group, _ in selected(run, "steps=4-")} == {"train-000003"}
    assert {group.partition("/")[0] for group, _ in selected(run, "kind=eval")} == {"eval-before", "eval-2"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step=3"], "'step=3' is no filter; filters are steps=3"),
        (["steps=4-3"], "steps=4-3: the first bound is above the second"),
        (["steps=-"], "steps=-: write steps=3"),
        (["reward=high"], "reward=high: write reward=1"),
        (["reward=nan"], "reward=nan: write reward=1"),
        (["end=stopped"], "end=stopped is none of finished"),
        (["kind=test"], "kind=test is none of train, eval, expert"),
        (["steps=1", "steps=2"], "steps is given twice"),
        (["kind=expert"], "only count and export accept them"),
    ],
)
def test_a_word_that_is_no_filter_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        selection_of(words)


def test_counts_by_end(run: StoredRun) -> None:
    lines = [line.split() for line in count(run, selection_of(["kind=train"])[0], "end").splitlines()]
    assert [line[:3] for line in lines[1:]] == [
        ["finished", "8", "16"],
        ["reward_error", "8", "8"],
        ["truncated", "8", "8"],
        ["all", "8", "32"],
    ]
    assert lines[-1][3:6] == ["25.0%", "0.1667", "8"], "means are of those with a verdict"


def test_show_and_sample_print_what_is_there(run: StoredRun) -> None:
    text = show(run, "train-000001/1[3]", tokens=True)
    assert "dropped by step 2: surplus" in text and "ground truth: 2" in text and "reward_message: no <verdict>" in text
    assert "(2) tool: 8 tokens\ntool <b>" in text and "weights 1.1 (1), 1.4 (9)" in text
    assert "\x1b" not in text, "no response steers a terminal"
    assert show(run, "train-000001/1").count("reward -1 (wrong), truncated") == 1
    every = Selection()
    assert sample(run, every, 5, seed=1) == sample(run, every, 5, seed=1) != sample(run, every, 5, seed=2)
    with pytest.raises(ConfigError, match="train-9/1: no such group"):
        show(run, "train-9/1")


def test_a_character_of_several_tokens_stands_at_its_last(run: StoredRun) -> None:
    (first, *_) = run.store.selection.members(["train-000000/0"])
    tokens = tokens_of(first.response, run.tokenizer, 100)
    assert [token.text for token in tokens] == ["j", "a", " ", "", "", "", "🙂", "<|end|>"]
    assert [token.version for token in tokens] == ["1.0"] + ["1.4"] * 7 and tokens[0].logp == -6


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_exported_rows_load_back(run: StoredRun, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "PART_BYTES", 1)  # a part for each group
    path = tmp_path / name
    assert export.export(run, selection_of(["kind=train", "reward=-1..1"])[0], path) == 8 * 3
    _, rows = read_table(path, TRAJECTORY.names)
    (stored, *_) = run.store.selection.members(["train-000000/1"])
    row = next(row for row in rows if (row["group_id"], row["index"]) == ("train-000000/1", 0))
    assert set(row) == set(TRAJECTORY.names)
    turns = row["turns"]
    for turn, wanted in zip(turns, stored.turns, strict=True):
        assert turn["token_ids"] == wanted.token_ids.tolist() and turn["author"] == wanted.author
        assert (turn["logp"] is None) == (wanted.logp is None)
        assert wanted.logp is None or np.array(turn["logp"], np.float32).tobytes() == wanted.logp.tobytes()
    assert turns[3]["versions"] == [{"start": 0, "end": 1, "version": "1.0"}, {"start": 1, "end": 8, "version": "1.4"}]
    extra = json.loads(row["extra_info"]) if name.endswith("parquet") else row["extra_info"]
    assert extra == {"index": 1, "x": []} and row["reward_model"]["ground_truth"] == "2"
    assert (row["response"], row["score"], row["acc"], row["step"], row["reason"]) == ("ja 🙂", 1.0, True, 1, "surplus")
    assert row["prompt"] == [{"role": "user", "content": "1 + 1 ="}] and row["data_source"] == "code"
    if name.endswith("parquet"):
        assert pq.ParquetFile(path).num_row_groups == 8, "written part by part"
    assert [each.name for each in tmp_path.glob(".rows*")] == []


def test_exported_expert_rows_can_be_imported(own: StoredRun, tmp_path: Path) -> None:
    logp = np.array([-0.5, -1.0], np.float32)
    own.store.experts.import_sources([("a", [expert(0, score=0.5), expert(1, teacher_logp=logp, tokenizer="t")])])
    assert export_experts(own.store, tmp_path / "experts.parquet") == 2
    _, rows = read_table(tmp_path / "experts.parquet", EXPERT.names)
    assert [(row["response"], row["score"], row["teacher_logp"]) for row in rows] == [
        ("1", 0.5, None),
        ("2", None, [-0.5, -1.0]),
    ]
    assert [row["images"] for row in rows] == [[], []]


@pytest.mark.parametrize("name", ["experts.parquet", "experts.jsonl"])
def test_exported_expert_rows_keep_their_images(own: StoredRun, tmp_path: Path, name: str) -> None:
    prompt, image = ({"role": "user", "content": "<image> ?"},), picture(1)
    task = Task("expert/0", "", prompt, "", {}, response="3", images=(image,))
    own.store.experts.import_sources([("a", [ExpertExperience(with_inline_images(task))])])
    assert export_experts(own.store, tmp_path / name) == 1
    (row,) = read_rows(tmp_path / name, require_response=True, split="expert")
    assert (row.prompt, row.images, row.response) == (prompt, (image,), "3")


def checkpoint(run: StoredRun, step: int) -> None:
    folder = run.run_dir / "checkpoints" / f"global_step_{step}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")


def left(run: StoredRun) -> set[str]:
    """Groups that have trajectories."""
    return {group for group, _ in selected(run)}


def pruned(run: StoredRun, *words: str, config: Config | None = None, delete: bool = True) -> Pruned:
    run = StoredRun(run.run_dir, config or run.config, run.store)
    return export.prune(run, selection_of(words)[0], delete=delete)


def test_pruning_takes_what_nothing_needs(own: StoredRun) -> None:
    before = left(own)
    assert pruned(own, "kind=train").deleted == 0, "without a checkpoint a start begins again"
    checkpoint(own, 2)
    assert not pruned(own, delete=False).deleted and left(own) == before, "a look deletes nothing"
    found = pruned(own)
    gone = before - left(own)
    assert gone == {f"{name}/{i}" for name in ("train-000000", "train-000001", "eval-2") for i in range(2)}
    assert found.deleted == 6 * SIZE and found.tallies["train"].groups == 4
    assert found.kept == {
        "which no step has used": 2,
        "used after the newest checkpoint (step 2)": 2,
        "which the report shows (eval-before, eval-after)": 2,
    }
    assert own.store.groups.states("train-000000")["train-000000/1"] == ("dropped", 1, "surplus"), "groups stay"
    assert pruned(own).deleted == 0
    with pytest.raises(ConfigError, match="they were pruned"):
        show(own, "train-000000/0")
    assert own.store.journal.events("prune")[0]["data"]["trajectories"] == 6 * SIZE


def test_a_group_goes_only_where_all_its_trajectories_match(own: StoredRun) -> None:
    checkpoint(own, 3)
    assert pruned(own, "kind=train", "reward=..1").deleted == 0, "one has no verdict"
    assert pruned(own, "source=code", "kind=train").deleted == 3 * SIZE


def test_what_replay_or_prioritized_order_reads_stays(own: StoredRun) -> None:
    checkpoint(own, 3)
    url = own.config.store.url
    replays = config_of(own.run_dir, url, "buffer.replay.share=0.5", "buffer.replay.max_age=2")
    assert pruned(own, "kind=train", config=replays).kept == {
        "which no step has used": 2,
        "which steps may train on again (buffer.replay, from step 2 on)": 4,
    }
    assert {group for group in left(own) if group.startswith("train")} == {
        f"train-{step:06d}/{i}" for step in (1, 2, 3) for i in range(2)
    }
    prioritized = config_of(own.run_dir, url, "taskset.order=prioritized")
    assert pruned(own, "kind=train", "steps=1-3", config=prioritized).deleted == 0


def test_a_resume_uses_again_what_was_sampled_ahead(own: StoredRun) -> None:
    """Of weights before an older checkpoint, used after it."""
    own.store.journal.record_step(4, {}, Used(("train-000003/0",), {"train-000003/1": "surplus"}))
    own.store.pacing.record_version(WeightsVersion(1, 3), 1)  # it was asked for with weights of one step
    for step in (2, 4):
        checkpoint(own, step)
    found = pruned(own, "kind=train", "steps=4")
    assert found.deleted == 0 and found.kept == {"which a resume from an earlier checkpoint would use again": 2}
    own.store.rollouts.discard(2)
    assert own.store.groups.take(9, step=3) == ["train-000003/0", "train-000003/1"]
    assert own.store.selection.delete_trajectories(["train-000003/0"]) == 0, "ready again"


def test_a_page_shows_responses_as_text(run: StoredRun, tmp_path: Path) -> None:
    path = tmp_path / "data.html"
    said = write_page(run, selection_of(["kind=train", "end=truncated"])[0], path, 3, ["kind=train"])
    html = path.read_text()
    assert said == f"{path}: 3 of 8 train groups" and "Training, the last 3 of 8 groups" in html
    assert "Held-out" not in html
    assert html.count("<script>") == 1 and "alert(1)<" not in html and "tool &lt;b&gt;" in html and "\x1b" not in html
    assert html.count('class="response other"') == 9, "those that do not match are shown, pale"
    assert "no &lt;verdict&gt;" in html and "<u>1.4</u>" in html and "🙂" in html
    assert 'title="-6.0000 · 1.3 · ' in html and "http" not in html.replace("http://www.w3.org", "")


def test_a_page_shows_training_and_held_out_tasks_under_their_names(run: StoredRun, tmp_path: Path) -> None:
    said = write_page(run, selection_of([])[0], tmp_path / "a.html", 5, [])
    assert said.endswith("3 of 8 train groups, 2 of 4 held-out groups")
    html = (tmp_path / "a.html").read_text()
    assert html.index("Training, the last 3") < html.index("train-000003/1") < html.index("Held-out tasks, the last 2")
    assert "held-out <b>after step 2</b>" in html and "train <b>step 4</b>" in html
    assert len(set(re.findall(r'<section class="group" id="(\w+)"', html))) == 5, "links lead to one group each"


def test_a_turn_without_a_turn_before_it_has_words() -> None:
    turns = [Turn("user", np.zeros(1, np.int32), follows) for follows in (-1, 0, -1, 1)]
    assert [context_of(turns, i) for i in range(3)] == [None, None, "begins a new context"]
    assert context_of(turns, 3) == "continues turn 1"


def test_excluded_members_are_named_and_in_no_statistics(run: StoredRun, tmp_path: Path) -> None:
    """Rewards 1.0, 0.5, -1.0 and none; the third is excluded."""
    text = show(run, "train-000001/0")
    assert text.count("not trained: dull") == 1 and "rewards: mean 0.75," in text
    path = tmp_path / "data.html"
    write_page(run, selection_of(["kind=train", "steps=2"])[0], path, 9, [])
    assert path.read_text().count("not trained: dull") == 1 and "0.75 ± 0.354" in path.read_text()


def test_a_page_has_bounds(run: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.run.data.page.TOKENS_OF_PAGE", 1)
    monkeypatch.setattr("megarl.run.data.page.TOKENS_OF_TURN", 2)
    monkeypatch.setattr("megarl.run.data.page.MEMBERS", 2)
    assert write_page(run, Selection(), tmp_path / "a.html", 9, []).endswith(
        "1 of 8 train groups, 1 of 4 held-out groups"
    )
    html = (tmp_path / "a.html").read_text()
    assert "more tokens are left out" in html and "The first 2 of 4 responses." in html


def test_commands_read_while_a_job_writes_and_say_what_is_wrong(
    run: StoredRun, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    folder = str(run.run_dir)
    with run.store.database.writer.begin():  # a job's transaction is under way
        assert main(["data", "count", folder, "--by", "kind", "steps=1-3"]) == 0
    assert main(["data", "export", folder, "-o", str(tmp_path / "x.jsonl"), "kind=eval"]) == 0
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 4 * SIZE
    assert main(["data", "prune", folder]) == 0
    assert "kept: 2 groups, which no step has used" in capsys.readouterr().out
    for words, message in (
        (["count", f"{folder}/none"], "has no resolved.json"),
        (["prune", folder, "source="], "source= has an empty name; give a data source"),
        (["count", folder, "source=code,"], "source=code, has an empty name"),
        (["count", folder, "source=maths"], "source=maths: no task has it; sources are code, reasoning_gym/chain_sum"),
        (["export", folder, "-o", "rows.csv"], "-o rows.csv: end the name in .parquet or .jsonl"),
        (["page", folder, "reward=7"], "no trajectory matches reward=7"),
    ):
        assert main(["data", *words]) == 2
        assert message in caplog.messages[-1]


class Plain:
    """A tokenizer whose unknown characters are bytes, as of Llama 2 and Gemma."""

    def __init__(self) -> None:
        vocab = {"▁": 0, "a": 1, "▁the": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
        self.tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
        self.tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )

    def decode(self, ids: Any, *, special: bool = False) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def test_tokens_that_are_no_characters_have_a_text_too() -> None:
    plain: Any = Plain()
    whole = [2, 0, *(3 + byte for byte in "é🙂".encode()), 1]
    assert text_of_tokens(plain, whole) == [" the", " ", "", "é", "", "", "", "🙂", "a"]
    assert "".join(text_of_tokens(plain, whole[:-2])).startswith(" the é") and text_of_tokens(plain, []) == []
    draw = np.random.default_rng(0)
    for _ in range(300):
        ids = draw.integers(0, 259, draw.integers(1, 12)).tolist()
        found = text_of_tokens(plain, ids)
        assert len(found) == len(ids)
        if "�" not in (text := plain.decode(ids)):
            assert "".join(found) == text
