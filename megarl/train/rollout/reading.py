"""One reader per node: the first rank of each node reads the store and hands what it has read to the node's other
ranks, its arrays through a file that they map (``spool.py``)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from megarl.buffer.experience import by_group
from megarl.buffer.order.draws import ExpertRow
from megarl.buffer.order.replay import Replayed
from megarl.buffer.store import Store
from megarl.core.errors import JobError, MegarlError, describe
from megarl.core.processes import heartbeat
from megarl.core.schema import Trajectory, WeightsVersion, file_digest
from megarl.engines.sync.shared import machine
from megarl.tasks import ChatTokenizer, encode_demonstrations
from megarl.tasks.images.inline import without_inline_images
from megarl.train.rollout.spool import Spool, Spooled, unspooled

log = logging.getLogger(__name__)
T = TypeVar("T")
STOPPED = "stopped"
Expand = Callable[[np.ndarray, Sequence[bytes]], np.ndarray]
"""(ids of a prompt, files of its images) -> the ids with a placeholder for each vector."""
IMAGES_OF = 4
"""Tasks whose images are read at once."""
Fault = str | tuple[type[MegarlError], str] | None
"""Reason why reading ended: nothing, STOPPED, or (type, text) of an error."""


class NodeReader:
    """A rank's place among those of its node. Every rank makes one, and calls ``read`` together with all others.

    Args:
        timeout_s: How long a part is waited for; longer than the reader waits for a store that is away.
    """

    def __init__(self, timeout_s: float = 600.0) -> None:
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._group: dist.ProcessGroup | None = None
        self._reader = 0
        if self._world == 1:
            return
        nodes: list[str] = [""] * self._world
        dist.all_gather_object(nodes, machine())
        for node in dict.fromkeys(nodes):  # all ranks make all groups, in one order
            ranks = [rank for rank, where in enumerate(nodes) if where == node]
            group = dist.new_group(ranks, timedelta(seconds=timeout_s), "gloo")
            if dist.get_rank() in ranks:
                self._group, self._reader = group, ranks[0]

    @property
    def reads(self) -> bool:
        """True if this rank is its node's reader."""
        return self._world == 1 or dist.get_rank() == self._reader

    def read(
        self,
        parts: Callable[[], Iterable[T]],
        stopping: Callable[[], bool] = lambda: False,
        nbytes: Callable[[], int] = lambda: 0,
    ) -> list[T] | None:
        """All parts, the same on every rank; only readers call ``parts``. None on every rank when ``stopping()`` on
        some reader.

        ``nbytes``: about the bytes of the arrays of all parts, for which there must be room before the first is read.

        Arrays are read-only where there are several ranks: they lie once a node. The reader has a part in its own
        memory until its arrays are written.

        Raises what ``parts`` raised on some reader, on every rank: as JobError where it is no error of megarl's.
        """
        if self._world == 1:
            return list(parts())
        with closing(Spool()) as spool:
            spooled: list[Spooled] = []
            for message in self._messages(parts, stopping, nbytes, spool) if self.reads else itertools.repeat(None):
                part, fault, path = self._broadcast(message)
                heartbeat.beat()
                if part is None:
                    break
                spooled.append(part)
            found: list[T] = []
            if fault is None:
                try:
                    found = unspooled(path, spooled)
                except JobError as error:  # every rank raises it
                    fault = self._as_error(error)
            return found if self._agree(fault) else None  # all have mapped the file once they agree

    def from_first(self, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0; return its result on every rank. Raises its error everywhere, as ``read`` does."""
        if self._world == 1:
            return make()
        box: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                box[0] = make()
            except Exception as error:
                box[1] = self._as_error(error)
        dist.broadcast_object_list(box, 0)
        heartbeat.beat()
        if isinstance(box[1], tuple):
            raise box[1][0](box[1][1])
        return box[0]  # type: ignore[no-any-return]

    def _messages(
        self, parts: Callable[[], Iterable[T]], stopping: Callable[[], bool], nbytes: Callable[[], int], spool: Spool
    ) -> Iterator[tuple[Spooled | None, Fault, str | None]]:
        """(part, None, None) for each, then None, what ended it, and the path of the file with the arrays."""
        fault: Fault = None
        try:
            spool.reserve(nbytes())
            for part in parts():
                if stopping():
                    fault = STOPPED
                    break
                spooled = spool.add(part)
                del part  # before the next one is read
                yield spooled, None, None
        except Exception as error:  # every rank raises it
            fault = self._as_error(error)
        yield None, fault, spool.path

    def _as_error(self, error: Exception) -> Fault:
        if isinstance(error, MegarlError):
            return type(error), str(error)
        log.exception("reading the store failed")
        return JobError, f"trainer rank {self._reader}, which reads the store for its node, failed: {describe(error)}"

    def _broadcast(self, message: Any) -> Any:
        """The reader's message, on all ranks of the node."""
        box = [message]
        dist.broadcast_object_list(box, self._reader, self._group)
        return box[0]

    def _agree(self, fault: Fault) -> bool:
        """Nodes agree; False where some reader stopped. Raises the first error."""
        everyone: list[Fault] = [None] * self._world
        dist.all_gather_object(everyone, fault)
        for each in everyone:
            if isinstance(each, tuple):
                raise each[0](each[1])
        return STOPPED not in everyone


class RolloutReader:
    """Reads rollouts and expert experiences from the store, the same on every rank."""

    def __init__(self, reader: NodeReader, store: Store, stopping: Callable[[], bool]) -> None:
        self._reader = reader
        self._store = store
        self._stopping = stopping

    def take(self, choose: Callable[[], Sequence[str]]) -> list[Trajectory] | None:
        """Trajectories of the groups that ``choose`` returns on rank 0, in its order; None on every rank when the job
        is asked to stop."""
        store, chosen = self._store, self._reader.from_first(choose)

        def parts() -> Iterator[list[Trajectory]]:
            return (store.groups.read(part) for part in store.groups.parts(chosen))

        found = self._reader.read(parts, self._stopping, lambda: sum(store.groups.array_bytes(chosen).values()))
        place = {group_id: number for number, group_id in enumerate(chosen)}
        read = None if found is None else [trajectory for part in found for trajectory in part]
        return None if read is None else sorted(read, key=lambda trajectory: place[trajectory.group_id])

    def replayed(self, choose: Callable[[], Sequence[Replayed]]) -> list[tuple[Replayed, list[Trajectory]]] | None:
        """Groups that ``choose`` draws, in its order, with their trajectories; None on every rank when the job is asked
        to stop. Only readers call ``choose``."""
        store, chosen = self._store, cache(lambda: {group.group_id: group for group in choose()})

        def parts() -> Iterator[list[tuple[Replayed, list[Trajectory]]]]:
            for part in store.groups.parts(list(chosen())):
                read = {group[0].group_id: group for group in by_group(store.groups.read(part))}
                yield [(chosen()[group_id], read[group_id]) for group_id in part]

        found = self._reader.read(parts, self._stopping, lambda: sum(store.groups.array_bytes(list(chosen())).values()))
        return None if found is None else [group for part in found for group in part]

    def images(self, trajectories: Iterable[Trajectory]) -> dict[str, bytes]:
        """Digest -> file of each image of their turns."""
        shown = [trajectory for trajectory in trajectories if any(turn.images for turn in trajectory.turns)]
        tasks = sorted({trajectory.task_id for trajectory in shown})
        groups = sorted({trajectory.group_id for trajectory in shown})

        def parts() -> Iterator[dict[str, bytes]]:
            for start in range(0, len(tasks), IMAGES_OF):
                found = self._store.tasks.images(tasks[start : start + IMAGES_OF])
                yield {file_digest(file): file for files in found.values() for file in files}
            for group in groups:
                yield self._store.groups.images([group])

        found = self._reader.read(parts)
        assert found is not None, "nothing here looks at the stop request"
        return {digest: file for part in found for digest, file in part.items()}

    def data_sources(self, trajectories: Iterable[Trajectory]) -> dict[str, str]:
        """Task id -> ``data_source`` of the tasks of trajectories."""
        tasks = sorted({trajectory.task_id for trajectory in trajectories})

        def parts() -> Iterator[dict[str, str]]:
            found = self._store.selection.tasks_named(tasks)
            yield {task_id: task.data_source for task_id, task in found.items()}

        found = self._reader.read(parts)
        assert found is not None, "nothing here looks at the stop request"
        return {task_id: source for part in found for task_id, source in part.items()}

    def metrics(self, rollouts: Callable[[], Sequence[str]]) -> dict[str, float]:
        """Metrics of rollouts, as their explorers measured them, summed. Only readers call ``rollouts``."""
        found = self._reader.read(lambda: [self._store.rollouts.metrics(rollout_id) for rollout_id in rollouts()])
        assert found is not None, "nothing here looks at the stop request"
        return {name: sum(metrics.get(name, 0.0) for metrics in found) for metrics in found for name in metrics}

    def version_steps(self, versions: Sequence[WeightsVersion]) -> dict[WeightsVersion, int]:
        """Steps of training in ``versions``."""
        found = self._reader.read(lambda: [self._store.pacing.version_steps(versions)])
        assert found is not None, "nothing here looks at the stop request"
        return found[0]

    def demonstrations(
        self, tokenizer: ChatTokenizer, expand: Expand | None = None, *, teacher: bool = False
    ) -> list[ExpertRow]:
        """All expert experiences as tokens, in the store's order.

        Args:
            expand: Gives a prompt a placeholder for each vector of its images; None where the model takes none.
            teacher: With log-probs, where a row has them.
        """

        def parts() -> Iterator[list[ExpertRow]]:
            for part in self._store.experts.read():
                tasks = [without_inline_images(expert.task) for expert in part]
                pairs = encode_demonstrations(tasks, tokenizer)
                logp = [expert.teacher_logp if teacher else None for expert in part]
                yield [
                    ExpertRow(prompt if expand is None else expand(prompt, task.images), response, own, task.images)
                    for task, (prompt, response), own in zip(tasks, pairs, logp, strict=True)
                ]

        found = self._reader.read(parts)
        assert found is not None, "nothing here looks at the stop request"
        return [row for part in found for row in part]
