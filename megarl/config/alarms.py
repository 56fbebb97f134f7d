"""Settings of alarms: what a running job says about itself, and the bounds beyond which it says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megarl.config.bounds import Bound, Count, NonNegative, Positive, UnitInterval


@dataclass(frozen=True)
class AlarmsConfig:
    """A bound of None leaves its alarm out. Alarms are lines of the log and metrics ``alarm/NAME`` (docs/alarms.md)."""

    witness: bool = True
    """Compute advantages, loss and one sum of the gradient of each step's updates a second time by plain formulas
    (``check/*``), for the algorithms that have one."""
    advantages: Positive | None = 1e-4
    """Bound of ``check/advantages``. Float32 rounding is near 1e-7; whitening of nearly equal values reaches 1e-5."""
    loss: Positive | None = 1e-3
    """Bound of ``check/loss``: of the loss, and of its gradient at each token. Float32 rounding is near 1e-6."""
    old_logp: Positive | None = 0.05
    """Bound of ``check/old_logp``, as a share of what updates have changed of the log-probs."""
    gradient: Positive | None = None
    """Bound of ``check/gradient``; None takes 1e-3 in float32 and 0.05 in bfloat16, whose rounding is near 0.01."""
    optimizer: Positive | None = 0.05
    """Bound of ``check/optimizer``: how far a few weights' change is from AdamW's formula, in learning rates."""
    trajectories: NonNegative = 4
    """Sequences of each step whose tokens, loss mask, log-probs, prompt and judged text are compared with the store's
    turns and rows. Each takes about a millisecond."""
    verdicts: NonNegative = 4
    """Trained responses of each step whose verdicts are asked for again, in a process of its own; not those of programs
    and judges. In a run's first step 16 times as many. An answer takes the verifier's time once more."""
    truth: str | None = None
    """Python file with ``compute_score``, as ``reward.path``: a verifier that is independent of the reward. It judges
    ``truths`` responses of each step, in a process of its own. An alarm tells wrong responses that gain reward."""
    other_truth: bool = False
    """Also judge them by the reward's own verifier against the ground truth of another task: no second one is needed.
    It costs as many more calls of the function in ``reward.path``."""
    truths: Count = 64
    """Trained responses of each step that ``truth`` and ``other_truth`` judge. Few responses notice a rise late."""
    gamed: Annotated[float, Bound(0, 1)] | None = 0.05
    """Rise of the mean reward through wrong responses since the first four steps, as a share of the rewards' range. It
    must also exceed three standard errors, and the rise of right responses. Raise it above the weight of a form that a
    reward function pays for itself."""
    groups: bool = True
    """Compare each step's groups with the store's rows: earlier use, number, lag, the order of tasks and seeds."""
    entropy: UnitInterval | None = 0.1
    """Share of the usual entropy below which it has collapsed."""
    length: Annotated[float, Bound(1, above=True)] | None = 3.0
    """Factor by which the mean response is longer or shorter than usual."""
    zero_variance: UnitInterval | None = 1.0
    """Share of groups without a difference in reward from which on ``least_steps`` steps in a row teach nothing."""
    ess: UnitInterval | None = 0.1
    """Effective sample size of importance weights, as a share of the tokens, below which few tokens decide a step."""
    reward: Positive | None = 6.0
    """Standard errors by which the mean reward jumps from one step to the next; a step's rewards give the error."""
    greedy: Positive | None = 0.01
    """Nats by which tokens of greedy held-out answers are less likely than the trainer's likeliest ones, on average.
    Rounding gives below 1e-6 in float32 and 1e-3 in bfloat16; sampling gives 0.1 and more."""
    ends: UnitInterval | None = 0.1
    """Share of responses that stop without an end token, or go on after one. Agents may stop at texts of their own."""
    chance: Positive | None = 14.0
    """Evidence, in nats, that samples of a group do not depend on chance alone: a healthy step exceeds it with a
    probability below exp(-14), one in a million."""
    window: Count = 10
    """Steps whose median is usual."""
    least_steps: Count = 3
    """Steps in a row that ``zero_variance`` needs, and steps of the window before which nothing is usual."""
