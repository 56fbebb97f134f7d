"""Known rows that match a model's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megarl.core.errors import ArchitectureError
from megarl.weights.architectures import ARCHITECTURES, blocks
from megarl.weights.architectures.table import (
    COMMON_KEYS,
    EXPERT,
    Architecture,
    BaseNames,
    Fused,
    JoinedTensor,
    LayerRules,
    ModelSizes,
    MultiplierKeys,
    NormRules,
    Op,
    Param,
    RouterRules,
    Shape,
    Stage,
)
from megarl.weights.checkpoint.formats.hf_files import places, places_of_parts
from megarl.weights.drafts.other_names import Renamed, placed_norms, renamed
from megarl.weights.drafts.rules import ATTENTION, layer_rules, multiplier_keys, other_keys
from megarl.weights.drafts.tiny import Stored, place_in_table

_GROUPS = {name: value for name, value in vars(blocks).items() if name.isupper() and isinstance(value, tuple)}
ROW_GROUPS: Mapping[str, tuple[Param, ...]] = {n: v for n, v in _GROUPS.items() if isinstance(v[0], Param)}
VLLM_GROUPS: Mapping[str, tuple[Fused, ...]] = {n: v for n, v in _GROUPS.items() if isinstance(v[0], Fused)}
"""Name in ``blocks`` -> shared rows."""
_SINGLE = {n: (v,) for n, v in vars(blocks).items() if n.isupper() and isinstance(v, JoinedTensor)}
JOINED_GROUPS: Mapping[str, tuple[JoinedTensor, ...]] = {
    **_SINGLE,
    **{n: v for n, v in _GROUPS.items() if isinstance(v[0], JoinedTensor)},
}
"""Name in ``blocks`` -> tensors of files that contain several logical ones."""

Place = tuple[str, int]
"""Name of a tensor and its layer; ``BESIDE`` for tensors outside the layers."""
BESIDE = -1

_NORM_PAIRS = (
    ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
    ("self_attn_bda.norm.weight", "mlp_bda.norm.weight"),
)
"""Norms of a layer that Megatron has together."""


class RowFit(NamedTuple):
    """Rows whose tensors a model has, in the shapes and layers that they say."""

    rows: tuple[Param, ...]
    joined: tuple[JoinedTensor, ...]
    places: frozenset[Place]


@dataclass
class Draft:
    """Rows found for a model, and tensors without a row."""

    name: str
    stored: Stored
    tower: bool = False
    """True if the model has a vision tower beside the language model."""
    groups: dict[str, tuple[Param, ...]] = field(default_factory=dict)
    """Rows of ``blocks``, by their names there."""
    borrowed: dict[str, list[Param]] = field(default_factory=dict)
    """Where a row comes from -> rows that ``blocks`` does not have."""
    joined: list[JoinedTensor] = field(default_factory=list)
    vllm: dict[str, tuple[Fused, ...]] = field(default_factory=dict)
    vllm_own: list[Fused] = field(default_factory=list)
    """vLLM's rows for tensors that are in ``borrowed``, under vLLM's usual names."""
    unplaced: dict[str, str] = field(default_factory=dict)
    """Name of a tensor without a row -> its shape, with names of sizes that match."""
    missing: list[str] = field(default_factory=list)
    """Tensors that the draft expects but the model lacks."""
    refused: str = ""
    """Error message of the draft for the configuration."""
    questions: list[str] = field(default_factory=list)
    """Facts that neither names, shapes nor probes decide."""
    fixed: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Sizes under unusual keys of config.json."""
    megatron: dict[str, Any] = field(default_factory=dict)
    layers: LayerRules = LayerRules()
    multipliers: MultiplierKeys = MultiplierKeys()
    norms: NormRules = NormRules()
    router: RouterRules = RouterRules()

    def rows(self) -> tuple[Param, ...]:
        """Return all rows."""
        return tuple(row for group in (*self.groups.values(), *self.borrowed.values()) for row in group)

    def architecture(self) -> Architecture:
        """Return the draft as a table."""
        inner = any(one.prefixed for one in self.stored.values())
        return Architecture(
            self.name,
            self.name,
            self.rows(),
            (*(row for group in self.vllm.values() for row in group), *self.vllm_own),
            joined=tuple(self.joined),
            fixed=dict(self.fixed),
            megatron=dict(self.megatron),
            vllm_text="language_model." if self.tower else "",
            base_names=replace(blocks.INNER_NAMES, in_files=inner) if self.tower else BaseNames(),
            layers=self.layers,
            multipliers=self.multipliers,
            norms=self.norms,
            router=self.router,
            keys=dict(self.keys),
        )


