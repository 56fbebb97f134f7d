"""The packages of ARCHITECTURE.md against the import graph, and what each process may leave unimported."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import megarl

PACKAGE = Path(megarl.__file__).parent
ROOT = PACKAGE.parent
MAX_NAMES = 25
"""Most public names of a class, with those of its bases."""
HEAVY = ("torch", "vllm", "megatron", "transformers", "transformer_engine", "apex", "matplotlib", "tensorboard")


LAYERS = ("weights", "learn", "engines", "buffer", "explore", "train", "run")
"""Folders of packages."""
ONLY = {
    "core": set[str](), "ops": set[str](), "sandbox": {"core"}, "rewards": {"core", "config", "sandbox"},
    "config": {"core"},
}  # fmt: skip
"""Package -> all that it imports of megarl beside itself."""
APART = {
    ("engines", "learn"), ("engines/client", "weights"), ("engines/fleet", "weights"),
    *((box, below) for box in ("tasks", "buffer", "explore")
      for below in ("weights", "learn", "engines/server", "engines/sync", "engines/cpu", "engines/tracing")),
}  # fmt: skip
"""(layer or package, one that it never imports, though that stands above it)"""
MAX_FILES = 15
"""Most files of a folder, its ``__init__`` aside."""
ROWS = {"weights/architectures", "learn/algorithms", "buffer/store", "train/parts"}
"""Folders whose files are rows of one table."""
PRONOUNS = {"own", "others", "kept", "joined", "sent"}
"""No file is named so: of what, the name does not say."""
TWINS = {
    "adapters", "alarms", "bench", "client", "command", "engines", "experts", "fleet", "grid", "harbor", "images",
    "job", "late", "lora", "memory", "model", "offline", "pacing", "plan", "probe", "process", "replay", "rollouts",
    "routing", "rows", "schema", "server", "store", "text", "turns", "types", "verifier", "vision", "writer",
}  # fmt: skip
"""Names of several files: each is one thing, as two packages see it (``late``: late rewards in store and step)."""


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
    above = above if package not in ONLY else above & (ONLY[package] | {package, "_C"})
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


def test_no_folder_has_more_files_than_a_reader_can_look_over() -> None:
    files: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if not path.name.startswith("__"):
            files.setdefault(str(path.parent.relative_to(PACKAGE)), []).append(path.stem)
    assert {folder: len(names) for folder, names in files.items() if len(names) > MAX_FILES}.keys() <= ROWS
    assert not {(folder, name) for folder, names in files.items() for name in names if name in PRONOUNS}


def faces() -> dict[str, set[str]]:
    """Package -> modules that its ``FACE`` names."""
    return {
        path.parent.name: {
            f"megarl.{path.parent.name}.{name}" for name in importlib.import_module(f"megarl.{path.parent.name}").FACE
        }
        for path in sorted(PACKAGE.glob("*/__init__.py"))
    }


def test_a_file_name_occurs_twice_only_for_one_thing() -> None:
    names = Counter(file.stem for file in PACKAGE.rglob("*.py") if file.stem != "__init__")
    assert {name for name, count in names.items() if count > 1} == TWINS


def test_the_face_of_a_package_names_what_others_import() -> None:
    graph = import_graph({module_of(path): source for path, source in all_sources().items()})
    used: dict[str, set[str]] = {}
    for module, imported in graph.items():
        for other in imported:
            package = other.split(".")[1:2]
            patches = module.startswith("megarl.exam.areas")  # faults are put in where no other package looks
            if other.count(".") > 1 and module.split(".")[1:2] != package and not patches:
                used.setdefault(package[0], set()).add(other)
    assert faces() == {package: used.get(package, set()) for package in faces()}


def module_of(path: str) -> str:
    """Name of the module of a file below the root."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> modules of ``sources`` that it imports, also inside functions and ``if TYPE_CHECKING``."""
    assert not any("/" in name for name in sources), "names of modules, not paths"
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
    graph = import_graph({module_of(path): source for path, source in all_sources().items()})
    assert graph["megarl.train.trainer"] >= {"megarl.train.step", "megarl.core.errors"}
    TopologicalSorter(graph).prepare()  # CycleError names the circle


