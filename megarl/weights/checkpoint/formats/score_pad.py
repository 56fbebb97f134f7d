"""Position of a score model's score: transformers reads the last token that is not config.json's ``pad_token_id``.

Source: transformers' ``modeling_layers.py`` (``GenericForSequenceClassification.forward``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.core.durable import read_json

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
