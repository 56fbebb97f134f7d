"""Adapters on grids: checkpoints that any grid resumes from, the base they are for, and the model without them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl import cli
from megarl.config import Config, save_resolved
from megarl.config.lora import LoraConfig
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megarl.core.errors import CheckpointError
from megarl.run.launch.subjects import subject_of
from megarl.weights.checkpoint.convert.adapters import AdapterCheckpoint, merge_adapter
from megarl.weights.checkpoint.convert.convert import Settings
from megarl.weights.checkpoint.convert.open_checkpoint import open_checkpoint
from megarl.weights.checkpoint.formats import peft
from tests.parallel.batches import random_sequences
from tests.parallel.families import save
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, logical_tensors
from tests.parallel.peft_twin import FOLDER, save_adapter
from tests.parallel.test_megatron_on_cpu import parts, sft_steps

LORA = LoraConfig(rank=3, alpha=5.0, targets=["all-linear", "embed_tokens"], modules_to_save=["model.norm"])
SAVING = ParallelConfig(tp=2, pp=2, sequence_parallel=True)
LOADING = {"pp2vpp2": ParallelConfig(pp=2, vpp=2), "dp2ep2": ParallelConfig(dp=2, ep=2)}
STEPS = 2
STATES = tuple(f"optimizer.state.{name}." for name in ("param", "exp_avg", "exp_avg_sq"))


def make_actor(path: Path, parallel: ParallelConfig, lora: LoraConfig = LORA, vocab: int = VOCAB) -> Any:
    """An actor with the adapter that lies beside its model."""
    from megarl.learn.batching import MicroBatching
    from megarl.learn.parallel import process_groups
    from megarl.learn.training.model import TrainedModel
    from megarl.learn.training.schedule import Head
    from megarl.weights.checkpoint.formats import hf

    process_groups.initialize(parallel, seed=1)
    rows = MicroBatching(dp=parallel.dp, rows=2, multiple=parallel.tp, chunks=parallel.pp if parallel.vpp > 1 else 1)
    model = ModelConfig(path=str(path), lora=lora)
    config = hf.read_hf_config(path)
    actor = TrainedModel(config, model, parallel, Head(vocab), rows, OptimizerConfig(lr=1e-2))
    actor.model.load_hf(path)
    adapters = actor.model.adapters
    assert adapters is not None
    adapters.load(path / FOLDER, actor.model.all_tensors)
    actor.model.weights_changed()
    return actor


def whole(actor: Any) -> dict[str, torch.Tensor]:
    """A's and B's as rank 0 gathers them."""
    from megarl.weights.checkpoint.formats import peft

    adapters = actor.model.adapters
    factors = adapters.adapted(actor.model.all_tensors).factors
    return peft.gathered(adapters.layout, torch.distributed.get_rank(), factors)[0]


def train(rank: int, model: str, folder: str) -> dict[str, Any]:
    """Runs in each rank: a checkpoint after some steps, and one more step."""
    from torch.distributed.checkpoint import FileSystemReader

    from megarl.weights.checkpoint.training import state

    actor = make_actor(Path(model), SAVING)
    base = {name: tensor.clone() for name, tensor in actor.model.tensors.items()}
    begins = whole(actor)
    sft_steps(actor, range(STEPS))
    found = state.save(Path(folder), STEPS, parts(actor), {"phase": "rl"}, keep=1, model=Path(model))
    changed = [name for name, tensor in actor.model.tensors.items() if not torch.equal(tensor, base[name])]
    ends = whole(actor)
    actor.model.proven_tensors()
    return {
        "digest": actor.model.adapters.base_digest(actor.model.tensors),
        "changed": changed,
        "still": [name for name, tensor in begins.items() if torch.equal(tensor, ends[name])],
        "adapter": ends,
        "next": sft_steps(actor, range(STEPS, STEPS + 1)),
        "keys": list(FileSystemReader(found / "actor").read_metadata().state_dict_metadata),
    }


def resume(rank: int, model: str, folder: str) -> dict[str, Any]:
    """Runs in each rank: the next step on every other grid."""
    from megatron.core import parallel_state

    from megarl.weights.checkpoint.training import state

    found: dict[str, Any] = {}
    for name, parallel in LOADING.items():
        actor = make_actor(Path(model), parallel)
        newest = state.latest(Path(folder))
        assert newest is not None
        state.load(newest, parts(actor))
        loaded = whole(actor)
        found[name] = {
            "digest": actor.model.adapters.base_digest(actor.model.tensors),
            "adapter": loaded,
            "next": sft_steps(actor, range(STEPS, STEPS + 1)),
        }
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save("qwen3_moe_mixed", tmp_path_factory.mktemp("lora"))
    save_adapter(path, LORA)
    return path


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    run_dir = tmp_path_factory.mktemp("saved")
    folder = run_dir / "checkpoints"
    folder.mkdir()
    save_resolved(Config(model=ModelConfig(path=str(model), lora=LORA)), run_dir / "resolved.json")
    return folder, run_grid(4, train, str(model), str(folder))


def test_training_changes_adapters_alone(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    """Every A and B moves, and of the model itself what ``modules_to_save`` names."""
    _, ranks = saved
    assert ranks[0]["still"] == []
    changed = {name for rank in ranks for name in rank["changed"]}
    assert changed == {"decoder.final_layernorm.weight"}


def test_any_grid_resumes_from_a_checkpoint(model: Path, saved: tuple[Path, list[dict[str, Any]]]) -> None:
    """The same bits of A, B and base, the same next step; and the checkpoint has no base."""
    folder, ranks = saved
    loss, norm = sum(rank["next"][0][0] for rank in ranks), ranks[0]["next"][0][1]
    others = {key for key in ranks[0]["keys"] if ".lora_" not in key and not key.startswith("rng_state")}
    assert others == {f"{prefix}decoder.final_layernorm.weight" for prefix in ("", *STATES)}
    resumed = run_grid(2, resume, str(model), str(folder))
    for name in LOADING:
        assert {rank[name]["digest"] for rank in resumed} == {ranks[0]["digest"]}
        adapter = resumed[0][name]["adapter"]
        assert all(torch.equal(tensor, adapter[key]) for key, tensor in ranks[0]["adapter"].items())
        assert sum(rank[name]["next"][0][0] for rank in resumed) == pytest.approx(loss, rel=1e-5)
        assert resumed[0][name]["next"][0][1] == pytest.approx(norm, rel=1e-5)


def test_a_checkpoint_is_written_as_pefts_files(
    model: Path, saved: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """With the bits that the trainer had, of what is saved whole too; a bench merges them into their model."""
    folder, ranks = saved
    checkpoint = folder / f"global_step_{STEPS}"
    with pytest.raises(CheckpointError, match=r"has adapters alone.*megarl convert megatron-to-hf"):
        open_checkpoint(checkpoint)
    assert cli.main(["convert", "megatron-to-hf", str(checkpoint), str(tmp_path / "adapter"), "--verify"]) == 0
    found = {peft.own_name(name): t for name, t in load_file(tmp_path / "adapter" / peft.TENSORS).items()}
    assert found.keys() == ranks[0]["adapter"].keys() | {"model.norm.weight"}
    assert all(torch.equal(found[name], tensor) for name, tensor in ranks[0]["adapter"].items())
    assert not torch.equal(
        found["model.norm.weight"], load_file(model / FOLDER / peft.TENSORS)[peft.stored_name("model.norm.weight")]
    )
    assert peft.base_of(tmp_path / "adapter") == model

    subject = subject_of(f"run:{folder.parent}@{STEPS}")
    subject.convert(tmp_path / "bench")
    merge_adapter(model, tmp_path / "adapter", tmp_path / "merged", Settings(progress=False))
    wanted, benched = (logical_tensors(path) for path in (tmp_path / "merged", subject.hf_path(tmp_path / "bench")))
    assert wanted.keys() == benched.keys() and all(torch.equal(wanted[name], benched[name]) for name in wanted)

    shutil.copytree(checkpoint, tmp_path / "alone" / checkpoint.name)
    with pytest.raises(CheckpointError, match=r"resolved\.json is missing; give RUN/checkpoints/global_step_N"):
        AdapterCheckpoint.of(tmp_path / "alone" / checkpoint.name)


def compare_with_base(rank: int, path: str) -> dict[str, Any]:
    """Runs alone: log-probs of the base, of the actor without adapters, with them, and of the merged model."""
    from megarl.learn.training.adapters import share_base
    from megarl.learn.training.model import Model, WithoutAdapters
    from megarl.weights.reshard.adapters import merged

    actor = make_actor(Path(path), ParallelConfig())
    sequences = random_sequences(3, 6, VOCAB)
    batches = [actor.model.micro_batches(sequences)]
    config, rows = actor.model.hf_config, actor.model.micro_batching
    plain = Model(config, ModelConfig(path=path), ParallelConfig(), actor.model.head, rows)
    plain.load_hf(Path(path))
    found = {
        "base": plain.outputs(sequences, batches),
        "without": WithoutAdapters(actor.model).outputs(sequences, batches),
        "with": actor.model.outputs(sequences, batches),
    }
    tensors = actor.model.proven_tensors()
    for name, tensor in plain.tensors.items():
        tensor.copy_(tensors[name])
    found["merged"] = plain.outputs(sequences, batches)
    off, name = 0.0, ""
    ab = actor.model.adapters.adapted(actor.model.all_tensors).factors
    for local, adapters in actor.model.adapters.local.items():
        factors, own = ab, actor.model.tensors[local]
        exact = {key: value.double() for key, value in factors.items()}
        expected = own.double()
        for each in adapters:
            product, at = each.factors.scale * (exact[each.b] @ exact[each.a]), 0
            into = expected.t() if each.factors.is_embedding else expected
            for begin, end in each.places:
                into[begin:end] += product[at : at + end - begin]
                at += end - begin
        error = float(((merged(own, adapters, factors).double() - expected).abs() / expected.abs().max()).max())
        off, name = max((off, name), (error, local))
    found["off"] = off, name
    lora = Model(config, actor.model.model_config, ParallelConfig(), None, rows)
    found["begun"] = {name: t.clone() for name, t in lora.all_tensors.items() if ".embed_tokens." in name}
    lora.copy_from(actor.model, bucket_bytes=1 << 20)
    share_base(actor.model.chunks, lora.chunks)
    theirs = actor.model.tensors
    found["shared"] = {
        name for name, tensor in lora.tensors.items() if name in theirs and tensor.data_ptr() == theirs[name].data_ptr()
    }
    found["names"] = set(lora.tensors)
    return found


def test_a_model_without_its_adapters_is_the_base(model: Path) -> None:
    [found] = run_grid(1, compare_with_base, str(model))
    assert torch.equal(found["without"], found["base"]), "the reference of an actor with adapters"
    assert float((found["with"] - found["base"]).abs().max()) > 0.1
    assert float((found["merged"] - found["with"]).abs().max()) < 1e-5
    assert found["off"][0] < 1e-6, found["off"]
    kept = {"output_layer.weight", "decoder.final_layernorm.weight"}
    assert found["shared"] == found["names"] - kept, "a critic of the same base has no second one"
    a, b = (found["begun"][f"lora.embedding.word_embeddings.embed_tokens.{which}"] for which in "ab")
    assert not a.any() and 0.8 < float(b.std()) < 1.2, "of an embedding A begins with zeros, and B as PEFT's"
