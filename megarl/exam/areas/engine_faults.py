"""Faults of an engine that has the right weights and computes or samples otherwise; of the trainer's forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as but
from typing import Any

from megarl.exam.fault import Fault, wrap, wrap_in

# Keys, values and captured graphs of older weights.


def _keep_prefix_cache() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap_in(Scheduler, "reset_prefix_cache", lambda original, *args, **kwargs: True)


def slow_down() -> None:
    """Let responses of a small job last over a sync; not a fault."""
    import time

    from vllm.v1.core.sched.scheduler import Scheduler

    def slow(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.2)
        return original(self, *args, **kwargs)

    wrap_in(Scheduler, "schedule", slow)


def _keep_running_keys() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    slow_down()

    def reset(original: Any, self: Any, *args: Any, **kwargs: Any) -> bool:
        original(self)  # without those of running requests
        return True

    wrap_in(Scheduler, "reset_prefix_cache", reset)


def _decode_with_old() -> None:
    from megarl.engines.sync.receiver import Receiver

    def start(original: Any, self: Any) -> None:
        new = not hasattr(self, "captured")
        self.captured = _held(self.model)
        if new:
            _compute_decode(self)
        original(self)

    wrap(Receiver.start_weight_update, start)


def _held(model: Any) -> list[tuple[Any, dict[str, Any], Any]]:
    """Return each module with copies of its parameters, and the packed form that it computes from."""
    return [
        (module, {name: p.data.clone() for name, p in module.named_parameters(recurse=False)}, _packed(module))
        for module in model.modules()
    ]


def _packed(module: Any) -> Any:
    return vars(module).get("cpu_linear")


def _put(held: list[tuple[Any, dict[str, Any], Any]]) -> None:
    for module, values, packed in held:
        for name, value in values.items():
            module.get_parameter(name).data.copy_(value)
        if packed is not None:
            module.cpu_linear = packed


def _compute_decode(receiver: Any) -> None:
    """Compute batches of sampled tokens alone with the weights of the last update but one."""
    from vllm.forward_context import get_forward_context

    model, forward = receiver.model, receiver.model.forward

    def compute(*args: Any, **kwargs: Any) -> Any:
        found = get_forward_context().attn_metadata
        metadata = next(iter(found.values())) if found else None
        if metadata is None or metadata.num_actual_tokens != len(metadata.seq_lens):
            return forward(*args, **kwargs)
        new = _held(model)
        _put(receiver.captured)
        try:
            return forward(*args, **kwargs)
        finally:
            _put(new)

    model.forward = compute


# Log-probs of another distribution than the one sampled from.


def _report_raw() -> None:
    """Let engines report log-probs from before temperature, top-p and top-k."""
    from vllm.v1.sample.sampler import Sampler

    def sample(original: Any, self: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        before = logits.log_softmax(-1)
        sampled, processed = original(self, logits, *args, **kwargs)
        return sampled, None if processed is None else before

    wrap_in(Sampler, "sample", sample)


def _divide_logp() -> None:
    from megarl.engines.server.endpoint import record_of

    _report_raw()
    wrap(record_of, lambda original, *args, **kwargs: _divided(original(*args, **kwargs)))


def _divided(record: Any) -> Any:
    return but(record, logprobs=record.logprobs / 0.7) if hasattr(record, "logprobs") else record


def _sample_with(**settings: Any) -> None:
    from megarl.engines.server.endpoint import sampling_params

    wrap(sampling_params, lambda original, given: original(given | settings))


def _renormalise() -> None:
    _sample_with(top_p=0.8)


def _penalise() -> None:
    _sample_with(repetition_penalty=1.1)


def _take_defaults() -> None:
    _report_raw()
    _sample_with(top_p=0.8, top_k=20)


def _ignore_end() -> None:
    _sample_with(ignore_eos=True)


def _sample_padding() -> None:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def get(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        self.org_vocab_size = 1 << 30
        return original(self, *args, **kwargs)

    wrap_in(LogitsProcessor, "_get_logits", get)


# Another function of the same weights.


def _default_epsilon() -> None:
    from megarl.learn.models.norms import RMSNorm

    def begin(original: Any, self: Any, config: Any, hidden_size: int, *args: Any, **kwargs: Any) -> None:
        original(self, config, hidden_size, *args, **kwargs)
        self.eps = 1e-5

    wrap(RMSNorm.__init__, begin)


def _default_base() -> None:
    from megarl.weights.architectures.rope import ropes

    wrap(ropes, lambda original, *args: tuple(rope and rope._replace(base=500_000.0) for rope in original(*args)))


def _shorten_window() -> None:
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    def begin(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.sliding_window = get_current_vllm_config().model_config.max_model_len - 3

    wrap_in(CPUAttentionBackendImpl, "__init__", begin)


def _round_router() -> None:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    def route(original: Any, *args: Any, **kwargs: Any) -> Any:
        weights, experts = original(*args, **kwargs)
        return weights.bfloat16().to(weights.dtype), experts

    wrap_in(CPURouter, "_compute_routing", route)


def _round_head() -> None:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    wrap_in(LogitsProcessor, "_apply_head", lambda original, *args: original(*args).bfloat16().float())


def _round_keys() -> None:
    import torch
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    def update(original: Any, self: Any, layer: Any, key: Any, value: Any, *args: Any) -> None:
        key, value = (each.to(torch.float8_e4m3fn).to(each.dtype) for each in (key, value))
        original(self, layer, key, value, *args)

    wrap_in(CPUAttentionBackendImpl, "do_kv_cache_update", update)


def _drop_units() -> None:
    from megarl.learn.models.gpt import transformer_config

    def made(original: Any, *args: Any) -> Any:
        config = original(*args)
        config.hidden_dropout = 0.1
        return config

    wrap(transformer_config, made)


# What is sampled.


def _seeding(number: Callable[[int, int], int]) -> None:
    """Seed sample j of n with another number."""
    from megarl.engines.server.endpoint import _seeded

    wrap(_seeded, lambda original, sampling, prompt, j: original(sampling, prompt, number(j, prompt.n)))


def _seed_alike() -> None:
    _seeding(lambda j, n: 0)


def _seed_halves_alike() -> None:
    _seeding(lambda j, n: j % max(1, n // 2))


def _recording(change: Callable[[Any], Any]) -> None:
    from megarl.engines.server.endpoint import record_of

    def recorded(original: Any, *args: Any, **kwargs: Any) -> Any:
        record = original(*args, **kwargs)
        return change(record) if len(getattr(record, "token_ids", ())) else record

    wrap(record_of, recorded)


def _drop_end() -> None:
    def dropped(record: Any) -> Any:
        if record.finish_reason != "stop":
            return record
        most = len(record.token_ids) - 1
        spans = tuple(span._replace(end=min(span.end, most)) for span in record.versions if span.start < most)
        return but(record, token_ids=record.token_ids[:-1], logprobs=record.logprobs[:-1], versions=spans)

    _recording(dropped)


def _force_end() -> None:
    known: list[int] = []

    def forced(record: Any) -> Any:
        if record.finish_reason == "stop":
            known[:] = [int(record.token_ids[-1])]
        elif known:
            record.token_ids[-1] = known[0]
        return record

    _recording(forced)


MOVES = ("algorithm.entropy_coef=0.1", "trainer.optimizer.lr=1e-3")
"""Updates that change the weights at every step, whatever the rewards are."""
LONG = (*MOVES, "model.path={folder}/long")
GOING_ON = ("sync.pause=keep", "rollout.max_response_tokens=96", "rollout.max_num_seqs=8", *LONG)
"""Responses that go on after a sync, where engines are slow (``slow_down``)."""
SHARED_PREFIX = (*LONG, "taskset.train_size=8", "taskset.options.min_terms=14", "taskset.options.max_terms=14")
"""Tasks that come again at every step, and prompts longer than a block of the prefix cache."""

FAULTS: tuple[Fault, ...] = (
    # Keys, values and captured graphs of older weights.
    Fault(
        "prefix-cache-kept",
        "InternLM/lmdeploy#4917",
        "A weight sync leaves the prefix cache: prompts that come again are answered from keys of old weights.",
        alarm="cache",
        job="tiny",
        install=_keep_prefix_cache,
        begins=2,
        settings=SHARED_PREFIX,
    ),
    Fault(
        "prefix-cache-kept-by-async",
        "NovaSky-AI/SkyRL#2246",
        "An asynchronous sync skips the reset of the prefix cache, which a synchronous one makes.",
        alarm="cache",
        job="late",
        install=_keep_prefix_cache,
        begins=2,
        settings=SHARED_PREFIX,
    ),
    Fault(
        "prefix-cache-of-other-adapter",
        "vllm-project/vllm#42125",
        "An adapter reloaded under the same name finds the prefix cache of the adapter before.",
        alarm="cache",
        job="lora",
        install=_keep_prefix_cache,
        begins=2,
        settings=("sync.adapter=separate", *SHARED_PREFIX),
    ),
    Fault(
        "running-keys-kept",
        "NVIDIA-NeMo/RL#3152",
        "Responses that go on after a sync are continued from keys and values of the old weights.",
        alarm="stale-keys",
        job="late",
        install=_keep_running_keys,
        begins=2,
        settings=GOING_ON,
        within=2,
    ),
    Fault(
        "decode-graph-stale",
        "vllm-project/vllm#48312",
        "Prompts are computed with the new weights, sampled tokens by a captured graph that reads the old ones.",
        alarm="decode",
        job="tiny",
        install=_decode_with_old,
        begins=2,
    ),
    # Log-probs of another distribution than the one sampled from.
    Fault(
        "logp-without-temperature",
        "huggingface/trl#4159",
        "The engine reports log-probs from before the temperature, the trainer computes them after it.",
        alarm="gap",
        job="tiny",
        install=_report_raw,
        settings=("rollout.temperature=0.7",),
    ),
    Fault(
        "logp-divided-by-temperature",
        "PrimeIntellect-ai/prime-rl#697",
        "Log-probs are divided by the temperature, instead of the logits.",
        alarm="gap",
        job="tiny",
        install=_divide_logp,
        settings=("rollout.temperature=0.7",),
    ),
    Fault(
        "logp-renormalised",
        "huggingface/trl#6789",
        "Sampling keeps the likeliest tokens only, and log-probs are those among them.",
        alarm="gap",
        job="tiny",
        install=_renormalise,
    ),
    Fault(
        "penalty-on",
        "verl-project/verl#7270",
        "A repetition penalty of the checkpoint's generation config changes what is sampled, and its log-probs.",
        alarm="gap",
        job="tiny",
        install=_penalise,
    ),
    Fault(
        "defaults-of-checkpoint",
        "NVIDIA-NeMo/RL#3497",
        "The checkpoint's top-k and top-p change what is sampled; reported log-probs are of the whole distribution.",
        alarm="surprise",
        job="tiny",
        install=_take_defaults,
        settings=("model.path={folder}/long",),
    ),
    Fault(
        "padded-rows-sampled",
        "mirage-project/mirage#751",
        "Padded rows of the output layer take part in sampling, with logits of 0.",
        alarm="probe",
        job="tiny",
        install=_sample_padding,
        settings=("model.path={folder}/padded",),
        within=0,
    ),
    # Another function of the same weights.
    Fault(
        "norm-epsilon",
        "NVIDIA-NeMo/Megatron-Bridge#5712",
        "Some norms of the trainer use their default epsilon instead of the model's.",
        alarm="norms",
        job="tiny",
        install=_default_epsilon,
    ),
    Fault(
        "rope-base",
        "sgl-project/SpecForge#265",
        "The trainer takes a default for the base of the rotary embedding, and ignores the model's rope_theta.",
        alarm="probe",
        job="tiny",
        install=_default_base,
        within=0,
    ),
    Fault(
        "window-one-short",
        "vllm-project/vllm#3385",
        "The engine attends to one token less than the trainer, where a text is as long as its window.",
        alarm="far",
        job="tiny",
        install=_shorten_window,
        within=0,
    ),
    Fault(
        "router-weights-rounded",
        "sgl-project/sglang#39351",
        "The engine rounds the routers' weights of experts to bfloat16.",
        alarm="probe",
        job="moe",
        install=_round_router,
        within=0,
    ),
    Fault(
        "head-rounded",
        "allenai/open-instruct#1387",
        "The engine computes the output layer in bfloat16, the trainer in float32.",
        alarm="probe",
        job="tiny",
        install=_round_head,
        within=0,
    ),
    Fault(
        "keys-in-8-bits-without-scale",
        "NVIDIA-NeMo/RL#3225",
        "The engine keeps keys and values in 8 bits with scale 1 instead of calibrated ones.",
        alarm="probe",
        job="tiny",
        install=_round_keys,
        within=0,
    ),
    Fault(
        "dropout-on",
        "Human-Agent-Society/reef#536",
        "Megatron's default dropout stays on in the trainer's forward pass.",
        alarm="gap",
        job="tiny",
        install=_drop_units,
    ),
    # What is sampled.
    Fault(
        "equal-samples",
        "Tencent-Hunyuan/UniRL#208",
        "All samples of a group have the same seed, so that they are equal.",
        alarm="equal-samples",
        job="tiny",
        install=_seed_alike,
    ),
    Fault(
        "half-equal-samples",
        "verl-project/verl#6857",
        "Samples are numbered in each half of a group by itself, so that each has a twin with the same seed.",
        alarm="equal-samples",
        job="tiny",
        install=_seed_halves_alike,
        settings=("model.path={folder}/long",),
    ),
    Fault(
        "end-token-dropped",
        "InternLM/xtuner#1063",
        "The engine's answer lacks the end token that it sampled, so that stopping is never trained.",
        alarm="tokens",
        job="tiny",
        install=_drop_end,
    ),
    Fault(
        "end-token-forced",
        "OpenRLHF/OpenRLHF#238",
        "The last token of a truncated response is replaced by an end token that was not sampled.",
        alarm="tokens",
        job="tiny",
        install=_force_end,
        settings=("rollout.max_response_tokens=2",),
    ),
    Fault(
        "end-token-ignored",
        "google/tunix#2314",
        "The engine does not stop at the end token of a turn, and goes on to the longest length.",
        alarm="past-end",
        job="tiny",
        install=_ignore_end,
    ),
)
