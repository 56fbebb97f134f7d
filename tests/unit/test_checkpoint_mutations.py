"""Damaged checkpoints: ``inspect`` and ``convert`` both take a mutation, or both refuse it with a MegarlError."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from megarl.cli import main
from megarl.core.errors import CheckpointError, MegarlError
from megarl.run.launch.subjects import subject_of
from megarl.weights.checkpoint.convert.convert import convert_hf_to_megatron, convert_megatron_to_hf
from megarl.weights.checkpoint.convert.verify import inspect_checkpoint
from megarl.weights.checkpoint.formats.hf_files import INDEX, read_header
from megarl.weights.checkpoint.training.manifest import complete
from tests.unit.reshard_cases import Config, qwen3_config
from tests.unit.reshard_oracle import random_hf
from tests.unit.test_checkpoint_convert import QUIET, deepseek, write_hf

Change = Callable[[Path], Any]

MODELS: dict[str, Config] = {
    "qwen3": qwen3_config(num_hidden_layers=2, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "qwen3_moe": qwen3_config(
        model_type="qwen3_moe",
        num_hidden_layers=2,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        moe_intermediate_size=6,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "deepseek_v3": deepseek(num_nextn_predict_layers=0, num_hidden_layers=2, n_group=2, topk_group=1),
    "score": qwen3_config(num_hidden_layers=2, architectures=["Qwen3ForCausalLM"], pad_token_id=3, eos_token_id=4),
}
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 1.5, 10**5, 10**30, float("inf"), float("nan")),
    *("", "x", "\0", "\ud800", [], [0], ["x"], [[]], {}, {"x": 1}),
)
MORE = (
    *("quantization_config", "rope_scaling", "rope_parameters", "architectures", "id2label", "text_config"),
    *("vision_config", "n_group", "sliding_window", "attention_bias", "dtype", "torch_dtype", "layer_types"),
    *("num_nextn_predict_layers", "partial_rotary_factor", "hidden_act", "is_causal", "eos_token_id"),
)
SAMPLE = 5
"""Mutations of a model's config.json in ``make test``; ``make soak`` has all."""


def of_json(name: str, change: Callable[[Any], Any]) -> Change:
    """Change the JSON file of this name, in whatever folder of the checkpoint it is."""

    def write(folder: Path) -> None:
        (file,) = folder.rglob(name)
        value = json.loads(file.read_text())
        change(value)
        file.write_text(json.dumps(value))

    return write


def raw(name: str, data: bytes) -> Change:
    def write(folder: Path) -> None:
        (file,) = folder.rglob(name)
        file.write_bytes(data)

    return write


def config(**values: Any) -> Change:
    return of_json("config.json", lambda found: found.update(values))


