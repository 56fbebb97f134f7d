"""Trained rewards against verdicts that are given again, and against the settings' parts by plain formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megarl.buffer.experience import by_group
from megarl.buffer.store import Store
from megarl.config import Config
from megarl.config.rewards import RewardConfig
from megarl.core.schema import Reward, Task, TokenBounds, Trajectory, name_of
from megarl.rewards.again import SecondVerifier
from megarl.rewards.verdict import NO_VERDICT, format_reward, language_consistency, language_of, repetition_penalty
from megarl.rewards.wrong_answers import WrongAnswer, accepted, wrong_answers
from megarl.train.batch.judged_texts import JudgedTexts, can_be_asked, verifier_score
from megarl.train.part import Metrics, Part, StepData
from megarl.train.ranks import Reporter, RunContext, TrainState

WAIT_S = 1.0
"""Longest wait of a step for second verdicts; later ones are compared in the next step."""
FIRST_WAIT_S = 10.0
"""The same in the first step, while the process imports verifiers."""
WITHIN = 1e-6
"""Relative difference of two scores that are equal."""
FIRST_TIMES = 16
"""Factor of ``alarms.verdicts`` in a run's first step: most faults are there from the start."""
RANDOM = 9
"""Random stream of the choice of responses."""


class Verdicts(Part):
    """Asks for the verdicts on a few trained responses again, on rank 0, and computes the scores' parts again."""

    def __init__(self, config: Config, context: RunContext, store: Store, reporter: Reporter) -> None:
        self._config, self._store, self._reporter = config, store, reporter
        self._texts = JudgedTexts(config, store)
        self._is_first = context.rank == 0
        self._again = SecondVerifier(config.reward)
        self._open: dict[int, tuple[Trajectory, Task, str, bool]] = {}
        self._wrong: dict[int, WrongAnswer] = {}
        """Question -> answer that must not count as right."""
        self._found: dict[str, list[str]] = {}
        self._wait_s = FIRST_WAIT_S
        if self._is_first:
            self._again.start()

    def before_batch(self, state: TrainState, data: StepData) -> None:
        if not self._is_first:
            return
        config = self._config
        for one in data.trajectories:
            if one.reward.status in NO_VERDICT and config.reward.on_error != "zero":
                self._say("no-verdict", f"{name_of(one)} has no verdict ({one.reward.status}) and is trained")
        by_length = config.reward.overlong_buffer is not None or config.reward.length.weight
        for group in by_group(data.trajectories) if by_length else ():
            for name, text in wrong_parts(group, config.reward, config.rollout.max_response_tokens, state.step):
                self._say("shaping", f"{name}: {text}")
        several = config.alarms.verdicts * (1 if state.step else FIRST_TIMES)
        chosen = choice(data.trajectories, several, np.random.default_rng([RANDOM, state.step]))
        if not state.step:
            tasks = self._store.facts.tasks({one.task_id for one in chosen})
            self._ask_wrong([tasks[name] for name in sorted(tasks)])
        for one, task, text, in_thinking in self._texts.of(chosen):
            data.read.append((one, task))
            if (number := self._again.ask(task, text, in_thinking=in_thinking)) is not None:
                self._open[number] = one, task, text, in_thinking

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        if not self._is_first:
            return
        replies = self._again.replies(self._wait_s)
        self._wait_s = WAIT_S
        wrong = [(one, replies.pop(number)) for number, one in self._wrong.items() if number in replies]
        if wrong:
            self._wrong.clear()
        if (text := accepted(wrong)) is not None:
            self._say("verifier", text)
        for number, reply in replies.items():
            one, task, text, in_thinking = self._open.pop(number)
            if "error" in reply or reply["status"] in NO_VERDICT:
                continue
            shape = shape_again(text, task.question, in_thinking, self._config.reward)
            for name, difference in differences(one.reward, reply, shape, self._config):
                self._say(name, f"{name_of(one)}, task {one.task_id}: {difference}; its text is {text!a:.200}")
        metrics["check/verdicts_again"] = float(len(replies))
        for name, texts in self._found.items():
            metrics[f"alarm/{name}"] = float(len(texts))
            self._reporter.log(
                f"alarm {name}: step {state.step}: {len(texts)} of its responses: {texts[0]}{HINT[name]}"
            )
        self._found.clear()

    def _ask_wrong(self, tasks: Sequence[Task]) -> None:
        for one in wrong_answers(tasks):
            if (number := self._again.ask(one.task, one.text, in_thinking=False)) is not None:
                self._wrong[number] = one

    def _say(self, name: str, text: str) -> None:
        self._found.setdefault(name, []).append(text)

    def finish(self) -> None:
        self._again.close()


