"""Modules of a stage: Megatron's local spec with additions, or TransformerEngine's."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.core.errors import ConfigError
from megarl.learn.models import norms
from megarl.learn.models.norms import RMSNorm
from megarl.weights import megatron_private
from megarl.weights.architectures import architecture
from megarl.weights.architectures.megatron_config import transformer_kwargs
from megarl.weights.architectures.rope import ropes
from megarl.weights.architectures.table import USUAL_NORMS, ModelSizes, NormRules

LATENT_NORM_EPS = 1e-6
"""Epsilon of latent attention's norms in transformers, regardless of ``rms_norm_eps``; Megatron has one for all
norms."""


FUSION_PACKAGES = {
    "gradient_accumulation_fusion": ("fused_weight_gradient_mlp_cuda", "NVIDIA's apex with its CUDA extensions"),
    "moe_permute_fusion": ("transformer_engine.pytorch", "TransformerEngine"),
}
"""Member of ``model.fusions`` -> (module that Megatron-Core imports for it, package that provides the module)."""


EIGHT_BIT_UNIT = 16
"""Divisor of the sizes of matrices that TransformerEngine multiplies in 8 bits; tokens are padded to it."""
EIGHT_BIT_BLOCK = 128
"""The same with a scale for each block."""


def check_implementation(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError if this machine cannot provide ``model.transformer_impl``, ``model.fusions``, ``model.fp8``,
    ``model.moments_dtype`` or ``model.moe_dispatcher``. Cheap for defaults."""
    for fusion in model.fusions:
        _check_package(f"model.fusions has {fusion}", *FUSION_PACKAGES[fusion], "leave it out", parallel)
    if model.transformer_impl == "transformer_engine":
        package = "transformer_engine.pytorch", "TransformerEngine"
        _check_package(
            "model.transformer_impl=transformer_engine", *package, "set model.transformer_impl to local", parallel
        )
    if model.fp8 is not None:
        package = "transformer_engine.pytorch", "TransformerEngine"
        _check_package(f"model.fp8={model.fp8}", *package, "set model.fp8 to null", parallel)
    if model.moments_dtype != "float32" and parallel.backend == "nccl":
        package = "transformer_engine.pytorch.optimizers", "TransformerEngine"
        fix = "set model.moments_dtype to float32"
        _check_package(f"model.moments_dtype={model.moments_dtype}", *package, fix, parallel)
    if model.moe_dispatcher == "deepep":
        fix = "set model.moe_dispatcher to alltoall"
        _check_package("model.moe_dispatcher=deepep", "deep_ep", "DeepEP", fix, parallel)


def _check_package(setting: str, module: str, package: str, fix: str, parallel: ParallelConfig) -> None:
    if parallel.backend != "nccl":
        raise ConfigError(
            f"{setting} with parallel.backend={parallel.backend}: {package} computes on CUDA alone; set "
            f"parallel.backend to nccl, or {fix}"
        )
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a CUDA library that it was built for is missing
        raise ConfigError(
            f"{setting}, but {module} cannot be imported ({error}); install {package} as docs/install_gpu.md says, or "
            f"{fix}"
        ) from error


