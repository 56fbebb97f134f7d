"""Arrays in a file without a name: the same values for whoever maps it, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.core.errors import DiskFullError, JobError
from megarl.train.rollout.reading import ALIGNMENT, Spool, unspooled
from tests.disks import small_disk

WRITER = """
import signal
import numpy as np
from megarl.train.rollout.reading import Spool
spool = Spool()
part = spool.add({"ids": np.arange(100_000)})
print(spool.path, part.pickled.hex(), part.places[0][1], flush=True)
signal.pause()
"""
"""A reader that is killed after a part."""


def parts() -> list[Any]:
    """Objects with arrays of every kind that trajectories have, of lengths that are no multiple of the alignment."""
    ids = np.arange(1000, dtype=np.int32)
    routing = np.arange(7 * 3 * 2, dtype=np.int8).reshape(7, 3, 2)
    return [
        {"ids": ids[3:20], "same": ids[3:20], "name": "ä"},
        [routing[1:4], np.empty(0, np.float32), np.linspace(0, 1, 11, dtype=np.float32)],
        "no array",
        routing[:, 1:],  # not contiguous: it is in the message
    ]


def test_arrays_come_back_as_they_were_and_lie_in_the_file() -> None:
    spool = Spool()
    spooled = [spool.add(part) for part in parts()]
    first, second, text, strided = unspooled(spool.path, spooled)
    spool.close()
    wanted = parts()
    pairs = [(first["ids"], wanted[0]["ids"]), *zip(second, wanted[1], strict=True), (strided, wanted[3])]
    assert [(a.dtype, a.shape, a.tobytes()) for a, _ in pairs] == [(b.dtype, b.shape, b.tobytes()) for _, b in pairs]
    assert first["name"] == "ä" and text == "no array"
    starts = [start for part in spooled for start, _ in part.places]
    assert len(starts) == 5 and not any(start % ALIGNMENT for start in starts)
    with pytest.raises(ValueError, match="read-only"):
        first["ids"][0] = 1


def test_nothing_is_made_for_objects_without_arrays() -> None:
    spool = Spool()
    spooled = [spool.add({"seconds": 2.0})]
    assert spool.path is None and unspooled(None, spooled) == [{"seconds": 2.0}]


def test_arrays_that_are_all_empty_come_back() -> None:
    spool = Spool()
    spooled = [spool.add(np.empty((0, 4), np.int16))]
    assert unspooled(spool.path, spooled)[0].shape == (0, 4)
    spool.close()


def test_a_reader_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    from megarl.train.rollout.reading import Spooled

    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER], env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    path, pickled, nbytes = writer.stdout.readline().split()
    [found] = unspooled(path, [Spooled(bytes.fromhex(pickled), [(0, int(nbytes))])])
    assert os.readlink(path).startswith(str(tmp_path))
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    assert os.listdir(tmp_path) == []
    assert np.array_equal(found["ids"], np.arange(100_000)), "who has mapped the file keeps it"
    with pytest.raises(JobError, match="cannot be mapped"):
        unspooled(path, [])


def test_a_full_disk_names_the_folder_and_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda buffering: open("/dev/full", "wb", buffering))  # noqa: SIM115
    spool = Spool()
    with pytest.raises(DiskFullError, match=f"^80 bytes .*{tmp_path} .*No space left.*TMPDIR"):
        spool.add(np.arange(10))
    spool.close()


def test_a_small_disk_is_known_before_the_first_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "small", "1m") as place:
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        with closing(Spool()) as spool:
            spool.reserve(2**19)
            spooled = spool.add(np.arange(2**16))  # all that was taken
            [found] = unspooled(spool.path, [spooled])
            assert np.array_equal(found, np.arange(2**16))
            with pytest.raises(DiskFullError, match=rf"^1,048,576 bytes .* to {place} .*are free .*TMPDIR"):
                spool.add(np.arange(2**17))
            del found
        with closing(Spool()) as spool, pytest.raises(DiskFullError, match=r"^1,048,577 bytes .*No space left.*TMPDIR"):
            spool.reserve(2**20 + 1)
        with closing(Spool()) as spool:
            spool.reserve(2**20)  # nothing is left of those before


def test_a_folder_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(JobError, match="gone.*TMPDIR"):
        Spool().add(np.arange(10))
