"""A thousand faulty weight syncs, which must all be refused, and ten thousand healthy ones, which must all pass.

``python -m tests.loop.sync_mutants [fp8] [MUTANTS HEALTHY [RESULTS]]``, ``fp8`` with an engine in 8 bits. All run over
one real engine in this process (``local_engine``), two trainer ranks, the real publisher, plan, shared memory,
receiver, digests and probe; only HTTP and gloo's sockets, which carry offsets of buckets here, are replaced
(``local_link``). Each mutant is followed by a healthy sync of the same weights, which must pass. What has ended stands
in RESULTS (a file in ``runs/soak/`` for each commit) and is not repeated.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from megarl.config.schema import ModelConfig
from megarl.core.schema import WeightsVersion
from megarl.engines.client.probe import PROBE_TOLERANCES, ProbeText
from megarl.engines.sync import link
from megarl.learn.training.optimizer import whole_digests
from megarl.run.supervise.process_specs import engine_process
from megarl.train.sync import fleet
from megarl.weights.reshard import execute
from tests.loop.conftest import TINY_ROLLOUT
from tests.loop.engines import HOST, perturbed, tiny_engine, transformers_logp
from tests.loop.local_engine import LocalControl, LocalEngine
from tests.loop.local_link import join
from tests.loop.sync_faults import KINDS, Lab, Weights
from tests.loop.trainers import checkpoint_tensors, ranks_of, shards

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "runs" / "soak"
MUTANTS, HEALTHY = 1000, 10_000
SEED = 40
SETS = 16
"""Sets of weights that are published in turn."""
BUCKET_BYTES = 32768
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
TEXT = [1, 9, 77, 150, 199, 4, 4, 31, 88, 12, 63, 140]
CHECKS = {
    "written": r"what the optimizer last wrote",
    "digest": r"digest sent",
    "form": r"other numbers in 8 bits than those made from what arrived",
    "sum": r"add up to other numbers than those sent",
    "number": r"message -?\d+ of (that|another) channel arrived",
    "count": r"did not get all their elements|has shape .* in the layout",
    "address": r"the sync moved tensors",
    "padding": r"the padding of .* is not zero",
    "version": r"the engine has version",
    "plan": r"do not agree on the weights",
    "probe": r"of the probe text",
    "decode": r"tokens that the engine decoded",
}
"""Check -> words of its error."""
EIGHT_BITS = 0.06
"""Tolerance of the probe text for an engine in 8 bits."""
UNSEEN = ("prompts and decode with one old layer", "decode with one old layer")
"""Kinds whose differences are as large as those that 8 bits make."""
SAVE = 250
"""Healthy syncs between two lines of the results."""


@contextmanager
def lab_of(folder: Path, *, eight_bits: bool = False) -> Iterator[tuple[Lab, list[Weights]]]:
    """An engine, two ranks that are connected to it, and sets of weights, of which the engine has the first."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if eight_bits else "float32"
    rollout = replace(TINY_ROLLOUT, weight_dtype="fp8") if eight_bits else TINY_ROLLOUT
    running = tiny_engine(folder, rollout=rollout, dtype=dtype, sizes=SIZES)
    running = replace(
        running,
        config=replace(running.config, sync=replace(running.config.sync, bucket_bytes=BUCKET_BYTES)),
        _url="local",
    )
    LocalControl.engine = LocalEngine(running.model_path, eight_bits=eight_bits)
    for module, name, ours in (
        (fleet, "EngineControl", LocalControl), (link, "join", join)
    ):  # fmt: skip
        setattr(module, name, ours)
    for name in ("buckets_from", "buckets_to"):  # of three ranks in this process, not one
        setattr(execute, name, lru_cache(None)(getattr(execute, name).__wrapped__))
    ranks = ranks_of(running)
    model = Qwen3ForCausalLM.from_pretrained(running.model_path, attn_implementation="eager").eval()
    sets = []
    for seed in range(SETS):
        other = perturbed(model, seed)
        full = checkpoint_tensors(other)
        of_ranks = [shards(full, ranks.layout, rank) for rank in range(len(ranks.publishers))]
        written = [whole_digests(tensors) for tensors in of_ranks]
        logp = transformers_logp(other, TEXT[:1], TEXT[1:]).tolist()
        text = ProbeText(TEXT, logp, EIGHT_BITS if eight_bits else PROBE_TOLERANCES[dtype])
        sets.append(Weights(of_ranks, written, text))
    lab = Lab(LocalControl.engine, ranks, BUCKET_BYTES, sets[0], sets[0])
    if failure := sync(lab, WeightsVersion(1, 1)):
        raise failure
    yield lab, sets


def sync(lab: Lab, version: WeightsVersion) -> Exception | None:
    """Publish ``lab.new`` as a trainer does, with its tensors as a fault has left them, and probe; the first rank's
    error."""
    ranks, new = lab.ranks, lab.new
    tensors = lab.tensors or new.shards
    if any(publisher.connection.transport is None for publisher in ranks.publishers):
        for failure in ranks.call(lambda rank, publisher: publisher.connect()):
            if failure is not None:
                return failure
    for answer in ranks.call(lambda rank, p: p.publish(tensors[rank], version, written=new.written[rank])):
        if isinstance(answer, Exception):
            return answer
    for answer in ranks.call(lambda rank, p: p.probe(new.probe)):
        if isinstance(answer, Exception):
            return answer
    return None


def check_of(failure: Exception) -> str:
    """Name of the check whose words an error has; all of it where there is none."""
    return next((check for check, words in CHECKS.items() if re.search(words, str(failure))), str(failure))


