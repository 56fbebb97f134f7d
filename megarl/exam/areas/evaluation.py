"""Faults of held-out evaluations: what is asked, of which weights, and what is counted."""

from __future__ import annotations

from megarl.exam.fault import Fault

EVERY_TWO = ("trainer.eval_interval=2",)
SAMPLED = (*EVERY_TWO, "evaluation.samples=4", "evaluation.temperature=0.7")

FAULTS: tuple[Fault, ...] = (
    Fault(
        "weights-of-before",
        "ray-project/ray#60777",
        "An evaluation after an update uses the weights that the engines had before.",
        alarm="eval-weights",
        job="tiny",
        settings=EVERY_TWO,
        within=2,
    ),
    Fault(
        "weights-mixed",
        "radixark/miles#1740",
        "Held-out tasks are answered while weights change: no version of weights is measured.",
        alarm="eval-weights",
        job="late",
        settings=EVERY_TWO,
        within=2,
    ),
    Fault(
        "greedy-sampled",
        "huggingface/lighteval#559",
        "An evaluation that is reported as greedy samples at temperature 1.",
        alarm="eval-sampling",
        job="tiny",
        settings=EVERY_TWO,
        within=2,
    ),
    Fault(
        "system-block-twice",
        "NVIDIA-NeMo/RL#4185",
        "Held-out prompts have the template's system block twice, training prompts once.",
        alarm="eval-prompts",
        job="tiny",
        settings=(*EVERY_TWO, "taskset.system_prompt=add:", "rollout.max_prompt_tokens=40"),
        within=2,
    ),
    Fault(
        "last-batch-dropped",
        "verl-project/verl#7464",
        "Held-out tasks of the last incomplete batch are never asked.",
        alarm="eval-rows",
        job="tiny",
        settings=EVERY_TWO,
        within=2,
    ),
    Fault(
        "other-rows-each-time",
        "verl-project/verl#7824",
        "Each evaluation draws its held-out tasks anew, so that two are not comparable.",
        alarm="eval-rows",
        job="tiny",
        settings=EVERY_TWO,
        within=2,
    ),
    Fault(
        "failures-left-out",
        "rllm-org/rllm#382",
        "Answers without a verdict are left out of the accuracy's denominator.",
        alarm="eval-count",
        job="tiny",
        settings=EVERY_TWO,
        within=2,
    ),
    Fault(
        "mean-of-means",
        "PrimeIntellect-ai/prime-rl#1850",
        "The accuracy is the mean of the parts' means, although parts have different sizes.",
        alarm="eval-count",
        job="tiny",
        settings=EVERY_TWO,
        within=2,
    ),
    Fault(
        "pass-at-k-with-replacement",
        "verl-project/verl#7240",
        "pass@k is estimated by draws with replacement, which is too low.",
        alarm="eval-count",
        job="tiny",
        settings=SAMPLED,
        within=2,
    ),
    Fault(
        "answer-of-before-the-cut",
        "marin-community/marin#9163",
        "A truncated answer is graded by what can be found in it, and counted as right.",
        alarm="eval-truncated",
        job="tiny",
        settings=(*EVERY_TWO, "rollout.max_response_tokens=3"),
        within=2,
    ),
)
