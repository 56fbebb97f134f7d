"""The packages of ARCHITECTURE.md against the import graph, and what each process may leave unimported."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import megarl

PACKAGE = Path(megarl.__file__).parent
ROOT = PACKAGE.parent
MAX_LINES = 200
HEAVY = ("torch", "vllm", "megatron", "transformers", "transformer_engine", "apex", "matplotlib", "tensorboard")


LAYERS = ("core", "weights", "learn", "engine", "explore", "train", "run")
"""Folders of packages."""
APART = {
    ("engine", "learn"), ("engine/client", "weights"),
    ("explore", "weights"), ("explore", "learn"), ("explore", "engine/server"), ("explore", "engine/sync"),
}  # fmt: skip
"""(layer or package, one that it never imports, though that stands above it)"""


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """Of a file's imports and classes: all that is looked at here."""
    return [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef)
    ]


@functools.cache
def packages_in_order() -> list[str]:
    """Packages as the table of ARCHITECTURE.md names them: from top to bottom, within a row from left to right."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text.split("## Packages")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")][2:]
    names = [name for cell in cells for name in re.findall(r"`((?:\w+/)?\w+)(?:/|\.py)`", cell)]
    return [name for name in names if name != "csrc"]


def package_of(parts: tuple[str, ...]) -> str:
    """Package of a module within megarl; that of a layer's own ``__init__`` is the layer."""
    return "/".join(parts[: 2 if parts[0] in LAYERS else 1])


@functools.cache
def modules() -> dict[str, list[Path]]:
    """Package -> its Python files; ``__init__`` and ``__main__`` of megarl and of layers are no packages."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        package = package_of(path.relative_to(PACKAGE).with_suffix("").parts)
        if not package.rpartition("/")[2].startswith("__"):
            found.setdefault(package, []).append(path)
    return found


def imported_packages(source: str) -> Iterator[tuple[str, int]]:
    """(package, line) of every import of megarl in a file, also those inside functions and ``if TYPE_CHECKING``."""
    for node in nodes(source):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "megarl" and rest:
                yield package_of(tuple(rest.split("."))), node.lineno


def violations(package: str, source: str, order: list[str]) -> list[str]:
    above = set(order[: order.index(package)]) | {package, "_C"}
    whole = (package, package.partition("/")[0])
    above -= {other for other in above for a in whole for b in (other, other.partition("/")[0]) if (a, b) in APART}
    found = dict.fromkeys((other, line) for other, line in imported_packages(source) if other not in above)
    return [f"line {line}: {package} imports {other}" for other, line in found]


def test_architecture_names_every_package_once() -> None:
    order = packages_in_order()
    assert len(order) == len(set(order))
    assert set(order) == set(modules())


@pytest.mark.parametrize("package", packages_in_order())
def test_a_package_imports_only_from_packages_above_it(package: str) -> None:
    order = packages_in_order()
    found = [
        f"{path.relative_to(ROOT)} {violation}"
        for path in modules()[package]
        for violation in violations(package, path.read_text(), order)
    ]
    assert not found, "\n".join(found)


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> modules of ``sources`` that it imports, also inside functions and ``if TYPE_CHECKING``."""
    graph: dict[str, set[str]] = {name: set() for name in sources}
    for name, source in sources.items():
        for node in nodes(source):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                wholes = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= wholes if wholes <= sources.keys() else {str(node.module), *(wholes & sources.keys())}
        graph[name] = (graph[name] & sources.keys()) - {name}
    return graph


def test_no_module_imports_itself_through_others() -> None:
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    graph = import_graph({name: path.read_text() for name, path in files.items()})
    assert graph["megarl.train.trainer"] >= {"megarl.train.step", "megarl.core.errors"}
    TopologicalSorter(graph).prepare()  # CycleError names the circle


def test_a_circle_is_seen_wherever_the_import_stands() -> None:
    sources = {
        "p.a": "def f():\n    from p import b\n",
        "p.b": "if TYPE_CHECKING:\n    from p.a import Name\n",
        "p": "",
    }
    with pytest.raises(CycleError):
        TopologicalSorter(import_graph(sources)).prepare()


