"""Jobs that are disturbed, and what they must have in common with ``whole_job``."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from megarl.buffer.store import Store
from megarl.weights.checkpoint.training.manifest import finished
from tests.loop.held import Held
from tests.system.jobs import START_S, Job

ROLLOUTS = ("eval-before", "train-000000", "train-000001", "train-000002", "eval-after")
NOT_COMPARED = re.compile(
    r"timing_s|idle|perf|memory|rollout|sync|reward/|training/attempt|check/(greedy|verdicts_again|gamed|any-truth)"
    r"|(other_)?truth/"
)
"""What depends on the machine, on where rewards are computed or engines are, or counts attempts."""


def kill(job: Job, role: str, pid: int) -> None:
    """Of a process known before: to look for it takes longer than what it is to be killed in."""
    os.kill(pid, signal.SIGKILL)
    job.until(lambda: f"{role} was ended by signal 9" in job.output.read_text(), f"the end of {role} noticed")


def has(job: Job, role: str) -> bool:
    """True if a process of the role is there."""
    with suppress(AssertionError, FileNotFoundError, ProcessLookupError):
        return bool(job.pid_of(role))
    return False


def groups(job: Job, rollout: str, state: str) -> int:
    return len(job.query(f"select 1 from groups where rollout_id = '{rollout}' and state = '{state}'"))


def items(run_dir: Path) -> dict[str, Any]:
    """Every answer of every rollout: what was sampled, by which weights, and what it got."""
    store = Store(f"sqlite:///{run_dir}/store.db")
    found: dict[str, Any] = {}
    for rollout in ROLLOUTS:
        for e in store.groups.trajectories(rollout):
            key = f"{rollout} {e.group_id} {e.index}"
            assert key not in found
            logp = np.asarray(e.response.logp).tobytes().hex()
            versions = [(s.start, s.end, str(s.version)) for s in e.response.spans]
            found[key] = (
                e.task_id,
                e.response.token_ids.tolist(),
                logp,
                versions,
                e.reward.score,
                e.reward.status,
                e.finish_reason,
            )
    store.close()
    return found


def learned(run_dir: Path) -> dict[str, Any]:
    """Metrics of every step, as last written, and digests of the exported weights."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {
        f"step {record['step']}: {name}": value
        for record in records
        for name, value in record.items()
        if not NOT_COMPARED.match(name)
    }
    weights = load_file(run_dir / "hf" / "model.safetensors")
    bits = {name: tensor.flatten().view(torch.uint8).numpy() for name, tensor in weights.items()}
    return found | {name: sha256(each.tobytes()).hexdigest() for name, each in bits.items()}


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    """Metrics of each step."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "actor/pg_loss" in record]


@contextmanager
def left_alone(run_dir: Path, settings: Sequence[str], limit_s: float = START_S) -> Iterator[Path]:
    """Directory of a job that has ended by itself."""
    job = Job(run_dir, settings).start()
    try:
        assert job.wait(limit_s) == 0, job.output.read_text()
        yield job.run_dir
    finally:
        job.clean_up()


def kill_in_step(job: Job, held: Held, after: int, resumed: int) -> None:
    """Kill all of a job that holds back answers of its training rollouts: while one is held back that was scored when
    ``after`` steps were recorded, and the checkpoint of step ``resumed`` is whole.

    The job cannot end before: with k = ``sync.max_staleness`` it has at least ``after`` + k + 1 steps, so the
    publication after step ``after`` asks for more groups.
    """
    held.until(job, "train", lambda: after in job.steps(), f"{after} steps")
    checkpoints = job.run_dir / "checkpoints"
    job.until(lambda: f"global_step_{resumed}" in (p.name for p in finished(checkpoints)), f"checkpoint {resumed}")
    job.kill_all()
    held.release("train")
    assert job.steps() == list(range(1, after + 1))


@contextmanager
def whole_and_killed(
    root: Path,
    settings: Sequence[str],
    after: int,
    resumed: int,
    look: Callable[[Job], None] = lambda job: None,
    then: Sequence[str] = (),
) -> Iterator[tuple[Path, Path]]:
    """Directories of a job that was left alone, and of one that was killed when ``after`` steps were recorded
    (``kill_in_step``), looked at, and resumed after step ``resumed``, with the settings ``then`` as well."""
    held = Held(root)
    settings = (*settings, *held.settings)
    whole, killed = Job(root / "whole", settings).start(), Job(root / "killed", settings)
    try:
        assert whole.wait(START_S) == 0, whole.output.read_text()
        held.hold("train")
        killed.start()
        kill_in_step(killed, held, after, resumed)
        look(killed)
        again = Job(root / "killed", (*settings, *then)).start()
        try:
            assert again.wait(START_S) == 0, again.output.read_text()
            assert f"resumed from {root}/killed/checkpoints/global_step_{resumed}" in again.output.read_text()
        finally:
            again.clean_up()
        yield whole.run_dir, killed.run_dir
    finally:
        for job in (killed, whole):
            if job.has_started:
                job.clean_up()
