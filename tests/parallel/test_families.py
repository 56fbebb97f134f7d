"""Every family on real Megatron grids: the logits and gradients of transformers, and the same HF file again.

All grids of one size run in one set of processes: to start them costs more than the tiny models do.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import ModelConfig, ParallelConfig
from tests.conftest import SOAK
from tests.parallel.batches import sequences_of
from tests.parallel.families import ALIKE, FAMILIES, MOE, ONE_STAGE, VOCAB, hf_model, save
from tests.parallel.grid import run_grid
from tests.parallel.test_fused_packages import HAVE_TE

TOLERANCE = 1e-4
SP = ParallelConfig(tp=2, sequence_parallel=True)
GRIDS = {
    "tp1": ParallelConfig(),
    "tp2": ParallelConfig(tp=2),
    "tp2-sp": SP,
    "pp2": ParallelConfig(pp=2),
    "pp1+3": ParallelConfig(pp=2, first_stage_layers=1),
    "pp3+1": ParallelConfig(pp=2, last_stage_layers=1),
    "pp2-vpp2": ParallelConfig(pp=2, vpp=2),
    "tp2pp2": ParallelConfig(tp=2, pp=2),
    "tp4-sp": ParallelConfig(tp=4, sequence_parallel=True),  # more ranks than most families here have key/value heads
}
EXPERT_GRIDS = {
    "ep2": ParallelConfig(dp=2, ep=2),
    "tp2ep2": replace(SP, ep=2),
    "tp2-etp1": replace(SP, etp=1),
    "tp2dp2ep2-etp2": replace(SP, dp=2, ep=2, etp=2),
    "tp2pp2ep2": replace(SP, pp=2, ep=2),
}
SHORT: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "ernie4_5_short": ("ernie4_5", {}, ("rms_norm_eps", "rope_parameters", "tie_word_embeddings")),
    "deepseek_v3_short": (  # with groups that transformers' defaults can cut
        "deepseek_v3",
        {"n_routed_experts": 16, "num_experts_per_tok": 8},
        ("n_group", "topk_group", "routed_scaling_factor", "rope_interleave"),
    ),
    "qwen3_moe_short": ("qwen3_moe", {}, ("norm_topk_prob", "rms_norm_eps", "rope_parameters", "decoder_sparse_step")),
}
"""Checkpoints whose config.json leaves keys out: name -> (family, changes, keys)."""
REFUSED = (("qwen3_vl", "pp1+3"), *((family, grid) for family in ONE_STAGE for grid in GRIDS if "pp" in grid))
"""Two layers of this family must be on the first stage; all layers of the others on one."""
CASES = [(family, grid) for family in FAMILIES for grid in (*GRIDS, *(EXPERT_GRIDS if family in MOE else ()))]
CASES = [case for case in CASES if case not in REFUSED]
CASES += [(name, "tp1") for name in SHORT]
ALL_GRIDS = GRIDS | EXPERT_GRIDS
TURNS = (
    ("tp2-sp", "tp4-sp", "tp2-sp"),
    ("tp2", "pp2", "pp2-vpp2", "pp1+3", "tp2pp2", "pp3+1"),
    ("ep2", "tp2ep2", "tp2-etp1"),
    ("tp2dp2ep2-etp2", "tp2pp2ep2"),
)
"""Grids of which every run has one for each family, in turn; ``ALIKE`` families have one grid. ``make soak`` has
all."""


def in_every_run(family: str, grid: str) -> bool:
    turn = list(FAMILIES).index(family) if family in FAMILIES else 0
    if family in ALIKE:
        return grid == ("tp2-sp", "tp2ep2" if family in MOE else "pp2")[turn % 2]
    return all(grid not in some or some[turn % len(some)] == grid for some in TURNS)


def cases(chosen: list[tuple[str, str]]) -> Any:
    """Parameters of a test, those of ``make soak`` marked."""
    marked = [pytest.param(f, g, marks=() if in_every_run(f, g) else pytest.mark.soak) for f, g in chosen]
    return pytest.mark.parametrize(("family", "grid"), marked, ids=[f"{f}-{g}" for f, g in chosen])


TRAINED = ("tp2-sp", "tp4-sp", "pp2", "ep2", "tp2ep2", "tp2-etp1", "tp2dp2ep2-etp2", "tp2pp2ep2")
"""Grids on which gradients are compared too: one for each way that a gradient crosses ranks."""
GRADIENT_TOLERANCE = 1e-5
"""Of a tensor's largest entry; or four times what float32 costs transformers itself, where that is more:
its delta nets compute in float32 whatever the model's type is."""