def unknown_names(sources: dict[str, str], known: dict[str, str]) -> set[str]:
    """Names of megarl that imports of ``sources`` ask for and no source of ``known`` has; imports in strings too, which
    are code for another process."""
    by_module = {module_of(path): source for path, source in known.items()}
    found = set()
    for source in sources.values():
        joined = re.sub(r'"\n\s*f?"', "", source)  # a string in parts, one a line
        for module, names in re.findall(r"\bfrom (megarl(?:\.\w+)*) import (\w+(?:, \w+)*)", joined):
            for name in names.split(", "):
                if f"{module}.{name}" not in by_module and not re.search(rf"\b{name}\b", by_module.get(module, "")):
                    found.add(f"{module}.{name}")
    return found


def test_imports_in_strings_name_what_there_is() -> None:
    assert unknown_names(all_sources(), all_sources()) <= {"megarl._C"}
    sources = {"megarl/p/a.py": "code = 'from megarl.p import b; b.f()'\nfrom megarl.p.a import code\n"}
    assert unknown_names(sources, sources) == {"megarl.p.b"}
    sources = {"megarl/p/a.py": 'code = (\n    "from megarl.p import "\n    f"b; {x}"\n)\n'}
    assert unknown_names(sources, sources) == {"megarl.p.b"}


def test_programs_that_are_started_by_name_exist() -> None:
    """Dotted names in strings, such as those after ``-m``; one that is built from parts is refused."""
    known = {module_of(path) for path in all_sources()} | {"megarl._C"}
    for path, source in all_sources().items():
        if not path.startswith("megarl/"):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr) and isinstance(first := node.values[0], ast.Constant):
                assert not re.fullmatch(r"megarl(\.\w+)*\.", str(first.value)), f"{path}:{node.lineno}: write it whole"
            if isinstance(node, ast.Constant) and re.fullmatch(r"megarl(\.[a-z_]\w*)+", str(node.value)):
                name = str(node.value)
                assert name in known or path == "megarl/old_names.py", (path, name)


def test_a_circle_is_seen_wherever_the_import_stands() -> None:
    sources = {
        "p.a": "def f():\n    from p import b\n",
        "p.b": "if TYPE_CHECKING:\n    from p.a import Name\n",
        "p": "",
    }
    with pytest.raises(CycleError):
        TopologicalSorter(import_graph(sources)).prepare()


def test_violations_are_seen_wherever_the_import_stands() -> None:
    order = ["core", "learn/models", "explore/workflows", "train/loop"]
    source = (
        "from megarl.train import loop\ndef f():\n    import megarl.train.loop.base\n"
        "    from megarl.core.errors import JobError\n    from megarl.learn.models import head\n"
    )
    assert violations("explore/workflows", source, order) == [
        "line 1: explore/workflows imports train/loop",
        "line 3: explore/workflows imports train/loop",
        "line 5: explore/workflows imports learn/models",
    ]


def classes(sources: dict[str, str]) -> Iterator[tuple[str, ast.ClassDef]]:
    """(module, class) of every class of ``sources``, also of private ones and those inside functions."""
    for module, source in sources.items():
        yield from ((module, node) for node in nodes(source) if isinstance(node, ast.ClassDef))


