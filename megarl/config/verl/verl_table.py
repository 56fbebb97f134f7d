"""The table of verl's settings: every known key with its counterpart, its reason or its advice.

Keys are those of verl's ``ppo_trainer.yaml`` and ``ppo_megatron_trainer.yaml`` at commit b178a3cd56f5, and older names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

DATA, ALGORITHM, TRAINER, CRITIC = "data", "algorithm", "trainer", "critic"
MODEL, ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout", "ref"))
MEGATRON = f"{ACTOR}.megatron"
TRANSFORMER = f"{MEGATRON}.override_transformer_config"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
CORRECTION = f"{ALGORITHM}.rollout_correction"
_GRID = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
_UPDATES = "trainer.updates_per_step, the number of mini-batches (train_batch_size / ppo_mini_batch_size)"
_STEPS = "trainer.steps, counted in steps of trainer.tasks_per_step rows"
_MICRO = "trainer.max_tokens_per_micro_batch"


class MappedKey(NamedTuple):
    """One of verl's keys that has a counterpart."""

    ours: str
    """Setting or settings of megarl, with words on the difference; the hint of error texts."""
    rule: str = "same"
    """Function of ``verl_rules.RULES`` that computes the values."""

    @property
    def setting(self) -> str:
        """First setting in ``ours``."""
        return self.ours.split(",")[0].split(" ")[0].split("=")[0]


class UnmappedKey(NamedTuple):
    """One of verl's keys without a counterpart."""

    todo: str
    """Advice for the user."""
    neutral: tuple[Any, ...] = (None, False)
    """Values with which the key has no effect in verl."""


def _optimizer(theirs: str, ours: str, role: str) -> dict[str, MappedKey]:
    """Rows of the keys of an optimizer."""
    rule = f"{role}_optimizer"
    keys = {
        "lr": "lr", "min_lr": "min_lr", "min_lr_ratio": "min_lr, a rate", "lr_warmup_steps": "warmup_steps",
        "lr_warmup_steps_ratio": "warmup_steps, a number of steps", "lr_decay_steps": "decay_steps",
        "lr_decay_style": "decay_steps, of a linear decay", "lr_scheduler_type": "decay_steps, of a linear decay",
        "warmup_style": "decay_steps, of a linear decay", "weight_decay": "weight_decay", "clip_grad": "clip_grad",
        "betas": "beta1 and beta2",
    }  # fmt: skip
    return {f"{theirs}.{key}": MappedKey(f"{ours}.{name}", rule) for key, name in keys.items()}


