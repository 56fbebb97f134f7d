"""Open an HF checkpoint for reading slices, and check it against its family's table.

Source: transformers' ``modeling_layers.py`` (``GenericForSequenceClassification.forward``).
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.core.durable import read_json
from megarl.core.errors import CheckpointError, first_of
from megarl.weights.architectures import ARCHITECTURES, Head, architecture
from megarl.weights.architectures.complete import complete
from megarl.weights.architectures.table import PREDICTION_KEYS, PredictionRules, prediction_tensors
from megarl.weights.checkpoint.formats.hf_files import (
    SCALE,
    Dequantised,
    Divided,
    FilePlace,
    HFFiles,
    in_files,
    places,
    places_of_parts,
)
from megarl.weights.checkpoint.formats.output import MANIFEST, write_json
from megarl.weights.checkpoint.formats.slices import Source, check_dtypes
from megarl.weights.reshard.layout import Layout, Shape

CLASSIFIER = "ForSequenceClassification"
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_MADE_FOR_IT = ("pad", "reserved", "unused")
"""Parts of names of unused tokens, in order of preference."""


def is_classifier(hf_config: Mapping[str, Any]) -> bool:
    """True if a config.json belongs to a score model, not to the language model that it starts from."""
    return any(name.endswith(CLASSIFIER) for name in hf_config.get("architectures") or ())


def score_pad(hf_config: Mapping[str, Any]) -> int | None:
    """Token that a score model skips at the end of a sequence; ``None`` for a model without a score head yet."""
    return hf_config.get("pad_token_id") if is_classifier(hf_config) else None


def with_score_pad(hf_config: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], str | None]:
    """Return config.json for a new score model, trained to score at the end token, and its pad token if that changed.

    If ``pad_token_id`` is an end token, transformers would score the token before the end, so it becomes the
    tokenizer's pad token or another unused token. Without one it is null: transformers refuses batches and reads the
    last token. ``folder``: the language model's, with tokenizer.
    """
    if isinstance(text := hf_config.get("text_config"), Mapping):  # transformers reads it there
        inner, token = with_score_pad(text, folder)
        return {**hf_config, "text_config": inner}, token
    ids = _token_ids(folder)
    ends = _ends(hf_config, folder, ids)
    config, pad = dict(hf_config), hf_config.get("pad_token_id")
    if pad is not None and pad not in ends:
        return config, None
    token = next((token for token in _candidates(folder, ids) if ids[token] not in ends), None)
    if pad is None and token is None:
        return config, None
    return config | {"pad_token_id": None if token is None else ids[token]}, token


def write_pad_token(folder: Path, token: str) -> None:
    """Set the pad token of a checkpoint's tokenizer to ``token``."""
    for file in (folder / name for name in TOKENIZER_FILES):
        if file.is_file() and (found := json.loads(file.read_text())).get("pad_token") != token:
            file.write_text(json.dumps(found | {"pad_token": token}, indent=2, ensure_ascii=False))


def _candidates(folder: Path, ids: Mapping[str, int]) -> list[str]:
    """Candidates for the pad token: the tokenizer's, then special tokens with suitable names."""
    own = _text(read_json(folder / "tokenizer_config.json").get("pad_token"))
    named = [t["content"] for t in read_json(folder / "tokenizer.json").get("added_tokens", ()) if t.get("special")]
    ranked = [token for part in _MADE_FOR_IT for token in sorted(named, key=ids.__getitem__) if part in token.lower()]
    return [token for token in (own, *ranked) if token in ids]


def _ends(hf_config: Mapping[str, Any], folder: Path, ids: Mapping[str, int]) -> set[int]:
    """Tokens that may end an answer."""
    own = ids.get(_text(read_json(folder / "tokenizer_config.json").get("eos_token")))
    found = [hf_config.get("eos_token_id"), read_json(folder / "generation_config.json").get("eos_token_id"), own]
    return {end for value in found for end in (value if isinstance(value, list) else [value]) if end is not None}


def _token_ids(folder: Path) -> dict[str, int]:
    tokenizer = read_json(folder / "tokenizer.json")
    vocab = tokenizer.get("model", {}).get("vocab", {})
    words = dict(vocab) if isinstance(vocab, dict) else {word[0]: number for number, word in enumerate(vocab)}
    return words | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}


def _text(token: Any) -> str:
    return token.get("content", "") if isinstance(token, dict) else token or ""


EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
SCORE = "score.weight"
"""HF's score head (``...ForSequenceClassification`` with one label)."""
LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration")
"""Suffixes of class names in ``architectures``."""
_DERIVED = ("rotary_emb.inv_freq",)
"""Suffixes of tensors that the model computes, although some files contain them."""
JOINED = tuple(joined.name for arch in ARCHITECTURES.values() for joined in arch.joined)
"""Suffixes of tensors that contain several logical tensors."""
_PACKED = ("_proj_blocks", "_proj_scales")
"""Suffixes of weights in MXFP4."""
_MTP_BLOCKS = ("model.mtp_", "mtp.")
"""Prefixes of prediction layers that transformers does not load: of ERNIE, and of Qwen3-Next, Qwen3.5 and K-EXAONE."""
_MTP_JOINT = ("model.layers.{}.eh_proj.weight", "mtp.fc.weight")
"""Names of the first prediction layer's projection; ``{}`` is the number of layers before it."""
_MTP_COPY = re.compile(r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight")
"""Names of tensors in a prediction layer that repeat the model's embedding and output weights."""
_COMPARED = 1 << 22
_UNTABLED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("architectures", lambda value: _is_list(value, str), "it must be a list of names of classes"),
    (
        "eos_token_id",
        lambda value: isinstance(value, int) or _is_list(value, int),
        "it must be the number of a token, or a list of them",
    ),
    ("pad_token_id", lambda value: isinstance(value, int), "it must be the number of a token"),
)
"""Keys of config.json that no family's table checks, with a check and its description."""
HF_FOLDER = "huggingface"
"""Directory of config.json and tokenizer, in or next to a Megatron checkpoint."""
_COMPLETED: dict[str, dict[str, Any]] = {}
"""Text of a config.json -> completed configuration: processes read the same one for each model, layout and export."""
_LEFT = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".distcp"),
    *(".h5", ".h5.index.json", ".msgpack", ".msgpack.index.json", ".onnx", ".onnx_data", ".ot"),
    *(MANIFEST, "metadata.json"),
)
"""Suffixes of weight files and other format-specific files."""


def read_hf_config(path: Path, setting: str = "model.path") -> dict[str, Any]:
    """Read config.json of a checkpoint directory, completed with transformers' defaults.

    ``setting``: name of the setting with the directory, for errors. Raises CheckpointError if the file is missing or
    not JSON, ArchitectureError if transformers refuses it.
    """
    config = read_config_json(path, setting)
    if (key := json.dumps(config)) in _COMPLETED:
        return copy.deepcopy(_COMPLETED[key])
    found = complete(config)
    if found != config:  # else it is cheap, or a warning has said why
        _COMPLETED[key] = copy.deepcopy(found)
    return found


def read_config_json(path: Path, setting: str = "model.path") -> dict[str, Any]:
    """Read config.json unchanged. ``setting`` and errors: as ``read_hf_config``, without ArchitectureError."""
    file = path / "config.json"
    if not file.is_file():
        fix = f"set {setting} to the directory of an HF checkpoint"
        if path.name == "hf":  # where a run leaves its model
            fix += f", or let the run of {path.parent} end first, which writes it"
        raise CheckpointError(f"{path} has no config.json; {fix}")
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); copy the checkpoint again") from error
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{file} must hold a JSON object, found {type(config).__name__}; copy the checkpoint again"
        )
    for key, is_right, text in _UNTABLED:
        value = config.get(key)
        if value is not None and not is_right(value):
            raise CheckpointError(f"{file} has {key}={value!r}; {text}")
    return config


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def open_hf(path: Path) -> HFFiles | Dequantised | Divided:
    """Open the logical tensors of a checkpoint directory; FP8 weights are dequantised.

    Raises CheckpointError for missing, truncated or damaged files and an unknown quantisation; ArchitectureError if
    config.json of a family with fused tensors does not match its table.
    """
    files = open_files(path)
    return divided(files, read_hf_config(path)) if any(name.endswith(JOINED) for name in files.shapes) else files


def divided(files: HFFiles | Dequantised, hf_config: Mapping[str, Any]) -> HFFiles | Dequantised | Divided:
    """Split the fused tensors of files, named as in the family's table, into logical tensors. Parts that files have
    instead of a fused tensor stay."""
    found = ARCHITECTURES.get(str(hf_config.get("model_type")))
    if found is None or not found.joined:
        return files
    parts, here = places_of_parts(found, hf_config), files.shapes
    return Divided(files, {name: at for name, at in parts.items() if at.stored in here or name not in here})


