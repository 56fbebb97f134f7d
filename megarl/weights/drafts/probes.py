"""ModelFacts about a model that no name and no shape shows, from its logits under changed weights.

Each probe changes weights so that the logits stay the same exactly if the fact holds.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megarl.weights.architectures.table import COMMON_KEYS
from megarl.weights.drafts.tiny import text_of, tiny_model

Weights = dict[str, torch.Tensor]
Change = Callable[[Weights], None]
_SAME = 2e-4
"""Largest difference of logits, as a share of the largest one, that counts as rounding."""
_TOWER = re.compile(r"vision|visual")
_LAYER = re.compile(r"layers\.(\d+)\.self_attn\.")


@dataclass(frozen=True)
class ModelFacts:
    """ModelFacts about a model; ``None`` where no probe decides."""

    zero_centred: bool | None
    """Norms are RMSNorm and multiply by 1 + weight; False: by weight."""
    embedding_root: bool
    """Embeddings are multiplied by the square root of their width."""
    no_softmax: bool | None
    """A shift of all scores of a router changes its weights, which a softmax's do not."""
    normalised: bool | None
    """Weights of the chosen experts have the same sum for every token, with the configuration's settings."""
    neighbours: bool | None
    """The rotary embedding rotates neighbouring pairs; False: the two halves of a head."""
    rotating: tuple[bool, ...] | None
    """True for each layer that rotates queries and keys."""
    scales: tuple[float, ...]
    """Factors of attention scores."""


class WeightProbe:
    """A model of transformers whose weights are changed and restored.

    Args:
        config: Configuration of the tiny model.
    """

    def __init__(self, model: Any, config: Mapping[str, Any]) -> None:
        self.model, self.config = model, text_of(dict(config))
        self._weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(6, self.config["vocab_size"], (1, 24), generator=generator)
        self._plain = self.logits()

    def logits(self) -> torch.Tensor:
        """Return the model's logits of a fixed text."""
        with torch.no_grad():
            logits: torch.Tensor = self.model(input_ids=self.tokens, use_cache=False).logits
        return logits

    def changed(self, *changes: Change) -> torch.Tensor:
        """Return the logits under changed weights."""
        weights = {name: tensor.clone() for name, tensor in self._weights.items()}
        for change in changes:
            change(weights)
        self.model.load_state_dict(weights)
        try:
            return self.logits()
        finally:
            self.model.load_state_dict(self._weights)

    def keeps(self, *changes: Change, plain: torch.Tensor | None = None) -> bool:
        """True if the logits stay the same, compared with ``plain`` or the unchanged ones."""
        plain = self._plain if plain is None else plain
        return bool((self.changed(*changes) - plain).abs().max() <= _SAME * plain.abs().max())


def facts_of(model: Any, config: Mapping[str, Any]) -> ModelFacts:
    """Return what the logits of a model say.

    Args:
        model: A tiny model with ``config``, without neutral values (``tiny.tiny_model``).
    """
    probe = WeightProbe(model, config)
    sigmoid, normalised = _router(probe)
    neighbours, rotating = _rope(probe)
    named = [module for name, module in model.named_modules() if name.endswith("self_attn") and not _TOWER.search(name)]
    scales = {float(module.scaling) for module in named if hasattr(module, "scaling")}
    return ModelFacts(
        _zero_centred(probe), _embedding_root(probe), sigmoid, normalised, neighbours, rotating, tuple(sorted(scales))
    )


def normalises(config: Mapping[str, Any], key: str, value: bool) -> bool | None:
    """``ModelFacts.normalised`` with another value of a key; ``None`` if transformers refuses it."""
    other = copy.deepcopy(dict(config))
    text_of(other)[key] = value
    return _router(WeightProbe(tiny_model(other), other))[1]


def _zero_centred(probe: WeightProbe) -> bool | None:
    """Compare the norms' outputs with those of RMSNorm, by weight and by 1 + weight."""
    width = probe.config["hidden_size"]
    states = 10 * torch.randn(1, 5, width, generator=torch.Generator().manual_seed(4))
    plain = states * states.square().mean(-1, keepdim=True).rsqrt()
    found = set[bool | None]()
    for name, module in probe.model.named_modules():
        weight = getattr(module, "weight", None)
        if not name.endswith("norm") or _TOWER.search(name) or weight is None or weight.shape != (width,):
            continue
        with torch.no_grad():
            output = module(states)
        one, centred = (torch.allclose(output, plain * by, rtol=1e-3, atol=1e-3) for by in (weight, 1 + weight))
        found.add(centred if one != centred else None)
    return found.pop() if len(found) == 1 else None


