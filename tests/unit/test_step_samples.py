"""Sequences of a share are those of the whole step, with all that is known of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.buffer.experience import with_group_stats
from megarl.buffer.order.draws import ExpertRow
from megarl.config.algorithms import AlgorithmConfig, MixConfig
from megarl.config.schema import ModelConfig
from megarl.core.errors import NonRetryableError
from megarl.core.schema import Reward, Trajectory, Turn, WeightsSpan, WeightsVersion, file_digest
from megarl.learn import algorithms
from megarl.learn.batching import StepShare, micro_batches
from megarl.learn.batching.micro import MicroBatching
from megarl.train.batch.batch import StepBatch, StepPlan, make_batch
from megarl.train.batch.images import ImageInputs, StepImages
from megarl.train.batch.samples import StepSamples, without_routing
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from tests.loop.vision_models import QWEN_IMAGE, picture, save_tiny_qwen2_5_vl
from tests.unit.test_vision_processor import config_of

OLD, NEW = WeightsVersion(1, 1), WeightsVersion(1, 2)
LAGS = {OLD: 3, NEW: 0}
PICTURES = [picture(1, 56, 56), picture(2, 56, 84)]
VECTORS = [4, 6]
SHARES = [[0], [5], [1, 2], [3, 4, 6], [6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]
"""Of six samples and two demonstrations."""


def routing_of(turns: list[Turn], line: list[int], seed: int) -> np.ndarray:
    """Expert ids of all but the last token of a line."""
    tokens = sum(len(turns[i]) for i in line) - 1
    return np.random.default_rng(seed).integers(0, 4, (tokens, 2, 2)).astype(np.int8)


def trajectory(index: int, *, lines: int = 1, shown: int | None = None) -> Trajectory:
    """Answers to a text, or to an image, of one or two samples."""
    turns: list[Turn] = []
    for line in range(lines):
        ids = [2, 3 + index] if shown is None else [2, *[QWEN_IMAGE] * VECTORS[shown], 3]
        digests = () if shown is None else (file_digest(PICTURES[shown]),)
        prompt = Turn("user", np.array(ids, np.int32), images=digests)
        length = 3 + index + line
        logp = -np.arange(1, length + 1, dtype=np.float32) / 10
        spans = (WeightsSpan(0, 1 + index % 2, OLD), WeightsSpan(1 + index % 2, length, NEW))
        answer = Turn("model", np.arange(10, 10 + length, dtype=np.int32), len(turns), logp, spans, "stop", float(line))
        turns += [prompt, answer]
        turns[-1] = replace(answer, routing=routing_of(turns, [len(turns) - 2, len(turns) - 1], 10 * index + line))
    return Trajectory("r", "t", f"g{index // 2}", index, 2, tuple(turns), Reward(float(index % 2), "ok"))


MEMBERS = [trajectory(0), trajectory(1, lines=2), trajectory(2, shown=0), trajectory(3, shown=1, lines=2)]
DEMONSTRATIONS = [
    ExpertRow(np.arange(2, 5, dtype=np.int32), np.arange(4, dtype=np.int32)),
    ExpertRow(np.array([2, *[QWEN_IMAGE] * 4, 3], np.int32), np.arange(5, dtype=np.int32), images=(PICTURES[0],)),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> StepImages:
    model: Path = save_tiny_qwen2_5_vl(tmp_path_factory.mktemp("qwen") / "model")
    inputs = ImageInputs.of(config_of(model, model=ModelConfig(path=str(model))), read_hf_config(model))
    assert inputs is not None
    return StepImages(inputs, {file_digest(file): file for file in PICTURES})


def step(images: StepImages, numbers: list[int] | None, settings: AlgorithmConfig) -> StepBatch:
    """The step on a rank that holds ``numbers``; all without."""

    def share_of(plan: StepPlan) -> StepShare | None:
        return None if numbers is None else StepShare(torch.tensor(numbers), plan.lengths, plan.patches)

    given = (with_group_stats(MEMBERS), DEMONSTRATIONS, algorithms.get(settings.name), settings, 2, LAGS, images)
    return make_batch(*given, share_of, replays_routing=True)


@pytest.mark.parametrize("numbers", SHARES)
@pytest.mark.parametrize("segments", ["all", "current"])
def test_a_share_has_what_the_whole_step_has(images: StepImages, numbers: list[int], segments: str) -> None:
    settings = MixConfig(name="mix", segments=segments, turn_rewards=0.5)  # type: ignore[arg-type]
    batch, everything = (step(images, share, settings) for share in (numbers, None))
    own, whole = batch.sequences, everything.sequences
    assert own.share is not None and len(whole) == 8 and whole.lag is not None and whole.routing is not None
    kept = torch.isin(whole.row, own.share.numbers)
    for field in fields(own):
        expected, found = getattr(whole, field.name), getattr(own, field.name)
        if isinstance(expected, torch.Tensor):
            expected = expected[kept] if len(expected) == len(kept) else expected[numbers]
            assert found.dtype == expected.dtype and torch.equal(found, expected), field.name
        elif field.name not in ("images", "share"):
            assert found is expected is None, field.name
    assert own.images is not None and whole.images is not None
    assert torch.equal(own.images.positions, whole.images.positions[:, kept])
    starts, before = own.cu_seqlens.tolist(), whole.cu_seqlens.tolist()
    for place, number in enumerate(numbers):
        moved = [p._replace(start=p.start - before[number] + starts[place]) for p in whole.images.places[number]]
        assert list(own.images.places[place]) == moved
    assert batch.turn_advantages is not None and everything.turn_advantages is not None
    assert torch.equal(batch.turn_advantages, everything.turn_advantages[kept])
    for name in ("updates", "outside", "trained", "excluded", "finish_reasons", "outcomes"):
        assert getattr(batch, name) == getattr(everything, name), name


@pytest.mark.parametrize("limits", [MicroBatching(dp=2, rows=2), MicroBatching(dp=2, max_tokens=40, max_patches=60)])
def test_micro_batches_of_a_share_are_those_of_the_step(images: StepImages, limits: MicroBatching) -> None:
    """By patches too, those of images that other ranks hold among them."""
    settings = MixConfig(name="mix")
    whole = step(images, None, settings).sequences
    for rank in range(2):
        expected = micro_batches(whole, limits, rank)
        numbers = sorted(int(number) for batch in expected for number in batch.numbers)
        own = step(images, numbers, settings).sequences
        found = micro_batches(own, limits, rank)
        assert len(found) == len(expected) and 0 < len(numbers) < len(whole)
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine.take(own.tokens, -7), theirs.take(whole.tokens, -7))
            assert torch.equal(torch.tensor(numbers)[mine.numbers], theirs.numbers)
            assert torch.equal(mine.position, theirs.position) and torch.equal(mine.row, theirs.row)
            assert own.images is not None and whole.images is not None
            shown, wanted = (s.images.of(b.numbers, b.index) for s, b in ((own, mine), (whole, theirs)))
            assert (shown is None) == (wanted is None)
            if shown is not None and wanted is not None:
                assert torch.equal(shown.source, wanted.source) and torch.equal(shown.pixels, wanted.pixels)


def test_a_sequence_that_is_not_held_is_not_dealt(images: StepImages) -> None:
    own = step(images, [0, 3], MixConfig(name="mix")).sequences
    with pytest.raises(AssertionError, match=r"of the sequences \[0, 1, 2.* this rank does not hold all"):
        micro_batches(own, MicroBatching(rows=8), 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids: ids[1:], r"a sample of trajectory 3 of group g1 has 15 tokens, and expert ids of 13 tokens"),
        (
            lambda ids: ids[:, :1],
            r"several layouts .*: \(2, 2\) of trajectory 0 of group g0, \(1, 2\) of trajectory 3 of ",
        ),
    ],
)
def test_expert_ids_that_do_not_fit_name_their_trajectory(
    images: StepImages, change: Callable[[np.ndarray], np.ndarray], words: str
) -> None:
    """Each rank reads it in the facts of all samples, whatever it will hold."""
    *before, last = MEMBERS[3].turns
    assert last.routing is not None
    foreign = replace(MEMBERS[3], turns=(*before, replace(last, routing=change(last.routing))))
    with pytest.raises(NonRetryableError, match=rf"{words}.*; set rollout.routing_replay to false"):
        len(StepSamples([*MEMBERS[:3], foreign], [], AlgorithmConfig(), LAGS, images).facts)
    samples = StepSamples([without_routing(MEMBERS[0]), *MEMBERS[1:3], foreign], [], AlgorithmConfig(), LAGS, images)
    for share in (None, StepShare(torch.tensor([3, 4, 5]), samples.lengths, samples.patches)):
        assert samples.sequences(share).routing is None, "ids that some sample lacks are not used"