def of_header(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Change the header of a safetensors file, and leave its elements as they are."""

    def write(folder: Path) -> None:
        file = folder / "a.safetensors"
        data = file.read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:end])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[end:])

    return write


def entries(**values: Any) -> Change:
    """Change the entry of the first norm."""
    return of_header(lambda header: header["model.layers.0.input_layernorm.weight"].update(values))


def weight_map(change: Callable[[dict[str, Any]], Any]) -> Change:
    return of_json(INDEX, lambda index: change(index["weight_map"]))


def swapped(header: dict[str, Any]) -> None:
    """One layer's weights are read as another's, and its own bytes by nothing."""
    header["model.layers.0.mlp.up_proj.weight"]["data_offsets"] = header["model.layers.1.mlp.up_proj.weight"][
        "data_offsets"
    ]


DEEP = b"[" * 200_000
HF: dict[str, Change] = {
    "overlap": of_header(swapped),
    "hole": of_header(lambda header: header.pop("model.layers.0.input_layernorm.weight")),
    "entry 1": of_header(lambda header: header.update({"model.norm.weight": 1})),
    "negative shape": entries(shape=[-2, -4]),
    "shape of text": entries(shape=["8"]),
    "shape of fractions": entries(shape=[8.0]),
    "huge shape": entries(shape=[10**30]),
    "dtype []": entries(dtype=[]),
    "offsets 1": entries(data_offsets=[0, 1, 2]),
    "negative offsets": entries(data_offsets=[-32, 0]),
    "header no UTF-8": raw("a.safetensors", struct.pack("<Q", 4) + b'"\xff\xff"'),
    "header []": raw("a.safetensors", struct.pack("<Q", 2) + b"[]"),
    "deep header": raw("a.safetensors", struct.pack("<Q", len(DEEP)) + DEEP),
    "index no UTF-8": raw(INDEX, b'{"weight_map": "\xff"}'),
    "index []": raw(INDEX, b"[]"),
    "deep index": raw(INDEX, DEEP),
    "index without entries": weight_map(lambda found: found.clear()),
    "file 1": weight_map(lambda found: found.update({"model.norm.weight": 1})),
    "file []": weight_map(lambda found: found.update({"model.norm.weight": []})),
    "file with NUL": weight_map(lambda found: found.update({"model.norm.weight": "a\0b"})),
    "file elsewhere": weight_map(lambda found: found.update({"model.norm.weight": "../case/a.safetensors"})),
    "file .": weight_map(lambda found: found.update({"model.norm.weight": "."})),
}
TRAINING: dict[str, Change] = {
    "state no UTF-8": raw("state.json", b'{"step": "\xff"}'),
    "deep state": raw("state.json", DEEP),
    "files 1": of_json("state.json", lambda state: state.update(files=1)),
    "files with NUL": of_json("state.json", lambda state: state["files"].update({"actor/a\0b": [1, "x"]})),
    "file of another size": of_json("state.json", lambda state: state["files"].update({"actor/.metadata": [1, "x"]})),
    "size of text": of_json("state.json", lambda state: state["files"].update({"actor/.metadata": ["y", "x"]})),
    "another step": of_json("state.json", lambda state: state.update(step=4)),
    "metadata []": raw("metadata.json", b"[]"),
    "metadata no UTF-8": raw("metadata.json", b'"\xff"'),
    "no state": lambda folder: (folder / "state.json").unlink(),
}
CONFIGS: dict[str, tuple[str, Change]] = {
    "9 experts in 4 groups": ("deepseek_v3", config(n_routed_experts=9, n_group=4)),
    "4 experts in 3 groups": ("deepseek_v3", config(n_group=3)),
    "no UTF-8": ("qwen3", raw("config.json", b'{"model_type": "\xff"}')),
    "deep": ("qwen3", raw("config.json", DEEP)),
    "text": ("qwen3", config(rms_norm_eps="1e-6")),
    "tied text": ("qwen3", config(tie_word_embeddings="false")),
    "tied, but with other values": ("qwen3", config(tie_word_embeddings=True)),
    "list of rope": ("qwen3", config(rope_scaling=[1])),
    "infinite factor": ("qwen3", config(rope_scaling={"rope_type": "linear", "factor": float("inf")})),
    "layers": ("qwen3", config(num_hidden_layers=10**12)),
    "experts": ("qwen3_moe", config(num_experts=10**12)),
    "dense layers": ("qwen3_moe", config(mlp_only_layers=1)),
    "step": ("qwen3_moe", config(decoder_sparse_step=-1)),
    "shared experts": ("deepseek_v3", config(n_shared_experts=-1)),
    "classes": ("score", config(architectures=[1])),
    "pad": ("score", config(pad_token_id=[0])),
}


def config_mutations(name: str) -> Iterator[Change]:
    keys = [key for key in (*MODELS[name], *MORE) if name == "qwen3" or key not in (*MODELS["qwen3"], *MORE[:7])]
    for key in keys:
        for value in VALUES:
            yield config(**{key: value})
        yield of_json("config.json", lambda found, key=key: found.pop(key, None))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each model in both formats, one whose tensors are in two files, and a training checkpoint."""
    root = tmp_path_factory.mktemp("mutations")
    for name, settings in MODELS.items():
        tensors = random_hf(settings)
        if name == "score":
            tensors["score.weight"] = tensors.pop("lm_head.weight")[:1].clone()
        write_hf(root / "hf" / name, settings, tensors)
        convert_hf_to_megatron(root / "hf" / name, root / "megatron" / name, QUIET)
    tensors = random_hf(MODELS["qwen3"])
    sharded = write_hf(root / "hf/sharded", MODELS["qwen3"], {})
    (sharded / "model.safetensors").unlink()
    files = {name: "ba"["layers" in name] + ".safetensors" for name in tensors}
    for file in sorted(set(files.values())):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, sharded / file)
    (sharded / INDEX).write_text(json.dumps({"weight_map": files}))
    written = root / "megatron/global_step_3.attempt_1"
    convert_hf_to_megatron(root / "hf/qwen3", written / "actor", QUIET)
    for file in ("actor/megarl_manifest.json", "rng_0.json"):  # a job writes no such manifest
        (written / file).unlink(missing_ok=True)
    (written / "rng_0.json").write_text("{}")
    complete(written, {"step": 3, "phase": "step"}, {}, {}, keep=1)
    return root


