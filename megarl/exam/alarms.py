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
    "probe": r"of the probe text|is -?[\d.]+ in the engine and -?[\d.]+ in the trainer",
    "decode": r"tokens that the engine decoded",
    "adapter": r"does not compute with a test adapter|has not computed with a test adapter yet|has dropped its adapter",
    "far": r"after \d+ tokens the log-prob of token",
    "eight-bits": r"other numbers in 8 bits than those made from what arrived",
    "memory": r"came back from|has other elements than it had when it left",
    "untrained": r"the optimizer does not train",
    "base": r"the model under the adapters (has changed|is trained)|does not have the rest of the weights",
    "gap": r"tokens that it sampled with this step's weights are",
    "mask": r"sampled, but .* trained and",
    "advantages": r"its estimate fails or gives other numbers where a rank holds",
    "rows": r"rows that have changed or disappeared since",
    "held_out": r"asks a question of taskset\.eval",
    "checkpoint": r"THE RUN GOES BACK|is damaged|has SHA-256 .*, written was|written were",
    "same-answers": r"chosen and rejected are the same tokens",
    "lag": r"has sampled a response with the weights .* are recorded",
    "tokens": r"has computed other tokens than the \d+ recorded ones",
    "eval-weights": r"keeps its weights for evaluation",
    "moments": r"the optimizer does not have what .* gave it",
}
"""Name -> words of an error or refusal that names the fault."""
STEPS: dict[str, str] = {
    "stale-keys": "Tokens sampled after a sync in the middle of a response are far from the trainer's log-probs: the "
    "engine goes on with keys and values of old weights; look at sync.pause and the reset of running requests.",
    "surprise": "Sampled tokens are likelier, or less likely, than the reported log-probs allow: something else than "
    "rollout.temperature (top-p, top-k, a penalty) takes part in sampling.",
    "equal-samples": "Samples of a group are equal more often than their probabilities allow: seeds are equal.",
    "no-end": "A response that stopped does not end with an end token: it was dropped, and stopping is not trained.",
    "past-end": "A response goes on after an end token: the engine does not know the model's end tokens.",
    "eval-weights": "Held-out answers were sampled with other weights than the evaluated version.",
    "eval-sampling": "Held-out answers that should be greedy are not the likeliest tokens.",
    "eval-rows": "An evaluation asked for other held-out rows than the taskset has, or than the one before.",
    "eval-count": "The reported accuracy is not that of the evaluation's stored answers, counted again.",
    "advantages": "The step's advantages differ from those computed again from its rewards and groups; look at group "
    "statistics, whitening and the KL in the rewards.",
    "loss": "The gradient of the log-probs is not that of the algorithm's formula over all tokens of the update; look "
    "at aggregation, denominators, clipping, KL and entropy.",
    "old-logp": "The old log-probs of an update are not those of the step's first weights; look at when they are "
    "computed, and at the temperature.",
    "reference": "The reference computes other log-probs for a text than at the start; look at shared or refreshed "
    "weights, and at the temperature.",
    "critic": "The values or returns of the step differ from those computed again; look at the ends of responses, the "
    "value clip and the scale of values.",
    "gradient": "The gradient that the optimizer applied is not the sum over micro-batches and ranks; look at "
    "reduction, zeroing and clipping.",
    "frozen": "Trained parameters have got no gradient in any update; look at what detaches or freezes their layer.",
    "optimizer": "The weights have not changed as learning rate and weight decay demand; look at the schedule, the "
    "groups of parameters and skipped steps.",
    "precision": "A part of the model computes in another type than is set; look at casts before it.",
    "router": "The gradient of the routers' losses is not that of the whole update; look at their denominators.",
    "mask": "The tokens in the loss are not those that the model wrote; look at how turns become samples.",
    "tokens": "The tokens of a turn are not those that the engine computed; look at what decodes and encodes them.",
    "log-probs": "The engine's log-probs of a batch are not those of its tokens; look at their positions.",
    "template": "A prompt or message is not written as the model's chat template writes it; look at what renders, cuts "
    "or encodes it.",
    "text": "The text that was judged is not the text of the trained tokens; look at stop strings and at decoding.",
    "verdicts": "A stored verdict is not what the verifier returns for the same response when it is asked again.",
    "verifier": "The verifier counts texts as right that cannot be: lists of answers of other rows.",
    "environment": "An environment ended some episodes at a response after which it went on in equal ones.",
    "norms": "A norm of the trainer computes with another epsilon than the model's config has.",
    "no-verdict": "A response without a verdict is trained, although the settings leave it out.",
    "shaping": "A trained score is not its verdict with the parts that the settings add.",
    "lag": "Tokens were sampled by other weights than their recorded version.",
    "stale": "Trained tokens are older than sync.max_staleness allows.",
    "length-bias": "Trained responses are shorter than sampled ones: look at what drops or repeats long ones.",
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
    "kl-coef": "The KL coefficient is not that of the step before.",
    "average": "The moving average is not that of the step before.",
    "best": "The checkpoint kept as the best is not the best of the run.",
    "duplicates": "Most training rows ask a question that another row asks.",
    "same-prompts": "Tasks with different answers have the same prompt.",
    "answers": "Right answers are those of other rows; no check of it.",
    "answer-in-prompt": "Prompts have their expected answer.",
    "lost-rows": "The store has fewer tasks than the files have rows.",
    "preferences": "Chosen answers are less likely than rejected ones from the start: look at the columns.",
}
"""Name of an alarm of a step -> what it means."""


def named(text: str) -> list[str]:
    """Return the names of errors and of alarms before the first step in a job's log; alarms of steps are metrics."""
    found = [name for name, words in ERRORS.items() if re.search(words, text)]
    return found + [name for name in STEPS if re.search(rf"\balarm {name}:(?! step \d)", text)]
