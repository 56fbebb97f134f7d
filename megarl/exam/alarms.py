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
}
"""Name -> words of an error or refusal that names the fault."""
STEPS: dict[str, str] = {}
"""Name of an alarm of a step -> what it means."""


def named(text: str) -> list[str]:
    """Return the names of the alarms that the last lines of a job's log give."""
    found = [name for name, words in ERRORS.items() if re.search(words, text)]
    return found + [name for name in STEPS if re.search(rf"\balarm {name}:", text)]
