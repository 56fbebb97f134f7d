"""Metrics of routers: where a stage without experts computes its share of them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

from megarl.learn.models import experts


def test_a_stage_without_experts_shares_from_the_device_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes no tensor of the host, and the other stages would wait."""
    shared: list[str] = []

    def all_reduce(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        shared.append(tensor.device.type)

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    monkeypatch.setattr("megatron.core.parallel_state.get_pipeline_model_parallel_group", lambda: None)
    with suppress(
        NotImplementedError, ZeroDivisionError
    ):  # a meta tensor has no numbers to read, and no stage has experts
        experts.measured([torch.nn.Linear(2, 2, device="meta")], "actor")
    assert shared == ["meta", "meta"]
