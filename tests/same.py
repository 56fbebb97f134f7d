"""``python -m tests.same``: run six jobs with two seeds each and compare what they leave with recorded references.

A change that is not meant to change results passes. One that is meant to records the affected jobs again, with the
reason in its commit::

    python -m tests.same                       # compare all; status 1 where something differs
    python -m tests.same ppo files             # compare some
    python -m tests.same --record colocated    # write the references of a job again

References lie in ``tests/references/``, one file for each kind of processor: oneDNN and torch pick kernels by it, and
other kernels round differently. A digest of some kernel results names the kind. Where a processor has no file, record
one at the commit to compare with.

Compared are kept batches, exported models, the reference model, checkpoints, published weights, tables of the store and
metrics without times. Where time decides which groups a step takes (``completion``), counts and bounds are compared.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from megarl.buffer.store import Store
from megarl.core.kept_batches import KeptBatch, kept_steps, path_of
from tests.loop.test_bad_updates import ALGORITHM
from tests.loop.test_meanwhile import BOUND, Found
from tests.loop.test_meanwhile import SETTINGS as COMPLETION
from tests.loop.test_offline import SMALL, write_pairs
from tests.loop.test_roles import score_model
from tests.system.jobs import TINY, Job

FOLDER = Path(__file__).parent / "references"
LIMIT_S = 900.0
SEEDS = (1, 2)
STEPS = 4
KEPT = (
    f"trainer.steps={STEPS}",
    "trainer.eval_interval=2",
    "trainer.checkpoint_interval=2",
    "trainer.keep_batches=true",
)
NOT_COMPARED = re.compile(
    r"step|training/attempt|check/(verdicts_again|gamed|any-truth)|(other_)?truth/.*|(timing_s|idle|perf|memory)/.*|.*(_s|seconds)(/\w+)?"
)
"""Metrics that depend on the machine's speed or count attempts."""

Facts = dict[str, Any]
"""Name of a part of a run -> digest, number or list."""


def digest(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:16]


