"""Expert ids of an engine's model as samples carry them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.weights.architectures import architecture
from megarl.weights.checkpoint.formats.hf_source import read_hf_config


@dataclass(frozen=True)
class ExpertLayers:
    """Layers with experts of a model, and the type that an id of its experts fits."""

    numbers: tuple[int, ...]
    """Counted from 0 over all layers."""
    dtype: np.dtype[np.signedinteger]
    """int8 up to 128 experts, else int16: -1 stands for no id in the trainer."""

    @classmethod
    def of(cls, path: str) -> ExpertLayers:
        """Read the config.json of an HF checkpoint."""
        hf_config = read_hf_config(Path(path))
        sizes = architecture(hf_config).sizes(hf_config)
        return cls(sizes.moe_layers, np.dtype(np.int8 if sizes.experts <= 128 else np.int16))

    def of_engine(self, ids: np.ndarray) -> np.ndarray:
        """Return [N, L, K] of vLLM's [N, all layers, K], which are unsigned."""
        return ids[:, list(self.numbers)].astype(self.dtype)