def draft_of(name: str, stored: Stored, config: Mapping[str, Any], norms: Mapping[str, str]) -> Draft:
    """Find rows for every tensor: shared rows of ``blocks``, then those under other names, then rows of one family.

    Args:
        name: ``model_type``.
        config: Configuration of the tiny model with the tensors ``stored``; a language model's keys at the top.
        norms: Name of a norm in its layer -> Megatron's name for its place (``probes.norm_places``).
    """
    layers, keys = layer_rules(config), other_keys(config)
    match = Matcher(stored, config, Architecture(name, name, (), keys=keys, layers=layers))
    fitting = {group: fit for group, rows in _groups() if (fit := match.fit(rows, _known_joined()))}
    covers = [_cover(match.everything, {first: fitting[first]} | fitting) for first in fitting]
    chosen, left = min(
        covers,
        key=lambda cover: (len(cover[1]), sum("[" in group for group in cover[0])),
        default=(dict[str, RowFit](), match.everything),
    )
    groups = {group: fit.rows for group, fit in chosen.items()}
    if config.get("tie_word_embeddings") and "OUTPUT" not in groups:  # a row without a tensor of its own
        groups["OUTPUT[1:2]"] = blocks.OUTPUT[1:2]
    draft = Draft(name, stored, "vision_config" in config, groups, layers=layers)
    fits = [*chosen.values()]
    for origin, rows, joined, vllm in (
        *renamed(stored),
        *placed_norms(stored, {place for place, _ in left}, norms),
        *_own_rows(),
    ):
        fit = match.fit(rows, joined)
        if fit and fit.places <= left:
            draft.borrowed.setdefault(origin, []).extend(rows)
            draft.vllm_own += vllm
            fits.append(fit)
            left -= fit.places
    draft.joined = list(dict.fromkeys(one for fit in fits for one in fit.joined))
    axes = {axis for row in draft.rows() for part in row.hf for axis in part.axes.split()}
    draft.keys = {size: own for size, own in keys.items() if size in axes or size == "ffn"}
    draft.multipliers, draft.norms = multiplier_keys(config), _norms(draft)
    draft.vllm = _vllm(draft)
    for norm, place in norms.items():
        named = [row.megatron for row in draft.rows() if row.hf[0].name == norm and row.megatron != place]
        draft.questions += [
            f"the place of {norm}: {place} by the modules around it, {other} by its name" for other in named
        ]
    _check(draft, config, left)
    return draft


def _norms(draft: Draft) -> NormRules:
    """Derive the norms' places from the rows."""
    names = {row.megatron for row in draft.rows()}
    return NormRules(
        before="input_layernorm.weight" in names,
        after="self_attn_bda.norm.weight" in names,
        whole_width="WHOLE_QK_NORM" in draft.groups,
        after_rope="QK_NORM_AFTER_ROPE" in draft.groups,
    )


def _vllm(draft: Draft) -> dict[str, tuple[Fused, ...]]:
    """vLLM's groups for the rows; those that vLLM's code alone decides become questions."""
    logicals, grouped = {id(part) for row in draft.rows() for part in row.hf}, any(one.grouped for one in draft.joined)
    found = dict[str, tuple[Fused, ...]]()
    for group, rows in sorted(VLLM_GROUPS.items(), key=lambda item: all(row.op is not Op.GROUPED for row in item[1])):
        if not all(id(part) in logicals for row in rows for part in row.hf):
            continue
        if any(row.shard for row in rows):
            draft.questions.append(f"whether each vLLM worker has a part of the norms; if so add *{group} to vllm")
        elif grouped or not any(row.op is Op.GROUPED for row in rows):
            taken = {row.vllm for others in found.values() for row in others}
            found |= {} if any(row.vllm in taken for row in rows) else {group: rows}
    return found