def open_files(path: Path) -> HFFiles | Dequantised:
    """Open the stored tensors of a checkpoint directory, under their names in the family's table.

    Raises CheckpointError as ``open_hf`` does.
    """
    files = HFFiles(path)
    if (packed := next((name for name in files.entries if name.endswith(_PACKED)), None)) is not None:
        raise CheckpointError(
            f"{packed} in {path} is in MXFP4, which is not read; give a checkpoint in bfloat16: load this one in "
            "transformers with Mxfp4Config(dequantize=True) and save it"
        )
    if any(arch.name_in_table(name) != name for arch in ARCHITECTURES.values() for name in files.entries):
        rename(files, read_config_json(path))
    is_quantised = any(
        name.endswith(SCALE) or entry.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        for name, entry in files.entries.items()
    )
    if not is_quantised:
        return files
    quantization = read_config_json(path).get("quantization_config") or {}
    if not isinstance(quantization, Mapping):
        raise CheckpointError(f"{path / 'config.json'} has quantization_config={quantization!r}; it must be an object")
    return Dequantised(files, quantization)


def rename(files: HFFiles, hf_config: Mapping[str, Any]) -> None:
    """Rename the tensors of a checkpoint as in its family's table. Raises CheckpointError if two get one name."""
    if (found := ARCHITECTURES.get(str(hf_config.get("model_type")))) is not None:
        files.rename(found.name_in_table)


def places_in_files(hf_config: Mapping[str, Any], tensors: Mapping[str, Shape], head: Head) -> dict[str, FilePlace]:
    """Logical tensor -> place in the files of a model with this head."""
    return places(architecture(hf_config, head), hf_config, tensors)


def has_score(path: Path) -> bool:
    """True if an HF checkpoint has a score head. Raises CheckpointError for a missing or truncated file."""
    files = open_hf(path)
    try:
        return SCORE in files.shapes
    finally:
        files.close()


def check_hf(
    source: HFFiles | Dequantised | Divided, layout: Layout, hf_config: Mapping[str, Any], beside: Collection[str] = ()
) -> None:
    """Raise CheckpointError unless the files have every tensor of the layout, with its shape and a weight's dtype, and
    no unknown tensor except those in ``beside``.

    Prediction layers outside the layout and a tied model's copy of its embedding (see ``check_tied``) are allowed.
    """
    path = source.path
    files, tensors = in_files(source, layout.tensors)
    missing = [name for name in tensors if name not in files.shapes]
    if missing == [LM_HEAD]:
        raise CheckpointError(
            f"{path} lacks {LM_HEAD}, but config.json says tie_word_embeddings=false; set it to true if the model is "
            "tied, else copy the checkpoint again"
        )
    if missing == [SCORE]:
        raise CheckpointError(
            f"{path} lacks {SCORE}, so it is no sequence-classification checkpoint "
            f"(architectures={hf_config.get('architectures')}); "
            "use one, or start from this model with a score head of zeros"
        )
    if missing and all(_predicts(name, hf_config) for name in missing):
        raise CheckpointError(
            f"{path} lacks {first_of(missing, 5)} of the prediction layers; leave them out with --mtp drop, or copy "
            "the checkpoint again"
        )
    if missing:
        raise CheckpointError(
            f"{path} lacks {first_of(missing, 5)}; the files are incomplete or config.json is another model's"
        )
    for name, shape in tensors.items():
        check_shape(name, files.file_of(name), files.shapes[name], shape)
    check_dtypes((name, files.file_of(name), files.dtypes[name]) for name in tensors)
    unknown = [
        n
        for n in sorted(files.shapes)
        if n not in tensors and n not in beside and not is_expected(n, layout, hf_config)
    ]
    if unknown:
        raise CheckpointError(
            f"{path} has tensors that the model's table does not know: {first_of(unknown, 5)}; config.json is another "
            "model's, or add them to megarl/weights/architectures/"
        )


def is_expected(name: str, layout: Layout, hf_config: Mapping[str, Any]) -> bool:
    """True if a tensor outside the layout is allowed."""
    if name.endswith(_DERIVED) or (name == LM_HEAD and EMBEDDING in layout.tensors):
        return True
    if not _predicts(name, hf_config):
        return False
    return not has_prediction(layout.tensors, hf_config) or _MTP_COPY.fullmatch(name) is not None


