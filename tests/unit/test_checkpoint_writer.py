"""The process that writes checkpoints: copies, failures, and that it never outlives its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.weights.checkpoint.training import writer
from megarl.weights.checkpoint.training.writer import Writer, of_process


@pytest.fixture(scope="module")
def shared() -> Iterator[Writer]:
    writer = Writer()
    yield writer
    writer.kill()


@pytest.fixture
def own() -> Iterator[Writer]:
    writer = Writer()
    yield writer
    writer.kill()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def save_each(tensors: list[torch.Tensor], folder: Path, wait_for: Path | None = None) -> list[int]:
    while wait_for is not None and not wait_for.exists():
        time.sleep(0.01)
    sizes = []
    for i, tensor in enumerate(tensors):
        torch.save(tensor, folder / str(i))
        sizes.append(tensor.untyped_storage().nbytes())
    return sizes


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


@settings(max_examples=30)
@given(
    shapes=st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES), st.booleans()), max_size=6
    )
)
def test_it_gets_every_tensor_to_the_bit_and_alone(
    shared: Writer, tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[list[int], torch.dtype, bool]]
) -> None:
    """Whatever its type, shape and strides; and not the storage of all others with it."""
    folder = tmp_path_factory.mktemp("tensors")
    tensors = [torch.randint(0, 2, shape).to(dtype) for shape, dtype, _ in shapes]
    tensors = [
        t.transpose(0, 1) if turned and t.dim() > 1 else t for t, (_, _, turned) in zip(tensors, shapes, strict=True)
    ]
    sizes = shared.begin(save_each, tensors, folder).result()
    assert sizes == [t.nbytes for t in tensors]
    for i, want in enumerate(tensors):
        got = torch.load(folder / str(i))
        assert got.dtype == want.dtype and got.shape == want.shape and got.float().equal(want.float())


def test_it_has_tensors_as_they_were_and_takes_larger_ones_later(own: Writer, tmp_path: Path) -> None:
    for count in (10, 3, 500_000):
        numbers, go = torch.arange(count), tmp_path / f"go{count}"
        task = own.begin(save_each, [numbers, -numbers], tmp_path, go)
        assert not task.done
        numbers.zero_()
        go.touch()
        task.result()
        assert torch.load(tmp_path / "0").equal(torch.arange(count)) and torch.load(tmp_path / "1").equal(
            -torch.arange(count)
        )


def much(tensors: list[torch.Tensor], data: bytes) -> bytes:
    return data * 2


def test_what_is_larger_than_a_pipe_does_not_block_it(own: Writer) -> None:
    task = own.begin(much, [], b"x" * 2**20)
    until(lambda: task.done)
    assert len(task.result()) == 2**21


def test_one_that_reads_nothing_is_killed(own: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SEND_S", 0.3)
    os.kill(own.process.pid or 0, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match="ended with status -9"):
        own.begin(much, [], b"x" * 2**22).result()


def absent(tensors: list[torch.Tensor], path: Path) -> None:
    path.write_text("")


def test_what_it_raises_is_raised_here_and_it_goes_on(own: Writer, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing/file"):
        own.begin(absent, [], tmp_path / "missing" / "file").result()
    assert own.begin(much, [], b"x").result() == b"xx"


def ends(tensors: list[torch.Tensor]) -> None:
    os._exit(3)


def sleeps(tensors: list[torch.Tensor]) -> None:
    time.sleep(600)


@pytest.mark.parametrize(("work", "status"), [(ends, 3), (sleeps, -9)])
def test_one_that_dies_is_named(own: Writer, work: Callable[[list[torch.Tensor]], None], status: int) -> None:
    task = own.begin(work, [])
    if status < 0:
        task.kill()
    with pytest.raises(RuntimeError, match=f"ended with status {status}"):
        task.result()
    assert task.done and not own.alive
    later = own.begin(sleeps, [])
    with pytest.raises(RuntimeError, match=f"ended with status {status}"):
        later.result()


def test_there_is_one_for_each_process_and_another_after_its_death() -> None:
    first = of_process()
    assert of_process() is first
    first.kill()
    second = of_process()
    assert second is not first and second.begin(much, [], b"x").result() == b"xx"
    second.kill()


def test_memory_that_is_not_there_is_said_by_the_task(own: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, start: int, size: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    task = own.begin(much, [torch.zeros(1000)], b"x")
    assert task.done
    with pytest.raises(RuntimeError, match="no memory for a copy of 4,032 bytes .*Cannot allocate memory"):
        task.result()


def test_it_holds_nothing_open_and_ignores_what_asks_a_job_to_end() -> None:
    here, there = socket.socketpair()
    writer = Writer()
    there.close()
    here.settimeout(60)
    assert here.recv(1) == b"", "the child still holds the other end"
    pid = writer.process.pid
    assert pid is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        os.kill(pid, number)
    assert writer.begin(much, [], b"x").result() == b"xx"
    writer.kill()


def test_a_dead_one_gives_back_its_memory() -> None:
    first = of_process()
    first.begin(much, [torch.zeros(1000)], b"x").result()
    first.process.kill()
    first.process.join()
    gone = weakref.ref(first)
    del first
    assert of_process().alive and gone() is None
    of_process().kill()


def test_it_dies_with_its_parent() -> None:
    receive, send = multiprocessing.Pipe(duplex=False)
    parent = os.fork()
    if parent == 0:
        writer = Writer()
        writer.begin(sleeps, [])
        send.send(writer.process.pid)
        time.sleep(600)
        os._exit(0)
    pid = receive.recv()
    os.kill(parent, 9)
    os.waitpid(parent, 0)
    until(lambda: not _alive(pid))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
