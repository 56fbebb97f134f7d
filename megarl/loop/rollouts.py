"""Asking the explorer for rollouts, waiting for them, and what a step is trained with: groups, and demonstrations of mix.

What is asked for is a pure function of seed, step and how many rollouts the step has had, so a resumed run asks for the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from megarl import pulse
from megarl.config.schema import EvaluationConfig
from megarl.errors import LastingError
from megarl.experience import (
    Report,
    by_group,
    part_metrics,
    shuffle_rewards,
    split_by_accuracy,
    verifier_metrics,
    verify,
)
from megarl.experience.held_out import right_answers, sampled_metrics, standard_error
from megarl.loop import engines, reading
from megarl.rewards.tally import EVENT
from megarl.rollout.watch import EngineWatch
from megarl.schema import Experience
from megarl.store import Store
from megarl.tasksets import ChatTokenizer, encode_demonstrations, read_rows

if TYPE_CHECKING:
    from megarl.loop.session import Session

MEET_S = 30.0
"""How often ranks meet while they wait: a rollout may take longer than a collective waits for its ranks."""
NEWS_S = 1.0
"""How often the store is asked for news of the explorer."""
SETTLE_S = 1.0
"""The same while a checkpoint is being written, which counts only when they have met."""


EXTRA, EXPERT, ROLLBACK, EVALUATION = 1, 2, 3, 4
"""Streams of random numbers beside that of the tasks, so that one's choices say nothing about another's."""

Demonstration = tuple[np.ndarray, np.ndarray]
"""int32 [P], int32 [R]: the tokens of a prompt and of the answer to imitate."""


@dataclass(frozen=True)
class StepGroups:
    """What a step is trained with, the same on every rank."""

    experiences: list[Experience]
    """Whole groups, each experience with its group's statistics."""
    rollout_ids: tuple[str, ...]
    """All that the step asked for. A step belongs to its checkpoint with all of them: they carry its number in the store."""
    report: Report
    """What became of the groups of all these rollouts, dynamic sampling aside."""
    metrics: dict[str, float]


def data_seed(s: Session) -> int:
    """What tasks and seeds of a step are made from: ``trainer.seed``, and after a rollback another number, so that the step which
    went wrong is not done again as it was."""
    seed, rollbacks = s.config.trainer.seed, s.state.rollbacks
    return int(np.random.SeedSequence([seed, rollbacks, ROLLBACK]).generate_state(1)[0] >> 1) if rollbacks else seed


def tasks_of_step(task_ids: list[str], step: int, count: int, seed: int) -> list[str]:
    """The ``count`` tasks of a step: every epoch is a new permutation of all tasks. A pure function, so a resumed run goes on."""
    return [task_ids[i] for i in numbers_of_step(len(task_ids), step, count, seed)]


def numbers_of_step(size: int, step: int, count: int, seed: int, *stream: int) -> list[int]:
    """``count`` of 0 .. ``size``-1 for a step, as :func:`tasks_of_step` takes tasks."""
    order: list[int] = []
    while len(order) < count:
        epoch, offset = divmod(step * count + len(order), size)
        permutation = np.random.default_rng([seed, epoch, *stream]).permutation(size)
        order += permutation[offset : offset + count - len(order)].tolist()
    return order


def extra_tasks(task_ids: list[str], step: int, extra: int, count: int, seed: int) -> list[str]:
    """The ``count`` tasks of a step's rollout number ``extra`` (1, 2, …) beyond its first: new to the step while there are any
    that are, then all of them again."""
    permutation = np.random.default_rng([seed, step, EXTRA]).permutation(len(task_ids))
    first = set(tasks_of_step(task_ids, step, count, seed))
    order = [task_ids[i] for i in permutation if task_ids[i] not in first]
    order += [task_ids[i] for i in permutation if task_ids[i] in first]
    return [order[i % len(order)] for i in range((extra - 1) * count, extra * count)]


