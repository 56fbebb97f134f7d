"""Settings of low-rank adapters (LoRA, arXiv:2106.09685), by the names of PEFT."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megarl.config.bounds import Bound, NonNegative, Positive, Seed

ALL_LINEAR = "all-linear"
"""``targets``: every linear layer of attention, MLP and experts."""


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of a model that is trained: its own weights stay as they are (docs/lora.md)."""

    rank: NonNegative = 0
    """Rows of each A and columns of each B; 0 trains the model itself."""
    alpha: Positive = 32.0
    """The product B·A is multiplied by ``alpha`` / ``rank``."""
    rslora: bool = False
    """True multiplies by ``alpha`` / sqrt(``rank``) (arXiv:2312.03732)."""
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Layers with an adapter: ends of their HF names (``q_proj``, ``mlp.down_proj``); all-linear stands for all of
    attention, MLP and experts. ``lm_head`` and ``embed_tokens`` are named by themselves."""
    modules_to_save: list[str] = field(default_factory=list)
    """Ends of the HF names of modules that are trained whole beside the adapters (``lm_head``, ``model.norm``; ``norm``
    stands for every norm, as in PEFT)."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """End of a layer's HF name, as a regular expression -> rank of its adapter in place of ``rank``."""
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    """End of a layer's HF name, as a regular expression -> alpha of its adapter in place of ``alpha``."""
    dropout: Annotated[float, Bound(0, 1, below=True)] = 0.0
    """Share of an adapter's inputs that an update leaves out; losses then depend on the grid."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Distribution of a new A; B begins with zeros. kaiming: uniform within ±1/sqrt(inputs), PEFT's default. gaussian:
    standard deviation 1 / rank. Of ``embed_tokens`` A begins with zeros, and B with standard deviation 1."""
    seed: Seed = 1
    """Seed of a new A."""
    path: str | None = None
    """PEFT folder with the adapter that training begins with; null begins with a new one."""

    @property
    def is_used(self) -> bool:
        """True if adapters are trained."""
        return self.rank > 0
