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
from megarl.learn import algorithms
from megarl.train import parts
from megarl.train import step as step_module
from megarl.train.part import Part, Services
from megarl.train.parts import PARTS
from megarl.train.rollout import group_parts
from megarl.train.rollout.group_part import GroupPart, GroupServices
from megarl.train.rollout.group_parts import GROUP_PARTS
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
    "AveragedActor",
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
        ({"evaluation.average": 0.9}, "AveragedActor"),
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


GROUP_ORDER = (
    "GreedyBaseline",
    "SpareAnswers",
    "RecordedRouting",
    "BudgetAhead",
    "OverdueRewards",
    "ReplayedGroups",  # groups that a step has again are counted before it asks for others
    "DynamicSampling",
    "ShuffledRewards",
)


def test_parts_of_the_group_service_are_called_in_this_order() -> None:
    assert tuple(part.__name__ for _, part in GROUP_PARTS) == GROUP_ORDER


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"algorithm.name": "remax"}, "GreedyBaseline"),
        ({"rollout.spare": 1}, "SpareAnswers"),
        ({"rollout.routing_replay": True}, "RecordedRouting"),
        ({"rollout.budget_tokens": 64}, "BudgetAhead"),
        ({"reward.late_steps": 1}, "OverdueRewards"),
        ({"buffer.replay.share": 0.5}, "ReplayedGroups"),
        ({"algorithm.dynamic_sampling": True}, "DynamicSampling"),
        ({"reward.shuffle": True}, "ShuffledRewards"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_group_service_has_the_parts_that_its_settings_ask_for(settings: dict[str, Any], part: str) -> None:
    config = Config()
    for key, value in settings.items():
        config = changed(config, key, value)
    algorithm = algorithms.get(config.algorithm.name)
    assert [found.__name__ for asks, found in GROUP_PARTS if asks(config, algorithm)] == [part]
    assert not any(asks(Config(), algorithms.get("grpo")) for asks, _ in GROUP_PARTS)


@pytest.mark.parametrize(
    ("rows", "services", "base"), [(PARTS, Services, Part), (GROUP_PARTS, GroupServices, GroupPart)]
)
def test_a_part_names_services_that_there_are(rows: Any, services: type, base: type) -> None:
    names = {field.name for field in fields(services)}
    for _, part in rows:
        assert set(signature(part).parameters) <= names, part.__name__
        own = {name for name in vars(part) if not name.startswith("_")}
        assert own <= {name for name in vars(base) if not name.startswith("_")} != set(), part.__name__


@pytest.mark.parametrize(("package", "rows"), [(parts, PARTS), (group_parts, GROUP_PARTS)])
def test_a_part_can_be_removed_with_its_row(package: Any, rows: Any) -> None:
    """Nothing but the list imports a part, and every file is in the list."""
    graph = import_graph(all_sources())
    files = {f"{package.__name__}.{path.stem}" for path in Path(package.__path__[0]).glob("[!_]*.py")}
    assert {part.__module__ for _, part in rows} == files
    for module, imported in graph.items():
        assert module == package.__name__ or not files & imported, module


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
