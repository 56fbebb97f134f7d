"""The CPU kernels against what a user would write, in one run: ``python benchmarks/bench_ops.py [--threads N]``.

Every line gives megarl's time, the peer's time in the same process, their ratio, and the ratio to the memory traffic's
floor measured by a copy of the same bytes (log-prob: read forward, read and write backward; digest: one read).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.table import Table

from megarl import ops

Row = tuple[str, str, float, float, float | None]


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median wall time of ``run`` after one warm-up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def plain_logprob(logits: torch.Tensor, targets: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """What one would write in torch: log-softmax, gather, p log p."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def copy_seconds(num_bytes: int, repeats: int) -> float:
    """Time to move ``num_bytes`` through memory: a copy reads half of them and writes half."""
    source = torch.empty(max(1, num_bytes // 2), dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source)
    return seconds(lambda: target.copy_(source), repeats)


def logprob(repeats: int) -> Iterator[Row]:
    for rows, vocab, dtype in ((4096, 128, torch.float32), (512, 32_000, torch.float32), (256, 151_936, torch.bfloat16)):
        base = torch.randn(rows, vocab).to(dtype)
        targets = torch.randint(0, vocab, (rows,))
        buffer = torch.empty_like(base)

        def step(op: Callable[..., tuple[torch.Tensor, torch.Tensor]], base=base, targets=targets, buffer=buffer) -> None:
            leaf = buffer.copy_(base).detach().requires_grad_()
            logp, entropy = op(leaf.view_as(leaf), targets, vocab_size=base.shape[1])
            (logp.sum() + 0.01 * entropy.sum()).backward()

        refill = seconds(lambda base=base, buffer=buffer: buffer.copy_(base), repeats)
        ours = seconds(lambda step=step: step(ops.vocab_parallel_logprob), repeats) - refill
        plain = seconds(lambda step=step: step(plain_logprob), repeats) - refill
        traffic = 3 * base.numel() * base.element_size()
        yield f"log-prob + entropy, fwd+bwd [{rows} x {vocab}] {str(dtype)[6:]}", "plain torch", ours, plain, copy_seconds(traffic, repeats)


def advantage(repeats: int) -> Iterator[Row]:
    sequences, length = 64, 256
    n = sequences * length
    rewards, values = torch.randn(n), torch.randn(n)
    cu, bootstrap = torch.arange(0, n + 1, length), torch.zeros(sequences)
    arguments = {"gamma": 1.0, "lam": 0.95, "bootstrap": bootstrap}
    ours = seconds(lambda: ops.gae(rewards, values, cu, **arguments), repeats)
    loop = seconds(lambda: ops.gae_reference(rewards, values, cu, **arguments), 1)
    yield f"GAE [{sequences} x {length}]", "Python loop", ours, loop, copy_seconds(4 * n * 4, repeats)


def digest(repeats: int) -> Iterator[Row]:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(4096, 4096).to(dtype)
        box = {"start": (0, 0), "shape": x.shape}
        ours = seconds(lambda x=x, box=box: ops.slice_digest(x, **box), repeats)
        numpy = seconds(lambda x=x, box=box: ops.slice_digest_reference(x, **box), 1)
        yield f"digest [4096 x 4096] {str(dtype)[6:]}", "numpy", ours, numpy, copy_seconds(x.numel() * x.element_size(), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    table = Table(title=f"{ops.backend()['cpu']}, {options.threads} thread(s), torch {torch.__version__}")
    for name in ("op", "megarl ms", "peer", "peer ms", "peer / megarl", "megarl / copy of the same bytes"):
        table.add_column(name, justify="left" if name in ("op", "peer") else "right")
    for suite in (logprob, advantage, digest):
        for op, peer, ours, theirs, floor in suite(options.repeats):
            limit = "" if floor is None else f"{ours / floor:.2f}"
            table.add_row(op, f"{ours * 1e3:.3f}", peer, f"{theirs * 1e3:.2f}", f"{theirs / ours:.1f}x", limit)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
