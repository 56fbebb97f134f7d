"""Pictures with questions: the same bytes for the same seed, held out by question and picture, verifiable; and
files of demonstrations with images."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Task
from megarl.rewards import compute_score
from megarl.tasks import generate, read_preferences, read_rows, recipe, write_rows
from megarl.tasks.generators.entries import Entry, identity
from megarl.tasks.generators.generate import SPLITS
from megarl.tasks.generators.school import COLORS, PAPER, PICTURE_OPTIONS, shapes

SIZES = {"train": 120, "eval": 60, "warm_start": 120, "expert": 40}
SOURCES = {"vision/count", "vision/choice", "vision/anls"}


def write(folder: Path, seed: int = 3, **options: int) -> dict[str, list[Any]]:
    folder.mkdir(exist_ok=True)
    paths = {split: folder / f"{split}.parquet" for split in SPLITS}
    return generate("shapes", paths, SIZES, seed=seed, options=options)


def drawn(number: int, /, **options: int) -> list[Entry]:
    entries = shapes(5, {**PICTURE_OPTIONS, **options})
    return [entry for entry in (next(entries) for _ in range(number)) if entry]


def test_the_same_arguments_write_the_same_bytes_and_another_seed_other_rows(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write(tmp_path / name, seed)
    digests = [
        [hashlib.sha256((tmp_path / name / f"{split}.parquet").read_bytes()).hexdigest() for split in SPLITS]
        for name in "abc"
    ]
    assert digests[0] == digests[1] and not set(digests[0]) & set(digests[2])


def test_files_hold_the_pictures_and_no_held_out_question_about_the_same_one(tmp_path: Path) -> None:
    written = write(tmp_path / "rows")
    asked = {}
    for split in SPLITS:
        path = tmp_path / "rows" / f"{split}.parquet"
        rows = read_rows(path, require_response=split in ("warm_start", "expert"))
        assert rows == written[split] and len(rows) == SIZES[split]
        assert {row.data_source for row in rows} == SOURCES
        for row in rows:
            assert row.prompt[0]["content"].count("<image>") == 1 and len(row.images) == 1
            assert Image.open(io.BytesIO(row.images[0])).size == (PICTURE_OPTIONS["size"],) * 2
        asked[split] = {identity(row.prompt[0]["content"], row.images) for row in rows}
        assert len(asked[split]) == len(rows), "each question about a picture once"
        questions = {row.prompt[0]["content"] for row in rows}
        assert len(questions) < len(rows), "one question about many pictures"
    assert not asked["eval"] & (asked["train"] | asked["warm_start"] | asked["expert"])


def test_verifiers_take_the_right_answer_and_refuse_the_slip() -> None:
    found = drawn(200)
    assert {entry.data_source for entry in found} == SOURCES
    for entry in found:
        info = {"question": entry.question, **entry.info}
        statuses = [
            compute_score(entry.data_source, text, entry.answer, info)["status"]
            for text in (entry.response, entry.slip, "x")
        ]
        assert statuses == ["ok", "wrong", "wrong"], entry


def test_as_many_shapes_as_the_answer_says() -> None:
    """Cells with the colour, counted in the picture."""
    answers = set()
    for entry in drawn(100, side=0, digit=0, cells=3, size=48, max_shapes=6):
        pixels = np.asarray(Image.open(io.BytesIO(entry.images[0])))
        color = COLORS[entry.question.split()[2]]
        cells = [pixels[y : y + 16, x : x + 16].reshape(-1, 3) for y in (0, 16, 32) for x in (0, 16, 32)]
        assert sum(bool((cell == color).all(1).any()) for cell in cells) == int(entry.answer)
        assert {tuple(map(int, p)) for p in pixels.reshape(-1, 3)} <= {PAPER, *COLORS.values()}
        answers.add(entry.answer)
    assert answers == set("0123456")


def test_the_letter_is_that_of_the_side() -> None:
    answers = set()
    for entry in drawn(50, count=0, digit=0):
        pixels = np.asarray(Image.open(io.BytesIO(entry.images[0])))
        asked = entry.question.split()[3]
        place = {name: np.argwhere((pixels == color).all(2))[:, 1].mean() for name, color in COLORS.items()
                 if (pixels == color).all(2).any()}  # fmt: skip
        assert len(place) == 2 and entry.answer == ("A" if place[asked] == min(place.values()) else "B")
        answers.add(entry.answer)
    assert answers == {"A", "B"}


def test_each_digit_has_strokes_of_its_own() -> None:
    """The bounding box, scaled to one size, differs between digits and is alike for one digit."""
    seen: dict[str, list[np.ndarray]] = {}
    for entry in drawn(120, count=0, side=0, size=64):
        image = Image.open(io.BytesIO(entry.images[0])).convert("L").point(lambda value: 255 - value)
        crop = image.crop(image.getbbox()).resize((12, 20))
        seen.setdefault(entry.answer, []).append(np.asarray(crop, np.float32) / 255)
    assert set(seen) == set("0123456789")
    means = {digit: np.mean(crops, 0) for digit, crops in seen.items()}
    for digit, crops in seen.items():
        nearest = [min(means, key=lambda other: float(np.abs(means[other] - crop).mean())) for crop in crops]
        assert nearest.count(digit) >= 0.9 * len(nearest)


def test_slips_are_of_warm_starts_alone(tmp_path: Path) -> None:
    written = write(tmp_path / "rows", slip_percent=50)
    wrong = [row for row in written["warm_start"] if row.response != row.ground_truth]
    assert 0.3 * SIZES["warm_start"] < len(wrong) < 0.7 * SIZES["warm_start"]
    assert all(row.response == row.ground_truth for row in written["expert"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0, "side": 0, "digit": 0}, "count, side, digit are all 0"),
        ({"size": 20, "cells": 3}, r"size=20 leaves shapes less than 8 pixels in 3 cells; set it to 24"),
        ({"max_shapes": 5}, r"max_shapes=5 do not fit into 2 x 2 cells"),
        ({"min_shapes": 3, "max_shapes": 2}, "a maximum is below its minimum"),
        ({"colors": 9}, r"colors=9 must be at least 2 and at most 5; the default is 3"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write(tmp_path / "rows", **options)
    assert not list((tmp_path / "rows").iterdir())


def test_preferences_have_pictures(tmp_path: Path) -> None:
    paths = {split: tmp_path / f"{split}.parquet" for split in ("train", "eval")}
    found = generate("shapes", paths, {"train": 20, "eval": 5}, seed=1, kind="preferences")
    assert read_preferences(paths["train"]) == found["train"]
    assert all(len(row.images) == 1 and row.chosen != row.rejected for row in found["train"])


def png(color: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(file, "PNG")
    return file.getvalue()


def test_demonstrations_may_have_images(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(png("red"))
    part = {"type": "image", "image": "red.png"}
    rows = [
        {"prompt": [{"role": "user", "content": "<image>How many?"}], "response": "3", "images": ["red.png"]},
        {"prompt": "<image>How many?", "completion": "3", "images": ["red.png"]},
        {"prompt": [{"role": "user", "content": [part, {"type": "text", "text": "How many?"}]}], "response": "3"},
        {"messages": [
            {"role": "user", "content": [part, {"type": "text", "text": "How many?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "An <image> of 3"}]},
        ]},
        {"prompt": "How many?", "response": "3"},
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    *seen, plain = read_rows(path, require_response=True)
    assert plain.images == () and [row.images for row in seen] == [(png("red"),)] * 4
    assert {row.prompt[0]["content"] for row in seen} == {"<image>How many?"}
    assert [row.response for row in seen] == ["3", "3", "3", "An <image> of 3"]
    assert seen[3].answer == {"role": "assistant", "content": "An <image> of 3"}


def test_demonstrations_with_images_go_through_files(tmp_path: Path) -> None:
    ask = ({"role": "user", "content": "<image>?"},)
    truth = {"style": "rule", "ground_truth": "3"}
    tasks = [Task(f"rows/{i}", "vision/count", ask, "vision", truth, {"i": i}, str(i), (png("red"),)) for i in range(2)]
    write_rows(tmp_path / "rows.parquet", tasks)
    assert read_rows(tmp_path / "rows.parquet", require_response=True) == tasks


def test_a_demonstration_with_too_few_images_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "<image><image>", "response": "3", "images": []}) + "\n")
    assert read_rows(path, require_response=True)[0].images == ()
    (tmp_path / "red.png").write_bytes(png("red"))
    path.write_text(json.dumps({"prompt": "<image><image>", "response": "3", "images": ["red.png"]}) + "\n")
    with pytest.raises(DataError, match=r"line 1: images must be as many as the prompt has <image> \(2\), got 1"):
        read_rows(path, require_response=True)


def test_bounds_of_its_options_are_no_others(tmp_path: Path) -> None:
    """A user's generator may have an option of the same name with values of its own."""
    with pytest.raises(ConfigError, match=r"taskset.options.size=8 must be at least 16 and at most 1024; the default"):
        generate("shapes", {}, {}, seed=1, options={"size": 8})
    own = tmp_path / "mine.py"
    own.write_text(
        "from megarl.tasks.generators.entries import Entry, Generator\n\n\ndef entries(seed, settings):\n"
        "    while True:\n        yield Entry('a' * settings['size'], '1', 'math')\n\n\n"
        "GENERATOR = Generator(entries, {'size': 2})\n"
    )
    assert recipe(str(own), {}, seed=1, options={"size": 3})["taskset.options.size"] == 3