def _check(draft: Draft, config: Mapping[str, Any], left: frozenset[Place]) -> None:
    """Compare the whole draft with the tensors. Record tensors without a row, and rows without a tensor."""
    sizes = None
    try:
        arch = draft.architecture()
        sizes = arch.sizes(config)
        wanted = {
            place_in_table(place.stored): place.whole for place in places(arch, config, arch.tensors(config)).values()
        }
    except ArchitectureError as error:
        draft.refused, wanted = str(error), {}
    several = {name: [one.shape, *sorted(one.others)] for name, one in draft.stored.items() if one.others}
    if several:
        name, shapes = next(iter(several.items()))
        draft.refused = (
            f"{len(several)} tensors have other shapes in some layers, the first is {name} with {shapes}: write rows "
            "for each kind of layer by hand"
        )
    for (place, layer), shape in wanted.items():
        one = draft.stored.get(place)
        if one is None or one.shape != shape or (layer is not None and layer not in one.layers):
            draft.missing.append(f"{place} {list(shape)}" + ("" if layer is None else f" in layer {layer}"))
    names = {row.megatron for row in draft.rows()}
    there = [[name in names for name in pair] for pair in _NORM_PAIRS]
    if any(one != other for one, other in there) or not any(one for one, _ in there):
        draft.questions.append("where norms stand: no row has all of them before, or after, attention and MLP")
    draft.unplaced = {
        place: _described(draft.stored[place].shape, sizes) for place in sorted({place for place, _ in left})
    }


class Matcher:
    """Compares rows with a model's tensors.

    Args:
        arch: A table without rows, with the keys and rules of the model.
    """

    def __init__(self, stored: Stored, config: Mapping[str, Any], arch: Architecture) -> None:
        self._stored, self._config, self._arch = stored, config, arch
        self._experts = next((config[key] for key in COMMON_KEYS["experts"] if config.get(key) is not None), None)
        self.everything = frozenset((name, layer) for name, one in stored.items() for layer in one.layers or {BESIDE})

    def fit(self, rows: Iterable[Param], joined: Iterable[JoinedTensor]) -> RowFit | None:
        """Return the rows' tensors; ``None`` unless there are some, all in their shapes and layers.

        Args:
            joined: Candidates for tensors of the files that contain several of the rows' tensors.
        """
        rows, joined = tuple(rows), tuple(joined)
        tower = tuple(replace(row, stage=Stage.VISION) for row in rows if row.in_tower)  # for the tower's sizes
        arch = replace(self._arch, params=(*rows, *tower))
        try:
            sizes = arch.sizes(self._config)
        except ArchitectureError:
            return None
        covered, used = set[Place](), list[JoinedTensor]()
        for row in rows:
            found = self._row(row, joined, arch, sizes)
            if found is None:
                return None
            covered |= found.places
            used += found.joined
        return RowFit(rows, tuple(used), frozenset(covered)) if covered else None

    def _row(
        self, row: Param, joined: tuple[JoinedTensor, ...], arch: Architecture, sizes: ModelSizes
    ) -> RowFit | None:
        layers = self._layers(row.stage, sizes)
        parts = row.hf[:1] if row.op is Op.TIED else row.hf
        names = {part.name for part in parts}
        used = {
            one.name: one
            for one in joined
            if one.name in self._stored and {*one.parts} <= names and self._whole(arch, one) == self._shape(one.name)
        }
        inside = {part for one in used.values() for part in one.parts}
        wanted = {name: self._shape(name) for name in used}
        wanted |= {part.name: part.shape(sizes) for part in parts if part.name not in inside}
        covered = set[Place]()
        for name, shape in wanted.items():
            one = self._stored.get(name)
            if one is None:
                if 0 not in shape and not (row.op is Op.TIED and sizes.tied):
                    return None
            elif one.shape != shape or layers is None or not (layers <= one.layers if layers else not one.layers):
                return None
            else:
                covered |= {(name, layer) for layer in layers or {BESIDE}}
        return RowFit((row,), tuple(used.values()), frozenset(covered))

    def _shape(self, name: str) -> Shape:
        return self._stored[name].shape

    def _whole(self, arch: Architecture, one: JoinedTensor) -> Shape:
        return next(iter(places_of_parts(replace(arch, joined=(one,)), self._config).values())).whole

    def _layers(self, stage: Stage, sizes: ModelSizes) -> set[int] | None:
        """Layers with rows of a stage: empty for rows outside the layers, ``None`` if the model has no such layers."""
        everywhere = set(range(sizes.num_layers))
        if stage in (Stage.FIRST, Stage.VISION, Stage.DEEPSTACK, Stage.LAST):
            return set()
        sparse = set[int]().union(*(one.layers for name, one in self._stored.items() if self._of_experts(name)))
        kinds = self._config.get("layer_types") or ()
        attention = {layer for layer, kind in enumerate(kinds) if kind in ATTENTION}
        of_stage = {
            Stage.LAYER: everywhere,
            Stage.DENSE: everywhere - sparse if sparse else set(),
            Stage.MOE: sparse,
            Stage.ATTENTION: attention if attention < everywhere else set(),
            Stage.DELTA: set(sizes.delta_layers),
            Stage.CONVOLUTION: set(sizes.convolution_layers),
        }
        return of_stage.get(stage) or None

    def _of_experts(self, name: str) -> bool:
        """True for a tensor of one expert, or a stack of all experts' matrices."""
        shape = self._shape(name)
        return EXPERT in name or (len(shape) == 3 and shape[0] == self._experts)


