"""A job that is right, as small as its checks allow; the fixture ``prepared`` has its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.config import Config, compose
from megarl.core.jobs import ProcessKind
from megarl.run.nodes.plan import Plan

SMALL = [
    "experiment=quickstart",
    "taskset.train_size=30",
    "trainer.tasks_per_step=16",
    "taskset.eval_size=10",
    "taskset.warm_start_size=30",
    "taskset.expert_size=30",
    "model.from_scratch.hidden_size=32",
    "model.from_scratch.intermediate_size=48",
    "model.from_scratch.num_hidden_layers=4",
    "model.from_scratch.num_attention_heads=4",
    "model.from_scratch.num_key_value_heads=2",
    "model.from_scratch.head_dim=32",
    "model.from_scratch.max_position_embeddings=128",
    "rollout.max_prompt_tokens=48",
    "rollout.max_response_tokens=8",
    "parallel=tp2",
]
"""The quickstart on few rows, with every value that a message repeats."""


def config_of(run_dir: Path, *overrides: str) -> Config:
    given = {override.partition("=")[0] for override in overrides}
    small = [override for override in SMALL if override.partition("=")[0] not in given]  # each may be given once
    return compose([*small, f"run.dir={run_dir}", *overrides])


def nodes_of_ranks(plan: Plan) -> tuple[int, ...]:
    return tuple(rank.node for rank in plan.of(ProcessKind.TRAINER))


def nodes_of_engines(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Nodes of each engine's parts."""
    parts = plan.of(ProcessKind.ENGINE)
    return tuple(
        tuple(part.node for part in parts if part.number == engine.number) for engine in parts if not engine.part
    )


def refused(error: type[ValueError], config: Config, *words: str) -> None:
    """``check`` raises exactly ``error``, and its text has all ``words``; what exists already is not touched."""
    from megarl.run.checks.job import check

    with pytest.raises(error) as raised:
        check(config)
    assert type(raised.value) is error
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"
