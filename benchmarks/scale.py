"""CPU seconds and bytes of a step's services from 64 to 2,048 trainer ranks: ``python benchmarks/scale.py [--write]``.

Services are the real ones: the store, explorer writes, rank 0 reads, the arrays of each node, the plan of the batch,
the channel of supervisors and the watchdog, the registry of engines, sync plans, checkpoint manifests and the report.
Engines, models and GPUs are stand-ins: their messages are made up, with the sizes of real ones. Work grows with the
ranks, four trajectories a rank, so a service with exponent 1 costs each rank the same at every size. Rank 0 is among
the ranks.
"""

from __future__ import annotations

import argparse
import json
import logging
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import page
import psutil
import store as calls
from plan import DEEPSEEK_V3

from megarl.buffer.experience import verify, with_group_stats
from megarl.buffer.store import EndedGroup, Store, Used, outlines_of
from megarl.config import save_resolved
from megarl.config.algorithms import AlgorithmConfig
from megarl.config.rewards import RewardConfig
from megarl.config.schema import Config
from megarl.core.schema import Trajectory, WeightsVersion
from megarl.engines.fleet import EngineRow
from megarl.learn.batching import MicroBatching, dealt
from megarl.run.nodes import health
from megarl.run.nodes.node import Spec, Started
from megarl.run.nodes.node_agent import Channel
from megarl.run.nodes.remote import RemoteNode, RemoteProcess
from megarl.run.postgres import Server
from megarl.run.report.data import load
from megarl.run.report.html import page as report_page
from megarl.run.supervise.watchdog import Watchdog
from megarl.train.batch.samples import StepSamples
from megarl.train.rollout.reading import nbytes_of, parts_of
from megarl.weights.checkpoint.training.manifest import Fingerprint, read_manifest, write_manifest
from megarl.weights.reshard.layouts import MegatronGrid, megatron_layout, vllm_layout
from megarl.weights.reshard.plan import build_plan

SIZES = (64, 256, 1024, 2048)
RANKS_A_NODE = 8
TRAJECTORIES_A_RANK = 4
MEMBERS = 8
TOKENS = 32_768
PACKET = 2
"""Groups that the explorer puts together: 4 MB."""
REPEATS = 3
"""Plans of the batch, of which the fastest counts: the others meet the garbage collector."""
PART = 64 * 2**20
VOCAB = 150_000
STEP_S = 2_981.0
"""Seconds of a step of ``experiment=grpo_deepseek_v3``, whose step has 8,192 trajectories, as ``megarl plan`` predicts
them for 256 nodes of 8 H100."""
STEPS = 3
"""Steps in the report's timelines."""
PHASES = ("step", "sync", "rollout", "batch", "inference", "update", "checkpoint", "collective")
FILES_A_RANK = 2
"""Files of a rank in a checkpoint: its shard of the model and the optimizer, and its generators."""
VERSION = WeightsVersion(1, 0)
SQLITE, POSTGRES = "SQLite", "PostgreSQL"


@dataclass
class Cost:
    """CPU seconds of all processes of a service in a step, bytes that pass through it, and the number of processes that
    share them."""

    cpu: float = 0.0
    nbytes: int = 0
    processes: int = 1

    @property
    def of_each(self) -> float:
        """CPU seconds of one of the processes, for which the step may wait."""
        return self.cpu / self.processes


class Meter:
    """Costs by service."""

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = {}

    @contextmanager
    def measuring(self, name: str, of_server: Callable[[], float] = float, each: int = 1) -> Iterator[Cost]:
        """Add the CPU seconds of this process and of a server to a service.

        Args:
            each: Number of processes that do this at the same time, one after the other here.
        """
        found = self.costs.setdefault(name, Cost(processes=each))
        cpu, server = time.process_time(), of_server()
        yield found
        found.cpu += time.process_time() - cpu + of_server() - server


def server_seconds(folder: Path) -> float:
    """CPU seconds of the PostgreSQL processes whose data are in a folder."""
    total = 0.0
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "postgres":
            try:
                if process.cwd().startswith(str(folder)):
                    times = process.cpu_times()
                    total += times.user + times.system
            except psutil.Error:
                continue
    return total