def verdicts(checkpoint: Path, change: Change, folder: Path) -> tuple[str, str]:
    """(reason of ``inspect``, of ``convert``) for refusing a copy of the checkpoint after ``change``; empty: taken."""
    shutil.rmtree(folder, ignore_errors=True)
    case = folder / checkpoint.name
    shutil.copytree(checkpoint, case)
    change(case)
    to = convert_hf_to_megatron if "hf" in checkpoint.parts else convert_megatron_to_hf
    found = []
    for act in (
        lambda: inspect_checkpoint(case, digests=True, progress=False),
        lambda: to(case, folder / "out", settings=QUIET),
    ):
        try:
            result = act()
        except MegarlError as error:
            found.append(str(error))
        else:
            found.append("" if getattr(result, "is_whole", True) else repr(result))
    return found[0], found[1]


def assert_refused(checkpoint: Path, change: Change, folder: Path) -> None:
    inspected, converted = verdicts(checkpoint, change, folder)
    assert inspected and converted
    assert not (folder / "out").exists()


@pytest.mark.parametrize("what", CONFIGS)
def test_a_wrong_config_is_refused(whole: Path, tmp_path: Path, what: str) -> None:
    name, change = CONFIGS[what]
    kind = ("hf", "megatron")[list(CONFIGS).index(what) % 2]  # both read it in the same way
    assert_refused(whole / kind / name, change, tmp_path / "case")


@pytest.mark.parametrize("count", [SAMPLE, pytest.param(None, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["hf", "megatron"])
@pytest.mark.parametrize("name", MODELS)
def test_inspect_and_convert_agree_about_a_config(
    whole: Path, tmp_path: Path, name: str, kind: str, count: int | None
) -> None:
    changes = list(config_mutations(name))
    random.Random(f"{name} {kind}").shuffle(changes)
    for change in changes[:count]:
        inspected, converted = verdicts(whole / kind / name, change, tmp_path / "case")
        (file,) = (tmp_path / "case" / name).rglob("config.json")
        assert bool(inspected) == bool(converted), (inspected, converted, file.read_text())


@pytest.mark.parametrize("what", HF)
def test_a_damaged_index_or_header_is_refused(whole: Path, tmp_path: Path, what: str) -> None:
    assert_refused(whole / "hf/sharded", HF[what], tmp_path / "case")


@pytest.mark.parametrize("what", TRAINING)
def test_a_damaged_training_checkpoint_is_refused(whole: Path, tmp_path: Path, what: str) -> None:
    assert_refused(whole / "megatron/global_step_3", TRAINING[what], tmp_path / "case")


def test_what_is_not_damaged_is_taken(whole: Path, tmp_path: Path) -> None:
    for path in (whole / "hf/sharded", whole / "megatron/global_step_3", whole / "megatron/global_step_3/actor"):
        assert verdicts(path, lambda folder: None, tmp_path / "case") == ("", "")


@pytest.mark.parametrize("at", ["", "actor"])
def test_a_flipped_bit_of_a_training_checkpoint_is_found(
    whole: Path, tmp_path: Path, at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = tmp_path / "global_step_3"
    shutil.copytree(whole / "megatron/global_step_3", case)
    file = max((case / "actor").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[data.index(b"\x3f", len(data) // 2) - 1] ^= 1  # beside an exponent: in the elements
    file.write_bytes(data)
    assert main(["convert", "megatron-to-hf", str(case / at), str(tmp_path / "out"), "--verify"]) == 2
    assert not (tmp_path / "out").exists()
    assert main(["convert", "inspect", str(case / at), "--digests"]) == 1
    assert "has SHA-256" in capsys.readouterr().out


def test_another_models_damage_keeps_no_actor_from_being_converted(whole: Path, tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        (folder / "rng_0.json").write_text("other")

    assert verdicts(whole / "megatron/global_step_3", change, tmp_path / "case") == ("", "")


def test_an_unfinished_training_checkpoint_is_refused(whole: Path, tmp_path: Path) -> None:
    case = tmp_path / "global_step_3.attempt_2"
    shutil.copytree(whole / "megatron/global_step_3", case)
    for path in (case, case / "actor"):
        with pytest.raises(CheckpointError, match="global_step_3.attempt_2 was not finished"):
            convert_megatron_to_hf(path, tmp_path / "out", settings=QUIET)
        with pytest.raises(CheckpointError, match="was not finished"):
            subject_of(str(path))
        assert "was not finished" in str(inspect_checkpoint(path).problem)


@pytest.mark.parametrize(
    ("second", "size", "fault"), [((4, 12), 12, "b overlaps a"), ((12, 20), 20, "b leaves bytes out after a")]
)
def test_each_byte_belongs_to_one_tensor(tmp_path: Path, second: tuple[int, int], size: int, fault: str) -> None:
    both = {"a": (0, 8), "b": second}
    text = json.dumps({n: {"dtype": "F32", "shape": [2], "data_offsets": at} for n, at in both.items()}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    with pytest.raises(CheckpointError, match=fault):
        read_header(tmp_path / "a.safetensors")
