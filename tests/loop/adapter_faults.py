"""Faults of the weight syncs of a model with adapters, each put into one place of the real code.

Five kinds are known from other systems: an adapter that is never delivered, that is delivered under a name that matches
nothing, that is scaled twice, that is merged in bfloat16, that is resumed without its optimizer
(``tests/parallel/test_lora_resumes.py``). Their neighbours are here too.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.model_loader.reload import layerwise
from vllm.v1.engine.input_processor import InputProcessor

from megarl.engines.sync import writer
from megarl.engines.sync.lora import AdapterWriter
from megarl.engines.sync.writer import SliceWriter
from megarl.learn.training.optimizer import whole_digests
from megarl.weights.reshard import adapters
from megarl.weights.reshard.adapters import AdapterDelivery, LocalAdapter, MergedTensors, SeparateTensors, is_adapter
from megarl.weights.reshard.buckets import HEADER
from tests.loop import sync_faults
from tests.loop.sync_faults import Lab, Weights

Way = Literal["merged", "separate"]
AdapterWeights = Weights
"""Its shards are ``MergedTensors`` or ``SeparateTensors``."""
Factors = Mapping[str, torch.Tensor]
Fault = Callable[["AdapterLab", random.Random], AbstractContextManager[None]]


@dataclass
class AdapterLab(Lab):
    """A lab of a model with adapters."""

    trial: Weights = None  # type: ignore[assignment]
    """Test adapter."""
    begun: Weights = None  # type: ignore[assignment]
    """Weights of a job that begins: every B is zero."""
    way: Way = "merged"

    @property
    def adapters(self) -> AdapterWriter:
        """The worker's, of an engine with adapters of its own."""
        found: AdapterWriter = self.engine.receiver.adapted.adapters
        return found

    def rank_of(self, tensors: Any) -> int:
        """Trainer rank of tensors that are sent."""
        return next(r for w in (self.new, self.trial) for r, shard in enumerate(w.shards) if shard is tensors)


# --- What a trainer sends of an engine's own adapters.


