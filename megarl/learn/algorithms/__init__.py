"""Algorithms by name. A new one is one file of pure functions and one row here; users can give their own file."""

from __future__ import annotations

import difflib

from megarl.config import Config
from megarl.core.errors import ConfigError
from megarl.core.jobs import JOBS, Job, Mode
from megarl.learn.algorithms.cispo import CISPO
from megarl.learn.algorithms.distill import DISTILL
from megarl.learn.algorithms.dpo import DPO
from megarl.learn.algorithms.grpo import GRPO
from megarl.learn.algorithms.gspo import GSPO
from megarl.learn.algorithms.kimi_mirror_descent import KIMI_MIRROR_DESCENT
from megarl.learn.algorithms.mix import MIX
from megarl.learn.algorithms.online_dpo import ONLINE_DPO
from megarl.learn.algorithms.opmd import OPMD
from megarl.learn.algorithms.ppo import PPO
from megarl.learn.algorithms.reinforce_pp import REINFORCE_PP
from megarl.learn.algorithms.reinforce_pp_baseline import REINFORCE_PP_BASELINE
from megarl.learn.algorithms.remax import REMAX
from megarl.learn.algorithms.reward_model import REWARD_MODEL
from megarl.learn.algorithms.rloo import RLOO
from megarl.learn.algorithms.sft import SFT
from megarl.learn.algorithms.types import Algorithm, Estimate, Loss, LossInput, StepInput
from megarl.learn.algorithms.user import load, try_out

ALGORITHMS: dict[str, Algorithm] = {
    "cispo": CISPO,
    "distill": DISTILL,
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

__all__ = ["ALGORITHMS", "Algorithm", "Estimate", "Loss", "LossInput", "StepInput", "get", "job_of", "try_out"]


def get(name: str) -> Algorithm:
    """Return the algorithm with this name, or of a Python file. Raises ConfigError with the nearest name."""
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


def job_of(config: Config) -> Job:
    """Return the job of ``config``; only this function determines its mode. Raises ConfigError as ``get``."""
    mode: Mode = config.run.mode
    if mode != "bench" and get(config.algorithm.name).offline:
        mode = "offline"
    return JOBS[mode].numbered(config.run.number)
