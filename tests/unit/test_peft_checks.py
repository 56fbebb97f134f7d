"""The adapter that a job begins with is compared with ``model.lora`` before any process starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megarl.config.lora import LoraConfig
from megarl.core.errors import CheckpointError, ConfigError
from megarl.run.checks.job import check_sizes
from megarl.weights.checkpoint.formats import peft
from tests.parallel.peft_twin import save_adapter
from tests.unit.small_job import config_of, refused

LORA = LoraConfig(rank=4, alpha=6.0, targets=["q_proj", "down_proj"], modules_to_save=["model.norm"])
RIGHT = (
    "model.lora.rank=4",
    "model.lora.alpha=6",
    "model.lora.targets=[down_proj,q_proj]",
    "model.lora.modules_to_save=[model.norm]",
    "trainer.warm_start.steps=0",
)


@pytest.fixture(scope="module")
def adapter(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(prepared / "model", base)
    return save_adapter(base, LORA)


def test_an_adapter_of_the_settings_passes(prepared: Path, adapter: Path) -> None:
    check_sizes(config_of(prepared, *RIGHT, f"model.lora.path={adapter}"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["rank=0"], ["model.lora.rank=0", "has rank 4; set model.lora.rank=4"]),
        (["rank=8"], ["model.lora.rank=8", "has rank 4", "set model.lora.rank=4"]),
        (["alpha=8"], ["model.lora.alpha=8 multiplies", "by 2,", "by 1.5", "set model.lora.alpha=6.0"]),
        (["rslora=true"], ["by 3,", "set model.lora.rslora=False"]),
        (["targets=[q_proj]"], ["model.lora.targets=['q_proj'] lacks", "mlp.down_proj", "['q_proj', 'down_proj']"]),
        (["targets=[all-linear]"], ["model.lora.targets=['all-linear'] has", "k_proj", "does not"]),
        (["modules_to_save=[]"], ["model.lora.modules_to_save=[]", "has ['model.norm']"]),
    ],
    ids=str,
)
def test_other_settings_are_named(prepared: Path, adapter: Path, changes: list[str], words: list[str]) -> None:
    changed = {change.partition("=")[0] for change in changes}
    kept = [each for each in RIGHT if each.removeprefix("model.lora.").partition("=")[0] not in changed]
    settings = [*kept, *(f"model.lora.{change}" for change in changes), f"model.lora.path={adapter}"]
    with pytest.raises(ConfigError) as raised:
        check_sizes(config_of(prepared, *settings))
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_folder_that_is_no_adapter_of_the_model(prepared: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model.lora.path: .* is no PEFT adapter"):
        check_sizes(config_of(prepared, *RIGHT, f"model.lora.path={tmp_path}"))
    shutil.copytree(adapter, tmp_path / "adapter")
    tensors = load_file(adapter / peft.TENSORS)
    tensors.popitem()
    save_file(tensors, tmp_path / "adapter" / peft.TENSORS)
    with pytest.raises(CheckpointError, match=r"model.lora.path: .* lacks"):
        check_sizes(config_of(prepared, *RIGHT, f"model.lora.path={tmp_path / 'adapter'}"))


def test_a_warm_start_would_change_the_model_of_the_adapter(prepared: Path, adapter: Path) -> None:
    settings = [*RIGHT[:-1], "trainer.warm_start.steps=20", f"model.lora.path={adapter}"]
    with pytest.raises(ConfigError, match=r"model.lora.path=.* with trainer.warm_start.steps=20"):
        check_sizes(config_of(prepared, *settings))


def test_targets_of_a_new_adapter(prepared: Path) -> None:
    refused(ConfigError, config_of(prepared, "model.lora.rank=4", "model.lora.targets=[w1]"), "w1", "q_proj")
