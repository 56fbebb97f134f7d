"""Proof that the slices of a send are the trainer's tensors: each is read and cast a second time, outside the buckets.

The engines' digests are compared with those of the sent slices, and the trainer's tensors with what the optimizer
wrote. This is the link between them: it finds tensors that are left out as unchanged, are of another rank, layer or
expert, or are rounded on their way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from megarl.core.errors import WeightsDiffer, first_of
from megarl.ops import digest_values, slice_digests
from megarl.weights.reshard import layout as boxes
from megarl.weights.reshard.execute import SliceDigests, SliceKey, buckets_from, local_view
from megarl.weights.reshard.plan import ReshardPlan


@torch.no_grad()
def check_sent(
    plan: ReshardPlan,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    sent: SliceDigests,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    proven: Collection[SliceKey] = (),
) -> None:
    """Compare the digests of sent slices with digests of the trainer's tensors. Raises WeightsDiffer naming tensors.

    Args:
        tensors: Local name -> tensor of source rank ``rank``.
        sent: Digests that ``send`` has returned in ``known``, for the same dtype and bucket size.
        proven: Slices that were compared in this publication before.
    """
    shapes, seen = plan.source.tensors, set(proven)
    keys: list[SliceKey] = []
    digests: list[torch.Tensor] = []
    for bucket in buckets_from(plan, rank, bucket_bytes, dtype):
        asked = []
        for each in bucket.slices:
            key = each.move.src_local, each.move.tensor, each.box
            if key not in seen:
                seen.add(key)
                keys.append(key)
                view = local_view(tensors[each.move.src_local], each, each.src_at).to(each.dtype)
                asked.append((view, boxes.start_of(each.box), shapes[each.move.tensor]))
        if asked:
            digests.append(slice_digests(asked))
    values = digest_values(torch.cat(digests)) if digests else []
    wrong = {key[0]: None for key, value in zip(keys, values, strict=True) if sent.get(key) != value}
    if wrong:
        raise WeightsDiffer(
            f"{first_of(list(wrong), 4)} is not sent as the trainer has it on rank {rank}: the engines would get "
            "weights that were left out, rounded, or taken from another rank, layer or expert"
        )
