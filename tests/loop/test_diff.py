"""``megarl diff``: causes put into an engine are named, with the layer and operation; on healthy models none is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from megarl import cli
from megarl.config.schema import Config, ModelConfig, RolloutConfig
from megarl.core.errors import ConfigError
from megarl.diff.command import ENGINE, Diff, DiffSequence, diff, run, traced_process
from tests.loop.diff_causes import CAUSES, FILES, TOKENS, other_weights
from tests.loop.engines import save_tokenizer
from tests.loop.test_sync_families import SIZES
from tests.loop.vision_models import save_qwen_processor
from tests.loop.zygote import Zygote
from tests.parallel.families import FAMILIES, hf_model
from tests.parallel.grid import run_grid
from tests.system import commands
from tests.system.jobs import Job

QUICK = ("rope-size", "missing-expert", "kept-prefix", "temperature")
"""Causes of every run; ``make soak`` has all."""
HEALTHY = ("qwen3", "deepseek_v3", "qwen3_5")
REFUSED = "qwen2_windows"
"""vLLM refuses a window of some layers in Qwen2."""
ROUNDED = ("qwen3_next", "qwen3_5")
"""Families whose layers vLLM computes in bfloat16 alone on CPUs."""
TEMPLATE = "{% for m in messages %}t7 {{ m.content }}{% endfor %}"


def compared(family: str, folder: Path, zygote: Zygote, name: str | None = None, **settings: Any) -> Diff:
    """The family's tiny model on both sides, with the seeded cause ``name`` in the engine."""
    settings = {"dtype": "bfloat16"} | settings if family.startswith(ROUNDED) else settings
    path, seeded = folder / "model", None if name is None else CAUSES[name]
    save_qwen_processor(path, FAMILIES[family][0]) if "vision_config" in FAMILIES[family][1] else save_tokenizer(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    hf_model(family, **SIZES.get(family.removesuffix("_unbiased"), {})).save_pretrained(path)
    options = {} if seeded is None else seeded.options
    config = Config(
        model=ModelConfig(path=str(path), **settings),
        rollout=RolloutConfig(kv_cache_bytes=2**25, engine_options=options),
    )
    more = {} if name is None else {"DIFF_CAUSE": name, FILES: str(folder / "others")}
    if seeded is not None and seeded.weights is not None:
        other_weights(path, folder / "others", seeded.weights)

    # transformers reads the words of this tokenizer in other ways for the model types of some families.
    messages = [{"role": "user", "content": "t5 t6"}] if family == "qwen3" else None
    # vLLM's table of this tiny model's YaRN ends after 40 positions.
    tokens = TOKENS[:30] if family == "ministral3" else TOKENS
    sequence = DiffSequence(config, tokens, messages)
    argv, environment = traced_process(sequence, folder)
    own = ["tests.loop.diff_causes" if word == ENGINE else word for word in argv]
    zygote.start(own, {**environment, **more}, folder / "engine.log").wait(120)
    [found] = run_grid(1, of_trainer, sequence, folder)
    return found


def of_trainer(rank: int, sequence: DiffSequence, folder: Path) -> Diff:
    """Runs in a process of its own: Megatron changes variables, groups and torch for the whole process."""
    return diff(sequence, folder, lambda argv, environment, log: lambda: None)  # the trace is there


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in CAUSES]
)
def test_a_seeded_cause_is_named(name: str, tmp_path: Path, zygote: Zygote) -> None:
    seeded, began = CAUSES[name], time.monotonic()
    found = compared(seeded.family, tmp_path, zygote, name)
    print(f"DIFF {name}: {time.monotonic() - began:.1f} s\n{found.text()}")
    assert found.first is not None and found.cause is not None
    assert found.first.point == seeded.at
    assert found.cause.name == seeded.named and seeded.word in found.cause.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in HEALTHY else pytest.mark.soak) for name in FAMILIES if name != REFUSED],
)
def test_no_layer_of_a_healthy_model_is_named(family: str, tmp_path: Path, zygote: Zygote) -> None:
    found = compared(family, tmp_path, zygote)
    print(f"DIFF {family}:\n{found.text()}")
    assert found.first is None, found.text()
    assert len(found.findings) > 10


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama2", "qwen3_moe", "deepseek_v3"])
def test_rounding_to_bfloat16_is_within_the_tolerances(family: str, tmp_path: Path, zygote: Zygote) -> None:
    found = compared(family, tmp_path, zygote, dtype="bfloat16")
    print(f"DIFF {family}, bfloat16:\n{found.text()}")
    assert found.first is None, found.text()


@pytest.mark.slow
def test_the_command_compares_a_row_of_a_run(whole_job: Job, tmp_path: Path) -> None:
    """With an engine process of its own, the run's last weights and its own chat template."""
    status, text = commands.run(["-m", "megarl", "diff", str(whole_job.run_dir), "--row", "3"], tmp_path / "log")
    assert status == 0, text
    assert "chat template" in text and "comparisons agree" in text
    with pytest.raises(ConfigError, match="--row 100000"):
        run(cli.parse_arguments(["diff", str(whole_job.run_dir), "--row", "100000"]))
