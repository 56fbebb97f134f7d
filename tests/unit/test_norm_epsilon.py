"""Norms with another epsilon than the config's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megarl.learn.models.norms import RMSNorm
from megarl.train.parts.norm_epsilon import wrong_norms


def test_a_norm_with_another_epsilon_is_found() -> None:
    config: Any = {"hidden_size": 64, "rms_norm_eps": 1e-6, "num_attention_heads": 2}
    parallel = SimpleNamespace(sequence_parallel=False)
    right, wrong = RMSNorm(parallel, 64, 1e-6), RMSNorm(parallel, 64, 1e-5)
    heads = RMSNorm(parallel, 32, 1e-6, zero_centred=True)
    assert wrong_norms(torch.nn.ModuleDict({"a": right, "c": heads}), config) == []
    assert wrong_norms(torch.nn.ModuleDict({"a": right, "b": wrong}), config) == ["b"]
