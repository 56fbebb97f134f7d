"""What a card gives the trainer: ``python benchmarks/gpu.py attention|update|layers|sync|jobs [--write]``.

- ``attention``: packed attention in bfloat16 by torch's kernel, its outputs and gradients against float32, and its time
  beside the path that float32 takes.
- ``update``: forward, backward and optimizer step of a packed micro-batch; model FLOPs against the card's.
- ``layers``: four layers of Qwen2.5-7B's shape by recomputation: seconds, and activations beside their estimate.
- ``sync``: a trainer process sends its weights slice by slice into an engine process's tensors on the same card, with
  and without digests, beside plain copies of as many bytes. Buckets of registered host memory and of the card (CUDA
  IPC) are kept, so the first sync takes longer than later ones.
- ``jobs``: ``experiment=sft``, killed and resumed beside a run that was not, and ``experiment=dpo``.

Without a GPU the same code runs at toy size on the CPU, which proves that it runs and measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import page
import torch
import torch.multiprocessing as mp
from packing import one_rank

from megarl.config.algorithms import AlgorithmConfig
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, TrainerConfig

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
BACKEND: Any = "nccl" if GPU else "gloo"
QWEN2_5_1_5B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
TOY = QWEN2_5_1_5B | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
                      "vocab_size": 1024}  # fmt: skip
MODEL = QWEN2_5_1_5B if GPU else TOY
LAYERS_OF_7B = QWEN2_5_1_5B | {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 4,
                               "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064,
                               "tie_word_embeddings": False}  # fmt: skip
TOKENS = 16_384 if GPU else 256
LOGITS_BYTES = 2**30 if GPU else 2**20
HEADS = ((12, 2, 128), (32, 8, 128), (14, 2, 64), (4, 2, 32))
"""Query heads, key/value heads and width of Qwen2.5-1.5B, Llama-3.1-8B, Qwen2.5-0.5B and the quickstart's model."""
DATA_SHEET = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 FLOP/s."""


def seconds(step: Callable[[], object], repeats: int = 5) -> float:
    """Median time of ``step`` after two that warm up."""
    return statistics.median(every(step, repeats + 2)[2:])


def every(step: Callable[[], object], repeats: int) -> list[float]:
    """Time of ``step``, each time."""
    taken = []
    for _ in range(repeats):
        _synchronize()
        start = time.perf_counter()
        step()
        _synchronize()
        taken.append(time.perf_counter() - start)
    return taken


def _synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def matmul_speed() -> float:
    """FLOP/s of a large bfloat16 product of random numbers on this device."""
    n = 8192 if GPU else 256
    a, b = (torch.randn(n, n, device=DEVICE).bfloat16() for _ in range(2))
    return 2 * n**3 / seconds(lambda: a @ b)


def lengths_of(tokens: int, longest: int, seed: int = 0) -> list[int]:
    """Long-tailed lengths that fill ``tokens`` exactly."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        drawn = float(torch.randn((), generator=generator).mul(1.0).add(6.0).exp())
        lengths.append(max(2, min(int(drawn), longest, tokens - sum(lengths))))
    lengths[-1] -= sum(lengths) - tokens
    return [length for length in lengths if length > 0]


# --- attention --------------------------------------------------------------------------------------------------------