def mutants(count: int) -> list[str]:
    """Kinds of so many mutants, in proportion to a thousand, and each kind at least once; in a random order."""
    assert sum(row.count for row in KINDS.values()) == MUTANTS
    kinds = [kind for kind, row in KINDS.items() for _ in range(max(1, round(row.count * count / MUTANTS)))]
    random.Random(SEED).shuffle(kinds)
    return kinds


class Versions:
    """Versions that no sync had."""

    def __init__(self) -> None:
        self._n = 1

    def next(self) -> WeightsVersion:
        self._n += 1
        return WeightsVersion(1, self._n)


def run_mutant(lab: Lab, kind: str, number: int, versions: Versions) -> str:
    """Check that refuses mutant ``number``; ``passed`` where none does."""
    rng = random.Random(f"{SEED} {kind} {number}")
    lab.tensors = list(lab.new.shards)
    with KINDS[kind].fault(lab, rng):
        failure = sync(lab, versions.next())
    lab.tensors = []
    return "passed" if failure is None else check_of(failure)


def run(
    lab: Lab,
    sets: Sequence[Weights],
    kinds: Sequence[str],
    healthy: int,
    results: Path,
    done: Sequence[Mapping[str, Any]],
) -> tuple[Counter[tuple[str, str]], list[str], int]:
    """Run mutants and healthy syncs that are not ``done``; return how often which check caught which kind, what went
    wrong, and the number of healthy syncs."""
    versions, rng = Versions(), random.Random(SEED)
    found = Counter((line["kind"], line["caught_by"]) for line in done if "kind" in line)
    wrong = [line["wrong"] for line in done if "wrong" in line]
    passed = sum(line.get("healthy", 0) for line in done)
    known = {line["mutant"] for line in done if "mutant" in line}

    def write(**line: Any) -> None:
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def publish_whole(what: str) -> int:
        failure = sync(lab, versions.next())
        if failure is None:
            return 1
        wrong.append(f"{what}: {failure}")
        write(wrong=wrong[-1])
        return 0

    for number, kind in enumerate(kinds):
        if number in known:
            continue
        lab.old, lab.new = lab.new, rng.choice([w for w in sets if w is not lab.new])
        caught_by = run_mutant(lab, kind, number, versions)
        found[kind, caught_by] += 1
        again = publish_whole(f"after mutant {number} ({kind})")
        passed += again
        write(mutant=number, kind=kind, caught_by=caught_by, healthy=again)
        if number % 100 == 99:
            print(f"{number + 1} mutants", flush=True)
    while passed < healthy and len(wrong) < 10:
        whole = 0
        for _ in range(min(SAVE, healthy - passed)):
            lab.old, lab.new = lab.new, rng.choice([w for w in sets if w is not lab.new])
            whole += publish_whole("healthy")
        passed += whole
        write(healthy=whole)
        if passed % 1000 < SAVE:
            print(f"{passed} healthy syncs", flush=True)
    return found, wrong, passed


def table(found: Mapping[tuple[str, str], int]) -> str:
    """Markdown: kinds, mutants and what caught how many."""
    lines = ["| mutants | number | caught by |", "|---|---|---|"]
    for kind in (kind for kind in KINDS if any(name == kind for name, _ in found)):
        checks = {check: n for (name, check), n in found.items() if name == kind}
        caught = ", ".join(check if len(checks) == 1 else f"{check} {n}" for check, n in sorted(checks.items()))
        lines.append(f"| {kind} | {sum(checks.values())} | {caught} |")
    return "\n".join(lines)


def unexpected(found: Mapping[tuple[str, str], int]) -> list[str]:
    """Kinds of which mutants passed, or were refused by something else than the check that is there for them."""
    return [f"{n} x {kind}: {check}" for (kind, check), n in found.items() if check not in KINDS[kind].caught_by]


def environment() -> dict[str, str]:
    """Environment of an engine in this process; it must be there before torch is imported."""
    return {
        **engine_process("", TINY_ROLLOUT, ModelConfig(), HOST, 0)[1],
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def main() -> None:
    """Run what is left at this commit, and print the table. Status 1 where a mutant passed or a healthy sync did
    not."""
    own = environment()
    if any(os.environ.get(name) != value for name, value in own.items()):
        os.execve(sys.executable, [sys.executable, "-m", "tests.loop.sync_mutants", *sys.argv[1:]], os.environ | own)
    torch.set_num_threads(1)
    logging.disable()  # each refused sync would log its trace
    disable_progress_bar()
    eight_bits, given = "fp8" in sys.argv, [word for word in sys.argv[1:] if word != "fp8"]
    count, healthy = map(int, given[:2] or (MUTANTS, HEALTHY))
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    name = f"sync_mutants_{'fp8_' * eight_bits}{commit}_{count}_{healthy}.jsonl"
    results = Path(given[2]) if len(given) > 2 else RESULTS / name
    kinds = [kind for kind in mutants(count) if not (eight_bits and kind in UNSEEN)]
    results.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, lab_of(Path(folder) / "engine", eight_bits=eight_bits) as (lab, sets):
        found, wrong, passed = run(lab, sets, kinds, healthy, results, done)
    print(table(found))
    for line in [*unexpected(found), *wrong]:
        print("WRONG", line)
    caught = sum(n for (kind, check), n in found.items() if check in KINDS[kind].caught_by)
    print(f"{time.monotonic() - start:.0f} s at {commit}, seed {SEED}")
    print(f"{caught} of {found.total()} mutants caught, {len(wrong)} alarms in {passed + len(wrong)} healthy syncs")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(bool(unexpected(found) or wrong)))  # vLLM's threads wait for nothing


if __name__ == "__main__":
    main()
