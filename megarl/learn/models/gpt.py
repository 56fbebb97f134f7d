"""Construction of a Megatron-Core GPTModel stage from the architecture table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.learn.models.experts import clamped_swiglu
from megarl.learn.models.recompute import recompute_settings
from megarl.learn.models.specs import block_spec, check_implementation
from megarl.weights.architectures import Head, architecture
from megarl.weights.architectures.megatron_config import gpt_kwargs, has_router_bias, multipliers, transformer_kwargs
from megarl.weights.architectures.rope import ropes
from megarl.weights.megatron_private import keep_float32_bias
from megarl.weights.reshard.layouts import padded_vocab_size

__all__ = ["build_chunks", "named_tensors", "transformer_config", "unwrap"]


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": gelu_tanh, "clamped_swiglu": clamped_swiglu}


def build_chunks(
    hf_config: Mapping[str, Any], model: ModelConfig, parallel: ParallelConfig, head: Head = "lm"
) -> tuple[torch.nn.Module, ...]:
    """Build this rank's ``parallel.vpp`` model chunks. Their weights are meaningless: load weights before use.

    On the last chunk of the last stage ``forward(tokens, position_ids, None)`` with tokens int64 [B, S] returns
    vocabulary-parallel logits [B, S, V/tp]; within ``models.head.requesting`` it returns float32 [B, S, 2] of log-prob
    and entropy. With ``head="score"`` it returns float32 [B, S, 1], equal on all tensor-parallel ranks
    (``install_value_head``). ``packed_seq_params``: the sequences of a chunk are concatenated (B = 1). Under context
    parallelism S counts this rank's share (see ``batching.micro``). Only models with images use position ids
    (``models.vision``), as int64 [3, B, S].
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    from megarl.learn.models import attention, experts, packed, vision
    from megarl.learn.models import head as lm_head
    from megarl.learn.models import norms as scaling

    check_implementation(model, parallel)
    arch = architecture(hf_config)
    gpt = gpt_kwargs(architecture(hf_config, head), hf_config)
    layer_ropes = ropes(arch, hf_config)
    numbers = multipliers(arch, hf_config)
    gpt["vocab_size"] = padded_vocab_size(gpt["vocab_size"], parallel.tp)
    config, sizes = transformer_config(hf_config, model, parallel), arch.sizes(hf_config)
    chunks = []
    for chunk in range(parallel.vpp):
        vp_stage = chunk if parallel.vpp > 1 else None
        pre_process = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        post_process = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        block = block_spec(config, model, vp_stage, numbers.residual, arch.norms, sizes)
        if has_router_bias(arch) and not arch.router.sigmoid:
            experts.balance(block, model.router, biased=True)
        if not config.gated_linear_unit:
            experts.pair(block)
        stage: torch.nn.Module = GPTModel(
            config,
            block,
            pre_process=pre_process,
            post_process=post_process,
            position_embedding_type="rope",
            parallel_output=True,
            vp_stage=vp_stage,
            **(lm_head.smallest_output(gpt, pre_process, post_process, parallel.tp) if head == "score" else gpt),
        )
        _mark_experts(stage)
        scaling.install(stage, numbers, logits=head == "lm")
        scaling.add_layer_inputs(stage, gpt["vocab_size"], sizes.num_layers, sizes.layer_input)
        (lm_head.install_value_head if head == "score" else lm_head.install)(stage)
        experts.install(stage)
        attention.share_keys(stage, sizes)
        packed.install(stage, layer_ropes)
        base, share = gpt.get("rotary_base", 0.0), gpt.get("rotary_percent", 1.0)
        vision.install(stage, hf_config, base, share, trained=model.train_vision_tower)
        if parallel.backend == "nccl":
            stage = stage.cuda()
        if config.bf16:
            stage = Float16Module(config, stage)
            _keep_float32(stage)
            vision.keep_float32(unwrap(stage))
        chunks.append(stage)
    return tuple(chunks)


