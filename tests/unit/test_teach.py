"""``megarl data teach`` with a small real server: the file, going on after an end, and what it and sft refuse."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from aiohttp.test_utils import TestServer

from megarl.cli import parse_arguments
from megarl.core.errors import ConfigError, DataError, JobError
from megarl.run.checks import job as checks
from megarl.run.data.command import run
from megarl.run.data.teach import PART_ROWS
from megarl.tasks import ChatTokenizer, encode_demonstrations, read_rows, tokenizer_digest
from megarl.tasks.image_rows import data_uri
from megarl.tasks.row_files import write_table
from tests.loop.vision_models import picture
from tests.unit.small_job import config_of, refused
from tests.unit.test_store_experts import other_run
from tests.unit.test_teacher_server import LIKELY, Server, logp_of

TOP_K = 3


def rows_of(folder: Path, number: int = PART_ROWS + 6) -> Path:
    """Rows of a jsonl file; a third are an assistant's message."""
    lines = []
    for i in range(number):
        asked, answer = [{"role": "user", "content": f"{i} + 1 ="}], str(i + 1)
        row: dict[str, Any] = {"prompt": asked, "response": answer, "data_source": "sums"}
        if i % 3 == 1:
            row = {"messages": [*asked, {"role": "assistant", "content": answer}]}
        lines.append(row)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return path


def command(source: Path, *words: str) -> None:
    assert run(parse_arguments(["data", "teach", str(source), *words])) == 0


def taught(server: Server, source: Path, prepared: Path, *words: str) -> Path:
    """In a thread, because the command has an event loop of its own. ``NAME=`` leaves a setting out."""
    model = ChatTokenizer.open(prepared / "model")
    server.texts, server.length = (lambda token: model.decode([token], special=True)), 10**6

    async def main() -> Path:
        async with TestServer(server.app(detokenizes=False)) as running:
            url = f"teachers.large.url={running.make_url('/v1')}"
            given = [f"model.path={prepared / 'model'}", url, "teachers.large.retries=0", f"top_k={TOP_K}"]
            names = {word.partition("=")[0] for word in words}
            given = [word for word in given if word.partition("=")[0] not in names]
            given += [word for word in words if not word.endswith("=")]
            await asyncio.to_thread(command, source, *given)
            written = [word.partition("=")[2] for word in words if word.startswith("out=")]
            return Path(written[0]) if written else source.with_name("rows_taught.parquet")

    return asyncio.run(main())


def table(path: Path) -> list[dict[str, Any]]:
    with pq.ParquetFile(path) as file:
        rows: list[dict[str, Any]] = file.read().to_pylist()
    return rows


def test_rows_keep_their_texts_and_get_scores(prepared: Path, tmp_path: Path) -> None:
    source = rows_of(tmp_path)
    out = taught(Server(), source, prepared, "teachers.large.model=large")
    given, found = (read_rows(path, require_response=True, split="train") for path in (source, out))
    assert found == given
    tokenizer = ChatTokenizer.open(prepared / "model")
    for row, (prompt, response) in zip(table(out), encode_demonstrations(given, tokenizer), strict=True):
        ids = [*prompt.tolist(), *response.tolist()]
        wanted = [logp_of(ids[:place], ids[place]) for place in range(len(prompt), len(ids))]
        assert row["teacher_logp"] == pytest.approx(wanted, rel=1e-6)
        assert row["teacher_ids"] == [[LIKELY, LIKELY + 1, LIKELY + 2]] * len(response)
        assert row["teacher_topk_logp"] == [pytest.approx([-0.1, -0.2, -0.3])] * len(response)
        assert row["teacher"] == "large" == row["teacher_files"]
        assert row["teacher_tokenizer"] == tokenizer_digest(prepared / "model")


def test_an_ended_command_goes_on(prepared: Path, tmp_path: Path) -> None:
    source = rows_of(tmp_path)
    fails = Server(lambda number, answer: 400 if number == PART_ROWS + 4 else None)  # one request is the check's
    with pytest.raises(JobError, match=r"answered 400.*repeat the command, which goes on"):
        taught(fails, source, prepared, "teachers.large.model=large")
    parts = tmp_path / "rows_taught.parquet.parts"
    assert [path.name for path in parts.iterdir()] == ["000000000.parquet"] and not (
        tmp_path / "rows_taught.parquet"
    ).exists()
    with pytest.raises(ConfigError, match=r"000000000.parquet has scores of other rows, teachers or top_k; remove .*"):
        taught(Server(), source, prepared, "teachers.large.model=large", "top_k=2")
    again = Server()
    out = taught(again, source, prepared, "teachers.large.model=large")
    assert len(again.bodies) == 1 + 6, "only the second part is asked for"
    assert not parts.exists()
    once = taught(Server(), source, prepared, "teachers.large.model=large", f"out={tmp_path / 'once.parquet'}")
    assert table(once) == table(out)