def sent(change: Callable[[AdapterLab, SeparateTensors, str, torch.Tensor, random.Random], torch.Tensor]) -> Fault:
    """``change`` what is sent of A's and B's."""

    @contextmanager
    def fault(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
        whole = SeparateTensors.__getitem__

        def changed(self: SeparateTensors, name: str) -> torch.Tensor:
            found = whole(self, name)
            return change(lab, self, name, found, rng) if is_adapter(name) else found

        with mock.patch.object(SeparateTensors, "__getitem__", changed):
            yield

    return fault


def sent_b(change: Callable[[SeparateTensors, LocalAdapter, torch.Tensor], torch.Tensor]) -> Fault:
    """``change`` what is sent of B's."""

    def of_b(lab: AdapterLab, self: SeparateTensors, name: str, found: torch.Tensor, rng: random.Random) -> Any:
        own = next((each for group in self.model.adapters.values() for each in group if each.b == name), None)
        return found if own is None else change(self, own, found)

    return sent(of_b)


def zeroed_b(*, one: bool) -> Fault:
    """B is zero on its way, in all layers or in one."""
    return sent_b(lambda self, own, b: b if one and "layers.1.mlp.linear_fc2" not in own.b else torch.zeros_like(b))


def scaled_b(factor: Callable[[LocalAdapter], float]) -> Fault:
    """B is multiplied once more."""
    return sent_b(lambda self, own, b: b * factor(own))


def other_name(rename: Callable[[str], str], which: str) -> Fault:
    """An A or B is sent under another's name."""

    def change(lab: AdapterLab, self: SeparateTensors, name: str, found: torch.Tensor, rng: random.Random) -> Any:
        other = rename(name)
        if not name.endswith(which) or other not in self.model.factors:
            return found
        scale = self.scales.get(other, 1.0)
        return self.model.factors[other] * scale

    return sent(change)


def exchanged(first: str, second: str) -> Callable[[str], str]:
    """Exchange two words of a name."""
    return lambda name: "".join({first: second, second: first}.get(part, part) for part in _split(name, first, second))


def _split(name: str, first: str, second: str) -> list[str]:
    return re.split(f"({re.escape(first)}|{re.escape(second)})", name)


def earlier(which: str) -> Fault:
    """A's or B's of the sync before are sent, beside the others of this one."""

    def change(lab: AdapterLab, self: SeparateTensors, name: str, found: torch.Tensor, rng: random.Random) -> Any:
        if not name.endswith(which):
            return found
        old: SeparateTensors = lab.old.shards[lab.rank_of(self)]  # type: ignore[assignment]
        return old.model.factors[name] * self.scales.get(name, 1.0)

    return sent(change)


def of_other_rank(lab: AdapterLab, self: SeparateTensors, name: str, found: torch.Tensor, rng: random.Random) -> Any:
    """Rank 1 sends rank 0's share of every B that is cut."""
    weights = lab.trial if any(self is shard for shard in lab.trial.shards) else lab.new
    mine = lab.rank_of(self)
    other: Any = weights.shards[0]
    if mine == 0 or not name.endswith(".b") or other.model.factors[name].shape != found.shape:
        return found
    return other.model.factors[name] * self.scales[name]


def narrow(which: str) -> Fault:
    """A's or B's were bfloat16 for a moment."""

    def change(lab: AdapterLab, self: SeparateTensors, name: str, found: torch.Tensor, rng: random.Random) -> Any:
        return found.bfloat16().to(found.dtype) if name.endswith(which) else found

    return sent(change)


# --- What a trainer merges.

Merge = Callable[..., torch.Tensor]


def merging(change: Callable[[Merge, torch.Tensor, list[LocalAdapter], Factors], torch.Tensor]) -> Fault:
    """Merge otherwise."""

    @contextmanager
    def fault(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
        _forget_merged(lab)
        whole = adapters.merged
        with mock.patch.object(adapters, "merged", lambda base, own, factors: change(whole, base, own, factors)):
            yield
        _forget_merged(lab)

    return fault


def _forget_merged(lab: AdapterLab) -> None:
    for weights in (lab.old, lab.new, lab.trial, lab.begun):
        for shard in weights.shards:
            shard.made.clear()  # type: ignore[attr-defined]


def rescaled(scale: Callable[[LocalAdapter], float]) -> Fault:
    """Merge with other scales."""

    def change(merge: Merge, base: torch.Tensor, own: list[LocalAdapter], factors: Factors) -> torch.Tensor:
        return merge(base, [replace(a, factors=a.factors._replace(scale=scale(a))) for a in own], factors)

    return merging(change)


def renamed(rename: Callable[[str], str], which: str) -> Fault:
    """Merge A's or B's of other names."""

    def change(merge: Merge, base: torch.Tensor, own: list[LocalAdapter], factors: Factors) -> torch.Tensor:
        def other(name: str) -> str:
            to = rename(name)
            return to if to in factors and factors[to].shape == factors[name].shape else name

        return merge(base, own, {**factors, **{getattr(a, which): factors[other(getattr(a, which))] for a in own}})

    return merging(change)


def merged_in_bf16(merge: Merge, base: torch.Tensor, own: list[LocalAdapter], factors: Factors) -> torch.Tensor:
    """W + scale · B·A in bfloat16."""
    narrowed = {name: tensor.bfloat16() for name, tensor in factors.items()}
    whole = base.bfloat16()
    for a in own:
        product, at = narrowed[a.b] @ narrowed[a.a] * a.factors.scale, 0
        for begin, end in a.places:
            whole[begin:end] += product[at : at + end - begin]
            at += end - begin
    return whole.to(base.dtype)


def added_in_bf16(merge: Merge, base: torch.Tensor, own: list[LocalAdapter], factors: Factors) -> torch.Tensor:
    """W in float32, and B·A in bfloat16."""
    return merge(base, own, {name: tensor.bfloat16().float() for name, tensor in factors.items()})


def of_earlier(lab: AdapterLab, rng: random.Random) -> AbstractContextManager[None]:
    """Merged tensors of the sync before are sent."""
    whole = MergedTensors.__getitem__

    def stale(self: MergedTensors, name: str) -> torch.Tensor:
        if name in self.model.adapters and self in lab.new.shards:
            return whole(lab.old.shards[lab.rank_of(self)], name)  # type: ignore[arg-type]
        return whole(self, name)

    return mock.patch.object(MergedTensors, "__getitem__", stale)  # type: ignore[return-value]


def earlier_merged(which: Literal["a", "b"]) -> Fault:
    """A's or B's of the sync before are merged with the others of this one."""

    @contextmanager
    def fault(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
        old: dict[int, Any] = {
            id(new.model.factors): before.model.factors  # type: ignore[attr-defined]
            for new, before in zip(lab.new.shards, lab.old.shards, strict=True)
        }

        def change(merge: Merge, base: torch.Tensor, own: list[LocalAdapter], factors: Factors) -> torch.Tensor:
            before = old.get(id(factors), factors)
            return merge(base, own, {**factors, **{getattr(a, which): before[getattr(a, which)] for a in own}})

        with merging(change)(lab, rng):
            yield

    return fault


# --- What a trainer has, and what it delivers of it.


@contextmanager
def base_changed(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
    """Something writes into the frozen model."""
    rank = rng.randrange(len(lab.new.shards))
    model: Any = lab.new.shards[rank].model  # type: ignore[attr-defined]
    tensor = model.own[rng.choice(sorted(model.own.keys() - model.saved))]
    before = tensor.clone()
    tensor.view(-1)[rng.randrange(tensor.numel())] += 1e-6
    tensor.view(-1)[:8] += 1e-6
    yield
    tensor.copy_(before)


@contextmanager
def untried(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
    """The trial of an engine is left out."""
    with mock.patch.object(lab.ranks.publishers[0], "untried", lambda: False):
        yield


def undelivered(chosen: Callable[[str], bool], *, engine_too: bool = False) -> Fault:
    """Deliver nothing of the tensors ``chosen`` after the first sync; the engine's plan says so too or not."""

    @contextmanager
    def fault(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
        whole = AdapterDelivery.changed

        def fewer(self: AdapterDelivery, destination: Any) -> set[str]:
            dropped = {name for name in whole(self, destination) if chosen(name)}
            together = {part for row in destination.rows if not dropped.isdisjoint(row.parts) for part in row.parts}
            return whole(self, destination) - together

        with mock.patch.object(AdapterDelivery, "changed", fewer), ExitStack() as stack:
            for publisher in lab.ranks.publishers:
                stack.enter_context(mock.patch.object(publisher, "changes", {}))
            if engine_too:
                receiver = lab.engine.receiver
                plan = receiver.plans["all"]
                fewer_plan = plan.only(
                    fewer(lab.ranks.publishers[0].connection.adapters, plan.destination).__contains__
                )
                stack.enter_context(mock.patch.dict(receiver.plans, {"changed": fewer_plan}))
                locals_ = [n for n in fewer_plan.destination.local_shapes(0) if not is_adapter(n)]
                stack.enter_context(mock.patch.object(receiver.adapted, "changed", locals_))
            yield

    return fault


@contextmanager
def lost_base(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
    """The engine has lost its weights, and the trainer does not know."""
    lab.engine.receiver.lose_weights()
    yield


@contextmanager
def engine_base_changed(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
    """The engine's memory of what is never sent again changes."""
    parameters = dict(lab.engine.model.named_parameters())
    name = rng.choice([n for n in parameters if "embed_tokens" in n or "input_layernorm" in n or "k_norm" in n])
    parameters[name].data.view(-1)[3] += 1e-6
    yield


# --- What an engine does with adapters of its own.


def copied(*, one: bool) -> Fault:
    """A's and B's are written into copies that nothing reads."""

    @contextmanager
    def fault(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
        whole, chosen = AdapterWriter.tensor, rng.choice(sorted(lab.adapters.shapes))

        def tensor(self: AdapterWriter, name: str) -> torch.Tensor:
            found = whole(self, name)
            return found.clone() if not one or name == chosen else found

        with mock.patch.object(AdapterWriter, "tensor", tensor):
            yield

    return fault


@contextmanager
def no_layer(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
    """A name stands for a LoRA layer that the model does not have."""
    places, name = lab.adapters.places, rng.choice(sorted(lab.adapters.shapes))
    layer = copy.copy(places[name].layer)
    layer.lora_a_stacked = tuple(t.clone() for t in layer.lora_a_stacked)
    layer.lora_b_stacked = tuple(t.clone() for t in layer.lora_b_stacked)
    with mock.patch.dict(
        places, {n: p._replace(layer=layer) for n, p in places.items() if p.layer is places[name].layer}
    ):
        yield


@contextmanager
def moved_buffers(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
    """A layer's buffers are other memory than at the start."""
    layer = rng.choice(list(lab.adapters.places.values())).layer
    before = layer.lora_a_stacked
    layer.lora_a_stacked = tuple(t.clone() for t in before)
    yield
    for old, new in zip(before, layer.lora_a_stacked, strict=True):
        old.copy_(new)
    layer.lora_a_stacked = before


def places_exchanged(rename: Callable[[str], str]) -> Fault:
    """The worker takes an A and B for another's of the same shape."""

    @contextmanager
    def fault(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
        places, shapes = lab.adapters.places, lab.adapters.shapes
        other = {
            name: places[rename(name)]
            for name in shapes
            if rename(name) != name and shapes.get(rename(name)) == shapes[name]
        }
        assert other
        with mock.patch.dict(places, other):
            yield

    return fault


def written_over(change: Callable[[torch.Tensor, Sequence[int]], None]) -> Fault:
    """The buffer of one A or B is changed as an update ends."""

    @contextmanager
    def fault(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
        finish = AdapterWriter.finish
        name = rng.choice([n for n, shape in sorted(lab.adapters.shapes.items())])

        def then(self: AdapterWriter) -> None:
            finish(self)
            change(self.places[name].buffer(0), self.shapes[name])

        with mock.patch.object(AdapterWriter, "finish", then):
            yield

    return fault


def _pad(buffer: torch.Tensor, shape: Sequence[int]) -> None:
    buffer[shape[0] :], buffer[:, shape[1] :] = 0.5, 0.5


def _narrow(buffer: torch.Tensor, shape: Sequence[int]) -> None:
    buffer.copy_(buffer.bfloat16())
    buffer[0, 0] += 1e-6  # a B of zeros has nothing to round


@contextmanager
def no_slot(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
    """vLLM has dropped the adapter from its slot."""
    manager, finish = lab.adapters.manager, AdapterWriter.finish
    before = list(manager.lora_index_to_id)

    def then(self: AdapterWriter) -> None:
        finish(self)
        manager.lora_index_to_id[:] = [None] * len(before)

    with mock.patch.object(AdapterWriter, "finish", then):
        yield
    manager.lora_index_to_id[:] = before


@contextmanager
def unrequested(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
    """Requests do not ask for the adapter."""
    plain: Any = InputProcessor.process_inputs.__wrapped__  # type: ignore[attr-defined]
    with mock.patch.object(InputProcessor, "process_inputs", plain):
        yield


def kernel(changed: Callable[[Callable[..., None], Any, Any, torch.Tensor, float], float | None]) -> Fault:
    """The kernel computes with another scale; None: not at all."""

    @contextmanager
    def fault(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
        whole: Any = PunicaWrapperCPU.add_lora_linear

        def compute(self: Any, y: Any, x: Any, a: Any, b: Any, scale: float, *rest: Any, **kwargs: Any) -> None:
            other = changed(whole, self, y, x, scale)
            if other is not None:
                whole(self, y, x, a, b, other, *rest, **kwargs)

        with mock.patch.object(PunicaWrapperCPU, "add_lora_linear", compute):
            yield

    return fault


@contextmanager
def one_layer_alone(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
    """One layer computes without its adapter."""
    layer = rng.choice([place.layer for place in lab.adapters.places.values()])
    base = layer.base_layer
    with mock.patch.object(layer, "apply", lambda x, bias=None: base.quant_method.apply(base, x, bias)):
        yield


# --- What an engine does with merged weights.


@contextmanager
def rounded_by_engine(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
    """The engine rounds what it was given to bfloat16."""
    pack = SliceWriter.pack

    def narrow_first(self: SliceWriter, module: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data.copy_(parameter.data.bfloat16())
        pack(self, module)

    with mock.patch.object(SliceWriter, "pack", narrow_first):
        yield


@contextmanager
def kept_layer(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
    """One adapted layer keeps its old tensors, as if its new ones had been packed."""
    owner = lab.engine.receiver.writer.owner
    module, _ = owner[rng.choice(sorted(name for name in owner if "_proj" in name))]
    process = layerwise._layerwise_process

    def keep(layer: Any, info: Any) -> None:
        if layer is not module:
            process(layer, info)
            return
        layerwise._place_kernel_tensors(layer, info)
        info.reset()

    with mock.patch.object(writer, "_layerwise_process", keep):
        yield


def copied_merged(lab: AdapterLab, rng: random.Random) -> AbstractContextManager[None]:
    """A merged tensor is written into a copy that the model does not read."""
    chosen = rng.choice(sorted(name for name in lab.engine.receiver.writer.owner if "_proj" in name))
    tensor = SliceWriter.tensor

    def copied(self: SliceWriter, name: str) -> torch.Tensor:
        found = tensor(self, name)
        return found.clone() if name == chosen else found

    return mock.patch.object(SliceWriter, "tensor", copied)  # type: ignore[return-value]


def flipped_bit(lab: AdapterLab, rng: random.Random) -> AbstractContextManager[None]:
    """A bit of a rank's first message is flipped."""
    bit = rng.randrange(8)

    def change(number: int, message: torch.Tensor) -> list[torch.Tensor]:
        if number == 0:
            message[HEADER + 5] ^= 1 << bit
        return [message]

    return sync_faults.messages(lab, rng.randrange(2), change)


def lost_message(lab: AdapterLab, rng: random.Random) -> AbstractContextManager[None]:
    """A rank's first message is lost."""
    return sync_faults.messages(lab, rng.randrange(2), lambda number, message: [message] if number else [])


@contextmanager
def without_own(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
    """The trainer itself computes without its adapters."""
    with (
        mock.patch.object(lab, "trial", replace(lab.trial, probe=lab.begun.probe)),
        mock.patch.object(lab, "new", replace(lab.new, probe=lab.begun.probe)),
    ):
        yield


@contextmanager
def kept_cache(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
    """The engine keeps keys and values of the old adapter, and says so."""
    with sync_faults.tampered(lab, lambda path, answer: {"success": False} if "success" in (answer or {}) else answer):
        yield


@contextmanager
def stale_optimizer(lab: AdapterLab, rng: random.Random) -> Iterator[None]:
    """A rank's A's and B's are not what its optimizer wrote: a parameter was not updated."""
    rank = rng.randrange(len(lab.tensors))
    before = lab.new.written[rank]
    stale = whole_digests(lab.old.shards[rank].model.trained)  # type: ignore[attr-defined]
    name = rng.choice(sorted(n for n in stale if stale[n] != before[n]))
    with mock.patch.dict(before, {name: stale[name]}):  # type: ignore[arg-type]
        yield


class Kind(NamedTuple):
    """A kind of mutants."""

    fault: Fault
    ways: tuple[Way, ...]
    when: Literal["start", "near", "far"]
    """The sync that has the fault: the first of a job, of an update that no probe sees, or of any other."""
    caught_by: frozenset[str]
    """Checks of which one must catch each."""

    @property
    def at_start(self) -> bool:
        return self.when == "start"

    @property
    def near(self) -> bool:
        return self.when == "near"


MERGED: tuple[Way, ...] = ("merged",)
SEPARATE: tuple[Way, ...] = ("separate",)
BOTH: tuple[Way, ...] = ("merged", "separate")


def _kind(fault: Any, ways: tuple[Way, ...], when: Literal["start", "near", "far"], *caught_by: str) -> Kind:
    return Kind(fault, ways, when, frozenset(caught_by))


_LAYERS, _GATES = exchanged("layers.0", "layers.1"), exchanged(".gate_proj", ".up_proj")
_RANKED = lambda own: own.factors.scale * own.factors.rank / 8  # noqa: E731
_RSLORA = lambda own: own.factors.scale * own.factors.rank**0.5  # noqa: E731

KINDS: dict[str, Kind] = {
    # 1 never delivered
    "B sent as zeros": _kind(zeroed_b(one=False), SEPARATE, "start", "sent"),
    "one B sent as zeros": _kind(zeroed_b(one=True), SEPARATE, "near", "sent"),
    "no adapter merged": _kind(merging(lambda merge, base, own, f: base), MERGED, "start", "sent"),
    "one adapter of a fused tensor not merged": _kind(
        merging(lambda merge, base, own, f: merge(base, own[:-1] if len(own) > 1 else own, f)), MERGED, "near", "sent"
    ),
    "written into copies": _kind(copied(one=False), SEPARATE, "start", "digest"),
    "one written into a copy": _kind(copied(one=True), SEPARATE, "near", "digest"),
    "merged weights written into a copy": _kind(copied_merged, MERGED, "near", "digest", "padding"),
    "a layer keeps its merged weights": _kind(kept_layer, MERGED, "start", "digest", "padding"),
    "one adapter not delivered again": _kind(
        undelivered(lambda name: "layers.1.self_attn.o_proj" in name), BOTH, "near", "covered"
    ),
    "one adapter not delivered again, as both plans say": _kind(
        undelivered(lambda name: "layers.1.self_attn.o_proj" in name, engine_too=True), BOTH, "near", "covered"
    ),
    "modules_to_save not delivered again": _kind(
        undelivered(lambda name: name == "model.norm.weight"), BOTH, "near", "covered"
    ),
    "requests without the adapter at the start": _kind(unrequested, SEPARATE, "start", "trial"),
    "requests without the adapter": _kind(unrequested, SEPARATE, "far", "probe"),
    "a kernel that does nothing at the start": _kind(kernel(lambda *_: None), SEPARATE, "start", "trial"),
    "a kernel that does nothing": _kind(kernel(lambda *_: None), SEPARATE, "near", "probe"),
    "a kernel that does nothing in decode": _kind(
        kernel(lambda whole, self, y, x, scale: None if x.numel() == x.shape[-1] else scale),
        SEPARATE,
        "far",
        "decode",
        "probe",
    ),
    "a layer without its adapter at the start": _kind(one_layer_alone, SEPARATE, "start", "trial"),
    "a layer without its adapter": _kind(one_layer_alone, SEPARATE, "far", "probe"),
    "the adapter is in no slot at the start": _kind(no_slot, SEPARATE, "start", "dropped"),
    "the adapter was dropped": _kind(no_slot, SEPARATE, "near", "dropped"),
    "the trainer's layers without adapters at the start": _kind(without_own, BOTH, "start", "trial"),
    "the trainer's layers without adapters": _kind(without_own, BOTH, "far", "probe"),
    "the trial left out": _kind(untried, BOTH, "start", "untried"),
    # 2 under a name that matches nothing, or something else
    "a layer that the model does not have at the start": _kind(no_layer, SEPARATE, "start", "layer"),
    "a layer that the model does not have": _kind(no_layer, SEPARATE, "near", "layer"),
    "buffers of a layer moved": _kind(moved_buffers, SEPARATE, "near", "address"),
    "B sent as another layer's": _kind(other_name(_LAYERS, ".b"), SEPARATE, "start", "sent"),
    "A sent as another layer's": _kind(other_name(_LAYERS, ".a"), SEPARATE, "near", "sent"),
    "A of gate and up exchanged": _kind(other_name(_GATES, ".a"), SEPARATE, "near", "sent"),
    "q and v exchanged": _kind(other_name(exchanged(".q_proj", ".v_proj"), ".a"), SEPARATE, "start", "sent"),
    "q and v merged into each other": _kind(renamed(exchanged(".q_proj", ".v_proj"), "a"), MERGED, "near", "sent"),
    "gate and up exchanged": _kind(other_name(_GATES, ".b"), SEPARATE, "start", "sent"),
    "B merged into another layer": _kind(renamed(_LAYERS, "b"), MERGED, "start", "sent"),
    "A merged into another layer": _kind(renamed(_LAYERS, "a"), MERGED, "near", "sent"),
    "gate and up merged into each other": _kind(renamed(_GATES, "b"), MERGED, "start", "sent"),
    "A of gate and up merged into each other": _kind(renamed(_GATES, "a"), MERGED, "near", "sent"),
    "the worker exchanges layers at the start": _kind(places_exchanged(_LAYERS), SEPARATE, "start", "trial"),
    "the worker exchanges layers": _kind(places_exchanged(_LAYERS), SEPARATE, "far", "layer", "probe"),
    "the worker exchanges gate and up at the start": _kind(places_exchanged(_GATES), SEPARATE, "start", "trial"),
    "the worker exchanges gate and up": _kind(places_exchanged(_GATES), SEPARATE, "far", "probe"),
    "the engine agrees on the other way": _kind(sync_faults.disagreed("lora", None), BOTH, "near", "plan", "without"),
    # 3 scaled otherwise
    "B scaled twice": _kind(scaled_b(lambda own: own.factors.scale), SEPARATE, "start", "sent"),
    "B not scaled": _kind(scaled_b(lambda own: 1 / own.factors.scale), SEPARATE, "near", "sent"),
    "B scaled by another rank": _kind(scaled_b(lambda own: own.factors.rank / 8), SEPARATE, "start", "sent"),
    "B scaled as rslora": _kind(scaled_b(lambda own: own.factors.rank**0.5), SEPARATE, "near", "sent"),
    "merged with the scale twice": _kind(rescaled(lambda own: own.factors.scale**2), MERGED, "start", "sent"),
    "merged without the scale": _kind(rescaled(lambda own: 1.0), MERGED, "near", "sent"),
    "merged with the scale of another rank": _kind(rescaled(_RANKED), MERGED, "start", "sent"),
    "merged with the scale of rslora": _kind(rescaled(_RSLORA), MERGED, "near", "sent"),
    "a kernel that scales again at the start": _kind(
        kernel(lambda whole, self, y, x, scale: scale * 1.5), SEPARATE, "start", "trial"
    ),
    "a kernel that scales again": _kind(kernel(lambda whole, self, y, x, scale: scale * 1.5), SEPARATE, "far", "probe"),
    "subtracted": _kind(merging(lambda merge, base, own, f: merge(base, own, f, -1.0)), MERGED, "start", "sent"),
    # 4 merged in bfloat16, or otherwise than once
    "merged in bfloat16 at the start": _kind(merging(merged_in_bf16), MERGED, "start", "sent"),
    "merged in bfloat16": _kind(merging(merged_in_bf16), MERGED, "near", "sent"),
    "B·A of bfloat16": _kind(merging(added_in_bf16), MERGED, "near", "sent"),
    "merged twice": _kind(
        merging(lambda merge, base, own, f: merge(merge(base, own, f), own, f)), MERGED, "start", "sent"
    ),
    "merged into an old base": _kind(
        merging(lambda merge, base, own, f: merge(base * (1 + 1e-4), own, f)), MERGED, "near", "sent"
    ),
    "A rounded to bfloat16": _kind(narrow(".a"), SEPARATE, "near", "sent"),
    "B rounded to bfloat16": _kind(narrow(".b"), SEPARATE, "start", "sent"),
    "rounded by the engine": _kind(rounded_by_engine, MERGED, "start", "digest"),
    "one rounded by the engine": _kind(written_over(_narrow), SEPARATE, "near", "digest"),
    # Neighbours: old versions, shares, padding, the base
    "A of the sync before": _kind(earlier(".a"), SEPARATE, "near", "sent"),
    "B of the sync before": _kind(earlier(".b"), SEPARATE, "near", "sent"),
    "A of the sync before merged": _kind(earlier_merged("a"), MERGED, "near", "sent"),
    "B of the sync before merged": _kind(earlier_merged("b"), MERGED, "near", "sent"),
    "merged weights of the sync before": _kind(of_earlier, MERGED, "near", "sent"),
    "a rank sends the sync before": _kind(sync_faults.stale_rank, BOTH, "near", "written"),
    "a parameter that the optimizer did not update": _kind(stale_optimizer, BOTH, "near", "written"),
    "the share of another rank": _kind(sent(of_other_rank), SEPARATE, "near", "sent"),
    "garbage beside the rank": _kind(written_over(_pad), SEPARATE, "start", "padding"),
    "garbage beside the rank later": _kind(written_over(_pad), SEPARATE, "near", "padding"),
    "the trainer's base changed": _kind(base_changed, BOTH, "near", "base"),
    "the engine's base changed": _kind(engine_base_changed, BOTH, "near", "still"),
    "the engine has lost its base": _kind(lost_base, BOTH, "near", "lost"),
    "the prefix cache kept": _kind(kept_cache, BOTH, "near", "cache"),
    "a bit flipped on its way": _kind(flipped_bit, BOTH, "near", "digest"),
    "a message lost": _kind(lost_message, BOTH, "near", "number"),
}
"""Kinds of mutants. Those of a job's first sync are found there, before its first step; all others at the next sync."""
