"""Adapters in PEFT's file format: ``adapter_config.json`` and ``adapter_model.safetensors``.

Source: PEFT 0.21 ``utils/save_and_load.py`` (names), ``tuners/lora/config.py`` (keys), ``tuners/tuners_utils.py``
(which layers are adapted). Settings with keys unknown to this file are refused.

PEFT's files use transformers' module names. In a model with images these differ from the checkpoint's names.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megarl.config import hub
from megarl.config.lora import ALL_LINEAR, LoraConfig
from megarl.core.durable import replace_directory
from megarl.core.errors import CheckpointError, first_of
from megarl.weights.architectures import Architecture, Head, HFConfig, architecture
from megarl.weights.architectures.table import name_in_modules
from megarl.weights.checkpoint.formats.hf_files import HFFiles
from megarl.weights.checkpoint.formats.output import partial_path, write_json
from megarl.weights.checkpoint.formats.slices import Source, check_dtypes, value_fault
from megarl.weights.reshard import layout as boxes
from megarl.weights.reshard.adapters import (
    EMBEDDING,
    WEIGHT,
    Factors,
    linear_modules,
    matches_key,
    names_module,
    saved_whole,
    saves_tensor,
)
from megarl.weights.reshard.buckets import wire_dtype
from megarl.weights.reshard.copy import GroupTransport
from megarl.weights.reshard.execute import Transport, exchange
from megarl.weights.reshard.layout import Layout, Shape
from megarl.weights.reshard.layouts import whole_layout
from megarl.weights.reshard.plan import build_plan

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of HF tensor names in the file."""
_COPY = ".base_layer.weight"
"""Suffix of the name of a copy of the model's weight."""
_COMPARED = 1 << 22
_METADATA = {"format": "pt"}
_PLAIN_LORA = "use an adapter of plain LoRA, or merge this one with PEFT (merge_and_unload) and train the merged model"
_REFUSED = {
    "use_dora": _PLAIN_LORA,
    "use_qalora": _PLAIN_LORA,
    "use_bdlora": _PLAIN_LORA,
    "lora_bias": _PLAIN_LORA,
    "fan_in_fan_out": _PLAIN_LORA,
    "layer_replication": "merge it with PEFT (merge_and_unload) and train the merged model",
    "megatron_config": _PLAIN_LORA,
    "trainable_token_indices": "merge it with PEFT (merge_and_unload) and train the merged model",
    "alora_invocation_tokens": _PLAIN_LORA,
    "arrow_config": _PLAIN_LORA,
    "kasa_config": _PLAIN_LORA,
    "velora_config": _PLAIN_LORA,
    "monteclora_config": _PLAIN_LORA,
    "ensure_weight_tying": "merge it with PEFT (merge_and_unload) and train the merged model",
    "target_parameters": "name the layers of experts in target_modules (gate_proj, up_proj, down_proj), with a tensor "
    "for each expert, or merge it with PEFT (merge_and_unload)",
}
"""Keys that change an adapter's computation, each with the fix for the user."""
_READ = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "lora_dropout", "bias", "init_lora_weights", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "rank_pattern", "alpha_pattern"),
)
_WITHOUT_EFFECT = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("megatron_core", "qalora_group_size", "runtime_config", "loftq_config", "eva_config", "corda_config"),
    "lora_ga_config",
)
"""Keys that do not affect a finished plain LoRA adapter."""
_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Initialisations of A and B that do not change the model's weights."""


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``adapter_config.json``. Raises CheckpointError if it is missing, damaged, or has an unsupported setting."""
    path = folder / CONFIG
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{folder} is no PEFT adapter: {path.name} cannot be read ({error})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); copy the adapter again") from error
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        kind = found.get("peft_type") if isinstance(found, dict) else type(found).__name__
        raise CheckpointError(f"{path} has peft_type={kind!r}; megarl reads only LORA")
    for key, value in found.items():
        if key in _REFUSED and value:
            raise CheckpointError(f"{path} has {key}={value!r}, which megarl does not compute; {_REFUSED[key]}")
        if value and key not in (*_REFUSED, *_READ, *_WITHOUT_EFFECT):
            raise CheckpointError(
                f"{path} has {key}={value!r}, which megarl does not know; save the adapter with PEFT 0.21, or remove "
                "the key if it does not change what the adapter computes"
            )
    if (bias := found.get("bias", "none")) != "none":
        raise CheckpointError(f"{path} has bias={bias!r}; use an adapter that was trained with bias='none'")
    if (init := found.get("init_lora_weights", True)) not in _INITS:
        raise CheckpointError(
            f"{path} has init_lora_weights={init!r}, for which PEFT changes the model's own weights too; save the "
            "adapter with path_initial_model_for_weight_conversion, which makes plain LoRA of it"
        )
    for key, (is_right, text) in _KINDS.items():
        if not is_right(found.get(key, _DEFAULTS.get(key))):
            raise CheckpointError(f"{path} has {key}={found.get(key)!r}; it must be {text}")
    return found


def is_folder(path: Path) -> bool:
    """True for a folder with a PEFT adapter."""
    return (path / CONFIG).is_file()


def saves_score(folder: Path) -> bool:
    """True if an adapter's ``modules_to_save`` includes a score head. Raises CheckpointError as ``read_config``."""
    return "score" in (read_config(folder).get("modules_to_save") or ())


