"""Cost of a divergence from distributions beside the policy loss: ``python benchmarks/divergence.py``, which
writes docs/benchmarks/divergence.md.

Both begin with the head's hidden states and end with their gradient and the output weight's. Runs alternate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import page
import torch

from megarl.ops import linear_logprob, policy_loss
from megarl.ops.divergence import Divergence, TopK, WholeVocabulary, linear_divergence, linear_top_k

TOKENS, VOCABULARY, HIDDEN, BUDGET, ROUNDS = 256, 32768, 1024, 2**26, 5
TEACHERS = (1024, 4096)
"""Hidden sizes of teachers."""
LIKELIEST = 64


def seconds(run: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> float:
    began = time.perf_counter()
    torch.autograd.grad(run(), inputs)
    return time.perf_counter() - began


def main() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = (torch.randn(VOCABULARY, HIDDEN) / 32).requires_grad_()
    targets, row = torch.randint(VOCABULARY, (TOKENS,)), torch.arange(TOKENS) // 64
    advantages = torch.randn(TOKENS)
    cu_seqlens = torch.searchsorted(row, torch.arange(int(row[-1]) + 2))

    def policy() -> torch.Tensor:
        logp, _ = linear_logprob(hidden, weight, targets, vocab_size=VOCABULARY, logits_bytes=BUDGET)
        return policy_loss(logp, logp.detach(), advantages, cu_seqlens, clip_low=0.2, clip_high=0.2).total

    runs = {"policy loss": policy}

    def add(name: str, teacher: WholeVocabulary | TopK, divergence: Divergence) -> None:
        runs[name] = lambda: linear_divergence(
            hidden, weight, teacher, divergence, vocab_size=VOCABULARY, logits_bytes=BUDGET
        ).sum()

    kinds = [Divergence("forward_kl"), Divergence("reverse_kl"), Divergence("jsd")]
    for size in TEACHERS:
        head = torch.randn(VOCABULARY, size) / size**0.5
        for kind in kinds if size == TEACHERS[0] else kinds[-1:]:
            add(
                f"`{kind.kind}`, teacher of hidden size {size:,}",
                WholeVocabulary(torch.randn(TOKENS, size), head),
                kind,
            )
    ids, logp = linear_top_k(hidden.detach() + 0.1, weight.detach(), LIKELIEST, vocab_size=VOCABULARY)
    add(f"`jsd`, `top_k` {LIKELIEST}", TopK(ids, logp, VOCABULARY), kinds[-1])
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS + 1):
        for name, run in runs.items():
            took = seconds(run, [hidden, weight])
            found[name] += [took] if number else []
    policy_s = statistics.median(found["policy loss"])
    text = page.Text()
    text.say(
        f"Forward and backward pass of head and loss: {TOKENS} tokens, vocabulary {VOCABULARY:,}, "
        f"hidden size {HIDDEN:,}, float32, `logits_bytes` {BUDGET // 2**20} MiB; medians of {ROUNDS} runs. A "
        "divergence is added to the policy loss, so an update's head and loss take 1 + ratio."
    )
    text.say("")
    text.say("| computed | seconds | ratio to the policy loss |")
    text.say("|---|---|---|")
    for name, each in found.items():
        took = statistics.median(each)
        text.say(f"| {name} | {took:.2f} | {took / policy_s:.2f} |")
    page.write("benchmarks/divergence.md", str(text))


if __name__ == "__main__":
    main()
