"""A job that is right, as small as its checks allow; the fixture ``prepared`` has its files."""

from __future__ import annotations

import functools
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config, compose
from megarl.config.hub import with_snapshots
from megarl.config.load import from_dict, to_dict
from megarl.core.errors import ConfigError
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
    if not any("path=" in override for override in overrides):
        with suppress(ConfigError):  # which names the run's directory
            values = to_dict(_composed(*small, *overrides))
            return with_snapshots(from_dict(Config, _moved(values, str(run_dir))))
    return compose([*small, f"run.dir={run_dir}", *overrides])


SOMEWHERE = "/directory/of/some/run"


@functools.cache
def _composed(*overrides: str) -> Config:
    """hydra takes a tenth of a second for what many tests ask for; they differ in the run's directory."""
    return compose([f"run.dir={SOMEWHERE}", *overrides])


def _moved(value: Any, run_dir: str) -> Any:
    if isinstance(value, str):
        return value.replace(SOMEWHERE, run_dir)
    if isinstance(value, dict):
        return {key: _moved(item, run_dir) for key, item in value.items()}
    return [_moved(item, run_dir) for item in value] if isinstance(value, list) else value


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