def shared_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Class names that stand more than once -> the modules that have one."""
    found: dict[str, list[str]] = {}
    for module, node in classes(sources):
        found.setdefault(node.name, []).append(module)
    return {name: where for name, where in found.items() if len(where) > 1}


@functools.cache
def all_sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in PACKAGE.rglob("*.py")}


def test_no_two_classes_have_one_name() -> None:
    assert not shared_names(all_sources())


def test_a_second_class_of_a_name_is_seen_wherever_it_stands() -> None:
    sources = {"p/a.py": "class _Fault: pass\nclass Fault: pass\n", "p/b.py": "def f():\n    class _Fault: pass\n"}
    assert shared_names(sources) == {"_Fault": ["p/a.py", "p/b.py"]}


class Written(NamedTuple):
    """A class as its file has it."""

    module: str
    node: ast.ClassDef
    bases: list[str]
    """Classes of megarl that it inherits from."""
    others: list[str]
    """Other bases, without their modules."""


def written_classes(sources: dict[str, str]) -> dict[str, Written]:
    """Name -> class, of every class of ``sources``."""
    own: dict[str, dict[str, str]] = {}
    """Module -> (name in it -> name in megarl); "" for what a library has."""
    for module, source in sources.items():
        own[module] = {}
        for node in nodes(source):
            if isinstance(node, ast.Import | ast.ImportFrom):
                origin = node.module if isinstance(node, ast.ImportFrom) else None
                for alias in node.names:
                    ours = (origin or alias.name).partition(".")[0] == "megarl"
                    own[module][alias.asname or alias.name.partition(".")[0]] = alias.name if ours else ""
    found = {}
    names = {node.name for _, node in classes(sources)}
    for module, node in classes(sources):
        bases: list[str] = []
        others: list[str] = []
        for base in node.bases:
            path = ast.unparse(base).partition("[")[0].split(".")
            first = own[module].get(path[0], path[0])
            name = path[-1] if len(path) > 1 else first
            (bases if first and name in names else others).append(name if first else path[-1])
        found[node.name] = Written(module, node, bases, others)
    return found


def statements(node: ast.AST, *ends: type) -> Iterator[ast.AST]:
    """All that stands below a node, without what is inside a node of ``ends``."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ends):
            yield from statements(child, *ends)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [part for part in statements(node, *FUNCTIONS, ast.ClassDef) if isinstance(part, FUNCTIONS)]


def public_names(name: str, found: dict[str, Written]) -> set[str]:
    """Public methods, properties, class attributes and attributes assigned to ``self``, with those of the bases."""
    node = found[name].node
    names = {part.name for part in methods(node)}
    names |= {
        part.id
        for part in statements(node, *FUNCTIONS, ast.ClassDef, ast.Lambda, ast.ListComp, ast.DictComp)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }
    names |= {
        part.attr
        for part in statements(node, ast.ClassDef)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self"
    }
    own = {each for each in names if not each.startswith("_")}
    return own.union(*(public_names(base, found) for base in found[name].bases))


def is_error(name: str, found: dict[str, Written]) -> bool:
    kinds = [getattr(builtins, other, None) for other in found[name].others]
    return any(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds) or any(
        is_error(base, found) for base in found[name].bases
    )


def is_row(written: Written) -> bool:
    """True for a dataclass, NamedTuple or enum that only has values, what follows from them, and constructors."""
    marks = [*(ast.unparse(mark).partition("(")[0] for mark in written.node.decorator_list), *written.others]
    computed = ("property", "cached_property", "classmethod", "staticmethod")
    return any(mark in ("dataclass", "NamedTuple") or mark.endswith("Enum") for mark in marks) and all(
        method.name.startswith("__") or any(ast.unparse(mark) in computed for mark in method.decorator_list)
        for method in methods(written.node)
    )


def is_declared(written: Written) -> bool:
    """True if no method does anything: what a subclass has of the class is names."""

    def is_nothing(part: ast.stmt, given: set[str]) -> bool:
        if isinstance(part, ast.Return):
            names = {each.id for each in ast.walk(part) if isinstance(each, ast.Name)}
            return names <= given and not any(isinstance(each, ast.Call) for each in ast.walk(part))
        return isinstance(part, ast.Pass | ast.Raise) or (
            isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
        )

    return all(
        is_nothing(part, {each.arg for each in method.args.args[1:]})
        for method in methods(written.node)
        for part in method.body
    )


def holds_values(name: str, found: dict[str, Written]) -> bool:
    """True for settings, errors and rows."""
    return "config/" in found[name].module or is_error(name, found) or is_row(found[name])


