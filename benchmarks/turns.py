"""Memory that takes turns: bytes of a 300M model in every phase beside its plan, and the seconds of engines' turns.

``python benchmarks/turns.py [--cycles N] [--rounds N] [--parts memory engines] [--write]``. A CPU has no other memory
than the host's: it is the device here, and a disk is what memory leaves to.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import page

from megarl.run.report.svg import line_chart

MIB = 2**20
SMALL: dict[str, int] = {}
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
SIZES = {"0.4M": SMALL, "300M": LARGE}
JOB = (
    "experiment=quickstart",
    "parallel=tp1",
    "algorithm.kl.coef=0",
    "algorithm.group_size=4",
    "trainer.steps=4",
    "trainer.tasks_per_step=2",
    "trainer.warm_start.steps=1",
    "trainer.warm_start.batch_size=2",
    "trainer.checkpoint_interval=100",
    "taskset.train_size=100",
    "taskset.eval_size=2",
    "taskset.warm_start_size=100",
    "rollout.max_response_tokens=8",
    "rollout.max_num_seqs=8",
)
MODES = {
    "separate": (),
    "asleep and awake": ("rollout.placement=colocated", "rollout.offload=sleep"),
    "ended and started": ("rollout.placement=colocated", "rollout.offload=destroy"),
}
CYCLE = ("sync", "rollout", "old_logp", "update")
STEP_EVERY = 20
"""Cycles between two real updates: the memory of one is freed again."""


Cycle = dict[str, tuple[int, int]]
"""Phase -> bytes planned, and bytes that the process has more than before it had a model."""


def memory(cycles: int, folder: Path, offload: Literal["memory", "disk"]) -> list[Cycle]:
    """Run so many cycles of phases in this process, which has no process group yet."""
    import torch

    from megarl.config.algorithms import AlgorithmConfig
    from megarl.config.schema import (
        Config,
        FromScratchConfig,
        ModelConfig,
        OptimizerConfig,
        ParallelConfig,
        TrainerConfig,
    )  # fmt: skip
    from megarl.core.metrics import Timeline
    from megarl.core.processes.machine import resident_bytes, trim_memory
    from megarl.learn import algorithms
    from megarl.learn.batching import Sequences
    from megarl.learn.memory.phases import Phase, Place
    from megarl.learn.parallel import process_groups
    from megarl.learn.training import objectives
    from megarl.learn.training.model import TrainedModel, micro_batching_for
    from megarl.learn.training.schedule import Head
    from megarl.train.memory import PhaseMemory
    from megarl.train.ranks import Ranks, RunContext

    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29631", OMP_NUM_THREADS="1")
    parallel, trainer = ParallelConfig(), TrainerConfig(offload=offload)
    process_groups.initialize(parallel, seed=1)
    scratch = FromScratchConfig(**LARGE)
    hf_config = {
        **{name: getattr(scratch, name) for name in scratch.__dataclass_fields__},
        "architectures": ["Qwen3ForCausalLM"],
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    trim_memory()
    base = resident_bytes()
    actor = TrainedModel(
        hf_config, ModelConfig(dtype="float32"), parallel, Head(scratch.vocab_size),
        micro_batching_for(parallel, trainer), OptimizerConfig(lr=1e-5),
    )  # fmt: skip
    actor.model.weights_changed()
    models: Any = SimpleNamespace(by_role=lambda: {"actor": actor.model})
    memory = PhaseMemory(
        RunContext(Config(trainer=trainer), folder, 1, 0), models, Ranks(), Timeline(folder / "timeline", "trainer_0")
    )
    memory.begin()
    tokens = torch.arange(16) + 2
    rows = Sequences(tokens, torch.tensor([16]), torch.arange(16) < 15)
    objective = objectives.policy(algorithms.get("sft"), AlgorithmConfig(), rows)
    found = []
    for cycle in range(cycles):
        seen = {}
        for name in CYCLE:
            memory.enter(Phase(name))
            planned = sum(r.nbytes for r in actor.model.residents if r.place in (Place.DEVICE, Place.MEMORY))
            seen[name] = (planned, resident_bytes() - base)
        if cycle % STEP_EVERY == 0:
            actor.backward(rows, actor.model.micro_batches(rows), objective)
            actor.step(1e-5)
        print(
            f"cycle {cycle + 1}/{cycles}: " + ", ".join(f"{n} {m / MIB:.0f}" for n, (_, m) in seen.items()), flush=True
        )
        found.append(seen)
    memory.close()
    return found


def slope(values: Sequence[float]) -> float:
    """Least-squares slope a cycle."""
    return statistics.linear_regression(range(len(values)), values).slope


def say_memory(text: page.Text, offload: str, found: list[Cycle]) -> None:
    text.say(
        f"A float32 actor of 300M parameters with `trainer.offload={offload}`, one rank, {len(found)} cycles of phases "
        f"with an update in every {STEP_EVERY}th. Planned: models on the device and in host memory. Measured: what the "
        "process has beyond its imports (median; without the first cycle, in which the optimizer has no moments). "
        "Slope: least squares."
    )
    text.say("")
    text.say("| phase | planned, MiB | measured, MiB (least-most) | difference | slope, KiB a cycle |")
    text.say("|---|---|---|---|---|")
    for name in CYCLE:
        rows = [seen[name] for seen in found[1:]]
        planned, measured = rows[-1][0] / MIB, [m / MIB for _, m in rows]
        middle = statistics.median(measured)
        off = f"{(middle - planned) / planned:+.1%}" if planned else f"{middle - planned:+.0f} MiB"
        text.say(
            f"| {name} | {planned:.0f} | {middle:.0f} ({min(measured):.0f}-{max(measured):.0f}) | {off} | "
            f"{slope(measured) * 1024:+.0f} |"
        )


def job(size: str, mode: str, folder: Path) -> list[dict[str, float]]:
    """Metrics of a job's steps after the first."""
    run_dir = folder / f"{size}-{mode}".replace(" ", "-")
    scratch = [f"model.from_scratch.{name}={value}" for name, value in SIZES[size].items()]
    command = [sys.executable, "-m", "megarl", "train", *JOB, *scratch, *MODES[mode], f"run.dir={run_dir}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [r for r in records if r.get("training/global_step", 0) > 1]


def say_engines(text: page.Text, rounds: int) -> None:
    text.say(
        "Seconds a step that colocated engines take to leave, and to come back and be given weights (a sync, beside "
        f"that of a job whose engine stays), median of 3 steps and {rounds} rounds. Freed: bytes of the worker's "
        "process, with a KV cache of 256 MiB; an engine that has ended has none."
    )
    text.say("")
    text.say("| model | engine | leaves, s | sync, s | freed, MiB | left, MiB |")
    text.say("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            steps: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
            for number in range(rounds):
                for mode in MODES:
                    steps[mode] += job(size, mode, Path(folder, str(number)))
            for mode, rows in steps.items():

                def median(name: str, rows: list[dict[str, float]] = rows) -> float | None:
                    values = [row[name] for row in rows if name in row]
                    return statistics.median(values) if values else None

                leaves, freed, left = (
                    median(name)
                    for name in (
                        "timing_s/engines_leave", "memory/engines/freed_bytes", "memory/engines/asleep_bytes",
                    )
                )  # fmt: skip
                cells = [
                    "-" if leaves is None else f"{leaves:.2f}",
                    f"{median('timing_s/sync') or 0.0:.2f}",
                    "-" if freed is None else f"{freed / MIB:.0f}",
                    "-" if left is None else f"{left / MIB:.0f}",
                ]
                text.say(f"| {size} | {mode} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=["memory", "engines"], default=["memory", "engines"])
    parser.add_argument("--write", action="store_true", help="also write docs/benchmarks/turns.md")
    options = parser.parse_args()
    text = page.Text()
    offload: Literal["memory", "disk"]
    for offload in ("disk", "memory") if "memory" in options.parts else ():
        cycles = options.cycles if offload == "memory" else -(-options.cycles // 10)
        with tempfile.TemporaryDirectory(dir=page.ROOT) as folder, multiprocessing.get_context("spawn").Pool(1) as pool:
            start = time.monotonic()
            found = pool.apply(memory, (cycles, Path(folder), offload))
            print(f"{(time.monotonic() - start) / cycles:.1f} s a cycle", flush=True)
        say_memory(text, offload, found)
        text.say("")
        if options.write and offload == "memory":
            points = [(cycle, seen["rollout"][1] / MIB) for cycle, seen in enumerate(found[1:], 2)]
            chart = line_chart("MiB of a rank as it enters the rollout", points, width=680, zero=True)
            page.picture("turns_memory.svg", chart)
    if options.write and "memory" in options.parts:
        page.write("benchmarks/turns.md", str(text), "benchmarks/turns.py memory")
    if "engines" in options.parts:
        text = page.Text()
        say_engines(text, options.rounds)
        if options.write:
            page.write("benchmarks/turns.md", str(text))


if __name__ == "__main__":
    main()
