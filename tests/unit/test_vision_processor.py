"""Qwen2.5-VL's processor without torchvision: patches and tokens of images, and what a training job refuses of them."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import Qwen2_5_VLConfig

from megarl.buffer.store import ExpertExperience, Store
from megarl.config import Config
from megarl.config.schema import ModelConfig, RolloutConfig
from megarl.config.taskset import TasksetConfig
from megarl.core.errors import CheckpointError, ConfigError, DataError
from megarl.core.schema import Task
from megarl.run.checks import job, vision
from megarl.run.checks.inputs import ExpertCheck, check_lengths
from megarl.run.checks.tasksets import without_overlong
from megarl.run.run_dir.prepare import make
from megarl.run.run_dir.rows import processor_of
from megarl.tasks import ChatTokenizer, chat_messages, encode_rows, write_rows
from megarl.tasks.image_processor import (
    DEFAULT,
    Processor,
    check_image_files,
    check_image_prompts,
    pixel_limits,
    prompt_lengths,
)
from megarl.tasks.image_rows import with_inline_images
from megarl.train.batch.images import ImageInputs, demonstrations_of
from megarl.train.rollout.reading import NodeReader, RolloutReader
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from tests.loop.vision_models import (
    QWEN,
    QWEN_IMAGE,
    QWEN_SIZES,
    QWEN_UNIT,
    picture,
    save_qwen_processor,
    save_tiny_idefics3,
    save_tiny_qwen2_5_vl,
)
from tests.parallel.families import score_class
from tests.unit.small_job import config_of as settings_of
from tests.unit.small_job import refused

VISION: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2},
}
UNIT = QWEN_UNIT**2
SIDES = ((1, 1), (3, 40), (40, 3), (27, 29), (56, 56), (200, 130), (500, 20), (640, 480))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen2_5_vl(tmp_path_factory.mktemp("qwen") / "model")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> ChatTokenizer:
    return ChatTokenizer.open(model)


def jpeg(width: int = 300, height: int = 200) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(picture(0, width, height))).save(file, "JPEG")
    return file.getvalue()


def task(row: int, *images: bytes, text: str = "How many dogs ?", **more: Any) -> Task:
    prompt = ({"role": "user", "content": " ".join([*["<image>"] * len(images), text])},)
    return Task(f"train/{row}", "vision/count", prompt, "", {"ground_truth": "3"}, images=images, **more)


def config_of(path: Path, **changes: Any) -> Config:
    rollout = RolloutConfig(max_prompt_tokens=40)
    taskset = TasksetConfig(train="rows.parquet", eval="rows.parquet")
    return replace(Config(model=ModelConfig(path=str(path)), rollout=rollout, taskset=taskset), **changes)


MAKE = """
import json, os, sys
from megarl.core.imports import do_without_videos
do_without_videos(); do_without_videos()
from transformers import AutoProcessor
for family, path in json.loads(sys.argv[1]).items():
    if (pid := os.fork()) == 0:
        processor = AutoProcessor.from_pretrained(path)
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
        kinds = [type(processor).__name__, type(processor.image_processor).__name__]
        modelling = any("modeling_qwen" in name for name in sys.modules)
        print(json.dumps([family, kinds[0], smart_resize(56, 84), modelling]), flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, family
"""
"""Makes the processors of families, each in a process that has imported transformers and no family; vLLM takes
``smart_resize`` as it does."""


def test_a_processor_is_made_without_torchvision_and_twice_is_once(tmp_path: Path) -> None:
    """In processes of their own: others here may have made it work."""
    models = {family: str(save_qwen_processor(tmp_path / family, family)) for family in QWEN}
    done = subprocess.run([sys.executable, "-c", MAKE, json.dumps(models)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert found == [[family, QWEN[family][2].__name__, [56, 84], False] for family in QWEN]


@pytest.mark.parametrize("limits", [(None, None), (None, 4 * UNIT), (4 * UNIT, None), (3 * UNIT, 5 * UNIT)])
def test_the_grid_from_the_head_is_that_of_the_pixels(model: Path, limits: tuple[int | None, int | None]) -> None:
    processor = Processor.open(model, *limits)
    for width, height in SIDES:
        image = picture(width, width, height)
        pixels, grid = processor.pixels(image)
        assert grid == processor.grid(image), (width, height)
        assert pixels.shape == (grid[0] * grid[1] * grid[2], 3 * 2 * 14 * 14) and pixels.dtype == np.float32
        assert processor.num_vectors(image) == len(pixels) // 4


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_a_turned_file_of_each_format_has_the_grid_of_its_pixels(model: Path, kind: str) -> None:
    processor, file, exif = Processor.open(model), io.BytesIO(), Image.Exif()
    exif[274] = 6  # turned by 90 degrees
    Image.open(io.BytesIO(picture(3, 120, 40))).save(file, kind, exif=exif)
    assert processor.pixels(file.getvalue())[1] == processor.grid(file.getvalue())


def test_lengths_are_those_of_the_processors_ids(model: Path, tokenizer: ChatTokenizer) -> None:
    processor = Processor.open(model, 2 * UNIT, 6 * UNIT)
    tasks = [task(0), task(1, picture(1, 90, 60)), task(2, picture(2, 30, 30), picture(3, 100, 40))]
    whole = [processor.prompt_ids(tokenizer.render(chat_messages(t)), t.images) for t in tasks[1:]]
    assert prompt_lengths(tasks, tokenizer, processor)[1:] == [len(ids) for ids in whole]
    assert prompt_lengths(tasks, tokenizer, None) == [len(ids) for ids in encode_rows(tasks, tokenizer)]
    assert [int((ids == QWEN_IMAGE).sum()) for ids in whole] == [
        sum(map(processor.num_vectors, t.images)) for t in tasks[1:]
    ]


def test_pixel_limits_are_the_files_or_the_settings(tmp_path: Path, model: Path) -> None:
    assert pixel_limits(tmp_path) == DEFAULT
    assert pixel_limits(model) == (UNIT, 16 * UNIT) and pixel_limits(model, None, 4 * UNIT) == (UNIT, 4 * UNIT)
    (tmp_path / "preprocessor_config.json").write_text('{"min_pixels": 3136, "max_pixels": 12845056}')  # as published
    assert pixel_limits(tmp_path) == (3136, 12845056) and pixel_limits(tmp_path, 5000) == (5000, 12845056)


def test_files_as_published_are_limited_alike(tmp_path: Path, model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    (tmp_path / "preprocessor_config.json").write_text(
        '{"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, '
        '"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}'
    )
    image = picture(1, 300, 300)
    assert Processor.open(tmp_path).grid(image) == (1, 22, 22)
    assert Processor.open(tmp_path, None, 9 * UNIT).pixels(image)[1] == (1, 6, 6)
    assert Processor.open(tmp_path).pixels(picture(1, 28, 28))[1] == (1, 4, 4)


def test_another_family_has_no_grid(tmp_path: Path) -> None:
    processor = Processor.open(save_tiny_idefics3(tmp_path))
    with pytest.raises(DataError, match="do not follow from the size of an image"):
        processor.grid(picture(1))
    with pytest.raises(DataError, match="makes no patches"):
        processor.pixels(picture(1))
    with pytest.raises(CheckpointError, match="has no limits in pixels; leave model.min_image_pixels"):
        Processor.open(tmp_path, 1000)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (task(4, jpeg()[:-2000]), "the image cannot be decoded as PNG.*image file is truncated"),
        (task(4, picture(1, 2010, 10)), "aspect ratio must be smaller than 200"),
        (task(4, picture(1), text="<|image_pad|> ?"), r"it has 2 <\|image_pad\|> and 1 images; write <image> once"),
        (task(4, picture(1, 112, 112), text="?"), "prompt has 21 tokens with its 1 images, rollout.max_prompt_tok"),
        (task(4, text="How " * 21), "prompt has 23 tokens, rollout.max_prompt_tokens is 20; raise it or drop the row"),
    ],
)
def test_a_row_that_the_model_cannot_take_is_named(
    model: Path, tokenizer: ChatTokenizer, asked: Task, message: str
) -> None:
    rows = [task(row, jpeg(60, 40)) for row in range(4)]
    check = partial(check_image_prompts, tokenizer=tokenizer, processor=Processor.open(model), limit=20)
    check(rows, path="rows.parquet")
    with pytest.raises(DataError, match=f"rows.parquet: row 5: .*{message}"):
        check([*rows, asked], path="rows.parquet")


def test_images_of_demonstrations_are_decoded(model: Path) -> None:
    with pytest.raises(DataError, match=r"rows.parquet: row 2: .*image file is truncated"):
        vision.check_image_files_of(config_of(model), "train", [task(0), task(1, jpeg()[:-900])])
    check_image_files([task(0, jpeg()), task(1)], path="rows.parquet")


def test_lengths_of_demonstrations_count_the_images(model: Path, tokenizer: ChatTokenizer) -> None:
    rows = [task(0, picture(1, 112, 112), response="three")]
    check = partial(check_lengths, config_of(model), "train", rows, tokenizer)
    check(26, Processor.open(model))
    with pytest.raises(DataError, match="row 1 .*has 26 tokens with its answer, the model's context is 25"):
        check(25, Processor.open(model))


def test_overlong_prompts_are_dropped_with_their_images(model: Path, tokenizer: ChatTokenizer) -> None:
    config = config_of(model, taskset=TasksetConfig(train="r", overlong_prompts="drop"))
    config = replace(config, rollout=replace(config.rollout, max_prompt_tokens=20))
    rows = [task(0, picture(1, 112, 112)), task(1, picture(1, 30, 30)), task(2)]
    processor = processor_of(config, [rows])
    assert without_overlong(config, "train", rows, tokenizer, processor) == rows[1:]
    assert processor_of(config, [[task(0)], []]) is None
    vision.check_prompts_of(config, "train", rows, rows[1:], tokenizer, processor)
    with pytest.raises(DataError, match="row 1: prompt has 24 tokens with its 1 images"):
        refusing = replace(config, taskset=replace(config.taskset, overlong_prompts="refuse"))
        vision.check_prompts_of(refusing, "train", rows, rows, tokenizer, processor)


def test_a_family_with_a_table_is_accepted_with_its_rows(model: Path) -> None:
    vision.check_images(config_of(model), VISION, {"train": [task(0, picture(1)), task(1)]})


def test_images_need_the_files_of_a_processor(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes images and has no processor_config.json or preprocessor_config.json;"):
        vision.check_images(config_of(tmp_path), VISION, {"train": [task(0)]})
    with pytest.raises(ConfigError, match=r"has no processor_config.json or .*row 2 \(taskset.train\) has 1 images"):
        vision.check_images(config_of(tmp_path), VISION, {"train": [task(0), task(1, picture(1))]})


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (783, None, "model.min_image_pixels=783 is less than one vector's 28 x 28 pixels in .*; set it to 784 or more"),
        (None, 783, "model.max_image_pixels=783 is less than"),
        (2000, 1000, "model.min_image_pixels=2000 and model.max_image_pixels=1000: no image has at least 2000 and"),
        (16 * UNIT + 1, None, "model.min_image_pixels=12545 and the maximum of the model's own processor=12544"),
    ],
)
def test_limits_of_pixels_that_do_not_fit_are_refused(
    model: Path, low: int | None, high: int | None, message: str
) -> None:
    config = config_of(model, model=ModelConfig(path=str(model), min_image_pixels=low, max_image_pixels=high))
    with pytest.raises(ConfigError, match=message):
        vision.check_images(config, VISION, {"train": []})


def test_limits_of_pixels_are_refused_for_a_text_model(model: Path) -> None:
    config = config_of(model, model=ModelConfig(path=str(model), max_image_pixels=1000))
    with pytest.raises(ConfigError, match="model.max_image_pixels=1000, and the model of .* takes text only; leave"):
        vision.check_images(config, {"model_type": "qwen3"}, {"train": []})


# ------------------------------------------------------------------ a whole job's checks


@pytest.fixture
def job_of_images(model: Path, tmp_path: Path) -> Callable[..., Config]:
    """Settings of a job on rows with images."""

    def make_config(*overrides: str, train: list[Task], held_out: list[Task]) -> Config:
        for split, rows in (("train", train), ("eval", held_out)):
            write_rows(tmp_path / f"{split}.parquet", rows)
        paths = [f"taskset.{split}={tmp_path}/{split}.parquet" for split in ("train", "eval")]
        own = ["model.from_scratch=null", "taskset.generate=null", "taskset.warm_start=null"]
        own += ["trainer.warm_start.steps=0", "trainer.tasks_per_step=2"]
        return settings_of(tmp_path / "run", *paths, *own, f"model.path={model}", *overrides)

    return make_config


def images_of(count: int) -> list[bytes]:
    return [picture(seed, 56, 56) for seed in range(count)]


@pytest.mark.parametrize("mode", [[], ["run.mode=bench"]], ids=["train", "bench"])
def test_a_job_checks_its_rows_with_images(job_of_images: Callable[..., Config], mode: list[str]) -> None:
    train, held_out = [task(i, image) for i, image in enumerate(images_of(3))], [task(0, picture(9, 112, 112))]
    good = job_of_images(*mode, train=train, held_out=held_out)
    assert job.check(good)["eval"].tasks[0].images == held_out[0].images
    long = job_of_images(*mode, "rollout.max_prompt_tokens=23", train=train, held_out=held_out)
    with pytest.raises(DataError, match="eval.parquet: row 1: prompt has 24 tokens with its 1 images, rollout.max_p"):
        job.check(long)
    cut = job_of_images(*mode, train=train, held_out=[*held_out, task(1, jpeg()[:-900])])
    with pytest.raises(DataError, match="eval.parquet: row 2: .*image file is truncated"):
        job.check(cut)


def test_the_longest_prompt_is_that_with_most_images(job_of_images: Callable[..., Config]) -> None:
    config = job_of_images("rollout.max_prompt_tokens=null", train=[task(0, *images_of(2))], held_out=[task(0)])
    assert make(config).rollout.max_prompt_tokens == 2 * (4 + 2) + 6
    small = job_of_images(
        "rollout.max_prompt_tokens=null",
        f"model.max_image_pixels={UNIT}",
        train=[task(0, *images_of(2))],
        held_out=[task(0)],
    )
    assert make(small).rollout.max_prompt_tokens == 2 * (1 + 2) + 6


def test_a_text_model_refuses_a_row_with_images(prepared: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", [task(0), task(1, picture(1))])
    refused(
        DataError,
        settings_of(prepared, f"taskset.train={tmp_path}/rows.parquet", "rollout.max_prompt_tokens=null"),
        "rows.parquet: row 2 (taskset.train) has 1 images and the model of",
        "takes text only",
    )


def test_images_that_do_not_fit_a_micro_batch_are_refused(job_of_images: Callable[..., Config]) -> None:
    """4 x 4 patches each."""
    rows = {"train": [task(0, *images_of(1)), task(1, *images_of(2))], "held_out": [task(0)]}
    assert job.check(job_of_images("trainer.max_patches_per_micro_batch=32", **rows))
    with pytest.raises(
        DataError, match=r"row 2 .* has images of 32 patches, and trainer.max_patches_per_micro_batch is"
    ):
        job.check(job_of_images("trainer.max_patches_per_micro_batch=31", **rows))
    with pytest.raises(ConfigError, match="max_patches_per_micro_batch=32 with trainer.packing=false"):
        job.check(job_of_images("trainer.max_patches_per_micro_batch=32", "trainer.packing=false", **rows))


def test_rows_that_are_not_trained_may_have_larger_images(job_of_images: Callable[..., Config]) -> None:
    large = task(1, picture(9, 112, 112), picture(8, 112, 112))
    limits = ("trainer.max_patches_per_micro_batch=16", "taskset.overlong_prompts=drop", "rollout.max_prompt_tokens=13")
    kept = job_of_images(
        *limits, train=[task(0, *images_of(1)), task(2, *images_of(1)), large], held_out=[task(0, picture(7, 56, 56))]
    )
    assert len(job.check(kept)["train"].tasks) == 2


def test_a_row_has_no_more_images_than_a_trajectory_may_have(job_of_images: Callable[..., Config]) -> None:
    settings = ["rollout.max_images=1", "rollout.workflow=agent", "rollout.agent=mine.py"]
    rows = {"train": [task(0), task(1, *images_of(2))]}
    with pytest.raises(DataError, match=r"row 2 .* has 2 images, and rollout.max_images=1; raise it"):
        vision.check_images(job_of_images(*settings, train=rows["train"], held_out=[task(0)]), VISION, rows)


@pytest.mark.parametrize(("environment", "shows"), [("guess", False), ("gymnasium", True), ("mine.py", True)])
def test_environments_that_may_show_images_are_known(tmp_path: Path, environment: str, shows: bool) -> None:
    if environment.endswith(".py"):
        environment = str(tmp_path / environment)
        Path(environment).write_text("def make(task): ...\n")
    kwargs = {"render_mode": "rgb_array"} if environment == "gymnasium" else {}
    rollout = RolloutConfig(workflow="environment", environment=environment, options={"kwargs": kwargs})
    assert vision.may_show(rollout) is shows
    assert not vision.may_show(RolloutConfig(workflow="tools")) and vision.may_show(RolloutConfig(workflow="agent"))


@pytest.fixture(scope="module")
def scores(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of the family, with the actor's processor."""
    path = Path(shutil.copytree(model, tmp_path_factory.mktemp("scores") / "model"))
    score_class()(Qwen2_5_VLConfig(**QWEN_SIZES, num_labels=1)).save_pretrained(path)
    return path


def rows_of_images() -> dict[str, list[Task]]:
    """The second of the training rows has an image."""
    return {"train": [task(0), task(1, *images_of(1))], "held_out": [task(0, text="How many ?")]}


ROLES = {"reward_model.path": (), "critic.path": ("algorithm=ppo",)}


@pytest.mark.parametrize("setting", ROLES)
def test_roles_of_the_family_are_accepted_with_images(
    job_of_images: Callable[..., Config], scores: Path, setting: str
) -> None:
    assert job.check(job_of_images(*ROLES[setting], f"{setting}={scores}", **rows_of_images()))


@pytest.mark.parametrize("setting", ROLES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config": None}, "takes text only, and .*row 2 .* has 1 images; set it to a model of the actor's fam"),
        ({"image_token_id": 5}, "has image_token_id=5, the actor 4: it is given the actor's tokens and patches"),
        ({"vision_config": {"patch_size": 7}}, "has vision_config.patch_size=7, the actor 14: it is given"),
        ({"vision_config": {"spatial_merge_size": 4}}, "has vision_config.spatial_merge_size=4, the actor 2: it"),
        ({"limits": 9}, r"resizes images to 784 to 7056 pixels, the actor to 784 to 12544; set model.min_image_pixels"),
    ],
)
def test_roles_that_see_other_images_are_refused(
    job_of_images: Callable[..., Config],
    scores: Path,
    tmp_path: Path,
    setting: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    path = Path(shutil.copytree(scores, tmp_path / "other"))
    config = json.loads((path / "config.json").read_text())
    if "limits" in changes:
        save_qwen_processor(path, max_vectors=changes["limits"])
    elif changes == {"vision_config": None}:
        config = {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]}
    else:
        config |= {**changes, "vision_config": config["vision_config"] | changes.get("vision_config", {})}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"{setting}={path} {message}"):
        job.check(job_of_images(*ROLES[setting], f"{setting}={path}", **rows_of_images()))


