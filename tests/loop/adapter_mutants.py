"""Faulty weight syncs of a model with adapters, which must all be refused, and healthy ones, which must all pass.

``python -m tests.loop.adapter_mutants merged|separate [EACH HEALTHY [FOLDER]]``: EACH mutants of every kind. The model,
the first set of weights as PEFT's files and the engine's log-probs with it stay in FOLDER. All run over one real engine
in this process, as in ``sync_mutants``: two trainer ranks, the real publisher, plan, receiver, digests, probe and test
adapter. What a trainer computes is transformers' model with W + scale · B·A of float64 in it.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from megarl.config.lora import LoraConfig
from megarl.core.schema import WeightsVersion
from megarl.engines.client.probe import PROBE_TOLERANCES, ProbeText
from megarl.engines.sync import link
from megarl.learn.training.optimizer import whole_digests
from megarl.train.sync import fleet
from megarl.train.sync.probe import ADAPTER_SIZE
from megarl.weights.checkpoint.formats.hf import read_hf_config
from megarl.weights.reshard import execute
from megarl.weights.reshard.adapters import (
    AdaptedModel,
    Factors,
    MergedTensors,
    SeparateTensors,
    adapter_layout,
    factors_of,
    local_adapters,
    saved_whole,
)
from tests.loop.adapter_faults import KINDS, AdapterLab, AdapterWeights, Way
from tests.loop.conftest import TINY_ROLLOUT
from tests.loop.engines import tiny_engine, transformers_logp
from tests.loop.local_engine import LocalControl, LocalEngine
from tests.loop.local_link import join
from tests.loop.sync_mutants import BUCKET_BYTES, SIZES, TEXT, Versions, environment
from tests.loop.trainers import checkpoint_tensors, ranks_of, shards
from tests.parallel.peft_twin import write_adapter

LORA = LoraConfig(rank=4, alpha=6.0, rank_pattern={"k_proj": 3}, modules_to_save=["model.norm"])
EACH, HEALTHY = 1, 40
SEED = 64
SETS = 6
"""Sets of weights that are published in turn."""
COMPUTED = "computed.json"
"""Has ``TEXT``, and its log-probs that the engine computes with the first set."""
NEAR = 1e-6
"""Difference of a set from the one before it, as an update of a small learning rate makes it: no probe sees it."""
CHECKS = {
    "trial": r"does not compute with a test adapter",
    "untried": r"has not computed with a test adapter yet",
    "written": r"what the optimizer last wrote",
    "sent": r"is not (A|scale · B|W \+ scale · B·A, added in float32)|is not sent as the trainer has it",
    "base": r"the model under the adapters has changed",
    "still": r"weights that training does not change are other ones in the engine",
    "covered": r"a sync would not deliver them",
    "digest": r"digest sent",
    "number": r"message -?\d+ of (that|another) channel arrived",
    "count": r"did not get all their elements",
    "padding": r"the padding of .* is not zero",
    "layer": r"in a LoRA layer that is no layer of the model",
    "address": r"the sync moved tensors",
    "dropped": r"has dropped its adapter",
    "without": r"has sync.adapter=|has announced no model.lora",
    "lost": r"does not have the rest of the weights",
    "plan": r"do not agree on the weights",
    "cache": r"kept its prefix cache",
    "probe": r"of the probe text",
    "decode": r"tokens that the engine decoded",
}
"""Check -> words of its error."""


class Trainers:
    """What two trainer ranks have: the model, its layouts, and adapters that are made for them."""

    def __init__(self, path: Path, ranks: int, layout: object, way: Way) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        self.full = checkpoint_tensors(self.model)
        self.factors: dict[str, Factors] = factors_of(read_hf_config(path), LORA)
        self.way, self.base = way, layout
        self.adapters = adapter_layout(layout, self.factors)  # type: ignore[arg-type]
        self.local = [local_adapters(layout, self.factors, rank) for rank in range(ranks)]  # type: ignore[arg-type]
        self.saved = saved_whole({name: tuple(tensor.shape) for name, tensor in self.full.items()}, LORA)
        # Tensors of the model itself are the same objects in every set, as a trainer's are.
        self.own = [shards(self.full, layout, rank) for rank in range(ranks)]  # type: ignore[arg-type]
        self.saved_locals = frozenset(
            row.local
            for row in layout.rows  # type: ignore[attr-defined]
            if not set(self.saved).isdisjoint(row.parts)
        )

    def drawn(self, seed: int, size: float) -> dict[str, torch.Tensor]:
        """A's, B's and what is saved whole; ``size``: of B's."""
        generator, found = torch.Generator().manual_seed(seed), {}
        for own in self.factors.values():
            found[own.a] = torch.randn(own.rank, own.shape[1], generator=generator) / own.shape[1] ** 0.5
            b = torch.randn(own.shape[0], own.rank, generator=generator)
            found[own.b] = b * (size / (own.scale * own.rank**0.5))
        for name in self.saved:
            found[name] = self.full[name] + 0.05 * torch.randn(self.full[name].shape, generator=generator)
        return found

    def near(self, tensors: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
        """The same, changed by an update of a small learning rate."""
        generator = torch.Generator().manual_seed(seed)
        return {name: t + NEAR * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}

    def weights(self, tensors: Mapping[str, torch.Tensor]) -> AdapterWeights:
        """What the ranks send, and the log-probs that belong to it."""
        models = []
        for rank, own in enumerate(self.own):
            trained = shards({**self.full, **tensors}, self.base, rank)  # type: ignore[arg-type]
            with_saved = {name: trained[name] if name in self.saved_locals else own[name] for name in own}
            factors = shards(dict(tensors), self.adapters, rank)
            saved = self.saved_locals & own.keys()
            models.append(AdaptedModel(with_saved, factors, self.local[rank], saved))
        kind = MergedTensors if self.way == "merged" else SeparateTensors
        written = [whole_digests(model.trained) for model in models]
        logp = transformers_logp(self._merged(tensors), TEXT[:1], TEXT[1:]).tolist()
        text = ProbeText(TEXT, logp, PROBE_TOLERANCES["float32"])
        return AdapterWeights([kind(model) for model in models], written, text)

    def _merged(self, tensors: Mapping[str, torch.Tensor]) -> Qwen3ForCausalLM:
        model = copy.deepcopy(self.model)
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, own in self.factors.items():
                product = tensors[own.b].double() @ tensors[own.a].double()
                named[name].copy_((self.full[name].double() + own.scale * product).float())
            for name in self.saved:
                named[name].copy_(tensors[name])
        return model


@contextmanager
def lab_of(folder: Path, way: Way) -> Iterator[tuple[AdapterLab, list[AdapterWeights]]]:
    """An engine, two ranks, and sets of weights, of which the engine has the first; every second one is near the one
    before it."""
    running = tiny_engine(folder, rollout=TINY_ROLLOUT, sizes=SIZES)
    config = running.config
    config = replace(
        config,
        model=replace(config.model, lora=LORA),
        sync=replace(config.sync, bucket_bytes=BUCKET_BYTES, adapter=way, timeout_s=5.0),
    )
    running = replace(running, config=config, _url="local")
    LocalControl.engine = LocalEngine(running.model_path, lora=LORA if way == "separate" else None)
    for module, name, ours in ((fleet, "EngineControl", LocalControl), (link, "join", join)):
        setattr(module, name, ours)
    for name in ("buckets_from", "buckets_to"):  # of three ranks in this process, not one
        setattr(execute, name, lru_cache(None)(getattr(execute, name).__wrapped__))
    ranks = ranks_of(running)
    trainers = Trainers(running.model_path, len(ranks.publishers), ranks.layout, way)
    sets: list[AdapterWeights] = []
    for seed in range(SETS // 2):
        tensors = trainers.drawn(seed, 0.3)
        sets += [trainers.weights(tensors), trainers.weights(trainers.near(tensors, seed))]
    write_adapter(running.model_path, LORA, trainers.drawn(0, 0.3))
    begun = trainers.weights(trainers.drawn(SETS, 0.0))
    trial = trainers.weights(trainers.drawn(SETS + 1, ADAPTER_SIZE))
    lab = AdapterLab(LocalControl.engine, ranks, BUCKET_BYTES, sets[0], sets[0], trial=trial, begun=begun, way=way)
    if failure := sync(lab, WeightsVersion(1, 1)):
        raise failure
    computed = LocalControl("local", "").probe(TEXT).prefill
    (folder / COMPUTED).write_text(json.dumps({"text": TEXT, "logp": computed}))
    yield lab, sets


def sync(lab: AdapterLab, version: WeightsVersion) -> Exception | None:
    """Publish ``lab.new`` as a trainer does: with a test adapter first where the engine was not tried, and probe; the
    first rank's error."""
    ranks, new, trial = lab.ranks, lab.new, lab.trial
    tensors = lab.tensors or new.shards
    if any(publisher.connection.transport is None for publisher in ranks.publishers):
        for failure in ranks.call(lambda rank, publisher: publisher.connect()):
            if failure is not None:
                return failure
    if ranks.publishers[0].untried():
        tried = WeightsVersion(version.attempt, 0)

        def try_adapter(rank: int, publisher: object) -> None:
            of_rank = {"written": trial.written[rank], "probe": trial.probe}
            publisher.try_adapter(trial.shards[rank], tried, **of_rank)  # type: ignore[attr-defined]

        for failure in ranks.call(try_adapter):
            if failure is not None:
                return failure
    for answer in ranks.call(lambda rank, p: p.publish(tensors[rank], version, written=new.written[rank])):
        if isinstance(answer, Exception):
            return answer
    for answer in ranks.call(lambda rank, p: p.probe(new.probe)):
        if isinstance(answer, Exception):
            return answer
    return None


def forget(lab: AdapterLab) -> None:
    """Make the engine one that has just joined."""
    publisher = lab.ranks.publishers[0]
    publisher.tried, publisher.whole = set(), set()


def check_of(failure: Exception) -> str:
    """Name of the check whose words an error has; all of it where there is none."""
    return next((check for check, words in CHECKS.items() if re.search(words, str(failure))), str(failure))


def run_mutant(lab: AdapterLab, kind: str, number: int, versions: Versions) -> str:
    """Check that refuses a mutant; ``passed`` where none does."""
    rng = random.Random(f"{SEED} {kind} {number}")
    row = KINDS[kind]
    if row.at_start:
        forget(lab)
        lab.new = lab.begun
    lab.tensors = list(lab.new.shards)
    try:
        with row.fault(lab, rng):
            failure = sync(lab, versions.next())
    finally:
        lab.tensors = []
    return "passed" if failure is None else check_of(failure)


def run(
    lab: AdapterLab, sets: list[AdapterWeights], each: int, healthy: int
) -> tuple[Counter[tuple[str, str]], list[str], int]:
    """Run mutants of every kind, then healthy syncs; return how often which check caught which kind, what went wrong,
    and the number of healthy syncs."""
    versions, rng = Versions(), random.Random(SEED)
    found, wrong, passed = Counter[tuple[str, str]](), list[str](), 0

    def publish_whole(what: str) -> int:
        failure = sync(lab, versions.next())
        if failure is not None:
            wrong.append(f"{what}: {failure}")
        return int(failure is None)

    def next_of(pairs: bool) -> None:
        """Go on to weights that a small update has made of the engine's; to any others otherwise."""
        if not pairs:
            lab.old, lab.new = lab.new, rng.choice([w for w in sets if w is not lab.new])
            return
        at = rng.randrange(len(sets) // 2)
        lab.old, lab.new = sets[2 * at], sets[2 * at + 1]
        lab.new = lab.old
        publish_whole("before a small update")
        lab.new = sets[2 * at + 1]

    names = [name for name, row in KINDS.items() if lab.way in row.ways for _ in range(each)]
    rng.shuffle(names)
    for number, kind in enumerate(names):
        next_of(KINDS[kind].near)
        began = time.monotonic()
        caught_by = run_mutant(lab, kind, number, versions)
        found[kind, caught_by] += 1
        print(f"{kind}: {caught_by} ({time.monotonic() - began:.1f} s)", flush=True)
        forget_after = caught_by == "passed"
        if forget_after:  # whatever it has left
            forget(lab)
        passed += publish_whole(f"after {kind}")
    while passed < healthy and len(wrong) < 10:
        lab.old, lab.new = lab.new, rng.choice([w for w in sets if w is not lab.new])
        if passed % 20 == 0:
            forget(lab)
            lab.new = lab.begun
        passed += publish_whole("healthy")
    return found, wrong, passed


def unexpected(found: Mapping[tuple[str, str], int]) -> list[str]:
    """Kinds of which mutants passed, or were refused by something else than the check that is there for them."""
    return [f"{n} x {kind}: {check}" for (kind, check), n in found.items() if check not in KINDS[kind].caught_by]


def main() -> None:
    """Run all, and print what caught what. Status 1 where a mutant passed or a healthy sync did not."""
    own = environment()
    if any(os.environ.get(name) != value for name, value in own.items()):
        os.execve(sys.executable, [sys.executable, "-m", "tests.loop.adapter_mutants", *sys.argv[1:]], os.environ | own)
    torch.set_num_threads(1)
    logging.disable()  # each refused sync would log its trace
    disable_progress_bar()
    way: Way = "separate" if sys.argv[1] == "separate" else "merged"
    each, healthy = map(int, sys.argv[2:4] or (EACH, HEALTHY))
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary, lab_of(Path((*sys.argv[4:], temporary)[0]), way) as (lab, sets):
        print(f"made in {time.monotonic() - start:.0f} s", flush=True)
        found, wrong, passed = run(lab, sets, each, healthy)
    for line in [*unexpected(found), *wrong]:
        print("WRONG", line)
    caught = sum(n for (kind, check), n in found.items() if check in KINDS[kind].caught_by)
    print(f"{time.monotonic() - start:.0f} s, {way}, seed {SEED}")
    print(f"{caught} of {found.total()} mutants caught, {len(wrong)} alarms in {passed + len(wrong)} healthy syncs")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(bool(unexpected(found) or wrong)))  # vLLM's threads wait for nothing


if __name__ == "__main__":
    main()
