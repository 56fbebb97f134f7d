"""Faults of held-out evaluations: other tasks, other weights, another count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megarl.exam.fault import Fault, replace, wrap


def _evaluate_before() -> None:
    from megarl.train.step import OnlineSteps

    def evaluate(original: Any, self: Any, state: Any, name: str) -> None:
        self.evaluates = True
        try:
            original(self, state, name)
        finally:
            self.evaluates = False

    def publish(original: Any, self: Any, state: Any, given: Any = None) -> Any:
        known = getattr(self, "evaluates", False) and self.services.weights.version.n
        return {} if known else original(self, state, given)

    wrap(OnlineSteps.evaluate, evaluate)
    wrap(OnlineSteps.publish, publish)


def _mix_weights() -> None:
    from megarl.engines.fleet import Fleet
    from megarl.explore.explorer.explorer import sampling_of
    from megarl.train.rollout.evaluation import EvaluationMeanwhile

    wrap(sampling_of, lambda original, *args: _of_any(original(*args)))
    replace(Fleet.behind, lambda self, version: [row for row in self.to_join(begun=True) if row.has != version])
    replace(EvaluationMeanwhile._has_lost_one, lambda self: False)


def _of_any(sampling: Any) -> Any:
    from dataclasses import replace as but

    return but(sampling, newest=None, rollout="")


def _sample_greedy() -> None:
    from megarl.buffer.order.draws import evaluation_sampling

    wrap(
        evaluation_sampling, lambda original, config, step: original(config, step) | {"temperature": 1.0, "seed": step}
    )


def _repeat_system() -> None:
    from dataclasses import replace as but

    import numpy as np

    from megarl.explore.explorer.explorer import Explorer

    async def group(original: Any, self: Any, claim: Any) -> Any:
        found = await original(self, claim)
        if claim.kind == "eval":
            ids = found.prompt.token_ids
            found.prompt = but(found.prompt, token_ids=np.concatenate([ids[:2], ids]))
        return found

    wrap(Explorer._group, group)


def _asking(chosen: Callable[[list[str], int], list[str]]) -> None:
    """Ask for other held-out tasks."""
    from megarl.train.rollout.evaluation import Evaluation

    def ask(original: Any, self: Any, step: int, *args: Any) -> None:
        self.__dict__["_tasks"] = chosen(self._store.tasks.ids("eval"), step)
        original(self, step, *args)

    wrap(Evaluation.ask, ask)


def _drop_last_batch() -> None:
    _asking(lambda tasks, step: tasks[: len(tasks) // 8 * 8])


def _draw_again() -> None:
    import random

    _asking(lambda tasks, step: random.Random(step).sample(tasks, len(tasks) // 2))


def _counting(accuracy: Callable[[list[Any]], float]) -> None:
    """Report another accuracy of the same answers."""
    from megarl.explore.explorer.other_explorers import evaluated

    def count(original: Any, store: Any, rollout_id: str, *args: Any) -> Any:
        found = original(store, rollout_id, *args)
        ids = store.groups.ids(rollout_id)
        answers = [each for part in store.groups.parts(ids) for each in store.groups.read(part)]
        found["accuracy"] = found["metrics"]["val/accuracy"] = accuracy(answers)
        return found

    wrap(evaluated, count)


def _right(answers: list[Any]) -> float:
    return sum(each.reward.status == "ok" for each in answers) / max(1, len(answers))


def _leave_failures_out() -> None:
    _counting(lambda answers: _right([each for each in answers if each.end.value != "truncated"]))


def _average_parts() -> None:
    def mean(answers: list[Any]) -> float:
        parts = [answers[at : at + 7] for at in range(0, len(answers), 7)]
        return sum(map(_right, parts)) / len(parts)

    _counting(mean)


def _draw_with_replacement() -> None:
    from megarl.buffer.experience.held_out import pass_at

    replace(pass_at, lambda k, right, n: 1.0 - (1.0 - right / n) ** k)


EVERY_TWO = ("trainer.eval_interval=2",)
SAMPLED = (*EVERY_TWO, "evaluation.samples=4", "evaluation.temperature=0.7")

FAULTS: tuple[Fault, ...] = (
    Fault(
        "weights-of-before",
        "ray-project/ray#60777",
        "An evaluation after an update uses the weights that the engines had before.",
        alarm="eval-weights",
        job="evaluated",
        install=_evaluate_before,
        begins=2,
        within=2,
    ),
    Fault(
        "weights-mixed",
        "radixark/miles#1740",
        "Held-out tasks are answered while weights change: no version of weights is measured.",
        alarm="eval-weights",
        job="late",
        install=_mix_weights,
        begins=2,
        settings=(*EVERY_TWO, "trainer.eval_engines=1", "rollout.replicas=2", "sync.pause=keep"),
        within=2,
    ),
    Fault(
        "greedy-sampled",
        "huggingface/lighteval#559",
        "An evaluation that is reported as greedy samples at temperature 1.",
        alarm="eval-sampling",
        job="evaluated",
        install=_sample_greedy,
        within=2,
    ),
    Fault(
        "system-block-twice",
        "NVIDIA-NeMo/RL#4185",
        "Held-out prompts have the template's system block twice, training prompts once.",
        alarm="template",
        job="evaluated",
        install=_repeat_system,
        within=2,
    ),
    Fault(
        "last-batch-dropped",
        "verl-project/verl#7464",
        "Held-out tasks of the last incomplete batch are never asked.",
        alarm="eval-rows",
        job="evaluated",
        install=_drop_last_batch,
        within=2,
    ),
    Fault(
        "other-rows-each-time",
        "verl-project/verl#7824",
        "Each evaluation draws other held-out tasks, so that two are not comparable.",
        alarm="eval-rows",
        job="evaluated",
        install=_draw_again,
        within=2,
    ),
    Fault(
        "failures-left-out",
        "rllm-org/rllm#382",
        "Truncated answers are left out of the accuracy's denominator.",
        alarm="eval-count",
        job="evaluated",
        install=_leave_failures_out,
        settings=("rollout.max_response_tokens=2",),
        within=2,
    ),
    Fault(
        "mean-of-means",
        "PrimeIntellect-ai/prime-rl#1850",
        "The accuracy is the mean of the parts' means, although parts have different sizes.",
        alarm="eval-count",
        job="evaluated",
        install=_average_parts,
        within=2,
    ),
    Fault(
        "pass-at-k-with-replacement",
        "verl-project/verl#7240",
        "pass@k is estimated by draws with replacement, which is too low.",
        alarm="eval-count",
        job="tiny",
        install=_draw_with_replacement,
        settings=SAMPLED,
        within=2,
    ),
)
