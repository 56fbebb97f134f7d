"""Adapters of one model on one rank: where they lie, and the model's tensors with them and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megarl.core.config.lora import LoraConfig
from megarl.learn.models import lora
from megarl.weights.architectures import Head, HFConfig
from megarl.weights.reshard.adapters import (
    MergedTensors,
    TrainedPart,
    adapter_layout,
    factors_of,
    is_adapter,
    local_adapters,
    trained_whole,
)
from megarl.weights.reshard.layout import Layout


class ModelAdapters:
    """Adapters of a model's chunks, which ``install`` has made.

    Args:
        base: Layout of the model's own tensors.
    """

    def __init__(
        self,
        hf_config: HFConfig,
        config: LoraConfig,
        chunks: Sequence[torch.nn.Module],
        base: Layout,
        rank: int,
        head: Head,
    ) -> None:
        self.factors = factors_of(hf_config, config, head)
        self.layout = adapter_layout(base, self.factors)
        self.local = local_adapters(base, self.factors, rank)
        self.saved = trained_whole(base.tensors, config, head)
        """HF names of the model's own tensors that are trained whole."""
        self.part = TrainedPart.of(hf_config, config, head)
        """Number of parameters that are trained, and of all."""
        lora.install(chunks, base, rank, self.factors, config)
        saved = set(self.saved)
        found = {row.local for row, _ in base.rows_of(rank) if not saved.isdisjoint(row.parts)}
        self.saved_locals = lora.freeze(chunks, found)
        """Local names of those that this rank has."""

    def merged(self, tensors: Mapping[str, torch.Tensor]) -> MergedTensors:
        """The model's own tensors with the adapters in them, of a rank's tensors of both kinds."""
        own = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
        return MergedTensors(own, self.local, tensors)
