"""One score of a sequence: megarl reads it where transformers' ...ForSequenceClassification does, pad = end
included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import ModelConfig, ParallelConfig
from tests.parallel.families import VOCAB
from tests.parallel.grid import run_grid
from tests.parallel.test_value_head import MODELS, TOLERANCE, hf_classifier

END, PAD = 3, 0
PADS = {"its-own": PAD, "end": END, "none": None}
CASES = [(model, pad) for model in MODELS for pad in PADS]
LENGTHS = [5, 17, 1, 9]


def answers() -> list[torch.Tensor]:
    """Sequences that end as answers do: with an end token, cut without one, an end token alone, and two of them."""
    generator = torch.Generator().manual_seed(5)
    found = [torch.randint(4, VOCAB, (length,), generator=generator) for length in LENGTHS]
    found[0][-1] = found[2][0] = END
    found[3][-2:] = END
    return found


def read(rank: int, folder: str) -> dict[tuple[str, str], torch.Tensor]:
    """(model, pad) -> megarl's scores [N]."""
    from megarl.learn.batching import MicroBatching, Sequences, score_positions
    from megarl.learn.parallel import process_groups
    from megarl.learn.training.model import Model
    from megarl.weights.checkpoint.formats import hf
    from megarl.weights.checkpoint.formats.hf_source import score_pad

    tokens = torch.cat(answers())
    sequences = Sequences(tokens, torch.tensor(LENGTHS), torch.zeros(len(tokens), dtype=torch.bool))
    process_groups.initialize(ParallelConfig(), seed=1)
    found = {}
    for name in MODELS:
        path = Path(folder) / name
        model = Model(
            hf.read_hf_config(path), ModelConfig(path=str(path)), ParallelConfig(), None, MicroBatching(max_tokens=40)
        )
        model.load_hf(path)
        scores = model.outputs(sequences, [model.micro_batches(sequences)])
        config = json.loads((path / "config.json").read_text())
        for pad, token in PADS.items():
            (path / "config.json").write_text(json.dumps(config | {"pad_token_id": token}))
            found[name, pad] = scores[score_positions(sequences, score_pad(hf.read_hf_config(path)))].clone()
    return found


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[tuple[str, str], torch.Tensor], dict[tuple[str, str], torch.Tensor]]:
    """(megarl's scores, transformers' scores of the padded batch; of each by itself where there is no pad token)."""
    root, expected = tmp_path_factory.mktemp("reading"), {}
    for name in MODELS:
        model = hf_classifier(name)
        model.save_pretrained(root / name)
        for pad, token in PADS.items():
            model.config.pad_token_id = token
            expected[name, pad] = torch.cat(_scores(model, token))
    return run_grid(1, read, str(root))[0], expected


def _scores(model: Any, pad: int | None) -> list[torch.Tensor]:
    if pad is None:
        return [model(ids[None]).logits[:, 0].detach() for ids in answers()]
    batch = torch.nn.utils.rnn.pad_sequence(answers(), batch_first=True, padding_value=pad)
    there = torch.arange(batch.shape[1]) < torch.tensor(LENGTHS)[:, None]
    return [model(batch, attention_mask=there.long()).logits[:, 0].detach()]


@pytest.mark.parametrize(("model", "pad"), CASES, ids=[f"{m}-{p}" for m, p in CASES])
def test_scores_equal_transformers(both: Any, model: str, pad: str) -> None:
    megarl, transformers = (side[model, pad] for side in both)
    assert float((megarl - transformers).abs().max() / transformers.abs().max()) < TOLERANCE


def test_the_pad_token_decides(both: Any) -> None:
    """Else the cases above would show nothing."""
    assert not torch.allclose(both[1]["qwen3", "end"], both[1]["qwen3", "its-own"])
