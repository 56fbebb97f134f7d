"""Published rows against the cost model, and its predictions for presets (docs/benchmarks/planner.md).

Each row of ``unit/cases/planner_rows.json`` has its source, grid and measurement. Systems of others differ from megarl
in two ways that the model takes as they are published: NeMo-RL's refit in turns and its unexplained seconds, and 8-bit
products and DeepEP of Megatron-Bridge's rows.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megarl.config.schema import ParallelConfig
from megarl.planner.model_cost import DEVICES, PACKED, LayerCost, ModelCost, Product
from megarl.planner.phase_seconds import Lengths, RolloutCost, TrainingCost
from megarl.planner.predict import sync_seconds
from megarl.weights.checkpoint.formats.hf_source import complete

CASES = Path(__file__).parent / "unit" / "cases"
UNEXPLAINED_S = 17.0
"""Seconds of a step of NeMo-RL in turns that nothing explains: its own, not in megarl's model."""
PADDED = 1.4
"""Tokens of a padded batch over those of its sequences (SkyRL's row)."""


def _dense(family: str, vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv: int) -> dict[str, Any]:
    return {
        "model_type": family, "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 128,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
        "tie_word_embeddings": hidden < 2048,
    }  # fmt: skip


SIZES = {
    "Llama-3.1-8B": ("llama", 128256, 4096, 14336, 32, 32, 8),
    "Llama-3-70B": ("llama", 128256, 8192, 28672, 80, 64, 8),
    "Llama-3.1-405B": ("llama", 128256, 16384, 53248, 126, 128, 8),
    "Qwen3-32B": ("qwen3", 151936, 5120, 25600, 64, 64, 8),
    "Qwen2.5-1.5B": ("qwen2", 151936, 1536, 8960, 28, 12, 2),
    "Qwen2.5-7B": ("qwen2", 152064, 3584, 18944, 28, 28, 4),
    "Qwen2.5-32B": ("qwen2", 152064, 5120, 27648, 64, 40, 8),
    "Qwen2.5-72B": ("qwen2", 152064, 8192, 29568, 80, 64, 8),
}
"""Sizes of published config.json files: family, vocabulary, hidden, MLP, layers, heads, key/value heads."""
FILES = {"DeepSeek-V3": "DeepSeek-V3-Base-bf16", "Qwen3-235B-A22B": "Qwen3-235B-A22B", "Qwen3-30B-A3B": "Qwen3-30B-A3B"}


def _gated_delta(hidden: int, layers: int, heads: int, kv: int, experts: int, mlp: int) -> ModelCost:
    """Return a model of a family that megarl does not train: three of four layers have a gated delta rule and no KV."""
    found = []
    for number in range(layers):
        full = number % 4 == 3
        attention = [Product(hidden, (2 * heads + 2 * kv) * 256 if full else 3 * heads * 256, "column")]
        attention.append(Product(heads * 256, hidden, "row"))
        after = [Product(hidden, 2 * mlp, "column"), Product(mlp, hidden, "row")]
        if experts:
            after += [Product(hidden, experts, "none"), Product(hidden, 2 * mlp, "expert_column", 8)]
            after.append(Product(mlp, hidden, "expert_row", 8))
        inner = 3 * mlp + (8 * (3 * mlp + 4 * hidden) if experts else 0)
        elements = (8 * hidden, 2 * (heads + 2 * kv) * 256 + inner)
        found.append(
            LayerCost(
                tuple(attention),
                tuple(after),
                heads * full,
                512,
                elements,
                512 * kv * full,
                kv if full else 1,
                experts,
                8 * bool(experts),
            )
        )
    return ModelCost(tuple(found), hidden, 248320, False)


@cache
def model_of(name: str) -> ModelCost:
    if name == "Qwen3.5-35B-A3B":
        return _gated_delta(2048, 40, 16, 2, 256, 512)
    if name == "Qwen3.5-9B":
        return _gated_delta(4096, 32, 16, 4, 0, 12288)
    if name in FILES:
        return ModelCost.of(complete(json.loads((CASES / "hf_configs.json").read_text())[FILES[name]]["config"]))
    return ModelCost.of(_dense(*SIZES[name]))


@dataclass(frozen=True)
class Judged:
    """A row, its measurement and its prediction in seconds."""

    row: dict[str, Any]
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def judges(self) -> bool:
        """False for a row that does not publish its lengths, or contradicts itself."""
        return not self.row.get("no_length") and not self.row.get("inconsistent")


def judged() -> list[Judged]:
    """Return all rows with predictions."""
    rows = json.loads((CASES / "planner_rows.json").read_text())
    found = []
    for row in rows:
        measured = row["measured"]
        found.append(Judged(row, measured.get("step_s", measured.get("sync_s")), seconds_of(row)))
    return found


