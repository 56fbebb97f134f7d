"""What the engines themselves hold on a rank, without the other ranks.

``python -m tests.unit.reshard_engines ENGINE[,ENGINE]...`` prints a line of JSON for each case: the engine, the case
and how the oracle differs from it. Engines of one word share a process, which is forked from this one.

- ``megatron``: real GPTModels over torch's fake process group; their names, shapes, layer and expert numbers.
- ``checkpoint``: the values that they save.
- ``vllm``: the values in real models whose own loaders read a whole HF model, told which place in their groups they
  have.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.conftest import SOAK
from tests.unit import reshard_oracle as oracle
from tests.unit.reshard_cases import FAMILIES, MOE_FAMILIES, Config, Grid, qwen3_config

Line = tuple[str, Any]

_EXPERTS: dict[str, Config] = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
    "deepseek_v3": {
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "head_dim": None,
        "num_nextn_predict_layers": 0,
        "rope_interleave": True,
    },
}


def model(family: str, **changes: Any) -> Config:
    base = qwen3_config(
        model_type=family,
        vocab_size=170,
        hidden_act="silu",
        intermediate_size=128,
        num_hidden_layers=5,
        sliding_window=None,
    )
    return {**base, **_EXPERTS.get(family, {}), **changes}


def small_model(family: str, **changes: Any) -> Config:
    """With 4 experts, for grids that must divide them."""
    sizes: Config = {
        "hidden_size": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 4,
    }
    if family == "deepseek_v3":
        sizes |= {
            "num_key_value_heads": 8,
            "head_dim": None,
            "q_lora_rank": 8,
            "kv_lora_rank": 6,
            "qk_rope_head_dim": 2,
            "qk_nope_head_dim": 3,
            "v_head_dim": 5,
        }
    experts = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "deepseek_v3": "n_routed_experts"}
    return model(family, **{**sizes, **({experts[family]: 4} if family in experts else {}), **changes})


# ------------------------------------------------------------------ Megatron-Core


def megatron() -> Iterator[Line]:
    from megarl.learn.parallel import cpu

    cpu.install()
    dense = [
        Grid(),
        Grid(2, 2),
        Grid(tp=4),
        Grid(tp=8),
        Grid(2, 2, 2, cp=2),
        Grid(pp=2, vpp=2),
        Grid(tp=2, pp=3, first=1, last=1),
        Grid(pp=2, last=1),
        Grid(pp=3, first=2),
    ]
    sparse = [
        Grid(tp=2, dp=2, ep=2),
        Grid(tp=2, dp=4, ep=4, etp=2),
        Grid(tp=2, pp=2, dp=2, ep=4, etp=1),
        Grid(tp=2, etp=1),
        Grid(dp=4, etp=2, ep=2),
        Grid(pp=2, vpp=2, dp=2, ep=2),
        Grid(tp=2, cp=2, ep=2),
        Grid(pp=2, first=1, dp=2, ep=2),
    ]
    for family in FAMILIES:
        others = (
            [{"q_lora_rank": None}, {"num_nextn_predict_layers": 2}]
            if family == "deepseek_v3"
            else [{"tie_word_embeddings": True}]
        )
        for changes in ({}, *others):
            config = small_model(family, **changes)
            for grid in dense + (sparse if family in MOE_FAMILIES else []):
                for rank in ranks_of(family, changes, grid):
                    got, want = megatron_holds(config, grid, rank), megatron_expected(config, grid, rank)
                    different = {k: (got.get(k), want.get(k)) for k in got | want if got.get(k) != want.get(k)}
                    yield f"{family} {changes} {grid} rank {rank}", different or None


def ranks_of(family: str, changes: Config, grid: Grid) -> list[int]:
    """All ranks of a dense family, of one with experts and of MLA's; elsewhere those that hold something else.

    Families differ in what a layer has, not in how a grid cuts it; the changes touch the first and the last stage
    or all layers alike. ``make soak`` takes all ranks of all.
    """
    if SOAK or (not changes and family in ("qwen3", "mixtral", "deepseek_v3")):
        return list(range(grid.world))
    return sorted({0, grid.world - 1} | ({grid.world // 2} if not changes else set()))


@functools.cache
def seed_once() -> None:
    """Megatron makes no model without seeds. No case depends on them, and torch seeds a missing GPU slowly."""
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(0)


@contextlib.contextmanager
def megatron_chunks(c: Config, grid: Grid, rank: int) -> Iterator[dict[str, Any]]:
    """Name prefix -> GPTModel of every model chunk of a rank, in a world of which the other ranks do not answer."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from torch import distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megarl.config.schema import ModelConfig
    from megarl.learn.models.specs import block_spec

    dist.init_process_group("fake", rank=rank, world_size=grid.world, store=FakeStore())
    parallel_state.initialize_model_parallel(
        grid.tp,
        grid.pp,
        grid.vpp if grid.vpp > 1 else None,
        context_parallel_size=grid.cp,
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=oracle.expert_size(grid),
        create_gloo_process_groups=False,
    )
    seed_once()
    settings, unit = megatron_settings(c, grid), 64 * grid.tp
    chunks = {}
    for chunk in range(grid.vpp):
        stage = chunk if grid.vpp > 1 else None
        spec = block_spec(settings, ModelConfig(), stage)
        chunks[f"chunk{chunk}." if grid.vpp > 1 else ""] = GPTModel(
            settings,
            spec,
            mtp_block_spec=get_gpt_mtp_block_spec(settings, spec, use_transformer_engine=False, vp_stage=stage),
            vocab_size=-(-c["vocab_size"] // unit) * unit,
            max_sequence_length=16,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=c["tie_word_embeddings"],
            vp_stage=stage,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        )
    yield chunks
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def tensors_of(gpt: Any) -> dict[str, torch.Tensor]:
    buffers = {name: buffer for name, buffer in gpt.named_buffers() if name.endswith("expert_bias")}
    return {name: tensor.data for name, tensor in (dict(gpt.named_parameters()) | buffers).items()}


def megatron_holds(c: Config, grid: Grid, rank: int) -> dict[str, Any]:
    """Shapes by name, and what Megatron itself says about this rank's place, layers and experts."""
    from megatron.core import parallel_state

    held: dict[str, Any] = {}
    with megatron_chunks(c, grid, rank) as chunks:
        for prefix, gpt in chunks.items():
            held |= {prefix + name: tuple(tensor.shape) for name, tensor in tensors_of(gpt).items()}
            held[prefix + "layers"] = [layer.layer_number - 1 for layer in gpt.decoder.layers]
            held[prefix + "experts"] = [
                list(layer.mlp.local_expert_indices)
                for layer in gpt.decoder.layers
                if hasattr(layer.mlp, "local_expert_indices")
            ]
        held["tp, etp"] = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    return held


def megatron_expected(c: Config, grid: Grid, rank: int) -> dict[str, Any]:
    mtp = c.get("num_nextn_predict_layers", 0) > 0
    tensors = oracle.megatron_rank(c, oracle.numbered_hf(c, mtp), grid, rank, mtp=mtp)
    want: dict[str, Any] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    stage, place = divmod(rank, grid.tp * grid.cp * grid.dp)
    etp = oracle.expert_size(grid)
    for chunk in range(grid.vpp):
        prefix = f"chunk{chunk}." if grid.vpp > 1 else ""
        layers = oracle.chunk_layers(c["num_hidden_layers"], grid)[stage, chunk]
        want[prefix + "layers"] = layers
        moe = [layer for layer in layers if oracle.is_moe(c, layer)]
        each = oracle.num_experts(c) // grid.ep if moe else 0
        first = place // etp % grid.ep * each
        want[prefix + "experts"] = [list(range(first, first + each)) for _ in moe]
    return {**want, "tp, etp": (place % grid.tp, place % etp)}


def checkpoint() -> Iterator[Line]:
    """The oracle's values under Megatron's own account of them: all ranks hold what ``megatron_rank`` says and give
    their ``sharded_state_dict``; what its tensors add up to must be megarl's layout of a checkpoint, filled from HF."""
    from megarl.learn.parallel import cpu
    from megarl.weights.reshard.layouts import dist_layout, hf_layout
    from megarl.weights.reshard.plan import build_plan
    from tests.unit.test_reshard_families import carry_out

    cpu.install()
    dense = [Grid(), Grid(2, 2), Grid(tp=4), Grid(pp=2, vpp=2), Grid(tp=2, pp=2, first=1)]
    sparse = [Grid(tp=2, dp=2, ep=2, etp=2), Grid(tp=2, pp=2, dp=2, ep=4, etp=1), Grid(pp=2, vpp=2, dp=2, ep=2)]
    for family in FAMILIES:
        for changes in (
            {},
            {"num_nextn_predict_layers": 1} if family == "deepseek_v3" else {"tie_word_embeddings": True},
        ):
            config = small_model(family, **changes)
            mtp = config.get("num_nextn_predict_layers", 0) > 0
            hf = oracle.numbered_hf(config, mtp)
            for grid in dense + (sparse if family in MOE_FAMILIES else []):
                rows = -(-config["vocab_size"] // (64 * grid.tp)) * 64 * grid.tp
                plan = build_plan(hf_layout(config, mtp=mtp), dist_layout(config, vocab=rows, mtp=mtp))
                saved = [megatron_saves(config, hf, grid, rank, mtp) for rank in range(grid.world)]
                yield f"{family} {changes} {grid}", oracle.first_difference(added_up(saved), carry_out(plan, [hf], 0))


def megatron_saves(c: Config, hf: oracle.Tensors, grid: Grid, rank: int, mtp: bool) -> list[Any]:
    """The ShardedTensors of one rank."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    values = oracle.megatron_rank(c, hf, grid, rank, mtp=mtp)
    found = []
    with megatron_chunks(c, grid, rank) as chunks:
        for prefix, gpt in chunks.items():
            for name, tensor in tensors_of(gpt).items():
                tensor.copy_(values[prefix + name])
            state = gpt.sharded_state_dict(
                metadata={"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
            )
            apply_factories(state)
            found += [value for value in nested_values(state) if isinstance(value, ShardedTensor)]
    return found


def added_up(ranks: list[list[Any]]) -> oracle.Tensors:
    """Key -> global tensor; where several ranks have an element they must agree."""
    whole: oracle.Tensors = {}
    for shard in (shard for rank in ranks for shard in rank):
        full = whole.setdefault(shard.key, torch.full(shard.global_shape, torch.nan))
        data = shard.data.reshape([1] * shard.prepend_axis_num + list(shard.data.shape))
        part = full[tuple(slice(at, at + size) for at, size in zip(shard.global_offset, data.shape, strict=True))]
        assert bool((part.isnan() | (part == data)).all()), f"ranks differ in {shard.key}"
        part.copy_(data)
    return whole


def megatron_settings(c: Config, grid: Grid) -> Any:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    mla = c["model_type"] == "deepseek_v3"
    values: dict[str, Any] = {
        "num_layers": c["num_hidden_layers"],
        "hidden_size": c["hidden_size"],
        "num_attention_heads": c["num_attention_heads"],
        "num_query_groups": c["num_key_value_heads"],
        "kv_channels": c["v_head_dim"] if mla else oracle.head_of(c),
        "ffn_hidden_size": c["intermediate_size"],
        "normalization": "RMSNorm",
        "transformer_impl": "local",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": c["model_type"] == "qwen2",
        "qk_layernorm": mla or c["model_type"] in ("qwen3", "qwen3_moe"),
        "pipeline_dtype": torch.float32,
        "tensor_model_parallel_size": grid.tp,
        "pipeline_model_parallel_size": grid.pp,
        "virtual_pipeline_model_parallel_size": grid.vpp if grid.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": grid.first,
        "num_layers_in_last_pipeline_stage": grid.last,
        "expert_model_parallel_size": grid.ep,
        "expert_tensor_parallel_size": oracle.expert_size(grid),
        "use_cpu_initialization": True,
        "perform_initialization": False,  # no case reads initial values
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
    }
    if c["model_type"] in MOE_FAMILIES:
        pattern = [int(oracle.is_moe(c, layer)) for layer in range(c["num_hidden_layers"])]
        values |= {
            "num_moe_experts": oracle.num_experts(c), "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall",
            "moe_ffn_hidden_size": c.get("moe_intermediate_size", c["intermediate_size"]),
            "moe_layer_freq": 1 if all(pattern) else pattern,
        }  # fmt: skip
    if mla:
        values |= {
            "q_lora_rank": c["q_lora_rank"],
            "kv_lora_rank": c["kv_lora_rank"],
            "v_head_dim": c["v_head_dim"],
            "rope_type": "rope",
            "qk_head_dim": c["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": c["qk_rope_head_dim"],
            "moe_shared_expert_intermediate_size": c["n_shared_experts"] * c["moe_intermediate_size"],
            "mtp_num_layers": c["num_nextn_predict_layers"] or None,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32",
        }
    return (MLATransformerConfig if mla else TransformerConfig)(**values)


# ------------------------------------------------------------------ vLLM


def vllm() -> Iterator[Line]:
    os.environ.update(TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1", VLLM_PLUGINS="", VLLM_LOGGING_LEVEL="ERROR")
    import vllm.distributed.parallel_state as groups
    from vllm.config import VllmConfig, set_current_vllm_config

    # Sizes that vLLM's CPU kernels accept.
    sizes = {"hidden_size": 96, "num_attention_heads": 12, "head_dim": 32}
    latent = {
        "num_key_value_heads": 12,
        "head_dim": None,
        "q_lora_rank": 6,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    more = {"qwen2": {"hidden_size": 384}, "deepseek_v3": latent}  # qwen2 takes hidden // heads for its heads
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        groups.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        groups.initialize_model_parallel(1, 1)
        if groups._EP is None:
            groups._EP = groups.init_model_parallel_group([[0]], 0, "gloo", group_name="ep")
        for family in FAMILIES:
            places = [({}, 4, 1, False, rank) for rank in (0, 1, 3)] + [({}, 2, 3, False, rank) for rank in (1, 2, 5)]
            if family == "deepseek_v3":
                places.append(({"q_lora_rank": None}, 2, 1, False, 1))
            else:
                places += [({"tie_word_embeddings": True}, 1, 3, False, rank) for rank in range(3)]
            if family in MOE_FAMILIES:
                places += [({}, 4, 1, True, rank) for rank in range(4)]
            for changes, tp, pp, expert_parallel, rank in places:
                config = model(family, **{**sizes, **more.get(family, {}), **changes})
                hf = oracle.numbered_hf(config)
                got = vllm_holds(config, hf, Path(folder), tp, pp, expert_parallel, rank)
                want = oracle.vllm_rank(config, hf, tp, rank, pp, expert_parallel)
                what = f"{family} {changes} tp={tp} pp={pp} expert_parallel={expert_parallel} rank {rank}"
                yield what, oracle.first_difference(got, want)


def vllm_holds(
    c: Config, hf: oracle.Tensors, folder: Path, tp: int, pp: int, expert_parallel: bool, rank: int
) -> oracle.Tensors:
    """Every parameter, and lm_head's also where it is the embedding's, after ``load_weights`` of the whole model."""
    import vllm.distributed.parallel_state as groups
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import utils

    names = {"deepseek_v3": "DeepseekV3", "qwen3_moe": "Qwen3Moe"}
    architectures = [names.get(c["model_type"], c["model_type"].capitalize()) + "ForCausalLM"]
    settings = {k: v for k, v in c.items() if v is not None or k == "q_lora_rank"}
    (folder / "config.json").write_text(
        json.dumps({**settings, "architectures": architectures, "torch_dtype": "float32"})
    )
    # Nothing here speaks with other processes: constructors and loaders only ask for their place.
    for group, place, size in ((groups._TP, rank % tp, tp), (groups._EP, rank % tp, tp), (groups._PP, rank // tp, pp)):
        group.rank_in_group = group.rank = place
        group.world_size, group.ranks = size, list(range(size))
    utils._model_to_pp_missing_layer_names.clear()  # keyed by id(model)
    hf_model = ModelConfig(
        model=str(folder),
        tokenizer=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=32,
        enforce_eager=True,
    )
    config = VllmConfig(
        model_config=hf_model, parallel_config=ParallelConfig(enable_expert_parallel=expert_parallel),
        cache_config=CacheConfig(block_size=32), device_config=DeviceConfig("cpu"),
    )  # fmt: skip
    with set_current_vllm_config(config):
        net = initialize_model(vllm_config=config, model_config=hf_model)
        for parameter in net.parameters():
            parameter.data.zero_()
        net.load_weights(iter(hf.items()))
    heads = {f"lm_head.{name}": parameter for name, parameter in net.lm_head.named_parameters()}
    return {name: parameter.data for name, parameter in (dict(net.named_parameters()) | heads).items()}


if __name__ == "__main__":
    pids = []
    for engines in sys.argv[1:]:
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                for engine in engines.split(","):
                    for line in {"megatron": megatron, "checkpoint": checkpoint, "vllm": vllm}[engine]():
                        os.write(1, f"{json.dumps([engine, *line])}\n".encode())  # at once: others write there too
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    sys.exit(any([os.waitpid(pid, 0)[1] for pid in pids]))
