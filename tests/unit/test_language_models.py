"""The code of docs/experiments.md that takes the language model out of a model with a vision tower."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import FromScratchConfig
from megarl.core.errors import ArchitectureError
from megarl.learn.models.from_scratch import save_tokenizer, train_tokenizer
from megarl.weights.architectures import architecture
from megarl.weights.architectures.complete import complete
from megarl.weights.checkpoint.formats import hf
from tests.parallel.families import FAMILIES

CODE = re.search(r"```py\n(.*?)```", Path("docs/experiments.md").read_text(), re.DOTALL)
TOWER = {
    **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"patch_size": 14, "image_size": 56},
}
PIXTRAL = {**TOWER, "model_type": "pixtral", "head_dim": 16}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma": ("gemma3", "gemma3_text", {**TOWER, "model_type": "siglip_vision_model"}),
    "gemma4": ("gemma4", "gemma4_text", {**TOWER, "model_type": "gemma4_vision"}),
    "mistral": ("mistral3", "mistral", PIXTRAL),
    "ministral": ("mistral3", "ministral3", PIXTRAL),
    "ministral_tied": ("mistral3", "ministral3", PIXTRAL),  # as Ministral 3 of 3B
}
"""Name -> (``model_type``, that of the language model, settings of the tower)."""


@pytest.mark.parametrize("name", list(MODELS))
def test_the_language_model_taken_out_has_the_same_logits(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

    assert CODE is not None
    whole_type, text_type, tower = MODELS[name]
    settings = {**FAMILIES[text_type][1], "model_type": text_type}
    tied = settings["tie_word_embeddings"] or name.endswith("_tied")
    config = AutoConfig.for_model(
        whole_type, text_config=settings, vision_config=dict(tower), tie_word_embeddings=tied, mm_tokens_per_image=4
    )
    source, target = tmp_path / "source", tmp_path / "target"
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(source)
    written = json.loads((source / "config.json").read_text())
    if not tied:
        del written["tie_word_embeddings"]  # files of Mistral Small do without it, transformers then takes true
        (source / "config.json").write_text(json.dumps(written))
    with pytest.raises(ArchitectureError, match=f"take out the language model .*{text_type}"):
        architecture(complete(written))
    GenerationConfig().save_pretrained(source)
    save_tokenizer(train_tokenizer(["1 + 2 = 3"], 128), source, FromScratchConfig())

    code = re.sub(r'= "models/gemma-3-12b-it", .*', f'= "{source}", "{target}"', CODE[1]).replace("bfloat16", "float32")
    exec(compile(code, "docs/experiments.md", "exec"), {})

    found = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokens = torch.randint(11, 200, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(found(tokens).logits, whole(tokens).logits)
    settings = hf.read_hf_config(target)
    assert architecture(settings).name == text_type
    assert settings["tie_word_embeddings"] is tied
