"""A model that lies on a device is given its micro-batches there, from sequences that lie on the host: its forward pass through Megatron's
schedule on torch's fake tensors, which know where they are and refuse to be mixed, on a machine that has no such device."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, save_tiny_qwen3

DEVICE = "privateuseone:0"


def on_device(rank: int, path: str, head: Literal["log-probs", "scores"]) -> list[tuple[str, tuple[int, ...]]]:
    """Runs in a process of its own: where each micro-batch's answers are, and their shape."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from megarl import ops
    from megarl.batching import Sequences
    from megarl.checkpoint import hf
    from megarl.config.schema import ModelConfig, ParallelConfig, TrainerConfig
    from megarl.ops import checks
    from megarl.parallel import groups
    from megarl.training.model import FrozenModel, cut_for
    from megarl.training.schedule import Head, run

    _setup_privateuseone_for_python_backend()
    ops.use("torch")
    checks.device = lambda *args, **kwargs: None  # type: ignore[assignment]
    parallel = ParallelConfig()
    groups.initialize(parallel, seed=1)
    cut = cut_for(parallel, TrainerConfig(packing=False, micro_batch_size=2))
    model = FrozenModel(
        hf.read_hf_config(Path(path)), ModelConfig(path=path), parallel, Head(VOCAB) if head == "log-probs" else None, cut
    )
    tokens = torch.arange(24)
    sequences = Sequences(tokens, torch.full((8,), 3), tokens % 3 < 2)
    batches = model.micro_batches(sequences)
    with FakeTensorMode(static_shapes=True) as mode:

        def faked(real: Any) -> Any:
            values = {field.name: getattr(real, field.name) for field in fields(real)}
            return type(real)(**{name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in values.items()})

        def there(x: torch.Tensor) -> torch.Tensor:
            return torch.empty(x.shape, dtype=x.dtype, device=DEVICE)

        for module in model.chunks[0].modules():
            module._parameters = {n: None if p is None else _like(torch.nn.Parameter(there(p)), p) for n, p in module._parameters.items()}
            module._buffers = {n: None if b is None else there(b) for n, b in module._buffers.items()}
        rotary = model.chunks[0].rotary_pos_emb
        rotary.inv_freq = there(rotary.inv_freq)  # Megatron makes it on the current device
        answers = run(
            model.chunks, faked(sequences), [faked(b) for b in batches], model.head, lambda batch, answer: (answer.sum(), answer), forward_only=True
        )
    return [(str(x.device), tuple(x.shape)) for x in answers]


def _like(parameter: torch.nn.Parameter, other: torch.nn.Parameter) -> torch.nn.Parameter:
    parameter.__dict__.update(other.__dict__)  # Megatron's marks
    return parameter


@pytest.mark.parametrize(("head", "width"), [("log-probs", 2), ("scores", 1)])
def test_micro_batches_go_where_the_model_is(tmp_path: Path, head: Literal["log-probs", "scores"], width: int) -> None:
    save_tiny_qwen3(tmp_path)
    [answers] = run_grid(1, on_device, str(tmp_path), head)
    assert answers == [(DEVICE, (2, 3, width))] * 4
