"""Low-rank adapters (LoRA, arXiv:2106.09685) as layout rows: an A and a B for each logical tensor, sharded like it.

If a tensor W [out, in] is split along its outputs, B [out, r] is split likewise and A [r, in] is whole. If W is split
along its inputs, A is split and B is whole. The layout of adapters follows from the model's layout alone: the same few
lines serve Megatron's grid, vLLM's fused shards and PEFT's files.

An embedding E [vocabulary, hidden] is a linear layer of one-hot inputs; its W is the transpose of E. A [r, vocabulary]
is split like E, B [hidden, r] is whole, and scale · (B·A)ᵀ is added to E.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod, sqrt
from typing import NamedTuple, Self

import torch

from megarl.config.lora import ALL_LINEAR, LoraConfig
from megarl.core.errors import ConfigError, first_of
from megarl.weights.architectures import Head, HFConfig, architecture
from megarl.weights.architectures.table import Op, Stage, hf_name
from megarl.weights.reshard.layout import AxisSpan, Layout, LayoutRow, Owners, Shape, Split

WEIGHT = ".weight"
SCORE = "score.weight"
"""Head of a critic or reward model."""
LORA = "lora"
"""First part of adapters' local names, after ``chunk<v>`` if there is one."""
EMBEDDING = "model.embed_tokens"
TOWER = "visual."
"""Prefix of names of a vision tower's layers."""
OUTSIDE = (Stage.FIRST, Stage.VISION, Stage.DEEPSTACK, Stage.LAST, Stage.MTP)
"""Stages that ``all-linear`` leaves out."""


class Factors(NamedTuple):
    """Adapter of one logical tensor W: it adds ``scale`` · B·A to W."""

    module: str
    """HF name of W without ``.weight``."""
    shape: Shape
    """(out, in) of W."""
    rank: int
    scale: float
    is_embedding: bool = False
    """The tensor is the transpose of W: [in, out]."""

    @property
    def a(self) -> str:
        """HF name of A [rank, in]."""
        return self._name("A")

    @property
    def b(self) -> str:
        """HF name of B [out, rank]."""
        return self._name("B")

    def _name(self, letter: str) -> str:
        return f"{self.module}.lora_embedding_{letter}" if self.is_embedding else f"{self.module}.lora_{letter}.weight"

    @property
    def leaf(self) -> str:
        """Last part of the module's name."""
        return self.module.rpartition(".")[2]


class LinearModule(NamedTuple):
    """A linear layer, or an embedding, that may have an adapter."""

    shape: Shape
    """(out, in)."""
    in_all: bool
    """``all-linear`` includes it."""
    is_embedding: bool = False
    """Its weight is [in, out]."""


def names_module(ending: str, module: str) -> bool:
    """True if a target in PEFT's list matches this module: its full name, or its last parts."""
    return module == ending or module.endswith(f".{ending}")


def matches_key(key: str, module: str) -> bool:
    """True if a key of ``rank_pattern`` or ``alpha_pattern`` matches this module. PEFT matches it as a regular
    expression against the full name or its last parts."""
    return re.match(rf"(.*\.)?({key})$", module) is not None


def saves_tensor(ending: str, tensor: str) -> bool:
    """True if ``ending``, from ``modules_to_save``, matches this tensor's module. PEFT matches suffixes, also within
    words: ``norm`` matches all norms, ``model.norm`` the last one."""
    module = tensor.rpartition(".")[0]
    while module and not module.endswith(ending):
        module = module.rpartition(".")[0]
    return bool(module)


