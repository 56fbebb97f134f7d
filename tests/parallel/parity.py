"""The parity matrix: updates on a fixed batch, on every grid, against one process of plain transformers and torch.

``python -m tests.parallel.parity docs/parity.md`` measures all cells and writes the table; ``test_parity.py`` asks that
none is worse than ``TOLERANCE``. All cells of one world run in one set of processes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from megarl.config.algorithms import AlgorithmConfig, KLConfig
from megarl.config.lora import LoraConfig
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, RouterConfig, TrainerConfig
from megarl.weights.architectures import Head
from tests.conftest import SOAK
from tests.parallel import peft_twin
from tests.parallel.batches import sequences_of
from tests.parallel.families import save as save_family
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, logical_tensors, save_tiny_qwen3
from tests.parallel.several import OBJECTIVES, Expected, expected_of, several

TOLERANCE = 1e-5
UPDATES = 4 if SOAK else 2
"""Loss, gradient norm and gradients are compared before the first, losses before each."""
SETTINGS = AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, entropy_coef=0.01, kl=KLConfig(coef=0.1))
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, clip_grad=0.5)
PACKED_TOKENS = 48
"""Two or three of the batch's sequences."""
LORA = {
    "qwen3, LoRA": LoraConfig(
        rank=4, alpha=6.0, rank_pattern={"k_proj": 3}, targets=["all-linear", "lm_head", "embed_tokens"]
    ),
    "qwen3_moe, LoRA": LoraConfig(rank=4, alpha=6.0),
    "deepseek_v3, LoRA": LoraConfig(rank=4, alpha=6.0, rslora=True),
}
"""``model.lora`` of the models that have adapters."""
MODELS = ("qwen3", "qwen3, tied", "qwen3_moe", "qwen3_moe, balanced", "deepseek_v3, balanced", *LORA)
ROUTERS = {
    "qwen3_moe, balanced": RouterConfig(aux_loss_coef=0.3, z_loss_coef=0.02),
    "deepseek_v3, balanced": RouterConfig(aux_loss_coef=0.3, z_loss_coef=0.02, bias_update_rate=0.05),
}
"""``model.router`` of the models that have one."""
SEEDS = {"deepseek_v3, balanced": 3, "deepseek_v3, LoRA": 3}
"""Of the models for which 0 does not serve: a gradient is small beside its terms, so that float32 shows, or an expert
gets no token."""

GRIDS = {
    "one process": ParallelConfig(),
    "TP2": ParallelConfig(tp=2),
    "TP2 + SP": ParallelConfig(tp=2, sequence_parallel=True),
    "PP2": ParallelConfig(pp=2),
    "PP2 × VPP2": ParallelConfig(pp=2, vpp=2),
    "DP2": ParallelConfig(dp=2),
    "CP2": ParallelConfig(cp=2),
    "EP2": ParallelConfig(dp=2, ep=2),
    "TP2 × PP2": ParallelConfig(tp=2, pp=2),
    "TP2 × DP2": ParallelConfig(tp=2, dp=2),
    "TP2 + SP × PP2": ParallelConfig(tp=2, pp=2, sequence_parallel=True),
    "TP2 + SP × CP2": ParallelConfig(tp=2, cp=2, sequence_parallel=True),
    "CP2 × EP2": ParallelConfig(cp=2, ep=2),
}

EXPERT_GRIDS = {
    "TP2 + SP × ETP1": ParallelConfig(tp=2, etp=1, sequence_parallel=True),
    "TP2 + SP × EP2": ParallelConfig(tp=2, ep=2, sequence_parallel=True),
    "TP2 + SP × EP2, ETP2": ParallelConfig(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True),
}
"""Grids whose experts lie otherwise than the rest, for adapters; ``test_families.py`` compares gradients of experts
themselves on them."""
ALL_GRIDS = GRIDS | EXPERT_GRIDS


