"""Values of megarl's settings from verl's: one function for each rule that ``verl_table.MAPPED`` names.

A rule gets a key, its row and all settings, and returns full names of megarl's settings with their values. Rules that
read several keys return the same for each of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from megarl.config.verl.verl_source import VerlSource
from megarl.config.verl.verl_table import (
    ACTOR,
    ALGORITHM,
    CORRECTION,
    CRITIC,
    DATA,
    MEGATRON,
    MODEL,
    REF,
    ROLLOUT,
    TRAINER,
    TRANSFORMER,
    MappedKey,
)

Settings = dict[str, Any]
Rule = Callable[[str, MappedKey, VerlSource], Settings]
NEVER = 1_000_000
"""Interval in steps that no run reaches."""
UNLIMITED = 1000
"""Extra rollouts in place of verl's 0, which is no limit."""


class NotMappedError(Exception):
    """A value without a counterpart; the text says what to do.

    Attributes:
        instead: Settings without that value, where megarl's defaults would put another in its place.
    """

    def __init__(self, text: str, instead: Settings | None = None) -> None:
        super().__init__(text)
        self.instead = instead or {}


class NoEffectError(Exception):
    """A value that changes nothing beside the other settings; the text has the reason."""


def _same(key: str, row: MappedKey, source: VerlSource) -> Settings:
    if source.get(key) in (None, ""):
        raise NotMappedError(f"it has no value; set {row.setting}")
    return {row.setting: source.get(key)}


def _unless_null(key: str, row: MappedKey, source: VerlSource) -> Settings:
    if source.get(key) is None:
        raise NoEffectError("not set")
    return _same(key, row, source)


def _mapping(key: str, row: MappedKey, source: VerlSource) -> Settings:
    """Write a mapping, or the entry of it that ``key`` names."""
    inner = key.removeprefix(_row_key(row, key)).lstrip(".")
    if not inner and not source.get(key):
        raise NoEffectError("empty")
    return {f"{row.setting}.{inner}" if inner else row.setting: source.get(key)}


def _row_key(row: MappedKey, key: str) -> str:
    """Return the part of ``key`` that the table has."""
    return next(k for k in (f"{DATA}.apply_chat_template_kwargs", f"{ROLLOUT}.engine_kwargs.vllm") if key.startswith(k))


# -------------------------------------------------------------------- data


def _files(key: str, row: MappedKey, source: VerlSource) -> Settings:
    files = source.get(key)
    files = [files] if isinstance(files, str) else list(files)
    return {row.setting: files[0] if len(files) == 1 else files}


def _column(key: str, row: MappedKey, source: VerlSource) -> Settings:
    field = "prompt" if key.endswith("prompt_key") else "data_source"
    if source.get(key) == field:
        raise NoEffectError(f"rows have the column {field}")
    return {f"taskset.columns.{field}": source.get(key)}


def _images(key: str, row: MappedKey, source: VerlSource) -> Settings:
    column, freezes = source.get(f"{DATA}.image_key"), f"{ACTOR}.freeze_vision_tower"
    settings: Settings = {"taskset.columns.images": column} if column not in (None, "images") else {}
    if source.is_given(f"{DATA}.image_key", freezes) and "gen" not in source.config_name:
        settings["model.train_vision_tower"] = not source.get(freezes)
    return settings


def _order(key: str, row: MappedKey, source: VerlSource) -> Settings:
    return {"taskset.order": "shuffled" if source.get(key) else "file"}


def _overlong_prompts(key: str, row: MappedKey, source: VerlSource) -> Settings:
    return {"taskset.overlong_prompts": "drop" if source.get(key) else "refuse"}


def _truncation(key: str, row: MappedKey, source: VerlSource) -> Settings:
    if source.get(key) == "error":
        return {}
    if source.get(f"{DATA}.filter_overlong_prompts"):
        raise NoEffectError("longer prompts are dropped")
    raise NotMappedError("prompts are never cut; set taskset.overlong_prompts=drop")