def block_spec(
    config: Any,
    model: ModelConfig,
    vp_stage: int | None = None,
    residual: float = 1.0,
    rules: NormRules = USUAL_NORMS,
    sizes: ModelSizes | None = None,
) -> Any:
    """Make TransformerBlockSubmodules of this rank's layers (of chunk ``vp_stage``), dense and with experts by
    ``config``, with norms by ``rules``. Outputs of attention and MLP are multiplied by ``residual`` before they are
    added. ``sizes`` has the layers whose heads or MLPs differ; None if there are none."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megarl.learn.models.attention import CoreAttention, GatedSelfAttention, NormedValueAttention

    width = 0 if sizes is None else sizes.layer_input
    if config.multi_latent_attention and config.q_lora_rank is None:
        megatron_private.keep_query_projection()
    if model.transformer_impl == "transformer_engine":
        # Fused norms, linears and attention (packed and context parallel). Not offered: fp8, fused rope.
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        return _balanced(_added(block, config, residual, rules, width), model)
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    block.layer_norm = norms.norm_of(rules)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CoreAttention
        if config.attention_output_gate:
            layer.submodules.self_attention.module = GatedSelfAttention
        if rules.of_values:
            layer.submodules.self_attention.module = NormedValueAttention
        norms.place(layer.submodules, config, rules)
        if config.multi_latent_attention:
            latent_norm = ModuleSpec(module=RMSNorm, params={"own_eps": LATENT_NORM_EPS})
            attention.kv_layernorm = latent_norm
            attention.q_layernorm = IdentityOp if config.q_lora_rank is None else latent_norm
            # Whole on every rank, as with TransformerEngine. The local spec's sharded and gathered projection loses the
            # gradient of the other ranks' heads for the shared rotary key.
            attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
    block = _with_recurrent_layers(_added(block, config, residual, rules, width), config, vp_stage)
    return _balanced(_with_other_layers(block, config, sizes, vp_stage), model)


def _with_other_layers(block: Any, config: Any, sizes: ModelSizes | None, vp_stage: int | None) -> Any:
    """Give layers without a window their own heads, if they differ from the others; let ``sizes.shared_layers`` take
    keys and values, and have their own MLPs."""
    if sizes is None or not (sizes.global_layers or sizes.shared_layers):
        return block
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    for number, layer in enumerate(block.layer_specs, first):
        attention, mlp = layer.submodules.self_attention, layer.submodules.mlp
        if number in sizes.global_layers:
            heads = {"head": sizes.global_head, "groups": sizes.global_kv_heads}
            values = "keys" if sizes.keys_are_values else "projected"
            attention = replace(attention, params={**attention.params, **heads, "values": values})
        if number in sizes.shared_layers:
            attention = replace(attention, params={**attention.params, "values": "taken"})
            if sizes.late_ffn != sizes.ffn:  # no ModuleSpec: Megatron warns of one with another class than its own
                mlp = SimpleNamespace(module=_late_mlp(), submodules=mlp.submodules, params={"width": sizes.late_ffn})
        # layers alike share one spec
        submodules = replace(layer.submodules, self_attention=attention, mlp=mlp)
        block.layer_specs[number - first] = replace(layer, submodules=submodules)
    return block


@cache
def _late_mlp() -> Any:
    """Return the class of an MLP that is ``width`` wide instead of ``config.ffn_hidden_size``."""
    from megatron.core.transformer.mlp import MLP

    class LateMLP(MLP):  # type: ignore[misc]
        def __init__(self, config: Any, width: int, **named: Any) -> None:
            config = copy.copy(config)
            config.ffn_hidden_size = width
            super().__init__(config, ffn_hidden_size=width, **named)

    return LateMLP


def _with_recurrent_layers(block: Any, config: Any, vp_stage: int | None) -> Any:
    """Replace the attention of the layers that ``config.linear_attention_freq`` names by gated delta nets, or by short
    convolutions if the config has no heads of delta nets."""
    if config.linear_attention_freq is None:
        return block
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from megarl.learn.models.delta import DeltaNet, ShortConvolution

    module = ShortConvolution if config.linear_num_value_heads is None else DeltaNet
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    for number, layer in enumerate(block.layer_specs):
        if config.linear_attention_freq[first + number]:  # layers alike share one spec
            submodules = replace(layer.submodules, self_attention=ModuleSpec(module=module))
            block.layer_specs[number] = replace(layer, submodules=submodules)
    return block


def _added(block: Any, config: Any, residual: float, rules: NormRules, width: int) -> Any:
    """Replace Megatron's additions to the residual; ``width``: of each layer's own input, 0 without."""
    if residual != 1.0 or rules.after or rules.scaled:
        from megatron.core.transformer.spec_utils import ModuleSpec

        from megarl.learn.models.norms import LayerInputGate, Residual

        params = {"multiplier": residual, "norm": norms.after(config, rules)}
        of_mlp = {**params, "scaled": rules.scaled, "gate": partial(LayerInputGate, config, width) if width else None}
        for layer in block.layer_specs:
            layer.submodules.self_attn_bda = ModuleSpec(module=Residual, params=params)
            layer.submodules.mlp_bda = ModuleSpec(module=Residual, params=of_mlp)
    return block


def check_layers(model: ModelConfig, hf_config: Mapping[str, Any]) -> None:
    """Raise ConfigError if TransformerEngine's layers would compute another function than megarl's: other norms,
    windows, sinks, YaRN's scale, short convolutions."""
    if model.transformer_impl != "transformer_engine":
        return
    arch = architecture(hf_config)
    kwargs = transformer_kwargs(arch, hf_config)
    if arch.norms != USUAL_NORMS:
        raise ConfigError(
            f"model.transformer_impl=transformer_engine with {arch.name}: TransformerEngine's layers fuse Llama's "
            "norms into their linears, and this family has others; set model.transformer_impl to local"
        )
    eps = kwargs["layernorm_epsilon"]
    if kwargs["mla"] and eps != LATENT_NORM_EPS:
        raise ConfigError(
            f"model.transformer_impl=transformer_engine with rms_norm_eps={eps!r} and latent "
            f"attention: its latent norms have {LATENT_NORM_EPS}, and TransformerEngine's layers have one epsilon; set "
            "model.transformer_impl to local"
        )
    found = {
        f"a window of attention of {hf_config.get('sliding_window')} tokens": "window_size" in kwargs,
        "sinks in its attention": "softmax_type" in kwargs,
        "short convolutions in place of attention in some layers": "linear_attention_freq" in kwargs,
        "queries that grow with their position": arch.layers.queries_grow,
        "YaRN": any(rope.attention_factor != 1.0 for rope in ropes(arch, hf_config) if rope is not None),
    }
    for part in (part for part, is_there in found.items() if is_there):
        raise ConfigError(
            f"model.transformer_impl=transformer_engine, but the {arch.name} model has {part}, which only megarl's own "
            "layers compute; set model.transformer_impl to local"
        )


