"""What a checkpoint costs a step: none, written at once, written in the background, in turns within one run of trainer
ranks.

The larger configuration of the quickstart: the same tasks' shapes (64 x 8 answers of 8 tokens after 16 of a prompt) and
updates, a Qwen3 of hidden size 512 and 8 layers (27 M parameters, 0.33 GB of training state), TP2 on two ranks. A step
is what the trainer does of one: log-probs of actor and reference, two updates. No engine runs, so a job's step, which
samples too, is longer and the share lower. Every arm takes the time from the snapshot's begin up to the end of the step
in which the checkpoint counts.

    python benchmarks/checkpoint.py [--rounds 4] [--hidden 512] [--layers 8] [--tasks 64]

Prints a table: median and quartiles of the seconds, what was lost to a checkpoint, and its share of a step; and how
fast files are hashed, written and verified.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

ARMS = ("none", "at once", "background")
PROMPT, ANSWER, GROUP = 16, 8, 8


def save_model(path: Path, hidden: int, layers: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=64,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)


def measure(rank: int, model: str, folder: str, rounds: int, tasks: int) -> dict[str, Any]:
    """Runs in each rank: arm -> seconds of a step with one such checkpoint, and what its parts took."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from megarl.config.algorithms import AlgorithmConfig
    from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
    from megarl.learn import algorithms
    from megarl.learn.batching import MicroBatching, of_demonstrations
    from megarl.learn.parallel import process_groups
    from megarl.learn.training import objectives
    from megarl.learn.training.model import Model, TrainedModel
    from megarl.learn.training.schedule import Head
    from megarl.train.batch.batch import updates_of
    from megarl.weights.checkpoint.training import state, writer

    writer.of_process()  # as a job does, before there are models
    parallel = ParallelConfig(tp=2)
    process_groups.initialize(parallel, seed=1)
    from megarl.weights.checkpoint.formats import hf

    hf_config, micro_batching, head = hf.read_hf_config(Path(model)), MicroBatching(dp=1, max_tokens=8192), Head(128)
    settings = ModelConfig(path=model)
    actor = TrainedModel(hf_config, settings, parallel, head, micro_batching, OptimizerConfig(lr=1e-5))
    reference = Model(hf_config, settings, parallel, head, micro_batching)
    for m in (actor.model, reference):
        m.load_hf(Path(model))
    dice = np.random.default_rng(0)
    rows = [
        (dice.integers(2, 128, PROMPT).astype(np.int32), dice.integers(2, 128, ANSWER).astype(np.int32))
        for _ in range(tasks * GROUP)
    ]
    batch = of_demonstrations(rows)
    updates = updates_of([[i] for i in range(len(rows))], 2)
    parts = {"actor": state.CheckpointedModel(actor.model.chunks, actor.optimizer.inner)}

    def step() -> None:
        for m in (actor.model, reference):
            m.outputs(batch, [m.micro_batches(batch, units) for units in updates])
        for units in updates:
            objective = objectives.policy(algorithms.get("sft"), AlgorithmConfig(name="sft"), batch)
            actor.backward(batch, actor.model.micro_batches(batch, units), objective)
            actor.step(1e-5)

    def meet() -> float:
        dist.barrier()
        return time.perf_counter()

    def processor_s() -> float:
        """Of all ranks and of their writers that have ended."""
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        total = torch.tensor(sum(used.ru_utime + used.ru_stime for used in own), dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)

    step()  # the first has no moments yet
    found: dict[str, Any] = {arm: [] for arm in ARMS} | {"begin": [], "finish": [], "at once alone": []}
    number = 0
    for _ in range(rounds):
        for arm in ARMS:
            used, start = processor_s(), meet()
            if arm != "none":
                number += 1
                pending = state.begin(
                    Path(folder),
                    number,
                    parts,
                    state.Manifest({"phase": "rl"}),
                    background=arm == "background",
                    model=Path(model),
                )
                if arm == "at once":
                    pending.finish(1)
                found["begin" if arm == "background" else "at once alone"].append(meet() - start)
            step()
            if arm == "background":
                flag = torch.tensor(0)
                before = meet()
                late = False
                while True:  # a short step: what the writer still has to do is lost
                    flag.fill_(int(pending.written))
                    dist.all_reduce(flag, dist.ReduceOp.MIN)
                    if flag:
                        break
                    late = True
                    time.sleep(0.01)
                pending.finish(1)
                found["finish"].append(meet() - before)
                found.setdefault("late", []).append(late)
            found[arm].append(meet() - start)
            found.setdefault(f"processor {arm}", []).append(processor_s() - used)
    checkpoint = state.latest(Path(folder))
    assert checkpoint is not None
    if rank == 0:
        from megarl.weights.checkpoint.training.manifest import Fingerprint, fault_of_files

        files = [path for path in checkpoint.rglob("*.distcp")]
        found["bytes"] = sum(path.stat().st_size for path in files)
        start = time.perf_counter()
        for path in files:
            Fingerprint.of(path)
        found["hash"] = time.perf_counter() - start
        start = time.perf_counter()
        assert fault_of_files(checkpoint) is None
        found["verify"] = time.perf_counter() - start
        blob = files[0].read_bytes()
        start = time.perf_counter()
        with (Path(folder) / "blob").open("wb") as out:
            out.write(blob)
            out.flush()
            os.fsync(out.fileno())
        found["disk"] = len(blob) / (time.perf_counter() - start)
    dist.barrier()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--write", action="store_true", help="also write the figures into docs/checkpoints.md")
    parser.add_argument("--dir", type=Path, default=None, help="where the checkpoints go (default: a temporary folder)")
    arguments = parser.parse_args()
    from tests.parallel.grid import run_grid

    folder = Path(tempfile.mkdtemp(prefix="megarl-checkpoint-", dir=arguments.dir))
    try:
        save_model(folder / "model", arguments.hidden, arguments.layers)
        load = os.getloadavg()[0]
        first, *_ = run_grid(
            2, measure, str(folder / "model"), str(folder / "saved"), arguments.rounds, arguments.tasks, timeout_s=3600
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = page.Text()
    say = text.say

    say(
        f"hidden {arguments.hidden}, {arguments.layers} layers, TP2, {arguments.tasks} tasks x {GROUP} answers, "
        f"{arguments.rounds} rounds; {first['bytes'] / 1e6:.0f} MB of files a checkpoint; load average {load:.1f} "
        f"before, {os.getloadavg()[0]:.1f} after"
    )
    base = statistics.median(first["none"])
    say("")
    say("| checkpoint | a step, s (quartiles) | lost to it, s | share of a step | processor time more, s |")
    say("|---|---|---|---|---|")
    processor = statistics.median(first["processor none"])
    for arm in ARMS:
        low, middle, high = statistics.quantiles(first[arm], n=4) if len(first[arm]) > 1 else first[arm] * 3
        # Each beside the plain step of its own round, as neighbours on a machine that others use too.
        lost = statistics.median(a - b for a, b in zip(first[arm], first["none"], strict=True))
        more = statistics.median(a - b for a, b in zip(first[f"processor {arm}"], first["processor none"], strict=True))
        say(
            f"| {arm} | {middle:.2f} ({low:.2f} to {high:.2f}) | {lost:.2f} | {lost / base:.1%} | {more:.2f} of "
            f"{processor:.2f} |"
        )
    say("")
    for name, label in (
        ("begin", "snapshot and fork"),
        ("finish", "making it count"),
        ("at once alone", "written at once"),
    ):
        say(f"- {label}: {statistics.median(first[name]):.2f} s, {statistics.median(first[name]) / base:.1%} of a step")
    say(f"- the writer outlasted the step in {sum(first['late'])} of {len(first['late'])}")
    size = first["bytes"]
    say(
        f"- SHA-256 of its files {size / first['hash'] / 1e9:.2f} GB/s, verified by all cores "
        f"{size / first['verify'] / 1e9:.2f} GB/s, disk writes with fsync {first['disk'] / 1e9:.2f} GB/s"
    )
    if arguments.write:
        page.write("checkpoints.md", str(text))


if __name__ == "__main__":
    main()