def build_and_load(path: Path, parallel: ParallelConfig, rank: int, dtype: str = "float32") -> tuple[Any, Any, Any]:
    """(model chunks, their tensors by layout name, layout) of this rank, filled from the HF checkpoint."""
    from megarl.learn.models.gpt import build_chunks, named_tensors
    from megarl.learn.parallel.grid import megatron_grid
    from megarl.weights.checkpoint.formats import hf
    from megarl.weights.reshard.layouts import megatron_layout

    hf_config = hf.read_hf_config(path)
    chunks = build_chunks(hf_config, ModelConfig(path=str(path), dtype=dtype), parallel)  # type: ignore[arg-type]
    tensors = named_tensors(chunks if len(chunks) > 1 else chunks[0])
    for tensor in tensors.values():
        tensor.fill_(float("nan"))  # whatever is not loaded shows
    layout = megatron_layout(hf_config, megatron_grid(parallel))
    built, planned = {name: tuple(t.shape) for name, t in tensors.items()}, dict(layout.local_shapes(rank))
    assert built == planned, (
        f"only built: {built.items() - planned.items()}; only planned: {planned.items() - built.items()}"
    )
    hf.load_into(path, layout, rank, tensors)
    return chunks, tensors, layout


def forward(chunks: Any, tokens: torch.Tensor, rows: torch.Tensor, tp_group: Any) -> dict[int, torch.Tensor]:
    """Row -> logits [S, V] on the last stage, {} elsewhere. Two micro-batches, because the interleaved schedule needs
    them."""
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(iterator: Any, model: Any) -> Any:
        batch = next(iterator)
        output = model(tokens[batch], torch.arange(tokens.shape[1]).expand_as(tokens[batch]), None)
        return output, lambda logits: (logits.sum(), torch.zeros((), dtype=torch.int), (batch, logits))

    size = len(rows) // 2
    iterators = [iter(rows.split(size)) for _ in chunks]
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        collected = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=2,
            seq_length=tokens.shape[1],
            micro_batch_size=size,
            forward_only=True,
        )
    found = {}
    for batch, share in collected:
        shares = [torch.empty_like(share) for _ in range(tp_group.size())]
        dist.all_gather(shares, share.contiguous(), group=tp_group)
        found |= dict(zip(batch.tolist(), torch.cat(shares, -1)[..., :VOCAB], strict=True))
    return found


def backward(stage: Any, tokens: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Local name -> gradient of the mean cross-entropy of the next token over the rows of all data-parallel ranks."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megarl.learn.batching import MicroBatching, micro_batches
    from megarl.learn.models.gpt import named_tensors, unwrap
    from megarl.learn.training.schedule import Head, run

    config: Any = unwrap(stage).config
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), stage)
    model.zero_grad_buffer()
    model.train()
    count = len(tokens) * (tokens.shape[1] - 1)
    mask = torch.ones_like(tokens[rows], dtype=torch.bool)
    mask[:, -1] = False
    sequences = sequences_of(tokens[rows], mask)
    batches = micro_batches(sequences, MicroBatching(rows=2), 0)
    run([model], sequences, batches, Head(VOCAB), lambda _, x: (-x[..., 0].sum() / count, None), forward_only=False)
    gradients = {
        name: torch.zeros_like(tensor) for name, tensor in named_tensors(stage).items()
    }  # the router's bias has none, nor has a frozen tower
    return gradients | {name: p.main_grad for name, p in unwrap(stage).named_parameters() if p.requires_grad}


