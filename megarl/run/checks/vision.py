"""Checks of rows with images against models that take images.

Each error names the fix.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config import Config
from megarl.config.derived import path_of, prompt_tokens
from megarl.config.schema import RolloutConfig
from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Preference, Task
from megarl.explore import environments
from megarl.explore.recording.images import OF_TEXT
from megarl.learn import algorithms
from megarl.learn.parallel.grid import roles_of
from megarl.run.checks.roles import role_config, role_files
from megarl.run.run_dir.rows import SPLITS, Rows, place
from megarl.tasks import ChatTokenizer, check_prompts, place_of_row
from megarl.tasks.image_processor import pixel_limits
from megarl.tasks.templates.tokenizer import PROCESSOR
from megarl.weights.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from megarl.tasks.image_processor import Processor


log = logging.getLogger(__name__)

VISION_KEYS = ("vision_config", "vision_tower", "mm_vision_tower")
"""Keys of config.json; a model that takes images has at least one."""
PIXEL_SETTINGS = ("min_image_pixels", "max_image_pixels")
"""Settings of ``model``."""

ANY_LENGTH = 2**62
"""Token limit that no prompt exceeds."""


def is_vision_model(hf_config: Mapping[str, Any]) -> bool:
    """Return True if a model takes images according to its config.json."""
    return any(hf_config.get(key) for key in VISION_KEYS)


def check_images(config: Config, hf_config: Mapping[str, Any], rows: Mapping[str, Rows]) -> None:
    """Check that the model takes the rows' images, and that megarl can train the model. Images are not read: see
    :func:`check_prompts_of`.

    Call this before the model's checks, which would report only a missing table.

    Args:
        rows: Rows of every split that the job reads.

    Raises:
        ConfigError: megarl cannot train this vision-language model; it has no processor; a pixel limit does not fit it;
            or a critic or reward model does not take the actor's images.
        DataError: a row has images and the model takes text only.
    """
    with_images = _with_images(config, rows)
    path = config.model.path
    if not is_vision_model(hf_config):
        for where, row in with_images:
            raise DataError(
                f"{where} has {len(row.images)} images and the model of {path} takes text only (its config.json has "
                f"none of {', '.join(VISION_KEYS)}); drop the images or the row"
            )
        check_environment(config)
        for name in PIXEL_SETTINGS:
            if (value := getattr(config.model, name)) is not None:
                raise ConfigError(f"model.{name}={value}, and the model of {path} takes text only; leave it out")
        return
    if hf_config.get("model_type") not in ARCHITECTURES:
        name = (hf_config.get("architectures") or [hf_config.get("model_type", "?")])[0]
        raise ConfigError(
            f"model.path={path} is a vision-language model ({name}): megarl has no trainer for these, only rollouts "
            "and rewards (docs/rewards_vision.md); give a text model or one of a family with a table: "
            f"{', '.join(ARCHITECTURES)}"
        )
    _check_pixels(config, hf_config)
    _check_count(config, {split: found for split, found in rows.items() if split in SPLITS})
    if not _has_processor(Path(path)):
        seen = next((f", and {where} has {len(row.images)} images" for where, row in with_images), "")
        raise ConfigError(
            f"model.path={path} takes images and has no {' or '.join(PROCESSOR)}{seen}; copy the processor's files of "
            "the published model there"
        )
    if config.run.mode == "bench":
        return
    if (first := next(with_images, None)) is not None:
        where, row = first
        _check_roles(config, hf_config, f"{where} has {len(row.images)} images")
    elif may_show(config.rollout):
        _check_roles(config, hf_config, f"messages of rollout.workflow={config.rollout.workflow} may show images")


def _shows(rollout: RolloutConfig) -> bool | None:
    """Return True or False if it is known that messages after a task's prompt have images (an environment from a user's
    file: its ``make.shows_images(options)``); None if unknown."""
    if rollout.workflow != "environment":
        return False if rollout.workflow in OF_TEXT else None
    shows = getattr(environments.get(rollout.environment), "shows_images", None)
    if shows is None:
        return False if rollout.environment in environments.ENVIRONMENTS else None
    return bool(shows(rollout.options))


def may_show(rollout: RolloutConfig) -> bool:
    """Return False if no message after a task's prompt can have images."""
    return _shows(rollout) is not False


