"""Generalised advantage estimation over packed sequences.

Shape legend: T packed tokens, N sequences; sequence i is tokens ``cu_seqlens[i] .. cu_seqlens[i + 1]``.
"""

from __future__ import annotations

import itertools

import torch

from megarl.ops import native


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

    No whitening and no gradient: the results are constants of the loss. The recursion runs in float64. Results of a
    sequence are bitwise independent of the other sequences.

    Args:
        rewards, values: float32 [T].
        cu_seqlens: int32 or int64 [N + 1], from 0 to T, never decreasing. Unchecked on a GPU, where a check would make
            the CPU wait: values are clamped into [0, T], and tokens outside all sequences get 0.
        gamma, lam: in [0, 1].
        bootstrap: float32 [N], value of the state after each sequence's last token; 0 for a finished sequence.

    Returns:
        (advantages, returns), float32 [T].

    Raises:
        TypeError, ValueError: an argument is invalid; the text names it.
    """
    if native.twin():
        return gae_reference(rewards, values, cu_seqlens, gamma=gamma, lam=lam, bootstrap=bootstrap)
    offsets = _check(rewards, values, cu_seqlens, bootstrap, gamma, lam)
    advantages, returns = packed_gae(rewards.detach(), values.detach(), offsets, bootstrap.detach(), gamma, lam).unbind(
        0
    )
    return advantages, returns


def discounted_returns(
    rewards: torch.Tensor, cu_seqlens: torch.Tensor, gamma: float, bootstrap: torch.Tensor
) -> torch.Tensor:
    """R_t = r_t + γ R_{t+1}, with ``bootstrap`` after the last token: :func:`gae` with values 0 and λ = 1.

    Same arguments and errors as ``gae``; returns float32 [T].
    """
    native.tensor("rewards", rewards, dtypes=native.REFERENCE if native.twin() else (native.real(),))
    return gae(rewards, torch.zeros_like(rewards), cu_seqlens, gamma=gamma, lam=1.0, bootstrap=bootstrap)[1]


def discounted_returns_reference(
    rewards: torch.Tensor, cu_seqlens: torch.Tensor, gamma: float, bootstrap: torch.Tensor
) -> torch.Tensor:
    """Reference for :func:`discounted_returns`, a plain loop; float32 or float64."""
    _check_reference(rewards, rewards, cu_seqlens, bootstrap, gamma, 1.0)
    returns = torch.zeros_like(rewards, dtype=torch.float64)
    for i, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        following = bootstrap[i].double()
        for t in reversed(range(start, end)):
            returns[t] = following = rewards[t].double() + gamma * following
    return returns.to(rewards.dtype)


@native.op(
    "gae(Tensor rewards, Tensor values, Tensor cu_seqlens, Tensor bootstrap, float gamma, float lam) -> Tensor",
    fake=lambda rewards, *_: rewards.new_empty(2, rewards.shape[0]),
)
def packed_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens: torch.Tensor,
    bootstrap: torch.Tensor,
    gamma: float,
    lam: float,
) -> torch.Tensor:
    """:func:`gae` as one [2, T] tensor. Two tensors freed together would go back to the system, and cost new pages."""
    cu_seqlens = _check(rewards, values, cu_seqlens, bootstrap, gamma, lam)
    native.rising("cu_seqlens", cu_seqlens, rewards.shape[0])
    rewards, values, bootstrap = rewards.contiguous(), values.contiguous(), bootstrap.contiguous()
    tokens, sequences = rewards.shape[0], cu_seqlens.shape[0] - 1
    # On the CPU cu_seqlens was checked, so every token is written.
    empty = rewards.new_empty if rewards.device.type == "cpu" else rewards.new_zeros
    results = empty(2, tokens)
    # A few long sequences at one block each leave most of a GPU idle. Both ways give the same bits.
    slots = native.library.gae_slots(sequences, tokens)
    few_long = sequences < 128 and slots > 4 * sequences
    scratch = rewards.new_empty(slots if few_long else 0, dtype=torch.float64)
    native.run(
        "gae",
        rewards,
        rewards.data_ptr(),
        values.data_ptr(),
        cu_seqlens.data_ptr(),
        sequences,
        tokens,
        bootstrap.data_ptr(),
        gamma,
        lam,
        results[0].data_ptr(),
        results[1].data_ptr(),
        scratch.data_ptr() if few_long else 0,
    )
    return results


def gae_reference(
    rewards: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference for :func:`gae`, a plain loop; float32 or float64, like the result."""
    _check_reference(rewards, values, cu_seqlens, bootstrap, gamma, lam)
    advantages = torch.zeros_like(rewards, dtype=torch.float64)
    r, v = rewards.double(), values.double()
    for i, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        next_value, advantage = bootstrap[i].double(), r.new_zeros(())
        for t in reversed(range(start, end)):
            advantage = r[t] + gamma * next_value - v[t] + gamma * lam * advantage
            advantages[t], next_value = advantage, v[t]
    return advantages.to(rewards.dtype), (advantages + v).to(rewards.dtype)


def _check(
    rewards: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens: torch.Tensor,
    bootstrap: torch.Tensor,
    gamma: float,
    lam: float,
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> torch.Tensor:
    """Return ``cu_seqlens`` as contiguous int64. ``dtypes``: allowed dtypes; ``None`` for the kernels' dtype."""
    native.tensor("rewards", rewards, dtypes=dtypes or (native.real(),), shape=(None,))
    native.tensor("values", values, dtypes=(rewards.dtype,), shape=tuple(rewards.shape), like=rewards)
    offsets = native.offsets("cu_seqlens", cu_seqlens, like=rewards)
    native.tensor("bootstrap", bootstrap, dtypes=(rewards.dtype,), shape=(offsets.shape[0] - 1,), like=rewards)
    native.number("gamma", gamma, low=0, high=1)
    native.number("lam", lam, low=0, high=1)
    return offsets


def _check_reference(
    rewards: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens: torch.Tensor,
    bootstrap: torch.Tensor,
    gamma: float,
    lam: float,
) -> None:
    """Check the references' arguments; float64 is allowed too, for exact values and gradient checks."""
    offsets = _check(rewards, values, cu_seqlens, bootstrap, gamma, lam, dtypes=native.REFERENCE)
    native.rising("cu_seqlens", offsets, rewards.shape[0])
