"""The step on one screen, and the parts that features add to it."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from inspect import getsource, signature
from pathlib import Path
from typing import Any

import pytest

from megarl.core.config import Config
from megarl.core.config.algorithms import MixConfig
from megarl.train import parts
from megarl.train import step as step_module
from megarl.train.part import Part, Services
from megarl.train.parts import PARTS
from megarl.train.step import OnlineSteps
from tests.unit.test_layering import all_sources, import_graph

ORDER = (
    "Quiet",  # requests end before engines that take turns get memory
    "Colocation",  # engines leave before a model computes
    "ReferenceRefresh",
    "ColdCheck",
    "RewardModelScores",
    "Demonstrations",
    "KeptBatches",
    "DrainAhead",
    "TruncationLine",
    "AccountLine",
)


def changed(config: Any, key: str, value: Any) -> Any:
    """``config`` with another value at ``key``."""
    name, _, rest = key.partition(".")
    return replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


def wanted(config: Config) -> list[str]:
    return [part.__name__ for asks, part in PARTS if asks(config)]


def test_parts_are_called_in_this_order() -> None:
    assert tuple(part.__name__ for _, part in PARTS) == ORDER


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"sync.order": "completion", "sync.pause": "wait", "sync.max_staleness": 1}, "Quiet"),
        ({"rollout.placement": "colocated"}, "Colocation"),
        ({"reference.refresh": 2}, "ReferenceRefresh"),
        ({"sync.cold_interval": 4}, "ColdCheck"),
        ({"reward_model.path": "model"}, "RewardModelScores"),
        ({"algorithm": MixConfig(name="mix")}, "Demonstrations"),
        ({"trainer.keep_batches": True}, "KeptBatches"),
        ({"sync.max_staleness": 1}, "DrainAhead"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_job_has_the_parts_that_its_settings_ask_for(settings: dict[str, Any], part: str) -> None:
    config = Config()
    assert wanted(config) == ["TruncationLine", "AccountLine"]
    for key, value in settings.items():
        config = changed(config, key, value)
    assert part in wanted(config)


def test_a_part_names_services_that_there_are() -> None:
    services = {field.name for field in fields(Services)}
    for _, part in PARTS:
        assert set(signature(part).parameters) <= services, part.__name__
        own = {name for name in vars(part) if not name.startswith("_")}
        assert own <= {name for name in vars(Part) if not name.startswith("_")} != set(), part.__name__


def test_a_part_can_be_removed_with_its_row() -> None:
    """Nothing but the list imports a part, and every file is in the list."""
    graph = import_graph(all_sources())
    files = {f"megarl.train.parts.{path.stem}" for path in Path(parts.__path__[0]).glob("[!_]*.py")}
    assert {part.__module__ for _, part in PARTS} == files
    for module, imported in graph.items():
        assert module == "megarl.train.parts" or not files & imported, module


def test_the_step_is_on_one_screen() -> None:
    """It names no feature: modules of parts are behind their list."""
    step, publish = (len(getsource(function).splitlines()) for function in (OnlineSteps.step, OnlineSteps.publish))
    assert step + publish <= 60
    source = Path(step_module.__file__).read_text()
    assert len(source.splitlines()) <= 160
    words = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert not words & {
        "placement",
        "cold_interval",
        "refresh",
        "reward_model",
        "keep_batches",
        "eval_engines",
        "order",
    }
