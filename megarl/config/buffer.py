"""Settings of the buffer between explorer and trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any

from megarl.config.bounds import Bound, Coefficient, Count, UnitInterval


@dataclass(frozen=True)
class ReplayConfig:
    """Groups that a step trains on again (docs/algorithms.md)."""

    share: Annotated[float, Bound(0, 1, below=True)] = 0.0
    """Share of a step's ``trainer.tasks_per_step`` groups that are replayed, rounded down to whole groups; the step
    samples that many fewer. 0 replays none."""
    uses: Annotated[int, Bound(2, 1000)] = 2
    """Most steps that train on a group, including the first."""
    max_age: Count = 10
    """Most steps from a group's first use to its last."""
    decay: Annotated[float, Bound(0, 1, above=True)] = 0.9
    """Factor of a group's priority for each step since its first use; 1 ignores age."""
    hardness: Coefficient = 0.0
    """Exponent of a group's share of wrong responses in its priority: 0 ignores it, 1 is in proportion to it. Above 0,
    groups with only right responses are never replayed."""
    min_accuracy: UnitInterval = 0.0
    """Least share of right responses of a replayed group; a value above 0 leaves out groups with only wrong
    responses."""
    max_accuracy: UnitInterval = 1.0
    """Largest share of right responses of a replayed group; a value below 1 leaves out groups with only right
    responses."""

    def num_groups(self, tasks_per_step: int) -> int:
        """Return the number of replayed groups of a step, computed exactly from the decimals of ``share``."""
        return int(Fraction(str(self.share)) * tasks_per_step)


@dataclass(frozen=True)
class BufferConfig:
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Groups that a step trains on again."""
    operators: dict[str, Any] = field(default_factory=dict, hash=False)
    """Operators applied to whole groups before training, in this order: NAME -> its settings, e.g. {duplicates: {},
    length: {max_tokens: 512}, mine: {file: mine.py}} (docs/operators.md)."""
    min_members: Count = 2
    """Fewest members that a group must keep, after operators and ``reward.on_error=mask`` exclude some, to be trained
    on."""