def on_grids(rank: int, folder: str, cases: list[tuple[str, str]]) -> dict[tuple[str, str], float | None]:
    """Runs in each rank: the largest difference from the expected logits (None without the last stage).

    Writes ``{family}-from-{grid}``, the model's weights again, and ``{family}-gradients-{grid}``.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megarl.learn.parallel import process_groups
    from megarl.weights.checkpoint.formats import hf
    from megarl.weights.reshard.layouts import hf_layout
    from megarl.weights.reshard.plan import build_plan

    found: dict[tuple[str, str], float | None] = {}
    for grid in dict.fromkeys(grid for _, grid in cases):
        parallel = ALL_GRIDS[grid]
        position = process_groups.initialize(parallel, seed=1)
        for family in (f for f, g in cases if g == grid):
            path = Path(folder) / family
            expected = torch.load(path / "logits.pt")
            tokens = expected["tokens"]
            chunks, tensors, layout = build_and_load(path, parallel, rank)
            mine = torch.arange(len(tokens))[position.dp_rank :: parallel.dp]
            logits = forward(chunks, tokens, mine, parallel_state.get_tensor_model_parallel_group())
            differences = [float((row - expected["logits"][i]).abs().max()) for i, row in logits.items()]
            found[family, grid] = max(differences) if differences else None
            plan = build_plan(layout, hf_layout(hf.read_hf_config(path)))
            hf.export_hf(plan, rank, tensors, path, Path(folder) / f"{family}-from-{grid}")
            if grid in TRAINED:
                gradients = backward(chunks[0], tokens, mine)
                hf.export_hf(plan, rank, gradients, path, Path(folder) / f"{family}-gradients-{grid}")
        dist.barrier()
        parallel_state.destroy_model_parallel()
    return found


def gradients(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Parameter -> gradient that transformers gives of the mean cross-entropy of the next token."""
    model.set_experts_implementation("eager")  # the other one has no float64
    model.zero_grad()
    logp = torch.log_softmax(model(tokens).logits, -1)[:, :-1].gather(-1, tokens[:, 1:, None])
    logp.mean().neg().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative(found: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    return float((found - want).abs().max() / want.abs().max().clamp_min(1e-12))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``{family}``: a checkpoint, with tokens [8, 24] and the logits that transformers gives for them;
    ``{family}-gradients``: the gradients that it gives in float64, under the names of the weights; ``own`` in
        ``logits.pt`` is how far its float32 ones are from them. Those of ``SHORT`` have no gradients."""
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("families")
    # Without the padding token: transformers gives its embedding no gradient.
    tokens = torch.randint(2, VOCAB, (8, 24), generator=torch.Generator().manual_seed(3))
    for family in FAMILIES:
        model = hf_model(family)
        model.save_pretrained(root / family)
        logits = model(tokens).logits
        in_float32 = gradients(model, tokens)
        expected = gradients(model.double(), tokens)
        own = max(relative(in_float32[name], gradient) for name, gradient in expected.items())
        kept = {"tokens": tokens, "logits": logits.detach(), "own": own}
        torch.save(kept, root / family / "logits.pt")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(expected.get(name, torch.zeros_like(parameter)))  # a tower's is absent
            for buffer in model.buffers():
                buffer.zero_()
        model.float().save_pretrained(root / f"{family}-gradients")
    for name, (family, changes, keys) in SHORT.items():
        save(family, root / name, **changes)
        config = json.loads((root / name / "config.json").read_text())
        assert set(keys) <= config.keys()
        (root / name / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in keys}))
        model = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32, attn_implementation="eager")
        torch.save({"tokens": tokens, "logits": model(tokens).logits.detach()}, root / name / "logits.pt")
    return root


BATCH = 32
"""Most cases that one set of processes computes: half a minute on two idle cores."""


class Differences:
    """Largest difference of a logit on any rank, for (family, grid); up to ``BATCH`` cases of one number of ranks are
    measured, and their files written, when the first of them is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[tuple[str, str], float] = {}

    def __getitem__(self, case: tuple[str, str]) -> float:
        if case not in self._found:
            world = ALL_GRIDS[case[1]].world_size
            some = [(f, g) for f, g in CASES if ALL_GRIDS[g].world_size == world and (SOAK or in_every_run(f, g))]
            first = some.index(case) // BATCH * BATCH
            batch = some[first : first + BATCH]
            answers = run_grid(world, on_grids, str(self._folder), batch)
            self._found |= {one: max(a[one] for a in answers if a[one] is not None) for one in batch}
        return self._found[case]


@pytest.fixture(scope="module")
def differences(folder: Path) -> Differences:
    return Differences(folder)


@cases(CASES)
def test_logits_equal_transformers(differences: Differences, family: str, grid: str) -> None:
    assert differences[family, grid] < TOLERANCE


@cases(CASES)
def test_export_is_the_same_file_again(folder: Path, differences: Differences, family: str, grid: str) -> None:
    from safetensors.torch import load_file

    assert differences[family, grid] is not None  # the file is there
    before = load_file(folder / family / "model.safetensors")
    after = load_file(folder / f"{family}-from-{grid}" / "model.safetensors")
    assert before.keys() == after.keys()
    different = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    assert not different


TRAINED_CASES = [case for case in CASES if case[1] in TRAINED]


@cases(TRAINED_CASES)
def test_gradients_equal_transformers(folder: Path, differences: Differences, family: str, grid: str) -> None:
    from safetensors.torch import load_file

    assert differences[family, grid] is not None  # the file is there
    expected = load_file(folder / f"{family}-gradients" / "model.safetensors")
    found = load_file(folder / f"{family}-gradients-{grid}" / "model.safetensors")
    assert found.keys() == expected.keys()
    tolerance = max(GRADIENT_TOLERANCE, 4 * torch.load(folder / family / "logits.pt")["own"])
    for name, want in expected.items():
        error = relative(found[name], want)
        assert error < tolerance, f"{name}: gradient off by {error:.1e} of its largest entry, not {tolerance:.1e}"


def without_point(rank: int, path: str, parallel: ParallelConfig, point: str) -> None:
    from megatron.core import parallel_state

    from megarl.learn.parallel import cpu, process_groups

    cpu.POINTS = tuple(p for p in cpu.POINTS if p.__name__ != point)
    process_groups.initialize(parallel, seed=1)
    chunks, _, _ = build_and_load(Path(path), parallel, rank)
    tokens = torch.arange(48).reshape(2, 24)
    forward(chunks, tokens, torch.arange(2), parallel_state.get_tensor_model_parallel_group())


NEEDED = {
    "_absent_transformer_engine": ("deepseek_v3", ParallelConfig(), "must be a type|Unsupported linear_q_down_proj"),
    "_expert_counts_on_host": ("mixtral", ParallelConfig(dp=2, ep=2), "incompatible function arguments"),
    "_uneven_shares": ("mixtral", ALL_GRIDS["tp2dp2ep2-etp2"], "invalid tensor size"),
}


@pytest.mark.parametrize("point", list(NEEDED))
def test_each_point_for_experts_is_needed(folder: Path, point: str) -> None:
    if HAVE_TE and point == "_absent_transformer_engine":
        pytest.skip("TransformerEngine is installed")
    family, parallel, message = NEEDED[point]
    with pytest.raises(AssertionError, match=message):
        run_grid(parallel.world_size, without_point, str(folder / family), parallel, point)


def router_bias(rank: int, path: str) -> dict[str, torch.Tensor]:
    from megarl.learn.parallel import process_groups

    process_groups.initialize(ParallelConfig(), seed=1)
    _, tensors, _ = build_and_load(Path(path), ParallelConfig(), rank, "bfloat16")
    return {n: t for n, t in tensors.items() if "expert_bias" in n or "router.weight" in n}


def test_router_bias_stays_float32(folder: Path) -> None:
    """Under bf16 Megatron casts it with everything else; half of its bits would then be lost in the load."""
    from safetensors.torch import load_file

    stored = load_file(folder / "deepseek_v3" / "model.safetensors")
    (found,) = run_grid(1, router_bias, str(folder / "deepseek_v3"))
    for layer in (1, 2, 3):
        assert found[f"decoder.layers.{layer}.mlp.router.weight"].dtype == torch.bfloat16
        bias = found[f"decoder.layers.{layer}.mlp.router.expert_bias"]
        assert torch.equal(bias, stored[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"])
