"""Expert ids of a step against the actor's model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.config.schema import Config
from megarl.core.errors import NonRetryableError
from megarl.core.schema import Outcome, Reward
from megarl.learn.batching import Sequences, StepShare
from megarl.train.inference.models import Models
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from tests.parallel.families import save

FIX = "set rollout.routing_replay to false"


def check(folder: Path, routing: torch.Tensor | None) -> None:
    models = object.__new__(Models)
    models.config, models.hf_config = Config(), read_hf_config(folder)
    rows = [Outcome("r", "g0", index, 1, 2, Reward(0.0, "ok"), False, None, None) for index in range(4)]
    share = StepShare(torch.tensor([1, 3]), torch.tensor([5, 1, 5, 2]))
    models.check_routing(
        Sequences(
            torch.zeros(3, dtype=torch.int32), torch.tensor([1, 2]), torch.zeros(3), routing=routing, share=share
        ),
        rows,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three layers with experts, a dense one between, and 3 of 8 experts for a token."""
    return save("qwen3_moe_mixed", tmp_path_factory.mktemp("model"))


def test_ids_of_the_model_pass(folder: Path) -> None:
    check(folder, torch.randint(-1, 8, (3, 3, 3), dtype=torch.int8))


def one_of(expert: int, position: int) -> torch.Tensor:
    """Expert ids of three tokens, one of which has a foreign one."""
    ids = torch.zeros(3, 3, 3, dtype=torch.int8)
    ids[position, 1, 2] = expert
    return ids


@pytest.mark.parametrize(
    ("routing", "words"),
    [
        (None, r"\(3, 3\) .* none came"),
        (torch.zeros(3, 4, 3, dtype=torch.int8), r"\(3, 3\) .* those of \(4, 3\) came"),
        (torch.zeros(3, 3, 2, dtype=torch.int8), r"\(3, 3\) .* those of \(3, 2\) came"),
        (one_of(8, 2), "trajectory 3 of group g0 has expert id 8, of 8 experts with ids 0 to 7"),
        (one_of(-2, 0), "trajectory 1 of group g0 has expert id -2, of 8 experts"),
    ],
)
def test_others_are_refused(folder: Path, routing: torch.Tensor | None, words: str) -> None:
    with pytest.raises(NonRetryableError, match=rf"{words}.*{FIX}"):
        check(folder, routing)
