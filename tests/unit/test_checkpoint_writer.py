"""The forked process that writes a checkpoint: a snapshot, its failures, and that it never outlives its parent."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from megarl.checkpoint.writer import Writer


def test_it_sees_memory_as_it_was() -> None:
    numbers = list(range(1000))
    receive, send = multiprocessing.Pipe(duplex=False)

    def work() -> int:
        receive.recv()
        return sum(numbers)

    writer = Writer(work)
    assert not writer.done
    numbers.clear()
    send.send("go")
    assert writer.result() == sum(range(1000))


def test_a_result_larger_than_a_pipe_does_not_block_it() -> None:
    writer = Writer(lambda: b"x" * 2**20)
    deadline = time.monotonic() + 60
    while not writer.done and time.monotonic() < deadline:
        time.sleep(0.01)
    assert writer.done and len(writer.result()) == 2**20


def test_what_it_raises_is_raised_here(tmp_path: Path) -> None:
    writer = Writer(lambda: (tmp_path / "missing" / "file").write_text(""))
    with pytest.raises(FileNotFoundError, match="missing/file"):
        writer.result()


@pytest.mark.parametrize("signal_sent", [False, True])
def test_one_that_dies_is_named(signal_sent: bool) -> None:
    writer: Writer[None] = Writer(lambda: time.sleep(600) if signal_sent else os._exit(3))
    if signal_sent:
        writer.kill()
    with pytest.raises(RuntimeError, match=f"ended with status {-9 if signal_sent else 3}"):
        writer.result()
    assert writer.done


def test_it_dies_with_its_parent() -> None:
    receive, send = multiprocessing.Pipe(duplex=False)
    parent = os.fork()
    if parent == 0:
        def work() -> None:
            send.send(os.getpid())
            time.sleep(600)

        writer = Writer(work)
        send.send(f"child {writer._process.pid}")
        time.sleep(600)
        os._exit(0)
    said = {str(receive.recv()), str(receive.recv())}
    (pid,) = (int(text) for text in said if text.isdigit())
    os.kill(parent, 9)
    os.waitpid(parent, 0)
    deadline = time.monotonic() + 60
    while _alive(pid):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
