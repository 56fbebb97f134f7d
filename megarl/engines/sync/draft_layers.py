"""Prediction layers with which an engine drafts tokens (``rollout.speculative=mtp``), and their comparison with the
model's files. Runs inside vLLM's workers.

No job trains these layers, so no update sends them. Embedding and output weight of vLLM's draft model are the model's
own modules, which updates write.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from torch import nn
from vllm.config import ModelConfig

from megarl.core.errors import WeightsDiffer, first_of
from megarl.engines.sync.eight_bits import EightBits
from megarl.engines.sync.files import compare_with_files
from megarl.engines.sync.writer import LocalTensor, SliceWriter
from megarl.weights.reshard.execute import digests_of
from megarl.weights.reshard.layout import Layout

SHOWN = 4


class DraftLayers:
    """Prediction layers of one worker.

    Args:
        drafter: vLLM's draft model.
        model: The model whose drafts it makes.
        layout: ``vllm_layout`` of a single engine with ``drafts``.
        tensors: Local tensor name -> its part of the layout.
        rank: The worker's in the engine.

    Raises WeightSyncError if the draft model lacks tensors of the layout or has others.
    """

    def __init__(
        self,
        drafter: nn.Module,
        model: nn.Module,
        model_config: ModelConfig,
        layout: Layout,
        tensors: dict[str, LocalTensor],
        rank: int,
    ) -> None:
        shared = frozenset(model.modules())
        self._writer = SliceWriter(drafter, model_config, tensors, EightBits(drafter, layout, rank), shared)
        self._path, self._dtype = Path(model_config.model), model_config.dtype
        self._layout, self._rank = layout, rank
        self._digests: dict[str, int] | None = None

    def check(self) -> None:
        """Compare the layers with the model's files, element by element; later calls compare digests with those of the
        first call. Raises WeightsDiffer naming the tensors that differ."""
        read = lru_cache(maxsize=1)(self._writer.computed_with)  # consecutive pieces share a tensor
        found = digests_of(self._layout, self._rank, read)
        if self._digests is None:
            compare_with_files(self._layout, self._rank, read, self._path, self._dtype)
            self._digests = found
        if wrong := [name for name, digest in found.items() if digest != self._digests[name]]:
            raise WeightsDiffer(
                f"the engine's draft layers have changed, although no update writes them: {first_of(wrong, SHOWN)}"
            )