def check_fp8(model: ModelConfig, parallel: ParallelConfig, hf_config: Mapping[str, Any]) -> None:
    """Raise ConfigError if the model's layers cannot compute in 8 bits (``model.fp8``)."""
    if model.fp8 is None:
        return
    sizes, unit = architecture(hf_config).sizes(hf_config), EIGHT_BIT_UNIT
    if model.fp8 == "blockwise":
        unit = EIGHT_BIT_BLOCK
    widths = {"hidden size": sizes.hidden, "MLP width of a rank": sizes.ffn // parallel.tp}
    refused = {
        f"model.transformer_impl={model.transformer_impl}, and TransformerEngine's layers alone have 8 bits; set it to "
        "transformer_engine": model.transformer_impl != "transformer_engine",
        f"model.dtype={model.dtype}; set it to bfloat16": model.dtype != "bfloat16",
        f"model.lora.rank={model.lora.rank}, whose adapters compute in model.dtype; set it to 0": model.lora.is_used,
        "experts, whose tokens would need padding": bool(sizes.moe_layers),
        "latent attention": bool(sizes.kv_lora),
        **{f"a {name} of {width}, no multiple of {unit}": bool(width % unit) for name, width in widths.items()},
    }
    for reason in (reason for reason, holds in refused.items() if holds):
        raise ConfigError(f"model.fp8={model.fp8} with {reason}, or set model.fp8 to null")


def _balanced(block: Any, model: ModelConfig) -> Any:
    if model.router.is_used:
        from megarl.learn.models.experts import balance

        balance(block, model.router)
    return block
