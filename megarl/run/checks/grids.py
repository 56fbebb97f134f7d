"""Checks of a job's model against the trainer's grid and the engines' grid.

Recomputed parts of layers are checked against the models that have them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megarl.config import Config
from megarl.config.derived import context_tokens, prompt_tokens
from megarl.core.errors import ConfigError
from megarl.learn.models.recompute import lacking
from megarl.learn.models.specs import check_fp8, check_layers
from megarl.learn.parallel.grid import check_parallel, megatron_grid
from megarl.ops import rows_in_budget
from megarl.run.checks.decoding import check_decode_context, check_delta_nets, check_prediction
from megarl.run.checks.dispatcher import check_experts_settings
from megarl.run.checks.engine_options import check_batched_tokens, check_eight_bits
from megarl.run.checks.lora import check_adapter, check_separate
from megarl.run.checks.vision import is_vision_model
from megarl.weights.architectures import Head, architecture
from megarl.weights.architectures.megatron_config import has_router_bias
from megarl.weights.architectures.rope import ropes
from megarl.weights.checkpoint.formats.hf_source import SCORE, check_hf, check_labels, open_hf
from megarl.weights.reshard.layouts import Layout, hf_layout, megatron_layout, padded_vocab_size, vllm_layout
from megarl.weights.reshard.plan import build_plan

ENGINE_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vllm 0.32, v1/attention/backends/cpu_attn.py: others fail at the first request, after the warm
start."""
ENGINE_LATENT = (512, 64)
"""kv_lora_rank and qk_rope_head_dim of the kernel in v1/attention/backends/mla/cpu_mla.py."""
ENGINE_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""Settings of DeepSeek-V3 that vLLM's models/deepseek_v2.py follows only if config.json has them."""
ENGINE_EXPERT_UNIT = 32
"""The hidden size must be a multiple of this in layers/fused_moe/experts/cpu_moe.py."""


def check_model(config: Config, hf_config: Mapping[str, Any], *, engines: bool, head: Head = "lm") -> None:
    """Check that the architecture has a table, the trainer's grid can train the model and its files are complete; with
    ``engines``, also that engines can receive it. ``head="score"``: a reward model from the start; a language model's
    files are accepted too."""
    check_parallel(config.parallel, architecture(hf_config).sizes(hf_config))
    check_router(config, hf_config)
    check_routing_replay(config, hf_config, engines=engines)
    check_recompute(config, hf_config)
    check_fusions(config, hf_config)
    check_layers(config.model, hf_config)
    check_fp8(config.model, config.parallel, hf_config)
    check_experts_settings(config.model, config.parallel, hf_config)
    columns = padded_vocab_size(int(hf_config["vocab_size"]), config.parallel.tp) // config.parallel.tp
    try:
        rows_in_budget(
            columns, getattr(torch, config.model.head_dtype or config.model.dtype), config.trainer.logits_bytes
        )
    except ValueError as error:
        raise ConfigError(f"trainer.{error}") from error
    grid = megatron_grid(config.parallel)
    source = megatron_layout(hf_config, grid, transformer_impl=config.model.transformer_impl, head=head)
    if engines:
        _check_engines(config, hf_config, source)
    build_plan(source, hf_layout(hf_config, head=head)).check()
    files = open_hf(Path(config.model.path))
    try:
        # Reads headers and sizes, which detects truncated files.
        if head == "score" and SCORE not in files.shapes:
            check_hf(files, source.only(lambda name: name != SCORE), hf_config, beside={SCORE})
        else:
            if head == "score":
                check_labels(Path(config.model.path), hf_config)
            check_hf(files, source, hf_config)
        check_adapter(config, hf_config, files, head)
    finally:
        files.close()
    for setting, value in asdict(config.model.from_scratch).items() if config.model.from_scratch else ():
        if hf_config.get(setting, value) != value:
            raise ConfigError(
                f"model.from_scratch.{setting}={value}, but the model in {config.model.path} has {hf_config[setting]}; "
                "remove that directory to make the model again, or set the value that it has (model.from_scratch=null "
                "for a model of your own)"
            )