def base_of(folder: Path) -> Path:
    """Find an adapter's base HF checkpoint: ``base_model_name_or_path`` in its settings, a folder or a name in the
    hub's cache. Raises CheckpointError as ``read_config`` does, and if the checkpoint does not exist."""
    named = read_config(folder).get("base_model_name_or_path")
    path = Path(hub.snapshot(str(named)))
    if not named or not (path / "config.json").is_file():
        raise CheckpointError(
            f"{folder / CONFIG} has base_model_name_or_path={named!r}, which is no HF checkpoint here: it has no "
            "config.json; write the folder of the model that the adapter is for into that key"
        )
    return path


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _is_rank(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int)


def _is_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) and name for name in value))


def _is_pattern(is_value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        value is None
        or (isinstance(value, dict) and all(_is_expression(key) and is_value(each) for key, each in value.items()))
    )


def _is_expression(value: Any) -> bool:
    try:
        re.compile(value)
    except (re.error, TypeError):
        return False
    return isinstance(value, str)


def _is_names_or_expression(value: Any) -> bool:
    return _is_expression(value) if isinstance(value, str) else _is_names(value)


def _is_layers(value: Any) -> bool:
    return value is None or all(type(layer) is int for layer in (value if isinstance(value, list) else [value]))


_DEFAULTS = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
_NAMES = "a list of names, a regular expression, or null"
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_rank, "a positive integer"),
    "lora_alpha": (_is_number, "a positive number"),
    "lora_dropout": (lambda value: value == 0 or (_is_number(value) and value < 1), "a number from 0 to below 1"),
    "target_modules": (
        lambda value: bool(value) and _is_names_or_expression(value),
        "a list of names, or a regular expression",
    ),
    "exclude_modules": (_is_names_or_expression, _NAMES),
    "modules_to_save": (_is_names, "a list of names, or null"),
    "rank_pattern": (_is_pattern(_is_rank), "an object of regular expressions and positive integers"),
    "alpha_pattern": (_is_pattern(_is_number), "an object of regular expressions and positive numbers"),
    "layers_to_transform": (_is_layers, "numbers of layers, or null"),
    "layers_pattern": (_is_names_or_expression, _NAMES),
}
"""Key -> check of its value, and a description of valid values."""