def attention() -> Iterator[str]:
    from megatron.core.transformer.enums import AttnMaskType

    from megarl.learn.models.attention import CoreAttention
    from megarl.learn.models.gpt import transformer_config

    parallel = ParallelConfig(backend=BACKEND)
    one_rank(parallel)
    config = transformer_config(MODEL, ModelConfig(path="unused", dtype="bfloat16"), parallel)
    core = CoreAttention(config, 1, AttnMaskType.causal, "self")
    peak = matmul_speed()
    yield f"A large bfloat16 product runs at {peak / 1e12:.0f} TFLOP/s here."
    yield ""
    yield (
        "| heads, key/value heads, width | sequences | error of outputs | of gradients (q, k, v) | bucketed path's | "
        "ms, forward + backward | TFLOP/s, of the product's | bucketed path's time |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for heads in HEADS:
        cases = {"long-tailed": lengths_of(TOKENS, TOKENS // 4), "one": [TOKENS]}
        if heads == HEADS[0]:
            cases |= {
                "equal": [TOKENS // 4] * 4,
                "equal, short": [TOKENS // 16] * 16,
                "two": [2 * TOKENS // 3, TOKENS - 2 * TOKENS // 3],
            }
        for name, lengths in cases.items():
            yield _attention_row(core, heads, name, lengths, peak)


def _attention_row(core: Any, heads: tuple[int, int, int], name: str, lengths: list[int], peak: float) -> str:
    from megatron.core.packed_seq_params import PackedSeqParams

    from megarl.learn.models.attention import layout_of

    queries, groups, width = heads
    torch.manual_seed(queries)
    *qkv, upstream = (
        torch.randn(TOKENS, n, width, device=DEVICE).bfloat16() for n in (queries, groups, groups, queries)
    )
    cu, longest = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE), max(lengths)
    params = PackedSeqParams("thd", cu, cu, max_seqlen_q=longest, max_seqlen_kv=longest)
    layout = layout_of(params, 1)

    def run(path: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        if path == "varlen" and GPU:  # torch has no such kernel for CPUs
            out = core._varlen(*leaves, params, layout)
        else:
            out = core._bucketed(*leaves, layout)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream.view_as(out).to(out.dtype))]

    want = run("bucketed", *(x.float() for x in qkv))
    errors, taken = {}, {}
    for path in ("varlen", "bucketed"):
        got = run(path, *qkv)
        errors[path] = [f"{float((a.float() - b).norm() / b.norm()):.1e}" for a, b in zip(got, want, strict=True)]
    del want, got
    for path in errors:
        taken[path] = seconds(partial(run, path, *qkv))
    speed = 3.5 * 4 * sum(n * n / 2 for n in lengths) * queries * width / taken["varlen"]
    return (
        f"| {queries}, {groups}, {width} | {name} ({len(lengths)}) | {errors['varlen'][0]} | "
        f"{', '.join(errors['varlen'][1:])} | {', '.join(errors['bucketed'])} | {taken['varlen'] * 1e3:.2f} | "
        f"{speed / 1e12:.0f}, {speed / peak:.0%} | {taken['bucketed'] / taken['varlen']:.1f}x |"
    )


# --- update -----------------------------------------------------------------------------------------------------------


def flops_of(config: dict[str, Any], lengths: list[int]) -> float:
    """Of forward and backward: 6 for each weight of a product and token, and attention's (PaLM, 2204.02311, app. B)."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = hidden // config["num_attention_heads"]
    of_layer = hidden * width * 2 * (config["num_attention_heads"] + config["num_key_value_heads"]) + 3 * hidden * inner
    weights = config["num_hidden_layers"] * of_layer + config["vocab_size"] * hidden
    scores = config["num_hidden_layers"] * sum(n * n / 2 for n in lengths) * hidden * 4
    return 6 * weights * sum(lengths) + 3 * scores


def update(profile: str | None, layers: list[str], recomputes: list[str]) -> Iterator[str]:
    parallel = ParallelConfig(backend=BACKEND)
    one_rank(parallel)
    peak = matmul_speed()
    sheet = next((speed for part, speed in DATA_SHEET.items() if GPU and part in torch.cuda.get_device_name()), peak)
    yield (
        f"{MODEL['num_hidden_layers']} layers of width {MODEL['hidden_size']} (Qwen2.5-1.5B on a GPU), random weights, "
        f"bfloat16, {TOKENS:,} tokens in one packed micro-batch. A large product runs at {peak / 1e12:.0f} TFLOP/s."
    )
    yield ""
    yield (
        "| layers | sequences | recompute | log-probs, s | forward + backward, s | optimizer, s | MFU, measured peak | "
        "MFU, data sheet | peak memory, GiB |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for which in layers:
        for recompute in recomputes:
            for name, lengths in {"long-tailed": lengths_of(TOKENS, TOKENS // 4), "one": [TOKENS]}.items():
                if name == "one" and recompute != "none":
                    continue
                kept = profile if (which, recompute, name) == ("local", "none", "long-tailed") else None
                try:
                    impl: Any = which.partition(",")[0]
                    settings = ModelConfig("unused", dtype="bfloat16", recompute=recompute, transformer_impl=impl)
                    *taken, memory, _ = _update_of(parallel, settings, lengths, kept, "unfused" not in which)
                    speed = flops_of(MODEL, lengths) / taken[1]
                    found = " | ".join(
                        [*(f"{t:.3f}" for t in taken), f"{speed / peak:.1%}", f"{speed / sheet:.1%}", f"{memory:.1f}"]
                    )
                except Exception as error:  # one that does not fit is said, and the others are measured
                    found = f"{type(error).__name__}: {str(error).splitlines()[0][:100]} | | | | |"
                yield f"| {which} | {name} ({len(lengths)}) | {recompute} | {found} |"
                gc.collect()
                if GPU:
                    torch.cuda.empty_cache()


def layers_of_7b() -> Iterator[str]:
    from megarl.learn.memory.activation_bytes import activation_bytes
    from megarl.weights.architectures import architecture
    from megarl.weights.architectures.complete import complete

    parallel = ParallelConfig(backend=BACKEND)
    one_rank(parallel)
    shape = complete(LAYERS_OF_7B if GPU else TOY)
    sizes = architecture(shape).sizes(shape)
    yield (
        f"{sizes.num_layers} layers of width {sizes.hidden} and {sizes.vocab:,} tokens, bfloat16, {TOKENS:,} tokens in "
        f"one packed micro-batch; logits by {LOGITS_BYTES >> 20} MiB."
    )
    yield ""
    yield "| recompute | forward + backward, s | activations, GiB | estimated, GiB |"
    yield "|---|---|---|---|"
    ways: dict[str, dict[str, Any]] = {
        "none": {},
        "core_attn": {"recompute": "selective"},
        "mlp": {"recompute": "selective", "recompute_modules": ["mlp"]},
        "full": {"recompute": "full"},
    }
    for name, more in ways.items():
        settings = ModelConfig("unused", dtype="bfloat16", **more)
        taken = _update_of(parallel, settings, lengths_of(TOKENS, TOKENS // 4), None, shape=shape, logits=LOGITS_BYTES)
        estimate = activation_bytes(sizes, settings, parallel, TOKENS, LOGITS_BYTES) / 2**30
        yield f"| {name} | {taken[1]:.3f} | {taken[-1]:.2f} | {estimate:.2f} |"
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()


def _update_of(
    parallel: ParallelConfig,
    settings: ModelConfig,
    lengths: list[int],
    profile: str | None,
    fused: bool = True,
    shape: dict[str, Any] = MODEL,
    logits: int | None = None,
) -> list[float]:
    """Seconds of log-probs, of forward and backward, of the optimizer's step; GiB of the peak of memory, and of what
    the passes add to the model's own."""
    from megarl.learn import algorithms
    from megarl.learn.batching import Sequences, micro_batches
    from megarl.learn.models.gpt import unwrap
    from megarl.learn.training import objectives
    from megarl.learn.training.model import TrainedModel, micro_batching_for
    from megarl.learn.training.schedule import Head

    limits = micro_batching_for(parallel, TrainerConfig(max_tokens_per_micro_batch=TOKENS))
    head = Head(shape["vocab_size"], logits_bytes=logits)
    model = TrainedModel(shape, settings, parallel, head, limits, OptimizerConfig(lr=1e-6))
    if not fused:
        config: Any = unwrap(model.model.chunks[0]).config
        config.bias_activation_fusion = False
    mask = torch.ones(TOKENS, dtype=torch.bool)
    mask[torch.tensor(lengths).cumsum(0) - 1] = False
    step = Sequences(torch.randint(0, shape["vocab_size"], (TOKENS,)), torch.tensor(lengths), mask)
    batches = micro_batches(step, limits, 0)
    objective = objectives.policy(algorithms.get("sft"), AlgorithmConfig(), step)
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if GPU else 0
    passes = seconds(lambda: model.backward(step, batches, objective), 3)
    added = torch.cuda.max_memory_allocated() - held if GPU else 0
    outputs = seconds(lambda: model.model.outputs(step, [batches]), 3)
    stepping = seconds(lambda: model.step(0.0), 3)
    if profile:
        _profile(lambda: model.backward(step, batches, objective), Path(profile))
    peak = torch.cuda.max_memory_allocated() if GPU else 0
    return [outputs, passes, stepping, peak / 2**30, added / 2**30]


def _profile(step: Callable[[], object], path: Path) -> None:
    """Where the time of one ``step`` goes, kernel by kernel and op by op, into a text file."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * GPU]
    with profiling(activities=activities) as found:
        step()
        _synchronize()
    averages = found.key_averages()
    by = "self_cuda_time_total" if GPU else "self_cpu_time_total"
    path.write_text(
        averages.table(sort_by=by, row_limit=60, max_name_column_width=90)
        + averages.table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=60)
    )


# --- sync -------------------------------------------------------------------------------------------------------------


def sync() -> Iterator[str]:
    from megarl.weights.architectures import architecture

    size = sum(torch.Size(s).numel() for s in architecture(MODEL).tensors(MODEL).values()) * 2
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_sync_rank, (port, folder), nprocs=2)
        found = torch.load(Path(folder, "0.pt"))
    yield (
        f"{size / 1e9:.2f} GB in bfloat16, one trainer rank and one engine rank, two processes on one device; later: "
        "the median of 3."
    )
    yield ""
    yield "| way | first, s | second, s | later, s | GB/s |"
    yield "|---|---|---|---|---|"
    for name, (first, second, *later) in found.items():
        taken = statistics.median(later)
        yield f"| {name} | {first:.3f} | {second:.3f} | {taken:.3f} | {size / taken / 1e9:.1f} |"


def _sync_rank(rank: int, port: int, folder: str) -> None:
    import torch.distributed as dist
    from reshard import Between, without_digests

    from megarl.engines.sync.shared import (
        DeviceMemory,
        HostMemory,
        SharedMemoryReceiver,
        SharedMemorySender,
        memory_file,
    )
    from megarl.weights.reshard import execute
    from megarl.weights.reshard.layouts import MegatronGrid, megatron_layout, vllm_layout
    from megarl.weights.reshard.plan import build_plan

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    source, destination = megatron_layout(MODEL, MegatronGrid()), vllm_layout(MODEL, 1)
    plan = build_plan(source, destination)
    layout, dtype = (source, destination)[rank], torch.bfloat16
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape, device=DEVICE).to(dtype) for name, shape in layout.local_shapes(0).items()}
    files: list[Any] = [None, None]
    dist.all_gather_object(files, memory_file())
    link = Between(1 if rank == 0 else 0)
    host = HostMemory(files[0]) if rank == 0 else HostMemory(others={0: files[0]})
    memories: dict[str, Any] = {"host memory": host} | ({"the card's memory": DeviceMemory()} if GPU else {})

    def move(transport: Any, bucket: int, finish: Callable[[], None] = lambda: None) -> None:
        if rank == 0:
            execute.send(plan, 0, tensors, transport, dtype=dtype, bucket_bytes=bucket)
        else:
            execute.receive(plan, 0, tensors.__getitem__, transport, dtype=dtype, bucket_bytes=bucket)
        finish()

    ways: dict[str, Callable[[], object]] = {}
    for name, memory in memories.items():
        shared: Any = (
            SharedMemorySender(link, frozenset([0]), memory) if rank == 0 else SharedMemoryReceiver(link, {0}, memory)
        )
        for mib in (8, 64):
            way = lambda shared=shared, mib=mib: move(shared, mib << 20, shared.finish)  # noqa: E731
            ways[f"slices through {name}, buckets of {mib} MiB"] = way
            ways[f"the same through {name}, {mib} MiB, without the digests of what is sent"] = lambda way=way: (
                without_digests(way)
            )
    ways["slices over sockets, buckets of 64 MiB"] = lambda: move(link, 64 << 20)
    flat = torch.cat([x.flatten() for x in tensors.values()])
    pinned = torch.empty(flat.shape, dtype=dtype, pin_memory=GPU)
    plain = torch.empty(flat.shape, dtype=dtype)
    for name, memory in (("pageable", plain), ("pinned", pinned)):
        ways[f"one copy, device to {name} memory"] = lambda memory=memory: rank or memory.copy_(flat)
        ways[f"one copy, {name} memory to device"] = lambda memory=memory: rank or flat.copy_(memory)
    ways["one copy within the device"] = lambda: rank or flat.clone()
    found = {}
    for name, way in ways.items():

        def together(way: Callable[[], object] = way) -> None:
            way()
            _synchronize()
            dist.barrier()

        found[name] = every(together, 5)
    if rank == 0:
        torch.save(found, Path(folder, "0.pt"))
    dist.destroy_process_group()


# --- jobs -------------------------------------------------------------------------------------------------------------

STEPS, INTERVAL = 40, 10


def jobs(root: Path) -> Iterator[str]:
    root.mkdir(parents=True, exist_ok=True)
    yield _outcome(root, "sft", "sft")
    process = subprocess.Popen(_command(root, "killed", "sft"), stdout=subprocess.DEVNULL, start_new_session=True)
    latest = root / "killed" / "checkpoints" / "latest_checkpointed_iteration.txt"
    deadline = time.monotonic() + JOB_S
    while process.poll() is None and time.monotonic() < deadline:
        if latest.exists() and int(latest.read_text()) >= STEPS // 2:
            break
        time.sleep(0.05)
    if process.poll() is not None:
        raise SystemExit(f"experiment=sft ended by itself with {process.returncode} before it could be killed")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    yield f"- killed by SIGKILL after the checkpoint of step {latest.read_text() if latest.exists() else None}"
    yield _outcome(root, "killed", "sft")
    yield _difference(root / "sft", root / "killed")
    yield _outcome(root, "dpo", "dpo")


JOB_S = 150.0


def _command(root: Path, name: str, experiment: str) -> list[str]:
    return [
        sys.executable, "-m", "megarl", "train", f"experiment={experiment}", f"run.name={name}",
        f"run.dir={root / name}", "parallel=tp1", f"parallel.backend={BACKEND}", "model.dtype=bfloat16",
        f"trainer.steps={STEPS}", f"trainer.checkpoint_interval={INTERVAL}", f"trainer.eval_interval={STEPS // 2}",
    ]  # fmt: skip


def _outcome(root: Path, name: str, experiment: str) -> str:
    """Run a job to its end; its time and result, or the end of its log."""
    start, log = time.monotonic(), root / f"{name}.log"
    with log.open("a") as out:
        try:
            code = subprocess.run(_command(root, name, experiment), stdout=out, stderr=out, timeout=JOB_S).returncode
        except subprocess.TimeoutExpired:
            code = 124
    lines = log.read_text().splitlines()
    if code:
        return f"- experiment={experiment}: exit code {code}\n```\n" + "\n".join(lines[-40:]) + "\n```"
    found = [line for line in lines if line.startswith((f"step {STEPS}/", "before", "after"))]
    return f"- experiment={experiment}: {time.monotonic() - start:.0f} s; " + "; ".join(
        " ".join(x.split()) for x in found
    )


def _difference(whole: Path, resumed: Path) -> str:
    """Largest difference of the exported weights of two runs."""
    from safetensors.torch import load_file

    largest, same = 0.0, True
    for file in sorted((whole / "hf").glob("*.safetensors")):
        other = load_file(resumed / "hf" / file.name)
        for name, tensor in load_file(file).items():
            same = same and torch.equal(tensor, other[name])
            largest = max(largest, float((tensor.float() - other[name].float()).abs().max()))
    found = "the same bits" if same else f"at most {largest:.1e} apart"
    return f"- exported weights of the resumed run and of the one that was not killed: {found}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["attention", "update", "layers", "sync", "jobs"])
    parser.add_argument("--write", action="store_true", help="also write the lines into docs/benchmarks/gpu.md")
    parser.add_argument(
        "--layers", nargs="+", default=["local", "local, unfused"], help='of `update`; or "transformer_engine"'
    )
    parser.add_argument("--recompute", nargs="+", default=["none", "selective", "full"], help="of `update`")
    parser.add_argument("--profile", help="of `update`: a file for where the time of a backward pass goes")
    parser.add_argument("--root", type=Path, default=Path("runs/gpu"), help="of `jobs`: where runs are kept")
    arguments = parser.parse_args()
    found = {
        "attention": attention,
        "update": lambda: update(arguments.profile, arguments.layers, arguments.recompute),
        "layers": layers_of_7b,
        "sync": sync,
        "jobs": lambda: jobs(arguments.root.absolute()),
    }[arguments.what]()
    text = page.Text()
    for line in found:
        text.say(line)
    if arguments.write:
        page.write("benchmarks/gpu.md", str(text), f"benchmarks/gpu.py {arguments.what}")


if __name__ == "__main__":
    main()
