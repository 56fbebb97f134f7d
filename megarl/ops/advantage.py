"""Generalised advantage estimation over packed sequences.

Shape legend: T packed tokens, N sequences; sequence i is tokens ``cu_seqlens[i] .. cu_seqlens[i + 1]``.
"""

from __future__ import annotations

import torch

from megarl.ops import checks, native


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """δ_t = r_t + γ V_{t+1} − V_t;  A_t = δ_t + γ λ A_{t+1};  returns R_t = A_t + V_t (Schulman et al., 1506.02438).

    No whitening. The discounted return is the case values = 0, lam = 1.

    Args:
        rewards, values: float32 [T].
        cu_seqlens: int32 or int64 [N + 1], from 0 to T, never decreasing.
        bootstrap: float32 [N], the value of the state after each sequence's last token: 0 for a finished sequence.

    Returns:
        (advantages, returns), float32 [T]; the recursion itself runs in float64.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.
    """
    offsets = _check(rewards, values, cu_seqlens, bootstrap)
    rewards, values, bootstrap = rewards.contiguous(), values.contiguous(), bootstrap.contiguous()
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    native.run(
        "gae", rewards, rewards.data_ptr(), values.data_ptr(), offsets.data_ptr(), offsets.numel() - 1, rewards.numel(),
        bootstrap.data_ptr(), gamma, lam, advantages.data_ptr(), returns.data_ptr(), 0,
    )  # fmt: skip
    return advantages, returns


def gae_reference(
    rewards: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`gae` computes, as a plain loop; the result has the dtype of ``rewards``."""
    advantages = torch.zeros(rewards.shape, dtype=torch.float64)
    r, v = rewards.double(), values.double()
    for i, (start, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)):
        next_value, advantage = bootstrap[i].double(), torch.zeros((), dtype=torch.float64)
        for t in reversed(range(start, end)):
            advantage = r[t] + gamma * next_value - v[t] + gamma * lam * advantage
            advantages[t], next_value = advantage, v[t]
    return advantages.to(rewards.dtype), (advantages + v).to(rewards.dtype)


def _check(
    rewards: torch.Tensor, values: torch.Tensor, cu_seqlens: torch.Tensor, bootstrap: torch.Tensor
) -> torch.Tensor:
    """``cu_seqlens`` as contiguous int64."""
    checks.tensor("rewards", rewards, dtypes=(torch.float32,), shape=(None,))
    checks.tensor("values", values, dtypes=(torch.float32,), shape=tuple(rewards.shape), like=rewards)
    checks.tensor("cu_seqlens", cu_seqlens, dtypes=(torch.int32, torch.int64), shape=(None,), like=rewards)
    offsets = cu_seqlens.long().contiguous()
    if offsets.numel() == 0 or offsets[0] != 0 or offsets[-1] != rewards.numel() or (offsets.diff() < 0).any():
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens {rewards.numel()}, got {cu_seqlens.tolist()[:8]}"
        )
    checks.tensor("bootstrap", bootstrap, dtypes=(torch.float32,), shape=(offsets.numel() - 1,), like=rewards)
    return offsets
