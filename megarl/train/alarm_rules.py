"""Rules of alarms: bounds of a step's metrics, and the causes to look at beyond them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megarl.config import Config
from megarl.train.update.gap import TOLERANCES

History = Sequence[Mapping[str, float]]
"""Metrics of earlier steps, the newest last."""


@dataclass(frozen=True)
class Rule:
    """An alarm.

    Attributes:
        name: Of the metric ``alarm/NAME``, which has the value that is out of bounds.
        look_at: Causes, for the log line.
        test: (settings, earlier steps, this step) -> value and text; None while all is well.
    """

    name: str
    look_at: str
    test: Callable[[Config, History, Mapping[str, float]], tuple[float, str] | None]


def _above(
    metric: str, bound: Callable[[Config], float | None], setting: str
) -> Callable[..., tuple[float, str] | None]:
    """Make the test that a metric is at most a setting."""

    def test(config: Config, history: History, now: Mapping[str, float]) -> tuple[float, str] | None:
        value, most = now.get(metric), bound(config)
        if value is None or most is None or value <= most:
            return None
        return value, f"{metric} is {value:.3g}, above {setting}={most:g}"

    return test


GRADIENT = {"float32": 1e-3, "bfloat16": 0.05}
"""Default of ``alarms.gradient`` by ``model.dtype``."""


RATE = 1e-9
"""Relative difference of a learning rate from the schedule's, in float64."""


def _counted(config: Config, history: History, now: Mapping[str, float]) -> tuple[float, str] | None:
    name, updates, before = "actor/optimizer_steps", now.get("actor/updates"), history[-1] if history else {}
    same = before.get("training/rollbacks") == now.get("training/rollbacks")
    if updates is None or name not in before or name not in now or not same:
        return None
    counted = now[name] - before[name]
    text = f"the optimizer has counted {counted:.0f} steps more than after the last step, for {updates:.0f} updates"
    return None if counted == updates else (counted - updates, text)


def _usual(config: Config, history: History, metric: str) -> float | None:
    """Return the median of a metric over the window; None while it has few steps."""
    known = [one[metric] for one in history[-config.alarms.window :] if metric in one]
    return statistics.median(known) if len(known) >= config.alarms.least_steps else None


def _entropy(config: Config, history: History, now: Mapping[str, float]) -> tuple[float, str] | None:
    share, usual, value = config.alarms.entropy, _usual(config, history, "actor/entropy"), now.get("actor/entropy")
    if share is None or usual is None or value is None or value >= share * usual:
        return None
    return value, f"the entropy is {value:.3g} nats a token, usual is {usual:.3g} (alarms.entropy={share:g})"


def _length(config: Config, history: History, now: Mapping[str, float]) -> tuple[float, str] | None:
    name, factor = "response_length/mean", config.alarms.length
    usual, value = _usual(config, history, name), now.get(name)
    if factor is None or not usual or value is None or usual / factor <= value <= usual * factor:
        return None
    return value, f"responses have {value:.4g} tokens, usual is {usual:.4g} (alarms.length={factor:g})"


def _zero_variance(config: Config, history: History, now: Mapping[str, float]) -> tuple[float, str] | None:
    name, share, steps = "rollout/zero_variance", config.alarms.zero_variance, config.alarms.least_steps
    last = [one.get(name, 0.0) for one in (*history, now)][-steps:]
    if share is None or len(last) < steps or min(last) < share:
        return None
    return last[-1], f"in {steps} steps in a row at least {share:.0%} of the groups had equal rewards"


def _ess(config: Config, history: History, now: Mapping[str, float]) -> tuple[float, str] | None:
    known = {key: value for key, value in now.items() if key.startswith("training/ess/")}
    least = config.alarms.ess
    if least is None or not known or min(known.values()) >= least:
        return None
    name = min(known, key=lambda key: known[key])
    return known[name], f"{name} is {known[name]:.3g}, below alarms.ess={least:g}"


def _reward(config: Config, history: History, now: Mapping[str, float]) -> tuple[float, str] | None:
    name, most = "critic/score/mean", config.alarms.reward
    if most is None or not history or name not in history[-1] or name not in now:
        return None
    spread = max(one.get("critic/score/max", 0.0) - one.get("critic/score/min", 0.0) for one in (history[-1], now))
    number = config.trainer.tasks_per_step  # responses of a group are alike, so groups are counted
    error = spread / 2.0 * math.sqrt(2.0 / number)
    jump = now[name] - history[-1][name]
    if not error or abs(jump) <= most * error:
        return None
    return jump, f"the mean reward went from {history[-1][name]:.4g} to {now[name]:.4g} within a step"