def transformer_config(hf_config: Mapping[str, Any], model: ModelConfig, parallel: ParallelConfig) -> Any:
    """Make Megatron's TransformerConfig: sizes from the table, precision and grid from the settings."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    values = transformer_kwargs(architecture(hf_config), hf_config)
    values["activation_func"] = ACTIVATIONS[values.pop("activation")]
    if "num_moe_experts" in values:
        values |= _experts_settings(model)
    dtype = getattr(torch, model.dtype)
    on_cpu = parallel.backend == "gloo"
    make = MLATransformerConfig if values.pop("mla") else TransformerConfig
    biased = values.pop("add_bias_linear")
    config = make(
        **values,
        add_bias_linear=False,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=model.dtype == "bfloat16",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        **recompute_settings(model, architecture(hf_config).sizes(hf_config)),
        finalize_model_grads_func=finalize_model_grads,
        # The loss is already divided by its global denominator, so gradients are summed and never divided again.
        calculate_per_token_loss=True,
        variable_seq_lengths=False,
        transformer_impl=model.transformer_impl,  # 0.19 selects the projections of latent attention by it
        moe_grouped_gemm=model.transformer_impl == "transformer_engine" and "num_moe_experts" in values,
        batch_p2p_comm=not (on_cpu or parallel.overlap_p2p),
        overlap_p2p_comm=parallel.overlap_p2p,
        deallocate_pipeline_outputs=not on_cpu,
        use_cpu_initialization=on_cpu,
        # torch.compile's kernel, a tenth of an update's time (docs/benchmarks/gpu.md).
        bias_activation_fusion=not on_cpu and values["activation_func"] is F.silu,
        **_eight_bits(model),
        **dict.fromkeys(model.fusions, True),
        # Not offered: none helps without dropout, with our attention, or with shared tables of angles.
        apply_rope_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    config.add_bias_linear = biased  # set later: Megatron refuses biases of experts that ranks share; see ``paired``
    return config


def _eight_bits(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's settings for ``model.fp8``, with DeepSeek-V3's format for blocks."""
    if model.fp8 is None:
        return {}
    return {
        "fp8": "e4m3" if model.fp8 == "blockwise" else "hybrid",
        "fp8_recipe": model.fp8,
        "disable_parameter_transpose_cache": True,  # else weights in 8 bits stay on the device between updates
    }


def _experts_settings(model: ModelConfig) -> dict[str, str]:
    """Return Megatron's settings for exchanging tokens between expert-parallel ranks, and for the routers' dtype."""
    dispatcher = {"moe_token_dispatcher_type": "alltoall"}
    if model.moe_dispatcher == "deepep":
        dispatcher = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
    return dispatcher | ({"moe_router_dtype": "fp32"} if model.router_dtype == "float32" else {})


def _mark_experts(stage: torch.nn.Module) -> None:
    """Mark experts for reduction over their separate data-parallel group, which Megatron does not do at ep=1.

    Without the mark gradients are wrong if experts are sharded differently from other layers (etp != tp), and a
    checkpoint of the distributed optimizer does not load with another ep.
    """
    for name, parameter in stage.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]


def _keep_float32(stage: torch.nn.Module) -> None:
    """Restore router biases to float32 after Float16Module: they decide between nearly equal experts."""
    for module in stage.modules():
        keep_float32_bias(module)


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the GPTModel inside DistributedDataParallel and Float16Module."""
    inner: Any = module
    while hasattr(inner, "module"):
        inner = inner.module
    assert isinstance(inner, torch.nn.Module)
    return inner


def named_tensors(module: torch.nn.Module | Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return local name -> data of every parameter and router bias, with the names of reshard layouts.

    With several chunks (``parallel.vpp`` above 1) names begin with ``chunk{v}.``.
    """
    if not isinstance(module, torch.nn.Module):
        return {f"chunk{v}.{name}": t for v, chunk in enumerate(module) for name, t in named_tensors(chunk).items()}
    stage = unwrap(module)
    biases = {name: buffer for name, buffer in stage.named_buffers() if name.endswith("mlp.router.expert_bias")}
    return {name: p.data for name, p in stage.named_parameters()} | biases
