"""A loss is computed where the model's answers are, from a step that lies on the host: torch's fake tensors tell on which device each
would be, on a machine that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TypeVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from megarl import algorithms, ops
from megarl.algorithms import Loss
from megarl.batching import Sequences
from megarl.config import compose
from megarl.config.schema import AlgorithmConfig, KLConfig
from megarl.ops import checks
from megarl.training import objectives
from megarl.training.objectives import Kept, Objective

DEVICE = "privateuseone:0"


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[None]:
    """One that computes nothing. The ops are torch's own: kernels would not say where their arguments ought to lie."""
    _setup_privateuseone_for_python_backend()
    ops.use("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "device", lambda *args, **kwargs: None)
        yield
    ops.use("megarl")


def step() -> tuple[Sequences, Kept]:
    """Eight sequences of three tokens, two of them in the loss; the last two are demonstrated."""
    count = 8
    tokens = torch.arange(3 * count)
    sequences = Sequences(tokens, torch.full((count,), 3), tokens % 3 < 2)
    for name in ("advantages", "returns", "engine_logp", "old_logp", "ref_logp", "values"):
        setattr(sequences, name, torch.rand(len(tokens)))
    sequences.expert = torch.arange(count) >= count - 2
    index = sequences.mask.nonzero()[:, 0]
    return sequences, Kept(index, sequences.row[index], torch.arange(count), count, sequences.mask)


T = TypeVar("T", Sequences, Kept)


def faked(mode: FakeTensorMode, real: T) -> T:
    """With tensors that know where they lie, and nothing of what they hold."""
    values = {field.name: getattr(real, field.name) for field in fields(real)}
    return type(real)(**{name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in values.items()})


def on_device(make: Callable[[Sequences], Objective], sequences: Sequences, kept: Kept) -> Loss:
    assert make(sequences).count(kept).device.type == "cpu"  # summed over ranks there
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    with FakeTensorMode(shape_env=shapes) as mode:
        answers = torch.rand(len(kept.index), 2, device=DEVICE, requires_grad=True)
        return make(faked(mode, sequences)).loss(faked(mode, kept), answers)


def check(loss: Loss) -> None:
    found = {str(x.device) for x in (loss.total, *(part for pair in loss.metrics.values() for part in pair))}
    assert found == {DEVICE} and loss.total.requires_grad


@pytest.mark.parametrize("name", [name for name, found in algorithms.ALGORITHMS.items() if "actor" in found.roles])
def test_policies(name: str) -> None:
    settings = compose([f"algorithm={name}"]).algorithm
    check(on_device(lambda sequences: objectives.policy(algorithms.get(name), settings, sequences), *step()))


def test_terms_that_may_be_added() -> None:
    settings = AlgorithmConfig(entropy_coef=0.1, kl=KLConfig(coef=0.1), correction="truncate")
    check(on_device(lambda sequences: objectives.policy(algorithms.get("grpo"), settings, sequences), *step()))


def test_scores_of_pairs() -> None:
    sequences, _ = step()
    kept = Kept(sequences.cu_seqlens[1:] - 1, torch.arange(8), torch.arange(8), 8, sequences.mask)
    algorithm, settings = algorithms.get("reward_model"), AlgorithmConfig(name="reward_model")
    check(on_device(lambda sequences: objectives.preference_scores(algorithm, settings, sequences.lengths[:4].float()), sequences, kept))


def test_values() -> None:
    check(on_device(lambda sequences: objectives.returns(AlgorithmConfig(), sequences), *step()))


def test_a_part_left_on_the_host_would_be_noticed() -> None:
    mixed = Objective("actor", lambda kept: kept.mask.sum(), lambda kept, answers: Loss(answers[:, 0] * kept.mask, {}))
    with pytest.raises(RuntimeError, match="device"):
        on_device(lambda _: mixed, *step())