def training_groups(s: Session) -> StepGroups | None:
    """Ask for this step's groups with the version last published, wait, and verify them; None when the job is asked to stop.

    With ``algorithm.dynamic_sampling`` groups that are all right or all wrong are left out, and further rollouts of other tasks
    are asked for, at most ``algorithm.max_extra_rollouts``, until there are ``trainer.tasks_per_step`` groups; of more, the
    first ones count.

    Raises:
        LastingError: dynamic sampling left no group at all.
    """
    config, step = s.config, s.state.step
    dynamic, wanted = config.algorithm.dynamic_sampling, config.trainer.tasks_per_step
    groups: list[list[Experience]] = []
    ids: list[str] = []
    measured: list[dict[str, float]] = []
    raw: list[Experience] = []
    report = Report(0, {}, {}, ())
    for extra in range(1 + config.algorithm.max_extra_rollouts if dynamic else 1):
        with s.timeline.phase("rollout", step=step):
            ids.append(request_training_rollout(s, extra))
            label = f"rollout {step + 1}" + (f", again ({len(groups)} of {wanted} groups)" if extra else "")
            if not wait_for_rollout(s, ids[-1], label):
                return None
        with s.timeline.phase("batch", step=step):
            answers = reading.experiences(s.reader, s.store, ids[-1], lambda: s.stop_flag)
            if answers is None:
                return None
            raw += answers
            verified = verify(
                answers,
                config.reward,
                vocab_size=int(s.hf_config["vocab_size"]),
                max_response_tokens=config.rollout.max_response_tokens,
                greedy="greedy" in s.algorithm.needs,
                step=step,
            )
            report += verified.report
            found = by_group(verified.experiences)
            if dynamic:
                found, left_out = split_by_accuracy(found)
                measured.append({name: float(count) for name, count in left_out.items()})
            groups += found
        measured.append(reading.metrics(s.reader, s.store, ids[-1]))
        if len(groups) >= wanted:
            break
    experiences = [experience for group in groups[:wanted] for experience in group]
    metrics = {f"rollout/{name}": sum(m.get(name, 0.0) for m in measured) for m in measured for name in m}
    metrics |= {"rollout/extra": len(ids) - 1.0, "rollout/kept_groups": float(min(len(groups), wanted))}
    if dynamic and not groups and report.kept:
        raise LastingError(
            f"algorithm.dynamic_sampling=true: none of the {report.kept} groups of {len(ids)} rollouts of step {step + 1} is between all "
            f"right ({metrics['rollout/all_right']:.0f}) and all wrong ({metrics['rollout/all_wrong']:.0f}); raise "
            "algorithm.max_extra_rollouts or algorithm.group_size, take other tasks, or set it to false"
        )
    metrics |= part_metrics(experiences) | verifier_metrics(raw)
    if config.reward.shuffle:
        experiences = shuffle_rewards(experiences, seed=data_seed(s) * 1_000_003 + step)
    return StepGroups(experiences, tuple(ids), report, metrics)


def request_training_rollout(s: Session, extra: int = 0) -> str:
    """Rollout number ``extra`` of this step beyond its first; returns its id."""
    config, step = s.config, s.state.step
    count, seed = config.trainer.tasks_per_step, data_seed(s)
    rollout_id = f"train-{step:06d}" + (f"-{extra}" if extra else "")
    if s.position.rank == 0:
        tasks = extra_tasks(s.train_tasks, step, extra, count, seed) if extra else tasks_of_step(s.train_tasks, step, count, seed)
        own_seed = seed * 1_000_003 + step
        if extra:
            own_seed = int(np.random.SeedSequence([seed, step, extra, EXTRA]).generate_state(1)[0])
        sampling = {"temperature": config.rollout.temperature, "max_tokens": config.rollout.max_response_tokens, "seed": own_seed}
        if "greedy" in s.algorithm.needs:
            sampling["greedy"] = True
        s.store.request_rollout(rollout_id, "train", step, s.version, tasks, config.algorithm.group_size, sampling)
    return rollout_id


def num_expert_rows(usual: int, ratio: float) -> int:
    """How many expert rows beside ``usual`` sampled ones make ⌈ratio · rows⌉ of all rows of a step.

    In the decimals that the setting is written in: 0.07 · 100 is 7, in floats it is above 7.
    """
    share = Fraction(str(ratio))
    return math.ceil(usual * share / (1 - share))


class ExpertRows:
    """The demonstrations of ``taskset.expert``; which of them a step takes depends on seed and step alone."""

    def __init__(self, demonstrations: Sequence[Demonstration]) -> None:
        self._demonstrations = demonstrations

    @classmethod
    def read(cls, path: str, tokenizer: ChatTokenizer) -> Self:
        """Raises DataError naming the row that cannot be used."""
        return cls(encode_demonstrations(read_rows(Path(path), require_response=True), tokenizer, path=path))

    def of_step(self, step: int, count: int, seed: int) -> list[Demonstration]:
        """``count`` rows for a step, each row as often as any other over the epochs of steps with this count."""
        return [self._demonstrations[i] for i in numbers_of_step(len(self._demonstrations), step, count, seed, EXPERT)]