MAPPED: dict[str, MappedKey] = {
    # ------------------------------------------------------------------ data
    f"{DATA}.train_files": MappedKey("taskset.train, one file, or several by name", "files"),
    f"{DATA}.val_files": MappedKey("taskset.eval, one file, or several by name", "files"),
    f"{DATA}.prompt_key": MappedKey("taskset.columns, {prompt: COLUMN}", "column"),
    f"{DATA}.reward_fn_key": MappedKey("taskset.columns, {data_source: COLUMN}", "column"),
    f"{DATA}.image_key": MappedKey("taskset.columns, {images: COLUMN}", "images"),
    f"{DATA}.shuffle": MappedKey("taskset.order", "order"),
    f"{DATA}.filter_overlong_prompts": MappedKey("taskset.overlong_prompts, drop in place of true", "overlong_prompts"),
    f"{DATA}.truncation": MappedKey("taskset.overlong_prompts, drop or refuse", "truncation"),
    f"{DATA}.train_batch_size": MappedKey("trainer.tasks_per_step", "batch"),
    f"{DATA}.max_prompt_length": MappedKey("rollout.max_prompt_tokens"),
    f"{DATA}.max_response_length": MappedKey("rollout.max_response_tokens"),
    f"{DATA}.seed": MappedKey("trainer.seed", "unless_null"),
    f"{DATA}.apply_chat_template_kwargs": MappedKey("taskset.chat_template_kwargs", "mapping"),
    # ----------------------------------------------------------------- model
    f"{MODEL}.path": MappedKey("model.path"),
    f"{MODEL}.enable_gradient_checkpointing": MappedKey("model.recompute", "recompute"),
    f"{MODEL}.use_remove_padding": MappedKey("trainer.packing", "micro_batches"),
    f"{MODEL}.lora_rank": MappedKey("model.lora.rank", "lora"),
    f"{MODEL}.lora_alpha": MappedKey("model.lora.alpha", "lora"),
    f"{MODEL}.target_modules": MappedKey("model.lora.targets", "lora"),
    f"{MODEL}.lora_adapter_path": MappedKey("model.lora.path", "lora"),
    f"{MODEL}.lora.rank": MappedKey("model.lora.rank", "lora"),
    f"{MODEL}.lora.alpha": MappedKey("model.lora.alpha", "lora"),
    f"{MODEL}.lora.dropout": MappedKey("model.lora.dropout", "lora"),
    f"{MODEL}.lora.target_modules": MappedKey("model.lora.targets", "lora"),
    f"{MODEL}.lora.adapter_path": MappedKey("model.lora.path", "lora"),
    f"{MODEL}.lora.type": MappedKey("model.lora.targets, adapters of q, k, v apart", "lora"),
    f"{MODEL}.lora.lora_A_init_method": MappedKey("model.lora.init", "lora"),
    # ----------------------------------------------------------------- actor
    f"{ACTOR}.ppo_mini_batch_size": MappedKey(_UPDATES, "batch"),
    f"{ACTOR}.ppo_epochs": MappedKey("trainer.ppo_epochs"),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": MappedKey(
        "trainer.micro_batch_size, with trainer.packing=false", "micro_batches"
    ),
    f"{ACTOR}.ppo_micro_batch_size": MappedKey(_MICRO, "micro_batches"),
    f"{ACTOR}.ppo_max_token_len_per_gpu": MappedKey(_MICRO, "micro_batches"),
    f"{ACTOR}.use_dynamic_bsz": MappedKey("trainer.packing", "micro_batches"),
    f"{ACTOR}.grad_clip": MappedKey("trainer.optimizer.clip_grad", "actor_optimizer"),
    f"{ACTOR}.clip_ratio": MappedKey("algorithm.clip_low and algorithm.clip_high", "clip"),
    f"{ACTOR}.clip_ratio_low": MappedKey("algorithm.clip_low", "clip"),
    f"{ACTOR}.clip_ratio_high": MappedKey("algorithm.clip_high", "clip"),
    f"{ACTOR}.clip_ratio_c": MappedKey("algorithm.dual_clip", "clip"),
    f"{ACTOR}.entropy_coeff": MappedKey("algorithm.entropy_coef"),
    f"{ACTOR}.use_kl_loss": MappedKey("algorithm.kl.place=loss", "kl"),
    f"{ACTOR}.kl_loss_coef": MappedKey("algorithm.kl.coef", "kl"),
    f"{ACTOR}.kl_loss_type": MappedKey("algorithm.kl.estimator", "kl"),
    f"{ACTOR}.loss_agg_mode": MappedKey("algorithm.aggregation", "aggregation"),
    f"{ACTOR}.loss_scale_factor": MappedKey("algorithm.aggregation_length", "aggregation"),
    f"{ACTOR}.policy_loss.loss_mode": MappedKey("algorithm=gspo, cispo or another file of configs/algorithm", "name"),
    f"{ACTOR}.tis_imp_ratio_cap": MappedKey("algorithm.correction_cap", "correction"),
    f"{ACTOR}.freeze_vision_tower": MappedKey("model.train_vision_tower, the opposite", "images"),
    f"{ACTOR}.ulysses_sequence_parallel_size": MappedKey("parallel.cp", "grid"),
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": MappedKey("parallel.cp", "grid"),
    f"{ACTOR}.router_replay.mode": MappedKey("rollout.routing_replay", "router_replay"),
    f"{ROLLOUT}.enable_rollout_routing_replay": MappedKey("rollout.routing_replay", "router_replay"),
    f"{ACTOR}.fsdp_config.param_offload": MappedKey("trainer.offload", "actor_offload"),
    f"{ACTOR}.fsdp_config.optimizer_offload": MappedKey("trainer.offload", "actor_offload"),
    f"{ACTOR}.fsdp_config.offload_policy": MappedKey("trainer.offload", "actor_offload"),
    f"{MEGATRON}.param_offload": MappedKey("trainer.offload", "actor_offload"),
    f"{MEGATRON}.optimizer_offload": MappedKey("trainer.offload", "actor_offload"),
    f"{MEGATRON}.grad_offload": MappedKey("trainer.offload", "actor_offload"),
    f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload": MappedKey("trainer.offload", "actor_offload"),
    **_optimizer(f"{ACTOR}.optim", "trainer.optimizer", "actor"),
    **{f"{MEGATRON}.{theirs}": MappedKey(f"parallel.{ours}", "grid") for theirs, ours in _GRID.items()},
    f"{MEGATRON}.sequence_parallel": MappedKey("parallel.sequence_parallel", "grid"),
    f"{TRANSFORMER}.num_layers_in_first_pipeline_stage": MappedKey("parallel.first_stage_layers", "unless_null"),
    f"{TRANSFORMER}.num_layers_in_last_pipeline_stage": MappedKey("parallel.last_stage_layers", "unless_null"),
    f"{TRANSFORMER}.recompute_granularity": MappedKey("model.recompute", "recompute"),
    f"{TRANSFORMER}.recompute_modules": MappedKey("model.recompute_modules", "recompute"),
    f"{TRANSFORMER}.moe_aux_loss_coeff": MappedKey("model.router.aux_loss_coef"),
    f"{TRANSFORMER}.moe_z_loss_coeff": MappedKey("model.router.z_loss_coef"),
    f"{TRANSFORMER}.moe_router_bias_update_rate": MappedKey("model.router.bias_update_rate"),
    f"{TRANSFORMER}.moe_router_dtype": MappedKey("model.router_dtype", "router_dtype"),
    f"{TRANSFORMER}.moe_enable_deepep": MappedKey("model.moe_dispatcher", "deepep"),
    f"{TRANSFORMER}.moe_token_dispatcher_type": MappedKey("model.moe_dispatcher", "deepep"),
    f"{TRANSFORMER}.moe_permute_fusion": MappedKey("model.fusions", "fusions"),
    f"{TRANSFORMER}.gradient_accumulation_fusion": MappedKey("model.fusions", "fusions"),
    # ------------------------------------------------------------- reference
    f"{REF}.fsdp_config.param_offload": MappedKey("reference.offload", "reference_offload"),
    f"{REF}.megatron.param_offload": MappedKey("reference.offload", "reference_offload"),
    **{
        f"{REF}.megatron.{theirs}": MappedKey(f"reference.parallel, {ours} of it", "reference_grid")
        for theirs, ours in _GRID.items()
    },
    # --------------------------------------------------------------- engines
    f"{ROLLOUT}.n": MappedKey("algorithm.group_size"),
    f"{ROLLOUT}.over_sample_rate": MappedKey("rollout.spare, a number of trajectories of each group", "spare"),
    f"{ROLLOUT}.temperature": MappedKey("rollout.temperature"),
    f"{ROLLOUT}.top_p": MappedKey(
        "evaluation.top_p, in evaluation alone: training samples from the whole distribution", "whole_distribution"
    ),
    f"{ROLLOUT}.top_k": MappedKey(
        "evaluation.top_k, in evaluation alone: training samples from the whole distribution", "whole_distribution"
    ),
    f"{ROLLOUT}.val_kwargs.n": MappedKey("evaluation.samples", "evaluation"),
    f"{ROLLOUT}.val_kwargs.temperature": MappedKey("evaluation.temperature", "evaluation"),
    f"{ROLLOUT}.val_kwargs.top_p": MappedKey("evaluation.top_p", "evaluation"),
    f"{ROLLOUT}.val_kwargs.top_k": MappedKey("evaluation.top_k", "evaluation"),
    f"{ROLLOUT}.val_kwargs.do_sample": MappedKey("evaluation.temperature above 0", "evaluation"),
    f"{ROLLOUT}.tensor_model_parallel_size": MappedKey("rollout.tp", "engines"),
    f"{ROLLOUT}.pipeline_model_parallel_size": MappedKey("rollout.pp", "engines"),
    f"{ROLLOUT}.data_parallel_size": MappedKey("rollout.replicas", "engines"),
    f"{ROLLOUT}.expert_parallel_size": MappedKey("rollout.expert_parallel", "engines"),
    f"{ROLLOUT}.gpu_memory_utilization": MappedKey("rollout.gpu_memory_utilization"),
    f"{ROLLOUT}.max_num_seqs": MappedKey("rollout.max_num_seqs"),
    f"{ROLLOUT}.enforce_eager": MappedKey("rollout.enforce_eager"),
    f"{ROLLOUT}.dtype": MappedKey("model.dtype", "dtype"),
    f"{ROLLOUT}.max_num_batched_tokens": MappedKey(
        "rollout.engine_options, {max_num_batched_tokens: N}", "engine_option"
    ),
    f"{ROLLOUT}.enable_chunked_prefill": MappedKey("rollout.engine_options, by vLLM's name", "engine_option"),
    f"{ROLLOUT}.enable_prefix_caching": MappedKey("rollout.engine_options, by vLLM's name", "engine_option"),
    f"{ROLLOUT}.engine_kwargs.vllm": MappedKey("rollout.engine_options, a mapping of vLLM's names", "mapping"),
    f"{ROLLOUT}.max_model_len": MappedKey("rollout.max_trajectory_tokens", "max_model_len"),
    # ------------------------------------------------------------- algorithm
    f"{ALGORITHM}.adv_estimator": MappedKey("algorithm=grpo, or another file of configs/algorithm", "name"),
    f"{ALGORITHM}.norm_adv_by_std_in_grpo": MappedKey("algorithm.normalize_by_std"),
    f"{ALGORITHM}.gamma": MappedKey("algorithm.gamma", "returns"),
    f"{ALGORITHM}.lam": MappedKey("algorithm.lam", "returns"),
    f"{ALGORITHM}.use_kl_in_reward": MappedKey("algorithm.kl.place=reward", "kl"),
    f"{ALGORITHM}.kl_penalty": MappedKey("algorithm.kl.estimator", "kl"),
    f"{ALGORITHM}.kl_ctrl.kl_coef": MappedKey("algorithm.kl.coef", "kl"),
    f"{ALGORITHM}.kl_ctrl.type": MappedKey("algorithm.kl.target, null for a fixed coefficient", "kl"),
    f"{ALGORITHM}.kl_ctrl.target_kl": MappedKey("algorithm.kl.target", "kl"),
    f"{ALGORITHM}.kl_ctrl.horizon": MappedKey("algorithm.kl.horizon", "kl"),
    f"{ALGORITHM}.filter_groups.enable": MappedKey("algorithm.dynamic_sampling", "dynamic_sampling"),
    f"{ALGORITHM}.filter_groups.metric": MappedKey("algorithm.dynamic_sampling, by verdicts", "dynamic_sampling"),
    f"{ALGORITHM}.filter_groups.max_num_gen_batches": MappedKey("algorithm.max_extra_rollouts", "dynamic_sampling"),
    f"{CORRECTION}.rollout_is": MappedKey("algorithm.correction", "correction"),
    f"{CORRECTION}.rollout_is_threshold": MappedKey("algorithm.correction_cap", "correction"),
    # ---------------------------------------------------------------- critic
    f"{CRITIC}.model.path": MappedKey("critic.path", "critic_path"),
    f"{CRITIC}.ppo_epochs": MappedKey("trainer.ppo_epochs, of actor and critic alike", "critic_as_actor"),
    f"{CRITIC}.ppo_mini_batch_size": MappedKey(
        "trainer.updates_per_step, of actor and critic alike", "critic_as_actor"
    ),
    f"{CRITIC}.cliprange_value": MappedKey("algorithm.value_clip", "value_clip"),
    f"{CRITIC}.grad_clip": MappedKey("critic.optimizer.clip_grad", "critic_optimizer"),
    **_optimizer(f"{CRITIC}.optim", "critic.optimizer", "critic"),
    f"{CRITIC}.model.fsdp_config.param_offload": MappedKey("critic.offload", "critic_offload"),
    f"{CRITIC}.model.fsdp_config.optimizer_offload": MappedKey("critic.offload", "critic_offload"),
    f"{CRITIC}.megatron.param_offload": MappedKey("critic.offload", "critic_offload"),
    f"{CRITIC}.megatron.optimizer_offload": MappedKey("critic.offload", "critic_offload"),
    f"{CRITIC}.megatron.grad_offload": MappedKey("critic.offload", "critic_offload"),
    **{
        f"{CRITIC}.megatron.{theirs}": MappedKey(f"critic.parallel, {ours} of it", "critic_grid")
        for theirs, ours in _GRID.items()
    },
    f"{TRAINER}.critic_warmup": MappedKey("critic.warmup_steps", "critic_warmup"),
    # --------------------------------------------------------------- rewards
    "custom_reward_function.path": MappedKey("reward.path", "unless_null"),
    "reward_model.enable": MappedKey("reward_model.path", "reward_model"),
    "reward_model.model.path": MappedKey("reward_model.path", "reward_model"),
    "reward_model.model.fsdp_config.param_offload": MappedKey("reward_model.offload", "reward_model"),
    f"{OVERLONG}.enable": MappedKey("reward.overlong_buffer", "overlong"),
    f"{OVERLONG}.len": MappedKey("reward.overlong_buffer", "overlong"),
    f"{OVERLONG}.penalty_factor": MappedKey("reward.overlong_penalty", "overlong"),
    "reward_model.overlong_buffer.enable": MappedKey("reward.overlong_buffer", "overlong"),
    "reward_model.overlong_buffer.len": MappedKey("reward.overlong_buffer", "overlong"),
    "reward_model.overlong_buffer.penalty_factor": MappedKey("reward.overlong_penalty", "overlong"),
    "reward_model.reward_kwargs.max_resp_len": MappedKey("rollout.max_response_tokens", "max_resp_len"),
    # --------------------------------------------------------------- trainer
    f"{TRAINER}.total_epochs": MappedKey(_STEPS, "steps"),
    f"{TRAINER}.total_training_steps": MappedKey("trainer.steps", "steps"),
    f"{TRAINER}.save_freq": MappedKey("trainer.checkpoint_interval", "checkpoint_interval"),
    f"{TRAINER}.test_freq": MappedKey("trainer.eval_interval", "eval_interval"),
    f"{TRAINER}.logger": MappedKey("trainer.trackers", "trackers"),
    f"{TRAINER}.experiment_name": MappedKey("run.name", "run_name"),
    f"{TRAINER}.default_local_dir": MappedKey("run.dir"),
    f"{TRAINER}.max_actor_ckpt_to_keep": MappedKey("trainer.keep_checkpoints", "unless_null"),
    f"{TRAINER}.nnodes": MappedKey("parallel.dp, of tp, pp and cp; the launcher gives the nodes", "grid"),
    f"{TRAINER}.n_gpus_per_node": MappedKey("parallel.dp, of tp, pp and cp; the launcher gives the nodes", "grid"),
}
"""verl's full name -> its counterpart here."""

