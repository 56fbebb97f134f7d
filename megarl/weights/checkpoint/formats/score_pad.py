"""Position at which a score model's score is read: transformers takes the last token that is not config.json's
``pad_token_id``.

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
"""Parts of the names of tokens that stand for nothing, the best first."""


def is_classifier(hf_config: Mapping[str, Any]) -> bool:
    """Return True if a config.json is a score model's, and not that of the language model that it starts from."""
    return any(name.endswith(CLASSIFIER) for name in hf_config.get("architectures") or ())


def score_pad(hf_config: Mapping[str, Any]) -> int | None:
    """The token that a score model's reading passes over at the end of a sequence; None for a model without a score
    head yet."""
    return hf_config.get("pad_token_id") if is_classifier(hf_config) else None


def with_score_pad(hf_config: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], str | None]:
    """config.json of a new score model, which is trained at the end token, and its pad token where that is another than
    before.

    A ``pad_token_id`` that is an end token would make transformers read the token before the end. Then the tokenizer's
    own pad token is taken, or another that stands for nothing; where there is none it is null: transformers refuses
    batches then, and reads the last token. ``folder``: of the language model with its tokenizer.
    """
    if isinstance(text := hf_config.get("text_config"), Mapping):  # where transformers reads it then
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
    """Make ``token`` the pad token of a checkpoint's tokenizer."""
    for file in (folder / name for name in TOKENIZER_FILES):
        if file.is_file() and (found := json.loads(file.read_text())).get("pad_token") != token:
            file.write_text(json.dumps(found | {"pad_token": token}, indent=2, ensure_ascii=False))


def _candidates(folder: Path, ids: Mapping[str, int]) -> list[str]:
    """Pad tokens to choose from: the tokenizer's own, then special ones by what their names promise."""
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
