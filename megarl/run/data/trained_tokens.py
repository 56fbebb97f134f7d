"""Comparison of the tokens in a run's training batches with the turns in its store.

Uses only the stored turns, not the trainer's code: each sequence must be a line of turns, from a first turn to one of
the model. Each token in the loss must be a token that the model wrote there.

Shape legend: T tokens of a sequence or of a line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

import numpy as np

from megarl.core.errors import ConfigError
from megarl.core.kept_batches import KeptBatch, kept_steps, path_of
from megarl.core.schema import Author, Turn
from megarl.run.data.open_run import StoredRun, progress, table

AUTHORS: tuple[str, ...] = get_args(Author)
MODEL = AUTHORS.index("model")
NOBODY = -1
"""Author of positions after a line's end."""
TRAINED = "rollout/tokens/trained"
"""Metric of a step: number of sampled tokens in its loss, counted by the trainer."""


class Line(NamedTuple):
    """Consecutive turns that end with one of the model."""

    tokens: np.ndarray
    """int32 [T]"""
    authors: np.ndarray
    """int8 [T], in ``AUTHORS``."""


@dataclass
class TrainedTokens:
    """Counts over a run's steps."""

    steps: int = 0
    without_file: int = 0
    """Finished steps without a batch file."""
    several_turns: int = 0
    """Sequences with more than one turn of the model."""
    sequences: int = 0
    trained: int = 0
    """Tokens in the loss, without expert rows."""
    expert: int = 0
    """Tokens of expert rows in the loss, which no model has sampled."""
    differ: int = 0
    """Tokens in the loss that differ from the stored turns."""
    of_others: Counter[str] = field(default_factory=Counter)
    """Author -> tokens in the loss that the model did not write."""
    sequences_differ: int = 0
    absent: int = 0
    """Sequences with no trajectory in the store."""
    uncounted: int = 0
    """Sum over steps of the difference from the recorded metric."""

    @property
    def wrong(self) -> bool:
        """True if a token or sequence differs, is missing or was not counted."""
        counts = (self.differ, sum(self.of_others.values()), self.sequences_differ, self.absent, self.uncounted)
        return any(counts)

    def text(self) -> str:
        """Return the table."""
        others = {author: self.of_others[author] for author in AUTHORS if author != "model"}
        rows: list[tuple[str, int]] = [
            ("steps", self.steps),
            ("steps without a batch", self.without_file),
            ("sequences", self.sequences),
            ("sequences with several turns of the model", self.several_turns),
            ("trained tokens", self.trained),
            ("trained tokens of expert rows, not compared", self.expert),
            ("trained tokens that differ from those sampled", self.differ),
            *((f"trained tokens of author {author}", number) for author, number in others.items()),
            ("sequences that differ from the stored turns", self.sequences_differ),
            ("sequences whose trajectory is not in the store", self.absent),
            ("trained tokens more or less than steps have recorded", self.uncounted),
        ]
        return table([(name, f"{number:,}") for name, number in rows])

    def compare(self, tokens: np.ndarray, targets: np.ndarray, mask: np.ndarray, lines: Sequence[Line]) -> None:
        """Count one sequence.

        Args:
            tokens: int32 [T]
            targets: int32 [T]; position i has the token after it.
            mask: bool [T]
            lines: Lines of the sequence's trajectory.
        """
        places = np.flatnonzero(mask)
        line = _nearest(tokens, places, lines)
        self.sequences_differ += not np.array_equal(line.tokens, tokens)
        following = places + 1
        inside = following < len(line.tokens)
        authors = np.full(len(places), NOBODY)
        authors[inside] = line.authors[following[inside]]
        same = np.zeros(len(places), np.bool_)
        same[inside] = targets[places[inside]] == line.tokens[following[inside]]
        self.differ += int(np.count_nonzero(~same))
        for author, number in zip(*np.unique(authors, return_counts=True), strict=True):
            if author not in (MODEL, NOBODY):
                self.of_others[AUTHORS[author]] += int(number)
        starts = np.diff((line.authors == MODEL).astype(np.int8), prepend=0) > 0
        self.several_turns += int(np.count_nonzero(starts)) > 1


def count_trained(run: StoredRun) -> TrainedTokens:
    """Compare every finished step with a batch file.

    Raises:
        ConfigError: no step has a batch file.
        DataError: a file is damaged.
    """
    steps, files = dict(run.store.journal.steps()), set(kept_steps(run.run_dir))
    compared = [step for step in steps if step in files]
    if not compared:
        raise ConfigError(
            f"{run.run_dir} has no batches of finished steps; train with trainer.keep_batches=true, which writes them "
            "from the next start on"
        )
    found = TrainedTokens(len(compared), len(steps) - len(compared))
    with progress(len(compared), "steps") as bar:
        for step in compared:
            _add_step(found, run, KeptBatch.read(path_of(run.run_dir, step)), steps[step].get(TRAINED))
            bar.update(1)
    return found


def _add_step(found: TrainedTokens, run: StoredRun, batch: KeptBatch, recorded: float | None) -> None:
    """Count a step's sequences.

    Args:
        recorded: The step's metric ``TRAINED``.
    """
    cuts = np.cumsum(batch.lengths)[:-1]
    parts = [np.split(values, cuts) for values in (batch.tokens, batch.targets, batch.mask)]
    of_group: dict[int, list[int]] = {}
    for n, group in enumerate(batch.groups.tolist()):
        of_group.setdefault(group, []).append(n)
    sums = np.array([np.count_nonzero(mask) for mask in parts[2]])
    expert = of_group.pop(-1, [])
    found.sequences += len(batch.lengths)
    found.expert += int(sums[expert].sum())
    found.trained += int(sums.sum()) - int(sums[expert].sum())
    once = np.setdiff1d(np.unique(batch.numbers, return_index=True)[1], expert)
    found.uncounted += 0 if recorded is None else abs(int(sums[once].sum()) - int(recorded))
    names = {str(batch.group_ids[group]): numbers for group, numbers in of_group.items()}
    for few in run.store.groups.parts(list(names)):
        lines = {(each.group_id, each.index): list(lines_of(each.turns)) for each in run.store.selection.members(few)}
        for name in few:
            for n in names[name]:
                if own := lines.get((name, int(batch.indices[n]))):
                    found.compare(parts[0][n], parts[1][n], parts[2][n], own)
                else:
                    found.absent += 1


def lines_of(turns: Sequence[Turn]) -> Iterator[Line]:
    """Yield the line that ends at each turn of the model."""
    for turn in turns:
        if turn.author != "model":
            continue
        line = [turn]
        while line[0].follows >= 0:
            line.insert(0, turns[line[0].follows])
        authors = [np.full(len(each), AUTHORS.index(each.author), np.int8) for each in line]
        yield Line(np.concatenate([each.token_ids for each in line]), np.concatenate(authors))


def _nearest(tokens: np.ndarray, places: np.ndarray, lines: Sequence[Line]) -> Line:
    """Return the line with these tokens, or with most of them.

    After a rewritten context, lines with equal tokens may have different authors: the line with the fewest trained
    tokens of other authors wins.
    """

    def distance(line: Line) -> tuple[int, int]:
        common = min(len(tokens), len(line.tokens))
        other = np.count_nonzero(tokens[:common] != line.tokens[:common])
        following = places[places + 1 < len(line.tokens)] + 1
        longer = max(len(tokens), len(line.tokens)) - common
        return int(other) + longer, int(np.count_nonzero(line.authors[following] != MODEL))

    return min(lines, key=distance)