def seconds_of(row: dict[str, Any]) -> float:
    model, device = model_of(row["model"]), DEVICES[row["gpu"].lower()]
    if row["kind"] == "sync":
        return sync_seconds(
            model, row["gen"]["tp"], device, {"gather-verl": "gather", "slices": "nccl"}[row["transport"]]
        )
    train, work = row["train"], row["work"]
    cost = _training(model, row, device.name)
    if row["kind"] == "train":  # constant lengths: nothing is lost in packing, and no optimizer in our own rows
        tokens, micro_batch = work["trajectories"] * work["response"], train["mb_tokens"] / PACKED.value
        if row["id"].startswith("own"):
            return cost.micro_batch(tokens, work["response"] / 2, trains=True).total
        return cost.update(tokens, micro_batch, work["response"] / 2)
    lengths = Lengths.of_mean(work["response"], work["cap"])
    context = lengths.context(work["prompt"])
    tokens = work["trajectories"] * (work["prompt"] + work["response"]) * (PADDED if train.get("padded") else 1)
    trainer = work["updates"] * cost.update(tokens / work["updates"], train["mb_tokens"], context)
    trainer += row["passes"] * cost.passes(tokens, train["mb_tokens"], context)
    gen, ahead = row["gen"], 1 if row["staleness"] == "partial" else row["staleness"]
    engine = RolloutCost(model, gen["tp"], device, gen["util"], gen["max_seqs"])
    each = math.ceil(work["trajectories"] / (row["gen_gpus"] // gen["tp"]))
    rollout = engine.seconds(each, work["prompt"], lengths, ahead=ahead)
    if ahead:
        return max(rollout, trainer) + sync_seconds(model, gen["tp"], device, "nccl")
    is_nemo = row["transport"] == "gather" and row["id"].startswith("n")
    sync = sync_seconds(model, gen["tp"], device, "nemo" if row["transport"] == "gather" else "gather")
    return rollout + trainer + sync + UNEXPLAINED_S * is_nemo


def _training(model: ModelCost, row: dict[str, Any], gpu: str) -> TrainingCost:
    train = row["train"]
    tp, cp, pp, vpp = train["tp"], train["cp"], train["pp"], train["vpp"]
    grid = ParallelConfig(
        tp=tp, cp=cp, pp=pp, vpp=vpp, dp=row["train_gpus"] // (tp * cp * pp), ep=train["ep"], sequence_parallel=tp > 1,
        overlap_grad_reduce=True, backend="nccl",
    )  # fmt: skip
    short = -len(model.layers) % (pp * vpp)  # uneven stages: as if the last had as many layers as the others
    model = ModelCost(model.layers + model.layers[-1:] * short, model.hidden, model.vocab, model.tied)
    modules = ("mlp", "moe") if train["recompute"] == "selective" else ()
    tuned = row["id"].startswith("mb")
    return TrainingCost(model, grid, DEVICES[gpu], train["recompute"], modules, train["precision"] == "fp8", tuned)


def null_errors(rows: list[Judged]) -> tuple[float, float]:
    """Return median errors of two models that know less, on rows of RL and training.

    The first has one rate of FLOPs a GPU, the median of all rows; the second the median tokens per second and GPU of
    the same model's other rows.
    """
    work = [(one, _tokens(one.row), _tokens(one.row) * model_of(one.row["model"]).flops(0) * 3) for one in rows]
    rate = statistics.median(flops / one.measured / one.row["gpus"] for one, _, flops in work)
    first = [abs(flops / rate / one.row["gpus"] / one.measured - 1) for one, _, flops in work]
    second = []
    for one, tokens, _ in work:
        others = [
            t / o.measured / o.row["gpus"] for o, t, _ in work if o is not one and o.row["model"] == one.row["model"]
        ]
        if others:
            second.append(abs(tokens / statistics.median(others) / one.row["gpus"] / one.measured - 1))
    return statistics.median(first), statistics.median(second)


def _tokens(row: dict[str, Any]) -> float:
    return float(row["work"]["trajectories"] * (row["work"]["prompt"] + row["work"]["response"]))


def presets() -> list[str]:
    """Return a line for each experiment of a real model."""
    from megarl.config import compose
    from megarl.planner.predict import JobPlan, StepWork, predict
    from megarl.planner.search import search
    from tests.unit.test_configs import NODES, hf_config

    lines = [
        "| preset | GPUs | H100 | H200 | B200 | rollout, update on H100 | idle | against the best, H100 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in NODES:
        config = compose([f"experiment={name}"])
        work, plan = StepWork.of(config, hf_config(config.model.path)), JobPlan.of(config)
        h100, h200, b200 = (predict(work, plan, DEVICES[gpu]) for gpu in ("h100", "h200", "b200"))
        best = search(work, plan.gpus, DEVICES["h100"], name, config.sync.max_staleness)[0]
        parts = ", ".join(f"{h100.seconds.get(phase, 0.0):.0f}" for phase in ("rollout", "update"))
        seconds = " | ".join(f"{one.step_s:.0f}" for one in (h100, h200, b200))
        lines.append(
            f"| {name} | {plan.gpus} | {seconds} | {parts} | {h100.idle:.0%} | {h100.step_s / best.step_s:.2f} x |"
        )
    return lines


def table() -> list[str]:
    """Return a line for each published row, and one about all."""
    rows = judged()
    lines = ["| row | model | GPUs | measured, s | predicted, s | error | |", "|---|---|---|---|---|---|---|"]
    for one in rows:
        row, why = one.row, ""
        if not one.judges:
            why = "does not judge: " + ("no length" if row.get("no_length") else "contradicts itself")
        gpus = row.get("gpus", row["train_gpus"])
        lines.append(
            f"| {row['id']} | {row['model']} | {gpus} {row['gpu']} | {one.measured:.4g} | {one.predicted:.4g} | "
            f"{one.error:+.0%} | {why} |"
        )
    errors = sorted(abs(one.error) for one in rows if one.judges)
    flops, rate = null_errors([one for one in rows if one.row["kind"] != "sync" and one.judges])
    share = sum(error <= 0.25 for error in errors) / len(errors)
    return [
        *lines,
        "",
        f"Median error {statistics.median(errors):.0%} on {len(errors)} rows that judge; {share:.0%} are within 25 %.",
        "Median errors of two simpler models on the rows of RL and training:",
        f"one rate of FLOPs a GPU {flops:.0%}, the median rate of the same model's other rows {rate:.0%}.",
    ]