_PACKED = "forward passes take trainer.max_tokens_per_micro_batch"
_KERNELS = "a choice of kernels, not of results"
_LOADING = "a way of loading or sending weights; every sync is proven by digests"
_SEEDS = "trainer.seed seeds everything"
_SHARDING = "FSDP's sharding; megarl's grids are parallel.*, its optimizer is sharded over parallel.dp"
NO_EFFECT: dict[str, str] = {
    "*._target_": "names a class of verl",
    "defaults": "hydra's list of verl's own files",
    "hydra.*": "hydra's search path",
    "*profiler*": "profiling of verl",
    "actor_rollout_ref.hybrid_engine": "engines and trainer share the GPUs here (rollout.placement=colocated)",
    "actor_rollout_ref.nccl_timeout": "cluster.stall_s ends a job that makes no progress",
    "*.log_prob_micro_batch_size": _PACKED,
    "*.log_prob_micro_batch_size_per_gpu": _PACKED,
    "*.log_prob_use_dynamic_bsz": _PACKED,
    "*.log_prob_max_token_len_per_gpu": _PACKED,
    "critic.forward_*": _PACKED,
    "critic.ppo_micro_batch_size*": "the critic takes the actor's micro-batches",
    "critic.ppo_max_token_len_per_gpu": "the critic takes the actor's micro-batches",
    "critic.use_dynamic_bsz": "the critic takes the actor's micro-batches",
    "critic.ulysses_sequence_parallel_size": "the critic takes the actor's grid",
    "critic.model.use_remove_padding": "the critic takes the actor's micro-batches",
    "critic.model.enable_gradient_checkpointing": "the critic takes model.recompute",
    "critic.model.tokenizer_path": "the critic has the actor's tokenizer",
    "critic.enable": "algorithm.name decides on a critic",
    "critic.loss_agg_mode": "the critic takes algorithm.aggregation",
    "*.rollout_n": "as rollout.n",
    "*.use_torch_compile": _KERNELS,
    "*.use_fused_kernels": _KERNELS,
    "*.fused_kernel_options*": _KERNELS,
    "*.use_liger": _KERNELS,
    "*.tiled_mlp*": "memory only; trainer.logits_bytes bounds logits",
    "*.entropy_checkpointing": "memory only; trainer.logits_bytes bounds logits",
    "*.entropy_from_logits_with_chunking": "memory only; trainer.logits_bytes bounds logits",
    "*.enable_activation_offload": "memory only; model.recompute saves activations",
    "*.use_prefix_grouper": _KERNELS,
    "*.calculate_entropy": "entropy is always reported",
    f"{ACTOR}.shuffle": "an update's rows do not depend on the order within it",
    "*.data_loader_seed": _SEEDS,
    "*.megatron.seed": _SEEDS,
    "*.full_determinism": _SEEDS,
    "*.fsdp_config.seed": _SEEDS,
    "*.strategy": "megarl trains with Megatron-Core",
    "*.fsdp_config.*": _SHARDING,
    f"{REF}.ulysses_sequence_parallel_size": "the reference takes the actor's grid",
    f"{REF}.*": "the reference takes the actor's settings",
    "*.checkpoint.*": "checkpoints have model, optimizer and all states",
    "*.use_shm": _LOADING,
    "*.layered_summon": _LOADING,
    "*.load_format": _LOADING,
    "*.checkpoint_engine*": _LOADING,
    "*.use_mbridge": _LOADING,
    "*.vanilla_mbridge": _LOADING,
    "*.use_dist_checkpointing": _LOADING,
    "*.dist_checkpointing_*": "model.path is an HF checkpoint; megarl convert makes one",
    "*.load_weight": _LOADING,
    "*.megatron.use_remove_padding": "trainer.packing decides",
    "*.use_distributed_optimizer": "the optimizer is always sharded over parallel.dp",
    "*.megatron.override_ddp_config*": "parallel.overlap_grad_reduce and parallel.overlap_param_gather overlap",
    "*.megatron.dtype": "model.dtype decides",
    "*.optim.optimizer": "the optimizer is AdamW",
    "*.optim.optimizer_impl": "the optimizer is AdamW",
    "*.optim.total_training_steps": "trainer.steps is the length",
    "*.optim.num_cycles": "of a cosine schedule alone",
    "*.optim.lr_warmup_init": "a warm-up begins at lr / warmup_steps",
    "*.optim.weight_decay_incr_style": "the weight decay is constant",
    "*.optim.lr_wsd_*": "of a WSD schedule alone",
    "*.optim.use_checkpoint_opt_param_scheduler": "a resume keeps the settings of the command",
    "*.optim.override_optimizer_config.*": "memory only; trainer.offload moves the optimizer",
    "*.optim.override_optimizer_config": "memory only; trainer.offload moves the optimizer",
    f"{MODEL}.trust_remote_code": "no code of a checkpoint runs here",
    "*.trust_remote_code": "no code of a checkpoint runs here",
    "*.external_lib": "no code of a checkpoint runs here",
    f"{MODEL}.hf_config_path": "the configuration is that of model.path",
    f"{MODEL}.torch_dtype": "model.dtype decides; master weights are always float32",
    f"{MODEL}.lora.dropout_position": "dropout is at an adapter's input",
    f"{MODEL}.lora.lora_B_init_method": "a new B begins with zeros",
    f"{MODEL}.lora.a2a_experimental": _KERNELS,
    f"{MODEL}.lora.merge": "sync.adapter decides",
    f"{MODEL}.lora.freeze_*": "adapters train nothing else",
    f"{MODEL}.lora.dtype": "adapters have model.dtype and float32 masters",
    f"{MODEL}.use_remove_padding": "trainer.packing decides",
    f"{ROLLOUT}.name": "megarl's engine is vLLM",
    f"{ROLLOUT}.mode": "engines are servers and answer asynchronously",
    f"{ROLLOUT}.prompt_length": "as data.max_prompt_length",
    f"{ROLLOUT}.response_length": "as data.max_response_length",
    f"{ROLLOUT}.free_cache_engine": "engines that share GPUs sleep (rollout.offload)",
    f"{ROLLOUT}.multi_stage_wake_up": "engines wake in stages (rollout.offload)",
    f"{ROLLOUT}.calculate_log_probs": "the engines' log-probs are always kept",
    f"{ROLLOUT}.cudagraph_capture_sizes": _KERNELS,
    f"{ROLLOUT}.disable_log_stats": "statistics are in rollout/* metrics",
    f"{ROLLOUT}.logprobs_mode": "log-probs are those of rollout.temperature on both sides",
    f"{ROLLOUT}.scheduling_policy": "sync.pause decides",
    f"{ROLLOUT}.do_sample": "training samples at rollout.temperature",
    f"{ROLLOUT}.skip_tokenizer_init": "tokens go in and out of engines",
    f"{ROLLOUT}.skip_dump_dir": "of skip_rollout alone",
    f"{ROLLOUT}.engine_kwargs.sglang*": "megarl's engine is vLLM",
    f"{ROLLOUT}.engine_kwargs.trtllm*": "megarl's engine is vLLM",
    f"{ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache": "a cache of vLLM",
    f"{ROLLOUT}.engine_kwargs.vllm.compilation_config.*": _KERNELS,
    f"{ROLLOUT}.agent.num_workers": "rollout.explorers decides",
    f"{ROLLOUT}.agent.default_agent_loop": "rollout.workflow decides",
    f"{ROLLOUT}.agent.custom_async_server*": "engines are megarl's",
    f"{ROLLOUT}.trace.*": "megarl data show has every trajectory",
    f"{ROLLOUT}.prometheus.*": "metrics are in metrics.jsonl and trackers",
    f"{ROLLOUT}.multi_turn.*": "of multi_turn.enable alone",
    f"{ROLLOUT}.multi_turn.format": "of multi_turn.enable alone",
    f"{ROLLOUT}.mtp*": "of model.mtp.enable alone",
    f"{ROLLOUT}.quantization_config_file": "of quantization alone",
    f"{ROLLOUT}.limit_images": "rollout.max_images decides",
    f"{TRANSFORMER}.recompute_method": "a recomputed layer is computed again whole",
    f"{TRANSFORMER}.recompute_num_layers": "every layer is recomputed",
    **{
        f"{TRANSFORMER}.{name}": _KERNELS
        for name in (
            "apply_rope_fusion",
            "attention_backend",
            "bias_activation_fusion",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "deallocate_pipeline_outputs",
            "moe_grouped_gemm",
            "moe_shared_expert_overlap",
            "persist_layer_norm",
            "use_flash_attn",
        )
    },
    "critic.megatron.override_transformer_config*": "the critic takes the actor's model settings",
    "data.return_*": "a format of verl's batches",
    "data.val_batch_size": "all held-out tasks are evaluated together",
    "data.gen_batch_size": "groups are sampled until a step has enough",
    "data.dataloader_num_workers": "rows are read by the explorer",
    "data.filter_overlong_prompts_workers": "rows are read by the explorer",
    "data.validation_shuffle": "the order of held-out tasks changes nothing",
    "data.use_shm": _LOADING,
    "data.tokenizer": "the tokenizer is that of model.path",
    "data.video_key": "of rows with videos alone",
    "data.image_patch_size": "the processor of model.path decides",
    "data.tool_config_path": "of multi_turn.enable alone",
    "reward_model.reward_manager": "megarl's reward workers score each response",
    "reward_manager.*": "megarl's reward workers score each response",
    "reward_model.num_workers": "reward.workers decides",
    "reward_model.launch_reward_fn_async": "responses are scored as they end",
    "reward_model.use_reward_loop": "responses are scored as they end",
    "reward_model.reward_loop_*": "responses are scored as they end",
    "reward_model.rollout.*": "the reward model is computed by the trainer's ranks (reward_model.parallel)",
    "reward_model.micro_batch_size*": _PACKED,
    "reward_model.use_dynamic_bsz": _PACKED,
    "reward_model.forward_max_token_len_per_gpu": _PACKED,
    "reward_model.max_length": _PACKED,
    "reward_model.ulysses_sequence_parallel_size": "the reward model takes the actor's grid",
    "reward_model.n_gpus_per_node": "of enable_resource_pool alone",
    "reward_model.nnodes": "of enable_resource_pool alone",
    "reward_model.model.*": "the reward model takes the actor's settings",
    "reward_model.megatron.*": "the reward model takes the actor's grid (reward_model.parallel)",
    "reward_model.sandbox_fusion.max_concurrent": "of sandbox_fusion.url alone",
    "reward_model.sandbox_fusion.memory_limit_mb": "reward.code.memory_mib has the limit",
    "reward_model.overlong_buffer.log": "the part reward/overlong is always reported",
    f"{OVERLONG}.log": "the part reward/overlong is always reported",
    "custom_reward_function.reward_kwargs": "of custom_reward_function.path alone",
    "trainer.project_name": "trackers take WANDB_PROJECT from the environment",
    "trainer.balance_batch": "sequences are always spread evenly",
    "trainer.log_val_generations": "the report has samples of answers",
    "trainer.*_data_dir": "the store has every trajectory (megarl data export)",
    "trainer.esi_redundant_time": "run.shutdown_grace_s is the time of a stop",
    "trainer.resume_mode": "the same command resumes; another run.dir begins a new run",
    "trainer.val_before_train": "held-out tasks are always evaluated before and after training",
    "trainer.default_hdfs_dir": "run.dir is the place of checkpoints",
    "trainer.del_local_ckpt_after_load": "trainer.keep_checkpoints decides",
    "trainer.max_critic_ckpt_to_keep": "a checkpoint has actor and critic; trainer.keep_checkpoints decides",
    "trainer.ray_wait_register_center_timeout": "megarl has no Ray",
    "trainer.use_legacy_worker_impl": "a choice among verl's workers",
    "ray_kwargs.*": "megarl has no Ray",
    "ray_init.*": "megarl has no Ray",
    "transfer_queue.*": "the store hands over trajectories",
    "algorithm.pf_ppo.*": "of use_pf_ppo alone",
    f"{CORRECTION}.loss_type": "of bypass_mode alone",
    f"{CORRECTION}.rollout_rs_threshold*": "of rollout_rs alone",
    f"{ACTOR}.policy_loss.clip_cov_*": "of loss_mode=clip_cov alone",
    f"{ACTOR}.policy_loss.kl_cov_*": "of loss_mode=kl_cov alone",
    f"{ACTOR}.policy_loss.ppo_kl_coef": "of loss_mode=kl_cov alone",
    f"{ACTOR}.tau_*": "of loss_mode=sapo alone",
    "*.router_replay.*": "of router_replay.mode alone",
    f"{ACTOR}.sum_pi_squared_checkpointing": "of an optimal token baseline alone",
    f"{MODEL}.mtp.*": "of model.mtp.enable alone",
    f"{MODEL}.tokenizer_path": "the tokenizer is that of model.path",
}
"""Pattern of verl's keys -> reason why they change nothing here."""

