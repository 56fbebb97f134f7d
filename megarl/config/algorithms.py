"""Settings of algorithms: common ones, and a dataclass for each algorithm with more.

An algorithm with further settings has a dataclass here, a row of ``SETTINGS`` and a parent of ``AnyAlgorithmConfig``.
On the command line all of them are ``algorithm.NAME``; ``algorithm.name`` decides which exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, TypeGuard

from megarl.config.bounds import Bound, Coefficient, Count, NonNegative, Positive, UnitInterval
from megarl.core.errors import ConfigError


@dataclass(frozen=True)
class KLConfig:
    coef: Coefficient = 0.001
    """Coefficient of the KL to the reference; 0 needs no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL. k1 has no gradient in a loss, so it requires ``place=reward``."""
    place: Literal["loss", "reward"] = "loss"
    """Place of the KL: a term of the loss, or a penalty subtracted from each token's reward."""
    target: Positive | None = None
    """Target KL per token of the adaptive coefficient (Ziegler et al., 1909.08593); None keeps ``coef`` fixed."""
    horizon: Count = 10000
    """Horizon of the adaptive coefficient, in responses."""


@dataclass(frozen=True)
class AlgorithmConfig:
    name: str = "grpo"
    """Algorithm of megarl, or path of a Python file with your own algorithm (ends in .py; docs/algorithms.md)."""
    group_size: Count = 8
    """Responses sampled for each task."""
    importance: Literal["token", "sequence_mean", "sequence_product"] = "token"
    """Unit of the ratio of new to old policy: each token, or the mean or sum of a response's log-ratios."""
    clip_low: Coefficient = 0.2  # no maximum: DeepSeek-R1 has 10
    """The ratio's lower bound is 1 - clip_low; above 1 there is none."""
    clip_high: Coefficient = 0.2
    """The ratio's upper bound is 1 + clip_high."""
    dual_clip: Annotated[float, Bound(1, above=True)] | None = None
    """c > 1 bounds the loss of tokens with a negative advantage by c·|A|; None for no bound."""
    normalize_by_std: bool = True
    """Divide advantages by the standard deviation of their group (GRPO); False only subtracts the mean (Dr. GRPO)."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    """Reduction of token losses to one number: a mean over all tokens of the update, or per response first
    (docs/algorithms.md)."""
    aggregation_length: Count = 1024
    """L of ``seq_mean_token_sum_norm``."""
    entropy_coef: Coefficient = 0.0
    """Coefficient of the entropy bonus."""
    kl: KLConfig = field(default_factory=KLConfig)
    """KL to the reference model."""
    dynamic_sampling: bool = False
    """Replace zero-variance groups (all responses right or all wrong) by new ones before training (DAPO)."""
    overlong_filtering: bool = False
    """Leave responses that reached ``rollout.max_response_tokens`` out of the loss; their group's statistics keep them
    (DAPO)."""
    max_extra_rollouts: NonNegative = 10
    """Most extra rollouts of a step to replace zero-variance groups; then it trains with the groups it has."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """Effect of the engine's log-probs on a token's surrogate, with r = exp(old_logp - engine_logp): nothing; times
    min(r, C); times r, and 0 where r is outside [1/C, C]."""
    correction_cap: Annotated[float, Bound(1)] = 2.0
    """C of ``correction``."""
    segments: Literal["all", "current"] = "all"
    """Tokens in the loss of a trajectory sampled by several weights versions: all of them, or only those of its newest
    weights, with earlier ones as context (Kimi k1.5's partial rollouts). No effect on trajectories of one version."""
    turn_rewards: UnitInterval = 0.0
    """Share of the turns' own rewards in the advantage (docs/algorithms.md); 0 uses only trajectory rewards."""
    turn_gamma: UnitInterval = 1.0
    """Discount of later turns' rewards in a turn's return; used with ``turn_rewards``."""
    options: dict[str, float] = field(default_factory=dict)
    """Settings of your algorithm."""


@dataclass(frozen=True)
class MirrorDescentConfig(AlgorithmConfig):
    """Settings of kimi_mirror_descent."""

    tau: Coefficient = 1.0
    """Strength of the pull towards the policy at the start of the step."""


@dataclass(frozen=True)
class OPMDConfig(MirrorDescentConfig):
    opmd: Literal["mean", "pairwise"] = "mean"
    """Baseline of a response: its group's mean, or each other response of the group."""


@dataclass(frozen=True)
class PreferenceConfig(AlgorithmConfig):
    """Settings of losses of preference pairs."""

    beta: Positive = 0.1
    """β of preference losses."""
    preference: Literal["sigmoid", "ipo"] = "sigmoid"
    """Loss of a preference pair: DPO's logistic loss, or IPO's squared one."""
    label_smoothing: Annotated[float, Bound(0, 0.5, below=True)] = 0.0
    """Probability that a preference is the wrong way round (cDPO)."""


@dataclass(frozen=True)
class MixConfig(AlgorithmConfig):
    mu: UnitInterval = 0.1
    """Weight of the loss on expert rows; the usual rows have 1 - mu."""
    expert_ratio: Annotated[float, Bound(0, 1, below=True)] = 0.2
    """Share of expert rows in a step's rows (``taskset.expert``); the default of distill is 0."""
    expert_loss: Literal["sft", "off_policy"] = "sft"
    """Loss of expert rows: their negative log-likelihood; or minus their ratio to the teacher's log-probs, which the
    rows must have (``teacher_logp``), as responses of another policy (LUFFY)."""
    expert_shaping: Positive | None = 0.1
    """γ of ``expert_loss=off_policy``: a ratio x counts as x / (x + γ); None for the bare ratio."""


@dataclass(frozen=True)
class ReinforcePPConfig(AlgorithmConfig):
    gamma: UnitInterval = 1.0
    """Discount of a token's reward."""


@dataclass(frozen=True)
class ReMaxConfig(ReinforcePPConfig):
    whiten_advantages: bool = False
    """Whiten the advantages of a step: mean 0 and variance 1 over its tokens."""


@dataclass(frozen=True)
class PPOConfig(ReMaxConfig):
    lam: UnitInterval = 1.0
    """λ of generalised advantage estimation."""
    bootstrap_truncated: bool = False
    """Value after a response that reached ``rollout.max_response_tokens``: False takes 0, as after a finished response;
    True takes the critic's value of the state there, as if the response went on."""
    value_clip: Positive | None = 0.5
    """Largest distance of the critic's value from its value at the start of the step; None for no bound."""


@dataclass(frozen=True)
class DivergenceConfig(AlgorithmConfig):
    """Settings of losses that compare distributions with a teacher's."""

    divergence: Literal["sampled", "forward_kl", "reverse_kl", "jsd"] = "sampled"
    """Teachers' term: the reverse KL of the sampled token as its reward, or a divergence of the teacher's and the
    student's distributions at each token as a loss (docs/distillation.md). With sft ``sampled`` reads no teacher."""
    beta: Annotated[float, Bound(0, 1, above=True, below=True)] = 0.5
    """β of ``divergence=jsd``: towards 0 the gradient is the forward KL's, towards 1 the reverse KL's."""
    top_k: NonNegative = 0
    """Tokens of a divergence: the teacher's k likeliest, with all others as one; 0 takes the whole vocabulary, with sft
    all that the rows have."""


@dataclass(frozen=True)
class SFTConfig(DivergenceConfig):
    cross_entropy_coef: Coefficient = 1.0
    """Coefficient of the demonstrated tokens' negative log-likelihood beside a ``divergence``; 0 learns from the
    teacher's distributions alone."""


@dataclass(frozen=True)
class DistillConfig(ReinforcePPConfig, DivergenceConfig):
    gamma: UnitInterval = 0.0
    """Discount of a token's reward; the default of distill is 0."""
    reward_coef: Coefficient = 0.0
    """Coefficient of the group-relative advantage of the task's reward (GRPO's), beside the teachers' term."""
    expert_ratio: Annotated[float, Bound(0, 1, below=True)] = 0.0
    """Share of expert rows in a step's rows (``taskset.expert``); with distill a divergence is their loss."""
    teacher_tokens: Literal["all", "thinking", "answer"] = "all"
    """Tokens of a response with the teacher's term: all, its thought, or the answer after it. A response without a
    thought is all answer."""


@dataclass(frozen=True)
class AnyAlgorithmConfig(PPOConfig, MixConfig, PreferenceConfig, OPMDConfig, DistillConfig, SFTConfig):
    """Settings of all algorithms; an algorithm in your own Python file has all of them. Names in brackets are the only
    algorithms of megarl with that setting."""


SETTINGS: dict[str, type[AlgorithmConfig]] = {
    "dpo": PreferenceConfig,
    "kimi_mirror_descent": MirrorDescentConfig,
    "mix": MixConfig,
    "online_dpo": PreferenceConfig,
    "opmd": OPMDConfig,
    "ppo": PPOConfig,
    "reinforce_pp": ReinforcePPConfig,
    "remax": ReMaxConfig,
    "distill": DistillConfig,
    "sft": SFTConfig,
}
"""Algorithms with further settings; all others use ``AlgorithmConfig``."""


def settings_of(name: str) -> type[AlgorithmConfig]:
    """Return the dataclass of an algorithm's settings; ``name`` may be a Python file."""
    return AnyAlgorithmConfig if name.endswith(".py") else SETTINGS.get(name, AlgorithmConfig)


def expert_ratio(config: AlgorithmConfig) -> float:
    """Return the share of expert rows in a step's rows, if the algorithm draws any."""
    return config.expert_ratio if isinstance(config, MixConfig | DistillConfig) else 0.0


def reads_teacher(config: AlgorithmConfig) -> bool:
    """Return True if the loss of expert rows reads their teacher's log-probs."""
    return isinstance(config, MixConfig) and config.expert_loss == "off_policy"


def reads_distribution(config: AlgorithmConfig) -> TypeGuard[DivergenceConfig]:
    """Return True if the loss has a divergence from the teachers' distributions."""
    return isinstance(config, DivergenceConfig) and config.divergence != "sampled"


def teacher_top_k(config: AlgorithmConfig) -> int:
    """Return the number of its likeliest tokens that the loss reads of a teacher; 0 for none, or for all of them."""
    return config.top_k if reads_distribution(config) else 0


def owners(setting: str) -> list[str]:
    """Names of the algorithms that add ``setting``; ``[]`` if all have it or it is unknown."""
    if setting in {f.name for f in fields(AlgorithmConfig)}:
        return []
    return [name for name, kind in SETTINGS.items() if setting in {f.name for f in fields(kind)}]


def check_owners(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``values``, of the group ``algorithm``, has a setting that its algorithm lacks and others
    have."""
    name = str(values.get("name", AlgorithmConfig.name))
    own = {f.name for f in fields(settings_of(name))}
    for setting in values:
        if setting not in own and (of := owners(setting)):
            raise ConfigError(
                f"algorithm.{setting}={values[setting]} is a setting of {', '.join(of)}, not of {name}; leave it out "
                f"(~algorithm.{setting} where a file sets it), or take algorithm={of[0]}"
            )