HINT = {
    "verdicts": "; look at what happens between the response and its stored reward, or, if the verifier is random, set "
    "alarms.verdicts=0",
    "verifier": "; look at how the verifier finds the answer in a text",
    "shaping": "; look at the settings of reward that add parts to a score, and where they are added",
    "no-verdict": "; look at reward.on_error and at what reads a missing verdict as 0",
}


def choice(trajectories: Sequence[Trajectory], number: int, random: np.random.Generator) -> list[Trajectory]:
    """Choose responses whose verdict may be asked for again: first equal ones with unequal verdicts, then half of the
    others from those with the highest scores, which are few at first and matter most."""
    known = [one for one in trajectories if can_be_asked(one)]
    of_tasks: dict[str, set[str]] = {}
    for one in known:
        of_tasks.setdefault(one.task_id, set()).add(one.reward.status)
    keys = {id(one): _same(one) for one in known if len(of_tasks[one.task_id]) > 1}  # a key takes time
    statuses: dict[tuple[str, int, TokenBounds | None], set[str]] = {}
    for one in known:
        if id(one) in keys:
            statuses.setdefault(keys[id(one)], set()).add(one.reward.status)
    known = [known[i] for i in random.permutation(len(known))]
    chosen = [one for one in known if id(one) in keys and len(statuses[keys[id(one)]]) > 1][:number]
    taken = {id(one) for one in chosen}
    rest = sorted((one for one in known if id(one) not in taken), key=lambda e: -e.reward.score)
    high = [one for one in rest if one.reward.score == rest[0].reward.score]
    low = rest[len(high) :]
    half = max(number - len(chosen) - len(low), (number - len(chosen)) // 2)
    chosen += high[:half]
    random.shuffle(low)  # type: ignore[arg-type]
    return [*chosen, *low[: number - len(chosen)]]


def _same(one: Trajectory) -> tuple[str, int, TokenBounds | None]:
    """Return a key that equal responses to a task share, and hardly any others."""
    response = one.response
    return one.task_id, len(response), response.token_bounds if len(response) else None


def shape_again(text: str, question: str, in_thinking: bool, config: RewardConfig) -> dict[str, float]:
    """Return the parts for a response's form that have a weight, each from its own function."""
    parts: dict[str, float] = {}
    if config.format.weight:
        parts["format"] = format_reward(text, config.format.form, in_thinking=in_thinking)
    if config.repetition.weight:
        parts["repetition"] = repetition_penalty(text, config.repetition.ngram)
    if config.language.weight:
        wanted = config.language.language
        parts["language"] = language_consistency(text, language_of(question) if wanted == "prompt" else wanted)
    return parts


def differences(
    reward: Reward, again: Mapping[str, Any], shape: Mapping[str, float], config: Config
) -> list[tuple[str, str]]:
    """Return (alarm, text) for each difference of a trained reward from a second verdict and from the parts."""
    settings, parts = config.reward, reward.parts
    found: list[tuple[str, str]] = []
    for name, value in shape.items():
        if not _equal(parts.get(name, math.nan), value):
            found.append(("shaping", f"part {name} is {parts.get(name)}, and {value:.6g} when computed again"))
    own = verifier_score(reward, config)
    if reward.status != again["status"] or not _equal(own, settings.weight * again["score"]):
        text = f"its verdict is {reward.status} with score {own:.6g}, and {again['status']} with score "
        found.append(("verdicts", f"{text}{settings.weight * again['score']:.6g} when it is asked for again"))
    return found


def wrong_parts(
    group: Sequence[Trajectory], config: RewardConfig, limit: int | None, step: int
) -> list[tuple[str, str]]:
    """Return (trajectory, text) where a part for the length of responses is not that of the formula."""
    judged = [one for one in group if one.reward.status not in NO_VERDICT]
    found: list[tuple[str, str]] = []
    if config.overlong_buffer is not None and limit is not None:
        for one in judged:
            over = len(one.response) - (limit - config.overlong_buffer)
            share = min(max(over, 0), config.overlong_buffer) / config.overlong_buffer
            found += _wrong(one, "overlong", -config.overlong_penalty * share)
    if config.length.weight and step >= config.length.warmup_steps:
        lengths = [one.response_length for one in judged]
        span = max(lengths, default=0) - min(lengths, default=0)
        for one, length in zip(judged, lengths, strict=True):
            term = 0.5 - (length - min(lengths)) / span if span else 0.0
            found += _wrong(one, "length", term if one.reward.status == "ok" else min(0.0, term))
    return found


def _wrong(one: Trajectory, name: str, value: float) -> list[tuple[str, str]]:
    stored = one.reward.parts.get(name, math.nan)
    if _equal(stored, value):
        return []
    return [(name_of(one), f"part {name} is {stored:.6g}, and {value:.6g} by the settings")]


def _equal(one: float, other: float) -> bool:
    return abs(one - other) <= WITHIN * max(1.0, abs(one), abs(other))