def lora_of(folder: Path, hf_config: HFConfig, head: Head = "lm") -> LoraConfig:
    """Convert a PEFT folder's settings to megarl's settings, for a model.

    ``targets`` lists the layers that PEFT selects by ``target_modules`` (suffixes, ``all-linear`` or a regular
    expression), ``exclude_modules``, ``layers_to_transform`` and ``layers_pattern``.

    Raises CheckpointError as ``read_config`` does, and if PEFT would select no layer.
    """
    found = read_config(folder)
    linear = linear_modules(hf_config, head)
    arch = architecture(hf_config, head)
    tensors = arch.tensors(hf_config)
    endings = found.get("modules_to_save") or []
    saved = [ending for ending in endings if any(saves_tensor(ending, name_in_modules(arch, name)) for name in tensors)]
    if arch.base_names.pairs:  # by this table's full names
        of_saved = [t for t in tensors if any(saves_tensor(ending, name_in_modules(arch, t)) for ending in saved)]
        saved = list(dict.fromkeys(name.rpartition(".")[0] for name in of_saved))
    in_all = {module: not own.is_embedding and module != "lm_head" for module, own in linear.items()}
    chosen = [module for module in linear if _is_adapted(found, name_in_modules(arch, module), in_all=in_all[module])]
    if EMBEDDING not in linear and _is_adapted(found, name_in_modules(arch, EMBEDDING), in_all=False):
        raise CheckpointError(
            f"{folder / CONFIG} has target_modules={found['target_modules']!r} with the embedding, by which this "
            f"{arch.name} computes logits too (tie_word_embeddings): merged, the adapter would change both; use an "
            "adapter without embed_tokens"
        )
    chosen = [module for module in chosen if not any(saves_tensor(ending, module + WEIGHT) for ending in saved)]
    if not chosen:
        raise CheckpointError(
            f"{folder / CONFIG} has target_modules={found['target_modules']!r}, which is no linear layer of "
            f"{arch.name}; give the model that the adapter is for"
        )
    lora = LoraConfig(
        rank=int(found.get("r", 8)),
        alpha=float(found.get("lora_alpha", 8)),
        rslora=bool(found.get("use_rslora")),
        targets=_endings(chosen, linear),
        modules_to_save=saved,
        rank_pattern=_used(found.get("rank_pattern"), linear, arch),
        alpha_pattern={key: float(alpha) for key, alpha in _used(found.get("alpha_pattern"), linear, arch).items()},
        dropout=float(found.get("lora_dropout", 0.0)),
        init="gaussian" if found.get("init_lora_weights") == "gaussian" else "kaiming",
        path=str(folder),
    )
    every = [module for module, own in linear.items() if own.in_all]
    every = [module for module in every if not any(saves_tensor(ending, module + WEIGHT) for ending in saved)]
    return replace(lora, targets=[ALL_LINEAR]) if chosen == every else lora


def _used(pattern: dict[str, Any] | None, modules: Iterable[str], arch: Architecture) -> dict[str, Any]:
    """Return the keys of a pattern that match a module; PEFT ignores others. If transformers' names differ from the
    table's, return the full table name of each matching module instead."""
    pattern = pattern or {}
    if not arch.base_names.pairs:
        return {key: value for key, value in pattern.items() if any(matches_key(key, each) for each in modules)}
    return dict(_by_module(pattern, {name_in_modules(arch, module): module for module in modules}))


