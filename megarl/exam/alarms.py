"""Names of what a job says when it notices a fault: alarms of steps, and words of errors and refusals.

An alarm of a step is a line ``alarm NAME: …`` of the log and a metric ``alarm/NAME``. An error or refusal is known by
its words.
"""

from __future__ import annotations

import re

ERRORS: dict[str, str] = {
    "undelivered": r"a sync would not deliver them|weights that training does not change are other ones in the engine",
    "digest": r"digest sent|did not get all their elements|the padding of .* is not zero"
    r"|message -?\d+ of (that|another) channel arrived|the sync moved tensors",
    "written": r"what the optimizer last wrote",
    "sent": r"is not (A|scale · B|W \+ scale · B·A, added in float32)|is not sent as the trainer has it",
    "cache": r"kept its prefix cache",
    "probe": r"of the probe text",
    "decode": r"tokens that the engine decoded",
    "adapter": r"does not compute with a test adapter|has not computed with a test adapter yet|has dropped its adapter",
    "base": r"the model under the adapters has changed|does not have the rest of the weights",
    "rows": r"rows that have changed or disappeared since",
    "held_out": r"asks a question of taskset\.eval",
    "checkpoint": r"THE RUN GOES BACK|is damaged|has SHA-256 .*, written was|written were",
    "same-answers": r"chosen and rejected are the same tokens",
    "sample": r"tokens that it sampled with this step's weights are",
    "moments": r"the optimizer does not have what .* gave it",
}
"""Name -> words of an error or refusal that names the fault."""
STEPS: dict[str, str] = {
    "verdicts": "A stored verdict is not what the verifier returns for the same response when it is asked again.",
    "no-verdict": "A response without a verdict is trained, although the settings leave it out.",
    "shaping": "A trained score is not its verdict with the parts that the settings add.",
    "lag": "Tokens were sampled by other weights than their recorded version.",
    "stale": "Trained tokens are older than sync.max_staleness allows.",
    "length-bias": "Trained responses are shorter than sampled ones: look at what drops or repeats long ones.",
    "unfinished": "A response counts as finished without a token that ends one.",
    "twice": "A group was trained by an earlier step too.",
    "missing-groups": "A step has fewer groups, or members, than it has asked for.",
    "learning-rate": "The learning rate is not that of the schedule at this step.",
    "optimizer-steps": "The optimizer has counted other steps than the updates that were made.",
    "resumed-weights": "The weights after a resume are not those that the checkpoint was made of.",
    "moments-lost": "The optimizer's moments after a resume are not those before it.",
    "data-order": "The tasks of a step are not those that the order of the data gives.",
    "priorities": "Tasks with other results are drawn equally often.",
    "repeated-seeds": "A step samples with the seed of an earlier step.",
    "random-states": "The random generators are not in the checkpoint's state.",
    "step-gap": "The steps of the run have a gap, or one twice.",
    "reference": "The reference has other weights than it began with.",
    "kl-coef": "The KL coefficient is not that of the step before.",
    "average": "The moving average is not that of the step before.",
    "best": "The checkpoint kept as the best is not the best of the run.",
    "duplicates": "Most training rows ask a question that another row asks.",
    "same-prompts": "Tasks with different answers have the same prompt.",
    "answers": "Hardly any right response to rows whose answers other rows have: look at the columns.",
    "answer-in-prompt": "Prompts have their expected answer.",
    "lost-rows": "The store has fewer tasks than the files have rows.",
    "preferences": "Chosen answers are less likely than rejected ones from the start: look at the columns.",
}
"""Name of an alarm of a step -> what it means."""


def named(text: str) -> list[str]:
    """Return the names of the alarms that the last lines of a job's log give."""
    found = [name for name, words in ERRORS.items() if re.search(words, text)]
    return found + [name for name in STEPS if re.search(rf"\balarm {name}:", text)]
