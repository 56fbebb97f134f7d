"""Make a draft of a family's table; format it as a source file and as a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from megarl.core.errors import ArchitectureError
from megarl.weights.architectures.table import Logical, Param, Shard, Stage
from megarl.weights.drafts.matches import Draft, arguments, draft_of, logits_of, passed_over
from megarl.weights.drafts.tiny import SMALL, TOKENS, stored_tensors, tiny_model


def drafted(name: str, config: dict[str, Any]) -> tuple[Draft, list[dict[str, Any]]]:
    """Return the draft of a family, and configuration changes that it would ignore.

    Args:
        config: Configuration of the tiny model.
    """
    from transformers.utils import logging as messages

    messages.set_verbosity_error()  # silences errors about tried values
    messages.disable_progress_bar()
    model = tiny_model(config)
    draft = draft_of(name, stored_tensors(model), config)
    arch = draft.architecture()
    try:
        _, found = passed_over(config, logits_of(model, config), lambda changed: arguments(arch, changed))
    except ArchitectureError as error:
        draft.refused = str(error)
        return draft, []
    names = set(model.state_dict())
    single = {
        key
        for key, value in config.items()
        if isinstance(value, bool) and _tensors({**config, key: not value}) != names
    }
    single |= {key for change in found if len(change) == 1 for key in change if key in config}
    fixed = sorted(key for key in single - set(SMALL) if not isinstance(config[key], dict | list))
    draft.fixed = {key: config[key] for key in fixed}
    return draft, [change for change in found if not set(change) <= set(draft.fixed)]


def _tensors(config: dict[str, Any]) -> set[str] | None:
    """Tensor names of a configuration's model; ``None`` if transformers refuses it."""
    try:
        return set(tiny_model(config).state_dict())
    except ArchitectureError:
        return None


def source(draft: Draft) -> str:
    """Return the source file of a draft: a table in the form of ``megarl/weights/architectures``."""
    groups = sorted({name.partition("[")[0] for name in (*draft.groups, *draft.vllm)})
    rows = [f"        *{name}," for name in draft.groups]
    logicals: dict[int, str] = {}
    lines = []
    for family, own in draft.borrowed.items():
        for row in own:
            for part in row.hf:
                if id(part) not in logicals:
                    logicals[id(part)] = f"_T{len(logicals)}"
                    lines.append(f"{logicals[id(part)]} = {_logical(part)}")
            rows.append(f"        {_param(row, logicals)},  # as {family} has it")
    arch = draft.architecture()
    rules = {name: _call(rule) for name, rule in vars(arch).items() if name in ("layers", "norms", "router")}
    rules = {name: call for name, call in rules.items() if call}
    table = ["Architecture", *(["Logical", "Op", "Param", "Shard", "Stage"] if lines else [])]
    table += [call.partition("(")[0] for call in rules.values()]
    return "\n".join(
        [
            f'"""{draft.name}: a draft by ``megarl add-model``.',
            "",
            f"Source: ``transformers/models/{draft.name}/modeling_{draft.name}.py``.",
            '"""',
            "",
            "from __future__ import annotations",
            "",
            "from megarl.weights.architectures.blocks import (",
            *(f"    {name}," for name in groups),
            ")",
            f"from megarl.weights.architectures.table import {', '.join(table)}",
            "",
            *(f"# no row: {name} {shape}" for name, shape in draft.unplaced.items()),
            *lines,
            "",
            f"{draft.name.upper()} = Architecture(",
            f'    name="{draft.name}",',
            f'    models="{draft.name}",  # names of published models',
            "    params=(",
            *rows,
            "    ),",
            f"    vllm=({''.join(f'*{name}, ' for name in draft.vllm).rstrip()}),",
            *(f"    {name}={call}," for name, call in rules.items()),
            *([f"    keys={draft.keys!r},"] if draft.keys else []),
            f"    fixed={draft.fixed!r},",
            ")",
            "",
        ]
    )


def _call(rule: Any) -> str:
    """Constructor call of a rule with its non-default values; "" if all are defaults."""
    given = [f"{one.name}={value!r}" for one in fields(rule) if (value := getattr(rule, one.name)) != one.default]
    return f"{type(rule).__name__}({', '.join(given)})" if given else ""


def _logical(part: Logical) -> str:
    shard = "" if part.shard is Shard.REPLICATED else f", Shard.{part.shard.name}"
    dtype = "" if part.dtype is None else f", dtype={part.dtype!r}"
    return f'Logical("{part.name}", "{part.axes}"{shard}{dtype})'


def _param(row: Param, logicals: Mapping[int, str]) -> str:
    parts = "".join(f"{logicals[id(part)]}, " for part in row.hf).rstrip()
    stage = "" if row.stage is Stage.LAYER else f", Stage.{row.stage.name}"
    te = "" if row.te is None else f', te="{row.te}"'
    return f'Param("{row.megatron}", Op.{row.op.name}, ({parts}){stage}{te})'


def report(draft: Draft, config: Mapping[str, Any], unread: list[dict[str, Any]], beside: list[str]) -> Iterator[str]:
    """Yield lines with the rows found, the tensors not placed, and the next steps.

    Args:
        unread: Changes of config.json that change transformers' logits but are ignored by the draft.
        beside: Names in the checkpoint's files that transformers does not read.
    """
    yield f"rows of blocks.py: {', '.join(draft.groups) or 'none'}"
    for family, rows in draft.borrowed.items():
        yield f"rows of {family}: {', '.join(row.megatron for row in rows)}"
    yield from (f"NO ROW for {name} {shape}" for name, shape in draft.unplaced.items())
    yield from (f"NO ROW for {name}, which transformers does not read" for name in beside)
    if draft.refused:
        yield f"REFUSED: {draft.refused}"
    for key, value in draft.fixed.items():
        yield f"fixed: {key}={value!r} changes what transformers computes and no rule reads it; name a rule, or keep it"
    for change in unread:
        yield f"NOT READ: {change} changes what transformers computes; refuse it or read it"
    yield "Names that fit prove nothing: the tests compare what is computed."
    yield "next: put the file into megarl/weights/architectures/ and its row into ARCHITECTURES there;"
    yield "add this row to FAMILIES in tests/parallel/families.py, and its name to ALIKE there:"
    small = {key: value for key, value in config.items() if key in SMALL or key in TOKENS or isinstance(value, list)}
    yield f'    "{draft.name}": ("{draft.name}", {small!r}),'
    yield (
        f"then run: pytest tests/parallel/test_families.py tests/unit/test_config_keys.py -k {draft.name} "
        "(docs/adding_a_model.md)"
    )