def test_a_bench_looks_at_no_role(job_of_images: Callable[..., Config]) -> None:
    rows = rows_of_images()
    bench = job_of_images(
        "run.mode=bench", "reward_model.path=/nonexistent", train=rows["held_out"], held_out=rows["train"]
    )
    assert job.check(bench)


def test_a_role_without_a_processor_is_warned_of(
    job_of_images: Callable[..., Config], scores: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = Path(shutil.copytree(scores, tmp_path / "bare", ignore=shutil.ignore_patterns("*processor*")))
    with caplog.at_level("WARNING"):
        job.check(job_of_images(f"reward_model.path={bare}", **rows_of_images()))
    assert f"reward_model.path={bare}: no processor to compare with the actor's" in caplog.text


def test_lengths_and_patches_of_expert_rows_count_their_images(
    job_of_images: Callable[..., Config], tmp_path: Path
) -> None:
    """A prompt of 6 tokens with one placeholder, 16 vectors of 64 patches, and an answer of 2 tokens."""
    write_rows(tmp_path / "expert.parquet", [task(3, picture(5, 112, 112), response="three")])
    rows = rows_of_images()
    mix = ("algorithm=mix", f"taskset.expert={tmp_path}/expert.parquet", "rollout.max_prompt_tokens=16")
    patches = "trainer.max_patches_per_micro_batch="
    assert job.check(job_of_images(*mix, f"{patches}64", **rows))
    with pytest.raises(DataError, match=r"expert.parquet: row 1 \(taskset.expert\) has images of 64 patches"):
        job.check(job_of_images(*mix, f"{patches}63", **rows))
    check = ExpertCheck(job_of_images(*mix, f"{patches}63", **rows))
    with pytest.raises(DataError, match=r"row 1 \(taskset.expert\) has images of 64 patches"):
        check.rows(f"{tmp_path}/expert.parquet", [ExpertExperience(task(0, picture(5, 112, 112), response="three"))])
    few = "trainer.max_tokens_per_micro_batch=25"
    with pytest.raises(DataError, match=r"expert.parquet: row 1 .* takes 26 tokens with its answer"):
        job.check(job_of_images(*mix, few, "rollout.max_response_tokens=8", **rows))


def test_images_of_expert_rows_pass_through_a_store(model: Path, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    """Digests tell rows apart by their images alone; tokens and files come out as those of the row itself."""
    rows = [task(0, picture(1, 56, 56), picture(2), text="? Look", response="three")]
    rows += [replace(rows[0], task_id="expert/1", images=(picture(3), picture(2))), task(2, response="3")]
    experts = [ExpertExperience(with_inline_images(replace(row, task_id=f"expert/{i}"))) for i, row in enumerate(rows)]
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.experts.replace_source("rows.parquet", experts)
    assert store.experts.count() == 3
    inputs = ImageInputs.of(config_of(model, model=ModelConfig(path=str(model))), read_hf_config(model))
    assert inputs is not None
    found = RolloutReader(NodeReader(), store, lambda: False).demonstrations(tokenizer, inputs.expand)
    store.close()
    expected = demonstrations_of(rows, tokenizer, inputs)
    assert [row.images for row in found] == [row.images for row in rows]
    for row, (prompt, response) in zip(found, expected, strict=True):
        assert row.prompt.tolist() == prompt.tolist() and row.response.tolist() == response.tolist()
