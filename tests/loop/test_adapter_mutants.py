"""Faulty weight syncs of adapters are refused, healthy ones are not: each kind once, merged and as adapters of the
engine's own. Engines of both ways and the trainer compute the same with one adapter."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from megarl.config.schema import ParallelConfig
from megarl.weights.checkpoint.formats import peft
from megarl.weights.checkpoint.formats.hf import read_hf_config
from tests.loop.engines import VOCAB
from tests.loop.zygote import Zygote
from tests.parallel.grid import run_grid
from tests.parallel.peft_twin import FOLDER
from tests.parallel.test_lora import make_actor

WAYS = ("merged", "separate")
LEAST = 38
"""Kinds of mutants of each way."""


def check(zygote: Zygote, folder: Path, *, each: int, healthy: int, timeout_s: float) -> None:
    """Run both ways at the same time."""
    programs = {}
    for way in WAYS:
        argv = [sys.executable, "-m", "tests.loop.adapter_mutants", way, str(each), str(healthy)]
        argv.append(str(folder / f"{way}_engine"))
        programs[way] = zygote.start(argv, {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}, folder / way)
    for way, program in programs.items():
        ended, log = program.wait(timeout_s), (folder / way).read_text()
        caught = re.fullmatch(r"(\d+) of (\d+) mutants caught, 0 alarms in (\d+) healthy syncs", log.splitlines()[-1])
        assert ended and caught, log
        assert caught[1] == caught[2] and int(caught[2]) >= LEAST * each and int(caught[3]) >= healthy, log


def trainer_logp(rank: int, model: Path, tokens: list[int]) -> torch.Tensor:
    """Runs in each rank: log-probs of ``tokens[1:]`` with the adapter that lies beside the model."""
    from megarl.learn.batching import Sequences

    lora = peft.lora_of(model / FOLDER, read_hf_config(model))
    actor = make_actor(model, ParallelConfig(tp=2), lora, VOCAB).model
    length = len(tokens)
    text = Sequences(torch.tensor(tokens), torch.tensor([length]), torch.arange(length) < length - 1)
    return actor.outputs(text, [actor.micro_batches(text)], temperature=1.0)[:-1]


@pytest.mark.timeout(240)
def test_faulty_syncs_of_adapters_are_caught_and_healthy_ones_pass(zygote: Zygote, tmp_path: Path) -> None:
    check(zygote, tmp_path, each=1, healthy=LEAST, timeout_s=110)
    merged, separate = (json.loads((tmp_path / f"{way}_engine" / "computed.json").read_text()) for way in WAYS)
    engines = [torch.tensor(each["logp"]) for each in (merged, separate)]
    torch.testing.assert_close(*engines, rtol=0, atol=1e-5)
    for trainer in run_grid(2, trainer_logp, tmp_path / "merged_engine" / "model", merged["text"]):
        for engine in engines:
            torch.testing.assert_close(engine, trainer, rtol=0, atol=1e-5)


@pytest.mark.soak
@pytest.mark.timeout(1900)
def test_a_thousand_healthy_syncs_of_adapters(zygote: Zygote, tmp_path: Path) -> None:
    check(zygote, tmp_path, each=5, healthy=1000, timeout_s=900)