_TURNS = "set rollout.workflow=tools with rollout.tools, or rollout.workflow=environment (docs/workflows.md)"
_OWN_LOSS = "write the loss in a file of your own, algorithm.name=FILE.py (docs/algorithms.md)"
_COPY = "put it into config.json of a copy of the checkpoint, and give that as model.path"
UNMAPPED: dict[str, UnmappedKey] = {
    f"{ROLLOUT}.multi_turn.enable": UnmappedKey(_TURNS),
    f"{ROLLOUT}.multi_turn.tool_config_path": UnmappedKey(_TURNS),
    f"{ROLLOUT}.multi_turn.interaction_config_path": UnmappedKey(_TURNS),
    f"{ROLLOUT}.multi_turn.max_assistant_turns": UnmappedKey("set rollout.max_tool_calls"),
    f"{ROLLOUT}.multi_turn.max_user_turns": UnmappedKey(_TURNS),
    f"{ROLLOUT}.multi_turn.num_repeat_rollouts": UnmappedKey(_TURNS),
    f"{ROLLOUT}.agent.agent_loop_config_path": UnmappedKey(_TURNS),
    f"{ROLLOUT}.ignore_eos": UnmappedKey("responses end with the model's end token; remove it"),
    f"{ROLLOUT}.skip_rollout": UnmappedKey("buffer.replay trains on earlier groups"),
    f"{ROLLOUT}.quantization": UnmappedKey("set rollout.weight_dtype=fp8 (docs/tuning.md)"),
    f"{ACTOR}.calculate_sum_pi_squared": UnmappedKey(_OWN_LOSS),
    f"{ACTOR}.use_rollout_log_probs": UnmappedKey("set algorithm=decoupled_ppo"),
    f"{MODEL}.override_config": UnmappedKey(_COPY, (None, {})),
    f"{MODEL}.override_config.*": UnmappedKey(_COPY, (None, {})),
    f"{MODEL}.custom_chat_template": UnmappedKey("put it into the tokenizer of a copy of the checkpoint"),
    f"{MODEL}.exclude_modules": UnmappedKey("name the layers with adapters in model.lora.targets", (None, [], "")),
    f"{MODEL}.lora.exclude_modules": UnmappedKey("name the layers with adapters in model.lora.targets", (None, [], "")),
    f"{MODEL}.mtp.enable": UnmappedKey("MTP layers are not trained; rollout.speculative drafts tokens"),
    "critic.model.lora_rank": UnmappedKey("the critic is trained whole; leave it out", (None, 0)),
    "critic.model.override_config*": UnmappedKey(_COPY, (None, {})),
    "reward_model.model.override_config*": UnmappedKey(_COPY, (None, {})),
    f"{MEGATRON}.override_mcore_model_config*": UnmappedKey(_COPY, (None, {})),
    f"{TRANSFORMER}.account_for_embedding_in_pipeline_split": UnmappedKey("set parallel.first_stage_layers"),
    f"{TRANSFORMER}.account_for_loss_in_pipeline_split": UnmappedKey("set parallel.last_stage_layers"),
    f"{TRANSFORMER}.pipeline_model_parallel_layout": UnmappedKey(
        "set parallel.first_stage_layers and parallel.last_stage_layers"
    ),
    f"{TRANSFORMER}.*": UnmappedKey("look for a setting of model.* (docs/settings.md)"),
    f"{ALGORITHM}.use_pf_ppo": UnmappedKey("set taskset.order=prioritized or buffer.replay for hard tasks"),
    f"{CORRECTION}.rollout_rs": UnmappedKey("algorithm.correction=mask leaves tokens out by their own ratio"),
    f"{CORRECTION}.bypass_mode": UnmappedKey("set algorithm.correction=none or algorithm=decoupled_ppo"),
    f"{CORRECTION}.rollout_is_batch_normalize": UnmappedKey("weights are not normalised; leave it out"),
    f"{CORRECTION}.rollout_token_veto_threshold": UnmappedKey("set algorithm.correction=mask"),
    "data.custom_cls.path": UnmappedKey("change rows by taskset.process (docs/tasksets.md)"),
    "data.custom_cls.name": UnmappedKey("change rows by taskset.process (docs/tasksets.md)"),
    "data.sampler.*": UnmappedKey("set taskset.order=curriculum or prioritized"),
    "data.datagen.*": UnmappedKey("set taskset.generate (docs/own_experiments.md)"),
    "data.train_max_samples": UnmappedKey("cut the file of rows", (None, -1)),
    "data.val_max_samples": UnmappedKey("cut the file of rows", (None, -1)),
    "custom_reward_function.name": UnmappedKey("name the function compute_score", (None, "compute_score")),
    "custom_reward_function.reward_kwargs.*": UnmappedKey("write the values into the file of reward.path"),
    "reward_model.reward_kwargs.*": UnmappedKey("write the values into the file of reward.path"),
    "reward_model.enable_resource_pool": UnmappedKey("set reward_model.parallel; it shares the trainer's ranks"),
    "reward_model.sandbox_fusion.url": UnmappedKey("set reward.code.url to a megarl sandbox serve (docs/sandbox.md)"),
    "reward_model.data_processor_fn*": UnmappedKey("write a reward function, reward.path (docs/rewards.md)"),
    "-m": UnmappedKey("this program has parts of its own, which are not imported"),
    "rollout.nnodes": UnmappedKey("set rollout.placement=separate, rollout.replicas and sync.max_staleness"),
    "rollout.n_gpus_per_node": UnmappedKey("set rollout.placement=separate, rollout.replicas and sync.max_staleness"),
    **{
        f"{MODEL}.override_config.{name}": UnmappedKey("models have no dropout", (None, 0, 0.0))
        for name in ("attention_dropout", "embd_pdrop", "resid_pdrop")
    },
    "--config-name": UnmappedKey("this file was not found; import it too, and give the script's words after it"),
    "~*": UnmappedKey("it removes a setting of a file; import the file, and remove the setting yourself"),
    "trainer.val_only": UnmappedKey("start megarl bench (docs/bench.md)"),
    "trainer.resume_from_path": UnmappedKey("give run.dir of the run, or model.path of a converted checkpoint"),
    "trainer.device": UnmappedKey("megarl computes on CUDA GPUs or CPUs", (None, "cuda")),
    "async_training.*": UnmappedKey("set sync.max_staleness and sync.interval (docs/asynchrony.md)"),
}
"""Pattern of verl's keys -> what to do instead."""

