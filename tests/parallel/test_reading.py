"""One rank of each node reads the store; all ranks have the same trajectories, and the same error."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from megarl.core.errors import FencedError, JobError, StoreDamagedError
from megarl.explore.store import Store
from tests.parallel.grid import run_grid
from tests.stores import make_task, make_trajectory, request

NODES = ["a", "a", "b", "a"]
"""Of ranks 0 to 3: the readers are 0 and 2."""
GROUPS = 12


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('store')}/store.db"
    store = Store(url)
    store.add_tasks("train", [make_task(i) for i in range(GROUPS)])
    request(store, groups=GROUPS, greedy=True)
    for claim in store.claim_groups("e", GROUPS):
        assert store.put(
            claim, [make_trajectory(claim, i, 5 + claim.position) for i in claim.indices], {"samples": 2.0}
        )
    store.close()
    return url


def joined(rank: int, nodes: list[str]) -> Any:
    """This rank's reader, in a world of gloo whose ranks lie on these nodes."""
    import torch.distributed as dist

    from megarl.train.rollout.reading import NodeReader

    os.environ["MEGARL_NODE"] = nodes[rank]
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=len(nodes))
    return NodeReader(60.0)


def plain(trajectory: Any) -> Any:
    """All that a trajectory holds, in values that pickle alike wherever they come from."""
    turns = [
        vars(turn) | {"token_ids": turn.token_ids.tobytes(), "logp": None if turn.logp is None else turn.logp.tobytes()}
        for turn in trajectory.turns
    ]
    greedy = None if trajectory.greedy is None else plain(trajectory.greedy)
    return vars(trajectory) | {"turns": turns, "greedy": greedy, "dtype": str(trajectory.response.logp.dtype)}


def rollout(rank: int, nodes: list[str], url: str) -> tuple[bytes, dict[str, float], int, bool]:
    """(trajectories, metrics, bytes of the store's rows that this rank decoded, greedy answers are shared within
    groups)."""
    from megarl.explore.store import buffer as rows
    from megarl.train.rollout.reading import RolloutReader

    reader, store = joined(rank, nodes), Store(url)
    store.parts = lambda ids: [ids[:5], ids[5:6], ids[6:]]  # type: ignore[method-assign, assignment, misc]
    decoded: list[int] = []
    decode = rows.trajectory_from_row
    rows.trajectory_from_row = lambda row: (decoded.append(len(row.tensors) + len(row.record)), decode(row))[1]  # type: ignore[func-returns-value]
    rollouts = RolloutReader(reader, store, lambda: False)
    found, metrics = rollouts.take(lambda: store.take(GROUPS, step=0)), rollouts.metrics(lambda: ["r0"])
    assert found is not None
    shared = len({id(e.greedy) for e in found}) == GROUPS
    return pickle.dumps([plain(e) for e in found]), metrics, sum(decoded), shared


FAULTS = ("damaged", "fenced", "driver", "stop")


def failing(rank: int) -> dict[str, Any]:
    """Runs in each rank, fault by fault: what ``read`` raises or returns, where reader 2 meets it after its first
    part."""
    reader = joined(rank, NODES)
    return {fault: read_with(reader, rank, fault) for fault in FAULTS}


def read_with(reader: Any, rank: int, fault: str) -> Any:

    def parts() -> Iterator[int]:
        yield 1
        if rank == 2 and fault != "stop":
            raise {
                "damaged": StoreDamagedError("row 7"),
                "fenced": FencedError("attempt 2"),
                "driver": KeyError("no such column"),
            }[fault]
        yield 2

    looks = iter([False, True])
    try:
        return reader.read(parts, lambda: rank == 2 and fault == "stop" and next(looks))
    except JobError as error:
        return type(error), str(error)


def test_one_rank_of_each_node_reads_and_all_have_the_same(url: str) -> None:
    store = Store(url)
    wanted, metrics = pickle.dumps([plain(e) for e in store.trajectories("r0")]), store.rollout_metrics("r0")
    store.close()
    ranks = run_grid(4, rollout, NODES, url)
    assert [got[0] == wanted for got in ranks] == [True] * 4 and [got[1] for got in ranks] == [metrics] * 4
    assert [got[2] > 0 for got in ranks] == [True, False, True, False] and ranks[0][2] == ranks[2][2]
    assert all(got[3] for got in ranks)
    alone = run_grid(1, rollout, ["a"], url)
    assert sum(got[2] for got in run_grid(4, rollout, ["a"] * 4, url)) == alone[0][2], (
        "four ranks of a node read as much as one"
    )


@pytest.fixture(scope="module")
def met() -> list[dict[str, Any]]:
    """Of each rank; the ranks read on after a fault."""
    return run_grid(4, failing)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_reader_meets_reaches_every_rank_of_every_node(met: list[dict[str, Any]], fault: str) -> None:
    ranks = [found[fault] for found in met]
    assert ranks == [ranks[0]] * 4
    if fault == "stop":
        assert ranks[0] is None
    else:
        kind = {"damaged": StoreDamagedError, "fenced": FencedError, "driver": JobError}[fault]
        assert (
            ranks[0][0] is kind
            and {"damaged": "row 7", "fenced": "attempt 2", "driver": "rank 2, which reads"}[fault] in ranks[0][1]
        )
