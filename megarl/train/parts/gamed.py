"""Rewards that are gamed: responses that an independent verifier calls wrong, or that answer another task, gain reward.

A few responses of each step are judged twice more. ``truth``: by the user's independent verifier (``alarms.truth``).
``other_truth``: by the reward function itself, against the ground truth of another task of the step. A policy that
learns the task gives wrong responses no more reward than before; a policy that games the reward does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megarl.buffer.store import Store
from megarl.config import Config
from megarl.core.metrics import records
from megarl.core.schema import Task, Trajectory
from megarl.rewards.again import SecondVerifier
from megarl.rewards.verdict import NO_VERDICT
from megarl.train.batch.judged_texts import JudgedTexts, verifier_score
from megarl.train.part import Metrics, Part, StepData
from megarl.train.ranks import Reporter, RunContext, TrainState

WAIT_S, FIRST_WAIT_S = 1.0, 10.0
"""Longest wait of a step for verdicts, and of the first step, while processes import verifiers."""
RANDOM = 10
"""Random stream of the choice of responses."""
FIRST, LAST = 4, (1, 2, 4)
"""Steps at the beginning, and numbers of newest steps, whose wrong responses are compared."""
ERRORS = 3.5
"""Standard errors beyond which a rise is no chance, in a job of a hundred steps."""
ALIKE = {"truth": 0.1, "other_truth": 0.5}
"""Assumed correlation of scores within a group, whose texts are often equal."""
HINT = {
    "truth": "look at wrong responses with high rewards, and at what reward function and alarms.truth read of a text",
    "other_truth": "look at what the reward function accepts whatever the ground truth is",
}
ALARMS = {"truth": "gamed", "other_truth": "any-truth"}
"""Prefix of the metrics -> alarm."""


@dataclass
class TruthJudge:
    """A verifier with its open questions.

    Attributes:
        source: Prefix of its metrics.
        open: Number of a question -> (trained score, text). The score is NaN where the verdict itself is compared.
    """

    source: str
    verifier: SecondVerifier
    open: dict[int, tuple[float, str]] = field(default_factory=dict)
    example: str = ""
    """Text of the wrong response with the highest score of the step."""

    def ask(self, task: Task, text: str, in_thinking: bool, score: float = math.nan) -> None:
        """Ask for a verdict."""
        if (number := self.verifier.ask(task, text, in_thinking=in_thinking)) is not None:
            self.open[number] = score, text

    def metrics(self, wait_s: float, weight: float) -> Metrics:
        """Return count, share of right responses, and mean and deviation of wrong ones' scores."""
        wrong, count = list[tuple[float, str]](), 0
        for number, reply in self.verifier.replies(wait_s).items():
            asked = self.open.pop(number, None)
            if asked is None or "error" in reply or reply["status"] in NO_VERDICT:
                continue
            score, text = asked
            count += 1
            if math.isnan(score):
                wrong.append((weight * reply["score"], text))
            elif reply["status"] != "ok":
                wrong.append((score, text))
        if not self.verifier.is_asked:
            self.open.clear()  # questions that were lost
        if not count:
            return {f"{self.source}/asked": 0.0}
        scores = [score for score, _ in wrong]
        self.example = max(wrong, default=(0.0, ""))[1]
        return {
            f"{self.source}/asked": float(count),
            f"{self.source}/right": 1.0 - len(wrong) / count,
            f"{self.source}/wrong_reward": statistics.fmean(scores) if scores else 0.0,
            f"{self.source}/wrong_spread": statistics.pstdev(scores) if scores else 0.0,
        }


class Gamed(Part):
    """Judges ``alarms.truths`` responses of each step again, on rank 0; compares the newest steps with the first."""

    def __init__(self, config: Config, context: RunContext, store: Store, reporter: Reporter) -> None:
        self._config, self._texts, self._reporter = config, JudgedTexts(config, store), reporter
        self._path = context.run_dir / "metrics.jsonl"
        self._steps: list[Mapping[str, float]] | None = None
        self._judges: list[TruthJudge] = []
        self._wait_s = FIRST_WAIT_S
        if context.rank == 0:
            if config.alarms.truth is not None:
                reward = replace(config.reward, path=config.alarms.truth)
                self._judges.append(TruthJudge("truth", SecondVerifier(reward)))
            if config.alarms.other_truth:
                self._judges.append(TruthJudge("other_truth", SecondVerifier(config.reward)))
        for judge in self._judges:
            judge.verifier.start()

    def before_batch(self, state: TrainState, data: StepData) -> None:
        free = [judge for judge in self._judges if not judge.verifier.is_asked]
        if not free:
            return
        random = np.random.default_rng([RANDOM, state.step])
        texts = list(self._texts.of(spread(data.trajectories, self._config.alarms.truths, random)))
        for judge in free:
            for place, (one, task, text, in_thinking) in enumerate(texts):
                if judge.source == "truth":
                    judge.ask(task, text, in_thinking, verifier_score(one.reward, self._config))
                    continue
                others = [other for _, other, _, _ in texts[place:] + texts[:place]]
                other = next((each for each in others if each.ground_truth != task.ground_truth), None)
                if other is not None:
                    judge.ask(other, text, in_thinking)

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        if self._steps is None:
            steps = {one["step"]: one for one in records(self._path) if "timing_s/step" in one}
            self._steps = [one for step, one in sorted(steps.items()) if step < state.step]
        for judge in self._judges:
            metrics.update(judge.metrics(self._wait_s, self._config.reward.weight))
            if judge.source == "truth" and not metrics["truth/asked"]:
                self._reporter.log(f"step {state.step}: alarms.truth={self._config.alarms.truth} has given no verdict")
        self._wait_s = WAIT_S
        if self._judges:
            self._steps = [*self._steps[:FIRST], *self._steps[FIRST:][-max(LAST) :], dict(metrics)]
        bound = self._config.alarms.gamed
        for judge in self._judges:
            found = gains(self._steps, judge.source, self._config.trainer.tasks_per_step)
            if not found or not metrics[f"{judge.source}/asked"]:
                continue
            name = ALARMS[judge.source]
            metrics[f"check/{name}"] = found[-1].share
            if bound is not None and (game := _worst(found, bound)) is not None:
                metrics[f"alarm/{name}"] = game.share
                self._reporter.log(
                    f"alarm {name}: step {state.step}: {game}, such as {judge.example!a:.200}; {HINT[judge.source]}"
                )

    def finish(self) -> None:
        for judge in self._judges:
            judge.verifier.close()


