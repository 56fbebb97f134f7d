"""Copy of the weights published last: an engine replaced during the update receives them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megarl.config.job import SyncConfig
from megarl.core.errors import WeightsDiffer
from megarl.core.schema import WeightsVersion
from megarl.engines.client.probe import ProbeText
from megarl.weights.reshard.adapters import Adapted


@dataclass(frozen=True, eq=False)
class SentWeights:
    """This rank's share of a version."""

    tensors: Mapping[str, torch.Tensor]
    """Megatron name -> local tensor, in host memory."""
    written: Mapping[str, int]
    """Digests of what the optimizer wrote."""
    probe: ProbeText

    @classmethod
    def copy_of(cls, tensors: Mapping[str, torch.Tensor], written: Mapping[str, int], probe: ProbeText) -> SentWeights:
        """Copy tensors to host memory: one more set of the rank's parameters, or its trained tensors of adapters."""
        if isinstance(tensors, Adapted):
            return cls(type(tensors)(tensors.model.kept()), written, probe)
        return cls({name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}, written, probe)


class SentDigests:
    """Digests of this rank's share of the version sent last."""

    def __init__(self) -> None:
        self._last: tuple[WeightsVersion, Mapping[str, int]] | None = None

    def check(self, version: WeightsVersion, written: Mapping[str, int]) -> None:
        """Record what is sent next. Raises WeightsDiffer if the same version was sent with other weights."""
        known = written if self._last is None or self._last[0] != version else self._last[1]
        if changed := sorted(name for name in known.keys() | written.keys() if known.get(name) != written.get(name)):
            raise WeightsDiffer(
                f"weights {version} would be published again with other values: {len(changed)} tensors of this rank "
                f"have changed since, the first is {changed[0]}; no engine may sample with them as that version"
            )
        self._last = version, written


def outlives_update(sync: SyncConfig) -> bool:
    """True if engines keep sampling with a version after the following update, and no other version may replace it: in
    admission order, over links."""
    return sync.max_staleness > 0 and sync.order == "admission" and sync.method == "direct"