DEFAULTS: dict[str, Any] = {
    f"{DATA}.train_batch_size": 1024, f"{DATA}.max_prompt_length": 512, f"{DATA}.max_response_length": 512,
    f"{DATA}.shuffle": True, f"{DATA}.filter_overlong_prompts": False, f"{DATA}.truncation": "error",
    f"{MODEL}.enable_gradient_checkpointing": True, f"{MODEL}.use_remove_padding": True,
    f"{ACTOR}.ppo_mini_batch_size": 256, f"{ACTOR}.ppo_epochs": 1, f"{ACTOR}.use_dynamic_bsz": False,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384, f"{ACTOR}.clip_ratio": 0.2, f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2, f"{ACTOR}.clip_ratio_c": 3.0, f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.use_kl_loss": False, f"{ACTOR}.kl_loss_coef": 0.001, f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.loss_agg_mode": "token-mean", f"{ACTOR}.optim.lr": 1e-6, f"{CRITIC}.optim.lr": 1e-5,
    f"{CRITIC}.cliprange_value": 0.5, f"{TRAINER}.critic_warmup": 0,
    f"{ROLLOUT}.n": 1, f"{ROLLOUT}.temperature": 1.0, f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5, f"{ROLLOUT}.max_num_seqs": 256, f"{ROLLOUT}.dtype": "bfloat16",
    f"{ROLLOUT}.max_num_batched_tokens": 8192, f"{ROLLOUT}.val_kwargs.n": 1,
    f"{ALGORITHM}.adv_estimator": "gae", f"{ALGORITHM}.norm_adv_by_std_in_grpo": True, f"{ALGORITHM}.gamma": 1.0,
    f"{ALGORITHM}.lam": 1.0, f"{ALGORITHM}.use_kl_in_reward": False, f"{ALGORITHM}.kl_penalty": "kl",
    f"{TRAINER}.total_epochs": 30, f"{TRAINER}.nnodes": 1, f"{TRAINER}.n_gpus_per_node": 8,
    f"{TRAINER}.save_freq": -1, f"{TRAINER}.test_freq": -1, f"{TRAINER}.logger": ["console", "wandb"],
}  # fmt: skip
"""Values of verl's files for keys that are always written, given or not."""
FALLBACKS: dict[str, Any] = {
    "min_lr_ratio": 0.0, "min_lr": 0.0, "lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.0, "lr_decay_steps": None,
    "lr_decay_style": "constant", "lr_scheduler_type": "constant", "weight_decay": 0.01, "betas": [0.9, 0.999],
}  # fmt: skip
"""Last word of an optimizer's key -> verl's value."""
