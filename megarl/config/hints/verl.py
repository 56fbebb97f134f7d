"""Names of settings in verl (``ppo_trainer.yaml``, ``ppo_megatron_trainer.yaml``) -> names here."""

from __future__ import annotations

_MODEL, _ACTOR, _ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_GRID = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
_ROUTER = {
    "aux_loss_coeff": "aux_loss_coef",
    "z_loss_coeff": "z_loss_coef",
    "router_bias_update_rate": "bias_update_rate",
}
_OPTIMIZER = {
    "lr": "lr",
    "min_lr": "min_lr",
    "lr_warmup_steps": "warmup_steps",
    "lr_decay_steps": "decay_steps",
    "weight_decay": "weight_decay",
    "clip_grad": "clip_grad",
}

VERL: dict[str, str] = {
    "data.train_files": "taskset.train, one file, or several by name",
    "data.val_files": "taskset.eval, one file, or several by name",
    "data.prompt_key": "taskset.columns, {prompt: COLUMN}",
    "data.shuffle": "taskset.order",
    "data.filter_overlong_prompts": "taskset.overlong_prompts, drop in place of true",
    "data.train_batch_size": "trainer.tasks_per_step",
    "data.max_prompt_length": "rollout.max_prompt_tokens",
    "data.max_response_length": "rollout.max_response_tokens",
    "data.seed": "trainer.seed",
    "data.apply_chat_template_kwargs": "taskset.chat_template_kwargs",
    f"{_MODEL}.path": "model.path",
    f"{_MODEL}.enable_gradient_checkpointing": "model.recompute",
    f"{_ACTOR}.ppo_mini_batch_size": "trainer.updates_per_step, the number of mini-batches (train_batch_size / "
    "ppo_mini_batch_size)",
    f"{_ACTOR}.ppo_epochs": "trainer.ppo_epochs",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "trainer.micro_batch_size, with trainer.packing=false",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "trainer.max_tokens_per_micro_batch",
    f"{_ACTOR}.use_dynamic_bsz": "trainer.packing",
    f"{_ACTOR}.grad_clip": "trainer.optimizer.clip_grad",
    f"{_ACTOR}.clip_ratio": "algorithm.clip_low and algorithm.clip_high",
    f"{_ACTOR}.clip_ratio_low": "algorithm.clip_low",
    f"{_ACTOR}.clip_ratio_high": "algorithm.clip_high",
    f"{_ACTOR}.clip_ratio_c": "algorithm.dual_clip",
    f"{_ACTOR}.entropy_coeff": "algorithm.entropy_coef",
    f"{_ACTOR}.use_kl_loss": "algorithm.kl.place=loss",
    f"{_ACTOR}.kl_loss_coef": "algorithm.kl.coef",
    f"{_ACTOR}.kl_loss_type": "algorithm.kl.estimator",
    f"{_ACTOR}.loss_agg_mode": "algorithm.aggregation",
    **{f"{_ACTOR}.optim.{theirs}": f"trainer.optimizer.{ours}" for theirs, ours in _OPTIMIZER.items()},
    **{f"{_ACTOR}.megatron.{theirs}": f"parallel.{ours}" for theirs, ours in _GRID.items()},
    **{
        f"{_ACTOR}.megatron.override_transformer_config.moe_{theirs}": f"model.router.{ours}"
        for theirs, ours in _ROUTER.items()
    },
    f"{_ROLLOUT}.n": "algorithm.group_size",
    f"{_ROLLOUT}.over_sample_rate": "rollout.spare, a number of trajectories of each group",
    f"{_ROLLOUT}.temperature": "rollout.temperature",
    **{
        f"{_ROLLOUT}.{name}": f"evaluation.{name}, in evaluation alone: training samples from the whole distribution"
        for name in ("top_p", "top_k")
    },
    f"{_ROLLOUT}.val_kwargs.n": "evaluation.samples",
    **{f"{_ROLLOUT}.val_kwargs.{name}": f"evaluation.{name}" for name in ("temperature", "top_p", "top_k")},
    f"{_ROLLOUT}.val_kwargs.do_sample": "evaluation.temperature above 0",
    f"{_ROLLOUT}.tensor_model_parallel_size": "rollout.tp",
    f"{_ROLLOUT}.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    f"{_ROLLOUT}.max_num_seqs": "rollout.max_num_seqs",
    f"{_ROLLOUT}.enforce_eager": "rollout.enforce_eager",
    f"{_ROLLOUT}.dtype": "model.dtype",
    f"{_ROLLOUT}.max_num_batched_tokens": "rollout.engine_options, {max_num_batched_tokens: N}",
    f"{_ROLLOUT}.engine_kwargs.vllm": "rollout.engine_options, a mapping of vLLM's names",
    "algorithm.adv_estimator": "algorithm=grpo, or another file of configs/algorithm",
    "algorithm.use_kl_in_reward": "algorithm.kl.place=reward",
    "algorithm.kl_penalty": "algorithm.kl.estimator",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl.coef",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl.target",
    "algorithm.kl_ctrl.horizon": "algorithm.kl.horizon",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.normalize_by_std",
    "algorithm.filter_groups.enable": "algorithm.dynamic_sampling",
    "algorithm.filter_groups.max_num_gen_batches": "algorithm.max_extra_rollouts",
    "critic.model.path": "critic.path",
    "critic.ppo_epochs": "trainer.ppo_epochs, of actor and critic alike",
    "critic.cliprange_value": "algorithm.value_clip",
    **{f"critic.optim.{theirs}": f"critic.optimizer.{ours}" for theirs, ours in _OPTIMIZER.items()},
    "custom_reward_function.path": "reward.path",
    "reward_model.model.path": "reward_model.path",
    "trainer.total_epochs": "trainer.steps, counted in steps of trainer.tasks_per_step rows",
    "trainer.total_training_steps": "trainer.steps",
    "trainer.save_freq": "trainer.checkpoint_interval",
    "trainer.test_freq": "trainer.eval_interval",
    "trainer.critic_warmup": "critic.warmup_steps",
    "trainer.logger": "trainer.trackers",
    "trainer.experiment_name": "run.name",
    "trainer.default_local_dir": "run.dir",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
}