def _cover(everything: frozenset[Place], fitting: Mapping[str, RowFit]) -> tuple[dict[str, RowFit], frozenset[Place]]:
    """Choose, in order, each group with only uncovered tensors. Return these groups, and the tensors without a row."""
    chosen, left = dict[str, RowFit](), everything
    for group, fit in fitting.items():
        if fit.places <= left:
            chosen[group] = fit
            left -= fit.places
    return chosen, left


def _groups() -> Iterator[tuple[str, tuple[Param, ...]]]:
    """Yield the named groups of rows, largest first. Then yield single rows, rows of all layers last."""
    yield from sorted(ROW_GROUPS.items(), key=lambda group: (-len(group[1]), group[0]))
    alone = [(f"{group}[{i}:{i + 1}]", (row,)) for group, rows in ROW_GROUPS.items() for i, row in enumerate(rows)]
    yield from sorted(alone, key=lambda group: group[1][0].stage is Stage.LAYER)


def _known_joined() -> tuple[JoinedTensor, ...]:
    known = (*JOINED_GROUPS.values(), *(arch.joined for arch in ARCHITECTURES.values()))
    return tuple(dict.fromkeys(one for group in known for one in group))


def _own_rows() -> Iterator[Renamed]:
    """Yield the rows that only single families have."""
    shared = {id(row) for rows in ROW_GROUPS.values() for row in rows}
    for family, arch in ARCHITECTURES.items():
        for row in arch.params:
            if id(row) not in shared:
                vllm = tuple(one for one in arch.vllm if {*map(id, one.hf)} <= {*map(id, row.hf)})
                yield Renamed(f"as {family} has it", (row,), arch.joined, vllm)


def _described(shape: tuple[int, ...], sizes: ModelSizes | None) -> str:
    """Format a shape with the names of sizes that match each extent."""
    if sizes is None:
        return str(list(shape))
    known = [n for n in dir(sizes) if not n.startswith("_") and isinstance(getattr(sizes, n), int)]
    fits = [[n for n in known if getattr(sizes, n) == extent and n not in ("tied", "num_layers")] for extent in shape]
    return f"{list(shape)}, axes {' x '.join(' or '.join(names) or '?' for names in fits)}"
