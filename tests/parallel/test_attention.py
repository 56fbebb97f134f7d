"""Packed and padded sequences, context parallelism and recomputation: log-probs and gradients of transformers' eager
run.

The reference runs one sequence at a time, so it knows neither padding nor neighbours. Batches are laid out here by
plain loops. All cases of one world run in one set of processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import ModelConfig, ParallelConfig
from tests.conftest import SOAK
from tests.parallel.families import ALIKE, VOCAB, hf_model, save
from tests.parallel.grid import run_grid

TOLERANCE = 1e-5
"""Of the largest entry: of all log-probs, and of each parameter's gradient on a rank."""
BF16_TOLERANCE = 0.15
"""8 bits of mantissa, through four layers, against float32."""
OTHERS = (*ALIKE, "gemma4_text")
"""Families with another rotation, other windows or heads."""
LENGTHS = (5, 24, 2, 13, 17, 9, 24, 3)
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {}) for name in ("qwen3", "qwen2", "llama3", "qwen3_moe", "deepseek_v3", "deepseek_v3_yarn", *OTHERS)
} | {"linear": ("llama2", {"rope_parameters": LINEAR})}


@dataclass(frozen=True)
class Case:
    grid: str
    packed: bool
    model: str = "qwen3"
    recompute: str = "none"
    dtype: str = "float32"

    def __str__(self) -> str:
        parts = [self.model, self.grid, "packed" if self.packed else "padded", self.recompute, self.dtype]
        return "-".join(part for part in parts if part not in ("none", "float32"))


SP = ParallelConfig(tp=2, sequence_parallel=True)
GRIDS = {
    "tp1": ParallelConfig(),
    "tp2": ParallelConfig(tp=2),
    "tp2-sp": SP,
    "pp2": ParallelConfig(pp=2),
    "pp2-vpp2": ParallelConfig(pp=2, vpp=2),
    "dp2": ParallelConfig(dp=2),
    "cp2": ParallelConfig(cp=2),
    "ep2": ParallelConfig(dp=2, ep=2),
    "cp2ep2": ParallelConfig(cp=2, ep=2),
    "cp4": ParallelConfig(cp=4),  # more ranks than key/value heads
    "tp2cp2": ParallelConfig(tp=2, cp=2),
    "tp2cp2-sp": replace(SP, cp=2),
    "cp2pp2": ParallelConfig(cp=2, pp=2),
    "cp2dp2": ParallelConfig(cp=2, dp=2),
    "cp2dp2ep2": ParallelConfig(cp=2, dp=2, ep=2),
    "tp2pp2vpp2-sp": replace(SP, pp=2, vpp=2),
}
BOTH = (False, True)
ALL = [
    *(Case(grid, packed) for grid in GRIDS if "ep2" not in grid for packed in BOTH),
    *(
        Case(grid, packed, "qwen3_moe")
        for grid in ("tp1", "ep2", "cp2ep2", "cp2dp2ep2", "tp2cp2-sp")
        for packed in BOTH
    ),
    *(Case(grid, packed, "deepseek_v3_yarn") for grid in ("tp2-sp", "cp2", "tp2cp2-sp") for packed in BOTH),
    *(Case(grid, True, model) for model in ("llama3", "linear", "qwen2", "deepseek_v3") for grid in ("tp1", "cp2")),
    *(Case(grid, packed, model) for model in OTHERS for grid in ("cp2", "tp2cp2-sp") for packed in BOTH),
    *(
        Case(grid, packed, "qwen3", recompute)
        for recompute in ("selective", "full")
        for grid in ("tp1", "tp2-sp", "cp2", "pp2-vpp2")
        for packed in BOTH
    ),
    *(Case("ep2", True, "qwen3_moe", recompute) for recompute in ("selective", "full")),
    Case("cp2", True, "deepseek_v3_yarn", "selective"),
    *(Case(grid, packed, dtype="bfloat16") for grid in ("tp1", "cp2") for packed in BOTH),
]


