"""A reward model and a critic that are PEFT's adapters with a score head: scores of PEFT's own model, the actor's
memory, and the bytes that the check predicts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.algorithms import KLConfig, PPOConfig
from megarl.config.lora import LoraConfig
from megarl.config.schema import Config, CriticConfig, ModelConfig, RewardModelConfig
from megarl.core.errors import CheckpointError
from megarl.learn.training.role_adapters import shares_base
from megarl.weights.checkpoint.convert.adapters import merge_adapter, unmerge_adapter
from megarl.weights.checkpoint.convert.convert import Settings
from megarl.weights.checkpoint.formats import hf, peft
from megarl.weights.checkpoint.formats.score_files import ScoreFiles
from megarl.weights.reshard.layouts import hf_layout
from tests.parallel.batches import random_sequences
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, save_tiny_qwen3

TOLERANCE = 1e-5


def save_adapter(base: Path, target: Path) -> torch.Tensor:
    """Write an adapter of PEFT's with a score head. Return its score of every position, float32 [T]."""
    import peft as library
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    )
    settings = library.LoraConfig(
        task_type="SEQ_CLS", r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1
    )
    adapted = library.get_peft_model(model, settings).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "score" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(str(target))
    inner, found = adapted.base_model.model, []
    sequences = random_sequences(3, 6, VOCAB)
    with torch.no_grad():
        for ids in sequences.tokens.long().split(sequences.lengths.tolist()):
            found.append(inner.score(inner.model(ids[None]).last_hidden_state)[0, :, 0])
    return torch.cat(found)


def test_a_score_head_is_merged_into_a_model_without_one(folder: Path, tmp_path: Path) -> None:
    """The target is a sequence-classification checkpoint, whose scores are PEFT's."""
    from transformers import AutoModelForSequenceClassification

    base, adapter, merged = folder / "base", folder / "adapter", tmp_path / "merged"
    merge_adapter(base, adapter, merged, Settings(progress=False, verify=True))
    model = AutoModelForSequenceClassification.from_pretrained(merged, attn_implementation="eager").eval()
    assert model.num_labels == 1
    sequences, found = random_sequences(3, 6, VOCAB), []
    with torch.no_grad():
        for ids in sequences.tokens.long().split(sequences.lengths.tolist()):
            found.append(model.score(model.model(ids[None]).last_hidden_state)[0, :, 0])
    torch.testing.assert_close(torch.cat(found), torch.load(folder / "scores.pt"), rtol=0, atol=TOLERANCE)
    with pytest.raises(CheckpointError, match=r"has no score\.weight, which .* brought"):
        unmerge_adapter(merged, adapter, tmp_path / "back", Settings(progress=False), base)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("score_adapters")
    base = save_tiny_qwen3(folder / "base", layers=2, tied=True)
    torch.save(save_adapter(base, folder / "adapter"), folder / "scores.pt")
    return folder


def job(folder: Path) -> Config:
    """Settings of a job whose actor, critic and reward model are adapters of one model."""
    path = str(folder / "adapter")
    return Config(
        model=ModelConfig(path=str(folder / "base"), lora=LoraConfig(rank=3)),
        critic=CriticConfig(path=path),
        reward_model=RewardModelConfig(path=path),
        algorithm=replace(PPOConfig(name="ppo"), kl=KLConfig(coef=0.1)),
    )


def built(rank: int, folder: str) -> dict[str, Any]:
    """Runs in a rank: scores of critic and reward model, bytes of residents, and bytes of all parameters, those that
    models share once."""
    from megarl.learn import algorithms
    from megarl.learn.memory.residents import residents_of
    from megarl.learn.parallel import process_groups
    from megarl.train.inference.models import Models

    config = job(Path(folder))
    process_groups.initialize(config.parallel, seed=1)
    models = Models(config, algorithms.get("ppo"))
    models.make_actor(None)
    models.load_beginning()
    models.build(0, None, Path(folder) / "none", lambda phase: None)
    assert models.critic is not None and models.reward_model is not None
    sequences = random_sequences(3, 6, VOCAB)
    scores = {
        role: model.outputs(sequences, [model.micro_batches(sequences)])
        for role, model in models.by_role().items()
        if role != "actor"
    }
    for model in (models.actor, models.critic):
        model.step(1e-3)
    residents = [each for role, model in models.by_role().items() for each in residents_of(role, model)]
    chunks = [chunk for model in models.by_role().values() for chunk in model.chunks]
    storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for c in chunks for p in c.parameters()}
    return {
        "scores": scores,
        "residents": {each.name: each.nbytes for each in residents},
        "parameters": sum(storages.values()),
    }


def test_scores_are_those_of_peft_and_memory_is_the_actors(folder: Path) -> None:
    from megarl.learn import algorithms
    from megarl.run.checks.memory import resident_bytes

    [found] = run_grid(1, built, str(folder))
    expected = torch.load(folder / "scores.pt")
    for role in ("critic", "reward_model"):
        assert float((found["scores"][role] - expected).abs().max() / expected.abs().max()) < TOLERANCE, role
    [predicted] = resident_bytes(job(folder), algorithms.get("ppo"), {"actor": hf.read_hf_config(folder / "base")})
    assert predicted == found["residents"]
    shared = sum(size for name, size in predicted.items() if name.endswith("parameters"))
    assert shared == found["parameters"], "the frozen model is there once"


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("reward_model", {"dtype": "bfloat16"}),
        ("reward_model", {"offload": "memory"}),
        ("model", {"lora": LoraConfig()}),
        ("model", {"lora": LoraConfig(rank=3, modules_to_save=["norm"])}),
        ("model", {"path": "another"}),
    ],
)
def test_another_base_has_memory_of_its_own(folder: Path, part: str, change: dict[str, Any]) -> None:
    config = job(folder)
    assert shares_base(config, "reward_model")
    assert not shares_base(replace(config, **{part: replace(getattr(config, part), **change)}), "reward_model")


def test_adapters_that_are_no_score_models_are_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "adapter" / peft.CONFIG).read_text())
    (tmp_path / peft.CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": "gone/model"}))
    with pytest.raises(CheckpointError, match="base_model_name_or_path='gone/model', which is no HF checkpoint"):
        ScoreFiles.of(tmp_path)
    (tmp_path / peft.CONFIG).write_text(json.dumps(config | {"modules_to_save": None}))
    hf_config = hf.read_hf_config(folder / "base")
    with pytest.raises(CheckpointError, match="has no score head"):
        ScoreFiles.of(tmp_path).check(hf_layout(hf_config, head="score"), hf_config)
