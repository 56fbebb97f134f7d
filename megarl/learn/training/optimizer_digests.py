"""Digests of the weights that a model's optimizer last wrote: evidence about the tensors that are sent, made without a
layout.

A digest is of one local parameter, in the parameter's own dtype. Each data-parallel rank adds the share that its
optimizer steps, read from the tensors that Adam itself writes (float32 masters, cast), so the sum depends on no copy of
the parameter.
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
    """Name -> digest of the whole tensor; all lie on one device."""
    found = slice_digests([(tensor, (0,) * tensor.dim(), tensor.shape) for tensor in tensors.values()])
    return dict(zip(tensors, digest_values(found), strict=True))


@torch.no_grad()
def digests_written(chunks: Sequence[torch.nn.Module], optimizer: Any, *, frozen: bool = True) -> dict[str, int]:
    """Local name -> digest of what ``optimizer`` (Megatron's) has written for it, or of the tensor now where nothing
    trains it (with ``frozen``).

    Every rank calls it: the shares of a data-parallel group are added up.
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
    """uint64 [number of ``parameters``]: digests of those that one distributed optimizer trains, 0 for the others."""
    number = {p: i for i, p in enumerate(parameters)}
    total = torch.zeros(len(parameters), dtype=torch.int64, device=parameters[0].device)
    for p, (group, place) in optimizer.model_param_group_index_map.items():
        share = optimizer.optimizer.param_groups[group]["params"][place]
        start = (first_element(optimizer, p),)
        # One at a time, so that one cast copy lives at a time.
        total[number[p]].copy_(slice_digests([(share.to(p.dtype), start, (p.numel(),))])[0])
    dist.all_reduce(total, group=optimizer.data_parallel_group)  # modulo 2**64
    return total.cpu().numpy().view(np.uint64)


def check_written(tensors: Mapping[str, torch.Tensor], written: Mapping[str, int]) -> None:
    """Compare tensors with ``digests_written``, by local name; of a model with adapters what is trained.

    Raises:
        WeightsDiffer: naming a tensor that is another, and how many others are.
    """
    given = whole_digests(tensors.model.trained if isinstance(tensors, Adapted) else tensors)
    wrong = [name for name in sorted(given.keys() | written.keys()) if given.get(name) != written.get(name)]
    if wrong:
        values = ("nothing" if (v := side.get(wrong[0])) is None else format(v, "016x") for side in (written, given))
        raise WeightsDiffer(
            "weights to be sent are not what the optimizer last wrote: {} has digest {} by the optimizer, {} in the "
            "tensor given{}; the tensors are an old copy, or parameters were not updated from the optimizer's".format(
                wrong[0], *values, f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
            )
        )
