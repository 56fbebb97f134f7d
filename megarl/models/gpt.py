"""A Megatron-Core GPTModel stage from an architecture table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from megarl.architectures import architecture
from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.reshard.layouts import padded_vocab_size

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu}


class RMSNorm(torch.nn.RMSNorm):
    """The local spec's norm, usable with sequence parallelism: Megatron reduces gradients of weights so marked."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def build_stage(hf_config: Mapping[str, Any], model: ModelConfig, parallel: ParallelConfig) -> torch.nn.Module:
    """This rank's pipeline stage. Its weights mean nothing yet: load some before use.

    On the last stage ``forward(tokens, position_ids, None)`` returns vocabulary-parallel logits [B, S, V/tp].
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    table = architecture(hf_config)
    gpt = dict(table.gpt(hf_config))
    config = transformer_config(hf_config, model, parallel)
    gpt["vocab_size"] = padded_vocab_size(gpt["vocab_size"], parallel.tp)
    stage: torch.nn.Module = GPTModel(
        config,
        _block_spec(config, model),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        parallel_output=True,
        **gpt,
    )
    if parallel.backend == "nccl":
        stage = stage.cuda()
    return Float16Module(config, stage) if config.bf16 else stage


def transformer_config(hf_config: Mapping[str, Any], model: ModelConfig, parallel: ParallelConfig) -> Any:
    """Megatron's TransformerConfig: sizes from the table, precision and grid from the settings."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    values = dict(architecture(hf_config).transformer_config(hf_config))
    values["activation_func"] = ACTIVATIONS[values.pop("activation")]
    dtype = getattr(torch, model.dtype)
    on_cpu = parallel.backend == "gloo"
    return TransformerConfig(
        **values,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=model.dtype == "bfloat16",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        finalize_model_grads_func=finalize_model_grads,
        # The loss arrives divided by its global denominator, so gradients are summed and never divided again.
        calculate_per_token_loss=True,
        variable_seq_lengths=False,
        batch_p2p_comm=not on_cpu,
        deallocate_pipeline_outputs=not on_cpu,
        # Each of these fusions needs CUDA, apex, TransformerEngine or a compile at start.
        use_cpu_initialization=on_cpu,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
    )


def _block_spec(config: Any, model: ModelConfig) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    if model.transformer_impl == "transformer_engine":
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside DistributedDataParallel and Float16Module."""
    inner: Any = module
    while hasattr(inner, "module"):
        inner = inner.module
    assert isinstance(inner, torch.nn.Module)
    return inner


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Local parameter name -> data, as reshard layouts name them."""
    return {name: p.data for name, p in unwrap(module).named_parameters()}
