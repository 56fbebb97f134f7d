"""megarl's kernels against what one would use instead, in one run: ``python benchmarks/kernels.py [--threads N] [--out
FILE]``.

Runs on the GPU where there is one, else on the CPU. For each op every contender runs in turn, ``--repeats`` times;
medians. A line gives the time, how many times megarl's time that is, the time over that of the op's memory traffic
alone (log-prob: logits read forward, read and written backward; GAE: two arrays read, two written; digest: one read),
and the peak of memory beside the inputs. The speed of memory is measured here on a CPU (reading 1 GiB) and the data
sheet's on a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import page
import torch
import torch.nn.functional as F

from megarl import ops

HBM = {"H200": 4.8e12, "H100": 3.35e12, "A100-SXM4-80GB": 2.04e12, "A100": 1.56e12}
"""Bytes per second by data sheet."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = DEVICE.type == "cuda"
Step = Callable[[], object]


@dataclass
class Race:
    """One op at one size."""

    title: str
    traffic: float
    """Bytes that must be moved; 0 where memory is not what limits."""
    prepare: Callable[[], object] = lambda: None
    """Run before each contender's turn, outside its time."""
    contenders: dict[str, Step] = field(default_factory=dict)
    """The first is megarl's."""


@dataclass
class Result:
    seconds: float
    extra_bytes: int


# --- what is measured ------------------------------------------------------------------------------------------------


def plain_logprob(logits: torch.Tensor, targets: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """What one would write in torch: log-softmax, gather, p log p."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


class FromHead(torch.autograd.Function):
    """``buffer`` as a tensor that some GEMM has made: no leaf, and its gradient goes nowhere."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=buffer.dtype, device=buffer.device).set_(buffer.untyped_storage(), 0, buffer.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


def logprob_peers() -> Iterator[tuple[str, Callable[..., tuple[torch.Tensor, torch.Tensor | None]]]]:
    """(name, function of logits and targets to log-prob and, where it can, entropy)."""
    yield "plain torch", plain_logprob
    yield "plain torch, compiled", torch.compile(plain_logprob, dynamic=False)

    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    def sequence_first(loss: Callable[..., torch.Tensor], *more: Any) -> Callable[..., tuple[torch.Tensor, None]]:
        # Float16Module hands the loss logits in float32.
        return lambda logits, targets, **_: (-loss(logits.float()[:, None], targets[:, None], *more)[:, 0], None)

    yield "Megatron cross entropy (no entropy)", sequence_first(vocab_parallel_cross_entropy)
    yield (
        "Megatron fused cross entropy (no entropy)",
        sequence_first(fused_vocab_parallel_cross_entropy, get_tensor_model_parallel_group()),
    )
    for module, function, name in (
        ("flash_attn.losses.cross_entropy", "CrossEntropyLoss", "flash-attn cross entropy (no entropy)"),
        ("liger_kernel.transformers", "LigerCrossEntropyLoss", "Liger cross entropy (no entropy)"),
        ("quack", "cross_entropy", "quack cross entropy (no entropy)"),
    ):
        try:
            peer: Any = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError):
            continue
        loss = peer if function.islower() else peer(reduction="none")
        more = {"reduction": "none"} if function.islower() else {}
        yield name, lambda logits, targets, loss=loss, more=more, **_: (-loss(logits, targets, **more), None)


