"""Files in memory that other processes open by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.core.processes.memory_files import MemoryFiles, names_in, open_file

OTHER = """
import os, sys
from megarl.core.processes.memory_files import open_file

descriptor = open_file(sys.argv[1], "a")
print(os.read(descriptor, 9).decode())
os.pwrite(descriptor, b"theirs", 0)
"""


def test_another_process_opens_the_same_file_and_none_is_left() -> None:
    files = MemoryFiles()
    first = open_file(files.address, "a")
    os.write(first, b"ours")
    command = [sys.executable, "-c", OTHER, files.address]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "ours\n"
    assert os.pread(first, 9, 0) == b"theirs"
    other = open_file(files.address, "b")
    assert os.pread(other, 9, 0) == b""
    assert names_in(files.address) == ["a", "b"]
    files.close()
    with pytest.raises(ConnectionRefusedError):
        open_file(files.address, "a")
    for descriptor in (first, other):
        os.close(descriptor)


def test_files_of_a_folder_stay(tmp_path: Path) -> None:
    descriptor = open_file(str(tmp_path), "a")
    os.pwrite(descriptor, b"ours", 0)
    os.close(descriptor)
    assert (tmp_path / "a").read_bytes() == b"ours"
    assert names_in(str(tmp_path)) == ["a"]
    with pytest.raises(FileNotFoundError):
        open_file(str(tmp_path / "none"), "a")
