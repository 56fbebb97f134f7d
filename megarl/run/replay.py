"""``megarl replay``: compute a kept step of a run again, on one process or on the run's grid, and name the first stage
that differs from what was trained."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.buffer.store import Selection
from megarl.config import Config, load_resolved
from megarl.core.errors import ConfigError
from megarl.core.jobs import ProcessKind
from megarl.core.kept_batches import KeptBatch, KeptValues, kept_steps, path_of, values_path
from megarl.core.metrics import records
from megarl.core.processes.fork import Forked
from megarl.core.schema import Trajectory, file_digest
from megarl.run.data.open_run import stored_run, table
from megarl.run.process import ports
from megarl.run.process.process import ForkServers
from megarl.run.report.data import located, store_url
from megarl.weights.checkpoint.training.manifest import finished, steps_of

if TYPE_CHECKING:
    from megarl.train.replay import ReplayStage

LONGEST_S = 24 * 3600.0
"""Seconds that the ranks of a replayed step may take."""


def replay(run_dir: Path, step: int, *, weights: Path | None = None, same_grid: bool = False) -> int:
    """Compute a step again and print its stages; return 1 if one differs, else 0.

    Args:
        step: Number of the step, from 1.
        weights: Checkpoint of the step before; None for the run's own.
        same_grid: Compute on a process for each rank of the run, where every bit counts.

    Raises:
        ConfigError: the run has no such step, file or checkpoint, or learns from what no kept step has.
        DataError: a file is damaged.
    """
    servers = _servers(run_dir) if same_grid else None
    try:
        return _replay(run_dir, step, weights, servers, same_grid=same_grid)
    finally:
        if servers is not None:
            servers.close()


def _replay(run_dir: Path, step: int, weights: Path | None, servers: ForkServers | None, *, same_grid: bool) -> int:
    config = _settings(run_dir)
    recorded = {int(one["step"]): one for one in records(run_dir / "metrics.jsonl") if "timing_s/step" in one}
    checkpoint = weights or _checkpoint_before(run_dir, step, recorded)
    if step not in recorded or not values_path(run_dir, step).is_file():
        raise ConfigError(
            f"{run_dir} has not kept step {step}; kept are {kept_steps(run_dir) or 'none'}: train with "
            "trainer.keep_batches=true"
        )
    values = KeptValues.read(values_path(run_dir, step))
    rewards = _rewards(config, run_dir, values)
    task = json.dumps([str(run_dir), step, str(checkpoint), same_grid, recorded[step]])
    if same_grid:
        stages = rewards + _on_grid(task, config, servers)
    else:
        [port] = ports.choose("127.0.0.1", 1, None)
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        stages = rewards + _stages(task)
    rows = [[s.name, f"{s.difference:.2e}", f"{s.bound:.0e}", "DIFFERS" if s.differs else "", s.where] for s in stages]
    sys.stdout.write(table([["stage", "difference", "bound", "", "largest"], *rows]) + "\n")
    first = next((stage for stage in stages if stage.differs), None)
    if first is None:
        sys.stdout.write(f"step {step} is what was trained: {len(stages)} stages agree\n")
        return 0
    sys.stdout.write(f"step {step} differs first in its {first.name}: {first.difference:.3e} at {first.where}\n")
    return 1


def _servers(run_dir: Path) -> ForkServers | None:
    """Return what ranks on CPUs are forked from, made before the imports; None if CUDA forbids it. Raises
    ConfigError."""
    config = _resolved(run_dir)
    return ForkServers([config.trainer.num_threads]) if config.parallel.backend == "gloo" else None


def _resolved(run_dir: Path) -> Config:
    """Return the run's settings as they were written. Raises ConfigError."""
    if not (run_dir / "resolved.json").is_file():
        raise ConfigError(f"{run_dir} has no resolved.json; give the directory of a run, e.g. runs/quickstart")
    return load_resolved(run_dir / "resolved.json")


def _settings(run_dir: Path) -> Config:
    """Return the run's settings, with paths as they are now. Raises ConfigError."""
    from megarl.learn import algorithms
    from megarl.train.replay import check_replays

    config = _resolved(run_dir)
    check_replays(config, algorithms.get(config.algorithm.name))
    path = str(located(config, run_dir, config.model.path))
    return replace(config, run=replace(config.run, dir=str(run_dir)), model=replace(config.model, path=path))