def test_what_the_command_refuses(prepared: Path, tmp_path: Path) -> None:
    source, model = rows_of(tmp_path, 3), f"model.path={prepared / 'model'}"
    teacher = "teachers.near.path=/m"
    shown = tmp_path / "picture.jsonl"
    shown.write_text(json.dumps({"prompt": "<image> ?", "response": "1", "images": [data_uri(picture(1))]}) + "\n")
    (tmp_path / "there.parquet").touch()
    for given, words, match in (
        (source, [model], "teachers is empty; set teachers.NAME.path"),
        (source, [model, teacher, "top_k=x"], "top_k=x must be a whole number"),
        (source, [model, teacher, f"out={tmp_path / 'there.parquet'}"], "there.parquet exists; give another file"),
        (source, [model, teacher, "out=a.jsonl"], r"out=a\.jsonl must end in \.parquet and"),
        (source, [model, teacher, "parallel=tp2"], "parallel has 2 ranks; teach computes on one"),
        (source, [teacher], "no value for model.path"),
        (tmp_path, [teacher], "has no resolved.json; give the directory of a run, or a file of rows"),
    ):
        with pytest.raises(ConfigError, match=match):
            command(given, *words)
    for given, words, match in (
        (source, ["teachers.large.sources=[maths]"], r"rows\.jsonl: line 1 \(taskset\.train\) has data_source 'sums'"),
        (shown, [], r"picture\.jsonl: line 1 \(taskset\.train\) has images, which teach does not score"),
    ):
        with pytest.raises(DataError, match=match):
            taught(Server(), given, prepared, *words)


@pytest.fixture(scope="module")
def scored(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scored")
    return taught(Server(), rows_of(folder, 20), prepared, "teachers.large.model=large")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"teacher_logp": None}, ["row 4", "teacher_logp must be a value of the teacher; score the rows"]),
        ({"response": "5 "}, ["row 4", "teacher_tokens", "text, chat template or its options have changed"]),
        ({"teacher_tokenizer": "x"}, ["row 4", "the digest of model.path's tokenizer.json; take the model"]),
        ({"teacher_ids": [[1, 2, 999]]}, ["row 4", "teacher_ids must be k values for each of"]),
        ({"teacher_vocab_size": 10**6}, ["row 4", "teacher_vocab_size must be at most 128"]),
        ({"teacher_topk_logp": "high"}, ["row 4", "finite log-probs, none above 0"]),
    ],
)
def test_rows_that_sft_cannot_learn_from(
    prepared: Path, scored: Path, tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    rows = table(scored)
    if change.get("teacher_topk_logp"):
        change = {"teacher_topk_logp": [[1.0] * TOP_K for _ in rows[3]["teacher_logp"]]}
    rows[3] |= change
    write_table(tmp_path / "rows.parquet", rows, None, pq.read_schema(scored))
    config = config_of(
        prepared, "algorithm=sft", "algorithm.divergence=forward_kl", f"taskset.train={tmp_path / 'rows.parquet'}",
        "parallel=tp1",
    )  # fmt: skip
    refused(DataError, config, str(tmp_path / "rows.parquet"), *words)


def test_settings_of_sft(prepared: Path, scored: Path) -> None:
    plain, base = f"taskset.train={prepared / 'data' / 'warm_start.parquet'}", ["algorithm=sft", "parallel=tp1"]
    refused(DataError, config_of(prepared, *base, plain, "algorithm.divergence=jsd"), "column 'teacher' is missing")
    base.append(f"taskset.train={scored}")
    forward = "algorithm.divergence=forward_kl"
    checks.check(config_of(prepared, *base, forward, "algorithm.cross_entropy_coef=0", "algorithm.top_k=2"))
    for more, error, words in (
        (["algorithm.top_k=2"], ConfigError, "algorithm.top_k=2 with algorithm.divergence=sampled"),
        (["algorithm.cross_entropy_coef=0"], ConfigError, "algorithm.cross_entropy_coef=0 with algorithm.divergence"),
        ([forward, "algorithm.top_k=4"], DataError, "teacher_ids must be at least 4 ids for each token"),
    ):
        refused(error, config_of(prepared, *base, *more), words)


def test_responses_of_a_run(prepared: Path, tmp_path: Path) -> None:
    """Its model and template count; a response with a low score can be left out."""
    run_dir = other_run(prepared, tmp_path)
    found = {}
    for name, more in (("all", []), ("right", ["--min-score", "1"])):
        out = tmp_path / f"{name}.parquet"
        taught(Server(), run_dir, prepared, "model.path=", "teachers.large.model=large", f"out={out}", *more)
        found[name] = [(row["prompt"], row["response"]) for row in table(out)]
    assert len(found["all"]) == 6 and len(found["right"]) == 2
    assert [response for _, response in found["right"]] == ["1", "3"]
    assert json.loads(found["right"][0][0])[-1]["content"] == "0 + 1 ="
