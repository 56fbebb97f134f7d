"""Kernels for log-probs, entropies, advantages, policy loss and digests, each with a plain reference; host memory.

Code here imports no other package of megarl. Functions take and return tensors.
"""

from __future__ import annotations

from megarl.ops import native
from megarl.ops.advantage import discounted_returns, discounted_returns_reference, gae, gae_reference
from megarl.ops.digest import digest_values, slice_digest, slice_digest_reference, slice_digests
from megarl.ops.linear import linear_logprob, linear_logprob_loss, linear_logprob_reference, rows_in_budget
from megarl.ops.logprob import vocab_parallel_logprob, vocab_parallel_logprob_reference
from megarl.ops.native import use
from megarl.ops.policy import PolicyLoss, PolicySums, policy_loss, policy_loss_reference

__all__ = [
    "PolicyLoss",
    "PolicySums",
    "backend",
    "digest_values",
    "discounted_returns",
    "discounted_returns_reference",
    "gae",
    "gae_reference",
    "has_cuda_kernels",
    "linear_logprob",
    "linear_logprob_loss",
    "linear_logprob_reference",
    "policy_loss",
    "policy_loss_reference",
    "rows_in_budget",
    "slice_digest",
    "slice_digest_reference",
    "slice_digests",
    "use",
    "vocab_parallel_logprob",
    "vocab_parallel_logprob_reference",
]


def has_cuda_kernels() -> bool:
    """True if the extension was built with the CUDA kernels."""
    return hasattr(native.library, "cuda")


def backend() -> dict[str, str]:
    """Implementation that the ops use for CPU and for CUDA tensors, and the path of the extension."""
    extension = native.library
    if native.twin():
        return {"CPU and CUDA tensors": "plain torch (trainer.kernels=torch)", "extension": str(extension.__file__)}
    return {
        "CPU tensors": f"C++ ({extension.isa()})",
        "CUDA tensors": f"kernels {extension.CUDA_STATE}",
        "extension": str(extension.__file__),
    }


FACE = ("divergence", "host_memory", "logprob", "policy")
"""Modules that other packages may import."""