def has_prediction(tensors: Collection[str], hf_config: Mapping[str, Any]) -> bool:
    """True if some of these logical tensors belong to prediction layers."""
    return any(name.format(hf_config.get("num_hidden_layers")) in tensors for name in _MTP_JOINT)


def has_prediction_layers(path: Path, hf_config: Mapping[str, Any]) -> bool:
    """True if a checkpoint's files have every tensor of the prediction layers that its config.json names. Raises
    CheckpointError as ``open_hf`` does."""
    tensors = prediction_tensors(architecture(hf_config), hf_config)
    if not tensors:
        return False
    source = open_hf(path)
    source.close()
    return all(source.shapes.get(name) == shape for name, shape in tensors.items())


def _predicts(name: str, hf_config: Mapping[str, Any]) -> bool:
    """True if a tensor belongs to a prediction layer."""
    if name.startswith(_MTP_BLOCKS):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    first = int(hf_config.get("num_hidden_layers") or 0)
    return layer is not None and 0 <= int(layer[1]) - first < int(hf_config.get(PREDICTION_KEYS[0]) or 0)


def check_labels(path: Path, hf_config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if config.json describes a sequence-classification model without exactly one label."""
    if not is_classifier(hf_config):
        return
    by_name = hf_config.get("id2label")
    # transformers' default is 2
    labels = hf_config.get("num_labels", 2) if not isinstance(by_name, Mapping) else len(by_name)
    if labels != 1:
        raise CheckpointError(
            f"{path} has num_labels={labels} ({'id2label' if by_name is not None else 'num_labels'} of config.json), a "
            "critic or reward model has 1: one score for each token; use a checkpoint that was trained so"
        )


def check_shape(name: str, where: Path, found: Shape, expected: Shape) -> None:
    """Raise CheckpointError if a tensor has an unexpected shape."""
    if found != expected:
        raise CheckpointError(
            f"{name} in {where} has shape {found}, config.json asks for {expected}; they belong to different models"
        )


def check_tied(source: Source, embedding: str, copy: str, rows: int) -> None:
    """Raise CheckpointError unless the first ``rows`` of a tied model's embedding and its copy are equal."""
    hidden = source.shapes[embedding][1]
    step = max(_COMPARED // hidden, 1)
    for lo in range(0, rows, step):
        box = ((lo, min(lo + step, rows)), (0, hidden))
        check_copy(source.path, embedding, copy, source.read(embedding, box), source.read(copy, box))


def check_copy(path: Path, embedding: str, copy: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise CheckpointError unless two slices, of the embedding and of its copy, are equal."""
    if not torch.equal(a, b):
        raise CheckpointError(
            f"{path}: config.json says tie_word_embeddings=true, so {copy} must be equal to {embedding}, but it "
            "differs; set tie_word_embeddings to false if the model was trained so"
        )


def small_files(source: Path) -> list[str]:
    """Names of a checkpoint's files that are copied unchanged."""
    files = (file for file in source.iterdir() if file.is_file())
    return sorted(file.name for file in files if not file.name.startswith(".") and not file.name.endswith(_LEFT))


def copy_small_files(source: Path, target: Path, dtype: torch.dtype, *, mtp: bool, is_value: bool = False) -> None:
    """Copy tokenizer and other small files, and config.json adapted to unquantised tensors of ``dtype``, with or
    without prediction layers and value head."""
    for name in small_files(source):
        shutil.copyfile(source / name, target / name)
    config = read_config_json(source)
    config.pop("quantization_config", None)
    if not mtp:
        _drop_prediction(config)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    if is_value and not is_classifier(config):  # a classifier keeps its pad_token_id
        config, pad = with_score_pad(config, source)
        if pad is not None:
            write_pad_token(target, pad)
    if is_value:
        ending = re.compile(f"({'|'.join(LANGUAGE_MODELS)})$")
        config["architectures"] = [ending.sub(CLASSIFIER, name) for name in config.get("architectures") or ()]
        config.pop("num_labels", None)
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    write_json(target / "config.json", config)


def _drop_prediction(config: dict[str, Any]) -> None:
    """Set the number of prediction layers in a config.json to 0."""
    found = ARCHITECTURES.get(str(config.get("model_type")))
    rules = PredictionRules() if found is None else found.layers.prediction
    text = config.get("text_config")
    part = text if isinstance(text, dict) and rules.key in text else config
    if part.get(rules.key, rules.default):
        part[rules.key] = 0