def linear_modules(hf_config: HFConfig, head: Head = "lm") -> dict[str, LinearModule]:
    """HF name of each linear layer that may have an adapter, in layer order; the embedding comes first.

    If the output weight is tied, neither embedding nor output layer is included.
    """
    arch = architecture(hf_config, head)
    sizes = arch.sizes(hf_config)
    linear: dict[str, LinearModule] = {}
    for param in arch.params:
        if param.megatron.endswith("router.weight") or param.stage is Stage.MTP:
            continue
        if sizes.tied and param.stage in (Stage.FIRST, Stage.LAST):
            continue
        is_embedding = param.stage is Stage.FIRST
        # In an output layer's row the second part is the embedding, for models with tied weights.
        for part in param.hf[:1] if param.op is Op.TIED else param.hf:
            shape = part.shape(sizes)
            is_matrix = len(shape) == 2 and 0 not in shape and part.name.endswith(WEIGHT)
            if is_matrix and part.name != f"{TOWER}pos_embed{WEIGHT}":  # a table of positions
                module = LinearModule(shape[::-1] if is_embedding else shape, param.stage not in OUTSIDE, is_embedding)
                linear |= {
                    hf_name(part, occurrence).removesuffix(WEIGHT): module
                    for occurrence in arch.occurrences(param, sizes)
                    if occurrence.layer is None or occurrence.layer < sizes.num_layers
                }
    linear.pop("score", None)
    order = {name: place for place, name in enumerate(arch.tensors(hf_config))}
    return {module: linear[module] for module in sorted(linear, key=lambda module: order[module + WEIGHT])}


def factors_of(hf_config: HFConfig, lora: LoraConfig, head: Head = "lm") -> dict[str, Factors]:
    """HF name of each adapted tensor -> adapter, in layer order, without layers of ``modules_to_save``.

    Raises ConfigError for a target or pattern key that matches no linear layer of the model, and for a model with gated
    delta nets, short convolutions or layers whose heads differ.
    """
    arch = architecture(hf_config, head)
    linear, name = linear_modules(hf_config, head), arch.name
    if lora.is_used and arch.sizes(hf_config).recurrent_layers:
        raise ConfigError(
            f"model.lora.rank={lora.rank} with {name}: megarl has no adapters for gated delta nets, gated attention "
            "beside them and short convolutions; set model.lora.rank to 0"
        )
    if lora.is_used and arch.sizes(hf_config).global_layers:
        raise ConfigError(
            f"model.lora.rank={lora.rank} with {name}: megarl has no adapters for layers whose heads differ; set "
            "model.lora.rank to 0"
        )
    targets = [target for target in lora.targets if target != ALL_LINEAR]
    _check_named("targets", targets, list(linear), name, names_module)
    for key in ("rank_pattern", "alpha_pattern"):
        _check_named(key, list(getattr(lora, key)), list(linear), name, matches_key)

    def is_target(module: str) -> bool:
        if any(saves_tensor(ending, module + WEIGHT) for ending in lora.modules_to_save):
            return False
        if ALL_LINEAR in lora.targets and linear[module].in_all:
            return True
        return any(names_module(target, module) for target in targets)

    return {module + WEIGHT: _factors(module, linear[module], lora) for module in linear if is_target(module)}


def _factors(module: str, layer: LinearModule, lora: LoraConfig) -> Factors:
    rank = next((r for key, r in lora.rank_pattern.items() if matches_key(key, module)), lora.rank)
    alpha = next((a for key, a in lora.alpha_pattern.items() if matches_key(key, module)), lora.alpha)
    scale = alpha / (sqrt(rank) if lora.rslora else rank)
    return Factors(module, layer.shape, rank, scale, layer.is_embedding)


def _check_named(
    key: str, names: list[str], modules: list[str], model: str, matches: Callable[[str, str], bool]
) -> None:
    leaves = first_of(list(dict.fromkeys(module.rpartition(".")[2] for module in modules)), 20)
    for name in names:
        try:
            found = any(matches(name, module) for module in modules)
        except re.error as error:
            raise ConfigError(
                f"model.lora.{key} has {name!r}, which is no regular expression ({error}); name some of {leaves}"
            ) from error
        if not found:
            raise ConfigError(
                f"model.lora.{key} has {name!r}, which is no linear layer of {model}; name some of {leaves}"
            )


def saved_whole(tensors: Mapping[str, Shape], lora: LoraConfig) -> list[str]:
    """HF names of the tensors that ``modules_to_save`` trains. Raises ConfigError for a name without a match."""
    found: dict[str, None] = {}
    for ending in lora.modules_to_save:
        own = [name for name in tensors if saves_tensor(ending, name)]
        if not own:
            raise ConfigError(f"model.lora.modules_to_save has {ending!r}, which names no module of the model")
        found |= dict.fromkeys(own)
    return list(found)


