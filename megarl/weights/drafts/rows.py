"""Find known rows that match the tensors of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.core.errors import ArchitectureError
from megarl.weights.architectures import ARCHITECTURES, blocks
from megarl.weights.architectures.table import (
    EXPERT,
    Architecture,
    Fused,
    LayerRules,
    ModelSizes,
    NormRules,
    Op,
    Param,
    RouterRules,
    Stage,
)
from megarl.weights.drafts.tiny import LAYERS, Stored

_GROUPS = {name: value for name, value in vars(blocks).items() if name.isupper() and isinstance(value, tuple)}
ROW_GROUPS: Mapping[str, tuple[Param, ...]] = {n: v for n, v in _GROUPS.items() if isinstance(v[0], Param)}
VLLM_GROUPS: Mapping[str, tuple[Fused, ...]] = {n: v for n, v in _GROUPS.items() if isinstance(v[0], Fused)}
"""Name in ``blocks`` -> shared rows."""


Place = tuple[str, int]
"""Name of a tensor and its layer; ``BESIDE`` for tensors outside the layers."""
BESIDE = -1


@dataclass
class Draft:
    """Rows found for a model, and tensors without a row."""

    name: str
    stored: Stored
    groups: dict[str, tuple[Param, ...]] = field(default_factory=dict)
    """Rows of ``blocks``, by their names there."""
    borrowed: dict[str, list[Param]] = field(default_factory=dict)
    """``model_type`` of another family -> matching rows from its table."""
    vllm: dict[str, tuple[Fused, ...]] = field(default_factory=dict)
    unplaced: dict[str, str] = field(default_factory=dict)
    """Name of a tensor without a row -> its shape, with names of sizes that match."""
    refused: str = ""
    """Error message of the draft for the configuration."""
    fixed: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Sizes under unusual keys of config.json."""
    layers: LayerRules = LayerRules()

    def architecture(self) -> Architecture:
        """Return the draft as a table."""
        rows = [row for group in (*self.groups.values(), *self.borrowed.values()) for row in group]
        return Architecture(
            self.name,
            self.name,
            tuple(rows),
            tuple(row for group in self.vllm.values() for row in group),
            fixed=dict(self.fixed),
            layers=self.layers,
            norms=self.norms(),
            router=RouterRules(sigmoid="ROUTER_BIAS" in self.groups),
            keys=dict(self.keys),
        )

    def norms(self) -> NormRules:
        """Derive the norms' places from the rows."""
        return NormRules(
            before="input_layernorm.weight" in self.stored,
            after="NORMS_AFTER" in self.groups,
            whole_width="WHOLE_QK_NORM" in self.groups,
        )


def draft_of(name: str, stored: Stored, config: Mapping[str, Any]) -> Draft:
    """Find rows for every tensor of a model: first shared rows of ``blocks``, then rows of single families.

    Args:
        name: ``model_type``.
        config: Configuration of the tiny model with the tensors ``stored``.
    """
    fitting = {group: (rows, _places(Architecture(name, name, rows), stored, config)) for group, rows in _groups()}
    fitting = {group: found for group, found in fitting.items() if found[1]}
    covers = [_cover(stored, {first: fitting[first]} | fitting) for first in fitting]
    chosen, left = min(
        covers,
        key=lambda cover: (len(cover[1]), sum("[" in group for group in cover[0])),
        default=(dict[str, tuple[Param, ...]](), _all(stored)),
    )
    layers = LayerRules(
        partial_rotary=config.get("partial_rotary_factor") is not None,
        windows=bool(config.get("layer_types") and config.get("sliding_window")),
    )
    draft = Draft(name, stored, chosen, layers=layers)
    for family, row in _own_rows():
        arch = replace(ARCHITECTURES[family], params=(row,))
        places = _places(arch, stored, config)
        if places and places <= left:
            draft.borrowed.setdefault(family, []).append(row)
            axes = {axis for part in row.hf for axis in part.axes.split()}
            draft.keys |= {axis: keys for axis, keys in arch.keys.items() if axis in axes}
            left -= places
    logicals = {id(part) for row in draft.architecture().params for part in row.hf}
    draft.vllm = {
        group: rows
        for group, rows in VLLM_GROUPS.items()
        if all(id(part) in logicals for row in rows for part in row.hf)
    }
    try:
        sizes = draft.architecture().sizes(config)
    except ArchitectureError as error:
        draft.refused, sizes = str(error), None
    draft.unplaced = {place: _described(stored[place].shape, sizes) for place in sorted({place for place, _ in left})}
    return draft


def _all(stored: Stored) -> set[Place]:
    return {(place, layer) for place, one in stored.items() for layer in one.layers or {BESIDE}}


def _cover(
    stored: Stored, fitting: Mapping[str, tuple[tuple[Param, ...], set[Place]]]
) -> tuple[dict[str, tuple[Param, ...]], set[Place]]:
    """Choose, in order, each group with only uncovered tensors. Return these groups, and the tensors without a row."""
    chosen, left = dict[str, tuple[Param, ...]](), _all(stored)
    for group, (rows, places) in fitting.items():
        if places <= left:
            chosen[group] = rows
            left -= places
    return chosen, left


def _groups() -> Iterator[tuple[str, tuple[Param, ...]]]:
    """Yield groups of rows with their names, largest first, then each of their rows alone."""
    yield from sorted(ROW_GROUPS.items(), key=lambda group: (-len(group[1]), group[0]))
    for group, rows in ROW_GROUPS.items():
        yield from ((f"{group}[{i}:{i + 1}]", (row,)) for i, row in enumerate(rows))


def _own_rows() -> Iterator[tuple[str, Param]]:
    shared = {id(row) for rows in ROW_GROUPS.values() for row in rows}
    for family, arch in ARCHITECTURES.items():
        yield from ((family, row) for row in arch.params if id(row) not in shared)


def _places(arch: Architecture, stored: Stored, config: Mapping[str, Any]) -> set[Place]:
    """Tensors of the rows; empty unless all exist with matching shapes, in the layers of their stage."""
    try:
        sizes = arch.sizes(config)
    except ArchitectureError:
        return set()
    found = set[Place]()
    for row in arch.params:
        layers = _layers(row.stage, stored)
        for part in row.hf[:1] if row.op is Op.TIED else row.hf:
            shape = part.shape(sizes)
            one = stored.get(part.name)
            if one is None:
                if 0 not in shape and not (row.op is Op.TIED and sizes.tied):
                    return set()
            elif one.shape != shape or not (layers <= one.layers if layers else not one.layers):
                return set()
            else:
                found |= {(part.name, layer) for layer in layers or {BESIDE}}
    return found


def _layers(stage: Stage, stored: Stored) -> set[int]:
    """Layers with rows of a stage; empty for rows outside the layers."""
    everywhere = set(range(LAYERS))
    sparse = set().union(*(one.layers for place, one in stored.items() if EXPERT in place))
    of_stage = {Stage.LAYER: everywhere, Stage.DENSE: everywhere - sparse if sparse else set(), Stage.MOE: sparse}
    return of_stage.get(stage, set())


def _described(shape: tuple[int, ...], sizes: ModelSizes | None) -> str:
    """Format a shape with the names of sizes that match each extent."""
    if sizes is None:
        return str(list(shape))
    plain = replace(sizes, moe_layers=())
    known = [n for n in dir(plain) if not n.startswith("_") and isinstance(getattr(plain, n), int)]
    fits = [[n for n in known if getattr(plain, n) == extent and n not in ("tied", "num_layers")] for extent in shape]
    return f"{list(shape)}, axes {' x '.join(' or '.join(names) or '?' for names in fits)}"
