"""Settings of low-rank adapters (LoRA, arXiv:2106.09685), with PEFT's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megarl.config.bounds import Bound, NonNegative, Positive, Seed

ALL_LINEAR = "all-linear"
"""``targets``: every linear layer of attention, MLP and experts."""


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of a trained model, which keeps its own weights unchanged (docs/lora.md)."""

    rank: NonNegative = 0
    """Rank of the adapters: rows of each A and columns of each B; 0 trains the model itself."""
    alpha: Positive = 32.0
    """The product B·A is multiplied by ``alpha`` / ``rank``."""
    rslora: bool = False
    """True multiplies by ``alpha`` / sqrt(``rank``) (arXiv:2312.03732)."""
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Layers with an adapter: suffixes of their HF names (``q_proj``, ``mlp.down_proj``), or all-linear for all layers
    of attention, MLP and experts. ``lm_head`` and ``embed_tokens`` must be named explicitly."""
    modules_to_save: list[str] = field(default_factory=list)
    """Suffixes of the HF names of modules trained whole in addition to the adapters (``lm_head``, ``model.norm``;
    ``norm`` matches every norm, as in PEFT)."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """Suffix of a layer's HF name, as a regular expression -> rank of its adapter in place of ``rank``."""
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    """Suffix of a layer's HF name, as a regular expression -> alpha of its adapter in place of ``alpha``."""
    dropout: Annotated[float, Bound(0, 1, below=True)] = 0.0
    """Dropout probability of an adapter's inputs in training; above 0 losses depend on the grid."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Distribution of a new A; B begins with zeros. kaiming: uniform within ±1/sqrt(inputs), PEFT's default. gaussian:
    standard deviation 1 / rank. For ``embed_tokens``, A begins with zeros and B with standard deviation 1."""
    seed: Seed = 1
    """Seed of a new A."""
    path: str | None = None
    """PEFT folder with the initial adapter; null creates a new adapter."""

    @property
    def is_used(self) -> bool:
        """True if adapters are trained."""
        return self.rank > 0