@contextmanager
def database(kind: str, folder: Path) -> Iterator[tuple[Store, Callable[[], float]]]:
    """A store, and the CPU seconds of its server."""
    if kind == SQLITE:
        store = Store(f"sqlite:///{folder / 'store.db'}", outage_s=60.0)
        yield store, float
        store.close()
        return
    server = Server(folder / "postgres", "key of the benchmark")
    server.start()
    try:
        store = Store(server.url, outage_s=60.0)
        yield store, lambda: server_seconds(folder / "postgres")
        store.close()
    finally:
        server.stop()


def answers_of(claim: calls.Claim, tokens: np.ndarray, logp: np.ndarray, lengths: np.ndarray) -> list[Trajectory]:
    """A group's trajectories of these lengths, every second one right."""
    return [
        calls.with_tokens(one, np.roll(tokens, one.index)[:length], logp[:length])
        for one, length in zip(calls.answers(claim), lengths.tolist(), strict=True)
    ]


def of_store(meter: Meter, kind: str, ranks: int, tokens: int) -> None:
    """A step in the store: requested, explored, chosen, outlined, planned, read by every node, recorded."""
    rng = np.random.default_rng(ranks)
    groups, nodes = ranks * TRAJECTORIES_A_RANK // MEMBERS, ranks // RANKS_A_NODE
    ids = rng.integers(0, VOCAB, tokens, dtype=np.int32)
    logp = -rng.exponential(0.5, tokens).astype(np.float32)
    with tempfile.TemporaryDirectory() as name, database(kind, Path(name)) as (store, of_server):

        def measuring(service: str, each: int = 1):  # type: ignore[no-untyped-def]
            return meter.measuring(f"{service} ({kind})", of_server, each)

        store.tasks.add("train", calls.tasks("train", groups))
        store.pacing.record_version(VERSION, 0)
        with measuring("rank 0 asks, chooses, records"):
            store.rollouts.request("train-000000", "train", 0, VERSION, store.tasks.ids("train"), MEMBERS, {})
        with measuring("explorer claims and puts groups") as cost:
            while claims := store.groups.claim("explorer", PACKET, max_samples=PACKET * MEMBERS):
                lengths = rng.integers(tokens - tokens // 4, tokens + 1, (len(claims), MEMBERS))
                ended = [EndedGroup(c, answers_of(c, ids, logp, own)) for c, own in zip(claims, lengths, strict=True)]
                assert all(store.groups.put_all(ended))
                cost.nbytes += int(lengths.sum()) * 8
        with measuring("rank 0 asks, chooses, records"):
            chosen = store.groups.take(groups, step=0)
        with measuring("rank 0 reads outlines") as cost:
            rows = store.groups.outline_rows(chosen)
        cost.nbytes += sum(len(row.record) + len(row.group_id) for row in rows)
        with measuring("rank 0 asks, chooses, records"):
            store.journal.record_step(1, {}, Used(tuple(chosen)))
        outlines, shares = planned(meter, rows, nodes)
        sizes = {(e.group_id, e.index): nbytes_of(e) for e in outlines}
        with measuring("nodes read their arrays", nodes) as cost:
            for share in shares:
                own = {key: sizes[key] for key in sorted((outlines[i].group_id, outlines[i].index) for i in share)}
                read = 0
                for part in parts_of(own, PART):
                    arrays = store.groups.arrays(part)
                    read += sum(array.nbytes for found in arrays.values() for array in found.values())
                assert read == sum(own.values()), "a node reads its share, each array once"
                cost.nbytes += read


def planned(meter: Meter, rows: Sequence[object], nodes: int) -> tuple[list[Trajectory], list[list[int]]]:
    """A rank's plan of the batch from outlines, with seconds of one rank; the trajectories of each node's ranks."""
    runs = Meter()
    for run in range(REPEATS):
        with runs.measuring(str(run)):
            verified = verify(outlines_of(rows), RewardConfig(), vocab_size=VOCAB)  # type: ignore[arg-type]
            outlines = with_group_stats(verified.trajectories)
            assert not verified.dropped
            lengths = StepSamples(outlines, [], AlgorithmConfig()).lengths.tolist()
            dealing = dealt(lengths, MicroBatching(dp=nodes, max_tokens=2 * TOKENS))
    fastest = min(runs.costs.values(), key=lambda cost: cost.cpu)
    meter.costs["each rank plans the batch"] = fastest  # of either database
    shares = [[number for batch in batches for number in batch] for batches in dealing]
    return outlines, shares


def of_channel(meter: Meter, ranks: int, folder: Path) -> None:
    """Heartbeats of all nodes to the head in a step, and the head's watchdog over them."""
    cluster = Config().cluster
    beat_s = min(cluster.heartbeat_s / 4, max(1.0, cluster.stall_s / 5))
    facts = asdict(health.facts("node", "127.0.0.1"))
    nodes, agents, started = [], [], []
    names = [f"trainer_{rank}" for rank in range(ranks)]
    for number in range(ranks // RANKS_A_NODE):
        here, there = socket.socketpair()
        node = RemoteNode(Channel(here, 600.0), {"rank": number, "role": "all", "facts": facts})
        for name in names[number * RANKS_A_NODE : (number + 1) * RANKS_A_NODE]:
            node.processes[name] = RemoteProcess(Spec(name, (), {}, ""), node)
        started += [Started(process, node) for process in node.processes.values()]  # type: ignore[arg-type]
        nodes.append(node)
        agents.append(Channel(there, 600.0))
    rounds = 4
    with meter.measuring("supervisors' heartbeats") as cost:
        for beat in range(1, rounds + 1):
            for node, agent in zip(nodes, agents, strict=True):
                message = {name: [beat, 0, 1, 0.0, "update", "S"] for name in node.processes}
                agent.send(event="beat", heartbeats=message)
                cost.nbytes += len(json.dumps(message))
            for node in nodes:  # a message has all processes of a node
                while next(iter(node.processes.values())).heartbeat().beats < beat:
                    time.sleep(0.005)
    scaled(cost, STEP_S / beat_s / rounds)
    watchdog = Watchdog(Config(), folder)
    with meter.measuring("head's watchdog") as cost:
        for _ in range(rounds):
            watchdog._looked -= 10.0
            watchdog.look(started)
    scaled(cost, STEP_S / rounds)
    for agent in agents:
        agent.close()


def scaled(cost: Cost, factor: float) -> None:
    """Take the costs of some rounds for those of a step."""
    cost.cpu, cost.nbytes = cost.cpu * factor, int(cost.nbytes * factor)


def of_engines(meter: Meter, engines: int, folder: Path) -> None:
    """The engines' registry in a step: rank 0 reads the rows and records what it has delivered."""
    store = Store(f"sqlite:///{folder / 'engines.db'}")
    store.engines.register([EngineRow("train", number, url=f"http://node-{number}:8000") for number in range(engines)])
    with meter.measuring("rank 0 reads engines, records delivery") as cost:
        rows = store.engines.read()
        store.engines.delivered({row.key: row.start for row in rows}, VERSION, "base")
    assert len(rows) == engines
    cost.nbytes += sum(len(repr(row)) for row in rows)
    store.close()


def of_sync(meter: Meter, ranks: int, engines: int) -> None:
    """The plan of rank 0's own transfers of DeepSeek-V3, made once when engines join."""
    stage = ranks // 16  # 61 layers: 15 stages of 4 and a last one of 1
    grid = MegatronGrid(tp=min(8, stage), pp=16, dp=max(1, stage // 8), ep=min(64, stage), last_stage_layers=1)
    with meter.measuring("each rank plans the sync, at the start"):
        source = megatron_layout(DEEPSEEK_V3, grid, transformer_impl="transformer_engine")
        plan = build_plan(source, vllm_layout(DEEPSEEK_V3, 8, engines, expert_parallel=True))
        moves = sum(1 for _ in plan.moves_from(0))
    assert moves


def of_checkpoint(meter: Meter, ranks: int, folder: Path) -> None:
    """Rank 0's manifest of all ranks' files, written and read."""
    files = {
        f"actor/__{rank}_{number}.distcp": Fingerprint(10**9, f"{rank:064x}")
        for rank in range(ranks)
        for number in range(FILES_A_RANK)
    }
    checkpoint = folder / "global_step_1"
    checkpoint.mkdir()
    with meter.measuring("rank 0 writes and reads a manifest") as cost:
        write_manifest(checkpoint, {"step": 1, "phase": "rl"}, {}, files)
        assert len(read_manifest(checkpoint)["files"]) == len(files)
    cost.nbytes += (checkpoint / "state.json").stat().st_size


def of_report(meter: Meter, ranks: int, folder: Path) -> None:
    """The report of a run with the timelines of all ranks, per step."""
    save_resolved(Config(), folder / "resolved.json")
    (folder / "timeline").mkdir()
    lines = [
        json.dumps({"phase": phase, "start": 100.0 * step + i, "seconds": 1.0, "step": step, "attempt": 1})
        for step in range(STEPS)
        for i, phase in enumerate(PHASES)
    ]
    for rank in range(ranks):
        (folder / "timeline" / f"trainer_{rank}.jsonl").write_text("\n".join(lines) + "\n")
    with meter.measuring("report, after the run") as cost:
        text = report_page(load(folder))
    cost.nbytes += len(text)
    scaled(cost, 1 / STEPS)


def measure(ranks: int, tokens: int, kinds: Sequence[str]) -> dict[str, Cost]:
    """Costs of all services at a size."""
    meter, engines = Meter(), max(16, ranks // RANKS_A_NODE)
    for kind in kinds:
        of_store(meter, kind, ranks, tokens)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        of_channel(meter, ranks, folder)
        of_engines(meter, engines, folder)
        of_checkpoint(meter, ranks, folder)
        of_report(meter, ranks, folder)
    of_sync(meter, ranks, engines)
    return meter.costs


def exponent(sizes: Sequence[int], values: Sequence[float]) -> str:
    """The slope of a line through the logarithms; a dash without bytes."""
    if min(values) <= 0:
        return "–"
    return f"{np.polyfit(np.log(sizes), np.log(values), 1)[0]:.2f}"


def say(text: page.Text, found: dict[int, dict[str, Cost]], tokens: int) -> None:
    sizes, largest = list(found), max(found)
    text.say(
        f"{TRAJECTORIES_A_RANK} trajectories of up to {tokens:,} tokens a rank ({TRAJECTORIES_A_RANK * largest:,} at "
        f"{largest:,} ranks), token ids and log-probs, {RANKS_A_NODE} ranks a node, one model replica a node. CPU "
        "seconds of all processes of the service in a step, for plans of one rank; a column for each number of ranks; "
        "the last one is the exponent of growth."
    )
    text.say("")
    text.say("| CPU seconds of a step | " + " | ".join(f"{size:,}" for size in sizes) + " | exponent |")
    text.say("|---|" + "---:|" * (len(sizes) + 1))
    names = list(found[largest])
    for name in names:
        own = [found[size][name].cpu for size in sizes]
        text.say(f"| {name} | " + " | ".join(f"{cpu:.3f}" for cpu in own) + f" | {exponent(sizes, own)} |")
    text.say("")
    text.say("| bytes of a step | " + " | ".join(f"{size:,}" for size in sizes) + " | exponent |")
    text.say("|---|" + "---:|" * (len(sizes) + 1))
    for name in names:
        own = [found[size][name].nbytes for size in sizes]
        if any(own):
            text.say(f"| {name} | " + " | ".join(f"{n:,}" for n in own) + f" | {exponent(sizes, own)} |")
    text.say("")
    text.say(
        f"CPU seconds of one process at {largest:,} ranks, beside the {STEP_S:,.0f} s of a step of DeepSeek-V3 "
        "(`megarl plan`). Explorer and supervisors work while the step goes on:"
    )
    text.say("")
    text.say("| service | seconds | share of the step |")
    text.say("|---|---:|---:|")
    for name in sorted(names, key=lambda name: -found[largest][name].of_each):
        seconds = found[largest][name].of_each
        text.say(f"| {name} | {seconds:.2f} | {seconds / STEP_S:.2%} |")
    of_node = found[largest][f"nodes read their arrays ({SQLITE})"]
    text.say("")
    text.say(
        f"A node reads {of_node.nbytes // of_node.processes:,} bytes of arrays, 1/{of_node.processes} of the step's; "
        "its ranks hold all of them; rank 0 reads the rows without arrays once."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="most tokens of a trajectory")
    parser.add_argument("--databases", nargs="+", default=(SQLITE, POSTGRES), help="SQLite first")
    parser.add_argument("--write", action="store_true", help="also write the tables into docs/benchmarks/scale.md")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    text = page.Text()
    found = {}
    for ranks in options.sizes:
        begun = time.perf_counter()
        found[ranks] = measure(ranks, options.tokens, options.databases)
        print(f"{ranks} ranks: {time.perf_counter() - begun:.0f} s", flush=True)
    say(text, found, options.tokens)
    if options.write:
        page.write("benchmarks/scale.md", str(text))


if __name__ == "__main__":
    main()
