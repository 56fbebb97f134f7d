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
    "base": r"the model under the adapters has changed|does not have the rest of the weights",
    "gap": r"tokens that it sampled with this step's weights are",
    "mask": r"sampled, but .* trained and",
    "advantages": r"its estimate fails or gives other numbers where a rank holds",
}
"""Name -> words of an error or refusal that names the fault."""
STEPS: dict[str, str] = {
    "untrained": "An update changed none of the tensors that are trained: compare what is frozen with model.lora.",
    "stale-keys": "Tokens sampled after a sync in the middle of a response are far from the trainer's log-probs: the "
    "engine goes on with keys and values of old weights; look at sync.pause and the reset of running requests.",
    "surprise": "Sampled tokens are likelier, or less likely, than the reported log-probs allow: something else than "
    "rollout.temperature (top-p, top-k, a penalty) takes part in sampling.",
    "equal-samples": "Samples of a group are equal more often than their probabilities allow: seeds are equal.",
    "no-end": "A response that stopped does not end with an end token: it was dropped, and stopping is not trained.",
    "past-end": "A response goes on after an end token: the engine does not know the model's end tokens.",
    "eval-weights": "Held-out answers were sampled with other weights than the evaluated version.",
    "eval-sampling": "Held-out answers that should be greedy are not the likeliest tokens.",
    "eval-prompts": "A held-out prompt is not what the chat template makes of its row.",
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
    "template": "A prompt or message is not written as the model's chat template writes it; look at what renders, cuts "
    "or encodes it.",
    "text": "The text that was judged is not the text of the trained tokens; look at stop strings and at decoding.",
}
"""Name of an alarm of a step -> what it means."""


def named(text: str) -> list[str]:
    """Return the names of the alarms that the last lines of a job's log give."""
    found = [name for name, words in ERRORS.items() if re.search(words, text)]
    return found + [name for name in STEPS if re.search(rf"\balarm {name}:", text)]
