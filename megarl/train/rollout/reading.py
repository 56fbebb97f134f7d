"""Reading the store: rank 0 reads rows without arrays for all ranks, each node reads arrays once for its ranks.

Pickle (protocol 5) separates arrays from the rest: arrays go to the file unchanged, the rest is a message. It is short,
except for image files, which are bytes and stay in the message.

The file has no name (``O_TMPFILE``), so that nothing remains however the processes end. Ranks open it through
``/proc``, as engine workers open the memory of the weight sync. It is in the temporary folder, not in /dev/shm: pages
of a file on disk can be written out when memory is short, and containers often have 64 MiB of /dev/shm. If the total
size is known, the disk space is reserved before the first array. The file is written by calls, not through a mapping: a
full disk is then an error instead of a SIGBUS.
"""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import os
import pickle
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist

from megarl.buffer.experience import by_group
from megarl.buffer.order.draws import ExpertRow
from megarl.buffer.order.group_choice import Replayed
from megarl.buffer.store import PART_BYTES, OutlineRow, Store, is_outline, outlines_of, with_arrays
from megarl.config.derived import teacher_of
from megarl.config.schema import TeacherConfig
from megarl.core.errors import DiskFullError, JobError, MegarlError, describe
from megarl.core.processes import heartbeat
from megarl.core.schema import Trajectory, WeightsVersion, file_digest
from megarl.engines.sync.shared import machine
from megarl.tasks import ChatTokenizer, encode_demonstrations
from megarl.tasks.image_rows import without_inline_images
from megarl.weights.checkpoint.training.disk_space import is_full, size

ALIGNMENT = 16
"""Bytes; each array starts at a multiple of this, like arrays that numpy allocates."""


class Spooled(NamedTuple):
    """An object without its arrays."""

    pickled: bytes
    places: list[tuple[int, int]]
    """(start, bytes) of each array in the file."""


class Spool:
    """The reader's side. The file exists from the first array until ``close``; ranks keep what they have mapped."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._end = 0

    @property
    def path(self) -> str | None:
        """Path of the file for other processes of this machine; None if no array was written."""
        return None if self._file is None else f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def reserve(self, nbytes: int) -> None:
        """Reserve disk space for about ``nbytes`` of arrays. Raises as ``add``."""
        if nbytes:
            with self._naming(nbytes):
                file = self._opened()
                if 0 < _free(file) < nbytes:  # else others see a full disk until the call fails; 0 may be unknown
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.posix_fallocate(file, 0, nbytes)

    def add(self, content: Any) -> Spooled:
        """Write the arrays of an object. Raises DiskFullError, or JobError if the folder cannot be written."""
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
        arrays = [buffer.raw() for buffer in buffers]
        with self._naming(sum(array.nbytes for array in arrays)):
            return Spooled(pickled, [self._write(array) for array in arrays])

    @contextmanager
    def _naming(self, nbytes: int) -> Iterator[None]:
        """Add the folder and its free space to errors while writing ``nbytes``."""
        try:
            yield
        except OSError as error:
            folder = tempfile.tempdir or "a temporary folder"  # None if no usable folder was found
            free = "" if self._file is None else f", where {size(_free(self._file.fileno()))} are free"
            raise (DiskFullError if is_full(error) else JobError)(
                f"{size(nbytes)} of a step's trajectories cannot be written to {folder} of {platform.node()}{free} "
                f"({error}); make room there, or set TMPDIR to another folder of this machine"
            ) from error

    def _opened(self) -> int:
        """Return the file's descriptor."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by ``close``
        return self._file.fileno()

    def _write(self, array: memoryview) -> tuple[int, int]:
        file, start = self._opened(), self._end
        place = start, array.nbytes
        while array:
            written = os.pwrite(file, array, start)
            array, start = array[written:], start + written
        self._end = start + -start % ALIGNMENT
        return place

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _free(file: int) -> int:
    """Return the free bytes of the disk with an open file."""
    found = os.fstatvfs(file)
    return found.f_bavail * found.f_frsize


def unspooled(path: str | None, parts: Sequence[Spooled]) -> list[Any]:
    """Return the objects; their arrays are read-only views of one mapping of the file.

    Raises JobError if the file cannot be mapped.
    """
    mapped = memoryview(b"" if path is None else _mapped(path))
    return [
        pickle.loads(part.pickled, buffers=[mapped[start : start + nbytes] for start, nbytes in part.places])
        for part in parts
    ]


def _mapped(path: str) -> mmap.mmap | bytes:
    try:
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            return mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ) if length else b""
    except OSError as error:
        raise JobError(
            f"the trajectories that this node's reader has written cannot be mapped from {path} ({error}); ranks of a "
            "node must see each other's /proc/<pid>/fd, and TMPDIR must be a folder whose files can be mapped"
        ) from error


