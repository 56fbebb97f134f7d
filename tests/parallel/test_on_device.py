"""A model that lies on a device is given its micro-batches there, and its loss is computed there, from a step that lies
on the host: torch's fake tensors know where they are and refuse to be mixed, on a machine that has no such device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
import torch

from megarl.learn import algorithms
from megarl.learn.batching import Sequences
from megarl.learn.training.objectives import LossTokens, Objective
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, save_tiny_qwen3

DEVICE = "privateuseone:0"
T = TypeVar("T")


def prepare() -> None:
    """In a process of its own, which nothing else is done in afterwards. The ops are torch's: kernels would not say
    where their arguments ought to lie."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from megarl import ops
    from megarl.ops import native

    _setup_privateuseone_for_python_backend()
    ops.use("torch")
    native.device = lambda *args, **kwargs: None  # type: ignore[assignment]


def faked(mode: Any, real: T) -> T:
    """A dataclass whose tensors know where they lie, and nothing of what they hold."""
    values = {field.name: getattr(real, field.name) for field in fields(real)}  # type: ignore[arg-type]
    return type(real)(**{name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in values.items()})


def step() -> tuple[Sequences, LossTokens]:
    """Eight sequences of three tokens, two of them in the loss; the last two are demonstrated."""
    count = 8
    tokens = torch.arange(3 * count)
    sequences = Sequences(tokens, torch.full((count,), 3), tokens % 3 < 2)
    for name in ("advantages", "returns", "engine_logp", "old_logp", "ref_logp", "values"):
        setattr(sequences, name, torch.rand(len(tokens)))
    sequences.expert = torch.arange(count) >= count - 2
    index = sequences.mask.nonzero()[:, 0]
    return sequences, LossTokens(index, sequences.row[index], torch.arange(count), count, sequences.mask)


# ---------------------------------------------------------------- the model


def forward(rank: int, path: str, head: Literal["log-probs", "scores"]) -> list[tuple[str, tuple[int, ...]]]:
    """Where each micro-batch's answers are, and their shape: a forward pass through Megatron's schedule."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megarl.config.schema import ModelConfig, ParallelConfig, TrainerConfig
    from megarl.learn.parallel import process_groups
    from megarl.learn.training.model import Model, micro_batching_for
    from megarl.learn.training.schedule import Head, run
    from megarl.weights.checkpoint.formats import hf

    prepare()
    parallel = ParallelConfig()
    process_groups.initialize(parallel, seed=1)
    micro_batching = micro_batching_for(parallel, TrainerConfig(packing=False, micro_batch_size=2))
    asked = Head(VOCAB) if head == "log-probs" else None
    model = Model(hf.read_hf_config(Path(path)), ModelConfig(path=path), parallel, asked, micro_batching)
    sequences, _ = step()
    batches = list(model.micro_batches(sequences))
    with FakeTensorMode(static_shapes=True) as mode:

        def there(x: torch.Tensor) -> torch.Tensor:
            return torch.empty(x.shape, dtype=x.dtype, device=DEVICE)

        def parameter(p: torch.nn.Parameter) -> torch.nn.Parameter:
            moved = torch.nn.Parameter(there(p))
            moved.__dict__.update(p.__dict__)  # Megatron's marks
            return moved

        for module in model.chunks[0].modules():
            module._parameters = {name: None if p is None else parameter(p) for name, p in module._parameters.items()}
            module._buffers = {name: None if b is None else there(b) for name, b in module._buffers.items()}
        rotary = model.chunks[0].rotary_pos_emb
        rotary.inv_freq = there(rotary.inv_freq)  # Megatron makes it on the current device
        # The number of positions in the loss is data, which fake tensors do not have.
        torch.nonzero = lambda x: torch.zeros(4, x.dim(), dtype=torch.int64, device=x.device)  # type: ignore[assignment]
        answers = run(
            model.chunks, faked(mode, sequences), [faked(mode, b) for b in batches], asked,
            lambda batch, answer: (answer.sum(), answer), forward_only=True,
        )  # fmt: skip
    return [(str(x.device), tuple(x.shape)) for x in answers]


@pytest.mark.parametrize(("head", "width"), [("log-probs", 2), ("scores", 1)])
def test_micro_batches_go_where_the_model_is(tmp_path: Path, head: Literal["log-probs", "scores"], width: int) -> None:
    save_tiny_qwen3(tmp_path)
    [answers] = run_grid(1, forward, str(tmp_path), head)
    assert answers == [(DEVICE, (2, 3, width))] * 4


# ---------------------------------------------------------------- losses

POLICIES = [name for name, found in algorithms.ALGORITHMS.items() if "actor" in found.roles]
OTHERS = ("all terms", "reward_model", "critic")


def losses(rank: int) -> dict[str, set[str]]:
    """Where the sums of each loss are; what went wrong instead."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from megarl.config import compose
    from megarl.config.algorithms import AlgorithmConfig, KLConfig, PPOConfig
    from megarl.learn.algorithms import Loss
    from megarl.learn.training import objectives

    prepare()
    found: dict[str, set[str]] = {}

    def add(name: str, make: Callable[[Sequences], Objective], sequences: Sequences, kept: LossTokens) -> None:
        assert make(sequences).count(kept).device.type == "cpu"  # summed over ranks there
        with FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)) as mode:
            answers = torch.rand(len(kept.index), 2, device=DEVICE, requires_grad=True)
            try:
                loss = make(faked(mode, sequences)).loss(faked(mode, kept), answers)
            except RuntimeError as error:
                found[name] = {str(error).splitlines()[0]}
                return
        assert loss.total.requires_grad
        found[name] = {str(x.device) for x in (loss.total, *(part for pair in loss.metrics.values() for part in pair))}

    for name in POLICIES:
        settings = compose([f"algorithm={name}"]).algorithm
        add(name, lambda s, name=name, settings=settings: objectives.policy(algorithms.get(name), settings, s), *step())  # type: ignore[misc]
    whole = AlgorithmConfig(entropy_coef=0.1, kl=KLConfig(coef=0.1), correction="truncate")
    add("all terms", lambda s: objectives.policy(algorithms.get("grpo"), whole, s), *step())
    add("critic", lambda s: objectives.returns(PPOConfig(), s), *step())
    sequences, _ = step()
    last = LossTokens(sequences.cu_seqlens[1:] - 1, torch.arange(8), torch.arange(8), 8, sequences.mask)
    preference, settings = algorithms.get("reward_model"), AlgorithmConfig(name="reward_model")
    add(
        "reward_model",
        lambda s: objectives.preference_scores(preference, settings, s.lengths[:4].float()),
        sequences,
        last,
    )
    mixed = Objective("actor", lambda kept: kept.mask.sum(), lambda kept, answers: Loss(answers[:, 0] * kept.mask, {}))
    add("a part left on the host", lambda s: mixed, *step())
    return found


@pytest.fixture(scope="module")
def devices() -> dict[str, set[str]]:
    [found] = run_grid(1, losses)
    return dict(found)


@pytest.mark.parametrize("name", [*POLICIES, *OTHERS])
def test_losses_are_computed_where_the_answers_are(devices: dict[str, set[str]], name: str) -> None:
    assert devices[name] == {DEVICE}


def test_a_part_left_on_the_host_would_be_noticed(devices: dict[str, set[str]]) -> None:
    [said] = devices["a part left on the host"]
    assert "device" in said and said != DEVICE