def in_every_run(case: Case) -> bool:
    """Grids of four ranks meet one layout in turn, as all grids do of a recomputed layer, bfloat16 and YaRN.

    Families that differ in their rotation alone meet one grid; all are on one rank in test_families.py. ``make soak``
    has all.
    """
    if case.model in OTHERS:  # a part of each head rotates, or no head of some layers
        return case in (
            Case("cp2", True, "glm4_moe"),
            Case("cp2", True, "smollm3"),
            Case("cp2", True, "qwen2_windows"),
            Case("cp2", True, "gemma4_text"),
            Case("tp2cp2-sp", False, "qwen2_windows"),
        )
    if case.model in ("llama3", "linear", "qwen2", "deepseek_v3"):
        return case.grid == "cp2"
    if (case.model, case.recompute, case.dtype) in (("qwen3_moe", "none", "float32"), ("qwen3", "none", "float32")):
        return GRIDS[case.grid].world_size < 4 or case.packed == bool(list(GRIDS).index(case.grid) % 2)
    if case.recompute != "none" and case.model != "qwen3":
        return True
    return case.packed == bool(ALL.index(replace(case, packed=False)) // 2 % 2)


CASES = [case for case in ALL if SOAK or in_every_run(case)]


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def zigzag(length: int, cp: int, rank: int) -> list[int]:
    """Positions of a sequence that a rank has."""
    size = length // (2 * cp)
    return [*range(rank * size, (rank + 1) * size), *range((2 * cp - 1 - rank) * size, (2 * cp - rank) * size)]


@dataclass
class Batch:
    """A micro-batch: tokens, targets, and weights of the loss [b, s] for a rank; ``source`` is (sequence, position) or
    None."""

    tokens: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    source: list[list[tuple[int, int] | None]]
    params: Any


def layout(
    sequences: list[torch.Tensor],
    weights: list[torch.Tensor],
    chosen: list[int],
    parallel: ParallelConfig,
    packed: bool,
    cp_rank: int,
    length: int,
) -> Batch:
    """``length`` rows of tokens for each chunk or row, the same in all micro-batches because pipeline stages exchange
    fixed sizes."""
    from megatron.core.packed_seq_params import PackedSeqParams

    cp = parallel.cp
    lengths = [up(len(sequences[i]), 2 * cp) for i in chosen] if packed else [length] * len(chosen)
    places: list[list[tuple[int, int] | None]] = [
        [(i, p) if p < len(sequences[i]) else None for p in zigzag(whole, cp, cp_rank)]
        for i, whole in zip(chosen, lengths, strict=True)
    ]
    params = None
    if packed:
        rest = length - sum(lengths)
        if rest:
            lengths.append(rest)
            places.append([None] * (rest // cp))
        cu = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)
        )
        places = [[place for row in places for place in row]]

    def fill(values: list[torch.Tensor], shift: int, nothing: float) -> torch.Tensor:
        def at(place: tuple[int, int] | None) -> float:
            if place is None or place[1] + shift >= len(values[place[0]]):
                return nothing
            return float(values[place[0]][place[1] + shift])

        return torch.tensor([[at(place) for place in row] for row in places])

    return Batch(fill(sequences, 0, 0).long(), fill(sequences, 1, -100).long(), fill(weights, 0, 0), places, params)


def backward(chunks: Any, parallel: ParallelConfig, batches: list[Batch], length: int) -> dict[tuple[int, int], float]:
    """Runs the batches forward and backward; (sequence, position) -> log-prob on ranks of the last stage."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megarl.learn.models.gpt import unwrap
    from megarl.learn.models.head import Request, requesting

    def step(iterator: Any, model: Any) -> Any:
        batch = next(iterator)
        with requesting(unwrap(model), Request.of(batch.targets, torch.device("cpu"), VOCAB)):
            output = model(batch.tokens, None, None, packed_seq_params=batch.params)

        def loss(answer: torch.Tensor) -> Any:
            return (
                (answer[..., 0] * batch.weights).sum(),
                torch.zeros((), dtype=torch.int),
                (batch, answer[..., 0].detach()),
            )

        return output, loss

    config: Any = unwrap(chunks[0]).config
    wrapped = [
        DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), c) for c in chunks
    ]
    for model in wrapped:
        model.zero_grad_buffer()
        model.train()
    collected = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=wrapped if len(chunks) > 1 else wrapped[0],
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=len(batches[0].tokens),
        forward_only=False,
    )
    return {
        place: float(logp)
        for batch, answer in collected
        for row, values in zip(batch.source, answer, strict=True)
        for place, logp in zip(row, values, strict=True)
        if place is not None
    }


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def on_grids(rank: int, folder: str, cases: list[Case]) -> dict[Case, tuple[float, float, str]]:
    """Runs in each rank: the largest relative error of a log-prob, that of a gradient, and the name of that
    parameter."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megarl.learn.models.gpt import build_chunks, named_tensors, unwrap
    from megarl.learn.parallel import process_groups
    from megarl.learn.parallel.grid import megatron_grid
    from megarl.weights.checkpoint.formats import hf
    from megarl.weights.reshard.layouts import megatron_layout

    found = {}
    for grid in dict.fromkeys(case.grid for case in cases):
        parallel = GRIDS[grid]
        position = process_groups.initialize(parallel, seed=1)
        for case in (c for c in cases if c.grid == grid):
            path = Path(folder) / case.model
            expected = torch.load(path / "expected.pt")
            model = ModelConfig(path=str(path), recompute=case.recompute, dtype=case.dtype)  # type: ignore[arg-type]
            hf_config = hf.read_hf_config(path)
            chunks = build_chunks(hf_config, model, parallel)
            tensors = named_tensors(chunks if len(chunks) > 1 else chunks[0])
            plan = megatron_layout(hf_config, megatron_grid(parallel))
            hf.load_into(path, plan, rank, tensors)

            mine = list(range(len(LENGTHS)))[position.dp_rank :: parallel.dp]
            micro = [mine[: len(mine) // 2], mine[len(mine) // 2 :]]
            longest = sum(LENGTHS) + 2 * parallel.cp * len(LENGTHS) if case.packed else max(LENGTHS)
            length = up(longest, 2 * parallel.cp * parallel.tp)
            batches = [
                layout(expected["tokens"], expected["weights"], m, parallel, case.packed, position.cp_rank, length)
                for m in micro
            ]
            logp = backward(chunks, parallel, batches, length)
            wanted = torch.tensor([expected["logp"][i][p] for i, p in logp if p + 1 < LENGTHS[i]])
            got = torch.tensor([value for (i, p), value in logp.items() if p + 1 < LENGTHS[i]])
            error = relative(got, wanted) if len(got) else 0.0

            named = [
                (f"chunk{v}.{name}" if len(chunks) > 1 else name, p)
                for v, chunk in enumerate(chunks)
                for name, p in unwrap(chunk).named_parameters()
                if p.requires_grad
            ]
            gradients = {name: torch.full(tensor.shape, float("nan")) for name, tensor in tensors.items()}
            hf.load_into(Path(folder) / f"{case.model}-gradients", plan, rank, gradients)
            errors = {name: relative(p.main_grad, gradients[name]) for name, p in named}
            worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
            found[case] = (error, errors[worst], worst)
        dist.barrier()
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints, each with its tokens, weights of the loss and log-probs; ``{model}-gradients`` hold the loss's
    gradients."""
    root = tmp_path_factory.mktemp("attention")
    g = torch.Generator().manual_seed(5)
    # Without the padding token: transformers gives its embedding no gradient.
    tokens = [torch.randint(2, VOCAB, (n,), generator=g) for n in LENGTHS]
    weights = [torch.randn(n, generator=g) / sum(LENGTHS) for n in LENGTHS]
    for name, (family, changes) in MODELS.items():
        model = hf_model(family, **changes)
        model.save_pretrained(root / name)
        logps = []
        for row, weight in zip(tokens, weights, strict=True):
            logp = torch.log_softmax(model(row[None]).logits[0], -1)[:-1].gather(-1, row[1:, None])[:, 0]
            (logp * weight[:-1]).sum().backward()
            logps.append(logp.detach())
        torch.save({"tokens": tokens, "weights": weights, "logp": logps}, root / name / "expected.pt")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            for buffer in model.buffers():
                buffer.zero_()
        model.save_pretrained(root / f"{name}-gradients")
    return root


@pytest.fixture(scope="module")
def errors(folder: Path) -> dict[Case, tuple[float, float, str]]:
    """Case -> the largest error of a log-prob, and of a gradient with its name, of all ranks."""
    found = {}
    for world in sorted({p.world_size for p in GRIDS.values()}):
        cases = [c for c in CASES if GRIDS[c.grid].world_size == world]
        answers = run_grid(world, on_grids, str(folder), cases)
        for case in cases:
            mine = [a[case] for a in answers]
            found[case] = (max(m[0] for m in mine), *max((m[1:] for m in mine), key=lambda m: m[0]))
    return found


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if in_every_run(case) else pytest.mark.soak) for case in ALL], ids=str
)
def test_equals_transformers_one_sequence_at_a_time(errors: Any, case: Case) -> None:
    logp, gradient, name = errors[case]
    tolerance = BF16_TOLERANCE if case.dtype == "bfloat16" else TOLERANCE
    assert logp < tolerance
    assert gradient < tolerance, f"{name}: gradient off by {gradient:.1e} of its largest entry"


def neighbours(rank: int, path: str) -> list[bool]:
    """For the model and for the attention alone: whether other sequences keep their bits when one sequence changes."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from megarl.learn.models.attention import CoreAttention
    from megarl.learn.parallel import process_groups
    from tests.parallel.test_families import build_and_load

    process_groups.initialize(ParallelConfig(), seed=1)
    (stage,), _, _ = build_and_load(Path(path), ParallelConfig(), rank)
    g = torch.Generator().manual_seed(0)
    total, changed = sum(LENGTHS), slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
    others = torch.ones(total, dtype=torch.bool)
    others[changed] = False

    def params() -> Any:
        cu = torch.tensor([sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)], dtype=torch.int32)
        return PackedSeqParams("thd", cu, cu, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS))

    tokens = torch.randint(2, VOCAB, (1, total), generator=g)
    one = stage(tokens, None, None, packed_seq_params=params())[0]
    tokens[0, changed] = torch.randint(2, VOCAB, (LENGTHS[1],), generator=g)
    two = stage(tokens, None, None, packed_seq_params=params())[0]

    core = CoreAttention(stage.config, 1, AttnMaskType.causal, "self")
    query, key, value = (torch.randn(total, heads, 24, generator=g) for heads in (4, 2, 2))
    three = core(query, key, value, None, packed_seq_params=params())
    key[changed] = value[changed] = query[changed] = float("nan")  # would spread through any weight of zero
    four = core(query, key, value, None, packed_seq_params=params())
    return [
        torch.equal(one[others], two[others]),
        not torch.equal(one[~others], two[~others]),
        torch.equal(three[others], four[others]),
        bool(four[~others].isnan().all()),
    ]


def test_packed_sequences_do_not_see_each_other(folder: Path) -> None:
    assert run_grid(1, neighbours, str(folder / "qwen3")) == [[True] * 4]


def attention_alone(rank: int, has_more: bool) -> list[float]:
    """Largest differences of the attention under cp=2 from scores with a mask: outputs, and gradients of query, key,
    value and sinks.

    Args:
        has_more: The attention has a window and sinks.
    """
    import torch.distributed as dist
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from megarl.learn.models.attention import CoreAttention
    from megarl.learn.parallel import process_groups

    process_groups.initialize(ParallelConfig(cp=2), seed=1)
    config = TransformerConfig(
        num_layers=1, hidden_size=48, num_attention_heads=6, attention_dropout=0.0, context_parallel_size=2,
        use_cpu_initialization=True, **({"window_size": (4, 0), "softmax_type": "learnable"} if has_more else {}),
    )  # fmt: skip
    lengths = [8, 4, 20, 12, 4]
    total = sum(lengths)
    g = torch.Generator().manual_seed(3)
    shapes = [(6, 8), (3, 8), (3, 5)]  # cp divides neither the 3 key/value heads; values are narrower
    whole = [torch.randn(total, *shape, generator=g, requires_grad=True) for shape in shapes]
    weight = torch.randn(total, 6 * 5, generator=g)

    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    behind = torch.arange(total)[:, None] - torch.arange(total)
    allowed = (segment[:, None] == segment) & (behind >= 0) & (behind < (5 if has_more else total))
    query, key, value = whole
    sinks = torch.randn(6, generator=g, requires_grad=True)
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, 1)) * 0.3
    scores = scores.masked_fill(~allowed, float("-inf"))
    if has_more:
        scores = torch.cat([scores, sinks[:, None, None].expand(6, total, 1)], -1)
    probabilities = scores.softmax(-1)[..., :total]
    expected = torch.einsum("hqk,khd->qhd", probabilities, value.repeat_interleave(2, 1)).flatten(1)
    (expected * weight).sum().backward()

    mine = torch.tensor([sum(lengths[:i]) + p for i, n in enumerate(lengths) for p in zigzag(n, 2, rank)])
    shares = [x.detach()[mine].requires_grad_() for x in whole]
    core = CoreAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=0.3)
    if has_more:
        core.softmax_offset.data.copy_(sinks.detach())
    cu = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)
    out = core(*shares, None, packed_seq_params=PackedSeqParams("thd", cu, cu, max_seqlen_q=20, max_seqlen_kv=20))
    (out * weight[mine]).sum().backward()
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(shares, whole, strict=True))]
    differences = [float((found - want[mine]).abs().max()) for found, want in pairs]
    if has_more:
        dist.all_reduce(core.softmax_offset.grad)  # each rank has that of its heads
        differences.append(float((core.softmax_offset.grad - sinks.grad).abs().max()))
    dist.barrier()
    return differences