def logprob() -> Iterator[Race]:
    sizes = [(4096, 128, torch.float32), (512, 32_000, torch.float32), (256, 151_936, torch.bfloat16)]
    if GPU:
        sizes = [(8192, 151_936, torch.bfloat16), (8192, 151_936 // 8, torch.bfloat16), (8192, 32_000, torch.float32)]
    yield from _logprob_of(sizes)


def vocabularies() -> Iterator[Race]:
    """Columns of Llama 2 to Gemma 3; few rows on a CPU."""
    rows = 4096 if GPU else 64
    yield from _logprob_of([(rows, vocab, torch.bfloat16) for vocab in (32_000, 65_536, 128_256, 200_064, 262_144)])


def _logprob_of(sizes: list[tuple[int, int, torch.dtype]]) -> Iterator[Race]:
    for rows, vocab, dtype in sizes:
        base = torch.randn(rows, vocab, device=DEVICE).to(dtype)
        buffer = torch.empty_like(base)
        targets = torch.randint(0, vocab, (rows,), device=DEVICE)

        def step(op: Any, buffer: torch.Tensor = buffer, targets: torch.Tensor = targets, vocab: int = vocab) -> None:
            logp, entropy = op(FromHead.apply(torch.zeros((), requires_grad=True), buffer), targets, vocab_size=vocab)
            loss = logp.sum() if entropy is None else logp.sum() + 0.01 * entropy.sum()
            loss.backward()

        def refill(buffer: torch.Tensor = buffer, base: torch.Tensor = base) -> None:
            buffer.copy_(base)

        race = Race(
            f"log-prob + entropy, forward + backward [{rows} × {vocab}] {_short(dtype)}", 3 * base.nbytes, refill
        )
        race.contenders["megarl"] = lambda step=step: step(ops.vocab_parallel_logprob)
        for name, peer in logprob_peers():
            race.contenders[name] = lambda step=step, peer=peer: step(peer)
        yield race


def linear() -> Iterator[Race]:
    tokens, hidden_size, vocab, dtype = (
        (8192, 4096, 151_936, torch.bfloat16) if GPU else (512, 512, 32_000, torch.float32)
    )
    hidden = torch.randn(tokens, hidden_size, device=DEVICE).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden_size, device=DEVICE) * hidden_size**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=DEVICE)
    budget = tokens * vocab * hidden.element_size() // 8
    keep = {"vocab_size": vocab}
    chunked = {"vocab_size": vocab, "logits_bytes": budget}

    def loss(logp: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return logp.sum() + 0.01 * entropy.sum()

    def clear() -> None:
        hidden.grad = weight.grad = None

    race = Race(
        f"linear + log-prob, forward + backward [{tokens} × {hidden_size}] · [{hidden_size} × {vocab}] {_short(dtype)}",
        0,
        clear,
    )
    race.contenders = {
        "megarl, mode A (logits kept)": lambda: loss(*ops.linear_logprob(hidden, weight, targets, **keep)).backward(),
        "megarl, mode C (1/8 of the logits, computed again)": lambda: loss(
            *ops.linear_logprob(hidden, weight, targets, **chunked)
        ).backward(),
        "megarl, mode B (1/8 of the logits, loss inside)": lambda: ops.linear_logprob_loss(
            hidden, weight, targets, lambda logp, entropy, _: loss(logp, entropy), **chunked
        ).backward(),
        "F.linear + plain torch": lambda: loss(*plain_logprob(F.linear(hidden, weight), targets)).backward(),
    }
    yield race


def gae_loop(
    rewards: list[float], values: list[float], cu: list[int], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """The plain loop at its fastest: Python floats, not tensors."""
    advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
    for start, end in zip(cu, cu[1:], strict=False):
        following = advantage = 0.0
        for t in range(end - 1, start - 1, -1):
            advantage = rewards[t] + gamma * following - values[t] + gamma * lam * advantage
            advantages[t], returns[t], following = advantage, advantage + values[t], values[t]
    return advantages, returns


def time_loop(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    """[N, L] padded, a loop over time: what verl, TRL and OpenRLHF do."""
    advantages, advantage, following = (
        torch.empty_like(rewards),
        torch.zeros_like(rewards[:, 0]),
        torch.zeros_like(rewards[:, 0]),
    )
    for t in range(rewards.shape[1] - 1, -1, -1):
        advantage = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * advantage
        advantages[:, t], following = advantage, values[:, t]
    return advantages


def doubling_scan(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    """[N, L] padded, an associative scan: A_t = δ_t + c·A_{t+1} over 1, 2, 4, … steps at once."""
    advantages = rewards - values
    advantages[:, :-1] += gamma * values[:, 1:]
    factor, step = gamma * lam, 1
    while step < rewards.shape[1]:
        advantages[:, :-step] = advantages[:, :-step] + factor * advantages[:, step:]
        factor, step = factor * factor, 2 * step
    return advantages


Padded = Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]


def of_packed(
    method: Padded, rewards: torch.Tensor, values: torch.Tensor, cu: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed tokens to rows [N, L] and back, where the lengths differ."""
    lengths = cu.diff()
    if (lengths == lengths[0]).all():
        shape = len(lengths), int(lengths[0])
        advantages = method(rewards.view(shape), values.view(shape), 0.99, 0.95).flatten()
        return advantages, advantages + values
    keep = torch.arange(int(lengths.max()), device=cu.device) < lengths[:, None]
    padded = [torch.zeros(keep.shape, device=cu.device).masked_scatter_(keep, x) for x in (rewards, values)]
    advantages = method(*padded, 0.99, 0.95)[keep]
    return advantages, advantages + values


def gae() -> Iterator[Race]:
    long_tail = (
        torch.distributions.LogNormal(6.5, 1.2).sample((1024,)).clamp(16, 16_384)
    ).long()  # of reasoning: mean about 1,200
    sizes = {
        "1024 sequences of 16 to 16,384 (log-normal)": long_tail,
        "128 sequences of 8192": torch.full((128,), 8192),
    }
    if GPU:
        sizes["512 sequences of 8192"] = torch.full((512,), 8192)
    sizes["1 sequence of 1,048,576"] = torch.tensor([1 << 20])
    for name, lengths in sizes.items():
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(DEVICE)
        tokens = int(cu[-1])
        rewards, values = torch.randn(tokens, device=DEVICE), torch.randn(tokens, device=DEVICE)
        bootstrap = torch.zeros(len(lengths), device=DEVICE)
        race = Race(f"GAE, {tokens:,} packed tokens: {name}", 4 * rewards.nbytes)
        race.contenders["megarl"] = lambda r=rewards, v=values, cu=cu, b=bootstrap: ops.gae(
            r, v, cu, gamma=0.99, lam=0.95, bootstrap=b
        )
        if not GPU:
            lists = rewards.tolist(), values.tolist(), cu.tolist(), 0.99, 0.95
            race.contenders["Python loop"] = lambda lists=lists: gae_loop(*lists)
        if lengths.max() <= 16_384:
            race.contenders["padded torch loop over time"] = lambda packed=(rewards, values, cu): of_packed(
                time_loop, *packed
            )
        race.contenders["padded associative scan in torch"] = lambda packed=(rewards, values, cu): of_packed(
            doubling_scan, *packed
        )
        yield race


def policy() -> Iterator[Race]:
    for rows, length in ((64, 256), (256, 4096)):
        tokens = rows * length
        logp = torch.randn(tokens, device=DEVICE, requires_grad=True)
        entropy = torch.rand(tokens, device=DEVICE, requires_grad=True)
        old, ref = (logp.detach() + 0.1 * torch.randn(tokens, device=DEVICE) for _ in range(2))
        advantages = torch.randn(tokens, device=DEVICE)
        cu = torch.arange(0, tokens + 1, length, device=DEVICE)
        keyword: dict[str, Any] = {
            "entropy": entropy,
            "ref_logp": ref,
            "clip_low": 0.2,
            "clip_high": 0.28,
            "kl": "k3",
            "kl_coef": 1e-3,
            "entropy_coef": 1e-3,
        }

        def step(op: Any, arguments: Any = (logp, old, advantages, cu), keyword: Any = keyword) -> None:
            op(*arguments, **keyword).total.backward()

        race = Race(f"policy loss, metrics and gradient, {rows} sequences of {length}", 7 * old.nbytes)
        race.contenders["megarl"] = lambda step=step: step(ops.policy_loss)
        race.contenders["plain torch"] = lambda step=step: step(ops.policy_loss_reference)
        yield race


def digest() -> Iterator[Race]:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn((1 << 30) // dtype.itemsize // 8192, 8192).to(dtype).to(DEVICE)
        race = Race(f"digest [{x.shape[0]} × {x.shape[1]}] {_short(dtype)}", x.nbytes)
        race.contenders["megarl"] = lambda x=x: ops.slice_digest(x, start=(0, 0), shape=x.shape)
        race.contenders["one read by torch (sum of int64)"] = lambda x=x: x.view(torch.int64).sum().item()
        yield race
    x = torch.randn(1 << 18, 1024).bfloat16().to(DEVICE)[:, :256]  # rows of 512 bytes
    race = Race(f"digest [{x.shape[0]} × {x.shape[1]} of 1024] bfloat16", x.numel() * x.element_size())
    race.contenders["megarl"] = lambda x=x: ops.slice_digest(x, start=(0, 0), shape=x.shape)
    race.contenders["one read by torch (sum of int64)"] = lambda x=x: x.view(torch.int64).sum().item()
    yield race
    for rows, width in ((2000, 64), (2000, 8192)):
        x = torch.randn(rows, width).bfloat16().to(DEVICE)
        slices = [(x[i], (i * width,), (rows * width,)) for i in range(rows)]
        race = Race(f"digests of {rows} slices of {width} bfloat16", x.nbytes)
        race.contenders["megarl"] = lambda slices=slices: ops.digest_values(ops.slice_digests(slices))
        race.contenders["a call for each slice"] = lambda slices=slices: [
            ops.slice_digest(x, start=start, shape=shape) for x, start, shape in slices
        ]
        yield race


def alone(speed: float) -> Iterator[str]:
    """Times of the log-prob's kernels themselves, by torch's profiler: without launches and what autograd adds. The
    gradient goes into another buffer, so that a buffer can be used again."""
    yield "\n**log-prob + entropy, kernels alone**\n"
    yield "| logits | forward, µs | of one read | backward, µs | of a read and a write |"
    yield "|---|---|---|---|---|"
    sizes = [(151_936 // cut, torch.bfloat16) for cut in (1, 2, 4, 8)]
    for vocab, dtype in [*sizes, (32_000, torch.bfloat16), (32_000, torch.float32)]:
        logits = torch.randn(8192, vocab, device=DEVICE).to(dtype)
        targets = torch.randint(0, vocab, (8192,), device=DEVICE)

        def step(logits: torch.Tensor = logits, targets: torch.Tensor = targets, vocab: int = vocab) -> None:
            leaf = logits.detach().requires_grad_()
            logp, entropy = ops.vocab_parallel_logprob(
                leaf.view_as(leaf), targets, vocab_size=vocab, inplace_backward=False
            )
            (logp.sum() + 0.01 * entropy.sum()).backward()

        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(20):
                step()
            torch.cuda.synchronize()
        times = [
            sum(e.self_device_time_total for e in found.key_averages() if name in e.key) / 20
            for name in ("local_kernel", "backward_kernel")
        ]
        shares = [time / 1e6 / (n * logits.nbytes / speed) for n, time in zip((1, 2), times, strict=True)]
        cells = " | ".join(f"{time:.0f} | {share:.2f}×" for time, share in zip(times, shares, strict=True))
        yield f"| 8192 × {vocab} {_short(dtype)} | {cells} |"


# --- measuring -------------------------------------------------------------------------------------------------------


def run(race: Race, repeats: int) -> dict[str, Result | str]:
    results: dict[str, Result | str] = {}
    times: dict[str, list[float]] = {}
    keep_freed_memory(False)
    for name, step in race.contenders.items():
        try:
            race.prepare()
            step()  # compiles, allocates
            race.prepare()
            results[name] = Result(0.0, extra_bytes(step))
            times[name] = []
        except Exception as error:  # a peer that does not run here is reported, not hidden
            results[name] = f"does not run: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
    keep_freed_memory(True)
    for _ in range(repeats + 1):
        for name, taken in times.items():
            race.prepare()
            taken.append(seconds(race.contenders[name]))
    keep_freed_memory(False)  # what the next race is made of lies in pages of its own
    for name, taken in times.items():
        result = results[name]
        assert isinstance(result, Result)
        result.seconds = statistics.median(taken[1:])
    return results


def keep_freed_memory(keep: bool) -> None:
    """Whether malloc gives large blocks back to the system at once, so that a peak can be seen, or keeps them for the
    next allocation, so that nobody's time is that of page faults (torch's CUDA allocator keeps them anyway)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30 if keep else 1 << 17)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30 if keep else 1 << 17)
        if not keep:
            libc.malloc_trim(0)


def seconds(step: Step) -> float:
    if GPU:
        torch.cuda._sleep(2_000_000)  # the launches queue up after it: the device's time is measured, not the host's
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def extra_bytes(step: Step) -> int:
    """The rise of the peak of memory while ``step`` runs."""
    if GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now
    before = _status("VmRSS")
    step()
    return max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def bandwidth() -> tuple[float, str]:
    """(bytes per second, where the number is from)."""
    if GPU:
        name = torch.cuda.get_device_name()
        for part, speed in HBM.items():
            if part in name:
                return speed, f"{speed / 1e12:.2f} TB/s by data sheet"
    x = torch.ones(1 << 27, dtype=torch.int64, device=DEVICE)
    best = min(seconds(lambda: x.sum()) for _ in range(7))
    return x.nbytes / best, f"{x.nbytes / best / 1e9:.1f} GB/s, measured by reading 1 GiB"


def table(races: Iterator[Race], speed: float, repeats: int) -> Iterator[str]:
    for race in races:
        yield f"\n**{race.title}**\n"
        yield "| way | ms | of megarl's time | of the memory traffic's | peak extra memory |"
        yield "|---|---|---|---|---|"
        results = run(race, repeats)
        first = next(iter(results.values()))
        for name, result in results.items():
            if isinstance(result, str) or isinstance(first, str):
                yield f"| {name} | {result} | | | |"
                continue
            over = f"{result.seconds / (race.traffic / speed):.2f}×" if race.traffic else ""
            times = f"{result.seconds / first.seconds:.1f}×" if result is not first else "1"
            yield f"| {name} | {result.seconds * 1e3:.3f} | {times} | {over} | {result.extra_bytes / 2**20:.1f} MiB |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=[], help="of logprob vocabularies linear gae policy digest")
    parser.add_argument(
        "--write", action="store_true", help="also write docs/benchmarks/kernels.md; on a CPU --only has its own part"
    )
    options = parser.parse_args()
    if options.write and options.only and GPU:
        parser.error("--only with --write would leave out the other kernels of this GPU's part; give one of them")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    _one_rank()
    speed, source = bandwidth()
    device = (
        torch.cuda.get_device_name()
        if GPU
        else f"{options.threads} thread(s), {ops.backend()['CPU tensors']}, {platform.machine()}"
    )
    lines = [f"{device}; torch {torch.__version__}; memory {source}."]
    print(lines[0], flush=True)
    for suite in (logprob, vocabularies, linear, gae, policy, digest):
        if options.only and suite.__name__ not in options.only:
            continue
        for line in table(suite(), speed, options.repeats):
            print(line, flush=True)
            lines.append(line)
    if GPU and not options.only:
        for line in alone(speed):
            print(line, flush=True)
            lines.append(line)
    if options.write:
        name = " ".join(("benchmarks/kernels.py", *(("gpu",) if GPU else sorted(options.only))))
        page.write("benchmarks/kernels.md", "\n".join(lines), name)


def _one_rank() -> None:
    """Megatron's cross entropies ask for a tensor-parallel group."""
    from megatron.core import parallel_state

    from megarl.learn.parallel import cpu

    cpu.install()
    torch.distributed.init_process_group(
        "nccl" if GPU else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
