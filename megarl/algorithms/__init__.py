"""Algorithms by name. A new one is one file of pure functions and one row here; a user's own is a file of theirs."""

from __future__ import annotations

import difflib

from megarl.algorithms.cispo import CISPO
from megarl.algorithms.dpo import DPO
from megarl.algorithms.grpo import GRPO
from megarl.algorithms.gspo import GSPO
from megarl.algorithms.kimi_mirror_descent import KIMI_MIRROR_DESCENT
from megarl.algorithms.mix import MIX
from megarl.algorithms.online_dpo import ONLINE_DPO
from megarl.algorithms.opmd import OPMD
from megarl.algorithms.ppo import PPO
from megarl.algorithms.reinforce_pp import REINFORCE_PP
from megarl.algorithms.reinforce_pp_baseline import REINFORCE_PP_BASELINE
from megarl.algorithms.remax import REMAX
from megarl.algorithms.reward_model import REWARD_MODEL
from megarl.algorithms.rloo import RLOO
from megarl.algorithms.sft import SFT
from megarl.algorithms.types import Algorithm, Estimate, Loss, LossInput, StepInput
from megarl.algorithms.user import load, try_out
from megarl.errors import ConfigError

ALGORITHMS: dict[str, Algorithm] = {
    "cispo": CISPO,
    "dpo": DPO,
    "grpo": GRPO,
    "gspo": GSPO,
    "kimi_mirror_descent": KIMI_MIRROR_DESCENT,
    "mix": MIX,
    "online_dpo": ONLINE_DPO,
    "opmd": OPMD,
    "ppo": PPO,
    "reinforce_pp": REINFORCE_PP,
    "reinforce_pp_baseline": REINFORCE_PP_BASELINE,
    "remax": REMAX,
    "reward_model": REWARD_MODEL,
    "rloo": RLOO,
    "sft": SFT,
}

__all__ = ["ALGORITHMS", "Algorithm", "Estimate", "Loss", "LossInput", "StepInput", "get", "try_out"]


def get(name: str) -> Algorithm:
    """The algorithm called ``name``, or that of the Python file ``name``; ConfigError with the nearest known name
    otherwise."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if name.endswith(".py"):
        return load(name)
    near = difflib.get_close_matches(name, ALGORITHMS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"no algorithm {name!r}{hint} (known: {', '.join(sorted(ALGORITHMS))}; or a Python file of your own, ending in "
        ".py)"
    )
