"""Convert a call's arguments to the types of its tool's JSON schema, for formats that write values as bare text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Parameters = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> JSON schema of its parameters."""
CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
"""Words for constants, in lower case: Qwen3-Coder's template writes ``True`` and ``None``."""
MAX_REFS = 8
"""Maximum nested references and alternatives to follow."""


def parameters_of(tools: Iterable[Mapping[str, Any]]) -> Parameters:
    """Return the schemas of the tools' parameters; a tool without a schema is skipped."""
    found = [tool.get("function", tool) for tool in tools]
    return {
        function["name"]: function["parameters"]
        for function in found
        if isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("parameters"), Mapping)
    }


def read_argument(text: str, value: Any, parameters: Mapping[str, Any], name: str) -> Any:
    """Return an argument with its schema's type: ``text``, or the ``value`` parsed from it as JSON.

    Text that fits no type stays ``value``, which the tool refuses. Without a type in the schema return ``value``.
    """
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    types = _types(schema, parameters)
    if isinstance(value, str) and (word := text.strip().lower()) in CONSTANTS:
        constant = CONSTANTS[word]
        value = constant if _types_of(constant) & types else value
    fits = not isinstance(value, str) and _types_of(value) & types
    return text if "string" in types and not fits else value


def _types(schema: Any, root: Mapping[str, Any], levels: int = MAX_REFS) -> set[str]:
    """Return the JSON type names that a schema allows; empty if it names none."""
    if not isinstance(schema, Mapping) or levels == 0:
        return set()
    found = schema.get("type")
    if isinstance(found, str):
        return {found}
    if isinstance(found, list):
        return {one for one in found if isinstance(one, str)}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    types = set[str]().union(*map(_types_of, values))
    others = [one for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list) for one in schema[key]]
    if isinstance(reference := schema.get("$ref"), str):
        others.append(_referred(reference, root))
    return types.union(*(_types(one, root, levels - 1) for one in others))


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of a schema that ``#/…`` refers to; None if it is missing."""
    part: Any = root
    for key in reference.removeprefix("#/").split("/"):
        part = part.get(key) if isinstance(part, Mapping) else None
    return part


def _types_of(value: Any) -> set[str]:
    """Return the JSON type names of a value."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    return {{float: "number", str: "string", list: "array", dict: "object"}.get(type(value), "")}
