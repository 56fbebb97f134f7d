"""The step on one screen, and the parts that features add to it."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import fields, replace
from inspect import getsource, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megarl.config import Config
from megarl.config.algorithms import DistillConfig, MixConfig
from megarl.config.schema import TeacherConfig
from megarl.learn import algorithms
from megarl.train import parts
from megarl.train import step as step_module
from megarl.train.part import Part, Services
from megarl.train.parts import PARTS
from megarl.train.rollout import group_parts
from megarl.train.rollout.group_part import GroupPart, GroupServices
from megarl.train.rollout.group_parts import GROUP_PARTS
from megarl.train.step import OnlineSteps
from tests.trajectories import VERSION
from tests.unit.test_layering import ROOT, all_sources, import_graph, module_of

ORDER = (
    "Quiet",  # requests end before engines that take turns get memory
    "DraftAcceptance",  # engines are asked before they leave
    "Colocation",  # engines leave before a model computes
    "ReferenceRefresh",
    "FixedReference",
    "ColdCheck",
    "RewardModelScores",
    "Teachers",
    "Demonstrations",
    "TaughtTokens",
    "KeptBatches",
    "AveragedActor",
    "DrainAhead",
    "BestKept",
    "PriorityDraws",
    "EqualEpisodes",
    "TruncationLine",
    "AccountLine",
    "PredictedSeconds",
    "SamplingChecks",
    "Resumed",
    "Norms",
    "StoredGroups",
    "Verdicts",
    "ComparedTurns",  # reads the store right after others have
    "Gamed",
    "Alarms",  # tests what the other parts have measured
)


def changed(config: Any, key: str, value: Any) -> Any:
    """``config`` with another value at ``key``."""
    name, _, rest = key.partition(".")
    return replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


def wanted(config: Config) -> list[str]:
    return [part.__name__ for asks, part in PARTS if asks(config)]


def test_parts_are_called_in_this_order() -> None:
    """A part that was removed may be left in the list."""
    names = [part.__name__ for _, part in PARTS]
    assert names == [name for name in ORDER if name in names]


def test_a_job_without_further_settings_has_its_log_and_its_prediction_alone() -> None:
    assert set(wanted(Config())) <= {"FixedReference", *ORDER[ORDER.index("TruncationLine") :]}


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"sync.order": "completion", "sync.pause": "wait", "sync.max_staleness": 1}, "Quiet"),
        ({"rollout.placement": "colocated"}, "Colocation"),
        ({"rollout.speculative": "ngram"}, "DraftAcceptance"),
        ({"reference.refresh": 2}, "ReferenceRefresh"),
        ({"sync.cold_interval": 4}, "ColdCheck"),
        ({"reward_model.path": "model"}, "RewardModelScores"),
        ({"teachers": {"math": TeacherConfig("model")}}, "Teachers"),
        ({"algorithm": MixConfig(name="mix")}, "Demonstrations"),
        ({"algorithm": DistillConfig(name="distill", expert_ratio=0.1)}, "Demonstrations"),
        ({"algorithm": DistillConfig(name="distill", teacher_tokens="answer")}, "TaughtTokens"),
        ({"trainer.keep_batches": True}, "KeptBatches"),
        ({"evaluation.average": 0.9}, "AveragedActor"),
        ({"sync.max_staleness": 1}, "DrainAhead"),
        ({"trainer.keep_best": "val/accuracy"}, "BestKept"),
        ({"taskset.order": "prioritized"}, "PriorityDraws"),
        ({"rollout.workflow": "environment"}, "EqualEpisodes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_job_has_the_parts_that_its_settings_ask_for(settings: dict[str, Any], part: str) -> None:
    config = Config()
    assert part not in wanted(config)
    for key, value in settings.items():
        config = changed(config, key, value)
    assert part in wanted(config)


GROUP_ORDER = (
    "GreedyBaseline",
    "TaughtGroups",
    "SpareAnswers",
    "RecordedRouting",
    "BudgetAhead",
    "OverdueRewards",
    "ReplayedGroups",  # groups that a step has again are counted before it asks for others
    "DynamicSampling",
    "ShuffledRewards",
)


def test_parts_of_the_group_service_are_called_in_this_order() -> None:
    names = [part.__name__ for _, part in GROUP_PARTS]
    assert names == [name for name in GROUP_ORDER if name in names]


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"algorithm.name": "remax"}, "GreedyBaseline"),
        ({"teachers": {"math": TeacherConfig("model")}}, "TaughtGroups"),
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


def couplings(package: str, sources: dict[str, str]) -> list[str]:
    """Return what stands in the way of removing a module of a package with its rows in the package's one table.

    The table alone may name what it imports from the module, in rows of their own. Tests that import the module have
    its name in theirs.
    """
    files = {name for name in sources if name.startswith(f"{package}.")}
    found = []
    for module, imported in import_graph(sources).items():
        for file in sorted(imported & files):
            own = module.startswith("tests.") and file.rpartition(".")[2] in module.rpartition(".")[2]
            found += [] if own or module == package else [f"{module} imports {file}"]
    tree = ast.parse(sources[package])
    origin = {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module in files
        for alias in node.names
    }
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module == package:
                found += [f"{module} imports {a.name} of {origin[a.name]}" for a in node.names if a.name in origin]
    [table] = [node.value for node in tree.body if isinstance(node, ast.AnnAssign)]
    assert isinstance(table, ast.Tuple)
    rows = [[node.id for node in ast.walk(row) if isinstance(node, ast.Name)] for row in table.elts]
    found += [f"a row of {of}" for row in rows if len(of := {origin[name] for name in row if name in origin}) != 1]
    everywhere = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in origin)
    found += sorted((everywhere - Counter(itertools.chain(*rows))).keys())
    return found + sorted(files - {str(origin[name]) for name in everywhere})


@pytest.mark.parametrize("package", [parts.__name__, group_parts.__name__])
def test_a_part_can_be_removed_with_its_row(package: str) -> None:
    """Nothing but its rows needs a part: no other module, no test that is not its own, and no page."""
    folder = package.replace(".", "/")
    tests = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    sources = {
        module_of(path): source
        for path, source in (all_sources() | tests).items()
        if path.startswith(folder) or package.rpartition(".")[2] in source
    }
    assert couplings(package, sources) == []
    for page in (ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").rglob("*.md")):
        named = re.findall(rf"\b{folder.rpartition('/')[2]}/\w+\.py", page.read_text())
        assert named == [], page


def test_what_needs_a_part_is_seen() -> None:
    table = "from p.a import A, asks\nfrom p.b import B\nROWS: tuple = (\n    (asks, A),\n    (None, B),\n)\n"
    sources = {"p": table, "p.a": "", "p.b": "", "q": "import p\n", "tests.test_a_here": "from p.a import A\n"}
    assert couplings("p", sources) == []
    assert couplings("p", sources | {"q": "def f():\n    from p import a\n"}) == ["q imports p.a"]
    assert couplings("p", sources | {"q": "from p import B\n"}) == ["q imports B of p.b"]
    assert couplings("p", sources | {"p.b": "from p.a import A\n"}) == ["p.b imports p.a"]
    assert couplings("p", sources | {"tests.test_b": "import p.a\n"}) == ["tests.test_b imports p.a"]
    assert couplings("p", sources | {"p": table + "def f():\n    return B\n"}) == ["B"]
    assert couplings("p", sources | {"p": table.replace("None, B", "asks, B")}) != []
    assert couplings("p", sources | {"p.c": ""}) == ["p.c"]


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


def test_a_job_without_parts_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = SimpleNamespace(connect=lambda: None, version=VERSION)
    timeline, memory = SimpleNamespace(phase=lambda name: nullcontext()), SimpleNamespace(enter=lambda phase: None)
    monkeypatch.setattr(step_module, "services_of", lambda rank: SimpleNamespace(weights=weights, evaluation="asked"))
    monkeypatch.setattr(step_module, "parts_of", lambda services: [])
    config = SimpleNamespace(rollout=SimpleNamespace(is_colocated=False))
    steps = OnlineSteps(cast(Any, SimpleNamespace(timeline=timeline, memory=memory, config=config)))
    assert steps.version is steps.evaluation is None
    steps.connect()
    assert (steps.version, steps.evaluation) == (VERSION, "asked")
