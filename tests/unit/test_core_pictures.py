"""Files of images that are damaged: whatever a decoder raises is a ValueError."""

from __future__ import annotations

import io
import random
from collections import Counter

import pytest
from PIL import Image

from megarl.core.pictures import FORMATS, decode, media_type, size_of
from tests.conftest import examples


def picture(form: str) -> bytes:
    dice = random.Random(3)
    image = Image.new("RGB", (28, 28))
    image.putdata([(dice.randrange(256), dice.randrange(256), dice.randrange(256)) for _ in range(28 * 28)])
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


@pytest.mark.parametrize("form", FORMATS)
def test_damage_is_a_value_error_or_nothing(form: str) -> None:
    """Bytes of the head are changed, or the end is missing."""
    whole, dice = picture(form), random.Random(5)
    assert decode(whole).size == size_of(whole) == (28, 28) and media_type(whole) == f"image/{form.lower()}"
    causes: Counter[type | None] = Counter()
    for _ in range(examples(400, 20_000)):
        file = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            file[dice.randrange(min(len(file), 200))] = dice.randrange(256)
        damaged = bytes(file[: dice.randrange(len(file))] if dice.random() < 0.2 else file)
        for read in (decode, size_of, media_type):
            try:
                read(damaged)
            except ValueError as error:
                causes[type(error.__cause__)] += 1
    assert causes


def test_what_pillow_does_not_foresee_is_a_value_error() -> None:
    """The offset of a TIFF's pixels as a float: TypeError in Pillow."""
    file = bytearray(picture("TIFF"))
    at = file.index(bytes((0x11, 0x01, 4, 0)))  # tag StripOffsets, type LONG
    file[at + 2] = 11  # FLOAT
    with pytest.raises(ValueError, match="cannot be interpreted as an integer") as refused:
        decode(bytes(file))
    assert isinstance(refused.value.__cause__, TypeError) and size_of(bytes(file)) == (28, 28)