def test_violations_are_seen_wherever_the_import_stands() -> None:
    order = ["core/errors", "learn/models", "explore/store", "train/loop"]
    source = (
        "from megarl.train import loop\ndef f():\n    import megarl.train.loop.base\n"
        "    from megarl.core.errors import JobError\n    from megarl.learn.models import head\n"
    )
    assert violations("explore/store", source, order) == [
        "line 1: explore/store imports train/loop",
        "line 3: explore/store imports train/loop",
        "line 5: explore/store imports learn/models",
    ]


def classes(sources: dict[str, str]) -> Iterator[tuple[str, str, int]]:
    """(class, module, lines) of every class of ``sources``, also of private ones and those inside functions."""
    for module, source in sources.items():
        for node in nodes(source):
            if isinstance(node, ast.ClassDef):
                yield node.name, module, (node.end_lineno or node.lineno) - node.lineno + 1


def shared_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Class names that stand more than once -> the modules that have one."""
    found: dict[str, list[str]] = {}
    for name, module, _ in classes(sources):
        found.setdefault(name, []).append(module)
    return {name: where for name, where in found.items() if len(where) > 1}


@functools.cache
def all_sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in PACKAGE.rglob("*.py")}


def test_no_two_classes_have_one_name() -> None:
    assert not shared_names(all_sources())


def test_a_second_class_of_a_name_is_seen_wherever_it_stands() -> None:
    sources = {"p/a.py": "class _Fault: pass\nclass Fault: pass\n", "p/b.py": "def f():\n    class _Fault: pass\n"}
    assert shared_names(sources) == {"_Fault": ["p/a.py", "p/b.py"]}


def test_lines_of_a_class_are_counted() -> None:
    assert list(classes({"p.py": "x = 1\nclass A:\n    y = 2\n\n    z = 3\n"})) == [("A", "p.py", 4)]


def test_no_class_is_too_large() -> None:
    large = {name: (module, lines) for name, module, lines in classes(all_sources()) if lines >= MAX_LINES}
    assert not large


@pytest.mark.parametrize(
    "package", [package for package in packages_in_order() if package not in ("engine/server", "engine/sync")]
)
def test_only_the_engines_side_names_vllm(package: str) -> None:
    """The trainer's and the explorer's processes never import vLLM: it costs 13 s and takes over the process."""
    for path in modules()[package]:
        for node in nodes(path.read_text()):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "vllm" for name in names), f"{path}:{node.lineno}"


def run_python(code: str, blocked: tuple[str, ...] = ()) -> str:
    """Run ``code`` in a fresh interpreter in which importing any of ``blocked`` fails; returns what it prints."""
    block = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
    done = subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_by(*modules: str) -> set[str]:
    return set(run_python(f"import {', '.join(modules)}\nprint(*sys.modules)").split())


def test_importing_is_light() -> None:
    light = imported_by(
        "megarl", "megarl.cli", "megarl.core.config", "megarl.core.schema", "megarl.run.process.process"
    )
    assert not light & set(HEAVY)


def test_explorer_workers_and_report_run_without_torch() -> None:
    """Started once for every job or engine beside the trainers: torch would cost seconds and 300 MB each."""
    imported = imported_by(
        "megarl.explore.explorer.explorer",
        "megarl.explore.bench.driver",
        "megarl.engine.client.client",
        "megarl.engine.client.control",
        "megarl.explore.rewards.pool.worker",
        "megarl.run.report.bench",
        "megarl.run.report.html",
    )
    assert not imported & {"torch", "vllm", "megatron", "transformers"}


NEITHER = (
    "megarl.weights.reshard.plan",
    "megarl.weights.reshard.execute",
    "megarl.weights.architectures",
    "megarl.engine.client.client",
    "megarl.weights.checkpoint.formats.hf",
    "megarl.ops",
    "megarl.learn.algorithms",
    "megarl.run.launch.job",
    "megarl.run.checks.memory",
)


def test_layers_below_the_models_need_neither_megatron_nor_vllm() -> None:
    run_python(f"import {', '.join(NEITHER)}", blocked=("megatron", "vllm", "transformer_engine", "apex"))


def test_trainer_needs_no_vllm() -> None:
    run_python("import megarl.train.trainer, megarl.train.sync.publish", blocked=("vllm", "transformer_engine", "apex"))
