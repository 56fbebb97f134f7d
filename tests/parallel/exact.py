"""Log-probs of a transformers model in float64, against which the rounding of float32 is measured."""

from __future__ import annotations

from typing import Any

import torch


class _Float64(torch.overrides.TorchFunctionMode):
    """Norms, routers, angles and softmaxes of transformers ask for float32 by name; here they get float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


@torch.no_grad()
def exact_logps(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """float64 [B, S, V]: log-probs of every token to follow each position of tokens int64 [B, S].

    The model has float32 weights, and has them again afterwards. Experts that ``test_replay.force`` chose stay chosen.
    """
    experts = model.config._experts_implementation
    model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    try:
        with _Float64():
            logits = model.double()(tokens).logits
    finally:
        model.float().set_experts_implementation(experts)
    assert logits.dtype == torch.float64
    return torch.log_softmax(logits, -1)


def rounding(found: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """Mean, 99th percentile and largest absolute error of log-probs [n]."""
    errors = (found.double() - exact).abs()
    return {"mean": float(errors.mean()), "p99": float(errors.quantile(0.99)), "max": float(errors.max())}
