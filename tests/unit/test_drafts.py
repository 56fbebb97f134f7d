"""``megarl add-model``: drafts of families that have a table are that table's rows; what fits none is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.cli import main
from megarl.weights.architectures import ARCHITECTURES
from megarl.weights.architectures.table import Param
from megarl.weights.drafts.tiny import tiny_config
from megarl.weights.drafts.writing import drafted, source
from tests.parallel.families import FAMILIES


def written(folder: Path, values: dict[str, Any] | str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def key(row: Param) -> tuple[Any, ...]:
    return row.megatron, row.op, tuple(part.name for part in row.hf), row.stage


@pytest.mark.parametrize("family", ["qwen3", "granite", "glm4_moe", "qwen2_moe", "olmo2"])
def test_a_draft_has_the_rows_that_were_written_by_hand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str
) -> None:
    model_type, values = FAMILIES[family]
    config = tiny_config(written(tmp_path, {"model_type": model_type, **values}))
    table = ARCHITECTURES[model_type]
    if family != "qwen2_moe":  # whose shared expert no other family has
        monkeypatch.delitem(ARCHITECTURES, model_type)
    torch.set_num_threads(1)
    draft, _ = drafted(model_type, config)
    layers = set().union(*(one.layers for one in draft.stored.values()))
    assert len(layers) == config["num_hidden_layers"] and not draft.unplaced
    found, wanted = {key(row) for row in draft.architecture().params}, {key(row) for row in table.params}
    assert found <= wanted
    assert {stage.name for *_, stage in wanted - found} <= {"MTP", "DENSE"}, "no tensors, and no layers, in this model"
    assert draft.refused or draft.fixed["hidden_act"] == "silu"
    if family == "granite":
        assert not draft.refused
        assert {*vars(table.multipliers).values()} <= {*draft.fixed, ""}, "numbers that no rule of the draft reads"
    assert draft.norms() == table.norms
    if family == "qwen2_moe":
        assert draft.keys == table.keys and set(draft.borrowed) == {"qwen2_moe"}
    space: dict[str, Any] = {}
    exec(compile(source(draft), "draft", "exec"), space)
    assert {key(row) for row in space[model_type.upper()].params} == found


def test_the_command_names_what_it_cannot_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "model", {"model_type": "stablelm", "hidden_size": 64, "num_attention_heads": 4})
    out = tmp_path / "stablelm.py"
    assert main(["add-model", str(folder), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "NO ROW for input_layernorm.bias [64]" in printed and "# no row: model.norm.bias" in out.read_text()
    assert '"stablelm": ("stablelm", {' in printed


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "qwen3"}, "has a table already"),
        ({"model_type": "nobodys"}, "has no configuration class for model_type='nobodys'"),
        ({"model_type": "gemma3", "text_config": {}}, "give the config.json of its language model alone"),
        ({"model_type": "helium", "hidden_size": "wide"}, "transformers' HeliumConfig refuses it"),
        ("{", "config.json is not valid JSON"),
        ("[]", "config.json must hold a JSON object, found list"),
        (None, "has no config.json"),
    ],
)
def test_what_the_command_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, values: dict[str, Any] | str | None, message: str
) -> None:
    folder = tmp_path if values is None else written(tmp_path / "model", values)
    assert main(["add-model", str(folder), "--out", str(tmp_path / "out.py")]) == 2
    assert message in caplog.text and not (tmp_path / "out.py").exists()


def test_a_file_that_cannot_be_written_is_named_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = written(tmp_path / "model", {"model_type": "stablelm"})
    assert main(["add-model", str(folder), "--out", str(tmp_path / "missing" / "out.py")]) == 2
    assert f"{tmp_path / 'missing'} is no directory that can be written" in caplog.text


def test_heads_of_a_family_that_divides_the_hidden_size(tmp_path: Path) -> None:
    """Helium's output projection is square, so heads of another width do not fit it."""
    config = tiny_config(written(tmp_path, {"model_type": "helium"}))
    assert config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]