def _check_count(config: Config, rows: Mapping[str, Rows]) -> None:
    """Raise DataError for a row with more images than a trajectory may have."""
    rollout = config.rollout
    for where, row in _with_images(config, rows) if may_show(rollout) else ():
        if len(row.images) > rollout.max_images:
            raise DataError(
                f"{where} has {len(row.images)} images, and rollout.max_images={rollout.max_images}; raise it, or drop "
                "the row"
            )


def check_environment(config: Config) -> None:
    """Raise ConfigError if an environment shows images (``shows_images(options)`` of its ``make``) to a text-only
    model."""
    rollout = config.rollout
    if _shows(rollout):
        raise ConfigError(
            f"rollout.environment={rollout.environment} shows images with rollout.options={rollout.options}, and the "
            f"model of {config.model.path} takes text only; give a model that takes images, or other options"
        )


def _check_roles(config: Config, hf_config: Mapping[str, Any], seen: str) -> None:
    """Raise ConfigError if a role's model does not take images from the actor's processor.

    Args:
        hf_config: The actor's config.json.
        seen: Row with images, for messages.
    """
    for role in roles_of(config, algorithms.get(config.algorithm.name)):
        if (path := path_of(config, role)) is None:
            continue
        base = role_files(role, Path(path)).base
        found = role_config(role, base)
        if not is_vision_model(found):
            raise ConfigError(
                f"{role}.path={path} takes text only, and {seen}; set it to a model of the actor's family "
                f"({hf_config['model_type']}), leave it out, or drop the images"
            )
        for key, mine, other in _facts(hf_config, found):
            if mine != other:
                raise ConfigError(
                    f"{role}.path={path} has {key}={other}, the actor {mine}: it is given the actor's tokens and "
                    "patches of images; use a model that was made from the actor's"
                )
        _check_pixels_of(config, f"{role}.path={path}", base)