class News:
    """Lines about failing rewards, which the explorer leaves in the store: its own log is not on the terminal."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen = max((event["at"] for event in store.events(EVENT)), default=0.0)
        self._looked_at = time.monotonic()

    def lines(self) -> list[str]:
        """Those that have come since; looks every NEWS_S at most."""
        if time.monotonic() - self._looked_at < NEWS_S:
            return []
        self._looked_at = time.monotonic()
        found = self._store.events(EVENT, self._seen)
        self._seen = max([self._seen, *(event["at"] for event in found)])
        return [event["data"]["line"] for event in found]


def wait_for_rollout(s: Session, rollout_id: str, label: str) -> bool:
    """Wait on every rank until all groups are done, with a progress bar; False when the job is asked to stop."""
    with s.progress(None, label, "group") as bar:
        while True:
            with engines.watch(s) as watch:
                done = _wait(s, rollout_id, bar, watch)
            if done is not None:
                return done
            engines.publish_again(s, watch.lost)


def _wait(s: Session, rollout_id: str, bar: Any, watch: EngineWatch) -> bool | None:
    """As ``wait_for_rollout``; None, on every rank, when an engine needs the weights that another had in its place."""
    while True:
        done = s.position.rank != 0 or _follow(s, rollout_id, bar, watch)
        s.settle()
        if s.agree(done):
            return True
        if s.stop_requested():
            return False
        if not s.agree(watch.lost is None):
            return None


def _follow(s: Session, rollout_id: str, bar: Any, watch: EngineWatch) -> bool:
    """Show the progress until ranks meet; True when all groups are done, False early when asked to stop or when an engine needs weights."""
    until = time.monotonic() + (SETTLE_S if s.settling else min(MEET_S, s.config.cluster.stall_s / 3))
    while True:
        pulse.mark()  # the explorer shows whether it moves
        done, bar.total = s.store.progress(rollout_id)
        bar.update(done - bar.n)
        for line in s.news.lines():
            s.say(line)
        if done == bar.total or s.stop_flag or watch.lost is not None or time.monotonic() > until:
            return done == bar.total
        time.sleep(s.config.store.poll_s)


def evaluate(s: Session, rollout_id: str) -> bool:
    """Answers to every held-out task as ``evaluation`` sets; records ``val/accuracy``. False when the job is asked to stop."""
    with s.timeline.phase("evaluation", step=s.state.step):
        if s.position.rank == 0:
            samples, sampling = s.config.evaluation.samples, evaluation_sampling(s)
            s.store.request_rollout(rollout_id, "eval", s.state.step, s.version, s.eval_tasks, samples, sampling)
        if not wait_for_rollout(s, rollout_id, "held-out tasks"):
            return False
    if s.position.rank == 0:
        _record_evaluation(s, rollout_id)
    return True


def evaluation_sampling(s: Session) -> dict[str, float]:
    """Sampling of an evaluation, a function of the settings and the step, so that a resumed run samples the same."""
    config = s.config.evaluation
    sampling = {"temperature": config.temperature, "max_tokens": s.config.rollout.max_response_tokens}
    if config.temperature == 0.0:
        return sampling
    seed = int(np.random.SeedSequence([s.config.trainer.seed, s.state.step, EVALUATION]).generate_state(1)[0])
    return sampling | {"seed": seed, "top_p": config.top_p, "top_k": config.top_k}


def _record_evaluation(s: Session, rollout_id: str) -> None:
    step, config, tasks = s.state.step, s.config.evaluation, s.eval_tasks
    n, right, errors = config.samples, np.zeros(len(tasks), dtype=np.int64), 0
    for span in s.store.spans(rollout_id):  # never all answers at once
        answers = s.store.experiences(rollout_id, span)
        right += right_answers(answers, tasks)
        errors += sum(e.reward.status in ("error", "timeout") for e in answers)
    accuracy = int(right.sum()) / (len(tasks) * n)
    metrics = {"val/accuracy": accuracy, "val/error_rate": errors / (len(tasks) * n)}
    if n > 1:
        sources = {task.task_id: task.data_source for task in s.store.tasks("eval", images=False)}
        metrics |= sampled_metrics(right, n, [sources[task] for task in tasks])
    event = {"rollout_id": rollout_id, "step": step, "accuracy": accuracy, "samples": n, "standard_error": standard_error(right / n)}
    if n > 1:
        event |= {"pass": metrics[f"val/pass@{n}"], "pass_standard_error": metrics.get(f"val/pass@{n}_se")}
    s.store.record_event("trainer", "evaluation", event)
    s.write(step, metrics)
    s.say(f"held-out accuracy at step {step}: {evaluation_text(metrics, int(right.sum()), len(tasks), config)}"
        + (f"; {errors} without a verdict" if errors else ""))  # fmt: skip


def evaluation_text(metrics: Mapping[str, float], right: int, tasks: int, config: EvaluationConfig) -> str:
    """Accuracy for a person: ``45.2% ± 3.1% (avg@8 of 30 tasks, temperature 0.6), pass@8 70.0% ± 8.5%``."""
    n, how = config.samples, f"temperature {config.temperature:g}" if config.temperature else "greedy"

    def shown(name: str) -> str:
        error = metrics.get(f"{name}_se")
        return f"{metrics[name]:.1%}" + ("" if error is None else f" ± {error:.1%}")

    if n == 1:
        return f"{shown('val/accuracy')} ({right} of {tasks} tasks, {how})"
    return f"{shown('val/accuracy')} (avg@{n} of {tasks} tasks, {how}), pass@{n} {shown(f'val/pass@{n}')}"