def too_many_names(sources: dict[str, str], most: int) -> dict[str, int]:
    """Class -> number of its public names, where that is above ``most``."""
    found = written_classes(sources)
    numbers = {name: len(public_names(name, found)) for name in found if not holds_values(name, found)}
    return {name: number for name, number in numbers.items() if number > most}


def shared_code(sources: dict[str, str]) -> dict[str, list[str]]:
    """Class -> classes of megarl with code that it inherits from."""
    found = written_classes(sources)
    shared = {
        name: [base for base in each.bases if not holds_values(base, found) and not is_declared(found[base])]
        for name, each in found.items()
    }
    return {name: bases for name, bases in shared.items() if bases}


def test_a_class_has_few_public_names() -> None:
    large = too_many_names(all_sources(), MAX_NAMES)
    assert not large, f"{large}: compose a class of parts"


def test_no_class_inherits_code_from_another() -> None:
    shared = shared_code(all_sources())
    assert not shared, f"{shared}: make the base a part"


def test_public_names_are_counted_wherever_they_stand() -> None:
    sources = {
        "p/a.py": (
            "import lib\nfrom lib import Foreign\nfrom megarl.p.b import Base as Other\ndef f():\n"
            "    class A(Other, lib.Base, Foreign):\n        if True:\n            a: int\n"
            "        b, _c = 1, [x for x in y]\n"
            "        async def d(self):\n            with g() as self.e:\n                self.h, self._i = z = 1, 2\n"
            "            self.j.k = 1\n            class B:\n                l = 1\n"
        ),
        "p/b.py": "class Base:\n    @property\n    def m(self): return self._n\n    def d(self): pass\n",
        "p/c.py": "class Foreign:\n    o = 1\n",
    }
    found = written_classes(sources)
    assert public_names("A", found) == {"a", "b", "d", "e", "h", "m"} and public_names("B", found) == {"l"}
    assert too_many_names(sources, 5) == {"A": 6} and not too_many_names(sources, 6)


@pytest.mark.parametrize(
    ("values", "acting"),
    [
        (
            "@dataclass(frozen=True)\nclass A:\n    a: int\n    @property\n    def b(self): return self.a\n",
            "@property\n",
        ),
        ("class A(NamedTuple):\n    a: int\n    @classmethod\n    def b(cls): return cls(1)\n", "@classmethod\n"),
        ("class A(StrEnum):\n    a = '1'\n    @property\n    def b(self): return self.a\n", "(StrEnum)"),
        ("class A(ValueError):\n    a = 1\n    def b(self): return self.a\n", "(ValueError)"),
    ],
)
def test_values_have_many_names_and_heirs(values: str, acting: str) -> None:
    """``acting``: what makes the class one that only has values."""
    heir = "class B(A): pass\n"
    assert not too_many_names({"megarl/p.py": values}, 1)
    assert not shared_code({"megarl/p.py": values + heir})
    other = values.replace(f"    {acting}", "").replace(acting, "")
    assert too_many_names({"megarl/p.py": other}, 1) == {"A": 2}
    assert shared_code({"megarl/p.py": other + heir}) == {"B": ["A"]}
    assert not too_many_names({"megarl/config/p.py": other}, 1)
    assert not shared_code({"megarl/config/p.py": other, "megarl/q.py": heir})


@pytest.mark.parametrize(
    ("base", "seen"),
    [
        ("def f(self): return self.g()", True),
        ("def __init__(self): self._a = 1", True),
        ("if TYPE_CHECKING:\n        async def f(self):\n            'Text.'\n            await g()", True),
        ("a: int\n    def f(self):\n        'Return a.'\n        return {}", False),
        ("@abstractmethod\n    def f(self): ...", False),
        ("def f(self, a): return a", False),
        ("def f(self): raise NotImplementedError", False),
    ],
)
def test_inherited_code_is_seen_wherever_it_stands(base: str, seen: bool) -> None:
    sources = {
        "p/a.py": f"class Base(ABC):\n    {base}\n",
        "p/b.py": "import megarl.p.a\ndef f():\n    class _Further(megarl.p.a.Base[int]): pass\n",
        "p/c.py": "from lib import Base\nclass Other(Base): pass\n",
    }
    assert shared_code(sources) == ({"_Further": ["Base"]} if seen else {})