def processor() -> str:
    """Return a digest of kernel results; processors that round alike have the same."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    found = [np.float32(0)]
    for rows, inner, columns in ((1, 64, 128), (33, 64, 192), (64, 128, 64), (200, 1536, 96)):
        a, b = (torch.randn(shape, generator=generator) for shape in ((rows, inner), (inner, columns)))
        product = torch.nn.functional.linear(a, b.T.contiguous())
        soft = torch.log_softmax(product, -1).exp() * torch.rsqrt(product.square().mean(-1, keepdim=True) + 1e-6)
        q = a.view(1, 1, rows, inner)
        attention = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        found += [x.numpy() for x in (product, soft, torch.nn.functional.silu(product), attention)]
    return digest(*(np.ascontiguousarray(x).tobytes() for x in found))


# ---------------------------------------------------------------- what a run has left


def tensors(path: Path) -> str:
    found = load_file(path)
    return digest(*(part for name in sorted(found) for part in (name.encode(), raw(found[name]))))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def batches(run_dir: Path) -> Facts:
    found = {}
    for step in kept_steps(run_dir):
        kept = KeptBatch.read(path_of(run_dir, step))
        found[f"batch {step}"] = digest(*(np.ascontiguousarray(part).tobytes() for part in vars(kept).values()))
    return found


def files_of_weights(run_dir: Path) -> Facts:
    """Digests of exported and published models and of every file that the manifests of checkpoints list."""
    found = {
        f"{path.relative_to(run_dir)}": tensors(path)
        for pattern in ("hf/*.safetensors", "reference/*.safetensors", "weights/*/*.safetensors")
        for path in sorted(run_dir.glob(pattern))
    }
    for manifest in sorted(run_dir.glob("checkpoints/global_step_*/state.json")):
        listed = json.loads(manifest.read_text())["files"]
        content = {name: of for name, of in listed.items() if not name.endswith(".metadata")}  # has an order of its own
        found[f"{manifest.parent.relative_to(run_dir)}"] = digest(json.dumps(content, sort_keys=True).encode())
    return found


def metrics(run_dir: Path) -> Facts:
    """A digest for each step and first word of the metrics' names."""
    values: dict[str, dict[str, Any]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if not NOT_COMPARED.fullmatch(name):
                kind = "evaluation" if "val/accuracy" in record else "step"
                values.setdefault(f"metrics {kind} {record['step']} {name.partition('/')[0]}", {})[name] = value
    return {key: digest(json.dumps(found, sort_keys=True).encode()) for key, found in values.items()}


TABLES = {
    "tasks": "task_id, split, position, data_source, prompt, reward_model, extra_info, response",
    "rollouts": "rollout_id, kind, step, num_groups, group_size",
    "groups": "group_id, rollout_id, position, task_id, state, used_by, reason",
    "excluded": '"group_id", step, "index", reason',
    "replays": "group_id, step",
    "versions": "version, step",
}
"""Columns that neither time nor the number of an attempt decides."""


def store(run_dir: Path) -> Facts:
    connection = sqlite3.connect(f"file:{run_dir}/store.db?mode=ro", uri=True)
    found = {}
    for table, columns in TABLES.items():
        rows = sorted(map(repr, connection.execute(f"select {columns} from {table}")))
        found[f"table {table}"] = [len(rows), digest(*(row.encode() for row in rows))]
    connection.close()
    return found


def trajectories(run_dir: Path) -> Facts:
    """A digest of each rollout: tokens, log-probs, scores, verdicts."""
    opened = Store(f"sqlite:///{run_dir}/store.db", read_only=True)
    rollouts: dict[str, list[str]] = {}
    for group in opened.database.read(lambda c: c.exec_driver_sql("select group_id, rollout_id from groups").all()):
        for e in opened.groups.read([group.group_id]):
            parts = [
                (
                    turn.token_ids.tolist(),
                    None if turn.logp is None else turn.logp.tobytes().hex(),
                    [(s.start, s.end) for s in turn.spans],
                )
                for turn in e.turns
            ]
            line = repr((e.group_id, e.index, e.task_id, parts, e.reward.score, e.reward.status, e.finish_reason))
            rollouts.setdefault(group.rollout_id, []).append(line)
    opened.close()
    return {
        f"rollout {name}": [len(lines), digest(*(line.encode() for line in sorted(lines)))]
        for name, lines in rollouts.items()
    }


def everything(run_dir: Path) -> Facts:
    found = batches(run_dir) | files_of_weights(run_dir) | metrics(run_dir)
    return found | (store(run_dir) | trajectories(run_dir) if (run_dir / "store.db").exists() else {})


def resumed(run_dir: Path) -> Facts:
    """As ``everything``, without the versions: a run that was killed publishes some again, under other numbers."""
    return {name: value for name, value in everything(run_dir).items() if name != "table versions"}


def accounts(run_dir: Path) -> Facts:
    """Check bounds of a job whose steps take what is ready, and return what no order of events changes."""
    found = Found(run_dir)
    found.check(sorted(found.metrics))
    connection = sqlite3.connect(f"file:{run_dir}/store.db?mode=ro", uri=True)
    used = connection.execute(
        "select used_by, group_id from groups where state = 'consumed' and used_by > 0"
    ).fetchall()
    left = connection.execute("select count(*) from groups where state in ('claimed', 'pending')").fetchone()[0]
    connection.close()
    steps = Counter(step for step, group in used if group.startswith("train"))
    assert len({group for _, group in used}) == len(used), "a group was used twice"
    return {
        "steps": sorted(steps),
        "most groups of a step": max(steps.values()),
        "bound of lags": max(found.lags) <= BOUND,
        "evaluated steps": sorted(found.metrics),
        "open groups": left,
    }


# ---------------------------------------------------------------- the jobs


def ended(*jobs: Job) -> Path:
    """Wait for the ends of jobs of one run. Raises AssertionError with the output of one that fails."""
    try:
        for job in jobs:
            assert job.wait(LIMIT_S) == 0, job.output.read_text()
    finally:
        for job in jobs:
            job.clean_up()
    return jobs[0].run_dir


def quickstart(run_dir: Path, seed: Sequence[str]) -> Path:
    return ended(Job(run_dir, (*TINY, *KEPT, *seed)).start())


def ppo(run_dir: Path, seed: Sequence[str]) -> Path:
    """Critic, reference and reward model beside the actor, on TP2·DP2; all leave for the disk."""
    scores = score_model(run_dir.with_name("scores"))
    roles = ("trainer", "critic", "reference", "reward_model")
    settings = [
        *TINY, *KEPT, *seed, "algorithm=ppo", "algorithm.group_size=4", "algorithm.kl.coef=0.1",
        "parallel.tp=2", "parallel.dp=2", "reference.refresh=3", "reward_model.coef=0.5", "critic.warmup_steps=1",
        f"reward_model.path={scores}", f"critic.path={scores}", *(f"{role}.offload=disk" for role in roles),
    ]  # fmt: skip
    return ended(Job(run_dir, settings).start())


def colocated(run_dir: Path, seed: Sequence[str]) -> Path:
    """Killed after its third step, which goes on from the checkpoint of the second."""
    job = Job(
        run_dir, (*TINY, *KEPT, *seed, "rollout.placement=colocated", "rollout.offload=sleep", "trainer.offload=memory")
    )
    job.start()
    try:
        job.until(lambda: 3 in job.steps(), "three steps", poll_s=0.002)
        job.kill_all()
    finally:
        job.clean_up()
    return ended(job.start())


def completion(run_dir: Path, seed: Sequence[str]) -> Path:
    """Two engines; one of them evaluates while steps go on."""
    return ended(Job(run_dir, (*COMPLETION, *seed)).start())


def files(run_dir: Path, seed: Sequence[str]) -> Path:
    """An explore program and a trainer, whose weights go as files."""
    settings = (*TINY, *KEPT, *seed, "sync.method=checkpoint", "cluster.heartbeat_s=2")
    explore = Job(run_dir, settings, ("explore",)).start()
    return ended(Job(run_dir, [*settings, "run.mode=train"]).start(), explore)


def preferences(run_dir: Path, seed: Sequence[str]) -> Path:
    """A supervised warm start, then DPO, whose fifth update has a NaN on one rank; the job rolls back."""
    folder = run_dir.parent
    algorithm = folder / "spoiled.py"
    spoiled = ALGORITHM.replace("supervised import SFT", "pairs import DPO").replace("SFT", "DPO")
    algorithm.write_text(spoiled.replace('os.environ.get("SPOILED", "0")', '"5"'))
    rows = [f"taskset.train={write_pairs(folder / 'train.jsonl', 200, 1)}"]
    rows += [f"taskset.eval={write_pairs(folder / 'eval.jsonl', 40, 2)}"]
    settings = [
        "experiment=dpo", "parallel=dp2", *SMALL, *rows, *KEPT[:-1], *seed, f"algorithm.name={algorithm}",
        "trainer.update_filter.on_nonfinite=rollback",
    ]  # fmt: skip
    return ended(Job(run_dir, settings).start())


JOBS: dict[str, tuple[Callable[[Path, Sequence[str]], Path], Callable[[Path], Facts]]] = {
    "quickstart": (quickstart, everything),
    "ppo": (ppo, everything),
    "colocated": (colocated, resumed),
    "completion": (completion, accounts),
    "files": (files, everything),
    "preferences": (preferences, everything),
}
"""Name -> (runs a job, reads what it has left)."""


def facts_of(name: str, seed: int, folder: Path) -> Facts:
    run, read = JOBS[name]
    folder.mkdir(parents=True)
    return read(run(folder / "run", [f"trainer.seed={seed}"]))


def differences(recorded: Facts, found: Facts) -> list[str]:
    """One line for each part that is missing, new or different."""
    lines = [f"{key}: missing" for key in recorded if key not in found]
    lines += [f"{key}: not in the reference" for key in found if key not in recorded]
    shared = (key for key in recorded if key in found)
    return lines + [f"{key}: {found[key]}, recorded {recorded[key]}" for key in shared if found[key] != recorded[key]]


def main(arguments: Iterable[str]) -> int:
    names = [word for word in arguments if word != "--record"] or list(JOBS)
    if unknown := sorted(set(names) - set(JOBS)):
        sys.exit(f"{unknown[0]}: no such job; there are {', '.join(JOBS)}")
    records = "--record" in arguments
    path = FOLDER / f"{processor()}.json"
    references: dict[str, Facts] = json.loads(path.read_text()) if path.is_file() else {}
    missing = [name for name in names if f"{name} 1" not in references]
    if missing and not records:
        sys.exit(
            f"{path} has no reference of {missing[0]}: none was recorded on a processor of this kind. Check out the "
            "commit to compare with, run `python -m tests.same --record` there, and copy the file here"
        )
    failed = 0
    for name in names:
        for seed in SEEDS:
            folder = Path(tempfile.mkdtemp(prefix=f"same-{name}-{seed}-"))
            found = json.loads(json.dumps(facts_of(name, seed, folder / "job")))
            lines = differences(references.get(f"{name} {seed}", {}), found)
            if records:
                references[f"{name} {seed}"] = found
                path.write_text(json.dumps(references, indent=1, sort_keys=True) + "\n")
                print(f"{name}, seed {seed}: recorded {len(found)} parts; {len(lines)} are new or differ")
            elif lines:
                failed += 1
                print(f"{name}, seed {seed}: {len(lines)} of {len(found)} parts differ; the run is in {folder}")
            else:
                print(f"{name}, seed {seed}: {len(found)} parts are equal")
            print("".join(f"  {line}\n" for line in lines), end="", flush=True)
            if records or not lines:
                shutil.rmtree(folder)
    print(f"{len(names) * len(SEEDS) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