log = logging.getLogger(__name__)
T = TypeVar("T")
STOPPED = "stopped"
Expand = Callable[[np.ndarray, Sequence[bytes]], np.ndarray]
"""(token ids of a prompt, its image files) -> the ids with a placeholder for each image vector."""
IMAGES_OF = 4
"""Number of tasks read together for their images."""
Fault = str | tuple[type[MegarlError], str] | None
"""Reason why reading ended: None at the end of the data, STOPPED, or (type, text) of an error."""


class NodeReader:
    """A rank's place in its node. Every rank makes one, and all ranks call ``read`` together.

    Args:
        timeout_s: Timeout for one part; longer than the reader's timeout for an unavailable store.
    """

    def __init__(self, timeout_s: float = 600.0) -> None:
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._group: dist.ProcessGroup | None = None
        self._reader = 0
        if self._world == 1:
            return
        nodes: list[str] = [""] * self._world
        dist.all_gather_object(nodes, machine())
        for node in dict.fromkeys(nodes):  # all ranks count all groups, in the same order; members alone wait
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
        """Return all parts, the same on every rank; only readers call ``parts``. Return None on every rank if
        ``stopping()`` is true on some reader.

        ``nbytes``: approximate bytes of all arrays; disk space for them is reserved before the first part is read.

        With several ranks, arrays are read-only: a node has one copy. The reader holds a part in memory until the
        part's arrays are written.

        Raises an error of ``parts`` on every rank; an error of another library as JobError.
        """
        if self._world == 1:
            return list(parts())
        with closing(Spool()) as spool:
            spooled: list[Spooled] = []
            for message in self._messages(parts, stopping, nbytes, spool) if self.reads else itertools.repeat(None):
                part, fault, path = self.broadcast(message)
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
            return found if self._agree(fault) else None  # all ranks have mapped the file when they agree

    def of_node(self, value: T) -> list[T]:
        """Return ``value`` of each rank of the node, in the order of the ranks. The node's ranks call it together."""
        if self._world == 1:
            return [value]
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, value, group=self._group)
        return found

    def from_first(self, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0; return its result, or raise its error as ``read`` does, on every rank."""
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
        """Yield (part, None, None) for each part; then (None, reason for the end, path of the file with the arrays)."""
        fault: Fault = None
        try:
            spool.reserve(nbytes())
            for part in parts():
                if stopping():
                    fault = STOPPED
                    break
                spooled = spool.add(part)
                del part  # before the next part is read
                yield spooled, None, None
        except Exception as error:  # every rank raises it
            fault = self._as_error(error)
        yield None, fault, spool.path

    def _as_error(self, error: Exception) -> Fault:
        if isinstance(error, MegarlError):
            return type(error), str(error)
        log.exception("reading the store failed")
        return JobError, f"trainer rank {self._reader}, which reads the store for its node, failed: {describe(error)}"

    def broadcast(self, message: Any) -> Any:
        """Return the reader's message on all ranks of the node."""
        box = [message]
        dist.broadcast_object_list(box, self._reader, self._group)
        return box[0]

    def _agree(self, fault: Fault) -> bool:
        """Agree among all nodes; return False if a reader stopped. Raises the first error."""
        everyone: list[Fault] = [None] * self._world
        dist.all_gather_object(everyone, fault)
        for each in everyone:
            if isinstance(each, tuple):
                raise each[0](each[1])
        return STOPPED not in everyone


class RolloutReader:
    """Reads rollouts and expert experiences from the store; returns the same on every rank.

    Args:
        whole: Every node reads all arrays, because ``buffer.operators`` read texts of whole groups.
    """

    def __init__(self, reader: NodeReader, store: Store, stopping: Callable[[], bool], *, whole: bool = False) -> None:
        self._reader = reader
        self._store = store
        self._stopping = stopping
        self._whole = whole

    def take(self, choose: Callable[[], Sequence[str]]) -> list[Trajectory] | None:
        """Return the trajectories of the groups that ``choose`` returns on rank 0, in that order, without arrays
        (``with_arrays``); None on every rank after a request to stop."""
        found = self.replayed(lambda: [Replayed(group_id, 0, 0) for group_id in choose()])
        return None if found is None else [trajectory for _, group in found for trajectory in group]

    def replayed(self, choose: Callable[[], Sequence[Replayed]]) -> list[tuple[Replayed, list[Trajectory]]] | None:
        """Return the groups that ``choose`` draws on rank 0, in that order, with their trajectories; otherwise as
        ``take``."""

        def read() -> tuple[list[Replayed], list[OutlineRow]] | None:
            if self._stopping():
                return None
            chosen = list(choose())
            return chosen, self._store.groups.outline_rows([group.group_id for group in chosen])

        found = self._reader.from_first(read)
        if found is None:
            return None
        chosen, rows = found
        outlines = outlines_of(rows)
        groups = {
            group[0].group_id: group for group in by_group(self.with_arrays(outlines) if self._whole else outlines)
        }
        return [(group, groups[group.group_id]) for group in chosen]

    def with_arrays(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return trajectories with their arrays, in the same order; those that have them are unchanged. Every rank
        calls it, with the trajectories that it needs. Arrays of greedy answers are never read.

        With several ranks, arrays are read-only: a node has one copy.
        """
        wanted = {(each.group_id, each.index): nbytes_of(each) for each in trajectories if is_outline(each)}
        sizes = {key: size for of_rank in self._reader.of_node(wanted) for key, size in of_rank.items()}
        parts = parts_of(dict(sorted(sizes.items())), PART_BYTES)
        found = self._reader.read(lambda: map(self._store.groups.arrays, parts), nbytes=lambda: sum(sizes.values()))
        assert found is not None, "nothing here looks at the stop request"
        arrays = {key: tensors for part in found for key, tensors in part.items()}
        return [with_arrays(e, arrays[e.group_id, e.index]) if is_outline(e) else e for e in trajectories]

    def images(self, trajectories: Iterable[Trajectory]) -> dict[str, bytes]:
        """Return digest -> file for each image in the trajectories' turns."""
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
        named = self._store.selection.tasks_named
        return self._reader.from_first(lambda: {name: task.data_source for name, task in named(tasks).items()})

    def metrics(self, rollouts: Callable[[], Sequence[str]]) -> dict[str, float]:
        """Return the sums of the explorers' metrics over rollouts. Only rank 0 calls ``rollouts``."""
        found = self._reader.from_first(lambda: [self._store.rollouts.metrics(name) for name in rollouts()])
        return {name: sum(metrics.get(name, 0.0) for metrics in found) for metrics in found for name in metrics}

    def version_steps(self, versions: Sequence[WeightsVersion]) -> dict[WeightsVersion, int]:
        """Return version -> number of training steps in its weights."""
        return self._reader.from_first(lambda: self._store.pacing.version_steps(versions))

    def demonstrations(
        self,
        tokenizer: ChatTokenizer,
        expand: Expand | None = None,
        *,
        teacher: bool = False,
        teachers: Mapping[str, TeacherConfig] = {},
    ) -> list[ExpertRow]:
        """Return all expert experiences as tokens, in the store's order.

        Args:
            expand: Inserts a placeholder for each image vector into a prompt; None for a text model.
            teacher: Include the teacher's log-probs of rows that have them.
            teachers: Each row gets one of them by its ``data_source``.
        """

        def parts() -> Iterator[list[ExpertRow]]:
            for part in self._store.experts.read():
                tasks = [without_inline_images(expert.task) for expert in part]
                pairs = encode_demonstrations(tasks, tokenizer)
                logp = [expert.teacher_logp if teacher else None for expert in part]
                yield [
                    ExpertRow(
                        prompt if expand is None else expand(prompt, task.images),
                        response,
                        own,
                        task.images,
                        teacher_of(teachers, task.data_source),
                    )
                    for task, (prompt, response), own in zip(tasks, pairs, logp, strict=True)
                ]

        found = self._reader.read(parts)
        assert found is not None, "nothing here looks at the stop request"
        return [row for part in found for row in part]


def nbytes_of(trajectory: Trajectory) -> int:
    """Return the bytes of a trajectory's arrays, also of those that are not read."""
    scores = trajectory.teacher_scores
    arrays = [array for turn in trajectory.turns for array in (turn.token_ids, turn.logp, turn.routing)]
    arrays += [] if scores is None else [scores.logp, scores.ids, scores.logps]
    return sum(array.nbytes for array in arrays if array is not None)


def parts_of(sizes: Mapping[tuple[str, int], int], nbytes: int) -> list[dict[str, list[int]]]:
    """Split trajectories, (group id, index) -> bytes, into parts of at most ``nbytes``, at least one trajectory each;
    return the indices by group of each part."""
    parts: list[dict[str, list[int]]] = []
    room = 0
    for (group_id, index), needed in sizes.items():
        if not parts or needed > room:
            parts.append({})
            room = nbytes
        parts[-1].setdefault(group_id, []).append(index)
        room -= needed
    return parts
