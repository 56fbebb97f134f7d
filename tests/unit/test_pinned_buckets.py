"""Buckets of the weight sync that are registered with CUDA, with a stand-in for its runtime: no GPU is needed."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.engines.sync.shared import HostMemory, SharedMemorySender, memory_file
from megarl.ops import host_memory
from tests.loop.trainers import Sent


class Runtime:
    """Counts what is registered, and knows whether it was mapped when it was unregistered."""

    def __init__(self, refuses: int = 0) -> None:
        self.refuses = refuses
        self.held: dict[int, int] = {}
        self.mapped: list[bool] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.refuses:
            self.held[address] = nbytes
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        self.mapped.append(f"\n{address:x}-" in Path("/proc/self/maps").read_text())
        del self.held[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def sender() -> SharedMemorySender:
    link = SimpleNamespace(isend=lambda message, rank: Sent())
    return SharedMemorySender(link, frozenset({0}), HostMemory(memory_file()))  # type: ignore[arg-type]


def test_buckets_are_registered_once_and_until_the_sender_closes(runtime: Runtime) -> None:
    mine = sender()
    for _ in range(2):
        sizes = [mine.allocate(n).numel() for n in (5000, 10_000)]
        assert sizes == [5000, 10_000] and sorted(runtime.held.values()) == [8192, 12_288]
        mine.finish()
        assert len(runtime.held) == 2 and not runtime.mapped
    mine.close()
    assert not runtime.held and runtime.mapped == [True, True]


def test_a_receiver_opens_a_bucket_once_and_closes_what_a_new_file_replaced(runtime: Runtime) -> None:
    file = memory_file()
    mine, theirs = HostMemory(file), HostMemory(others={3: file})
    first = mine.make(5000)
    name = mine.name(first, 0)
    first.fill_(1)
    opened = theirs.open(3, name)
    mine.rest()
    assert mine.name(mine.make(4000), 0) == name and theirs.open(3, name) is opened  # kept, as it is large enough
    address = opened.data_ptr()
    assert len(runtime.held) == 2 and bool((opened[:5000] == 1).all())
    mine.close()
    second = mine.make(5000)
    second.fill_(2)
    again = theirs.open(3, mine.name(second, 0))
    assert bool((again[:5000] == 2).all()) and bool((opened[:5000] == 1).all())
    assert address not in runtime.held and len(runtime.held) == 2 and mine.name(second, 0) != name
    theirs.close()
    mine.close()
    assert not runtime.held


def test_buckets_of_a_sync_that_failed_are_unregistered(runtime: Runtime) -> None:
    mine = sender()
    mine.allocate(5000)
    mine.close()
    assert not runtime.held and runtime.mapped == [True]


def test_memory_that_cannot_be_registered_is_slower_and_nothing_else(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.refuses = 801
    with caplog.at_level(logging.WARNING, host_memory.__name__):
        mine = sender()
        bucket = mine.allocate(5000)
        bucket.fill_(7)
        mine.finish()
    assert "cannot be registered with CUDA (error 801)" in caplog.text and not runtime.mapped