RULES: tuple[Rule, ...] = (
    Rule(
        "advantages",
        "the group statistics, the baseline or the reward of some response",
        _above("check/advantages", lambda c: c.alarms.advantages, "alarms.advantages"),
    ),
    Rule(
        "loss",
        "the loss's denominators, its clip bounds, its KL term or its mask",
        _above("check/loss", lambda c: c.alarms.loss, "alarms.loss"),
    ),
    Rule(
        "old-logp",
        "when old log-probs are computed, with which weights and temperature, and which of them an update reads",
        _above("check/old_logp", lambda c: c.alarms.old_logp, "alarms.old_logp"),
    ),
    Rule(
        "gradient",
        "the scaling of micro-batches, and the reduction of gradients over data-parallel ranks",
        _above("check/gradient", lambda c: c.alarms.gradient or GRADIENT[c.model.dtype], "alarms.gradient"),
    ),
    Rule(
        "critic",
        "the ends of responses, the values after them, the value clip and what scales values",
        _above("check/critic", lambda c: c.alarms.gradient or GRADIENT[c.model.dtype], "alarms.gradient"),
    ),
    Rule(
        "stale-keys",
        "sync.pause, and the reset of running requests after an update",
        _above(
            "check/stale_keys", lambda c: c.sync.sample_tolerance or TOLERANCES[c.model.dtype], "sync.sample_tolerance"
        ),
    ),
    Rule(
        "router",
        "the denominators of the routers' losses, and what detaches them from the routers",
        _above("check/router", lambda c: c.alarms.loss, "alarms.loss"),
    ),
    Rule(
        "length-bias",
        "what drops, repeats or reorders long responses before they are trained",
        _above("check/early_ends", lambda c: c.alarms.chance, "alarms.chance"),
    ),
    Rule(
        "precision",
        "casts before the output layer, and model.head_dtype where the head is made",
        _above("check/head_dtype", lambda c: 0.0, "the share of ranks whose head may compute in another type"),
    ),
    Rule(
        "reference",
        "weights that the reference shares with the actor, what refreshes it, and its temperature",
        _above(
            "check/reference", lambda c: c.sync.sample_tolerance or TOLERANCES[c.model.dtype], "sync.sample_tolerance"
        ),
    ),
    Rule(
        "frozen",
        "what detaches or freezes a layer, and which parameters the optimizer has",
        _above("check/frozen", lambda c: 0.0, "the number of trained parameters that may have no gradient"),
    ),
    Rule(
        "learning-rate",
        "the schedule, what counts its steps, and what a resume has changed",
        _above("check/learning_rate", lambda c: RATE, "the schedule's rounding"),
    ),
    Rule(
        "optimizer",
        "skipped steps, the weight decay of each group of parameters, and Adam's settings",
        _above("check/optimizer", lambda c: c.alarms.optimizer, "alarms.optimizer"),
    ),
    Rule("optimizer-steps", "skipped or repeated steps of the optimizer, and what a resume has read", _counted),
    Rule(
        "no-end",
        "what removes the end token from stopped responses, and stop texts that an agent asks for",
        _above("check/no_end", lambda c: c.alarms.ends, "alarms.ends"),
    ),
    Rule(
        "past-end",
        "the end tokens of generation_config.json, and whether the engine stops at them",
        _above("check/past_end", lambda c: c.alarms.ends, "alarms.ends"),
    ),
    Rule(
        "equal-samples",
        "the seeds of a group's samples, and settings of sampling beside rollout.temperature",
        _above("check/equal_samples", lambda c: c.alarms.chance, "alarms.chance"),
    ),
    Rule(
        "surprise",
        "settings of sampling beside rollout.temperature, such as top-p and top-k of generation_config.json",
        _above("check/likeliest", lambda c: c.alarms.chance, "alarms.chance"),
    ),
    Rule("entropy", "the learning rate, algorithm.entropy_coef, and whether one answer gets all rewards", _entropy),
    Rule("length", "stop tokens, the chat template, and whether length itself is rewarded", _length),
    Rule(
        "zero-variance",
        "tasks that are too easy or too hard, or a verifier that always answers the same",
        _zero_variance,
    ),
    Rule("ess", "the lag of samples, the learning rate, and log-probs of other weights or another temperature", _ess),
    Rule("reward-jump", "the verifier, the tasks, and what a resume has changed", _reward),
)
