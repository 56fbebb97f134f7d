"""Weights that were published last, kept while the actor is trained: an engine that dies then is given them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megarl.core.config.schema import Config
from megarl.engine.client.probe import ProbeText


@dataclass(frozen=True, eq=False)
class SentWeights:
    """This rank's share of a version."""

    tensors: Mapping[str, torch.Tensor]
    """Megatron name -> local tensor, in host memory."""
    written: Mapping[str, int]
    """Digests of what the optimizer had written."""
    probe: ProbeText

    @classmethod
    def copy_of(cls, tensors: Mapping[str, torch.Tensor], written: Mapping[str, int], probe: ProbeText) -> SentWeights:
        """Copy tensors to the host: one more set of the rank's parameters there."""
        return cls({name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}, written, probe)


def outlives_update(config: Config) -> bool:
    """True if a version is sampled with after the update that follows it, and nothing else may sample in its place: in
    admission order, with engines that are there then."""
    sync = config.sync
    ahead = sync.max_staleness > 0 and sync.order == "admission"
    return ahead and sync.method == "direct" and config.rollout.placement == "separate"
