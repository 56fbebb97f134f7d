"""Adapters of one model on one rank: where they lie, and the model's tensors with them and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megarl.core.config.lora import LoraConfig
from megarl.learn.models import lora
from megarl.weights.architectures import Head, HFConfig
from megarl.weights.checkpoint.formats import peft
from megarl.weights.reshard.adapters import (
    MergedTensors,
    adapter_layout,
    factors_of,
    file_layout,
    is_adapter,
    local_adapters,
    saved_whole,
)
from megarl.weights.reshard.layout import Layout

SCORE = "score.weight"
"""The head of a critic or reward model, which learns beside the adapters."""


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
        self.rank = rank
        self.factors = factors_of(hf_config, config, head)
        self.layout = adapter_layout(base, self.factors)
        self.local = local_adapters(base, self.factors, rank)
        score = [SCORE] if head == "score" else []
        self.saved = list(dict.fromkeys([*saved_whole(base.tensors, config), *score]))
        """HF names of the model's own tensors that are trained whole."""
        self.file_layout = file_layout(base, self.layout, self.saved)
        """Layout of what PEFT's files have: ``layout``, and that of the tensors ``saved``."""
        lora.install(chunks, base, rank, self.factors, config)
        saved = set(self.saved)
        self.saved_locals = {row.local for row, _ in base.rows_of(rank) if not saved.isdisjoint(row.parts)}
        lora.freeze(chunks, self.saved_locals)

    def load(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load PEFT's files into a rank's adapters and the modules that are trained whole; ``Model.weights_changed``
        comes after it.

        Raises CheckpointError where the files are not those of these adapters.
        """
        peft.load_adapter(folder, self.file_layout, self.rank, tensors)

    def merged(self, tensors: Mapping[str, torch.Tensor]) -> MergedTensors:
        """The model's own tensors with the adapters in them, of a rank's tensors of both kinds."""
        own = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
        return MergedTensors(own, self.local, tensors)
