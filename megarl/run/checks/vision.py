"""Images and vision-language models in a training job: refused, each in a line that names what does work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.core.config import Config
from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Task
from megarl.run.run_dir.rows import Rows, place

VISION_KEYS = ("vision_config", "vision_tower", "mm_vision_tower")
"""Keys of config.json; a model that takes images has one of them."""


def is_vision_model(hf_config: Mapping[str, Any]) -> bool:
    """Return True if a model takes images, by its config.json."""
    return any(hf_config.get(key) for key in VISION_KEYS)


def check_images(config: Config, hf_config: Mapping[str, Any], rows: Mapping[str, Rows]) -> None:
    """Check that nothing of a training job has to do with images. ``rows``: of every split that the job reads.

    To be called before the model's own checks, which would name only a missing table.

    Raises:
        ConfigError: the model is a vision-language model.
        DataError: a row has images.
    """
    if is_vision_model(hf_config):
        name = (hf_config.get("architectures") or [hf_config.get("model_type", "?")])[0]
        raise ConfigError(
            f"model.path={config.model.path} is a vision-language model ({name}): megarl has no trainer for these, "
            "only rollouts and rewards (docs/rewards_vision.md); give a text model"
        )
    for split, found in rows.items():
        for row in found:
            if isinstance(row, Task) and row.images:
                raise DataError(
                    f"{place(config, split, row)} has {len(row.images)} images and the model of {config.model.path} "
                    f"takes text only (its config.json has none of {', '.join(VISION_KEYS)}); drop the images or the "
                    "row"
                )