def trained_whole(tensors: Mapping[str, Shape], lora: LoraConfig, head: Head) -> list[str]:
    """HF names of the base model's tensors that are trained with the adapters: ``saved_whole``, and the score head of a
    critic or reward model. Raises ConfigError as ``saved_whole`` does."""
    return list(dict.fromkeys([*saved_whole(tensors, lora), *([SCORE] if head == "score" else [])]))


class TrainedPart(NamedTuple):
    """Parameter counts of a model with adapters."""

    trained: int
    """Parameters of adapters and of fully trained tensors."""
    every: int
    """All parameters of the model and its adapters."""

    @classmethod
    def of(cls, hf_config: HFConfig, lora: LoraConfig, head: Head = "lm") -> Self:
        """Count parameters from shapes. Raises ConfigError as ``factors_of`` does."""
        tensors = architecture(hf_config, head).tensors(hf_config)
        factors = factors_of(hf_config, lora, head)
        added = sum(own.rank * sum(own.shape) for own in factors.values())
        whole = sum(prod(tensors[name]) for name in trained_whole(tensors, lora, head))
        return cls(added + whole, added + sum(map(prod, tensors.values())))

    def __str__(self) -> str:
        return f"{self.trained:,} of {self.every:,} parameters ({self.trained / self.every:.2%})".replace("%", " %")


def file_shapes(factors: Iterable[Factors]) -> dict[str, Shape]:
    """Shape of each A and B by its HF name."""
    tensors: dict[str, Shape] = {}
    for own in factors:
        tensors |= {own.a: (own.rank, own.shape[1]), own.b: (own.shape[0], own.rank)}
    return tensors


def file_layout(base: Layout, adapters: Layout, saved: Collection[str]) -> Layout:
    """Layout of all tensors in PEFT's files: the adapters, and the base model's tensors ``saved``.

    Raises ConfigError if Megatron fuses a saved tensor with unsaved ones.
    """
    rows = [row for row in base.rows if not set(saved).isdisjoint(row.parts)]
    for row in rows:
        if left := [part for part in row.parts if part not in saved]:
            one = next(part for part in row.parts if part in saved)
            names = [part.rpartition(".")[0] for part in (one, *left)]
            raise ConfigError(
                f"model.lora.modules_to_save has {names[0]}, which Megatron trains in one tensor with "
                f"{first_of(names[1:], 3)}; name all of them or none"
            )
    tensors = {**adapters.tensors, **{name: base.tensors[name] for name in dict.fromkeys(saved)}}
    return Layout(adapters.name, tensors, adapters.num_ranks, [*adapters.rows, *rows], base.dtypes)


def local_name(base: str, leaf: str, which: str) -> str:
    """Local name of an A or B (``which``), derived from the base tensor's local name."""
    chunk, _, rest = base.partition(".") if base.startswith("chunk") else ("", "", base)
    prefix = f"{chunk}.{LORA}" if chunk else LORA
    return f"{prefix}.{rest.removesuffix(WEIGHT)}.{leaf}.{which}"


def is_adapter(local: str) -> bool:
    """True for a local name of an A or B."""
    return LORA in local.split(".", 2)[:2]


def adapter_layout(base: Layout, factors: Mapping[str, Factors]) -> Layout:
    """Layout of the A's and B's of a model with the layout ``base``."""
    whole: dict[Owners, Owners] = {}

    def everyone(owners: Owners) -> Owners:
        if len(owners.ranks) == 1:
            return owners
        if owners not in whole:
            whole[owners] = Owners((tuple(sorted(chain(*owners.ranks))),))
        return whole[owners]

    rows: list[LayoutRow] = []
    for row in base.rows:
        for place, tensor in enumerate(row.parts):
            own = factors.get(tensor)
            if own is None:
                continue
            out, into = own.shape
            by_input = _by_input(row, own)
            cut = tuple(_of_part(split, place) for split in row.splits)
            uncut = everyone(row.owners)
            a, b = (own.rank, into), (out, own.rank)
            a_splits, b_splits = (cut, (_uncut(out),)) if by_input else ((_uncut(own.rank),), cut)
            a_owners, b_owners = (row.owners, uncut) if by_input else (uncut, row.owners)
            name = local_name(row.local, own.leaf, "a")
            rows.append(LayoutRow(name, (own.a,), a, int(by_input), a_splits, a_owners, row.stack, row.lead))
            name = local_name(row.local, own.leaf, "b")
            rows.append(LayoutRow(name, (own.b,), b, 0, b_splits, b_owners, row.stack, row.lead))
    return Layout(f"adapters of {base.name}", file_shapes(factors.values()), base.num_ranks, rows)


