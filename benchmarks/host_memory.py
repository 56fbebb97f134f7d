"""Host memory of trainer ranks during a step: bytes a token, held after each stage and at its peak.

    python benchmarks/host_memory.py [--answers 512] [--tokens 8192] [--algorithms grpo ppo] [--ranks 1 4]

Each data-parallel rank of each algorithm is a process of its own, on synthetic answers in a SQLite store. The step is
the trainer's own; a function that calls the forward step and the loss of each micro-batch, with zeros for log-probs,
replaces Megatron's schedule. Counted are resident pages: /proc/self/clear_refs resets the peak (VmHWM) before each
stage, and malloc returns freed memory at once. Pages of the file with a step's trajectories count on each rank that has
read them, although they lie once a node. A small step comes before, so that what is allocated once is not counted.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import page

ANSWERS_OF_A_GROUP = 8
PROMPT = 64
VOCAB = 1000


def resident(field: str) -> int:
    """Bytes: VmRSS now, VmHWM at its peak."""
    return int(re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def give_back() -> None:
    """Return to the system what malloc keeps of freed memory, so that resident is what is in use."""
    ctypes.CDLL(None).malloc_trim(0)


class Timeline:
    """Of the trainer; takes the memory of each phase in the place of its time."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, int]] = {}
        self._base = 0
        self._began = ""

    def reset(self) -> None:
        give_back()
        self.found, self._began, self._base = {}, "", resident("VmRSS")

    def begin(self, stage: str) -> None:
        self._began = stage
        Path("/proc/self/clear_refs").write_text("5")

    def end(self) -> None:
        if self._began:
            peak = resident("VmHWM")
            give_back()
            self.found[self._began] = (peak - self._base, resident("VmRSS") - self._base)

    @contextmanager
    def phase(self, name: str, **labels: int) -> Iterator[None]:
        first = {"batch": "load", "inference": "score", "update": "update"}.get(name)
        stage = name if first in self.found else first
        if stage is not None:
            self.begin(stage)
        yield
        if stage is not None:
            self.end()
            self.begin("metrics")  # of the step, after the last of its phases


def schedule(**arguments: Any) -> list[Any]:
    """Megatron's schedule without a model's passes: forward step and loss of each micro-batch."""
    collected = []
    for _ in range(arguments["num_microbatches"]):
        output, loss = arguments["forward_step_func"](arguments["data_iterator"], arguments["model"])
        total, _, found = loss(output)
        if not arguments["forward_only"]:
            total.backward()
        collected.append(found)
    return collected


def model_of(kind: str, config: Any) -> Any:
    """An actor, critic or reference without layers."""
    import torch

    from megarl.learn.memory.residents import Residents
    from megarl.learn.training.model import Model, TrainedModel, micro_batching_for
    from megarl.learn.training.schedule import Head

    class Chunk(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, tokens: torch.Tensor, *_: Any, **more: Any) -> torch.Tensor:
            return (self.weight * 0).expand(*tokens.shape, 1 if kind == "critic" else 2)

        def zero_grad_buffer(self) -> None:
            pass

    class Layerless(TrainedModel):
        def __init__(self) -> None:
            self.model = Model.__new__(Model)
            self.model.head = None if kind == "critic" else Head(VOCAB)
            self.model.parallel, self.model.grid = config.parallel, nullcontext
            self.model.micro_batching = micro_batching_for(config.parallel, config.trainer)
            self.model.dp_rank = torch.distributed.get_rank()
            self.model.chunks, self.model.residents, self.model.gathered = [Chunk()], Residents(), True
            self._routers, self._balanced = [], False
            self.optimizer: Any = SimpleNamespace(inner=SimpleNamespace(zero_grad=lambda: None, optimizer=None))

        def gradient_norm(self) -> float:
            return 1.0

        def step(self, lr: float, watch: Any) -> float:
            return 1.0

    return Layerless().model if kind == "reference" else Layerless()


