"""Files of a critic or reward model: a sequence-classification checkpoint, or a PEFT adapter with its base model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megarl.config.lora import LoraConfig
from megarl.core.errors import CheckpointError
from megarl.weights.architectures import HFConfig
from megarl.weights.checkpoint.formats import peft
from megarl.weights.checkpoint.formats.hf_source import SCORE, check_hf, check_labels, has_score, open_hf
from megarl.weights.reshard.adapters import factors_of, file_shapes, trained_whole
from megarl.weights.reshard.layout import Layout


@dataclass(frozen=True)
class ScoreFiles:
    """Folders with the weights of one critic or reward model."""

    base: Path
    """HF checkpoint: the full model, or the adapter's base model."""
    adapter: Path | None = None
    """PEFT folder; its score head replaces the checkpoint's."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Resolve a ``<role>.path``. Raises CheckpointError if an adapter's base model is not on this machine."""
        return cls(peft.base_of(path), path) if peft.is_folder(path) else cls(path)

    def lora(self, hf_config: HFConfig) -> LoraConfig:
        """Return the adapter's settings, or the default without an adapter. Raises CheckpointError.

        Args:
            hf_config: config.json of ``base``.
        """
        return LoraConfig() if self.adapter is None else peft.lora_of(self.adapter, hf_config, "score")

    def check(self, layout: Layout, hf_config: HFConfig) -> None:
        """Check that the files have every tensor of a model's layout. Raises CheckpointError naming tensor and file.

        Args:
            layout: The model's layout, with a score head.
            hf_config: config.json of ``base``.
        """
        files = open_hf(self.base)
        try:
            if self.adapter is None:
                check_labels(self.base, hf_config)
                check_hf(files, layout, hf_config)
                return
            check_hf(files, layout.only(lambda name: name != SCORE), hf_config, beside={SCORE})
            lora = self.lora(hf_config)
            if "score" not in lora.modules_to_save:
                raise CheckpointError(
                    f"{self.adapter / peft.CONFIG} has no score head among modules_to_save; give an adapter of a "
                    "reward model (task_type SEQ_CLS with one label)"
                )
            wanted = file_shapes(factors_of(hf_config, lora, "score").values())
            wanted |= {name: layout.tensors[name] for name in trained_whole(layout.tensors, lora, "score")}
            peft.open_adapter(self.adapter, wanted, files, hf_config).close()
        finally:
            files.close()

    @property
    def begins_without_score(self) -> bool:
        """True if only the adapter has a score head, not the checkpoint."""
        return self.adapter is not None and not has_score(self.base)
