"""Predictions of the planner: published rows, and a step of each preset: ``python benchmarks/planner.py --write``."""

from __future__ import annotations

import argparse
import sys

import page

sys.path.insert(0, str(page.ROOT))  # the rows are test cases

from tests.planner_rows import presets, table  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="also write the tables into docs/benchmarks/planner.md")
    options = parser.parse_args()
    text = "\n".join(["## Published rows", *table(), "", "## A step of each preset", *presets(), ""])
    sys.stdout.write(text)
    if options.write:
        page.write("benchmarks/planner.md", text)


if __name__ == "__main__":
    main()
