"""The Python face of ``csrc``: every op beside its plain reference, with the same signature."""

from __future__ import annotations

from megarl.ops import native
from megarl.ops.advantage import discounted_returns, discounted_returns_reference, gae, gae_reference
from megarl.ops.digest import slice_digest, slice_digest_reference
from megarl.ops.logprob import vocab_parallel_logprob, vocab_parallel_logprob_reference
from megarl.ops.native import use
from megarl.ops.policy import PolicyLoss, PolicySums, policy_loss, policy_loss_reference

__all__ = [
    "PolicyLoss",
    "PolicySums",
    "backend",
    "discounted_returns",
    "discounted_returns_reference",
    "gae",
    "gae_reference",
    "policy_loss",
    "policy_loss_reference",
    "slice_digest",
    "slice_digest_reference",
    "use",
    "vocab_parallel_logprob",
    "vocab_parallel_logprob_reference",
]


def backend() -> dict[str, str]:
    """Which code the ops run: the extension's file, the CPU's instruction set, and the CUDA kernels or why there are none."""
    extension = native.library
    cuda = f"built for {extension.CUDA_ARCHITECTURES}" if hasattr(extension, "cuda") else "not built (no nvcc was found)"
    return {"cpu": f"C++ ({extension.isa()})", "cuda": cuda, "extension": str(extension.__file__)}
