"""Sampling settings of drafted tokens in engines on CPU: vLLM 0.32 leaves them uninitialised.

``cpu_triton_utils._expand_kernel_impl`` writes a request's temperature, top-k and top-p for each of its drafted tokens
into an int64 copy that it drops, unless they are int64 already. Drafted tokens would be judged at arbitrary
temperatures.
"""

from __future__ import annotations

import torch


def install() -> None:
    """Replace vLLM's expansion of a batch to its drafted tokens; a second call changes nothing."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return [num_tokens]: each request's value of ``x`` [B], once for each of its tokens, any dtype.

    Args:
        cu_num_tokens: int [B], tokens of all requests up to and including each.
        replace_from: Value to replace by ``replace_to``.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)