@dataclass(frozen=True)
class Cell:
    model: str
    grid: str
    rows: int | None
    """Rows of a padded micro-batch; None is packed."""
    recompute: str
    several: bool = False
    """Trajectories of several samples each, under the objectives of ``several.py``."""

    @property
    def layout(self) -> str:
        return "packed" if self.rows is None else f"padded, {self.rows} row{'s' * (self.rows > 1)}"

    def __str__(self) -> str:
        samples = " | trajectories of several samples" if self.several else ""
        return f"{self.model} | {self.grid} | {self.layout} | recompute {self.recompute}{samples}"


@dataclass
class Errors:
    """Relative: losses to the sum of the loss's terms without their signs, gradients to each parameter's largest
    entry."""

    loss: float
    norm: float
    gradient: float
    parameter: str
    """With the worst gradient."""
    later: float
    """Losses of the updates that follow; of all updates what routers measure (relative). Of trajectories of several
    samples: metrics, relative to the sum of their terms without signs."""

    @property
    def worst(self) -> float:
        return max(self.loss, self.norm, self.gradient, self.later)


LAYOUTS = (None, 1, 2, 4)
NEEDS_SP = ("TP2", "TP2 × PP2", "TP2 × DP2")
"""Grids on which Megatron trains no experts."""
CELLS = [
    *(
        Cell("qwen3_moe" if "EP" in grid else "qwen3", grid, rows, recompute)
        for grid, parallel in GRIDS.items()
        for recompute in ("none", "full")
        for rows in (LAYOUTS if recompute == "none" or parallel.world_size == 1 else (None, 2))
    ),
    *(Cell("qwen3_moe", grid, None, "none") for grid in ("one process", "TP2 + SP", "PP2 × VPP2")),
    *(Cell("qwen3, tied", grid, None, "none") for grid in GRIDS if "EP" not in grid),
    *(Cell(model, grid, None, "none") for model in ROUTERS for grid in GRIDS if grid not in NEEDS_SP),
    *(
        Cell("deepseek_v3, balanced", grid, rows, recompute)
        for grid in ("one process", "PP2 × VPP2", "CP2 × EP2")
        for rows, recompute in ((2, "none"), (None, "full"))
    ),
    *(Cell("qwen3", grid, None, "selective") for grid in ("one process", "TP2 + SP", "CP2", "PP2 × VPP2")),
    *(
        Cell(model, grid, rows, "full" if rows is None and "×" in grid else "none")
        for model in LORA
        for grid in GRIDS
        if ("EP" not in grid if model == "qwen3, LoRA" else grid not in NEEDS_SP)
        for rows in (None, 2)
    ),
    *(Cell(model, grid, None, "none") for model in LORA if model != "qwen3, LoRA" for grid in EXPERT_GRIDS),
    *(
        Cell("qwen3_moe" if "EP" in grid else "qwen3", grid, rows, "none", several=True)
        for grid in GRIDS
        for rows in LAYOUTS
    ),
]


def in_every_run(cell: Cell) -> bool:
    """Whether ``make test`` measures it; ``make soak`` and ``make parity`` measure all.

    Every grid meets packed and padded rows, recomputation and trajectories of several samples. Which padded layout,
    which recomputed one and which of two models it meets takes turns among the grids, instead of all with all.
    """
    turn = list(ALL_GRIDS).index(cell.grid)
    if (
        turn == 0
        or cell.recompute == "selective"
        or (cell.model == "deepseek_v3, balanced" and cell.layout != "packed")
    ):
        return True
    if cell.model in LORA:
        if cell.grid in EXPERT_GRIDS:
            return cell.model == "qwen3_moe, LoRA"
        return (list(LORA).index(cell.model) + turn + (cell.rows is None)) % 2 == 0
    if cell.model == "qwen3, tied":
        return turn % 2 == 0
    if cell.model in ROUTERS:
        return cell.recompute == "full" or (MODELS.index(cell.model) + turn) % 2 == 0
    if cell.recompute == "full":
        return cell.rows == (None, 2)[turn % 2]
    if cell.several:
        return cell.rows == (None, LAYOUTS[1 + turn % 3])[turn % 2]
    return cell.rows in (None, LAYOUTS[1 + turn % 3])


