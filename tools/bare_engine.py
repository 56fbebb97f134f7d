"""vLLM without megarl, to set beside a job's rollout: ``python tools/bare_engine.py MODEL [--requests N]``.

Every request has random tokens and runs to its last token. On a GPU also the seconds in which the engine sleeps
(level 2) and wakes. Without a GPU the same code runs on vLLM's CPU build, which measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GPU = torch.cuda.is_available()


def timed(step: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of ``step``, and what it returns."""
    start = time.perf_counter()
    found = step()
    return time.perf_counter() - start, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--requests", type=int, default=128 if GPU else 4)
    parser.add_argument("--prompt", type=int, default=24, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=512 if GPU else 8, help="tokens of a response")
    arguments = parser.parse_args()

    if not GPU:  # in this process, whose cores another may have
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    more: dict[str, Any] = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 2**24,
        "distributed_executor_backend": "uni",
    }
    if GPU:
        more = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.5}
    llm = LLM(
        str(arguments.model), dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=arguments.requests,
        max_model_len=arguments.prompt + arguments.response, **more,
    )  # fmt: skip
    vocabulary = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    chosen = random.Random(0)
    prompts = [
        TokensPrompt(prompt_token_ids=[chosen.randrange(vocabulary) for _ in range(arguments.prompt)])
        for _ in range(arguments.requests)
    ]
    sampling = SamplingParams(max_tokens=arguments.response, ignore_eos=True, detokenize=False, temperature=1.0)
    for name in ("first", "second"):
        seconds, answers = timed(lambda: llm.generate(prompts, sampling, use_tqdm=False))
        tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
        print(f"{name}: {tokens} response tokens in {seconds:.2f} s, {tokens / seconds:,.0f} a second", flush=True)
    if GPU:
        asleep, _ = timed(lambda: llm.sleep(level=2))
        awake, _ = timed(llm.wake_up)
        print(f"sleeps within {asleep:.2f} s, wakes within {awake:.2f} s")


if __name__ == "__main__":
    main()