def _facts(mine: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key of config.json, values of two models) for each key that determines patches or their places."""
    yield "image_token_id", mine.get("image_token_id"), other.get("image_token_id")
    towers = [config.get("vision_config") or {} for config in (mine, other)]
    for key in ("patch_size", "temporal_patch_size", "spatial_merge_size"):
        yield f"vision_config.{key}", towers[0].get(key), towers[1].get(key)


def _check_pixels_of(config: Config, setting: str, path: Path) -> None:
    """Raise ConfigError if a role's processor resizes images differently from the actor's."""
    if not _has_processor(path):
        log.warning(
            "%s: no processor to compare with the actor's; make sure that it was trained on images of the same sizes",
            setting,
        )
        return
    model = config.model
    mine, other = pixel_limits(model.path, model.min_image_pixels, model.max_image_pixels), pixel_limits(path)
    if mine != other:
        raise ConfigError(
            f"{setting} resizes images to {other.low} to {other.high} pixels, the actor to {mine.low} to {mine.high}; "
            f"set model.min_image_pixels={other.low} and model.max_image_pixels={other.high}, or the limits of its "
            "processor's file"
        )


def _has_processor(path: Path) -> bool:
    return any((path / name).is_file() for name in PROCESSOR)


def check_patches(config: Config, rows: Mapping[str, Rows], processor: Processor | None, *, pairs: bool) -> None:
    """Check that each training row's images fit a micro-batch (``trainer.max_patches_per_micro_batch``).

    Args:
        rows: Rows that the trainer's models process.
        processor: The model's processor, if rows of the job have images.
        pairs: The model processes two sequences of each prompt of train and eval together.

    Raises:
        ConfigError: packing is off, so patches have no limit.
        DataError: names the row with images that do not fit or that the processor refuses.
    """
    limit = config.trainer.max_patches_per_micro_batch
    if limit is None or processor is None:
        return
    if not config.trainer.packing:
        raise ConfigError(
            f"trainer.max_patches_per_micro_batch={limit} with trainer.packing=false: padded micro-batches have "
            "trainer.micro_batch_size rows, whatever their images; set trainer.packing to true or leave the limit out"
        )
    for split, found in rows.items():
        twice = pairs and split in SPLITS
        for where, row in _with_images(config, {split: found}):
            try:
                patches = (2 if twice else 1) * sum(math.prod(processor.grid(image)) for image in row.images)
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
            if patches > limit:
                raise DataError(
                    f"{where} has images of {patches} patches{' with both answers' if twice else ''}, and "
                    f"trainer.max_patches_per_micro_batch is {limit}; raise it, lower model.max_image_pixels, or drop "
                    "the row"
                )


def check_prompts_of(
    config: Config,
    split: str,
    rows: Sequence[Task],
    kept: Sequence[Task],
    tokenizer: ChatTokenizer,
    processor: Processor | None,
) -> None:
    """Check the lengths of a split's prompts and decode its images.

    Args:
        rows: Tasks of the split.
        kept: Tasks that remain after the filters of ``taskset``.
        processor: The model's processor, if rows of the job have images.

    Raises:
        DataError: names file and row; for an overlong prompt only with ``taskset.overlong_prompts=refuse``.
    """
    limit, where = prompt_tokens(config.rollout), partial(place_of_row, config.taskset, split)
    refuses = config.taskset.overlong_prompts == "refuse"
    if processor is not None:
        from megarl.tasks.image_processor import check_image_prompts

        check_image_prompts(rows if refuses else kept, tokenizer, processor, limit, path=where)
    elif refuses:
        check_prompts(rows, tokenizer, limit, path=where)


def check_rendered(
    config: Config, split: str, rows: Rows, tokenizer: ChatTokenizer, processor: Processor | None
) -> None:
    """Render the prompts of tasks and decode their images. Raises DataError naming file and row if the chat template or
    the processor refuses one."""
    tasks, where = [row for row in rows if isinstance(row, Task)], partial(place_of_row, config.taskset, split)
    if processor is None:
        check_prompts(tasks, tokenizer, ANY_LENGTH, path=where)
        return
    from megarl.tasks.image_processor import check_image_prompts

    check_image_prompts(tasks, tokenizer, processor, ANY_LENGTH, path=where)


def check_image_files_of(config: Config, split: str, rows: Rows) -> None:
    """Decode the images of a split's demonstrations. Raises DataError naming file and row of a damaged one."""
    tasks = [row for row in rows if row.images]
    if tasks:
        from megarl.tasks.image_processor import check_image_files

        check_image_files(tasks, path=partial(place_of_row, config.taskset, split))


def _with_images(config: Config, rows: Mapping[str, Rows]) -> Iterator[tuple[str, Task | Preference]]:
    """Yield (place, row) of each row with images."""
    for split, found in rows.items():
        for row in found:
            if row.images:
                yield place(config, split, row), row


def _check_pixels(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Raise ConfigError for pixel limits that no image can meet with this model."""
    model, vision = config.model, hf_config.get("vision_config") or {}
    given = {name: value for name in PIXEL_SETTINGS if (value := getattr(model, name)) is not None}
    if not given:
        return
    side = int(vision.get("patch_size", 14)) * int(vision.get("spatial_merge_size", 2))
    for name, value in given.items():
        if value < side**2:
            raise ConfigError(
                f"model.{name}={value} is less than one vector's {side} x {side} pixels in {model.path}; set it to "
                f"{side**2} or more"
            )
    low, high = pixel_limits(model.path, model.min_image_pixels, model.max_image_pixels)
    if low > high:
        name, own = ("max", "min") if "min_image_pixels" not in given else ("min", "max")
        whose = f"model.{own}_image_pixels" if len(given) == 2 else f"the {own}imum of the model's own processor"
        raise ConfigError(
            f"model.{name}_image_pixels={given[f'{name}_image_pixels']} and {whose}={low if own == 'min' else high}: "
            f"no image has at least {low} and at most {high} pixels; set model.min_image_pixels to {high} or less, or "
            f"model.max_image_pixels to {low} or more"
        )
