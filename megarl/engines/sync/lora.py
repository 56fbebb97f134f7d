"""Adapters (LoRA) of an engine that applies A and B separately from an unchanged model (``sync.adapter=separate``).
Runs inside vLLM's workers.

vLLM keeps the A's and B's of a LoRA layer in buffers with a slot for each adapter, which its kernels read. Our engines
have one slot and one adapter, never loaded from files, replaced or removed: a sync writes into its buffers and reads
digests from them. vLLM applies no further factor, so B arrives as scale · B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import nn
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.model_manager import LRUCacheLoRAModelManager

from megarl.core.errors import WeightsDiffer, WeightSyncError, first_of
from megarl.engines.sync.one_adapter import ADAPTER, of_zeros
from megarl.engines.sync.writer import SliceWriter
from megarl.weights.reshard.adapters import beside, is_adapter, local_name
from megarl.weights.reshard.layout import Layout

Part = Literal["all", "changed"]
"""Weights of an update: the model's own and its adapters, or the adapters alone."""
_SHOWN = 4


class _LayerPlace(NamedTuple):
    """Place of an A or B among vLLM's LoRA layers."""

    path: str
    """Path of the layer in the model."""
    layer: BaseLinearLayerWithLoRA
    which: Literal["a", "b"]
    number: int
    """Index among the tensors fused in the layer."""

    def buffer(self, slot: int) -> torch.Tensor:
        """Return the layer's whole buffer: A [largest rank, in] or B [out, largest rank]."""
        stacked = self.layer.lora_a_stacked if self.which == "a" else self.layer.lora_b_stacked
        whole: torch.Tensor = stacked[self.number][slot, 0]
        return whole