def fill(store: Any, step: int, answers: int, tokens: int) -> None:
    """Groups of a step, whose responses have ``tokens`` tokens each."""
    import numpy as np

    from megarl.core.schema import Reward, Task, Trajectory, Turn, WeightsSpan, WeightsVersion

    rollout_id = f"train-{step:06d}"
    version, random = WeightsVersion(1, 1), np.random.default_rng(0)
    tasks = [
        Task(f"{rollout_id}/{i}", "s", ({"role": "user", "content": "?"},), "a", {})
        for i in range(answers // ANSWERS_OF_A_GROUP)
    ]
    store.tasks.add(rollout_id, tasks)
    store.rollouts.request(rollout_id, "train", step, version, [task.task_id for task in tasks], ANSWERS_OF_A_GROUP, {})
    for claim in store.groups.claim("benchmark", len(tasks)):
        prompt = random.integers(0, VOCAB, PROMPT).astype(np.int32)
        store.groups.put(claim, [
            Trajectory(
                rollout_id, claim.task.task_id, claim.group_id, index, claim.group_size,
                (
                    Turn("user", prompt),
                    Turn(
                        "model", random.integers(0, VOCAB, tokens).astype(np.int32), 0,
                        -random.random(tokens, dtype=np.float32), (WeightsSpan(0, tokens, version),), "stop",
                    ),
                ),
                Reward(float(index % 2), "ok" if index % 2 else "wrong"),
            )
            for index in claim.indices
        ])  # fmt: skip


def steps_of(config: Any, store: Any) -> Any:
    """An online trainer, of which the step is real."""
    import torch.distributed as dist

    from megarl.core.schema import WeightsVersion
    from megarl.learn import algorithms
    from megarl.train.inference.inference import Inference
    from megarl.train.inference.models import Models
    from megarl.train.part import Services
    from megarl.train.ranks import RunContext
    from megarl.train.rollout import rollouts
    from megarl.train.rollout.reading import NodeReader, RolloutReader
    from megarl.train.step import OnlineSteps
    from megarl.train.update.learner import Learner

    trainer: Any = SimpleNamespace(config=config, algorithm=algorithms.get(config.algorithm.name), timeline=Timeline())
    critic = model_of("critic", config) if config.algorithm.name == "ppo" else None
    trainer.models = SimpleNamespace(
        actor=model_of("actor", config), reference=model_of("reference", config), critic=critic, reward_model=None,
        images=None, head=SimpleNamespace(vocab_size=VOCAB),
    )  # fmt: skip
    trainer.models.finish_gathers = partial(Models.finish_gathers, trainer.models)
    trainer.reporter = SimpleNamespace(
        timeline=trainer.timeline, log=lambda text: None, record_step=lambda *_, **__: None,
        keep_batch=lambda *_: None, dropped=lambda *_: None,
    )  # fmt: skip
    trainer.end_step = lambda state, metrics, version, used: state
    reader = RolloutReader(NodeReader(), store, lambda: False)
    trainer.store = store
    context = trainer.context = RunContext(config, Path(), 1, dist.get_rank())
    asked = rollouts.Rollouts(context, trainer.algorithm, store, trainer.reporter, reader, lambda *_, **__: None, VOCAB)
    weights = SimpleNamespace(publish=lambda step, given: {}, version=WeightsVersion(1, 0), step=0)
    given = {"rollouts": asked, "weights": weights, "reader": reader}
    updates: Any = SimpleNamespace(begin=lambda: None, end=lambda state: {}, admits=lambda state, *_: (True, state))
    ranks: Any = SimpleNamespace(gather=lambda sums: sums)
    trainer.memory = SimpleNamespace(enter=lambda phase: None, phase=None)
    trainer.inference = Inference(config, trainer.algorithm, trainer.models, trainer.memory.enter)
    trainer.learner = Learner(config, trainer.algorithm, trainer.inference, updates, ranks)
    trainer.learner.with_arrays = reader.with_arrays
    steps = OnlineSteps(trainer)
    steps.services = Services(**dict.fromkeys((field.name for field in fields(Services)), None) | given)
    return steps


def measure(algorithm: str, answers: int, tokens: int, ranks: int, folder: str) -> dict[str, tuple[float, float]]:
    """Stage -> bytes a token of the step (peak within it, held after it), beyond what the process has without a step.

    Args:
        folder: Of the store, which rank 0 fills.
    """
    import megatron.core.pipeline_parallel as pipeline
    import torch

    from megarl.buffer.store import Store
    from megarl.config.alarms import AlarmsConfig
    from megarl.config.algorithms import AnyAlgorithmConfig, KLConfig
    from megarl.config.job import SyncConfig
    from megarl.config.schema import Config, ParallelConfig, TrainerConfig
    from megarl.learn.parallel import process_groups
    from megarl.train.ranks import TrainState

    torch.set_num_threads(1)
    process_groups.initialize(ParallelConfig(dp=ranks), seed=0)
    pipeline.get_forward_backward_func = lambda: schedule
    kl = KLConfig(0.01, "k1", "reward", target=0.1) if algorithm == "ppo" else KLConfig(0.01, "k3", "loss", target=0.1)
    config = Config(
        alarms=AlarmsConfig(witness=False),
        parallel=ParallelConfig(dp=ranks),
        sync=SyncConfig(sample_tolerance=1e9),  # the engine's log-probs are made up
        algorithm=AnyAlgorithmConfig(
            name=algorithm, kl=kl, group_size=ANSWERS_OF_A_GROUP, whiten_advantages=algorithm == "ppo"
        ),
        trainer=TrainerConfig(
            tasks_per_step=answers // ANSWERS_OF_A_GROUP, packing=True, max_tokens_per_micro_batch=max(2 * tokens, 8192)
        ),
    )
    first = torch.distributed.get_rank() == 0
    if first:
        store = Store(f"sqlite:///{folder}/store.db")
        fill(store, 0, 2 * ANSWERS_OF_A_GROUP, 64)
        fill(store, 1, answers, tokens)
    torch.distributed.barrier()
    store = store if first else Store(f"sqlite:///{folder}/store.db")
    steps = steps_of(config, store)
    for step in (0, 1):
        steps.step(TrainState("rl", step))
        steps.rank.timeline.end()
    store.close()
    number = answers * (PROMPT + tokens)
    return {stage: (peak / number, held / number) for stage, (peak, held) in steps.rank.timeline.found.items()}


def measured_apart(algorithm: str, answers: int, tokens: int, ranks: int = 1) -> dict[str, tuple[float, float]]:
    """``measure`` in a process for each rank, whose malloc keeps nothing that is freed; the most of any rank."""
    from megarl.run.process import ports

    command = [sys.executable, __file__, "--one", algorithm, "--answers", str(answers), "--tokens", str(tokens)]
    [port] = ports.choose("127.0.0.1", 1, None)
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "4096",
        "MALLOC_TRIM_THRESHOLD_": "4096",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with tempfile.TemporaryDirectory(prefix="megarl-memory-") as folder, ThreadPoolExecutor(ranks) as threads:

        def run(rank: int) -> dict[str, tuple[float, float]]:
            found = subprocess.run(
                [*command, "--ranks", str(ranks), "--folder", folder],
                env=environment | {"RANK": str(rank)}, capture_output=True, text=True, timeout=600,
            )  # fmt: skip
            if found.returncode:
                raise RuntimeError(found.stderr)
            return dict(json.loads(found.stdout.splitlines()[-1]))

        every = list(threads.map(run, range(ranks)))
    largest = {stage: zip(*(found[stage] for found in every), strict=True) for stage in every[0]}
    return {stage: (max(peaks), max(held)) for stage, (peaks, held) in largest.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--algorithms", nargs="+", default=["grpo", "ppo"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4], help="data-parallel ranks, on this machine")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks/host_memory.md")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        sizes = (arguments.answers, arguments.tokens, *arguments.ranks)
        print(json.dumps(measure(arguments.one, *sizes, arguments.folder)))
        return
    lines = [
        f"{arguments.answers:,} answers of {PROMPT} + {arguments.tokens:,} tokens; bytes of one rank for each token of "
        "the step.", "",
        "| algorithm | ranks | stage | peak | held after it |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for algorithm in arguments.algorithms:
        for ranks in arguments.ranks:
            found = measured_apart(algorithm, arguments.answers, arguments.tokens, ranks)
            lines += [f"| {algorithm} | {ranks} | {stage} | {p:.1f} | {h:.1f} |" for stage, (p, h) in found.items()]
    print("\n".join(lines))
    if arguments.write:
        page.write("benchmarks/host_memory.md", "\n".join(lines))


if __name__ == "__main__":
    main()