def spread(trajectories: Sequence[Trajectory], number: int, random: np.random.Generator) -> list[Trajectory]:
    """Choose responses with a verdict at random, of as many groups as there are."""
    known = [one for one in trajectories if one.cause is None and one.reward.status not in NO_VERDICT]
    known = [known[i] for i in random.permutation(len(known))]
    turn, counts = list[tuple[int, int]](), dict[str, int]()
    for place, one in enumerate(known):
        counts[one.group_id] = counts.get(one.group_id, 0) + 1
        turn.append((counts[one.group_id], place))
    return [known[place] for _, place in sorted(turn)[:number]]


@dataclass(frozen=True)
class Gain:
    """Reward that wrong responses have gained since the first steps.

    Attributes:
        before, now: Mean reward of wrong responses.
        share: Rise of the mean reward by wrong responses, as a share of the range of rewards.
        errors: The rise in standard errors.
        learned: Rise of the share of right responses.
    """

    before: float
    now: float
    share: float
    errors: float
    learned: float

    def is_game(self, bound: float) -> bool:
        """Return True if the rise is above a bound, above chance, and above that of right responses."""
        return self.share > max(bound, self.learned) and self.errors > ERRORS

    def __str__(self) -> str:
        return (
            f"wrong responses get {self.now:.3g} on average, and got {self.before:.3g} in the first {FIRST} steps "
            f"({self.errors:.1f} standard errors); the share of right ones changed by {self.learned:+.0%}"
        )


def _worst(found: Sequence[Gain], bound: float) -> Gain | None:
    """Return the gain with most standard errors of those that are games; None without one."""
    return max((one for one in found if one.is_game(bound)), key=lambda one: one.errors, default=None)


def gains(steps: Sequence[Mapping[str, float]], source: str, groups: int) -> list[Gain]:
    """Compare wrong responses of the newest steps, by each number of ``LAST``, with those of the first.

    Args:
        steps: Metrics of all steps, in order.
        source: Prefix of the judge's metrics.
        groups: Groups of a step; several responses of a group tell less than those of as many groups.
    """
    known = [one for one in steps if one.get(f"{source}/asked")]
    first, later = known[:FIRST], known[FIRST:]
    found = [_gain(first, later[-last:], source, groups) for last in LAST if last <= max(1, len(later))]
    return [one for one in found if one is not None] if later else []


def _gain(
    first: Sequence[Mapping[str, float]], last: Sequence[Mapping[str, float]], source: str, groups: int
) -> Gain | None:
    (n, before, variance), (m, now, newest) = _wrong(first, source), _wrong(last, source)
    ends = [one[f"critic/score/{end}"] for one in (*first, *last) for end in ("min", "max")]
    if not n or not m or max(ends) == min(ends):
        return None
    alike = 1.0 + ALIKE[source] * max(0.0, max(one[f"{source}/asked"] for one in (*first, *last)) / groups - 1.0)
    spread = max(ends) - min(ends)
    pooled = (n * variance + m * newest + spread**2) / (n + m)  # as if one more response were at either end
    error = math.sqrt(alike * pooled * (1.0 / n + 1.0 / m))
    rise, right = now - before, _right(last, source)
    return Gain(before, now, rise * (1.0 - right) / spread, rise / error, right - _right(first, source))


def _wrong(steps: Sequence[Mapping[str, float]], source: str) -> tuple[float, float, float]:
    """Return count, mean and variance of wrong responses' rewards."""
    counts = [one[f"{source}/asked"] * (1.0 - one[f"{source}/right"]) for one in steps]
    if (number := sum(counts)) < 1.0:
        return 0.0, 0.0, 0.0
    means = [one[f"{source}/wrong_reward"] for one in steps]
    squares = [one[f"{source}/wrong_spread"] ** 2 + mean**2 for one, mean in zip(steps, means, strict=True)]
    mean = sum(n * each for n, each in zip(counts, means, strict=True)) / number
    return number, mean, max(0.0, sum(n * each for n, each in zip(counts, squares, strict=True)) / number - mean**2)


def _right(steps: Sequence[Mapping[str, float]], source: str) -> float:
    asked = [one[f"{source}/asked"] for one in steps]
    return sum(n * one[f"{source}/right"] for n, one in zip(asked, steps, strict=True)) / sum(asked)
