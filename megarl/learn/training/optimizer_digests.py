"""Digests of the weights that a model's optimizer last wrote, to check the tensors to send without using a layout.

A digest covers one local parameter in the parameter's dtype. Each data-parallel rank adds the share that its optimizer
updates, read from the tensors that Adam writes (float32 masters, cast) and not from copies of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.core.errors import WeightsDiffer
from megarl.learn.models.gpt import named_tensors, unwrap
from megarl.ops import digest_values, slice_digests
from megarl.weights.megatron_private import first_element
from megarl.weights.reshard.adapters import Adapted


def whole_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return name -> digest of the whole tensor; all tensors must be on one device."""
    found = slice_digests([(tensor, (0,) * tensor.dim(), tensor.shape) for tensor in tensors.values()])
    return dict(zip(tensors, digest_values(found), strict=True))


@torch.no_grad()
def digests_written(chunks: Sequence[torch.nn.Module], optimizer: Any, *, frozen: bool = True) -> dict[str, int]:
    """Return local name -> digest of what ``optimizer`` (Megatron's) wrote; with ``frozen`` also of untrained tensors.

    Every rank calls it: the shares of a data-parallel group are summed.
    """
    names: dict[torch.nn.Parameter, str] = {}
    for number, chunk in enumerate(chunks):
        prefix = f"chunk{number}." if len(chunks) > 1 else ""
        names |= {p: prefix + name for name, p in unwrap(chunk).named_parameters() if p.requires_grad}
    written = np.zeros(len(names), dtype=np.uint64)
    for distributed in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not distributed.is_stub_optimizer:
            written += _shares(distributed, list(names))  # 0 for parameters of the other optimizers
    found = dict(zip(names.values(), written.tolist(), strict=True))
    if not frozen:
        return found
    tensors = named_tensors(chunks if len(chunks) > 1 else chunks[0])
    now = whole_digests({name: tensor for name, tensor in tensors.items() if name not in found})
    return {name: found[name] if name in found else now[name] for name in tensors}


def _shares(optimizer: Any, parameters: Sequence[torch.nn.Parameter]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return uint64 [number of ``parameters``]: digests of one distributed optimizer's parameters, 0 for others."""
    written = np.zeros(len(parameters), dtype=np.uint64)
    # Data-parallel ranks have the same parameters in their buffers; other ranks may train more, fewer, or none.
    own = [p for buffer in optimizer.buffers for p in buffer.params]
    if not own:
        return written
    number = {p: i for i, p in enumerate(own)}
    total = torch.zeros(len(own), dtype=torch.int64, device=own[0].device)
    for p, (group, place) in optimizer.model_param_group_index_map.items():
        share = optimizer.optimizer.param_groups[group]["params"][place]
        start = (first_element(optimizer, p),)
        # One at a time, so that only one cast copy exists.
        total[number[p]].copy_(slice_digests([(share.to(p.dtype), start, (p.numel(),))])[0])
    dist.all_reduce(total, group=optimizer.data_parallel_group)  # modulo 2**64
    place_of = {p: i for i, p in enumerate(parameters)}
    written[[place_of[p] for p in own]] = total.cpu().numpy().view(np.uint64)
    return written


def check_written(tensors: Mapping[str, torch.Tensor], written: Mapping[str, int]) -> None:
    """Compare tensors with ``digests_written``, by local name; with adapters, only trained tensors.

    Raises:
        WeightsDiffer: names one differing tensor, and the number of others.
    """
    given = whole_digests(tensors.model.trained if isinstance(tensors, Adapted) else tensors)
    wrong = [name for name in sorted(given.keys() | written.keys()) if given.get(name) != written.get(name)]
    if wrong:
        values = ("nothing" if (v := side.get(wrong[0])) is None else format(v, "016x") for side in (written, given))
        raise WeightsDiffer(
            "weights to be sent are not what the optimizer last wrote: {} has digest {} by the optimizer, {} in the "
            "tensor given{}; the tensors are an old copy, or parameters were not updated from the optimizer's "
            "masters".format(wrong[0], *values, f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else "")
        )