def make_batch(reference_logp: Any) -> dict[str, torch.Tensor]:
    """Six rows of unequal length. old_logp and ref_logp are the model's own, perturbed: no term of the loss
    vanishes."""
    g = torch.Generator().manual_seed(11)
    rows, length = 6, 20
    tokens = torch.randint(2, VOCAB, (rows, length), generator=g)
    mask = torch.zeros(rows, length, dtype=torch.bool)
    lengths = torch.zeros(rows, dtype=torch.int64)
    for i in range(rows):
        prompt = int(torch.randint(3, 8, (), generator=g))
        response = int(torch.randint(1, length - prompt, (), generator=g))
        mask[i, prompt - 1 : prompt + response - 1] = True
        tokens[i, prompt + response :] = 0
        lengths[i] = prompt + response
    mask[3, 7] = False  # a token in the middle that is not in the loss
    logp = reference_logp(tokens)
    noise = [torch.randn(rows, length, generator=g) * 0.1 for _ in range(2)]
    advantages = torch.randn(rows, 1, generator=g).expand(rows, length).contiguous()
    return {
        "tokens": tokens, "lengths": lengths, "mask": mask, "old_logp": logp + noise[0], "ref_logp": logp + noise[1],
        "advantages": advantages,
    }  # fmt: skip


