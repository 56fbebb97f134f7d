"""One rank of each node reads the store; all ranks have the same trajectories and the same error. The arrays lie once a
node."""

from __future__ import annotations

import mmap
import os
import pickle
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.buffer.order.replay import Replayed
from megarl.buffer.store import Store
from megarl.core.errors import DiskFullError, FencedError, JobError, StoreDamagedError
from megarl.core.schema import Trajectory
from tests.parallel.grid import run_grid
from tests.stores import make_task, make_trajectory, request

NODES = ["a", "a", "b", "a"]
"""Of ranks 0 to 3: the readers are 0 and 2."""
GROUPS = 12


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('store')}/store.db"
    store = Store(url)
    store.tasks.add("train", [make_task(i) for i in range(GROUPS)])
    request(store, groups=GROUPS, greedy=True)
    for claim in store.groups.claim("e", GROUPS):
        assert store.groups.put(
            claim, [routed(make_trajectory(claim, i, 5 + claim.position)) for i in claim.indices], {"samples": 2.0}
        )
    store.close()
    return url


def routed(trajectory: Trajectory) -> Trajectory:
    """The trajectory with expert ids of its tokens."""
    *before, last = trajectory.turns
    tokens = sum(map(len, trajectory.turns)) - 1
    ids = np.arange(tokens * 6, dtype=np.int8).reshape(tokens, 3, 2)
    return replace(trajectory, turns=(*before, replace(last, routing=ids)))


def joined(rank: int, nodes: list[str]) -> Any:
    """This rank's reader, in a world of gloo whose ranks lie on these nodes."""
    import torch.distributed as dist

    from megarl.train.rollout.reading import NodeReader

    os.environ["MEGARL_NODE"] = nodes[rank]
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=len(nodes))
    return NodeReader(60.0)


ARRAYS = ("token_ids", "logp", "routing")


def plain(trajectory: Any) -> Any:
    """All that a trajectory holds, in values that pickle alike wherever they come from."""
    turns = [vars(turn) | {name: values(getattr(turn, name)) for name in ARRAYS} for turn in trajectory.turns]
    greedy = None if trajectory.greedy is None else plain(trajectory.greedy)
    return vars(trajectory) | {"turns": turns, "greedy": greedy}


def values(array: np.ndarray | None) -> Any:
    return None if array is None else (str(array.dtype), array.shape, array.tobytes())


def memory_of(array: np.ndarray) -> Any:
    """The object whose memory an array is a view of."""
    base: Any = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return base.obj if isinstance(base, memoryview) else base


def arrays_of(trajectories: list[Trajectory]) -> list[np.ndarray]:
    """Arrays of trajectories and of their greedy answers."""
    every = [*trajectories, *(e.greedy for e in trajectories if e.greedy is not None)]
    found = [getattr(turn, name) for e in every for turn in e.turns for name in ARRAYS]
    return [array for array in found if array is not None]


def rollout(rank: int, nodes: list[str], url: str) -> dict[str, Any]:
    """What a rank has of ``take`` and ``replayed``, and how it came there."""
    from megarl.buffer.store import groups as rows
    from megarl.train.rollout.reading import RolloutReader

    reader, store = joined(rank, nodes), Store(url)
    store.groups.parts = lambda ids: [ids[:5], ids[5:6], ids[6:]]  # type: ignore[method-assign, assignment, misc]
    decoded: list[int] = []
    decode = rows.trajectory_from_row
    rows.trajectory_from_row = lambda row: (decoded.append(len(row.tensors) + len(row.record)), decode(row))[1]  # type: ignore[func-returns-value]
    rollouts = RolloutReader(reader, store, lambda: False)
    found, metrics = rollouts.take(lambda: store.groups.take(GROUPS, step=0)), rollouts.metrics(lambda: ["r0"])
    assert found is not None
    read = sum(decoded)
    groups = list(dict.fromkeys(e.group_id for e in found))
    again = rollouts.replayed(lambda: [Replayed(group, 1, 2) for group in groups[2:4]])
    assert again is not None
    memories = [
        {id(memory): type(memory) for memory in map(memory_of, arrays_of(each))} for each in (found, again[0][1])
    ]
    return {
        "trajectories": pickle.dumps([plain(e) for e in found]),
        "replayed": pickle.dumps([plain(e) for _, group in again for e in group]),
        "metrics": metrics,
        "decoded": read,
        "shared_greedy": len({id(e.greedy) for e in found}) == GROUPS,
        "memories": [list(memory.values()) for memory in memories],
        "writeable": any(array.flags.writeable for array in arrays_of(found)),
    }


FAULTS = ("damaged", "fenced", "driver", "disk", "room", "stop")