def _by_input(row: LayoutRow, own: Factors) -> bool:
    """True if a row splits W along its inputs."""
    return (row.axis == 1) != own.is_embedding


def _uncut(size: int) -> Split:
    return Split(size, size, (AxisSpan(0, 0, size, 0),))


def _of_part(split: Split, part: int) -> Split:
    """Share of one part alone: its elements concatenated, with padding if it is the only part."""
    spans, at = [], 0
    for number, low, high, _ in split.spans:
        if number == part:
            spans.append(AxisSpan(0, low, high, at))
            at += high - low
    padding = split.size - split.used
    return Split(at + padding, at, tuple(spans))


@dataclass(frozen=True)
class LocalAdapter:
    """Adapter of one logical tensor on one rank."""

    factors: Factors
    a: str
    """Local name of A."""
    b: str
    places: tuple[tuple[int, int], ...]
    """Ranges [begin, end) of base-tensor rows (embedding: columns) matching B's rows, in B's order; all if W is split
    along its inputs."""
    by_input: bool
    """W is split along its inputs."""
    lead: tuple[int, ...] = ()
    """Index of the tensor in a stack."""

    @property
    def rows(self) -> int:
        """Rows of B on this rank."""
        return sum(end - begin for begin, end in self.places)


def local_adapters(base: Layout, factors: Mapping[str, Factors], rank: int) -> dict[str, list[LocalAdapter]]:
    """Local name of each adapted base tensor of a rank -> its adapters, in the order of the tensor's parts."""
    found: dict[str, list[LocalAdapter]] = {}
    for row, share in base.rows_of(rank):
        for place, tensor in enumerate(row.parts):
            own = factors.get(tensor)
            if own is None:
                continue
            split = row.splits[share]
            by_input = _by_input(row, own)
            if by_input:
                places: tuple[tuple[int, int], ...] = ((0, own.shape[0]),)
            else:
                places = tuple((at, at + high - low) for part, low, high, at in split.spans if part == place)
                if split.used < split.size:
                    places = (*places, (split.used, split.size))
            a, b = (local_name(row.local, own.leaf, which) for which in "ab")
            found.setdefault(row.local, []).append(LocalAdapter(own, a, b, places, by_input, row.lead))
    return found


@dataclass(frozen=True)
class AdaptedModel:
    """A rank's tensors of a model with adapters."""

    own: Mapping[str, torch.Tensor]
    """Local name -> tensor of the base model."""
    factors: Mapping[str, torch.Tensor]
    """Local name -> A or B."""
    adapters: Mapping[str, list[LocalAdapter]]
    """Result of ``local_adapters``."""
    saved: frozenset[str] = frozenset()
    """Names in ``own`` that are trained too."""

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        """Local name -> tensor that training changes."""
        return {name: self.own[name] for name in self.own if name in self.saved} | dict(self.factors)

    def kept(self) -> AdaptedModel:
        """Return a copy with its trained tensors in host memory."""
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.trained.items()}
        own = {name: copies.get(name, tensor) for name, tensor in self.own.items()}
        return AdaptedModel(own, {name: copies[name] for name in self.factors}, self.adapters, self.saved)


class MergedTensors(Mapping[str, torch.Tensor]):
    """Local tensors of a model with merged adapters: W + scale · B·A in float32, rounded once to W's dtype.

    A merged tensor is computed on access, and the last few are cached.
    """

    KEPT = 2

    def __init__(self, model: AdaptedModel) -> None:
        self.model = model
        self.made: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        base, adapters = self.model.own[name], self.model.adapters.get(name)
        if adapters is None:
            return base
        if name not in self.made:
            while len(self.made) >= self.KEPT:
                self.made.pop(next(iter(self.made)))
            self.made[name] = merged(base, adapters, self.model.factors)
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.model.own)

    def __len__(self) -> int:
        return len(self.model.own)

    @property
    def unmerged(self) -> Mapping[str, torch.Tensor]:
        """Tensors of the same names and shapes, available without computation."""
        return self.model.own