def norm_places(model: Any, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of norms in layers with Megatron's, by which module reads its output, or writes its input.

    Args:
        model: A tiny model with ``config``.
    """
    calls: list[tuple[str, Any, Any]] = []

    def record(name: str, _: Any, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        states = given[0] if given else named.get("hidden_states")
        calls.append((name, states, output[0] if isinstance(output, tuple) else output))

    hooks = []
    for name, module in model.named_modules():
        child = re.fullmatch(r"(.*\.)?layers\.\d+\.(\w+)", name)
        if child and not _TOWER.search(name):
            hooks.append(module.register_forward_hook(partial(record, child[2]), with_kwargs=True))
    WeightProbe(model, config)
    for hook in hooks:
        hook.remove()
    found: dict[str, str] = {}
    for norm, states, output in (call for call in calls if "norm" in call[0]):
        for name, read, written in (call for call in calls if "norm" not in call[0]):
            mixes = re.search(r"attn|attention|conv|mixer", name) is not None
            if written is states:
                found[f"{norm}.weight"] = "self_attn_bda.norm.weight" if mixes else "mlp_bda.norm.weight"
            elif read is output:
                found.setdefault(f"{norm}.weight", "input_layernorm.weight" if mixes else "pre_mlp_layernorm.weight")
    return found


def _filled(names: list[str], value: float) -> Change:
    def fill(weights: Weights) -> None:
        for name in names:
            weights[name].fill_(value)

    return fill


def _embedding_root(probe: WeightProbe) -> bool:
    embedding = probe.model.get_input_embeddings()
    with torch.no_grad():
        found, plain = embedding(probe.tokens), embedding.weight[probe.tokens]
    root: float = probe.config["hidden_size"] ** 0.5
    return bool(torch.allclose(found, plain * root, rtol=1e-3))


def _router(probe: WeightProbe) -> tuple[bool | None, bool | None]:
    """Return (sigmoid, normalised). A softmax ignores a shift of all scores; with equal experts only the weights' sum
    counts."""
    experts = next((probe.config[key] for key in COMMON_KEYS["experts"] if probe.config.get(key) is not None), None)
    state = probe.model.state_dict()
    routers = [
        name
        for name, tensor in state.items()
        if tensor.shape == (experts, probe.config["hidden_size"]) and re.search(r"gate|router", name)
    ]
    stacks = [
        name
        for name, tensor in state.items()
        if name not in routers and tensor.ndim >= 2 and tensor.shape[0] == experts and "layers." in name
    ]
    if experts is None or not routers or not stacks:
        return None, None
    generator = torch.Generator().manual_seed(2)

    def shift(weights: Weights) -> None:
        for name in routers:
            weights[name] += 0.3 * torch.randn(weights[name].shape[1], generator=generator)

    def equal(weights: Weights) -> None:
        for name in stacks:
            weights[name].copy_(weights[name][:1].expand_as(weights[name]).clone())

    def other(weights: Weights) -> None:
        for name in routers:
            weights[name].copy_(0.3 * torch.randn(weights[name].shape, generator=generator))

    return not probe.keeps(shift), probe.keeps(equal, other, plain=probe.changed(equal))


def _rope(probe: WeightProbe) -> tuple[bool | None, tuple[bool, ...] | None]:
    """Return (neighbours, layers that rotate). Turning queries and keys alike within a pair that the rope turns too,
    or anyhow in a layer without a rope, changes no score."""
    turns, head = list(_projections(probe)), _head(probe.config)
    if not turns:
        return None, None
    ropes = probe.config.get("rope_parameters") or {}
    share = ropes.get("partial_rotary_factor") or probe.config.get("partial_rotary_factor") or 1.0
    width = int(head * share) // 2 * 2
    generator = torch.Generator().manual_seed(3)
    angles = torch.rand(width // 2, generator=generator) + 0.5
    anyhow = torch.linalg.qr(torch.randn(head, head, generator=generator))[0]
    norms = [name for name in probe.model.state_dict() if re.search(r"self_attn\.\w*norm\w*\.weight", name)]
    flat = _filled(norms, 0.5)
    plain = probe.changed(flat)

    def turned(matrix: torch.Tensor, layers: set[int] | None = None) -> bool:
        def turn(weights: Weights) -> None:
            for name, layer, rows in turns:
                if layers is None or layer in layers:
                    for first in rows:
                        part = weights[name][first : first + head]
                        part.copy_(matrix @ part)

        return probe.keeps(flat, turn, plain=plain)

    near, halves = (turned(_pairs(head, pairs, angles)) for pairs in (_near(width), _halves(width)))
    layers = sorted({layer for _, layer, _ in turns})
    rotating = {layer: not turned(anyhow, {layer}) for layer in layers}
    everywhere = tuple(rotating.get(layer, True) for layer in range(probe.config["num_hidden_layers"]))
    return near if near != halves else None, everywhere


def _projections(probe: WeightProbe) -> Iterator[tuple[str, int, list[int]]]:
    """Yield (weight or bias with queries or keys, its layer, first row of each head)."""
    config, state = probe.config, probe.model.state_dict()
    heads, latent = config["num_attention_heads"], config.get("kv_lora_rank")
    groups = config.get("num_key_value_heads") or heads
    for name, tensor in state.items():
        layer = _LAYER.search(name)
        kind = re.search(r"self_attn\.(q|k|qkv|q_b|kv_a)_proj(_with_mqa)?\.", name)
        if layer is None or kind is None or _TOWER.search(name):
            continue
        count = {"q": heads, "q_b": heads, "k": groups, "qkv": heads + groups, "kv_a": 1}[kind[1]]
        step = _head(config) if kind[1] == "qkv" else tensor.shape[0] // count
        first = 0 if not latent else step - _head(config)  # with a latent the last dimensions rotate
        yield name, int(layer[1]), [number * step + first for number in range(count)]


def _head(config: Mapping[str, Any]) -> int:
    """Width of the part of a head that may rotate."""
    if config.get("kv_lora_rank"):
        return int(config["qk_rope_head_dim"])
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _near(width: int) -> list[tuple[int, int]]:
    return [(n, n + 1) for n in range(0, width, 2)]


def _halves(width: int) -> list[tuple[int, int]]:
    return [(n, n + width // 2) for n in range(width // 2)]


def _pairs(head: int, pairs: list[tuple[int, int]], angles: torch.Tensor) -> torch.Tensor:
    """Matrix that turns each pair of a head's dimensions by an angle."""
    matrix = torch.eye(head)
    for (a, b), angle in zip(pairs, angles, strict=True):
        cos, sin = angle.cos(), angle.sin()
        matrix[a, a], matrix[a, b], matrix[b, a], matrix[b, b] = cos, -sin, sin, cos
    return matrix
