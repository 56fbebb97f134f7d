"""Comparison of a few sequences of each step with the store's turns, before models are updated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from megarl.buffer.store import Store
from megarl.config import Config
from megarl.core.schema import Task, Trajectory, name_of
from megarl.tasks import ChatTokenizer
from megarl.train.batch.batch import StepBatch
from megarl.train.batch.judged_texts import can_be_asked
from megarl.train.batch.recorded_lines import Templates, difference, lines_of
from megarl.train.part import Metrics, Part, StepData
from megarl.train.ranks import Reporter, RunContext, TrainState

T = TypeVar("T")
CAUSES = {
    "tokens": "what makes sequences of turns, and what reads them from the store",
    "mask": "what puts turns of the model, and no others, into the loss",
    "log-probs": "what puts log-probs at the positions of their tokens",
    "template": "the chat template, its options, and what renders, cuts or encodes messages",
    "text": "stop strings, and what decodes a response before it is judged",
}
"""Alarm -> what to look at."""


class ComparedTurns(Part):
    """Compares ``alarms.trajectories`` sequences of each step with recorded turns, on rank 0."""

    def __init__(self, config: Config, context: RunContext, store: Store, reporter: Reporter) -> None:
        self._config, self._store, self._reporter = config, store, reporter
        self._number = config.alarms.trajectories if context.rank == 0 else 0
        self._templates: Templates | None = None
        self._elsewhere: dict[tuple[str, int], Trajectory] = {}
        """Trajectories of the step, of which rank 0 may hold others than those that are read; empty without data
        parallelism."""
        self._whole: dict[tuple[str, int], Trajectory] = {}
        """Trajectories of the step that are read, by (group id, index)."""
        self._tasks: dict[str, Task] = {}
        self._found: dict[str, int] = {}
        """Alarm -> sequences of the step that have it."""

    def before_batch(self, state: TrainState, data: StepData) -> None:
        """Take trajectories that ``Verdicts`` has read, except one that it cannot ask for, and read the rest."""
        if not self._number:
            return
        read, every = data.read, data.trajectories
        few = spread([one for one in every if not can_be_asked(one)], 1, state.step) if read else []
        taken = spread(read, self._number - len(few), state.step)
        self._whole = {(one.group_id, one.index): one for one, _ in taken}
        self._tasks = {task.task_id: task for _, task in taken}
        if left := self._number - len(few) - len(taken):
            known = self._whole.keys() | {(one.group_id, one.index) for one in few}
            few += spread([one for one in every if (one.group_id, one.index) not in known], left, state.step)
        self._read(few)
        if self._config.parallel.dp > 1:
            self._elsewhere = {(each.group_id, each.index): each for each in data.trajectories}

    def before_update(self, state: TrainState, batch: StepBatch) -> None:
        chosen = self._chosen(state, batch)
        keys = {(batch.rows[number].group_id, batch.rows[number].index) for _, number, _ in chosen}
        self._read([self._elsewhere[key] for key in sorted(keys - self._whole.keys())])
        whole, tasks = self._whole, self._tasks
        self._elsewhere, self._whole, self._tasks = {}, {}, {}
        if not chosen:
            return
        if self._templates is None:
            self._templates = Templates(ChatTokenizer.of(self._config), self._config.rollout.workflow)
        self._found, lines = {}, dict[str, str]()
        sequences, starts = batch.sequences, batch.sequences.cu_seqlens.tolist()
        for place, number, ordinal in chosen:
            row, part = batch.rows[number], slice(starts[place], starts[place + 1])
            trajectory = whole[row.group_id, row.index]
            logp = None if sequences.engine_logp is None else sequences.engine_logp[part].numpy()
            found = None
            if (task := tasks.get(trajectory.task_id)) is not None and not ordinal:
                found = self._templates.difference(trajectory, task)
            if not (self._config.algorithm.overlong_filtering and row.truncated):
                line = list(lines_of(trajectory.turns))[ordinal]
                found = difference(line, sequences.tokens[part].numpy(), sequences.mask[part].numpy(), logp) or found
            if found is not None:
                name, text = found
                self._found[name] = self._found.get(name, 0) + 1
                lines.setdefault(name, f"{name_of(row)}: {text}")
        for name, text in lines.items():
            self._reporter.log(
                f"alarm {name}: step {state.step + 1}: {self._found[name]} of {len(chosen)} compared sequences, the "
                f"first {text}; look at {CAUSES[name]}"
            )

    def _chosen(self, state: TrainState, batch: StepBatch) -> list[tuple[int, int, int]]:
        """Return (place among the held sequences, number in the step, number in its trajectory) of those to compare."""
        share, rows = batch.sequences.share, batch.rows
        numbers = range(len(batch.sequences)) if share is None else share.numbers.tolist()
        sampled = [(place, number) for place, number in enumerate(numbers) if number < len(rows)]
        if not sampled or not self._number:
            return []
        keys = [(row.group_id, row.index) for row in rows]
        few = spread([one for one in sampled if keys[one[1]] in self._whole], self._number, state.step)
        if rest := self._elsewhere.keys() - self._whole.keys():
            few += spread([one for one in sampled if keys[one[1]] in rest], self._number - len(few), state.step)
        counts, ordinals = Counter[tuple[str, int]](), dict[int, int]()
        chosen = {keys[number] for _, number in few}
        for number, key in enumerate(keys):
            if key in chosen:
                ordinals[number] = counts[key]
                counts[key] += 1
        return [(place, number, ordinals[number]) for place, number in few]

    def _read(self, outlines: Sequence[Trajectory]) -> None:
        """Read the arrays and tasks of some trajectories."""
        if not outlines:
            return
        self._whole |= {(each.group_id, each.index): each for each in self._store.groups.whole(outlines)}
        self._tasks |= self._store.facts.tasks({each.task_id for each in outlines})

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        metrics |= {f"alarm/{name}": float(number) for name, number in self._found.items()}
        self._found = {}


def spread(values: Sequence[T], number: int, step: int) -> list[T]:
    """Return up to ``number`` values at equal distances, which begin at another place in each step."""
    stride = max(1, len(values) // number) if number else 1
    return list(values[step % stride :: stride][:number])
