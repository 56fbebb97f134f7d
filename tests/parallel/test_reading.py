"""Rank 0 reads rows without arrays, one rank of each node the arrays that its ranks hold; all ranks have the same
trajectories and the same error. The arrays lie once a node."""

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

from megarl.buffer.order.group_choice import Replayed
from megarl.buffer.store import Store, is_outline
from megarl.buffer.store.codec import trajectory_to_row
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
    """Arrays of trajectories."""
    found = [getattr(turn, name) for e in trajectories for turn in e.turns for name in ARRAYS]
    return [array for array in found if array is not None]


def held_by(rank: int, trajectories: list[Trajectory]) -> list[Trajectory]:
    """The trajectories that a rank takes: two neighbours share some."""
    return trajectories[rank * 4 : rank * 4 + 6]


def rollout(rank: int, nodes: list[str], url: str) -> dict[str, Any]:
    """What a rank has of ``take``, ``replayed`` and ``with_arrays``, and how it came there."""
    from megarl.buffer.store import groups as rows
    from megarl.train.rollout import reading

    reader, store = joined(rank, nodes), Store(url)
    reading.PART_BYTES = 1000
    loaded: list[int] = []
    load = rows.load_tensors
    rows.load_tensors = lambda data: (loaded.append(len(data)), load(data))[1]  # type: ignore[func-returns-value]
    rollouts = reading.RolloutReader(reader, store, lambda: False)
    found, metrics = rollouts.take(lambda: store.groups.take(GROUPS, step=0)), rollouts.metrics(lambda: ["r0"])
    assert found is not None and all(is_outline(e) for e in found)
    groups = list(dict.fromkeys(e.group_id for e in found))
    again = rollouts.replayed(lambda: [Replayed(group, 1, 2) for group in groups[2:4]])
    assert again is not None
    outlined = sum(loaded)
    held = rollouts.with_arrays(held_by(rank, found))
    assert all(one is other for one, other in zip(rollouts.with_arrays(held), held, strict=True))
    memories = {id(memory): type(memory) for memory in map(memory_of, arrays_of(held))}
    return {
        "outlines": repr([facts(e) for e in found]),
        "replayed": repr([facts(e) for _, group in again for e in group]),
        "held": repr([plain(replace(e, greedy=None)) for e in held]),
        "metrics": metrics,
        "outlined": outlined,
        "loaded": sum(loaded),
        "shared_greedy": len({id(e.greedy) for e in found}) == GROUPS,
        "memories": list(memories.values()),
        "writeable": any(array.flags.writeable for array in arrays_of(held)),
    }


def facts(trajectory: Trajectory) -> Any:
    """All that a trajectory holds but its values: those of arrays by their shape and type."""
    found = plain(trajectory)
    greedy = None if trajectory.greedy is None else facts(trajectory.greedy)
    turns = [
        vars(turn)
        | {name: values(getattr(turn, name)) and values(getattr(turn, name))[:2] for name in ARRAYS}
        | {"bounds": turn.token_bounds}
        for turn in trajectory.turns
    ]
    return found | {"turns": turns, "greedy": greedy}


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


def test_a_node_reads_the_arrays_of_its_ranks_alone(url: str) -> None:
    store = Store(url)
    every = store.groups.trajectories("r0")
    groups = list(dict.fromkeys(e.group_id for e in every))[2:4]
    outlines, metrics = repr([facts(e) for e in every]), store.rollouts.metrics("r0")
    again = repr([facts(e) for e in every if e.group_id in groups])
    sizes = {key_of(e): len(trajectory_to_row(e)["tensors"]) for e in every}
    store.close()
    ranks = run_grid(4, rollout, NODES, url)
    assert [got["outlines"] == outlines for got in ranks] == [True] * 4
    assert [got["replayed"] == again for got in ranks] == [True] * 4
    for rank, got in enumerate(ranks):
        assert got["held"] == repr([plain(replace(e, greedy=None)) for e in held_by(rank, every)])
    assert [got["metrics"] for got in ranks] == [metrics] * 4
    assert [got["outlined"] for got in ranks] == [0] * 4, "lengths and rewards need no arrays"
    shares = [
        {key_of(e) for rank in range(4) if NODES[rank] == node for e in held_by(rank, every)} for node in ("a", "b")
    ]
    wanted = [sum(sizes[key] for key in share) for share in shares]
    assert [got["loaded"] for got in ranks] == [wanted[0], 0, wanted[1], 0], "each array of the share once"
    assert all(got["shared_greedy"] for got in ranks)
    assert [got["memories"] for got in ranks] == [[mmap.mmap]] * 4, "all arrays of a call are views of one mapping"
    assert not any(got["writeable"] for got in ranks)
    alone = run_grid(1, rollout, ["a"], url)
    assert alone[0]["held"] == ranks[0]["held"] and mmap.mmap not in alone[0]["memories"], "as they were read"
    for rank, got in enumerate(run_grid(4, rollout, ["a", "b", "c", "d"], url)):
        assert got["loaded"] == sum(sizes[key_of(e)] for e in held_by(rank, every)), "a node of one rank"


def key_of(trajectory: Trajectory) -> tuple[str, int]:
    return trajectory.group_id, trajectory.index


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