def failing(rank: int, folder: str) -> dict[str, Any]:
    """Runs in each rank, fault by fault: what ``read`` raises or returns, where reader 2 meets it after its first
    part; and what lies in the temporary folder or is open there afterwards."""
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    reader = joined(rank, NODES)
    found = {fault: read_with(reader, rank, fault) for fault in FAULTS}
    opened = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists() or path.is_symlink()]
    return found | {"left": os.listdir(folder) + [path for path in opened if path.startswith(folder)]}


def read_with(reader: Any, rank: int, fault: str) -> Any:

    def parts() -> Iterator[np.ndarray]:
        yield np.arange(1000)
        if rank == 2 and fault == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        elif rank == 2 and fault not in ("room", "stop"):
            raise {
                "damaged": StoreDamagedError("row 7"),
                "fenced": FencedError("attempt 2"),
                "driver": KeyError("no such column"),
            }[fault]
        yield np.arange(1000)

    looks = iter([False, True])
    try:
        stopping = lambda: rank == 2 and fault == "stop" and next(looks)  # noqa: E731
        return reader.read(parts, stopping, lambda: 2**60 if rank == 2 and fault == "room" else 8000)
    except JobError as error:
        return type(error), str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_one_rank_of_each_node_reads_and_all_have_the_same(url: str) -> None:
    store = Store(url)
    every = store.groups.trajectories("r0")
    groups = list(dict.fromkeys(e.group_id for e in every))[2:4]
    wanted, metrics = pickle.dumps([plain(e) for e in every]), store.rollouts.metrics("r0")
    again = pickle.dumps([plain(e) for e in every if e.group_id in groups])
    store.close()
    ranks = run_grid(4, rollout, NODES, url)
    assert [got["trajectories"] == wanted for got in ranks] == [True] * 4
    assert [got["replayed"] == again for got in ranks] == [True] * 4
    assert [got["metrics"] for got in ranks] == [metrics] * 4
    assert [got["decoded"] > 0 for got in ranks] == [True, False, True, False]
    assert ranks[0]["decoded"] == ranks[2]["decoded"]
    assert all(got["shared_greedy"] for got in ranks)
    assert [got["memories"] for got in ranks] == [[[mmap.mmap]] * 2] * 4, (
        "all arrays of a call are views of one mapping"
    )
    assert not any(got["writeable"] for got in ranks)
    alone = run_grid(1, rollout, ["a"], url)
    assert alone[0]["trajectories"] == wanted and mmap.mmap not in alone[0]["memories"][0], "as they were read"
    assert sum(got["decoded"] for got in run_grid(4, rollout, ["a"] * 4, url)) == alone[0]["decoded"], (
        "four ranks of a node read as much as one"
    )


PARTS, PART_TOKENS = 16, 2**20


def private(rank: int) -> dict[str, int]:
    """Bytes of a read of 16 parts of 4 MiB: those of the messages, and those that this rank has for itself."""
    import psutil
    import torch.distributed as dist

    reader = joined(rank, ["a"] * 3)
    receive, messages = reader.broadcast, []

    def receiving(message: Any) -> Any:
        found = receive(message)
        messages.append(len(pickle.dumps(found)))
        return found

    reader.broadcast = receiving
    before = psutil.Process().memory_full_info().uss
    found = reader.read(lambda: (np.full(PART_TOKENS, number, np.int32) for number in range(PARTS)))
    sums = [int(array.sum(dtype=np.int64)) for array in found]  # every page is mapped by every rank
    dist.barrier()
    held = psutil.Process().memory_full_info().uss - before
    dist.barrier()
    assert sums == [number * PART_TOKENS for number in range(PARTS)]
    return {"messages": sum(messages), "held": held}


def test_arrays_take_no_memory_of_a_rank() -> None:
    nbytes = PARTS * PART_TOKENS * 4
    for rank in run_grid(3, private):
        assert rank["messages"] < nbytes / 1000, "the arrays are in no message"
        assert rank["held"] < nbytes / 4, "a copy has all of it"


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank; the ranks read on after a fault."""
    return run_grid(4, failing, str(tmp_path_factory.mktemp("temporary")))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_reader_meets_reaches_every_rank_of_every_node(met: list[dict[str, Any]], fault: str) -> None:
    ranks = [found[fault] for found in met]
    assert ranks == [ranks[0]] * 4
    if fault == "stop":
        assert ranks[0] is None
    else:
        kind, text = {
            "damaged": (StoreDamagedError, "row 7"),
            "fenced": (FencedError, "attempt 2"),
            "driver": (JobError, "rank 2, which reads"),
            "disk": (JobError, "set TMPDIR to another folder"),
            "room": (DiskFullError, "1,152,921,504,606,846,976 bytes"),
        }[fault]
        assert ranks[0][0] is kind and text in ranks[0][1]


def test_reads_that_failed_leave_no_file(met: list[dict[str, Any]]) -> None:
    assert [found["left"] for found in met] == [[]] * 4
