"""Adapters of one model on one rank: their layout, and the model's tensors with and without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megarl.config.lora import LoraConfig
from megarl.learn.models import lora
from megarl.learn.models.gpt import unwrap
from megarl.ops import digest_values, slice_digests
from megarl.weights.architectures import Head, HFConfig
from megarl.weights.checkpoint.formats import peft
from megarl.weights.reshard import layout
from megarl.weights.reshard.adapters import (
    AdaptedModel,
    TrainedPart,
    adapter_layout,
    factors_of,
    file_layout,
    is_adapter,
    local_adapters,
    trained_whole,
)
from megarl.weights.reshard.execute import fold
from megarl.weights.reshard.layout import Layout


class ModelAdapters:
    """Adapters of a model's chunks; the constructor installs them.

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
        self.rank, self._base = rank, base
        self._hf_config, self._config, self._head = hf_config, config, head
        self.factors = factors_of(hf_config, config, head)
        self.layout = adapter_layout(base, self.factors)
        self.local = local_adapters(base, self.factors, rank)
        self.saved = trained_whole(base.tensors, config, head)
        """HF names of the base model's tensors that are trained whole."""
        self.file_layout = file_layout(base, self.layout, self.saved)
        """Layout of PEFT's files: ``layout``, and the layout of the tensors ``saved``."""
        self.part = TrainedPart.of(hf_config, config, head)
        """Numbers of trained parameters and of all parameters."""
        lora.install(chunks, base, rank, self.factors, config)
        saved = set(self.saved)
        found = {row.local for row, _ in base.rows_of(rank) if not saved.isdisjoint(row.parts)}
        self.saved_locals = lora.freeze(chunks, found)
        """Local names of the wholly trained tensors on this rank."""
        self._originals: dict[str, torch.Tensor] = {}

    def keep_originals(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep copies of the wholly trained tensors as they are in the base model."""
        self._originals = {name: tensors[name].clone() for name in self.saved_locals}

    @contextmanager
    def left_out(self, chunks: Sequence[torch.nn.Module], tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Make the chunks compute the base model within the context: without adapters, and with original tensors."""
        trained = {name: tensors[name].clone() for name in self._originals}
        try:
            _write(tensors, self._originals)
            with lora.without(chunks):
                yield
        finally:
            _write(tensors, trained)

    def load(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load PEFT's files into a rank's adapters and wholly trained modules; call ``Model.weights_changed``
        afterwards.

        Raises CheckpointError if the files do not fit these adapters.
        """
        peft.load_adapter(folder, self.file_layout, self.rank, tensors, self._hf_config)

    def save(self, target: Path, tensors: Mapping[str, torch.Tensor], base: str) -> dict[str, int]:
        """Write the adapters and wholly trained modules as PEFT's files; every rank calls it, rank 0 writes.

        Args:
            tensors: Local name -> tensor of this rank.
            base: Path or name of the adapters' base model.

        Returns:
            HF name -> digest of this rank's part of the written tensor.
        """
        return peft.write_adapter(
            target,
            self._config,
            self.factors,
            self.file_layout,
            self.rank,
            tensors,
            base=base,
            modules_to_save=[*self._config.modules_to_save, *(["score"] if self._head == "score" else [])],
            head=self._head,
            hf_config=self._hf_config,
        )

    def base_digest(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Return the hexadecimal digest of the adapters' base model, the same on every grid. Every rank calls it.

        Args:
            tensors: Local name -> tensor of this rank.
        """
        mine: dict[str, int] = {}
        base = self._base
        for row, share in base.rows_of(self.rank):
            is_first = row.owners.ranks[share][0] == self.rank
            own = [part for part in row.parts if part not in self.saved and base.rows_with[part][0] is row]
            if not is_first or not own:
                continue
            pieces = [piece for piece in row.pieces(share) if piece.tensor in own]
            tensor = tensors[row.local]
            asked = [
                (
                    tensor[layout.index_of(piece.at, layout.shape_of(piece.box))],
                    layout.start_of(piece.box),
                    base.tensors[piece.tensor],
                )
                for piece in pieces
            ]
            found = digest_values(slice_digests(asked)) if asked else []
            for piece, digest in zip(pieces, found, strict=True):
                mine[piece.tensor] = (mine.get(piece.tensor, 0) + digest) % 2**64
        total = torch.from_numpy(np.array([fold(mine)], dtype=np.uint64).view(np.int64))
        dist.all_reduce(total)  # modulo 2**64
        return f"{int(total.numpy().view(np.uint64)[0]):016x}"

    def adapted(self, tensors: Mapping[str, torch.Tensor]) -> AdaptedModel:
        """Return a rank's tensors, separated into base tensors and adapters."""
        own = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
        factors = {name: tensor for name, tensor in tensors.items() if is_adapter(name)}
        return AdaptedModel(own, factors, self.local, self.saved_locals)


@torch.no_grad()
def _write(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    for name, value in values.items():
        tensors[name].copy_(value)


def share_base(lender: Sequence[torch.nn.Module], chunks: Sequence[torch.nn.Module]) -> None:
    """Make a model with adapters use the memory of another model with the same base and grid, for parameters that
    neither trains."""
    for theirs, own in zip(lender, chunks, strict=True):
        known = {name: p for name, p in unwrap(theirs).named_parameters() if not p.requires_grad}
        for name, parameter in unwrap(own).named_parameters():
            other = known.get(name)
            if other is not None and not parameter.requires_grad and other.shape == parameter.shape:
                parameter.data = other.data
                parameter.is_lent = True  # type: ignore[attr-defined]