class SeparateTensors(Mapping[str, torch.Tensor]):
    """Local tensors of a model, and A and scale · B of its adapters as separate tensors, as vLLM uses them."""

    def __init__(self, model: AdaptedModel) -> None:
        self.model = model
        self.scales = {each.b: each.factors.scale for group in model.adapters.values() for each in group}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.model.factors:
            return self.model.own[name]
        factor, scale = self.model.factors[name], self.scales.get(name)
        return factor if scale is None else (factor.to(torch.float32) * scale).to(factor.dtype)

    def __iter__(self) -> Iterator[str]:
        return chain(self.model.own, self.model.factors)

    def __len__(self) -> int:
        return len(self.model.own) + len(self.model.factors)

    @property
    def unmerged(self) -> Mapping[str, torch.Tensor]:
        """Tensors of the same names and shapes, available without computation."""
        return {**self.model.own, **self.model.factors}


Adapted = MergedTensors | SeparateTensors


def beside(base: Layout, adapters: Layout) -> Layout:
    """Layout of a model's tensors and its adapters."""
    tensors = {**base.tensors, **adapters.tensors}
    return Layout(base.name, tensors, base.num_ranks, (*base.rows, *adapters.rows), base.dtypes)


def rewritten(destination: Layout, factors: Mapping[str, Factors], saved: Iterable[str] = ()) -> set[str]:
    """Logical tensors to send again after changes in ``factors`` and ``saved``: all in the same engine modules."""

    def module(local: str) -> str:
        return local.rpartition(".")[0]

    changed = {*factors, *saved}
    modules = {module(row.local) for row in destination.rows if not changed.isdisjoint(row.parts)}
    return {part for row in destination.rows if module(row.local) in modules for part in row.parts}


@dataclass(frozen=True)
class AdapterDelivery:
    """Delivery of adapters to engines: merged into the model's tensors, or as separate tensors."""

    factors: Mapping[str, Factors]
    saved: tuple[str, ...]
    """HF names of the base model's tensors that are trained too."""
    separate: bool

    @classmethod
    def of(cls, hf_config: HFConfig, lora: LoraConfig, *, separate: bool) -> AdapterDelivery:
        """Build from settings alone, so that both sides get the same result."""
        tensors = architecture(hf_config).tensors(hf_config)
        return cls(factors_of(hf_config, lora), tuple(saved_whole(tensors, lora)), separate)

    def layout(self, base: Layout) -> Layout:
        """Layout of all tensors on one side."""
        return beside(base, adapter_layout(base, self.factors)) if self.separate else base

    def changed(self, destination: Layout) -> set[str]:
        """Logical tensors of an engine's layout that training changes, and tensors written together with them."""
        if not self.separate:
            return rewritten(destination, self.factors, self.saved)
        own = {name for each in self.factors.values() for name in (each.a, each.b)}
        return own | rewritten(destination, {}, self.saved)


@torch.no_grad()
def merged(
    base: torch.Tensor, adapters: list[LocalAdapter], factors: Mapping[str, torch.Tensor], sign: float = 1.0
) -> torch.Tensor:
    """Copy of a local tensor, in its dtype, with ``sign`` times its adapters added in float32."""
    whole = base.to(torch.float32, copy=True)
    for adapter in adapters:
        a, b = (factors[name][adapter.lead].to(whole) for name in (adapter.a, adapter.b))
        into = whole[adapter.lead]
        # Computed transposed, in the memory order of an embedding.
        into, product = (into.t(), (a.t() @ b.t()).t()) if adapter.factors.is_embedding else (into, b @ a)
        at = 0
        for begin, end in adapter.places:
            into[begin:end].add_(product[at : at + end - begin], alpha=sign * adapter.factors.scale)
            at += end - begin
    return whole.to(base.dtype)
