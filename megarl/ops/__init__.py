"""The Python face of ``csrc``: every op beside its plain reference, with the same signature."""

from __future__ import annotations

from megarl import _C
from megarl.ops.advantage import gae, gae_reference
from megarl.ops.digest import slice_digest, slice_digest_reference
from megarl.ops.logprob import vocab_parallel_logprob, vocab_parallel_logprob_reference

__all__ = [
    "backend",
    "gae",
    "gae_reference",
    "slice_digest",
    "slice_digest_reference",
    "vocab_parallel_logprob",
    "vocab_parallel_logprob_reference",
]


def backend() -> dict[str, str]:
    """Which code the ops run: the extension's file and the instruction set chosen on this machine."""
    return {"cpu": f"C++ ({_C.isa()})", "extension": _C.__file__}
