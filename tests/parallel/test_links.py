"""Real processes in a weight link: which sockets they have, and how they learn of a partner's death."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megarl.run.process import ports
from tests.parallel.grid import run_grid

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from megarl.engines.sync.link import Link

TRAINERS, WORKERS = 16, 4
PARTNERS = {**{t: [t % WORKERS] for t in range(TRAINERS - 1)}, TRAINERS - 1: []}
"""Trainer rank -> workers that it sends to; the last sends nothing."""


def sockets() -> int:
    """Number of sockets that this process has open."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # gloo's threads close some meanwhile
            count += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    return count


def joined(
    rank: int, port: int, *, trainers: int, workers: int, partners: list[int], timeout_s: float = 20.0
) -> tuple[TCPStore, Link]:
    """This rank's store and link, in which trainer rank 0 serves the store."""
    from megarl.engines.sync.link import LinkAddress, join, open_store

    address = LinkAddress("127.0.0.1", port, "1/0", trainers + workers, timeout_s)
    store = open_store(address, master=rank == 0)
    return store, join(store, address, rank, trainers if rank < trainers else 0, partners)


def exchange(rank: int, port: int) -> tuple[int, int]:
    """Number of sockets after each trainer rank has sent its number; sum of the numbers that came here."""
    import torch

    from megarl.engines.sync.link import LinkAddress, open_store

    before, total, is_trainer = sockets(), 0, rank < TRAINERS
    senders = [t for t, workers in PARTNERS.items() if rank - TRAINERS in workers]
    mine = PARTNERS[rank] if is_trainer else senders
    store, link = joined(rank, port, trainers=TRAINERS, workers=WORKERS, partners=mine)
    if not is_trainer:
        del store  # as the engine's workers do
    for other in mine:
        if is_trainer:
            link.isend(torch.tensor([rank], dtype=torch.uint8), other).wait()
        else:
            total += int(link.irecv(1, other, lambda: torch.empty(1, dtype=torch.uint8)).wait())
    with pytest.raises(AssertionError, match="no partner in the plan"):
        link.isend(torch.zeros(1), TRAINERS + WORKERS)
    count = sockets() - before
    if not is_trainer:
        store = open_store(LinkAddress("127.0.0.1", port, "", 0, 20.0), master=False)
    if store.add("measured", 1) == TRAINERS + WORKERS:
        store.set("end", "")
    store.wait(["end"])
    store.add("gone", 1)
    while rank == 0 and store.add("gone", 0) < TRAINERS + WORKERS:
        time.sleep(0.01)
    return count, total


def test_only_partners_are_connected() -> None:
    """A full mesh has 19 connections a rank."""
    [port] = ports.choose("127.0.0.1", 1, None)
    found = run_grid(TRAINERS + WORKERS, exchange, port)
    listening, store = 1, 1
    (first, _), *others = found[:TRAINERS]
    # It serves the store to the trainer ranks; workers have left, or do when it counts.
    assert listening + store + 1 + TRAINERS + 1 <= first <= listening + store + 1 + TRAINERS + 1 + WORKERS
    assert [count for count, _ in others] == [*[listening + store + 1] * (TRAINERS - 2), listening + store]
    assert [count for count, _ in found[TRAINERS:]] == [listening + n for n in (4, 4, 4, 3)]
    assert [total for _, total in found[TRAINERS:]] == [24, 28, 32, 21]


def partner(rank: int, port: int, end: str) -> tuple[float, str]:
    """Seconds until the trainer rank learns of the end of its worker, which has sent nothing yet, and the error."""
    import torch

    from megarl.engines.sync.link import LinkAddress, open_store

    if rank == 0:
        store, link = joined(0, port, trainers=1, workers=1, partners=[0])
        store.set("ready", "")
        start = time.monotonic()
        with pytest.raises(RuntimeError) as raised:
            link.irecv(1, 0, lambda: torch.empty(1, dtype=torch.uint8)).wait()
        took = time.monotonic() - start
        store.set("noticed", "")
        store.wait(["gone"])
        return took, str(raised.value)
    if (worker := os.fork()) == 0:
        store, link = joined(1, port, trainers=1, workers=1, partners=[0])
        held = link.group if end == "closed, its group held" else None
        if end != "killed":
            link.close()
        time.sleep(60.0)
        del held
    store = open_store(LinkAddress("127.0.0.1", port, "", 0, 20.0), master=False)
    store.wait(["ready"])
    if end != "killed":
        store.wait(["noticed"])
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    store.set("gone", "")
    return 0.0, ""