def _batch(key: str, row: MappedKey, source: VerlSource) -> Settings:
    tasks, mini = source.get(f"{DATA}.train_batch_size"), source.get(f"{ACTOR}.ppo_mini_batch_size")
    if mini > tasks or tasks % mini:
        raise NotMappedError(
            f"{mini} tasks of an update do not divide {tasks} of a step; set trainer.updates_per_step to a divisor"
        )
    return {"trainer.tasks_per_step": tasks, "trainer.updates_per_step": tasks // mini}


def _max_resp_len(key: str, row: MappedKey, source: VerlSource) -> Settings:
    if source.get(key) == source.get(f"{DATA}.max_response_length"):
        raise NoEffectError("as data.max_response_length")
    raise NotMappedError("the length penalty ends at rollout.max_response_tokens; set that")


# ---------------------------------------------------------- grid and memory


def gpus(source: VerlSource) -> int:
    """Return the number of GPUs."""
    return int(source.get(f"{TRAINER}.nnodes")) * int(source.get(f"{TRAINER}.n_gpus_per_node"))


def _grid(key: str, row: MappedKey, source: VerlSource) -> Settings:
    """Grid of the actor: Megatron's sizes; for FSDP the engines' tp, and the sequence-parallel size as cp."""
    if source.is_megatron:
        return _sizes(source, MEGATRON, "parallel")
    cp = source.get(f"{ACTOR}.ulysses_sequence_parallel_size") or 1
    cp = max(cp, source.get(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size") or 1)
    tp = source.get(f"{ROLLOUT}.tensor_model_parallel_size") or 1
    tp = tp if gpus(source) % (tp * cp) == 0 else 1
    return _world(source, "parallel", {"tp": tp, "pp": 1, "cp": cp})


def _sizes(source: VerlSource, theirs: str, ours: str) -> Settings:
    def size(name: str, default: int | None = 1) -> Any:
        value = source.get(f"{theirs}.{name}")
        return source.get(f"{MEGATRON}.{name}") or default if value is None else value

    return _world(
        source,
        ours,
        {
            "tp": size("tensor_model_parallel_size"),
            "pp": size("pipeline_model_parallel_size"),
            "cp": size("context_parallel_size"),
            "ep": size("expert_model_parallel_size"),
            "etp": size("expert_tensor_parallel_size", None),
            "vpp": size("virtual_pipeline_model_parallel_size"),
        },
    )


def _world(source: VerlSource, ours: str, sizes: dict[str, Any]) -> Settings:
    """Return settings of a grid that fills all GPUs by data parallelism."""
    world, model = gpus(source), sizes["tp"] * sizes["pp"] * sizes["cp"]
    if world % model:
        raise NotMappedError(f"tp * pp * cp = {model} does not divide {world} GPUs; set {ours}.*")
    shards = source.get(f"{MEGATRON}.sequence_parallel")
    sizes = sizes | {"dp": world // model, "sequence_parallel": sizes["tp"] > 1 and shards is not False}
    settings = {f"{ours}.{name}": value for name, value in sizes.items() if value is not None}
    return settings | ({"parallel.backend": "nccl"} if ours == "parallel" else {})


def _role_grid(theirs: str, ours: str) -> Rule:
    def rule(key: str, row: MappedKey, source: VerlSource) -> Settings:
        if ours == "critic.parallel" and not _has_critic(source):
            raise NoEffectError("adv_estimator has no critic")
        own, actor = _sizes(source, theirs, ours), _sizes(source, MEGATRON, "parallel")
        if all(actor.get(name.replace(ours, "parallel")) == value for name, value in own.items()):
            raise NoEffectError("as the actor's grid")
        return own | {f"{ours}.backend": "nccl"}

    return rule


def _offload(role: str, setting: str, *keys: str) -> Rule:
    def rule(key: str, row: MappedKey, source: VerlSource) -> Settings:
        if role == CRITIC and not _has_critic(source):
            raise NoEffectError("adv_estimator has no critic")
        if role == REF and (source.get(f"{MODEL}.lora_rank") or source.get(f"{MODEL}.lora.rank")):
            raise NoEffectError("the reference of adapters is the model without them, in the same memory")
        return {setting: "memory" if any(source.get(each) for each in keys) else "none"}

    return rule


def _recompute(key: str, row: MappedKey, source: VerlSource) -> Settings:
    if not source.is_megatron:
        return {"model.recompute": "full" if source.get(f"{MODEL}.enable_gradient_checkpointing") else "none"}
    kind = source.get(f"{TRANSFORMER}.recompute_granularity") or "none"
    if key.endswith("recompute_modules"):
        if kind != "selective":
            raise NoEffectError("of recompute_granularity=selective alone")
        return {"model.recompute_modules": source.get(key)}
    return {"model.recompute": kind}


def _engines(key: str, row: MappedKey, source: VerlSource) -> Settings:
    tp, pp = (source.get(f"{ROLLOUT}.{name}_model_parallel_size") or 1 for name in ("tensor", "pipeline"))
    dp, ep = (source.get(f"{ROLLOUT}.{name}_parallel_size") or 1 for name in ("data", "expert"))
    if dp > 1:
        raise NotMappedError("engines do not share experts over data_parallel_size; raise rollout.tp")
    if ep not in (1, tp):
        raise NotMappedError(f"expert_parallel_size={ep} is neither 1 nor tp={tp}; set rollout.expert_parallel=true")
    if gpus(source) % (tp * pp):
        raise NotMappedError(f"{tp * pp} workers of an engine do not divide {gpus(source)} GPUs; set rollout.tp")
    return {
        "rollout.placement": "colocated",
        "rollout.tp": tp,
        "rollout.pp": pp,
        "rollout.expert_parallel": ep > 1,
        "rollout.replicas": gpus(source) // (tp * pp),
        "rollout.nodes": max(1, tp * pp // int(source.get(f"{TRAINER}.n_gpus_per_node"))),
    }


def _engine_option(key: str, row: MappedKey, source: VerlSource) -> Settings:
    return {f"rollout.engine_options.{key.rpartition('.')[2]}": source.get(key)}


def _max_model_len(key: str, row: MappedKey, source: VerlSource) -> Settings:
    length = source.get(key)
    longest = source.get(f"{DATA}.max_prompt_length") + source.get(f"{DATA}.max_response_length")
    if length is None or length >= longest:
        raise NoEffectError("not below the longest prompt and response")
    return {"rollout.max_trajectory_tokens": length}


def _dtype(key: str, row: MappedKey, source: VerlSource) -> Settings:
    names = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
    if source.get(key) not in names:
        raise NotMappedError("set model.dtype to bfloat16 or float32")
    return {"model.dtype": names[source.get(key)]}


def _micro_batches(key: str, row: MappedKey, source: VerlSource) -> Settings:
    longest = source.get(f"{DATA}.max_prompt_length") + source.get(f"{DATA}.max_response_length")
    if source.get(f"{ACTOR}.use_dynamic_bsz"):
        cp = _grid(key, row, source)["parallel.cp"]
        tokens = source.get(f"{ACTOR}.ppo_max_token_len_per_gpu") * cp
        return {"trainer.packing": True, "trainer.max_tokens_per_micro_batch": max(tokens, longest)}
    rows = source.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    if rows is None and (whole := source.get(f"{ACTOR}.ppo_micro_batch_size")) is not None:
        rows = max(1, whole // _grid(key, row, source)["parallel.dp"])
    if rows is None:
        raise NotMappedError("verl needs a size of micro-batches; set trainer.max_tokens_per_micro_batch")
    if source.get(f"{MODEL}.use_remove_padding"):
        return {"trainer.packing": True, "trainer.max_tokens_per_micro_batch": rows * longest}
    return {"trainer.packing": False, "trainer.micro_batch_size": rows}


# --------------------------------------------------------------- algorithm

_ESTIMATORS = {
    "gae": "ppo", "grpo": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp", "reinforce_plus_plus_baseline": "reinforce_pp_baseline", "remax": "remax",
}  # fmt: skip
_WITH_RETURNS = ("ppo", "remax", "reinforce_pp")
"""Algorithms with ``kl.place=reward``."""


def algorithm_name(source: VerlSource) -> str:
    """Return megarl's algorithm of the advantage estimator and the loss."""
    estimator, loss = source.get(f"{ALGORITHM}.adv_estimator"), source.get(f"{ACTOR}.policy_loss.loss_mode")
    if estimator not in _ESTIMATORS:
        raise NotMappedError(f"adv_estimator={estimator} has no counterpart; {_own('advantage')}")
    name = _ESTIMATORS[estimator]
    if loss in (None, "vanilla"):
        return name
    if loss in ("gspo", "cispo") and name == "grpo":
        return str(loss)
    raise NotMappedError(f"loss_mode={loss} with {estimator} has no counterpart; {_own('loss')}")


def _own(what: str) -> str:
    return f"write the {what} in a file of your own, algorithm.name=FILE.py (docs/algorithms.md)"


def _has_critic(source: VerlSource) -> bool:
    return bool(source.get(f"{ALGORITHM}.adv_estimator") == "gae")


def _name(key: str, row: MappedKey, source: VerlSource) -> Settings:
    name = algorithm_name(source)
    extra: dict[str, Settings] = {
        "ppo": {"algorithm.whiten_advantages": True},
        "gspo": {"algorithm.importance": "sequence_mean"},
    }
    return {"algorithm.name": name, **extra.get(name, {})}


def _named(source: VerlSource) -> str:
    """Return the algorithm's name, or ``grpo`` where it has no counterpart, for the other rules."""
    try:
        return algorithm_name(source)
    except NotMappedError:
        return "grpo"


def _clip(key: str, row: MappedKey, source: VerlSource) -> Settings:
    low, high = source.get(f"{ACTOR}.clip_ratio_low"), source.get(f"{ACTOR}.clip_ratio_high")
    if key.endswith("clip_ratio") and low is not None and high is not None:
        raise NoEffectError(f"clip_ratio_low={low} and clip_ratio_high={high} (0.2 in verl's file) come first")
    both = source.get(f"{ACTOR}.clip_ratio")
    low, high = both if low is None else low, both if high is None else high
    if _named(source) == "cispo" and low < 1 and key.endswith("low"):
        raise NotMappedError("cispo has no lower bound here; set clip_ratio_low to 1 or more")
    settings = {"algorithm.clip_low": low, "algorithm.clip_high": high}
    if key.endswith("clip_ratio_c"):
        if _named(source) in ("gspo", "cispo"):
            raise NoEffectError(f"{_named(source)} has no bound of negative advantages")
        return settings | {"algorithm.dual_clip": source.get(key)}
    return settings


def _kl(key: str, row: MappedKey, source: VerlSource) -> Settings:
    estimators = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    in_loss, in_reward = source.get(f"{ACTOR}.use_kl_loss"), source.get(f"{ALGORITHM}.use_kl_in_reward")
    in_controller = key.startswith(f"{ALGORITHM}.")
    off: Settings = {"algorithm.kl.coef": 0.0, "algorithm.kl.place": "loss", "algorithm.kl.estimator": "k3"}
    if in_loss and in_reward:
        raise NotMappedError("one place of the KL at a time; set algorithm.kl.place to loss or reward", off)
    if not in_loss and not in_reward:
        return off
    if in_controller != bool(in_reward) and not key.endswith(("use_kl_loss", "use_kl_in_reward")):
        raise NoEffectError("of the KL's other place")
    theirs = source.get(f"{ALGORITHM}.kl_penalty" if in_reward else f"{ACTOR}.kl_loss_type")
    if theirs not in estimators or (in_loss and estimators[theirs] == "k1"):
        todo = f"the estimator {theirs} has no counterpart here; set algorithm.kl.estimator to k2 or k3"
        raise NotMappedError(todo, off)
    if in_reward and _named(source) not in _WITH_RETURNS:
        raise NotMappedError(f"a KL in the reward is for {', '.join(_WITH_RETURNS)}; set algorithm.kl.place=loss", off)
    control = f"{ALGORITHM}.kl_ctrl"
    coef = source.get(f"{control}.kl_coef") if in_reward else source.get(f"{ACTOR}.kl_loss_coef")
    settings = {
        "algorithm.kl.coef": 0.001 if coef is None else coef,
        "algorithm.kl.place": "reward" if in_reward else "loss",
        "algorithm.kl.estimator": estimators[theirs],
    }
    if in_reward and source.get(f"{control}.type") == "adaptive":
        settings["algorithm.kl.target"] = source.get(f"{control}.target_kl") or 0.1
        settings["algorithm.kl.horizon"] = source.get(f"{control}.horizon") or 10000
    elif key.endswith(("target_kl", "horizon")):
        raise NoEffectError("of kl_ctrl.type=adaptive alone")
    return settings


def _aggregation(key: str, row: MappedKey, source: VerlSource) -> Settings:
    mode = str(source.get(f"{ACTOR}.loss_agg_mode"))
    modes = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    if mode not in modes:
        raise NotMappedError(f"set algorithm.aggregation to one of {', '.join(modes)} with _ for -")
    if _named(source) == "gspo":
        return {"algorithm.aggregation": "seq_mean_token_mean"}  # verl's gspo ignores the setting
    settings: Settings = {"algorithm.aggregation": mode.replace("-", "_")}
    if mode.endswith("norm"):
        length = source.get(f"{ACTOR}.loss_scale_factor") or source.get(f"{DATA}.max_response_length")
        settings["algorithm.aggregation_length"] = length
    elif key.endswith("loss_scale_factor"):
        raise NoEffectError("of seq-mean-token-sum-norm alone")
    return settings


def _returns(key: str, row: MappedKey, source: VerlSource) -> Settings:
    allowed = {"gamma": _WITH_RETURNS, "lam": ("ppo",)}[key.rpartition(".")[2]]
    if _named(source) not in allowed or (_named(source) == "remax"):
        raise NoEffectError(f"adv_estimator={source.get(f'{ALGORITHM}.adv_estimator')} does not read it")
    return _same(key, row, source)


def _dynamic_sampling(key: str, row: MappedKey, source: VerlSource) -> Settings:
    groups = f"{ALGORITHM}.filter_groups"
    if not source.get(f"{groups}.enable"):
        return {"algorithm.dynamic_sampling": False}
    metric = source.get(f"{groups}.metric")
    if key.endswith("metric") and metric not in (None, "acc", "score"):
        raise NotMappedError(f"groups are filtered by verdicts, not by {metric}; set buffer.operators.variance")
    most = source.get(f"{groups}.max_num_gen_batches")
    extra = 10 if most is None else UNLIMITED if most <= 0 else most - 1
    return {"algorithm.dynamic_sampling": True, "algorithm.max_extra_rollouts": extra}


def _correction(key: str, row: MappedKey, source: VerlSource) -> Settings:
    cap = source.get(f"{ACTOR}.tis_imp_ratio_cap")
    if cap is not None and cap > 0:
        return {"algorithm.correction": "truncate", "algorithm.correction_cap": cap}
    kind = source.get(f"{CORRECTION}.rollout_is")
    if kind is None:
        return {"algorithm.correction": "none"}
    if kind != "token":
        raise NotMappedError(f"ratios are a token's, not of a {kind}; set algorithm.correction=truncate")
    threshold = source.get(f"{CORRECTION}.rollout_is_threshold")
    return {"algorithm.correction": "truncate", "algorithm.correction_cap": 2.0 if threshold is None else threshold}


def _router_replay(key: str, row: MappedKey, source: VerlSource) -> Settings:
    mode = source.get(f"{ACTOR}.router_replay.mode") or "disabled"
    if mode not in ("disabled", "R3"):
        raise NotMappedError(f"mode {mode} replays the trainer's own choice; set rollout.routing_replay (verl's R3)")
    return {"rollout.routing_replay": mode == "R3"}


def _whole_distribution(key: str, row: MappedKey, source: VerlSource) -> Settings:
    if source.get(key) in (None, 1, 1.0) if key.endswith("top_p") else source.get(key) in (None, -1, 0):
        raise NoEffectError("training samples from the whole distribution")
    raise NotMappedError("training samples from the whole distribution; leave it out")


def _spare(key: str, row: MappedKey, source: VerlSource) -> Settings:
    rate = float(source.get(key))
    if rate and source.get(f"{ROLLOUT}.name") == "vllm":
        raise NoEffectError("verl reads it with SGLang alone")
    return {"rollout.spare": round(rate * source.get(f"{ROLLOUT}.n"))}


def _evaluation(key: str, row: MappedKey, source: VerlSource) -> Settings:
    values = {name: source.get(f"{ROLLOUT}.val_kwargs.{name}") for name in ("n", "temperature", "top_p", "top_k")}
    if not source.get(f"{ROLLOUT}.val_kwargs.do_sample"):
        if values["n"] != 1:
            raise NotMappedError("greedy samples of a task are copies; set evaluation.samples=1 or a temperature")
        return {"evaluation.samples": 1, "evaluation.temperature": 0.0}
    top_k = values["top_k"]
    return {
        "evaluation.samples": values["n"],
        "evaluation.temperature": values["temperature"] or 0.0,
        "evaluation.top_p": 1.0 if values["top_p"] is None else values["top_p"],
        "evaluation.top_k": 0 if top_k is None or top_k < 0 else top_k,
    }


# ------------------------------------------------------------ optimizer


def _optimizer(theirs: str, ours: str) -> Rule:
    def rule(key: str, row: MappedKey, source: VerlSource) -> Settings:
        if theirs == CRITIC and not _has_critic(source):
            raise NoEffectError("adv_estimator has no critic")
        optim = f"{theirs}.optim"
        clip = source.get(f"{optim}.clip_grad") if source.is_megatron else source.get(f"{theirs}.grad_clip")
        clip = clip if clip is not None else source.get(f"{optim}.clip_grad")
        beta1, beta2 = source.get(f"{optim}.betas")
        return {
            f"{ours}.lr": source.get(f"{optim}.lr"),
            f"{ours}.weight_decay": source.get(f"{optim}.weight_decay"),
            f"{ours}.clip_grad": 1.0 if clip is None else clip,
            f"{ours}.beta1": beta1,
            f"{ours}.beta2": beta2,
            f"{ours}.warmup_steps": _warmup_steps(optim, key, source),
            **_decay(optim, ours, key, source),
        }

    return rule


def _warmup_steps(optim: str, key: str, source: VerlSource) -> int:
    steps = source.get(f"{optim}.lr_warmup_steps")
    ratio = source.get(f"{optim}.lr_warmup_steps_ratio")
    if (steps is not None and steps >= 0) or not ratio:
        return max(0, steps or 0)
    if (total := total_steps(source)) is None:
        if not key.endswith("ratio"):
            return 0
        raise NotMappedError(f"{ratio:g} of an unknown number of steps; give --rows")
    return int(ratio * total)


def _decay(optim: str, ours: str, key: str, source: VerlSource) -> Settings:
    style = source.get(f"{optim}.lr_scheduler_type")
    if source.is_megatron:
        style = source.get(f"{optim}.lr_decay_style")
    elif (older := source.get(f"{optim}.warmup_style")) is not None:
        style = older
    if style == "constant":
        return {}
    end = source.get(f"{optim}.lr_decay_steps") or total_steps(source)
    if style == "linear" and end is not None:
        return {f"{ours}.decay_steps": end, f"{ours}.min_lr": source.get(f"{optim}.min_lr") or 0.0}
    if key.endswith(("style", "type")):
        raise NotMappedError(f"a decay is linear, not {style}; set {ours}.decay_steps and {ours}.min_lr")
    return {}


def _critic_path(key: str, row: MappedKey, source: VerlSource) -> Settings:
    if not _has_critic(source):
        raise NoEffectError("adv_estimator has no critic")
    if source.get(key) == source.get(f"{MODEL}.path"):
        return {"critic.path": None}  # a copy of the actor with a new head, as in verl
    return {"critic.path": source.get(key)}


def _critic_as_actor(key: str, row: MappedKey, source: VerlSource) -> Settings:
    if not _has_critic(source):
        raise NoEffectError("adv_estimator has no critic")
    actor = source.get(f"{ACTOR}.{key.rpartition('.')[2]}")
    if source.get(key) != actor:
        raise NotMappedError(f"the critic has the actor's {actor}; leave it out")
    raise NoEffectError("as the actor's")


def _critic_warmup(key: str, row: MappedKey, source: VerlSource) -> Settings:
    if not _has_critic(source):
        raise NoEffectError("adv_estimator has no critic")
    return _same(key, row, source)


def _value_clip(key: str, row: MappedKey, source: VerlSource) -> Settings:
    if not _has_critic(source):
        raise NoEffectError("adv_estimator has no critic")
    return _same(key, row, source)


# ------------------------------------------------------ model and rewards

_LAYERS = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"], "linear_q": ["q_proj"], "linear_k": ["k_proj"],
    "linear_v": ["v_proj"], "linear_proj": ["o_proj"], "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc1_gate": ["gate_proj"], "linear_fc1_up": ["up_proj"], "linear_fc2": ["down_proj"],
}  # fmt: skip


def _lora(key: str, row: MappedKey, source: VerlSource) -> Settings:
    """Settings of adapters: FSDP's keys are ``model.lora_*``, Megatron's are ``model.lora.*``."""

    def value(fsdp: str, megatron: str, default: Any) -> Any:
        for name in (fsdp, f"lora.{megatron}"):
            if (found := source.get(f"{MODEL}.{name}")) is not None:
                return found
        return default

    rank, path = value("lora_rank", "rank", 0), value("lora_adapter_path", "adapter_path", None)
    if not rank:
        if key.endswith("rank"):
            return {"model.lora.rank": 0}
        raise NoEffectError("of a rank above 0 alone")
    named = value("target_modules", "target_modules", "all-linear")
    layers = [named] if isinstance(named, str) else [ours for name in named for ours in _LAYERS.get(name, [name])]
    if any(re.search(r"[^\w.-]", layer) for layer in layers):
        raise NotMappedError("name the layers in model.lora.targets; a regular expression is not read")
    init = source.get(f"{MODEL}.lora.lora_A_init_method")
    if key.endswith("init_method") and init not in (None, "kaiming"):
        raise NotMappedError(f"set model.lora.init; {init} is not available")
    settings = {
        "model.lora.rank": rank,
        "model.lora.alpha": value("lora_alpha", "alpha", 32 if source.is_megatron else 16),
        "model.lora.targets": layers,
        "model.lora.dropout": source.get(f"{MODEL}.lora.dropout") or 0.0,
    }
    return settings if path is None else settings | {"model.lora.path": path}


def _router_dtype(key: str, row: MappedKey, source: VerlSource) -> Settings:
    if source.get(key) in (None, "bf16"):
        raise NoEffectError("the family's type")
    return {"model.router_dtype": "float32"}


def _deepep(key: str, row: MappedKey, source: VerlSource) -> Settings:
    return {"model.moe_dispatcher": "deepep" if source.get(f"{TRANSFORMER}.moe_enable_deepep") else "alltoall"}


def _fusions(key: str, row: MappedKey, source: VerlSource) -> Settings:
    names = ("gradient_accumulation_fusion", "moe_permute_fusion")
    return {"model.fusions": [name for name in names if source.get(f"{TRANSFORMER}.{name}")]}


def _reward_model(key: str, row: MappedKey, source: VerlSource) -> Settings:
    if not source.get("reward_model.enable"):
        raise NoEffectError("of reward_model.enable alone")
    path = source.get("reward_model.model.path")
    if path is None:
        raise NotMappedError("give reward_model.path")
    offload = "memory" if source.get("reward_model.model.fsdp_config.param_offload") else "none"
    weight = {} if source.get("custom_reward_function.path") else {"reward.weight": 0.0}
    return {"reward_model.path": path, "reward_model.offload": offload, **weight}


def _overlong(key: str, row: MappedKey, source: VerlSource) -> Settings:
    """DAPO's length penalty; verl's built-in scores are -1 and 1, megarl's 0 and 1, so that half of it is as much."""
    group = key.rpartition(".")[0]
    if not source.get(f"{group}.enable"):
        raise NoEffectError("of a length penalty that is enabled alone")
    penalty, own = source.get(f"{group}.penalty_factor"), source.get("custom_reward_function.path")
    penalty = 1.0 if penalty is None else penalty
    return {
        "reward.overlong_buffer": source.get(f"{group}.len"),
        "reward.overlong_penalty": penalty if own else penalty / 2,
    }


# --------------------------------------------------------------- trainer


def total_steps(source: VerlSource) -> int | None:
    """Return the number of steps; None if epochs are given without a number of rows."""
    if (steps := source.get(f"{TRAINER}.total_training_steps")) is not None:
        return int(steps)
    if source.rows is None:
        return None
    return max(1, int(source.get(f"{TRAINER}.total_epochs")) * (source.rows // source.get(f"{DATA}.train_batch_size")))


def _steps(key: str, row: MappedKey, source: VerlSource) -> Settings:
    if (steps := total_steps(source)) is None:
        epochs, batch = source.get(f"{TRAINER}.total_epochs"), source.get(f"{DATA}.train_batch_size")
        raise NotMappedError(f"{epochs} epochs of (rows // {batch}) steps; give --rows, or trainer.steps")
    if key.endswith("total_epochs") and source.get(f"{TRAINER}.total_training_steps") is not None:
        raise NoEffectError("total_training_steps comes first")
    return {"trainer.steps": steps}


def _checkpoint_interval(key: str, row: MappedKey, source: VerlSource) -> Settings:
    interval = source.get(key)
    return {"trainer.checkpoint_interval": interval if interval > 0 else total_steps(source) or NEVER}


def _eval_interval(key: str, row: MappedKey, source: VerlSource) -> Settings:
    return {"trainer.eval_interval": max(0, source.get(key))}


def _trackers(key: str, row: MappedKey, source: VerlSource) -> Settings:
    given = source.get(key)
    names = [name for name in ([given] if isinstance(given, str) else given) if name not in ("console", "file")]
    if unknown := [name for name in names if name not in ("tensorboard", "wandb", "mlflow")]:
        raise NotMappedError(f"{', '.join(unknown)}: set trainer.trackers to tensorboard, wandb or mlflow")
    return {"trainer.trackers": names}


def _run_name(key: str, row: MappedKey, source: VerlSource) -> Settings:
    return {"run.name": re.sub(r"[^\w.=+-]+", "-", str(source.get(key))).strip(".-") or "verl"}


RULES: dict[str, Rule] = {
    "same": _same, "unless_null": _unless_null, "mapping": _mapping, "files": _files, "column": _column,
    "images": _images, "order": _order, "overlong_prompts": _overlong_prompts, "truncation": _truncation,
    "batch": _batch, "max_resp_len": _max_resp_len, "grid": _grid, "engines": _engines,
    "reference_grid": _role_grid(f"{REF}.megatron", "reference.parallel"),
    "critic_grid": _role_grid(f"{CRITIC}.megatron", "critic.parallel"),
    "actor_offload": _offload(ACTOR, "trainer.offload", *(
        f"{ACTOR}.fsdp_config.{name}" for name in ("param_offload", "optimizer_offload", "offload_policy")), *(
        f"{MEGATRON}.{name}" for name in ("param_offload", "optimizer_offload", "grad_offload")),
        f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload"),
    "critic_offload": _offload(CRITIC, "critic.offload", *(
        f"{CRITIC}.model.fsdp_config.{name}" for name in ("param_offload", "optimizer_offload")), *(
        f"{CRITIC}.megatron.{name}" for name in ("param_offload", "optimizer_offload", "grad_offload"))),
    "reference_offload": _offload(REF, "reference.offload", f"{REF}.fsdp_config.param_offload",
                                  f"{REF}.megatron.param_offload"),
    "recompute": _recompute, "engine_option": _engine_option, "max_model_len": _max_model_len, "dtype": _dtype,
    "micro_batches": _micro_batches, "name": _name, "clip": _clip, "kl": _kl, "aggregation": _aggregation,
    "returns": _returns, "dynamic_sampling": _dynamic_sampling, "correction": _correction,
    "router_replay": _router_replay, "whole_distribution": _whole_distribution, "spare": _spare,
    "evaluation": _evaluation, "actor_optimizer": _optimizer(ACTOR, "trainer.optimizer"),
    "critic_optimizer": _optimizer(CRITIC, "critic.optimizer"), "critic_path": _critic_path,
    "critic_as_actor": _critic_as_actor, "critic_warmup": _critic_warmup, "value_clip": _value_clip, "lora": _lora,
    "router_dtype": _router_dtype, "deepep": _deepep, "fusions": _fusions, "reward_model": _reward_model,
    "overlong": _overlong, "steps": _steps, "checkpoint_interval": _checkpoint_interval,
    "eval_interval": _eval_interval, "trackers": _trackers, "run_name": _run_name,
}  # fmt: skip
"""Name in ``verl_table.MAPPED`` -> function."""
