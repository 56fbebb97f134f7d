"""Expert ids of an engine's model, in the form of samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.weights.architectures import architecture
from megarl.weights.checkpoint.formats.hf_source import read_hf_config


@dataclass(frozen=True)
class ExpertLayers:
    """Layers with experts of a model, and the integer type of its expert ids."""

    numbers: tuple[int, ...]
    """Counted from 0 over all layers."""
    dtype: np.dtype[np.signedinteger]
    """int8 up to 128 experts, else int16: signed, because the trainer uses -1 for no id."""

    @classmethod
    def of(cls, path: str) -> ExpertLayers:
        """Read the config.json of an HF checkpoint."""
        hf_config = read_hf_config(Path(path))
        sizes = architecture(hf_config).sizes(hf_config)
        return cls(sizes.moe_layers, np.dtype(np.int8 if sizes.experts <= 128 else np.int16))

    def of_engine(self, ids: np.ndarray) -> np.ndarray:
        """Return signed ids [N, L, K] from vLLM's unsigned [N, all layers, K]."""
        return ids[:, list(self.numbers)].astype(self.dtype)
