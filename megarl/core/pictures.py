"""Decode image files, which come from rows, environments and agents. Imports Pillow when it is called."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""Formats that Pillow may read; other decoders are not tried on untrusted bytes."""
MAX_PIXELS = 50_000_000


def decode(file: bytes) -> Image:
    """Return the image in RGB. Raises ValueError if the file is damaged, too large or no image."""
    with _opened(file) as image:
        return image.convert("RGB")


def size_of(file: bytes) -> tuple[int, int]:
    """Return (width, height) from the file's header. Raises ValueError if the file is too large or no image."""
    with _opened(file) as image:
        return image.size


def media_type(file: bytes) -> str:
    """Return the media type of an image file, such as ``image/png``. Raises ValueError as ``size_of`` does."""
    with _opened(file) as image:
        return str(image.get_format_mimetype())


@contextmanager
def _opened(file: bytes) -> Iterator[ImageFile]:
    """Open an image. Turn any Pillow error in the body into a ValueError: damaged files raise TypeError, struct.error,
    ZeroDivisionError and more, depending on the decoder."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(file), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"it has {image.width} x {image.height} pixels, more than {MAX_PIXELS}")
            yield image
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"the image cannot be decoded as {', '.join(FORMATS)} ({error})") from error
