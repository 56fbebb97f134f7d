"""Run a copy of verl's ``verl/utils/reward_score/math_dapo.py`` on the rows of ``tests/unit/cases/graders.tsv``.

    python benchmarks/against/math_dapo.py FILE

Prints each row whose verdict is not the recorded one, and ends with status 1 where there is one.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROWS = Path(__file__).parents[2] / "tests" / "unit" / "cases" / "graders.tsv"


def main(path: str) -> int:
    """Return the number of rows with another verdict."""
    score, differ = runpy.run_path(path)["compute_score"], 0
    for line in ROWS.read_text(encoding="utf-8").splitlines()[1:]:
        gold, answer, _, recorded, *_ = line.split("\t")
        response = answer[2:].replace("⏎", "\n") if answer.startswith("> ") else f"Answer: {answer}"
        found = "right" if score(response, gold)["acc"] else "wrong"
        if found != recorded:
            differ += 1
            sys.stdout.write(f"{answer} for {gold}: {found}, recorded {recorded}\n")
    return differ


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1]), 1))