def _checkpoint_before(run_dir: Path, step: int, recorded: Mapping[int, object]) -> Path:
    folder = run_dir / "checkpoints"
    found = finished(folder)
    known = dict(zip(steps_of(found), found, strict=True))
    if step - 1 not in known:
        able = [number + 1 for number in sorted(known) if number + 1 in recorded and number + 1 in kept_steps(run_dir)]
        raise ConfigError(
            f"step {step} begins with weights that no checkpoint of {run_dir} has; those of steps {able or 'none'} are "
            "there: give --weights, or train with trainer.checkpoint_interval=1 and trainer.keep_checkpoints"
        )
    return known[step - 1]


def _rewards(config: Config, run_dir: Path, values: KeptValues) -> list[ReplayStage]:
    """Compare the step's rewards with the store's verdicts; [] without a store, or if the trainer changes rewards."""
    from megarl.train.replay import ReplayStage

    if config.reward_model.path is not None or config.buffer.operators or store_url(config, run_dir) is None:
        return []
    of_step = list(zip(values.response_groups.tolist(), values.response_indices.tolist(), strict=True))
    with stored_run(run_dir, Selection()) as run:
        members = run.store.selection.members(list(dict.fromkeys(group for group, _ in of_step)))
    stored = {(one.group_id, one.index): one.reward.score for one in members}
    apart = [
        abs(stored[key] - reward) if key in stored else math.inf
        for key, reward in zip(of_step, values.rewards.tolist(), strict=True)
    ]
    at = max(range(len(apart)), key=apart.__getitem__)
    group, index = of_step[at]
    return [ReplayStage("rewards", apart[at], 0.0, f"response {index} of group {group}")]


def _stages(task: str) -> list[ReplayStage]:
    """Compute the step on this rank."""
    from megarl.train.replay import StepReplay, on_one_process
    from megarl.weights.megatron_private import silence

    silence()
    run, step, checkpoint, same_grid, recorded = json.loads(task)
    run_dir = Path(run)
    config = _settings(run_dir)
    kept, values = KeptBatch.read(path_of(run_dir, step)), KeptValues.read(values_path(run_dir, step))
    grid = config if same_grid else on_one_process(config)
    if grid.parallel.backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    read = partial(_images, run_dir)
    return StepReplay(grid, kept, values, Path(checkpoint), read, exact=same_grid).stages(recorded)


def _images(run_dir: Path, groups: Sequence[str]) -> tuple[list[Trajectory], dict[str, bytes]]:
    """Return the trajectories of groups, and digest -> file of their images."""
    with stored_run(run_dir, Selection()) as run:
        members = run.store.selection.members(list(groups))
        of_tasks = run.store.tasks.images({one.task_id for one in members})
        files = {file_digest(file): file for files in of_tasks.values() for file in files}
        return members, files | run.store.groups.images(list(groups))


def _on_grid(task: str, config: Config, servers: ForkServers | None) -> list[ReplayStage]:
    """Compute the step on a process for each rank. Raises ConfigError with the output of a rank that fails."""
    from megarl.train.replay import ReplayStage

    [port] = ports.choose("127.0.0.1", 1, None)
    ranks, threads = config.parallel.world_size, {"OMP_NUM_THREADS": str(config.trainer.num_threads)}
    shared = {**os.environ, **threads, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory() as folder:
        file, outputs = Path(folder, "task.json"), [Path(folder, f"rank_{rank}.log") for rank in range(ranks)]
        file.write_text(task)
        started = [
            _start(["-m", __name__, str(file)], {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, path, servers)
            for rank, path in enumerate(outputs)
        ]
        if failed := [rank for rank, process in enumerate(started) if process.wait(LONGEST_S)]:
            last = outputs[failed[0]].read_text()[-2000:]
            raise ConfigError(f"rank {failed[0]} could not compute the step again:\n{last}")
        return [ReplayStage(**stage) for stage in json.loads(outputs[0].read_text().splitlines()[-1])]


def _start(
    argv: Sequence[str], env: Mapping[str, str], output: Path, servers: ForkServers | None
) -> Forked | subprocess.Popen[bytes]:
    """Start ``python ARGV``, forked if possible: then all ranks share the imports."""
    with output.open("wb") as file:
        if servers is not None:
            servers.preload(ProcessKind.TRAINER, env)
        server = None if servers is None else servers.of(ProcessKind.TRAINER)
        pid = None if server is None else server.fork(argv, env, file.fileno(), {})
        if pid is not None:
            return Forked(pid)
        return subprocess.Popen([sys.executable, *argv], env=env, stdout=file, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    found = [asdict(stage) for stage in _stages(Path(sys.argv[1]).read_text())]
    sys.stdout.write(json.dumps(found) + "\n")