def _by_module(pattern: Mapping[str, Any], modules: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield (name, pattern value) of matching modules. ``modules``: name to match -> name to yield."""
    for module, wanted in modules.items():
        if (key := next((key for key in pattern if matches_key(key, module)), None)) is not None:
            yield wanted, pattern[key]


def _is_adapted(found: Mapping[str, Any], module: str, *, in_all: bool) -> bool:
    """True if PEFT's settings adapt a linear layer or an embedding; ``in_all``: all-linear includes the module."""
    targets, excluded = found["target_modules"], found.get("exclude_modules") or []
    if re.fullmatch(excluded, module) if isinstance(excluded, str) else any(names_module(e, module) for e in excluded):
        return False
    if isinstance(targets, str):
        if targets.lower() == ALL_LINEAR:
            return in_all
        return re.fullmatch(targets, module) is not None
    if module in targets:
        return True
    return any(names_module(target, module) for target in targets) and _is_in_layers(found, module)


def _is_in_layers(found: Mapping[str, Any], module: str) -> bool:
    layers, patterns = found.get("layers_to_transform"), found.get("layers_pattern") or []
    if layers is None or layers == []:
        return True
    expressions = [rf"(?:^|.*?\.){p}\.(\d+)\." for p in ([patterns] if isinstance(patterns, str) else patterns)]
    for expression in expressions or [r".*?\.[^.]*\.(\d+)\."]:
        if (match := re.match(expression, module)) is not None:
            return int(match[1]) in (layers if isinstance(layers, list) else [layers])
    return False


def _endings(chosen: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Shortest names that make PEFT select ``chosen`` and no other of ``modules``: the last part of a name if all
    modules with that last part are chosen, else the full name."""
    kept, every = list(chosen), list(modules)
    left = {module.rpartition(".")[2] for module in set(every).difference(kept)}
    left |= {part for module in every for part in module.split(".")[:-1]}  # blocks that contain modules
    names = (module if (leaf := module.rpartition(".")[2]) in left else leaf for module in kept)
    return list(dict.fromkeys(names))


def write_adapter(
    target: Path,
    lora: LoraConfig,
    factors: Mapping[str, Factors],
    layout: Layout,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    base: str,
    modules_to_save: list[str],
    head: str = "lm",
    hf_config: HFConfig | None = None,
    transport: Transport | None = None,
    bucket_bytes: int = 64 << 20,
) -> dict[str, int]:
    """Write a rank's adapters as PEFT's files; every rank of the grid calls it, rank 0 writes.

    Args:
        layout: Layout of the adapters and of tensors trained by ``modules_to_save`` (``adapters.file_layout``).
        tensors: Local name -> tensor.
        base: Path or name of the adapter's base model.
        hf_config: As in ``config_of``.

    Returns:
        HF name -> digest of this rank's part as written.

    Raises CheckpointError on rank 0 if ``target`` exists and is not an adapter.
    """
    if rank == 0:
        _check_replaceable(target)
    whole, digests = gathered(layout, rank, tensors, transport=transport, bucket_bytes=bucket_bytes)
    if rank == 0:
        write_files(target, whole, config_of(lora, factors, base, modules_to_save, head, hf_config), hf_config)
    return digests


def write_files(
    target: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], hf_config: HFConfig | None = None
) -> None:
    """Write PEFT's files, replacing another adapter's.

    Args:
        tensors: HF name -> full tensor.
        config: Result of ``config_of``.
        hf_config: As in ``config_of``.

    Raises CheckpointError if ``target`` exists and is not an adapter.
    """
    _check_replaceable(target)
    temporary = partial_path(target)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    table = None if hf_config is None else architecture(hf_config)
    save_file({stored_name(name, table): tensor for name, tensor in tensors.items()}, temporary / TENSORS, _METADATA)
    write_json(temporary / CONFIG, dict(config))
    replace_directory(temporary, target)


def _check_replaceable(target: Path) -> None:
    if target.exists() and not (target / CONFIG).is_file() and any(target.iterdir()):
        raise CheckpointError(
            f"{target} is not a PEFT adapter, so a new adapter does not replace it; give another directory"
        )


def gathered(
    layout: Layout,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    transport: Transport | None = None,
    bucket_bytes: int = 64 << 20,
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Gather a layout's full tensors by HF name on rank 0 ({} on others); also return digests of this rank's part."""
    dtype = next((tensor.dtype for tensor in tensors.values()), torch.float32)
    plan = build_plan(layout, whole_layout("PEFT", layout.tensors), colocated=True)
    whole = {}
    if rank == 0:
        own = {name: wire_dtype(layout, name, dtype) for name in layout.tensors}
        whole = {name: torch.empty(shape, dtype=own[name]) for name, shape in layout.tensors.items()}
    sent = exchange(
        plan, rank, tensors, whole.__getitem__, transport or GroupTransport(), dtype=dtype, bucket_bytes=bucket_bytes
    )
    return whole, {name: digest for (_, name), digest in sent.items()}


def config_of(
    lora: LoraConfig,
    factors: Mapping[str, Factors],
    base: str,
    modules_to_save: list[str],
    head: str = "lm",
    hf_config: HFConfig | None = None,
) -> dict[str, Any]:
    """Return the contents of ``adapter_config.json`` for adapters.

    Args:
        hf_config: The model's config.json. With it a target is only the last part of a name, if that names no module
            without an adapter; ``None`` writes full names.
    """
    adapted, saved = [own.module for own in factors.values()], modules_to_save
    ranks, alphas = dict(lora.rank_pattern), dict(lora.alpha_pattern)
    if hf_config is not None:
        table: Head = "score" if head == "score" else "lm"
        arch = architecture(hf_config, table)
        tensors = arch.tensors(hf_config)
        if arch.base_names.pairs:
            named = {module: name_in_modules(arch, module) for module in adapted}
            ranks, alphas = (dict(_by_module(pattern, named)) for pattern in (ranks, alphas))
        every = [name_in_modules(arch, name.rpartition(".")[0]) for name in tensors]
        adapted = _endings([name_in_modules(arch, module) for module in adapted], every)
        names = saved_whole(tensors, replace(lora, modules_to_save=modules_to_save))
        # Full names, because PEFT would match ``norm`` to every norm.
        saved = list(dict.fromkeys(name_in_modules(arch, name.rpartition(".")[0]) for name in names))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head == "lm" else "SEQ_CLS",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": _number(lora.alpha),
        "use_rslora": lora.rslora,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True if lora.init == "kaiming" else "gaussian",
        "target_modules": adapted,
        "modules_to_save": saved or None,
        "rank_pattern": ranks,
        "alpha_pattern": {key: _number(alpha) for key, alpha in alphas.items()},
        "inference_mode": True,
    }


def _number(value: float) -> int | float:
    """Convert an integral alpha to an integer, as PEFT does."""
    return int(value) if float(value).is_integer() else value


def open_adapter(
    folder: Path, shapes: Mapping[str, Shape], base: Source | None = None, hf_config: HFConfig | None = None
) -> HFFiles:
    """Open the tensors of a PEFT folder under their HF names.

    Args:
        hf_config: The model's config.json, to find its table with the HF names; ``None`` keeps the stored names.
        shapes: HF name -> shape, of all tensors that the file must contain.
        base: The model's tensors, to check the copy of an output layer that PEFT writes next to its adapter; ``None``
            checks nothing.

    Raises CheckpointError for a missing, truncated or damaged file, a missing, unknown or misshapen tensor, a wrong
    copy.
    """
    path = folder / TENSORS
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {TENSORS}; save the adapter with safe_serialization=True")
    files = HFFiles(folder, [TENSORS])
    files.rename(partial(own_name, table=None if hf_config is None else architecture(hf_config)))
    if missing := [name for name in shapes if name not in files.shapes]:
        raise CheckpointError(f"{path} lacks {first_of(missing, 3)}; give model.lora the targets that it has")
    copies = {name: name.replace(_COPY, WEIGHT) for name in files.shapes if name.endswith(_COPY)}
    adapted = {name.partition(".lora_")[0] + WEIGHT for name in shapes if ".lora_" in name}
    copies = {copy: name for copy, name in copies.items() if name in adapted}
    if unknown := [name for name in files.shapes if name not in shapes and name not in copies]:
        raise CheckpointError(f"{path} has {first_of(unknown, 3)}, which no target of model.lora takes")
    for name, shape in shapes.items():
        if files.shapes[name] != shape:
            raise CheckpointError(
                f"{name} in {path} has shape {files.shapes[name]}, this model's has {shape}; set model.lora.rank to "
                "the adapter's, or model.path to its model"
            )
    check_dtypes((name, path, files.dtypes[name]) for name in files.shapes)
    for copy, name in copies.items():
        if base is not None and not _is_copy(files, copy, base, name):
            raise CheckpointError(
                f"{copy} in {path} is not {name} of {base.path}: the adapter is for another model; set model.path to "
                "that model, or save the adapter with save_embedding_layers=False if the weights need not be equal"
            )
    return files


def _is_copy(files: HFFiles, copy: str, base: Source, name: str) -> bool:
    if files.shapes[copy] != base.shapes[name]:
        return False
    return all(
        torch.equal(files.read(copy, box).to(base.dtypes[name]), base.read(name, box))
        for box in boxes.split(boxes.whole(base.shapes[name]), _COMPARED)
    )


def load_adapter(
    folder: Path, layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor], hf_config: HFConfig | None = None
) -> None:
    """Load a rank's adapters from PEFT's files; the bits stay the same if dtypes are equal.

    Args:
        layout: Layout of the adapters and of tensors trained by ``modules_to_save`` (``adapters.file_layout``).
        hf_config: As in ``open_adapter``.

    Raises CheckpointError as ``read_config`` and ``open_adapter`` do, and for non-finite values.
    """
    read_config(folder)
    files = open_adapter(folder, layout.tensors, hf_config=hf_config)
    try:
        with torch.no_grad():
            for pad in layout.padding(rank):
                tensors[pad.local][boxes.index_of(boxes.start_of(pad.box), boxes.shape_of(pad.box))].zero_()
            for piece in layout.pieces(rank):
                values = files.read(piece.tensor, piece.box)
                part = tensors[piece.local][boxes.index_of(piece.at, boxes.shape_of(piece.box))].copy_(values)
                if prod(part.shape) and (fault := value_fault(values, part)) is not None:
                    raise CheckpointError(f"{piece.tensor} in {files.file_of(piece.tensor)} {fault}")
    finally:
        files.close()


def own_name(stored: str, table: Architecture | None = None) -> str:
    """Convert a tensor name in PEFT's file to the HF name. ``table``: needed if transformers' names differ."""
    name = re.sub(r"(\.lora_(?:embedding_)?[AB])\.default\b", r"\1", stored.removeprefix(PREFIX))
    return name if table is None else table.name_in_table(name)


def stored_name(name: str, table: Architecture | None = None) -> str:
    """Convert an HF name to the tensor name in PEFT's file. ``table``: as in ``own_name``."""
    return PREFIX + (name if table is None else name_in_modules(table, name))