@pytest.mark.parametrize("end", ["killed", "closed", "closed, its group held"])
def test_a_partners_end_is_noticed_at_once(end: str) -> None:
    """Before its first message, too: gloo's pairs that are not connected yet would wait for it for five timeouts.
    Frames of an error may hold a group that is closed."""
    [port] = ports.choose("127.0.0.1", 1, None)
    (took, error), _ = run_grid(2, partner, port, end)
    assert took < 20.0 and (  # its timeout
        "Connection closed by peer" in error or "Connection reset by peer" in error
    )


def lacking(rank: int, port: int, folder: Path) -> str:
    """Error of a rank that joins a link which three ranks never join."""
    from torch import distributed as dist

    def meet(where: str) -> None:
        (folder / f"{where} {rank}").touch()
        while len([*folder.glob(f"{where} *")]) < 3:
            time.sleep(0.01)

    meet("begins")
    with pytest.raises(dist.DistError) as raised:
        joined(rank, port, trainers=3, workers=3, partners=[0], timeout_s=4.0)
    meet("ends")  # rank 0 serves the store
    return str(raised.value)


def test_ranks_that_do_not_join_are_named(tmp_path: Path) -> None:
    [port] = ports.choose("127.0.0.1", 1, None)
    for text in run_grid(3, lacking, port, tmp_path):
        assert "of 6 ranks of link 1/0 these did not come in 4 s: 3, 4, 5" in text


def refused(rank: int, port: int) -> str:
    """The sender's error when the worker closes the link after its first message, while the next is arriving and
    another one waits."""
    import torch

    store, link = joined(rank, port, trainers=1, workers=1, partners=[0])
    size, said, works = 32 << 20, "", []
    if rank == 0:
        try:
            works += [link.isend(torch.ones(size, dtype=torch.uint8), 0) for _ in range(4)]
            while works:
                works.pop(0).wait()
        except RuntimeError as error:
            said = str(error)
        works.clear()
    else:
        arrivals = [link.irecv(size, 0, lambda: torch.empty(size, dtype=torch.uint8)) for _ in range(3)]
        arrivals[0].wait()
    link.close()
    if rank == 1:
        arrivals.clear()  # gloo closes the connections now
        store.add("gone", 1)
    while rank == 0 and not store.add("gone", 0):
        time.sleep(0.01)
    return said


def test_a_link_is_closed_while_a_message_arrives() -> None:
    """gloo's destructor would hang, and the sender wait for its timeout."""
    [port] = ports.choose("127.0.0.1", 1, None)
    sender, worker = run_grid(2, refused, port)
    assert sender and "Timed out" not in sender and not worker


def late(rank: int, port: int) -> str:
    """The sender's error when its small message comes after the worker has closed the link, and forgotten what it had
    expected."""
    import torch

    store, link = joined(rank, port, trainers=1, workers=1, partners=[0])
    word, said = torch.ones(1, dtype=torch.uint8), ""
    if rank == 1:
        arrivals = [link.irecv(1, 0, lambda: torch.empty(1, dtype=torch.uint8)) for _ in range(2)]
        link.close()
        del arrivals[0]
        store.set("closed", "")
        store.wait(["sent"])
        time.sleep(0.1)
        arrivals.clear()
        store.add("gone", 1)
        return said
    store.wait(["closed"])
    time.sleep(0.5)  # gloo notices the end of the connection, and no send is under way then
    try:
        link.isend(word, 0).wait()
    except RuntimeError as error:
        said = str(error)
    store.set("sent", "")
    while not store.add("gone", 0):
        time.sleep(0.01)
    return said


def test_a_message_comes_after_a_link_is_closed() -> None:
    """gloo's destructor would never return, in a worker that has refused a sync."""
    [port] = ports.choose("127.0.0.1", 1, None)
    sender, _ = run_grid(2, late, port)
    assert "onnection" in sender and "Timed out" not in sender