WITH_VLLM = ("engines/server", "engines/sync", "engines/cpu", "engines/tracing")
"""Packages whose code runs in engines."""


@pytest.mark.parametrize("package", [package for package in packages_in_order() if package not in (*WITH_VLLM, "exam")])
def test_only_the_engines_side_names_vllm(package: str) -> None:
    """The trainer's and the explorer's processes never import vLLM: it costs 13 s and takes over the process."""
    for path in modules()[package]:
        for node in nodes(path.read_text()):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "vllm" for name in names), f"{path}:{node.lineno}"


LIGHT = ("megarl", "megarl.cli", "megarl.config", "megarl.core.schema", "megarl.run.process.process")
WITHOUT_TORCH = (
    "megarl.explore.explorer.explorer",
    "megarl.explore.bench",
    "megarl.engines.client.client",
    "megarl.engines.client.control",
    "megarl.rewards.pool.worker",
    "megarl.run.report.bench",
    "megarl.run.report.html",
)
"""Started once for every job or engine beside the trainers: torch would cost seconds and 300 MB each."""
NEITHER = (
    "megarl.weights.reshard.plan",
    "megarl.weights.reshard.execute",
    "megarl.weights.architectures",
    "megarl.engines.client.client",
    "megarl.weights.checkpoint.formats.hf",
    "megarl.ops",
    "megarl.learn.algorithms",
    "megarl.run.launch.job",
    "megarl.run.checks.memory",
)
TRAINER = ("megarl.train.trainer", "megarl.train.sync.publish")
ABSENT = ("vllm", "transformer_engine", "apex")
IMPORT = """
import importlib, json, sys, traceback
for stage, blocked, modules in json.loads(sys.argv[1]):
    for name in [name for name in sys.modules if sys.modules[name] is None]:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(blocked))
    try:
        for name in modules:
            importlib.import_module(name)
        error = ""
    except Exception:
        error = traceback.format_exc()
    print(json.dumps([stage, error, [name for name in sys.modules if sys.modules[name] is not None]]), flush=True)
"""


class Imported(NamedTuple):
    """What a fresh interpreter has when it has imported some modules of megarl."""

    error: str
    """Traceback of the import that failed."""
    modules: set[str]


@pytest.fixture(scope="module")
def imported() -> dict[str, Imported]:
    """Stages of one interpreter, from what imports least to what imports most: torch is imported once for all."""
    stages = [
        ("light", (), LIGHT),
        ("without torch", (), WITHOUT_TORCH),
        ("neither", (*ABSENT, "megatron"), NEITHER),
        ("trainer", ABSENT, TRAINER),
    ]
    command = [sys.executable, "-W", "ignore", "-c", IMPORT, json.dumps(stages)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return {stage: Imported(error, set(modules)) for stage, error, modules in lines}


def test_importing_is_light(imported: dict[str, Imported]) -> None:
    found = imported["light"]
    assert found.error == "" and set(LIGHT) <= found.modules and not found.modules & set(HEAVY)


def test_explorer_workers_and_report_run_without_torch(imported: dict[str, Imported]) -> None:
    found = imported["without torch"]
    assert found.error == "" and set(WITHOUT_TORCH) <= found.modules
    assert not found.modules & {"torch", "vllm", "megatron", "transformers"}


def test_layers_below_the_models_need_neither_megatron_nor_vllm(imported: dict[str, Imported]) -> None:
    assert imported["neither"].error == "" and set(NEITHER) <= imported["neither"].modules


def test_trainer_needs_no_vllm(imported: dict[str, Imported]) -> None:
    found = imported["trainer"]
    assert found.error == "" and {*TRAINER, "megatron"} <= found.modules and "vllm" not in found.modules
