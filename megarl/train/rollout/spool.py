"""Objects with one copy of their arrays per node: the node's reader writes the arrays to a file, and ranks map it.

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
import mmap
import os
import pickle
import platform
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

from megarl.core.errors import DiskFullError, JobError
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