class AdapterWriter:
    """Adapters of one worker.

    Args:
        model: The worker's model, with vLLM's LoRA layers.
        layout: Layout of the adapters.
        rank: The worker's rank in it.

    Raises:
        WeightSyncError: the engine has no LoRA layers, or they are not those of the layout.
    """

    def __init__(self, model: nn.Module, layout: Layout, rank: int) -> None:
        manager = getattr(model, "lora_manager", None)
        if manager is None:
            raise WeightSyncError(
                "the trainer has sync.adapter=separate, the engine was started without adapters: the programs that "
                "share engines need the same sync.adapter and model.lora"
            )
        self.layout, self._model = layout, model
        self.manager: LRUCacheLoRAModelManager = manager
        """vLLM's manager of the model's LoRA layers."""
        self.places = _places_of(manager)
        """Local name -> place of every A and B in vLLM's buffers."""
        self.shapes = layout.local_shapes(rank)
        """Local name -> shape of every A and B of the layout."""
        self._left: dict[str, int] = {}
        unknown = [name for name in self.shapes if name not in self.places]
        if unknown:
            raise WeightSyncError(
                f"vLLM has no LoRA layer for {first_of(unknown, _SHOWN)}; set sync.adapter=merged, or leave these out "
                "of model.lora.targets"
            )
        _keep(manager)
        for name in self.shapes:
            self.computed_with(name)

    def start(self) -> None:
        """Begin an update: set every A and B to zero, including those in no layout."""
        for layer in dict.fromkeys(place.layer for place in self.places.values()):
            layer.reset_lora(self._slot)
        self._left = {name: math.prod(shape) for name, shape in self.shapes.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Return the engine's A or B of a local name, to write slices into."""
        return self.computed_with(name)

    def wrote(self, name: str, numel: int) -> None:
        """Count written elements."""
        self._left[name] -= numel

    def finish(self) -> None:
        """End an update. Raises WeightSyncError if an A or B did not get all its elements."""
        short = [name for name, left in self._left.items() if left]
        if short:
            raise WeightSyncError(f"these adapters did not get all their elements: {first_of(short, _SHOWN)}")

    def computed_with(self, name: str) -> torch.Tensor:
        """Return the engine's A or B of a local name, in the layout's shape. Raises WeightSyncError if vLLM's shape
        differs, or the engine does not use the adapter."""
        whole, shape = self.places[name].buffer(self._slot), self.shapes[name]
        rank_axis = 0 if self.places[name].which == "a" else 1
        if whole.shape[1 - rank_axis] != shape[1 - rank_axis] or whole.shape[rank_axis] < shape[rank_axis]:
            raise WeightSyncError(
                f"{name} has shape {tuple(whole.shape)} in vLLM's LoRA layer, {shape} in the layout; set "
                "sync.adapter=merged, or start the engine with the trainer's model.lora"
            )
        return whole[: shape[0], : shape[1]]

    def check_rest(self) -> None:
        """Check that the buffers are zero outside the layout's A's and B's, and are used by the model's layers. Raises
        WeightsDiffer."""
        for name, place in self.places.items():
            if self._model.get_submodule(place.path) is not place.layer:
                raise WeightsDiffer(
                    f"{name} lies in a LoRA layer that is no layer of the model: start the engine again"
                )
            whole, shape = place.buffer(self._slot), self.shapes.get(name, (0, 0))
            if whole[shape[0] :].any() or whole[:, shape[1] :].any():
                raise WeightsDiffer(f"the padding of {name} outside {shape} is not zero after the sync")

    @property
    def _slot(self) -> int:
        try:
            return self.manager.lora_index_to_id.index(ADAPTER.lora_int_id)
        except ValueError:
            raise WeightSyncError("the engine has dropped its adapter: start it again") from None


class AdaptedWriter:
    """Writer with ``SliceWriter``'s methods for a model trained with adapters, and for the engine's separate adapters.

    Args:
        own: Writer of the model itself.
        adapters: Writer of A's and B's; None if they are merged into the model's weights.
        changed: Local tensors of the model itself that training changes.
    """

    def __init__(self, own: SliceWriter, adapters: AdapterWriter | None, changed: Sequence[str]) -> None:
        self._own, self.adapters, self.changed = own, adapters, changed
        self._part: Part = "all"
        self.has_own = False
        """True if the model's own weights came from the trainer."""
        self._still: dict[str, int] | None = None
        """Digests of the weights that training does not change, after the last update of all weights."""

    def start(self, part: Part) -> None:
        """Begin an update. Raises WeightSyncError for a partial update if the other weights are missing."""
        if part == "changed" and not self.has_own:
            raise WeightSyncError(
                "an update of what training changes came to an engine that does not have the rest of the weights yet: "
                "the first update after a join or a sleep brings all"
            )
        self._part, self.has_own = part, False
        if part == "all":
            self._still = None
        if self.adapters is not None:
            self.adapters.start()
        if part == "all" or self.changed:
            self._own.start(None if part == "all" else self.changed)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the local tensor to write slices into."""
        return self._of(name).tensor(name)

    def wrote(self, name: str, numel: int) -> None:
        """Count written elements."""
        self._of(name).wrote(name, numel)

    def finish(self) -> None:
        """End an update. Raises WeightSyncError if a tensor did not get all its elements."""
        if self._part == "all" or self.changed:
            self._own.finish()
        if self.adapters is not None:
            self.adapters.finish()
        self.has_own = True

    def computed_with(self, name: str) -> torch.Tensor:
        """Return the local tensor that the engine computes with."""
        return self._of(name).computed_with(name)

    def layout(self, own: Layout, changed: Layout) -> Layout:
        """Return the layout of the last update's weights. Raises WeightsDiffer if an adapter's padding is not zero.

        Args:
            own: Layout of the model itself.
            changed: Layout of the weights that training changes.
        """
        if self.adapters is not None:
            self.adapters.check_rest()
        if self._part == "changed":
            return changed
        return own if self.adapters is None else beside(own, self.adapters.layout)

    def check_still(
        self, found: Mapping[str, int], digests: Callable[[Layout], Mapping[str, int]], own: Layout, changed: Layout
    ) -> None:
        """Check that weights not in the last update are unchanged since the last update of all weights. Raises
        WeightsDiffer.

        Args:
            found: Digests of the last update's weights.
            digests: Returns the digests of the model's weights.
            own: Layout of the model itself.
            changed: Layout of the weights that training changes.
        """
        if self._part == "all":
            self._still = {
                tensor: found[tensor] for tensor in found.keys() - changed.tensors.keys() if tensor in own.tensors
            }
            return
        if self._still is None:
            raise WeightsDiffer("weights that training does not change were never compared with those sent")
        now = digests(own.only(self._still.__contains__))
        if wrong := [tensor for tensor, digest in self._still.items() if now.get(tensor) != digest]:
            raise WeightsDiffer(
                f"weights that training does not change are other ones in the engine than were sent: "
                f"{first_of(wrong, _SHOWN)}; start the engine again"
            )

    def _of(self, name: str) -> AdapterWriter | SliceWriter:
        if is_adapter(name):
            assert self.adapters is not None, f"{name} came to an engine without adapters"
            return self.adapters
        return self._own


def _places_of(manager: LRUCacheLoRAModelManager) -> dict[str, _LayerPlace]:
    """Return local name -> place of every A and B in vLLM's LoRA layers."""
    found: dict[str, _LayerPlace] = {}
    for path, layer in manager.modules.items():
        if not isinstance(layer, BaseLinearLayerWithLoRA):
            continue
        own = path.rpartition(".")[2]
        leaves = manager.packed_modules_mapping.get(own, [own])
        for number, leaf in enumerate(leaves if len(leaves) == layer.n_slices else [own]):
            for which in ("a", "b"):
                found[local_name(f"{path}.weight", leaf, which)] = _LayerPlace(path, layer, which, number)  # type: ignore[arg-type]
    return found


def _keep(manager: LRUCacheLoRAModelManager) -> None:
    """Pin the adapter in the engine: vLLM would drop it and its buffers after every weight update."""
    if ADAPTER.lora_int_id not in manager.list_adapters():
        manager.add_adapter(of_zeros(ADAPTER))
    manager.activate_adapter(ADAPTER.lora_int_id)
    manager.pin_adapter(ADAPTER.lora_int_id)
    manager.remove_all_adapters = lambda: None  # type: ignore[method-assign]
