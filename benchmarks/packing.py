"""Packed against padded batches: how full micro-batches are, and the time of one update, side by side in one run.

    python benchmarks/packing.py [--sequences 64] [--rounds 3]

Lengths are long-tailed like those of reasoning answers: log-normal with a median of ``--median`` tokens, cut at
``--longest``. The model is small and real, the update is the trainer's: forward, backward and optimizer step of a
supervised loss on one CPU process.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import page
import torch

from megarl.config.algorithms import AlgorithmConfig
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from megarl.learn import algorithms
from megarl.learn.batching import Sequences
from megarl.learn.batching.micro import MicroBatching, deal

VOCAB = 512


def lengths_of(number: int, median: int, longest: int, seed: int = 0) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 1.0, number)
    return [int(n) for n in np.clip(drawn, 8, longest)]


def fill() -> list[str]:
    """How full micro-batches are, for DeepSeek-R1's sizes: 8,192 answers of up to 32,768 tokens in 16 updates."""
    lines = [
        "| data-parallel ranks | chunk | micro-batches a rank | tokens / (chunks × chunk) | dummies | padded rows "
        "instead |",
        "|---|---|---|---|---|---|",
    ]
    lengths = lengths_of(512, 3000, 32768)
    for dp in (1, 4, 16):
        ranks = deal([[n] for n in lengths], MicroBatching(dp=dp, max_tokens=32768))
        chunks = [chunk for rank in ranks for chunk in rank]
        fullest = max(sum(lengths[i] for i in chunk) for chunk in chunks)
        share = sum(lengths) / (len(chunks) * fullest)
        padded = sum(lengths) / (len(lengths) * max(lengths))
        dummies = sum(not chunk for chunk in chunks)
        lines.append(f"| {dp} | {fullest:,} | {len(ranks[0])} | {share:.1%} | {dummies} | {padded:.1%} |")
    return lines


def one_rank(parallel: ParallelConfig) -> None:
    """Make this process the only rank of a grid."""
    from megarl.learn.parallel import process_groups

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process_groups.initialize(parallel, seed=1)


def actor(path: Path, longest: int) -> Any:
    from megarl.learn.training.model import TrainedModel, micro_batching_for
    from megarl.learn.training.schedule import Head
    from megarl.weights.checkpoint.formats import hf

    one_rank(ParallelConfig())
    micro_batching = micro_batching_for(ParallelConfig(), TrainerConfig(max_tokens_per_micro_batch=longest))
    model = TrainedModel(
        hf.read_hf_config(path),
        ModelConfig(path=str(path)),
        ParallelConfig(),
        Head(VOCAB),
        micro_batching,
        OptimizerConfig(lr=1e-4),
    )
    model.model.load_hf(path)
    return model


def save_model(path: Path, longest: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=longest,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--median", type=int, default=200)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    from megarl.learn.batching import micro_batches
    from megarl.learn.training import objectives

    lengths = lengths_of(arguments.sequences, arguments.median, arguments.longest)
    total = sum(lengths)
    mask = torch.ones(total, dtype=torch.bool)
    mask[torch.tensor(lengths).cumsum(0) - 1] = False
    tokens = torch.randint(0, VOCAB, (total,), generator=torch.Generator().manual_seed(0))
    step = Sequences(tokens, torch.tensor(lengths), mask)
    ways = {
        "packed": MicroBatching(max_tokens=arguments.longest),
        "padded, 1 row": MicroBatching(rows=1),
        "padded, 8 rows": MicroBatching(rows=8),
    }
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), arguments.longest)
        model = actor(Path(folder), arguments.longest)
    objective = objectives.policy(algorithms.get("sft"), AlgorithmConfig(), step)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    losses = {}
    for round_ in range(arguments.rounds + 1):
        for way, micro_batching in ways.items():
            batches = micro_batches(step, micro_batching, 0)
            start = time.perf_counter()
            found = model.backward(step, batches, objective)
            model.step(0.0)
            if round_:  # the first round warms up
                seconds[way].append(time.perf_counter() - start)
            losses[way] = found["actor/loss"][0]
    packed = statistics.median(seconds["packed"])
    lines = [
        "| way | micro-batches | positions computed / tokens | seconds of an update | of packed | loss |",
        "|---|---|---|---|---|---|",
    ]
    for way, micro_batching in ways.items():
        batches = micro_batches(step, micro_batching, 0)
        positions = len(batches) * batches[0].index.numel()
        median = statistics.median(seconds[way])
        lines.append(
            f"| {way} | {len(batches)} | {positions / total:.2f} | {median:.2f} | {median / packed:.2f} | "
            f"{losses[way]:.6f} |"
        )
    text = "\n".join(
        [
            "Timings are ratios of one run.",
            "",
            "## How full micro-batches are",
            "512 answers (one of R1's 16 updates of 8,192) of log-normal lengths with a median of 3,000 tokens, cut at "
            "32,768.",
            "",
            *fill(),
            "",
            "## Time of an update",
            f"{arguments.sequences} sequences of log-normal lengths, median {arguments.median}, longest "
            f"{arguments.longest}, {total:,} tokens; a Qwen3 of 2 layers and width 256 on one CPU process of "
            f"{arguments.threads} threads, float32, median of {arguments.rounds} rounds.",
            "",
            *lines,
            "",
        ]
    )
    print(text)
    page.write("benchmarks/packing.md", text)


if __name__ == "__main__":
    main()
