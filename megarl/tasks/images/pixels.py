"""Number of an image's pixels after resizing by a model's processor, from the processor's files alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megarl.core.durable import read_json

DEFAULT = (56 * 56, 28 * 28 * 1280)
"""Default limits of transformers' ``Qwen2VLImageProcessor``."""


class PixelLimits(NamedTuple):
    """Minimum and maximum pixels of a resized image."""

    low: int
    high: int

    @property
    def size(self) -> dict[str, int]:
        """``size`` setting of Qwen2-VL's image processors, which store pixels under the names of edges."""
        return {"shortest_edge": self.low, "longest_edge": self.high}


def pixel_limits(path: str | os.PathLike[str], low: int | None = None, high: int | None = None) -> PixelLimits:
    """Return ``low`` and ``high``; for None, the value of the processor in the checkpoint directory ``path``.

    Raises CheckpointError if a file is not a JSON object.
    """
    found = _image_processor(Path(path))
    size = found.get("size")
    size = size if isinstance(size, Mapping) else {}
    own = [
        _first(found.get(f"{end}_pixels"), size.get(edge), default)
        for end, edge, default in zip(("min", "max"), ("shortest_edge", "longest_edge"), DEFAULT, strict=True)
    ]
    return PixelLimits(_first(low, own[0]), _first(high, own[1]))


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _image_processor(folder: Path) -> Mapping[str, Any]:
    """Return the image processor's settings, from the file that transformers reads."""
    nested = read_json(folder / "processor_config.json").get("image_processor")
    return nested if isinstance(nested, Mapping) else read_json(folder / "preprocessor_config.json")
