"""Images of a step: their places and positions among the tokens, and their patches on a trainer rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.buffer.order.draws import ExpertRow
from megarl.config.schema import ModelConfig
from megarl.core.errors import DataError
from megarl.core.schema import ImagesAt, file_digest
from megarl.learn.batching import MicroBatching, Sequences, joined, micro_batches, of_demonstrations
from megarl.learn.batching.images import Image, Vision
from megarl.learn.batching.micro import deal
from megarl.tasks import ChatTokenizer, chat_messages
from megarl.tasks.image_processor import Processor
from megarl.train.batch import images as step_images
from megarl.train.batch.images import ImageInputs, StepImages, demonstrations_of
from megarl.train.batch.samples import of_experts
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from tests.loop.vision_models import QWEN_IMAGE, picture, save_tiny_qwen2_5_vl
from tests.parallel import vision
from tests.unit.test_vision_processor import config_of, task

VISION = Vision(vision.IMAGE, vision.MERGE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen2_5_vl(tmp_path_factory.mktemp("qwen") / "model")


@pytest.fixture
def inputs(model: Path) -> ImageInputs:
    found = ImageInputs.of(config_of(model, model=ModelConfig(path=str(model))), read_hf_config(model))
    assert found is not None
    return found


def test_positions_are_those_of_transformers() -> None:
    own, made = vision.hf_model(vision.FAMILY), vision.sequences()
    assert made.images is not None
    starts = made.cu_seqlens.tolist()
    for start, end, images in zip(starts, starts[1:], vision.images(), strict=False):
        ids = made.tokens[start:end].long()[None]
        kinds = torch.zeros_like(ids)
        for place in made.images.places[starts.index(start)]:
            kinds[0, place.start - start : place.start - start + place.vectors] = 1
        grids = torch.tensor([image.grid for image in images]) if images else None
        expected, _ = own.model.get_rope_index(ids, kinds, image_grid_thw=grids)
        assert torch.equal(made.images.positions[:, start:end].long(), expected[:, 0])


def test_placeholders_behind_the_last_image_are_ordinary_tokens() -> None:
    tokens = torch.tensor([9, 4, 4, 9, 4, 9])
    [place] = VISION.places(tokens, [Image("x", (1, 2, 4))], start=10)
    assert (place.start, place.vectors) == (11, 2)
    assert VISION.positions(6, [place], start=10).tolist() == [
        [0, 1, 1, 3, 4, 5],
        [0, 1, 1, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
    ]


@pytest.mark.parametrize(("tokens", "there"), [([9, 4, 9], 1), ([9, 9, 9], 0), ([4, 9, 4], 1), ([9, 4, 4, 4, 9], 3)])
def test_tokens_with_other_placeholders_are_refused(tokens: list[int], there: int) -> None:
    with pytest.raises(DataError, match=rf"image 1 of 1 \(x\) of row 7 has 2 vectors, but the tokens have {there} "):
        VISION.places(torch.tensor(tokens), [Image("x", (1, 2, 4))], owner="row 7")


@pytest.mark.parametrize("limits", [MicroBatching(max_tokens=200), MicroBatching(rows=3), MicroBatching(max_tokens=64)])
def test_a_micro_batch_has_each_of_its_images_once(limits: MicroBatching) -> None:
    made = vision.sequences()
    assert made.images is not None
    for batch in micro_batches(made, limits, 0):
        shown = made.images.of(batch.numbers, batch.index)
        digests = list(dict.fromkeys(d for number in batch.numbers for d in vision.IMAGES[int(number)]))
        if shown is None:
            assert not digests
            continue
        assert torch.equal(shown.pixels, torch.cat([vision.pixels(digest) for digest in digests]))
        assert shown.grids.tolist() == [list(vision.GRIDS[digest]) for digest in digests]
        first = np.cumsum([0, *(VISION.vectors(Image(digest, vision.GRIDS[digest])) for digest in digests)])
        for number in batch.numbers.tolist():
            for place in made.images.places[number]:
                here = torch.isin(batch.index, torch.arange(place.start, place.start + place.vectors))
                begin = int(first[digests.index(place.image.digest)])
                assert shown.source[here].tolist() == list(range(begin, begin + place.vectors))
        assert int((shown.source >= 0).sum()) == sum(
            place.vectors for number in batch.numbers.tolist() for place in made.images.places[number]
        )
        assert (shown.source[batch.index < 0] == -1).all()


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("limit", [80, 100, 200])
def test_patches_of_a_micro_batch_are_bounded(limit: int, dp: int) -> None:
    made = vision.sequences()
    assert made.images is not None and sum(map(made.images.patches, range(len(made)))) == 24 + 4 + 16 + 80 + 16 + 24 + 4
    limits = MicroBatching(dp=dp, max_tokens=120, max_patches=limit)
    found = [batch for rank in range(dp) for batch in micro_batches(made, limits, rank)]
    assert sorted(int(number) for batch in found for number in batch.numbers) == list(range(len(made)))
    for batch in found:
        assert int((batch.index >= 0).sum()) <= 120
        assert sum(made.images.patches(int(number)) for number in batch.numbers) <= limit
    loose = MicroBatching(dp=dp, max_tokens=120)
    assert len(micro_batches(made, loose, 0)) <= len(micro_batches(made, limits, 0))
    with pytest.raises(ValueError, match="does not fit"):
        micro_batches(made, replace(limits, max_patches=79), 0)


@pytest.mark.parametrize("most", [588, 1176, 2100, 2352, 4200])
def test_a_unit_at_the_limit_of_patches_fits(most: int) -> None:
    """Where 5120 / most is no number of float64."""
    limits = MicroBatching(max_tokens=5120, max_patches=most)
    assert deal([[100], [100]], limits, [most, 1]) in ([[[0], [1]]], [[[1], [0]]])
    with pytest.raises(ValueError, match="does not fit"):
        deal([[100]], limits, [most + 1])


def test_text_that_follows_has_positions_of_its_own() -> None:
    made = vision.sequences()
    text = of_demonstrations([(np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32))] * 2)
    both = joined(made, text)
    assert both.images is not None and both.images.places[-2:] == ((), ())
    assert both.images.positions[:, -10:].tolist() == [[0, 1, 2, 3, 4] * 2] * 3
    assert joined(text, text).images is None


@pytest.mark.parametrize("sampled", ["images", "text"])
def test_demonstrations_that_follow_have_images_of_their_own(inputs: ImageInputs, sampled: str) -> None:
    """Places and patches are those of the demonstrations by themselves, behind the sampled tokens."""
    made = vision.sequences()
    if sampled == "text":
        made.images = None
    rows = [
        ExpertRow(np.array([2, *[QWEN_IMAGE] * 4, 3], np.int32), np.array([9], np.int32), images=(picture(1, 56, 56),)),
        ExpertRow(np.array([9], np.int32), np.array([9, 8], np.int32)),
    ]
    shown = of_experts(rows, StepImages(inputs, {}))
    both, start = joined(made, shown).images, len(made.tokens)
    assert shown.images is not None and both is not None and len(both.places) == len(made) + 2
    assert torch.equal(both.positions[:, start:], shown.images.positions)
    [own], [place] = shown.images.places[0], both.places[-2]
    assert place == own._replace(start=start + own.start) and both.places[-1] == ()
    assert torch.equal(both.pixels(place.image.digest), shown.images.pixels(own.image.digest))
    if made.images is not None:
        assert both.places[: len(made)] == made.images.places
        assert torch.equal(both.positions[:, :start], made.images.positions)
        assert torch.equal(both.pixels("a"), vision.pixels("a"))


def test_demonstrations_have_a_placeholder_for_each_vector(model: Path, inputs: ImageInputs) -> None:
    tokenizer, processor = ChatTokenizer.open(model), Processor.open(model)
    few, more = (picture(1, 90, 60),), (picture(2), picture(3, 28, 99))
    rows = [task(0, *few, response="three"), task(1, response="3"), task(2, *more, response="3")]
    for row, (prompt, _) in zip(rows, demonstrations_of(rows, tokenizer, inputs), strict=True):
        messages = chat_messages(row)
        seen = processor.prompt_ids(tokenizer.render(messages), row.images) if row.images else None
        expected = tokenizer.prompt_ids(messages) if seen is None else seen
        assert prompt.dtype == np.int32 and prompt.tolist() == expected.tolist()
    made = of_demonstrations(demonstrations_of(rows, tokenizer, inputs))
    inputs.put(made, [row.images for row in rows])
    assert made.images is not None and [len(places) for places in made.images.places] == [1, 0, 2]
    for row, places in zip(rows, made.images.places, strict=True):
        for file, place in zip(row.images, places, strict=True):
            assert (made.tokens[place.start : place.start + place.vectors] == QWEN_IMAGE).all()
            pixels, grid = processor.pixels(file)
            assert place.image.grid == grid and np.array_equal(made.images.pixels(place.image.digest).numpy(), pixels)


def test_patches_are_made_once_and_bounded(inputs: ImageInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [picture(seed, 56, 56) for seed in range(3)]
    made = of_demonstrations([(np.array([2, *[QWEN_IMAGE] * 4, 3], np.int32), np.array([9], np.int32))] * 3)
    inputs.put(made, [[file] for file in files])
    assert made.images is not None
    one, two, three = (places[0].image.digest for places in made.images.places)
    patches = made.images.pixels(one)
    assert made.images.pixels(one) is patches
    monkeypatch.setattr(step_images, "PATCH_BYTES", 2 * patches.nbytes)
    made.images.pixels(two)
    assert made.images.pixels(one) is patches
    made.images.pixels(three)  # in the place of the second, which was asked for before the first
    assert made.images.pixels(one) is patches and len(inputs.kept) == 2
    later = of_demonstrations([(np.array([9], np.int32), np.array([9], np.int32))])
    inputs.put(later, [()])
    assert made.images.pixels(one) is patches
    inputs.kept.clear()
    assert torch.equal(made.images.pixels(one), patches), "a batch keeps its files, whatever comes after it"


def test_a_batch_without_images_has_none(inputs: ImageInputs) -> None:
    made = Sequences(torch.tensor([1, 2, 3]), torch.tensor([3]), torch.tensor([True, True, False]))
    inputs.put(made, [()])
    assert made.images is None


def test_images_stand_in_the_turns_that_show_them(inputs: ImageInputs) -> None:
    """Not where the model has written their placeholder."""
    one, two = picture(1, 56, 56), picture(2, 56, 56)
    shown = [QWEN_IMAGE] * 4
    made = of_demonstrations([(np.array([2, *shown, 3, QWEN_IMAGE, 5, *shown], np.int32), np.array([9], np.int32))] * 2)
    first, later = ImagesAt(0, 6, (file_digest(one),)), ImagesAt(7, 12, (file_digest(two),))
    StepImages(inputs, {file_digest(one): one, file_digest(two): two}).put(made, [[first, later], []], str)
    assert made.images is not None
    assert [[(p.start, p.image.digest) for p in places] for places in made.images.places] == [
        [(1, file_digest(one)), (8, file_digest(two))],
        [],
    ]