def next_token_logp(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(tokens).logits.float()
    logp_all = torch.log_softmax(logits, -1)
    nxt = torch.roll(tokens, -1, 1)
    return logp_all.gather(-1, nxt[..., None])[..., 0], -(logp_all.exp() * logp_all).sum(-1)


class RouterBalance:
    """What the routers of a transformers model did in its last forward pass, measured sequence by sequence."""

    def __init__(self, model: Any, lengths: torch.Tensor) -> None:
        self._lengths = lengths.tolist()
        self._gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
        self._outputs: dict[Any, Any] = {}
        for gate in self._gates:
            gate.register_forward_hook(lambda module, given, output: self._outputs.__setitem__(module, output))

    def losses(self) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Balance and z-loss, added up over the layers, and each layer's loads."""
        balance, z, loads = torch.zeros(()), torch.zeros(()), []
        for gate in self._gates:
            logits, _, chosen = (x.view(len(self._lengths), -1, x.shape[-1]) for x in self._outputs[gate])
            experts, load, squares = logits.shape[-1], torch.zeros(logits.shape[-1]), []
            for row, length in enumerate(self._lengths):
                of_row = logits[row, :length]
                scores = of_row.softmax(-1)
                if hasattr(gate, "e_score_correction_bias"):
                    scores = of_row.sigmoid() / of_row.sigmoid().sum(-1, keepdim=True)
                best = torch.nn.functional.one_hot(scores.topk(gate.top_k).indices, experts).sum(1)
                balance = balance + experts / gate.top_k * (best.float().mean(0) * scores.mean(0)).sum() / len(
                    self._lengths
                )
                squares.append(of_row.logsumexp(-1).square())
                load += torch.bincount(chosen[row, :length].flatten(), minlength=experts)
            z = z + torch.cat(squares).mean()
            loads.append(load)
        return balance, z, loads

    def move(self, loads: list[torch.Tensor], rate: float) -> None:
        for gate, load in zip(self._gates, loads, strict=True):
            gate.e_score_correction_bias += rate * torch.sign(load.mean() - load)


def reference(
    path: Path, router: RouterConfig | None = None, lora: LoraConfig | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The batch; and the losses of all updates, the sizes of their terms, the first gradient's norm and entries by HF
    name."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    if lora is not None:
        model = peft_twin.load(model, peft_twin.save_adapter(path, lora), lora)
    with torch.no_grad():
        batch = make_batch(lambda tokens: next_token_logp(model, tokens)[0])
    # Decay is for matrices, as everywhere: not for norms.
    parameters = [parameter for parameter in model.parameters() if lora is None or parameter.requires_grad]
    of_several = [] if router is not None or lora is not None else several_expected(model, batch)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps)
    losses, sizes, norms, gradients, measured = [], [], [], {}, []
    routers = None if router is None else RouterBalance(model, batch["lengths"])
    for update in range(UPDATES):
        logp, entropy = next_token_logp(model, batch["tokens"])
        ratio = torch.exp(logp - batch["old_logp"])
        surrogate = torch.minimum(ratio * batch["advantages"], ratio.clamp(0.8, 1.28) * batch["advantages"])
        log_r = batch["ref_logp"] - logp
        k3 = (torch.exp(log_r) - log_r - 1).clamp(max=10)
        terms = torch.stack([-surrogate, 0.1 * k3, -0.01 * entropy])[:, batch["mask"]]
        count = batch["mask"].sum()
        loss = terms.sum() / count
        whole = loss
        if routers is not None:
            balance, z, loads = routers.losses()
            whole = loss + router.aux_loss_coef * balance + router.z_loss_coef * z
            fullest = max(float(load.max() / load.mean()) for load in loads)
            found = (float(balance.detach()) / len(loads), float(z.detach()) / len(loads), fullest)
            measured.append(dict(zip(("router_balance", "router_z", "router_load"), found, strict=True)))
        adam.zero_grad()
        whole.backward()
        norm = torch.sqrt(sum(p.grad.double().pow(2).sum() for p in parameters))
        if update == 0:
            gradients = gradients_by_file(model) if lora is None else gradients_of_adapter(model)
        for p in parameters:
            p.grad.mul_(min(1.0, OPTIMIZER.clip_grad / (float(norm) + 1e-6)))
        adam.step()
        if routers is not None and router.bias_update_rate:
            routers.move(loads, router.bias_update_rate)
        losses.append(float(loss.detach()))
        sizes.append(float(terms.detach().abs().sum() / count))
        norms.append(float(norm))
    return batch, {
        "losses": losses,
        "sizes": sizes,
        "norms": norms,
        "gradients": gradients,
        "routers": measured,
        "several": of_several,
    }


def several_expected(
    model: Any, batch: dict[str, torch.Tensor]
) -> list[tuple[Expected, float, dict[str, torch.Tensor]]]:
    """Of each of ``OBJECTIVES``: loss and metrics, the gradient's norm, its entries by HF name."""
    found = []
    for settings in OBJECTIVES:
        model.zero_grad()
        expected = expected_of(settings, batch, *next_token_logp(model, batch["tokens"]))
        expected.loss.backward()
        norm = torch.sqrt(sum(p.grad.double().pow(2).sum() for p in model.parameters()))
        found.append((expected.detached(), float(norm), gradients_by_file(model)))
    model.zero_grad()
    return found


def gradients_by_file(model: Any) -> dict[str, torch.Tensor]:
    """Gradients of the logical tensors; in memory transformers keeps all experts as one."""
    copy = deepcopy(model)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for into, parameter in zip(copy.parameters(), model.parameters(), strict=True):
            into.copy_(torch.zeros_like(into) if parameter.grad is None else parameter.grad)  # a router's bias
        copy.save_pretrained(folder)
        return logical_tensors(Path(folder))


def gradients_of_adapter(model: Any) -> dict[str, torch.Tensor]:
    """Gradients of A's and B's."""
    return peft_twin.by_file(model, {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})


def folder_of(root: Path, model: str) -> Path:
    return root / MODELS[MODELS.index(model)].replace(", ", "_")


def prepare(root: Path) -> None:
    """The models as HF checkpoints, each with ``parity.pt``: the batch, and what the reference makes of it."""
    save_tiny_qwen3(folder_of(root, "qwen3"))
    save_tiny_qwen3(folder_of(root, "qwen3, LoRA"))
    save_tiny_qwen3(folder_of(root, "qwen3, tied"), tied=True)
    for model in MODELS[2:]:
        if model == "qwen3, LoRA":
            continue
        save_family(model.partition(",")[0], folder_of(root, model), seed=SEEDS.get(model, 0))
    for model in MODELS:
        expected = reference(folder_of(root, model), ROUTERS.get(model), LORA.get(model))
        torch.save(expected, folder_of(root, model) / "parity.pt")


def whole_gradients(chunks: Iterable[Any], names: Iterable[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Local name -> reduced gradient. The distributed optimizer leaves each rank a shard of each bucket; it is put
    together here."""
    import torch.distributed as dist

    found = {}
    for chunk, named in zip(chunks, names, strict=True):
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel() // group.size()
                mine = bucket.grad_data[group.rank() * size : (group.rank() + 1) * size].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)
        found |= {name: p.main_grad.cpu().clone() for name, p in named.items()}
    return found


def gradient_errors(
    rank: int, hf_config: Any, layout: Any, found: Any, expected: Any, head: Head = "lm"
) -> tuple[float, str]:
    """The worst of this rank's parts of all HF tensors, relative to the tensor's largest entry, and its HF name."""
    from megarl.weights.reshard.layouts import whole_layout
    from megarl.weights.reshard.plan import build_plan

    worst, where = 0.0, ""
    for m in build_plan(whole_layout("HF", layout.tensors), layout).moves:
        if m.dst != rank or m.dst_local.endswith("expert_bias"):  # moved by rule
            continue
        size = [hi - lo for lo, hi in m.box]
        want = expected[m.src_local]
        here = found[m.dst_local][tuple(slice(a, a + n) for a, n in zip(m.dst_at, size, strict=True))]
        there = want[tuple(slice(a, a + n) for a, n in zip(m.src_at, size, strict=True))]
        error = float((here - there).abs().max() / want.abs().max().clamp_min(1e-12))
        if not error <= worst:  # NaN too
            worst, where = error, m.src_local
    return worst, where


def several_errors(actor: Any, names: Any, batch: Any, expected: Any, worst_gradient: Any) -> Errors:
    """This rank's worst errors of ``OBJECTIVES``; nothing is trained. ``worst_gradient``: of gradients, expected."""
    import torch.distributed as dist

    from megarl.core.metrics import mean_of_sums
    from megarl.learn import algorithms
    from megarl.learn.training import objectives

    errors = Errors(0.0, 0.0, 0.0, "", 0.0)
    for settings, (wanted, norm, gradients) in zip(OBJECTIVES, expected, strict=True):
        sequences = several(batch, settings)
        objective = objectives.policy(algorithms.get(settings.name), settings, sequences)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, actor.backward(sequences, actor.model.micro_batches(sequences), objective))
        metrics = mean_of_sums(everyone)
        of_norm = abs(actor.gradient_norm() - norm) / norm
        gradient, where = worst_gradient(whole_gradients(actor.model.chunks, names), gradients)
        if not gradient <= errors.gradient:  # NaN too
            errors.gradient, errors.parameter = gradient, where
        of_loss = abs(metrics["actor/loss"] - float(wanted.loss)) / wanted.size
        of_metrics = [abs(metrics[name] - value) / size for name, (value, size) in wanted.metrics.items()]
        for name, value in (("loss", of_loss), ("norm", of_norm), ("later", max(of_metrics))):
            setattr(errors, name, max(getattr(errors, name), value))
    return errors


def on_grid(rank: int, root: str, cells: list[Cell], backend: Literal["gloo", "nccl"] = "gloo") -> dict[Cell, Errors]:
    """Runs in each rank: this rank's errors of every cell."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megarl.core.metrics import mean_of_sums
    from megarl.learn import algorithms
    from megarl.learn.models.gpt import unwrap
    from megarl.learn.parallel import process_groups
    from megarl.learn.parallel.grid import megatron_grid
    from megarl.learn.training import objectives
    from megarl.learn.training.model import TrainedModel, micro_batching_for
    from megarl.learn.training.schedule import Head
    from megarl.weights.checkpoint.formats import hf, peft
    from megarl.weights.reshard.layouts import megatron_layout

    found = {}
    for grid in dict.fromkeys(cell.grid for cell in cells):
        parallel = replace(ALL_GRIDS[grid], backend=backend)
        process_groups.initialize(parallel, seed=1)
        for model, recompute in dict.fromkeys((c.model, c.recompute) for c in cells if c.grid == grid):
            path = folder_of(Path(root), model)
            hf_config = hf.read_hf_config(path)
            batch, expected = torch.load(path / "parity.pt", weights_only=False)
            layout = megatron_layout(hf_config, megatron_grid(parallel))
            settings = ModelConfig(
                path=str(path),
                recompute=recompute,  # type: ignore[arg-type]
                router=ROUTERS.get(model, RouterConfig()),
                lora=LORA.get(model, LoraConfig()),
            )
            trainer = TrainerConfig(max_tokens_per_micro_batch=PACKED_TOKENS)
            actor = TrainedModel(
                hf_config, settings, parallel, Head(VOCAB), micro_batching_for(parallel, trainer), OPTIMIZER
            )
            names = [
                {
                    (f"chunk{v}.{n}" if len(actor.model.chunks) > 1 else n): p
                    for n, p in unwrap(c).named_parameters()
                    if p.requires_grad
                }
                for v, c in enumerate(actor.model.chunks)
            ]
            sequences = sequences_of(**batch)
            objective = objectives.policy(algorithms.get("grpo"), SETTINGS, sequences)
            for cell in [c for c in cells if (c.grid, c.model, c.recompute) == (grid, model, recompute)]:
                hf.load_into(path, layout, rank, actor.model.tensors)
                if (adapters := actor.model.adapters) is not None:
                    peft.load_adapter(path / peft_twin.FOLDER, adapters.layout, rank, actor.model.all_tensors)
                actor.model.weights_changed()
                actor.optimizer.restart(OPTIMIZER)
                trainer = replace(trainer, packing=cell.rows is None, micro_batch_size=cell.rows or 1)
                actor.model.micro_batching = micro_batching_for(parallel, trainer)
                if cell.several:
                    of_gradients = partial(gradient_errors, rank, hf_config, layout)
                    found[cell] = several_errors(actor, names, batch, expected["several"], of_gradients)
                    continue
                batches = actor.model.micro_batches(sequences)
                losses, norms, worst, of_routers = [], [], (0.0, ""), [0.0]
                inferred = actor.model.outputs(sequences, [batches]) if cell.rows is None else None
                for update in range(UPDATES):
                    logp = torch.zeros(len(sequences.tokens)) if update == 0 and inferred is not None else None
                    sums = actor.backward(sequences, batches, objective, logp)
                    # What an update keeps of its own forward pass is what inference would have given, bit for bit; a
                    # GPU adds the experts' outputs in another order each time.
                    off_by = 1e-5 if backend == "nccl" and "experts" in " ".join(names[0]) else 0.0
                    assert logp is None or (logp - inferred).abs().max() <= off_by, f"{cell}: its own pass differs"
                    everyone: list[Any] = [None] * dist.get_world_size()
                    dist.all_gather_object(everyone, sums)
                    metrics = mean_of_sums(everyone)
                    losses.append(metrics["actor/loss"])
                    if model in ROUTERS:
                        of_routers += [
                            abs(metrics[f"actor/{name}"] / value - 1)
                            for name, value in expected["routers"][update].items()
                        ]
                    if update == 0:
                        gradients = whole_gradients(actor.model.chunks, names)
                        trained = layout if adapters is None else adapters.layout
                        worst = gradient_errors(rank, hf_config, trained, gradients, expected["gradients"])
                    norms.append(actor.step(OPTIMIZER.lr))
                off = [
                    abs(a - b) / size for a, b, size in zip(losses, expected["losses"], expected["sizes"], strict=True)
                ]
                norm = abs(norms[0] - expected["norms"][0]) / expected["norms"][0]
                found[cell] = Errors(off[0], norm, *worst, max(off[1:] + of_routers))
        dist.barrier()
        parallel_state.destroy_model_parallel()
    return found


def measure(root: Path, cells: Sequence[Cell] = CELLS, backend: Literal["gloo", "nccl"] = "gloo") -> dict[Cell, Errors]:
    """The worst errors of all ranks, cell by cell; with nccl each rank has a GPU."""
    prepare(root)
    found: dict[Cell, Errors] = {}
    for world in worlds(cells):
        found |= measure_world(root, world, cells, backend)
    return {cell: found[cell] for cell in cells}


def worlds(cells: Sequence[Cell]) -> list[int]:
    return sorted({ALL_GRIDS[c.grid].world_size for c in cells})


def measure_world(
    root: Path, world: int, cells: Sequence[Cell], backend: Literal["gloo", "nccl"] = "gloo"
) -> dict[Cell, Errors]:
    """``measure`` of those cells that take so many ranks, when ``prepare`` has run."""
    mine = [c for c in cells if ALL_GRIDS[c.grid].world_size == world]
    answers = run_grid(world, on_grid, str(root), mine, backend, timeout_s=600.0, gpus=backend == "nccl")
    found = {}
    for cell in mine:
        parts = [a[cell] for a in answers]
        worst = max(parts, key=lambda e: e.gradient)
        found[cell] = Errors(
            max(e.loss for e in parts),
            max(e.norm for e in parts),
            worst.gradient,
            worst.parameter,
            max(e.later for e in parts),
        )
    return found


HEADER = """# Parity of the grids

Written by `make parity` (`tests/parallel/parity.py`) on a CPU in float32; `tests/parallel/test_parity.py` fails where a
number is above {tolerance:.0e}.

One GRPO batch of six sequences of unequal length with perturbed `old_logp` and `ref_logp`, so that clipping, the KL
term and the entropy term are all in the gradient. The reference is one process of transformers (eager attention) and
`torch.optim.AdamW`, with the loss and the clipping of the gradient written out in the test. Four updates each.
"Several": the six are samples of three trajectories, which lie on different ranks and in different micro-batches; grpo
with two aggregations, gspo and mix, whose worst is shown, one gradient each; in the last column are their metrics.

- **loss**, **next losses**: of the first update and of the three that follow (worst), relative to the sum of the loss's
  terms without their signs;
- **norm**: of the gradient before clipping, relative;
- **gradient**: of every parameter as transformers names and shapes it, on every rank that holds a part of it, relative
  to its largest entry; the worst parameter.

Models: 4 layers, 200 tokens (no multiple of the padded vocabulary). EP2 stands on DP2. Recompute: `model.recompute`.

{summary}

| model | grid | micro-batches, recompute | loss | norm | gradient | worst parameter | next losses |
|---|---|---|---|---|---|---|---|
"""


def table(found: dict[Cell, Errors]) -> str:
    worst_cell, worst = max(found.items(), key=lambda item: item[1].worst)
    summary = (
        f"{len(found)} cells; the worst number is {worst.worst:.1e} ({worst_cell.grid}, {worst_cell.layout}, "
        f"{worst_cell.model})."
    )
    lines = [
        f"| {c.model.replace(', balanced', ', bal.')} | {c.grid} "
        f"| {c.layout}{'' if c.recompute == 'none' else f'; {c.recompute}'}{'; several' if c.several else ''} "
        f"| {e.loss:.1e} "
        f"| {e.norm:.1e} | {e.gradient:.1e} "
        f"| `{e.parameter.removeprefix('model.').removeprefix('layers.').removesuffix('.weight')}` | {e.later:.1e} |"
        for c, e in found.items()
    ]
    return HEADER.format(tolerance=TOLERANCE, summary=summary) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        errors = measure(Path(folder))
    Path(sys.argv[1]).write_text(table(errors))
    print(f"{len(errors)} cells in {time.monotonic() - start:.0f} s, worst {max(e.worst for e in errors.values()):.1e}")
