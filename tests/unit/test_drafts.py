"""``megarl add-model``: drafts of families that have a table are that table's rows; what fits none is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megarl.cli import main
from megarl.weights.architectures import ARCHITECTURES
from megarl.weights.architectures.complete import complete
from megarl.weights.architectures.table import Architecture, hf_name, parts_of
from megarl.weights.checkpoint.formats.hf_files import places
from megarl.weights.drafts.key_changes import arguments
from megarl.weights.drafts.matches import Draft, draft_of
from megarl.weights.drafts.probes import norm_places
from megarl.weights.drafts.tiny import flat, place_in_table, stored_tensors, text_of, tiny_config, tiny_model
from megarl.weights.drafts.writing import drafted, learn, source
from tests.parallel.families import FAMILIES, WITH_CLASS, hf_model


def written(folder: Path, values: dict[str, Any] | str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def rows_of(arch: Architecture, config: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """(HF name, Megatron's) of each tensor -> its place and shape in files, op, shard and place in the row."""
    sizes, found = arch.sizes(config), {}
    tensors = arch.tensors(config)
    files = places(arch, config, tensors)
    for row in arch.params:
        for one in arch.occurrences(row, sizes):
            for number, part in enumerate(parts_of(row, sizes)):
                if (name := hf_name(part, one)) in tensors:
                    te = None if sizes.recurrent_layers else row.te  # TransformerEngine has no such layers
                    found[name, row.megatron] = (files[name], row.op, row.keys, te, part.shard, number)
    return found


OPEN = {"qwen2_5_vl": {"visual."}, "qwen3_vl": {"visual.deepstack_merger_list."}}
"""Family -> beginnings of the names of tensors that are of no known kind without its table."""


class Hidden(NamedTuple):
    """A family that is drafted although it has a table."""

    draft: Draft
    table: Architecture
    full: dict[str, Any]
    """Configuration of its tiny model, as the table reads it."""
    config: dict[str, Any]
    """The same as transformers' class has it."""
    model: Any


def hide(monkeypatch: pytest.MonkeyPatch, family: str) -> Hidden:
    """Take away a family's table, and draft it under an invented name from its tiny model's files."""
    model_type, _ = FAMILIES[family]
    table = ARCHITECTURES[model_type]
    torch.set_num_threads(1)
    model = hf_model(family)
    config = model.config.to_dict()
    if "intermediate_size" not in text_of(type(model.config)().to_dict()):  # in FAMILIES, but not in such a config.json
        text_of(config).pop("intermediate_size", None)
    full = complete(config)
    names = {place_in_table(place.stored)[0] for place in places(table, full, table.tensors(full)).values()}
    monkeypatch.delitem(ARCHITECTURES, model_type)
    return Hidden(
        draft_of("invented", stored_tensors(model, names), flat(config), norm_places(model, config)),
        table,
        full,
        config,
        model,
    )


WIDE = "gemma4_text"
"""Family with heads of two widths."""
DRAFTED = [family for family in WITH_CLASS if FAMILIES[family][0] != WIDE]


def test_layers_of_other_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = hf_model(WIDE).config.to_dict()
    monkeypatch.delitem(ARCHITECTURES, WIDE)
    draft, changes = drafted("invented", config)
    assert "self_attn.k_norm.weight with [(24,), (32,)]" in draft.refused and not changes


@pytest.mark.parametrize("family", DRAFTED)
def test_a_family_is_drafted_without_its_table(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    hidden = hide(monkeypatch, family)
    draft, open_names = hidden.draft, tuple(OPEN.get(family, ()))
    assert not draft.missing and not draft.refused
    assert all(name.startswith(open_names) for name in draft.unplaced) and bool(draft.unplaced) == bool(open_names)
    found, wanted = rows_of(draft.architecture(), flat(hidden.config)), rows_of(hidden.table, hidden.full)
    assert {name: row for name, row in found.items() if wanted.get(name) != row} == {}
    assert {place_in_table(name)[0] for name, _ in wanted.keys() - found.keys()} == {*draft.unplaced}


UNLIKE = {"gpt_oss": "whether rows of gate and up alternate, the activation, and gated_linear_unit in megatron="}
"""Family whose Megatron arguments need more than names and logits show -> a question of its draft."""
BY_LOGITS = [
    pytest.param(family, marks=() if number % 4 == 0 else pytest.mark.soak) for number, family in enumerate(DRAFTED)
]


@pytest.mark.parametrize("family", BY_LOGITS)
def test_logits_show_the_rules_of_a_family(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    draft, table, full, config, model = hide(monkeypatch, family)
    learn(draft, model, config)
    if family in UNLIKE:
        assert UNLIKE[family] in draft.questions
        return
    assert not [question for question in draft.questions if question.startswith("the place of")]
    assert arguments(draft.architecture(), flat(config))[1:] == arguments(table, full)[1:]
    if not draft.unplaced:
        assert (draft.norms, draft.router, draft.multipliers) == (table.norms, table.router, table.multipliers)


@pytest.mark.parametrize("family", ["granite", "qwen3_5_moe", "lfm2"])
def test_the_file_of_a_draft_has_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str) -> None:
    model_type, values = FAMILIES[family]
    config = tiny_config(written(tmp_path, {"model_type": model_type, **values}))
    monkeypatch.delitem(ARCHITECTURES, model_type)
    torch.set_num_threads(1)
    draft, _ = drafted(model_type, config)
    assert draft.refused or draft.fixed.get("hidden_act", "silu") == "silu"
    space: dict[str, Any] = {}
    exec(compile(source(draft), "draft", "exec"), space)
    table, made = space[model_type.upper()], draft.architecture()
    assert rows_of(table, flat(config)) == rows_of(made, flat(config))
    assert (table.keys, table.megatron, {*table.joined}) == (made.keys, made.megatron, {*made.joined})
    assert (table.norms, table.router, table.layers, table.multipliers) == (
        *(made.norms, made.router, made.layers, made.multipliers),
    )
    assert {row.vllm: len(row.hf) for row in table.vllm} == {row.vllm: len(row.hf) for row in made.vllm}


def test_the_command_names_what_it_cannot_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "model", {"model_type": "stablelm", "hidden_size": 64, "num_attention_heads": 4})
    out = tmp_path / "stablelm.py"
    assert main(["add-model", str(folder), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "NO ROW for input_layernorm.bias [64]" in printed and "# no row: model.norm.bias" in out.read_text()
    assert '"stablelm": ("stablelm", {' in printed


@pytest.mark.parametrize(
    ("model_type", "question"),
    [
        ("cohere2", "where norms stand"),  # one norm before attention and MLP
        ("olmo", "what norms compute"),  # norms without weights
        ("phimoe", "how the router scores experts"),  # no softmax, no sigmoid
        ("starcoder2", "which linear layers have biases"),
    ],
)
def test_a_draft_asks_what_it_cannot_see(tmp_path: Path, model_type: str, question: str) -> None:
    config = tiny_config(written(tmp_path, {"model_type": model_type}))
    model = tiny_model(config)
    draft = draft_of(model_type, stored_tensors(model), flat(config), norm_places(model, config))
    learn(draft, model, config)
    assert [asked for asked in draft.questions if asked.startswith(question)]


def test_a_norm_that_stands_elsewhere_is_asked_about() -> None:
    model = hf_model("llama2")
    elsewhere = {"post_attention_layernorm.weight": "self_attn_bda.norm.weight"}
    assert norm_places(model, model.config.to_dict())["post_attention_layernorm.weight"] == "pre_mlp_layernorm.weight"
    draft = draft_of("invented", stored_tensors(model), model.config.to_dict(), elsewhere)
    assert draft.questions == [
        "the place of post_attention_layernorm.weight: self_attn_bda.norm.weight by the modules around it, "
        "pre_mlp_layernorm.weight by its name"
    ]


def test_a_language_model_beside_an_unknown_tower_is_drafted(tmp_path: Path) -> None:
    config = tiny_config(written(tmp_path, {"model_type": "gemma3", "text_config": {}}))
    model = tiny_model(config)
    draft = draft_of("gemma3", stored_tensors(model), flat(config), norm_places(model, config))
    learn(draft, model, config)
    assert draft.norms == ARCHITECTURES["gemma3_text"].norms and draft.architecture().vllm_text
    assert {name.partition(".")[0] for name in draft.unplaced} == {"vision_tower", "multi_modal_projector"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "qwen3"}, "has a table already"),
        ({"model_type": "nobodys"}, "has no configuration class for model_type='nobodys'"),
        ({"model_type": "helium", "hidden_size": "wide"}, "transformers' HeliumConfig refuses it"),
        ({"model_type": "gpt2"}, "lacks hidden_size, num_attention_heads, num_hidden_layers, rope_parameters, which"),
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
