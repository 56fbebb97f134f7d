"""Qwen3-VL: configurations and settings with which its layers would compute something else are refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from megarl.config import Config
from megarl.config.schema import ModelConfig, TrainerConfig
from megarl.core.errors import ArchitectureError, ConfigError
from megarl.run.checks.grids import check_recompute
from megarl.weights.architectures import architecture
from megarl.weights.architectures.complete import complete
from megarl.weights.reshard.grid import MegatronGrid, check_grid
from tests.parallel.families import FAMILIES

SETTINGS = FAMILIES["qwen3_vl"][1]


def config_of(part: str, **changes: Any) -> dict[str, Any]:
    """config.json of the tiny model with other values of one part."""
    values = copy.deepcopy(SETTINGS)
    values[part] |= changes
    return complete({"model_type": "qwen3_vl", **values})


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("text_config", {"mrope_section": [4, 4, 4], "mrope_interleaved": False}, "mrope_interleaved=False"),
        ("text_config", {"mrope_section": [4, 4, 4]}, "mrope_interleaved=False"),
        ("text_config", {"mrope_section": [2, 5, 5], "mrope_interleaved": True}, r"mrope_section=\[2, 5, 5\]"),
        ("vision_config", {"num_position_embeddings": 26}, "num_position_embeddings=26; it must be a square"),
        ("vision_config", {"deepstack_visual_indexes": [2, 0]}, r"deepstack_visual_indexes=\[2, 0\]; .*ascending"),
        ("vision_config", {"deepstack_visual_indexes": [1, 1]}, r"deepstack_visual_indexes=\[1, 1\]"),
        ("vision_config", {"deepstack_visual_indexes": [0, 3]}, "of the tower's 3 blocks"),
        ("vision_config", {"deepstack_visual_indexes": []}, r"deepstack_visual_indexes=\[\]"),
        ("vision_config", {"rope_parameters": {"rope_type": "axial", "rope_theta": 5000.0}}, "rope_theta=5000.0"),
        ("vision_config", {"out_hidden_size": 32}, "out_hidden_size=32"),
    ],
)
def test_other_functions_are_refused(part: str, changes: dict[str, Any], message: str) -> None:
    if part == "text_config":
        changes = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **changes}}
    with pytest.raises(ArchitectureError, match=message):
        architecture(config_of(part, **changes))


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (MegatronGrid(pp=8), "parallel.pp=8 leaves 1 layers .* set parallel.pp to 4 or less"),
        (MegatronGrid(pp=2, first_stage_layers=1), "parallel.first_stage_layers=1 .* to 2 or more"),
        (MegatronGrid(pp=2, vpp=4), "parallel.vpp=4 leaves 1 layers .* to a smaller number"),
    ],
)
def test_layers_that_add_vectors_stay_beside_the_tower(grid: MegatronGrid, message: str) -> None:
    sizes = architecture(config_of("vision_config")).sizes(config_of("vision_config"))
    assert sizes.deepstack == 2
    for fits in (MegatronGrid(pp=4), MegatronGrid(pp=2, vpp=2), MegatronGrid(pp=2, first_stage_layers=2)):
        check_grid("qwen3_vl", sizes, fits)
    with pytest.raises(ConfigError, match=message):
        check_grid("qwen3_vl", sizes, grid)


def test_padded_rows_are_not_computed_again() -> None:
    config = Config(model=ModelConfig(recompute="full"), trainer=TrainerConfig(packing=False))
    with pytest.raises(ConfigError, match="recompute=full with trainer.packing=false: the first 2 layers"):
        check_recompute(config, config_of("vision_config"))
    check_recompute(replace(config, trainer=TrainerConfig()), config_of("vision_config"))
    check_recompute(replace(config, model=ModelConfig()), config_of("vision_config"))
