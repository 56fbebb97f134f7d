"""Seconds of a rollout with drafts (``rollout.speculative=ngram``) and without, in pairs, by concurrency and
temperature.

``python benchmarks/speculative.py [--write]``. Two engines of one seeded Qwen3 on CPU, one after the other on the same
prompts. The model's next token depends mostly on its last one, so that greedy text repeats. ``--write`` also writes the
table into docs/benchmarks/speculative.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import page
import torch
from transformers import Qwen3ForCausalLM

sys.path.insert(0, str(page.ROOT))

from megarl.config.schema import RolloutConfig
from megarl.engines.client.client import Prompt, Sampling
from tests.loop.engines import WIDE_SIZES, RunningEngine, tiny_engine

ROLLOUT = RolloutConfig(max_prompt_tokens=64, max_response_tokens=128, max_num_seqs=64, kv_cache_bytes=2**27)
PAIRS, TOKENS = 5, 64


def prompts(count: int, pair: int) -> list[Prompt]:
    """Prompts of a phrase of eight tokens, five times; other ones in each pair."""
    dice = np.random.default_rng(pair)
    return [Prompt([1, *np.tile(dice.integers(4, 190, 8), 5).tolist()], seed=1000 * i + pair) for i in range(count)]


def engine_of(folder: Path, rollout: RolloutConfig) -> RunningEngine:
    """An engine of the seeded model, whose layers add a thousandth of what they would to the last token's vector."""
    engine = tiny_engine(folder, rollout=rollout, sizes=WIDE_SIZES)
    model = Qwen3ForCausalLM.from_pretrained(engine.model_path)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.001)
            layer.mlp.down_proj.weight.mul_(0.001)
    model.save_pretrained(engine.model_path)
    return engine


def seconds(engine: RunningEngine, asked: list[Prompt], sampling: Sampling) -> float:
    began = time.perf_counter()
    engine.generate(asked, sampling)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="also write the table into docs/benchmarks/speculative.md")
    write, text = parser.parse_args().write, page.Text()
    with tempfile.TemporaryDirectory() as folder:
        plain = engine_of(Path(folder) / "plain", ROLLOUT)
        drafting = engine_of(Path(folder) / "drafting", replace(ROLLOUT, speculative="ngram"))
        try:
            text.say("| responses at once | temperature | without | ngram | median of pairs | accepted drafts |")
            text.say("|---:|---:|---:|---:|---:|---:|")
            for engine in (plain.ready(), drafting.ready()):
                engine.generate(prompts(4, 99), Sampling(max_tokens=TOKENS, ignore_eos=True))  # compiles
            for count in (1, 16):
                for temperature in (0.0, 0.3, 1.0):
                    sampling = Sampling(max_tokens=TOKENS, temperature=temperature, ignore_eos=True)
                    before, pairs = drafting.control.drafts(), []
                    for pair in range(PAIRS):
                        both = (plain, drafting) if pair % 2 else (drafting, plain)
                        took = {engine is plain: seconds(engine, prompts(count, pair), sampling) for engine in both}
                        pairs.append((took[True], took[False]))
                    after = drafting.control.drafts()
                    drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
                    without, ngram = np.median(pairs, axis=0)
                    faster = np.median([a / b for a, b in pairs])
                    text.say(
                        f"| {count} | {temperature:g} | {without:.2f} s | {ngram:.2f} s | {faster:.2f} × | "
                        f"{100 * accepted / max(drafted, 1):.0f} % of {drafted:,} |"
                    )
        finally:
            plain.stop()
            drafting.stop()
    if write:
        page.write("benchmarks/speculative.md", str(text))


if __name__ == "__main__":
    main()