def check_router(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Check that the model supports the settings of ``model.router``. Raises ConfigError."""
    arch, router = architecture(hf_config), config.model.router
    for name, value in asdict(router).items():
        if value and not arch.sizes(hf_config).moe_layers:
            raise ConfigError(
                f"model.router.{name}={value}, but the model in {config.model.path} has no experts; set it to 0"
            )
    if router.bias_update_rate and not has_router_bias(arch):
        raise ConfigError(
            f"model.router.bias_update_rate={router.bias_update_rate}, but routers of {arch.name} have no bias to "
            "move; set it to 0 and model.router.aux_loss_coef above 0"
        )


def check_fusions(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Check that the model has the layers that ``model.fusions`` fuse. Raises ConfigError."""
    if "moe_permute_fusion" in config.model.fusions and not architecture(hf_config).sizes(hf_config).moe_layers:
        raise ConfigError(
            f"model.fusions has moe_permute_fusion, but the model in {config.model.path} has no experts; leave it out"
        )


def check_routing_replay(config: Config, hf_config: Mapping[str, Any], *, engines: bool) -> None:
    """Check that the model has experts with ids that the engines can record. Raises ConfigError."""
    rollout = config.rollout
    if not rollout.routing_replay:
        return
    refused = {
        f"the model in {config.model.path} has no experts": not architecture(hf_config).sizes(hf_config).moe_layers,
        f"algorithm.name={config.algorithm.name} samples nothing": not engines,
        f"the model in {config.model.path} takes images, whose tokens engines number otherwise": is_vision_model(
            hf_config
        ),
        f"vLLM records no experts with rollout.pp={rollout.pp}": rollout.pp > 1,
        f"it is untried with rollout.nodes={rollout.nodes}": rollout.nodes > 1,
    }
    for reason in (reason for reason, holds in refused.items() if holds):
        raise ConfigError(f"rollout.routing_replay=true, but {reason}; set rollout.routing_replay to false")


def _check_engines(config: Config, hf_config: Mapping[str, Any], source: Layout) -> None:
    """Check that the trainer's tensors divide over the engines' grid, and that vLLM can run this model at the rollouts'
    length."""
    rollout = config.rollout
    if rollout.pp > 1 and architecture(hf_config).sizes(hf_config).deepstack:
        raise ConfigError(
            f"rollout.pp={rollout.pp}, but layers of the model of model.path={config.model.path} add vectors of "
            "images, which is proven for engines of one stage alone; set rollout.pp to 1 and raise rollout.tp"
        )
    engines = vllm_layout(
        hf_config, rollout.tp, rollout.replicas, pp=rollout.pp, expert_parallel=rollout.expert_parallel
    )
    build_plan(source, engines).check()
    if quantization := hf_config.get("quantization_config"):
        raise ConfigError(
            f"config.json of {config.model.path} has quantization_config ({quantization.get('quant_method')}): engines "
            "would keep its weights in that form, which cannot be compared with the trainer's; convert it to bfloat16 "
            "(megarl convert hf-to-megatron, then megatron-to-hf)"
        )
    check_engine(config.model.path, hf_config)
    check_eight_bits(config, hf_config)
    check_decode_context(config, hf_config)
    check_delta_nets(config, hf_config)
    check_prediction(config, hf_config)
    check_separate(config, hf_config)
    context = int(hf_config["max_position_embeddings"])
    wanted = context_tokens(config.rollout)
    one = prompt_tokens(rollout) + rollout.max_response_tokens
    sum_of = "rollout.max_prompt_tokens + rollout.max_response_tokens"
    if wanted < one:
        raise ConfigError(
            f"rollout.max_trajectory_tokens={wanted} does not hold a prompt and a response: {sum_of} = {one}"
        )
    check_batched_tokens(config)
    if wanted > context:
        limit = sum_of if rollout.max_trajectory_tokens is None else "rollout.max_trajectory_tokens"
        raise ConfigError(
            f"{limit} = {wanted} is more than the model's context of {context} (max_position_embeddings); lower "
            f"{'one of them' if rollout.max_trajectory_tokens is None else 'it'}"
        )
    check_growth(config.model.path, hf_config, wanted)


def check_growth(path: str, hf_config: Mapping[str, Any], context: int) -> None:
    """Raise ConfigError if vLLM would scale queries by position differently from transformers, because it reads another
    key of config.json. ``context``: maximum tokens of a sequence."""
    for rope in set(ropes(architecture(hf_config), hf_config)):
        if rope is None or not rope.query_beta or context <= rope.original:
            continue
        needed = {"original_max_position_embeddings": rope.original, "beta": rope.query_beta}
        if hf_config.get("llama_4_scaling") != needed:
            raise ConfigError(
                f"config.json of {path} has llama_4_scaling={hf_config.get('llama_4_scaling')!r}, which vLLM reads in "
                f"the place of llama_4_scaling_beta={rope.query_beta}: with {context} tokens its log-probs would be "
                f'others; add "llama_4_scaling": {json.dumps(needed)} to the file'
            )


def check_engine(path: str, hf_config: Mapping[str, Any]) -> None:
    """Check that vLLM on CPU computes this model's sizes like the trainer. Raises ConfigError."""
    sizes = architecture(hf_config).sizes(hf_config)
    if sizes.kv_lora:
        for key, value in ENGINE_ROUTER.items():
            if hf_config.get(key) != value:
                raise ConfigError(
                    f"config.json of {path} has {key}={hf_config.get(key)!r}: transformers does not read it, vLLM "
                    "would route "
                    f'another way without it; add "{key}": "{value}" to the file'
                )
        if (sizes.kv_lora, sizes.qk_rope) != ENGINE_LATENT:
            raise ConfigError(
                f"kv_lora_rank={sizes.kv_lora} with qk_rope_head_dim={sizes.qk_rope} of {path}: vLLM's CPU attention "
                f"has only {ENGINE_LATENT[0]} with {ENGINE_LATENT[1]}"
            )
    else:
        heads = {"head_dim": sizes.head} | ({"global_head_dim": sizes.global_head} if sizes.global_layers else {})
        for key, width in heads.items():
            if width not in ENGINE_HEAD_DIMS:
                raise ConfigError(
                    f"{key}={width} of {path} is none that vLLM's CPU attention has: "
                    f"{', '.join(map(str, ENGINE_HEAD_DIMS))}"
                )
    if sizes.experts and sizes.hidden % ENGINE_EXPERT_UNIT:
        raise ConfigError(
            f"hidden_size={sizes.hidden} of {path} is no multiple of {ENGINE_EXPERT_UNIT}, which vLLM's CPU experts "
            "need"
        )


def check_recompute(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Check that the actor has the parts of layers to recompute. Other roles ignore parts that they lack.

    Raises:
        ConfigError: names the module.
    """
    model, modules = config.model, config.model.recompute_modules
    sizes = architecture(hf_config).sizes(hf_config)
    if sizes.deepstack and model.recompute == "full" and not config.trainer.packing:
        raise ConfigError(
            f"model.recompute=full with trainer.packing=false: the first {sizes.deepstack} layers of the model of "
            f"model.path={model.path} add vectors of images, which only packed micro-batches keep until they are "
            "computed again; set trainer.packing to true, or model.recompute to selective"
        )
    if sizes.hands_on and model.recompute == "full":
        raise ConfigError(
            f"model.recompute=full with the model of model.path={model.path}: its layers take keys and values, or "
            "inputs, that are not computed again; set model.recompute to selective"
        )
    if model.recompute != "selective":
        return
    if not modules:
        raise ConfigError("model.recompute=selective with model.recompute_modules=[]; set model.recompute to none")
    missing = lacking(sizes)
    if absent := [module for module in modules if module in missing]:
        raise ConfigError(
            f"model.recompute_modules={modules}, but the model of model.path={model.path} {missing[absent[0]]}; leave "
            f"{absent[0]} out"
        )
    if "moe_act" in modules and model.transformer_impl != "transformer_engine":
        raise ConfigError(
            f"model.recompute_modules={modules}: Megatron-Core computes moe_act again in TransformerEngine's grouped "
            "GEMM alone; leave moe_act out, take moe, or set model.transformer_impl to transformer_engine"
        )
    if "moe" in modules and (model.router.is_used or config.rollout.routing_replay):
        cause = "model.router" if model.router.is_used else "rollout.routing_replay"
        raise ConfigError(
            f"model.recompute_modules={modules} with {cause}: which sequence a token is of is known to whole layers "
            "alone when they are computed again; leave moe out, or set model.recompute to full"
        )
