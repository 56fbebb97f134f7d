"""What planning costs at the largest scale, and what a plan moves for published models: ``python benchmarks/plan.py
[--out FILE]``.

Two markdown tables. The first is measured, each line in a process of its own on one core: CPU seconds and peak memory
of the whole plan of DeepSeek-V3 671B from 2,048 trainer ranks to 64 engines, and of one rank's own part. The second is
**computed** from the plans' byte counts and the links' data-sheet limits: lower bounds, not measured on such machines;
gather-then-broadcast stands for the field's way to do it: whole parameters are gathered from the trainer and sent to
every engine rank, which cuts out its shard.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import textwrap
import time
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

import page

from megarl.weights.architectures import architecture
from megarl.weights.reshard.layouts import MegatronGrid, megatron_layout, vllm_layout
from megarl.weights.reshard.plan import ReshardPlan, build_plan

BF16 = 2
GB = 1e9
LINKS = {"NDR (50 GB/s)": 50e9, "NVLink 4 (450 GB/s)": 450e9}
"""Data-sheet limit of one GPU in one direction."""


@dataclass(frozen=True)
class Job:
    """A published model (its config.json's sizes), a trainer that holds it in bf16, and engines of one or more
    nodes."""

    name: str
    config: dict[str, Any]
    grid: MegatronGrid
    tp: int
    replicas: int
    expert_parallel: bool = False

    def plan(self) -> ReshardPlan:
        source = megatron_layout(self.config, self.grid, transformer_impl="transformer_engine")
        return build_plan(
            source, vllm_layout(self.config, self.tp, self.replicas, expert_parallel=self.expert_parallel)
        )


def _dense(
    family: str, vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **more,
    }


DEEPSEEK_V3 = _dense(
    "deepseek_v3",
    129280,
    7168,
    18432,
    61,
    128,
    128,
    head_dim=None,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    first_k_dense_replace=3,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    num_nextn_predict_layers=1,
    rope_interleave=True,
)
QWEN3_235B = _dense(
    "qwen3_moe", 151936, 4096, 12288, 94, 64, 4, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536,
    norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip
JOBS = (
    Job("Qwen3-8B", _dense("qwen3", 151936, 4096, 12288, 36, 32, 8), MegatronGrid(tp=4, dp=8), tp=2, replicas=16),
    Job(
        "Llama-3-70B",
        _dense("llama", 128256, 8192, 28672, 80, 64, 8),
        MegatronGrid(tp=8, pp=4, dp=4),
        tp=8,
        replicas=16,
    ),
    Job(
        "Qwen3-235B-A22B",
        QWEN3_235B,
        MegatronGrid(tp=4, pp=8, dp=8, ep=32, first_stage_layers=11, last_stage_layers=11),
        8,
        32,
        True,
    ),
    # 61 layers on 16 stages: 15 of 4 and a last one of 1, which has the output too.
    Job("DeepSeek-V3 671B", DEEPSEEK_V3, MegatronGrid(tp=8, pp=16, dp=16, ep=64, last_stage_layers=1), 32, 64, True),
)
LARGEST = JOBS[-1]


# ------------------------------------------------------------------ measured


def measure(what: str, rank: int) -> dict[str, float]:
    """Runs in a process of its own: imports are not counted as time, but as memory."""
    start = time.process_time()
    plan = LARGEST.plan()
    laid_out = time.process_time() - start
    moves = 0
    if what == "bytes":
        plan.check()
        plan.bytes_per_link(BF16)
    elif what == "everything":
        plan.check()
        moves = sum(1 for dst in range(plan.destination.num_ranks) for _ in plan.moves_to(dst))
    elif what == "to":
        moves = len(list(plan.moves_to(rank)))
    else:
        moves = len(list(plan.moves_from(rank)))
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "laid_out": laid_out, "moves": moves, "peak": peak}


def in_a_process(what: str, rank: int = 0) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", what, str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def measured() -> list[str]:
    ranks = LARGEST.grid.world_size
    parts: list[tuple[str, str, int]] = [
        ("the whole plan: every tensor checked, every move of every rank listed", "everything", 0),
        ("the check before a start: none missing or twice, bytes of links", "bytes", 0),
    ]
    parts += [
        (f"one engine rank's own part (rank {rank})", "to", rank) for rank in (0, LARGEST.tp * LARGEST.replicas - 1)
    ]
    parts += [(f"one trainer rank's own part (rank {rank})", "from", rank) for rank in (0, ranks // 2, ranks - 1)]
    lines = [
        f"### Planning {LARGEST.name}: {ranks} trainer ranks ({LARGEST.grid}) to {LARGEST.replicas} engines of "
        f"TP{LARGEST.tp}, experts in parallel (measured, one core)",
        "",
        "| what | moves | CPU seconds | of these, layouts | peak memory of the process |",
        "|---|---:|---:|---:|---:|",
    ]
    for text, what, rank in parts:
        found = in_a_process(what, rank)
        moves = f"{int(found['moves']):,}" if found["moves"] else "–"
        lines.append(
            f"| {text} | {moves} | {found['seconds']:.2f} | {found['laid_out']:.2f} | {found['peak'] / 2**20:,.0f} MiB "
            "|"
        )
    return lines


# ------------------------------------------------------------------ computed


def computed() -> list[str]:
    lines = [
        "### What a sync moves, bf16 (computed from the plans, not measured)",
        "",
        "Seconds are lower bounds: the busiest rank's bytes at its link's data-sheet limit, which no transfer reaches,",
        "and nothing else in the way. Gathering first: a pipelined broadcast of the whole model after a gather that",
        "costs nothing. Ranks' bytes are the most that one has; of trainer ranks also the mean. Links: of one GPU.",
        "",
    ]
    for job in JOBS:
        experts = f"/EP{job.tp}" if job.expert_parallel else ""
        where = f"{job.grid.world_size} trainer ranks ({job.grid}) to {job.replicas} engines of TP{job.tp}{experts}"
        lines += textwrap.wrap(f"- {job.name}: {where}", 120, subsequent_indent="  ")
    header = " | ".join(f"s, {name}" for name in LINKS)
    lines += [
        "",
        f"| model | way | all bytes | of a trainer rank | of an engine rank | {header} |",
        "|---|---|---:|---:|---:|" + "---:|" * len(LINKS),
    ]
    for job in JOBS:
        links = job.plan().bytes_per_link(BF16)
        sent, got = Counter[int](), Counter[int]()
        for (src, dst), size in links.items():
            sent[src] += size
            got[dst] += size
        trainers, engines = job.grid.world_size, job.tp * job.replicas
        total, most = sum(links.values()), max(max(sent.values()), max(got.values()))
        model = BF16 * sum(map(prod, architecture(job.config).tensors(job.config).values()))
        times = " | ".join(f"{most / speed:.3f}" for speed in LINKS.values())
        mean = total / trainers / GB
        lines.append(
            f"| {job.name} | slice to slice | {total / GB:,.0f} GB | {max(sent.values()) / GB:.2f} GB ({mean:.2f}) | "
            f"{max(got.values()) / GB:.2f} GB | {times} |"
        )
        times = " | ".join(f"{model / speed:.3f}" for speed in LINKS.values())
        lines.append(
            f"| | gather, then broadcast | {(engines + 1) * model / GB:,.0f} GB | {model / GB:,.1f} GB (a root) | "
            f"{model / GB:,.1f} GB | {times} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="also write the tables into docs/benchmarks/plan.md")
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "RANK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        sys.stdout.write(json.dumps(measure(options.measure[0], int(options.measure[1]))))
        return
    text = "\n".join([*measured(), "", *computed(), ""])
    sys.stdout.write(text)
    if options.write:
        page.write("benchmarks/plan.md", text)


if __name__ == "__main__":
    main()
