"""Episodes of a group that are equal up to a response: an environment that decides by its state alone goes on alike.

An environment that fails silently ends some of them as lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from megarl.buffer.store import Store
from megarl.config import Config
from megarl.core.schema import Trajectory, name_of
from megarl.train.part import Metrics, Part, StepData
from megarl.train.ranks import Reporter, RunContext, TrainState

MOST = 64
"""Trajectories of a step that are read."""


class EqualEpisodes(Part):
    """Compares episodes of a few groups of each step, on rank 0."""

    def __init__(self, config: Config, context: RunContext, store: Store, reporter: Reporter) -> None:
        self._store, self._reporter, self._is_first = store, reporter, context.rank == 0
        self._found = 0

    def before_batch(self, state: TrainState, data: StepData) -> None:
        if not self._is_first:
            return
        ended = broken_episodes(self._store.groups.whole(data.trajectories[:MOST]))
        if ended:
            self._found = len(ended)
            self._reporter.log(
                f"alarm environment: step {state.step + 1}: {len(ended)} episodes ended at a response after which the "
                f"environment answered in an equal episode, the first {name_of(ended[0])}; look at what the "
                "environment does when it fails: an exception ends an episode without a verdict"
            )

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        if self._found:
            metrics["alarm/environment"], self._found = float(self._found), 0


def broken_episodes(episodes: Sequence[Trajectory]) -> list[Trajectory]:
    """Return episodes that ended, not right, where others of their group with equal turns got an answer.

    Nothing where two equal episodes got different answers: that environment has chance in it.
    """
    answers: dict[tuple[object, ...], set[bytes]] = {}
    ends: dict[tuple[object, ...], Trajectory] = {}
    for one in episodes:
        key: tuple[object, ...] = (one.group_id,)
        for number, turn in enumerate(one.turns):
            if turn.author == "model":
                key = (*key, turn.token_ids.tobytes())
                if number + 1 < len(one.turns):
                    answers.setdefault(key, set()).add(one.turns[number + 1].token_ids.tobytes())
                elif one.cause is None and not one.truncated and one.reward.status == "wrong":
                    ends[key] = one
            else:
                key = (*key, turn.token_ids.tobytes())
    if any(len(found) > 1 for found in answers.values()):
        return []
    return [one for key, one in ends.items() if key in answers]
