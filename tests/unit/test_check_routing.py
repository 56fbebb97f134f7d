"""Expert ids of a step against the actor's model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.core.config.schema import Config
from megarl.core.errors import NonRetryableError
from megarl.learn.batching import Sequences
from megarl.train.update.models import Models
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from tests.parallel.families import save

FIX = "set rollout.routing_replay to false"


def check(folder: Path, routing: torch.Tensor | None) -> None:
    models = object.__new__(Models)
    models._config, models.hf_config = Config(), read_hf_config(folder)
    models.check_routing(
        Sequences(torch.zeros(3, dtype=torch.int32), torch.tensor([3]), torch.zeros(3), routing=routing)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three layers with experts, a dense one between, and 3 of 8 experts for a token."""
    return save("qwen3_moe_mixed", tmp_path_factory.mktemp("model"))


def test_ids_of_the_model_pass(folder: Path) -> None:
    check(folder, torch.randint(-1, 8, (3, 3, 3), dtype=torch.int8))


@pytest.mark.parametrize(
    ("routing", "words"),
    [
        (None, r"\(3, 3\) .* none came"),
        (torch.zeros(3, 4, 3, dtype=torch.int8), r"\(3, 3\) .* those of \(4, 3\) came"),
        (torch.zeros(3, 3, 2, dtype=torch.int8), r"\(3, 3\) .* those of \(3, 2\) came"),
        (torch.full((3, 3, 3), 8, dtype=torch.int8), "from 8 to 8 came for 8 experts"),
        (torch.full((3, 3, 3), -2, dtype=torch.int8), "from -2 to -2 came for 8 experts"),
    ],
)
def test_others_are_refused(folder: Path, routing: torch.Tensor | None, words: str) -> None:
    with pytest.raises(NonRetryableError, match=rf"{words}.*{FIX}"):
        check(folder, routing)
