"""What is sent is what the trainer has."""

from __future__ import annotations

import pytest
import torch

from megarl.core.errors import WeightsDiffer
from megarl.weights.reshard.buckets import HEADER
from megarl.weights.reshard.execute import Outgoing, SliceDigests, buckets_from
from megarl.weights.reshard.layouts import MegatronGrid, hf_layout, megatron_layout
from megarl.weights.reshard.plan import build_plan
from megarl.weights.reshard.sent_proof import check_sent
from tests.unit.reshard_network import Network
from tests.unit.reshard_oracle import qwen3_config

BUCKET, DTYPE = 4096, torch.bfloat16


def test_a_tensor_that_is_sent_otherwise_is_named() -> None:
    config = qwen3_config()
    plan = build_plan(megatron_layout(config, MegatronGrid()), hf_layout(config))
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in plan.source.local_shapes(0).items()}

    def sent(given: dict[str, torch.Tensor]) -> SliceDigests:
        outgoing = Outgoing(plan, given, Network().port(0), buckets_from(plan, 0, BUCKET, DTYPE))
        for bucket in outgoing.buckets:
            assert len(outgoing.pack(bucket)) == HEADER + bucket.nbytes
        outgoing.finish()
        return outgoing.known

    known = sent(tensors)
    check_sent(plan, 0, tensors, known, dtype=DTYPE, bucket_bytes=BUCKET)
    name = next(name for name in tensors if "linear_proj" in name)
    other = sent({**tensors, name: tensors[name].roll(1, 0)})
    with pytest.raises(WeightsDiffer, match=f"{name} is not sent as the trainer has it"):
        check_sent(plan, 0, tensors, other, dtype=DTYPE, bucket_bytes=BUCKET)
    check_sent(plan, 0, tensors, other, dtype=DTYPE, bucket_bytes=BUCKET, proven=set(other))
