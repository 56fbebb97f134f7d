"""Rows with images: what is read, what is refused with its row, through files and store; and what a training job
refuses."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from megarl.buffer.store import Store
from megarl.config import Config
from megarl.core.errors import CheckpointError, ConfigError, DataError
from megarl.core.schema import Task, WeightsVersion
from megarl.run.checks.vision import check_images
from megarl.tasks import chat_messages, read_preferences, read_rows, write_rows
from megarl.tasks import image_rows as images
from megarl.tasks.image_processor import Processor


def picture(color: str = "red", kind: str = "PNG", size: tuple[int, int] = (6, 4)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, kind)
    return file.getvalue()


RED, BLUE = picture(), picture("blue", "JPEG")
ASK = [{"role": "user", "content": "<image>How many?"}]


def row(**changes: Any) -> dict[str, Any]:
    return {
        "data_source": "vision/count",
        "prompt": ASK,
        "ability": "",
        "reward_model": {"ground_truth": "3"},
    } | changes


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def part(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "text": None, "image": None} | more


def test_the_forms_of_an_image_in_parquet(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "blue.jpg").write_bytes(BLUE)
    forms = [{"bytes": RED, "path": None}, {"bytes": None, "path": "a/blue.jpg"}]
    [both] = read_rows(
        parquet(
            tmp_path / "both.parquet", row(images=forms, prompt=[{"role": "user", "content": "<image> or <image>?"}])
        )
    )
    assert both.images == (RED, BLUE) and both.prompt[0]["content"] == "<image> or <image>?"
    for i, form in enumerate([RED, {"image": RED}, {"bytes": RED, "path": "gone.png"}]):
        [task] = read_rows(parquet(tmp_path / f"{i}.parquet", row(images=[form])))
        assert task.images == (RED,)


def test_the_forms_of_an_image_in_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "red.png"
    path.write_bytes(RED)
    uri = "data:image/png;base64," + base64.b64encode(RED).decode()
    rows = [
        row(images=[form])
        for form in ("red.png", str(path), f"file://{path}", {"path": "red.png"}, {"image": uri}, uri)
    ]
    rows.append(
        row(
            prompt=[
                {"role": "user", "content": [{"type": "image", "image": uri}, {"type": "text", "text": "How many?"}]}
            ]
        )
    )
    for task in read_rows(jsonl(tmp_path / "rows.jsonl", *rows)):
        assert (task.images, task.prompt) == ((RED,), tuple(ASK))


def test_lists_of_parts_become_texts_with_placeholders_and_back(tmp_path: Path) -> None:
    content = [part("image"), part("text", text="How "), part("text", text="many?"), part("image")]
    given = row(
        prompt=[{"role": "system", "content": [part("text", text="Count.")]}, {"role": "user", "content": content}],
        images=[RED, BLUE],
    )
    [task] = read_rows(parquet(tmp_path / "rows.parquet", given))
    assert [m["content"] for m in task.prompt] == ["Count.", "<image>How many?<image>"]
    assert [m["content"] for m in chat_messages(task)] == [
        [{"type": "text", "text": "Count."}],
        [{"type": "image"}, {"type": "text", "text": "How many?"}, {"type": "image"}],
    ]


def test_a_text_may_speak_of_images(tmp_path: Path) -> None:
    for column in ({}, {"images": []}, {"images": None}):
        [task] = read_rows(jsonl(tmp_path / "rows.jsonl", row(**column)))
        assert task.images == () and chat_messages(task) == ASK


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": [RED, RED]}, r"row 2: images must be as many as the prompt has <image> \(1\), got 2"),
        ({"images": [RED], "prompt": [{"role": "user", "content": "How many?"}]}, r"has <image> \(0\), got 1"),
        (
            {"images": [b"not an image"]},
            r"row 2: images\[0\] must be an image, got '12 bytes, the image cannot be decoded as PNG",
        ),
        ({"images": [RED[:20]]}, "cannot be decoded as PNG"),
        ({"images": ["gone.png"]}, "No such file"),
        ({"images": ["https://example.org/a.png"]}, "nothing is downloaded"),
        ({"images": ["data:image/png;base64,%%"]}, "data: URI in base64"),
        ({"images": [{"bytes": None, "path": None}]}, "one of them given"),
        ({"images": [7]}, "a path or a data: URI"),
        ({"images": "a.png"}, "images must be a list"),
        (
            {"images": [RED] * 17, "prompt": [{"role": "user", "content": "<image>" * 17}]},
            "at most 16 images of 32 MiB",
        ),
        ({"images": [RED + b"x" * 2**25]}, "at most 16 images of 32 MiB"),
        ({"videos": ["a.mp4"]}, "videos are not supported"),
        (
            {"images": [RED], "prompt": [{"role": "user", "content": [{"type": "image", "image": "red.png"}]}]},
            "empty where the prompt's parts hold",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            r"prompt\[0\].content\[0\] must be {type: text",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    # Not through a file: parquet wants one type for all, JSON has no bytes.
    location = images.RowLocation(tmp_path / "rows.parquet", 1)
    with pytest.raises(DataError, match=message):
        images.images_of(location, row(**changes))


def test_an_image_too_large_to_decode_is_refused() -> None:
    with pytest.raises(ValueError, match="10000 x 6000 pixels"):
        images.size_of(picture(size=(10_000, 6_000)))


@given(st.lists(st.sampled_from(["<image>", "a", " ", "<", "image>", "\n"]), max_size=12))
def test_no_text_is_lost_around_placeholders(pieces: list[str]) -> None:
    content = "".join(pieces)
    task = Task("t/0", "s", ({"role": "user", "content": content},), "", {}, images=(RED,) * content.count("<image>"))
    if task.images:
        parts = chat_messages(task)[0]["content"]
        assert "".join(part.get("text", "<image>") for part in parts) == content
        assert sum(part["type"] == "image" for part in parts) == len(task.images)


def test_rows_are_written_as_they_were_read(tmp_path: Path) -> None:
    message = ({"role": "user", "content": "<image>?"},)
    tasks = [
        Task(f"rows/{i}", "vision/count", message, "", {"ground_truth": "3"}, images=(image,))
        for i, image in enumerate([RED, BLUE])
    ]
    tasks.append(Task("rows/2", "math", ({"role": "user", "content": "?"},), "", {"ground_truth": "3"}))
    write_rows(tmp_path / "rows.parquet", tasks)
    assert read_rows(tmp_path / "rows.parquet") == tasks


def test_the_store_keeps_images_with_their_tasks(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/store.db")
    message = ({"role": "user", "content": "<image><image>?"},)
    task = Task("train/0", "vision/count", message, "", {"ground_truth": "3"}, images=(BLUE, RED))
    plain = Task("train/1", "math", ({"role": "user", "content": "?"},), "", {"ground_truth": "3"})
    store.tasks.add("train", [task, plain])
    assert store.tasks.read("train") == [task, plain]
    assert store.tasks.read("train", images=False) == [replace(task, images=()), plain]
    store.rollouts.request("r0", "train", 0, WeightsVersion(1, 0), ["train/0", "train/1"], 1, {})
    assert [claim.task for claim in store.groups.claim("e0", 2)] == [task, plain]
    store.tasks.add("train", [plain])
    store.tasks.add("eval", [replace(task, task_id="train/0", images=(RED,) * 2)])  # nothing of the first is left
    assert store.tasks.read("eval")[0].images == (RED, RED)


def test_preferences_have_images_as_tasks_have(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(RED)
    answers, parts = (
        {"chosen": "3", "rejected": "2"},
        [{"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}],
    )
    told = {"prompt": [{"role": "user", "content": parts}], **answers}
    column = {"prompt": "<image>?", **answers, "images": ["a.png"]}
    found = read_preferences(jsonl(tmp_path / "rows.jsonl", told, column, {"prompt": "<image>?", **answers}))
    assert [row.images for row in found] == [(RED,), (RED,), ()]
    assert {row.prompt[0]["content"] for row in found} == {"<image>?"}
    assert chat_messages(found[0])[0]["content"] == [{"type": "image"}, {"type": "text", "text": "?"}]
    with pytest.raises(DataError, match="line 1: images must be as many as the prompt has <image>"):
        read_preferences(jsonl(tmp_path / "more.jsonl", {**column, "images": ["a.png", "a.png"]}))


def test_a_training_job_refuses_images_and_models_that_take_them() -> None:
    config, text = Config(), {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    plain = Task("train/0", "math", ({"role": "user", "content": "?"},), "", {"ground_truth": "3"})
    seen = Task("train/1", "math", ({"role": "user", "content": "<image>"},), "", {"ground_truth": "3"}, images=(RED,))
    check_images(config, text, {"train": [plain], "eval": []})
    with pytest.raises(DataError, match=r"row 2 \(taskset.train\) has 1 images and the model of .* takes text only"):
        check_images(config, text, {"train": [plain, seen], "eval": []})
    vision = {"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {"depth": 32}}
    with pytest.raises(
        ConfigError,
        match=r"vision-language model \(Qwen2VLForConditionalGeneration\): megarl has no trainer for these, only "
        r"rollouts",
    ):
        check_images(config, vision, {"train": [seen]})


def test_a_model_without_a_processor_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="takes text only"):
        Processor.open(tmp_path)
