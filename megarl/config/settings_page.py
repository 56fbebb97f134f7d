"""The settings reference: every setting with its default, values and meaning, read from ``schema`` and
``hints``.

``megarl config --reference`` prints it, and a test compares it with docs/settings.md.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from megarl.config.algorithms import AlgorithmConfig, AnyAlgorithmConfig, owners
from megarl.config.bounds import Bound, bound_of
from megarl.config.hints import VERL
from megarl.config.schema import Config, OptimizerConfig, ParallelConfig

HEADER = """# Settings

Written by `megarl config --reference`; do not edit. Set them as overrides (`trainer.steps=20`) or in files of
`configs/`. `megarl config [overrides]` prints what a job composes to. An entry has the default, the values that a
setting may have, and verl's name for it. `null` is "not set".
"""
WIDTH = 120


SHARED: dict[type, str] = {OptimizerConfig: "trainer.optimizer", ParallelConfig: "parallel"}
"""Dataclass used by several groups -> the group that lists its rows."""


class Setting(NamedTuple):
    name: str
    default: str
    values: str
    help: str
    verl: str


def reference() -> str:
    """Return the page in Markdown, with a list for each group of settings."""
    lines = [HEADER]
    for prefix, kind in groups():
        lines += [f"## {prefix.removesuffix('.NAME')}", "", *_about(kind)]
        for row in settings(kind, prefix):
            facts = "; ".join([row.values, *([f"verl: {row.verl}"] if row.verl else [])])
            lines += _wrapped(f"- {row.name} = {row.default}: {facts}.") + _wrapped(f"  {row.help}")
        lines.append("")
    return "\n".join(lines)


def groups() -> Iterator[tuple[str, type]]:
    """Yield (prefix of its settings, dataclass) of each group. That of a group by name ends in ``.NAME``."""
    for name, kind in get_type_hints(Config).items():
        yield (f"{name}.NAME", get_args(kind)[1]) if get_origin(kind) is dict else (name, _whole(kind))


def changed(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each setting that differs from its default, with its value as an override."""
    for field in fields(config):
        value = getattr(config, field.name)
        name = f"{prefix}{field.name}"
        if is_dataclass(value):
            yield from changed(value, f"{name}.")
        elif value != (field.default if field.default_factory is MISSING else field.default_factory()):
            yield name, value if isinstance(value, str) else json.dumps(value, default=asdict)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def settings(kind: type, prefix: str) -> Iterator[Setting]:
    """Yield the rows of a dataclass and its nested dataclasses; one row for a dataclass listed in another group."""
    hints, bounded, helps = get_type_hints(kind), get_type_hints(kind, include_extras=True), _helps(kind)
    for field in fields(kind):
        name, text = f"{prefix}.{field.name}", helps[field.name]
        inner = _dataclass_of(hints[field.name])
        if inner is None:
            if kind is AnyAlgorithmConfig and (of := owners(field.name)):
                text = f"({', '.join(of)}) {text}"
            values = _values(hints[field.name], bound_of(bounded[field.name]))
            yield Setting(f"`{name}`", f"`{_default(field)}`", values, text, _verl(name))
        elif (place := SHARED.get(inner, name)) != name:
            yield Setting(f"`{name}.*`", _differing(field, inner), f"as `{place}.*`", text, "")
        else:
            if field.default is None:
                yield Setting(f"`{name}`", "`null`", "the settings below", text, "")
            yield from settings(inner, name)


def _whole(kind: type) -> type:
    """Return the dataclass with all settings of a group, for ``algorithm`` those of every algorithm."""
    return AnyAlgorithmConfig if kind is AlgorithmConfig else kind


def _about(kind: type) -> list[str]:
    """Return the class's docstring (Python gives a dataclass without one its signature)."""
    text = kind.__doc__ or ""
    return [] if text.startswith(f"{kind.__name__}(") else [*textwrap.wrap(" ".join(text.split()), WIDTH), ""]


def _helps(kind: type) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass and its bases."""
    found: dict[str, str] = {}
    for base in reversed([c for c in kind.__mro__ if is_dataclass(c)]):
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef), "the source of a class is a class"
        for here, after in zip(tree.body, [*tree.body[1:], None], strict=True):
            if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):
                text = (
                    after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
                )
                found[here.target.id] = " ".join(str(text).replace("``", "`").split())
    return found


def _default(field: Field[Any]) -> str:
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return "{}" if value == {} else f"{value:g}" if isinstance(value, float) else str(value)


def _differing(field: Field[Any], inner: type) -> str:
    """Return the defaults of a group that differ from its class's."""
    if field.default is None:
        return "`null`"
    given, usual = (field.default_factory() if field.default_factory is not MISSING else inner()), inner()
    return ", ".join(
        f"`{f.name}={getattr(given, f.name)}`"
        for f in fields(inner)
        if getattr(given, f.name) != getattr(usual, f.name)
    )


def _dataclass_of(kind: Any) -> type | None:
    found = [k for k in (kind, *get_args(kind)) if isinstance(k, type) and is_dataclass(k)]
    return found[0] if found else None


def _values(kind: Any, bound: Bound | None) -> str:
    kinds = [
        k for k in (get_args(kind) if get_origin(kind) not in (Literal, list, dict) else (kind,)) if k is not NoneType
    ] or [kind]
    texts = [_one_kind(k, bound) for k in kinds]
    return " or ".join(dict.fromkeys(texts))


def _one_kind(kind: Any, bound: Bound | None) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is list:
        return "list of " + (_one_kind(get_args(kind)[0], bound) or "texts")
    if get_origin(kind) is dict:
        return "map"
    if kind in (int, float):
        if bound is None:
            return "whole number" if kind is int else "number"
        return f"{bound}, whole" if kind is int else str(bound)
    return {bool: "`true`, `false`", str: "text"}[kind]


def _verl(name: str) -> str:
    """Return verl's settings with this setting as their first counterpart."""
    return ", ".join(
        f"`{theirs}`" for theirs, ours in VERL.items() if ours.split(",")[0].split(" ")[0].split("=")[0] == name
    )