@pytest.mark.parametrize("has_more", [False, True], ids=["causal", "window-sinks"])
def test_the_attention_alone_under_context_parallelism(has_more: bool) -> None:
    for differences in run_grid(2, attention_alone, has_more):
        assert max(differences) < 1e-5, f"outputs and gradients of query, key, value are off by {differences}"


def passes(rank: int, path: str) -> dict[str, tuple[int, int]]:
    """model.recompute -> how often attention and the linear after it run per layer in one forward and backward."""
    from megarl.learn.models.gpt import build_chunks
    from megarl.learn.parallel import process_groups
    from megarl.weights.checkpoint.formats import hf

    process_groups.initialize(ParallelConfig(), seed=1)
    found = {}
    for recompute in ("none", "selective", "full"):
        model = ModelConfig(path=path, recompute=recompute)  # type: ignore[arg-type]
        (stage,) = build_chunks(hf.read_hf_config(Path(path)), model, ParallelConfig())
        counts = {"core_attention": 0, "linear_proj": 0}

        def count(module: Any, *_: Any, counts: dict[str, int] = counts) -> None:
            counts["core_attention" if type(module).__name__ == "CoreAttention" else "linear_proj"] += 1

        for name, module in stage.named_modules():
            if name.endswith(("core_attention", "self_attention.linear_proj")):
                module.register_forward_pre_hook(count)
        stage(torch.zeros(1, 8, dtype=torch.int64), None, None).sum().backward()
        found[recompute] = (counts["core_attention"] // 4, counts["linear_proj"] // 4)
    return found


def test_what_is_recomputed(folder: Path) -> None:
    (found,) = run_grid(1, passes, str(folder / "qwen3"))
    assert found == {"none": (1, 1), "selective": (2, 1), "full": (2, 2)}


def on_a_gpu(rank: int, path: str) -> dict[str, list[float]]:
    """Heads -> distances from float32 of packed attention in bfloat16, of its output and its inputs' gradients."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from megarl.learn.models.attention import CoreAttention, layout_of
    from megarl.learn.models.gpt import transformer_config
    from megarl.learn.models.packed import LONG
    from megarl.learn.parallel import process_groups
    from megarl.weights.checkpoint.formats import hf

    parallel = ParallelConfig(backend="nccl")
    process_groups.initialize(parallel, seed=1)
    config = transformer_config(hf.read_hf_config(Path(path)), ModelConfig(path=path, dtype="bfloat16"), parallel)
    core = CoreAttention(config, 1, AttnMaskType.causal, "self")
    short = [1000, 1, 77, 513, 2]
    found = {}
    for heads, groups_, width, lengths in (
        *((*h, short) for h in ((4, 2, 32), (8, 8, 64), (12, 2, 128))),
        (12, 2, 128, [LONG]),  # not by the kernel for packed sequences
        (4, 2, 32, [LONG, LONG]),
    ):
        cu = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(lengths))
        made = [torch.randn(sum(lengths), n, width, device="cuda").bfloat16() for n in (heads, groups_, groups_, heads)]
        results = []
        for attend in (
            lambda *x: core(*x, None, packed_seq_params=params).unflatten(-1, (-1, x[-1].shape[-1])),  # noqa: B023
            lambda *x: core.bucketed(*(y.float() for y in x), layout_of(params, 1)),  # noqa: B023
        ):
            inputs = [x.clone().requires_grad_() for x in made[:3]]
            out = attend(*inputs)
            results.append([out.detach(), *torch.autograd.grad(out, inputs, made[3].to(out.dtype))])
        found[f"{heads}, {groups_}, {width}, {lengths}"] = [
            float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(*results, strict=True)
        ]
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_torchs_kernel_for_packed_sequences_is_close_to_float32(folder: Path) -> None:
    """bfloat16 rounds each number by up to 2^-9 of it."""
    [found] = run_grid(1, on_a_gpu, str(folder / "qwen3"), gpus=True)
    assert all(max(distances) < 6e-3 for distances in found.values()), found


class HostReads:
    """Counts where Python asks for the value of a tensor, for which it would wait on a GPU."""

    NAMES = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> HostReads:
        self._plain = {name: getattr(torch.Tensor, name) for name in self.NAMES}
        for name, plain in self._plain.items():

            def counted(tensor: Any, *arguments: Any, plain: Any = plain) -> Any:
                self.number += 1
                return plain(tensor, *arguments)

            setattr(torch.Tensor, name, counted)
        return self

    def __exit__(self, *_: Any) -> None:
        for name, plain in self._plain.items():
            setattr(torch.Tensor, name, plain)


def host_reads(rank: int, paths: list[str], parallel: ParallelConfig) -> list[tuple[int, int]]:
    """Of each model: its layers, and the tensors whose values Python asks for in a packed forward pass."""
    from megarl.learn.models.gpt import build_chunks
    from megarl.learn.models.packed import on_device
    from megarl.learn.parallel import process_groups
    from megarl.learn.training.schedule import packed_params_of
    from megarl.weights.checkpoint.formats import hf

    process_groups.initialize(parallel, seed=1)
    found = []
    for path in paths:
        hf_config = hf.read_hf_config(Path(path))
        (stage,) = build_chunks(hf_config, ModelConfig(path=path), parallel)
        cu = torch.tensor([0, 8, 20, 32], dtype=torch.int32)
        tokens = torch.zeros(1, 32 // parallel.cp, dtype=torch.int64)
        with HostReads() as reads:
            params = packed_params_of(on_device(cu, torch.device("cpu")), 12)
            stage(tokens, torch.zeros_like(tokens), None, packed_seq_params=params).sum().backward()
        found.append((hf_config["num_hidden_layers"], reads.number))
    return found


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_layers_do_not_wait_for_a_packed_micro_batch(tmp_path: Path, family: str, cp: int) -> None:
    """Indices and angles are made once; a GPU would wait at each value that Python asks for."""
    paths = []
    for layers in (2, 5):
        more = (
            {"first_k_dense_replace": layers} if family == "deepseek_v3" else {}
        )  # experts count tokens by themselves
        paths.append(str(save(family, tmp_path / str(layers), num_hidden_layers=layers, **more)))
    for few, many in run_grid(cp, host_reads, paths, ParallelConfig(cp=cp)):
        assert (few[0], many[0]) == (2, 5)
        assert few[1] == many[1] > 0
